"""`loo_cavity`: leave-one-out predictive densities from the sites of a sparse posterior, without fitting again."""

from collections.abc import Mapping
import math
from types import ModuleType
from typing import Any
import warnings

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import SVI

from numpyro_sgp.diagnostics.importance import pareto_smoothed, subsampled
from numpyro_sgp.diagnostics.inference_data import arviz_module
from numpyro_sgp.diagnostics.outputs import Result, fitted_values
from numpyro_sgp.distributions import SparsePosterior, log_prob_of, observed_mask, unwrap
from numpyro_sgp.elbo import Particle, QuadratureELBO, Trace, posteriors_of
from numpyro_sgp.optim import NaturalGradient

__all__ = ["loo_cavity"]


def loo_cavity(
    rng_key: Array,
    svi: SVI,
    result: Result | Mapping[str, Any],
    *model_args: Any,
    var_name: str | None = None,
    num_samples: int = 200,
    num_nodes: int = 32,
    num_draws: int = 1000,
    **model_kwargs: Any,
) -> Any:
    """Leave-one-out predictive densities from cavities, as the object that `az.loo` returns and `az.compare` takes.

    At the optimum each datum is in the posterior as a Gaussian site with the precision β = −2 ∂ell/∂v and the gradient
    α = ∂ell/∂m. Taken out of q(f_n) = N(m, r + s), of which r is the variance that u leaves, it leaves the cavity

        N(m − s′α, r + s′),   s′ = s / (1 − β s),

    whose density of y_n is found by quadrature. It is exact for a Gaussian likelihood, and for others as good as the
    sites are. Where the hyperparameters have a posterior, draws of them are weighted by 1/p(y_n | y_−n, θ) with
    Pareto-smoothed importance sampling: that posterior is without datum n too, and k̂ says how well that went. Sites are
    evaluated at the moments of q, so any guide will do, provided that it has converged.

    Args:
        rng_key: draws the hyperparameters.
        svi: the fitted `SVI` object; its model and guide are used.
        result: what `SVI.run` returned, or a dict of parameters.
        model_args: arguments of the model: all of the data.
        var_name: the observed site; needed where there are several.
        num_samples: draws of the hyperparameters.
        num_nodes: nodes along each axis, for one GP latent for each datum or two.
        num_draws: antithetic draws where a datum has more latents; even.
        model_kwargs: keyword arguments of the model.

    Returns:
        `ELPDData` with the pointwise densities; entries that a mask leaves out are absent.

    Raises:
        ImportError: ArviZ is not installed.
        ValueError: no observed site of that name, or one that does not have one datum for each row of its GP latents; a
            GP on top of a GP.

    References:
        Vehtari, Mononen, Tolvanen, Sivula and Winther (2016), "Bayesian leave-one-out cross-validation approximations
        for Gaussian latent variable models", section 3.
    """
    az = arviz_module()
    params, mutable_state = fitted_values(result)
    kwargs = {**svi.static_kwargs, **model_kwargs}
    loss = QuadratureELBO(num_nodes, num_samples=num_draws)
    floor = svi.optim.floor if isinstance(svi.optim, NaturalGradient) else None
    cavities = _Cavities(svi, {**params, **mutable_state}, loss, floor, var_name, model_args, kwargs)
    loo, full = jax.lax.map(cavities.log_densities, jax.random.split(rng_key, num_samples))
    loo, full = (np.asarray(x)[:, cavities.mask] for x in (loo, full))
    return _elpd_data(az, cavities.name, loo, full)


