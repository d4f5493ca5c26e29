"""The evidence of GP regression: collapsed bounds through inducing variables, and objectives of kernels with features.

Collapsed bounds have the optimal q(u) put in.

With Kuu = L Lᵀ, A = L⁻¹Kuf, noise variances σ_n² and w_n = 1/σ_n²: B = I + A diag(w) Aᵀ = L_B L_Bᵀ, and the optimum is
q(v) = N(B⁻¹ A diag(w) y, B⁻¹) with u = L v.
"""

from collections.abc import Callable
from functools import partial
import math
from typing import NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike

from numpyro_sgp.math.linalg import (
    cholesky,
    diagonal,
    log_determinant,
    solve_lower,
    solve_lower_transposed,
    triangular_inverse,
)
from numpyro_sgp.math.products import (
    gram_of_rows,
    half_product,
    lower_part_of_upper_product,
    lower_product,
    matmul,
    matvec,
    matvec_transposed,
    mirrored,
    product_of_lower,
    product_with_lower,
    transposed,
    upper_product,
)

__all__ = [
    "BOUNDS",
    "Collapsed",
    "batch_matrix",
    "collapsed",
    "collapsed_bound",
    "dense_log_evidence",
    "evidence_bound",
    "evidence_given",
    "evidence_upper_bound",
    "log_evidence",
    "minimax_objective",
]

BOUNDS = ("tight", "titsias", "dtc", "fitc")


class Collapsed(NamedTuple):
    """The value of a collapsed bound, and the optimal q(v) = N(m, B⁻¹), u = L v.

    Attributes:
        value: the bound on, or approximation of, log p(y), (...).
        L: Cholesky factor of Kuu, (..., M, M).
        A: L⁻¹ Kuf, (..., M, N).
        L_B: Cholesky factor of the whitened precision, (..., M, M).
        m: whitened mean, (..., M).
        misfit: observations less their fitted values, (..., N).
        precision: 1/σ_n², of "fitc" with the conditional variances in σ_n², (..., N).
        unexplained: k_nn − q_nn, (..., N).
    """

    value: Array
    L: Array
    A: Array
    L_B: Array
    m: Array
    misfit: Array
    precision: Array
    unexplained: Array


def collapsed(Kuu: Array, Kuf: Array, kff: Array, residual: Array, noise: Array, bound: str) -> Collapsed:
    """Log N(y | 0, Q + diag σ²) less a penalty for d_n = k_nn − q_nn, Q = AᵀA, and the optimal q(v), in O(N M²).

    The penalty is ½ Σ_n log(1 + d_n/σ_n²) for "tight", and ½ Σ_n d_n/σ_n² for "titsias". "dtc" has none and so bounds
    nothing; "fitc" puts d_n into the noise instead.

    Args:
        Kuu: prior covariance of the inducing variables, with jitter, (..., M, M).
        Kuf: (..., M, N).
        kff: prior variances, (..., N).
        residual: observations less the prior mean, (..., N).
        noise: noise variances σ_n², (..., N).
        bound: "tight", "titsias", "dtc" or "fitc".

    References:
        Titsias (2025), "New bounds for sparse variational Gaussian processes", for "tight"; Titsias (2009),
        "Variational learning of inducing variables in sparse Gaussian processes", equation 9; Tiao
        (2020), appendices V to VII; Quiñonero-Candela and Rasmussen (2005), "A unifying view of sparse approximate
        Gaussian process regression" (DTC, FITC).
    """
    L = cholesky(Kuu)
    A = _solve_many(L, Kuf)
    N, M = A.shape[-1], A.shape[-2]
    unexplained = kff - jnp.sum(A * A, axis=-2)
    if bound in ("tight", "fitc"):
        unexplained = jnp.maximum(unexplained, 0.0)  # a variance, whatever the rounding
    if bound == "fitc":
        noise = noise + unexplained
    precision = 1.0 / noise
    root = jnp.sqrt(precision)
    U = A * root[..., None, :]
    L_B = cholesky(jnp.eye(M, dtype=A.dtype) + matmul(U, U.mT))
    c = solve_lower(L_B, matvec(A, precision * residual)[..., None])
    m = solve_lower_transposed(L_B, c)[..., 0]
    misfit = residual - matvec_transposed(A, m)
    # A sum of non-negative terms: in float32 the difference w y² − |c|² loses the digits that matter where w is large.
    quadratic = jnp.sum(precision * misfit * misfit, axis=-1) + jnp.sum(m * m, axis=-1)
    log_noise = jnp.sum(jnp.broadcast_to(jnp.log(noise), (*noise.shape[:-1], N)), axis=-1)
    value = -0.5 * (N * math.log(2.0 * math.pi) + log_noise + log_determinant(L_B) + quadratic)
    if bound == "titsias":
        value = value - 0.5 * jnp.sum(precision * unexplained, axis=-1)
    elif bound == "tight":
        value = value - 0.5 * jnp.sum(jnp.log1p(precision * unexplained), axis=-1)
    return Collapsed(value, L, A, L_B, m, misfit, precision, unexplained)


