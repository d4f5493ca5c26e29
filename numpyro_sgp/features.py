"""Kernels of finite rank, k(x, z) = φ(x)ᵀS⁻¹φ(z): functions f(x) = φ(x)ᵀw with weights w ~ N(0, S⁻¹).

Each is a kernel like any other, and shows `rank`, `features(X, index)` and `prior_precision(index)`; so posteriors over
the weights (`AutoWeightSpaceGP`) can be had, and only some features evaluated. Leading axes of hyperparameters are a
batch of kernels, as in `numpyro_sgp.kernels`.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
import dataclasses
from functools import partial
import math
from typing import Any, cast, final

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

from numpyro_sgp.checks import positive
from numpyro_sgp.eager import as_one_program
from numpyro_sgp.expansion import Factor, frequencies, phases, scale_of, split, term_features, terms, width_of
from numpyro_sgp.finite_rank import FiniteRank, precision_matrix, whitened_features
from numpyro_sgp.inducing import AbstractInducing, as_inducing, check_width
from numpyro_sgp.kernels import Constant, Kernel, Product, Stationary, Sum, as_inputs, map_rows
from numpyro_sgp.linalg import default_jitter, matmul, with_jitter
from numpyro_sgp.pytrees import PytreeFunction

__all__ = [
    "AbstractFiniteRank",
    "Expanded",
    "FeatureMap",
    "FiniteRank",
    "HilbertSpace",
    "InducingBasis",
    "RandomFourier",
    "WeightVariables",
    "as_finite_rank",
]


class AbstractFiniteRank(Kernel):
    """A kernel of finite rank: subclasses give the features and the prior precision of their weights.

    Attributes:
        rank: the number of features, r.
    """

    rank: int

    @abstractmethod
    def features(self, X: ArrayLike, index: ArrayLike | None = None) -> Array:
        """φ(X), (..., N, r), or the features at `index` only.

        Args:
            X: inputs, (..., N, D).
            index: integers in [0, r), (K,), or None for all.
        """

    @abstractmethod
    def prior_precision(self, index: ArrayLike | None = None) -> Array:
        """S, the prior precision of the weights: one number for each, (..., r), or of those at `index`, (..., K)."""

    def _diagonal(self, X: Array) -> Array:
        Phi = whitened_features(self, X)
        return jnp.sum(Phi * Phi, axis=-1)

    def _matrix(self, X: Array, Z: Array) -> Array:
        left = whitened_features(self, X)
        right = left if Z is X else whitened_features(self, Z)
        return matmul(left, jnp.swapaxes(right, -1, -2))


def _at(values: Array, index: ArrayLike | None) -> Array:
    return values if index is None else jnp.take(values, jnp.asarray(index), axis=-1)


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class FeatureMap(AbstractFiniteRank):
    """k(x, z) = σ² φ(x)ᵀφ(z) for any features φ: a Bayesian last layer when φ is a network.

    >>> import jax.numpy as jnp
    >>> from numpyro_sgp.features import FeatureMap
    >>> kernel = FeatureMap(lambda X: jnp.concatenate([jnp.ones_like(X), X, X**2], axis=-1))
    >>> X = jnp.ones((7, 1))
    >>> kernel.features(X).shape, kernel(X, X[:5]).shape
    ((7, 3), (7, 5))

    Args:
        fn: φ for all rows at once, (N, D) -> (N, r), or `fn(params, X)` where `params` are given. A function may close
            over sampled or traced values; what is in `params` is a part of the kernel, and outlives the model's run.
        params: first argument of `fn`, any pytree; None for `fn(X)`. They become a part of `fn`.
        variance: σ², prior variance of the weights: a number for all or one for each, (r,); batch + (1,) or (r,).
        size: r, where it is asked for before the features were evaluated (`rank`).

    Raises:
        ValueError: `fn` does not return N rows, or not `size` columns.
    """

    fn: Callable
    params: Any = None
    variance: ArrayLike = 1.0
    size: int | None = dataclasses.field(default=None, metadata={"static": True})

    def __post_init__(self) -> None:
        fn, params = self.fn, self.params
        if params is not None and callable(fn) and not isinstance(fn, PytreeFunction):
            # One callable that shows its arrays, whatever else is among the parameters (a module has functions, too).
            fn, params = jax.tree_util.Partial(fn, params), None
        object.__setattr__(self, "fn", PytreeFunction.of(fn))
        object.__setattr__(self, "params", params)
        if self.size is not None:
            positive("size", self.size, "It is the number of columns that `fn` returns.")

    @property
    def rank(self) -> int:
        """The number of features, r."""
        if self.size is None:
            msg = "The rank of this `FeatureMap` is what `fn` returns. Pass `size=` where it is needed before that."
            raise ValueError(msg)
        return self.size

    def features(self, X: ArrayLike, index: ArrayLike | None = None) -> Array:
        Phi = map_rows(self.fn, as_inputs(X, "X"))
        if self.size is not None and Phi.shape[-1] != self.size:
            msg = f"`fn` returned {Phi.shape[-1]} features a row, but `size` is {self.size}. Make them agree."
            raise ValueError(msg)
        return _at(Phi, index)

    def prior_precision(self, index: ArrayLike | None = None) -> Array:
        S = 1.0 / jnp.asarray(self.variance)
        S = S if S.ndim else S[None]
        if index is None:
            return S if self.size is None else jnp.broadcast_to(S, (*S.shape[:-1], self.size))
        if S.shape[-1] == 1:
            return jnp.broadcast_to(S, (*S.shape[:-1], *jnp.shape(index)))
        return _at(S, index)


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class RandomFourier(AbstractFiniteRank):
    """Random Fourier features of a kernel, φ = √(2/r) (cos ω₁ᵀx, sin ω₁ᵀx, cos ω₂ᵀx, …), ω from its spectral density.

    The variance of the kernel is that of the weights. Frequencies are not stored: pair p is drawn from the key folded
    with p whenever it is asked for, so features at some indices cost what those cost, whatever the rank. A batch of
    kernels shares its standard draws, which each of them scales by its lengthscale (of rational quadratic kernels each
    has its own).

    >>> import jax, jax.numpy as jnp
    >>> from numpyro_sgp.features import RandomFourier
    >>> from numpyro_sgp.kernels import Matern52
    >>> kernel = RandomFourier(Matern52(0.5), rank=10_000_000, rng_key=jax.random.key(0))
    >>> kernel.features(jnp.ones((7, 2)), index=jnp.array([3, 9_999_999])).shape
    (7, 2)

    Args:
        kernel: a stationary kernel or `Periodic`, products of them and of constants, and `Warp` and `Select` of these;
            a kernel of one's own derives from `Stationary` and has `frequencies`.
        rank: r, even.
        rng_key: a key: it is a part of the kernel.

    Raises:
        ValueError: an odd rank; a sum of kernels (when the features are evaluated).
        TypeError: a kernel without frequencies (likewise).

    References:
        Rahimi and Recht (2007), "Random features for large-scale kernel machines", algorithm 1, with a cosine and a
        sine for each frequency; their squares sum to one, so the variance is exact at any rank.
    """

    kernel: Callable
    rank: int = dataclasses.field(metadata={"static": True})
    rng_key: Array
    key_type: Any = dataclasses.field(default=None, metadata={"static": True})

    def __post_init__(self) -> None:
        positive("rank", self.rank, "Use an even number, a cosine and a sine for each frequency.")
        if self.rank % 2:
            msg = f"`rank` must be even, a cosine and a sine for each frequency, got {self.rank}."
            raise ValueError(msg)
        # Kept as plain numbers, which can be pickled and go wherever arrays go.
        key = self.rng_key
        if isinstance(key, Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
            object.__setattr__(self, "key_type", jax.random.key_impl(key))
            object.__setattr__(self, "rng_key", jax.random.key_data(key))

    def _factors(self) -> tuple[list[Factor], list[Factor]]:
        """The spectral factors, and the constants."""
        expanded = list(terms(self.kernel))
        if len(expanded) > 1:
            msg = (
                f"`RandomFourier` takes one product of stationary kernels, got a sum of {len(expanded)}. Give each "
                "summand features of its own and add them: RandomFourier(k1, …) + RandomFourier(k2, …)."
            )
            raise ValueError(msg)
        spectral, finite = split(expanded[0])
        other = [type(factor.kernel).__name__ for factor in finite if not isinstance(factor.kernel, Constant)]
        if other or not spectral:
            msg = (
                f"`RandomFourier` needs a kernel with a spectral density, got {other or ['Constant']}. A kernel of "
                "finite rank has features already, and can be added to one of `RandomFourier`."
            )
            raise TypeError(msg)
        return spectral, finite

    def features(self, X: ArrayLike, index: ArrayLike | None = None) -> Array:
        X = as_inputs(X, "X")
        spectral, _ = self._factors()
        pairs = jnp.arange(self.rank // 2) if index is None else jnp.asarray(index) // 2
        widths = tuple(width_of(factor, X) for factor in spectral)
        omegas = _frequencies_of([factor.kernel for factor in spectral], self.rng_key, pairs, widths, self.key_type)
        phase: Any = 0.0
        for factor, omega in zip(spectral, omegas, strict=True):
            phase = phase + phases(factor, X, omega.astype(X.dtype))
        scale = math.sqrt(2.0 / self.rank)
        if index is not None:
            return scale * jnp.where(jnp.asarray(index) % 2 == 0, jnp.cos(phase), jnp.sin(phase))
        waves = jnp.stack([jnp.cos(phase), jnp.sin(phase)], axis=-1)
        return scale * waves.reshape(*phase.shape[:-1], self.rank)

    def prior_precision(self, index: ArrayLike | None = None) -> Array:
        spectral, constants = self._factors()
        variance: Any = 1.0
        for factor in spectral:
            variance = variance * scale_of(factor) ** 2
        for factor in constants:
            value = jnp.asarray(factor.kernel.variance)
            variance = variance * (value[..., None] if value.ndim else value)
        S = 1.0 / jnp.asarray(variance)
        size = self.rank if index is None else len(jnp.asarray(index))
        return jnp.broadcast_to(S, (*S.shape[:-1], size))


@partial(as_one_program, static_argnums=(3, 4))
def _frequencies_of(
    spectral: list[Any], key_data: Array, pairs: Array, widths: tuple[int, ...], key_type: Any
) -> list[Array]:
    """The frequencies of some pairs of features for each spectral kernel of a product, (…, F, D).

    In single precision whatever the inputs have: another precision would draw other numbers, and be another kernel.
    """
    key = jax.random.wrap_key_data(key_data, impl=key_type)

    def draw(pair: Array) -> list[Array]:
        keys = jax.random.split(jax.random.fold_in(key, pair), len(spectral))
        return [
            frequencies(kernel, k, 1, D, (), jnp.float32) for kernel, k, D in zip(spectral, keys, widths, strict=True)
        ]

    # (F, …, 1, D) to (…, F, D)
    return [jnp.moveaxis(omega, 0, -2)[..., 0, :, :] for omega in jax.vmap(draw)(pairs)]


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class InducingBasis(AbstractFiniteRank):
    """k(x, z) = k₀(x, Z) k₀(Z, Z)⁻¹ k₀(Z, z): the features k₀(x, Z), whose weights have the precision Kuu = k₀(Z, Z).

    The prior of the subset of regressors: what inducing inputs cannot explain has variance zero.

    Args:
        kernel: k₀, any kernel.
        Z: inducing inputs (r, D), or an inducing object.
        jitter: added to the diagonal of Kuu, relative to its mean; None for the default of the dtype.

    References:
        Quiñonero-Candela and Rasmussen (2005), "A unifying view of sparse approximate Gaussian process regression",
        section 5; Evans and Nair (2020), "Quadruply stochastic Gaussian processes".
    """

    kernel: Callable
    Z: AbstractInducing | ArrayLike
    jitter: float | None = None
    correlated_weights = True

    def __post_init__(self) -> None:
        # A transformation may put a placeholder here, which is left as it is.
        if isinstance(self.Z, Array | np.ndarray | list | tuple):
            object.__setattr__(self, "Z", as_inducing(self.Z, "Z"))

    @property
    def _inducing(self) -> AbstractInducing:
        return cast(AbstractInducing, self.Z)

    @property
    def rank(self) -> int:
        """The number of features, r."""
        return self._inducing.num_inducing

    def features(self, X: ArrayLike, index: ArrayLike | None = None) -> Array:
        X = as_inputs(X, "X")
        check_width(self._inducing, X, "Z")
        inducing = self._inducing if index is None else self._inducing.take(jnp.asarray(index))
        return jnp.swapaxes(inducing.Kuf(self.kernel, X), -1, -2)

    def prior_precision(self, index: ArrayLike | None = None) -> Array:
        """Kuu with its jitter, (..., r, r), or the rows and columns at `index`, (..., K, K)."""
        inducing = self._inducing if index is None else self._inducing.take(jnp.asarray(index))
        if index is None:
            Kuu = inducing.Kuu(self.kernel)
            return with_jitter(Kuu, self._relative_jitter(Kuu.dtype))
        Kuu = inducing.Kuu(self.kernel)
        # An index may occur twice: the jitter belongs to the variable, as its variance does.
        shift = self._relative_jitter(Kuu.dtype) * jnp.mean(self._inducing.Kuu_diagonal(self.kernel), axis=-1)
        same = jnp.asarray(index)[:, None] == jnp.asarray(index)[None, :]
        return Kuu + jnp.where(same, shift[..., None, None], 0.0)

    def _relative_jitter(self, dtype: Any) -> Any:
        return default_jitter(dtype) if self.jitter is None else self.jitter


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class HilbertSpace(AbstractFiniteRank):
    """Sines on a box as features, and the spectral density at their frequencies as the variance of their weights.

    φ_j(x) = Π_d sin(√λ_jd (x_d − a_d)) / √L_d with √λ_jd = π j_d / 2L_d on the box from a to b = a + 2L, and
    S_j⁻¹ = S(√λ_j) of the kernel. Functions are zero on the sides of the box: make it larger than the data by a
    lengthscale or two on each side.

    >>> import jax.numpy as jnp
    >>> from numpyro_sgp.features import HilbertSpace
    >>> from numpyro_sgp.kernels import SquaredExponential
    >>> kernel = HilbertSpace(SquaredExponential(0.5), num_basis=(8, 10), bounds=(-3.0, 3.0))
    >>> kernel.rank, kernel.features(jnp.ones((7, 2))).shape
    (80, (7, 80))

    Args:
        kernel: a stationary kernel with `spectral_density` (squared exponential, Matérn), sums of such kernels, and
            products of them with constants.
        num_basis: frequencies of each column: an integer for one column, or a sequence; the rank is their product.
        bounds: lower and upper sides of the box in the units of X, numbers or sequences of D numbers.

    Raises:
        ValueError: `num_basis` that are not positive integers; bounds that are not lower and upper, or of another
            number of columns.
        TypeError: a kernel without a spectral density (when it is evaluated).

    References:
        Solin and Särkkä (2020), "Hilbert space methods for reduced-rank Gaussian process regression", equations 56
        and 68; Riutort-Mayol et al. (2023), "Practical Hilbert space approximate Bayesian Gaussian processes".
    """

    kernel: Callable
    num_basis: int | Sequence[int] = dataclasses.field(metadata={"static": True})
    bounds: tuple[Any, Any] = dataclasses.field(metadata={"static": True})

    def __post_init__(self) -> None:
        # All of it is static, so never a placeholder.
        given = tuple(np.atleast_1d(np.asarray(self.num_basis, object)).tolist())
        for number in given:
            positive("num_basis", number, "Give one for each column.")
        lower, upper = (np.atleast_1d(np.asarray(side, float)) for side in self.bounds)
        D = max(len(given), len(lower), len(upper))
        if any(len(side) not in (1, D) for side in (given, lower, upper)):
            msg = (
                f"`num_basis` has {len(given)} entries, and `bounds` {len(lower)} and {len(upper)}. Give one of each "
                "for each column; a single bound is for all columns."
            )
            raise ValueError(msg)
        numbers = given if len(given) == D else given * D
        lower, upper = (np.broadcast_to(side, (D,)) for side in (lower, upper))
        if not np.all(lower < upper):
            msg = f"`bounds` must be lower and upper sides of a box, got {lower} and {upper}."
            raise ValueError(msg)
        object.__setattr__(self, "num_basis", tuple(int(number) for number in numbers))
        object.__setattr__(self, "bounds", (tuple(lower.tolist()), tuple(upper.tolist())))

    @property
    def _numbers(self) -> tuple[int, ...]:
        return cast("tuple[int, ...]", self.num_basis)

    @property
    def rank(self) -> int:
        """The number of features, r."""
        return math.prod(self._numbers)

    def _frequencies(self, index: ArrayLike | None, dtype: Any) -> Array:
        """√λ of each feature, (K, D); the last column's number runs first."""
        number = jnp.arange(self.rank) if index is None else jnp.asarray(index)
        lower, upper = (np.asarray(side) for side in self.bounds)
        columns = jnp.stack(jnp.unravel_index(number, self._numbers), axis=-1) + 1
        return columns.astype(dtype) * jnp.asarray(math.pi / (upper - lower), dtype)

    def features(self, X: ArrayLike, index: ArrayLike | None = None) -> Array:
        X = as_inputs(X, "X")
        lower, upper = (jnp.asarray(side, X.dtype) for side in self.bounds)
        if X.shape[-1] != len(self._numbers):
            msg = (
                f"`X` has shape {X.shape}, but `num_basis` is {self._numbers}. Give one number of frequencies for each "
                "column of X."
            )
            raise ValueError(msg)
        omega = self._frequencies(index, X.dtype)
        sines = jnp.sin((X - lower)[..., :, None, :] * omega) * jnp.sqrt(2.0 / (upper - lower))
        return jnp.prod(sines, axis=-1)

    def prior_precision(self, index: ArrayLike | None = None) -> Array:
        density = _spectral_density(self.kernel, self._frequencies(index, jnp.result_type(float)))
        # Where the density underflows the weight is zero, and so are its derivatives: the square of this is finite.
        return 1.0 / jnp.maximum(density, math.sqrt(float(jnp.finfo(density.dtype).tiny)))


