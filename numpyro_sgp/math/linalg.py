"""Factorisations of covariance matrices: jitter, Cholesky factors, triangular solves, and what whitens by them.

A factorisation that fails returns NaN, as LAPACK reports it; nothing here replaces a NaN.
"""

from collections.abc import Callable
import dataclasses
import itertools

import jax
from jax import Array, lax
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

from numpyro_sgp._internal.eager import as_one_program
from numpyro_sgp.math.products import (
    congruence_of_upper,
    half_congruence_of_transposed,
    halved,
    lower_product,
    lower_product_of_transposed,
    matmul,
    matvec,
    transposed,
    upper_product,
)

__all__ = [
    "Root",
    "cholesky",
    "default_jitter",
    "diagonal",
    "largest_eigenvalue",
    "log_determinant",
    "root_of",
    "solve_lower",
    "solve_lower_transposed",
    "triangular_inverse",
    "with_jitter",
]


def default_jitter(dtype: jax.typing.DTypeLike) -> float:
    """Jitter relative to the mean prior variance: 1e-6 in float64, 1e-4 in float32.

    The rounding error of a Cholesky factorisation grows like M times the machine epsilon; at M = 512 that is 6e-5 in
    float32 and 1e-13 in float64. The float64 value is set by conditioning instead: it bounds cond(Kuu) by M * 1e6.
    """
    return 1e-6 if jnp.finfo(dtype).eps < 1e-10 else 1e-4


def diagonal(K: Array) -> Array:
    """The main diagonal of the trailing two axes, (..., M)."""
    return jnp.diagonal(K, axis1=-2, axis2=-1)


@as_one_program
def with_jitter(K: Array, jitter: ArrayLike) -> Array:
    """K + jitter · mean(diag K) · I for symmetric K, (..., M, M)."""
    shift = jitter * jnp.mean(diagonal(K), axis=-1)
    return K + shift[..., None, None] * jnp.eye(K.shape[-1], dtype=K.dtype)


def cholesky(K: Array, jitter: ArrayLike = 0.0) -> Array:
    """Lower L with L Lᵀ = K + jitter · mean(diag K) · I.

    Args:
        K: symmetric matrices, (..., M, M); only the upper triangle is read.
        jitter: non-negative, relative to the mean of the diagonal.

    Returns:
        (..., M, M); NaN where the factorisation fails.
    """
    if not (isinstance(jitter, float) and jitter == 0.0):
        K = with_jitter(K, jitter)
    # The columns that LAPACK reads are the rows of the transpose.
    return lax.linalg.cholesky(K.mT, symmetrize_input=False)


def _solve(L: Array, B: Array, transpose: bool) -> Array:
    options = {"left_side": True, "lower": True, "transpose_a": transpose}
    # LAPACK solves in one dtype: parameters trained in float32 may meet inputs in float64.
    dtype = jnp.result_type(L, B)
    L, B = L.astype(dtype), B.astype(dtype)
    if L.ndim == 2 and B.ndim > 2:
        # One factor for many right-hand sides: put the batch into the columns, so that it is a single large solve.
        columns = jnp.moveaxis(B, -2, 0)
        solution = lax.linalg.triangular_solve(L, columns.reshape(L.shape[-1], -1), **options)
        return jnp.moveaxis(solution.reshape(columns.shape), 0, -2)
    batch = jnp.broadcast_shapes(L.shape[:-2], B.shape[:-2])
    L, B = (jnp.broadcast_to(x, batch + x.shape[-2:]) for x in (L, B))
    return lax.linalg.triangular_solve(L, B, **options)


def solve_lower(L: Array, B: Array) -> Array:
    """L⁻¹ B for lower-triangular L, (..., M, M), and B, (..., M, N); batch axes broadcast."""
    return _solve(L, B, transpose=False)


def solve_lower_transposed(L: Array, B: Array) -> Array:
    """L⁻ᵀ B for lower-triangular L, (..., M, M), and B, (..., M, N); batch axes broadcast."""
    return _solve(L, B, transpose=True)


def log_determinant(L: Array) -> Array:
    """log|L Lᵀ| from the Cholesky factor L, (...)."""
    return 2.0 * jnp.sum(jnp.log(diagonal(L)), axis=-1)


