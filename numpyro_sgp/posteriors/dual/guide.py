"""Dual parametrisation (t-SVGP): q(u) = prior × Gaussian sites, where the sites stay fixed while the prior moves."""

from collections.abc import Callable, Mapping
import copy
import dataclasses
from typing import Any, Literal, Self

import jax
from jax import Array
import jax.numpy as jnp
from numpyro.infer.autoguide import AutoNormal

from numpyro_sgp._internal.probed import value_of
from numpyro_sgp._internal.pytrees import own_copy
from numpyro_sgp.distributions.gaussian_process import GaussianProcess
from numpyro_sgp.distributions.sparse_posterior import SparsePosterior
from numpyro_sgp.distributions.sparse_regression import RegressionPosterior, started_sites
from numpyro_sgp.guides.guide import AbstractAutoSparseGP
from numpyro_sgp.guides.members import Joint
from numpyro_sgp.inducing import AbstractInducing
from numpyro_sgp.kernels.functional import same_rows
from numpyro_sgp.math.linalg import solve_lower, with_jitter
from numpyro_sgp.math.products import matmul, matvec
from numpyro_sgp.posteriors.dual.formulas import dual_dense, dual_per_datum, natural_mean_and_root
from numpyro_sgp.posteriors.dual.tied import shared_covariance, tied, tied_mean_and_root
from numpyro_sgp.posteriors.family import (
    AbstractPosteriorFamily,
    Inducing,
    at_prior,
    check_names,
    for_site,
    inducing_param,
    is_initial,
    refuse_growing,
    root_of_prior,
    started_at,
)
from numpyro_sgp.posteriors.gaussian import InducingGaussian
from numpyro_sgp.posteriors.moments import Moments, joined, perturbed_moments, project, with_past
from numpyro_sgp.posteriors.natural_parameters import DatumSites, Perturbed, TiedSites
from numpyro_sgp.posteriors.parameters import FittedParameters, Parameters
from numpyro_sgp.posteriors.process import AbstractProcess, TableProcess, dense_process

__all__ = ["AutoTSVGP", "Dual"]


def _own_rows(value: DatumSites | Perturbed, prior: GaussianProcess, M: Array) -> Array:
    """`M`, evaluated at the prior's X in the place of the sites' X: NaN if the two are not the same rows."""
    sites = value_of(value)
    if sites.X.shape != prior.X.shape:
        msg = (
            f'`sites="per_datum"` holds one site for each of the {sites.X.shape[0]} rows of X given at initialisation; '
            f"a training step came with X of shape {prior.X.shape}. Give the whole X at every step (subsample inside "
            'the model with `numpyro.subsample`), or use `sites="tied"` for minibatches.'
        )
        raise ValueError(msg)
    return jnp.where(same_rows(sites.X, prior.X), M, jnp.nan)


@dataclasses.dataclass(frozen=True)
class Dual(AbstractPosteriorFamily):
    """q(u) ∝ p(u) Π_i t_i(u) with Gaussian sites t_i; starts at the prior.

    Args:
        inducing: inducing inputs (M, D), an inducing object, or `(kernel, X, rng_key)` to one; None for the dense
            posterior (t-VGP), which has one site for each row of X.
        sites: "tied" keeps two sums over the data, (M,) and (M, M); "per_datum" keeps every site, (N,) and (N,).
        learn_inducing: whether to train the inducing inputs.
        init_from: the optimum of a regression with the same inducing variables, to start at in place of the prior.

    References:
        Adam, Chang, Khan and Solin (2021), "Dual parameterization of sparse variational Gaussian processes":
        section 3 (t-VGP), section 4 (t-SVGP).
    """

    inducing: Inducing | None
    sites: Literal["tied", "per_datum"] = "tied"
    learn_inducing: bool = False
    init_from: RegressionPosterior | None = None

    def __post_init__(self) -> None:
        if self.sites not in ("tied", "per_datum"):
            msg = f"`sites` must be 'tied' or 'per_datum', got {self.sites!r}. The default is 'tied'."
            raise ValueError(msg)

    @property
    def couples_rows(self) -> bool:
        return self.joins is not None

    @property
    def joins(self) -> str | None:
        tied = self.inducing is not None and self.sites == "tied"
        return "projected" if tied and self.init_from is None else None

    def moments(self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...]) -> Moments:
        if self.inducing is None:
            return self._dense(param, prior, batch_shape)
        inducing = inducing_param(param, self.inducing, prior, self.learn_inducing)
        refuse_growing(inducing, "the sites of `AutoTSVGP`")
        if self.sites == "per_datum":
            return self._per_datum(param, prior, batch_shape, inducing)
        return self._tied(param, prior, batch_shape, inducing)

    def gaussian(
        self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...]
    ) -> InducingGaussian | None:
        if self.inducing is None:
            return None
        inducing = inducing_param(param, self.inducing, prior, self.learn_inducing)
        sites = value_of(self._sites(param, prior, batch_shape, inducing))
        kernel, jitter = prior.kernel, prior.relative_jitter
        if isinstance(sites, DatumSites):
            L = root_of_prior(inducing, prior)
            A = solve_lower(L, inducing.Kuf(kernel, sites.fixed_X))
            Lambda2 = matmul(A * sites.Lambda2[..., None, :], jnp.swapaxes(A, -1, -2))
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

    def process(self, fitted: FittedParameters, q: SparsePosterior) -> AbstractProcess | TableProcess | None:
        return dense_process(fitted("sites"), q) if self.inducing is None else super().process(fitted, q)

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
        kernel, jitter = prior.kernel, prior.relative_jitter
        L, _, A, kff = project(inducing, kernel, prior.X, jitter)
        if isinstance(value, Perturbed):
            sites = value_of(value)
            q = dual_per_datum(sites.lambda1, sites.Lambda2, _own_rows(value, prior, A), A, kff)
            return perturbed_moments(value, None, q)
        A_sites = solve_lower(L, inducing.Kuf(kernel, value.fixed_X))
        return dual_per_datum(value.lambda1, value.Lambda2, A_sites, A, kff)

    def _dense(self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...]) -> Moments:
        zeros = DatumSites.zeros(batch_shape, prior.X)
        value = param("sites", started_sites(zeros, self.init_from, "datum", None, prior.X))
        kernel, kff = prior.kernel, prior.kernel(prior.X)
        if isinstance(value, Perturbed):
            sites = value_of(value)
            K = _own_rows(value, prior, kernel(prior.X, prior.X))
            return perturbed_moments(value, None, dual_dense(sites.lambda1, sites.Lambda2, K, K, kff))
        K, Kxf = kernel(value.fixed_X, value.fixed_X), kernel(value.fixed_X, prior.X)
        return dual_dense(value.lambda1, value.Lambda2, K, Kxf, kff)


