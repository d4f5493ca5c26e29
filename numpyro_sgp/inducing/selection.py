"""Choose inducing inputs and their number: k-means, greedy conditional variance, random rows, trace error.

`kmeans`, `greedy_variance` and `subset` have the signature that guides call at initialisation,
`(kernel, X, rng_key, *, num_inducing)`, so `functools.partial(greedy_variance, num_inducing=100)` is an `inducing=`
argument. They work on values: not inside `jit`. X may be a memory map: `subset` reads the rows it takes, `trace_error`
all of them in chunks; `kmeans` (without `num_rows`) and `greedy_variance` hold all rows, and `greedy_variance` besides
them one float for each pair of a row and an inducing input.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
import warnings

import jax
from jax import Array, lax
from jax.core import Tracer
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

from numpyro_sgp._internal.checks import positive
from numpyro_sgp._internal.pytrees import PytreeFunction
from numpyro_sgp.inducing.points import AbstractInducing, as_inducing
from numpyro_sgp.kernels.functional import AbstractFunctional, nodes_of
from numpyro_sgp.math.linalg import cholesky, default_jitter, solve_lower
from numpyro_sgp.math.products import matmul

__all__ = [
    "Suggestion",
    "TraceError",
    "greedy_variance",
    "kmeans",
    "median_lengthscale",
    "subset",
    "suggest_num_inducing",
    "trace_error",
]

# Rows of X read at once: large enough for efficient products, small enough that A takes a few megabytes.
_CHUNK = 8192

# Rows of the pivoted factor in one product: a step reads at most this many rows more than there are.
_BLOCK = 32


class TraceError(NamedTuple):
    """How much prior variance the inducing variables leave unexplained at the data, in units of f².

    Attributes:
        total: tr(K − Q), Q = Kfu Kuu⁻¹ Kuf; the variational bound loses at least half of it over σ².
        relative: tr(K − Q) / tr K, between 0 and 1.
        largest: the largest k_nn − q_nn.
    """

    total: float
    relative: float
    largest: float


class Suggestion(NamedTuple):
    """The smallest number of greedily chosen inducing inputs that meets a tolerance.

    Attributes:
        num_inducing: M.
        inducing: the inputs, (M, D).
        relative_errors: tr(K − Q) / tr K after 1, 2, … inputs, (M,).
    """

    num_inducing: int
    inducing: Array
    relative_errors: np.ndarray


def _rows(X: Any) -> np.ndarray:
    if isinstance(X, Tracer):
        msg = "Inducing inputs are chosen from values, and `X` is being traced. Choose them outside of `jax.jit`."
        raise TypeError(msg)
    X = np.asanyarray(nodes_of(X))
    if X.ndim != 2:
        msg = f"`X` must have shape (N, D), got {X.shape}. For one input use X[:, None]."
        raise ValueError(msg)
    return X


def _check_number(num_inducing: int, N: int) -> None:
    if positive("num_inducing", num_inducing, "It is how many inducing inputs are returned.") > N:
        msg = f"`num_inducing` is {num_inducing}, but X has {N} rows. Ask for at most as many as there are rows."
        raise ValueError(msg)


def _too_few(num_inducing: int, found: int) -> ValueError:
    return ValueError(f"`num_inducing` is {num_inducing}, but X has only {found} distinct rows. Ask for fewer.")


def _generator(rng_key: Array | None) -> np.random.Generator:
    seed = np.zeros(1, np.uint32) if rng_key is None else np.ravel(np.asarray(jax.random.key_data(rng_key)))
    return np.random.default_rng([int(word) for word in seed])


def subset(kernel: Callable | None, X: ArrayLike, rng_key: Array | None = None, *, num_inducing: int) -> Array:
    """Random distinct rows of X, (M, D).

    Args:
        kernel: not used; None will do.
        X: inputs, (N, D).
        rng_key: a key; by default always the same rows.
        num_inducing: M.

    Raises:
        ValueError: more inducing inputs than distinct rows.
        TypeError: X is being traced.
    """
    del kernel
    X = _rows(X)
    _check_number(num_inducing, len(X))
    order = _generator(rng_key).permutation(len(X))
    # Most sets have few equal rows: look at a few more than needed, and at all of them only if that was not enough.
    for size in (min(len(X), 2 * num_inducing), len(X)):
        rows = np.asarray(X[np.sort(order[:size])])
        _, first = np.unique(rows, axis=0, return_index=True)
        if len(first) >= num_inducing:
            chosen = _generator(rng_key).permutation(len(first))[:num_inducing]
            return jnp.asarray(rows[first[chosen]])
    raise _too_few(num_inducing, len(first))


def kmeans(
    kernel: Callable | None,
    X: ArrayLike,
    rng_key: Array | None = None,
    *,
    num_inducing: int,
    num_iterations: int = 10,
    num_rows: int | None = None,
) -> Array:
    """Centres of k-means clusters of the rows of X, (M, D): SciPy's, on columns scaled to unit variance.

    Args:
        kernel: not used; None will do.
        X: inputs, (N, D).
        rng_key: a key for the rows to start from; by default always the same.
        num_inducing: M.
        num_iterations: of Lloyd's algorithm.
        num_rows: cluster that many random rows instead of all.

    Raises:
        ValueError: more inducing inputs than distinct rows.
        TypeError: X is being traced.
    """
    from scipy.cluster.vq import kmeans2

    X = _rows(X)
    if num_rows is not None and num_rows < len(X):
        X = X[np.sort(_generator(rng_key).permutation(len(X))[:num_rows])]
    start = np.asarray(subset(kernel, X, rng_key, num_inducing=num_inducing), float)
    scale = np.std(X, axis=0, dtype=float)
    scale[scale == 0.0] = 1.0
    with warnings.catch_warnings():
        # A cluster that lost its rows keeps its centre, which is what is wanted of an inducing input.
        warnings.filterwarnings("ignore", "One of the clusters is empty", UserWarning)
        centres, _ = kmeans2(X / scale, start / scale, iter=num_iterations, minit="matrix")
    return jnp.asarray((centres * scale).astype(np.result_type(X.dtype, np.float32)))


def greedy_variance(kernel: Callable, X: ArrayLike, rng_key: Array | None = None, *, num_inducing: int) -> Array:
    """Rows of X chosen one by one, each where the prior variance given the earlier ones is largest, (M, D).

    A pivoted Cholesky factorisation of K that looks at one of its columns at a time: O(N M²) operations, N M floats.
    Best in few dimensions or on clustered rows, with M large enough to cover them; with M far too small for the data it
    spends itself on outlying rows, and `kmeans` explains more. Where the chosen rows explain all others up to rounding,
    a warning says so and the rest are random distinct rows.

    Args:
        kernel: one kernel, with typical hyperparameters: the lengthscale decides how far apart the rows will be.
        X: inputs, (N, D).
        rng_key: a key, for the random rows.
        num_inducing: M.

    Raises:
        ValueError: more inducing inputs than distinct rows; a batch of kernels.
        TypeError: X is being traced.

    References:
        Burt, Rasmussen and van der Wilk (2019), "Rates of convergence for sparse variational Gaussian process
        regression"; Fine and Scheinberg (2001), "Efficient SVM training using low-rank kernel representations".
    """
    X = _rows(X)
    _check_number(num_inducing, len(X))
    pivots, _ = _pivoted_cholesky(kernel, X, num_inducing, 0.0)
    chosen = np.asarray(X[pivots])
    if len(pivots) < num_inducing:
        distinct = np.unique(X, axis=0)
        if len(distinct) < num_inducing:
            raise _too_few(num_inducing, len(distinct))
        warnings.warn(
            f"{len(pivots)} inducing inputs explain all rows of X up to rounding; the other "
            f"{num_inducing - len(pivots)} are random rows. Ask for fewer, or give a shorter lengthscale.",
            stacklevel=2,
        )
        known = {row.tobytes() for row in chosen}
        others = np.stack([row for row in distinct if row.tobytes() not in known])
        more = _generator(rng_key).permutation(len(others))[: num_inducing - len(pivots)]
        chosen = np.concatenate([chosen, others[more]])
    return jnp.asarray(chosen)


def pivots_of(kernel: Callable, X: np.ndarray, most: int, tolerance: float) -> np.ndarray:
    """Rows chosen as `greedy_variance` does, by their index, until the share of the prior variance that they leave."""
    return _pivoted_cholesky(kernel, X, most, tolerance)[0]


def suggest_num_inducing(
    kernel: Callable, X: ArrayLike, *, tolerance: float = 0.01, max_num_inducing: int = 2000
) -> Suggestion:
    """The smallest M at which greedily chosen inducing inputs leave tr(K − Q) ≤ tolerance · tr K.

    Args:
        kernel: one kernel, with typical hyperparameters.
        X: inputs, (N, D); a random subset of the rows gives nearly the same answer sooner.
        tolerance: fraction of the prior variance at the data that may stay unexplained.
        max_num_inducing: where to stop looking.

    Raises:
        ValueError: the tolerance is not met with `max_num_inducing`, or does not lie in (0, 1); a batch of kernels, or
            one without variance at these rows.
        TypeError: X is being traced.
    """
    X = _rows(X)
    if not 0.0 < tolerance < 1.0:
        msg = f"`tolerance` must lie in (0, 1), a fraction of the prior variance, got {tolerance!r}. Try 0.01."
        raise ValueError(msg)
    most = positive("max_num_inducing", max_num_inducing, "The default is 2000.")
    pivots, errors = _pivoted_cholesky(kernel, X, min(most, len(X)), tolerance)
    if not len(errors):
        largest = float(jnp.max(kernel(_floating(X))))
        msg = (
            f"`kernel` must have a positive prior variance at some row of `X`, got at most {largest:.3g}. Look at its "
            "variance, and at `X`: that of `Linear` is 0 where `X` is."
        )
        raise ValueError(msg)
    if not errors[-1] <= tolerance:
        msg = (
            f"{len(pivots)} inducing inputs leave {errors[-1]:.3g} of the prior variance unexplained. Raise "
            "`max_num_inducing` or the `tolerance`."
        )
        raise ValueError(msg)
    return Suggestion(len(pivots), jnp.asarray(X[pivots]), errors)


def median_lengthscale(X: ArrayLike, *, max_rows: int = 1000) -> np.ndarray:
    """Lengthscales to start a stationary kernel with: √D times the median distance of two rows in each column, (D,).

    Equal values are left out of the median, so that a column of a few distinct values gets a scale too; one of equal
    values gets 1, and any other would do.

    Args:
        X: inputs, (N, D); a first minibatch is enough.
        max_rows: how many rows to use at most, evenly spaced ones, at a cost of their number squared for each column.

    Raises:
        ValueError: inputs that are not finite.

    References:
        Cheng and Boots (2017), "Variational inference for Gaussian process models with linear complexity", appendix
        C.2; with the factor √D, which medians of single columns need for the product over columns.

    Example:
        >>> import numpy as np, numpyro_sgp as sgp
        >>> sgp.median_lengthscale(np.array([[0.0], [1.0], [3.0]]))
        array([2.])
    """
    X = _rows(X)
    N, D = X.shape
    _check_finite(X)
    some = X[np.unique(np.linspace(0, N - 1, min(N, max_rows)).astype(int))]
    first, second = np.triu_indices(len(some), 1)
    medians = []
    for column in some.T:
        distances = np.abs(column[first] - column[second])
        distances = distances[distances > 0.0]
        medians.append(np.sqrt(D) * np.median(distances) if len(distances) else 1.0)
    return np.asarray(medians, X.dtype if np.issubdtype(X.dtype, np.floating) else float)


def trace_error(
    kernel: Callable, X: ArrayLike, inducing: ArrayLike | AbstractInducing, *, jitter: float | None = None
) -> TraceError:
    """tr(K − Q) at the data, read in chunks: the prior variance that the inducing variables leave unexplained.

    Args:
        kernel: one kernel.
        X: inputs, (N, D), or functionals with N rows.
        inducing: inducing inputs (M, D), or an inducing object.
        jitter: added to the diagonal of Kuu, relative to its mean; by default 1e-6 in float64 and 1e-4 in float32.

    Raises:
        ValueError: a batch of kernels.
        TypeError: X is being traced.
    """
    rows: Any = X if isinstance(X, AbstractFunctional) else _rows(X)
    _check_one(kernel, _floating(rows[:1]))
    kernel, inducing = PytreeFunction.of(kernel), as_inducing(inducing)
    total = prior = largest = 0.0
    for start in range(0, len(rows), _CHUNK):
        chunk = _floating(rows[start : start + _CHUNK])
        relative = default_jitter(chunk.dtype) if jitter is None else jitter
        unexplained, kff = (np.asarray(x, float) for x in _unexplained(kernel, inducing, chunk, relative))
        total, prior = total + unexplained.sum(), prior + kff.sum()
        largest = np.maximum(largest, unexplained.max())  # NaN stays NaN
    return TraceError(float(total), float(total / prior), float(largest))


@jax.jit
def _unexplained(
    kernel: PytreeFunction, inducing: AbstractInducing, X: Array, jitter: ArrayLike
) -> tuple[Array, Array]:
    A = solve_lower(cholesky(inducing.Kuu(kernel), jitter), inducing.Kuf(kernel, X))
    kff = kernel(X)
    return jnp.maximum(kff - jnp.sum(A * A, axis=-2), 0.0), kff


def _check_finite(X: np.ndarray) -> None:
    if not np.all(np.isfinite(X)):
        msg = "`X` has entries that are not finite. Drop or impute their rows."
        raise ValueError(msg)


def _check_one(kernel: Callable, rows: Array) -> None:
    shape = jax.eval_shape(kernel, rows).shape
    if len(shape) != 1:
        msg = f"`kernel` must be one kernel, got variances of shape {shape}. Take the kernels one after the other."
        raise ValueError(msg)


def _floating(X: Any) -> Any:
    if isinstance(X, AbstractFunctional):
        return X
    rows = jnp.asarray(X)
    return rows if jnp.issubdtype(rows.dtype, jnp.floating) else rows.astype(jnp.result_type(float))


def _pivoted_cholesky(kernel: Callable, X: np.ndarray, M: int, tolerance: float) -> tuple[np.ndarray, np.ndarray]:
    """Pivots in the order chosen, and tr(K − Q) / tr K after each."""
    _check_finite(X)
    rows = _floating(X)
    _check_one(kernel, rows)
    count, pivots, errors = _pivot(PytreeFunction.of(kernel), rows, M, tolerance)
    return np.asarray(pivots)[: int(count)], np.asarray(errors, float)[: int(count)]


@partial(jax.jit, static_argnames="M")
def _pivot(kernel: PytreeFunction, X: Array, M: int, tolerance: ArrayLike) -> tuple[Array, Array, Array]:
    kff = kernel(X)
    N, dtype = len(kff), kff.dtype
    # The factor's rows, in blocks so that a step reads those that are there and not those to come.
    C = jnp.zeros((-(-M // _BLOCK), _BLOCK, N), dtype)
    # Rounding leaves a variance of a few machine epsilons at rows that are explained.
    negligible = 100.0 * jnp.finfo(dtype).eps * jnp.max(kff)
    total = jnp.sum(kff)

    def is_unfinished(state: tuple) -> Array:
        step, variance, _, _, errors = state
        error = jnp.where(step > 0, errors[step - 1], jnp.inf)
        return (step < M) & (jnp.max(variance) > negligible) & (error > tolerance)

    def choose(state: tuple) -> tuple:
        step, variance, C, pivots, errors = state
        pivot = jnp.argmax(variance)
        column = C[:, :, pivot]

        def add_block(block: Array, explained: Array) -> Array:
            return explained + matmul(column[block], C[block])

        explained = lax.fori_loop(0, step // _BLOCK + 1, add_block, jnp.zeros(N, dtype))
        row = (kernel(X[pivot][None], X)[0] - explained) / jnp.sqrt(variance[pivot])
        # At the pivot itself nothing is left, exactly, so that it is not chosen twice.
        variance = jnp.maximum(variance - row * row, 0.0).at[pivot].set(0.0)
        C = C.at[step // _BLOCK, step % _BLOCK].set(row)
        pivots = pivots.at[step].set(pivot.astype(pivots.dtype))
        return step + 1, variance, C, pivots, errors.at[step].set(jnp.sum(variance) / total)

    start = (jnp.asarray(0), kff, C, jnp.zeros(M, jnp.int32), jnp.zeros(M, dtype))
    count, _, _, pivots, errors = lax.while_loop(is_unfinished, choose, start)
    return count, pivots, errors
