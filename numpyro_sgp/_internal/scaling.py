"""What an input of a traced program is multiplied by: the scales of effects that are written as products.

A product is entry by entry, as in `scale * effect`, or with a lower triangular matrix along one axis, as in
`effect @ (scale[:, None] * L).T`.
"""

from collections.abc import Collection, Mapping
import dataclasses
from typing import Any, NamedTuple, cast

import numpy as np

from numpyro_sgp._internal.linear_predictors import KEEPS, LINEAR_IN_FIRST, Operation, Program
from numpyro_sgp._internal.programs import linear_name

__all__ = ["Scaling", "scaling_of"]

# Powers of a positive operand; that of "integer_pow" is one of its parameters.
_POWERS = {"sqrt": 0.5, "rsqrt": -0.5, "square": 2.0, "integer_pow": None}
# Products, up to a constant, where the operands are.
_FACTORS = {"mul", "div", "transpose"} | _POWERS.keys() | (KEEPS - {"neg"})


class Scale(NamedTuple):
    """A factor of a latent.

    Attributes:
        name: the variable.
        shape: what it is reshaped to, which broadcasts against the latent.
        power: to which it is raised.
        transposed: whether its last two axes are exchanged after that.
    """

    name: str
    shape: tuple[int, ...]
    power: float = 1.0
    transposed: bool = False

    def to_the(self, power: float) -> "Scale":
        """Raised to a power."""
        return self._replace(power=power * self.power)

    def flipped(self) -> "Scale":
        """The factor of a transposed matrix."""
        shape = (1,) * (2 - len(self.shape)) + self.shape
        if 1 in shape:
            return self._replace(shape=shape[::-1] if self.shape else ())
        return self._replace(transposed=not self.transposed)

    def moved(self, equation: Any, before: tuple[int, ...], after: tuple[int, ...]) -> "Scale | None":
        """The factor after an operation that moves entries; None if that does not give it a shape."""
        kind = equation.primitive.name
        if kind == "transpose":
            return self.flipped() if len(after) == 2 else None
        if self.shape in ((), after) or before == after:
            return self
        if self.transposed:
            return None
        if kind == "broadcast_in_dim":
            shape = np.ones(len(after), int)
            padded = (1,) * (len(before) - len(self.shape)) + self.shape
            shape[list(equation.params["broadcast_dimensions"])] = padded
            return self._replace(shape=tuple(shape.tolist()))
        return self._replace(shape=after) if self.shape == before else None


class Scaling(NamedTuple):
    """What a latent is multiplied by.

    Attributes:
        scales: the factors.
        axis: where their product is a lower triangular matrix, the axis of the latent that it is multiplied with,
            counted from the end; None where it is multiplied entry by entry.
    """

    scales: tuple[Scale, ...]
    axis: int | None = None

    def times(self, factors: tuple[Scale, ...], place: tuple[int, ...] | None) -> "Scaling | None":
        """With more factors of the product; None where that is not of this form.

        Args:
            factors: the factors.
            place: the axis of the latent that each axis of the product is; None where entries are not in their places.
        """
        if any(each.shape for each in factors):
            if place is None or (self.axis is None and place != tuple(range(len(place)))):
                return None
            if self.axis is not None:
                axis = place.index(len(place) + self.axis) - len(place)
                sides = [(1,) * (len(place) - len(each.shape)) + each.shape for each in factors]
                if any(shape[axis] != np.prod(shape) for shape in sides):
                    return None
                # They scale rows of the matrix.
                rows = [(shape[axis], 1) if shape[axis] > 1 else () for shape in sides]
                factors = tuple(each._replace(shape=shape) for each, shape in zip(factors, rows, strict=True))
        return self._replace(scales=tuple(sorted((*self.scales, *factors))))


Scales = tuple[Scale, ...]
Place = tuple[int, ...] | None


