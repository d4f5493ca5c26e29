"""q(w) for the weights of a kernel of finite rank: f = Φw, w ~ N(0, S⁻¹) with S = diag(s).

With w = S^−½ v the prior of v is standard, A = S^−½Φᵀ, and k_ii = |A_i|²: nothing of f is left unexplained. The sites
are tempered, by a power α that is 1 until rounding would swallow the prior.
"""

from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp

from numpyro_sgp._internal.eager import as_one_program
from numpyro_sgp.math.linalg import diagonal
from numpyro_sgp.math.products import matvec, matvec_transposed, mirrored
from numpyro_sgp.posteriors.dual.formulas import (
    Whitened,
    by_posterior_root,
    by_sites,
    curvature,
    natural_mean_and_root,
    whitened_moments,
)
from numpyro_sgp.posteriors.moments import Moments, given_tangents, roots_of, tangents_like

__all__ = ["tempered_mean_and_root", "weight_space", "weight_space_mean"]


def tempering(trace: Array) -> Array:
    """α = (1 + (ε tr Λ̃)⁴)^−¼, the power of the sites beside the prior; ε is the machine epsilon of the dtype.

    I + Λ̃ holds the prior only while Λ̃ stays below 1/ε, 1e7 in float32, which a network that has learnt its data well
    exceeds. I + αΛ̃ has no eigenvalue above 1/ε, and q ∝ p(w) t(w)^α is a posterior like any other: its bound is a
    bound, of a q that is less certain than it might be where the data have settled everything. α is 1 to a thousandth
    up to a quarter of the limit, which in float64 no data reach.

    Args:
        trace: tr Λ̃, the sum of β_i k_ii over all data, (...).
    """
    x = jnp.finfo(trace.dtype).eps * trace
    # In powers of what is at most one: x⁴ overflows where x does not.
    beyond = x > 1.0
    larger = jnp.where(beyond, x, 1.0)
    smaller = jnp.where(beyond, 1.0 / larger, x)
    return 1.0 / (larger * (1.0 + smaller**4) ** 0.25)


def tempered_mean_and_root(lambda1: Array, Lambda2: Array) -> tuple[Array, Array]:
    """Mean and upper triangular root of q(v) from whitened sites, both tempered; see `natural_mean_and_root`."""
    alpha = tempering(jnp.sum(diagonal(Lambda2), axis=-1))
    return natural_mean_and_root(alpha[..., None] * lambda1, alpha[..., None, None] * Lambda2)


@jax.custom_jvp
def weight_space(lambda1: Array, Lambda2: Array, Phi: Array, precision: Array) -> Moments:
    """q(w) ∝ N(w | 0, S⁻¹) exp(λ₁ᵀw − ½wᵀΛ₂w): the sites are sums over the data, the prior is added exactly.

    m = Φ P⁻¹λ₁, v_i = φ_iᵀP⁻¹φ_i, KL = ½ [ tr(P⁻¹S) − r + |S^½P⁻¹λ₁|² + log|P| − log|S| ] with P = S + Λ₂. For a
    Gaussian likelihood λ₁ = Φᵀy/σ² and Λ₂ = ΦᵀΦ/σ²; minibatch steps of size ρ are exponential averages of these, the
    recursion of stochastic compositional gradient descent with F̃ = σ²P. Both sums are tempered: see `tempering`.

    Args:
        lambda1: Σ_i g_i φ_i, (..., r).
        Lambda2: Σ_i β_i φ_i φ_iᵀ, positive semi-definite, (..., r, r).
        Phi: features, (..., N, r).
        precision: s, (..., r).

    References:
        Shoham and Avron (2025), "Unbiased stochastic optimization for Gaussian processes on finite dimensional RKHS",
        section 3.2, corrected: σ²S is not averaged.
    """
    return _whitened(lambda1, Lambda2, Phi, precision).q.moments


class _WhitenedWeights(NamedTuple):
    """The posterior of v = S^½w, and what it was made of.

    Attributes:
        q: moments and factors.
        lambda1: tempered sites α S^−½λ₁, (..., r).
        Lambda2: tempered sites α S^−½Λ₂S^−½, (..., r, r).
        trace: tr S^−½Λ₂S^−½, (...).
        alpha: α, (...).
    """

    q: Whitened
    lambda1: Array
    Lambda2: Array
    trace: Array
    alpha: Array


@as_one_program
def _whitened(lambda1: Array, Lambda2: Array, Phi: Array, precision: Array) -> _WhitenedWeights:
    root = jnp.sqrt(precision)
    A = (Phi / root[..., None, :]).mT
    Lambda2 = Lambda2 / (root[..., :, None] * root[..., None, :])
    trace = jnp.sum(diagonal(Lambda2), axis=-1)
    alpha = tempering(trace)
    lambda1, Lambda2 = alpha[..., None] * (lambda1 / root), alpha[..., None, None] * Lambda2
    return _WhitenedWeights(
        whitened_moments(lambda1, Lambda2, A, jnp.sum(A * A, axis=-2)), lambda1, Lambda2, trace, alpha
    )


