"""A process at the times of its sites and of the rows that are asked for, and what its smoother says of these."""

from abc import abstractmethod
import dataclasses
from functools import partial
import math

import jax
from jax import Array
import jax.numpy as jnp

from numpyro_sgp._internal.eager import as_one_program
from numpyro_sgp.math.linalg import diagonal
from numpyro_sgp.math.products import matmul
from numpyro_sgp.posteriors.joint.by_rows import AbstractRows, GivenSeveral
from numpyro_sgp.posteriors.markov.formulas import Smoothed, smoothed, state_draws
from numpyro_sgp.posteriors.markov.state_space import AbstractStateSpace
from numpyro_sgp.posteriors.moments import AbstractDenseCovariance, Moments

__all__ = ["AbstractTimeline", "AbstractTimelineCovariance", "MarkovCovariance", "Timeline", "in_ascending_order"]


def in_ascending_order(times: Array) -> tuple[Array, Array, Array]:
    """The order of times, the interval from the one before for each in it, and where in it each time is, (N,)."""
    order = jnp.argsort(times)
    return order, jnp.diff(times[order], prepend=times[order[:1]]), jnp.argsort(order)


class AbstractTimeline(AbstractRows):
    """Rows in the order of time."""

    @abstractmethod
    def smoothed(self, lambda1: Array, precision: Array) -> Smoothed:
        """The smoother at all rows, in ascending order of time."""

    @abstractmethod
    def prior_draws(self, rng_key: Array, batch: tuple[int, ...]) -> Array:
        """Draws of the prior of what the sites see of f, at all rows in ascending order of time, (..., N)."""

    @abstractmethod
    def covariance(self, lambda1: Array, precision: Array) -> "AbstractTimelineCovariance":
        """The covariance between the rows that are asked for."""

    def given_several(self, lambda1: Array, precision: Array) -> GivenSeveral:
        found = self.smoothed(lambda1, precision)
        products = matmul(lambda1, found.mean.T)
        log_z = found.log_normaliser[0] - 0.5 * products[0, 0]
        return GivenSeveral(found.mean, found.variance[0], products, log_z)


@dataclasses.dataclass(frozen=True)
class AbstractTimelineCovariance(AbstractDenseCovariance):
    """The covariance between rows, by the smoother; a pytree.

    Attributes:
        line: the function at its rows.
        lambda1: (..., N).
        precision: (..., N).
    """

    line: AbstractTimeline
    lambda1: Array
    precision: Array

    def moments(self) -> Moments:
        """Moments at the rows, with the divergence."""
        q, rows, rest = self.line.smoothed(self.lambda1, self.precision), self.line.rows, self.line.unexplained
        variance = q.variance[..., rows]
        kl = q.divergence(self.lambda1, self.precision)
        return Moments(q.mean[..., rows], variance if rest is None else variance + rest, kl, self)

    def seen(self, *, at_once: int | None = None) -> Array:
        """Of what the sites see of f, (..., N, N), one smoothing for each row: the mean moves by a column with each λ₁.

        Args:
            at_once: how many columns are smoothed together; None for one after the other.
        """
        return _columns(self, at_once)

    def draw_seen(self, rng_key: Array, shape: tuple[int, ...]) -> Array:
        """Joint draws of what the sites see of f, about its mean: draws of the prior, corrected by the smoother.

        (Matheron's rule.) They are NaN where a precision is negative.
        """
        axes = self.lambda1.ndim
        many, batch = shape[: len(shape) - axes], shape[len(shape) - axes : -1]
        return _draws(self, jax.random.split(rng_key, math.prod(many)), batch).reshape(shape)


@partial(as_one_program, static_argnums=1)
def _columns(covariance: AbstractTimelineCovariance, at_once: int | None) -> Array:
    zeros, line = jnp.zeros_like(covariance.lambda1), covariance.line

    def column(row: Array) -> Array:
        return line.smoothed(zeros.at[..., row].set(1.0), covariance.precision).mean[..., line.rows]

    return jnp.moveaxis(jax.lax.map(column, line.rows, batch_size=at_once), 0, -1)


@partial(as_one_program, static_argnums=2)
def _draws(covariance: AbstractTimelineCovariance, rng_keys: Array, batch: tuple[int, ...]) -> Array:
    line, precision = covariance.line, covariance.precision

    def draw(rng_key: Array) -> Array:
        of_prior, of_sites = jax.random.split(rng_key)
        prior = line.prior_draws(of_prior, batch)
        noise = jax.random.normal(of_sites, prior.shape, prior.dtype)
        residual = -precision * prior - jnp.sqrt(precision) * noise
        return (prior + line.smoothed(residual, precision).mean)[..., line.rows]

    return jax.lax.map(draw, rng_keys)


@partial(as_one_program, static_argnums=4)
def _smoothed(model: AbstractStateSpace, interval: Array, lambda1: Array, precision: Array, parallel: bool) -> Smoothed:
    return smoothed(model, interval, lambda1, precision, parallel=parallel)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Timeline(AbstractTimeline):
    """A process at times in ascending order.

    Attributes:
        model: the process.
        interval: from the time before, (N,).
        order: where each of them is among the times as they were given, (N,).
        rows: where in ascending order the rows are that are asked for, (N_rows,).
        parallel: whether scans are associative.
    """

    model: AbstractStateSpace
    interval: Array
    order: Array
    rows: Array
    parallel: bool = dataclasses.field(metadata={"static": True})

    def smoothed(self, lambda1: Array, precision: Array) -> Smoothed:
        return _smoothed(self.model, self.interval, lambda1, precision, self.parallel)

    def prior_draws(self, rng_key: Array, batch: tuple[int, ...]) -> Array:
        states = state_draws(self.model, self.interval, rng_key, batch)
        return jnp.sum(states * jnp.asarray(self.model.h, states.dtype), axis=-1)

    def covariance(self, lambda1: Array, precision: Array) -> "MarkovCovariance":
        return MarkovCovariance(self, lambda1, precision)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MarkovCovariance(AbstractTimelineCovariance):
    """The covariance between rows of a process with sites at times in ascending order."""

    line: Timeline

    def given_inducing(self, Kff: Array) -> Array:
        # What was added to the prior variances.
        h, model = jnp.asarray(self.line.model.h, Kff.dtype), self.line.model
        own = jnp.sum(h[:, None] * model.covariance * h, axis=(-2, -1))
        extra = diagonal(Kff) - own[..., None]
        return self.seen() + extra[..., None] * jnp.eye(Kff.shape[-1], dtype=Kff.dtype)

    def draw_deviations(self, rng_key: Array, shape: tuple[int, ...]) -> Array:
        return self.draw_seen(rng_key, shape)
