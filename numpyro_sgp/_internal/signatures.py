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

    Args:
        model: the model, or a `functools.partial` of one.
        args: its positional arguments.
        kwargs: its other keyword arguments.
        N: the number of rows in all.
    """
    given = {**(model.keywords if isinstance(model, functools.partial) else {}), **kwargs}
    if given.get("num_data") is not None or not _takes_num_data(signature_of(model), args):
        return dict(kwargs)
    return {**kwargs, "num_data": N}


def _takes_num_data(signature: inspect.Signature | None, args: tuple) -> bool:
    """With **kwargs it does too: a model that cannot use it fails, where one that misses it has a wrong scale."""
    if signature is None:
        return False
    kinds = [
        parameter.kind
        for position, (name, parameter) in enumerate(signature.parameters.items())
        if parameter.kind is inspect.Parameter.VAR_KEYWORD or (name == "num_data" and position >= len(args))
    ]
    return any(kind is not inspect.Parameter.POSITIONAL_ONLY for kind in kinds)
