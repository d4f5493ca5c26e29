"""The dense posterior: one Gaussian site for each row of X, and no inducing inputs (t-VGP)."""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike

from numpyro_sgp._internal.probed import value_of
from numpyro_sgp.distributions.gaussian_process import GaussianProcess
from numpyro_sgp.distributions.sparse_posterior import SparsePosterior
from numpyro_sgp.distributions.sparse_regression import RegressionPosterior, started_sites
from numpyro_sgp.kernels.functional import same_rows
from numpyro_sgp.math.products import matmul
from numpyro_sgp.posteriors.dual.formulas import dense_explained, dual_dense
from numpyro_sgp.posteriors.family import AbstractRowFamily, at_prior, is_initial
from numpyro_sgp.posteriors.joint.by_rows import AbstractRows, GivenSeveral
from numpyro_sgp.posteriors.moments import AbstractDenseCovariance, Moments, draw_given_inducing, perturbed_moments
from numpyro_sgp.posteriors.parameters import FittedParameters, Parameters
from numpyro_sgp.posteriors.perturbation import Perturbed
from numpyro_sgp.posteriors.process import AbstractProcess, dense_process
from numpyro_sgp.posteriors.sites import DatumSites, RowSites

__all__ = ["Dense"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DenseRows(AbstractRows):
    """A process at the rows X of its sites, and at new rows after them.

    Attributes:
        kernel: its kernel.
        X: the rows of the sites.
        new: the rows that are asked for; None in training, where these are X.
        jitter: of covariances that draws are made with, relative.
        order: 0 … N − 1, of all rows.
        rows: which of them are asked for.
    """

    kernel: Callable
    X: Any
    new: Any
    jitter: ArrayLike
    order: Array
    rows: Array

    def given_several(self, lambda1: Array, precision: Array) -> GivenSeveral:
        N, kernel, X = self.X.shape[-2], self.kernel, self.X
        lambda1, precision = lambda1[:, :N], precision[:N]
        K = Kxf = kernel(X, X)
        kff = kernel(X)
        if self.new is not None:
            Kxf = jnp.concatenate([K, kernel(X, self.new)], axis=-1)
            kff = jnp.concatenate([kff, kernel(self.new)])
        # The last row is at λ₁ = 0, whose divergence has log Z in it: −½ Σ w v − KL.
        several = jnp.concatenate([lambda1, jnp.zeros((1, N), lambda1.dtype)])
        q = jax.vmap(dual_dense, (0, None, None, None, None))(several, precision, K, Kxf, kff)
        mean, variance = q.mean[:-1], q.variance[-1]
        log_z = -0.5 * precision @ variance[:N] - q.kl[-1]
        return GivenSeveral(mean, variance, matmul(lambda1, mean[:, :N].T), log_z)

    def covariance(self, lambda1: Array, precision: Array) -> "DenseCovariance":
        N, asked = self.X.shape[-2], self.X if self.new is None else self.new
        K, Kxf = self.kernel(self.X, self.X), self.kernel(self.X, asked)
        A = dense_explained(lambda1[..., :N], precision[..., :N], K, Kxf)
        return DenseCovariance(self.kernel, asked, self.jitter, A)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DenseCovariance(AbstractDenseCovariance):
    """Cov(f) = Kff − AᵀA between rows.

    Attributes:
        kernel: of the process.
        X: the rows.
        jitter: added to the covariance for draws, relative to the prior variances.
        A: (N_train, N).
    """

    kernel: Callable
    X: Any
    jitter: ArrayLike
    A: Array

    def given_inducing(self, Kff: Array) -> Array:
        return Kff - matmul(self.A.T, self.A)

    def draw_deviations(self, rng_key: Array, shape: tuple[int, ...]) -> Array:
        return draw_given_inducing(self, self.kernel, self.X, self.jitter, rng_key, shape)


@dataclasses.dataclass(frozen=True)
class Dense(AbstractRowFamily):
    """q(f) ∝ p(f) Π_n t_n(f_n) with a Gaussian site for each row, by a matrix of all rows; starts at the prior.

    Args:
        init_from: the optimum of a regression, to start at in place of the prior.

    References:
        Adam, Chang, Khan and Solin (2021), "Dual parameterization of sparse variational Gaussian processes",
        section 3.
    """

    init_from: RegressionPosterior | None = None
    takes_roots = True

    @property
    def joins(self) -> str | None:
        return "rows" if self.init_from is None else None

    def moments(self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...]) -> Moments:
        zeros = DatumSites.zeros(batch_shape, prior.X)
        value = param("sites", started_sites(zeros, self.init_from, "datum", None, prior.X))
        if self.init_from is None and is_initial(param, "sites"):
            return at_prior(prior.kernel, prior.X)
        sites, kernel, kff = value_of(value), prior.kernel, prior.kernel(prior.X)
        if not isinstance(value, Perturbed):
            K, Kxf = kernel(sites.fixed_X, sites.fixed_X), kernel(sites.fixed_X, prior.X)
            return dual_dense(sites.lambda1, sites.Lambda2, K, Kxf, kff)
        self.check_rows(prior, sites)
        self.check_floor(value)
        # Other rows, or another order of them, have no site here: the step is refused.
        K = jnp.where(same_rows(sites.X, prior.X), kernel(prior.X, prior.X), jnp.nan)
        return perturbed_moments(value, None, dual_dense(sites.lambda1, sites.Lambda2, K, K, kff))

    def updated(self, fitted: FittedParameters, q: SparsePosterior, linear: Array, precision: Array) -> dict[str, Any]:
        return {"sites": fitted("sites").extended(linear, precision, q.prior.X)}

    def process(self, fitted: FittedParameters, q: SparsePosterior) -> AbstractProcess | None:
        sites = fitted("sites")
        return dense_process(sites, q) if isinstance(sites, DatumSites) else None

    def check_prior(self, prior: GaussianProcess) -> None:
        del prior  # any kernel, at any inputs or functionals

    def sites_of(self, num_latents: int, prior: GaussianProcess, rng_key: Array) -> RowSites:
        del rng_key
        return RowSites.zeros(num_latents, prior.X)

    def in_rows(self, prior: GaussianProcess, sites: DatumSites | RowSites, *, new: bool) -> DenseRows:
        num_sites, num_rows = sites.X.shape[-2], prior.X.shape[-2]
        order, X = jnp.arange(num_sites + num_rows if new else num_sites), sites.fixed_X
        first = order.shape[0] - num_rows
        if not new:
            # With its derivatives, where the rows depend on parameters.
            X = prior.X if first == 0 else jnp.concatenate([X[:first], prior.X])
        return DenseRows(prior.kernel, X, prior.X if new else None, prior.relative_jitter, order, order[first:])
