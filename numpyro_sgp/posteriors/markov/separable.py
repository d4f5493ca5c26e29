"""Kernels of time and place as sums of products, of a kernel of one column and a kernel of the others.

Which column is the time is read from the kernel: the first one in which all of these products have a state-space form.
"""

from collections.abc import Callable
import dataclasses
from typing import NamedTuple

import jax
from jax import Array
import jax.numpy as jnp

from numpyro_sgp.kernels.algebra import Constant, Product, Sum
from numpyro_sgp.kernels.columns import columns_of, named, times
from numpyro_sgp.kernels.inputs import Select
from numpyro_sgp.posteriors.markov.state_space import AbstractStateSpace, state_space_of

__all__ = ["Separated", "SeparatedTerm", "separated"]


class SeparatedTerm(NamedTuple):
    """One product k_t(t, t′) k_s(s, s′).

    Attributes:
        time: k_t in its state-space form.
        space: k_s, a kernel of all columns that does not look at the time; None for 1.
    """

    time: AbstractStateSpace
    space: Callable | None


@dataclasses.dataclass(frozen=True)
class Separated:
    """A kernel as a sum of products.

    Attributes:
        column: which column is the time.
        terms: the products.
    """

    column: int
    terms: tuple[SeparatedTerm, ...]

    def with_time(self, places: Array) -> Array:
        """Places, (M, D − 1), as inputs at time zero, (M, D)."""
        before, after = places[..., : self.column], places[..., self.column :]
        return jnp.concatenate([before, jnp.zeros_like(places[..., :1]), after], axis=-1)


def separated(kernel: Callable, D: int, dtype: jax.typing.DTypeLike, num_harmonics: int) -> Separated:
    """A kernel of D columns as a sum of products.

    Args:
        kernel: sums and products of `Select` kernels.
        D: number of columns.
        dtype: of the states.
        num_harmonics: as that of `state_space_of`.

    Raises:
        TypeError: a kernel that is no such sum.
    """
    reason = ""
    for column in sorted(columns_of(kernel, D)):
        try:
            terms = [
                SeparatedTerm(state_space_of(_of_time(time, D), dtype, num_harmonics), space)
                for time, space in _terms(kernel, column, D)
            ]
        except TypeError as error:
            reason = reason or f" ({error})"
            continue
        return Separated(column, tuple(terms))
    msg = (
        "`space` needs a kernel that is a product of one of time, which has a state-space form, and one of place, or a "
        f"sum of such products; got {named(kernel, D)} of {D} columns{reason}. Write it as "
        "`Select(Matern32(...), [0]) * Select(SquaredExponential(...), [1, 2])`; `AutoTSVGP` takes any kernel."
    )
    raise TypeError(msg)


def _terms(kernel: Callable, column: int, D: int) -> list[tuple[Callable, Callable | None]]:
    """The factors of time and place of each product."""
    columns = columns_of(kernel, D)
    if columns <= {column}:
        return [(kernel, None)]
    if column not in columns:
        return [(Constant(1.0), kernel)]
    match kernel:
        case Sum():
            return _terms(kernel.left, column, D) + _terms(kernel.right, column, D)
        case Product():
            pairs = ((a, b) for a in _terms(kernel.left, column, D) for b in _terms(kernel.right, column, D))
            return [(Product(t, t2), times(s, s2)) for (t, s), (t2, s2) in pairs]
    msg = f"{named(kernel, D)} looks at column {column} together with others"
    raise TypeError(msg)


def _of_time(kernel: Callable, D: int) -> Callable:
    """A kernel that looks at one of D columns, as a kernel of one column."""
    match kernel:
        case Select():
            return _of_time(kernel.kernel, len(kernel.columns_of(D)))
        case Sum() | Product():
            return type(kernel)(_of_time(kernel.left, D), _of_time(kernel.right, D))
    if D > 1 and not isinstance(kernel, Constant):
        msg = f"{named(kernel, D)} has the time in {D} columns"
        raise TypeError(msg)
    return kernel
