"""Kernels of periodic functions."""

import dataclasses
import math
from typing import final

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike

from numpyro_sgp.kernels.algebra import Kernel
from numpyro_sgp.kernels.arrays import centred, check_columns, divide, expand, multiply, zero_distance
from numpyro_sgp.kernels.distances import squared_distance

__all__ = ["Cosine", "Periodic"]


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Periodic(Kernel):
    """k(x, z) = σ_f² exp(−2 Σ_d sin²(π (x_d − z_d) / p_d) / ℓ_d²): functions of period p.

    It is the squared exponential kernel of the features (cos(2πx_d/p_d), sin(2πx_d/p_d)), so ℓ is a distance on the
    unit circle and not in units of X.

    Args:
        lengthscale: ℓ, without unit; scalar, (D,), or batch + (1,) or (D,).
        period: p in units of X; scalar, (D,), or batch + (1,) or (D,).
        variance: σ_f² in units of f²; shape of the batch.

    References: MacKay (1998), "Introduction to Gaussian processes"; Rasmussen & Williams (2006), eq. 4.31 with p = 2π.
    """

    lengthscale: ArrayLike
    period: ArrayLike
    variance: ArrayLike = 1.0

    def _check(self, X: Array) -> None:
        check_columns("lengthscale", self.lengthscale, X)
        check_columns("period", self.period, X)

    def _diagonal(self, X: Array) -> Array:
        self._check(X)
        ones = jnp.exp(zero_distance(X, self.lengthscale, self.period))
        return multiply(expand(self.variance, -2, -1), ones)[..., 0]

    def _matrix(self, X: Array, Z: Array) -> Array:
        self._check(X)
        X, Z = centred(X, Z)
        # |φ(x) − φ(z)|² = Σ_d (2 − 2 cos(θ_d − θ'_d)) / ℓ_d² = 4 Σ_d sin²((θ_d − θ'_d)/2) / ℓ_d²
        r2 = squared_distance(self._features(X), self._features(Z))
        return multiply(expand(self.variance, -2, -1), jnp.exp(-0.5 * r2))

    def _features(self, X: Array) -> Array:
        theta = divide((2.0 * math.pi) * X, expand(self.period, -2))
        lengthscale = expand(self.lengthscale, -2)
        return jnp.concatenate([divide(jnp.cos(theta), lengthscale), divide(jnp.sin(theta), lengthscale)], axis=-1)


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Cosine(Kernel):
    """k(x, z) = σ_f² Π_d cos(2π (x_d − z_d) / p_d): waves of period p with a random amplitude and phase.

    Args:
        period: p in units of X; scalar, (D,), or batch + (1,) or (D,).
        variance: σ_f² in units of f²; shape of the batch.

    References: Wilson & Adams (2013), "Gaussian process kernels for pattern discovery and extrapolation", as one
    component of a spectral mixture without a width.
    """

    period: ArrayLike
    variance: ArrayLike = 1.0

    def _diagonal(self, X: Array) -> Array:
        check_columns("period", self.period, X)
        ones = jnp.exp(zero_distance(X, self.period))
        return multiply(expand(self.variance, -2, -1), ones)[..., 0]

    def _matrix(self, X: Array, Z: Array) -> Array:
        check_columns("period", self.period, X)
        X, Z = centred(X, Z)
        left, right = (divide((2.0 * math.pi) * each, expand(self.period, -2)) for each in (X, Z))
        angles = left[..., :, None, :] - right[..., None, :, :]
        return multiply(expand(self.variance, -2, -1), jnp.prod(jnp.cos(angles), axis=-1))
