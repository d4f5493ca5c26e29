"""The posterior of a function of time by its states at inducing times: sites on pairs of them, for minibatches."""

import dataclasses
from typing import Any

from jax import Array
import jax.numpy as jnp

from numpyro_sgp._internal.probed import value_of
from numpyro_sgp.distributions.gaussian_process import GaussianProcess
from numpyro_sgp.distributions.sparse_posterior import SparsePosterior
from numpyro_sgp.inducing import InducingPoints, as_inducing
from numpyro_sgp.posteriors.family import AbstractRowFamily, Inducing, at_prior, is_initial
from numpyro_sgp.posteriors.markov.family import check_times
from numpyro_sgp.posteriors.markov.pair_timeline import PairTimeline
from numpyro_sgp.posteriors.markov.state_space import state_space_of
from numpyro_sgp.posteriors.moments import Moments
from numpyro_sgp.posteriors.parameters import FittedParameters, Parameters
from numpyro_sgp.posteriors.perturbation import Perturbed, perturb_kl, perturb_marginals
from numpyro_sgp.posteriors.sites import PairSites

__all__ = ["SparseMarkov"]


@dataclasses.dataclass(frozen=True)
class SparseMarkov(AbstractRowFamily):
    """q(x) ∝ p(x) Π_j t_j(x_j, x_j+1), x the states of the process at inducing times; starts at the prior.

    Args:
        inducing: inducing times, (M,) or (M, 1), or `(kernel, X, rng_key)` to them.
        num_harmonics: as that of `Markov`.

    Raises:
        TypeError: a kernel without a state-space form.
        ValueError: inputs that are no times; fewer than two inducing times.

    References:
        Wilkinson, Solin and Adam (2021), "Sparse algorithms for Markovian Gaussian processes".
    """

    inducing: Inducing
    num_harmonics: int = 8

    def moments(self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...]) -> Moments:
        value = param("sites", lambda rng_key: self._zeros(prior, rng_key, batch_shape))
        if is_initial(param, "sites"):
            self.check_prior(prior)
            return at_prior(prior.kernel, prior.X)
        sites = value_of(value)
        line = self.in_rows(prior, sites, new=True)
        q = line.covariance_given_latents(sites).moments()
        if not isinstance(value, Perturbed):
            return q
        zero = line.at_rows(value.zero)
        of_rows = Perturbed(sites, dataclasses.replace(zero, epsilon2=zero.epsilon2[..., 0]))
        mean, variance = perturb_marginals(of_rows, None, q.mean, q.variance)
        return q._replace(mean=mean, variance=variance, kl=perturb_kl(value.zero, sites, q.kl))

    def updated(self, fitted: FittedParameters, q: SparsePosterior, linear: Array, precision: Array) -> dict[str, Any]:
        sites = fitted("sites")
        seen = self.in_rows(q.prior, sites, new=True).seen
        return {"sites": sites.with_rows(seen.pair, seen.a, linear, precision)}

    def check_prior(self, prior: GaussianProcess) -> None:
        check_times(prior, self.num_harmonics)

    def check_rows(self, prior: GaussianProcess, sites: Any) -> None:
        del prior, sites  # any rows are known from the states

    def has_rows(self, prior: GaussianProcess, sites: Any) -> Array:
        del prior, sites
        return jnp.asarray(True)

    def check_more_rows(self) -> None:
        msg = (
            "`condition` was called for an `AutoMarkovGP` with inducing times and other latents in its joint "
            "posterior. Train on all rows, or with `joint=False`, or without `inducing`."
        )
        raise TypeError(msg)

    def sites_of(self, num_latents: int, prior: GaussianProcess, rng_key: Array) -> PairSites:
        return self._zeros(prior, rng_key, (), num_latents)

    def _zeros(
        self, prior: GaussianProcess, rng_key: Array, batch_shape: tuple[int, ...], num_latents: int = 0
    ) -> PairSites:
        self.check_prior(prior)
        X, given = prior.X, self.inducing
        made = given(prior.kernel, X, rng_key) if callable(given) else given
        made = made if hasattr(made, "num_inducing") else jnp.reshape(jnp.asarray(made, X.dtype), (-1, 1))
        points = as_inducing(made, "inducing")
        if not isinstance(points, InducingPoints) or points.Z.ndim != 2 or points.Z.shape[-1] != 1 or len(points.Z) < 2:
            got = f"shape {points.Z.shape}" if isinstance(points, InducingPoints) else type(points).__name__
            msg = f"`inducing` of `AutoMarkovGP` must be two times or more, (M,) or (M, 1), got {got}."
            raise ValueError(msg)
        Z = jnp.sort(jnp.asarray(points.Z[:, 0], X.dtype))
        num_states = state_space_of(prior.kernel, X.dtype, self.num_harmonics).covariance.shape[-1]
        return PairSites.zeros(batch_shape, num_states, Z, num_latents)

    def in_rows(self, prior: GaussianProcess, sites: PairSites, *, new: bool) -> PairTimeline:
        del new
        # New times may have another dtype than those of the sites.
        dtype = jnp.result_type(prior.X, sites.lambda1)
        model = state_space_of(prior.kernel, dtype, self.num_harmonics)
        return PairTimeline.of(model, sites.fixed_Z.astype(dtype), jnp.asarray(prior.X[:, 0], dtype))
