"""Tables of weights that are too long to be touched as a whole: a row for each basis function, sampled rows in a step.

`WeightTable` is what the parameters hold. `RowSparse` puts `SampledRows` in its place when it evaluates the loss.
"""

from collections.abc import Callable
import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import Array, lax
import jax.numpy as jnp

from numpyro_sgp._internal.probed import Probed
from numpyro_sgp.features import HilbertSpace, InducingBasis, RandomFourier
from numpyro_sgp.features.finite_rank import has_correlated_weights
from numpyro_sgp.math.linalg import cholesky
from numpyro_sgp.math.products import matmul

__all__ = [
    "Change",
    "Control",
    "SampledRows",
    "WeightTable",
    "Weights",
    "draw_index",
    "features_at",
    "limit_of",
    "numbers_of",
    "with_numbers",
]


def limit_of(kernel: Any) -> Callable:
    """The kernel that features approximate: that of infinite rank, or the kernel itself where it is exact."""
    return kernel.kernel if isinstance(kernel, RandomFourier | HilbertSpace | InducingBasis) else kernel


def features_at(kernel: Any, X: Array, index: Array, whitened: bool) -> Array:
    """Features at some indices, (N, M), in the precision of X: whitened, those of weights of prior precision one."""
    Phi = kernel.features(X, index).astype(X.dtype)
    if not whitened or has_correlated_weights(kernel):
        return Phi
    S = jnp.asarray(kernel.prior_precision(index))
    return Phi / jnp.sqrt(S).astype(Phi.dtype)


