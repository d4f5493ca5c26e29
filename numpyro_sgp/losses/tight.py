"""What a bound gains if f given u may vary less than under the prior, where the likelihood is Gaussian.

Let d be what u leaves unexplained of the variance of a Gaussian's mean, and σ² the Gaussian's own variance. With
q(f | u) = p(f | u) an entry of the likelihood loses ½ x, x = d/σ². With the best q(f | u) = N(E[f | u], R V Rᵀ), where
R Rᵀ = Cov(f | u) and V is diagonal, it loses ½ log(1 + x): the bound is higher by ½ [x − log(1 + x)] for each entry.

Where the log density counts w times, and the divergence of f once, the gain is ½ [w x − log(1 + w x)]. For w > 1 the
gain here is w times that of w = 1, which is less: a weight may stand for rows that are not in the batch.
"""

from collections.abc import Callable, Mapping
import functools
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpyro.distributions as dist

from numpyro_sgp._internal.curvature import Shape, shapes_of
from numpyro_sgp.distributions.sparse_posterior import SparsePosterior
from numpyro_sgp.distributions.traces import Trace, entry_weights, rows_of_each, scaled_log_prob
from numpyro_sgp.distributions.wrappers import unwrap
from numpyro_sgp.features.expanded import is_finite_rank

__all__ = ["Gaussian", "gain", "gain_of_entries", "gaussian_of", "unexplained"]


class Gaussian(NamedTuple):
    """The likelihood of a site whose entries are Gaussian.

    Attributes:
        loc: means of the entries.
        scale: their standard deviations.
        weight: how often each counts beside the rows that it stands for, 0 where it is masked.
        rows: how many rows of all data each stands for, N/B in the plates of minibatches.
    """

    loc: Array
    scale: Array
    weight: Array
    rows: Array


def gaussian_of(trace: Trace, name: str) -> Gaussian | None:
    """The Gaussian likelihood of an observed site of a model; None where it has another."""
    site = trace[name]
    fn: Any = unwrap(site["fn"])
    fn = fn.base_dist if isinstance(fn, dist.LogNormal) else fn
    if not (site["is_observed"] and isinstance(fn, dist.Normal)):
        return None
    shape = jnp.broadcast_shapes(jnp.shape(site["value"]), site["fn"].shape())
    dtype, rows = jnp.result_type(fn.loc, fn.scale), rows_of_each(trace, name)
    parts: tuple[Any, ...] = fn.loc, fn.scale, (entry_weights(site) / rows).astype(dtype), jnp.asarray(rows, dtype)
    return Gaussian(*(jnp.broadcast_to(each, shape) for each in parts))


def gain_of_entries(variance: Array, gaussian: Gaussian, scale: ArrayLike | None) -> Array:
    """Σ of the gains.

    Args:
        variance: of the means, what u leaves unexplained.
        gaussian: the likelihood.
        scale: the factor of the divergence of f in the loss; None for 1.
    """
    of_f = 1.0 if scale is None else scale
    x, weight = variance / gaussian.scale**2, gaussian.weight / of_f
    lost = jnp.maximum(weight, 1.0) * jnp.log1p(jnp.minimum(weight, 1.0) * x)
    return jnp.asarray(0.5 * of_f * jnp.sum(gaussian.rows * (weight * x - lost)))


def unexplained(q: SparsePosterior) -> Array | None:
    """Prior variances given the inducing variables, (..., N); None where a posterior does not tell.

    Nor is it asked of kernels of finite rank: few features leave nothing unexplained, and millions are not to be added.
    """
    if q.moments.covariance is None or is_finite_rank(q.prior.kernel):
        return None
    rest = q.moments.covariance.unexplained(q.kernel(q.prior.X))
    return None if rest is None else jnp.broadcast_to(rest, q.batch_shape + q.event_shape)


