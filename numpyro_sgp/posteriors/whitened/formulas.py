"""q(u) by a mean and the root of a covariance: the parametrisations that gradient descent works on."""

from jax import Array
import jax.numpy as jnp

from numpyro_sgp._internal.eager import as_one_program
from numpyro_sgp.math.linalg import cholesky, diagonal, log_determinant, solve_lower, solve_lower_transposed
from numpyro_sgp.math.products import matmul, matvec, matvec_transposed
from numpyro_sgp.posteriors.moments import Moments, moments

__all__ = ["times_factors", "unwhitened", "whitened"]


def _log_det_root(S_sqrt: Array) -> Array:
    # The signs of a root's diagonal carry no meaning; |·| keeps the bound finite wherever an optimizer goes.
    return 2.0 * jnp.sum(jnp.log(jnp.abs(diagonal(S_sqrt))), axis=-1)


@as_one_program
def whitened(m: Array, S_sqrt: Array, A: Array, kff: Array) -> Moments:
    """q(v) = N(m, S_sqrt S_sqrtᵀ) with u = L v: mean Aᵀm, v_i = k_ii − |A_i|² + |S_sqrtᵀA_i|².

    KL = ½ [ |S_sqrt|²_F + |m|² − M − log|S| ].

    Args:
        m: whitened mean, (..., M).
        S_sqrt: lower triangular root of the whitened covariance, (..., M, M).
        A: L⁻¹ Kuf, (..., M, N).
        kff: prior variances, (..., N).

    References:
        Tiao (2020), "A handbook for sparse variational Gaussian processes", "Whitened parameterization"; corrects its
        whitened KL, which must be KL(N(m, S) ‖ N(0, I)).
    """
    T = matmul(S_sqrt.mT, A)
    trace = jnp.sum(S_sqrt * S_sqrt, axis=(-2, -1))
    kl = 0.5 * (trace + jnp.sum(m * m, axis=-1) - m.shape[-1] - _log_det_root(S_sqrt))
    return moments(matvec_transposed(A, m), kff, A, T, kl)


@as_one_program
def unwhitened(m: Array, S_sqrt: Array, L: Array, A: Array, kff: Array) -> Moments:
    """q(u) = N(m, S_sqrt S_sqrtᵀ): mean kᵀKuu⁻¹m, v_i = k_ii − |A_i|² + |S_sqrtᵀKuu⁻¹k_ui|².

    KL = ½ [ |L⁻¹S_sqrt|²_F + |L⁻¹m|² − M + log|Kuu| − log|S| ].

    Args:
        m: mean of u, (..., M).
        S_sqrt: lower triangular root of the covariance of u, (..., M, M).
        L: Cholesky factor of Kuu, (..., M, M).
        A: L⁻¹ Kuf, (..., M, N).
        kff: prior variances, (..., N).

    References:
        Hensman, Matthews and Ghahramani (2015), "Scalable variational Gaussian process classification", equation 16.
    """
    V = solve_lower_transposed(L, A)
    T = matmul(S_sqrt.mT, V)
    root, mean = solve_lower(L, S_sqrt), solve_lower(L, m[..., None])[..., 0]
    quadratic = jnp.sum(root * root, axis=(-2, -1)) + jnp.sum(mean * mean, axis=-1)
    kl = 0.5 * (quadratic - m.shape[-1] + log_determinant(L) - _log_det_root(S_sqrt))
    return moments(matvec_transposed(V, m), kff, A, T, kl)


def times_factors(m: Array, S_sqrt: Array, a: Array, linear: Array, precision: Array) -> tuple[Array, Array]:
    """Mean and lower triangular root of N(m, S) Π_i exp(lᵢ aᵢᵀv − ½ pᵢ (aᵢᵀv)²).

    With v = m + S_sqrt w, T = S_sqrtᵀa and P = I + T diag(p) Tᵀ: mean m + S_sqrt P⁻¹T(l − p∘aᵀm), covariance
    S_sqrt P⁻¹ S_sqrtᵀ.

    Args:
        m: (..., M).
        S_sqrt: lower triangular, (..., M, M).
        a: (..., M, N).
        linear: l, (..., N).
        precision: p, (..., N); P must be positive definite, else the result is NaN.
    """
    T = matmul(S_sqrt.mT, a)
    P = jnp.eye(m.shape[-1], dtype=m.dtype) + matmul(T * precision[..., None, :], T.mT)
    L_P = cholesky(P)
    w = matvec(T, linear - precision * matvec_transposed(a, m))
    w = solve_lower_transposed(L_P, solve_lower(L_P, w[..., None]))[..., 0]
    # S_sqrt L_P⁻ᵀ is a root that is not triangular: the factor R of its transpose is.
    R = jnp.linalg.qr(solve_lower(L_P, S_sqrt.mT), mode="r")
    return m + matvec(S_sqrt, w), (R * jnp.where(diagonal(R) < 0.0, -1.0, 1.0)[..., :, None]).mT
