"""The joint Gaussian of a function with a site in each row and other latents in one run of the guide."""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp

from numpyro_sgp._internal.probed import value_of
from numpyro_sgp.distributions.gaussian_process import GaussianProcess
from numpyro_sgp.distributions.sparse_posterior import SparsePosterior
from numpyro_sgp.distributions.traces import Trace
from numpyro_sgp.distributions.wrappers import unwrap
from numpyro_sgp.guides.group import Group
from numpyro_sgp.guides.joint_run import AbstractJointRun
from numpyro_sgp.guides.parameters import SiteParameters
from numpyro_sgp.math.products import matmul, matvec
from numpyro_sgp.posteriors.family import AbstractRowFamily, is_initial
from numpyro_sgp.posteriors.joint.by_rows import JointByRows, JointCovariance, markers
from numpyro_sgp.posteriors.moments import AbstractDenseCovariance, Moments, standard_deviation
from numpyro_sgp.posteriors.parameters import FittedParameters
from numpyro_sgp.posteriors.perturbation import Perturbed
from numpyro_sgp.posteriors.process import AbstractProcess, TableProcess
from numpyro_sgp.posteriors.sites import DatumSites, JointSites

__all__ = ["RowsRun"]


@dataclasses.dataclass(frozen=True)
class _GivenLatents:
    """q(f | w) at the draw of w."""

    family: AbstractRowFamily
    fitted: FittedParameters

    def process(self, q: SparsePosterior) -> AbstractProcess | TableProcess | None:
        return self.family.process(self.fitted, q)


class RowsRun(AbstractJointRun):
    """A joint Gaussian over a function with a site in each row and latents, in one run of the guide."""

    def __init__(
        self,
        group: Group,
        trace: Trace,
        model: Callable[[], Any],
        family: AbstractRowFamily,
        prefix: str,
        predicting: bool,
    ) -> None:
        super().__init__(group, trace, model)
        (site,) = group.sites
        prior: Any = unwrap(trace[site]["fn"])
        try:
            family.check_prior(prior)
        except (TypeError, ValueError) as error:
            error.add_note(f"This was at the GP site {site!r}.")
            raise
        B = matmul(self.prior_root, self.prior_root.T)

        def start(rng_key: Array) -> JointSites:
            zeros = JointSites.zeros((), self.num_latents, self.dtype)
            w = self._initial(trace, self.prior_mean, rng_key) - self.prior_mean
            return self._start(zeros, w, B, projected=True)

        param = SiteParameters(site, prefix, predicting)
        value = param("joint_sites", start)
        sites = param("sites", lambda rng_key: family.sites_of(self.num_latents, prior, rng_key))
        training, self._line = isinstance(sites, Perturbed), None
        self._training = training or is_initial(param, "sites")  # when no draws of f in all rows are asked for
        if not is_initial(param, "sites"):
            own: Any = value_of(sites)
            if training:
                family.check_rows(prior, own)
                family.check_floor(sites)
            self._line = family.in_rows(prior, own.with_earlier(), new=not training)
        variance = prior.kernel(prior.X)
        self.rows[site] = markers(variance)
        # Other rows than those of the sites, or another order of them: a training step is refused.
        self._same = family.has_rows(prior, value_of(sites))
        gaussian = JointByRows.of(value, sites, self._line, variance, self.prior_mean, self.prior_root, site)
        if training:
            m = jnp.where(self._same, gaussian.f[0], jnp.nan)
            gaussian = dataclasses.replace(gaussian, f=(m, gaussian.f[1]))
        self.gaussian = gaussian
        self._family, self._prefix, self._log_sites = family, prefix, None
        self._draw_latents()
        self.latents = self._latents_at(model, trace)

    def posterior(self, site: str, prior: GaussianProcess, batch_shape: tuple[int, ...]) -> SparsePosterior:
        gaussian = self.gaussian
        of_w = matmul(gaussian.S_sqrt.T, gaussian.G)
        mean = gaussian.given(gaussian.mean)
        if site in self.group.means:
            of_mean, slopes = self._prior_mean(site, prior, batch_shape)
            mean, of_w = mean + of_mean, of_w - matmul(gaussian.S_sqrt.T, slopes)
        variance = gaussian.f[1] + gaussian.rest + jnp.sum(of_w * of_w, axis=0)
        covariance = None if self._training else JointCovariance(self._given_latents(), of_w)
        q = SparsePosterior(prior, Moments(mean, variance, gaussian.kl, covariance), batch_shape)
        q.joint_run = self
        fitted = FittedParameters({f"{site}_{self._prefix}_sites": self._sites_given_latents()}, site, self._prefix)
        q.drawn = _GivenLatents(self._family, fitted)
        return q

    def _sites_given_latents(self) -> Any:
        """Those of f alone, at the draw of w."""
        return value_of(self.gaussian.sites).given(matvec(self.gaussian.L, self.v))

    def _given_latents(self) -> AbstractDenseCovariance:
        assert self._line is not None
        return self._line.covariance_given_latents(self._sites_given_latents())

    def draw(self, site: str, q: SparsePosterior, rng_key: Array, *, joint: bool) -> Array:
        del site
        gaussian = self.gaussian
        mean = gaussian.given(self.v)
        if joint:
            parts = self._given_latents().draw_parts(rng_key, mean.shape)
            self._f, rest, self._log_sites = mean + parts.explained, parts.rest, parts.log_sites
        else:
            given = Moments(mean, gaussian.f[1], q.moments.kl, None)
            self._f = SparsePosterior(q.prior, given, joint=False).sample(rng_key) - q.prior.prior_mean
            rest = jnp.zeros_like(mean)
            if self._line is not None and self._line.unexplained is not None:
                noise = jax.random.normal(jax.random.fold_in(rng_key, 1), mean.shape, mean.dtype)
                rest = standard_deviation(gaussian.rest) * noise
        return self._f + rest + q.prior.prior_mean

    def log_ratio(self, site: str, batch_shape: tuple[int, ...]) -> Array:
        """The log ratio log q(f, w) − log p(f) − log r(w) at the draw, NaN where that is not at the rows of the sites.

        With the part of f that the sites see. It is the logarithm of the sites there, less that of their normaliser.
        """
        del site, batch_shape
        gaussian = self.gaussian
        own, w = value_of(gaussian.value), matvec(gaussian.L, self.v)
        of_w = w @ (own.lambda1 - 0.5 * matvec(own.Lambda2, w)) - gaussian.log_z
        if self._log_sites is not None:
            return self._log_sites + of_w
        given, f = self._sites_given_latents(), self._f
        if not isinstance(given, DatumSites) or given.X.shape[0] != f.shape[-1]:
            return jnp.full((), jnp.nan, f.dtype)
        ratio = jnp.sum(f * (given.lambda1 - 0.5 * given.Lambda2 * f)) + of_w
        return jnp.where(self._same, ratio, jnp.nan)

    def given(self, site: str, q: SparsePosterior) -> SparsePosterior:
        f = self._f
        moments = Moments(f, self.gaussian.rest, self.log_ratio(site, q.batch_shape), None)
        return SparsePosterior(q.prior, moments, q.batch_shape, joint=False)
