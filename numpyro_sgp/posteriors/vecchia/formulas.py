"""A Gaussian process with Gaussian sites, each value conditioned on the nearest rows only.

Let the sites be exp(λ₁ₙ fₙ − ½ wₙ fₙ²). Given those of some rows with kernel matrix K, f at another input has, with
r = √w, A = I + diag(r) K diag(r) and k its covariances with these rows,

    E f = kᵀλ₁ − (r∘k)ᵀA⁻¹(r∘Kλ₁),    Var f = k(x, x) − (r∘k)ᵀA⁻¹(r∘k).

The marginals of q(f) are conditioned on the nearest rows. The normaliser is a product over the rows in some order, each
conditioned on the nearest of those before it, with mean μ and variance s from their sites:

    log Z = Σ [½(λ₁² s + 2 λ₁ μ − w μ²)/D − ½ log D],    D = 1 + w s.

With Gaussian noise this is the approximate likelihood of Vecchia. All is exact where the nearest rows are all rows.

References:
    Vecchia (1988), "Estimation and model identification for continuous spatial processes"; Guinness (2018),
    "Permutation and grouping methods for sharpening Gaussian process approximations", for the random order; Zilber and
    Katzfuss (2021), "Vecchia-Laplace approximations of generalized Gaussian processes for big non-Gaussian spatial
    data", for outcomes that are not Gaussian.
"""

from collections.abc import Callable
import dataclasses
import math
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp

from numpyro_sgp.math.linalg import cholesky, solve_lower, solve_lower_transposed
from numpyro_sgp.posteriors.joint.by_rows import AbstractRows, GivenSeveral
from numpyro_sgp.posteriors.moments import AbstractCovariance, standard_deviation
from numpyro_sgp.posteriors.vecchia.neighbours import nearest_before

__all__ = [
    "NeighbourCovariance",
    "NeighbourRows",
    "SitesOfRows",
    "conditionals",
    "draws",
    "log_normaliser",
    "moments_given",
]

_BLOCK = 2**16  # numbers in the kernel matrices of the rows that are treated at once
_KNOWN = 1e-8  # variance of a value that is known, relative to the prior's


class SitesOfRows(NamedTuple):
    """Sites, and where they are.

    Attributes:
        X: inputs, (N, D).
        lambda1: (..., N).
        precision: w, (..., N); moments are NaN where one is negative.
    """

    X: Array
    lambda1: Array
    precision: Array


class _Solved(NamedTuple):
    """What the moments and their derivatives are made of.

    Attributes:
        b: r∘A⁻¹(r∘k), so that Var f = k(x, x) − kᵀb, (..., K).
        weights: of λ₁ in the mean, k − K b, (..., K).
        c: (I + diag(w) K)⁻¹λ₁, so that E f = kᵀc, (..., K).
        mean_near: of f in the rows, K c, (..., K).
    """

    b: Array
    weights: Array
    c: Array
    mean_near: Array


def _times(K: Array, x: Array) -> Array:
    return jnp.sum(K * x[..., None, :], axis=-1)


def _solved(K: Array, k: Array, lambda1: Array, w: Array) -> _Solved:
    r = standard_deviation(w)
    L = cholesky(jnp.eye(r.shape[-1], dtype=K.dtype) + r[..., :, None] * K * r[..., None, :])
    # λ₁ may have axes in front of those of the kernel and of w.
    right = jnp.stack(jnp.broadcast_arrays(*(r * each for each in (k, *_several(_times(K, lambda1), L)))), axis=-1)
    solved = r[..., None] * solve_lower_transposed(L, solve_lower(L, right))
    b = solved[..., 0]
    c = lambda1 - jnp.moveaxis(solved[..., 1:], -1, 0).reshape(jnp.broadcast_shapes(lambda1.shape, b.shape))
    return _Solved(b, k - _times(K, b), c, _times(K, c))


def _several(x: Array, L: Array) -> list[Array]:
    """The vectors in `x`, one for each entry of the axes that it has in front of those of L."""
    return list(x.reshape(-1, *x.shape[x.ndim - L.ndim + 1 :]))


@jax.custom_jvp
def moments_given(K: Array, k: Array, prior: Array, lambda1: Array, w: Array) -> tuple[Array, Array]:
    """Mean and variance of f at an input given sites in some rows, with their derivative written out.

    Args:
        K: prior covariance of the rows, (..., K, K).
        k: their covariances with f, (..., K).
        prior: variance of f, (...).
        lambda1: of the sites, (..., K).
        w: their precisions, (..., K).
    """
    found = _solved(K, k, lambda1, w)
    return jnp.sum(k * found.c, axis=-1), _positive(prior - jnp.sum(k * found.b, axis=-1), prior)


