"""Signatures of users' models: whether a model takes `num_data`."""

from collections.abc import Callable, Mapping
import functools
import inspect
from typing import Any

__all__ = ["signature_of", "with_num_data"]


def signature_of(fn: Callable) -> inspect.Signature | None:
    """The signature of a function, or None for a callable that has none."""
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError):
        return None


def with_num_data(model: Callable, args: tuple, kwargs: Mapping[str, Any], N: int) -> dict[str, Any]:
    """Keyword arguments of a model, with N as `num_data` where it takes that by keyword and was not given it.

    A model with **kwargs takes it too: one that cannot use it fails, where one that misses it has a wrong scale.
    """
    given = {**(model.keywords if isinstance(model, functools.partial) else {}), **kwargs}
    signature = signature_of(model)
    if given.get("num_data") is not None or signature is None:
        return dict(kwargs)
    takes = any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD
        or (name == "num_data" and position >= len(args) and parameter.kind is not inspect.Parameter.POSITIONAL_ONLY)
        for position, (name, parameter) in enumerate(signature.parameters.items())
    )
    return {**kwargs, "num_data": N} if takes else dict(kwargs)
