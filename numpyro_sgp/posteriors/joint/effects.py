"""The effects of groups beside other members of a joint Gaussian, eliminated one by one.

Let z be the other members, and let each row of the data look at one number of e ~ N(0, diag(b)) at most. Its predictor
is η = hᵀz + c e_g + …. The posterior precision of e given z is then diagonal, d_g = 1/b_g + Σ β_i c_i², and

    e_g | z ~ N((λ_g − C_gᵀz)/d_g, 1/d_g),      C_g = Σ β_i c_i h_i.

So q(z) has the sites λ₁ − Σ_g C_g λ_g/d_g and Λ₂ − Σ_g C_g C_gᵀ/d_g, and a predictor depends on z through
h̃ = h − C_g c/d_g. With G effects and M other members a step costs O(G M²) in the place of O((G + M)³).
"""

from typing import NamedTuple

from jax import Array
import jax.numpy as jnp

from numpyro_sgp.math.products import matmul, matvec
from numpyro_sgp.posteriors.moments import whiten
from numpyro_sgp.posteriors.sites import EffectSites, TiedSites

__all__ = ["Eliminated", "Loading", "eliminated"]


class Loading(NamedTuple):
    """The effect in each of some predictors.

    Attributes:
        coefficient: c, (E,), 0 where there is none.
        index: g, (E,).
    """

    coefficient: Array
    index: Array


class Eliminated(NamedTuple):
    """What is left of the sites where e is integrated out, and e given z.

    Attributes:
        lambda1: sites of q(z), (M,).
        Lambda2: (M, M).
        precision: d, of e given z, (G,).
        linear: λ of the effects, (G,).
        C: in the basis of z as it is now, (M, G).
        V: K C, prior covariances of z with Cᵀz, (M, G).
    """

    lambda1: Array
    Lambda2: Array
    precision: Array
    linear: Array
    C: Array
    V: Array

    def restored(self, lambda1: Array, Lambda2: Array) -> tuple[Array, Array]:
        """The sites of z and e together, those of z, from sites of q(z) in the basis of z as it is now."""
        return (
            lambda1 + matvec(self.C, self.linear / self.precision),
            Lambda2 + matmul(self.C / self.precision, self.C.T),
        )

    def loaded(self, k: Array, variance: Array, loading: Loading) -> tuple[Array, Array]:
        """Covariances with z and variances of predictors, from those without their effects, (M, E) and (E,).

        A predictor with these, as if z were all that there is, has the posterior variance of η. Those of all Cᵀz come
        last.
        """
        c, g = loading
        share = c / self.precision[g]
        loaded = k - share * self.V[:, g]
        # k̃ᵀK⁻¹k̃ − kᵀK⁻¹k = −(c/d) C_gᵀ(k̃ + k)
        variance = variance + c * share - share * jnp.sum(self.C[:, g] * (loaded + k), axis=0)
        return (
            jnp.concatenate([loaded, self.V], axis=-1),
            jnp.concatenate([variance, jnp.sum(self.C * self.V, axis=0)]),
        )

    def divergence(self, prior_variance: Array, mean: Array, T: Array) -> Array:
        """E KL(q(e | z) ‖ p(e)).

        Args:
            prior_variance: b, (G,).
            mean: of Cᵀz, (G,).
            T: the posterior root of Cᵀz, (..., G).
        """
        second = ((self.linear - mean) ** 2 + jnp.sum(T * T, axis=0)) / self.precision**2
        ratio = self.precision * prior_variance
        return 0.5 * jnp.sum(1.0 / ratio - 1.0 + jnp.log(ratio) + second / prior_variance)


def eliminated(
    sites: TiedSites, effects: EffectSites, prior_variance: Array, K: Array | None, Kuv: Array | None
) -> Eliminated:
    """Integrate the effects out of the sites.

    Args:
        sites: of z, (M,) and (M, M).
        effects: of e and beside it, (G,) and (G, 1 + M).
        prior_variance: b, (G,).
        K: prior covariance of z, (M, M); None for whitened variables.
        Kuv: its covariance with the variables that the sites refer to; None where these are the same.
    """
    own, C = effects.Lambda2[:, 0], effects.Lambda2[:, 1:].T
    precision = 1.0 / prior_variance + own
    lambda1 = sites.lambda1 - matvec(C, effects.lambda1 / precision)
    Lambda2 = sites.Lambda2 - matmul(C / precision, C.T)
    if K is None:
        return Eliminated(lambda1, Lambda2, precision, effects.lambda1, C, C)
    if Kuv is None:
        return Eliminated(lambda1, Lambda2, precision, effects.lambda1, C, matmul(K, C))
    V = matmul(Kuv, C)
    inverse_root = whiten(K, jnp.eye(K.shape[-1], dtype=K.dtype))[1]
    now = matmul(inverse_root.T, matmul(inverse_root, V))
    return Eliminated(lambda1, Lambda2, precision, effects.lambda1, now, V)
