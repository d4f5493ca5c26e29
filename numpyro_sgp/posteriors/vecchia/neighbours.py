"""Groups of rows that are near each other, and the rows near each group, found on the host by a tree."""

from collections.abc import Callable
import dataclasses
from functools import partial

import jax
from jax import Array
from jax.core import Tracer
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np
from scipy.spatial import KDTree

__all__ = ["Neighbourhoods", "nearest", "nearest_before", "neighbourhoods"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Neighbourhoods:
    """Groups of rows, and the rows near each: whole numbers in floating point, so that optimizers can hold them.

    Attributes:
        members: rows of each group, (G, b); −1 where there are fewer.
        near: the nearest rows of other groups, (G, K).
        before: the nearest rows of the groups that come before it in a random order, (G, K).
    """

    members: Array
    near: Array
    before: Array

    @property
    def indices(self) -> tuple[Array, Array, Array]:
        """`members`, `near` and `before`, as indices."""
        parts = self.members, self.near, self.before
        members, near, before = (jnp.rint(jax.lax.stop_gradient(part)).astype(int) for part in parts)
        return members, near, before


def nearest(Z: ArrayLike, X: ArrayLike, num: int) -> Array:
    """The nearest rows of Z to each row of X, by Euclidean distance, (N, K); −1 where there are fewer.

    Args:
        Z: (M, D).
        X: (N, D).
        num: K.
    """
    return _on_host(partial(_nearest, num=num), (np.shape(X)[0], num), Z, X)


def nearest_before(X: ArrayLike, num: int, seed: int = 0) -> tuple[Array, Array]:
    """A random order of rows, (N,), and for each row of X the nearest of those that come before it, (N, K).

    The order is one for all inputs of as many rows. Where fewer come before, the rest is −1.

    Args:
        X: (N, D).
        num: K.
        seed: of the order.
    """
    order = np.random.default_rng(seed).permutation(np.shape(X)[0])
    rank = np.argsort(order)

    def find(X: np.ndarray) -> np.ndarray:
        return _nearest_before(X, X, rank, rank, num)

    return jnp.asarray(order), _on_host(find, (np.shape(X)[0], num), X)


def neighbourhoods(X: Array, num: int, size: int) -> Neighbourhoods:
    """Groups of rows by halving along their widest column, and the rows near each.

    Args:
        X: (N, D).
        num: K.
        size: b, the most rows of a group.
    """
    N = X.shape[0]
    G = max(len(_halved_sizes(N, size)), 1)

    def find(X: np.ndarray) -> np.ndarray:
        found = np.full((G, size + 2 * num), -1, np.int32)
        groups = _halved(np.nan_to_num(X), np.arange(N), size)
        of_row, centres = np.zeros(N, int), np.zeros((G, X.shape[1]))
        for number, rows in enumerate(groups):
            found[number, : len(rows)], of_row[rows], centres[number] = rows, number, X[rows].mean(axis=0)
        found[:, size : size + num] = _nearest_of_others(X, centres, of_row, size, num)
        rank = np.random.default_rng(0).permutation(G)
        found[:, size + num :] = _nearest_before(X, centres, rank[of_row], rank, num)
        return found

    found = _on_host(find, (G, size + 2 * num), X).astype(X.dtype)
    return Neighbourhoods(found[:, :size], found[:, size : size + num], found[:, size + num :])


def _on_host(find: Callable[..., np.ndarray], shape: tuple[int, int], *inputs: ArrayLike) -> Array:
    def run(*inputs: ArrayLike) -> np.ndarray:
        return find(*(np.asarray(each) for each in inputs))

    if not any(isinstance(each, Tracer) for each in inputs):
        return jnp.asarray(run(*inputs))
    inputs = tuple(jax.lax.stop_gradient(each) for each in inputs)
    return jax.pure_callback(run, jax.ShapeDtypeStruct(shape, jnp.int32), *inputs, vmap_method="sequential")


def _not_finite(X: np.ndarray) -> np.ndarray:
    return np.flatnonzero(~np.isfinite(X).all(axis=1))


def _nearest(Z: np.ndarray, X: np.ndarray, num: int) -> np.ndarray:
    found, k = np.full((len(X), num), -1, np.int32), min(num, len(Z))
    if not k:
        return found
    # What is not a number is a neighbour of all, so that it is seen in the moments.
    if len(bad := _not_finite(Z)):
        found[:, 0] = bad[0]
        return found
    rows = np.isfinite(X).all(axis=1)
    found[rows, :k] = np.reshape(KDTree(Z).query(X[rows], k)[1], (-1, k))
    return found


def _first(near: np.ndarray, wanted: np.ndarray, num: int) -> np.ndarray:
    """The first of some rows that are wanted, in their order, −1 where there are fewer."""
    index = np.argsort(~wanted, axis=1, kind="stable")[:, :num]
    found = np.where(np.take_along_axis(wanted, index, 1), np.take_along_axis(near, index, 1), -1)
    return np.pad(found, [(0, 0), (0, num - found.shape[1])], constant_values=-1)


def _nearest_of_others(X: np.ndarray, centres: np.ndarray, of_row: np.ndarray, size: int, num: int) -> np.ndarray:
    if len(bad := _not_finite(X)):
        return np.where(np.arange(num) == 0, bad[0], -1) * np.ones((len(centres), 1), np.int32)
    k = min(num + size, len(X))
    near = np.reshape(KDTree(X).query(centres, k)[1], (-1, k))
    return _first(near, of_row[near] != np.arange(len(centres))[:, None], num)


def _nearest_before(
    X: np.ndarray, centres: np.ndarray, rank_of_row: np.ndarray, rank: np.ndarray, num: int
) -> np.ndarray:
    """For each centre the nearest rows of a lower rank."""
    found = np.full((len(centres), num), -1, np.int32)
    if len(bad := _not_finite(X)):
        found[:, 0] = bad[0]
        return found
    start = 1
    while start < len(centres):
        # Of the nearest rows of the first ranks half or more are below a rank in their second half.
        stop = min(2 * start, len(centres))
        rows = np.flatnonzero(rank_of_row < stop)
        left = np.flatnonzero((rank >= start) & (rank < stop))
        tree, k = KDTree(X[rows]), min(3 * num, len(rows))
        while len(left):
            near = rows[np.reshape(tree.query(centres[left], k)[1], (-1, k))]
            before = rank_of_row[near] < rank[left][:, None]
            done = (before.sum(axis=1) >= num) | (k == len(rows))
            found[left[done]] = _first(near[done], before[done], num)
            left, k = left[~done], min(2 * k, len(rows))
        start = stop
    return found


def _halved_sizes(N: int, size: int) -> list[int]:
    return [N] if size >= N else [*_halved_sizes(N // 2, size), *_halved_sizes(N - N // 2, size)]


def _halved(X: np.ndarray, rows: np.ndarray, size: int) -> list[np.ndarray]:
    if len(rows) <= size:
        return [rows]
    column, half = np.argmax(np.ptp(X[rows], axis=0)), len(rows) // 2
    rows = rows[np.argpartition(X[rows, column], half)]
    return [*_halved(X, rows[:half], size), *_halved(X, rows[half:], size)]
