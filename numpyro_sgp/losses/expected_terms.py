"""The expectation of a term of the model over its linear predictors, which are Gaussian: row by row."""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jax import Array
import jax.numpy as jnp

from numpyro_sgp.math.linalg import cholesky
from numpyro_sgp.math.quadrature import product_grid
from numpyro_sgp.posteriors.moments import standard_deviation

__all__ = ["Conditional", "expected"]


class Conditional(NamedTuple):
    """The F linear predictors that each entry of a term looks at, given the latents that have nodes.

    Attributes:
        mean: (rows, F).
        covariance: (rows, F, F).
        explained: what of the covariance z and the effects of groups explain, (rows, F, F), as a function without
            arguments, for training does not need it. The rest is the prior's.
        log_density: the entries of the term, as a function of displacements of the predictors from their means,
            (rows, F).
        num_shared: how many of the first axes of the rows some predictor does not have: rows along them share it.
        scale: the size of the variances that the covariance was computed from, (rows, F): its rounding error is
            relative to them.
    """

    mean: Array
    covariance: Array
    explained: Callable[[], Array]
    log_density: Callable[[Array], Array]
    num_shared: int
    scale: Array


def expected(given: Conditional, num_nodes: int, num_samples: int, rng_key: Array) -> Array:
    """Σ over rows of the expected log density.

    Args:
        given: the predictors.
        num_nodes: Gauss-Hermite nodes of one predictor, where a row looks at one or two.
        num_samples: draws of more.
        rng_key: a key.
    """

    def at(z: Array) -> Array:
        return jnp.sum(given.log_density(z))

    if not given.mean.size:
        return at(given.mean)
    z, weights = _displacements(given, num_nodes, num_samples, rng_key)
    if given.covariance.shape[-1] <= 2 or given.num_shared:
        return jnp.sum(weights * jax.vmap(at)(z))
    # A quadratic function is a control variate: draws are for the rest. Pairs of draws have no odd part.
    other, _ = _displacements(given, num_nodes, num_samples, jax.random.fold_in(rng_key, 1))
    H = jax.lax.stop_gradient(jnp.mean(jax.lax.map(lambda z: _hessian(at, z), other), axis=0))
    rest = jax.vmap(lambda z: at(z) - 0.5 * jnp.einsum("...f,...fg,...g->", z, H, z))(z)
    return jnp.sum(weights * rest) + 0.5 * jnp.sum(H * given.covariance)


def _displacements(given: Conditional, num_nodes: int, num_samples: int, rng_key: Array) -> tuple[Array, Array]:
    """Displacements of the predictors from their means, (K, rows, F), and weights, (K,)."""
    covariance, ndim = given.covariance, given.mean.ndim - 1
    F, dtype = covariance.shape[-1], covariance.dtype
    if F <= 2:
        nodes, weights = (jnp.asarray(each, dtype) for each in product_grid(num_nodes, F))
        first = standard_deviation(covariance[..., 0, 0])
        if F == 1:
            return first[..., None] * nodes.reshape(-1, *(1,) * ndim, 1), weights
        x, y = (nodes[:, axis].reshape(-1, *(1,) * ndim) for axis in range(2))
        slope = covariance[..., 1, 0] / jnp.where(first > 0.0, first, 1.0)
        rest = covariance[..., 1, 1] - slope * slope
        second = standard_deviation(jnp.maximum(rest, 0.0))
        return jnp.stack(jnp.broadcast_arrays(first * x, slope * x + second * y), axis=-1), weights
    # (A predictor without variance, as the logit of a reference class, has a small part of the others' jitter.)
    eps, largest = jnp.finfo(dtype).eps, jnp.max(given.scale, axis=-1, keepdims=True)
    jitter = 10.0 * F * eps * jnp.maximum(given.scale, eps * jnp.where(largest > 0.0, largest, 1.0))
    L = cholesky(covariance + jitter[..., None] * jnp.eye(F, dtype=dtype))
    shape = (num_samples // 2, *((1,) * ndim if given.num_shared else covariance.shape[:-2]), F)
    half = jax.random.normal(rng_key, shape, dtype)
    noise = jnp.concatenate([half, -half])
    z = jnp.sum(L * noise[..., None, :], axis=-1)
    return z, jnp.full(num_samples, 1.0 / num_samples, dtype)


def _hessian(fn: Callable[[Array], Array], at: Array) -> Array:
    """Second derivatives, (rows, F, F), of a sum of functions of one row each, (rows, F)."""

    def column(d: Array) -> Array:
        tangent = jnp.zeros_like(at).at[..., d].set(1.0)
        return jax.jvp(jax.grad(fn), (at,), (tangent,))[1]

    F = at.shape[-1]
    return jnp.moveaxis(jax.lax.map(column, jnp.arange(F), batch_size=min(F, 32)), 0, -1)
