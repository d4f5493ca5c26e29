"""Inducing inputs that move or change in number, and what becomes of sites at them."""

import dataclasses
from typing import Any

from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike

from numpyro_sgp.inducing import InducingPoints
from numpyro_sgp.kernels.functional import AbstractFunctional
from numpyro_sgp.math.linalg import cholesky, solve_lower, solve_lower_transposed, with_jitter
from numpyro_sgp.math.products import matmul
from numpyro_sgp.posteriors.sites import EffectSites, TiedSites

__all__ = ["can_move", "projected", "projection", "rung"]


def can_move(inducing: Any, X: Any, variance: Any) -> bool:
    """Whether inducing inputs can be chosen among rows of X, given the shape of the prior variance there."""
    points = isinstance(inducing, InducingPoints) and inducing.Z.ndim == 2
    return points and not isinstance(X, AbstractFunctional) and len(variance.shape) == 1


def projected(sites: TiedSites, B: Array) -> TiedSites:
    """Sites at u = B u′."""
    if isinstance(sites, EffectSites):
        both = jnp.concatenate([sites.Lambda2[:, :1], matmul(sites.Lambda2[:, 1:], B)], axis=-1)
        return dataclasses.replace(sites, Lambda2=both, past=None)
    lambda1 = jnp.sum(sites.lambda1[..., None] * B, axis=-2)
    Lambda2 = matmul(B.mT, matmul(sites.Lambda2, B))
    return dataclasses.replace(sites, lambda1=lambda1, Lambda2=Lambda2, past=None)


def projection(old: InducingPoints, new: InducingPoints, kernel: Any, jitter: ArrayLike) -> Array:
    """B with E[u | u′] = B u′, (..., M, M′); rows of an identity for inducing inputs that stay."""
    K = with_jitter(new.Kuu(kernel), jitter)
    same = jnp.all(old.Z[:, None, :] == new.Z, axis=-1)
    L = cholesky(K)
    B = solve_lower_transposed(L, solve_lower(L, new.Kuv(kernel, old)))
    return jnp.where(jnp.any(same, axis=-1)[:, None], same.astype(K.dtype), B.mT)


def rung(M: int, needed: int, most: int, available: int) -> int:
    """The number of inducing inputs: on a ladder, since each number compiles anew."""
    if needed > M:
        M = max(needed, M + M // 2)
    elif needed < M // 2:
        M = max(needed, M // 2)
    return min(M, most, available)
