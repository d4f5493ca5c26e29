"""Functionals that look at f at a number of inputs: values, differences, weighted sums."""

from collections.abc import Callable
import dataclasses
import math
from typing import Any, final

import jax
from jax import Array, lax
import jax.numpy as jnp

from numpyro_sgp._internal.pytrees import register_unchecked
from numpyro_sgp.functionals.arrays import as_floats, check_shape
from numpyro_sgp.kernels.arrays import multiply
from numpyro_sgp.kernels.functional import AbstractFunctional

__all__ = ["Difference", "Values", "WeightedSum"]

# Numbers of the kernel that are held at a time, where rows come one after another: 32 MiB in float64.
_TOGETHER = 2**22


@final
@register_unchecked
@dataclasses.dataclass(frozen=True, eq=False)
class Values(AbstractFunctional):
    """Rows f(x_r): what an array of inputs, (R, D), is among other functionals."""

    X: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "X", as_floats(self.X))
        check_shape("X", self.X, 2, "(R, D)", "For one column use X[:, None].")

    @property
    def shape(self) -> tuple[int, int]:
        return self.X.shape

    @property
    def nodes(self) -> Array:
        return self.X

    def apply(self, fn: Callable[[Array], Array]) -> Array:
        return fn(jnp.asarray(self.X))

    def variance(self, kernel: Callable) -> Array:
        return kernel(jnp.asarray(self.X))


@final
@register_unchecked
@dataclasses.dataclass(frozen=True, eq=False)
class WeightedSum(AbstractFunctional):
    """Rows Σ_q w_rq f(x_rq): averages over areas or over time, integrals by a rule of one's own, contrasts.

    Rows with fewer terms than others repeat one of their inputs with weight zero. The variances of R rows take R·Q²
    values of the kernel, the covariances with M inducing variables R·Q·M; both are evaluated some rows at a time where
    they are many.

    Args:
        X: inputs x_rq, (R, Q, D).
        weights: w_rq, (R, Q); an average of Q values has the weights 1/Q.

    Raises:
        ValueError: arrays of other shapes.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_sgp as sgp
        >>> areas = sgp.functionals.WeightedSum(jnp.ones((3, 4, 2)), jnp.full((3, 4), 0.25))
        >>> areas.shape, sgp.GaussianProcess(sgp.kernels.SquaredExponential(1.0), areas).event_shape
        ((3, 2), (3,))
    """

    X: Any
    weights: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "X", as_floats(self.X))
        object.__setattr__(self, "weights", as_floats(self.weights))
        check_shape("X", self.X, 3, "(R, Q, D)", "R rows are sums over Q inputs of D columns each.")
        if self.weights.shape != self.X.shape[:2]:
            msg = (
                f"`weights` must have shape (R, Q) = {self.X.shape[:2]}, a number for each input, got "
                f"{self.weights.shape}. For averages use full((R, Q), 1 / Q)."
            )
            raise ValueError(msg)

    @property
    def shape(self) -> tuple[int, int]:
        return self.X.shape[0], self.X.shape[-1]

    @property
    def nodes(self) -> Array:
        return self.X.reshape(-1, self.X.shape[-1])

    def apply(self, fn: Callable[[Array], Array]) -> Array:
        values = fn(jnp.asarray(self.nodes))
        values = values.reshape(*values.shape[:-1], *self.weights.shape)
        return jnp.sum(multiply(values, jnp.asarray(self.weights)), axis=-1)

    def cross(self, kernel: Callable, Z: Array) -> Array:
        Q = self.X.shape[1]
        one = jax.eval_shape(kernel, Z, jax.ShapeDtypeStruct((Q, Z.shape[-1]), self.dtype))
        if math.prod(one.shape) * len(self) <= _TOGETHER:
            return super().cross(kernel, Z)
        return self._by_rows(lambda x, w: jnp.sum(kernel(Z, x) * w, axis=-1), math.prod(one.shape))

    def variance(self, kernel: Callable) -> Array:
        Q, D = self.X.shape[1:]
        points = jax.ShapeDtypeStruct((Q, D), self.dtype)
        size = math.prod(jax.eval_shape(kernel, points, points).shape)

        def of_row(x: Array, w: Array) -> Array:
            return jnp.sum(kernel(x, x) * (w[:, None] * w), axis=(-2, -1))

        return self._by_rows(of_row, size)

    def _by_rows(self, fn: Callable[[Array, Array], Array], size: int) -> Array:
        """A function of the inputs and weights of a row, (...), for all rows, (..., R); `size` numbers in each."""
        rows = jnp.asarray(self.X), jnp.asarray(self.weights)
        together = max(1, _TOGETHER // size)
        if len(self) <= together:
            return jax.vmap(fn, out_axes=-1)(*rows)
        # Computed again for a gradient, so that no more is held then either.
        found = lax.map(jax.checkpoint(lambda row: fn(*row)), rows, batch_size=together)
        return jnp.moveaxis(found, 0, -1)


@final
@register_unchecked
@dataclasses.dataclass(frozen=True, eq=False)
class Difference(AbstractFunctional):
    """Rows f(x_r) − f(x′_r): preferences, contrasts, changes.

    In float32 a difference over a thousandth of a lengthscale has no digits left; where all are so small, use
    `Derivative`, or float64.

    Args:
        X1: inputs x, (R, D).
        X2: inputs x′, (R, D).

    Raises:
        ValueError: arrays of other shapes.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_sgp as sgp
        >>> pairs = sgp.functionals.Difference(jnp.ones((5, 2)), jnp.zeros((5, 2)))
        >>> pairs.shape, pairs[:3].shape
        ((5, 2), (3, 2))
    """

    X1: Any
    X2: Any

    def __post_init__(self) -> None:
        for name in ("X1", "X2"):
            object.__setattr__(self, name, as_floats(getattr(self, name)))
            check_shape(name, getattr(self, name), 2, "(R, D)", "For one column use X[:, None].")
        if self.X1.shape != self.X2.shape:
            msg = (
                f"`X1` and `X2` must have the same shape (R, D), got {self.X1.shape} and {self.X2.shape}. Give one "
                "input of each for each row."
            )
            raise ValueError(msg)

    @property
    def shape(self) -> tuple[int, int]:
        return self.X1.shape

    @property
    def nodes(self) -> Array:
        return jnp.concatenate([self.X1, self.X2])

    def apply(self, fn: Callable[[Array], Array]) -> Array:
        return fn(jnp.asarray(self.X1)) - fn(jnp.asarray(self.X2))

    def variance(self, kernel: Callable) -> Array:
        X1, X2 = jnp.asarray(self.X1), jnp.asarray(self.X2)
        between = jax.vmap(lambda x, z: kernel(x[None], z[None])[..., 0, 0], out_axes=-1)(X1, X2)
        return jnp.maximum(kernel(X1) + kernel(X2) - 2.0 * between, 0.0)