class AutoTSVGP(AbstractAutoSparseGP):
    """Dual (t-SVGP) posterior for every GP site of a model, to be trained with `NaturalGradient`.

    Between natural steps the sites stay fixed while hyperparameters move, so the bound follows the prior and is tighter
    than with q(u) fixed.

    Args:
        model: a NumPyro model with `GaussianProcess` sites.
        inducing: inducing inputs (M, D), an inducing object, a dict of them by site, or a function
            `(kernel, X, rng_key)` that makes them when the guide is initialised; None for t-VGP, the dense posterior.
        sites: "tied" keeps sums over the data and takes minibatches; "per_datum" keeps one site for each row of X and
            needs the whole X at each step.
        base: guide for the other latents: an autoguide class, or a guide. A class starts a latent at what was observed
            of it, if it is the location of an outcome, and near its prior median otherwise.
        learn_inducing: whether to train the inducing inputs.
        joint: which GP sites and other latents have one joint Gaussian: "auto" for all that meet in a term of the
            model, False for none, or a tuple of names. Latents that a kernel or a prior mean depends on stay with
            `base`, and so do those of a guide of your own or of `AutoDelta`.
        init_from: where to start in place of the prior: what `SparseGPRegression.condition` gives with the same
            inducing variables, or a dict of them by site.
        prefix: of the names of parameters, `{site}_{prefix}_{symbol}`.

    Raises:
        ValueError: unknown `sites`; inducing inputs of another width than X.

    References:
        Adam, Chang, Khan and Solin (2021), "Dual parameterization of sparse variational Gaussian processes".
    """

    def __init__(
        self,
        model: Callable,
        inducing: Inducing | Mapping[str, Inducing | None] | None,
        *,
        sites: Literal["tied", "per_datum"] = "tied",
        base: Any = AutoNormal,
        learn_inducing: bool = False,
        init_from: RegressionPosterior | Mapping[str, RegressionPosterior] | None = None,
        joint: Joint = "auto",
        prefix: str = "auto",
    ) -> None:
        self.inducing = inducing
        self._options = {"sites": sites, "learn_inducing": learn_inducing}
        self.init_from = init_from
        Dual(None, **self._options)  # a mistake in the options raises here, not at the first run
        super().__init__(model, base=base, prefix=prefix, joint=joint)

    @property
    def learns_inducing(self) -> bool:
        """Whether the inducing inputs are trained."""
        return bool(self._options["learn_inducing"])

    def with_inducing(
        self, inducing: Inducing | Mapping[str, Inducing | None] | None, *, learn_inducing: bool = False
    ) -> Self:
        """The same guide with other inducing inputs; it keeps its base guide, with what that has found in the model.

        Args:
            inducing: inducing inputs (M, D), an inducing object, or a dict of them by site.
            learn_inducing: whether to train them.
        """
        guide = copy.copy(self)
        guide.inducing = inducing
        guide._options = {**self._options, "learn_inducing": learn_inducing}
        return guide

    def family(self, site: str) -> AbstractPosteriorFamily:
        start = started_at(self.init_from, site)
        return Dual(for_site(self.inducing, site, "inducing"), **self._options, init_from=start)

    def check_sites(self, sites: set[str]) -> None:
        check_names(self.inducing, sites, "inducing")
        check_names(self.init_from, sites, "init_from")
