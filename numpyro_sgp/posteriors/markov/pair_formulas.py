"""Smoothing of Gaussian sites on pairs of neighbouring states, in O(M) for M inducing times.

The inducing variables are the states x₁, ..., x_M of a Markov process at times z₁ < ... < z_M. Between two of these f
is known from their pair yⱼ = (xⱼ, xⱼ₊₁) alone,

    f(t) = a(t)ᵀyⱼ + r(t),        r independent of all states, with the variance of a bridge,

so that sites exp(lₙ aₙᵀy − ½ pₙ (aₙᵀy)²) of the rows between two times are one site exp(λⱼᵀyⱼ − ½ yⱼᵀΛⱼyⱼ) of the pair.
Before the first time and after the last f is known from the nearest state.

The site of a pair is the product of K = 2d sites of single numbers: with Λ = U D Uᵀ, U triangular in some order of
the numbers and D diagonal, and c = U⁻¹λ, those of c_k h_kᵀy − ½ D_k (h_kᵀy)², h_k the columns of U. So with m and P
mean and covariance of xⱼ from the pairs before, the pair has the mean H m and the covariance H P Hᵀ + diag(0, Q), H =
[I, Aᵀ]ᵀ, and filter and smoother take in one number after the other: with φ = P h, s = hᵀφ, μ = hᵀm, and D, e and W
as in `formulas`,

    filter:    m⁺ = m + φ e,   P⁺ = C P Cᵀ + φ φᵀ D_k/D²,   C = I − φ hᵀ W
    smoother:  g = Cᵀg⁺ − h e,   G = Cᵀ G⁺ C + h hᵀ W

The smoother keeps a root of G, in which what precise sites say of some directions leaves the digits of the others: G =
R Rᵀ + E, where Cᵀ R and h √W side by side become a square matrix again by a rotation, and E is what sites of negative
precision say. After its sites let the pair have mean and covariance μ and V. With g and G of the state after it,

    marginals: E y = μ − V Bᵀg,   Cov y = V − V BᵀG B V,   B = [0, I].

References:
    Adam, Eleftheriadis, Durrande, Artemev and Hensman (2020), "Doubly sparse variational Gaussian processes", for
    states as inducing variables; Wilkinson, Solin and Adam (2021), "Sparse algorithms for Markovian Gaussian
    processes", for sites on pairs of them.
"""

import dataclasses
from typing import NamedTuple

import jax
from jax import Array, lax
import jax.numpy as jnp

from numpyro_sgp.math.linalg import diagonal
from numpyro_sgp.math.products import matvec
from numpyro_sgp.posteriors.markov.formulas import site_update, small_product, two_passes
from numpyro_sgp.posteriors.markov.state_space import AbstractStateSpace

__all__ = ["PairProjections", "SmoothedPairs", "pair_projections", "smoothed_pairs"]


class PairProjections(NamedTuple):
    """f at N times as known from the pairs of states around them.

    Attributes:
        pair: which pair that is, (N,).
        a: (..., N, 2d).
        rest: Var(r), (..., N).
    """

    pair: Array
    a: Array
    rest: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SmoothedPairs:
    """What the smoother says of each pair.

    Attributes:
        mean: (..., J, 2d).
        covariance: (..., J, 2d, 2d), with axes of length 1 where λ alone has them.
        log_normaliser: log Z, (...).
    """

    mean: Array
    covariance: Array
    log_normaliser: Array


def _inverse(Q: Array) -> Array:
    """The inverse of a covariance of which some numbers may have no variance: these have none there, either."""
    variances = diagonal(Q)
    tiny = jnp.finfo(Q.dtype).tiny ** 0.5
    has_variance = variances > tiny
    scale = jnp.where(has_variance, 1.0 / jnp.sqrt(jnp.where(has_variance, variances, 1.0)), 0.0)
    both = scale[..., :, None] * scale[..., None, :]
    d = Q.shape[-1]
    # States of products of kernels may be all but dependent over a short time.
    added = jnp.where(has_variance, 10.0 * d * jnp.finfo(Q.dtype).eps, 1.0)
    return both * jnp.linalg.inv(both * Q + added[..., :, None] * jnp.eye(d, dtype=Q.dtype))


