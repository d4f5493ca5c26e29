"""Inducing variables with lengthscales of their own, for squared-exponential kernels."""

from collections.abc import Callable
import dataclasses
import math
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike

from numpyro_sgp.inducing.growing import GrowingInducing
from numpyro_sgp.inducing.points import AbstractInducing, AbstractPoints, as_points
from numpyro_sgp.kernels import SquaredExponential
from numpyro_sgp.kernels.arrays import expand
from numpyro_sgp.kernels.functional import AbstractFunctional
from numpyro_sgp.math.products import matmul

__all__ = ["MultiscaleInducing"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MultiscaleInducing(AbstractInducing):
    """Inducing variables with lengthscales l_md = ℓ_d exp(a_md), for kernels `SquaredExponential`.

    Cov(u_m, u_n) = σ_f² Π_d √(2 l_md l_nd / (l_md² + l_nd²)) exp(−(z_md − z_nd)² / (l_md² + l_nd²)), and with f(x) the
    same with ℓ in the place of one of the two. With a_m = 0 it is f(z_m); with a_m > 0 f smoothed around z_m, up to a
    factor; a_m < 0 is allowed as well, and the joint covariance of u and f is positive semi-definite for any a. A few
    wide ones stand for many points where f is smooth; `learn_inducing=True` trains both Z and a.

    Args:
        Z: inducing inputs in the units of X, (..., M, D).
        log_scales: a, (..., M, D); zeros by `MultiscaleInducing.at(Z)`.

    References:
        Cheng and Boots (2017), "Variational inference for Gaussian process models with linear complexity", equation 19
        ("generalised SE-ARD"); in place of its convention, u carries σ_f as f does, without which the joint
        covariance is not positive semi-definite.
    """

    Z: Array
    log_scales: Array

    @classmethod
    def at(cls, Z: ArrayLike) -> "MultiscaleInducing":
        """Inducing variables that start as function values at Z, (..., M, D).

        Raises:
            ValueError: Z that is not (..., M, D), or has NaN in it.
        """
        Z = as_points(Z)
        return cls(Z, jnp.zeros_like(Z))

    @property
    def num_inducing(self) -> int:
        return self.Z.shape[-2]

    @property
    def width(self) -> int:
        return self.Z.shape[-1]

    def Kuu(self, kernel: Callable) -> Array:
        return self._covariance(kernel, self)

    def Kuu_diagonal(self, kernel: Callable) -> Array:
        return _squared_exponential(kernel)(self.Z)

    def Kuf(self, kernel: Callable, X: Any) -> Array:
        if isinstance(X, AbstractFunctional):
            return X.apply(lambda P: self.Kuf(kernel, P))
        kernel = _squared_exponential(kernel)
        lengthscale = expand(kernel.lengthscale, -2)
        # As in the kernels: covariances do not change when both inputs are shifted, and products cancel less.
        centre = jax.lax.stop_gradient(jnp.mean(self.Z, axis=-2, keepdims=True))
        Z, X = (self.Z - centre) / lengthscale, (X - centre) / lengthscale
        # 1 / (exp(2a) + 1), (..., M, D)
        weight = jax.nn.sigmoid(-2.0 * self.log_scales)
        X_t, X2_t = X.mT, (X * X).mT
        r2 = jnp.sum(weight * Z * Z, axis=-1, keepdims=True) - 2.0 * matmul(weight * Z, X_t) + matmul(weight, X2_t)
        log_factor = -0.5 * jnp.sum(_log_cosh(self.log_scales), axis=-1, keepdims=True)
        return expand(kernel.variance, -2, -1) * jnp.exp(log_factor - jnp.maximum(r2, 0.0))

    def Kuv(self, kernel: Callable, other: AbstractInducing) -> Array:
        if isinstance(other, MultiscaleInducing):
            return self._covariance(kernel, other)
        if isinstance(other, AbstractPoints):
            return self.Kuf(kernel, other.Z)
        if isinstance(other, GrowingInducing):
            return other.Kuv(kernel, self).mT
        msg = (
            f"`MultiscaleInducing` has no covariance with a {type(other).__name__}. Use inducing inputs for both bases."
        )
        raise TypeError(msg)

    def _covariance(self, kernel: Callable, other: "MultiscaleInducing") -> Array:
        kernel = _squared_exponential(kernel)
        lengthscale = expand(kernel.lengthscale, -2)
        Z, Z_other = (points.Z / lengthscale for points in (self, other))
        difference = Z[..., :, None, :] - Z_other[..., None, :, :]
        a, b = self.log_scales[..., :, None, :], other.log_scales[..., None, :, :]
        # 2 exp(a + b) / (exp(2a) + exp(2b)) = 1 / cosh(a − b)
        r2 = difference * difference / (jnp.exp(2.0 * a) + jnp.exp(2.0 * b))
        return expand(kernel.variance, -2, -1) * jnp.exp(-jnp.sum(r2 + 0.5 * _log_cosh(a - b), axis=-1))


def _squared_exponential(kernel: Any) -> SquaredExponential:
    if not isinstance(kernel, SquaredExponential):
        msg = f"`MultiscaleInducing` needs a `SquaredExponential`, got {type(kernel).__name__}. Use `InducingPoints`."
        raise TypeError(msg)
    return kernel


def _log_cosh(a: Array) -> Array:
    """Log cosh a without overflow."""
    absolute = jnp.abs(a)
    return absolute + jnp.log1p(jnp.exp(-2.0 * absolute)) - math.log(2.0)
