"""Cholesky factors, triangular solves and products: every matrix operation of the package goes through here.

All products ask for the highest precision, because float32 products on GPUs are otherwise rounded to ten mantissa bits
(TF32). A factorisation that fails returns NaN, as LAPACK reports it; nothing here replaces a NaN.
"""

from functools import partial

import jax
from jax import Array, lax
import jax.numpy as jnp
from jax.typing import ArrayLike

__all__ = [
    "cholesky",
    "default_jitter",
    "diagonal",
    "log_determinant",
    "matmul",
    "matvec",
    "matvec_transposed",
    "solve_lower",
    "solve_lower_transposed",
    "triangular_inverse",
]

matmul = partial(jnp.matmul, precision=lax.Precision.HIGHEST)


def default_jitter(dtype: jax.typing.DTypeLike) -> float:
    """Jitter relative to the mean prior variance: 1e-6 in float64, 1e-4 in float32.

    The rounding error of a Cholesky factorisation grows like M times the machine epsilon; at M = 512 that is 6e-5 in
    float32 and 1e-13 in float64. The float64 value is set by conditioning instead: it bounds cond(Kuu) by M * 1e6.
    """
    return 1e-6 if jnp.finfo(dtype).eps < 1e-10 else 1e-4


def diagonal(K: Array) -> Array:
    """The main diagonal of the trailing two axes, (..., M)."""
    return jnp.diagonal(K, axis1=-2, axis2=-1)


def cholesky(K: Array, jitter: ArrayLike = 0.0) -> Array:
    """Lower L with L Lᵀ = K + jitter · mean(diag K) · I.

    Args:
        K: symmetric matrices, (..., M, M); only the lower triangle is read.
        jitter: non-negative, relative to the mean of the diagonal.

    Returns:
        (..., M, M); NaN where the factorisation fails.
    """
    shift = jitter * jnp.mean(diagonal(K), axis=-1)
    identity = jnp.eye(K.shape[-1], dtype=K.dtype)
    return lax.linalg.cholesky(K + shift[..., None, None] * identity, symmetrize_input=False)


def _solve(L: Array, B: Array, transpose: bool) -> Array:
    options = {"left_side": True, "lower": True, "transpose_a": transpose}
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


def matvec(A: Array, x: Array) -> Array:
    """A x for A, (..., M, N), and x, (..., N)."""
    return matmul(A, x[..., None])[..., 0]


def matvec_transposed(A: Array, x: Array) -> Array:
    """Aᵀ x for A, (..., M, N), and x, (..., M)."""
    return matmul(x[..., None, :], A)[..., 0, :]


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
    A_inverse, D_inverse = triangular_inverse(A, block), triangular_inverse(D, block)
    lower = -matmul(D_inverse, matmul(C, A_inverse))
    upper = jnp.zeros((*L.shape[:-2], half, M - half), L.dtype)
    return jnp.concatenate(
        [jnp.concatenate([A_inverse, upper], axis=-1), jnp.concatenate([lower, D_inverse], axis=-1)], axis=-2
    )
