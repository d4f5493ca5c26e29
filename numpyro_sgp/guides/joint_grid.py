"""The joint Gaussian of a function with inducing variables on a grid and other latents in one run of the guide."""

from collections.abc import Callable
import dataclasses
from typing import Any, cast

import jax
from jax import Array
import jax.numpy as jnp
import numpyro

from numpyro_sgp.distributions.gaussian_process import GaussianProcess
from numpyro_sgp.distributions.sparse_posterior import SparsePosterior
from numpyro_sgp.distributions.traces import Trace
from numpyro_sgp.distributions.wrappers import unwrap
from numpyro_sgp.guides.group import Group
from numpyro_sgp.guides.joint_run import INITIAL_SCALE, AbstractJointRun
from numpyro_sgp.guides.parameters import SiteParameters
from numpyro_sgp.math.linalg import solve_lower
from numpyro_sgp.math.products import matmul, matvec_transposed
from numpyro_sgp.posteriors.joint.by_rows import JointByRows, markers
from numpyro_sgp.posteriors.kronecker.family import GridGaussian, Kronecker
from numpyro_sgp.posteriors.kronecker.formulas import (
    GridCovariance,
    contract,
    deviation_of,
    divergence_of_latents,
    log_root,
)
from numpyro_sgp.posteriors.moments import Moments, whiten

__all__ = ["GridRun"]


class GridRun(AbstractJointRun):
    """A joint Gaussian over a function with inducing variables on a grid and latents, in one run of the guide.

    The mean of the whitened inducing variables v is a linear function of the whitened latents ω, and their covariance
    given ω is that of the grid: ω ~ N(μ, T Tᵀ) and v | ω ~ N(m + Cᵀ(ω − μ), R diag(s²) Rᵀ), for any optimizer.

    Attributes:
        drawn: a draw of v given that of the latents, (M₁, M₂, …).
    """

    def __init__(
        self, group: Group, trace: Trace, model: Callable[[], Any], family: Kronecker, prefix: str, predicting: bool
    ) -> None:
        super().__init__(group, trace, model)
        (site,) = group.sites
        prior: Any = unwrap(trace[site]["fn"])
        param = SiteParameters(site, prefix, predicting)
        try:
            grid = family.gaussian(param, prior, ())
        except (TypeError, ValueError) as error:
            error.add_note(f"This was at the GP site {site!r}.")
            raise
        P, dtype, root = self.num_latents, self.dtype, self.prior_root
        L, _ = whiten(matmul(root, root.T), root[:, :0])

        def start(rng_key: Array) -> Array:
            w = self._initial(trace, self.prior_mean, rng_key) - self.prior_mean
            return solve_lower(L, w[:, None])[:, 0]

        mean = param("latents", start)
        S_sqrt = jnp.tril(param("latents_sqrt", lambda _: INITIAL_SCALE * solve_lower(L, jnp.eye(P, dtype=dtype))))
        slopes = param("slopes", jnp.zeros((P, *grid.grid.inducing.sizes), dtype))
        kff = prior.kernel(prior.X)
        q = grid.moments(prior.kernel, prior.X)
        covariance = cast(GridCovariance, q.covariance)
        of_rows = contract(slopes, covariance.A)  # (P, N)
        self.rows[site] = markers(kff)
        seen = covariance.variance_of_inducing()
        rest = jnp.maximum(q.variance - seen, 0.0)
        self.gaussian = JointByRows(
            value=None,
            sites=None,
            zero=None,
            L=L,
            mean=mean,
            S_sqrt=S_sqrt,
            f=(q.mean - matvec_transposed(of_rows, mean), seen),
            rest=rest,
            G=-of_rows,
            kl=q.kl + divergence_of_latents(mean, S_sqrt, slopes),
            log_z=None,
            offset=self.prior_mean,
            root=root,
            effect_variance=jnp.zeros(0, dtype),
            spans={site: (0, 1, 2)},
        )
        self._draw_latents()
        B = matmul(S_sqrt.T, of_rows)
        self._moments = q._replace(
            variance=q.variance + jnp.sum(B**2, axis=0),
            kl=self.gaussian.kl,
            covariance=dataclasses.replace(covariance, B=B),
        )
        self._marginal = dataclasses.replace(grid, T=jnp.tensordot(S_sqrt.T, slopes, axes=1))
        self._noise_of_grid = jax.random.normal(cast(Array, numpyro.prng_key()), grid.m.shape, dtype)
        self._given = dataclasses.replace(grid, m=grid.m + jnp.tensordot(self.v - mean, slopes, axes=1))
        self.drawn = self._given.m + deviation_of(self._noise_of_grid, grid.s, grid.R)
        self.latents = self._latents_at(model, trace)

    def posterior(self, site: str, prior: GaussianProcess, batch_shape: tuple[int, ...]) -> SparsePosterior:
        found, marginal = self._moments, self._marginal
        if site in self.group.means:
            of_mean, slopes = self._prior_mean(site, prior, batch_shape)
            covariance: Any = found.covariance
            B = covariance.B + matmul(self.S_sqrt.T, slopes)
            variance = found.variance + jnp.sum(B**2 - covariance.B**2, axis=0)
            found = found._replace(
                mean=found.mean + of_mean, variance=variance, covariance=dataclasses.replace(covariance, B=B)
            )
            marginal = self._given  # given the latents that make the prior mean
        q = SparsePosterior(prior, found, batch_shape)
        q.joint_run, q.gaussian, q.drawn = self, marginal, self._given
        return q

    def draw(self, site: str, q: SparsePosterior, rng_key: Array, *, joint: bool) -> Array:
        return SparsePosterior(q.prior, self.given(site, q).moments, q.batch_shape, joint=joint).sample(rng_key)

    def log_ratio(self, site: str, batch_shape: tuple[int, ...]) -> Array:
        """The log ratio log q(v, ω) − log p(v) − log p(ω) at the draw."""
        del site, batch_shape
        grid: GridGaussian = self._given
        ratio = 0.5 * (jnp.sum(self.drawn**2) - jnp.sum(self._noise_of_grid**2)) - log_root(grid.s, grid.R)
        return ratio + 0.5 * jnp.sum(self.v**2 - self.noise**2) - jnp.linalg.slogdet(self.S_sqrt)[1]

    def given(self, site: str, q: SparsePosterior) -> SparsePosterior:
        covariance = cast(GridCovariance, self._moments.covariance)
        known = GridCovariance(covariance.A, covariance.T, jnp.zeros_like(covariance.s))
        mean = contract(self.drawn, covariance.A)
        moments = Moments(mean, self.gaussian.rest, self.log_ratio(site, q.batch_shape), known)
        return SparsePosterior(q.prior, moments, q.batch_shape, joint=False)
