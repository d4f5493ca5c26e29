"""q(u) by natural parameters relative to the prior: the parametrisations that natural gradients work on.

With whitened sites λ̃ and Λ̃ ⪰ 0 and P = I + Λ̃ = L_P L_Pᵀ, q(v) = N(P⁻¹λ̃, P⁻¹) and

    m_i = A_iᵀ P⁻¹ λ̃,   v_i = k_ii − |A_i|² + |L_P⁻¹A_i|²,   KL = ½ [ tr P⁻¹ − M + |P⁻¹λ̃|² + log|P| ].

The forms differ in what stays fixed while hyperparameters move.
"""

from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp

from numpyro_sgp._internal.eager import as_one_program
from numpyro_sgp.math.linalg import (
    cholesky,
    diagonal,
    log_determinant,
    solve_lower,
    solve_lower_transposed,
    triangular_inverse,
)
from numpyro_sgp.math.products import (
    gram_of_lower,
    half_congruence,
    lower_product,
    matmul,
    matvec,
    matvec_transposed,
    mirrored,
    symmetric_product,
    transposed,
    upper_product,
)
from numpyro_sgp.posteriors.moments import Moments, given_tangents, moments, roots_of, tangents_like

__all__ = [
    "Whitened",
    "by_posterior_root",
    "by_sites",
    "curvature",
    "dense_explained",
    "dense_weights",
    "divergence_of_covariance",
    "dual_dense",
    "dual_per_datum",
    "natural_mean_and_root",
    "natural_whitened",
    "root_of_precision",
    "whitened_moments",
]


def root_of_precision(P: Array) -> tuple[Array, Array]:
    """Lower L_P with L_P L_Pᵀ = P ⪰ I, and its inverse; NaN where the rounding of the sites' sums swallows the prior.

    What the data say is then known so much better than the prior says, that I + Λ̃ no longer holds the prior: in float32
    from tr Λ̃ = 1e7 on, with nats gone and nothing to see. A step that leads there has to be refused.
    """
    L_P = cholesky(P)
    # tr P⁻¹ needs the inverse root; with it at hand other solves are products. P ⪰ I is well conditioned.
    L_P_inverse = triangular_inverse(L_P)
    rounding = 0.5 * jnp.finfo(P.dtype).eps * jnp.sum(diagonal(P), axis=-1)
    # The diagonal of P⁻¹; a pivot of P may be twice as large as its least eigenvalue, which is what has to be seen.
    largest = jnp.max(jnp.sum(L_P_inverse * L_P_inverse, axis=-2), axis=-1)
    lost = (rounding * largest > 1.0)[..., None, None]
    return jnp.where(lost, jnp.nan, L_P), jnp.where(lost, jnp.nan, L_P_inverse)


def divergence_of_covariance(L_P: Array, L_P_inverse: Array) -> Array:
    """½ [tr P⁻¹ − M + log|P|], KL(N(0, P⁻¹) ‖ N(0, I)), (...), from the root of P and its inverse."""
    trace = jnp.sum(L_P_inverse * L_P_inverse, axis=(-2, -1))
    return 0.5 * (trace - L_P.shape[-1] + log_determinant(L_P))


class Whitened(NamedTuple):
    """The moments of q(v) = N(m, P⁻¹), P = I + Λ̃, and what their derivatives are made of.

    Attributes:
        moments: of q(f).
        T: L_P⁻¹A, (..., M, N).
        m: P⁻¹λ̃, (..., M).
        L_P_inverse: (..., M, M).
        explained: whether k_ii − |A_i|² came out non-negative, as it must but for rounding, (..., N).
    """

    moments: Moments
    T: Array
    m: Array
    L_P_inverse: Array
    explained: Array


@as_one_program
def natural_mean_and_root(lambda1: Array, Lambda2: Array) -> tuple[Array, Array]:
    """Mean P⁻¹λ̃, (..., M), and upper triangular root L_P⁻ᵀ of the covariance, from whitened sites."""
    _, L_P_inverse = root_of_precision(jnp.eye(Lambda2.shape[-1], dtype=Lambda2.dtype) + Lambda2)
    m = matvec_transposed(L_P_inverse, matvec(L_P_inverse, lambda1))
    return m, L_P_inverse.mT


@as_one_program
def whitened_moments(lambda1: Array, Lambda2: Array, A: Array, kff: Array) -> Whitened:
    """The moments from whitened sites λ̃, (..., M), and Λ̃, (..., M, M); the arguments of `natural_whitened`."""
    M = lambda1.shape[-1]
    L_P, L_P_inverse = root_of_precision(jnp.eye(M, dtype=A.dtype) + Lambda2)
    T = lower_product(L_P_inverse, A)
    m = matvec_transposed(L_P_inverse, matvec(L_P_inverse, lambda1))
    kl = divergence_of_covariance(L_P, L_P_inverse) + 0.5 * jnp.sum(m * m, axis=-1)
    explained = kff - jnp.sum(A * A, axis=-2) >= 0.0
    return Whitened(moments(matvec_transposed(A, m), kff, A, T, kl), T, m, L_P_inverse, explained)


