"""Abstract interpretation of traced programs."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from jax.extend.core import Literal

__all__ = ["ADDS", "MOVES", "MOVES_FIRST", "inner_program", "interpret", "linear_name"]

Fact = TypeVar("Fact")

# Operations that move or copy the entries of their operand.
MOVES = frozenset({
    "broadcast_in_dim", "copy", "copy_p", "expand_dims", "optimization_barrier", "reshape", "rev", "slice", "split",
    "squeeze", "transpose",
})  # fmt: skip
# The same of their first operand, where the others say which.
MOVES_FIRST = frozenset({"dynamic_slice", "gather"})
ADDS = frozenset({"add", "add_any", "sub"})


def linear_name(equation: Any) -> str:
    """The name of an operation; "truncate" for a conversion to integers, which is no linear one."""
    name = equation.primitive.name
    truncates = name == "convert_element_type" and equation.params["new_dtype"].kind not in "fcV"
    return "truncate" if truncates else name


def interpret(
    jaxpr: Any,
    inputs: Sequence[Fact],
    constant: Callable[[Any], Fact],
    of_equation: Callable[[Any, list[Fact]], Fact | list[Fact]],
) -> list[Fact]:
    """A fact about each output of a program, from facts about its inputs.

    Args:
        jaxpr: the program.
        inputs: a fact for each of its arguments.
        constant: the fact about a variable or literal that depends on no argument.
        of_equation: the fact about all outputs of an equation, or a list with one for each, from those about operands.
    """
    known = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(variable: Any) -> Fact:
        return known[variable] if not isinstance(variable, Literal) and variable in known else constant(variable)

    for equation in jaxpr.eqns:
        facts = [read(variable) for variable in equation.invars]
        inner = inner_program(equation)
        found = of_equation(equation, facts) if inner is None else interpret(inner, facts, constant, of_equation)
        outputs = found if isinstance(found, list) else [found] * len(equation.outvars)
        known.update(zip(equation.outvars, outputs, strict=True))
    return [read(variable) for variable in jaxpr.outvars]


def inner_program(equation: Any) -> Any:
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