class _Cavities:
    """Leave-one-out densities given draws of the hyperparameters."""

    def __init__(
        self,
        svi: SVI,
        values: dict[str, Any],
        loss: QuadratureELBO,
        floor: float | None,
        var_name: str | None,
        args: tuple,
        kwargs: dict,
    ) -> None:
        self.svi, self.values, self.loss, self.floor = svi, values, loss, floor
        self.args, self.kwargs = args, kwargs
        particle, guide_trace, model_trace = self._run(jax.random.key(0))
        if particle.nested_parents(guide_trace):
            msg = (
                "A cavity is a Gaussian for each row, which a GP on top of a GP does not have. Use `az.loo` on what "
                "`to_arviz` gives."
            )
            raise ValueError(msg)
        self.name = _observed_site(model_trace, var_name)
        site = model_trace[self.name]
        _check_whole(model_trace, site, self.name)
        self.mask = np.broadcast_to(observed_mask(site["fn"]), site["fn"].batch_shape)
        for name, q in posteriors_of(guide_trace).items():
            rows = self.mask.shape[-1:]
            if q.event_shape != rows or self.mask.shape not in (rows, (*q.batch_shape, *rows)):
                msg = (
                    f"`loo_cavity` leaves out one row of the GP sites at a time, but the observed site {self.name!r} "
                    f"has data of shape {self.mask.shape} and the GP site {name!r} has shape "
                    f"{(*q.batch_shape, *q.event_shape)}. Use `az.loo` on what `to_arviz` gives."
                )
                raise ValueError(msg)

    def _run(self, key: Array) -> tuple[Particle, Trace, Trace]:
        # Guides take a mask of False for a prediction: parameters must be given, and nothing is fitted.
        guide = handlers.mask(self.svi.guide, mask=False)
        particle = Particle(self.loss, key, self.values, self.svi.model, guide, self.args, self.kwargs)
        guide_trace = particle.run_guide(particle.guide_key, {})
        return particle, guide_trace, particle.run_model(guide_trace, {})

    def log_densities(self, key: Array) -> tuple[Array, Array]:
        """At each datum log p(y_n | θ, y_−n) and log p(y_n | θ, y), for the θ that belongs to a key."""
        particle, guide_trace, model_trace = self._run(key)
        posteriors = posteriors_of(guide_trace)

        def log_prob(values: Mapping[str, Array]) -> Array:
            site = particle.run_model(guide_trace, values)[self.name]
            return log_prob_of(site["fn"], site["value"])

        def term(trace: Trace) -> dict[str, Array]:
            return {self.name: jnp.sum(log_prob_of(trace[self.name]["fn"], trace[self.name]["value"]))}

        rules = particle.rules(guide_trace, model_trace, posteriors, term, term(model_trace))
        if not rules:
            msg = f"The observed site {self.name!r} depends on no GP site, so it has no cavities. Use `az.loo`."
            raise ValueError(msg)
        # The same nodes for all draws of θ.
        means = {name: q.mean for name, q in posteriors.items()}
        z, weights = particle.nodes(rules[0], means, jax.random.key(0))

        def at_nodes(mean: Mapping[str, Array], variance: Mapping[str, Array]) -> Array:
            values = {name: (mean[name], jnp.sqrt(variance[name])) for name in z}
            return jax.vmap(
                lambda node: log_prob({name: m + scale * node[name] for name, (m, scale) in values.items()})
            )(z)

        def expected(mean: Mapping[str, Array], variance: Mapping[str, Array]) -> Array:
            return jnp.tensordot(weights, at_nodes(mean, variance), axes=1)

        def log_density(mean: Mapping[str, Array], variance: Mapping[str, Array]) -> Array:
            return jax.scipy.special.logsumexp(at_nodes(mean, variance), axis=0, b=_column(weights, self.mask.ndim))

        posteriors = {name: q for name, q in posteriors.items() if name in z}
        mean = {name: q.mean for name, q in posteriors.items()}
        variance = {name: q.variance for name, q in posteriors.items()}
        without = {name: self._cavity(name, q, expected, mean, variance) for name, q in posteriors.items()}
        cavity_mean, cavity_variance = ({name: pair[i] for name, pair in without.items()} for i in range(2))
        return log_density(cavity_mean, cavity_variance), log_density(mean, variance)

    def _cavity(
        self, name: str, q: SparsePosterior, expected: Any, mean: Mapping[str, Array], variance: Mapping[str, Array]
    ) -> tuple[Array, Array]:
        paired = self.mask.shape == q.mean.shape
        latents = [...] if paired else list(np.ndindex(q.batch_shape))
        cavities = [self._cavity_of(name, latent, q, expected, mean, variance) for latent in latents]
        if paired:
            return cavities[0]
        means, variances = (jnp.stack(x).reshape(q.mean.shape) for x in zip(*cavities, strict=True))
        return means, variances

    def _cavity_of(
        self,
        name: str,
        latent: Any,
        q: SparsePosterior,
        expected: Any,
        mean: Mapping[str, Array],
        variance: Mapping[str, Array],
    ) -> tuple[Array, Array]:
        """Mean and variance of one latent for each datum, without that datum."""
        # Each datum depends on its own row: the derivatives along all rows at once are those of each datum.
        one = jnp.zeros_like(q.mean).at[latent].set(1.0)
        along = {other: one if other == name else jnp.zeros_like(value) for other, value in mean.items()}
        still = {other: jnp.zeros_like(value) for other, value in mean.items()}
        alpha = jax.jvp(expected, (mean, variance), (along, still))[1]
        beta = -2.0 * jax.jvp(expected, (mean, variance), (still, along))[1]
        if self.floor is not None:
            beta = jnp.maximum(beta, self.floor)
        T = q.moments.posterior_root
        total = q.variance[latent]
        explained = total if T is None else jnp.broadcast_to(jnp.sum(T * T, axis=-2), q.mean.shape)[latent]
        left = 1.0 - beta * explained
        # A site that is as precise as the posterior or more is not a part of it.
        s = jnp.where(left > 0.0, explained / left, jnp.nan)
        return q.mean[latent] - s * alpha, total - explained + s


