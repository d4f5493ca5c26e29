"""Kernels: covariance functions as JAX pytrees.

A kernel is any pytree with the calling convention of tinygp: `k(X)` is the diagonal, (..., N), and `k(X, Z)` the
matrix, (..., N, M). The classes here and every tinygp kernel are kernels, and the two can be added and multiplied.

Shapes. Inputs are (N, D), with leading axes for a batch of input sets. Hyperparameters with leading axes are a batch of
kernels; all batches broadcast.

* One number for each kernel (`variance`, `alpha`, `offset`) has the shape of the batch.
* One number for each input column (`lengthscale`, `period`, the `variance` of `Linear` and `Polynomial`) is a scalar or
  (D,) for one kernel, and batch + (1,) or batch + (D,) for a batch: C isotropic kernels have `lengthscale` (C, 1).

Values follow the promoted dtype of inputs and hyperparameters; a Python float adapts to the inputs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
import dataclasses
from functools import partial
import math
import operator
from typing import Any, cast, final

import jax
from jax import Array, lax
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

from numpyro_sgp.distances import equal_rows, exponential, exponential_linear, exponential_quadratic, squared_distance
from numpyro_sgp.eager import as_one_program
from numpyro_sgp.linalg import matmul
from numpyro_sgp.pytrees import PytreeFunction

__all__ = [
    "Constant",
    "Kernel",
    "Linear",
    "Matern12",
    "Matern32",
    "Matern52",
    "Periodic",
    "Polynomial",
    "Product",
    "RationalQuadratic",
    "Select",
    "SquaredExponential",
    "Stationary",
    "Sum",
    "Warp",
    "White",
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


def _check_columns(name: str, value: ArrayLike, X: Array) -> None:
    shape, D = jnp.shape(value), X.shape[-1]
    if shape and shape[-1] not in (1, D):
        msg = (
            f"`{name}` has shape {shape}, but its last axis must be 1 or D = {D}, the width of `X` of shape {X.shape}. "
            f"Use a scalar or ({D},) for one kernel; C isotropic kernels need shape (C, 1), here {(*shape, 1)}."
        )
        raise ValueError(msg)


def _expand(value: Any, *axes: int) -> Any:
    """New axes for an array; a scalar broadcasts as it is and, when a Python float, keeps adapting to any dtype."""
    return value if jnp.ndim(value) == 0 else jnp.expand_dims(value, axes)


def _aligned(*values: Any) -> Any:
    """Arrays with leading axes of size one up to a common rank, which `jax_numpy_rank_promotion="raise"` asks for."""
    rank = max(jnp.ndim(value) for value in values)
    return tuple(_expand(value, *range(rank - jnp.ndim(value))) for value in values)


def _add(a: Any, b: Any) -> Array:
    return operator.add(*_aligned(a, b))


def _multiply(a: Any, b: Any) -> Array:
    return operator.mul(*_aligned(a, b))


def _divide(a: Any, b: Any) -> Array:
    return operator.truediv(*_aligned(a, b))


def _centred(X: Array, Z: Array) -> tuple[Array, Array]:
    # Stationary kernels do not change when both inputs are shifted, so the shift needs no derivative; the products that
    # follow would otherwise cancel |x|² against 2 xᵀz. A median, since one row far away would take the digits of all
    # others, and of a few rows, since any point near most of them will do.
    X, Z = _aligned(X, Z)
    rows = lax.stop_gradient(X if X.shape[-2] > Z.shape[-2] else Z)
    centre = _median(rows[..., :: -(-rows.shape[-2] // _CENTRE_ROWS), :]) if rows.shape[-2] else 0.0
    return X - centre, Z - centre


def _median(X: Array) -> Array:
    """Of each column without NaN, the lower of two; 0 where there is nothing else."""
    X = jnp.sort(X, axis=-2)  # NaN last
    middle = (jnp.sum(X == X, axis=-2, keepdims=True) - 1) // 2
    rows = lax.broadcasted_iota(middle.dtype, X.shape, X.ndim - 2)
    return jnp.sum(jnp.where(rows == middle, X, 0.0), axis=-2, keepdims=True)


def _transposed(X: Array) -> Array:
    return jnp.swapaxes(X, -1, -2)


@as_one_program
def _scaled_squared_distance(X: Array, Z: Array, lengthscale: ArrayLike) -> Array:
    X, Z = _centred(X, Z)
    return squared_distance(_divide(X, lengthscale), _divide(Z, lengthscale))


class Kernel(ABC):
    """A covariance function k(x, z) = Cov(f(x), f(z)).

    Kernels add and multiply with each other, with numbers, and with any other callable that follows the convention. In
    `other + kernel` Python asks `other` first: a tinygp kernel on the left takes the operation and makes a kernel that
    fails when called, so put it on the right or write `Sum(other, kernel)`.
    """

    # Without this NumPy scalars and arrays on the left of an operator would loop over the kernel as an object.
    __array_ufunc__ = None

    def __call__(self, X: ArrayLike, Z: ArrayLike | None = None) -> Array:
        """The diagonal k(x_n, x_n), (..., N), or with a second argument the matrix k(x_n, z_m), (..., N, M).

        Args:
            X: inputs, (..., N, D).
            Z: inputs, (..., M, D).

        Raises:
            ValueError: inputs that are not (..., N, D), or a second input or hyperparameter of another width.
        """
        if Z is None:
            return self._diagonal(as_inputs(X, "X"))
        inputs = as_inputs(X, "X")
        others = inputs if Z is X else as_inputs(Z, "Z")
        if inputs.shape[-1] != others.shape[-1]:
            msg = (
                f"`X` and `Z` must have the same number of columns, got shapes {inputs.shape} and {others.shape}. "
                "Pass inputs with the same D, or use Select(kernel, dims) for a kernel on some columns."
            )
            raise ValueError(msg)
        return self._matrix(inputs, others)

    @abstractmethod
    def _diagonal(self, X: Array) -> Array:
        """k(x_n, x_n) for checked inputs (..., N, D)."""

    @abstractmethod
    def _matrix(self, X: Array, Z: Array) -> Array:
        """k(x_n, z_m) for checked inputs (..., N, D) and (..., M, D)."""

    def __add__(self, other: Callable | ArrayLike) -> "Sum":
        operand = _as_operand(other)
        return NotImplemented if operand is None else Sum(self, operand)

    def __radd__(self, other: Callable | ArrayLike) -> "Kernel":
        if isinstance(other, int) and other == 0:  # the start value of the built-in sum
            return self
        operand = _as_operand(other)
        return NotImplemented if operand is None else Sum(operand, self)

    def __mul__(self, other: Callable | ArrayLike) -> "Product":
        operand = _as_operand(other)
        return NotImplemented if operand is None else Product(self, operand)

    def __rmul__(self, other: Callable | ArrayLike) -> "Product":
        operand = _as_operand(other)
        return NotImplemented if operand is None else Product(operand, self)


def _as_operand(other: Callable | ArrayLike) -> Callable | None:
    if callable(other):
        return other
    return Constant(other) if isinstance(other, int | float | np.generic | np.ndarray | Array) else None


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
        _check_columns("lengthscale", self.lengthscale, X)
        r2 = _zero_distance(X, self.lengthscale)
        return _multiply(_expand(self.variance, -2, -1), self.correlation(r2))[..., 0]

    def _matrix(self, X: Array, Z: Array) -> Array:
        _check_columns("lengthscale", self.lengthscale, X)
        r2 = _scaled_squared_distance(X, Z, _expand(self.lengthscale, -2))
        return _multiply(_expand(self.variance, -2, -1), self.correlation(r2))


def _no_spectrum(kernel: Stationary, method: str) -> str:
    return (
        f"{type(kernel).__name__} has no `{method}`. Use `SquaredExponential` or a Matérn kernel, or give your class "
        "that method of `numpyro_sgp.kernels.Stationary`."
    )


def _scaled_density(kernel: Stationary, omega: Array, density: Callable[[Array, int], Array]) -> Array:
    """σ_f² Π_d ℓ_d times the density at Σ_d ℓ_d² ω_d² of the kernel with σ_f = ℓ = 1."""
    _check_columns("lengthscale", kernel.lengthscale, omega)
    D, lengthscale = omega.shape[-1], jnp.asarray(kernel.lengthscale)
    scaled = _multiply(omega, _expand(kernel.lengthscale, -2))
    volume = jnp.prod(jnp.broadcast_to(lengthscale, (*lengthscale.shape[:-1], D)), axis=-1)
    scale = _multiply(kernel.variance, volume)
    return _multiply(_expand(scale, -1), density(jnp.sum(scaled * scaled, axis=-1), D))


def _matern_frequencies(
    rng_key: Array, degrees: int, num: int, D: int, batch_shape: tuple[int, ...], dtype: jax.typing.DTypeLike
) -> Array:
    # The spectral density of a Matérn kernel is a multivariate Student-t with 2ν degrees of freedom.
    normal = jax.random.normal(rng_key, (*batch_shape, num, D + degrees), dtype)
    chi2 = jnp.sum(jnp.square(normal[..., D:]), axis=-1, keepdims=True)
    return normal[..., :D] * jnp.sqrt(degrees / chi2)


def _matern_density(kernel: Stationary, omega: Array, degrees: float) -> Array:
    def density(q: Array, D: int) -> Array:
        nu = 0.5 * degrees
        constant = (4.0 * math.pi) ** (0.5 * D) * math.gamma(nu + 0.5 * D) / math.gamma(nu) * degrees**nu
        return constant * (degrees + q) ** (-nu - 0.5 * D)

    return _scaled_density(kernel, omega, density)


def _zero_distance(X: Array, *columns: ArrayLike) -> Array:
    """The distance of each row to itself, (..., N, 1), in the batch and dtype of inputs and hyperparameters."""
    batch = jnp.broadcast_shapes(X.shape[:-2], *(jnp.shape(column)[:-1] for column in columns))
    return jnp.zeros((*batch, X.shape[-2], 1), jnp.result_type(X, *columns))


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
class Matern12(Stationary):
    """k(x, z) = σ_f² exp(−r), r² = Σ_d (x_d − z_d)² / ℓ_d²: continuous functions without a derivative.

    The kernel has a kink at r = 0; its gradient there is defined as 0.

    Args:
        lengthscale: ℓ in units of X; scalar, (D,), or batch + (1,) or (D,).
        variance: σ_f² in units of f²; shape of the batch.

    References: Rasmussen & Williams (2006), eq. 4.18 with γ = 1.
    """

    lengthscale: ArrayLike
    variance: ArrayLike = 1.0

    def correlation(self, r2: Array) -> Array:
        return _profile(exponential, 1.0, r2)

    def frequencies(
        self, rng_key: Array, num: int, D: int, batch_shape: tuple[int, ...], dtype: jax.typing.DTypeLike
    ) -> Array:
        return _matern_frequencies(rng_key, 1, num, D, batch_shape, dtype)

    def spectral_density(self, omega: Array) -> Array:
        return _matern_density(self, omega, 1.0)


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Matern32(Stationary):
    """k(x, z) = σ_f² (1 + √3 r) exp(−√3 r), r² = Σ_d (x_d − z_d)² / ℓ_d²: once differentiable functions.

    Args:
        lengthscale: ℓ in units of X; scalar, (D,), or batch + (1,) or (D,).
        variance: σ_f² in units of f²; shape of the batch.

    References: Rasmussen & Williams (2006), eq. 4.17.
    """

    lengthscale: ArrayLike
    variance: ArrayLike = 1.0

    def correlation(self, r2: Array) -> Array:
        return _profile(exponential_linear, 3.0, r2)

    def frequencies(
        self, rng_key: Array, num: int, D: int, batch_shape: tuple[int, ...], dtype: jax.typing.DTypeLike
    ) -> Array:
        return _matern_frequencies(rng_key, 3, num, D, batch_shape, dtype)

    def spectral_density(self, omega: Array) -> Array:
        return _matern_density(self, omega, 3.0)


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Matern52(Stationary):
    """k(x, z) = σ_f² (1 + √5 r + 5r²/3) exp(−√5 r), r² = Σ_d (x_d − z_d)² / ℓ_d²: twice differentiable functions.

    Args:
        lengthscale: ℓ in units of X; scalar, (D,), or batch + (1,) or (D,).
        variance: σ_f² in units of f²; shape of the batch.

    References: Rasmussen & Williams (2006), eq. 4.17.
    """

    lengthscale: ArrayLike
    variance: ArrayLike = 1.0

    def correlation(self, r2: Array) -> Array:
        return _profile(exponential_quadratic, 5.0, r2)

    def frequencies(
        self, rng_key: Array, num: int, D: int, batch_shape: tuple[int, ...], dtype: jax.typing.DTypeLike
    ) -> Array:
        return _matern_frequencies(rng_key, 5, num, D, batch_shape, dtype)

    def spectral_density(self, omega: Array) -> Array:
        return _matern_density(self, omega, 5.0)


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
        alpha, r2 = _aligned(_expand(self.alpha, -2, -1), r2)
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
        _check_columns("lengthscale", self.lengthscale, X)
        _check_columns("period", self.period, X)

    def _diagonal(self, X: Array) -> Array:
        self._check(X)
        ones = jnp.exp(_zero_distance(X, self.lengthscale, self.period))
        return _multiply(_expand(self.variance, -2, -1), ones)[..., 0]

    def _matrix(self, X: Array, Z: Array) -> Array:
        self._check(X)
        X, Z = _centred(X, Z)
        # |φ(x) − φ(z)|² = Σ_d (2 − 2 cos(θ_d − θ'_d)) / ℓ_d² = 4 Σ_d sin²((θ_d − θ'_d)/2) / ℓ_d²
        r2 = squared_distance(self._features(X), self._features(Z))
        return _multiply(_expand(self.variance, -2, -1), jnp.exp(-0.5 * r2))

    def _features(self, X: Array) -> Array:
        theta = _divide((2.0 * math.pi) * X, _expand(self.period, -2))
        lengthscale = _expand(self.lengthscale, -2)
        return jnp.concatenate([_divide(jnp.cos(theta), lengthscale), _divide(jnp.sin(theta), lengthscale)], axis=-1)


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
        _check_columns("variance", self.variance, X)
        return jnp.sum(_multiply(X * X, _expand(self.variance, -2)), axis=-1)

    def _matrix(self, X: Array, Z: Array) -> Array:
        _check_columns("variance", self.variance, X)
        return matmul(_multiply(X, _expand(self.variance, -2)), _transposed(Z))


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
            msg = (
                f"`degree` must be a positive Python integer, got {self.degree!r}. "
                "Use Polynomial(degree=2) for quadratic functions, and Constant(variance) for degree 0."
            )
            raise ValueError(msg)

    def _diagonal(self, X: Array) -> Array:
        return _add(Linear(self.variance)(X), _expand(self.offset, -1)) ** self.degree

    def _matrix(self, X: Array, Z: Array) -> Array:
        return _add(Linear(self.variance)(X, Z), _expand(self.offset, -2, -1)) ** self.degree


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Constant(Kernel):
    """k(x, z) = σ²: constant functions.

    Args:
        variance: σ² in units of f²; shape of the batch.
    """

    variance: ArrayLike

    def _diagonal(self, X: Array) -> Array:
        variance = jnp.asarray(self.variance, jnp.result_type(X, self.variance))
        batch = jnp.broadcast_shapes(X.shape[:-2], variance.shape)
        return jnp.broadcast_to(variance[..., None], (*batch, X.shape[-2]))

    def _matrix(self, X: Array, Z: Array) -> Array:
        variance = jnp.asarray(self.variance, jnp.result_type(X, Z, self.variance))
        batch = jnp.broadcast_shapes(X.shape[:-2], Z.shape[:-2], variance.shape)
        return jnp.broadcast_to(variance[..., None, None], (*batch, X.shape[-2], Z.shape[-2]))


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

    def _diagonal(self, X: Array) -> Array:
        return Constant(self.variance)(X)

    def _matrix(self, X: Array, Z: Array) -> Array:
        X, Z = _aligned(X, Z)
        equal, variance = _aligned(equal_rows(X, Z), Constant(self.variance)(X, Z))
        K = jnp.where(equal, variance, 0.0)
        unknown = jnp.isnan(X).any(axis=-1)[..., :, None] | jnp.isnan(Z).any(axis=-1)[..., None, :]
        unknown, K = _aligned(unknown, K)
        return jnp.where(unknown, jnp.nan, K)


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Sum(Kernel):
    """k(x, z) = k₁(x, z) + k₂(x, z): the sum of independent functions.

    Args:
        left: k₁, any kernel, ours or not.
        right: k₂, any kernel, ours or not; the batches broadcast.
    """

    left: Callable
    right: Callable

    def _diagonal(self, X: Array) -> Array:
        return _add(self.left(X), self.right(X))

    def _matrix(self, X: Array, Z: Array) -> Array:
        return _add(self.left(X, Z), self.right(X, Z))


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Product(Kernel):
    """k(x, z) = k₁(x, z) k₂(x, z): the covariance of the product of independent functions with mean zero.

    Args:
        left: k₁, any kernel, ours or not.
        right: k₂, any kernel, ours or not; the batches broadcast.
    """

    left: Callable
    right: Callable

    def _diagonal(self, X: Array) -> Array:
        return _multiply(self.left(X), self.right(X))

    def _matrix(self, X: Array, Z: Array) -> Array:
        return _multiply(self.left(X, Z), self.right(X, Z))


def map_rows(fn: Callable, X: Array) -> Array:
    """A user's function of inputs (N, D) at inputs (..., N, D), checked to return one row for each row."""
    at_rows = fn
    for _ in X.shape[:-2]:
        at_rows = jax.vmap(at_rows)
    features = at_rows(X)
    shape = getattr(features, "shape", None)
    if shape is None or len(shape) < X.ndim or shape[-2] != X.shape[-2]:
        got = f"a {type(features).__name__}" if shape is None else f"shape {shape}"
        msg = (
            f"`fn` must map inputs (N, D) to features (N, D'), but for inputs of shape {X.shape} it gave {got}. "
            "Return one row for each row of the inputs: jax.vmap(fn) if `fn` takes one row, fn(X)[:, None] if it "
            "returns one number a row."
        )
        raise ValueError(msg)
    return features


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Warp(Kernel):
    """k(x, z) = k₀(φ(x), φ(z)): a kernel on features, a deep kernel when φ is a network.

    >>> import jax.numpy as jnp
    >>> from numpyro_sgp.kernels import SquaredExponential, Warp
    >>> weights = jnp.ones((2, 4))
    >>> kernel = Warp(SquaredExponential(1.0), lambda X: jnp.tanh(X @ weights))
    >>> kernel(jnp.ones((7, 2)), jnp.ones((5, 2))).shape
    (7, 5)

    Args:
        kernel: k₀, any kernel on D' columns.
        fn: φ for all rows at once, (N, D) -> (N, D'). A function, which may close over sampled or traced values, or a
            callable pytree, whose arrays are then leaves of the kernel. A plain function is static, compared by
            identity: a kernel with a new lambda is compiled again by each `jit` it is an argument of, while
            `jax.tree_util.Partial(fn, params)` is not. Leading axes of the inputs are mapped over.

    Raises:
        ValueError: `fn` does not return N rows.

    References: MacKay (1998), "Introduction to Gaussian processes"; Wilson, Hu, Salakhutdinov & Xing (2016), "Deep
    kernel learning".
    """

    kernel: Callable
    fn: Callable

    def __post_init__(self) -> None:
        object.__setattr__(self, "fn", PytreeFunction.of(self.fn))

    def _diagonal(self, X: Array) -> Array:
        return self.kernel(self._features(X))

    def _matrix(self, X: Array, Z: Array) -> Array:
        features = self._features(X)
        return self.kernel(features, features if Z is X else self._features(Z))

    def _features(self, X: Array) -> Array:
        return map_rows(self.fn, X)


