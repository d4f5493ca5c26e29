"""Derivatives of a Gaussian process as rows."""

from collections.abc import Callable
import dataclasses
import operator
from typing import Any, final

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from numpyro_sgp._internal.pytrees import register_unchecked
from numpyro_sgp.functionals.arrays import as_floats, check_shape
from numpyro_sgp.kernels.algebra import kink_of
from numpyro_sgp.kernels.functional import AbstractFunctional

__all__ = ["Derivative"]


@final
@register_unchecked
@dataclasses.dataclass(frozen=True, eq=False)
class Derivative(AbstractFunctional):
    """Rows dᵀ∇f(x_r): slopes, fluxes, a trend, values that are known to be at an extremum.

    By automatic differentiation of the kernel: ∂_d k(x, z) and ∂_d ∂′_d k(x, x′). The kernel must have functions with a
    derivative. Those of the package say whether they have; of one that is not of the package this is not known, and its
    second mixed derivative must be finite where its inputs are equal.

    Args:
        X: inputs x, (R, D).
        direction: d, the number of a column; or a vector in the units of X, (D,), or one for each row, (R, D).

    Raises:
        ValueError: arrays of other shapes, or a column that there is not.
        TypeError: a kernel with `Matern12` or `White` in it, when it is evaluated. With the number of a column, these
            may be among kernels that `Select` other columns.

    References: Rasmussen & Williams (2006), section 9.4.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_sgp as sgp
        >>> slopes = sgp.functionals.Derivative(jnp.linspace(0.0, 1.0, 5)[:, None], 0)
        >>> sgp.GaussianProcess(sgp.kernels.SquaredExponential(0.5), slopes).variance  # σ_f²/ℓ²
        Array([4., 4., 4., 4., 4.], dtype=float32)
    """

    X: Any
    direction: Any
    column: int | None = dataclasses.field(default=None, init=False, metadata={"static": True})

    def __post_init__(self) -> None:
        object.__setattr__(self, "X", as_floats(self.X))
        check_shape("X", self.X, 2, "(R, D)", "For one column use X[:, None].")
        D = self.X.shape[1]
        if np.ndim(self.direction) == 0:
            column = operator.index(self.direction)
            if not -D <= column < D:
                msg = f"`direction` must be one of the D = {D} columns of `X`, got {column}. Use 0 to {D - 1}."
                raise ValueError(msg)
            object.__setattr__(self, "column", column % D)
            object.__setattr__(self, "direction", None)
            return
        direction = as_floats(self.direction)
        if direction.shape not in ((D,), self.X.shape):
            msg = (
                f"`direction` must have shape (D,) = ({D},) or (R, D) = {self.X.shape}, got {direction.shape}. For the "
                "derivative in one column give its number."
            )
            raise ValueError(msg)
        if direction.ndim == 1:
            # With the rows first, as the inputs are.
            broadcast = np.broadcast_to if isinstance(direction, np.ndarray) else jnp.broadcast_to
            direction = broadcast(direction, self.X.shape)
        object.__setattr__(self, "direction", direction)

    @property
    def shape(self) -> tuple[int, int]:
        return self.X.shape

    @property
    def nodes(self) -> Array:
        return self.X

    def _rows(self) -> tuple[Array, Array]:
        """Inputs and directions."""
        X = jnp.asarray(self.X)
        if self.column is not None:
            return X, jnp.zeros_like(X).at[:, self.column].set(1.0)
        return X, jnp.asarray(self.direction, X.dtype)

    def apply(self, fn: Callable[[Array], Array]) -> Array:
        X, direction = self._rows()
        # A value depends on its own row, so that all rows may move at once.
        return jax.jvp(fn, (X,), (direction,))[1]

    def cross(self, kernel: Callable, Z: Array) -> Array:
        self._check(kernel)
        return super().cross(kernel, Z)

    def _covariance(self, kernel: Callable, other: AbstractFunctional) -> Array:
        self._check(kernel)
        return super()._covariance(kernel, other)

    def variance(self, kernel: Callable) -> Array:
        self._check(kernel)

        def of_row(x: Array, d: Array) -> Array:
            def between(s: Array, t: Array) -> Array:
                return kernel((x + s * d)[None], (x + t * d)[None])[..., 0, 0]

            def slope(s: Array) -> Array:
                return jax.jvp(lambda t: between(s, t), (zero,), (one,))[1]

            zero, one = jnp.zeros((), x.dtype), jnp.ones((), x.dtype)
            return jax.jvp(slope, (zero,), (one,))[1]

        return jax.vmap(of_row, out_axes=-1)(*self._rows())

    def _check(self, kernel: Callable) -> None:
        kink = kink_of(kernel, self.column, self.shape[-1])
        if kink is not None:
            msg = (
                f"`Derivative` needs a kernel whose functions have a derivative, and {type(kink).__name__} has none. "
                "Use `Matern32` or a smoother kernel."
            )
            raise TypeError(msg)
