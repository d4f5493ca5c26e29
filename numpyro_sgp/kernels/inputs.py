"""Kernels of functions of the inputs: features, and some of the columns."""

from collections.abc import Callable, Sequence
import dataclasses
import operator
from typing import cast, final

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from numpyro_sgp._internal.pytrees import PytreeFunction
from numpyro_sgp.kernels.algebra import Kernel, kink_of

__all__ = ["Select", "Warp", "map_rows"]


def map_rows(fn: Callable, X: Array) -> Array:
    """A user's function of inputs (N, D) at inputs (..., N, D), checked to return one row for each row."""
    at_rows = fn
    for _ in X.shape[:-2]:
        at_rows = jax.vmap(at_rows)
    features = at_rows(X)
    shape = jnp.shape(features)
    if len(shape) < X.ndim or shape[-2] != X.shape[-2]:
        msg = (
            f"`fn` must map inputs (N, D) to features (N, D'), but inputs of shape {X.shape} gave {shape}. "
            "Use jax.vmap(fn) if `fn` takes one row, fn(X)[:, None] if it returns one number a row."
        )
        raise ValueError(msg)
    return features


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Warp(Kernel):
    """k(x, z) = k₀(φ(x), φ(z)): a kernel on features, a deep kernel when φ is a network.

    >>> import jax.numpy as jnp
    >>> from numpyro_sgp.kernels import SquaredExponential, Warp
    >>> weights = jnp.ones((2, 4))
    >>> kernel = Warp(SquaredExponential(1.0), lambda X: jnp.tanh(X @ weights))
    >>> kernel(jnp.ones((7, 2)), jnp.ones((5, 2))).shape
    (7, 5)

    Args:
        kernel: k₀, any kernel on D' columns.
        fn: φ for all rows at once, (N, D) -> (N, D'). A function, which may close over sampled or traced values, or a
            callable pytree, whose arrays are then leaves of the kernel. A plain function is static, compared by
            identity: a kernel with a new lambda is compiled again by each `jit` it is an argument of, while
            `jax.tree_util.Partial(fn, params)` is not. Leading axes of the inputs are mapped over.

    Raises:
        ValueError: `fn` does not return N rows.

    References: MacKay (1998), "Introduction to Gaussian processes"; Wilson, Hu, Salakhutdinov & Xing (2016), "Deep
    kernel learning".
    """

    kernel: Callable
    fn: Callable

    def __post_init__(self) -> None:
        object.__setattr__(self, "fn", PytreeFunction.of(self.fn))

    def _kink(self, column: int | None, D: int) -> Kernel | None:
        del column  # features may mix columns
        width = jax.eval_shape(self._features, jax.ShapeDtypeStruct((1, D), jnp.result_type(float))).shape[-1]
        return kink_of(self.kernel, None, width)

    def _diagonal(self, X: Array) -> Array:
        return self.kernel(self._features(X))

    def _matrix(self, X: Array, Z: Array) -> Array:
        features = self._features(X)
        return self.kernel(features, features if Z is X else self._features(Z))

    def _features(self, X: Array) -> Array:
        return map_rows(self.fn, X)


@dataclasses.dataclass(frozen=True)
class _Slice:
    # `slice` is not hashable before Python 3.12, and static data of a pytree must be.
    start: int | None
    stop: int | None
    step: int | None


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Select(Kernel):
    """k(x, z) = k₀(x[dims], z[dims]): a kernel on some of the input columns.

    Args:
        kernel: k₀, any kernel on that many columns.
        dims: column numbers: a sequence of integers, one integer, or a slice; negative numbers count from the end.

    Raises:
        TypeError: `dims` that are not integers.
        ValueError: `dims` out of range, or none.
    """

    kernel: Callable
    dims: "Sequence[int] | int | slice | _Slice" = dataclasses.field(metadata={"static": True})

    def __post_init__(self) -> None:
        # Static, so never a placeholder; stored in a form that can be hashed.
        dims = self.dims
        if isinstance(dims, slice):
            dims = _Slice(dims.start, dims.stop, dims.step)
        elif not isinstance(dims, _Slice):
            numbers = dims if np.iterable(dims) else (dims,)
            if any(isinstance(number, bool | np.bool_) for number in numbers):
                msg = f"`dims` must be column numbers or a slice, got {dims!r}. For a mask use np.flatnonzero(mask)."
                raise TypeError(msg)
            dims = tuple(operator.index(number) for number in numbers)
        object.__setattr__(self, "dims", dims)

    def _kink(self, column: int | None, D: int) -> Kernel | None:
        selected = self.columns_of(D)
        if column is None or selected.count(column) > 1:
            return kink_of(self.kernel, None, len(selected))
        return kink_of(self.kernel, selected.index(column), len(selected)) if column in selected else None

    def _diagonal(self, X: Array) -> Array:
        return self.kernel(self._columns(X))

    def _matrix(self, X: Array, Z: Array) -> Array:
        columns = self._columns(X)
        return self.kernel(columns, columns if Z is X else self._columns(Z))

    def _columns(self, X: Array) -> Array:
        return X[..., np.asarray(self.columns_of(X.shape[-1]))]

    def columns_of(self, D: int) -> tuple[int, ...]:
        """The selected ones of D columns, counted from the start.

        Args:
            D: how many there are.

        Raises:
            ValueError: `dims` out of range, or none.
        """
        dims = self.dims
        if isinstance(dims, _Slice):
            columns = tuple(range(D)[slice(dims.start, dims.stop, dims.step)])
        else:
            columns = cast("tuple[int, ...]", dims)
        if not columns or any(not -D <= column < D for column in columns):
            msg = f"`dims` must name at least one of the D = {D} columns of `X`, got {dims}. Use 0 to {D - 1}."
            raise ValueError(msg)
        return tuple(column % D for column in columns)
