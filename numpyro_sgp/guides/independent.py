"""GP sites with posteriors of their own, in a run of the guide where terms depend on several rows of them."""

from collections.abc import Collection, Mapping
from typing import Any

from jax import Array
import jax.numpy as jnp
import numpy as np

from numpyro_sgp.distributions.sparse_posterior import SparsePosterior
from numpyro_sgp.guides.group import Group
from numpyro_sgp.guides.joint_run import Prior
from numpyro_sgp.posteriors.joint.independent import IndependentGaussian
from numpyro_sgp.posteriors.joint.predictors import Rows, prior_covariance
from numpyro_sgp.posteriors.moments import roots_of

__all__ = ["IndependentRun"]


class IndependentRun:
    """What a loss asks of an `InducingRun`, of GP sites that share terms and are independent in the posterior.

    Attributes:
        group: the sites.
        rows: them at the model's inputs: roots of the covariance and the mean.
        transforms: of other latents: there are none.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.rows: dict[str, Rows] = {}
        self.transforms: dict[str, Any] = {}
        self.effect_shape = ()
        self.num_latents = 0
        self.priors: dict[str, Prior] = {}
        self._posteriors: dict[str, SparsePosterior] = {}
        self._num_prior: dict[str, int] = {}

    def add(self, site: str, q: SparsePosterior) -> None:
        """The posterior of a site, at the model's inputs."""
        roots, N = roots_of(q.moments), q.event_shape[0]
        parts = [roots.A, *(() if roots.T is None else (roots.T,)), q.moments.mean[..., None, :]]
        parts = [jnp.broadcast_to(part, (*q.batch_shape, *part.shape[-2:])) for part in parts]
        stacked = jnp.concatenate(parts, axis=-2)
        kff = jnp.broadcast_to(q.kernel(q.prior.X), (*q.batch_shape, N))
        self.rows[site] = Rows(stacked.reshape(-1, *stacked.shape[-2:]), kff.reshape(-1, N))
        self._num_prior[site] = roots.A.shape[-2]
        self._posteriors[site] = q
        self.priors[site] = Prior(q.kernel, q.prior.X, q.batch_shape)

    @property
    def dtype(self) -> Any:
        return self.rows[self.group.sites[0]].kff.dtype

    @property
    def gaussian(self) -> IndependentGaussian:
        """Q of all sites."""
        spans, start = {}, 0
        for site in self.group.sites:
            C, M, _ = self.rows[site].Kuf.shape
            spans[site] = (start, C, M)
            start += C * M
        kl = jnp.asarray(sum(jnp.sum(self._posteriors[site].kl) for site in self.group.sites))
        none = jnp.zeros(0, self.dtype)
        return IndependentGaussian(self._num_prior, kl, none, none[:, None], none, spans)

    def prior_covariance(self, site: str) -> Array:
        """Cov[f(X)] of the prior for each latent of a site, (C, N, N)."""
        return prior_covariance(*self.priors[site])

    def places(self, names: Collection[str]) -> np.ndarray:
        """Where the numbers of some latents are: nowhere."""
        del names
        return np.zeros(0, int)

    def unflattened(self, w: Array) -> dict[str, Array]:
        """Values of other latents: there are none."""
        del w
        return {}

    def values(self, w: Mapping[str, Array], effects: Array | None = None) -> dict[str, Array]:
        """Values of other latents: there are none."""
        del w, effects
        return {}
