"""The base class of kernels, and their sums and products."""

from abc import ABC, abstractmethod
from collections.abc import Callable
import dataclasses
from typing import final

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

from numpyro_sgp._internal.pytrees import PytreeFunction
from numpyro_sgp.kernels.arrays import add, as_inputs, multiply
from numpyro_sgp.kernels.functional import AbstractFunctional, covariance_at

__all__ = ["Constant", "Foreign", "Kernel", "Product", "Sum", "kink_of"]


class Kernel(ABC):
    """A covariance function k(x, z) = Cov(f(x), f(z)).

    Kernels add and multiply with each other, with numbers, and with any other callable that follows the convention. In
    `other + kernel` Python asks `other` first: a tinygp kernel on the left takes the operation and makes a kernel that
    fails when called, so put it on the right or write `Sum(other, kernel)`.
    """

    # Without this NumPy scalars and arrays on the left of an operator would loop over the kernel as an object.
    __array_ufunc__ = None

    def __call__(self, X: ArrayLike | AbstractFunctional, Z: ArrayLike | AbstractFunctional | None = None) -> Array:
        """The diagonal k(x_n, x_n), (..., N), or with a second argument the matrix k(x_n, z_m), (..., N, M).

        Args:
            X: inputs, (..., N, D), or linear functionals of `numpyro_sgp.functionals`.
            Z: inputs, (..., M, D), or linear functionals.

        Raises:
            ValueError: inputs that are not (..., N, D), or a second input or hyperparameter of another width.
        """
        if isinstance(X, AbstractFunctional) or isinstance(Z, AbstractFunctional):
            pair = (
                each if each is None or isinstance(each, AbstractFunctional) else as_inputs(each, name)
                for name, each in (("X", X), ("Z", Z))
            )
            return covariance_at(self, *pair)
        if Z is None:
            return self._diagonal(as_inputs(X, "X"))
        inputs = as_inputs(X, "X")
        others = inputs if Z is X else as_inputs(Z, "Z")
        if inputs.shape[-1] != others.shape[-1]:
            msg = (
                f"`X` and `Z` must have the same number of columns, got shapes {inputs.shape} and {others.shape}. "
                "Pass inputs with the same D."
            )
            raise ValueError(msg)
        return self._matrix(inputs, others)

    def _kink(self, column: int | None, D: int) -> "Kernel | None":
        """The part of the kernel whose functions have no derivative in one of D columns, or in any (None)."""
        del column, D
        return None

    @abstractmethod
    def _diagonal(self, X: Array) -> Array:
        """k(x_n, x_n) for checked inputs (..., N, D)."""

    @abstractmethod
    def _matrix(self, X: Array, Z: Array) -> Array:
        """k(x_n, z_m) for checked inputs (..., N, D) and (..., M, D)."""

    def __add__(self, other: Callable | ArrayLike) -> "Sum":
        operand = _as_operand(other)
        return NotImplemented if operand is None else Sum(self, operand)

    def __radd__(self, other: Callable | ArrayLike) -> "Kernel":
        if isinstance(other, int) and other == 0:  # the start value of the built-in sum
            return self
        operand = _as_operand(other)
        return NotImplemented if operand is None else Sum(operand, self)

    def __mul__(self, other: Callable | ArrayLike) -> "Product":
        operand = _as_operand(other)
        return NotImplemented if operand is None else Product(self, operand)

    def __rmul__(self, other: Callable | ArrayLike) -> "Product":
        operand = _as_operand(other)
        return NotImplemented if operand is None else Product(operand, self)


def kink_of(kernel: Callable, column: int | None, D: int) -> Kernel | None:
    """The part of a kernel whose functions have no derivative; None where there is none, or nothing is known."""
    return kernel._kink(column, D) if isinstance(kernel, Kernel) else None


def _as_operand(other: Callable | ArrayLike) -> Callable | None:
    if callable(other):
        return other
    return Constant(other) if isinstance(other, int | float | np.generic | np.ndarray | Array) else None


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Constant(Kernel):
    """k(x, z) = σ²: constant functions.

    Args:
        variance: σ² in units of f²; shape of the batch.
    """

    variance: ArrayLike

    def _diagonal(self, X: Array) -> Array:
        variance = jnp.asarray(self.variance, jnp.result_type(X, self.variance))
        batch = jnp.broadcast_shapes(X.shape[:-2], variance.shape)
        return jnp.broadcast_to(variance[..., None], (*batch, X.shape[-2]))

    def _matrix(self, X: Array, Z: Array) -> Array:
        variance = jnp.asarray(self.variance, jnp.result_type(X, Z, self.variance))
        batch = jnp.broadcast_shapes(X.shape[:-2], Z.shape[:-2], variance.shape)
        return jnp.broadcast_to(variance[..., None, None], (*batch, X.shape[-2], Z.shape[-2]))


@dataclasses.dataclass(frozen=True, eq=False)
class AbstractPair(Kernel):
    """A kernel of two others; its batch is that of both."""

    left: Callable
    right: Callable

    def _kink(self, column: int | None, D: int) -> Kernel | None:
        left = kink_of(self.left, column, D)
        return kink_of(self.right, column, D) if left is None else left


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Sum(AbstractPair):
    """k(x, z) = k₁(x, z) + k₂(x, z): the sum of independent functions.

    Args:
        left: k₁, any kernel, ours or not.
        right: k₂, any kernel, ours or not; the batches broadcast.
    """

    def _diagonal(self, X: Array) -> Array:
        return add(self.left(X), self.right(X))

    def _matrix(self, X: Array, Z: Array) -> Array:
        return add(self.left(X, Z), self.right(X, Z))


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Product(AbstractPair):
    """k(x, z) = k₁(x, z) k₂(x, z): the covariance of the product of independent functions with mean zero.

    Args:
        left: k₁, any kernel, ours or not.
        right: k₂, any kernel, ours or not; the batches broadcast.
    """

    def _diagonal(self, X: Array) -> Array:
        return multiply(self.left(X), self.right(X))

    def _matrix(self, X: Array, Z: Array) -> Array:
        return multiply(self.left(X, Z), self.right(X, Z))


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Foreign(Kernel):
    """A kernel that is not of this package, so that it takes linear functionals in the place of inputs.

    Args:
        kernel: any callable that follows the convention.
    """

    kernel: Callable

    def __post_init__(self) -> None:
        object.__setattr__(self, "kernel", PytreeFunction.of(self.kernel))

    def _diagonal(self, X: Array) -> Array:
        return self.kernel(X)

    def _matrix(self, X: Array, Z: Array) -> Array:
        return self.kernel(X, Z)
