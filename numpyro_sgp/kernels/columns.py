"""Which input columns a kernel looks at, and kernels as products over groups of columns."""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any, cast

import jax.numpy as jnp
import numpy as np

from numpyro_sgp.kernels.algebra import Constant, Product, Sum
from numpyro_sgp.kernels.inputs import Select
from numpyro_sgp.kernels.periodic import Cosine, Periodic
from numpyro_sgp.kernels.stationary import SquaredExponential

__all__ = ["NotAProductError", "columns_of", "factors", "named", "times"]

# Kernels of several columns that are products of themselves, one of each column.
_PRODUCTS = SquaredExponential | Periodic | Cosine


class NotAProductError(TypeError):
    """A kernel is no product over groups of columns."""


def columns_of(kernel: Callable, D: int) -> set[int]:
    """The columns that a kernel of D columns looks at."""
    match kernel:
        case Constant():
            return set()
        case Select():
            columns = kernel.columns_of(D)
            return {columns[inner] for inner in columns_of(kernel.kernel, len(columns))}
        case Sum() | Product():
            return columns_of(kernel.left, D) | columns_of(kernel.right, D)
    return set(range(D))


def times(one: Callable | None, other: Callable | None) -> Callable | None:
    """The product of two kernels, of which None is 1."""
    if one is None or other is None:
        return other if one is None else one
    return Product(one, other)


def named(kernel: Callable, D: int) -> str:
    """What a kernel of D columns is called in a message."""
    match kernel:
        case Sum():
            return f"{named(kernel.left, D)} + {named(kernel.right, D)}"
        case Product():
            sides = kernel.left, kernel.right
            return " * ".join(f"({named(each, D)})" if isinstance(each, Sum) else named(each, D) for each in sides)
        case Select():
            columns = kernel.columns_of(D)
            return f"Select({named(kernel.kernel, len(columns))}, {list(columns)})"
    return getattr(kernel, "__name__", type(kernel).__name__)


def factors(kernel: Callable, groups: Sequence[Sequence[int]], D: int) -> list[Callable | None]:
    """A kernel of D columns as a product of kernels of D columns, each of which looks at one group of them.

    Args:
        kernel: a product of kernels, each of one group, or of columns that factorise.
        groups: disjoint groups of columns.
        D: number of columns.

    Returns:
        One kernel for each group, None for 1.

    Raises:
        NotAProductError: a kernel that is no such product; the message names the part that is none.
    """
    looked_at = columns_of(kernel, D)
    own = [number for number, group in enumerate(groups) if looked_at & set(group)]
    if len(own) <= 1:
        place = own[0] if own else 0
        return [kernel if number == place else None for number in range(len(groups))]
    match kernel:
        case Product():
            pairs = zip(factors(kernel.left, groups, D), factors(kernel.right, groups, D), strict=True)
            return [times(*pair) for pair in pairs]
        case Select():
            columns = kernel.columns_of(D)
            inner = [[place for place, column in enumerate(columns) if column in group] for group in groups]
            found = factors(kernel.kernel, inner, len(columns))
            return [None if each is None else Select(each, columns) for each in found]
        case SquaredExponential() | Periodic() | Cosine():
            return [_restricted(kernel, group, D, first=number == own[0]) for number, group in enumerate(groups)]
    raise NotAProductError(named(kernel, D))


def _restricted(kernel: _PRODUCTS, group: Sequence[int], D: int, *, first: bool) -> Callable | None:
    """The factor of one group; the first one has the variance."""
    if not group:
        return None
    fields = {field.name: getattr(kernel, field.name) for field in dataclasses.fields(kernel)}
    variance = fields.pop("variance")
    fields = {name: _of_columns(value, group, D) for name, value in fields.items()}
    cls = cast(Any, type(kernel))
    return Select(cls(**fields, variance=variance if first else jnp.ones_like(variance)), tuple(group))


def _of_columns(value: Any, group: Sequence[int], D: int) -> Any:
    """Numbers of the columns of a group: there are D of them, or one for all."""
    shape = jnp.shape(value)
    return value[..., np.asarray(group)] if D > 1 and shape and shape[-1] == D else value
