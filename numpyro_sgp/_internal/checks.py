"""Checks of arguments that many functions share."""

import operator
from typing import Any

import numpy as np

__all__ = ["at_least", "positive"]


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
