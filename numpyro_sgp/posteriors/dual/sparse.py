"""The sparse dual posterior: inducing variables, and Gaussian sites that stay fixed while the prior moves."""

import dataclasses
from typing import Any, Literal

import jax
from jax import Array
import jax.numpy as jnp

from numpyro_sgp._internal.probed import value_of
from numpyro_sgp._internal.pytrees import own_copy
from numpyro_sgp.distributions.gaussian_process import GaussianProcess
from numpyro_sgp.distributions.sparse_posterior import SparsePosterior
from numpyro_sgp.distributions.sparse_regression import RegressionPosterior, started_sites
from numpyro_sgp.inducing import AbstractInducing
from numpyro_sgp.kernels.functional import same_rows
from numpyro_sgp.math.linalg import solve_lower, with_jitter
from numpyro_sgp.math.products import matmul, matvec
from numpyro_sgp.posteriors.dual.formulas import dual_per_datum, natural_mean_and_root
from numpyro_sgp.posteriors.dual.tied import shared_covariance, tied, tied_mean_and_root
from numpyro_sgp.posteriors.family import (
    AbstractPosteriorFamily,
    Inducing,
    at_prior,
    inducing_param,
    is_initial,
    refuse_growing,
    root_of_prior,
)
from numpyro_sgp.posteriors.gaussian import InducingGaussian
from numpyro_sgp.posteriors.moments import Moments, joined, perturbed_moments, project, with_past
from numpyro_sgp.posteriors.parameters import FittedParameters, Parameters
from numpyro_sgp.posteriors.perturbation import Perturbed
from numpyro_sgp.posteriors.sites import DatumSites, TiedSites

__all__ = ["SparseDual"]


def _at_own_rows(sites: DatumSites, prior: GaussianProcess, M: Array) -> Array:
    """`M`, evaluated at the prior's X in the place of the sites' X: NaN if the two are not the same rows."""
    if sites.X.shape != prior.X.shape:
        msg = (
            f'`sites="per_datum"` holds one site for each of the {sites.X.shape[0]} rows of X given at initialisation; '
            f"a training step came with X of shape {prior.X.shape}. Give the whole X at every step (subsample inside "
            'the model with `numpyro.subsample`), or use `sites="tied"` for minibatches.'
        )
        raise ValueError(msg)
    return jnp.where(same_rows(sites.X, prior.X), M, jnp.nan)