@dataclasses.dataclass(frozen=True)
class _Slice:
    # `slice` is not hashable before Python 3.12, and static data of a pytree must be.
    start: int | None
    stop: int | None
    step: int | None


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Select(Kernel):
    """k(x, z) = k₀(x[dims], z[dims]): a kernel on some of the input columns.

    Args:
        kernel: k₀, any kernel on that many columns.
        dims: column numbers: a sequence of integers, one integer, or a slice; negative numbers count from the end.

    Raises:
        TypeError: `dims` that are not integers.
        ValueError: `dims` out of range, or none.
    """

    kernel: Callable
    dims: "Sequence[int] | int | slice | _Slice" = dataclasses.field(metadata={"static": True})

    def __post_init__(self) -> None:
        # Static, so never a placeholder; stored in a form that can be hashed.
        dims = self.dims
        if isinstance(dims, slice):
            dims = _Slice(dims.start, dims.stop, dims.step)
        elif not isinstance(dims, _Slice):
            numbers = dims if np.iterable(dims) else (dims,)
            if any(isinstance(number, bool | np.bool_) for number in numbers):
                msg = f"`dims` must be column numbers or a slice, got {dims!r}. For a mask use np.flatnonzero(mask)."
                raise TypeError(msg)
            try:
                dims = tuple(operator.index(number) for number in numbers)
            except TypeError as error:
                msg = f"`dims` must be column numbers or a slice, got {dims!r}. Use Python integers, as in dims=(0, 2)."
                raise TypeError(msg) from error
        object.__setattr__(self, "dims", dims)

    def _diagonal(self, X: Array) -> Array:
        return self.kernel(self._columns(X))

    def _matrix(self, X: Array, Z: Array) -> Array:
        columns = self._columns(X)
        return self.kernel(columns, columns if Z is X else self._columns(Z))

    def _columns(self, X: Array) -> Array:
        D, dims = X.shape[-1], self.dims
        if isinstance(dims, _Slice):
            columns = tuple(range(D)[slice(dims.start, dims.stop, dims.step)])
        else:
            columns = cast("tuple[int, ...]", dims)
        if not columns or any(not -D <= column < D for column in columns):
            msg = (
                f"`dims` must name at least one of the D = {D} columns of `X` of shape {X.shape}, got {dims}. "
                f"Use numbers from 0 to {D - 1}, or from {-D} to -1 counted from the end."
            )
            raise ValueError(msg)
        return X[..., np.asarray(columns)]
