"""The joint Gaussian of GP sites and other latents in one run of the guide.

The priors of the GP sites and of the latents, given the hyperparameters, make the prior of z, and the sites make q(z)
of it. `guides/members.py` says which they are.
"""

from collections.abc import Callable
import dataclasses
from typing import Any, cast

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np
import numpyro

from numpyro_sgp._internal.probed import value_of
from numpyro_sgp._internal.pytrees import own_copy
from numpyro_sgp.distributions.gaussian_process import GaussianProcess
from numpyro_sgp.distributions.sparse_posterior import SparsePosterior
from numpyro_sgp.distributions.traces import Trace
from numpyro_sgp.distributions.wrappers import unwrap
from numpyro_sgp.guides.group import Group
from numpyro_sgp.guides.joint_run import INITIAL_SCALE, AbstractJointRun, Prior
from numpyro_sgp.guides.parameters import SiteParameters
from numpyro_sgp.math.linalg import solve_lower, with_jitter
from numpyro_sgp.math.products import matmul, matvec, matvec_transposed
from numpyro_sgp.posteriors.dual.tied import shared_covariance
from numpyro_sgp.posteriors.family import AbstractPosteriorFamily, inducing_param, refuse_growing
from numpyro_sgp.posteriors.gaussian import InducingGaussian
from numpyro_sgp.posteriors.joint.formulas import JointGaussian, stacked
from numpyro_sgp.posteriors.joint.predictors import Rows
from numpyro_sgp.posteriors.moments import Moments, Roots, moments, roots_of, whiten
from numpyro_sgp.posteriors.sites import EffectSites, JointSites

__all__ = ["InducingRun"]