def _spectral_density(kernel: Callable, omega: Array) -> Array:
    if isinstance(kernel, Sum):
        return _spectral_density(kernel.left, omega) + _spectral_density(kernel.right, omega)
    if isinstance(kernel, Product):
        for constant, other in ((kernel.left, kernel.right), (kernel.right, kernel.left)):
            if isinstance(constant, Constant):
                variance = jnp.asarray(constant.variance)
                return (variance[..., None] if variance.ndim else variance) * _spectral_density(other, omega)
    if isinstance(kernel, Stationary):
        return kernel.spectral_density(omega)
    msg = (
        f"`HilbertSpace` needs a stationary kernel with a spectral density, got {type(kernel).__name__}. Use "
        "`SquaredExponential` or a Matérn kernel; for others there is `RandomFourier`."
    )
    raise TypeError(msg)


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Expanded(AbstractFiniteRank):
    """The features of a sum or product of kernels of finite rank, with weights of precision one.

    Args:
        kernel: sums and products of `Linear`, `Polynomial`, `Constant` and kernels of this module, `Warp` and `Select`
            of them.

    Raises:
        TypeError: a kernel with a part that has no features (when they are evaluated).
    """

    kernel: Callable

    @property
    def rank(self) -> int:
        """The number of features, r."""
        msg = "The rank of this kernel depends on the inputs: it is the last axis of `features(X)`."
        raise ValueError(msg)

    def features(self, X: ArrayLike, index: ArrayLike | None = None) -> Array:
        X = as_inputs(X, "X")
        columns = [term_features(_finite(term), X) for term in terms(self.kernel)]
        batch = jnp.broadcast_shapes(*(column.shape[:-1] for column in columns))
        columns = [jnp.broadcast_to(column, (*batch, column.shape[-1])) for column in columns]
        return _at(jnp.concatenate(columns, axis=-1), index)

    def prior_precision(self, index: ArrayLike | None = None) -> Array:
        return jnp.ones(1 if index is None else len(jnp.asarray(index)))