@dataclasses.dataclass(frozen=True)
class SparseDual(AbstractPosteriorFamily):
    """q(u) ∝ p(u) Π_i t_i(u) with Gaussian sites t_i (t-SVGP); starts at the prior.

    Args:
        inducing: inducing inputs (M, D), an inducing object, or `(kernel, X, rng_key)` to one.
        sites: "tied" keeps two sums over the data, (M,) and (M, M); "per_datum" keeps every site, (N,) and (N,).
        learn_inducing: whether to train the inducing inputs.
        init_from: the optimum of a regression with the same inducing variables, to start at in place of the prior.

    References:
        Adam, Chang, Khan and Solin (2021), "Dual parameterization of sparse variational Gaussian processes",
        section 4.
    """

    inducing: Inducing
    sites: Literal["tied", "per_datum"] = "tied"
    learn_inducing: bool = False
    init_from: RegressionPosterior | None = None

    @property
    def couples_rows(self) -> bool:
        return self.joins is not None

    @property
    def joins(self) -> str | None:
        return "projected" if self.sites == "tied" and self.init_from is None else None

    def moments(self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...]) -> Moments:
        inducing = inducing_param(param, self.inducing, prior, self.learn_inducing)
        refuse_growing(inducing, "the sites of `AutoTSVGP`")
        if self.sites == "per_datum":
            return self._per_datum(param, prior, batch_shape, inducing)
        return self._tied(param, prior, batch_shape, inducing)

    def gaussian(self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...]) -> InducingGaussian:
        inducing = inducing_param(param, self.inducing, prior, self.learn_inducing)
        sites = value_of(self._sites(param, prior, batch_shape, inducing))
        kernel, jitter = prior.kernel, prior.relative_jitter
        if isinstance(sites, DatumSites):
            L = root_of_prior(inducing, prior)
            A = solve_lower(L, inducing.Kuf(kernel, sites.fixed_X))
            Lambda2 = matmul(A * sites.Lambda2[..., None, :], A.mT)
            return InducingGaussian(inducing, L, *natural_mean_and_root(matvec(A, sites.lambda1), Lambda2))
        Kuv = None if sites.reference is None else shared_covariance(inducing, sites.reference, kernel, jitter)
        Kuu = with_jitter(inducing.Kuu(kernel), jitter)
        return InducingGaussian(inducing, *tied_mean_and_root(sites.lambda1, sites.Lambda2, Kuu, Kuv))

    def updated(self, fitted: FittedParameters, q: SparsePosterior, linear: Array, precision: Array) -> dict[str, Any]:
        sites, prior = fitted("sites"), q.prior
        if isinstance(sites, DatumSites):
            return {"sites": sites.extended(linear, precision, prior.X)}
        inducing, kernel, jitter = fitted("inducing"), prior.kernel, prior.relative_jitter
        Kuv = None if sites.reference is None else shared_covariance(inducing, sites.reference, kernel, jitter)
        Kuu, Kuf = with_jitter(inducing.Kuu(kernel), jitter), inducing.Kuf(kernel, prior.X)
        found = tied(sites.lambda1, sites.Lambda2, Kuu, Kuf, kernel(prior.X), Kuv)
        if sites.reference is not None:
            lambda1, Lambda2 = found.projected_sites()
            sites = TiedSites(lambda1, Lambda2, own_copy(inducing))
        return {"sites": sites.with_rows(found.projections(), linear, precision)}

    def _sites(
        self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...], inducing: AbstractInducing
    ) -> Any:
        if self.sites == "per_datum":
            zeros, basis = DatumSites.zeros(batch_shape, prior.X), "datum"
        else:
            # In buffers of its own: a state that has one twice cannot be donated.
            reference = own_copy(inducing) if self.learn_inducing else None
            zeros = TiedSites.zeros(batch_shape, inducing.num_inducing, prior.X.dtype, reference)
            basis = "projection"
        return param("sites", started_sites(zeros, self.init_from, basis, inducing, prior.X))

    def _tied(
        self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...], inducing: AbstractInducing
    ) -> Moments:
        value = self._sites(param, prior, batch_shape, inducing)
        if self.init_from is None and is_initial(param, "sites"):
            return at_prior(prior.kernel, prior.X)
        sites = value_of(value)
        kernel, jitter, Kuv = prior.kernel, prior.relative_jitter, None
        if sites.reference is not None:
            Kuv = shared_covariance(inducing, sites.reference, kernel, jitter)
        Kuu, Kuf, kff = with_jitter(inducing.Kuu(kernel), jitter), inducing.Kuf(kernel, prior.X), kernel(prior.X)
        past, num_rows = sites.past, Kuf.shape[-1]
        if past is not None:
            columns = past.columns()
            Kuc = matmul(Kuu, columns)
            Kuf, kff = joined(Kuf, Kuc), joined(kff, jnp.sum(columns * Kuc, axis=-2))
        q = tied(sites.lambda1, sites.Lambda2, Kuu, Kuf, kff, Kuv)
        found = q.moments
        if isinstance(value, Perturbed):
            fixed = jax.lax.stop_gradient(q)
            if value.zero.transported is not None:
                lambda1, Lambda2 = fixed.projected_sites()
                sites = TiedSites(lambda1, Lambda2, inducing)
            found = perturbed_moments(value, fixed.projections(), found, sites)
        return found if past is None else with_past(found, q.moments, num_rows)

    def _per_datum(
        self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...], inducing: AbstractInducing
    ) -> Moments:
        value = self._sites(param, prior, batch_shape, inducing)
        if self.init_from is None and is_initial(param, "sites"):
            return at_prior(prior.kernel, prior.X)
        kernel, jitter = prior.kernel, prior.relative_jitter
        L, _, A, kff = project(inducing, kernel, prior.X, jitter)
        if isinstance(value, Perturbed):
            sites = value_of(value)
            q = dual_per_datum(sites.lambda1, sites.Lambda2, _at_own_rows(sites, prior, A), A, kff)
            return perturbed_moments(value, None, q)
        A_sites = solve_lower(L, inducing.Kuf(kernel, value.fixed_X))
        return dual_per_datum(value.lambda1, value.Lambda2, A_sites, A, kff)
