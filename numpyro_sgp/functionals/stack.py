"""Rows of different kinds, one after another."""

from collections.abc import Callable
import dataclasses
import itertools
from typing import Any, final

from jax import Array
import jax.numpy as jnp
import numpy as np

from numpyro_sgp._internal.pytrees import register_unchecked
from numpyro_sgp.functionals.sums import Values
from numpyro_sgp.kernels.functional import AbstractComposite, AbstractFunctional

__all__ = ["Rows", "Stack"]


@final
@register_unchecked
@dataclasses.dataclass(frozen=True, eq=False)
class Stack(AbstractComposite):
    """Rows of different kinds, one after another: values and derivatives of one function, points and areas.

    `stack[index]`, with rows of several kinds, evaluates each row as each kind and takes the right one. For minibatches
    of `fit` pass `stack[:]`, of which all arrays have R rows.

    Args:
        parts: functionals, and arrays of inputs, (N, D), in this order.

    Raises:
        ValueError: no parts, or parts of different widths.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_sgp as sgp
        >>> X = jnp.linspace(0.0, 1.0, 5)[:, None]
        >>> both = sgp.functionals.Stack([X, sgp.functionals.Derivative(X[:2], 0)])
        >>> sgp.GaussianProcess(sgp.kernels.SquaredExponential(0.5), both).event_shape
        (7,)
    """

    parts: Any

    def __post_init__(self) -> None:
        parts = []
        for part in self.parts:
            part = part if isinstance(part, AbstractFunctional) else Values(part)
            parts.extend(part.parts if isinstance(part, Stack) else [part])
        parts = [part for part in parts if len(part)] or parts[:1]
        if not parts or len({part.shape[1] for part in parts}) > 1:
            msg = (
                f"`parts` must be functionals or inputs of the same number of columns, got shapes "
                f"{[part.shape for part in parts]}. Give at least one, all with D columns."
            )
            raise ValueError(msg)
        object.__setattr__(self, "parts", tuple(parts))

    @property
    def shape(self) -> tuple[int, int]:
        return sum(len(part) for part in self.parts), self.parts[0].shape[1]

    @property
    def nodes(self) -> Array:
        return jnp.concatenate([part.nodes for part in self.parts])

    def __getitem__(self, index: Any) -> "Rows":
        self._check_index(index)
        ends = list(itertools.accumulate(len(part) for part in self.parts))
        starts = [0, *ends[:-1]]
        if isinstance(index, slice):
            index = np.arange(ends[-1])[index]
        index = index if isinstance(index, Array) else np.asarray(index)
        if index.dtype == bool:
            index = np.flatnonzero(index)
        like = np if isinstance(index, np.ndarray) else jnp
        index = like.where(index < 0, index + ends[-1], index)
        kind = sum((index >= end).astype(np.int32) for end in ends[:-1]) + like.zeros(index.shape, np.int32)
        # A row of another kind looks at some row of this one, and is not taken.
        own = (part[like.clip(index - start, 0, len(part) - 1)] for part, start in zip(self.parts, starts, strict=True))
        return Rows(tuple(own), kind)

    def apply(self, fn: Callable[[Array], Array]) -> Array:
        return _joined([part.apply(fn) for part in self.parts])

    def cross(self, kernel: Callable, Z: Array) -> Array:
        return _joined([part.cross(kernel, Z) for part in self.parts])

    def variance(self, kernel: Callable) -> Array:
        return _joined([part.variance(kernel) for part in self.parts])

    def covariance(self, kernel: Callable, other: AbstractFunctional) -> Array:
        parts = [part.covariance(kernel, other).mT for part in self.parts]
        return _joined(parts).mT


@final
@register_unchecked
@dataclasses.dataclass(frozen=True, eq=False)
class Rows(AbstractComposite):
    """Rows of a `Stack`: each is evaluated as each kind, so that all arrays have the rows first.

    Attributes:
        parts: the rows as functionals of each kind, R each.
        kind: which of them a row is, (R,).
    """

    parts: tuple[AbstractFunctional, ...]
    kind: Any

    @property
    def shape(self) -> tuple[int, int]:
        return self.kind.shape[0], self.parts[0].shape[1]

    @property
    def nodes(self) -> Array:
        return jnp.concatenate([part.nodes for part in self.parts])

    def apply(self, fn: Callable[[Array], Array]) -> Array:
        return self._taken([part.apply(fn) for part in self.parts])

    def cross(self, kernel: Callable, Z: Array) -> Array:
        return self._taken([part.cross(kernel, Z) for part in self.parts])

    def variance(self, kernel: Callable) -> Array:
        return self._taken([part.variance(kernel) for part in self.parts])

    def covariance(self, kernel: Callable, other: AbstractFunctional) -> Array:
        parts = [part.covariance(kernel, other).mT for part in self.parts]
        return self._taken(parts).mT

    def _taken(self, values: list[Array]) -> Array:
        """Of values as each kind, (..., R), those of the right kind."""
        taken = values[0]
        for number, value in enumerate(values[1:], 1):
            taken = jnp.where(jnp.asarray(self.kind) == number, value, taken)
        return taken


def _joined(values: list[Array]) -> Array:
    """Arrays side by side along their last axis, their leading axes broadcast."""
    batch = jnp.broadcast_shapes(*(value.shape[:-1] for value in values))
    return jnp.concatenate([jnp.broadcast_to(value, (*batch, value.shape[-1])) for value in values], axis=-1)
