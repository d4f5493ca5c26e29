"""Inducing variables: function values at inducing inputs, and the interface of others.

An inducing object is a pytree with three methods: `Kuu(kernel)`, the covariance of the inducing variables u;
`Kuf(kernel, X)`, their covariance with f(X); `Kuv(kernel, other)`, their covariance with another object's. Everything
else in the package uses those three and `num_inducing`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
import dataclasses
from typing import Any, final

import jax
from jax import Array
from jax.core import Tracer
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

from numpyro_sgp._internal.eager import as_one_program

__all__ = [
    "AbstractInducing",
    "BoundedInducingPoints",
    "InducingPoints",
    "as_inducing",
    "as_points",
    "check_new_inputs",
    "check_width",
]


class AbstractInducing(ABC):
    """Inducing variables u, linear functionals of f with covariances that a kernel determines."""

    @property
    @abstractmethod
    def num_inducing(self) -> int:
        """M, the number of inducing variables."""

    @property
    @abstractmethod
    def width(self) -> int:
        """D, the number of input columns they live in."""

    @abstractmethod
    def Kuu(self, kernel: Callable) -> Array:
        """Cov(u, u), (..., M, M), without jitter."""

    @abstractmethod
    def Kuf(self, kernel: Callable, X: Array) -> Array:
        """Cov(u, f(X)), (..., M, N)."""

    @abstractmethod
    def Kuv(self, kernel: Callable, other: "AbstractInducing") -> Array:
        """Cov(u, v) with the inducing variables v of another object, (..., M, M')."""

    def Kuu_diagonal(self, kernel: Callable) -> Array:
        """Var(u), (..., M); an object that knows it without its whole Kuu says so here."""
        return jnp.diagonal(self.Kuu(kernel), axis1=-2, axis2=-1)

    def take(self, index: Array) -> "AbstractInducing":
        """Some of the inducing variables, at `index`, (B,); as written here, every array has them on its axis −2."""
        return jax.tree.map(lambda leaf: jnp.take(leaf, index, axis=-2), self)


class AbstractPoints(AbstractInducing):
    """Function values at inducing inputs, u = f(Z); a subclass says where Z comes from."""

    Z: Any

    @property
    def num_inducing(self) -> int:
        return self.Z.shape[-2]

    @property
    def width(self) -> int:
        return self.Z.shape[-1]

    def Kuu(self, kernel: Callable) -> Array:
        # Distances by matrix products leave rounding on the diagonal; the kernel knows it exactly.
        return _with_diagonal(kernel(self.Z, self.Z), kernel(self.Z))

    def Kuu_diagonal(self, kernel: Callable) -> Array:
        return kernel(self.Z)

    def Kuf(self, kernel: Callable, X: Array) -> Array:
        return kernel(self.Z, X)

    def Kuv(self, kernel: Callable, other: AbstractInducing) -> Array:
        if isinstance(other, AbstractPoints):
            return kernel(self.Z, other.Z)
        return other.Kuf(kernel, self.Z).mT


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class InducingPoints(AbstractPoints):
    """Function values at inducing inputs, u = f(Z).

    Args:
        Z: inducing inputs in the units of X, (M, D); leading axes are one set for each latent of a batch.
    """

    Z: Array


@as_one_program
def _with_diagonal(K: Array, variances: Array) -> Array:
    index = jnp.arange(K.shape[-1])
    return K.at[..., index, index].set(variances)


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BoundedInducingPoints(AbstractPoints):
    """Function values at inducing inputs kept inside a box, Z = lower + (upper − lower) · sigmoid(logits).

    With `learn_inducing=True` any optimizer moves the logits freely and the inputs never leave the box: for inputs
    that live in one, where a kernel (periodic on an interval, a warp, a basis on a domain) means nothing outside.

    Args:
        logits: unconstrained inputs, (..., M, D).
        lower: smallest value of each column in the units of X, D numbers.
        upper: largest value of each column, D numbers.
    """

    logits: Array
    lower: tuple[float, ...] = dataclasses.field(metadata={"static": True})
    upper: tuple[float, ...] = dataclasses.field(metadata={"static": True})

    @classmethod
    def at(cls, Z: ArrayLike, lower: ArrayLike, upper: ArrayLike) -> "BoundedInducingPoints":
        """Inducing inputs at Z, (..., M, D), moved by a thousandth of the box off the sides that they lie on.

        Args:
            Z: inducing inputs, inside the box.
            lower: smallest values, a number or one for each column.
            upper: largest values, likewise.

        Raises:
            ValueError: a side without extent, or inputs outside of the box.
        """
        Z = as_points(Z)
        # In the dtype of Z: 0.1 is below its own rounding to float32.
        low, high = (np.broadcast_to(np.asarray(side, Z.dtype), Z.shape[-1:]) for side in (lower, upper))
        if not np.all(low < high):
            msg = f"`lower` must be smaller than `upper` in each column, got {low} and {high}."
            raise ValueError(msg)
        if not isinstance(Z, Tracer) and (np.any(low > Z) or np.any(high < Z)):
            msg = f"Some inducing inputs lie outside of the box from {low} to {high}. Clip them, or widen the box."
            raise ValueError(msg)
        # A side itself is at an infinite logit, where nothing moves.
        unit = jnp.clip((Z - low) / (high - low), 1e-3, 1.0 - 1e-3)
        return cls(jax.scipy.special.logit(unit), tuple(low.tolist()), tuple(high.tolist()))

    @property
    def Z(self) -> Array:
        """The inputs, (..., M, D)."""
        dtype = self.logits.dtype
        low, high = jnp.asarray(self.lower, dtype), jnp.asarray(self.upper, dtype)
        return low + (high - low) * jax.nn.sigmoid(self.logits)


def as_inducing(inducing: ArrayLike | AbstractInducing, argument: str = "inducing") -> AbstractInducing:
    """An inducing object as it is, or an array of inducing inputs, (..., M, D), as `InducingPoints`.

    Args:
        inducing: what a user gave.
        argument: what the user calls it.

    Raises:
        ValueError: an array with fewer than two axes, without rows, or with NaN in it.
        TypeError: what is no array.
    """
    if inducing is None or isinstance(inducing, str):
        msg = (
            f"`{argument}` must be inducing inputs, (M, D), or an inducing object, got {inducing!r}. `AutoTSVGP(model, "
            "None)` is the posterior without inducing inputs."
        )
        raise TypeError(msg)
    if type(inducing) is InducingPoints:
        inducing = inducing.Z
    if isinstance(inducing, AbstractInducing):
        return inducing
    return InducingPoints(as_points(inducing, argument))


def as_points(Z: ArrayLike, argument: str = "inducing") -> Array:
    """Inducing inputs as an array of floats, (..., M, D); the errors are those of `as_inducing`."""
    Z = jnp.asarray(Z)
    if Z.ndim < 2 or Z.shape[-2] == 0:
        msg = f"`{argument}` must have shape (M, D) with M ≥ 1, got {Z.shape}. For one column use Z[:, None]."
        raise ValueError(msg)
    if not jnp.issubdtype(Z.dtype, jnp.floating):
        Z = Z.astype(jnp.result_type(float))
    if not isinstance(Z, Tracer) and np.isnan(Z).any():
        msg = f"`{argument}` of shape {Z.shape} contains NaN. Drop or impute the rows it was made from."
        raise ValueError(msg)
    return Z


def check_new_inputs(width: int, X_new: Any) -> None:
    """Raise if inputs, or functionals, to predict at have another number of columns than those of the GP."""
    shape = np.shape(X_new)
    if len(shape) > 1 and shape[-1] != width:
        msg = f"`X_new` has shape {shape}, but this GP has inputs of {width} columns. Pass (N_new, D)."
        raise ValueError(msg)


def check_width(inducing: AbstractInducing, X: Array, argument: str = "inducing") -> None:
    """Raise if inducing variables live in another number of columns than the inputs have."""
    if inducing.width != X.shape[-1]:
        msg = (
            f"`{argument}` has {inducing.width} columns, but this site's `X` has shape {X.shape}. "
            f"Give inducing inputs with {X.shape[-1]} columns; for sites of different widths use a dict by site."
        )
        raise ValueError(msg)
