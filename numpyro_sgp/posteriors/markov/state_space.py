"""Kernels of one input as linear stochastic differential equations: f(t) = hᵀx(t), x a stationary Markov process.

Between times that are Δ apart, x(t + Δ) = A(Δ) x(t) + noise with covariance Q(Δ) = P − A P Aᵀ, and x ~ N(0, P) at any
time. All are in units that make the numbers of x alike: derivatives are those with respect to t times the rate.

References:
    Särkkä and Solin (2019), "Applied stochastic differential equations", section 12.3; Solin and Särkkä (2014),
    "Explicit link between periodic covariance functions and state space models", for the periodic kernel.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
import dataclasses
import functools
import math
from typing import Any, ClassVar

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from numpyro_sgp.kernels.algebra import Constant, Product, Sum
from numpyro_sgp.kernels.periodic import Cosine, Periodic
from numpyro_sgp.kernels.stationary import AbstractMatern
from numpyro_sgp.math.products import matmul

__all__ = ["AbstractStateSpace", "state_space_of"]


class AbstractStateSpace(ABC):
    """A stationary process f = hᵀx; its hyperparameters may have leading axes, one process for each entry."""

    @property
    @abstractmethod
    def h(self) -> np.ndarray:
        """Which numbers of the state add up to f, (d,); h₁ = 1."""

    @property
    @abstractmethod
    def covariance(self) -> Array:
        """P, (..., d, d)."""

    @property
    @abstractmethod
    def root(self) -> Array:
        """R with P = R Rᵀ, (..., d, d)."""

    @abstractmethod
    def transition(self, interval: Array) -> Array:
        """A(Δ), (..., N, d, d).

        Args:
            interval: Δ ≥ 0, (N,).
        """

    @abstractmethod
    def noise(self, interval: Array) -> Array:
        """Q(Δ), (..., N, d, d), without the cancellation of P − A P Aᵀ at short intervals."""

    @abstractmethod
    def noise_root(self, interval: Array) -> Array:
        """B with Q(Δ) = B Bᵀ, (..., N, d, k)."""


@functools.cache
def _gauss_legendre() -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights on [0, 1]; exact to rounding for what is integrated over an interval of one lengthscale."""
    nodes, weights = np.polynomial.legendre.leggauss(8)
    return 0.5 * (nodes + 1.0), 0.5 * weights


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Matern(AbstractStateSpace):
    """A Matérn process with 2ν = 1, 3 or 5: x has f and its derivatives, each divided by the rate λ = √(2ν)/ℓ.

    Attributes:
        rate: λ, (...).
        variance: σ_f², (...).
        degrees: 2ν.
    """

    rate: Array
    variance: Array
    degrees: int = dataclasses.field(metadata={"static": True})

    @property
    def h(self) -> np.ndarray:
        return np.eye((self.degrees + 1) // 2)[0]

    @property
    def covariance(self) -> Array:
        return self.variance[..., None, None] * jnp.asarray(_MATERN_COVARIANCE[self.degrees], self.variance.dtype)

    @property
    def root(self) -> Array:
        root = jnp.asarray(np.linalg.cholesky(_MATERN_COVARIANCE[self.degrees]), self.variance.dtype)
        return jnp.sqrt(self.variance)[..., None, None] * root

    def transition(self, interval: Array) -> Array:
        return _matern_transition(self.rate[..., None] * interval, self.degrees)

    def noise(self, interval: Array) -> Array:
        t = self.rate[..., None] * interval
        is_short = t <= 1.0
        columns, weights = self._driven(jnp.where(is_short, t, 1.0))
        short = matmul(columns * weights[..., None, :], columns.mT)
        return jnp.where(is_short[..., None, None], short, self._of_long(jnp.where(is_short, 1.0, t)))

    def noise_root(self, interval: Array) -> Array:
        t = self.rate[..., None] * interval
        is_short = t <= 1.0
        columns, weights = self._driven(jnp.where(is_short, t, 1.0))
        # √ has no derivative at Δ = 0, where the noise is zero.
        scale = jnp.where(weights > 0.0, jnp.sqrt(jnp.where(weights > 0.0, weights, 1.0)), 0.0)
        short, long = columns * scale[..., None, :], jnp.linalg.cholesky(self._of_long(jnp.where(is_short, 1.0, t)))
        padding = [(0, 0)] * (long.ndim - 1) + [(0, short.shape[-1] - long.shape[-1])]
        return jnp.where(is_short[..., None, None], short, jnp.pad(long, padding))

    def _driven(self, t: Array) -> tuple[Array, Array]:
        """Q = ∫₀ᵗ a(s) a(s)ᵀ q ds, a(s) the last column of A(s), by quadrature: a, (..., N, d, nodes), and weights."""
        nodes, weights = (jnp.asarray(each, t.dtype) for each in _gauss_legendre())
        columns = _matern_transition(t[..., None] * nodes, self.degrees)[..., -1].mT
        intensity = _MATERN_INTENSITY[self.degrees] * self.variance[..., None, None]
        return columns, intensity * t[..., None] * weights

    def _of_long(self, t: Array) -> Array:
        A, P = _matern_transition(t, self.degrees), self.covariance[..., None, :, :]
        return P - matmul(matmul(A, P), A.mT)


# At rate and variance one: P, and the intensity of the noise that drives the last derivative.
_MATERN_COVARIANCE = {
    1: np.ones((1, 1)),
    3: np.eye(2),
    5: np.asarray([[1.0, 0.0, -1.0 / 3.0], [0.0, 1.0 / 3.0, 0.0], [-1.0 / 3.0, 0.0, 1.0]]),
}
_MATERN_INTENSITY = {1: 2.0, 3: 4.0, 5: 16.0 / 3.0}


def _matern_transition(t: Array, degrees: int) -> Array:
    """A at rate one, t.shape + (d, d)."""
    one, h = jnp.ones_like(t), 0.5 * t * t
    match degrees:
        case 1:
            rows = [[one]]
        case 3:
            rows = [[1.0 + t, t], [-t, 1.0 - t]]
        case _:
            rows = [[1.0 + t + h, t + 2.0 * h, h], [-h, 1.0 + t - 2.0 * h, t - h]]
            rows += [[h - t, 2.0 * h - 3.0 * t, 1.0 - 2.0 * t + h]]
    matrix = jnp.stack([jnp.stack(row, axis=-1) for row in rows], axis=-2)
    return jnp.exp(-t)[..., None, None] * matrix


class AbstractWave(AbstractStateSpace):
    """A process without noise, whose state has independent numbers of one variance: it is known from a part of it.

    Attributes:
        size: how many numbers the state has.
        variance: σ_f², (...).
    """

    size: ClassVar[int]
    variance: Array

    @property
    def h(self) -> np.ndarray:
        return np.eye(self.size)[0]

    @property
    def covariance(self) -> Array:
        return self._times_identity(self.variance)

    @property
    def root(self) -> Array:
        # Not that of the matrix, whose zeros have no derivative.
        return self._times_identity(jnp.sqrt(self.variance))

    def _times_identity(self, number: Array) -> Array:
        return number[..., None, None] * jnp.eye(self.size, dtype=number.dtype)

    def noise(self, interval: Array) -> Array:
        return jnp.zeros_like(self.transition(interval))

    def noise_root(self, interval: Array) -> Array:
        return self.noise(interval)[..., :0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rotation(AbstractWave):
    """A wave of one frequency with a random amplitude and phase, σ_f² cos(ωΔ): a rotation.

    Attributes:
        frequency: ω, (...).
        variance: σ_f², (...).
    """

    frequency: Array
    variance: Array
    size = 2

    def transition(self, interval: Array) -> Array:
        angle = self.frequency[..., None] * interval
        c, s = jnp.cos(angle), jnp.sin(angle)
        return jnp.stack([jnp.stack([c, -s], axis=-1), jnp.stack([s, c], axis=-1)], axis=-2)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Level(AbstractWave):
    """A constant, N(0, σ²).

    Attributes:
        variance: σ², (...).
    """

    variance: Array
    size = 1

    def transition(self, interval: Array) -> Array:
        return jnp.ones((*self.variance.shape, *interval.shape, 1, 1), interval.dtype)


def _side_by_side(left: Array, right: Array) -> Array:
    """The block-diagonal matrix of two, (..., d₁ + d₂, k₁ + k₂)."""
    batch = jnp.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    left, right = (jnp.broadcast_to(each, (*batch, *each.shape[-2:])) for each in (left, right))
    upper = jnp.concatenate([left, jnp.zeros((*left.shape[:-1], right.shape[-1]), left.dtype)], axis=-1)
    lower = jnp.concatenate([jnp.zeros((*right.shape[:-1], left.shape[-1]), left.dtype), right], axis=-1)
    return jnp.concatenate([upper, lower], axis=-2)


def _kronecker(left: Array, right: Array) -> Array:
    product = left[..., :, None, :, None] * right[..., None, :, None, :]
    return product.reshape(*product.shape[:-4], math.prod(product.shape[-4:-2]), math.prod(product.shape[-2:]))


@dataclasses.dataclass(frozen=True)
class AbstractPair(AbstractStateSpace):
    """A process made of two independent ones; a pytree."""

    left: AbstractStateSpace
    right: AbstractStateSpace

    @staticmethod
    @abstractmethod
    def combined(left: Any, right: Any) -> Any:
        """A matrix of both processes, from those of each."""

    @property
    def covariance(self) -> Array:
        return self.combined(self.left.covariance, self.right.covariance)

    @property
    def root(self) -> Array:
        return self.combined(self.left.root, self.right.root)

    def transition(self, interval: Array) -> Array:
        return self.combined(self.left.transition(interval), self.right.transition(interval))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StateSpaceSum(AbstractPair):
    """The sum of two independent processes: their states side by side."""

    combined = staticmethod(_side_by_side)

    @property
    def h(self) -> np.ndarray:
        return np.concatenate([self.left.h, self.right.h])

    def noise(self, interval: Array) -> Array:
        return _side_by_side(self.left.noise(interval), self.right.noise(interval))

    def noise_root(self, interval: Array) -> Array:
        return _side_by_side(self.left.noise_root(interval), self.right.noise_root(interval))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StateSpaceProduct(AbstractPair):
    """A process whose covariance is the product of two: A = A₁ ⊗ A₂, P = P₁ ⊗ P₂, Q = Q₁ ⊗ P₂ + A₁P₁A₁ᵀ ⊗ Q₂."""

    combined = staticmethod(_kronecker)

    @property
    def h(self) -> np.ndarray:
        return np.kron(self.left.h, self.right.h)

    def noise(self, interval: Array) -> Array:
        A, P = self.left.transition(interval), self.left.covariance[..., None, :, :]
        kept = matmul(matmul(A, P), A.mT)
        of_right = _kronecker(kept, self.right.noise(interval))
        return _kronecker(self.left.noise(interval), self.right.covariance[..., None, :, :]) + of_right

    def noise_root(self, interval: Array) -> Array:
        kept = matmul(self.left.transition(interval), self.left.root[..., None, :, :])
        of_left = _kronecker(self.left.noise_root(interval), self.right.root[..., None, :, :])
        of_right = _kronecker(kept, self.right.noise_root(interval))
        batch = jnp.broadcast_shapes(of_left.shape[:-2], of_right.shape[:-2])
        parts = [jnp.broadcast_to(each, (*batch, *each.shape[-2:])) for each in (of_left, of_right)]
        return jnp.concatenate(parts, axis=-1)


def state_space_of(kernel: Callable, dtype: jax.typing.DTypeLike, num_harmonics: int) -> AbstractStateSpace:
    """The state-space form of a kernel of one input.

    Args:
        kernel: Matérn, `Cosine`, `Periodic` and `Constant` kernels, and sums and products of them.
        dtype: of the state.
        num_harmonics: J, how many waves stand for a periodic kernel, beside its mean; with 0 it has no form, since
            none is exact.

    Raises:
        TypeError: a kernel without such a form.
    """

    def number(value: object) -> Array:
        return jnp.asarray(value, dtype)

    def of_column(value: object) -> Array:
        value = number(value)
        return value[..., 0] if value.ndim else value

    match kernel:
        case AbstractMatern():
            rate = math.sqrt(kernel.degrees) / of_column(kernel.lengthscale)
            return Matern(rate, number(kernel.variance), kernel.degrees)
        case Constant():
            return Level(number(kernel.variance))
        case Cosine():
            return Rotation(2.0 * math.pi / of_column(kernel.period), number(kernel.variance))
        case Periodic() if num_harmonics:
            shares = _shares_of_waves(of_column(kernel.lengthscale), num_harmonics)
            variances = number(kernel.variance)[..., None] * shares
            frequency = 2.0 * math.pi / of_column(kernel.period)
            waves = (Rotation(j * frequency, variances[..., j]) for j in range(1, num_harmonics + 1))
            return functools.reduce(StateSpaceSum, waves, Level(variances[..., 0]))
        case Sum() | Product():
            pair = (state_space_of(each, dtype, num_harmonics) for each in (kernel.left, kernel.right))
            return (StateSpaceSum if isinstance(kernel, Sum) else StateSpaceProduct)(*pair)
    msg = (
        f"A kernel {type(kernel).__name__} has no state-space form here. Use Matérn, `Cosine`, `Periodic` and "
        "`Constant` kernels, and sums and products of them; `AutoTSVGP` takes any kernel."
    )
    raise TypeError(msg)


def _shares_of_waves(lengthscale: Array, num: int) -> Array:
    """How much of the variance of a periodic kernel is in waves 0 to `num`, (..., 1 + num), scaled to add up to one.

    The Fourier series of exp((cos θ − 1)/ℓ²), from its values at equally spaced angles: exact to rounding for ℓ > 0.05.
    """
    size = max(256, 8 * (num + 1))
    angles = 2.0 * math.pi * np.arange(size) / size
    waves = np.cos(np.arange(num + 1)[:, None] * angles) * np.where(np.arange(num + 1) == 0, 1.0, 2.0)[:, None] / size
    cosines, waves = (np.asarray(each, lengthscale.dtype) for each in (np.cos(angles), waves))
    values = jnp.exp((cosines - 1.0) / lengthscale[..., None] ** 2)
    shares = jnp.maximum(jnp.sum(values[..., None, :] * waves, axis=-1), 0.0)
    return shares / jnp.sum(shares, axis=-1, keepdims=True)
