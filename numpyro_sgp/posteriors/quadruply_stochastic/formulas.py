"""Estimates of a posterior over the weights of many basis functions, from a few of them: f = Φw, w ~ N(0, S⁻¹).

q(w) = N(μ, CCᵀ) with m weights, of which M are sampled in a step. C is a chevron: k dense columns U, lower triangular,
and a diagonal d below them. A sum over all weights is a plain sum over the sampled ones, m/M times; a product of two
such sums is a U-statistic, which weighs the pairs of different positions and those of one weight with itself apart. So
one set of features serves the square of the mean, its gradient and the variance, where the paper draws independent
sets. Changes of the sampled weights are arguments: an estimate is a function of them, whose gradient at zero is an
unbiased estimate of the gradient with respect to all weights.

References:
    Evans and Nair (2020), "Quadruply stochastic Gaussian processes".
"""

import dataclasses
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp

from numpyro_sgp.math.linalg import diagonal, solve_lower, solve_lower_transposed
from numpyro_sgp.math.products import matmul, matvec

__all__ = [
    "Inclusion",
    "Residual",
    "Sampled",
    "augmented_variance",
    "bounding_scale",
    "chevron_divergence",
    "chevron_variance",
    "control_variate",
    "inclusion",
    "jackknife",
    "linear_and_square",
    "mean_divergence",
    "nystrom_residual",
    "optimal_diagonal",
    "quadratic_form",
    "relevance_diagonal",
    "relevance_divergence",
]


class Inclusion(NamedTuple):
    """What each sampled weight and each pair of them stands for.

    Attributes:
        single: factor of a sum over the sampled weights, m/M.
        pair: factor of the products of two positions of the sample, those of a position with itself included.
        same: factor of these, in addition.
    """

    single: float
    pair: float
    same: float


def inclusion(size: int, number: int) -> Inclusion:
    """The factors of a uniform sample of M out of m weights without replacement.

    single = m/M, pair = m(m − 1) / M(M − 1) and same = m/M − pair. So Σ_k x_k over all weights is single Σ_s x, and
    (Σ_k x_k)(Σ_k y_k) is pair Σ_s x Σ_s y + same Σ_s xy, without bias.

    Args:
        size: m.
        number: M, at least 2 unless m is 1.

    References:
        In place of the independent index sets of Evans and Nair (2020), theorems 1 and 2.
    """
    if number == size:
        return Inclusion(1.0, 1.0, 0.0)
    single = size / number
    pair = size * (size - 1) / (number * (number - 1))
    return Inclusion(single, pair, single - pair)


def quadratic_form(x: Array, S: Array, sample: Inclusion) -> Array:
    """xᵀSx over all weights, (...), from a block of S.

    Args:
        x: at the sampled weights, (..., M).
        S: rows and columns at the sampled weights, (M, M).
        sample: the factors.
    """
    return sample.pair * jnp.sum(x * matvec(S, x), axis=-1) + sample.same * jnp.sum(diagonal(S) * x * x, axis=-1)


class Residual(NamedTuple):
    """What is known of Φw without sampling: at each row of data, h_l' a of a = Φ_p w at fixed inputs p.

    Attributes:
        known: h_l' a for each vector of weights, (N, c).
        features: h_l' Φ_p at the sampled weights, (N, M).
    """

    known: Array
    features: Array


def nystrom_residual(L: Array, Kpf: Array, Phi_p: Array, a: Array) -> Residual:
    """The part of Φw that interpolation from inputs p knows: h_l = K_pp⁻¹k_p(x_l).

    Estimates are unbiased whatever h is, and have little variance where it interpolates well.

    Args:
        L: Cholesky factor of the kernel matrix at p, (P, P).
        Kpf: kernel between p and the data, (P, N).
        Phi_p: features at p of the sampled weights, (P, M).
        a: Φ_p w of all weights, (P, c).
    """
    H = solve_lower_transposed(L, solve_lower(L, Kpf)).mT
    return Residual(matmul(H, a), matmul(H, Phi_p))


