"""Integrals of a Gaussian process over boxes as rows."""

from collections.abc import Callable
import dataclasses
import math
from typing import Any, NamedTuple, final

import jax
from jax import Array
from jax.core import Tracer
import jax.numpy as jnp
import numpy as np

from numpyro_sgp._internal.checks import positive
from numpyro_sgp._internal.pytrees import register_unchecked
from numpyro_sgp.functionals.arrays import as_floats, check_shape
from numpyro_sgp.functionals.sums import WeightedSum
from numpyro_sgp.kernels import Constant, Product, Select, SquaredExponential, Sum
from numpyro_sgp.kernels.arrays import add, aligned, check_columns, expand, multiply
from numpyro_sgp.kernels.functional import AbstractFunctional

__all__ = ["Integral"]

# Over an interval of up to a lengthscale, this many Gauss-Legendre nodes integrate exp(−t²/2) to 1e-16, while a
# difference of error functions loses digits.
_NARROW = 8


@final
@register_unchecked
@dataclasses.dataclass(frozen=True, eq=False)
class Integral(AbstractFunctional):
    """Rows ∫ f(x) dx over boxes: totals over areas or periods. Divide by the volume for averages.

    With F″(t) = exp(−t²/2ℓ²), the covariance over [a, b] and [c, d] in one column is F(b − c) − F(b − d) − F(a − c) +
    F(a − d). This is for `SquaredExponential` and `Constant`, and sums, products and `Select` of these. For any other
    kernel, for prior means and for drawn functions it is a `WeightedSum` over a product of Gauss-Legendre nodes, whose
    error is small where the nodes are closer than a lengthscale.

    Args:
        lower: lower sides of the boxes in the units of X, (R, D).
        upper: upper sides, (R, D).
        num_nodes: nodes in each column, where there is no closed form; a row then has num_nodes^D.

    Raises:
        ValueError: arrays of other shapes; a lower side above its upper side.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_sgp as sgp
        >>> months = sgp.functionals.Integral(jnp.array([[0.0], [1.0]]), jnp.array([[1.0], [2.0]]))
        >>> sgp.kernels.Constant(2.0)(months, months)
        Array([[2., 2.],
               [2., 2.]], dtype=float32)
    """

    lower: Any
    upper: Any
    num_nodes: int = dataclasses.field(default=10, metadata={"static": True})

    def __post_init__(self) -> None:
        positive("num_nodes", self.num_nodes, "It is the number of nodes in each column.")
        for name in ("lower", "upper"):
            object.__setattr__(self, name, as_floats(getattr(self, name)))
            check_shape(name, getattr(self, name), 2, "(R, D)", "For one column use lower[:, None].")
        if self.lower.shape != self.upper.shape:
            msg = (
                f"`lower` and `upper` must have the same shape (R, D), got {self.lower.shape} and {self.upper.shape}. "
                "Give both sides of each box."
            )
            raise ValueError(msg)
        if not any(isinstance(side, Tracer) for side in (self.lower, self.upper)):
            rows = int(np.any(np.asarray(self.lower) > np.asarray(self.upper), axis=-1).sum())
            if rows:
                msg = f"`lower` is above `upper` in {rows} rows. Swap the sides of these boxes."
                raise ValueError(msg)

    @property
    def shape(self) -> tuple[int, int]:
        return self.lower.shape

    @property
    def nodes(self) -> Array:
        return self._rule().nodes

    def _rule(self) -> WeightedSum:
        """The rows as sums over nodes."""
        D, dtype = self.shape[1], self.dtype
        nodes, weights = _legendre(self.num_nodes)
        grid = np.stack(np.meshgrid(*[nodes] * D, indexing="ij"), axis=-1).reshape(-1, D)
        products = np.prod(np.meshgrid(*[weights] * D, indexing="ij"), axis=0).reshape(-1)
        lower, width = jnp.asarray(self.lower), jnp.asarray(self.upper) - jnp.asarray(self.lower)
        X = lower[:, None, :] + width[:, None, :] * jnp.asarray(grid, dtype)
        return WeightedSum(X, jnp.prod(width, axis=-1, keepdims=True) * jnp.asarray(products, dtype))

    def apply(self, fn: Callable[[Array], Array]) -> Array:
        return self._rule().apply(fn)

    def cross(self, kernel: Callable, Z: Array) -> Array:
        terms = _terms(kernel, tuple(range(self.shape[1])))
        if terms is None:
            return self._rule().cross(kernel, Z)
        dtype = jnp.result_type(self.dtype, Z)
        sides = [
            (jnp.asarray(self.lower, dtype)[:, d], jnp.asarray(self.upper, dtype)[:, d], Z[..., d, None])
            for d in range(self.shape[1])
        ]
        return _total(terms, sides, lambda a, b, z: b - a + jnp.zeros_like(z), _single)

    def variance(self, kernel: Callable) -> Array:
        terms = _terms(kernel, tuple(range(self.shape[1])))
        if terms is None:
            return self._rule().variance(kernel)
        # As a matrix with one row.
        sides = [
            2 * (jnp.asarray(self.lower)[None, :, d], jnp.asarray(self.upper)[None, :, d]) for d in range(self.shape[1])
        ]
        return _total(terms, sides, _area, _double)[..., 0, :]

    def _covariance(self, kernel: Callable, other: AbstractFunctional) -> Array:
        terms = _terms(kernel, tuple(range(self.shape[1])))
        if terms is None:
            return self._rule()._covariance(kernel, other)
        if not isinstance(other, Integral):
            return other._covariance(kernel, self).mT
        sides = [
            (
                *(jnp.asarray(side)[:, d, None] for side in (self.lower, self.upper)),
                *(jnp.asarray(side)[:, d] for side in (other.lower, other.upper)),
            )
            for d in range(self.shape[1])
        ]
        return _total(terms, sides, _area, _double)