def scaling_of(
    program: Program, name: str, among: Mapping[int, str], triangular: Collection[str], outputs: Collection[str]
) -> tuple[Scaling | None, frozenset[int]]:
    """What an input is multiplied by before outputs depend on it in any other way.

    Args:
        program: the program.
        name: the input.
        among: names of the variables that may be factors, by number. Other factors depend on no input.
        triangular: those of them that are lower triangular matrices.
        outputs: names of the outputs.

    Returns:
        The factors, None if there are none or they differ from place to place; and the numbers of the products.
    """
    wanted = {program.outputs[output] for output in outputs}
    needed = set(wanted)
    for operation in reversed(program.operations):
        if needed.intersection(operation.results):
            needed.update(operation.operands)
    find = _Factors(program, among, triangular)
    start = program.inputs[name]
    # Multiples of the input, each with its factors and the axis of the input that each of its axes is.
    multiples: dict[int, tuple[Scaling, Place]] = {start: (Scaling(()), tuple(range(len(program.shapes[start]))))}
    products = {number: Scaling(()) for number in wanted & multiples.keys()}
    copies = {start}
    for operation in program.operations:
        inside = [number for number in operation.operands if number in multiples]
        if not inside or not needed.intersection(operation.results):
            continue
        kind, result = linear_name(operation.equation), operation.results[0]
        scaling, place = multiples[inside[0]]
        after = None
        if kind in KEEPS | LINEAR_IN_FIRST and inside == [operation.operands[0]] and len(operation.results) == 1:
            after = scaling, find.place_after(operation, inside[0], place)
            copies.update({result} if inside[0] in copies else ())
        elif (kind == "mul" and len(inside) == 1) or (kind == "div" and inside == [operation.operands[0]]):
            (other,) = [number for number in operation.operands if number != inside[0]]
            factors, place = find.factors(other), find.place_after(operation, inside[0], place)
            if factors is not None and not any(each.name in triangular or each.transposed for each in factors):
                more = scaling.times(_inverse(factors) if kind == "div" else factors, place)
                after = None if more is None else (more, place)
        elif kind == "dot_general" and len(inside) == 1 and inside[0] in copies and place is not None:
            after = find.mixing(operation, inside[0], place)
        if after is None:
            products.update({number: multiples[number][0] for number in inside})
            continue
        multiples[result] = after
        if result in wanted:
            products[result] = after[0]
    found = set(products.values())
    if len(found) != 1 or not (first := found.pop()).scales:
        return None, frozenset()
    return first, frozenset(products)


@dataclasses.dataclass
class _Factors:
    """Finds factors.

    Attributes:
        program: the program.
        among: names of the variables that may be factors, by number.
        triangular: those of them that are lower triangular matrices.
    """

    program: Program
    among: Mapping[int, str]
    triangular: Collection[str]

    def __post_init__(self) -> None:
        self.made_by = {result: operation for operation in self.program.operations for result in operation.results}

    def factors(self, number: int) -> Scales | None:
        """The variables that another one is a product of, times what depends on no input; None if it is no product."""
        shapes = self.program.shapes
        if number in self.among:
            return (Scale(self.among[number], () if np.prod(shapes[number]) == 1 else shapes[number]),)
        if not self.program.depends[number]:
            return ()
        if number not in self.made_by or linear_name(self.made_by[number].equation) not in _FACTORS:
            return None
        equation, operands, _ = self.made_by[number]
        kind = linear_name(equation)
        of_operands = [self.factors(operand) for operand in operands]
        if None in of_operands:
            return None
        found, *others = cast(list[Scales], of_operands)
        if others:
            return found + (others[0] if kind == "mul" else _inverse(others[0]))
        if kind in _POWERS:
            power = equation.params["y"] if kind == "integer_pow" else _POWERS[kind]
            return tuple(each.to_the(power) for each in found)
        moved = [each.moved(equation, shapes[operands[0]], shapes[number]) for each in found]
        return None if None in moved else tuple(cast(Scales, moved))

    def mixing(self, operation: Operation, number: int, place: tuple[int, ...]) -> tuple[Scaling, Place] | None:
        """The lower triangular matrix that an input is multiplied with along one of its axes, and the result's axes."""
        (of_both, batch), first = operation.equation.params["dimension_numbers"], operation.operands[0] == number
        own, others = of_both if first else of_both[::-1]
        matrix = operation.operands[1 if first else 0]
        shape = self.program.shapes[matrix]
        if len(own) != 1 or batch[0] or len(shape) != 2 or shape[0] != shape[1]:
            return None
        factors = self.factors(matrix)
        if factors is None:
            return None
        factors = factors if others[0] == 1 else tuple(each.flipped() for each in factors)
        roots = [each for each in factors if each.name in self.triangular]
        if len(roots) != 1 or roots[0] != Scale(roots[0].name, shape) or any(each.transposed for each in factors):
            return None
        free, mixed = [each for axis, each in enumerate(place) if axis != own[0]], [place[own[0]]]
        return Scaling(tuple(sorted(factors)), mixed[0] - len(place)), tuple(free + mixed if first else mixed + free)

    def place_after(self, operation: Operation, number: int, place: Place) -> Place:
        """The axis of an input that each axis of the result is; None where entries are not in their places.

        Args:
            operation: what is done to a multiple of the input.
            number: of the multiple.
            place: the axis of the input that each of its axes is.
        """
        kind, shapes = linear_name(operation.equation), self.program.shapes
        if place is None:
            return None
        if kind == "transpose":
            return tuple(place[axis] for axis in operation.equation.params["permutation"])
        same = shapes[number] == shapes[operation.results[0]]
        return place if same and kind in KEEPS | {"mul", "div"} else None


def _inverse(factors: Scales) -> Scales:
    return tuple(each.to_the(-1.0) for each in factors)
