"""The posterior of a function of space: one Gaussian site for each row, and each value from the nearest rows."""

import dataclasses
from typing import Any

from jax import Array
import jax.numpy as jnp

from numpyro_sgp._internal.probed import value_of
from numpyro_sgp.distributions.gaussian_process import GaussianProcess
from numpyro_sgp.distributions.sparse_posterior import SparsePosterior
from numpyro_sgp.kernels.functional import AbstractFunctional, same_rows
from numpyro_sgp.posteriors.family import AbstractRowFamily, at_prior, is_initial
from numpyro_sgp.posteriors.moments import Moments, perturbed_moments
from numpyro_sgp.posteriors.parameters import FittedParameters, Parameters
from numpyro_sgp.posteriors.perturbation import Perturbed
from numpyro_sgp.posteriors.sites import DatumSites, RowSites
from numpyro_sgp.posteriors.vecchia.formulas import (
    NeighbourCovariance,
    NeighbourRows,
    SitesOfRows,
    conditionals,
    log_normaliser,
    marginals,
)
from numpyro_sgp.posteriors.vecchia.neighbours import Neighbourhoods, nearest, neighbourhoods

__all__ = ["Vecchia"]


@dataclasses.dataclass(frozen=True)
class Vecchia(AbstractRowFamily):
    """Gaussian sites in all rows, of which the nearest make each marginal; starts at the prior.

    Args:
        num_neighbours: how many rows, K; groups have half as many.
    """

    num_neighbours: int = 40
    takes_roots = True

    def moments(self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...]) -> Moments:
        value = param("sites", lambda _: DatumSites.zeros(batch_shape, prior.X, self._places(prior.X)))
        if is_initial(param, "sites"):
            self.check_prior(prior)
            return at_prior(prior.kernel, prior.X)
        sites, training = value_of(value), isinstance(value, Perturbed)
        if training:
            self.check_rows(prior, sites)
            self.check_floor(value)
        rows, kernel = SitesOfRows(sites.fixed_X, sites.lambda1, sites.Lambda2), prior.kernel
        members, near, before = sites.places.indices
        mean, variance = marginals(kernel, members, near, rows)
        expected = rows.lambda1 * mean - 0.5 * rows.precision * (mean**2 + variance)
        kl = jnp.sum(expected, axis=-1) - log_normaliser(kernel, members, before, rows)
        if not training:
            index = self._nearest(rows.X, prior.X)
            found = conditionals(kernel, prior.X, index, rows)
            return Moments(*found, kl, NeighbourCovariance(kernel, prior.X, index, rows))
        # Other rows, or another order of them, have no site here: the step is refused.
        mean = jnp.where(same_rows(sites.X, prior.X), mean, jnp.nan)
        return perturbed_moments(value, None, Moments(mean, variance, kl, None))

    def updated(self, fitted: FittedParameters, q: SparsePosterior, linear: Array, precision: Array) -> dict[str, Any]:
        both = fitted("sites").extended(linear, precision, q.prior.X)
        return {"sites": dataclasses.replace(both, places=self._places(both.X))}

    def check_prior(self, prior: GaussianProcess) -> None:
        if isinstance(prior.X, AbstractFunctional):
            msg = (
                f"`AutoVecchiaGP` needs `X` to be inputs, (N, D), got {type(prior.X).__name__}. `AutoTSVGP` takes "
                "functionals."
            )
            raise TypeError(msg)

    def check_more_rows(self) -> None:
        msg = (
            "`condition` was called for an `AutoVecchiaGP` with other latents in its joint posterior, where "
            "the neighbours of the old rows would change. Train on all rows, or with `joint=False`."
        )
        raise TypeError(msg)

    def sites_of(self, num_latents: int, prior: GaussianProcess, rng_key: Array) -> RowSites:
        del rng_key
        return RowSites.zeros(num_latents, prior.X, self._places(prior.X))

    def in_rows(self, prior: GaussianProcess, sites: DatumSites | RowSites, *, new: bool) -> NeighbourRows:
        X, N = sites.fixed_X, sites.X.shape[0]
        if not new:
            none, rows = jnp.zeros((0, self.num_neighbours), int), jnp.arange(N)
            return NeighbourRows(prior.kernel, X, sites.places, none, rows, rows)
        both, index = jnp.concatenate([X, prior.X]), self._nearest(X, prior.X)
        order = jnp.arange(both.shape[0])
        return NeighbourRows(prior.kernel, both, sites.places, index, order, order[N:])

    def _nearest(self, Z: Array, X: Array) -> Array:
        """As many rows as those in training know of."""
        return nearest(Z, X, min(self.num_neighbours + self._group_size, Z.shape[0]))

    @property
    def _group_size(self) -> int:
        return max(self.num_neighbours // 2, 1)

    def _places(self, X: Array) -> Neighbourhoods:
        return neighbourhoods(X, self.num_neighbours, self._group_size)
