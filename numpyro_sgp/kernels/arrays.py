"""Inputs and hyperparameters of kernels: their shapes, batches and distances."""

import operator
from typing import Any

from jax import Array, lax
import jax.numpy as jnp
from jax.typing import ArrayLike

from numpyro_sgp._internal.eager import as_one_program
from numpyro_sgp.kernels.distances import squared_distance

__all__ = [
    "add",
    "aligned",
    "as_inputs",
    "centred",
    "check_columns",
    "divide",
    "expand",
    "multiply",
    "scaled_squared_distance",
    "zero_distance",
]

# Rows of which the inputs' centre is the median.
_CENTRE_ROWS = 32


def as_inputs(X: ArrayLike, name: str) -> Array:
    """Inputs as floats, (..., N, D), or an error by their name."""
    X = jnp.asarray(X)
    if X.ndim < 2 or X.shape[-1] == 0:
        msg = f"`{name}` must have shape (N, D), got {X.shape}. For one input use {name}[:, None]."
        raise ValueError(msg)
    return X if jnp.issubdtype(X.dtype, jnp.floating) else X.astype(jnp.result_type(float))


def check_columns(name: str, value: ArrayLike, X: Array) -> None:
    """Raise where a hyperparameter with one number for each column has another number of them."""
    shape, D = jnp.shape(value), X.shape[-1]
    if shape and shape[-1] not in (1, D):
        msg = (
            f"`{name}` has shape {shape}, but its last axis must be 1 or D = {D}, the width of `X`. Use a scalar or "
            f"({D},) for one kernel; C isotropic kernels need shape (C, 1), here {(*shape, 1)}."
        )
        raise ValueError(msg)


def expand(value: Any, *axes: int) -> Any:
    """New axes for an array; a scalar broadcasts as it is and, when a Python float, keeps adapting to any dtype."""
    return value if jnp.ndim(value) == 0 else jnp.expand_dims(value, axes)


def aligned(*values: Any) -> Any:
    """Arrays with leading axes of size one up to a common rank, which `jax_numpy_rank_promotion="raise"` asks for."""
    rank = max(jnp.ndim(value) for value in values)
    return tuple(expand(value, *range(rank - jnp.ndim(value))) for value in values)


def add(a: Any, b: Any) -> Array:
    """The sum of arrays of any two ranks."""
    return operator.add(*aligned(a, b))


def multiply(a: Any, b: Any) -> Array:
    """The product of arrays of any two ranks."""
    return operator.mul(*aligned(a, b))


def divide(a: Any, b: Any) -> Array:
    """The quotient of arrays of any two ranks."""
    return operator.truediv(*aligned(a, b))


def zero_distance(X: Array, *columns: ArrayLike) -> Array:
    """The distance of each row to itself, (..., N, 1), in the batch and dtype of inputs and hyperparameters."""
    batch = jnp.broadcast_shapes(X.shape[:-2], *(jnp.shape(column)[:-1] for column in columns))
    return jnp.zeros((*batch, X.shape[-2], 1), jnp.result_type(X, *columns))


def centred(X: Array, Z: Array) -> tuple[Array, Array]:
    """Both inputs, less a point among them: the products that follow would else cancel |x|² against 2 xᵀz."""
    # Stationary kernels do not change when both inputs are shifted, so the shift needs no derivative. A median, since
    # one row far away would take the digits of all others; of a few rows, since any point near most of them will do; of
    # the first argument, which are the inducing inputs and not a batch, whose rows may lie on several devices.
    X, Z = aligned(X, Z)
    rows = lax.stop_gradient(X)[..., :: max(-(-X.shape[-2] // _CENTRE_ROWS), 1), :]
    # A value that is there, not between two of them.
    centre = jnp.nanquantile(rows, 0.5, axis=-2, keepdims=True, method="lower") if rows.shape[-2] else 0.0
    return X - centre, Z - centre


@as_one_program
def scaled_squared_distance(X: Array, Z: Array, lengthscale: ArrayLike) -> Array:
    """Σ_d (x_d − z_d)² / ℓ_d², (..., N, M)."""
    X, Z = centred(X, Z)
    return squared_distance(divide(X, lengthscale), divide(Z, lengthscale))
