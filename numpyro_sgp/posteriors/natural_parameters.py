"""Natural parameters of sparse posteriors, and the perturbation through which their natural gradient is asked for.

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
from typing import Any, ClassVar, Self

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

from numpyro_sgp._internal.probed import Probed
from numpyro_sgp._internal.pytrees import own_copy
from numpyro_sgp.inducing import AbstractInducing
from numpyro_sgp.math.products import matmul, matvec, matvec_transposed

__all__ = [
    "AbstractSites",
    "DatumSites",
    "Earlier",
    "EffectSites",
    "JointSites",
    "PairSites",
    "Past",
    "Perturbation",
    "Perturbed",
    "RowSites",
    "TiedSites",
    "floored_matrix",
    "perturb_kl",
    "perturb_marginals",
]


@dataclasses.dataclass(frozen=True)
class AbstractSites:
    """Natural parameters (λ₁, Λ₂) relative to the prior; the type tells an optimizer to take natural steps."""

    lambda1: Array
    Lambda2: Array

    needs_floor = False  # whether Λ₂ has to stay positive semi-definite

    def perturbation(self, *, for_step: bool, floor: float | None = None) -> "Perturbation":
        """A zero perturbation of these sites.

        Args:
            for_step: whether to add what `natural_step` needs beside the direction.
            floor: the smallest precision of a datum, or None.
        """
        zeros = jnp.zeros_like(self.lambda1), jnp.zeros_like(self.Lambda2)
        return Perturbation(*zeros, scale=self._scale() if for_step else None, floor=floor)

    def _scale(self) -> Array:
        return jnp.zeros(self.lambda1.shape[:-1], self.lambda1.dtype)

    def natural_step(
        self, direction: "Perturbation", step_size: ArrayLike, damping: ArrayLike = 1.0
    ) -> "AbstractSites":
        """λ₁ ← λ₁ − ρ ∂loss/∂ε₁ and −½Λ₂ ← −½Λ₂ − ρ ∂loss/∂ε₂.

        Args:
            direction: ∂loss/∂ε at 0, with the fields of a perturbation, for a loss that has the divergence once.
            step_size: ρ in (0, 1]; 1 replaces the sites by their targets.
            damping: the part of ρ that steps refused before have left of it, for sites whose posterior takes other
                steps than they do.
        """
        del damping
        start = self if direction.transported is None else direction.transported
        step_size = jnp.asarray(step_size, self.lambda1.dtype)  # sites of one model may have several dtypes
        return dataclasses.replace(
            start,
            lambda1=start.lambda1 - step_size * direction.epsilon1,
            Lambda2=start.Lambda2 + 2.0 * step_size * direction.epsilon2,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Past:
    """Sites of data that are no longer at hand, t(u) = exp(lᵀφ − ½ |Rᵀφ|²), in the basis of the sites they are part of.

    They are the same as observations of linear functions of u. A posterior that has them counts E[log t(u)] with its
    divergence.

    Args:
        linear: l, (..., M).
        root: R, (..., M, R).
    """

    linear: Array
    root: Array

    @classmethod
    def of(cls, linear: Array, precision: Array) -> Self:
        """From l and R Rᵀ, (..., M, M).

        Negative eigenvalues are cut off: those of rounding, and small ones of a noise scale under the tighter bound.
        """
        eigenvalues, V = jnp.linalg.eigh(0.5 * (precision + precision.mT))
        return cls(linear, V * jnp.sqrt(jnp.maximum(eigenvalues, 0.0))[..., None, :])  # NaN stays NaN

    def columns(self) -> Array:
        """Vectors of the linear functions, those of l first, (..., M, 1 + R)."""
        return jnp.concatenate([self.linear[..., None], self.root], axis=-1)

    @staticmethod
    def expected(mean: Array, variance: Array) -> Array:
        """E[log t(u)], (...), from mean and variance of the linear functions, (..., 1 + R)."""
        return mean[..., 0] - 0.5 * jnp.sum(mean[..., 1:] ** 2 + variance[..., 1:], axis=-1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TiedSites(AbstractSites):
    """Sums over the data: λ₁ = Σ_i a_i g_i and Λ₂ = Σ_i β_i a_i a_iᵀ, in the basis that the posterior chose for a_i.

    Args:
        lambda1: (..., M), or (..., 0) where the mean is a parameter of its own.
        Lambda2: symmetric positive semi-definite, (..., M, M).
        reference: the inducing variables that the sums refer to, where these are trained and so move away from them;
            None where they stay.
        past: what of the sums is that of data which are no longer at hand, at the current inducing variables; None
            where all data are.
    """

    lambda1: Array
    Lambda2: Array
    reference: AbstractInducing | None = None
    past: Past | None = None

    @classmethod
    def zeros(
        cls,
        batch_shape: tuple[int, ...],
        M: int,
        dtype: jax.typing.DTypeLike,
        reference: AbstractInducing | None = None,
    ) -> Self:
        """Sites that change nothing: q is the prior."""
        # NumPy's zeros, since for each shape of its own `jnp.zeros` would compile a program.
        lambda1, Lambda2 = np.zeros((*batch_shape, M), dtype), np.zeros((*batch_shape, M, M), dtype)
        return cls(jnp.asarray(lambda1), jnp.asarray(Lambda2), reference)

    def with_rows(self, a: Array, linear: Array, precision: Array) -> Self:
        """The sums with other rows: λ₁ + Σ_i lᵢ aᵢ and Λ₂ + Σ_i pᵢ aᵢaᵢᵀ.

        Args:
            a: vectors of the rows in the basis of the sites, (..., M, N).
            linear: l, (..., N).
            precision: p, (..., N).
        """
        return dataclasses.replace(
            self,
            lambda1=self.lambda1 + matvec(a, linear),
            Lambda2=self.Lambda2 + matmul(a * precision[..., None, :], a.mT),
        )

    def perturbation(self, *, for_step: bool, floor: float | None = None) -> "Perturbation":
        """A zero perturbation; with a reference, a natural step starts from the sites at the current u."""
        perturbation = super().perturbation(for_step=for_step, floor=floor)
        if self.reference is None or not for_step:
            return perturbation
        here = dataclasses.replace(self, past=None)
        return dataclasses.replace(perturbation, transported=jax.tree.map(jnp.zeros_like, here))

    def natural_step(self, direction: "Perturbation", step_size: ArrayLike, damping: ArrayLike = 1.0) -> "TiedSites":
        moved = super().natural_step(direction, step_size, damping)
        assert isinstance(moved, TiedSites)
        return dataclasses.replace(moved, past=self.past)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class JointSites(TiedSites):
    """Tied sites of one Gaussian over several GPs and other latents: the loss need not be convex in them together."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EffectSites(JointSites):
    """Sums for the effects of groups beside those of `JointSites`: no two effects meet in one row of the data.

    Args:
        lambda1: Σ_i c_i g_i over the rows of each group, (G,); c_i is the coefficient of the effect in row i.
        Lambda2: in the first column the precisions Σ_i β_i c_i², in the others Σ_i β_i c_i a_i, (G, 1 + M).
        reference: as in `TiedSites`.
        past: as in `TiedSites`, as one observation for each effect: its coefficient, and its vector in the other
            members, are a row of the root, (G, 1 + M); `linear` has its linear term, (G,).
    """

    @classmethod
    def zeros(
        cls,
        batch_shape: tuple[int, ...],
        M: int,
        dtype: jax.typing.DTypeLike,
        reference: AbstractInducing | None = None,
    ) -> Self:
        """Sites that change nothing, for (G,) effects beside M numbers."""
        lambda1, Lambda2 = np.zeros(batch_shape, dtype), np.zeros((*batch_shape, 1 + M), dtype)
        return cls(jnp.asarray(lambda1), jnp.asarray(Lambda2), reference)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DatumSites(AbstractSites):
    """One Gaussian factor for each row of the training inputs, t_i(f_i) ∝ exp(λ₁ᵢ f_i − ½ λ₂ᵢ f_i²).

    Args:
        lambda1: (..., N).
        Lambda2: precisions, the diagonal of Λ₂, (..., N).
        X: the training inputs, or functionals, the factors belong to, (N, D); data, not trained.
        places: which rows are near each other, for a posterior that asks for that; data.
    """

    lambda1: Array
    Lambda2: Array
    X: Array
    places: Any = None

    @classmethod
    def zeros(cls, batch_shape: tuple[int, ...], X: Array, places: Any = None) -> "DatumSites":
        """Sites that change nothing: q is the prior."""
        # In buffers of their own, so that a state with them can be donated.
        first, second = (jnp.zeros((*batch_shape, X.shape[-2]), X.dtype) for _ in range(2))
        return cls(first, second, own_copy(X), places)

    def extended(self, linear: Array, precision: Array, X: Array) -> "DatumSites":
        """These sites, and those of other rows: λ₁, (..., N′), precisions, (..., N′), and inputs, (N′, D)."""
        first = jnp.concatenate([self.lambda1, linear], axis=-1)
        return DatumSites(first, jnp.concatenate([self.Lambda2, precision], axis=-1), jnp.concatenate([self.X, X]))

    @property
    def fixed_X(self) -> Array:
        """The training inputs, as data: without a gradient, whatever optimizer holds the sites."""
        return jax.lax.stop_gradient(self.X)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowSites(AbstractSites):
    """Sites of f in its rows beside those of latents w in one Gaussian, exp(λ₁ᵀf − ½ fᵀdiag(p) f − fᵀCᵀw).

    Args:
        lambda1: λ₁, (N,).
        Lambda2: p in the first column, Cᵀ in the others, (N, 1 + P).
        X: the training inputs, (N, D); data, not trained.
        places: as in `DatumSites`.
        earlier: sites of other data, which are the prior of these rows; None where there are none.
    """

    lambda1: Array
    Lambda2: Array
    X: Array
    places: Any = None
    earlier: "Earlier | None" = None

    @classmethod
    def zeros(cls, num_latents: int, X: Array, places: Any = None) -> "RowSites":
        """Sites that change nothing, beside P latents."""
        N = X.shape[0]
        return cls(jnp.zeros(N, X.dtype), jnp.zeros((N, 1 + num_latents), X.dtype), own_copy(X), places)

    def with_earlier(self) -> "RowSites":
        """The sites of the earlier rows, and these after them."""
        if self.earlier is None:
            return self
        rows = self.earlier.rows
        return RowSites(
            jnp.concatenate([rows.lambda1, self.lambda1]),
            jnp.concatenate([rows.Lambda2, self.Lambda2]),
            jnp.concatenate([rows.X, self.X]),
            rows.places,
        )

    @property
    def fixed_X(self) -> Array:
        """The training inputs, as data."""
        return jax.lax.stop_gradient(self.X)

    def given(self, w: Array) -> DatumSites:
        """Those of f alone, given w, (P,)."""
        return DatumSites(self.lambda1 - matvec(self.Lambda2[:, 1:], w), self.Lambda2[:, 0], self.X, self.places)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PairSites(AbstractSites):
    """Sums over the rows between neighbouring inducing times, exp(λⱼᵀyⱼ − ½ yⱼᵀΛⱼyⱼ − yⱼᵀCⱼᵀw) for each pair of states.

    With K numbers in each of J pairs yⱼ, beside P latents w; none where f has a posterior of its own.

    Args:
        lambda1: λⱼ, (..., J, K).
        Lambda2: Λⱼ, and Cⱼᵀ to its right, (..., J, K, K + P).
        Z: inducing times, in ascending order, (1 + J,); data, not trained.
    """

    lambda1: Array
    Lambda2: Array
    Z: Array

    earlier: ClassVar[None] = None

    @classmethod
    def zeros(cls, batch_shape: tuple[int, ...], num_states: int, Z: Array, num_latents: int = 0) -> "PairSites":
        """Sites that change nothing, with so many numbers in the state at each inducing time."""
        K, shape = 2 * num_states, (*batch_shape, Z.shape[0] - 1)
        return cls(jnp.zeros((*shape, K), Z.dtype), jnp.zeros((*shape, K, K + num_latents), Z.dtype), own_copy(Z))

    def _scale(self) -> Array:
        return jnp.zeros(self.lambda1.shape[:-2], self.lambda1.dtype)

    @property
    def precision(self) -> Array:
        """Λⱼ, (..., J, K, K)."""
        return self.Lambda2[..., : self.lambda1.shape[-1]]

    @property
    def crossed(self) -> Array:
        """Cⱼᵀ, (..., J, K, P)."""
        return self.Lambda2[..., self.lambda1.shape[-1] :]

    @property
    def fixed_Z(self) -> Array:
        """The inducing times, as data."""
        return jax.lax.stop_gradient(self.Z)

    def with_earlier(self) -> "PairSites":
        """The sites: earlier rows are part of their sums."""
        return self

    def given(self, w: Array) -> "PairSites":
        """Those of f alone, given w, (P,)."""
        return PairSites(self.lambda1 - matvec(self.crossed, w), self.precision, self.Z)

    def with_rows(self, pair: Array, a: Array, linear: Array, precision: Array) -> "PairSites":
        """The sums with other rows: λ + Σ_n lₙ aₙ and Λ + Σ_n pₙ aₙaₙᵀ, each in its pair.

        Args:
            pair: which pair knows of a row, (N,).
            a: vectors of the rows, (..., N, K).
            linear: l, (..., N).
            precision: p, (..., N).
        """
        outer = precision[..., None, None] * a[..., :, None] * a[..., None, :]
        lambda1 = self.lambda1.at[..., pair, :].add(linear[..., None] * a)
        return PairSites(lambda1, self.Lambda2.at[..., pair, :, :].add(outer), self.Z)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Earlier:
    """What is known from data that came before.

    Args:
        latents: sites of w.
        rows: those of f in its rows and between the two.
    """

    latents: JointSites
    rows: RowSites


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
    transported: TiedSites | None = None
    scale: Array | None = None
    floor: float | None = dataclasses.field(default=None, metadata={"static": True})

    def factor(self, axes: int) -> Array:
        """The factor of the divergence with so many axes appended; 1 where the divergence is not in the loss."""
        assert self.scale is not None
        return jnp.where(self.scale > 0.0, self.scale, 1.0).reshape(self.scale.shape + (1,) * axes)

    def at_rows(self, pair: Array, a: Array) -> "Perturbation":
        """As one of sites of f in each row, of that of sites on pairs: of E[f], E[f²] and 2 E[f w], (..., N[, 1 + P]).

        Args:
            pair: which pair knows of a row, (N,).
            a: vectors of the rows, (..., N, K).
        """
        a = jax.lax.stop_gradient(a)
        linear = jnp.sum(a * self.epsilon1[..., pair, :], axis=-1)
        turned = jnp.sum(a[..., :, None] * self.epsilon2[..., pair, :, :], axis=-2)
        K = a.shape[-1]
        own = jnp.sum(turned[..., :K] * a, axis=-1)
        return Perturbation(linear, jnp.concatenate([own[..., None], turned[..., K:]], axis=-1), floor=self.floor)

    def of_unit_scale(self, sites: AbstractSites) -> "Perturbation":
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
            assert isinstance(sites, TiedSites)
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

    value: AbstractSites
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


def perturb_kl(perturbation: Perturbation, sites: AbstractSites, kl: Array) -> Array:
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
    assert isinstance(sites, TiedSites)
    reference = jax.tree.map(lambda zero, value: jnp.sum(zero * value), transported.reference, sites.reference)
    own = jnp.sum(transported.lambda1 * sites.lambda1, axis=-1) + jnp.sum(
        transported.Lambda2 * sites.Lambda2, axis=(-2, -1)
    )
    return kl + own + sum(jax.tree.leaves(reference))
