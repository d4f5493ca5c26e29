"""A Gaussian process with Gaussian sites, each value conditioned on the nearest rows only.

Let the sites be exp(λ₁ₙ fₙ − ½ wₙ fₙ²). Given those of some rows with kernel matrix K, f at another input has, with
r = √w, A = I + diag(r) K diag(r) and k its covariances with these rows,

    E f = kᵀλ₁ − (r∘k)ᵀA⁻¹(r∘Kλ₁),    Var f = k(x, x) − (r∘k)ᵀA⁻¹(r∘k).

The marginals of q(f) in a group of rows are conditioned on the sites of the group and of the rows near it. The
normaliser is a product over the groups in a random order, each conditioned on the nearest rows N of those before it,

    log Z = Σ_G [log Z(G ∪ N) − log Z(N)],    log Z(T) = ½ λ₁ᵀΣλ₁ − ½ log|A|,    Σ = (K⁻¹ + diag(w))⁻¹ in the rows T.

With Gaussian noise this is the approximate likelihood of Vecchia. All is exact where the nearest rows are all rows.

References:
    Vecchia (1988), "Estimation and model identification for continuous spatial processes"; Guinness (2018),
    "Permutation and grouping methods for sharpening Gaussian process approximations", for random orders and groups;
    Zilber and Katzfuss (2021), "Vecchia-Laplace approximations of generalized Gaussian processes for big non-Gaussian
    spatial data", for outcomes that are not Gaussian.
"""

from collections.abc import Callable
import dataclasses
import math
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp

from numpyro_sgp._internal.eager import as_one_program
from numpyro_sgp.math.linalg import cholesky, solve_lower, solve_lower_transposed
from numpyro_sgp.posteriors.joint.by_rows import AbstractRows, GivenSeveral
from numpyro_sgp.posteriors.moments import AbstractDenseCovariance, standard_deviation
from numpyro_sgp.posteriors.vecchia.neighbours import Neighbourhoods, nearest_before

