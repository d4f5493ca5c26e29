"""How each entry of a function depends on the rows of its argument, found from the traced program.

An entry may depend on no row, on one row, on several rows through a sum of functions of one row each, or on several
rows in any other way. Expectations of the first three need only the marginals of the rows. No numbers are needed, so
the answer is the same within `jax.jit`, and neither rounding nor `stop_gradient` can hide a dependence.
"""

from collections.abc import Callable
import enum
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.extend.core import Literal

from numpyro_sgp._internal.axis_dependence import ELEMENTWISE, UNKNOWN, axis_of_equation
from numpyro_sgp._internal.programs import ADDS, MOVES, MOVES_FIRST, inner_program, interpret, linear_name

__all__ = ["Dependence", "Fact", "fact_of_equation", "row_dependence"]


class Dependence(enum.IntEnum):
    """On which rows an entry depends."""

    NONE = 0
    ONE = 1
    SUM = 2  # a sum of functions of one row each
    COUPLED = 3  # in another way, or not known


class Fact(NamedTuple):
    """How the entries of a value depend on rows.

    Attributes:
        kind: of all entries.
        where: for ONE, the axis along which entry i depends on row i, or else a name of the map from entries to rows;
            for NONE, a name of the value. Equal names mean equal maps or values.
    """

    kind: Dependence
    where: Any = None


_SUM, _COUPLED = Fact(Dependence.SUM), Fact(Dependence.COUPLED)
# Operations that pick entries of all operands but indices.
_JOINS = {"concatenate", "dynamic_update_slice", "pad", "scatter", "select_n", "stack"}
_SUMS = {"conv_general_dilated", "cumsum", "dot_general", "reduce_sum", "reduce_window_sum"}
# Linear in each operand that depends on rows while the others do not.
_LINEAR = {"convert_element_type", "mul", "neg", "real", "stop_gradient"}


def row_dependence(fn: Callable[[Array], Any], f: Array) -> Any:
    """The `Dependence` of each leaf of `fn(f)` on the rows of f, which are on its last axis.

    Args:
        fn: a function of one array.
        f: its argument, (..., N). Its leading axes are latents, and the same row of several latents counts as one row.
    """
    program, like = jax.make_jaxpr(fn, return_shape=True)(f)
    # A single row cannot be coupled with another one.
    start = Fact(Dependence.ONE, f.ndim - 1 if f.shape[-1] > 1 else "the row")
    found = interpret(program.jaxpr, [start], _constant, _of_equation)
    return jax.tree.unflatten(jax.tree.structure(like), [fact.kind for fact in found])


def fact_of_equation(equation: Any, facts: list[Fact]) -> list[Fact]:
    """A fact about each result of an equation, from those about its operands."""
    inner = inner_program(equation)
    found = _of_equation(equation, facts) if inner is None else interpret(inner, facts, _constant, _of_equation)
    return found if isinstance(found, list) else [found] * len(equation.outvars)


def _constant(variable: Any) -> Fact:
    return Fact(
        Dependence.NONE,
        ("literal", repr(variable.val)) if isinstance(variable, Literal) else ("constant", id(variable)),
    )


def _of_equation(equation: Any, facts: list[Fact]) -> Fact | list[Fact]:
    name = equation.primitive.name
    kinds = [fact.kind for fact in facts]
    worst = max(kinds, default=Dependence.NONE)
    dependent = [fact for fact in facts if fact.kind > Dependence.NONE]
    if worst is Dependence.NONE:
        return Fact(Dependence.NONE, _name(equation, facts))
    if name == "scan":
        return _of_scan(equation, facts)
    if name == "cond":
        return _of_cond(equation, facts)
    if worst is Dependence.COUPLED:
        return _COUPLED
    if all(fact.kind is Dependence.ONE for fact in dependent):
        aligned = all(isinstance(fact.where, int) for fact in dependent)
        if aligned:
            axes = [fact.where if fact.kind else None for fact in facts]
            axis = axis_of_equation(equation, axes)
            if axis != UNKNOWN:
                return Fact(Dependence.ONE, axis)
        elif name in ELEMENTWISE and len(set(dependent)) == 1:
            return dependent[0]
    if name in ADDS or (name in _SUMS and len(dependent) == 1):
        return _SUM
    if name in ("scatter-add", "scatter_add"):
        return _SUM if kinds[1] is Dependence.NONE else _COUPLED
    if name in MOVES | MOVES_FIRST and all(kind is Dependence.NONE for kind in kinds[1:]):
        return _picked(equation, facts, worst)
    if name in _JOINS and (name in ("concatenate", "stack") or not _index_depends(name, kinds)):
        return _picked(equation, facts, worst)
    linear = linear_name(equation) in _LINEAR or (name == "div" and kinds[0])
    return _SUM if worst is Dependence.SUM and len(dependent) == 1 and linear else _COUPLED