def pair_projections(model: AbstractStateSpace, Z: Array, times: Array) -> PairProjections:
    """What pairs of states say of f at some times.

    Args:
        model: the process.
        Z: inducing times, in ascending order, (M,).
        times: (N,).
    """
    h, P = jnp.asarray(model.h, times.dtype), model.covariance[..., None, :, :]
    pair = jnp.clip(jnp.searchsorted(Z, times, side="right") - 1, 0, Z.shape[0] - 2)
    first, last = Z[pair], Z[pair + 1]
    inside = jnp.clip(times, first, last)
    before, after = jnp.maximum(first - times, 0.0), jnp.maximum(times - last, 0.0)
    lags = jnp.concatenate([inside - first, last - inside, before + after])
    A_start, A_end, A_out = jnp.split(model.transition(lags), 3, axis=-3)
    # Outside, f is known from the state at the nearest time: forwards by A, backwards by P Aᵀ P⁻¹.
    backwards = matvec(_inverse(P), matvec(A_out, matvec(P, h)))
    seen = jnp.where((before > 0.0)[..., None], backwards, matvec(A_out.mT, h))
    outside = jnp.sum(h * matvec(P, h), axis=-1) - jnp.sum(seen * matvec(P, seen), axis=-1)
    # Inside, the part of the last state that the first does not know tells of the noise between.
    Q, of_start = model.noise(jnp.diff(Z)), matvec(model.noise(inside - first), seen)
    to_end = matvec(A_end, of_start)
    a_last = matvec(_inverse(Q)[..., pair, :, :], to_end)
    a_first = matvec(A_start.mT, seen - matvec(A_end.mT, a_last))
    between = jnp.sum(seen * of_start, axis=-1) - jnp.sum(a_last * to_end, axis=-1)
    rest = jnp.maximum(outside, 0.0) + jnp.maximum(between, 0.0)
    return PairProjections(pair, jnp.concatenate([a_first, a_last], axis=-1), rest)


def _single_sites(linear: Array, precision: Array, variances: Array) -> tuple[Array, Array, Array]:
    """The sites of single numbers: c, (..., K), D, (..., K), and the vectors h_k in rows, (..., K, K).

    Numbers are taken in the order of what is left of their precision beside the prior's, so that no number of an h_k
    is large, and what is left in the end, where Λ is singular as that of few rows is, is rounding.

    Args:
        linear: λ, (..., K).
        precision: Λ, (..., K, K).
        variances: of the numbers under the prior, (..., K).
    """
    K, dtype = precision.shape[-1], precision.dtype
    largest = jnp.max(jnp.abs(diagonal(precision)) * variances, axis=-1)

    def step(state: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], tuple[Array, Array, Array]]:
        rest, is_left = state
        pivots = diagonal(rest)
        relative = jnp.where(is_left, jnp.abs(pivots) * variances, -1.0)
        unit = jax.nn.one_hot(jnp.argmax(relative, axis=-1), K, dtype=dtype)
        is_known = jnp.max(relative, axis=-1) <= K * jnp.finfo(dtype).eps * largest  # from the numbers before it
        D = jnp.where(is_known, 0.0, jnp.sum(pivots * unit, axis=-1))
        column = jnp.sum(rest * unit[..., None, :], axis=-1) / jnp.where(is_known, 1.0, D)[..., None]
        is_left = is_left & (unit == 0.0)
        h = unit + jnp.where(is_left & ~is_known[..., None], column, 0.0)
        return (rest - D[..., None, None] * h[..., :, None] * h[..., None, :], is_left), (h, D, unit)

    def coefficient(rest: Array, known: tuple[Array, Array]) -> tuple[Array, Array]:
        h, unit = known
        c = jnp.sum(rest * unit, axis=-1)
        return rest - c[..., None] * h, c

    _, (h, D, unit) = lax.scan(step, (precision, jnp.ones(precision.shape[:-1], bool)), None, length=K)
    _, c = lax.scan(coefficient, linear, (h, unit))
    return jnp.moveaxis(c, 0, -1), jnp.moveaxis(D, 0, -1), jnp.moveaxis(h, 0, -2)


