"""The base class of kernels of finite rank."""

from abc import abstractmethod

from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike

from numpyro_sgp.features.finite_rank import whitened_features
from numpyro_sgp.kernels import Kernel
from numpyro_sgp.math.products import matmul

__all__ = ["AbstractFiniteRank", "at"]


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
        return matmul(left, right.mT)


def at(values: Array, index: ArrayLike | None) -> Array:
    """The numbers at `index` on the last axis, or all."""
    return values if index is None else jnp.take(values, jnp.asarray(index), axis=-1)
