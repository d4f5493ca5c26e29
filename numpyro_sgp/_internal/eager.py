"""Compile whole functions when nothing else compiles them, which shortens the time to the first step."""

from collections.abc import Callable
import functools
from typing import Any, TypeVar, cast

import jax
from jax import Array
from jax.core import Tracer
import numpy as np

__all__ = ["as_one_program"]

Fn = TypeVar("Fn", bound=Callable)


def as_one_program(fn: Fn, static_argnums: int | tuple[int, ...] = ()) -> Fn:
    """Compile `fn` as a whole when it is called with numbers; inside a trace it runs as it is.

    Called with numbers (`SVI.init` runs model and guide so) each of its operations would be compiled by itself, some
    thirty milliseconds for each: most of the time before the first step.
    """
    compiled = jax.jit(fn, static_argnums=static_argnums)
    static = {static_argnums} if isinstance(static_argnums, int) else set(static_argnums)

    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        arrays = [arg for position, arg in enumerate(args) if position not in static]
        numbers = all(_is_number(leaf) for leaf in jax.tree.leaves((arrays, kwargs)))
        return compiled(*args, **kwargs) if numbers else fn(*args, **kwargs)

    return cast(Fn, wrapped)


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, Array | np.ndarray | np.generic | float | int) and not isinstance(leaf, Tracer)