class Curvature(NamedTuple):
    """What the derivatives of the moments are made of beside the moments.

    Attributes:
        P_inverse: (..., M, M).
        U: P⁻¹A, (..., M, N).
        p: P⁻¹m, (..., M).
        Q: P⁻¹ − P⁻², (..., M, M).
    """

    P_inverse: Array
    U: Array
    p: Array
    Q: Array


def curvature(q: Whitened) -> Curvature:
    """Evaluate it once; what is not used is dropped by the compiler."""
    P_inverse = gram_of_lower(q.L_P_inverse)
    U = upper_product(transposed(q.L_P_inverse), q.T)
    return Curvature(P_inverse, U, matvec(P_inverse, q.m), P_inverse - symmetric_product(P_inverse, P_inverse))


def by_sites(q: Whitened, c: Curvature, d: Array, D: Array | None) -> tuple[Array, Any, Array]:
    """Derivatives of mean, variance and divergence along dλ̃ = d and dΛ̃ = D + Dᵀ.

    dm_i = U_iᵀ(d − dΛ̃ m),   dv_i = −U_iᵀ dΛ̃ U_i,   dKL = ½ tr(Q dΛ̃) + pᵀ(d − dΛ̃ m).
    """
    dvariance: Any = 0.0
    dkl: Any = 0.0
    if D is not None:
        d = d - matvec(D, q.m) - matvec_transposed(D, q.m)
        dvariance = -2.0 * jnp.sum(c.U * matmul(D, c.U), axis=-2)
        dkl = jnp.sum(c.Q * D, axis=(-2, -1))
    return matvec_transposed(c.U, d), dvariance, dkl + jnp.sum(c.p * d, axis=-1)


def by_posterior_root(q: Whitened, dA: Array | None, dLambda2: Array | None) -> Array | None:
    """The derivative of T = L_P⁻¹A."""
    X = q.L_P_inverse
    dT = None if dA is None else matmul(X, dA)
    if dLambda2 is not None:
        turned = matmul(half_congruence(X, dLambda2), q.T)
        dT = -turned if dT is None else dT - turned
    return dT


@jax.custom_jvp
def natural_whitened(lambda1: Array, Lambda2: Array, A: Array, kff: Array) -> Moments:
    """q(v) ∝ N(v | 0, I) exp(λ₁ᵀv − ½vᵀΛ₂v), u = L v: natural parameters that do not move with the hyperparameters.

    The derivative is written out, and differentiates no factorisation. With U = P⁻¹A,
    dm_i = dA_iᵀm + U_iᵀ(dλ̃ − dΛ̃ m), dv_i = dk_ii − 2 A_iᵀdA_i + 2 U_iᵀdA_i − U_iᵀdΛ̃ U_i and
    dKL = ½ tr((P⁻¹ − P⁻²)dΛ̃) + mᵀP⁻¹(dλ̃ − dΛ̃ m).

    Args:
        lambda1: whitened λ̃, (..., M).
        Lambda2: whitened Λ̃, symmetric with I + Λ̃ positive definite, (..., M, M).
        A: L⁻¹ Kuf, (..., M, N).
        kff: prior variances, (..., N).

    References:
        Salimbeni, Eleftheriadis and Hensman (2018), "Natural gradients in practice", in the whitened basis.
    """
    return whitened_moments(lambda1, Lambda2, A, kff).moments


def _natural_jvp(primals: tuple, tangents: tuple) -> tuple[Moments, Moments]:
    lambda1, Lambda2, A, kff = primals
    q = whitened_moments(lambda1, Lambda2, A, kff)
    c = curvature(q)
    dlambda1, dLambda2, dA, dkff = given_tangents(tangents)
    dmean: Any = 0.0
    dvariance: Any = 0.0
    dkl: Any = 0.0
    if dlambda1 is not None or dLambda2 is not None:
        # The derivative along the symmetric part: a gradient with respect to Λ̃ is symmetric.
        D = None if dLambda2 is None else 0.25 * mirrored(dLambda2)
        dmean, dvariance, dkl = by_sites(q, c, jnp.zeros_like(lambda1) if dlambda1 is None else dlambda1, D)
    if dA is not None:
        dmean = dmean + matvec_transposed(dA, q.m)
        dvariance = dvariance + 2.0 * jnp.sum((c.U - jnp.where(q.explained[..., None, :], A, 0.0)) * dA, axis=-2)
    if dkff is not None:
        dvariance = dvariance + jnp.where(q.explained, dkff, 0.0)
    dT = by_posterior_root(q, dA, None if dLambda2 is None else 0.5 * mirrored(dLambda2))
    return q.moments, tangents_like(q.moments, (dmean, dvariance, dkl, dA, dT))