def linear_and_square(
    Phi: Array, w: Array, change: Array, sample: Inclusion, residual: Residual | None = None
) -> tuple[Array, Array]:
    """Φ(w + change) and the squares of its entries, (N, c) both, unbiased as they stand and in their gradients.

    With R the features less those of the residual, G the latter, and r = Rw, g = G change over all weights, the square
    is (h'a)² + 2 h'a (r + g) + r² + 2 r g + O(change²): so to first order in a change of the sampled weights,
    the known part of the mean changes as well.

    Args:
        Phi: features at the sampled weights, (N, M).
        w: c vectors of weights at the sampled ones, (M, c).
        change: of these weights, zero where the estimate is evaluated, (M, c).
        sample: the factors.
        residual: a control variate.

    References:
        Evans and Nair (2020), theorem 1, by a U-statistic of one set of indices.
    """
    now = w + change
    if residual is None:
        r = matmul(Phi, now)
        return sample.single * r, sample.pair * r * r + sample.same * matmul(Phi * Phi, now * now)
    R, G = Phi - residual.features, residual.features
    r, g = matmul(R, now), matmul(G, change)
    square = sample.pair * r * r + sample.same * matmul(R * R, now * now)
    cross = sample.pair * r * g + sample.same * matmul(R * G, now * change)
    moved = sample.single * (r + g)
    known = residual.known
    return known + moved, known * known + 2.0 * known * moved + square + 2.0 * cross


def control_variate(Phi_p: Array, w: Array, change: Array, a: Array, sample: Inclusion) -> Array:
    """The exact mean of (Φw)² over fixed inputs p, less its estimate from the sampled weights, (c,): zero in the mean.

    To be added to the estimated square at each row of data. n times this over σ² is the control variate of the
    paper; its gradient, too, has the mean zero.

    Args:
        Phi_p: features at p of the sampled weights, (P, M).
        w: vectors of weights at the sampled ones, (M, c).
        change: of these weights, zero, (M, c).
        a: Φ_p w of all weights, (P, c).
        sample: the factors.

    References:
        Evans and Nair (2020), equation 3 and proposition 3, and appendix F.1, whose gradient must have the derivatives
        of both terms.
    """
    exact = a * a + 2.0 * a * sample.single * matmul(Phi_p, change)
    _, estimate = linear_and_square(Phi_p, w, change, sample)
    return jnp.mean(exact - estimate, axis=-2)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampled:
    """What a loss needs to know of moments that are estimates.

    Args:
        excess: estimated square of the mean, less the square of the estimated mean, (N,).
        variance: estimated variance, (N,).
        scale: a number whose mean is at least the standard deviation, (N,).
        halves: estimates of the mean from each half of the sample, for the jackknife, or None.
        share: M/m.
        controlled: whether the gradient of the mean has a control variate, which only a quadratic function keeps
            unbiased.
        log_concave: observed sites that the user says are log-concave.
        integrated: receives an entry when a loss has made use of this.
    """

    excess: Array
    variance: Array
    scale: Array
    halves: tuple[Array, Array] | None
    share: float = dataclasses.field(metadata={"static": True})
    controlled: bool = dataclasses.field(metadata={"static": True})
    log_concave: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    integrated: Any = dataclasses.field(metadata={"static": True})


def chevron_variance(squares: Array, Phi: Array, d: Array, sample: Inclusion) -> Array:
    """Var f = Σ_j (φᵀu_j)² + Σ_k d_k²φ_k², (N,): exact over the dense columns, a plain sum over the others.

    Args:
        squares: of ΦU, estimated, (N, k).
        Phi: features at the sampled weights, (N, M).
        d: diagonal, zero in the first k rows, (M,).
        sample: the factors.

    References:
        Evans and Nair (2020), theorem 2, without the sampling of columns.
    """
    return jnp.sum(squares, axis=-1) + sample.single * matvec(Phi * Phi, d * d)


def mean_divergence(mean: Array, precision: Array | None, sample: Inclusion) -> Array:
    """½ μᵀSμ: the mean's part of the divergence.

    Args:
        mean: μ at the sampled weights, (M,).
        precision: their block of S, (M, M), or None for the identity.
        sample: the factors.

    References:
        Evans and Nair (2020), theorem 1.
    """
    if precision is not None:
        return 0.5 * quadratic_form(mean, precision, sample)
    return 0.5 * sample.single * jnp.sum(mean * mean)


def chevron_divergence(U: Array, d: Array, log_diagonal: Array, precision: Array | None, sample: Inclusion) -> Array:
    """½ [tr(S CCᵀ) − log|CCᵀ| − m] − ½ log|S|: the covariance's part of the divergence.

    Where S is a block, its determinant, which no block shows, is left out, and the value is the divergence up to that
    constant.

    Args:
        U: dense columns at the sampled weights, (M, k).
        d: diagonal, zero in the first k rows, (M,).
        log_diagonal: log C_kk of the sampled weights, (M,).
        precision: as in `mean_divergence`.
        sample: the factors.

    References:
        Evans and Nair (2020), theorem 2, corrects the logarithm, which belongs inside the sum, and proposition 2,
        corrects the last line of its proof, which lacks m.
    """
    if precision is not None:
        S = diagonal(precision)
        columns = jnp.sum(quadratic_form(U.mT, precision, sample))
        return 0.5 * columns + sample.single * jnp.sum(0.5 * S * d * d - log_diagonal - 0.5)
    squares = jnp.sum(U * U, axis=-1) + d * d
    return sample.single * jnp.sum(0.5 * squares - log_diagonal - 0.5)


