"""Posteriors whose covariance is that of the weights of a table: the prior of the features, or relevance vectors."""

from abc import abstractmethod
import dataclasses
from typing import Any, final

import jax
from jax import Array
from jax.custom_derivatives import SymbolicZero
import jax.numpy as jnp
from jax.typing import ArrayLike

from numpyro_sgp.distributions.gaussian_process import GaussianProcess
from numpyro_sgp.distributions.sparse_posterior import SparsePosterior
from numpyro_sgp.posteriors.family import at_prior
from numpyro_sgp.posteriors.mean_basis import TableDraw
from numpyro_sgp.posteriors.moments import Moments
from numpyro_sgp.posteriors.parameters import FittedParameters, Parameters
from numpyro_sgp.posteriors.process import TableProcess
from numpyro_sgp.posteriors.quadruply_stochastic.abstract import AbstractQuadruplyStochastic, ControlForm, Part
from numpyro_sgp.posteriors.quadruply_stochastic.formulas import (
    Inclusion,
    bounding_scale,
    chevron_divergence,
    chevron_variance,
    mean_divergence,
    optimal_diagonal,
    relevance_diagonal,
    relevance_divergence,
)
from numpyro_sgp.posteriors.quadruply_stochastic.table_sums import Chevron, prior_diagonal, sums_of_squares
from numpyro_sgp.posteriors.quadruply_stochastic.weight_table import (
    Weights,
    WeightTable,
    limit_of,
    numbers_of,
    with_numbers,
)

__all__ = ["AbstractWeightCovariance", "RelevanceVectorMachine", "WithChevronCovariance"]

# Rows that tell how large the columns of features of a relevance vector machine are.
_START_ROWS = 1000


class AbstractWeightCovariance(AbstractQuadruplyStochastic):
    """q(w) = N(μ, CCᵀ), C with k dense columns and a diagonal; a subclass says what the weights' prior is."""

    dense_columns: int

    @abstractmethod
    def optimal_diagonal(self, kernel: Any, table: WeightTable, squares: Array, noise: Array) -> Array:
        """The best diagonal of C below the dense columns with a Gaussian likelihood, (m,).

        Args:
            kernel: the kernel of finite rank.
            table: the weights.
            squares: φ_kᵀφ_k over all N data, (m,).
            noise: σ², in units of y².
        """

    def process(self, fitted: FittedParameters, q: SparsePosterior) -> TableProcess:
        prior, table = q.prior, fitted("basis")
        draw = TableDraw(prior.kernel, table, width=prior.X.shape[-1], whiten=self.whitens)
        return TableProcess(limit_of(prior.kernel), prior.mean_function, draw, numbers_of(prior.kernel, table.size))

    def _part(self, param: Parameters, prior: GaussianProcess, kernel: Any) -> Part:
        scale = param("log_scale", jnp.zeros((), prior.X.dtype))
        return Part(at_prior(limit_of(kernel), prior.X), log_scale=scale)

    def _estimated_variance(
        self, part: Part, Phi: Array, squares: Array, now: Weights, sample: Inclusion
    ) -> tuple[Array, Array]:
        variance = chevron_variance(squares, Phi, now.d, sample)
        # With all weights the variance is exact; elsewhere c is the prior's deviation times a factor.
        if sample.single == 1.0:
            return variance, jnp.sqrt(variance)
        return variance, bounding_scale(variance, jnp.exp(part.log_scale) * jnp.sqrt(part.moments.variance))

    def _exact(self, kernel: Any, part: Part, table: WeightTable, f: Array, variance: Array) -> Moments:
        variance = jnp.sum(f[:, 1:] ** 2, axis=-1) + variance
        chevron = Chevron(kernel, table, self.whitens)
        return part.moments._replace(mean=f[:, 0], variance=variance, kernel=chevron)


@final
@dataclasses.dataclass(frozen=True)
class WithChevronCovariance(AbstractWeightCovariance):
    """The prior of the weights is that of the kernel's features. The arguments are those of `QuadruplyStochastic`."""

    basis_batch: int
    dense_columns: int
    control: int | ArrayLike | None
    control_form: ControlForm
    jackknife: bool
    log_concave: tuple[str, ...]

    def optimal_diagonal(self, kernel: Any, table: WeightTable, squares: Array, noise: Array) -> Array:
        precision = prior_diagonal(kernel, table) if self._correlated(kernel) else jnp.ones_like(squares)
        return optimal_diagonal(squares, precision, noise)

    def _checked(self, kernel: Any, size: int) -> Any:
        if not self._correlated(kernel):
            return kernel
        return with_numbers(kernel, [_fixed(number) for number in numbers_of(kernel, size)], size)

    @staticmethod
    def _divergence_of_weights(weights: Weights, precision: Array | None, sample: Inclusion) -> Array:
        of_mean = mean_divergence(weights.mean, precision, sample)
        return of_mean + chevron_divergence(weights.U, weights.d, weights.log_diagonal, precision, sample)


@final
@dataclasses.dataclass(frozen=True)
class RelevanceVectorMachine(AbstractWeightCovariance):
    """Each weight has a prior precision of its own, the one of the largest bound, s_k = 1/E w_k².

    The arguments are those of `QuadruplyStochastic`.
    """

    basis_batch: int
    dense_columns: int
    control: int | ArrayLike | None
    control_form: ControlForm
    jackknife: bool
    log_concave: tuple[str, ...]
    whitens = False

    def optimal_diagonal(self, kernel: Any, table: WeightTable, squares: Array, noise: Array) -> Array:
        del kernel
        rest = jnp.sum(table.values[:, : 1 + self.dense_columns] ** 2, axis=1)
        return relevance_diagonal(squares, rest, noise)

    @staticmethod
    def _divergence_of_weights(weights: Weights, precision: Array | None, sample: Inclusion) -> Array:
        del precision
        return relevance_divergence(weights.second_moment, weights.log_diagonal, sample)

    def _started(self, kernel: Any, X: Array, table: WeightTable) -> WeightTable:
        # With means of zero all variances have the same divergence. They start at those that the data would leave with
        # noise of a tenth of the prior's deviation.
        rows = X[:_START_ROWS]
        squares = sums_of_squares(kernel, rows, table, self.whitens) * (len(X) / len(rows))
        noise = 0.01 * jnp.mean(limit_of(kernel)(rows))
        log_diagonal = 0.5 * jnp.log(noise / jnp.maximum(squares, 1e-6 * jnp.mean(squares)))
        return dataclasses.replace(table, values=table.values.at[:, -1].set(log_diagonal))


@jax.custom_jvp
def _fixed(number: Array) -> Array:
    """A hyperparameter that nothing may train."""
    return number


def _refuse(primals: tuple[Array], tangents: tuple[Any]) -> tuple[Array, Any]:
    if not isinstance(tangents[0], SymbolicZero):
        msg = (
            "The loss was differentiated with respect to a hyperparameter of the kernel. With a chevron covariance and "
            "weights of a dense prior precision S, the loss leaves out −½ log|S| of an m × m matrix, so its "
            "hyperparameters have to be fixed numbers: train them with another guide, on some of the rows. Or leave "
            '`covariance="inducing"`.'
        )
        raise ValueError(msg)  # noqa: TRY004 - a hyperparameter of the right type, which may not be trained
    return primals[0], tangents[0]


_fixed.defjvp(_refuse, symbolic_zeros=True)
