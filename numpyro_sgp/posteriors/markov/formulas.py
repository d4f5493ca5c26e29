"""Smoothing of Gaussian sites on a Markov process, in O(N): marginals, divergence and draws.

The posterior is q(f) ∝ p(f) Π_n exp(λ₁ₙ fₙ − ½ wₙ fₙ²), at times in ascending order. A Kalman filter runs forwards and
a modified Bryson-Frazier smoother backwards, which inverts nothing. The state is taken with f itself as its first
number; then what a site does to it is known without cancellation, however precise the site is. With m⁻, P⁻ the
prediction of the state from the sites before it, φ the first column of P⁻, s and μ the first numbers of φ and m⁻, D =
1 + w s, e = (λ₁ − w μ)/D, W = w/D, and C the identity but for its first column, c = (1/D, −W φ₂, ..., −W φ_d),

    filter:    m = m⁻ + φ e,   P = P⁻ − W φ φᵀ, of which the first row and column are φ/D
    smoother:  g⁻ = Cᵀg − e₁ e,   G⁻ = Cᵀ G C + e₁ e₁ᵀ W,   g = Aᵀg⁻,   G = AᵀG⁻A   (of the time before)
    marginals: E f = μ + s e − φᵀg/D,   Var f = s/D − φᵀ G φ / D²
    log Z = Σ [ ½ (λ₁² s + 2 λ₁ μ − w μ²)/D − ½ log D ],   KL = Σ [ λ₁ m − ½ w (m² + v) ] − log Z

Sites are natural parameters, so that w = 0 is a time without an outcome.

References:
    Bierman (1973), "Fixed interval smoothing with discrete measurements", for the smoother; Särkkä and García-Fernández
    (2021), "Temporal parallelization of Bayesian smoothers", for the filter as an associative scan.
"""

from collections.abc import Callable
import dataclasses
import math
from typing import Any, NamedTuple

import jax
from jax import Array, lax
import jax.numpy as jnp
import numpy as np

from numpyro_sgp.math.products import matmul, matvec
from numpyro_sgp.posteriors.markov.state_space import AbstractStateSpace

