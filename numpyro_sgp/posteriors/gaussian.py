"""q(u) as a Gaussian: what a posterior family returns."""

from abc import ABC, abstractmethod
from collections.abc import Callable
import dataclasses
from typing import Any, NamedTuple

from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike

from numpyro_sgp.distributions.sparse_posterior import SparsePosterior
from numpyro_sgp.inducing import AbstractInducing, AbstractPoints, GrowingInducing, InducingPoints
from numpyro_sgp.math.linalg import cholesky, solve_lower, solve_lower_transposed
from numpyro_sgp.posteriors.decoupled.formulas import project_orthogonal
from numpyro_sgp.posteriors.mean_basis import AbstractMeanBasis
from numpyro_sgp.posteriors.moments import Moments, Projection
from numpyro_sgp.posteriors.process import AbstractProcess, ProcessPosterior
from numpyro_sgp.posteriors.whitened.formulas import whitened

__all__ = ["POINTS", "AbstractGaussian", "InducingGaussian", "MeanPart", "root_of_points"]

POINTS = AbstractPoints | GrowingInducing


class MeanPart(NamedTuple):
    """A part g of the mean with a basis of its own: m(x) = k_xu Kuu⁻¹m(u) + g(x) − k_xu Kuu⁻¹g(u).

    Attributes:
        basis: the functions.
        weights: their weights, as the basis takes them.
        projected: L⁻¹g(u), (..., M); None where that is nothing.
    """

    basis: AbstractMeanBasis
    weights: Any
    projected: Any


class AbstractGaussian(ABC):
    """A Gaussian q(u): what a posterior family returns.

    It may have any structure. A loss needs the moments, predictions need the process.
    """

    @abstractmethod
    def moments(self, kernel: Callable, X: Array) -> Moments:
        """The marginals at inputs (N, D), and the divergence."""

    @abstractmethod
    def process(self, q: SparsePosterior) -> AbstractProcess:
        """q(f) as a process.

        Args:
            q: the posterior at any inputs.
        """


@dataclasses.dataclass(frozen=True)
class InducingGaussian(AbstractGaussian):
    """q(u) through q(v) = N(m, S_sqrt S_sqrtᵀ) with u = L v, L Lᵀ = Kuu, so that the prior of v is N(0, I).

    Attributes:
        inducing: the inducing variables u.
        L: Cholesky factor of Kuu, (..., M, M).
        m: mean of v, (..., M).
        S_sqrt: triangular root of the covariance of v, (..., M, M); of a member of a joint posterior over D numbers its
            rows of a root of the whole, (..., M, D).
        part: a part of the mean beside the inducing variables; a family with one gives `moments` itself.
        kernel: the kernel of the process, where it is not the prior's; else None.
    """

    inducing: AbstractInducing
    L: Array
    m: Array
    S_sqrt: Array
    part: MeanPart | None = None
    kernel: Callable | None = None

    def moments(self, kernel: Callable, X: Array) -> Moments:
        A = solve_lower(self.L, self.inducing.Kuf(kernel, X))
        return whitened(self.m, self.S_sqrt, A, kernel(X))

    def process(self, q: SparsePosterior) -> ProcessPosterior:
        part, m = self.part, jnp.broadcast_to(self.m, (*q.batch_shape, self.m.shape[-1]))
        own = m if part is None or part.projected is None else m - part.projected
        return ProcessPosterior(
            kernel=q.prior.kernel if self.kernel is None else self.kernel,
            mean_function=q.prior.mean_function,
            inducing=self.inducing,
            L=self.L,
            a=solve_lower_transposed(self.L, own[..., None])[..., 0],
            m=m,
            R=self.S_sqrt.mT,
            mean_basis=None if part is None else part.basis,
            mean_weights=None if part is None else part.weights,
            kl=q.kl,
            jitter=q.prior.relative_jitter,
            batch_shape=q.batch_shape,
        )


def root_of_points(
    beta: AbstractInducing, gamma: AbstractInducing, kernel: Callable, jitter: ArrayLike
) -> tuple[AbstractInducing, Array] | None:
    """Function values at β and γ as one set of inducing variables, and their root; None for other variables.

    The root whitens the values at β, and those at γ given these.
    """
    if not isinstance(beta, POINTS) or not isinstance(gamma, POINTS):
        return None
    L = cholesky(beta.Kuu(kernel), jitter)
    L_vv = project_orthogonal(beta, gamma, Projection(L, L, L, L[..., 0]), kernel, beta.Z, jitter).L
    lower = solve_lower(L, beta.Kuv(kernel, gamma)).mT
    upper = jnp.concatenate([L, jnp.zeros_like(lower.mT)], axis=-1)
    whole = jnp.concatenate([upper, jnp.concatenate([lower, L_vv], axis=-1)], axis=-2)
    return _joined(beta, gamma), whole


def _joined(beta: Any, gamma: Any) -> AbstractInducing:
    """The values at the inputs of two bases, as those of one."""
    Z = jnp.concatenate([beta.Z, gamma.Z], axis=-2)
    if not any(isinstance(one, GrowingInducing) for one in (beta, gamma)):
        return InducingPoints(Z)
    active = [
        one.active if isinstance(one, GrowingInducing) else jnp.ones(one.num_inducing, Z.dtype) for one in (beta, gamma)
    ]
    return GrowingInducing(Z, jnp.zeros_like(Z), jnp.concatenate(active), 0)
