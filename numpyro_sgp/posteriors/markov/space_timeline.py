"""A function of time and place at the rows of its sites and those that are asked for, and what its smoother says."""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike

from numpyro_sgp._internal.eager import as_one_program
from numpyro_sgp.inducing import InducingPoints
from numpyro_sgp.posteriors.markov.formulas import Smoothed
from numpyro_sgp.posteriors.markov.separable import Separated
from numpyro_sgp.posteriors.markov.space_formulas import (
    SpaceTimeTerm,
    prior_covariance,
    prior_draws,
    prior_variance,
    smoothed_in_blocks,
)
from numpyro_sgp.posteriors.markov.timeline import AbstractTimeline, AbstractTimelineCovariance, in_ascending_order
from numpyro_sgp.posteriors.moments import Parts, draw_given_inducing, project, variance_given

__all__ = ["SpaceTimeCovariance", "SpaceTimeline"]

# How many rows are smoothed at once for columns of a covariance, which share the covariance of the state.
_COLUMNS = 32


@as_one_program
def _smoothed(terms: tuple[SpaceTimeTerm, ...], interval: Array, lambda1: Array, precision: Array) -> Smoothed:
    return smoothed_in_blocks(terms, interval, lambda1, precision)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SpaceTimeline(AbstractTimeline):
    """Rows in ascending order of time.

    Attributes:
        terms: the products of the kernel, at the rows.
        interval: from the row before, (N,).
        order: where each of them is among the rows as they were given, (N,).
        rows: where in ascending order those are that are asked for, (N_rows,).
        rest: what the places leave of the prior variances of these, (..., N_rows).
        kernel: of the process.
        X: the rows that are asked for, (N_rows, D).
        jitter: of covariance matrices, relative.
    """

    terms: tuple[SpaceTimeTerm, ...]
    interval: Array
    order: Array
    rows: Array
    rest: Array
    kernel: Any
    X: Array
    jitter: ArrayLike

    @classmethod
    def of(
        cls, kernel: Callable, products: Separated, places: Array, X: Array, first: int, jitter: ArrayLike
    ) -> "SpaceTimeline":
        """From inputs.

        Args:
            kernel: of the process.
            products: the same by its products.
            places: Z, (M, D − 1).
            X: inputs, (N, D).
            first: the number of the first row that is asked for, as are those after it.
            jitter: of the covariances of the places, and of rows that are drawn, relative.
        """
        order, interval, where = in_ascending_order(X[:, products.column])
        inducing, asked = InducingPoints(products.with_time(jnp.asarray(places, X.dtype))), X[first:]
        terms, rest = [], jnp.zeros(len(asked), X.dtype)
        for time, space in products.terms:
            if space is None:
                terms.append(SpaceTimeTerm(time, jnp.ones((1, len(X)), X.dtype)))
                continue
            found = project(inducing, space, X, jitter)
            left = variance_given(found.kff, found.A)[..., first:]
            rest = rest + prior_variance(time, X.dtype)[..., None] * left
            terms.append(SpaceTimeTerm(time, found.A[..., order]))
        return cls(tuple(terms), interval, order, where[first:], rest, kernel, asked, jitter)

    @property
    def unexplained(self) -> Array:
        return self.rest

    def smoothed(self, lambda1: Array, precision: Array) -> Smoothed:
        return _smoothed(self.terms, self.interval, lambda1, precision)

    def prior_draws(self, rng_key: Array, batch: tuple[int, ...]) -> Array:
        return prior_draws(self.terms, self.interval, rng_key, batch)

    def covariance(self, lambda1: Array, precision: Array) -> "SpaceTimeCovariance":
        return SpaceTimeCovariance(self, lambda1, precision)

    def prior_covariance(self) -> Array:
        """Of the projections of the rows that are asked for, (..., N_rows, N_rows)."""
        terms = [dataclasses.replace(term, a=term.a[..., self.rows]) for term in self.terms]
        return prior_covariance(terms, jnp.cumsum(self.interval)[self.rows])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SpaceTimeCovariance(AbstractTimelineCovariance):
    """The covariance between rows: that of their projections, which the sites see, and the prior's of the rest."""

    line: SpaceTimeline

    @property
    def sees_all(self) -> bool:
        return False

    def given_inducing(self, Kff: Array) -> Array:
        return Kff - self.line.prior_covariance()

    def of_inducing(self) -> Array:
        return self.seen(at_once=min(_COLUMNS, max(len(self.line.rows), 1)))

    def variance_of_inducing(self) -> Array:
        return self.line.smoothed(self.lambda1, self.precision).variance[..., self.line.rows]

    def unexplained(self, kff: Array) -> Array:
        del kff
        return self.line.rest

    def draw_deviations(self, rng_key: Array, shape: tuple[int, ...]) -> Array:
        parts = self.draw_parts(rng_key, shape)
        return parts.explained + parts.rest

    def draw_parts(self, rng_key: Array, shape: tuple[int, ...], *, of_inducing: Array | None = None) -> Parts:
        del of_inducing  # the sites are those of the rows
        of_seen, of_rest = jax.random.split(rng_key)
        line = self.line
        rest = draw_given_inducing(self, line.kernel, line.X, line.jitter, of_rest, shape)
        return Parts(self.draw_seen(of_seen, shape), rest)
