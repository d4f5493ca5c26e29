"""A posterior over the weights of a table with all of them, block by block: what predictions need.

No array is larger than the table, or than the features of a block at the inputs.
"""

from collections.abc import Callable
import dataclasses
from functools import partial
from typing import Any

import jax
from jax import Array, lax
import jax.numpy as jnp

from numpyro_sgp._internal.eager import as_one_program
from numpyro_sgp.kernels import Kernel
from numpyro_sgp.math.linalg import cholesky, diagonal, solve_lower, solve_lower_transposed
from numpyro_sgp.math.products import matmul, matvec
from numpyro_sgp.posteriors.quadruply_stochastic.formulas import Inclusion
from numpyro_sgp.posteriors.quadruply_stochastic.weight_table import Weights, WeightTable, features_at

__all__ = [
    "Chevron",
    "dense_divergence",
    "independent_divergence",
    "interpolated",
    "prior_diagonal",
    "streamed",
    "streamed_draw",
    "sums_of_squares",
]


@partial(as_one_program, static_argnums=3)
def streamed(kernel: Any, X: Array, table: WeightTable, whiten: bool) -> tuple[Array, Array]:
    """Φμ and ΦU beside each other, (N, 1 + k), and Σ d²φ², (N,)."""

    def add(sums: tuple[Array, Array], block: tuple[Array, Array]) -> tuple[tuple[Array, Array], None]:
        index, there = block
        weights = table.weights(table.at(index), index)
        Phi = jnp.where(there, features_at(kernel, X, index, whiten), 0.0)
        f, variance = sums
        f = f + matmul(Phi, weights.linear)
        if weights.d is not None:
            variance = variance + matvec(Phi * Phi, weights.d**2)
        return (f, variance), None

    N, dtype = X.shape[-2], X.dtype
    zeros = jnp.zeros((N, 1 + (table.dense_columns or 0)), dtype), jnp.zeros(N, dtype)
    # Features are computed again for a gradient, so that those of all blocks are never held.
    return lax.scan(jax.checkpoint(add), zeros, table.blocks())[0]


@partial(as_one_program, static_argnums=1)
def independent_divergence(table: WeightTable, divergence: Callable[[Weights, None, Inclusion], Array]) -> Array:
    """The divergence of all weights, independent ones, by that of a block of them."""

    def of_block(block: tuple[Array, Array]) -> Array:
        index, there = block
        # A row of zeros has none.
        weights = table.weights(jnp.where(there[:, None], table.at(index), 0.0), index)
        return divergence(weights, None, Inclusion(1.0, 1.0, 0.0))

    return jnp.sum(lax.map(of_block, table.blocks()))


@partial(as_one_program, static_argnums=4)
def streamed_draw(kernel: Any, X: Array, table: WeightTable, rng_key: Array, whiten: bool) -> Array:
    """φ(x)ᵀw, (N,), with w = μ + Cz and z ~ N(0, I), whose numbers are drawn again at each call, block by block."""
    key_columns, key_blocks = jax.random.split(rng_key)
    dtype = table.values.dtype
    columns = jax.random.normal(key_columns, (table.dense_columns or 0,), dtype)

    def add(sum_: Array, block: tuple[Array, tuple[Array, Array]]) -> tuple[Array, None]:
        number, (index, there) = block
        weights = table.weights(table.at(index), index)
        own = jax.random.normal(jax.random.fold_in(key_blocks, number), index.shape, dtype)
        w = weights.mean + matvec(weights.U, columns) + weights.d * own
        return sum_ + matvec(features_at(kernel, X, index, whiten), jnp.where(there, w, 0.0)), None

    blocks = table.blocks()
    return lax.scan(add, jnp.zeros(X.shape[-2], X.dtype), (jnp.arange(len(blocks[0])), blocks))[0]


# Rows in a block of features: with M of them a block is as large as that of a few steps of training.
_ROWS = 1024