natural_whitened.defjvp(_natural_jvp, symbolic_zeros=True)


def dual_per_datum(lambda1: Array, Lambda2: Array, A_sites: Array, A: Array, kff: Array) -> Moments:
    """q(u) ∝ p(u) Π_n exp(λ₁ₙ a_nᵀv − ½ λ₂ₙ (a_nᵀv)²), u = L v: t-SVGP, one site for each training input.

    Args:
        lambda1: (..., N_train).
        Lambda2: site precisions, (..., N_train).
        A_sites: L⁻¹ Kuf at the training inputs, (..., M, N_train).
        A: L⁻¹ Kuf where the posterior is wanted, (..., M, N).
        kff: prior variances there, (..., N).

    References:
        Adam et al. (2021), equations 18 to 21, with the sums over data left open.
    """
    weighted = A_sites * Lambda2[..., None, :]
    Lambda = matmul(weighted, A_sites.mT)
    return natural_whitened(matvec(A_sites, lambda1), Lambda, A, kff)


class DenseWeights(NamedTuple):
    """The factor of B = I + W½KW½ and the weights α of the mean, of sites (λ₁, W).

    Attributes:
        L_B: (..., N_train, N_train).
        L_B_inverse: likewise.
        weights: α, (..., N_train).
        root: W½, (..., N_train).
    """

    L_B: Array
    L_B_inverse: Array
    weights: Array
    root: Array


def dense_weights(lambda1: Array, Lambda2: Array, K: Array) -> DenseWeights:
    """α = e + W½B⁻¹(r − W½Ke), with r = W^−½λ₁ where a site has a precision, and e = λ₁ where it has none.

    It is (I + WK)⁻¹λ₁. As λ₁ − W½B⁻¹W½Kλ₁ it would be the difference of numbers that are larger by the ratio of the
    prior's variance to that of the noise: with noise of a hundredth of the prior's deviation, float32 would lose it.

    Args:
        lambda1: (..., N_train).
        Lambda2: site precisions, non-negative, (..., N_train).
        K: prior covariance at the training inputs, (..., N_train, N_train).
    """
    root = jnp.sqrt(Lambda2)
    B = jnp.eye(K.shape[-1], dtype=K.dtype) + root[..., :, None] * K * root[..., None, :]
    L_B, L_B_inverse = root_of_precision(B)
    empty = Lambda2 == 0.0
    alone, scaled = jnp.where(empty, lambda1, 0.0), jnp.where(empty, 0.0, lambda1 / jnp.where(empty, 1.0, root))
    half = solve_lower(L_B, (scaled - root * matvec(K, alone))[..., None])
    return DenseWeights(L_B, L_B_inverse, alone + root * solve_lower_transposed(L_B, half)[..., 0], root)


def dense_explained(lambda1: Array, Lambda2: Array, K: Array, Kxf: Array) -> Array:
    """A with Cov(f) = Kff − AᵀA, L_B⁻¹W½Kxf: (..., N_train, N)."""
    solved = dense_weights(lambda1, Lambda2, K)
    return solve_lower(solved.L_B, solved.root[..., :, None] * Kxf)


@as_one_program
def _dense(lambda1: Array, Lambda2: Array, K: Array, Kxf: Array, kff: Array) -> tuple[Moments, DenseWeights]:
    solved = dense_weights(lambda1, Lambda2, K)
    L_B, L_B_inverse, alpha, root = solved
    A = solve_lower(L_B, root[..., :, None] * Kxf)
    kl = 0.5 * (
        jnp.sum(L_B_inverse * L_B_inverse, axis=(-2, -1))
        - K.shape[-1]
        + jnp.sum(alpha * matvec(K, alpha), axis=-1)
        + log_determinant(L_B)
    )
    return moments(matvec_transposed(Kxf, alpha), kff, A, None, kl), solved


