"""What a likelihood is as a function of one latent: log-density quadratic, concave, or neither for all that is known.

An estimate of f from sampled basis functions can be used in a bound only where the log-density is one of the first two.
Whether a parameter of a distribution is affine in f, or the exponential of something affine, is read off the program
that computes it.
"""

from collections.abc import Callable, Collection
import enum
from typing import Any

import jax
from jax import Array
from jax.extend.core import Literal
import numpyro.distributions as dist

__all__ = ["Shape", "check_concave", "dependence", "inner_program", "is_quadratic", "shapes_of"]


class Shape(enum.Enum):
    """How a value depends on f."""

    CONSTANT = 0
    AFFINE = 1
    QUADRATIC = 2
    EXPONENTIAL = 3  # the exponential of something affine
    OTHER = 4


# By distribution: which of its parameters may depend on f, and how, for its log-density to be concave in f.
_CONCAVE: dict[type, dict[str, Shape]] = {
    dist.Normal: {"loc": Shape.AFFINE},
    dist.Laplace: {"loc": Shape.AFFINE},
    dist.Logistic: {"loc": Shape.AFFINE},
    dist.Gumbel: {"loc": Shape.AFFINE},
    dist.BernoulliLogits: {"logits": Shape.AFFINE},
    dist.BinomialLogits: {"logits": Shape.AFFINE},
    dist.Poisson: {"rate": Shape.EXPONENTIAL},
    dist.Exponential: {"rate": Shape.EXPONENTIAL},
    dist.Gamma: {"rate": Shape.EXPONENTIAL},
}

_LINEAR = {
    "add",
    "add_any",
    "sub",
    "neg",
    "concatenate",
    "reduce_sum",
    "cumsum",
}
# Operations that move or copy entries: they keep any shape.
_MOVES = {
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "copy_p",
    "expand_dims",
    "reshape",
    "rev",
    "slice",
    "squeeze",
    "transpose",
    "optimization_barrier",
}
# The same for the first operand, where the others are constant.
_MOVES_FIRST = {"dynamic_slice", "gather", "pad"}


def _of_equation(name: str, params: dict[str, Any], shapes: list[Shape]) -> Shape:
    if all(shape is Shape.CONSTANT for shape in shapes):
        return Shape.CONSTANT
    if name in _MOVES or (name in _MOVES_FIRST and all(shape is Shape.CONSTANT for shape in shapes[1:])):
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


def inner_program(equation: Any) -> Any:
    """The program that an equation calls, or None."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        found = equation.params.get(name)
        if found is not None:
            found = getattr(found, "jaxpr", found)
            if len(found.invars) == len(equation.invars):
                return found
    return None


def _of_program(jaxpr: Any, inputs: list[Shape]) -> list[Shape]:
    known = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(variable: Any) -> Shape:
        return Shape.CONSTANT if isinstance(variable, Literal) else known.get(variable, Shape.CONSTANT)

    for equation in jaxpr.eqns:
        shapes = [read(variable) for variable in equation.invars]
        inner = inner_program(equation)
        # A loop calls its program with other values each time, and is not looked into.
        if inner is not None and equation.primitive.name not in ("scan", "while", "cond"):
            outputs = _of_program(inner, shapes)
        else:
            outputs = [_of_equation(equation.primitive.name, equation.params, shapes)] * len(equation.outvars)
        known.update(zip(equation.outvars, outputs, strict=True))
    return [read(variable) for variable in jaxpr.outvars]


def shapes_of(fn: Callable[[Array], Any], f: Array) -> Any:
    """The shape of each leaf of `fn(f)` as a function of f."""
    program, like = jax.make_jaxpr(fn, return_shape=True)(f)
    return jax.tree.unflatten(jax.tree.structure(like), _of_program(program.jaxpr, [Shape.AFFINE]))


def _parameters(site_fn: dist.Distribution) -> dict[str, Any]:
    return {name: getattr(site_fn, name) for name in site_fn.arg_constraints if name in vars(site_fn)}


def dependence(site_fn_at: Callable[[Array], dist.Distribution], f: Array) -> tuple[type, dict[str, Shape]]:
    """The distribution of a site, and how its parameters depend on f, those that do not left out."""
    seen: list[type] = []

    def parameters(f: Array) -> dict[str, Any]:
        fn = site_fn_at(f)
        seen.append(type(fn))
        return _parameters(fn)

    found = shapes_of(parameters, f)
    return seen[-1], {name: shape for name, shape in found.items() if shape is not Shape.CONSTANT}


def is_quadratic(fn: Callable[[Array], Array], f: Array) -> bool:
    """Whether `fn` is a polynomial of degree two or less. No derivative tells: that of a kink is constant, too."""
    return shapes_of(fn, f) in (Shape.CONSTANT, Shape.AFFINE, Shape.QUADRATIC)


def check_concave(site: str, kind: type, found: dict[str, Shape], declared: Collection[str]) -> None:
    """Raise where a log-density is not known to be concave in f.

    Args:
        site: the observed site.
        kind: its distribution.
        found: how its parameters depend on f.
        declared: sites that the user says are log-concave.

    Raises:
        ValueError: the likelihood is not log-concave, or not known to be.
    """
    if site in declared:
        return
    needed = _CONCAVE.get(kind)
    if needed is not None and all(needed.get(name) is shape for name, shape in found.items()):
        return
    depends = ", ".join(f"`{name}` ({shape.name.lower()})" for name, shape in sorted(found.items())) or "nothing seen"
    known = ", ".join(sorted(known.__name__ for known in _CONCAVE))
    msg = (
        f"The likelihood of {site!r} is {kind.__name__} with {depends} depending on f, and not known to be log-concave "
        "in f. An estimate of f from sampled basis functions then gives no bound. Log-concave are, with a location or "
        f"logits that are affine in f, or a rate that is the exponential of something affine: {known}. Write the "
        f"likelihood so (`logits=` in the place of `probs=`), pass `log_concave=({site!r},)` to the guide if it is "
        "log-concave all the same, or use `AutoSVGP` or `AutoWeightSpaceGP`."
    )
    raise ValueError(msg)
