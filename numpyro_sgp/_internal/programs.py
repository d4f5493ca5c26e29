"""Abstract interpretation of traced programs."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from jax.extend.core import Literal

__all__ = ["interpret"]

Fact = TypeVar("Fact")


def interpret(
    jaxpr: Any, inputs: Sequence[Fact], constant: Fact, of_equation: Callable[[Any, list[Fact]], Fact]
) -> list[Fact]:
    """A fact about each output of a program, from facts about its inputs.

    Args:
        jaxpr: the program.
        inputs: a fact for each of its arguments.
        constant: the fact about what depends on no argument.
        of_equation: the fact about all outputs of an equation, from those about its operands.
    """
    known = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(variable: Any) -> Fact:
        return constant if isinstance(variable, Literal) else known.get(variable, constant)

    for equation in jaxpr.eqns:
        facts = [read(variable) for variable in equation.invars]
        inner = _called(equation)
        outputs = (
            [of_equation(equation, facts)] * len(equation.outvars)
            if inner is None
            else interpret(inner, facts, constant, of_equation)
        )
        known.update(zip(equation.outvars, outputs, strict=True))
    return [read(variable) for variable in jaxpr.outvars]


def _called(equation: Any) -> Any:
    """The program that an equation calls once with its operands, or None; loops and branches do not."""
    if equation.primitive.name in ("scan", "while", "cond"):
        return None
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        found = equation.params.get(name)
        if found is not None:
            found = getattr(found, "jaxpr", found)
            if len(found.invars) == len(equation.invars):
                return found
    return None