class _ScalarUpdate(NamedTuple):
    """What the filter leaves for the smoother of a site of one number: e, W (...), φ and h (..., K)."""

    e: Array
    W: Array
    phi: Array
    h: Array


class _Kept(NamedTuple):
    """What the filter leaves for the smoother of a pair: after its sites μ and V, these, and A."""

    mean: Array
    V: Array
    updates: _ScalarUpdate
    A: Array


def _at_scalar_site(m: Array, P: Array, c: Array, D: Array, h: Array) -> tuple[Array, Array, _ScalarUpdate, Array]:
    """The pair after a site of one number, and the site's part of log Z."""
    phi = jnp.sum(P * h[..., None, :], axis=-1)
    site, log_z = site_update(jnp.sum(m * h, axis=-1), jnp.sum(phi * h, axis=-1), c, D)
    m = m + phi * site.e[..., None]
    # C P Cᵀ + φφᵀ W/D: after a precise outcome rounding is small beside what is left of P.
    scaled = phi * site.W[..., None]
    half = P - scaled[..., :, None] * phi[..., None, :]  # C P
    column = jnp.sum(half * h[..., None, :], axis=-1)
    outer = phi[..., :, None] * phi[..., None, :] * (site.W / site.D)[..., None, None]
    P = half - column[..., :, None] * scaled[..., None, :] + outer
    return m, 0.5 * (P + P.mT), _ScalarUpdate(site.e, site.W, phi, h), log_z


def _forward(state: tuple[Array, Array], known: tuple) -> tuple[tuple[Array, Array], tuple[_Kept, Array]]:
    m, P = state
    A, Q, c, D, h = known
    d = m.shape[-1]
    AP = small_product(A, P)
    upper = jnp.concatenate([P, AP.mT], axis=-1)
    S = jnp.concatenate([upper, jnp.concatenate([AP, small_product(AP, A.mT) + Q], axis=-1)], axis=-2)
    mu = jnp.concatenate([m, small_product(A, m[..., None])[..., 0]], axis=-1)

    def site(state: tuple[Array, Array], known: tuple[Array, Array, Array]) -> tuple[tuple[Array, Array], tuple]:
        m, P, update, log_z = _at_scalar_site(*state, *known)
        return (m, P), (update, log_z)

    sites = jnp.moveaxis(c, -1, 0), jnp.moveaxis(D, -1, 0), jnp.moveaxis(h, -2, 0)
    (mean, V), (updates, log_z) = lax.scan(site, (mu, S), sites)
    return (mean[..., d:], V[..., d:, d:]), (_Kept(mean, V, updates, A), jnp.sum(log_z, axis=0))


def _rotated(X: Array) -> tuple[Array, Array]:
    """R and E with R Rᵀ + E = X Xᵀ, R (..., d, d), of X (..., d, k): E is rounding.

    The rotation is a constant where derivatives are taken. They are exact, since the sum is X Xᵀ for any rotation: R
    has those of first order, and E the others.
    """
    Q = jnp.linalg.qr(lax.stop_gradient(X).mT)[0]
    R = small_product(X, Q)
    rest = X - small_product(R, Q.mT)
    return R, small_product(rest, rest.mT)


def _before_scalar_site(
    state: tuple[Array, Array, Array], update: _ScalarUpdate, column: Array
) -> tuple[tuple[Array, Array, Array], None]:
    """Before a site g, and the parts X and E of G = X Xᵀ + E; the site has a column of X, (d + K,) zeros and a one."""
    g, X, E = state
    phi, h, W = update.phi, update.h, update.W
    g = g - h * (W * jnp.sum(phi * g, axis=-1) + update.e)[..., None]
    has_root = W > 0.0
    root = jnp.where(has_root, jnp.sqrt(jnp.where(has_root, W, 1.0)), 0.0)
    phi_X = jnp.sum(phi[..., :, None] * X, axis=-2)
    X = X + h[..., :, None] * (root[..., None] * column - W[..., None] * phi_X)[..., None, :]
    phi_E = jnp.sum(phi[..., :, None] * E, axis=-2)
    across = (W[..., None] * phi_E)[..., :, None] * h[..., None, :]
    own = jnp.where(has_root, 0.0, W) + W**2 * jnp.sum(phi_E * phi, axis=-1)
    return (g, X, E - across - across.mT + own[..., None, None] * h[..., :, None] * h[..., None, :]), None


