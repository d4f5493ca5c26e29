"""Inducing variables: what a sparse posterior conditions on.

An inducing object is a pytree with three methods: `Kuu(kernel)`, the covariance of the inducing variables u;
`Kuf(kernel, X)`, their covariance with f(X); `Kuv(kernel, other)`, their covariance with another object's. Everything
else in the package uses those three and `num_inducing`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
import dataclasses

import jax
from jax import Array
from jax.core import Tracer
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

__all__ = ["AbstractInducing", "InducingPoints", "as_inducing"]


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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class InducingPoints(AbstractInducing):
    """Function values at inducing inputs, u = f(Z).

    Args:
        Z: inducing inputs in the units of X, (M, D); leading axes are one set for each latent of a batch.
    """

    Z: Array

    @property
    def num_inducing(self) -> int:
        return self.Z.shape[-2]

    @property
    def width(self) -> int:
        return self.Z.shape[-1]

    def Kuu(self, kernel: Callable) -> Array:
        K = kernel(self.Z, self.Z)
        # Distances by matrix products leave rounding on the diagonal; the kernel knows it exactly.
        index = jnp.arange(self.num_inducing)
        return K.at[..., index, index].set(kernel(self.Z))

    def Kuf(self, kernel: Callable, X: Array) -> Array:
        return kernel(self.Z, X)

    def Kuv(self, kernel: Callable, other: AbstractInducing) -> Array:
        return jnp.swapaxes(other.Kuf(kernel, self.Z), -1, -2)


def as_inducing(inducing: ArrayLike | AbstractInducing) -> AbstractInducing:
    """An inducing object as it is, or an array of inducing inputs, (..., M, D), as `InducingPoints`.

    Raises:
        ValueError: an array with fewer than two axes, without rows, or with NaN in it.
    """
    if isinstance(inducing, AbstractInducing):
        return inducing
    Z = jnp.asarray(inducing)
    if Z.ndim < 2 or Z.shape[-2] == 0:
        msg = (
            f"`inducing` must have shape (M, D) with M ≥ 1, got {Z.shape}. For inputs in one dimension use Z[:, None]."
        )
        raise ValueError(msg)
    if not jnp.issubdtype(Z.dtype, jnp.floating):
        Z = Z.astype(jnp.result_type(float))
    if not isinstance(Z, Tracer) and np.isnan(Z).any():
        msg = f"`inducing` of shape {Z.shape} contains NaN. Drop or impute the rows it was made from."
        raise ValueError(msg)
    return InducingPoints(Z)
