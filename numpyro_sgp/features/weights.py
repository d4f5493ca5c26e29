"""The weights of a kernel of finite rank as inducing variables."""

from collections.abc import Callable
import dataclasses

import jax
from jax import Array

from numpyro_sgp.features.expanded import as_finite_rank
from numpyro_sgp.features.finite_rank import features_of, precision_matrix
from numpyro_sgp.inducing import AbstractInducing

__all__ = ["WeightVariables"]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class WeightVariables(AbstractInducing):
    """u = S w: the weights of a kernel of finite rank as inducing variables, with Kuu = S and Kuf = φ(X)ᵀ.

    Args:
        num: r, the rank.
        columns: D, of the inputs.
    """

    num: int
    columns: int

    @property
    def num_inducing(self) -> int:
        return self.num

    @property
    def width(self) -> int:
        return self.columns

    def Kuu(self, kernel: Callable) -> Array:
        return precision_matrix(as_finite_rank(kernel), self.num)

    def Kuf(self, kernel: Callable, X: Array) -> Array:
        return features_of(as_finite_rank(kernel), X).mT

    def Kuv(self, kernel: Callable, other: AbstractInducing) -> Array:
        assert isinstance(other, WeightVariables)
        return self.Kuu(kernel)