def _positive(variance: Array, prior: Array) -> Array:
    return jnp.maximum(variance, jnp.finfo(variance.dtype).eps * prior)


@moments_given.defjvp
def _moments_given_jvp(primals: tuple, tangents: tuple) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    K, k, prior, lambda1, w = primals
    dK, dk, dprior, dlambda1, dw = tangents
    b, weights, c, near = _solved(K, k, lambda1, w)
    mean, variance = jnp.sum(k * c, axis=-1), _positive(prior - jnp.sum(k * b, axis=-1), prior)
    turned = _times(dK, b)
    dmean = jnp.sum((dk - turned) * c + weights * (dlambda1 - near * dw), axis=-1)
    dvariance = dprior + jnp.sum(b * (turned - 2.0 * dk) - weights * weights * dw, axis=-1)
    return (mean, variance), (dmean, dvariance)


def _blocks(kernel: Callable, x: Array, X: Array) -> tuple[Array, Array, Array]:
    """Prior covariances of rows, with f at an input, and the variance of that."""
    return kernel(X, X), kernel(X, x[None])[..., 0], kernel(x[None])[..., 0]


def _at(sites: SitesOfRows, index: Array) -> SitesOfRows:
    """The sites of some rows; −1 is a site that says nothing."""
    there = index >= 0
    lambda1, w = (jnp.where(there, each[..., index], 0.0) for each in sites[1:])
    return SitesOfRows(sites.X[index], lambda1, w)