def relevance_divergence(second_moment: Array, log_diagonal: Array, sample: Inclusion) -> Array:
    """½ Σ_k log E w_k² − Σ_k log C_kk: the divergence at the best prior precision of each weight, s_k = 1/E w_k².

    Given q, the divergence from N(0, 1/s_k) is least there, and what is left of it is this. With a diagonal covariance
    it is ½ Σ_k log(1 + μ_k²/d_k²), zero where the mean is, whatever the variance.

    Args:
        second_moment: E w_k² = μ_k² + (CCᵀ)_kk of the sampled weights, (M,).
        log_diagonal: log C_kk, (M,).
        sample: the factors.

    References:
        Evans and Nair (2020), appendix I.3, for the prior; Tipping (2001), "Sparse Bayesian learning and the relevance
        vector machine", for its precisions at the maximum of the evidence.
    """
    return sample.single * jnp.sum(0.5 * jnp.log(second_moment) - log_diagonal)


def relevance_diagonal(sum_of_squares: Array, rest: Array, noise: Array) -> Array:
    """The diagonal d_k that maximises the bound with a Gaussian likelihood and the best s_k = 1/(c_k + d_k²), (M,).

    d_k² = 2 c_k / (a_k c_k + √(a_k² c_k² + 4 a_k c_k)) with a_k = φ_kᵀφ_k / σ²; zero where c_k is.

    Args:
        sum_of_squares: φ_kᵀφ_k over all N data, (M,).
        rest: c_k, E w_k² without d_k², (M,).
        noise: σ², in units of y².
    """
    ac = sum_of_squares * rest / noise
    root = jnp.sqrt(ac * ac + 4.0 * ac)
    return jnp.sqrt(jnp.where(rest > 0.0, 2.0 * rest / jnp.where(rest > 0.0, ac + root, 1.0), 0.0))


def optimal_diagonal(sum_of_squares: Array, precision: Array, noise: Array) -> Array:
    """The diagonal d_k = √(σ² / (φ_kᵀφ_k + σ² s_k)) that maximises the bound with a Gaussian likelihood, (M,).

    Args:
        sum_of_squares: φ_kᵀφ_k over all N data, (M,).
        precision: s_k, (M,).
        noise: σ², in units of y².

    References:
        Evans and Nair (2020), proposition 1; for the weights below the dense columns.
    """
    return jnp.sqrt(noise / (sum_of_squares + noise * precision))


def augmented_variance(variance: Array, prior_variance: Array, sum_of_squares: Array, noise: Array) -> Array:
    """Var f(x) with a basis function at x added to those there are: v + σ²k(x, x)² / (Σ_n k(x, x_n)² + σ²k(x, x)).

    A heuristic for a diagonal covariance; where the covariance is good it counts twice what the features span.

    Args:
        variance: v, (N,).
        prior_variance: k(x, x), (N,).
        sum_of_squares: Σ_n k(x, x_n)² over the data, (N,).
        noise: σ², in units of y².

    References:
        Evans and Nair (2020), proposition 4; corrects V[y], which is the variance of f and lacks σ².
    """
    return variance + noise * prior_variance**2 / (sum_of_squares + noise * prior_variance)


def bounding_scale(variance: Array, scale: Array) -> Array:
    """ŝ = v̂/2c + c/2, whose mean is at least √v for any c > 0 that does not depend on the sample, (N,).

    ψ(f, s) = E_z log g(f + s z) is concave in (f, s) where log g is, even in s and decreasing in |s|. So E ψ(f̂, ŝ) is
    at most ψ(f, √v) for unbiased estimates f̂ of f and v̂ of v, whether they are independent or not.

    Args:
        variance: v̂, which may be negative, (N,).
        scale: c, near √v, (N,).

    References:
        In the place of Evans and Nair (2020), theorem 3, which lacks a root and is no bound with it, since the mean of
        √v̂ is at most √v.
    """
    return 0.5 * (variance / scale + scale)


def jackknife(whole: Array, first: Array, second: Array, share: float) -> Array:
    """ψ_M + (1 − M/m)(ψ_M − ½(ψ_A + ψ_B)): the bias of order 1/M of a concave function of an estimate, removed.

    Exact where ψ is quadratic; elsewhere neither a bound nor unbiased.

    Args:
        whole: ψ with the estimate from the whole sample.
        first: ψ with that from the first half of it.
        second: ψ with that from the second half.
        share: M/m.
    """
    return whole + (1.0 - share) * (whole - 0.5 * (first + second))
