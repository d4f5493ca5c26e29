"""Which axis of a result corresponds to an axis of the argument, found from the traced program.

No numbers are needed, so it holds within `jax.jit` too. What is not known is not paired.
"""

from collections.abc import Callable, Sequence
import math
from typing import Any

import jax
from jax import Array

from numpyro_sgp._internal.programs import interpret

__all__ = ["ELEMENTWISE", "MIXED", "UNKNOWN", "axes_of", "axis_of_equation"]

MIXED = 0  # no axis that is counted from the back has this number

# Where the entries of the argument's axis are in a value: along this axis, counted from the front, or nowhere (None).
Axis = int | None
UNKNOWN = -1

_NAMES = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp
    convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igammac
    integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter not or polygamma pow
    reduce_precision regularized_incomplete_beta rem round rsqrt select_n sign sin sinh sqrt square stop_gradient sub
    tan tanh xor zeta
"""
ELEMENTWISE = frozenset(_NAMES.split())
_REDUCTIONS = ("argmax", "argmin", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum")
_CUMULATIVE = ("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum")


def axes_of(fn: Callable[[Array], Any], f: Array, axis: int) -> Any:
    """For each leaf of `fn(f)` the axis along which entry i depends on f at i of `axis` and on no other.

    Args:
        fn: a function of one array.
        f: its argument.
        axis: an axis of f with several entries, counted from the back.

    Returns:
        The structure of `fn(f)`, of axes counted from the back; `MIXED` where entries are mixed, or not known not to
        be. Leaves that do not depend on f are left out, as None.
    """
    program, like = jax.make_jaxpr(fn, return_shape=True)(f)
    leaves, structure = jax.tree.flatten(like)
    found = interpret(program.jaxpr, [f.ndim + axis], lambda _: None, axis_of_equation)
    return structure.unflatten(
        None if axis is None else MIXED if axis == UNKNOWN else axis - len(leaf.shape)
        for axis, leaf in zip(found, leaves, strict=True)
    )


def axis_of_equation(equation: Any, axes: list[Axis]) -> Axis:
    """The axis of the outputs of an equation, from those of its operands."""
    name, params = equation.primitive.name, equation.params
    if all(axis is None for axis in axes):
        return None
    if UNKNOWN in axes:
        return UNKNOWN
    if name == "dot_general":
        return _of_product(params["dimension_numbers"], [len(each.aval.shape) for each in equation.invars], axes)
    (axis, *others) = {each for each in axes if each is not None}
    if others:
        return UNKNOWN
    shape = equation.invars[axes.index(axis)].aval.shape
    first_only = all(each is None for each in axes[1:])
    if name in ELEMENTWISE:
        return axis
    if name in _REDUCTIONS:
        return _without(axis, params["axes"])
    if name == "squeeze":
        return _without(axis, params["dimensions"])
    if name in _CUMULATIVE or name == "split":
        return UNKNOWN if params["axis"] == axis else axis
    if name in ("concatenate", "sort"):
        return UNKNOWN if params["dimension"] == axis else axis
    if name == "stack":
        return axis + (params["axis"] <= axis)
    if name == "rev":
        return UNKNOWN if axis in params["dimensions"] else axis
    if name == "triangular_solve" and axes[0] is None and axis == len(shape) - (1 if params["left_side"] else 2):
        return axis  # one right-hand side for each entry
    if name in ("cholesky", "triangular_solve"):
        return axis if axis < len(shape) - 2 else UNKNOWN
    if name == "broadcast_in_dim" and first_only:
        return params["broadcast_dimensions"][axis]
    if name == "transpose":
        return params["permutation"].index(axis)
    if name == "reshape" and first_only and params["dimensions"] is None:
        return _reshaped(shape, axis, params["new_sizes"])
    if name == "slice":
        whole = params["start_indices"][axis] == 0 and params["limit_indices"][axis] == shape[axis]
        return axis if whole and (params["strides"] is None or params["strides"][axis] == 1) else UNKNOWN
    if name == "dynamic_slice" and first_only:
        return axis if params["slice_sizes"][axis] == shape[axis] else UNKNOWN
    if name == "pad" and first_only:
        return axis if tuple(params["padding_config"][axis]) == (0, 0, 0) else UNKNOWN
    if name == "gather" and first_only:
        return _gathered(params, shape, axis, len(equation.outvars[0].aval.shape))
    return UNKNOWN


def _without(axis: int, removed: Sequence[int]) -> int:
    return UNKNOWN if axis in removed else axis - sum(each < axis for each in removed)


def _reshaped(shape: Sequence[int], axis: int, sizes: Sequence[int]) -> int:
    """The axis that has as many entries, and as many of the other axes before it."""
    before = math.prod(shape[:axis])
    for new, size in enumerate(sizes):
        if size == shape[axis] and math.prod(sizes[:new]) == before:
            return new
    return UNKNOWN


def _gathered(params: dict[str, Any], shape: Sequence[int], axis: int, ndim: int) -> int:
    numbers = params["dimension_numbers"]
    if axis in numbers.operand_batching_dims:
        batch = [each for each in range(ndim) if each not in numbers.offset_dims]
        return batch[numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(axis)]]
    removed = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    if axis in removed or params["slice_sizes"][axis] != shape[axis]:
        return UNKNOWN
    return numbers.offset_dims[_without(axis, removed)]


def _of_product(dimension_numbers: Any, ndims: list[int], axes: list[Axis]) -> int:
    contracted, batch = dimension_numbers
    found = set()
    for side, axis in enumerate(axes):
        if axis is None:
            continue
        if axis in contracted[side]:
            return UNKNOWN
        if axis in batch[side]:
            found.add(tuple(batch[side]).index(axis))
            continue
        free = _without(axis, (*contracted[side], *batch[side])) + len(batch[side])
        found.add(free + (ndims[0] - len(contracted[0]) - len(batch[0]) if side else 0))
    return found.pop() if len(found) == 1 else UNKNOWN