def triangular_inverse(L: Array, block: int = 64) -> Array:
    """L⁻¹ for lower-triangular L, by halves: [[A, 0], [C, D]]⁻¹ = [[A⁻¹, 0], [−D⁻¹ C A⁻¹, D⁻¹]].

    Most of the work is matrix products, which run several times faster than triangular solves on every backend.

    Args:
        L: lower triangular, (..., M, M).
        block: size below which a plain triangular solve is used; 64 is where the two cost the same on a CPU.
    """
    M = L.shape[-1]
    if block >= M:
        identity = jnp.broadcast_to(jnp.eye(M, dtype=L.dtype), L.shape)
        return solve_lower(L, identity)
    # A split at a multiple of the block size keeps the number of distinct sizes, and so of compiled kernels, small.
    half = block * -(-(M // 2) // block)
    A, C, D = L[..., :half, :half], L[..., half:, :half], L[..., half:, half:]
    A_inverse = triangular_inverse(A, block)
    # One after the other: independent solves of a batch may run at once, and runs with two threads and ten latents were
    # seen to stop, all threads waiting, where they did (JAX 0.10.2 on a CPU; with this order they finish). NaN spreads
    # as it would below.
    D_inverse = triangular_inverse(D + 0.0 * A_inverse[..., :1, :1], block)
    lower = -matmul(D_inverse, matmul(C, A_inverse))
    upper = jnp.zeros((*L.shape[:-2], half, M - half), L.dtype)
    return jnp.concatenate(
        [jnp.concatenate([A_inverse, upper], axis=-1), jnp.concatenate([lower, D_inverse], axis=-1)], axis=-2
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Root:
    """The Cholesky factor of a covariance matrix, K = L Lᵀ, with what whitens by it.

    In float64 products with the inverse, several times faster than triangular solves. In float32 triangular solves: the
    rounding of such a product, the condition number of L times the machine epsilon whatever it is applied to, cost nats
    where solves lost 0.05.

    Attributes:
        L: (..., M, M).
        inverse: L⁻¹, (..., M, M), or None.
        inverse_transposed: L⁻ᵀ as an array of its own, (..., M, M), or None.
        blocks: sizes of the diagonal blocks outside of which K is zero; None for a single one.
    """

    L: Array
    inverse: Array | None
    inverse_transposed: Array | None
    blocks: tuple[int, ...] | None = dataclasses.field(default=None, metadata={"static": True})

    def product(self, fn: Callable[[Array, Array], Array], matrix: Array, B: Array) -> Array:
        """A product with a matrix that has the blocks of K, (..., M, N)."""
        parts = _slices(self.blocks)
        if not parts:
            return fn(matrix, B)
        return jnp.concatenate([fn(matrix[..., part, part], B[..., part, :]) for part in parts], axis=-2)

    def whiten(self, B: Array) -> Array:
        """L⁻¹B, (..., M, N)."""
        if self.inverse is None:
            return self.product(solve_lower, self.L, B)
        return self.product(lower_product, self.inverse, B)

    def whiten_tangent(self, B: Array) -> Array:
        """L⁻¹B, (..., M, N): as a linear map of B, one whose transpose is quick."""
        if self.inverse_transposed is None:
            return self.product(solve_lower, self.L, B)
        return self.product(lower_product_of_transposed, self.inverse_transposed, B)

    def unwhiten(self, B: Array) -> Array:
        """L⁻ᵀB, (..., M, N)."""
        if self.inverse_transposed is None:
            return self.product(solve_lower_transposed, self.L, B)
        return self.product(upper_product, self.inverse_transposed, B)

    def whiten_half(self, W: Array) -> Array:
        """Φ(L⁻¹ W L⁻ᵀ) for symmetric W, (..., M, M): as a linear map of W, one whose transpose is quick.

        W has the blocks of K.
        """
        parts = _slices(self.blocks)
        if parts:
            return _block_diagonal([self._whiten_half(W[..., part, part], part) for part in parts])
        return self._whiten_half(W, slice(None))

    def _whiten_half(self, W: Array, part: slice) -> Array:
        if self.inverse_transposed is None:
            L = self.L[..., part, part]
            return halved(solve_lower(L, solve_lower(L, W).mT))
        return half_congruence_of_transposed(self.inverse_transposed[..., part, part], W)

    def unwhiten_both(self, W: Array) -> Array:
        """L⁻ᵀ W L⁻¹ for symmetric W, (..., M, M)."""
        if self.inverse_transposed is None:
            return solve_lower_transposed(self.L, solve_lower_transposed(self.L, W).mT)
        return congruence_of_upper(self.inverse_transposed, W)


def root_of(K: Array, blocks: tuple[int, ...] | None = None) -> Root:
    """Factorise K, (..., M, M), of which only the upper triangle is read; NaN where that fails.

    Args:
        K: a covariance matrix.
        blocks: sizes of its diagonal blocks, outside of which it is zero; None for a single one.
    """
    parts = _slices(blocks)
    factors = [cholesky(K[..., part, part]) for part in parts] if parts else [cholesky(K)]
    L = _block_diagonal(factors)
    blocks = blocks if parts else None
    if jnp.finfo(L.dtype).eps > 1e-10:
        return Root(L, None, None, blocks)
    inverse = _block_diagonal([triangular_inverse(factor) for factor in factors])
    return Root(L, inverse, transposed(inverse), blocks)


def _slices(blocks: tuple[int, ...] | None) -> list[slice]:
    """The rows of each block; none where there is a single one."""
    if blocks is None or len(blocks) == 1:
        return []
    ends = np.cumsum([0, *blocks]).tolist()
    return [slice(*pair) for pair in itertools.pairwise(ends)]


def _block_diagonal(blocks: list[Array]) -> Array:
    return blocks[0] if len(blocks) == 1 else jax.scipy.linalg.block_diag(*blocks)


def largest_eigenvalue(K: Array) -> Array:
    """By power iteration, (...) of (..., N, N): from below, within a percent where the next one is a tenth smaller."""

    def multiply(_: int, x: Array) -> Array:
        y = matvec(K, x)
        return y / jnp.linalg.norm(y, axis=-1, keepdims=True)

    x = jax.lax.fori_loop(0, 100, multiply, jax.random.normal(jax.random.key(0), K.shape[:-1], K.dtype))
    return jnp.linalg.norm(matvec(K, x), axis=-1)