def _finite(term: tuple[Factor, ...]) -> list[Factor]:
    spectral, finite = split(term)
    if spectral:
        kernel = type(spectral[0].kernel).__name__
        msg = (
            f"{kernel} has no features: its rank is infinite. Approximate it, by `RandomFourier(kernel, rank, "
            "rng_key)`, `HilbertSpace(kernel, num_basis, bounds)` or `InducingBasis(kernel, Z)` of "
            "`numpyro_sgp.features`, or use a guide with inducing inputs."
        )
        raise TypeError(msg)
    return finite


def as_finite_rank(kernel: Callable) -> Any:
    """The kernel itself where it shows features, else its expansion into features.

    Args:
        kernel: a kernel of finite rank, or sums and products of such kernels.

    Raises:
        TypeError: a kernel without features.
    """
    if isinstance(kernel, FiniteRank):
        return kernel
    for term in terms(kernel):
        _finite(term)
    return Expanded(kernel)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class WeightVariables(AbstractInducing):
    """u = S w: the weights of a kernel of finite rank as inducing variables, with Kuu = S and Kuf = φ(X)ᵀ.

    Args:
        num: r, the rank.
        columns: D, of the inputs.
    """

    num: int
    columns: int

    @property
    def num_inducing(self) -> int:
        return self.num

    @property
    def width(self) -> int:
        return self.columns

    def Kuu(self, kernel: Callable) -> Array:
        return precision_matrix(as_finite_rank(kernel), self.num)

    def Kuf(self, kernel: Callable, X: Array) -> Array:
        return jnp.swapaxes(as_finite_rank(kernel).features(X), -1, -2)

    def Kuv(self, kernel: Callable, other: AbstractInducing) -> Array:
        if not isinstance(other, WeightVariables):
            msg = f"The covariance of weights with {type(other).__name__} is not known."
            raise TypeError(msg)
        return self.Kuu(kernel)
