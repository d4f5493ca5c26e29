"""q(w) for the weights of a kernel of finite rank: f = Φw, w ~ N(0, S⁻¹) with S = diag(s).

With w = S^−½ v the prior of v is standard, A = S^−½Φᵀ, and k_ii = |A_i|²: nothing of f is left unexplained. The sites
are tempered, by a power α that is 1 until rounding would swallow the prior.
"""

from jax import Array
import jax.numpy as jnp

from numpyro_sgp.conditionals.dual import natural_whitened
from numpyro_sgp.conditionals.moments import Moments
from numpyro_sgp.eager import as_one_program
from numpyro_sgp.linalg import diagonal, matvec

__all__ = ["weight_space", "weight_space_mean"]


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


@as_one_program
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
    root = jnp.sqrt(precision)
    A = jnp.swapaxes(Phi / root[..., None, :], -1, -2)
    Lambda = Lambda2 / (root[..., :, None] * root[..., None, :])
    alpha = tempering(jnp.sum(diagonal(Lambda), axis=-1))
    linear, precision = alpha[..., None] * (lambda1 / root), alpha[..., None, None] * Lambda
    return natural_whitened(linear, precision, A, jnp.sum(A * A, axis=-2))


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