def _over_rows(fn: Callable[..., Any], width: int, *rows: Array) -> Any:
    """`fn` of each row, some at a time: what they need is made again for the gradient."""
    N = rows[0].shape[0]
    size = max(min(_BLOCK // max(width * width, 1), N), 1)
    num = -(-N // size)

    def split(x: Array) -> Array:
        return jnp.pad(x, [(0, num * size - N)] + [(0, 0)] * (x.ndim - 1)).reshape(num, size, *x.shape[1:])

    block = jax.checkpoint(lambda rows: jax.vmap(fn)(*rows))
    found = jax.lax.map(block, tuple(split(x) for x in rows))
    return jax.tree.map(lambda x: jnp.moveaxis(x.reshape(-1, *x.shape[2:])[:N], 0, -1), found)


def conditionals(kernel: Callable, X: Array, index: Array, sites: SitesOfRows) -> tuple[Array, Array]:
    """Means and variances of f at inputs given the sites of rows near each, (..., N).

    Args:
        kernel: its kernel.
        X: (N, D).
        index: of the rows, (N, K); −1 for none.
        sites: of all rows.
    """

    def of_row(x: Array, index: Array) -> tuple[Array, Array]:
        near = _at(sites, index)
        return moments_given(*_blocks(kernel, x, near.X), near.lambda1, near.precision)

    return _over_rows(of_row, index.shape[-1], X, index)


def products_of_sites(kernel: Callable, before: Array, sites: SitesOfRows, others: Array) -> tuple[Array, Array]:
    """Log Z at λ₁ = 0, and Σ_n of the products λ₁Σλ₁′ of rows of `others` in the place of λ₁.

    Args:
        kernel: its kernel.
        before: for each row the nearest of those that come before it, (N, K).
        sites: of all rows.
        others: (R, N), or (R, ..., N) for several latents.

    Returns:
        Arrays (...) and (R, R, ...).
    """
    mean, s = conditionals(kernel, sites.X, before, sites._replace(lambda1=others))
    w = sites.precision
    D = 1.0 + w * s
    left, right = others[:, None], others[None]
    mean_left, mean_right = mean[:, None], mean[None]
    products = (left * right * s + left * mean_right + right * mean_left - w * mean_left * mean_right) / D
    return -0.5 * jnp.sum(jnp.log1p(w * s), axis=-1), jnp.sum(products, axis=-1)


def log_normaliser(kernel: Callable, before: Array, sites: SitesOfRows) -> Array:
    """Log Z, (...); arguments as those of `products_of_sites`."""
    log_z, products = products_of_sites(kernel, before, sites, sites.lambda1[None])
    return log_z + 0.5 * products[0, 0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NeighbourCovariance(AbstractCovariance):
    """The covariance between rows, one after the other given those near it.

    Attributes:
        kernel: the prior's.
        X: the rows, (N, D).
        index: the nearest rows of the sites, (N, K).
        sites: in all rows.
    """

    kernel: Any
    X: Array
    index: Array
    sites: SitesOfRows

    @property
    def num_noise(self) -> int | None:
        return None

    def given_inducing(self, Kff: Array) -> Array:
        N = self.X.shape[0]
        noise = jnp.broadcast_to(jnp.eye(N, dtype=Kff.dtype), (*Kff.shape[:-2], N, N))
        root = self._draws(jnp.moveaxis(noise, -2, 0))  # (N, ..., N), linear in the noise
        return jnp.einsum("s...i,s...j->...ij", root, root, precision=jax.lax.Precision.HIGHEST)

    def of_inducing(self) -> Array | None:
        return None

    def variance_of_inducing(self) -> Array | None:
        return None

    def deviation(self, noise: Array) -> Array:
        raise NotImplementedError

    def draw_deviations(self, rng_key: Array, shape: tuple[int, ...]) -> Array:
        axes = self.sites.lambda1.ndim
        many, rest = shape[: len(shape) - axes], shape[len(shape) - axes :]
        noise = jax.random.normal(rng_key, (math.prod(many), *rest), self.X.dtype)
        return self._draws(noise).reshape(shape)

    def _draws(self, noise: Array) -> Array:
        order, before = nearest_before(self.X, self.index.shape[-1])
        return draws(self.kernel, self.X, self.index, order, before, self.sites, noise)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NeighbourRows(AbstractRows):
    """A process in the rows of its sites, and after them in those that are asked for.

    Attributes:
        kernel: its kernel.
        X: all rows, (N, D).
        near: the nearest rows with a site to each, (N, K).
        before: for each row with a site the nearest of those that come before it, (N_sites, K).
        rows: where those are that are asked for, (N_rows,).
    """

    kernel: Any
    X: Array
    near: Array
    before: Array
    rows: Array

    def in_order(self, *values: Array) -> tuple[Array, ...]:
        missing = self.X.shape[0] - values[0].shape[-1]
        return tuple(jnp.pad(value, [(0, 0)] * (value.ndim - 1) + [(0, missing)]) for value in values)

    def given_several(self, lambda1: Array, precision: Array) -> GivenSeveral:
        sites = SitesOfRows(self.X, lambda1, precision)
        mean, variance = conditionals(self.kernel, self.X, self.near, sites)
        N = self.before.shape[0]
        own = SitesOfRows(self.X[:N], lambda1[0, :N], precision[:N])
        log_z, products = products_of_sites(self.kernel, self.before, own, lambda1[:, :N])
        return GivenSeveral(mean, variance, products, log_z)

    def covariance(self, lambda1: Array, precision: Array) -> NeighbourCovariance:
        sites = SitesOfRows(self.X, lambda1, precision)
        return NeighbourCovariance(self.kernel, self.X[self.rows], self.near[self.rows], sites)


def draws(
    kernel: Callable, X: Array, index: Array, order: Array, before: Array, sites: SitesOfRows, noise: Array
) -> Array:
    """Joint draws of f − E f at inputs, one after the other, (S, ..., N).

    Each is conditioned on the sites of the rows near it, and on the values at the nearest of the inputs before it.

    Args:
        kernel: its kernel.
        X: (N, D).
        index: of the rows near each, (N, K).
        order: of the inputs, (N,).
        before: for each input the nearest of those that come before it, (N, K).
        sites: of all rows.
        noise: standard normal numbers, (S, ..., N).
    """
    batch = jnp.broadcast_shapes(sites.lambda1.shape[:-1], kernel(X[:1]).shape[:-1])
    # A value that is known is a site of high precision.
    known = jnp.broadcast_to(1.0 / (_KNOWN * kernel(X)), (*batch, X.shape[0]))

    def of_row(x: Array, index: Array, before: Array) -> tuple[Array, Array]:
        there = jnp.broadcast_to(before >= 0, (*batch, before.shape[-1]))
        near, w = _at(sites, index), jnp.where(there, known[..., before], 0.0)
        precision = jnp.broadcast_to(near.precision, (*batch, index.shape[-1]))
        K, k, prior = _blocks(kernel, x, jnp.concatenate([near.X, X[before]]))
        precision = jnp.concatenate([precision, w], axis=-1)
        found = _solved(K, k, jnp.zeros_like(precision), precision)
        variance = _positive(prior - jnp.sum(k * found.b, axis=-1), prior)
        return found.weights[..., index.shape[-1] :] * w, variance

    weights, variance = _over_rows(of_row, 2 * index.shape[-1], X, index, before)  # (..., K, N) and (..., N)
    pushes = standard_deviation(variance) * noise

    def step(values: Array, i: Array) -> tuple[Array, None]:
        value = jnp.sum(weights[..., i] * values[..., before[i]], axis=-1) + pushes[..., i]
        return values.at[..., i].set(value), None

    return jax.lax.scan(step, jnp.zeros_like(pushes), order)[0]
