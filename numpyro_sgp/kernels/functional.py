"""What a kernel asks of a linear functional that stands in the place of its inputs."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Self

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from numpyro_sgp._internal.eager import as_one_program

__all__ = ["AbstractFunctional", "covariance_at", "nodes_of", "same_rows"]


class AbstractFunctional(ABC):
    """R rows ℓ_r f, linear in a function f of D columns: what may stand in the place of inputs (N, D).

    A pytree whose arrays have the rows first, so that batches, devices and `jit` take it as they take inputs. It is
    indexed by rows and has a `shape`, (R, D).
    """

    # Without these NumPy and JAX would take a functional for a sequence of rows.
    __array_ufunc__ = None
    __iter__ = None

    ndim = 2

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """(R, D)."""

    @property
    @abstractmethod
    def nodes(self) -> Array:
        """The inputs at which it looks at f, one below another, (..., D): what inducing inputs are chosen from."""

    @abstractmethod
    def apply(self, fn: Callable[[Array], Array]) -> Array:
        """ℓ_r g for a known function g, (..., R).

        Args:
            fn: g at inputs (N, D), (..., N); a value depends on its own row only.
        """

    @abstractmethod
    def variance(self, kernel: Callable) -> Array:
        """Var(ℓ_r f), (..., R)."""

    def cross(self, kernel: Callable, Z: Array) -> Array:
        """Cov(f(z_m), ℓ_r f), (..., M, R)."""
        # The kernel looks for a centre among its first inputs, which are not to be those of a batch.
        return self.apply(lambda X: kernel(Z, X))

    def covariance(self, kernel: Callable, other: "AbstractFunctional") -> Array:
        """Cov(ℓ_r f, ℓ′_s f) with the rows of another functional, (..., R, S)."""
        if isinstance(other, AbstractComposite):
            return other.covariance(kernel, self).mT
        return self._covariance(kernel, other)

    def _covariance(self, kernel: Callable, other: "AbstractFunctional") -> Array:
        return self.apply(lambda X: other.cross(kernel, X).mT).mT

    @property
    def dtype(self) -> np.dtype:
        """Of its numbers."""
        floats = [leaf for leaf in jax.tree.leaves(self) if jnp.issubdtype(leaf.dtype, jnp.floating)]
        return jnp.result_type(*floats)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Self:
        """Some rows: a slice, or an array of integers or booleans."""
        self._check_index(index)
        # An array on the host cannot be indexed by a traced one.
        traced = isinstance(index, Array)
        return jax.tree.map(lambda leaf: jnp.asarray(leaf)[index] if traced else leaf[index], self)

    def _check_index(self, index: Any) -> None:
        """Raise unless an index is one of rows."""
        if isinstance(index, tuple) or (not isinstance(index, slice) and np.ndim(index) != 1):
            msg = (
                f"A functional of shape {self.shape} is indexed by rows, got {index!r}. Use a slice or an array of "
                "row numbers."
            )
            raise IndexError(msg)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        msg = (
            f"A functional, {type(self).__name__} of shape {self.shape}, was given where an array of inputs is needed. "
            "Its `nodes` are inputs, (R·Q, D)."
        )
        raise TypeError(msg)


class AbstractComposite(AbstractFunctional):
    """Rows that are those of several other functionals."""


@as_one_program
def covariance_at(kernel: Callable, X: Any, Z: Any) -> Array:
    """A kernel where one of its two arguments, or the only one, is a functional; values as for inputs."""
    if Z is None:
        return X.variance(kernel)
    if X.shape[-1] != Z.shape[-1]:
        msg = (
            f"`X` and `Z` must have the same number of columns, got shapes {X.shape} and {Z.shape}. Pass inputs or "
            "functionals with the same D."
        )
        raise ValueError(msg)
    if not isinstance(Z, AbstractFunctional):
        return X.cross(kernel, Z).mT
    return X.covariance(kernel, Z) if isinstance(X, AbstractFunctional) else Z.cross(kernel, X)


def nodes_of(X: Any) -> Any:
    """Inputs as they are, or the nodes of a functional."""
    return X.nodes if isinstance(X, AbstractFunctional) else X


def same_rows(X: Any, Z: Any) -> Array:
    """Whether two sets of inputs, or two functionals, are equal, as a traced value."""
    (left, form), (right, other_form) = jax.tree.flatten(X), jax.tree.flatten(Z)
    if form != other_form:
        return jnp.zeros((), bool)
    return jnp.stack([jnp.array_equal(*pair) for pair in zip(left, right, strict=True)]).all()