def _column(weights: Array, axes: int) -> Array:
    return weights.reshape(weights.shape + (1,) * axes)


def _check_whole(trace: Trace, site: dict[str, Any], name: str) -> None:
    """Raise where the site is not all of the data, each counted once."""
    sizes = subsampled(trace)
    if sizes:
        msg = (
            f"The model has plates that take {sorted(sizes)} of their (size, subsample size), so that each draw would "
            "have other rows. Pass all rows to a model whose plates take them."
        )
        raise ValueError(msg)
    if site["scale"] is not None:
        msg = (
            f"The observed site {name!r} is scaled, so that a row does not count as one datum. Use a model without "
            "`handlers.scale`."
        )
        raise ValueError(msg)


def _observed_site(trace: Trace, var_name: str | None) -> str:
    found = [
        name
        for name, site in trace.items()
        if site["type"] == "sample" and site["is_observed"] and not isinstance(unwrap(site["fn"]), dist.Unit)
    ]
    if var_name is None and len(found) == 1:
        return found[0]
    if var_name not in found:
        msg = f"`var_name` must name one of the observed sites {found}, got {var_name!r}."
        raise ValueError(msg)
    return var_name


def _elpd_data(az: ModuleType, name: str, loo: np.ndarray, full: np.ndarray) -> Any:
    """Draws of log p(y_n | θ, y_−n) and of log p(y_n | θ, y), (S, N), as ArviZ's result."""
    import xarray

    S, N = loo.shape
    rounding = 1e3 * np.finfo(loo.dtype).eps
    if np.allclose(loo, loo[:1], rtol=rounding, atol=rounding, equal_nan=True):  # the hyperparameters are fixed
        pointwise, khat, good_k = loo[0], np.zeros(N), 0.7
    else:
        good_k = min(1.0 - 1.0 / math.log10(S), 0.7)
        log_weights, khat = pareto_smoothed(az, -loo.T)
        pointwise = np.logaddexp.reduce(log_weights + loo.T, axis=-1)
    lost, bad = int(np.isnan(pointwise).sum()), int((khat > good_k).sum())
    if lost:
        warnings.warn(
            f"{lost} of {N} data have a site that is more precise than the posterior, so the fit has not converged; "
            "their leave-one-out densities are NaN. Train longer, with natural steps on all rows.",
            stacklevel=3,
        )
    if bad:
        warnings.warn(
            f"The Pareto k of {bad} of {N} data is above {good_k:.2f}: without them the hyperparameters would be "
            "elsewhere, and their leave-one-out densities are uncertain.",
            stacklevel=3,
        )
    in_sample = np.logaddexp.reduce(full, axis=0) - math.log(S)
    elpd = float(pointwise.sum())
    dims = (f"{name}_dim_0",)
    fields = {
        "elpd": elpd,
        "se": math.sqrt(N * float(np.var(pointwise))),
        "p": float(in_sample.sum()) - elpd,
        "n_samples": S,
        "n_data_points": N,
        "scale": "log",
        "warning": bool(lost or bad),
        "good_k": good_k,
        "elpd_i": xarray.DataArray(pointwise, dims=dims),
        "pareto_k": xarray.DataArray(khat, dims=dims),
    }
    if not az.__version__.startswith("0."):
        return az.ELPDDataLOO(**fields)
    old = {"elpd": "elpd_loo", "p": "p_loo", "elpd_i": "loo_i"}
    fields = {old.get(field, field): value for field, value in fields.items()}
    return az.ELPDData(data=list(fields.values()), index=list(fields))