class Weights(NamedTuple):
    """q(w) = N(μ, CCᵀ) at some weights, C = (U, d).

    Attributes:
        linear: μ and the columns U beside each other, (M, 1 + k).
        d: the diagonal below the dense columns, zero in the first k rows, (M,), or None.
        log_diagonal: log C_kk, (M,), or None.
    """

    linear: Array
    d: Any
    log_diagonal: Any

    @property
    def mean(self) -> Array:
        """μ, (M,)."""
        return self.linear[:, 0]

    @property
    def U(self) -> Array:
        """The dense columns, (M, k)."""
        return self.linear[:, 1:]

    @property
    def second_moment(self) -> Array:
        """E w_k² = μ_k² + (CCᵀ)_kk, (M,), where there is a covariance; in a relevance vector machine 1/s_k."""
        return jnp.sum(self.linear * self.linear, axis=1) + self.d * self.d


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Control:
    """Fixed inputs p and fixed features there, so that a = Φ_p w can be tracked while hyperparameters move.

    Args:
        X: the inputs p, (P, D).
        L: Cholesky factor of the kernel matrix at p, (P, P).
        kernel: the kernel as it was when the guide was initialised, or when what is tracked was last computed anew.
        whitened: whether features are those of weights of prior precision one.
        jitter: added to the diagonal of the kernel matrix, relative to its mean.
    """

    X: Array
    L: Array
    kernel: Any
    whitened: bool = dataclasses.field(metadata={"static": True})
    jitter: float = dataclasses.field(metadata={"static": True})

    @classmethod
    def at(cls, X: Array, kernel: Any, whitened: bool, jitter: float) -> "Control":
        """With the kernel's numbers as they are, not differentiated."""
        kernel = lax.stop_gradient(kernel)
        return cls(X, cholesky(limit_of(kernel)(X, X), jitter), kernel, whitened, jitter)

    def features(self, index: Array) -> Array:
        """Φ_p at some indices, (P, M)."""
        return features_at(self.kernel, self.X, index, self.whitened)

    def cross(self, X: Array) -> Array:
        """Kernel between p and other inputs, (P, N)."""
        return limit_of(self.kernel)(self.X, X)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WeightTable:
    """What the posterior knows of each weight, a row for each.

    Args:
        values: μ; and, with a chevron covariance, the k dense columns and log C_kk, (m, 1) or (m, 2 + k).
        control: inputs of a control variate, or None.
        batch: how many rows a step samples, M.
        dense_columns: k, or None where there is a mean only.
    """

    values: Array
    control: Control | None
    batch: int = dataclasses.field(metadata={"static": True})
    dense_columns: int | None = dataclasses.field(metadata={"static": True})

    @property
    def size(self) -> int:
        """m, the number of rows."""
        return self.values.shape[0]

    def weights(self, values: Array, index: Array) -> Weights:
        """Rows at `index`, (M, c), as weights."""
        k = self.dense_columns
        if k is None:
            return Weights(values[:, :1], None, None)
        log_diagonal = values[:, 1 + k]
        column, first = jnp.arange(k), index[:, None] < k
        corner = jnp.where(index[:, None] == column, jnp.exp(log_diagonal)[:, None], 0.0)
        corner = jnp.where(index[:, None] > column, values[:, 1 : 1 + k], corner)
        U = jnp.where(first, corner, values[:, 1 : 1 + k])
        d = jnp.where(first[:, 0], 0.0, jnp.exp(log_diagonal))
        return Weights(jnp.concatenate([values[:, :1], U], axis=1), d, log_diagonal)

    def all_weights(self) -> Weights:
        """All rows as weights."""
        return self.weights(self.values, jnp.arange(self.size))

    def at(self, index: Array) -> Array:
        """The rows at some indices, (M, c)."""
        return self.values.at[index].get(mode="promise_in_bounds")

    def blocks(self) -> tuple[Array, Array]:
        """Indices of all rows in blocks of M, the last filled up with its last row, and which of them count."""
        number = -(-self.size // self.batch)
        index = jnp.arange(number * self.batch).reshape(number, self.batch)
        return jnp.minimum(index, self.size - 1), index < self.size

    def tracked(self) -> Array:
        """Φ_p w of all weights, (P, 1 + k), in memory that does not grow with m."""
        assert self.control is not None
        control = self.control
        number = -(-self.size // self.batch)
        columns = 1 + (self.dense_columns or 0)

        def add(block: Array, sums: Array) -> Array:
            index = block * self.batch + jnp.arange(self.batch)
            there, index = index < self.size, jnp.minimum(index, self.size - 1)
            linear = self.weights(self.at(index), index).linear
            return sums + matmul(control.features(index), jnp.where(there[:, None], linear, 0.0))

        return lax.fori_loop(0, number, add, jnp.zeros((control.X.shape[0], columns), self.values.dtype))


def _moves(leaf: Any, size: int) -> bool:
    # What is as long as the table is a part of the basis, which stays, and would make a step as long as the table.
    return jnp.issubdtype(jnp.result_type(leaf), jnp.floating) and jnp.size(leaf) < size


def numbers_of(kernel: Any, size: int) -> list[Array]:
    """The leaves of a kernel that are hyperparameters: real numbers, fewer than the m rows of its table."""
    return [jnp.asarray(leaf) for leaf in jax.tree.leaves(kernel) if _moves(leaf, size)]


def with_numbers(kernel: Any, numbers: list[Array], size: int) -> Any:
    """The kernel with other hyperparameters in the place of its own."""
    leaves, structure = jax.tree.flatten(kernel)
    left = iter(numbers)
    return structure.unflatten(next(left) if _moves(leaf, size) else leaf for leaf in leaves)


class Change(NamedTuple):
    """What derivatives with respect to a zero of this form are.

    Attributes:
        rows: the gradient with respect to the sampled rows, (M, c).
        numbers: the kernel's numbers as they are in the loss, and 1, all times the factor of the divergence; or None.
    """

    rows: Array
    numbers: list[Array] | None


@dataclasses.dataclass(frozen=True)
class SampledRows(Probed):
    """What `RowSparse` puts in the place of a table.

    Args:
        value: the table, whose values are not to be read.
        zero: a change of zero, to be differentiated.
        values: sampled rows, (M, c).
        index: which rows, (M,), distinct.
        tracked: Φ_p w of all weights, (P, 1 + k), or None.
        integrated: receives an entry when a loss integrates over the estimate as it must be.
    """

    value: WeightTable
    zero: Change
    values: Array
    index: Array
    tracked: Array | None
    integrated: Any


# A permutation of a few times as many rows as are wanted costs no more than what else is done with these.
_SMALL = 16
_ROUNDS = 6


@partial(jax.jit, static_argnums=(1, 2))
def draw_index(rng_key: Array, size: int, number: int) -> Array:
    """M of m indices without replacement, (M,), at a cost that does not grow with m; all of them in order for M = m.

    Where m is much larger than M, the first M values of a random permutation that is evaluated there only: a Feistel
    network on pairs of digits to the base √m, walked until it is inside. It is a pseudorandom permutation, as the
    numbers of a generator are pseudorandom.

    Args:
        rng_key: a key.
        size: m.
        number: M.

    References:
        Black and Rogaway (2002), "Ciphers with arbitrary finite domains", sections 3 and 4.
    """
    if number == size:
        return jnp.arange(size)
    if size <= _SMALL * number:
        return jax.random.permutation(rng_key, size)[:number]
    base = int(size**0.5)
    base += base * base < size
    keys = jax.random.split(rng_key, _ROUNDS)

    def permuted(x: Array) -> Array:
        left, right = x // base, x % base
        for key in keys:
            noise = jax.vmap(lambda digit, key=key: jax.random.bits(jax.random.fold_in(key, digit), dtype=jnp.uint32))
            shift = (noise(right) % jnp.uint32(base)).astype(x.dtype)
            left, right = right, (left + shift) % base
        return left * base + right

    start = permuted(jnp.arange(number))
    return lax.while_loop(lambda x: jnp.any(x >= size), lambda x: jnp.where(x >= size, permuted(x), x), start)