def _weight_space_jvp(primals: tuple, tangents: tuple) -> tuple[Moments, Moments]:
    """The derivative written out: along hyperparameters no matrix but P⁻¹ is made, and nothing is factorised.

    With E = −½ d log s and G = E + ½ d log α, the whitened sites change by dλ̃ = (E + d log α)λ̃ and dΛ̃ = GΛ̃ + Λ̃G; and
    Λ̃ = P − I leaves of the products with it Λ̃m = λ̃ − m, Λ̃U = A − U and Λ̃(P⁻¹ − P⁻²) = (I − P⁻¹)².
    """
    lambda1, Lambda2, Phi, precision = primals
    w = _whitened(lambda1, Lambda2, Phi, precision)
    q, c, A = w.q, curvature(w.q), roots_of(w.q.moments).A
    dlambda1, dLambda2, dPhi, dprecision = given_tangents(tangents)
    root = jnp.sqrt(precision)
    # Of the sites themselves, at the given prior.
    dLambda = None if dLambda2 is None else 0.5 * mirrored(dLambda2) / (root[..., :, None] * root[..., None, :])
    E = None if dprecision is None else -0.5 * dprecision / precision
    dA: Any = None if dPhi is None else (dPhi / root[..., None, :]).mT
    dtrace: Any = 0.0 if dLambda is None else jnp.sum(diagonal(dLambda), axis=-1)
    if E is not None:
        dA = E[..., :, None] * A + (0.0 if dA is None else dA)
        dtrace = dtrace + 2.0 * jnp.sum(E * diagonal(w.Lambda2), axis=-1) / w.alpha
    dmean: Any = 0.0
    dvariance: Any = 0.0
    dkl: Any = 0.0
    dLambda_whole = None
    if dlambda1 is not None or dLambda is not None:
        alpha = w.alpha[..., None]
        d = jnp.zeros_like(w.lambda1) if dlambda1 is None else alpha * (dlambda1 / root)
        dLambda_whole = None if dLambda is None else alpha[..., None] * dLambda
        dmean, dvariance, dkl = by_sites(q, c, d, None if dLambda_whole is None else 0.5 * dLambda_whole)
    if E is not None or dLambda is not None:
        _, dalpha = jax.jvp(tempering, (w.trace,), (jnp.broadcast_to(dtrace, w.trace.shape),))
        half = 0.5 * (dalpha / w.alpha)[..., None]
        g = half + (0.0 if E is None else E)
        turned, scaled = g * q.m, half * w.lambda1 + g * q.m
        left = A - c.U
        dmean = dmean + matvec_transposed(c.U, scaled) - matvec_transposed(left, turned)
        dvariance = dvariance - 2.0 * jnp.sum(c.U * (g[..., :, None] * left), axis=-2)
        settled = 1.0 - 2.0 * diagonal(c.P_inverse) + jnp.sum(c.P_inverse * c.P_inverse, axis=-1)
        dkl = dkl + jnp.sum(g * settled + c.p * scaled - (q.m - c.p) * turned, axis=-1)
        along = (g[..., :, None] + g[..., None, :]) * w.Lambda2
        dLambda_whole = along + (0.0 if dLambda_whole is None else dLambda_whole)
    if dA is not None:
        # All of f's prior variance is explained: of dv_i = dk_ii − 2 A_iᵀdA_i + 2 U_iᵀdA_i the last is left.
        dmean = dmean + matvec_transposed(dA, q.m)
        dvariance = dvariance + 2.0 * jnp.sum(c.U * dA, axis=-2)
    dT = by_posterior_root(q, dA, dLambda_whole)
    return q.moments, tangents_like(q.moments, (dmean, dvariance, dkl, dA, dT))


weight_space.defjvp(_weight_space_jvp, symbolic_zeros=True)


@as_one_program
def weight_space_mean(m: Array, Lambda2: Array, Phi: Array, precision: Array) -> Moments:
    """q(w) = N(m, (S + Λ₂)⁻¹): the mean by itself; Λ₂ is tempered as that of `weight_space` is.

    Args:
        m: mean of the weights, (..., r).
        Lambda2: precision above the prior's, positive semi-definite, (..., r, r).
        Phi: features, (..., N, r).
        precision: s, (..., r).
    """
    q = weight_space(jnp.zeros_like(m), Lambda2, Phi, precision)
    return q._replace(mean=matvec(Phi, m), kl=q.kl + 0.5 * jnp.sum(precision * m * m, axis=-1))
