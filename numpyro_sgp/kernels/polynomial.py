"""Linear and polynomial kernels."""

import dataclasses
from typing import final

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike

from numpyro_sgp.kernels.algebra import Kernel
from numpyro_sgp.kernels.arrays import add, check_columns, expand, multiply
from numpyro_sgp.math.products import matmul

__all__ = ["Linear", "Polynomial"]


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Linear(Kernel):
    """k(x, z) = Σ_d σ_d² x_d z_d: linear functions through the origin; add a `Constant` for an intercept.

    Args:
        variance: σ_d², prior variance of the slopes, in units of f²/X²; scalar, (D,), or batch + (1,) or (D,).

    References: Rasmussen & Williams (2006), section 4.2.2.
    """

    variance: ArrayLike = 1.0

    def _diagonal(self, X: Array) -> Array:
        check_columns("variance", self.variance, X)
        return jnp.sum(multiply(X * X, expand(self.variance, -2)), axis=-1)

    def _matrix(self, X: Array, Z: Array) -> Array:
        check_columns("variance", self.variance, X)
        return matmul(multiply(X, expand(self.variance, -2)), jnp.matrix_transpose(Z))


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Polynomial(Kernel):
    """k(x, z) = (Σ_d σ_d² x_d z_d + c)^degree: polynomials of at most that degree.

    Args:
        degree: a Python integer ≥ 1.
        variance: σ_d², scalar, (D,), or batch + (1,) or (D,); units of 1/X² when c has none.
        offset: c ≥ 0; shape of the batch. c = 0 leaves only the terms of exactly that degree.

    Raises:
        ValueError: a degree that is not a positive Python integer.

    References: Rasmussen & Williams (2006), section 4.2.2.
    """

    degree: int = dataclasses.field(metadata={"static": True})
    variance: ArrayLike = 1.0
    offset: ArrayLike = 1.0

    def __post_init__(self) -> None:
        # The degree is static, so it is never a placeholder, and a wrong one is seen where it is written.
        if isinstance(self.degree, bool) or not isinstance(self.degree, int) or self.degree < 1:
            msg = f"`degree` must be a positive Python integer, got {self.degree!r}. Use 2 for quadratic functions."
            raise ValueError(msg)

    def _diagonal(self, X: Array) -> Array:
        return add(Linear(self.variance)(X), expand(self.offset, -1)) ** self.degree

    def _matrix(self, X: Array, Z: Array) -> Array:
        return add(Linear(self.variance)(X, Z), expand(self.offset, -2, -1)) ** self.degree
