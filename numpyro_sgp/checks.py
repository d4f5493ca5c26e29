"""Checks of arguments that many functions share."""

import operator
from typing import Any

__all__ = ["positive"]


def positive(name: str, value: Any, hint: str) -> int:
    """An argument as a positive integer, or an error that names it and gives the hint."""
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number < 1 or isinstance(value, bool):
        msg = f"`{name}` must be a positive integer, got {value!r}. {hint}"
        raise ValueError(msg)
    return number