__all__ = [
    "NeighbourCovariance",
    "NeighbourRows",
    "SitesOfRows",
    "conditionals",
    "draws",
    "log_normaliser",
    "marginals",
    "moments_given",
    "normaliser_of",
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


def _apply(A: Array, B: Array) -> Array:
    """A B, of matrices whose axes in front broadcast."""
    return jnp.matmul(A, B, precision=jax.lax.Precision.HIGHEST)


class _Solved(NamedTuple):
    """What moments and normalisers, and their derivatives, are made of.

    Attributes:
        L: the root of A, (..., K, K).
        r: (..., K).
        c: (I + diag(w) K)⁻¹λ₁, so that E f = kᵀc, (..., K).
        near: E f in the rows, K c, (..., K).
    """

    L: Array
    r: Array
    c: Array
    near: Array

    def turned(self, k: Array) -> Array:
        """r∘A⁻¹(r∘k), (..., K, b), so that Var f = k(x, x) − kᵀ of it."""
        r = self.r[..., None]
        return r * solve_lower_transposed(self.L, solve_lower(self.L, r * k))


def _solved(K: Array, lambda1: Array, w: Array) -> _Solved:
    r = standard_deviation(w)
    L = cholesky(jnp.eye(r.shape[-1], dtype=K.dtype) + r[..., :, None] * K * r[..., None, :])
    first = _Solved(L, r, lambda1, lambda1)
    # λ₁ may have axes in front of those of the kernel and of w, which become columns.
    right = _apply(K, _as_columns(lambda1, L))
    c = lambda1 - _from_columns(first.turned(right), lambda1, L)
    return _Solved(L, r, c, _from_columns(_apply(K, _as_columns(c, L)), c, L))


def _as_columns(x: Array, L: Array) -> Array:
    """(R…, ..., K) to (..., K, R), `...` being the axes in front of L."""
    axes = L.ndim - 2
    x = jnp.broadcast_to(x, (*x.shape[: max(x.ndim - 1 - axes, 0)], *L.shape[:-1]))
    return jnp.moveaxis(x.reshape(-1, *L.shape[:-1]), 0, -1)


def _from_columns(columns: Array, like: Array, L: Array) -> Array:
    axes = L.ndim - 2
    x = jnp.moveaxis(columns, -1, 0)
    return x.reshape(*like.shape[: max(like.ndim - 1 - axes, 0)], *L.shape[:-1])


@jax.custom_jvp
def moments_given(K: Array, k: Array, prior: Array, lambda1: Array, w: Array) -> tuple[Array, Array]:
    """Means and variances of f at b inputs given sites in some rows, with their derivative written out.

    Args:
        K: prior covariance of the rows, (..., K, K).
        k: their covariances with f, (..., K, b).
        prior: variances of f, (..., b).
        lambda1: of the sites, (..., K).
        w: their precisions, (..., K).
    """
    found = _solved(K, lambda1, w)
    return _mean(k, found.c), _positive(prior - jnp.sum(k * found.turned(k), axis=-2), prior)


def _mean(k: Array, c: Array) -> Array:
    return jnp.sum(k * c[..., None], axis=-2)


def _positive(variance: Array, prior: Array) -> Array:
    return jnp.maximum(variance, jnp.finfo(variance.dtype).eps * prior)


@moments_given.defjvp
def _moments_given_jvp(primals: tuple, tangents: tuple) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    K, k, prior, lambda1, w = primals
    dK, dk, dprior, dlambda1, dw = tangents
    found = _solved(K, lambda1, w)
    b, c = found.turned(k), found.c
    weights = k - _apply(K, b)
    mean, variance = _mean(k, c), _positive(prior - jnp.sum(k * b, axis=-2), prior)
    turned = _apply(dK, b)
    dmean = _mean(dk - turned, c) + _mean(weights, dlambda1 - found.near * dw)
    dvariance = dprior + jnp.sum(b * (turned - 2.0 * dk) - weights * weights * dw[..., None], axis=-2)
    return (mean, variance), (dmean, dvariance)


@jax.custom_jvp
def normaliser_of(K: Array, lambda1: Array, w: Array) -> tuple[Array, Array]:
    """−½ log|A|, (...), and R Σ Rᵀ of λ₁ in the rows of R, Σ = (K⁻¹ + diag(w))⁻¹, with their derivative written out.

    Args:
        K: prior covariance of the rows, (..., K, K).
        lambda1: R, (R, ..., K).
        w: precisions, (..., K).
    """
    found = _solved(K, lambda1, w)
    return _half_log_determinant(found.L), jnp.sum(lambda1[:, None] * found.near[None], axis=-1)


def _half_log_determinant(L: Array) -> Array:
    return -jnp.sum(jnp.log(jnp.diagonal(L, axis1=-2, axis2=-1)), axis=-1)


@normaliser_of.defjvp
def _normaliser_of_jvp(primals: tuple, tangents: tuple) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    K, lambda1, w = primals
    dK, dlambda1, dw = tangents
    found = _solved(K, lambda1, w)
    c, near = found.c, found.near
    b = found.turned(K)
    variance = jnp.diagonal(K - _apply(K, b), axis1=-2, axis2=-1)
    precision = found.turned(jnp.eye(K.shape[-1], dtype=K.dtype))  # diag(r) A⁻¹ diag(r)
    dlog = -0.5 * jnp.sum(precision * dK, axis=(-2, -1)) - 0.5 * jnp.sum(variance * dw, axis=-1)
    turned = jnp.sum(dK * c[..., None, :], axis=-1)  # dK c
    left = dlambda1[:, None] * near[None] + near[:, None] * dlambda1[None]
    dproducts = jnp.sum(left + c[:, None] * turned[None] - near[:, None] * near[None] * dw, axis=-1)
    products = jnp.sum(lambda1[:, None] * near[None], axis=-1)
    return (_half_log_determinant(found.L), products), (dlog, dproducts)


def _at(sites: SitesOfRows, index: Array) -> SitesOfRows:
    """The sites of some rows; −1 is a site that says nothing."""
    there = index >= 0
    lambda1, w = (jnp.where(there, each[..., index], 0.0) for each in sites[1:])
    return SitesOfRows(sites.X[index], lambda1, w)


def _over_rows(fn: Callable[..., Any], width: int, *rows: Array) -> Any:
    """`fn` of each row, in front of all else: some at a time, and made again for the gradient."""
    N = rows[0].shape[0]
    size = max(min(_BLOCK // max(width * width, 1), N), 1)
    num = -(-N // size)

    def split(x: Array) -> Array:
        return jnp.pad(x, [(0, num * size - N)] + [(0, 0)] * (x.ndim - 1)).reshape(num, size, *x.shape[1:])

    block = jax.checkpoint(lambda rows: jax.vmap(fn)(*rows))
    found = jax.lax.map(block, tuple(split(x) for x in rows))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:N], found)


@as_one_program
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
        K, k, prior = kernel(near.X, near.X), kernel(near.X, x[None]), kernel(x[None])
        mean, variance = moments_given(K, k, prior, near.lambda1, near.precision)
        return mean[..., 0], variance[..., 0]

    found = _over_rows(of_row, index.shape[-1], X, index)
    mean, variance = (jnp.moveaxis(x, 0, -1) for x in found)
    return mean, variance


@as_one_program
def marginals(kernel: Callable, members: Array, near: Array, sites: SitesOfRows) -> tuple[Array, Array]:
    """Means and variances of f in the rows of the sites, given those of their group and near it, (..., N).

    Args:
        kernel: its kernel.
        members: of each group, (G, b); −1 for none.
        near: rows near each, (G, K).
        sites: of all rows.
    """

    def of_group(members: Array, near: Array) -> tuple[Array, Array]:
        own, both = sites.X[members], _at(sites, jnp.concatenate([members, near]))
        return moments_given(kernel(both.X, both.X), kernel(both.X, own), kernel(own), both.lambda1, both.precision)

    def in_rows(x: Array) -> Array:  # (G, ..., b)
        N = sites.X.shape[0]
        x = jnp.moveaxis(x, 0, -2).reshape(*x.shape[1:-1], -1)
        where = jnp.where(members < 0, N, members).ravel()
        return jnp.zeros((*x.shape[:-1], N), x.dtype).at[..., where].set(x, mode="drop")

    mean, variance = _over_rows(of_group, members.shape[-1] + near.shape[-1], members, near)
    return in_rows(mean), in_rows(variance)


@as_one_program
def products_of_sites(
    kernel: Callable, members: Array, before: Array, sites: SitesOfRows, others: Array
) -> tuple[Array, Array]:
    """Log Z at λ₁ = 0, and the products R Σ Rᵀ of rows R of `others` in the place of λ₁.

    Args:
        kernel: its kernel.
        members: of each group, (G, b); −1 for none.
        before: the nearest rows of groups that come before each, (G, K).
        sites: of all rows.
        others: (R, N), or (R, ..., N) for several latents.

    Returns:
        Arrays (...) and (R, R, ...).
    """
    sites = sites._replace(lambda1=others)

    def of_group(members: Array, before: Array) -> tuple[Array, Array]:
        both = _at(sites, jnp.concatenate([before, members]))
        K, num = kernel(both.X, both.X), before.shape[0]
        log_z, products = normaliser_of(K, both.lambda1, both.precision)
        without = normaliser_of(K[..., :num, :num], both.lambda1[..., :num], both.precision[..., :num])
        return log_z - without[0], products - without[1]

    found = _over_rows(of_group, members.shape[-1] + before.shape[-1], members, before)
    log_z, products = (jnp.sum(x, axis=0) for x in found)
    return log_z, products


def log_normaliser(kernel: Callable, members: Array, before: Array, sites: SitesOfRows) -> Array:
    """Log Z, (...); arguments as those of `products_of_sites`."""
    log_z, products = products_of_sites(kernel, members, before, sites, sites.lambda1[None])
    return log_z + 0.5 * products[0, 0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NeighbourCovariance(AbstractDenseCovariance):
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

    def given_inducing(self, Kff: Array) -> Array:
        N = self.X.shape[0]
        noise = jnp.broadcast_to(jnp.eye(N, dtype=Kff.dtype), (*Kff.shape[:-2], N, N))
        root = self._draws(jnp.moveaxis(noise, -2, 0))  # (N, ..., N), linear in the noise
        return jnp.einsum("s...i,s...j->...ij", root, root, precision=jax.lax.Precision.HIGHEST)

    def draw_deviations(self, rng_key: Array, shape: tuple[int, ...]) -> Array:
        axes = self.sites.lambda1.ndim
        many, rest = shape[: len(shape) - axes], shape[len(shape) - axes :]
        noise = jax.random.normal(rng_key, (math.prod(many), *rest), self.X.dtype)
        return self._draws(noise).reshape(shape)

    def _draws(self, noise: Array) -> Array:
        if not self.X.shape[0]:
            return noise
        order, before = nearest_before(self.X, self.index.shape[-1])
        return draws(self.kernel, self.X, self.index, order, before, self.sites, noise)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NeighbourRows(AbstractRows):
    """A process in the rows of its sites, and after them in those that are asked for.

    Attributes:
        kernel: its kernel.
        X: all rows, (N, D).
        places: groups of the rows with a site.
        index: the nearest rows with a site to each row after them, (N − N_sites, K); none in training.
        order: 0 to N − 1.
        rows: where those are that are asked for, (N_rows,).
    """

    kernel: Any
    X: Array
    places: Neighbourhoods
    index: Array
    order: Array
    rows: Array

    def given_several(self, lambda1: Array, precision: Array) -> GivenSeveral:
        members, near, before = self.places.indices
        N = self.X.shape[0] - self.index.shape[0]
        own = SitesOfRows(self.X[:N], lambda1[:, :N], precision[:N])
        mean, variance = marginals(self.kernel, members, near, own)
        log_z, products = products_of_sites(self.kernel, members, before, own, own.lambda1)
        if self.index.shape[0]:
            found = conditionals(self.kernel, self.X[N:], self.index, own)
            mean, variance = (jnp.concatenate(pair, axis=-1) for pair in zip((mean, variance), found, strict=True))
        return GivenSeveral(mean, variance, products, log_z)

    def covariance(self, lambda1: Array, precision: Array) -> NeighbourCovariance:
        sites = SitesOfRows(self.X, lambda1, precision)
        return NeighbourCovariance(self.kernel, self.X[self.rows], self.index, sites)


@as_one_program
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
        rows = jnp.concatenate([near.X, X[before]])
        K, k, prior = kernel(rows, rows), kernel(rows, x[None]), kernel(x[None])
        precision = jnp.concatenate([precision, w], axis=-1)
        b = _solved(K, jnp.zeros_like(precision), precision).turned(k)
        weights, variance = k - _apply(K, b), _positive(prior - jnp.sum(k * b, axis=-2), prior)
        return weights[..., index.shape[-1] :, 0] * w, variance[..., 0]

    found = _over_rows(of_row, 2 * index.shape[-1], X, index, before)
    weights, variance = (jnp.moveaxis(x, 0, -1) for x in found)  # (..., K, N) and (..., N)
    pushes = standard_deviation(variance) * noise

    def step(values: Array, i: Array) -> tuple[Array, None]:
        value = jnp.sum(weights[..., i] * values[..., before[i]], axis=-1) + pushes[..., i]
        return values.at[..., i].set(value), None

    return jax.lax.scan(step, jnp.zeros_like(pushes), order)[0]