def _solve_many(L: Array, B: Array) -> Array:
    """L⁻¹ B for B with many columns.

    In float64 one product with the inverse: three times faster than a triangular solve on a CPU (M = 128). In float32
    its rounding, the condition number of L times the machine epsilon whatever B, cost nats where the solve lost 0.05.
    """
    return matmul(triangular_inverse(L), B) if jnp.finfo(L.dtype).eps < 1e-10 else solve_lower(L, B)


def evidence_upper_bound(
    Kuu: Array,
    Kuf: Array,
    kff: Array,
    residual: Array,
    noise: Array,
    product: Callable[[Array], Array],
    num_iterations: int,
) -> Array:
    """An upper bound of log N(y | 0, K + diag σ²), in O(N²) operations for each iteration.

    −½ [N log 2π + log|Q + diag σ²| + 2 vᵀr − vᵀ(K + diag σ²)v], which holds for every v, as K ⪰ Q. The best v is
    (K + diag σ²)⁻¹r. Conjugate gradients go there from (Q + diag(σ² + t))⁻¹r, t = tr(K − Q), where the bound is at
    least that of Titsias.

    Args:
        Kuu: prior covariance of the inducing variables, with jitter, (M, M).
        Kuf: (M, N).
        kff: prior variances, (N,).
        residual: r, observations less the prior mean, (N,).
        noise: noise variances σ_n², (N,).
        product: K times a vector.
        num_iterations: of conjugate gradients.

    References:
        Gibbs and MacKay (1997), "Efficient implementation of Gaussian processes", for the quadratic term; Titsias
        (2014), "Variational inference for Gaussian and determinantal point processes", for the determinant and t.
    """
    q = collapsed(Kuu, Kuf, kff, residual, noise, "dtc")
    t = jnp.sum(jnp.maximum(q.unexplained, 0.0))
    start = collapsed(Kuu, Kuf, kff, residual, noise + t, "dtc")

    def covariance(x: Array) -> Array:
        return product(x) + noise * x

    def preconditioner(x: Array) -> Array:
        """(Q + diag σ²)⁻¹ x."""
        c = solve_lower(q.L_B, matvec(q.A, q.precision * x)[..., None])
        return q.precision * (x - matvec_transposed(q.A, solve_lower_transposed(q.L_B, c)[..., 0]))

    v, _ = jax.scipy.sparse.linalg.cg(
        covariance, residual, x0=start.precision * start.misfit, M=preconditioner, tol=0.0, maxiter=num_iterations
    )
    quadratic = 2.0 * jnp.sum(v * residual) - jnp.sum(v * covariance(v))
    N = residual.shape[-1]
    return -0.5 * (N * math.log(2.0 * math.pi) + jnp.sum(jnp.log(noise)) + log_determinant(q.L_B) + quadratic)


@partial(jax.custom_jvp, nondiff_argnums=(5,))
def collapsed_bound(Kuu: Array, Kuf: Array, kff: Array, residual: Array, noise: Array, bound: str) -> Array:
    """The value of `collapsed`, with its derivative written out: no factorisation is differentiated.

    With Σ = Kuu + Kuf diag(w) Kfu, b = Σ⁻¹Kuf(w∘y), r = y − Kfu b, g_n = ∂/∂σ_n² of the density and t_n that of the
    value with respect to q_nn (½/(σ_n² + d_n), ½w, 0 or −g),

        dKuf: b (w∘r)ᵀ − Σ⁻¹Kuf diag(w) + 2 Kuu⁻¹Kuf diag(t)
        dKuu: ½ (Kuu⁻¹ − Σ⁻¹ − b bᵀ) − Kuu⁻¹Kuf diag(t) Kfu Kuu⁻¹

    which takes one product with all rows beside those of the value (two for "tight" and "fitc"). See `collapsed` for
    the arguments.
    """
    return collapsed(Kuu, Kuf, kff, residual, noise, bound).value


