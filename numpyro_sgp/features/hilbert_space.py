"""Eigenfunctions of the Laplacian on a box as features."""

from collections.abc import Callable, Sequence
import dataclasses
import math
from typing import Any, cast, final

import jax
from jax import Array
from jax.core import Tracer
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

from numpyro_sgp._internal.checks import positive
from numpyro_sgp.features.abstract import AbstractFiniteRank
from numpyro_sgp.kernels import Constant, Product, Stationary, Sum
from numpyro_sgp.kernels.arrays import as_inputs

__all__ = ["HilbertSpace"]


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class HilbertSpace(AbstractFiniteRank):
    """Sines on a box as features, and the spectral density at their frequencies as the variance of their weights.

    φ_j(x) = Π_d sin(√λ_jd (x_d − a_d)) / √L_d with √λ_jd = π j_d / 2L_d on the box from a to b = a + 2L, and
    S_j⁻¹ = S(√λ_j) of the kernel. Functions are zero on the sides of the box: make it larger than the data by a
    lengthscale or two on each side, those of predictions too. Outside they are mirror images, which raises where the
    inputs are known; inside `jit`, as in training, they are not, and nothing is said.

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
            number of columns; inputs outside the box (when it is evaluated outside `jit`).
        TypeError: bounds that are traced; a kernel without a spectral density (when it is evaluated).

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
        lower, upper = _sides(self.bounds)
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
        _check_inside(X, self.bounds)
        sines = jnp.sin((X - lower)[..., :, None, :] * omega) * jnp.sqrt(2.0 / (upper - lower))
        return jnp.prod(sines, axis=-1)

    def prior_precision(self, index: ArrayLike | None = None) -> Array:
        density = _spectral_density(self.kernel, self._frequencies(index, jnp.result_type(float)))
        # Where the density underflows the weight is zero, and so are its derivatives: the square of this is finite.
        return 1.0 / jnp.maximum(density, math.sqrt(float(jnp.finfo(density.dtype).tiny)))


def _check_inside(X: Array, bounds: tuple[Any, Any]) -> None:
    """Raise where known inputs lie outside the box; sides are compared in the precision of the inputs."""
    if isinstance(X, Tracer) or not X.size:
        return
    values = np.asarray(X)
    lower, upper = (np.asarray(side, values.dtype) for side in bounds)
    if np.any(values < lower) or np.any(values > upper):
        axes = tuple(range(values.ndim - 1))
        msg = (
            f"`X` reaches from {values.min(axes).tolist()} to {values.max(axes).tolist()}, and `bounds` are "
            f"{lower.tolist()} and {upper.tolist()}: outside the box the functions are mirror images of those inside. "
            "Give `HilbertSpace` wider bounds, around all inputs of training and of prediction."
        )
        raise ValueError(msg)


def _sides(bounds: Any) -> list[np.ndarray]:
    """Lower and upper sides of a box as they were given."""
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(bounds)):
        msg = (
            "`bounds` are computed inside the model, where they are traced; they are fixed numbers, and a prediction "
            "at other inputs must find the same. Compute them outside, from all of the data."
        )
        raise TypeError(msg)
    return [np.atleast_1d(np.asarray(side, float)) for side in bounds]


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
