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
from numpyro_sgp.diagnostics.cavities import (
    Given,
    Likelihood,
    floored,
    identity,
    matvec,
    nodes_of_latents,
    standardised,
)
from numpyro_sgp.diagnostics.importance import LEAST_DRAWS, pareto_smoothed, subsampled
from numpyro_sgp.diagnostics.inference_data import arviz_module
from numpyro_sgp.diagnostics.outputs import fitted_values
from numpyro_sgp.distributions.sparse_posterior import SparsePosterior
from numpyro_sgp.distributions.traces import Trace, posteriors_of
from numpyro_sgp.distributions.wrappers import log_prob_of, observed_mask, unwrap
from numpyro_sgp.losses.joint import JointExpectation, Predictors
from numpyro_sgp.losses.quadrature_elbo import Particle, QuadratureELBO
from numpyro_sgp.losses.rules import rules_of
from numpyro_sgp.math.quadrature import product_grid
from numpyro_sgp.optim import NaturalGradient

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

    whose density of y_n is found by quadrature, with nodes where cavity and likelihood meet. Under a joint posterior
    f_n is the vector of the linear predictors of datum n, with all GPs, coefficients and effects in them: s, r and β
    are matrices, s′ = (I − s β)⁻¹s. The result is exact for a Gaussian likelihood of one latent or of one linear
    predictor, and for others as good as the sites are. Where hyperparameters have a posterior, and latents of a joint
    posterior that are in no linear predictor, such as a noise scale, draws of them are weighted by 1/p(y_n | y_−n, θ)
    with Pareto-smoothed importance sampling: that posterior is without datum n too, and k̂ says how well that went.
    Sites are evaluated at the moments of q, so any guide will do that has converged and whose mean and covariance are
    those of one Gaussian. `AutoQSGP`, and `AutoDecoupledGP` with a mean basis, are none: the mean moves by more than
    the covariance says.

    Args:
        rng_key: draws the hyperparameters and the latents in no linear predictor.
        svi: the fitted `SVI` object; its model and guide are used.
        result: what `SVI.run` returned, or a dict of parameters.
        model_args: arguments of the model: all of the data.
        var_name: the observed site; needed where there are several.
        num_samples: draws of these; at least 30 where there are any.
        num_nodes: nodes along each axis, for one GP latent or linear predictor for each datum or two.
        num_draws: antithetic draws where a datum has more; even.
        model_kwargs: keyword arguments of the model.

    Returns:
        `ELPDData` with the pointwise densities; entries that a mask leaves out are absent.

    Raises:
        ImportError: ArviZ is not installed.
        ValueError: no observed site of that name, or one that does not have one datum for each row of its GP latents
            or linear predictors; a datum that depends on other rows; a GP on top of a GP; a guide whose mean has a
            basis of its own; too few draws.

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
        expectation = self._joint(particle, guide_trace)
        if expectation is None:
            self._check_posteriors(particle, guide_trace)
        else:
            self._check_predictors(expectation.predictors(self.name))

    def _run(self, key: Array) -> tuple[Particle, Trace, Trace]:
        # Guides take a mask of False for a prediction: parameters must be given, and nothing is fitted.
        guide = handlers.mask(self.svi.guide, mask=False)
        particle = Particle(self.loss, key, self.values, self.svi.model, guide, self.args, self.kwargs)
        guide_trace = particle.run_guide(particle.guide_key, {})
        return particle, guide_trace, particle.run_model(guide_trace, {})

    def _log_prob(self, particle: Particle, guide_trace: Trace, values: Mapping[str, Array]) -> Array:
        site = particle.run_model(guide_trace, values)[self.name]
        return log_prob_of(site["fn"], site["value"])

    def _joint(self, particle: Particle, guide_trace: Trace) -> JointExpectation | None:
        """The joint posterior of what the data depend on; None where they depend on GP sites that have none."""
        expectations = particle.joint_expectations(guide_trace, analytic=False)
        return next((each for each in expectations if self.name in each.names), None)

    def _check_posteriors(self, particle: Particle, guide_trace: Trace) -> None:
        """Raise where a datum has no cavity under the posteriors of GP sites one by one."""
        posteriors = _alone(guide_trace)
        for name, q in posteriors.items():
            rows = self.mask.shape[-1:]
            if q.event_shape != rows or self.mask.shape not in (rows, (*q.batch_shape, *rows)):
                msg = (
                    f"The observed site {self.name!r} has data of shape {self.mask.shape}, and the GP site {name!r} "
                    f"has shape {(*q.batch_shape, *q.event_shape)}. `loo_cavity` needs one datum for each row of the "
                    "GP site. Use `az.loo` on what `to_arviz` gives."
                )
                raise ValueError(msg)
            if not self.svi.guide.family(name).has_cavities:
                msg = (
                    f"The posterior of the GP site {name!r}, {type(self.svi.guide.family(name)).__name__}, has a mean "
                    "and a covariance that are not those of one Gaussian. Use `az.loo` on what `to_arviz` gives, or "
                    "another guide, such as `AutoSVGP` or `AutoTSVGP`."
                )
                raise ValueError(msg)
        values = {name: guide_trace[name]["value"] for name in posteriors}
        if not _has_rows_apart(partial(self._log_prob, particle, guide_trace), values, self.mask.shape):
            msg = (
                f"`loo_cavity` needs the observed site {self.name!r} to depend on row n of {sorted(values)} alone at "
                "datum n, and some data depend on other rows. Give `GaussianProcess` its inputs in the order of the "
                "data, one row for each, or use `az.loo` on what `to_arviz` gives."
            )
            raise ValueError(msg)

    def _check_predictors(self, predictors: Predictors) -> None:
        """Raise where a datum has no linear predictors of its own."""
        if not predictors.num_roots:
            raise ValueError(self._without_gp())
        found = predictors.at(jnp.zeros(predictors.num_nodes, predictors.dtype))
        rows, sizes = (tuple(size for size in each if size > 1) for each in (found.mean.shape[:-1], self.mask.shape))
        entries = jax.eval_shape(found.log_density, found.mean)
        has_own = entries.size == self.mask.size and rows == sizes[max(0, len(sizes) - len(rows)) :]
        if has_own:
            given = Given.of(found, self.mask.shape)
            has_own = _has_rows_apart(given.log_prob, given.mean, self.mask.shape)
        if not has_own:
            msg = (
                f"The observed site {self.name!r} has data of shape {self.mask.shape}, and its linear predictors have "
                f"the rows {found.mean.shape[:-1]}. `loo_cavity` needs data that depend on one row each, with the rows "
                "along their last axes. Use `az.loo` on what `to_arviz` gives."
            )
            raise ValueError(msg)

    def _without_gp(self) -> str:
        return f"The observed site {self.name!r} depends on no GP site, so it has no cavities. Use `az.loo`."

    def log_densities(self, key: Array) -> tuple[Array, Array]:
        """At each datum log p(y_n | θ, y_−n) and log p(y_n | θ, y), for the θ that belongs to a key."""
        particle, guide_trace, model_trace = self._run(key)
        expectation = self._joint(particle, guide_trace)
        if expectation is not None:
            return self._of_predictors(expectation.predictors(self.name), jax.random.fold_in(key, 1))
        posteriors = _alone(guide_trace)

        def term(trace: Trace) -> dict[str, Array]:
            return {self.name: jnp.sum(log_prob_of(trace[self.name]["fn"], trace[self.name]["value"]))}

        model_at = partial(particle.run_model, guide_trace)
        rules = rules_of(guide_trace, model_trace, posteriors, (self.name,), term, model_at) if posteriors else []
        if not rules:
            raise ValueError(self._without_gp())
        # The same nodes for all draws of θ.
        means = {name: q.mean for name, q in posteriors.items()}
        by_site, weights = rules[0].nodes(self.loss.num_nodes, self.loss.num_samples, means, jax.random.key(0))
        posteriors = {name: q for name, q in posteriors.items() if name in by_site}
        z = [jnp.broadcast_to(by_site[name], (len(weights), *q.mean.shape)) for name, q in posteriors.items()]
        z = jnp.concatenate([jnp.reshape(x, (len(weights), -1, *self.mask.shape)) for x in z], axis=1)
        if rules[0].axes is None:
            z = standardised(z)

        def log_prob(f: Array) -> Array:
            ends = np.cumsum([q.mean.size // self.mask.size for q in posteriors.values()])
            parts = zip(posteriors.items(), jnp.split(f, ends[:-1]), strict=True)
            values = {name: jnp.reshape(part, q.mean.shape) for (name, q), part in parts}
            return self._log_prob(particle, guide_trace, values)

        given = self._independent(posteriors, log_prob)
        likelihood = Likelihood(given, z, weights, self.floor)
        # Each latent has a Gaussian of its own, and a site in it.
        loo = likelihood.log_expectation(*given.cavity(likelihood.alpha, likelihood.B * identity(given.mean)))
        return loo, likelihood.log_expectation(given.mean, given.covariance)

    def _independent(self, posteriors: Mapping[str, SparsePosterior], log_prob: Callable[[Array], Array]) -> "Given":
        """The D latents of each datum under independent posteriors."""
        moments = []
        for q in posteriors.values():
            covariance = q.moments.covariance
            of_u = None if covariance is None else covariance.variance_of_inducing()
            of_u = q.variance if of_u is None else jnp.broadcast_to(of_u, q.mean.shape)
            moments.append([jnp.reshape(x, (-1, *self.mask.shape)) for x in (q.mean, q.variance, of_u)])
        mean, variance, explained = (jnp.concatenate(x) for x in zip(*moments, strict=True))
        one = identity(mean)
        return Given(log_prob, mean, one * variance, one * explained)

    def _of_predictors(self, predictors: Predictors, key: Array) -> tuple[Array, Array]:
        """The densities at a draw of the latents that have nodes, the linear predictors integrated."""
        P = predictors.num_nodes
        xi = jax.random.normal(key, (P,), predictors.dtype)
        given = Given.of(predictors.at(xi), self.mask.shape)
        z, weights = self._nodes_of_predictors(given.mean)
        likelihood = Likelihood(given, z, weights, self.floor)
        alpha, B = likelihood.alpha, likelihood.B
        if P:
            alpha, B = self._site(predictors, given.mean, xi, z, weights)
        loo = likelihood.log_expectation(*given.cavity(alpha, B))
        return loo, likelihood.log_expectation(given.mean, given.covariance)

    def _site(self, predictors: Predictors, mean: Array, xi: Array, z: Array, weights: Array) -> tuple[Array, Array]:
        """The site of each datum given the latents that have nodes, w = m_w + L ξ: its gradient and precision.

        The site of η and w together is Gaussian. Given w its precision is E[B], and its gradient E[α] + E[α ξᵀ]ξ.
        """
        nodes, of_nodes = nodes_of_latents(predictors.num_nodes, xi.dtype)

        def at(node: Array) -> tuple[Array, Array]:
            likelihood = Likelihood(Given.of(predictors.at(node), self.mask.shape), z, weights, None)
            return likelihood.alpha, likelihood.B

        alphas, precisions = jax.lax.map(at, nodes)
        alpha = jnp.tensordot(of_nodes * (1.0 + nodes @ xi), alphas, axes=1)
        B = jnp.tensordot(of_nodes, precisions, axes=1)
        precision = floored(B, self.floor)
        moved = mean - Given.of(predictors.at(jnp.zeros_like(xi)), self.mask.shape).mean
        return alpha - matvec(precision - B, moved[None])[0], precision

    def _nodes_of_predictors(self, mean: Array) -> tuple[Array, Array]:
        """Standard normal nodes, (K, D, ...), and weights, the same for all draws of θ."""
        D = len(mean)
        if D <= 2:
            grid, weights = product_grid(self.loss.num_nodes, D)
            z = jnp.asarray(grid, mean.dtype).reshape(*grid.shape, *[1] * (mean.ndim - 1))
            return jnp.broadcast_to(z, (len(grid), *mean.shape)), jnp.asarray(weights, mean.dtype)
        half = jax.random.normal(jax.random.key(0), (self.loss.num_samples // 2, *mean.shape), mean.dtype)
        K = 2 * len(half)
        return standardised(jnp.concatenate([half, -half])), jnp.full(K, 1.0 / K, mean.dtype)


def _alone(guide_trace: Trace) -> dict[str, SparsePosterior]:
    """The GP sites that have a posterior of their own."""
    return {name: q for name, q in posteriors_of(guide_trace).items() if q.joint_run is None}


def _has_rows_apart(log_prob: Callable[[Any], Array], values: Any, shape: tuple[int, ...]) -> bool:
    """Whether the density of a datum depends on no rows of the values but its own.

    Where it does not, a tangent weighed by a number for each row has the derivative weighed by these numbers.
    """
    rng = np.random.default_rng(1)
    weights = jnp.asarray(rng.normal(size=shape))
    tangent = jax.tree.map(lambda value: jnp.asarray(rng.normal(size=value.shape), value.dtype), values)

    def along(weights: Array) -> Array:
        tangents = jax.tree.map(lambda t: weights.astype(t.dtype) * t, tangent)
        return jnp.reshape(jax.jvp(log_prob, (values,), (tangents,))[1], shape)

    weighed, alone = along(weights), weights * along(jnp.ones(shape))
    rounding = jnp.sqrt(jnp.finfo(weighed.dtype).eps) * jnp.abs(alone)
    return not jnp.any(jnp.abs(weighed - alone) > rounding)


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
            f"The Pareto k of {bad} of {N} data is above {good_k:.2f}: without them the hyperparameters, or latents in "
            "no linear predictor, would be elsewhere, and their leave-one-out densities are uncertain.",
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