def gain(
    posteriors: Mapping[str, SparsePosterior],
    scales: Mapping[str, ArrayLike | None],
    model_trace: Trace,
    names: tuple[str, ...],
    model_at: Callable[[Mapping[str, Array]], Trace],
) -> Array | float:
    """Σ of the gains of all terms, of GP sites whose rows enter them one by one.

    A GP site has one q(f | u) for all its terms, so it is the prior's where one of them is not Gaussian.

    Args:
        posteriors: of these GP sites.
        scales: the factors that their divergences have in the loss; None for 1.
        model_trace: a run of the model.
        names: the sites that have terms.
        model_at: the run of the model at values of GP sites.
    """
    variances = {name: each for name, q in posteriors.items() if (each := unexplained(q)) is not None}
    if not variances or all(gaussian_of(model_trace, name) is None for name in names):
        return 0.0
    means = {name: q.mean for name, q in posteriors.items()}

    def described(values: Mapping[str, Array]) -> dict[str, Any]:
        trace = model_at(values)
        return {name: (jnp.sum(scaled_log_prob(trace[name])), gaussian_of(trace, name)) for name in names}

    def shapes(chosen: Mapping[str, Array]) -> dict[str, Any]:
        """How each term depends on some GP sites."""
        sizes = [value.size for value in chosen.values()]
        flat = jnp.concatenate([value.ravel() for value in chosen.values()])

        def at(flat: Array) -> dict[str, Any]:
            parts, start = {}, 0
            for (name, value), size in zip(chosen.items(), sizes, strict=True):
                parts[name] = flat[start : start + size].reshape(value.shape)
                start += size
            return described({**means, **parts})

        return shapes_of(at, flat)

    together = shapes(means)
    apart = {site: together if len(means) == 1 else shapes({site: mean}) for site, mean in means.items()}
    depends = {name: {site for site in means if apart[site][name][0] is not Shape.CONSTANT} for name in names}
    fixed = {name for name in names if not _is_gaussian(together[name][1])}
    kept = {site for name in fixed for site in depends[name]} | (means.keys() - variances.keys())
    chosen = [name for name in names if depends[name] and not depends[name] & kept]
    if not chosen:
        return 0.0

    def locs(values: Mapping[str, Array]) -> dict[str, Array]:
        trace = model_at({**means, **values})
        return {name: _loc(trace, name) for name in chosen}

    dtype = next(iter(means.values())).dtype
    spread = dict.fromkeys(chosen, jnp.zeros((), dtype))
    for site in {site for name in chosen for site in depends[name]}:
        mean, rest = means[site], variances[site]
        latents = jnp.eye(rest[..., 0].size, dtype=rest.dtype).reshape(-1, *rest.shape[:-1], 1)

        def along(tangent: Array, site: str = site, mean: Array = mean) -> dict[str, Array]:
            return jax.jvp(lambda f: locs({site: f}), (mean,), (tangent,))[1]

        # An entry depends on one row: J d J is its variance, for each latent.
        slopes = jax.vmap(along)(jnp.broadcast_to(latents, (len(latents), *rest.shape)))
        weighted = jax.vmap(along)(latents * rest)
        for name in chosen:
            spread[name] = spread[name] + jnp.sum(slopes[name] * weighted[name], axis=0)
    found = model_at(means)
    total = jnp.zeros((), dtype)
    for name in chosen:
        gaussian = gaussian_of(found, name)
        assert gaussian is not None
        # (Of several sites the largest: with it the gain is least.)
        factors = [1.0 if scales[site] is None else jnp.max(jnp.asarray(scales[site])) for site in depends[name]]
        scale = jnp.asarray(functools.reduce(jnp.maximum, factors), dtype)
        total = total + gain_of_entries(spread[name], gaussian, scale)
    return total


def _loc(trace: Trace, name: str) -> Array:
    gaussian = gaussian_of(trace, name)
    assert gaussian is not None
    return gaussian.loc


def _is_gaussian(shapes: Gaussian | None) -> bool:
    """Whether an entry is Gaussian in f: by how mean, standard deviation and weight depend on it."""
    if shapes is None:
        return False
    affine = shapes.loc in (Shape.CONSTANT, Shape.AFFINE)
    return affine and shapes.scale is shapes.weight is shapes.rows is Shape.CONSTANT
