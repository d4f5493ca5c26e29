"""The perturbation through which the natural gradient of sites is asked for.

A posterior q(u) ∝ p(u) exp(λ₁ᵀφ − ½ φᵀΛ₂φ), with φ linear in u, has natural parameters (λ₁, −½Λ₂) above those of the
prior, and expectation parameters (E[φ], E[φφᵀ]). Let the marginals and the KL divergence move with a perturbation
(ε₁, ε₂) of the expectation parameters, to first order around ε = 0:

    δm_i = a_iᵀε₁,   δv_i = a_iᵀε₂a_i − 2 m_i a_iᵀε₁,   δKL = λ₁ᵀε₁ − ½ tr(Λ₂ε₂),        f_i = a_iᵀφ + …

Then ∂loss/∂ε at 0 is the natural gradient of the loss with respect to (λ₁, −½Λ₂) (Khan and Rue 2023, "The Bayesian
learning rule", section 2.2; Adam et al. 2021, section 3). It is an ordinary gradient of an ordinary value, obtained in
the backward pass that also differentiates the hyperparameters, and it passes through no factorisation.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp

from numpyro_sgp._internal.probed import Probed
from numpyro_sgp.math.products import matmul, matvec_transposed

__all__ = ["Perturbation", "Perturbed", "floored_matrix", "perturb_kl", "perturb_marginals"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Perturbation:
    """A zero perturbation of expectation parameters; its gradient is a natural gradient.

    Args:
        epsilon1: dual to λ₁, same shape.
        epsilon2: dual to −½Λ₂, same shape as Λ₂.
        transported: sites whose every number multiplies the corresponding number of the sites re-expressed at the
            current inducing variables, in an extra term of the loss that is zero at 0; so the gradient with respect to
            `transported` is those sites. None where the sites have no reference.
        scale: a zero added to the divergence of each latent, (...), or None; its gradient is the factor of the
            divergence in the loss, which `handlers.scale` makes another than 1.
        floor: smallest precision β = 2 ∂loss/∂v of a datum in the direction that is asked for, or None.
    """

    epsilon1: Array
    epsilon2: Array
    transported: Any = None
    scale: Array | None = None
    floor: float | None = dataclasses.field(default=None, metadata={"static": True})

    def factor(self, axes: int) -> Array:
        """The factor of the divergence with so many axes appended; 1 where the divergence is not in the loss."""
        assert self.scale is not None
        return jnp.where(self.scale > 0.0, self.scale, 1.0).reshape(self.scale.shape + (1,) * axes)

    def of_unit_scale(self, sites: Any) -> "Perturbation":
        """The natural gradient of a loss, divided by the factor that the divergence of each latent has in it.

        With ρ = 1 a step then ends where the sites are their targets, whatever the units of the loss.

        Args:
            sites: where the gradient was taken; they stay where a latent is not in the loss.
        """
        assert self.scale is not None
        batch = self.scale.ndim

        def divided(x: Array) -> Array:
            return x / self.factor(x.ndim - batch)

        transported = self.transported
        if transported is not None:
            inside = self.scale > 0.0
            # All latents share the reference, which is in the loss once for each of them.
            total = jnp.sum(self.scale)
            transported = dataclasses.replace(
                transported,
                lambda1=jnp.where(inside[..., None], divided(transported.lambda1), sites.lambda1),
                Lambda2=jnp.where(inside[..., None, None], divided(transported.Lambda2), sites.Lambda2),
                reference=jax.tree.map(
                    lambda new, old: jnp.where(total > 0.0, new / total, old), transported.reference, sites.reference
                ),
            )
        return dataclasses.replace(
            self, epsilon1=divided(self.epsilon1), epsilon2=divided(self.epsilon2), transported=transported
        )


@dataclasses.dataclass(frozen=True)
class Perturbed(Probed):
    """What `NaturalGradient` puts in the place of sites when it asks for the natural direction."""

    value: Any
    zero: Perturbation


@jax.custom_jvp
def _quadratic_at_zero(epsilon2: Array, a: Array) -> Array:
    """a_iᵀ ε₂ a_i at ε₂ = 0, which is 0: the product of zeros is not computed, its derivative below is the true one."""
    batch = jnp.broadcast_shapes(epsilon2.shape[:-2], a.shape[:-2])
    return jnp.zeros((*batch, a.shape[-1]), a.dtype)


@_quadratic_at_zero.defjvp
def _quadratic_at_zero_jvp(primals, tangents):
    epsilon2, a = primals
    # The tangent of a meets ε₂ = 0 and vanishes.
    return _quadratic_at_zero(epsilon2, a), jnp.sum(a * matmul(tangents[0], a), axis=-2)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _floored(delta_variance: Array, floor: float) -> Array:
    """δv as it is; the direction that is asked for takes ∂loss/∂v to be at least floor/2.

    δv depends on the perturbation ε alone. So this is a part of what a natural step asks for, and no parameter has a
    gradient that passes through it.
    """
    del floor
    return delta_variance


def _floored_forward(delta_variance: Array, floor: float) -> tuple[Array, None]:
    del floor
    return delta_variance, None


def _floored_backward(floor: float, _: None, g: Array) -> tuple[Array]:
    return (jnp.maximum(g, 0.5 * floor),)  # NaN stays NaN


_floored.defvjp(_floored_forward, _floored_backward)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def floored_matrix(delta_covariance: Array, floor: float) -> Array:
    """As `_floored`, for covariances between the numbers of an entry, (..., F, F): no eigenvalue is below floor/2."""
    del floor
    return delta_covariance


def _floored_matrix_forward(delta_covariance: Array, floor: float) -> tuple[Array, None]:
    del floor
    return delta_covariance, None


def _floored_matrix_backward(floor: float, _: None, g: Array) -> tuple[Array]:
    eigenvalues, V = jnp.linalg.eigh(0.5 * (g + g.mT))
    scaled = V * jnp.maximum(eigenvalues, 0.5 * floor)[..., None, :]  # NaN stays NaN
    return (matmul(scaled, V.mT),)


floored_matrix.defvjp(_floored_matrix_forward, _floored_matrix_backward)


def perturb_marginals(
    perturbed: Perturbed,
    a: Array | None,
    mean: Array,
    variance: Array,
    own_mean: Array | None = None,
    extra: tuple[Array, Array] | None = None,
) -> tuple[Array, Array]:
    """The marginals as functions of the perturbation, (m + δm, v + δv).

    Args:
        perturbed: sites and perturbation.
        a: the vectors of the sites' basis, one for each datum, (..., M, N), or None where each datum has its own site.
        mean: posterior means of the centred process, (..., N).
        variance: posterior variances, (..., N).
        own_mean: aᵀE[φ], the part of the mean that these sites make, (..., N), where the mean has other parts.
        extra: what perturbations of other sites add to E[f] and to E[f²], (..., N), where they share the mean.
    """
    perturbation, m = perturbed.zero, jax.lax.stop_gradient(mean if own_mean is None else own_mean)
    if a is None:
        delta_mean, quadratic = perturbation.epsilon1, perturbation.epsilon2
    else:
        a = jax.lax.stop_gradient(a)
        # Sites of the covariance alone have no λ₁, and leave the mean to whoever holds it.
        held = perturbation.epsilon1.shape[-1] > 0
        delta_mean = matvec_transposed(a, perturbation.epsilon1) if held else jnp.zeros_like(m)
        quadratic = _quadratic_at_zero(perturbation.epsilon2, a)
    if extra is not None:
        delta_mean, quadratic = delta_mean + extra[0], quadratic + extra[1]
    # In the shape of the marginals: what each of them contributes has a floor of its own.
    delta_variance = jnp.broadcast_to(quadratic - 2.0 * m * delta_mean, variance.shape)
    if perturbation.floor is not None:
        delta_variance = _floored(delta_variance, perturbation.floor)
    return mean + delta_mean, variance + delta_variance


def perturb_kl(perturbation: Perturbation, sites: Any, kl: Array) -> Array:
    """KL + λ₁ᵀε₁ − ½ tr(Λ₂ε₂), (...), with the sites expressed at the current inducing variables."""
    sites = jax.lax.stop_gradient(sites)
    axes, of_linear = (tuple(range(kl.ndim - x.ndim, 0)) for x in (sites.Lambda2, sites.lambda1))
    linear = jnp.sum(sites.lambda1 * perturbation.epsilon1, axis=of_linear)
    kl = kl + linear - 0.5 * jnp.sum(sites.Lambda2 * perturbation.epsilon2, axis=axes)
    if perturbation.scale is not None:
        kl = kl + perturbation.scale
    transported = perturbation.transported
    if transported is None:
        return kl
    reference = jax.tree.map(lambda zero, value: jnp.sum(zero * value), transported.reference, sites.reference)
    own = jnp.sum(transported.lambda1 * sites.lambda1, axis=-1) + jnp.sum(
        transported.Lambda2 * sites.Lambda2, axis=(-2, -1)
    )
    return kl + own + sum(jax.tree.leaves(reference))
