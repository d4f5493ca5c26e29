"""Cavities of Gaussian sites, and the expectation of a likelihood under them."""

from collections.abc import Callable
import math
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp

from numpyro_sgp.losses.expected_terms import Conditional
from numpyro_sgp.math.linalg import solve_lower
from numpyro_sgp.math.quadrature import product_grid
from numpyro_sgp.posteriors.moments import standard_deviation

__all__ = ["Given", "Likelihood", "floored", "identity", "matvec", "nodes_of_latents", "standardised"]


class Given(NamedTuple):
    """The D latents or linear predictors of each datum, given the hyperparameters.

    Attributes:
        log_prob: of their values, (D, ...), at each datum, (...).
        mean: m, (D, ...).
        covariance: V, (D, D, ...).
        explained: E, what of it the inducing variables and other members of q explain, (D, D, ...).
    """

    log_prob: Callable[[Array], Array]
    mean: Array
    covariance: Array
    explained: Array

    @classmethod
    def of(cls, found: Conditional, shape: tuple[int, ...]) -> "Given":
        """Linear predictors of data that have a shape, the last axes of which are those of the rows."""
        F, sizes = found.mean.shape[-1], tuple(size for size in shape if size > 1)
        mean = jnp.moveaxis(jnp.broadcast_to(found.mean, (*sizes, F)), -1, 0).reshape(F, *shape)
        covariance, explained = (
            jnp.moveaxis(jnp.broadcast_to(x, (*sizes, F, F)), (-2, -1), (0, 1)).reshape(F, F, *shape)
            for x in (found.covariance, found.explained())
        )
        # Data along the first axes share predictors: each of them has its own values of these, one after another.
        num_shared = len(sizes) + 1 - found.mean.ndim + found.num_shared
        K = math.prod(sizes[:num_shared])

        def log_prob(values: Array) -> Array:
            moved = jnp.moveaxis((values - mean).reshape(F, *sizes), 0, -1).reshape(K, *sizes[num_shared:], F)

            def at(k: Array) -> Array:
                return found.log_density(jnp.broadcast_to(moved[k], found.mean.shape)).reshape(K, -1)[k]

            return jax.vmap(at)(jnp.arange(K)).reshape(shape)

        return cls(log_prob, mean, covariance, explained)

    def cavity(self, alpha: Array, B: Array) -> tuple[Array, Array]:
        """Mean and covariance without the site of each datum, N(m − S′α, V − E + S′), S′ = (I − E B)⁻¹E.

        A site that is as precise as the posterior or more is not a part of it: the mean is NaN there.
        """
        root = _root(self.explained)
        left, U = _eigen(identity(self.mean) - _sandwich(root, B))
        in_posterior = jnp.all(left > 0.0, axis=0)
        turned = _product(root, U) / jnp.sqrt(jnp.where(in_posterior, left, 1.0))
        S = _product(turned, jnp.swapaxes(turned, 0, 1))
        mean = self.mean - matvec(S, alpha[None])[0]
        return jnp.where(in_posterior, mean, jnp.nan), self.covariance - self.explained + S


class Likelihood:
    """The densities p(y_n | f_n) of all data, with D latents each, and their second-order expansions under q.

    log p ≈ αᵀ(f − m) − ½ (f − m)ᵀB (f − m) + c, of which α = ∂ell/∂m and B = −2 ∂ell/∂V.

    Args:
        given: the latents under q.
        z: standard normal nodes, (K, D, ...), with weights (K,).
        weights: theirs.
        floor: the least entry on the diagonal of B, or None.
    """

    def __init__(self, given: Given, z: Array, weights: Array, floor: float | None) -> None:
        self.log_prob, self.z, self.weights, self.mean = jax.vmap(given.log_prob), z, weights, given.mean

        def ell(mean: Array, covariance: Array) -> Array:
            # Each datum depends on its own row: the derivatives of the sum are those of each datum.
            values = self.log_prob(mean + matvec(_root(covariance), z))
            return jnp.sum(jnp.tensordot(weights, values, axes=1))

        self.alpha, by_covariance = jax.grad(ell, argnums=(0, 1))(given.mean, given.covariance)
        # Of the covariance the root reads one triangle, so the derivative is that of both entries off the diagonal.
        self.B = floored(-(by_covariance + jnp.swapaxes(by_covariance, 0, 1)), floor)

    def log_expectation(self, mean: Array, covariance: Array) -> Array:
        """The log of E[p(y_n | f_n)] under N(mean, covariance), (...).

        The nodes are those of the Gaussian that the expansion makes of the integrand, each weighed by what the two
        densities there differ by. Nodes of N(mean, covariance) itself miss a likelihood much narrower than it. Where
        log p is quadratic the weighed terms are all the same, so the result is exact.
        """
        # With f = mean + L x: a standard normal x, and an expansion with a precision of G = LᵀBL about Lx = m − mean.
        L = _root(covariance)
        precision, U = _eigen(_sandwich(L, self.B))
        linear = jnp.stack([self.alpha, matvec(self.B, (self.mean - mean)[None])[0]])
        alpha, moved = matvec(jnp.swapaxes(_product(L, U), 0, 1), linear)
        # Log-densities may be convex, and a precision of I + G that is not positive is none.
        moved, precision = jnp.where(precision > 0.0, moved, 0.0), jnp.maximum(precision, 0.0)
        root = 1.0 / jnp.sqrt(1.0 + precision)
        x = matvec(U, root**2 * (alpha + moved) + root * self.z)
        log_ratio = 0.5 * jnp.sum(self.z**2 - x**2, axis=1) + jnp.sum(jnp.log(root), axis=0)
        values = self.log_prob(mean + matvec(L, x)) + log_ratio
        return jax.scipy.special.logsumexp(values, axis=0, b=self.weights.reshape(-1, *[1] * (values.ndim - 1)))