@jax.custom_jvp
def dual_dense(lambda1: Array, Lambda2: Array, K: Array, Kxf: Array, kff: Array) -> Moments:
    """q(f) ∝ p(f) Π_n exp(λ₁ₙ f_n − ½ λ₂ₙ f_n²): t-VGP, the dense posterior with one site for each training input.

    With W = diag(λ₂), B = I + W½KW½ = L_B L_Bᵀ and α = (I + WK)⁻¹λ₁: mean kᵀα, v = k − |L_B⁻¹W½k|²,
    KL = ½ [ tr B⁻¹ − N + αᵀKα + log|B| ]. No inverse of K is taken, so no jitter is needed.

    The derivative is written out, and needs no 1/λ₂. With H = W½B⁻¹W½, h = Hk, μ = Kα and the posterior covariances
    C = K − KHK and c = k − Kh,

        dm = dkᵀα − hᵀdK α + cᵀ(dλ₁ − dλ₂∘μ),   dv = dk_ii − 2 hᵀdk + hᵀdK h − (c∘c)ᵀdλ₂,
        dKL = ½ [ tr((H − W½B⁻²W½)dK) + αᵀdK α − 2 (Hμ)ᵀdK α ] + (Cα)ᵀ(dλ₁ − dλ₂∘μ) + ½ λ₂ᵀ(C∘C)dλ₂

    The gradient with respect to K is right for symmetric changes of it and not itself symmetric.

    Args:
        lambda1: (..., N_train).
        Lambda2: site precisions, non-negative, (..., N_train).
        K: prior covariance at the training inputs, (..., N_train, N_train).
        Kxf: prior covariance between training inputs and where the posterior is wanted, (..., N_train, N).
        kff: prior variances there, (..., N).

    References:
        Adam et al. (2021), equations 9 to 18; the stable form is Rasmussen and Williams (2006), section 3.4.3.
    """
    return _dense(lambda1, Lambda2, K, Kxf, kff)[0]


def _dual_dense_jvp(primals: tuple, tangents: tuple) -> tuple[Moments, Moments]:
    lambda1, Lambda2, K, Kxf, kff = primals
    q, (_, X, alpha, root) = _dense(lambda1, Lambda2, K, Kxf, kff)
    dlambda1, dLambda2, dK, dKxf, dkff = given_tangents(tangents)
    A, column = roots_of(q).A, root[..., :, None]
    h = column * upper_product(transposed(X), A)
    mu = matvec(K, alpha)
    B_inverse = gram_of_lower(X)
    H_mu = root * matvec(B_inverse, root * mu)
    dmean: Any = 0.0
    dvariance: Any = 0.0
    dkl: Any = 0.0
    turned: Any = None if dKxf is None else column * dKxf  # d(W½k), and below dB
    dB: Any = None
    if dK is not None:
        along = matvec(dK, alpha)
        by_trace = column * (B_inverse - symmetric_product(B_inverse, B_inverse)) * root[..., None, :]
        dmean = dmean - matvec_transposed(h, along)
        dvariance = dvariance + jnp.sum(h * matmul(dK, h), axis=-2)
        dkl = dkl + 0.5 * jnp.sum(by_trace * dK, axis=(-2, -1)) + jnp.sum((0.5 * alpha - H_mu) * along, axis=-1)
        dB = 0.5 * mirrored(column * dK * root[..., None, :])
    if dKxf is not None:
        dmean = dmean + matvec_transposed(dKxf, alpha)
        dvariance = dvariance - 2.0 * jnp.sum(h * dKxf, axis=-2)
    if dlambda1 is not None or dLambda2 is not None:
        d = jnp.zeros_like(lambda1) if dlambda1 is None else dlambda1
        d = d if dLambda2 is None else d - dLambda2 * mu
        dmean = dmean + matvec_transposed(Kxf, d) - matvec_transposed(h, matvec(K, d))
        dkl = dkl + jnp.sum((mu - matvec(K, H_mu)) * d, axis=-1)
    if dLambda2 is not None:
        c = Kxf - matmul(K, h)
        half = lower_product(X, column * K)
        C = K - matmul(half.mT, half)
        dvariance = dvariance - matvec_transposed(c * c, dLambda2)
        dkl = dkl + 0.5 * jnp.sum(matvec(C * C, Lambda2) * dLambda2, axis=-1)
        # That of W½ is infinite where λ₂ = 0, as is that of the root A of what the sites explain.
        droot = 0.5 * dLambda2 / root
        by_root = mirrored(droot[..., :, None] * K * root[..., None, :])
        dB = by_root if dB is None else dB + by_root
        along_root = droot[..., :, None] * Kxf
        turned = along_root if turned is None else turned + along_root
    if dkff is not None:
        # Where rounding has left less, the variance is the machine epsilon of the prior's.
        eps = jnp.finfo(kff.dtype).eps
        unexplained = kff - jnp.sum(A * A, axis=-2) > eps * kff
        dvariance = dvariance + jnp.where(unexplained, dkff, eps * dkff)
    dA = None if turned is None else lower_product(X, turned)
    if dB is not None:
        FA = matmul(half_congruence(X, dB), A)
        dA = -FA if dA is None else dA - FA
    return q, tangents_like(q, (dmean, dvariance, dkl, dA))


dual_dense.defjvp(_dual_dense_jvp, symbolic_zeros=True)
