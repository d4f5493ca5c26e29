"""A posterior as the prior of new rows: each new row has a Gaussian site of its own.

Let q(f) = N(μ, C + R) at the new rows, where C is what u explains and R the rest, row by row. With a site
exp(λ₁ᵢ δᵢ − ½ λ₂ᵢ δᵢ²) of δ = E[f | u] − μ for each row, the posterior of δ is that of a dense GP with the prior
N(0, C), and its divergence is KL(q_after ‖ q_before). So a bound that has these moments in the place of q(f) is that of
the new rows alone, and needs no old data.
"""

import dataclasses

import jax
from jax import Array
import jax.numpy as jnp

from numpyro_sgp._internal.probed import value_of
from numpyro_sgp.distributions.gaussian_process import GaussianProcess
from numpyro_sgp.posteriors.dual.formulas import dual_dense, dual_per_datum
from numpyro_sgp.posteriors.family import AbstractPosteriorFamily
from numpyro_sgp.posteriors.moments import Moments, Roots, perturbed_moments
from numpyro_sgp.posteriors.parameters import Parameters
from numpyro_sgp.posteriors.sites import DatumSites

__all__ = ["NEW_SITES", "Conditioned"]

NEW_SITES = "new_sites"  # symbol of the sites of new rows


@dataclasses.dataclass(frozen=True)
class Conditioned(AbstractPosteriorFamily):
    """The posterior of another family times sites of new rows.

    Args:
        before: the family, whose parameters are fitted.
    """

    before: AbstractPosteriorFamily

    @property
    def couples_rows(self) -> bool:
        return False

    def gaussian(self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...]) -> None:
        del param, prior, batch_shape

    def moments(self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...]) -> Moments:
        before = jax.lax.stop_gradient(self.before.moments(param, prior, batch_shape))
        value = param(NEW_SITES, DatumSites.zeros(batch_shape, prior.X))
        sites, T = value_of(value), before.covariance.T if isinstance(before.covariance, Roots) else None
        if T is not None and T.shape[-2] < T.shape[-1]:
            q = dual_per_datum(sites.lambda1, sites.Lambda2, T, T, before.variance)
        else:
            C = _explained(before, prior)
            q = dual_dense(sites.lambda1, sites.Lambda2, C, C, before.variance)
        q = perturbed_moments(value, None, q)
        return q._replace(mean=before.mean + q.mean, covariance=None)


def _explained(q: Moments, prior: GaussianProcess) -> Array:
    """C, (..., N, N): all of the covariance where u are the values of f at the training inputs."""
    assert q.covariance is not None
    explained = q.covariance.of_inducing()
    if explained is not None:
        return explained
    X, kernel = prior.X, prior.kernel
    index = jnp.arange(X.shape[-2])
    C = q.covariance.given_inducing(kernel(X, X))
    return jnp.broadcast_to(C, (*q.variance.shape, X.shape[-2])).at[..., index, index].set(q.variance)
