"""Find the linear predictors of a traced program, and evaluate the program at other values of them.

A program may be a nonlinear function of a few affine functions of its inputs: the log density of a Poisson regression
depends on intercept, coefficients and f through one predictor, f + Xβ. The program is flattened to a list of
operations. An affine variable that a nonlinear operation reads is a *root*; the output depends on the inputs through
its roots alone. No numbers are needed, so the answer is the same within `jax.jit`.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
import dataclasses
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.extend.core import Literal
import numpy as np

from numpyro_sgp._internal.programs import ADDS, MOVES, MOVES_FIRST, inner_program, linear_name
from numpyro_sgp._internal.row_dependence import Dependence, Fact, fact_of_equation

__all__ = ["KEEPS", "LINEAR_IN_FIRST", "Operation", "Program", "traced"]

# Linear in one operand, entry by entry: what depends on the result depends on that operand.
KEEPS = {"broadcast_in_dim", "convert_element_type", "copy", "copy_p", "expand_dims", "neg", "reshape", "squeeze"}
_JOINS = {"concatenate", "stack"}
# Linear in all operands together.
_LINEAR_TOGETHER = ADDS | _JOINS
# Linear in the first operand where the others do not depend on inputs.
LINEAR_IN_FIRST = (MOVES - KEEPS) | MOVES_FIRST | {"cumsum", "reduce_sum"}
# With one operand that depends on inputs, each number of the result is one of that operand's.
_COPIES = (KEEPS - {"neg"}) | (MOVES - {"optimization_barrier"}) | MOVES_FIRST
_INLINED = {"closed_call", "core_call", "jit", "pjit"}


class Operation(NamedTuple):
    equation: Any
    operands: tuple[int, ...]
    results: tuple[int, ...]


class _Affine(NamedTuple):
    """An affine variable; all that depends on it depends on its root."""

    root: int


class _Nonlinear(NamedTuple):
    roots: frozenset[int]


@dataclasses.dataclass(frozen=True)
class Program:
    """A traced function as a list of operations on numbered variables.

    Attributes:
        operations: in the order in which they are evaluated.
        constants: values of the variables that are no results of operations.
        inputs: numbers of the inputs, by name.
        outputs: numbers of the outputs, by name.
        depends: for each variable the names of the inputs that it depends on.
        shapes: of the variables.
        starts: the inputs that it was traced with.
    """

    operations: list[Operation]
    constants: dict[int, Any]
    inputs: dict[str, int]
    outputs: dict[str, int]
    depends: dict[int, frozenset[str]]
    shapes: dict[int, tuple[int, ...]]
    starts: dict[str, Any]

    def roots(self, output: str, variable: Collection[str]) -> tuple[int, ...]:
        """The affine variables through which an output depends on some of the inputs, while the others are fixed.

        Args:
            output: its name.
            variable: names of the inputs that vary.
        """
        fact = self._facts(variable).get(self.outputs[output])
        if fact is None:
            return ()
        return (fact.root,) if isinstance(fact, _Affine) else tuple(sorted(fact.roots))

    def taken_apart(self, roots: Sequence[int], variable: Collection[str]) -> tuple[int, ...]:
        """The affine variables that some roots are concatenated of, without the roots that these determine.

        The logits of classes, of which one is constant, are of fewer numbers than they have.

        Args:
            roots: affine variables.
            variable: names of the inputs that vary.
        """
        made_by = {result: operation for operation in self.operations for result in operation.results}
        joined = [root for root in roots if root in made_by and linear_name(made_by[root].equation) in _JOINS]
        if not joined:
            return tuple(roots)
        facts = self._facts(variable)
        found = [facts.get(operand) for root in joined for operand in made_by[root].operands]
        parts = {fact.root for fact in found if isinstance(fact, _Affine)}
        known = self._depends_given({number: frozenset() for number in parts})
        return tuple(sorted({*parts, *(root for root in roots if known[root].intersection(variable))}))

    def is_affine(self, output: str, variable: Collection[str]) -> bool:
        """Whether an output is an affine function of some of the inputs while the others are fixed."""
        return not isinstance(self._facts(variable).get(self.outputs[output]), _Nonlinear)

    def _facts(self, variable: Collection[str]) -> "dict[int, _Affine | _Nonlinear]":
        facts: dict[int, _Affine | _Nonlinear] = {self.inputs[name]: _Affine(self.inputs[name]) for name in variable}
        for operation in self.operations:
            found = _of_operation(operation, [facts.get(number) for number in operation.operands])
            if found is not None:
                for number in operation.results:
                    facts[number] = _Affine(number) if found == "new" else found
        return facts

    def origin(self, number: int) -> int:
        """The variable that another one is a copy of in another shape."""
        made_by = {result: operation for operation in self.operations for result in operation.results}
        while number in made_by and linear_name(made_by[number].equation) in KEEPS - {"neg"}:
            (number,) = made_by[number].operands
        return number

    def copied(self, output: str) -> str | None:
        """The name of the input whose numbers an output consists of, in any order and often; None where there is none.

        Args:
            output: its name.
        """
        made_by = {result: operation for operation in self.operations for result in operation.results}
        number = self.outputs[output]
        while number in made_by and linear_name(made_by[number].equation) in _COPIES:
            first, *others = made_by[number].operands
            if any(self.depends[other] for other in others):
                return None
            number = first
        return next((name for name, each in self.inputs.items() if each == number), None)

    def picked(self, number: int, name: str) -> tuple[int, ...]:
        """The variables of one row of an input each, on its last axis, through which another one depends on it."""
        start = Fact(Dependence.ONE, len(self.shapes[self.inputs[name]]) - 1)
        facts, made_by = {self.inputs[name]: start}, {}
        for operation in self.operations:
            operands = [facts.get(each, Fact(Dependence.NONE, ("variable", each))) for each in operation.operands]
            facts.update(zip(operation.results, fact_of_equation(operation.equation, operands), strict=True))
            made_by.update(dict.fromkeys(operation.results, operation))
        found, left = set(), [number]
        while left:
            each = left.pop()
            kind = facts[each].kind if each in facts else Dependence.NONE
            if kind is Dependence.ONE:
                found.add(each)
            elif kind is not Dependence.NONE:
                left += made_by[each].operands
        return tuple(sorted(found))

    def depends_given(self, given: Mapping[int, frozenset[str]]) -> dict[str, frozenset[str]]:
        """What each output depends on if some variables were inputs, with these names."""
        depends = self._depends_given(given)
        return {output: depends[number] for output, number in self.outputs.items()}

    def _depends_given(self, given: Mapping[int, frozenset[str]]) -> dict[int, frozenset[str]]:
        depends = {**self.depends, **given}
        for operation in self.operations:
            found = frozenset().union(*(depends[number] for number in operation.operands))
            depends.update({number: found for number in operation.results if number not in given})
        return depends

    def evaluate(
        self, wanted: Sequence[int], inputs: Mapping[str, Any], given: Mapping[int, Any] | None = None
    ) -> list[Any]:
        """Values of variables.

        Args:
            wanted: numbers of the variables.
            inputs: values of all inputs that these depend on.
            given: values of variables in the place of what the program computes for them.
        """
        given = {} if given is None else given
        known = {**self.constants, **{self.inputs[name]: value for name, value in inputs.items()}, **given}
        needed = set(wanted) - set(given)
        steps = []
        for operation in reversed(self.operations):
            if needed.intersection(operation.results):
                steps.append(operation)
                needed.difference_update(operation.results)
                needed.update(number for number in operation.operands if number not in given)
        for equation, operands, results in reversed(steps):
            found = _bind(equation, [known[number] for number in operands])
            for number, value in zip(results, found if equation.primitive.multiple_results else [found], strict=True):
                if number not in given:
                    known[number] = value
        return [known[number] for number in wanted]


def traced(fn: Callable[[dict[str, Array]], dict[str, Array]], inputs: Mapping[str, Array]) -> Program:
    """The program of a function of named arrays that returns named arrays."""
    closed, like = jax.make_jaxpr(fn, return_shape=True)(dict(inputs))
    builder = _Builder()
    names = sorted(inputs)  # the order of a dict's leaves
    numbers = {name: builder.new(frozenset({name}), inputs[name].shape) for name in names}
    constants = [builder.constant(value) for value in closed.consts]
    found = builder.flatten(closed.jaxpr, constants, [numbers[name] for name in names])
    outputs = dict(zip(sorted(like), found, strict=True))
    return Program(
        builder.operations, builder.constants, numbers, outputs, builder.depends, builder.shapes, dict(inputs)
    )


def _bind(equation: Any, operands: list[Any]) -> Any:
    params = equation.primitive.get_bind_params(equation.params)
    functions, params = params if isinstance(params, tuple) else ((), params)  # a pair before JAX 0.10
    return equation.primitive.bind(*functions, *operands, **params)


class _Builder:
    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.constants: dict[int, Any] = {}
        self.depends: dict[int, frozenset[str]] = {}
        self.shapes: dict[int, tuple[int, ...]] = {}
        self.known: dict[Any, tuple[int, ...]] = {}  # results of operations by what they do

    def new(self, depends: frozenset[str], shape: tuple[int, ...]) -> int:
        number = len(self.depends)
        self.depends[number], self.shapes[number] = depends, shape
        return number

    def constant(self, value: Any) -> int:
        number = self.new(frozenset(), np.shape(value))
        self.constants[number] = value
        return number

    def flatten(self, jaxpr: Any, constants: list[int], arguments: list[int]) -> list[int]:
        numbers = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *arguments], strict=True))

        def number_of(variable: Any) -> int:
            if not isinstance(variable, Literal):
                return numbers[variable]
            key = ("literal", repr(variable.val), str(variable.aval))
            if key not in self.known:
                self.known[key] = (self.constant(variable.val),)
            return self.known[key][0]

        for equation in jaxpr.eqns:
            operands = [number_of(variable) for variable in equation.invars]
            inner = inner_program(equation) if equation.primitive.name in _INLINED else None
            if inner is None:
                results = self._operation(equation, tuple(operands))
            else:
                closed = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
                consts = [self.constant(value) for value in getattr(closed, "consts", ())]
                results = self.flatten(inner, consts, operands)
            numbers.update(zip(equation.outvars, results, strict=True))
        return [number_of(variable) for variable in jaxpr.outvars]

    def _operation(self, equation: Any, operands: tuple[int, ...]) -> tuple[int, ...]:
        """The same operation on the same operands is one operation: what a model computes twice is one predictor."""
        key = None
        if not any(hasattr(value, "eqns") or hasattr(value, "jaxpr") for value in equation.params.values()):
            params = str(sorted((name, str(value)) for name, value in equation.params.items()))
            shapes = tuple(str(variable.aval) for variable in equation.outvars)
            key = (equation.primitive.name, operands, params, shapes)
            if not equation.effects and key in self.known:
                return self.known[key]
        depends = frozenset().union(*(self.depends[number] for number in operands))
        results = tuple(self.new(depends, variable.aval.shape) for variable in equation.outvars)
        self.operations.append(Operation(equation, operands, results))
        if key is not None:
            self.known[key] = results
        return results


def _of_operation(operation: Operation, facts: list[_Affine | _Nonlinear | None]) -> Any:
    """The fact about the results: None where they depend on nothing that varies, "new" for a new root."""
    dependent = [fact for fact in facts if fact is not None]
    if not dependent:
        return None
    name = linear_name(operation.equation)
    roots = frozenset().union(*(fact.roots if isinstance(fact, _Nonlinear) else {fact.root} for fact in dependent))
    if any(isinstance(fact, _Nonlinear) for fact in dependent):
        return _Nonlinear(roots)
    alone = len(dependent) == 1
    if name in KEEPS and alone:
        return dependent[0]
    if (name in ADDS or name == "mul") and alone:
        return dependent[0]
    if name == "div" and alone and facts[0] is not None:
        return dependent[0]
    if name in ADDS and len(roots) == 1:
        return dependent[0]
    linear = (
        name in _LINEAR_TOGETHER
        or (name in LINEAR_IN_FIRST and alone and facts[0] is not None)
        or (name == "dot_general" and alone)
        or (name == "select_n" and facts[0] is None)
        or (name == "pad" and facts[1] is None)
        or (name == "pad" and alone)
        or (name == "conv_general_dilated" and alone)
        or (name == "triangular_solve" and facts[0] is None)
        or (name in ("scatter-add", "scatter_add") and facts[1] is None)
    )
    return "new" if linear else _Nonlinear(roots)
