"""Kernels of the distance between inputs, and their spectra."""

from abc import abstractmethod
from collections.abc import Callable
import dataclasses
from functools import partial
import math
from typing import ClassVar, final

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike

from numpyro_sgp._internal.eager import as_one_program
from numpyro_sgp.kernels.algebra import Kernel
from numpyro_sgp.kernels.arrays import aligned, check_columns, expand, multiply, scaled_squared_distance, zero_distance
from numpyro_sgp.kernels.distances import exponential, exponential_linear, exponential_quadratic

__all__ = ["Matern12", "Matern32", "Matern52", "RationalQuadratic", "SquaredExponential", "Stationary"]


@partial(as_one_program, static_argnums=0)
def _profile(g: Callable[[Array], Array], factor: float, r2: Array) -> Array:
    return g(factor * r2)


class Stationary(Kernel):
    """A kernel of the scaled distance, k(x, z) = σ_f² g(r²) with r² = Σ_d (x_d − z_d)² / ℓ_d² and g(0) = 1.

    The diagonal is σ_f² whatever the inputs are.
    """

    lengthscale: ArrayLike
    variance: ArrayLike

    @abstractmethod
    def correlation(self, r2: Array) -> Array:
        """g(r²), with g(0) = 1 exactly.

        Args:
            r2: squared scaled distances, (..., N, M).
        """

    def frequencies(
        self, rng_key: Array, num: int, D: int, batch_shape: tuple[int, ...], dtype: jax.typing.DTypeLike
    ) -> Array:
        """Draws ω with g(r²) = E cos(ωᵀ(x − z)) at lengthscale one, batch_shape + (num, D).

        Args:
            rng_key: a key.
            num: how many.
            D: number of input columns.
            batch_shape: of the kernels, or of what they broadcast to.
            dtype: of the draws.

        Raises:
            TypeError: a kernel that does not say.
        """
        del rng_key, num, D, batch_shape, dtype
        raise TypeError(_no_spectrum(self, "frequencies"))

    def spectral_density(self, omega: Array) -> Array:
        """S(ω) = ∫ k(x, 0) exp(−iωᵀx) dx, (..., K) for frequencies (..., K, D).

        Args:
            omega: angular frequencies, in units of 1/X.

        Raises:
            TypeError: a kernel that does not say.
        """
        del omega
        raise TypeError(_no_spectrum(self, "spectral_density"))

    @property
    def draws_frequencies(self) -> bool:
        """Whether the kernel has `frequencies`."""
        return type(self).frequencies is not Stationary.frequencies

    def _diagonal(self, X: Array) -> Array:
        check_columns("lengthscale", self.lengthscale, X)
        r2 = zero_distance(X, self.lengthscale)
        return multiply(expand(self.variance, -2, -1), self.correlation(r2))[..., 0]

    def _matrix(self, X: Array, Z: Array) -> Array:
        check_columns("lengthscale", self.lengthscale, X)
        r2 = scaled_squared_distance(X, Z, expand(self.lengthscale, -2))
        return multiply(expand(self.variance, -2, -1), self.correlation(r2))


def _no_spectrum(kernel: Stationary, method: str) -> str:
    return f"{type(kernel).__name__} has no `{method}`. Use `SquaredExponential` or a Matérn kernel."


def _scaled_density(kernel: Stationary, omega: Array, density: Callable[[Array, int], Array]) -> Array:
    """σ_f² Π_d ℓ_d times the density at Σ_d ℓ_d² ω_d² of the kernel with σ_f = ℓ = 1."""
    check_columns("lengthscale", kernel.lengthscale, omega)
    D, lengthscale = omega.shape[-1], jnp.asarray(kernel.lengthscale)
    scaled = multiply(omega, expand(kernel.lengthscale, -2))
    volume = jnp.prod(jnp.broadcast_to(lengthscale, (*lengthscale.shape[:-1], D)), axis=-1)
    scale = multiply(kernel.variance, volume)
    return multiply(expand(scale, -1), density(jnp.sum(scaled * scaled, axis=-1), D))


