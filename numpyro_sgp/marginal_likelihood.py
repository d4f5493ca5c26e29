"""Collapsed bounds: the evidence of GP regression through inducing variables, with the optimal q(u) put in.

With Kuu = L Lᵀ, A = L⁻¹Kuf, noise variances σ_n² and w_n = 1/σ_n²: B = I + A diag(w) Aᵀ = L_B L_Bᵀ, and the optimum is
q(v) = N(B⁻¹ A diag(w) y, B⁻¹) with u = L v.
"""

import math
from typing import NamedTuple

from jax import Array
import jax.numpy as jnp

from numpyro_sgp.linalg import (
    cholesky,
    log_determinant,
    matmul,
    matvec,
    matvec_transposed,
    solve_lower,
    solve_lower_transposed,
)

__all__ = ["BOUNDS", "Collapsed", "collapsed"]

BOUNDS = ("titsias", "dtc", "fitc")


class Collapsed(NamedTuple):
    """The value of a collapsed bound, and the optimal q(v) = N(m, B⁻¹), u = L v.

    Attributes:
        value: the bound on, or approximation of, log p(y), (...).
        m: whitened mean, (..., M).
        L_B: Cholesky factor of the whitened precision, (..., M, M).
        precision: 1/σ_n², of `fitc` with the conditional variances in σ_n², (..., N).
    """

    value: Array
    m: Array
    L_B: Array
    precision: Array


def collapsed(A: Array, kff: Array, residual: Array, noise: Array, bound: str = "titsias") -> Collapsed:
    """Log N(y | 0, Q + diag σ²) − ½ Σ_n (k_nn − q_nn)/σ_n² with Q = AᵀA, in O(N M²).

    "dtc" leaves the trace term out and so bounds nothing; "fitc" puts k_nn − q_nn into the noise instead.

    Args:
        A: L⁻¹ Kuf, (..., M, N).
        kff: prior variances, (..., N).
        residual: observations less the prior mean, (..., N).
        noise: noise variances σ_n², (..., N).
        bound: "titsias", "dtc" or "fitc".

    References:
        Titsias (2009), "Variational learning of inducing variables in sparse Gaussian processes", equation 9; Tiao
        (2020), appendices V to VII; Quiñonero-Candela and Rasmussen (2005), sections 5 (DTC) and 6 (FITC).
    """
    N, M = A.shape[-1], A.shape[-2]
    unexplained = jnp.maximum(kff - jnp.sum(A * A, axis=-2), 0.0)
    if bound == "fitc":
        noise = noise + unexplained
    precision = 1.0 / noise
    root = jnp.sqrt(precision)
    U = A * root[..., None, :]
    L_B = cholesky(jnp.eye(M, dtype=A.dtype) + matmul(U, jnp.swapaxes(U, -1, -2)))
    c = solve_lower(L_B, matvec(U, root * residual)[..., None])
    m = solve_lower_transposed(L_B, c)[..., 0]
    # A sum of non-negative terms: in float32 the difference w y² − |c|² loses the digits that matter where w is large.
    misfit = root * (residual - matvec_transposed(A, m))
    quadratic = jnp.sum(misfit * misfit, axis=-1) + jnp.sum(m * m, axis=-1)
    log_noise = jnp.sum(jnp.broadcast_to(jnp.log(noise), (*noise.shape[:-1], N)), axis=-1)
    value = -0.5 * (N * math.log(2.0 * math.pi) + log_noise + log_determinant(L_B) + quadratic)
    if bound == "titsias":
        value = value - 0.5 * jnp.sum(precision * unexplained, axis=-1)
    return Collapsed(value, m, L_B, precision)
