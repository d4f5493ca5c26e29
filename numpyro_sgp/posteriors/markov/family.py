"""The posterior of a function of time, or of time and place: one Gaussian site for each row, smoothed in O(N)."""

import dataclasses
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

from numpyro_sgp._internal.probed import value_of
from numpyro_sgp._internal.pytrees import own_copy
from numpyro_sgp.distributions.gaussian_process import GaussianProcess
from numpyro_sgp.distributions.sparse_posterior import SparsePosterior
from numpyro_sgp.kernels.functional import AbstractFunctional, same_rows
from numpyro_sgp.posteriors.family import AbstractRowFamily, at_prior, is_initial
from numpyro_sgp.posteriors.markov.separable import Separated, separated
from numpyro_sgp.posteriors.markov.space_timeline import SpaceTimeline
from numpyro_sgp.posteriors.markov.state_space import state_space_of
from numpyro_sgp.posteriors.markov.timeline import AbstractTimeline, Timeline, in_ascending_order
from numpyro_sgp.posteriors.moments import Moments, perturbed_moments
from numpyro_sgp.posteriors.parameters import FittedParameters, Parameters
from numpyro_sgp.posteriors.perturbation import Perturbed
from numpyro_sgp.posteriors.sites import DatumSites, RowSites

__all__ = ["Markov", "check_times"]


def check_times(prior: GaussianProcess, num_harmonics: int) -> None:
    """Raise for inputs that are no times, or a kernel without a state-space form."""
    if isinstance(prior.X, AbstractFunctional) or prior.X.ndim != 2 or prior.X.shape[-1] != 1:
        got = type(prior.X).__name__ if isinstance(prior.X, AbstractFunctional) else f"shape {prior.X.shape}"
        msg = (
            f"`AutoMarkovGP` needs `X` to be times, (N, 1), got {got}. Give the places `space` for a function of "
            "time and place; `AutoTSVGP` takes any inputs."
        )
        raise ValueError(msg)
    state_space_of(prior.kernel, prior.X.dtype, num_harmonics)  # raises for other kernels


@dataclasses.dataclass(frozen=True)
class Markov(AbstractRowFamily):
    """q(f) ∝ p(f) Π_n t_n(f_n) with a Gaussian site for each time, by filtering and smoothing; starts at the prior.

    With `space` f is a function of time and place, and the sites are those of its projections on processes of time at
    some places: see `AutoMarkovGP`.

    Args:
        num_harmonics: how many waves stand for a `Periodic` kernel, beside its mean.
        parallel: whether scans over time are associative, for accelerators; None for where the default backend is one.
        space: these places, (M, D − 1), for inputs of D columns; None for functions of time.
    """

    num_harmonics: int = 8
    parallel: bool | None = None
    space: ArrayLike | None = None

    def moments(self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...]) -> Moments:
        value = param("sites", lambda _: DatumSites.zeros(batch_shape, prior.X, self._places(prior.X)))
        if is_initial(param, "sites"):
            self.check_prior(prior)
            return at_prior(prior.kernel, prior.X)
        sites = value_of(value)
        training = isinstance(value, Perturbed)
        if training:
            self.check_rows(prior, sites)
        line = self.in_rows(prior, sites, new=not training)
        q = line.covariance(*line.in_order(sites.lambda1, sites.Lambda2)).moments()
        if not training:
            return q
        # Other times, or another order of them, have no site here: the step is refused.
        q = q._replace(mean=jnp.where(same_rows(sites.X, prior.X), q.mean, jnp.nan))
        return perturbed_moments(value, None, q)

    def updated(self, fitted: FittedParameters, q: SparsePosterior, linear: Array, precision: Array) -> dict[str, Any]:
        before = fitted("sites")
        both = before.extended(linear, precision, q.prior.X)
        return {"sites": dataclasses.replace(both, places=before.places)}

    def check_prior(self, prior: GaussianProcess) -> None:
        if self.space is not None:
            self._separated(prior, prior.X.dtype)
            return
        check_times(prior, self.num_harmonics)

    def sites_of(self, num_latents: int, prior: GaussianProcess, rng_key: Array) -> RowSites:
        del rng_key
        return RowSites.zeros(num_latents, prior.X, self._places(prior.X))

    def _places(self, X: Array) -> Array | None:
        # Among the parameters, which the sites say nothing without.
        return None if self.space is None else own_copy(jnp.asarray(self.space, X.dtype))

    def _separated(self, prior: GaussianProcess, dtype: jax.typing.DTypeLike) -> Separated:
        """The kernel by products of time and place."""
        X, shape = prior.X, np.shape(self.space)
        if isinstance(X, AbstractFunctional) or X.ndim != 2 or len(shape) != 2 or X.shape[-1] != shape[-1] + 1:
            got = type(X).__name__ if isinstance(X, AbstractFunctional) else f"shape {X.shape}"
            msg = (
                f"`AutoMarkovGP` with `space` of shape {shape} needs `X` to have one column more, the time, got "
                f"{got}. Give places in the columns of `X` without the time."
            )
            raise ValueError(msg)
        if self.parallel:
            msg = "`parallel=True` is for functions of time alone, and there are places `space`. Leave `parallel` out."
            raise ValueError(msg)
        return separated(prior.kernel, X.shape[-1], dtype, self.num_harmonics)

    def in_rows(self, prior: GaussianProcess, sites: DatumSites | RowSites, *, new: bool) -> AbstractTimeline:
        X = sites.fixed_X
        if new:
            X = jnp.concatenate([X, prior.X])
        first = X.shape[0] - prior.X.shape[0]
        dtype = jnp.result_type(X, sites.lambda1)  # new times may have another one than those of the sites
        if self.space is not None:
            products, places = self._separated(prior, dtype), jax.lax.stop_gradient(sites.places)
            return SpaceTimeline.of(prior.kernel, products, places, X.astype(dtype), first, prior.relative_jitter)
        times = X[:, 0]
        model = state_space_of(prior.kernel, dtype, self.num_harmonics)
        parallel = self.parallel
        if parallel is None:
            parallel = jax.default_backend() != "cpu"
        order, interval, places = in_ascending_order(times)
        return Timeline(model, interval, order, places[first:], parallel)