class InducingRun(AbstractJointRun):
    """A joint Gaussian over inducing variables and latents, in one run of the guide."""

    def __init__(
        self,
        group: Group,
        trace: Trace,
        model: Callable[[], Any],
        family: Callable[[str], AbstractPosteriorFamily],
        prefix: str,
        predicting: bool,
        *,
        frozen: bool = False,
    ) -> None:
        super().__init__(group, trace, model)
        priors: dict[str, Any] = {name: unwrap(trace[name]["fn"]) for name in group.sites}
        inducing, Kuu, moves = {}, {}, False
        for name, prior in priors.items():
            own: Any = family(name)
            param = SiteParameters(name, prefix, predicting)
            try:
                inducing[name] = inducing_param(param, own.inducing, prior, own.learn_inducing)
                refuse_growing(inducing[name], "a joint posterior (pass `joint=False`)")
            except (TypeError, ValueError) as error:
                error.add_note(f"This was at the GP site {name!r}.")
                raise
            Kuu[name] = with_jitter(inducing[name].Kuu(prior.kernel), prior.relative_jitter)
            moves |= own.learn_inducing
        projected = family(group.sites[0]).joins == "projected"
        offset, root = self.prior_mean, self.prior_root
        batch_shapes = {name: trace[name]["fn"].batch_shape for name in group.sites}
        K, spans = stacked(Kuu, batch_shapes, root)
        variance = jnp.zeros(0, self.dtype)
        if group.effects is not None:
            fn: Any = unwrap(trace[group.effects]["fn"])
            self.effect_shape = jnp.shape(trace[group.effects]["value"])
            # (A product with a scale: the transform is linear.)
            scale = jnp.broadcast_to(self.transforms[group.effects].inv(fn.scale), self.effect_shape)
            variance = jnp.ravel(scale * scale).astype(self.dtype)
        # Whitened sites stay fixed in whitened effects, too.
        unit, variance = (
            (jnp.ones_like(variance), variance) if projected else (jnp.sqrt(variance), jnp.ones_like(variance))
        )

        def start(rng_key: Array) -> JointSites:
            reference: Any = own_copy(inducing) if moves and projected else None
            zeros = JointSites.zeros((), K.shape[0], K.dtype, reference)
            return self._start(zeros, self._initial(trace, offset, rng_key) - offset, K, projected=projected)

        param = SiteParameters(group.sites[0], prefix, predicting, probed=not frozen)
        value = param("joint_sites", start)
        effects = None
        if group.effects is not None:
            reference = own_copy(inducing) if moves and projected else None
            zeros = EffectSites.zeros(variance.shape, K.shape[0], K.dtype, reference)
            precise = zeros.Lambda2.at[:, 0].set((unit / INITIAL_SCALE) ** 2)
            effects = param("effect_sites", dataclasses.replace(zeros, Lambda2=precise))
        references, Kuv = value_of(value).reference, None
        if references is not None:
            shared = {
                name: shared_covariance(inducing[name], references[name], prior.kernel, prior.relative_jitter)
                for name, prior in priors.items()
            }
            Kuv, _ = stacked(shared, batch_shapes, root)
        self.gaussian = JointGaussian(
            value, K, Kuv, inducing, effects, unit, variance, offset, root, spans, projected, frozen
        )
        self._draw_latents()
        if effects is not None:
            intercept, slope, precision = self.gaussian.effects_given(self.L)
            noise = jax.random.normal(cast(Array, numpyro.prng_key()), intercept.shape, intercept.dtype)
            self.effects = intercept - matvec_transposed(slope, self.v) + noise / jnp.sqrt(precision)
        self.latents = self._latents_at(model, trace)

    def posterior(self, site: str, prior: GaussianProcess, batch_shape: tuple[int, ...]) -> SparsePosterior:
        """q(f(X)) of a GP site, whatever the other members are."""
        start, C, M = self.gaussian.spans[site]
        N = prior.event_shape[0]
        Kuf = jnp.broadcast_to(self.gaussian.inducing[site].Kuf(prior.kernel, prior.X), (*batch_shape, M, N))
        kff = jnp.broadcast_to(prior.kernel(prior.X), (*batch_shape, N))
        self.priors[site] = Prior(prior.kernel, prior.X, batch_shape)
        rows = self.rows[site] = Rows(Kuf.reshape(C, M, N), kff.reshape(C, N))
        k, variance, of_mean = self.gaussian.of_site(site, rows), rows.kff.ravel(), 0.0
        if site in self.group.means:
            P = self.num_latents
            of_mean, slopes = self._prior_mean(site, prior, batch_shape)
            # (What is linear in L⁻¹w is in the columns.)
            of_mean = of_mean - jnp.tensordot(self.mean[-P:], slopes, axes=1)
            slopes = slopes.reshape(P, C * N)
            k = k.at[-P:].set(matmul(self.L[-P:, -P:], slopes))
            variance = variance + jnp.sum(slopes * slopes, axis=0)
        found, kl = self.gaussian.posterior(k, variance)
        own = slice(start, start + C * M)
        A = self._of_each(found.A[own].reshape(C, M, C, N)).reshape(*batch_shape, M, N)
        D = found.T.shape[0]
        T = jnp.moveaxis(found.T.reshape(D, C, N), 0, -2).reshape(*batch_shape, D, N)
        share = self._share(site, batch_shape)
        shape = (*batch_shape, N)
        q = SparsePosterior(
            prior,
            Moments(found.mean.reshape(shape) + of_mean, found.variance.reshape(shape), kl * share, Roots(A, T)),
            batch_shape,
        )
        L = self._of_each(self.L[own, own].reshape(C, M, C, M)).reshape(*batch_shape, M, M)
        inducing = self.gaussian.inducing[site]
        q.joint_run = self
        m, root = self._given_mean(own) if site in self.group.means else (self.mean[own], self.S_sqrt[own])
        q.gaussian = InducingGaussian(inducing, L, m.reshape(*batch_shape, M), root.reshape(*batch_shape, M, -1))
        v = self.v[own].reshape(*batch_shape, M)
        q.drawn = InducingGaussian(inducing, L, v, jnp.zeros_like(L))
        return q

    def _given_mean(self, own: slice) -> tuple[Array, Array]:
        """Mean and a root of the covariance of entries of L⁻¹u given the draw of w, which makes the prior mean."""
        P = self.num_latents
        W, B = self.S_sqrt[-P:], self.S_sqrt[own]
        R, turned = whiten(matmul(W, W.T), W)
        gain = matmul(B, turned.T)
        deviation = solve_lower(R, (self.v[-P:] - self.mean[-P:])[:, None])[:, 0]
        return self.mean[own] + matvec(gain, deviation), B - matmul(gain, turned)

    def draw(self, site: str, q: SparsePosterior, rng_key: Array, *, joint: bool) -> Array:
        """f(X) given the draw of z: row by row, or jointly in O(N³), as a term that depends on several rows needs."""
        given = self.given(self.group.sites[0], q)
        joint |= any(site == each for _, each in self.group.coupled)
        return SparsePosterior(q.prior, given.moments, q.batch_shape, joint=joint).sample(rng_key)

    def log_ratio(self, site: str, batch_shape: tuple[int, ...]) -> Array:
        """The log ratio log q(z) − log p(u) − log r(w) at the draw, with the first site for all members, (...)."""
        # v = L⁻¹z
        ratio = 0.5 * jnp.sum(self.v**2 - self.noise**2) - jnp.linalg.slogdet(self.S_sqrt)[1]
        if self.effects is not None:
            intercept, slope, precision = self.gaussian.effects_given(self.L)
            deviation = self.effects - intercept + matvec_transposed(slope, self.v)
            variance = self.gaussian.effect_variance
            own = self.effects**2 / variance - precision * deviation**2 + jnp.log(precision * variance)
            ratio = ratio + 0.5 * jnp.sum(own)
        return ratio * self._share(site, batch_shape)

    def given(self, site: str, q: SparsePosterior) -> SparsePosterior:
        """The process given the draw of z, with the log ratio of that in the place of the divergence."""
        A, ratio = roots_of(q.moments).A, self.log_ratio(site, q.batch_shape)
        mean = matvec_transposed(A, q.drawn.m)
        return SparsePosterior(
            q.prior, moments(mean, q.prior.kernel(q.prior.X), A, None, ratio), q.batch_shape, joint=False
        )

    @staticmethod
    def _of_each(x: Array) -> Array:
        """The blocks of a latent with itself, (C, M, N) of (C, M, C, N)."""
        index = np.arange(x.shape[0])
        return x[index, :, index]
