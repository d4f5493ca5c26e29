"""`loo_cavity`: leave-one-out predictive densities from the sites of a sparse posterior, without fitting again."""

from collections.abc import Callable, Mapping
from functools import partial
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
from numpyro.infer.svi import SVIRunResult

from numpyro_sgp._internal.checks import at_least
from numpyro_sgp.diagnostics.importance import LEAST_DRAWS, pareto_smoothed, subsampled
from numpyro_sgp.diagnostics.inference_data import arviz_module
from numpyro_sgp.diagnostics.outputs import fitted_values
from numpyro_sgp.distributions.sparse_posterior import SparsePosterior
from numpyro_sgp.distributions.traces import Trace, posteriors_of
from numpyro_sgp.distributions.wrappers import log_prob_of, observed_mask, unwrap
from numpyro_sgp.losses.quadrature_elbo import Particle, QuadratureELBO
from numpyro_sgp.losses.rules import rules_of
from numpyro_sgp.math.linalg import solve_lower
from numpyro_sgp.optim import NaturalGradient
from numpyro_sgp.posteriors.moments import standard_deviation

__all__ = ["loo_cavity"]


def loo_cavity(
    rng_key: Array,
    svi: SVI,
    result: SVIRunResult | Mapping[str, Any],
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

    whose density of y_n is found by quadrature, with nodes where cavity and likelihood meet. It is exact for a Gaussian
    likelihood of one latent for each datum, and for others as good as the sites are. Where the hyperparameters have a
    posterior, draws of them are weighted by 1/p(y_n | y_−n, θ) with Pareto-smoothed importance sampling: that posterior
    is without datum n too, and k̂ says how well that went. Sites are evaluated at the moments of q, so any guide will do
    that has converged and whose mean and covariance are those of one Gaussian. `AutoQSGP`, and `AutoDecoupledGP` with a
    mean basis, are none: the mean moves by more than the covariance says.

    Args:
        rng_key: draws the hyperparameters.
        svi: the fitted `SVI` object; its model and guide are used.
        result: what `SVI.run` returned, or a dict of parameters.
        model_args: arguments of the model: all of the data.
        var_name: the observed site; needed where there are several.
        num_samples: draws of the hyperparameters; at least 30 where they have a posterior.
        num_nodes: nodes along each axis, for one GP latent for each datum or two.
        num_draws: antithetic draws where a datum has more latents; even.
        model_kwargs: keyword arguments of the model.

    Returns:
        `ELPDData` with the pointwise densities; entries that a mask leaves out are absent.

    Raises:
        ImportError: ArviZ is not installed.
        ValueError: no observed site of that name, or one that does not have one datum for each row of its GP latents;
            a datum that depends on other rows; a GP on top of a GP; a guide whose mean has a basis of its own; too few
            draws.

    References:
        Vehtari, Mononen, Tolvanen, Sivula and Winther (2016), "Bayesian leave-one-out cross-validation approximations
        for Gaussian latent variable models", section 3.
    """
    az = arviz_module()
    num_samples = at_least(2, "num_samples", num_samples, "The default is 200.")
    params, mutable_state = fitted_values(result)
    kwargs = {**svi.static_kwargs, **model_kwargs}
    loss = QuadratureELBO(num_nodes, num_samples=num_draws)
    floor = svi.optim.floor if isinstance(svi.optim, NaturalGradient) else None
    cavities = _Cavities(svi, {**params, **mutable_state}, loss, floor, var_name, model_args, kwargs)
    loo, full = jax.lax.map(cavities.log_densities, jax.random.split(rng_key, num_samples))
    loo, full = (np.asarray(x)[:, cavities.mask] for x in (loo, full))
    return _elpd_data(az, cavities.name, loo, full)


def _given_latents(name: str, q: SparsePosterior) -> SparsePosterior:
    """The posterior of a GP given the other latents, which count as hyperparameters."""
    group = q.joint_run.group
    if len(group.sites) > 1 or q.batch_shape not in ((), (1,)):
        msg = (
            f"The GP sites {list(group.sites)} have a joint posterior with several latents for each datum, which "
            "`loo_cavity` takes to be independent. Use `az.loo` on what `to_arviz` gives."
        )
        raise ValueError(msg)
    return q.joint_run.given_latents(name, q)


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
        if subsampled(model_trace) or site["scale"] is not None:
            msg = (
                f"The observed site {self.name!r} is scaled, or its plates take some of its rows, so that a row does "
                "not count as one datum. Pass all rows to a model whose plates take them, without `handlers.scale`."
            )
            raise ValueError(msg)
        self.mask = np.broadcast_to(observed_mask(site["fn"]), site["fn"].batch_shape)
        for name, q in posteriors_of(guide_trace).items():
            rows = self.mask.shape[-1:]
            if q.event_shape != rows or self.mask.shape not in (rows, (*q.batch_shape, *rows)):
                msg = (
                    f"The observed site {self.name!r} has data of shape {self.mask.shape}, and the GP site {name!r} "
                    f"has shape {(*q.batch_shape, *q.event_shape)}. `loo_cavity` needs one datum for each row of the "
                    "GP site. Use `az.loo` on what `to_arviz` gives."
                )
                raise ValueError(msg)
            if not svi.guide.family(name).has_cavities:
                msg = (
                    f"The posterior of the GP site {name!r}, {type(svi.guide.family(name)).__name__}, has a mean and a "
                    "covariance that are not those of one Gaussian. Use `az.loo` on what `to_arviz` gives, or another "
                    "guide, such as `AutoSVGP` or `AutoTSVGP`."
                )
                raise ValueError(msg)
        self._check_rows(particle, guide_trace, posteriors_of(guide_trace))

    def _run(self, key: Array) -> tuple[Particle, Trace, Trace]:
        # Guides take a mask of False for a prediction: parameters must be given, and nothing is fitted.
        guide = handlers.mask(self.svi.guide, mask=False)
        particle = Particle(self.loss, key, self.values, self.svi.model, guide, self.args, self.kwargs)
        guide_trace = particle.run_guide(particle.guide_key, {})
        for name, q in posteriors_of(guide_trace).items():
            if q.joint_run is not None:
                guide_trace[name] = {**guide_trace[name], "fn": _given_latents(name, q)}
        return particle, guide_trace, particle.run_model(guide_trace, {})

    def _log_prob(self, particle: Particle, guide_trace: Trace, values: Mapping[str, Array]) -> Array:
        site = particle.run_model(guide_trace, values)[self.name]
        return log_prob_of(site["fn"], site["value"])

    def _check_rows(self, particle: Particle, guide_trace: Trace, posteriors: Mapping[str, SparsePosterior]) -> None:
        """Raise where the density of a datum depends on other rows of the GP sites than its own.

        Where it does not, a tangent weighed by a number for each row has the derivative weighed by these numbers.
        """
        values = {name: guide_trace[name]["value"] for name in posteriors}
        rng = np.random.default_rng(1)
        weights = jnp.asarray(rng.normal(size=self.mask.shape))
        tangent = {name: jnp.asarray(rng.normal(size=value.shape), value.dtype) for name, value in values.items()}

        def along(weights: Array) -> Array:
            tangents = {name: weights.astype(t.dtype) * t for name, t in tangent.items()}
            return jax.jvp(lambda values: self._log_prob(particle, guide_trace, values), (values,), (tangents,))[1]

        weighed, alone = along(weights), weights * along(jnp.ones(self.mask.shape))
        rounding = jnp.sqrt(jnp.finfo(weighed.dtype).eps) * jnp.abs(alone)
        if jnp.any(jnp.abs(weighed - alone) > rounding):
            msg = (
                f"`loo_cavity` needs the observed site {self.name!r} to depend on row n of {sorted(values)} alone at "
                "datum n, and some data depend on other rows. Give `GaussianProcess` its inputs in the order of the "
                "data, one row for each, or use `az.loo` on what `to_arviz` gives."
            )
            raise ValueError(msg)

    def log_densities(self, key: Array) -> tuple[Array, Array]:
        """At each datum log p(y_n | θ, y_−n) and log p(y_n | θ, y), for the θ that belongs to a key."""
        particle, guide_trace, model_trace = self._run(key)
        posteriors = posteriors_of(guide_trace)

        def term(trace: Trace) -> dict[str, Array]:
            return {self.name: jnp.sum(log_prob_of(trace[self.name]["fn"], trace[self.name]["value"]))}

        model_at = partial(particle.run_model, guide_trace)
        rules = rules_of(guide_trace, model_trace, posteriors, (self.name,), term, model_at)
        if not rules:
            msg = f"The observed site {self.name!r} depends on no GP site, so it has no cavities. Use `az.loo`."
            raise ValueError(msg)
        # The same nodes for all draws of θ.
        means = {name: q.mean for name, q in posteriors.items()}
        by_site, weights = rules[0].nodes(self.loss.num_nodes, self.loss.num_samples, means, jax.random.key(0))
        posteriors = {name: q for name, q in posteriors.items() if name in by_site}
        z = [jnp.broadcast_to(by_site[name], (len(weights), *q.mean.shape)) for name, q in posteriors.items()]
        z = jnp.concatenate([jnp.reshape(x, (len(weights), -1, *self.mask.shape)) for x in z], axis=1)
        if rules[0].axes is None:
            z = _standardised(z)

        def log_prob(f: Array) -> Array:
            ends = np.cumsum([q.mean.size // self.mask.size for q in posteriors.values()])
            parts = zip(posteriors.items(), jnp.split(f, ends[:-1]), strict=True)
            values = {name: jnp.reshape(part, q.mean.shape) for (name, q), part in parts}
            return self._log_prob(particle, guide_trace, values)

        mean, variance, explained = self._moments(posteriors)
        likelihood = _Likelihood(log_prob, z, weights, mean, variance, self.floor)
        left = 1.0 - likelihood.beta * explained
        # A site that is as precise as the posterior or more is not a part of it.
        s = jnp.where(left > 0.0, explained / left, jnp.nan)
        loo = likelihood.log_expectation(mean - s * likelihood.alpha, variance - explained + s)
        return loo, likelihood.log_expectation(mean, variance)

    def _moments(self, posteriors: Mapping[str, SparsePosterior]) -> tuple[Array, Array, Array]:
        """Mean and variance of the D latents of each datum, and what of the variance is that of u, (D, ...)."""
        moments = []
        for q in posteriors.values():
            covariance = q.moments.covariance
            of_u = None if covariance is None else covariance.variance_of_inducing()
            of_u = q.variance if of_u is None else jnp.broadcast_to(of_u, q.mean.shape)
            moments.append([jnp.reshape(x, (-1, *self.mask.shape)) for x in (q.mean, q.variance, of_u)])
        mean, variance, explained = (jnp.concatenate(x) for x in zip(*moments, strict=True))
        return mean, variance, explained


class _Likelihood:
    """The densities p(y_n | f_n) of all data, with D latents each, and their second-order expansions under q.

    log p ≈ αᵀ(f − m) − ½ (f − m)ᵀB (f − m) + c, of which α = ∂ell/∂m, the diagonal of B is β = −2 ∂ell/∂v, and the
    rest of B is −∂²ell/∂m∂mᵀ.

    Args:
        log_prob: of values of f, (D, ...), at each datum, (...).
        z: standard normal nodes, (K, D, ...), with weights (K,).
        weights: theirs.
        mean: m, (D, ...).
        variance: v, (D, ...).
        floor: the least β, or None.
    """

    def __init__(
        self,
        log_prob: Callable[[Array], Array],
        z: Array,
        weights: Array,
        mean: Array,
        variance: Array,
        floor: float | None,
    ) -> None:
        self.log_prob, self.z, self.weights, self.mean = jax.vmap(log_prob), z, weights, mean

        def ell(mean: Array, variance: Array) -> Array:
            # Each datum depends on its own row: the derivatives of the sum are those of each datum.
            values = self.log_prob(mean + standard_deviation(variance) * z)
            return jnp.sum(jnp.tensordot(weights, values, axes=1))

        self.alpha, by_variance = jax.grad(ell, argnums=(0, 1))(mean, variance)
        beta = -2.0 * by_variance
        self.beta = beta if floor is None else jnp.maximum(beta, floor)
        D = len(mean)
        self.B = self.beta[None]
        if D > 1:

            def column(d: Array) -> Array:
                one = jnp.zeros_like(mean).at[d].set(1.0)
                return -jax.jvp(lambda m: jax.grad(ell)(m, variance), (mean,), (one,))[1]

            diagonal = jnp.arange(D)
            self.B = jax.lax.map(column, diagonal).at[diagonal, diagonal].set(self.beta)

    def log_expectation(self, mean: Array, variance: Array) -> Array:
        """The log of E[p(y_n | f_n)] under independent N(mean, variance), (...).

        The nodes are those of the Gaussian that the expansion makes of the integrand, each weighed by what the two
        densities there differ by. Nodes of N(mean, variance) itself miss a likelihood much narrower than it. Where
        log p is quadratic the weighed terms are all the same, so the result is exact.
        """
        # With f = mean + √variance x: a standard normal x, and an expansion with a precision of G at x = δ.
        scale = standard_deviation(variance)
        delta = jnp.where(scale == 0.0, 0.0, (self.mean - mean) / scale)
        precision, U = _eigen(scale[:, None] * self.B * scale[None])
        # Log-densities may be convex, and a precision of I + G that is not positive is none.
        precision = jnp.maximum(precision, 0.0)
        turned = _matvec(jnp.swapaxes(U, 0, 1), jnp.stack([scale * self.alpha, delta]))
        root = 1.0 / jnp.sqrt(1.0 + precision)
        x = _matvec(U, root**2 * (turned[0] + precision * turned[1]) + root * self.z)
        log_ratio = 0.5 * jnp.sum(self.z**2 - x**2, axis=1) + jnp.sum(jnp.log(root), axis=0)
        values = self.log_prob(mean + scale * x) + log_ratio
        return jax.scipy.special.logsumexp(values, axis=0, b=self.weights.reshape(-1, *[1] * (values.ndim - 1)))


def _eigen(G: Array) -> tuple[Array, Array]:
    """Eigenvalues, (D, ...), and vectors in columns, (D, D, ...), of symmetric (D, D, ...)."""
    if len(G) == 1:
        return G[0], jnp.ones_like(G)
    values, vectors = jnp.linalg.eigh(jnp.moveaxis(G, (0, 1), (-2, -1)))
    return jnp.moveaxis(values, -1, 0), jnp.moveaxis(vectors, (-2, -1), (0, 1))


def _matvec(U: Array, x: Array) -> Array:
    """(D, D, ...) times vectors (K, D, ...)."""
    return jnp.einsum("ij...,kj...->ki...", U, x, precision=jax.lax.Precision.HIGHEST)


def _standardised(z: Array) -> Array:
    """Draws, (K, D, ...), with the second moments of a standard normal: their averages of quadratics are exact."""
    K, D = z.shape[:2]
    if K < 2 * D:
        msg = f"`num_draws` must be at least {2 * D}, twice the number of latents of a datum, got {K}."
        raise ValueError(msg)
    second = jnp.einsum("ki...,kj...->...ij", z, z, precision=jax.lax.Precision.HIGHEST) / K
    L = jnp.linalg.cholesky(second)
    return jnp.moveaxis(solve_lower(L, jnp.moveaxis(z, (0, 1), (-1, -2))), (-1, -2), (0, 1))


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
        at_least(LEAST_DRAWS, "num_samples", S, "The hyperparameters have a posterior; the default is 200.")
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
