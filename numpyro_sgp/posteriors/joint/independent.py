"""Linear predictors of GP sites whose posteriors are independent of all else."""

import dataclasses

from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

from numpyro_sgp.posteriors.joint.effects import Loading
from numpyro_sgp.posteriors.joint.predictors import AbstractJointGaussian, Columns
from numpyro_sgp.posteriors.moments import moments

__all__ = ["IndependentGaussian"]


@dataclasses.dataclass(frozen=True)
class IndependentGaussian(AbstractJointGaussian):
    """Posteriors of GP sites that are independent of each other, by what is known of them at the rows.

    The variables of a latent are the rows of A, of T and the mean, which are linear in the rows of f, too. So what is
    called k here are A, T and mean of a predictor, one below the other.

    Attributes:
        num_prior: how many rows of A there are for a latent, by site.
        kl: the divergence of all sites.
    """

    num_prior: dict[str, int]
    kl: Array
    offset: Array
    root: Array
    effect_variance: Array
    spans: dict[str, tuple[int, int, int]]

    @property
    def size(self) -> int:
        return sum(C * M for _, C, M in self.spans.values())

    def _parts(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Where A, T and the means are in k."""
        A, T, mean = [], [], []
        for site, (start, C, M) in self.spans.items():
            for first in range(start, start + C * M, M):
                split = first + self.num_prior[site]
                A.append(np.arange(first, split))
                T.append(np.arange(split, first + M - 1))
                mean.append([first + M - 1])
        return np.concatenate(A), np.concatenate(T), np.concatenate(mean)

    def posterior(self, k: Array, variance: Array, loading: Loading | None = None) -> tuple[Columns, Array]:
        A, T, mean = (k[index] for index in self._parts())
        q = moments(jnp.sum(mean, axis=0), variance, A, T if len(T) else None, self.kl)
        none = Loading(jnp.zeros_like(variance), jnp.zeros(variance.shape, int)) if loading is None else loading
        return Columns(q.mean, q.variance, A, T, k[:0], *none, q.variance), self.kl

    def explained(self, one: Columns, other: Columns) -> Array:
        return jnp.sum(one.T * other.T, axis=0)

    def covariance(self, one: Columns, other: Columns, prior: ArrayLike, *, perturbed: bool = True) -> Array:
        del perturbed
        return jnp.asarray(prior) - jnp.sum(one.A * other.A, axis=0) + self.explained(one, other)

    def perturbation_of_covariance(self, one: Columns, other: Columns) -> Array:
        del other
        return jnp.zeros((), one.mean.dtype)

    def floored(self, perturbation: Array) -> Array:
        return perturbation