def _picked(equation: Any, facts: list[Fact], worst: Dependence) -> Fact:
    return Fact(worst, _name(equation, facts) if worst is Dependence.ONE else None)


def _index_depends(name: str, kinds: list[Dependence]) -> bool:
    """Whether what an operation picks entries by depends on rows."""
    indices = {"select_n": kinds[:1], "scatter": kinds[1:2], "dynamic_update_slice": kinds[2:]}.get(name, [])
    return any(indices)


def _name(equation: Any, facts: list[Fact]) -> Any:
    """A name that two equations share only if they do the same with the same operands."""
    operands = tuple(fact.where for fact in facts)
    if any(hasattr(value, "eqns") or hasattr(value, "jaxpr") for value in equation.params.values()):
        return ("of", id(equation), hash(operands))
    shapes = tuple(variable.aval.shape for variable in equation.invars)
    params = str(sorted((key, str(value)) for key, value in equation.params.items()))
    return ("of", equation.primitive.name, hash((params, shapes, operands)))


def _of_cond(equation: Any, facts: list[Fact]) -> list[Fact]:
    if facts[0].kind > Dependence.NONE:
        return [_COUPLED] * len(equation.outvars)
    branches = [interpret(branch.jaxpr, facts[1:], _constant, _of_equation) for branch in equation.params["branches"]]
    name = _name(equation, facts)
    return [_joined(found, (name, number)) for number, found in enumerate(zip(*branches, strict=True))]


def _joined(facts: tuple[Fact, ...], name: Any) -> Fact:
    """The fact about a value of which each entry is one of several."""
    worst = max(fact.kind for fact in facts)
    return facts[0] if len(set(facts)) == 1 else Fact(worst, name if worst < Dependence.SUM else None)


def _of_scan(equation: Any, facts: list[Fact]) -> list[Fact]:
    """A step sees a slice of what it scans over, and what it carries may depend on other rows than that does."""
    body = equation.params["jaxpr"].jaxpr
    # Ranks tell what is scanned over or stacked; the names of the parameters that count them differ between versions.
    num_carry = _count_of_equal_rank(equation.outvars, body.outvars)
    num_consts = _count_of_equal_rank(equation.invars, body.invars) - num_carry
    name = _name(equation, facts)
    consts, carry, scanned = (
        facts[:num_consts],
        facts[num_consts : num_consts + num_carry],
        [_slice(fact, (name, number)) for number, fact in enumerate(facts[num_consts + num_carry :])],
    )
    # Facts about what is carried only grow, so that this ends.
    while True:
        fresh = [
            Fact(fact.kind, (name, "carry", number)) if fact.kind < Dependence.SUM else fact
            for number, fact in enumerate(carry)
        ]
        found = interpret(body, [*consts, *fresh, *scanned], _constant, _of_equation)
        after = [before if before.kind >= new.kind else new for before, new in zip(carry, found, strict=False)]
        if [fact.kind for fact in after] == [fact.kind for fact in carry]:
            break
        carry = after
    stacked = [_stacked(fact, (name, "out", number)) for number, fact in enumerate(found[num_carry:])]
    return [*(fresh[: len(carry)]), *stacked]


def _count_of_equal_rank(outer: list, inner: list) -> int:
    return sum(a.aval.ndim == b.aval.ndim for a, b in zip(outer, inner, strict=True))


def _slice(fact: Fact, name: Any) -> Fact:
    if fact.kind is Dependence.ONE:
        return Fact(Dependence.ONE, fact.where - 1 if isinstance(fact.where, int) and fact.where > 0 else name)
    return Fact(fact.kind, name) if fact.kind is Dependence.NONE else fact


def _stacked(fact: Fact, name: Any) -> Fact:
    if fact.kind is Dependence.ONE:
        return Fact(Dependence.ONE, fact.where + 1 if isinstance(fact.where, int) else name)
    return Fact(fact.kind, name) if fact.kind is Dependence.NONE else fact
