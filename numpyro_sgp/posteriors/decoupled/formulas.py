"""Decoupled posteriors: a covariance over a small basis β, and a mean over a basis γ that may be far larger.

With u = f(β), L Lᵀ = Kuu and t = L⁻¹K_uγ a, a function k_xγ a of the mean basis has a part in the span of β, A(x)ᵀt,
and one orthogonal to it, of squared norm aᵀC a with C = K_γγ − K_γu Kuu⁻¹ K_uγ. The parametrisations differ in which of
the two the coefficients a carry. The cost of a mean is linear in the size of γ; only the norm is quadratic, and can be
estimated from some rows of its matrix.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike

from numpyro_sgp.inducing import AbstractInducing, RowMatch
from numpyro_sgp.math.linalg import cholesky, diagonal, solve_lower, solve_lower_transposed
from numpyro_sgp.math.products import matmul, matvec, matvec_transposed
from numpyro_sgp.posteriors.decoupled.coefficients import Coefficients, Response
from numpyro_sgp.posteriors.moments import Moments, Projection, moments, roots_of

__all__ = [
    "Span",
    "at_data",
    "coefficient_units",
    "hybrid",
    "largest_residual_variance",
    "mean_at",
    "mean_projected",
    "norm",
    "norm_by_blocks",
    "norm_from_rows",
    "orthogonal",
    "preconditioner",
    "project_orthogonal",
    "residual_variance",
    "solve",
]


def _dot(x: Array, y: Array) -> Array:
    return jnp.sum(x * y, axis=-1)


# Marginals and divergence.


def orthogonal(q: Moments, function: Array, t: Array, squared_norm: Array) -> Moments:
    """A posterior over β, its mean moved by the part of k_xγ a that is orthogonal to β.

    m_i = q.m_i + k_γiᵀa − A_iᵀt, the variance that of q, KL = q.kl + ½ aᵀC a, without a cross term.

    Args:
        q: moments over β, from `whitened` or `natural_whitened`.
        function: k_γiᵀa, by `mean_at`, (..., N).
        t: L⁻¹K_uγ a, by `mean_projected`, (..., M).
        squared_norm: aᵀC a, by `norm` or estimated by `norm_from_rows`, (...).

    References:
        Salimbeni, Cheng, Boots and Deisenroth (2018), "Orthogonally decoupled variational Gaussian processes".
    """
    mean = q.mean + function - matvec_transposed(roots_of(q).A, t)
    return q._replace(mean=mean, kl=q.kl + 0.5 * squared_norm)


def hybrid(q: Moments, m: Array, function: Array, t: Array, squared_norm: Array) -> Moments:
    """A posterior over β, its mean moved by all of k_xγ a.

    m_i = q.m_i + k_γiᵀa, the variance that of q, KL = q.kl + mᵀt + ½ aᵀK_γγ a. The same q as `orthogonal` has with
    the whitened mean m + t.

    Args:
        q: moments over β, from `whitened` or `natural_whitened`.
        m: whitened mean that q was made with, (..., M).
        function: k_γiᵀa, by `mean_at`, (..., N).
        t: L⁻¹K_uγ a, by `mean_projected`, (..., M).
        squared_norm: aᵀK_γγ a, by `norm` or estimated by `norm_from_rows`, without a projection, (...).

    References:
        Cheng and Boots (2017), "Variational inference for Gaussian process models with linear complexity",
        appendix A.3; corrects the missing factor ½ of its log-determinants.
    """
    return q._replace(mean=q.mean + function, kl=q.kl + _dot(m, t) + 0.5 * squared_norm)


def solve(q_u: Moments, q_v: Moments, kff: Array) -> Moments:
    """Independent posteriors over u = f(β) and over what u leaves of f(γ), v = f(γ) − K_γu Kuu⁻¹u.

    m_i and KL are sums, v_i = k_ii − |A_ui|² − |A_vi|² + |T_ui|² + |T_vi|².

    Args:
        q_u: moments over β, from `whitened` or `natural_whitened`.
        q_v: moments over v, from the same functions with the A of `project_orthogonal`.
        kff: prior variances, (..., N).

    References:
        Shi, Titsias and Mnih (2020), "Sparse orthogonal variational inference for Gaussian processes".
    """
    first, second = roots_of(q_u), roots_of(q_v)
    assert first.T is not None
    assert second.T is not None

    def rows(first: Array, second: Array) -> Array:
        batch = jnp.broadcast_shapes(first.shape[:-2], second.shape[:-2])
        return jnp.concatenate([jnp.broadcast_to(x, batch + x.shape[-2:]) for x in (first, second)], axis=-2)

    A = rows(first.A, second.A)
    return moments(q_u.mean + q_v.mean, kff, A, rows(first.T, second.T), q_u.kl + q_v.kl)


# A mean basis that is the data.


def at_data(
    q: Moments, a: Array, unit: Array, function: Array, t: Array | None, match: RowMatch, response: Response
) -> Moments:
    """A posterior over β with a mean over the data, at a batch of these, and its first-order change with `response`.

    m_i = q.m_i + r_i with r_i = k_γiᵀa − A_iᵀt, and KL = q.kl + ½ (N/B) Σ_b (a_b/c_b) r_b, an estimate of ½ aᵀC a from
    the rows of the batch, c_b of which are equal. A row that is not in the basis gives NaN.

    Args:
        q: moments over β, from `whitened` or `natural_whitened`, or those of the prior.
        a: coefficients, (..., M_γ).
        unit: what one unit of their parameters is in a, (..., M_γ).
        function: k_γiᵀa, by `mean_at`, (..., B).
        t: L⁻¹K_uγ a, or None where the mean is not projected, (..., M).
        match: where the rows of the batch are in the basis, (B,).
        response: zero.
    """
    index, count = match
    # Negative indices would count from the end; the row is not there, and neither is a mean for it.
    r = jnp.where(index < 0, jnp.nan, function)
    if t is not None:
        r = r - matvec_transposed(roots_of(q).A, t)
    shared = a[..., index] / count
    mean = q.mean + r + response.gradient[..., index] / unit[..., index]
    kl = q.kl + 0.5 * (a.shape[-1] / index.shape[0]) * _dot(shared, r) + jnp.sum(response.seen[..., index] / count, -1)
    kl = kl + response.scale
    if t is not None:
        assert response.gradient_projected is not None
        assert response.seen_projected is not None
        A = jax.lax.stop_gradient(roots_of(q).A)
        mean = mean + matvec_transposed(A, response.gradient_projected)
        kl = kl + _dot(response.seen_projected, matvec(A, shared))
    return q._replace(mean=mean, kl=kl)


# Blocks of a kernel matrix are made one after the other where all of it would have more entries than this. Such a block
# stays in a processor's cache: with 100 000 coefficients half of the time of a step that makes 2**25 entries at once.
_MOST_ENTRIES = 2**20


def _sum_over_blocks(product: Callable[[AbstractInducing, Array], Array], basis: AbstractInducing, a: Array, rows: int):
    """The sum of `product(block of the basis, its part of a)`, with blocks of a bounded number of entries."""
    M = basis.num_inducing
    size = max(_MOST_ENTRIES // max(rows, 1), 1)
    if size >= M:
        return product(basis, a)

    @jax.checkpoint
    def block(start: Array) -> Array:
        index = start + jnp.arange(size)
        in_range = index < M
        index = jnp.where(in_range, index, 0)
        return product(basis.take(index), jnp.where(in_range, a[..., index], 0.0))

    return jnp.sum(jax.lax.map(block, jnp.arange(0, M, size)), axis=0)


def mean_at(kernel: Callable, X: Array, gamma: AbstractInducing, a: Array) -> Array:
    """k_xγ a, (..., N), for coefficients (..., M_γ), in memory that does not grow with M_γ N."""
    return _sum_over_blocks(lambda block, a: matvec_transposed(block.Kuf(kernel, X), a), gamma, a, X.shape[-2])


def mean_projected(kernel: Callable, L: Array, beta: AbstractInducing, gamma: AbstractInducing, a: Array) -> Array:
    """L⁻¹K_uγ a, (S, ..., M), for several vectors a, (S, ..., M_γ), in memory that does not grow with M M_γ."""

    def product(block: AbstractInducing, a: Array) -> Array:
        return matmul(beta.Kuv(kernel, block), jnp.moveaxis(a, 0, -1))

    return jnp.moveaxis(solve_lower(L, _sum_over_blocks(product, gamma, a, beta.num_inducing)), -1, 0)


# The orthogonal part of a basis.


def residual_variance(L: Array, Kug: Array, kgg: Array) -> Array:
    """The prior variances at γ that β leaves unexplained, diag C, (..., M_γ), in O(M² M_γ); kgg are those at γ."""
    G = solve_lower(L, Kug)
    return jnp.maximum(kgg - jnp.sum(G * G, axis=-2), 0.0)


def largest_residual_variance(
    kernel: Callable, gamma: AbstractInducing, span: tuple[AbstractInducing, Array] | None
) -> Array:
    """The largest prior variance at γ that β leaves unexplained, max diag C, (...), in memory that M_γ does not change.

    `span` is β with the Cholesky factor of Kuu, or None where nothing is explained.
    """
    M = gamma.num_inducing
    if span is None:
        return jnp.max(gamma.Kuu_diagonal(kernel), axis=-1)
    beta, L = span
    size = min(max(_MOST_ENTRIES // beta.num_inducing, 1), M)

    def block(start: Array) -> Array:
        some = gamma.take(jnp.minimum(start + jnp.arange(size), M - 1))
        return jnp.max(residual_variance(L, beta.Kuv(kernel, some), some.Kuu_diagonal(kernel)), axis=-1)

    return jnp.max(jax.lax.map(block, jnp.arange(0, M, size)), axis=0)


# An input of γ in the span of β has d = 0, and would get an infinite scale for a function that is zero.
_FLOOR = 1e-2


def preconditioner(residual: Array, scale: Array) -> Array:
    """1 / √(k₀ (d + 1e-2)): a unit of it makes functions of comparable norms, so that one step size serves all.

    Args:
        residual: d = diag(C) / k₀, the share of the prior variance that β leaves unexplained, (..., M_γ).
        scale: k₀, mean prior variance, (..., 1).

    References:
        A diagonal preconditioner is D^−½: corrects D⁻¹ of Cheng and Boots (2017), appendix A.1, which explodes where γ
        comes near β.
    """
    return 1.0 / jnp.sqrt(scale * (residual + _FLOOR))


def coefficient_units(coefficients: Coefficients, gamma: AbstractInducing, kernel: Callable) -> Array:
    """What a unit of the parameters a₀ is in the coefficients a, (..., M_γ)."""
    kgg = gamma.Kuu_diagonal(kernel)
    scale = jnp.mean(kgg, axis=-1, keepdims=True)
    residual = coefficients.residual
    return preconditioner(kgg / scale if residual is None else jax.lax.stop_gradient(residual), scale)


def project_orthogonal(
    u: AbstractInducing, v: AbstractInducing, blocks: Projection, kernel: Callable, X: Array, jitter: ArrayLike
) -> Projection:
    """The blocks of v = f(γ) − K_γu Kuu⁻¹u, whose prior is N(0, C), in the place of those of inducing variables.

    Args:
        u: the basis β.
        v: the basis γ.
        blocks: those of β.
        kernel: a kernel.
        X: inputs, (N, D).
        jitter: added to the diagonal of C, relative to the mean prior variance at γ.
    """
    G = solve_lower(blocks.L, u.Kuv(kernel, v))
    Kgg = v.Kuu(kernel)
    # Relative to K_γγ, not to C: the rounding in C is that of the difference.
    shift = jitter * jnp.mean(diagonal(Kgg), axis=-1)[..., None, None]
    L = cholesky(Kgg - matmul(G.mT, G) + shift * jnp.eye(Kgg.shape[-1], dtype=Kgg.dtype))
    Kvf = v.Kuf(kernel, X) - matmul(G.mT, blocks.A)
    return Projection(L, Kvf, solve_lower(L, Kvf), blocks.kff)


# The squared norm aᵀC a, or aᵀK_γγ a without a projection.


def norm(a: Array, Kgg: Array, t: Array | None) -> Array:
    """aᵀK_γγ a − |t|², (...), with t = L⁻¹K_uγ a or None, and K_γγ without jitter."""
    squared = _dot(a, matvec(Kgg, a))
    return squared if t is None else squared - _dot(t, t)


class Span(NamedTuple):
    """The basis β to be orthogonal to.

    Attributes:
        beta: the inducing variables u.
        L: Cholesky factor of Kuu, (..., M, M).
        t: L⁻¹K_uγ a with a not differentiated, (..., M).
    """

    beta: AbstractInducing
    L: Array
    t: Array


def norm_from_rows(a: Array, index: Array, kernel: Callable, gamma: AbstractInducing, span: Span | None) -> Array:
    """An estimate of `norm` from |I| rows of the matrix drawn without replacement: O(|I| M_γ).

    (M_γ/|I|) a_Iᵀr with r = (C a)_I. Its value and its gradients with respect to a, to inducing inputs and to
    hyperparameters are all unbiased. The gradient with respect to a is 2 (M_γ/|I|) r on the sampled rows and zero
    elsewhere, not that of the estimate, whose part from the sampled columns has a variance a thousand times larger.

    Args:
        a: coefficients, (..., M_γ).
        index: the sampled rows I, distinct, (B,).
        kernel: a kernel.
        gamma: the mean basis.
        span: the basis to be orthogonal to, or None for aᵀK_γγ a.

    References:
        In place of the sampled columns of Cheng and Boots (2017), section 3.4.
    """
    w, some = jax.lax.stop_gradient(a), gamma.take(index)
    r = _sum_over_blocks(lambda block, w: matvec(some.Kuv(kernel, block), w), gamma, w, index.shape[0])
    # As in Kuu: the kernel knows the variances, which are not those of two inputs that happen to be equal.
    r = r + (some.Kuu_diagonal(kernel) - diagonal(some.Kuv(kernel, some))) * w[..., index]
    if span is not None:
        projected = solve_lower_transposed(span.L, span.t[..., None])[..., 0]
        r = r - matvec_transposed(span.beta.Kuv(kernel, some), projected)
    scale = a.shape[-1] / index.shape[0]
    # The second term is zero, and brings the gradient with respect to a.
    moving = 2.0 * _dot(a[..., index] - w[..., index], jax.lax.stop_gradient(r))
    return scale * (_dot(w[..., index], r) + moving)


def norm_by_blocks(a: Array, rows_at: Callable[[Array], Array], size: int, t: Array | None) -> Array:
    """`norm` by `size` rows of K_γγ after the other, `rows_at(index)`, (..., size, M_γ)."""
    M = a.shape[-1]

    def block(start: Array) -> Array:
        index = start + jnp.arange(size)
        inside_range = index < M
        index = jnp.where(inside_range, index, 0)
        return _dot(jnp.where(inside_range, a[..., index], 0.0), matvec(rows_at(index), a))

    squared = jnp.sum(jax.lax.map(block, jnp.arange(0, M, size)), axis=0)
    return squared if t is None else squared - _dot(t, t)