def _legendre(num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights on [0, 1]."""
    nodes, weights = np.polynomial.legendre.leggauss(num_nodes)
    return 0.5 * (nodes + 1.0), 0.5 * weights


class _Term(NamedTuple):
    """A term σ² Π_d exp(−½ p_d (x_d − z_d)²) of a kernel: its variance, and p by column, each of the batch's shape."""

    variance: Any
    precision: dict[int, Any]


def _terms(kernel: Any, columns: tuple[int, ...]) -> list[_Term] | None:
    """The terms of a kernel on some columns; None where it is not a sum of such."""
    if isinstance(kernel, Constant):
        return [_Term(kernel.variance, {})]
    if isinstance(kernel, SquaredExponential):
        check_columns("lengthscale", kernel.lengthscale, jnp.empty((1, len(columns))))
        lengthscale = jnp.asarray(kernel.lengthscale)
        own = [
            lengthscale if not lengthscale.ndim else lengthscale[..., d if lengthscale.shape[-1] > 1 else 0]
            for d in range(len(columns))
        ]
        precision: dict[int, Any] = {}
        for column, each in zip(columns, own, strict=True):
            precision[column] = add(precision.get(column, 0.0), 1.0 / (each * each))
        return [_Term(kernel.variance, precision)]
    if isinstance(kernel, Select):
        return _terms(kernel.kernel, tuple(columns[d] for d in kernel.columns_of(len(columns))))
    if not isinstance(kernel, Sum | Product):
        return None
    left, right = _terms(kernel.left, columns), _terms(kernel.right, columns)
    if left is None or right is None:
        return None
    if isinstance(kernel, Sum):
        return [*left, *right]
    return [_product(one, other) for one in left for other in right]


def _product(one: _Term, other: _Term) -> _Term:
    precision = dict(one.precision)
    for column, p in other.precision.items():
        precision[column] = add(precision[column], p) if column in precision else p
    return _Term(multiply(one.variance, other.variance), precision)


def _total(terms: list[_Term], sides: list[tuple], flat: Callable, curved: Callable) -> Array:
    """The sum over terms of σ² Π_d of integrals in one column, (..., N, M)."""
    total: Any = 0.0
    for term in terms:
        value = expand(jnp.asarray(term.variance), -2, -1)
        for column, side in enumerate(sides):
            p = term.precision.get(column)
            one = flat(*side) if p is None else curved(*side, expand(1.0 / jnp.sqrt(p), -2, -1))
            value = multiply(value, one)
        total = add(total, value)
    return total


def _sum_of_nodes(fn: Callable[[Array], Array], a: Array, b: Array) -> Array:
    """∫_a^b fn by nodes, for an interval of up to a lengthscale."""
    width = b - a
    # On a new first axis: one operation for all nodes, and a sum that fuses with it.
    nodes, weights = (
        jnp.expand_dims(jnp.asarray(x, width.dtype), range(1, 1 + width.ndim)) for x in _legendre(_NARROW)
    )
    return width * jnp.sum(weights * fn(a + width * nodes), axis=0)


def _single(a: Array, b: Array, z: Array, lengthscale: Array) -> Array:
    """∫_a^b exp(−(s − z)²/2ℓ²) ds = ℓ√(π/2) [erf((b − z)/√2ℓ) − erf((a − z)/√2ℓ)]."""
    a, b, z, lengthscale = aligned(a, b, z, lengthscale)
    root = math.sqrt(2.0) * lengthscale
    wide = 0.5 * math.sqrt(math.pi) * root * (jax.lax.erf((b - z) / root) - jax.lax.erf((a - z) / root))
    narrow = _sum_of_nodes(lambda s: jnp.exp(-(((s - z) / root) ** 2)), a, b)
    return jnp.where(b - a < lengthscale, narrow, wide)


def _double(a: Array, b: Array, c: Array, d: Array, lengthscale: Array) -> Array:
    """∫_a^b ∫_c^d exp(−(s − t)²/2ℓ²) dt ds = F(b − c) − F(b − d) − F(a − c) + F(a − d), F″(t) = exp(−t²/2ℓ²)."""
    a, b, c, d, lengthscale = aligned(a, b, c, d, lengthscale)
    root = math.sqrt(2.0) * lengthscale

    def F(t: Array) -> Array:
        return 0.5 * math.sqrt(math.pi) * root * t * jax.lax.erf(t / root) + 0.5 * root**2 * jnp.exp(-((t / root) ** 2))

    wide = F(b - c) - F(b - d) - F(a - c) + F(a - d)
    narrow = _sum_of_nodes(lambda s: _single(c, d, s, lengthscale), a, b)
    other = _sum_of_nodes(lambda t: _single(a, b, t, lengthscale), c, d)
    return jnp.where(b - a < lengthscale, narrow, jnp.where(d - c < lengthscale, other, wide))


def _area(a: Array, b: Array, c: Array, d: Array) -> Array:
    return (b - a) * (d - c)
