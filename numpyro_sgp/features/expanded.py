"""Finite-rank forms of kernels that have one: linear functions, polynomials, their sums and products."""

from collections.abc import Callable
import dataclasses
from typing import Any, final

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike

from numpyro_sgp.features.abstract import AbstractFiniteRank, at
from numpyro_sgp.features.decomposition import Factor, split, term_features, terms
from numpyro_sgp.features.finite_rank import FiniteRank
from numpyro_sgp.kernels.arrays import as_inputs

__all__ = ["Expanded", "as_finite_rank", "is_finite_rank"]


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Expanded(AbstractFiniteRank):
    """The features of a sum or product of kernels of finite rank, with weights of precision one.

    Args:
        kernel: sums and products of `Linear`, `Polynomial`, `Constant` and kernels of this module, `Warp` and `Select`
            of them.

    Raises:
        TypeError: a kernel with a part that has no features (when they are evaluated).
    """

    kernel: Callable

    @property
    def rank(self) -> int:
        """The number of features, r."""
        msg = "The rank of this kernel depends on the inputs: it is the last axis of `features(X)`."
        raise ValueError(msg)

    def features(self, X: ArrayLike, index: ArrayLike | None = None) -> Array:
        X = as_inputs(X, "X")
        columns = [term_features(_finite(term), X) for term in terms(self.kernel)]
        batch = jnp.broadcast_shapes(*(column.shape[:-1] for column in columns))
        columns = [jnp.broadcast_to(column, (*batch, column.shape[-1])) for column in columns]
        return at(jnp.concatenate(columns, axis=-1), index)

    def prior_precision(self, index: ArrayLike | None = None) -> Array:
        return jnp.ones(1 if index is None else len(jnp.asarray(index)))


def _finite(term: tuple[Factor, ...]) -> list[Factor]:
    spectral, finite = split(term)
    if spectral:
        kernel = type(spectral[0].kernel).__name__
        msg = (
            f"{kernel} has no features: its rank is infinite. Approximate it, by `RandomFourier(kernel, rank, "
            "rng_key)`, `HilbertSpace(kernel, num_basis, bounds)` or `InducingBasis(kernel, Z)` of "
            "`numpyro_sgp.features`, or use a guide with inducing inputs."
        )
        raise TypeError(msg)
    return finite


def is_finite_rank(kernel: Callable) -> bool:
    """Whether a kernel has features."""
    try:
        as_finite_rank(kernel)
    except TypeError:
        return False
    return True


def as_finite_rank(kernel: Callable) -> Any:
    """The kernel itself where it shows features, else its expansion into features.

    Args:
        kernel: a kernel of finite rank, or sums and products of such kernels.

    Raises:
        TypeError: a kernel without features.
    """
    if isinstance(kernel, FiniteRank):
        return kernel
    for term in terms(kernel):
        _finite(term)
    return Expanded(kernel)
