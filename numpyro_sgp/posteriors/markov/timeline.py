"""A process at the times of its sites and of the rows that are asked for, and what its smoother says of these."""

from abc import abstractmethod
import dataclasses
import math

import jax
from jax import Array
import jax.numpy as jnp

from numpyro_sgp.math.linalg import diagonal
from numpyro_sgp.math.products import matmul
from numpyro_sgp.posteriors.joint.by_rows import AbstractRows, GivenSeveral
from numpyro_sgp.posteriors.markov.formulas import Smoothed, smoothed, smoothing_draws
from numpyro_sgp.posteriors.markov.state_space import AbstractStateSpace
from numpyro_sgp.posteriors.moments import AbstractDenseCovariance, Moments

__all__ = ["AbstractTimeline", "AbstractTimelineCovariance", "MarkovCovariance", "Timeline", "in_ascending_order"]


def in_ascending_order(times: Array) -> tuple[Array, Array, Array]:
    """The order of times, the interval from the one before for each in it, and where in it each time is, (N,)."""
    order = jnp.argsort(times)
    return order, jnp.diff(times[order], prepend=times[order[:1]]), jnp.argsort(order)


class AbstractTimelineCovariance(AbstractDenseCovariance):
    """The covariance between rows, by the smoother."""

    @abstractmethod
    def moments(self) -> Moments:
        """Moments at the rows, with the divergence."""


class AbstractTimeline(AbstractRows):
    """Rows in the order of time."""

    @abstractmethod
    def smoothed(self, lambda1: Array, precision: Array) -> Smoothed:
        """The smoother at all rows, in ascending order of time."""

    @abstractmethod
    def covariance(self, lambda1: Array, precision: Array) -> AbstractTimelineCovariance:
        """The covariance between the rows that are asked for."""

    def given_several(self, lambda1: Array, precision: Array) -> GivenSeveral:
        found = self.smoothed(lambda1, precision)
        products = matmul(lambda1, found.mean.T)
        log_z = found.log_normaliser[0] - 0.5 * products[0, 0]
        return GivenSeveral(found.mean, found.variance[0], products, log_z)


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
        return smoothed(self.model, self.interval, lambda1, precision, parallel=self.parallel)

    def covariance(self, lambda1: Array, precision: Array) -> "MarkovCovariance":
        return MarkovCovariance(self, lambda1, precision)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MarkovCovariance(AbstractTimelineCovariance):
    """The covariance between rows of a process with sites at times in ascending order.

    Attributes:
        line: the process and its times.
        lambda1: (..., N).
        precision: (..., N).
    """

    line: Timeline
    lambda1: Array
    precision: Array

    def moments(self) -> Moments:
        q, rows = self.line.smoothed(self.lambda1, self.precision), self.line.rows
        kl = q.divergence(self.lambda1, self.precision)
        return Moments(q.mean[..., rows], q.variance[..., rows], kl, self)

    def given_inducing(self, Kff: Array) -> Array:
        """Cov(f), (..., N, N), one smoothing for each row: the mean moves by a column of it with each λ₁."""
        zeros = jnp.zeros_like(self.lambda1)

        def column(row: Array) -> Array:
            return self.line.smoothed(zeros.at[..., row].set(1.0), self.precision).mean[..., self.line.rows]

        covariance = jnp.moveaxis(jax.lax.map(column, self.line.rows), 0, -1)
        # What was added to the prior variances.
        h = jnp.asarray(self.line.model.h, zeros.dtype)
        own = jnp.sum(h[:, None] * self.line.model.covariance * h, axis=(-2, -1))
        extra = diagonal(Kff) - own[..., None]
        return covariance + extra[..., None] * jnp.eye(Kff.shape[-1], dtype=Kff.dtype)

    def draw_deviations(self, rng_key: Array, shape: tuple[int, ...]) -> Array:
        axes, zeros = self.lambda1.ndim, jnp.zeros_like(self.lambda1)
        many, batch = shape[: len(shape) - axes], shape[len(shape) - axes : -1]
        model, interval = self.line.model, self.line.interval
        d, k, N = model.covariance.shape[-1], model.noise_root(interval[:1]).shape[-1], len(interval)

        def draw(rng_key: Array) -> Array:
            keys, sizes = jax.random.split(rng_key, 3), ((d,), (N, k), (N,))
            first, steps, sites = (
                jax.random.normal(key, (*batch, *size), zeros.dtype) for key, size in zip(keys, sizes, strict=True)
            )
            noise = first, steps, sites
            return smoothing_draws(model, interval, zeros, self.precision, noise)[..., self.line.rows]

        draws = jax.lax.map(draw, jax.random.split(rng_key, math.prod(many)))
        return draws.reshape(shape)
