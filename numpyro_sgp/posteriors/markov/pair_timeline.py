"""A process by its states at inducing times, at the rows that are asked for, and what its smoother says of these."""

import dataclasses
from functools import partial
import math

import jax
from jax import Array
import jax.numpy as jnp

from numpyro_sgp._internal.eager import as_one_program
from numpyro_sgp.math.linalg import diagonal
from numpyro_sgp.math.products import matmul, matvec
from numpyro_sgp.posteriors.joint.by_rows import AbstractSiteRows, GivenLatents, expected_sites
from numpyro_sgp.posteriors.markov.formulas import state_draws
from numpyro_sgp.posteriors.markov.pair_formulas import (
    PairProjections,
    SmoothedPairs,
    pair_projections,
    smoothed_pairs,
)
from numpyro_sgp.posteriors.markov.state_space import AbstractStateSpace
from numpyro_sgp.posteriors.markov.timeline import in_ascending_order
from numpyro_sgp.posteriors.moments import AbstractDenseCovariance, Moments, Parts
from numpyro_sgp.posteriors.perturbation import Perturbation
from numpyro_sgp.posteriors.sites import PairSites

__all__ = ["PairCovariance", "PairTimeline"]

# How many rows are smoothed at once for columns of a covariance.
_COLUMNS = 32


@as_one_program
def _smoothed(model: AbstractStateSpace, intervals: Array, linear: Array, precision: Array) -> SmoothedPairs:
    return smoothed_pairs(model, intervals, linear, precision)


@as_one_program
def _projected(model: AbstractStateSpace, Z: Array, times: Array) -> PairProjections:
    return pair_projections(model, Z, times)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PairTimeline(AbstractSiteRows):
    """A process with sites on pairs of its states, at some times.

    Attributes:
        model: the process.
        Z: inducing times, in ascending order, (M,).
        times: those that are asked for, (N,).
        seen: what pairs of states say of f there.
    """

    model: AbstractStateSpace
    Z: Array
    times: Array
    seen: PairProjections

    @classmethod
    def of(cls, model: AbstractStateSpace, Z: Array, times: Array) -> "PairTimeline":
        """From inducing times, (M,), and times, (N,)."""
        return cls(model, Z, times, _projected(model, Z, times))

    @property
    def unexplained(self) -> Array:
        return self.seen.rest

    def smoothed(self, linear: Array, precision: Array) -> SmoothedPairs:
        """The smoother at all pairs."""
        return _smoothed(self.model, jnp.diff(self.Z), linear, precision)

    def projected(self, y: Array) -> Array:
        """E[f | y], (..., N), of values of the pairs, (..., J, K)."""
        return jnp.sum(self.seen.a * y[..., self.seen.pair, :], axis=-1)

    def variance(self, covariance: Array) -> Array:
        """Var(E[f | y]), (..., N), from covariances of the pairs, (..., J, K, K); rounding leaves it positive."""
        a, own = self.seen.a, covariance[..., self.seen.pair, :, :]
        least = jnp.finfo(a.dtype).eps * jnp.sum(a * a * jnp.maximum(diagonal(own), 0.0), axis=-1)
        return jnp.maximum(jnp.sum(a * matvec(own, a), axis=-1), least)

    def given_latents(self, sites: PairSites) -> GivenLatents:
        R = jnp.concatenate([sites.lambda1[None], jnp.moveaxis(sites.crossed, -1, 0)])
        q = self.smoothed(R, sites.precision)
        flat, mean = (x.reshape(len(R), -1) for x in (R, q.mean))
        products = matmul(flat, mean.T)
        log_z = q.log_normaliser[0] - 0.5 * products[0, 0]
        expected = partial(expected_sites, flat, sites.precision, mean, q.covariance[0])
        return GivenLatents(self.projected(q.mean), self.variance(q.covariance)[0], products, log_z, expected)

    def covariance_given_latents(self, sites: PairSites) -> "PairCovariance":
        return PairCovariance(self, sites.lambda1, sites.precision)

    def at_rows(self, zero: Perturbation) -> Perturbation:
        a, pair = jax.lax.stop_gradient(self.seen.a), self.seen.pair
        K = a.shape[-1]
        linear = jnp.sum(a * zero.epsilon1[..., pair, :], axis=-1)
        turned = jnp.sum(a[..., :, None] * zero.epsilon2[..., pair, :, :], axis=-2)
        own = jnp.sum(turned[..., :K] * a, axis=-1, keepdims=True)
        return Perturbation(linear, jnp.concatenate([own, turned[..., K:]], axis=-1), floor=zero.floor)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PairCovariance(AbstractDenseCovariance):
    """The covariance between rows: that of what pairs say of them, and the prior's of the rest.

    Attributes:
        line: the process at its rows.
        lambda1: λ, (..., J, K).
        precision: Λ, (..., J, K, K).
    """

    line: PairTimeline
    lambda1: Array
    precision: Array

    @property
    def sees_all(self) -> bool:
        return False

    def moments(self) -> Moments:
        """Moments at the rows, with the divergence."""
        line, q = self.line, self.line.smoothed(self.lambda1, self.precision)
        second = q.covariance + q.mean[..., :, None] * q.mean[..., None, :]
        expected = jnp.sum(self.lambda1 * q.mean, axis=(-2, -1))
        expected = expected - 0.5 * jnp.sum(self.precision * second, axis=(-3, -2, -1))
        variance = line.variance(q.covariance) + line.seen.rest
        return Moments(line.projected(q.mean), variance, expected - q.log_normaliser, self)

    def given_inducing(self, Kff: Array) -> Array:
        return Kff - _columns(self.line, jnp.zeros_like(self.lambda1), jnp.zeros_like(self.precision))

    def of_inducing(self) -> Array:
        return _columns(self.line, self.lambda1, self.precision)

    def variance_of_inducing(self) -> Array:
        return self.line.variance(self.line.smoothed(self.lambda1, self.precision).covariance)

    def unexplained(self, kff: Array) -> Array:
        del kff
        return self.line.seen.rest

    def draw_deviations(self, rng_key: Array, shape: tuple[int, ...]) -> Array:
        parts = self.draw_parts(rng_key, shape)
        return parts.explained + parts.rest

    def draw_parts(self, rng_key: Array, shape: tuple[int, ...], *, of_inducing: Array | None = None) -> Parts:
        axes = self.lambda1.ndim - 1
        many, batch = shape[: len(shape) - axes], shape[len(shape) - axes : -1]
        of_states, of_rest = jax.random.split(rng_key)
        of_states = of_states if of_inducing is None else of_inducing
        of_states, of_rest = (jax.random.split(key, math.prod(many)) for key in (of_states, of_rest))
        (explained, rest, log_sites), log_z = _draws(self, of_states, of_rest, batch)
        return Parts(explained.reshape(shape), rest.reshape(shape), log_sites.reshape(shape[:-1]), log_z)


