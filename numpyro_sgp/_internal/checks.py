"""Checks of arguments that many functions share."""

from collections.abc import Sequence
import operator
from typing import Any

import numpy as np

__all__ = ["at_least", "num_rows", "positive"]


def positive(name: str, value: Any, hint: str) -> int:
    """An argument as a positive integer, or an error that names it and gives the hint."""
    return at_least(1, name, value, hint)


def at_least(least: int, name: str, value: Any, hint: str) -> int:
    """An argument as an integer that is not too small, or an error that names it and gives the hint."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least or isinstance(value, bool | np.bool_):
        kind = {0: "a non-negative integer", 1: "a positive integer"}.get(least, f"an integer of at least {least}")
        msg = f"`{name}` must be {kind}, got {value!r}. {hint}"
        raise ValueError(msg)
    return number


def num_rows(arrays: Sequence[Any], needed: str, hint: str, *, least: int = 1) -> int:
    """N, the number of rows that all arrays have, or an error that says what is needed and gives the hint."""
    rows = {np.shape(each)[0] if np.ndim(each) else None for each in arrays}
    number = rows.pop() if len(rows) == 1 else None
    if number is None or number < least:
        msg = f"{needed}; got shapes {[np.shape(each) for each in arrays]}. {hint}"
        raise ValueError(msg)
    return number