def floored(B: Array, floor: float | None) -> Array:
    """Precisions, (D, D, ...), of which those on the diagonal have a floor."""
    if floor is None:
        return B
    diagonal = jnp.arange(len(B))
    return B.at[diagonal, diagonal].max(floor)


def nodes_of_latents(dimension: int, dtype: Any) -> tuple[Array, Array]:
    """Standard normal nodes for latents outside linear predictors, (K, dimension), and weights, (K,)."""
    if dimension <= 2:
        nodes, weights = product_grid(8, dimension)
        return jnp.asarray(nodes, dtype), jnp.asarray(weights, dtype)
    # Regressions on `dimension` numbers: several draws for each.
    half = jax.random.normal(jax.random.key(0), (max(32, 2 * dimension), dimension), dtype)
    K = 2 * len(half)
    return standardised(jnp.concatenate([half, -half])), jnp.full(K, 1.0 / K, dtype)


def identity(mean: Array) -> Array:
    """(D, D, 1, ...) for (D, ...)."""
    D = len(mean)
    return jnp.eye(D, dtype=mean.dtype).reshape(D, D, *[1] * (mean.ndim - 1))


def _root(V: Array) -> Array:
    """Lower roots, (D, D, ...), of covariances, which may be singular; of which the lower triangle is read."""
    L = jnp.zeros_like(V)
    for j in range(len(V)):
        column = V[j:, j] - jnp.sum(L[j:, :j] * L[j, :j], axis=1)
        # What rounding leaves of a variance that others explain is none.
        rest = jnp.where(column[0] > 10.0 * jnp.finfo(V.dtype).eps * V[j, j], column[0], 0.0)
        pivot = standard_deviation(rest)
        L = L.at[j:, j].set(jnp.where(pivot > 0.0, column / jnp.where(pivot > 0.0, pivot, 1.0), 0.0))
        L = L.at[j, j].set(pivot)
    return L


def _product(A: Array, B: Array) -> Array:
    """Matrices times matrices, (D, D, ...) both."""
    return jnp.einsum("ij...,jk...->ik...", A, B, precision=jax.lax.Precision.HIGHEST)


def _sandwich(L: Array, B: Array) -> Array:
    """LᵀBL."""
    return _product(jnp.swapaxes(L, 0, 1), _product(B, L))


def _eigen(G: Array) -> tuple[Array, Array]:
    """Eigenvalues, (D, ...), and vectors in columns, (D, D, ...), of symmetric (D, D, ...)."""
    if len(G) == 1:
        return G[0], jnp.ones_like(G)
    values, vectors = jnp.linalg.eigh(jnp.moveaxis(G, (0, 1), (-2, -1)))
    return jnp.moveaxis(values, -1, 0), jnp.moveaxis(vectors, (-2, -1), (0, 1))


def matvec(U: Array, x: Array) -> Array:
    """(D, D, ...) times vectors (K, D, ...)."""
    return jnp.einsum("ij...,kj...->ki...", U, x, precision=jax.lax.Precision.HIGHEST)


def standardised(z: Array) -> Array:
    """Draws, (K, D, ...), with the second moments of a standard normal: their averages of quadratics are exact."""
    K, D = z.shape[:2]
    if K < 2 * D:
        msg = f"`num_draws` must be at least {2 * D}, twice the number of latents of a datum, got {K}."
        raise ValueError(msg)
    second = jnp.einsum("ki...,kj...->...ij", z, z, precision=jax.lax.Precision.HIGHEST) / K
    L = jnp.linalg.cholesky(second)
    return jnp.moveaxis(solve_lower(L, jnp.moveaxis(z, (0, 1), (-1, -2))), (-1, -2), (0, 1))