__all__ = ["SiteUpdate", "Smoothed", "site_update", "small_product", "smoothed", "state_draws", "two_passes"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Smoothed:
    """What the smoother says of each time.

    Attributes:
        mean: (..., N).
        variance: (..., N), with axes of length 1 where λ₁ alone has them.
        log_normaliser: log Z, (...).
    """

    mean: Array
    variance: Array
    log_normaliser: Array

    def divergence(self, lambda1: Array, precision: Array) -> Array:
        """KL(q ‖ p), (...)."""
        sites = lambda1 * self.mean - 0.5 * precision * (self.mean**2 + self.variance)
        return jnp.sum(sites, axis=-1) - self.log_normaliser


class SiteUpdate(NamedTuple):
    """What a site exp(λ₁ f − ½ w f²) makes of f ~ N(μ, s): scalars (...), as named above."""

    mu: Array
    s: Array
    D: Array
    e: Array
    W: Array


def site_update(mu: Array, s: Array, lambda1: Array, w: Array) -> tuple[SiteUpdate, Array]:
    """What a site makes of f ~ N(μ, s), and log E exp(λ₁ f − ½ w f²)."""
    D = 1.0 + w * s
    log_z = 0.5 * (lambda1 * lambda1 * s + 2.0 * lambda1 * mu - w * mu * mu) / D - 0.5 * jnp.log1p(w * s)
    return SiteUpdate(mu, s, D, (lambda1 - w * mu) / D, w / D), log_z


class _Kept(NamedTuple):
    """What the filter leaves for the smoother at one time, or at each: the site's update, φ (..., d), A (..., d, d)."""

    site: SiteUpdate
    phi: Array
    A: Array

    @property
    def c(self) -> Array:
        """The first column of C, (..., d)."""
        return _first_number(1.0 / self.site.D, -self.site.W[..., None] * self.phi)


# A scan of sums is one loop of the compiler, where products of matrices are a call each. Measured on a CPU: a quarter
# of the time with 4 and 8 states, half with 14, five times as long with 26.
_FEW_STATES = 16


def small_product(A: Array, B: Array) -> Array:
    """A B of small matrices."""
    if A.shape[-1] > _FEW_STATES:
        return matmul(A, B)
    return jnp.sum(A[..., :, :, None] * B[..., None, :, :], axis=-2)


def _times(A: Array, x: Array) -> Array:
    """A x."""
    return jnp.sum(A * x[..., None, :], axis=-1)


def _first_number(first: Array, x: Array) -> Array:
    """X with another first number."""
    return jnp.where(np.arange(x.shape[-1]) == 0, first[..., None], x)


def _first_row_and_column(x: Array, X: Array) -> Array:
    """A symmetric matrix X with x as its first row and column."""
    is_first = np.arange(X.shape[-1]) == 0
    return jnp.where(is_first[:, None], x[..., None, :], jnp.where(is_first, x[..., :, None], X))


def _at_site(m: Array, P: Array, A: Array, lambda1: Array, w: Array) -> tuple[Array, Array, _Kept, Array]:
    """The state after a site, from the prediction before it; and the site's part of log Z."""
    phi = P[..., 0]
    site, log_z = site_update(m[..., 0], phi[..., 0], lambda1, w)
    m = m + phi * site.e[..., None]
    P = P - site.W[..., None, None] * phi[..., :, None] * phi[..., None, :]
    return m, _first_row_and_column(phi / site.D[..., None], P), _Kept(site, phi, A), log_z


def _forward(state: tuple[Array, Array], step: tuple) -> tuple[tuple[Array, Array], tuple[_Kept, Array]]:
    m, P = state
    A, Q, lambda1, w = step
    P = small_product(small_product(A, P), A.mT) + Q
    m, P, kept, log_z = _at_site(_times(A, m), 0.5 * (P + P.mT), A, lambda1, w)
    return (m, P), (kept, log_z)


def _marginals(kept: _Kept, g: Array, G: Array) -> tuple[Array, Array]:
    site, phi_g = kept.site, jnp.sum(kept.phi * g, axis=-1)
    phi_G_phi = jnp.sum(kept.phi * _times(G, kept.phi), axis=-1)
    mean = site.mu + site.s * site.e - phi_g / site.D
    variance = site.s / site.D - phi_G_phi / site.D**2
    return mean, jnp.maximum(variance, jnp.finfo(variance.dtype).eps * site.s)


def _backward(state: tuple[Array, Array], kept: _Kept) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Of the time before g and G, and the marginals of this one."""
    g, G = state
    found = _marginals(kept, g, G)
    c, A_t = kept.c, kept.A.mT
    g = _first_number(jnp.sum(c * g, axis=-1) - kept.site.e, g)
    across = _times(G, c)
    G = _first_row_and_column(_first_number(jnp.sum(c * across, axis=-1) + kept.site.W, across), G)
    return (_times(A_t, g), small_product(small_product(A_t, G), kept.A)), found


def _from_f(h: np.ndarray, X: Array) -> Array:
    """T X, where T x has f = hᵀx as its first number and the others of x (h₁ = 1)."""
    others = [float(each) * X[..., j, :] for j, each in enumerate(h) if j and each]
    first = sum(others, start=X[..., 0, :])
    return jnp.concatenate([first[..., None, :], X[..., 1:, :]], axis=-2)


def _steps_from_f(model: AbstractStateSpace, interval: Array) -> tuple[Array, Array]:
    """Transitions and noise of a state with f as its first number, T A T⁻¹ and T Q Tᵀ, (..., N, d, d)."""
    A, Q, h = model.transition(interval), model.noise(interval), model.h
    if not np.any(h[1:]):
        return A, Q
    h = np.asarray(h, A.dtype)
    A = _from_f(h, A)
    return A - np.append(0.0, h[1:]).astype(h.dtype) * A[..., :1], _from_f(h, _from_f(h, Q).mT)


def _first_axis(x: Array, axis: int) -> Array:
    return jnp.moveaxis(x, axis, 0)


def _chunks(*rows: Array) -> tuple[Array, ...]:
    """Arrays with K rows as (√K, √K, ...): rows of zeros are added at the end."""
    K = rows[0].shape[0]
    size = math.isqrt(max(K - 1, 0)) + 1
    num = -(-K // size)

    def split(x: Array) -> Array:
        x = jnp.pad(x, [(0, num * size - K)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(num, size, *x.shape[1:])

    return tuple(split(x) for x in rows)


def smoothed(
    model: AbstractStateSpace, interval: Array, lambda1: Array, precision: Array, *, parallel: bool = False
) -> Smoothed:
    """Marginals of q(f) at each time, and log Z.

    Only the states at every √N-th time are kept, and the others made again backwards: memory is that of 2√N states.

    Args:
        model: the process; its hyperparameters have the leading axes of the sites, or broadcast to them.
        interval: from the time before, (N,); that of the first time is not used.
        lambda1: λ₁, (..., N).
        precision: w ≥ 0, (..., N).
        parallel: as associative scans, for an accelerator: more operations in log N rounds, all states in memory.
    """
    h = np.asarray(model.h, lambda1.dtype)
    P = _from_f(h, _from_f(h, model.covariance).mT)
    # Covariances do not depend on λ₁.
    of_covariance = jnp.broadcast_shapes(P.shape[:-2], precision.shape[:-1])
    batch = jnp.broadcast_shapes(of_covariance, lambda1.shape[:-1])
    of_covariance = (1,) * (len(batch) - len(of_covariance)) + of_covariance
    lambda1 = jnp.broadcast_to(lambda1, (*batch, lambda1.shape[-1]))
    w = jnp.broadcast_to(precision, (*of_covariance, precision.shape[-1]))
    P = jnp.broadcast_to(P, (*of_covariance, *P.shape[-2:]))
    m = jnp.zeros((*batch, P.shape[-1]), P.dtype)
    interval = interval.at[0].set(0.0)
    if parallel:
        return _smoothed_in_parallel(model, m, P, interval, lambda1, w)
    sites = (_first_axis(site, -1) for site in (lambda1, w))

    def steps(block: tuple) -> tuple:
        interval, *sites = block
        each_step = _steps_from_f(model, interval)
        A, Q = (jnp.broadcast_to(each, (*of_covariance, *each.shape[-3:])) for each in each_step)
        return _first_axis(A, -3), _first_axis(Q, -3), *sites

    found, log_z = two_passes((m, P), (interval, *sites), _forward, _backward, steps)
    mean, variance = (jnp.moveaxis(x, 0, -1) for x in found)
    return Smoothed(mean, variance, log_z)


def two_passes(
    start: tuple[Array, Array],
    rows: tuple[Array, ...],
    forward: Callable[[tuple, tuple], tuple[tuple, tuple]],
    backward: Callable[[tuple, Any], tuple[tuple, Any]],
    steps: Callable[[tuple], tuple] = lambda block: block,
    *,
    end: tuple | None = None,
) -> tuple[Any, Array]:
    """A filter forwards and a smoother backwards, which keep the states at every √K-th of K rows.

    Args:
        start: the filter's first state.
        rows: arrays with K rows in front. Rows of zeros, which are added at the end, must say nothing.
        forward: from a state and a row to the next state, and what is kept for the smoother with the row's log Z.
        backward: from a state of the smoother and what was kept to its next state, and what it finds.
        steps: what `forward` gets of some rows at once.
        end: what the smoother starts with; None for zeros in the shape of `start`.

    Returns:
        What the smoother finds, with the rows in front, and the sum of log Z.
    """
    K = rows[0].shape[0]

    def filtered(state: tuple, block: tuple, kept: int) -> tuple[tuple, Any]:
        """What `forward` says of each row of a block, its first part or its second."""

        def step(state: tuple, known: tuple) -> tuple[tuple, Any]:
            state, found = forward(state, known)
            return state, found[kept]

        return lax.scan(step, state, steps(block))

    @jax.checkpoint
    def forwards(state: tuple, block: tuple) -> tuple[tuple, tuple]:
        after, log_z = filtered(state, block, 1)
        return after, (state, jnp.sum(log_z, axis=0))

    @jax.checkpoint
    def backwards(state: tuple, known: tuple) -> tuple[tuple, Any]:
        start, block = known
        _, updates = filtered(start, block, 0)
        return lax.scan(backward, state, updates, reverse=True)

    blocks = _chunks(*rows)
    _, (starts, log_z) = lax.scan(forwards, start, blocks)
    if end is None:
        end = jax.tree.map(jnp.zeros_like, start)
    _, found = lax.scan(backwards, end, (starts, blocks), reverse=True)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:K], found), jnp.sum(log_z, axis=0)


def _smoothed_in_parallel(
    model: AbstractStateSpace, m: Array, P: Array, interval: Array, lambda1: Array, w: Array
) -> Smoothed:
    batch, d = P.shape[:-2], P.shape[-1]
    A, Q = (
        _first_axis(jnp.broadcast_to(each, (*batch, *each.shape[-3:])), -3) for each in _steps_from_f(model, interval)
    )
    lambda1, w = (_first_axis(each, -1) for each in (lambda1, w))
    # The first state comes from nothing: A = 0, and its noise is P.
    first = jnp.arange(len(interval)).reshape(-1, *(1,) * (A.ndim - 1)) == 0
    from_before, Q = jnp.where(first, 0.0, A), jnp.where(first, P, Q)

    # p(x_k | x_{k−1}, site k) = N(F x + b, Σ), and the site as a function of x_{k−1}, exp(ηᵀx − ½ xᵀJx).
    phi, row = Q[..., 0], from_before[..., 0, :]
    D = 1.0 + w * phi[..., 0]
    W = (w / D)[..., None]
    F = from_before - (W * phi)[..., :, None] * row[..., None, :]
    F = jnp.concatenate([(row / D[..., None])[..., None, :], F[..., 1:, :]], axis=-2)
    Sigma = _first_row_and_column(phi / D[..., None], Q - (W * phi)[..., :, None] * phi[..., None, :])
    linear = (lambda1 / D)[..., None]
    elements = (F, phi * linear, Sigma, row * linear, (W * row)[..., :, None] * row[..., None, :])
    eye = jnp.eye(d, dtype=P.dtype)

    def after(one: tuple, two: tuple) -> tuple:
        F1, b1, S1, eta1, J1 = one
        F2, b2, S2, eta2, J2 = two
        inverse = jnp.linalg.inv(eye + matmul(S1, J2))
        FI = matmul(F2, inverse)
        b = matvec(FI, b1 + matvec(S1, eta2)) + b2
        S = matmul(matmul(FI, S1), F2.mT) + S2
        IF = matmul(F1.mT, inverse.mT)
        eta = matvec(IF, eta2 - matvec(J2, b1)) + eta1
        J = matmul(matmul(IF, J2), F1) + J1
        return matmul(FI, F1), b, 0.5 * (S + S.mT), eta, 0.5 * (J + J.mT)

    _, m_after, P_after, _, _ = lax.associative_scan(after, elements)
    m_before = jnp.concatenate([m[None], m_after[:-1]])
    P_before = jnp.concatenate([jnp.zeros_like(P_after[:1]), P_after[:-1]])
    m_before = matvec(from_before, m_before)
    P_before = matmul(matmul(from_before, P_before), from_before.mT) + Q
    _, _, kept, log_z = _at_site(m_before, P_before, A, lambda1, w)

    # Backwards, g and G are affine: Cᵀ and Aᵀ around those of the time after, and the site's own.
    C = jnp.concatenate([kept.c[..., None], jnp.broadcast_to(eye[:, 1:], (*A.shape[:-1], d - 1))], axis=-1)
    row = A[..., 0, :]
    own_g, own_G = -row * kept.site.e[..., None], (kept.site.W[..., None] * row)[..., :, None] * row[..., None, :]

    def before(late: tuple, early: tuple) -> tuple:
        K2, g2, G2 = late
        K1, g1, G1 = early
        K1_t = K1.mT
        return matmul(K2, K1), matvec(K1_t, g2) + g1, matmul(matmul(K1_t, G2), K1) + G1

    _, g, G = lax.associative_scan(before, (matmul(C, A), own_g, own_G), reverse=True)
    g = jnp.concatenate([g[1:], jnp.zeros_like(g[:1])])
    G = jnp.concatenate([G[1:], jnp.zeros_like(G[:1])])
    mean, variance = (jnp.moveaxis(x, 0, -1) for x in _marginals(kept, g, G))
    return Smoothed(mean, variance, jnp.sum(log_z, axis=0))


def state_draws(model: AbstractStateSpace, interval: Array, rng_key: Array, batch: tuple[int, ...]) -> Array:
    """Joint draws of the state at all times under the prior, (..., N, d).

    Args:
        model: the process.
        interval: from the time before, (N,).
        rng_key: a key.
        batch: axes in front.
    """
    of_first, of_steps = jax.random.split(rng_key)
    A, B = model.transition(interval.at[0].set(0.0)), model.noise_root(interval.at[0].set(0.0))
    d, k, dtype = A.shape[-1], B.shape[-1], interval.dtype
    first = jax.random.normal(of_first, (*batch, d), dtype)
    steps = jax.random.normal(of_steps, (*batch, len(interval), k), dtype)
    A, B = (_first_axis(jnp.broadcast_to(each, (*batch, *each.shape[-3:])), -3) for each in (A, B))
    pushes = matvec(B, _first_axis(steps, -2))

    def step(x: Array, known: tuple[Array, Array]) -> tuple[Array, Array]:
        A, push = known
        x = _times(A, x) + push
        return x, x

    root = jnp.broadcast_to(model.root, (*batch, *model.root.shape[-2:]))
    return jnp.moveaxis(lax.scan(step, matvec(root, first), (A, pushes))[1], 0, -2)
