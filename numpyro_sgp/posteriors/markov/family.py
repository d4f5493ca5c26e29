"""The posterior of a function of time: one Gaussian site for each time, smoothed in O(N)."""

import dataclasses
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp

from numpyro_sgp._internal.probed import value_of
from numpyro_sgp.distributions.gaussian_process import GaussianProcess
from numpyro_sgp.distributions.sparse_posterior import SparsePosterior
from numpyro_sgp.kernels.functional import AbstractFunctional, same_rows
from numpyro_sgp.posteriors.family import AbstractRowFamily, at_prior, is_initial
from numpyro_sgp.posteriors.markov.state_space import state_space_of
from numpyro_sgp.posteriors.markov.timeline import MarkovCovariance, Timeline
from numpyro_sgp.posteriors.moments import Moments, perturbed_moments
from numpyro_sgp.posteriors.natural_parameters import DatumSites, Perturbed, RowSites
from numpyro_sgp.posteriors.parameters import FittedParameters, Parameters

__all__ = ["Markov"]


@dataclasses.dataclass(frozen=True)
class Markov(AbstractRowFamily):
    """q(f) ∝ p(f) Π_n t_n(f_n) with a Gaussian site for each time, by filtering and smoothing; starts at the prior.

    Args:
        num_harmonics: how many waves stand for a `Periodic` kernel, beside its mean.
        parallel: whether scans over time are associative, for accelerators; None for where the default backend is one,
            in float64.
    """

    num_harmonics: int = 8
    parallel: bool | None = None

    def moments(self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...]) -> Moments:
        value = param("sites", lambda _: DatumSites.zeros(batch_shape, prior.X))
        if is_initial(param, "sites"):
            self.check_prior(prior)
            return at_prior(prior.kernel, prior.X)
        sites = value_of(value)
        line = self.in_rows(prior, sites, training=isinstance(value, Perturbed))
        q = MarkovCovariance(line, *line.in_order(sites.lambda1, sites.Lambda2)).moments()
        if not isinstance(value, Perturbed):
            return q
        # Other times, or another order of them, have no site here: the step is refused.
        q = q._replace(mean=jnp.where(same_rows(sites.X, prior.X), q.mean, jnp.nan))
        return perturbed_moments(value, None, q)

    def updated(self, fitted: FittedParameters, q: SparsePosterior, linear: Array, precision: Array) -> dict[str, Any]:
        return {"sites": fitted("sites").extended(linear, precision, q.prior.X)}

    def check_prior(self, prior: GaussianProcess) -> None:
        if isinstance(prior.X, AbstractFunctional) or prior.X.ndim != 2 or prior.X.shape[-1] != 1:
            got = type(prior.X).__name__ if isinstance(prior.X, AbstractFunctional) else f"shape {prior.X.shape}"
            msg = f"`AutoMarkovGP` needs `X` to be times, (N, 1), got {got}. `AutoTSVGP` takes any inputs."
            raise ValueError(msg)
        state_space_of(prior.kernel, prior.X.dtype, self.num_harmonics)  # raises for other kernels

    def row_sites(self, num_latents: int, X: Array) -> RowSites:
        return RowSites.zeros(num_latents, X)

    def in_rows(self, prior: GaussianProcess, sites: DatumSites | RowSites, *, training: bool) -> Timeline:
        if training:
            self.check_rows(prior, sites)
        times = sites.fixed_X[:, 0]
        if not training:
            times = jnp.concatenate([times, prior.X[:, 0]])
        dtype = jnp.result_type(times, sites.lambda1)  # new times may have another one than those of the sites
        model = state_space_of(prior.kernel, dtype, self.num_harmonics)
        parallel = self.parallel
        if parallel is None:
            parallel = jax.default_backend() != "cpu" and dtype == jnp.float64
        order = jnp.argsort(times)
        interval = jnp.diff(times[order], prepend=times[order[:1]])
        rows = jnp.argsort(order)[0 if training else len(sites.X) :]
        return Timeline(model, interval, order, rows, parallel)
