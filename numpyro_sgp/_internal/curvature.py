"""How a function depends on one argument: constant, affine, quadratic, the exponential of something affine, or other.

Read off the traced program. No derivative tells: that of a kink is constant, too.
"""

from collections.abc import Callable
import enum
from typing import Any

import jax
from jax import Array

from numpyro_sgp._internal.programs import ADDS, MOVES, MOVES_FIRST, interpret, linear_name

__all__ = ["Shape", "is_quadratic", "shapes_of"]


class Shape(enum.Enum):
    """How a value depends on f."""

    CONSTANT = 0
    AFFINE = 1
    QUADRATIC = 2
    EXPONENTIAL = 3  # the exponential of something affine
    OTHER = 4


_LINEAR = ADDS | {"neg", "concatenate", "reduce_sum", "cumsum"}
# They keep any shape, of the first operand where the others are constant.
_KEEPS, _KEEPS_FIRST = MOVES | {"convert_element_type"}, MOVES_FIRST | {"pad"}


def _of_equation(equation: Any, shapes: list[Shape]) -> Shape:
    name, params = linear_name(equation), equation.params
    if all(shape is Shape.CONSTANT for shape in shapes):
        return Shape.CONSTANT
    if name in _KEEPS or (name in _KEEPS_FIRST and all(shape is Shape.CONSTANT for shape in shapes[1:])):
        return shapes[0]
    worst = max(shapes, key=lambda shape: shape.value)
    polynomial = worst.value <= Shape.QUADRATIC.value
    if name in _LINEAR or (name == "select_n" and shapes[0] is Shape.CONSTANT):
        return worst if polynomial else Shape.OTHER
    if name in ("mul", "dot_general") and worst is Shape.AFFINE:
        return Shape.AFFINE if Shape.CONSTANT in shapes else Shape.QUADRATIC
    if name in ("mul", "dot_general", "div"):
        if worst is Shape.EXPONENTIAL and name != "dot_general":
            return worst if all(shape in (Shape.CONSTANT, worst) for shape in shapes) else Shape.OTHER
        scaled = polynomial and shapes[1] is Shape.CONSTANT
        return worst if scaled or (polynomial and name != "div" and shapes[0] is Shape.CONSTANT) else Shape.OTHER
    if name == "square" or (name == "integer_pow" and params["y"] == 2):
        return Shape.QUADRATIC if worst is Shape.AFFINE else Shape.OTHER
    if name == "exp":
        return Shape.EXPONENTIAL if worst is Shape.AFFINE else Shape.OTHER
    if name == "log":
        return Shape.AFFINE if worst is Shape.EXPONENTIAL else Shape.OTHER
    return Shape.OTHER


def shapes_of(fn: Callable[[Array], Any], f: Array) -> Any:
    """The shape of each leaf of `fn(f)` as a function of f."""
    program, like = jax.make_jaxpr(fn, return_shape=True)(f)
    return jax.tree.unflatten(
        jax.tree.structure(like), interpret(program.jaxpr, [Shape.AFFINE], lambda _: Shape.CONSTANT, _of_equation)
    )


def is_quadratic(fn: Callable[[Array], Array], f: Array) -> bool:
    """Whether `fn` is a polynomial of degree two or less."""
    return shapes_of(fn, f) in (Shape.CONSTANT, Shape.AFFINE, Shape.QUADRATIC)
