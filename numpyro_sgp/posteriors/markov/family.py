"""The posterior of a function of time: one Gaussian site for each time, smoothed in O(N)."""

import dataclasses
import math
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp

from numpyro_sgp._internal.probed import value_of
from numpyro_sgp.distributions.gaussian_process import GaussianProcess
from numpyro_sgp.distributions.sparse_posterior import SparsePosterior
from numpyro_sgp.kernels.functional import AbstractFunctional, same_rows
from numpyro_sgp.math.linalg import diagonal
from numpyro_sgp.posteriors.family import AbstractPosteriorFamily, at_prior, is_initial
from numpyro_sgp.posteriors.markov.formulas import Smoothed, smoothed, smoothing_draws
from numpyro_sgp.posteriors.markov.state_space import AbstractStateSpace, state_space_of
from numpyro_sgp.posteriors.moments import AbstractCovariance, Moments, perturbed_moments
from numpyro_sgp.posteriors.natural_parameters import DatumSites, Perturbed
from numpyro_sgp.posteriors.parameters import FittedParameters, Parameters

__all__ = ["Markov"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MarkovCovariance(AbstractCovariance):
    """The covariance between rows of a process with sites at times in ascending order.

    Attributes:
        model: the process.
        interval: from the time before, (N,).
        lambda1: (..., N).
        precision: (..., N).
        rows: where in that order the rows are that are asked for, (N_rows,).
        parallel: whether scans are associative.
    """

    model: AbstractStateSpace
    interval: Array
    lambda1: Array
    precision: Array
    rows: Array
    parallel: bool = dataclasses.field(metadata={"static": True})

    def moments(self) -> Moments:
        """Moments at the rows, with the divergence."""
        q = self._smoothed(self.lambda1)
        kl = q.divergence(self.lambda1, self.precision)
        return Moments(q.mean[..., self.rows], q.variance[..., self.rows], kl, self)

    def _smoothed(self, lambda1: Array) -> Smoothed:
        return smoothed(self.model, self.interval, lambda1, self.precision, parallel=self.parallel)

    @property
    def num_noise(self) -> int | None:
        return None

    def given_inducing(self, Kff: Array) -> Array:
        """Cov(f), (..., N, N), one smoothing for each row: the mean moves by a column of it with each λ₁."""
        zeros = jnp.zeros_like(self.lambda1)

        def column(row: Array) -> Array:
            return self._smoothed(zeros.at[..., row].set(1.0)).mean[..., self.rows]

        covariance = jnp.moveaxis(jax.lax.map(column, self.rows), 0, -1)
        # What was added to the prior variances.
        h = jnp.asarray(self.model.h, zeros.dtype)
        own = jnp.sum(h[:, None] * self.model.covariance * h, axis=(-2, -1))
        extra = diagonal(Kff) - own[..., None]
        return covariance + extra[..., None] * jnp.eye(Kff.shape[-1], dtype=Kff.dtype)

    def of_inducing(self) -> Array | None:
        return None

    def variance_of_inducing(self) -> Array | None:
        return None

    def deviation(self, noise: Array) -> Array:
        raise NotImplementedError

    def draw_deviations(self, rng_key: Array, shape: tuple[int, ...]) -> Array:
        axes, zeros = self.lambda1.ndim, jnp.zeros_like(self.lambda1)
        many, batch = shape[: len(shape) - axes], shape[len(shape) - axes : -1]
        d, k = self.model.covariance.shape[-1], self.model.noise_root(self.interval[:1]).shape[-1]
        N = len(self.interval)

        def draw(rng_key: Array) -> Array:
            keys, sizes = jax.random.split(rng_key, 3), ((d,), (N, k), (N,))
            first, steps, sites = (
                jax.random.normal(key, (*batch, *size), zeros.dtype) for key, size in zip(keys, sizes, strict=True)
            )
            noise = first, steps, sites
            return smoothing_draws(self.model, self.interval, zeros, self.precision, noise)[..., self.rows]

        draws = jax.lax.map(draw, jax.random.split(rng_key, math.prod(many)))
        return draws.reshape(shape)


@dataclasses.dataclass(frozen=True)
class Markov(AbstractPosteriorFamily):
    """q(f) ∝ p(f) Π_n t_n(f_n) with a Gaussian site for each time, by filtering and smoothing; starts at the prior.

    Args:
        num_harmonics: how many waves stand for a `Periodic` kernel, beside its mean.
        parallel: whether scans over time are associative, for accelerators; None for where the default backend is one,
            in float64.
    """

    num_harmonics: int = 8
    parallel: bool | None = None

    @property
    def couples_rows(self) -> bool:
        return False

    def gaussian(self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...]) -> None:
        del param, prior, batch_shape

    def moments(self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...]) -> Moments:
        _check_times(prior)
        value = param("sites", lambda _: DatumSites.zeros(batch_shape, prior.X))
        if is_initial(param, "sites"):
            state_space_of(prior.kernel, prior.X.dtype, self.num_harmonics)  # raises for other kernels
            return at_prior(prior.kernel, prior.X)
        sites = value_of(value)
        if isinstance(value, Perturbed):
            if sites.X.shape != prior.X.shape:
                msg = (
                    f"`AutoMarkovGP` holds one site for each of the {sites.X.shape[0]} times given at initialisation; "
                    f"a training step came with X of shape {prior.X.shape}. Give all times at every step."
                )
                raise ValueError(msg)
            q = self._smoothed(prior, sites.fixed_X[:, 0], sites.lambda1, sites.Lambda2, 0)
            # Other times, or another order of them, have no site here: the step is refused.
            same = same_rows(sites.X, prior.X)
            q = q._replace(mean=jnp.where(same, q.mean, jnp.nan))
            return perturbed_moments(value, None, q)
        times = jnp.concatenate([sites.fixed_X[:, 0], prior.X[:, 0]])
        without = jnp.zeros((*sites.lambda1.shape[:-1], len(prior.X)), sites.lambda1.dtype)
        lambda1, precision = (jnp.concatenate([each, without], axis=-1) for each in (sites.lambda1, sites.Lambda2))
        return self._smoothed(prior, times, lambda1, precision, len(sites.X))

    def updated(self, fitted: FittedParameters, q: SparsePosterior, linear: Array, precision: Array) -> dict[str, Any]:
        return {"sites": fitted("sites").extended(linear, precision, q.prior.X)}

    def _smoothed(self, prior: GaussianProcess, times: Array, lambda1: Array, precision: Array, first: int) -> Moments:
        """Moments at times in any order, (N,), but for the `first` of them."""
        dtype = jnp.result_type(times, lambda1)  # new times may have another one than those of the sites
        model = state_space_of(prior.kernel, dtype, self.num_harmonics)
        parallel = self.parallel
        if parallel is None:
            parallel = jax.default_backend() != "cpu" and dtype == jnp.float64
        order = jnp.argsort(times)
        interval = jnp.diff(times[order], prepend=times[order[:1]])
        rows = jnp.argsort(order)[first:]
        return MarkovCovariance(model, interval, lambda1[..., order], precision[..., order], rows, parallel).moments()


def _check_times(prior: GaussianProcess) -> None:
    if isinstance(prior.X, AbstractFunctional) or prior.X.ndim != 2 or prior.X.shape[-1] != 1:
        got = type(prior.X).__name__ if isinstance(prior.X, AbstractFunctional) else f"shape {prior.X.shape}"
        msg = f"`AutoMarkovGP` needs `X` to be times, (N, 1), got {got}. `AutoTSVGP` takes any inputs."
        raise ValueError(msg)
