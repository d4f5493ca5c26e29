"""Kernels of finite rank: f(x) = φ(x)ᵀw with a Gaussian prior on the weights w, so k(x, z) = φ(x)ᵀS⁻¹φ(z)."""

from typing import Any, Protocol, runtime_checkable

from jax import Array
import jax.numpy as jnp

from numpyro_sgp.kernels.functional import AbstractFunctional
from numpyro_sgp.math.linalg import cholesky, solve_lower

__all__ = [
    "FiniteRank",
    "features_of",
    "has_correlated_weights",
    "precision_matrix",
    "weight_precision",
    "whiten_features",
    "whitened_features",
]


@runtime_checkable
class FiniteRank(Protocol):
    """A kernel k(x, z) = φ(x)ᵀS⁻¹φ(z) that shows its features φ and the precision S of their weights.

    Those of `numpyro_sgp.features` also have `rank`, the number of features r. A kernel whose weights are correlated
    sets `correlated_weights = True`, and then S is a matrix.
    """

    def features(self, X: Any, index: Any = None) -> Array:
        """φ(X), (..., N, r), or the features at `index` only.

        Args:
            X: inputs, (..., N, D).
            index: integers, (K,), or None for all.
        """
        ...

    def prior_precision(self, index: Any = None) -> Array:
        """S of the weights (at `index`): its diagonal, (..., r) or (..., 1), or (..., r, r) for correlated weights."""
        ...


def has_correlated_weights(kernel: FiniteRank) -> bool:
    """Whether the prior precision is a matrix and not its diagonal."""
    return bool(getattr(kernel, "correlated_weights", False))


def weight_precision(kernel: FiniteRank, Phi: Array) -> Array:
    """The precision of independent weights, one number for each of the features Phi, (..., r), in their dtype."""
    S = jnp.asarray(kernel.prior_precision())
    return jnp.broadcast_to(S, (*S.shape[:-1], Phi.shape[-1])).astype(Phi.dtype)


def precision_matrix(kernel: FiniteRank, rank: int) -> Array:
    """S as a matrix, (..., r, r)."""
    if has_correlated_weights(kernel):
        return kernel.prior_precision()
    S = jnp.asarray(kernel.prior_precision())
    return jnp.broadcast_to(S, (*S.shape[:-1], rank))[..., :, None] * jnp.eye(rank, dtype=S.dtype)


def features_of(kernel: FiniteRank, X: Any, index: Any = None) -> Array:
    """The features at inputs, or functionals of them, (..., N, r).

    Args:
        kernel: a kernel of finite rank.
        X: inputs, (..., N, D), or functionals with N rows.
        index: of the features, or None for all.
    """
    if not isinstance(X, AbstractFunctional):
        return kernel.features(X, index)
    # With the rows last, as in `apply`.
    rows_last = X.apply(lambda P: kernel.features(P, index).mT)
    return rows_last.mT


def whitened_features(kernel: FiniteRank, X: Array) -> Array:
    """Features of independent weights with variance one: L_S⁻¹φ(x) for each row, S = L_S L_Sᵀ, (..., N, r)."""
    return whiten_features(kernel, features_of(kernel, X))


def whiten_features(kernel: FiniteRank, Phi: Array) -> Array:
    """The features Phi of a kernel, (..., N, r), as those of independent weights with variance one."""
    if not has_correlated_weights(kernel):
        return Phi / jnp.sqrt(weight_precision(kernel, Phi))[..., None, :]
    A = solve_lower(cholesky(kernel.prior_precision()), Phi.mT)
    return A.mT
