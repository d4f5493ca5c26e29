"""Nearest rows, found on the host by a tree."""

import jax
from jax import Array
from jax.core import Tracer
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np
from scipy.spatial import KDTree

__all__ = ["nearest", "nearest_before"]


def nearest(Z: ArrayLike, X: ArrayLike, num: int) -> Array:
    """The nearest rows of Z to each row of X, by Euclidean distance, (N, K); −1 where there are fewer.

    Args:
        Z: (M, D).
        X: (N, D).
        num: K.
    """
    return _on_host(_nearest, np.shape(X)[0], num, Z, X)


def nearest_before(X: ArrayLike, num: int, seed: int = 0) -> tuple[Array, Array]:
    """A random order of rows, (N,), and for each row of X the nearest of those that come before it, (N, K).

    The order is one for all inputs of as many rows. Where fewer come before, the rest is −1.

    Args:
        X: (N, D).
        num: K.
        seed: of the order.
    """
    order = np.random.default_rng(seed).permutation(np.shape(X)[0])
    found = _on_host(lambda X, num: _nearest_before(X, order, num), np.shape(X)[0], num, X)
    return jnp.asarray(order), found


def _on_host(find, num_rows: int, num: int, *inputs: ArrayLike) -> Array:
    if not any(isinstance(each, Tracer) for each in inputs):
        return jnp.asarray(find(*(np.asarray(each) for each in inputs), num))
    shape = jax.ShapeDtypeStruct((num_rows, num), jnp.int32)
    inputs = tuple(jax.lax.stop_gradient(each) for each in inputs)
    return jax.pure_callback(
        lambda *inputs: find(*(np.asarray(each) for each in inputs), num), shape, *inputs, vmap_method="sequential"
    )


def _not_finite(X: np.ndarray) -> np.ndarray:
    return np.flatnonzero(~np.isfinite(X).all(axis=1))


def _nearest(Z: np.ndarray, X: np.ndarray, num: int) -> np.ndarray:
    found, k = np.full((len(X), num), -1, np.int32), min(num, len(Z))
    if not k:
        return found
    # What is not a number is a neighbour of all, and has one, so that it is seen in the moments.
    if len(bad := _not_finite(Z)):
        found[:, 0] = bad[0]
        return found
    found[_not_finite(X), 0] = 0
    rows = np.isfinite(X).all(axis=1)
    found[rows, :k] = np.reshape(KDTree(Z).query(X[rows], k)[1], (-1, k))
    return found


def _nearest_before(X: np.ndarray, order: np.ndarray, num: int) -> np.ndarray:
    found = np.full((len(X), num), -1, np.int32)
    if len(bad := _not_finite(X)):
        found[:, 0] = bad[0]
        return found
    X = X[order]
    for place in range(min(num + 1, len(X))):  # all that come before
        found[place, :place] = np.arange(place)
    start = num + 1
    while start < len(X):
        # Of the nearest in the first rows, twice as many, half or more come before one in their second half.
        stop = min(2 * start, len(X))
        tree, left, k = KDTree(X[:stop]), np.arange(start, stop), min(3 * num, stop)
        while len(left):
            near = np.reshape(tree.query(X[left], k)[1], (len(left), k))
            before = near < left[:, None]
            enough = before.sum(axis=1) >= num
            first = np.argsort(~before[enough], axis=1, kind="stable")[:, :num]
            found[left[enough]] = np.take_along_axis(near[enough], first, axis=1)
            left, k = left[~enough], min(2 * k, stop)
        start = stop
    rows = np.empty_like(found)
    rows[order] = np.where(found < 0, -1, order[found])
    return rows