@as_one_program
def _columns(line: PairTimeline, lambda1: Array, precision: Array) -> Array:
    """Covariances of what pairs say of the rows, (..., N, N): their mean moves by a column with the site of each."""
    zeros = jnp.zeros_like(lambda1)

    def column(row: Array) -> Array:
        moved = zeros.at[..., line.seen.pair[row], :].set(line.seen.a[..., row, :])
        return line.projected(line.smoothed(moved, precision).mean)

    N = line.times.shape[0]
    return jnp.moveaxis(jax.lax.map(column, jnp.arange(N), batch_size=min(_COLUMNS, max(N, 1))), 0, -1)


def _pairs(x: Array) -> Array:
    """States, (..., M, d), as pairs of neighbours, (..., J, 2d)."""
    return jnp.concatenate([x[..., :-1, :], x[..., 1:, :]], axis=-1)


@partial(as_one_program, static_argnums=3)
def _draws(covariance: PairCovariance, of_states: Array, of_rest: Array, batch: tuple[int, ...]) -> tuple:
    line, precision = covariance.line, covariance.precision
    M, model, intervals = line.Z.shape[0], line.model, jnp.diff(line.Z, prepend=line.Z[:1])
    _, interval, where = in_ascending_order(jnp.concatenate([line.Z, line.times]))
    eigenvalues, V = jnp.linalg.eigh(0.5 * (precision + precision.mT))
    largest = jnp.max(jnp.abs(eigenvalues), axis=-1, keepdims=True)
    is_rounding = jnp.abs(eigenvalues) <= 100.0 * jnp.finfo(V.dtype).eps * largest
    root = V * jnp.sqrt(jnp.where(is_rounding, 0.0, eigenvalues))[..., None, :]  # NaN where one is negative
    q = line.smoothed(covariance.lambda1, precision)

    def draw(keys: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        of_prior, of_sites = jax.random.split(keys[0])
        prior = _pairs(state_draws(model, intervals, of_prior, batch))
        noise = jax.random.normal(of_sites, prior.shape, prior.dtype)
        # A draw of the prior, corrected by the smoother (Matheron's rule).
        residual = -matvec(precision, prior) - matvec(root, noise)
        deviation = prior + line.smoothed(residual, precision).mean
        y = q.mean + deviation
        log_sites = jnp.sum(y * (covariance.lambda1 - 0.5 * matvec(precision, y)), axis=(-2, -1))
        # What the states leave of f is independent of them: that of any draw of the prior.
        states = state_draws(model, interval, keys[1], batch)[..., where, :]
        f = jnp.sum(states[..., M:, :] * jnp.asarray(model.h, states.dtype), axis=-1)
        return line.projected(deviation), f - line.projected(_pairs(states[..., :M, :])), log_sites

    return jax.lax.map(draw, (of_states, of_rest)), q.log_normaliser