def _backward(state: tuple[Array, Array, Array], kept: _Kept) -> tuple[tuple[Array, Array, Array], tuple[Array, Array]]:
    """Before a pair g, R and E, and the marginals of the pair."""
    g, R, E = state
    d = g.shape[-1]
    to_end = kept.V[..., :, d:]
    mean = kept.mean - small_product(to_end, g[..., None])[..., 0]
    seen = small_product(to_end, R)
    covariance = kept.V - small_product(seen, seen.mT) - small_product(small_product(to_end, E), to_end.mT)
    K = 2 * d
    g = jnp.concatenate([jnp.zeros_like(g), g], axis=-1)
    in_front = [(0, 0)] * (R.ndim - 2)
    X, E = jnp.pad(R, [*in_front, (d, 0), (0, K)]), jnp.pad(E, [*in_front, (d, 0), (d, 0)])
    columns = jnp.eye(d + K, dtype=R.dtype)[d:]
    (g, X, E), _ = lax.scan(
        lambda state, known: _before_scalar_site(state, *known), (g, X, E), (kept.updates, columns), reverse=True
    )

    def turned(X: Array) -> Array:
        """HᵀX."""
        return X[..., :d, :] + small_product(kept.A.mT, X[..., d:, :])

    R, rest = _rotated(turned(X))
    E = turned(turned(E).mT) + rest
    return (turned(g[..., None])[..., 0], R, E), (mean, covariance)


def smoothed_pairs(model: AbstractStateSpace, intervals: Array, linear: Array, precision: Array) -> SmoothedPairs:
    """Moments of each pair, and log Z of the sites, in O(M d³).

    Args:
        model: the process; its hyperparameters have the leading axes of the sites, or broadcast to them.
        intervals: between inducing times, (J,).
        linear: λ, (..., J, 2d).
        precision: Λ, (..., J, 2d, 2d).
    """
    P = model.covariance
    # Covariances do not depend on λ.
    of_covariance = jnp.broadcast_shapes(P.shape[:-2], precision.shape[:-3])
    batch = jnp.broadcast_shapes(of_covariance, linear.shape[:-2])
    of_covariance = (1,) * (len(batch) - len(of_covariance)) + of_covariance
    linear = jnp.broadcast_to(linear, (*batch, *linear.shape[-2:]))
    precision = jnp.broadcast_to(precision, (*of_covariance, *precision.shape[-3:]))
    P = jnp.broadcast_to(P, (*of_covariance, *P.shape[-2:]))
    m = jnp.zeros((*batch, P.shape[-1]), P.dtype)

    def steps(block: tuple) -> tuple:
        intervals, *sites = block
        A, Q = model.transition(intervals), model.noise(intervals)
        A, Q = (jnp.broadcast_to(each, (*of_covariance, *each.shape[-3:])) for each in (A, Q))
        return jnp.moveaxis(A, -3, 0), jnp.moveaxis(Q, -3, 0), *sites

    nothing, variances = jnp.zeros_like(P), diagonal(P)
    c, D, h = _single_sites(linear, precision, jnp.concatenate([variances, variances], axis=-1)[..., None, :])
    rows = intervals, jnp.moveaxis(c, -2, 0), jnp.moveaxis(D, -2, 0), jnp.moveaxis(h, -3, 0)
    (mean, covariance), log_z = two_passes(
        (m, P), rows, _forward, _backward, steps, end=(jnp.zeros_like(m), nothing, nothing)
    )
    return SmoothedPairs(jnp.moveaxis(mean, 0, -2), jnp.moveaxis(covariance, 0, -3), log_z)
