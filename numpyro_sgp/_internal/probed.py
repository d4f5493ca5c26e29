"""A parameter with a zero beside it: how an optimizer asks a loss for more than the gradient of a parameter."""

import dataclasses
from typing import Any

__all__ = ["Probed", "value_of"]


@dataclasses.dataclass(frozen=True)
class Probed:
    """What an optimizer puts in the place of a parameter while it evaluates the loss.

    The loss depends on `zero` to first order. Its derivative with respect to `zero`, which is an ordinary gradient, is
    what the optimizer asks for.

    Args:
        value: the parameter.
        zero: zeros, to be differentiated.
    """

    value: Any
    zero: Any


def value_of(parameter: Any) -> Any:
    """The parameter itself, whether an optimizer probes it or not."""
    return parameter.value if isinstance(parameter, Probed) else parameter
