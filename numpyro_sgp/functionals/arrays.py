"""Arrays of functionals: checked, and left where they are."""

from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

__all__ = ["as_floats", "check_shape"]


def as_floats(value: Any) -> Any:
    """An array of floats: one on the host stays there, so that batches of its rows are gathered there."""
    value = value if isinstance(value, Array | np.ndarray) else np.asarray(value)
    if jnp.issubdtype(value.dtype, jnp.floating):
        return value
    return value.astype(jax.dtypes.canonicalize_dtype(float))


def check_shape(name: str, value: Any, ndim: int, form: str, remedy: str) -> None:
    """Raise unless an array has that many axes, none of them of length zero but the first."""
    if value.ndim != ndim or 0 in value.shape[1:]:
        msg = f"`{name}` must have shape {form}, got {value.shape}. {remedy}"
        raise ValueError(msg)
