"""Sites: the natural parameters of a posterior above those of its prior, by what they are held for.

A posterior is q(u) ∝ p(u) t(u), t(u) = exp(λ₁ᵀφ − ½ φᵀΛ₂φ) with φ linear in u. Sites are (λ₁, Λ₂): sums over all data,
one for each row, or one for the rows between two inducing times; of f alone, or beside other latents. `NaturalGradient`
takes a step for whatever is a site, by the direction that a `Perturbation` asks for.
"""

import dataclasses
from typing import Any, ClassVar, Self

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

from numpyro_sgp._internal.pytrees import own_copy
from numpyro_sgp.inducing import AbstractInducing
from numpyro_sgp.math.products import matmul, matvec
from numpyro_sgp.posteriors.perturbation import Perturbation

__all__ = [
    "AbstractSites",
    "DatumSites",
    "Earlier",
    "EffectSites",
    "JointSites",
    "PairSites",
    "Past",
    "RowSites",
    "TiedSites",
]


@dataclasses.dataclass(frozen=True)
class AbstractSites:
    """Natural parameters (λ₁, Λ₂) relative to the prior; the type tells an optimizer to take natural steps."""

    lambda1: Array
    Lambda2: Array

    needs_floor = False  # whether Λ₂ has to stay positive semi-definite

    def perturbation(self, *, for_step: bool, floor: float | None = None) -> Perturbation:
        """A zero perturbation of these sites.

        Args:
            for_step: whether to add what `natural_step` needs beside the direction.
            floor: the smallest precision of a datum, or None.
        """
        zeros = jnp.zeros_like(self.lambda1), jnp.zeros_like(self.Lambda2)
        return Perturbation(*zeros, scale=self._scale() if for_step else None, floor=floor)

    def _scale(self) -> Array:
        return jnp.zeros(self.lambda1.shape[:-1], self.lambda1.dtype)

    def natural_step(self, direction: Perturbation, step_size: ArrayLike, damping: ArrayLike = 1.0) -> "AbstractSites":
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

    def perturbation(self, *, for_step: bool, floor: float | None = None) -> Perturbation:
        """A zero perturbation; with a reference, a natural step starts from the sites at the current u."""
        perturbation = super().perturbation(for_step=for_step, floor=floor)
        if self.reference is None or not for_step:
            return perturbation
        here = dataclasses.replace(self, past=None)
        return dataclasses.replace(perturbation, transported=jax.tree.map(jnp.zeros_like, here))

    def natural_step(self, direction: Perturbation, step_size: ArrayLike, damping: ArrayLike = 1.0) -> "TiedSites":
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