@partial(as_one_program, static_argnums=3)
def sums_of_squares(kernel: Any, X: Array, table: WeightTable, whiten: bool) -> Array:
    """φ_kᵀφ_k over all rows of X for each basis function, (m,)."""
    N, D = X.shape
    number = -(-N // _ROWS)
    blocks = jnp.pad(X, ((0, number * _ROWS - N), (0, 0))).reshape(number, _ROWS, D)
    there = (jnp.arange(number * _ROWS) < N).reshape(number, _ROWS)

    def of_block(index: Array) -> Array:
        def add(sums: Array, rows: tuple[Array, Array]) -> tuple[Array, None]:
            Phi = features_at(kernel, rows[0], index, whiten)
            return sums + matvec((Phi * Phi).mT, rows[1].astype(Phi.dtype)), None

        return lax.scan(add, jnp.zeros(index.shape, X.dtype), (blocks, there))[0]

    return lax.map(of_block, table.blocks()[0]).reshape(-1)[: table.size]


@partial(as_one_program, static_argnums=5)
def interpolated(kernel: Any, X: Array, table: WeightTable, values: Array, jitter: Array, whiten: bool) -> Array:
    """S⁻¹Φᵀ(ΦS⁻¹Φᵀ + εI)⁻¹ values, (m,), in two passes: the smallest weights that give these values at X."""
    blocks = table.blocks()

    def of_block(index: Array, there: Array) -> tuple[Array, Array]:
        variance = 1.0 if whiten else table.weights(table.at(index), index).second_moment
        Phi = jnp.where(there, features_at(kernel, X, index, whiten), 0.0)
        return Phi, Phi * variance

    def add(gram: Array, block: tuple[Array, Array]) -> tuple[Array, None]:
        Phi, scaled = of_block(*block)
        return gram + matmul(Phi, scaled.mT), None

    N, dtype = X.shape[-2], X.dtype
    L = cholesky(lax.scan(add, jnp.zeros((N, N), dtype), blocks)[0], jitter)
    dual = solve_lower_transposed(L, solve_lower(L, values[:, None]))[:, 0]
    weights = lax.map(lambda block: matvec(of_block(*block)[1].mT, dual), blocks)
    return weights.reshape(-1)[: table.size]


@as_one_program
def dense_divergence(kernel: Any, table: WeightTable) -> Array:
    """The divergence of correlated weights, by pairs of blocks: ½ μᵀSμ, and of a covariance up to −½ log|S|."""
    index, there = table.blocks()
    weights = jax.vmap(lambda block: table.weights(table.at(block), block))(index)
    linear = jnp.where(there[..., None], weights.linear, 0.0)
    M = index.shape[-1]

    def row(index_i: Array, linear_i: Array) -> Array:
        def pair(other: tuple[Array, Array]) -> Array:
            index_j, linear_j = other
            S = kernel.prior_precision(jnp.concatenate([index_i, index_j]))[:M, M:]
            return jnp.sum(linear_i * matmul(S, linear_j))

        return jnp.sum(lax.map(jax.checkpoint(pair), (index, linear)))

    kl = 0.5 * jnp.sum(lax.map(lambda block: row(*block), (index, linear)))
    if weights.d is None:
        return kl
    S = _diagonal_in_blocks(kernel, table)
    return kl + jnp.sum(jnp.where(there, 0.5 * S * weights.d**2 - weights.log_diagonal - 0.5, 0.0))


def _diagonal_in_blocks(kernel: Any, table: WeightTable) -> Array:
    return lax.map(lambda index: diagonal(kernel.prior_precision(index)), table.blocks()[0])


def prior_diagonal(kernel: Any, table: WeightTable) -> Array:
    """S_kk of correlated weights, (m,), block by block."""
    return _diagonal_in_blocks(kernel, table).reshape(-1)[: table.size]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Chevron(Kernel):
    """The posterior covariance φ(x)ᵀΣφ(z) as a kernel."""

    kernel: Any
    table: WeightTable
    whiten: bool = dataclasses.field(metadata={"static": True})

    def _diagonal(self, X: Array) -> Array:
        f, variance = streamed(self.kernel, X, self.table, self.whiten)
        return jnp.sum(f[:, 1:] ** 2, axis=-1) + variance

    def _matrix(self, X: Array, Z: Array) -> Array:
        return _chevron_matrix(self.kernel, X, Z, self.table, self.whiten)


@partial(as_one_program, static_argnums=4)
def _chevron_matrix(kernel: Any, X: Array, Z: Array, table: WeightTable, whiten: bool) -> Array:
    columns = table.dense_columns or 0

    def add(sums: tuple[Array, Array, Array], block: tuple[Array, Array]) -> tuple[tuple[Array, Array, Array], None]:
        index, there = block
        weights = table.weights(table.at(index), index)
        left, right = (jnp.where(there, features_at(kernel, at, index, whiten), 0.0) for at in (X, Z))
        scaled = left * (weights.d**2)
        K = sums[0] + matmul(scaled, right.mT)
        return (K, sums[1] + matmul(left, weights.U), sums[2] + matmul(right, weights.U)), None

    dtype = X.dtype
    zeros = (
        jnp.zeros((len(X), len(Z)), dtype),
        jnp.zeros((len(X), columns), dtype),
        jnp.zeros((len(Z), columns), dtype),
    )
    K, left, right = lax.scan(add, zeros, table.blocks())[0]
    return K + matmul(left, right.T)
