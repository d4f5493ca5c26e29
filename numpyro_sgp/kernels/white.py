"""White noise as a kernel."""

import dataclasses
from typing import final

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike

from numpyro_sgp.kernels.algebra import Constant, Kernel
from numpyro_sgp.kernels.arrays import aligned
from numpyro_sgp.kernels.distances import equal_rows

__all__ = ["White"]


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class White(Kernel):
    """k(x, z) = σ² 1[x = z]: an independent value at each input, the same one at exactly equal inputs.

    Repeated rows share their value, so this is not observation noise for repeated measurements: put that in the
    likelihood. Whether a row with NaN equals another is unknown, so its covariances are NaN.

    Args:
        variance: σ² in units of f²; shape of the batch.
    """

    variance: ArrayLike

    def _kink(self, column: int | None, D: int) -> Kernel | None:
        del column, D
        return self

    def _diagonal(self, X: Array) -> Array:
        return Constant(self.variance)(X)

    def _matrix(self, X: Array, Z: Array) -> Array:
        X, Z = aligned(X, Z)
        equal, variance = aligned(equal_rows(X, Z), Constant(self.variance)(X, Z))
        K = jnp.where(equal, variance, 0.0)
        unknown = jnp.isnan(X).any(axis=-1)[..., :, None] | jnp.isnan(Z).any(axis=-1)[..., None, :]
        unknown, K = aligned(unknown, K)
        return jnp.where(unknown, jnp.nan, K)