class AbstractMatern(Stationary):
    """Matérn kernels, whose spectral density is a multivariate Student-t with 2ν degrees of freedom."""

    degrees: ClassVar[int]
    profile: ClassVar[Callable[[Array], Array]]  # of q = 2ν r²

    def correlation(self, r2: Array) -> Array:
        return _profile(type(self).profile, float(self.degrees), r2)

    def frequencies(
        self, rng_key: Array, num: int, D: int, batch_shape: tuple[int, ...], dtype: jax.typing.DTypeLike
    ) -> Array:
        normal = jax.random.normal(rng_key, (*batch_shape, num, D + self.degrees), dtype)
        chi2 = jnp.sum(jnp.square(normal[..., D:]), axis=-1, keepdims=True)
        return normal[..., :D] * jnp.sqrt(self.degrees / chi2)

    def spectral_density(self, omega: Array) -> Array:
        def density(q: Array, D: int) -> Array:
            degrees, nu = float(self.degrees), 0.5 * self.degrees
            constant = (4.0 * math.pi) ** (0.5 * D) * math.gamma(nu + 0.5 * D) / math.gamma(nu) * degrees**nu
            return constant * (degrees + q) ** (-nu - 0.5 * D)

        return _scaled_density(self, omega, density)


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class SquaredExponential(Stationary):
    """k(x, z) = σ_f² exp(−r²/2), r² = Σ_d (x_d − z_d)² / ℓ_d²: infinitely differentiable functions.

    >>> import jax.numpy as jnp
    >>> from numpyro_sgp.kernels import Linear, SquaredExponential
    >>> X = jnp.ones((7, 2))
    >>> kernel = 2.0 * SquaredExponential(lengthscale=0.5) + Linear()
    >>> kernel(X).shape, kernel(X, X[:5]).shape
    ((7,), (7, 5))
    >>> SquaredExponential(lengthscale=jnp.ones((3, 1)))(X, X).shape  # three kernels
    (3, 7, 7)

    Args:
        lengthscale: ℓ in units of X; scalar, (D,), or batch + (1,) or (D,).
        variance: σ_f² in units of f²; shape of the batch.

    References: Rasmussen & Williams (2006), eq. 4.9.
    """

    lengthscale: ArrayLike
    variance: ArrayLike = 1.0

    def correlation(self, r2: Array) -> Array:
        return jnp.exp(-0.5 * r2)

    def frequencies(
        self, rng_key: Array, num: int, D: int, batch_shape: tuple[int, ...], dtype: jax.typing.DTypeLike
    ) -> Array:
        return jax.random.normal(rng_key, (*batch_shape, num, D), dtype)

    def spectral_density(self, omega: Array) -> Array:
        def density(q: Array, D: int) -> Array:
            return (2.0 * math.pi) ** (0.5 * D) * jnp.exp(-0.5 * q)

        return _scaled_density(self, omega, density)


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Matern12(AbstractMatern):
    """k(x, z) = σ_f² exp(−r), r² = Σ_d (x_d − z_d)² / ℓ_d²: continuous functions without a derivative.

    The kernel has a kink at r = 0; its gradient there is defined as 0.

    Args:
        lengthscale: ℓ in units of X; scalar, (D,), or batch + (1,) or (D,).
        variance: σ_f² in units of f²; shape of the batch.

    References: Rasmussen & Williams (2006), eq. 4.18 with γ = 1.
    """

    lengthscale: ArrayLike
    variance: ArrayLike = 1.0
    degrees = 1
    profile = exponential

    def _kink(self, column: int | None, D: int) -> Kernel | None:
        del column, D
        return self


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Matern32(AbstractMatern):
    """k(x, z) = σ_f² (1 + √3 r) exp(−√3 r), r² = Σ_d (x_d − z_d)² / ℓ_d²: once differentiable functions.

    Args:
        lengthscale: ℓ in units of X; scalar, (D,), or batch + (1,) or (D,).
        variance: σ_f² in units of f²; shape of the batch.

    References: Rasmussen & Williams (2006), eq. 4.17.
    """

    lengthscale: ArrayLike
    variance: ArrayLike = 1.0
    degrees = 3
    profile = exponential_linear


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Matern52(AbstractMatern):
    """k(x, z) = σ_f² (1 + √5 r + 5r²/3) exp(−√5 r), r² = Σ_d (x_d − z_d)² / ℓ_d²: twice differentiable functions.

    Args:
        lengthscale: ℓ in units of X; scalar, (D,), or batch + (1,) or (D,).
        variance: σ_f² in units of f²; shape of the batch.

    References: Rasmussen & Williams (2006), eq. 4.17.
    """

    lengthscale: ArrayLike
    variance: ArrayLike = 1.0
    degrees = 5
    profile = exponential_quadratic


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class RationalQuadratic(Stationary):
    """k(x, z) = σ_f² (1 + r²/2α)^(−α), r² = Σ_d (x_d − z_d)² / ℓ_d²: a mixture of lengthscales.

    Args:
        lengthscale: ℓ in units of X; scalar, (D,), or batch + (1,) or (D,).
        variance: σ_f² in units of f²; shape of the batch.
        alpha: α > 0, without unit; shape of the batch. α → ∞ is the squared exponential.

    References: Rasmussen & Williams (2006), eq. 4.19.
    """

    lengthscale: ArrayLike
    variance: ArrayLike = 1.0
    alpha: ArrayLike = 1.0

    def correlation(self, r2: Array) -> Array:
        alpha, r2 = aligned(expand(self.alpha, -2, -1), r2)
        # log1p, because 1 + r²/2α rounds to 1 for large α.
        return jnp.exp(-alpha * jnp.log1p(0.5 * r2 / alpha))

    def frequencies(
        self, rng_key: Array, num: int, D: int, batch_shape: tuple[int, ...], dtype: jax.typing.DTypeLike
    ) -> Array:
        # (1 + r²/2α)^(−α) = E exp(−τr²/2) with τ ~ Gamma(α, rate α): a scale mixture of squared exponentials.
        key_normal, key_scale = jax.random.split(rng_key)
        shape = (*jnp.broadcast_shapes(batch_shape, jnp.shape(self.alpha)), num)
        alpha = jnp.broadcast_to(jnp.expand_dims(jnp.asarray(self.alpha), -1), shape).astype(dtype)
        tau = jax.random.gamma(key_scale, alpha) / alpha
        return jax.random.normal(key_normal, (*shape, D), dtype) * jnp.sqrt(tau)[..., None]