@collapsed_bound.defjvp
def _collapsed_bound_jvp(bound: str, primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
    Kuu, Kuf, kff, residual, noise = primals
    q = collapsed(Kuu, Kuf, kff, residual, noise, bound)
    A, w = q.A, q.precision
    identity = jnp.eye(A.shape[-2], dtype=A.dtype)
    L_B_inverse = triangular_inverse(q.L_B)
    B_inverse = matmul(L_B_inverse.mT, L_B_inverse)
    # Whitened, the gradient with respect to Kuu is that of ½ (I − B⁻¹ − m mᵀ) − A diag(t) Aᵀ.
    whitened = 0.5 * (identity - B_inverse - q.m[..., :, None] * q.m[..., None, :])
    by_residual = -w * q.misfit
    outer = solve_lower_transposed(q.L, q.m[..., None]) * -by_residual[..., None, :]
    if bound == "titsias":
        # With t = ½ w both sums over rows are products with I − B⁻¹, and A diag(t) Aᵀ = ½ (B − I).
        rows = matmul(solve_lower_transposed(q.L, identity - B_inverse), A)
        shrunk = jnp.sum(A * A, axis=-2) - jnp.sum(Kuf * rows, axis=-2)
        by_Kuf = outer + rows * w[..., None, :]
        whitened = whitened - 0.5 * (matmul(q.L_B, q.L_B.mT) - identity)
    else:
        rows = matmul(solve_lower_transposed(q.L, B_inverse), A)
        # Not the product of rows with Kuf: a sum of what is not negative loses nothing in float32.
        T = _solve_many(q.L_B, A)
        shrunk = jnp.sum(T * T, axis=-2)
        by_Kuf = outer - rows * w[..., None, :]
    by_noise = -0.5 * w * (1.0 - w * shrunk - w * q.misfit * q.misfit)
    by_kff = jnp.zeros_like(by_noise)
    if bound == "titsias":
        by_kff = jnp.broadcast_to(-0.5 * w, by_noise.shape)
        by_noise = by_noise + 0.5 * w * w * q.unexplained
    elif bound in ("tight", "fitc"):
        shrinkage = 0.5 * w / (1.0 + w * q.unexplained)
        by_unexplained = -shrinkage if bound == "tight" else by_noise
        if bound == "tight":
            by_noise = by_noise + shrinkage * w * q.unexplained
        # Where rounding made k_nn − q_nn negative, the value has 0 in its place.
        by_kff = jnp.where(q.unexplained > 0.0, by_unexplained, 0.0)
        weighted = A * by_kff[..., None, :]
        by_Kuf = by_Kuf - 2.0 * solve_lower_transposed(q.L, weighted)
        whitened = whitened + matmul(weighted, A.mT)
    half = solve_lower_transposed(q.L, whitened).mT
    by_Kuu = solve_lower_transposed(q.L, half)
    dKuu, dKuf, dkff, dresidual, dnoise = tangents
    derivative = jnp.sum(by_Kuu * dKuu, axis=(-2, -1)) + jnp.sum(by_Kuf * dKuf, axis=(-2, -1))
    derivative = derivative + jnp.sum(by_kff * dkff + by_residual * dresidual + by_noise * dnoise, axis=-1)
    return q.value, jnp.broadcast_to(derivative, q.value.shape)


# Kernels of finite rank, f = Aᵀw with w ~ N(0, I), A (r, N), one noise variance: minus the log evidence is
#
#     min_w ½ [ |y − Aᵀw|²/σ² + |w|² + log|F| + (N − r) log σ² + N log 2π ],   F = A Aᵀ + σ²I,
#
# a sum over the data but for log|F|. For any positive definite matrix F̃, log|F| ≤ tr(F̃⁻¹F) + log|F̃| − r: linear in F.


def log_evidence(A: Array, residual: Array, noise: Array) -> Array:
    """Log N(y | 0, AᵀA + σ²I), (...), by the smaller of two factorisations.

    Args:
        A: features of independent weights with variance one, (..., r, N).
        residual: observations less the prior mean, (..., N).
        noise: noise variance σ², (...).
    """
    r, N = A.shape[-2:]
    if r >= N:
        return dense_log_evidence(matmul(A.mT, A), residual, noise)
    L = cholesky(batch_matrix(A, noise, 1.0))
    w = solve_lower_transposed(L, solve_lower(L, matvec(A, residual)[..., None]))[..., 0]
    return -evidence_given(w, A, residual, noise, 1.0) - 0.5 * log_determinant(L)


def dense_log_evidence(K: Array, residual: Array, noise: Array) -> Array:
    """Log N(y | 0, K + σ²I), (...).

    Args:
        K: prior covariance, (..., N, N).
        residual: observations less the prior mean, (..., N).
        noise: noise variance σ², (...).
    """
    N = K.shape[-1]
    L = cholesky(K + noise[..., None, None] * jnp.eye(N, dtype=K.dtype))
    c = solve_lower(L, residual[..., None])[..., 0]
    return -0.5 * (jnp.sum(c * c, axis=-1) + log_determinant(L) + N * math.log(2.0 * math.pi))


def batch_matrix(A: Array, noise: Array, scale: ArrayLike) -> Array:
    """F of all data estimated from a batch, (N/B) A Aᵀ + σ²I, (..., r, r).

    Args:
        A: features of the batch, (..., r, B).
        noise: σ², (...).
        scale: N/B.
    """
    identity, scale = jnp.eye(A.shape[-2], dtype=A.dtype), jnp.asarray(scale, A.dtype)
    return scale * matmul(A, A.mT) + noise[..., None, None] * identity


def evidence_given(w: Array, A: Array, residual: Array, noise: Array, scale: ArrayLike) -> Array:
    """½ [(N/B) |y − Aᵀw|²/σ² + |w|² + (N − r) log σ² + N log 2π]: minus the log evidence but for ½ log|F|.

    Args:
        w: weights, (..., r).
        A: features of the batch, (..., r, B).
        residual: observations less the prior mean, (..., B).
        noise: σ², (...).
        scale: N/B.
    """
    misfit = residual - matvec_transposed(A, w)
    scale = jnp.asarray(scale, A.dtype)
    N = scale * A.shape[-1]
    quadratic = scale * jnp.sum(misfit * misfit, axis=-1) / noise + jnp.sum(w * w, axis=-1)
    return 0.5 * (quadratic + (N - A.shape[-2]) * jnp.log(noise) + N * math.log(2.0 * math.pi))


def evidence_bound(w: Array, F: Array, A: Array, residual: Array, noise: Array, scale: ArrayLike) -> Array:
    """An upper bound of minus the log evidence, estimated from a batch without bias, (...).

    `evidence_given` + ½ [tr(F̃⁻¹F) + log|F̃| − r] for any weights w and matrix F̃, equal to minus the bound of
    q(w) = N(w, σ²F̃⁻¹); tight at F̃ = F and the best w. Its gradient with F̃ held fixed is that of stochastic
    compositional gradient descent.

    Args:
        w: weights, (..., r).
        F: F̃, positive definite, (..., r, r).
        A: features of the batch, (..., r, B).
        residual: observations less the prior mean, (..., B).
        noise: σ², (...).
        scale: N/B.

    References:
        Shoham and Avron (2025), "Unbiased stochastic optimization for Gaussian processes on finite dimensional RKHS",
        section 3.2, with the constants that make it a bound.
    """
    L = cholesky(F)
    whitened = solve_lower(L, A)
    inverse = triangular_inverse(L)
    size = jnp.asarray(scale, A.dtype) * jnp.sum(whitened * whitened, axis=(-2, -1))
    trace = size + noise * jnp.sum(inverse * inverse, axis=(-2, -1))
    return evidence_given(w, A, residual, noise, scale) + 0.5 * (trace + log_determinant(L) - A.shape[-2])


def minimax_objective(
    w: Array,
    R: Array,
    B: Array,
    A: Array,
    residual: Array,
    noise: Array,
    scale: ArrayLike,
    penalty: ArrayLike,
    form: str = "whitened",
) -> Array:
    """½ [g + log|Ã| + μ⟨B, D⟩], Ã = σ²(I + R Rᵀ) in the place of F: minimised over (θ, w, R), maximised over |B| ≤ 1.

    D = I − L⁻¹F L⁻ᵀ with Ã = L Lᵀ ("whitened"), whose solution is that of the evidence as soon as μ ≥ √r; or
    D = (Ã − F)/|Ã| ("printed"), which needs μ ≥ |F| |F⁻¹| ≥ r. Linear in F, and so without bias on batches.

    Args:
        w: weights, (..., r).
        R: lower triangular, (..., r, r).
        B: the maximising player, symmetric with a Frobenius norm of at most one, (..., r, r).
        A: features of the batch, (..., r, B).
        residual: observations less the prior mean, (..., B).
        noise: σ², (...).
        scale: N/B.
        penalty: μ.
        form: "whitened" or "printed".

    References:
        Shoham and Avron (2025), section 3.1, equation 3.2, for the printed form.
    """
    r = A.shape[-2]
    rest = evidence_given(w, A, residual, noise, scale) + 0.5 * r * jnp.log(noise)
    penalty = jnp.asarray(penalty, A.dtype)
    if form == "whitened":
        return rest + _held_together(R, B, A, jnp.asarray(scale, A.dtype) / noise, penalty)
    P = jnp.eye(r, dtype=R.dtype) + gram_of_rows(R)
    matrix = noise[..., None, None] * P
    size = jnp.sqrt(jnp.sum(matrix * matrix, axis=(-2, -1)))
    difference = jnp.sum(B * (matrix - batch_matrix(A, noise, scale)), axis=(-2, -1)) / size
    return rest + 0.5 * (log_determinant(cholesky(P)) + penalty * difference)


@jax.custom_jvp
def _held_together(R: Array, B: Array, A: Array, c: Array, penalty: Array) -> Array:
    """½ [log|P| + μ⟨B, I − X(I + c AAᵀ)Xᵀ⟩], P = I + R Rᵀ = L Lᵀ and X = L⁻¹, with the derivative written out.

    With G = X(I + c AAᵀ)Xᵀ and Φ the lower triangle with its diagonal halved, the gradient with respect to P is
    ½ Xᵀ[I + μ(Φ(BG) + Φ(BG)ᵀ)]X, for symmetric B, and that with respect to R the lower triangle of it times 2R: no
    factorisation is differentiated.
    """
    return _penalised(R, 0.5 * mirrored(B), A, c, penalty)[0]


def _penalised(R: Array, B: Array, A: Array, c: Array, penalty: Array) -> tuple[Array, Array, Array, Array]:
    """The value for symmetric B, X, G and X A."""
    L = cholesky(jnp.eye(R.shape[-1], dtype=R.dtype) + gram_of_rows(R))
    X = triangular_inverse(L)
    U = lower_product(X, A)
    G = gram_of_rows(X) + c[..., None, None] * matmul(U, U.mT)
    difference = jnp.sum(diagonal(B), axis=-1) - jnp.sum(B * G, axis=(-2, -1))
    return 0.5 * (log_determinant(L) + penalty * difference), X, G, U


@_held_together.defjvp
def _held_together_jvp(primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
    R, B, A, c, penalty = primals
    dR, dB, dA, dc, dpenalty = tangents
    B = 0.5 * mirrored(B)
    value, X, G, U = _penalised(R, B, A, c, penalty)
    X_t, half = transposed(X), 0.5 * penalty
    D, BU = jnp.eye(R.shape[-1], dtype=R.dtype) - G, matmul(B, U)
    V = product_of_lower(X, R)
    by_R = lower_part_of_upper_product(X_t, V + penalty * product_with_lower(mirrored(half_product(B, G)), V))
    by_A = (-2.0 * half * c)[..., None, None] * upper_product(X_t, BU)
    derivative = jnp.sum(by_R * dR, axis=(-2, -1)) + half * jnp.sum(D * dB, axis=(-2, -1))
    derivative = derivative + jnp.sum(by_A * dA, axis=(-2, -1)) - half * jnp.sum(U * BU, axis=(-2, -1)) * dc
    derivative = derivative + 0.5 * jnp.sum(D * B, axis=(-2, -1)) * dpenalty
    return value, jnp.broadcast_to(derivative, value.shape)
