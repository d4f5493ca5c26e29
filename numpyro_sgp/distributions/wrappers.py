"""Distributions inside expansions by plates, masks and `to_event`, and supports inside `independent`."""

from collections.abc import Callable
from typing import Any

from jax import Array
from jax.core import Tracer
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.distributions.distribution import ExpandedDistribution, Independent, MaskedDistribution

__all__ = ["entry_mask", "is_positive", "is_real", "is_triangular", "log_prob_of", "observed_mask", "rewrap", "unwrap"]


def unwrap(fn: dist.Distribution) -> dist.Distribution:
    """The distribution inside plates' expansions, masks and `to_event`."""
    while isinstance(fn, ExpandedDistribution | MaskedDistribution | Independent):
        fn = fn.base_dist
    return fn


def is_real(support: Any) -> bool:
    """Whether a support is all real numbers, or vectors or matrices of them."""
    while isinstance(support, type(constraints.independent(constraints.real, 1))):
        support = support.base_constraint
    return support is constraints.real


def is_positive(support: Any) -> bool:
    """Whether a support is one of numbers above zero, or above a bound that is at least zero and no tracer."""
    while hasattr(support, "base_constraint"):  # of an event
        support = support.base_constraint
    lowest = getattr(support, "lower_bound", None)
    return lowest is not None and not isinstance(lowest, Tracer) and bool(np.all(np.asarray(lowest) >= 0.0))


def is_triangular(support: Any) -> bool:
    """Whether a support is one of lower triangular matrices with positive diagonal."""
    return support in (constraints.lower_cholesky, constraints.corr_cholesky)


def rewrap(fn: dist.Distribution, replace: Callable[[Any, tuple[int, ...]], dist.Distribution]) -> dist.Distribution:
    """`fn` with the distribution inside replaced by `replace(inner, batch_shape)`, masks and `to_event` kept.

    An expansion is taken over by the replacement, which is given its batch shape.
    """
    if isinstance(fn, MaskedDistribution):
        return rewrap(fn.base_dist, replace).mask(fn._mask)  # pyright: ignore[reportArgumentType]
    if isinstance(fn, Independent):
        return rewrap(fn.base_dist, replace).to_event(fn.reinterpreted_batch_ndims)
    if isinstance(fn, ExpandedDistribution):
        # What lies between (masks, `to_event`) may have moved axes of the inside's batch to the event.
        own, expanded = len(fn.base_dist.batch_shape), fn.batch_shape
        return rewrap(fn.base_dist, lambda inner, shape: replace(inner, expanded + shape[own:]))
    return replace(fn, fn.batch_shape)


def log_prob_of(fn: dist.Distribution, value: Array) -> Array:
    """The log density of a site, also where a mask of False, which tells a guide to predict, covers all of it."""
    if isinstance(fn, MaskedDistribution) and fn._mask is False:
        fn = fn.base_dist
    return jnp.asarray(fn.log_prob(value))


def observed_mask(fn: dist.Distribution) -> Array:
    """Which log densities of a site count: an array that broadcasts to the batch shape of `fn`."""
    mask = entry_mask(fn)
    axes = tuple(range(-min(fn.event_dim, mask.ndim), 0))
    return jnp.any(mask, axis=axes) if axes else mask


def entry_mask(fn: dist.Distribution) -> Array:
    """Which entries of a site's value count: an array that broadcasts to the shape of `fn`, events included."""
    if isinstance(fn, MaskedDistribution):
        mask = jnp.asarray(fn._mask)
        return jnp.logical_and(mask.reshape(*mask.shape, *(1,) * fn.event_dim), entry_mask(fn.base_dist))
    if isinstance(fn, ExpandedDistribution | Independent):
        return entry_mask(fn.base_dist)
    return jnp.asarray(True)
