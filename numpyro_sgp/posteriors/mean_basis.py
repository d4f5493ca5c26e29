"""Bases that a posterior's mean, or a draw from it, has beside its inducing variables, evaluated at any inputs."""

from abc import ABC, abstractmethod
from collections.abc import Callable
import dataclasses
from typing import Any

import jax
from jax import Array

from numpyro_sgp.inducing import AbstractInducing, check_new_inputs
from numpyro_sgp.posteriors.decoupled.formulas import mean_at
from numpyro_sgp.posteriors.quadruply_stochastic.table_sums import streamed, streamed_draw
from numpyro_sgp.posteriors.quadruply_stochastic.weight_table import WeightTable, with_numbers

__all__ = ["AbstractMeanBasis", "InducingMean", "TableDraw", "TableMean"]


class AbstractMeanBasis(ABC):
    """What is the same for all draws of the hyperparameters; what each of them changes are its weights."""

    @abstractmethod
    def mean_at(self, kernel: Callable, X: Array, weights: Any) -> Array:
        """The function at inputs (N, D), (..., N).

        Args:
            kernel: the kernel of the covariance.
            X: inputs, (N, D).
            weights: what belongs to one draw.
        """


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class InducingMean(AbstractMeanBasis):
    """k_xγ b, with the weights b, (..., M_γ)."""

    gamma: AbstractInducing

    def mean_at(self, kernel: Callable, X: Array, weights: Array) -> Array:
        return mean_at(kernel, X, self.gamma, weights)


@dataclasses.dataclass(frozen=True)
class _OfTable(AbstractMeanBasis):
    """Weights in a table, of the features of a kernel of finite rank.

    Attributes:
        finite: that kernel, whose own numbers are not read.
        table: the table.
        width: of the inputs.
        whiten: whether features are those of weights of prior precision one.
    """

    finite: Any
    table: WeightTable
    width: int = dataclasses.field(metadata={"static": True})
    whiten: bool = dataclasses.field(metadata={"static": True})

    def kernel_at(self, X: Array, numbers: list[Array]) -> Any:
        """The kernel of finite rank with these numbers, for inputs of the right width."""
        check_new_inputs(self.width, X)
        return with_numbers(self.finite, numbers, self.table.size)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TableMean(_OfTable):
    """φ(x)ᵀμ with the means of a table; the weights are the numbers of the kernel of finite rank."""

    def mean_at(self, kernel: Callable, X: Array, weights: list[Array]) -> Array:
        del kernel
        return streamed(self.kernel_at(X, weights), X, self.table, self.whiten)[0][:, 0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TableDraw(_OfTable):
    """φ(x)ᵀw with w drawn from the chevron covariance of a table: the weights are the kernel's numbers and a key."""

    def mean_at(self, kernel: Callable, X: Array, weights: tuple[list[Array], Array]) -> Array:
        del kernel
        numbers, rng_key = weights
        return streamed_draw(self.kernel_at(X, numbers), X, self.table, rng_key, self.whiten)
