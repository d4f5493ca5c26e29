"""Inducing inputs on a grid."""

from collections.abc import Sequence
import dataclasses
import itertools
from typing import final

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

from numpyro_sgp.inducing.points import AbstractPoints, InducingPoints, as_points

__all__ = ["InducingGrid"]


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class InducingGrid(AbstractPoints):
    """Function values at all combinations of points on several axes, u = f(Z₁ × Z₂ × …).

    `AutoSVGP` then holds no matrix of all M = M₁M₂… values, so M may be tens of thousands.

    Args:
        axes: points of each axis, (M_d, D_d), an axis being the next D_d columns of X. `at` and `over` make them.

    Example:
        >>> import numpy as np, numpyro_sgp as sgp
        >>> X = np.random.default_rng(0).uniform(size=(1000, 2))
        >>> sgp.InducingGrid.over(X, (30, 20)).num_inducing
        600
    """

    axes: tuple[Array, ...]

    @classmethod
    def at(cls, *axes: ArrayLike) -> "InducingGrid":
        """A grid of given points.

        Args:
            axes: points of each axis, the axes in the order of the columns of X: (M_d,), or (M_d, D_d) for an axis of
                several columns.

        Raises:
            ValueError: an axis without points, or with NaN.
        """
        columns = [axis if np.ndim(axis) != 1 else np.asarray(axis)[:, None] for axis in axes]
        return cls(tuple(as_points(axis, "axes") for axis in columns))

    @classmethod
    def over(cls, X: ArrayLike, sizes: Sequence[int]) -> "InducingGrid":
        """A regular grid that covers the rows of X.

        Args:
            X: inputs, (N, D).
            sizes: number of points for each column, at least 2.

        Raises:
            ValueError: sizes that do not belong to the columns, or below 2; a column that is constant.
        """
        shape = np.shape(X)
        numbers = np.asarray(sizes)
        whole = numbers.shape == shape[1:] and np.issubdtype(numbers.dtype, np.integer)
        if len(shape) != 2 or not whole or np.any(numbers < 2):
            msg = f"`sizes` must be an integer above 1 for each column of `X`, got {sizes!r} for X of shape {shape}."
            raise ValueError(msg)
        X = np.asarray(X)
        X = X if np.issubdtype(X.dtype, np.floating) else X.astype(float)
        low, high = X.min(axis=0), X.max(axis=0)
        if np.any(low == high):
            constant = np.flatnonzero(low == high).tolist()
            msg = f"Columns {constant} of `X` are constant: a grid over them is one point many times. Drop them."
            raise ValueError(msg)
        return cls.at(*(np.linspace(*ends, dtype=X.dtype) for ends in zip(low, high, sizes, strict=True)))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of points, M_d."""
        return tuple(axis.shape[-2] for axis in self.axes)

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The columns of each axis."""
        ends = np.cumsum([0, *(axis.shape[-1] for axis in self.axes)])
        return tuple(tuple(range(first, last)) for first, last in itertools.pairwise(ends))

    @property
    def num_inducing(self) -> int:
        return int(np.prod(self.sizes))

    @property
    def width(self) -> int:
        return sum(axis.shape[-1] for axis in self.axes)

    @property
    def Z(self) -> Array:
        """All inputs, (M, D); the last axis changes fastest."""
        index = np.indices(self.sizes).reshape(len(self.axes), -1)
        return jnp.concatenate([axis[rows] for axis, rows in zip(self.axes, index, strict=True)], axis=-1)

    def take(self, index: Array) -> InducingPoints:
        return InducingPoints(jnp.take(self.Z, index, axis=-2))

    def axis_inputs(self, number: int) -> Array:
        """Points of an axis in all columns, the other ones zero, (M_d, D): for kernels that look at that axis alone."""
        group, axis = self.groups[number], self.axes[number]
        return jnp.pad(axis, ((0, 0), (group[0], self.width - group[-1] - 1)))
