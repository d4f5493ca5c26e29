"""q(w) for the weights of a kernel of finite rank: f = Φw, w ~ N(0, S⁻¹) with S = diag(s).

With w = S^−½ v the prior of v is standard, A = S^−½Φᵀ, and k_ii = |A_i|²: nothing of f is left unexplained.
"""

from jax import Array
import jax.numpy as jnp

from numpyro_sgp.conditionals.dual import natural_whitened
from numpyro_sgp.conditionals.moments import Moments
from numpyro_sgp.eager import as_one_program
from numpyro_sgp.linalg import matvec

__all__ = ["weight_space", "weight_space_mean"]


@as_one_program
def weight_space(lambda1: Array, Lambda2: Array, Phi: Array, precision: Array) -> Moments:
    """q(w) ∝ N(w | 0, S⁻¹) exp(λ₁ᵀw − ½wᵀΛ₂w): the sites are sums over the data, the prior is added exactly.

    m = Φ P⁻¹λ₁, v_i = φ_iᵀP⁻¹φ_i, KL = ½ [ tr(P⁻¹S) − r + |S^½P⁻¹λ₁|² + log|P| − log|S| ] with P = S + Λ₂. For a
    Gaussian likelihood λ₁ = Φᵀy/σ² and Λ₂ = ΦᵀΦ/σ²; minibatch steps of size ρ are exponential averages of these, the
    recursion of stochastic compositional gradient descent with F̃ = σ²P.

    Args:
        lambda1: Σ_i g_i φ_i, (..., r).
        Lambda2: Σ_i β_i φ_i φ_iᵀ, positive semi-definite, (..., r, r).
        Phi: features, (..., N, r).
        precision: s, (..., r).

    References:
        Shoham and Avron (2025), "Unbiased stochastic optimization for Gaussian processes on finite dimensional RKHS",
        section 3.2, corrected: σ²S is not averaged.
    """
    root = jnp.sqrt(precision)
    A = jnp.swapaxes(Phi / root[..., None, :], -1, -2)
    Lambda = Lambda2 / (root[..., :, None] * root[..., None, :])
    return natural_whitened(lambda1 / root, Lambda, A, jnp.sum(A * A, axis=-2))


@as_one_program
def weight_space_mean(m: Array, Lambda2: Array, Phi: Array, precision: Array) -> Moments:
    """q(w) = N(m, (S + Λ₂)⁻¹): the mean by itself.

    Args:
        m: mean of the weights, (..., r).
        Lambda2: precision above the prior's, positive semi-definite, (..., r, r).
        Phi: features, (..., N, r).
        precision: s, (..., r).
    """
    q = weight_space(jnp.zeros_like(m), Lambda2, Phi, precision)
    return q._replace(mean=matvec(Phi, m), kl=q.kl + 0.5 * jnp.sum(precision * m * m, axis=-1))
