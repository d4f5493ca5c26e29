"""A posterior whose mean is in the weights of a table, and whose covariance is that of inducing variables."""

from collections.abc import Callable
import dataclasses
from typing import Any, final

from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

from numpyro_sgp.distributions.gaussian_process import GaussianProcess
from numpyro_sgp.distributions.sparse_posterior import SparsePosterior
from numpyro_sgp.inducing import AbstractInducing, AbstractPoints, subset
from numpyro_sgp.math.linalg import solve_lower, solve_lower_transposed
from numpyro_sgp.posteriors.family import Inducing, inducing_param, root_of_prior
from numpyro_sgp.posteriors.gaussian import InducingGaussian, MeanPart
from numpyro_sgp.posteriors.mean_basis import TableMean
from numpyro_sgp.posteriors.moments import Moments, project
from numpyro_sgp.posteriors.parameters import FittedParameters, Parameters
from numpyro_sgp.posteriors.process import ProcessPosterior
from numpyro_sgp.posteriors.quadruply_stochastic.abstract import AbstractQuadruplyStochastic, ControlForm, Part
from numpyro_sgp.posteriors.quadruply_stochastic.formulas import Inclusion, mean_divergence
from numpyro_sgp.posteriors.quadruply_stochastic.weight_table import Weights, WeightTable, limit_of, numbers_of
from numpyro_sgp.posteriors.whitened.formulas import whitened

__all__ = ["WithInducingCovariance"]

# Of the inducing inputs that are chosen where none are given: a Cholesky factorisation of this size costs a fraction of
# the features of a step with 1000 basis functions and 500 rows.
_DEFAULT_INDUCING = 200


@final
@dataclasses.dataclass(frozen=True)
class WithInducingCovariance(AbstractQuadruplyStochastic):
    """The covariance is that of function values u = L v: f = A(x)ᵀv + (φ(x) − Φ_uᵀKuu⁻¹k_u(x))ᵀw, v and w independent.

    The weights say what u does not, and q(v) has a mean of its own, m. The prior of f is the kernel's at u, and
    elsewhere up to what features are off by. The arguments are those of `QuadruplyStochastic`.
    """

    basis_batch: int
    inducing: Inducing | None
    control: int | ArrayLike | None
    control_form: ControlForm
    jackknife: bool
    log_concave: tuple[str, ...]
    dense_columns = None

    def process(self, fitted: FittedParameters, q: SparsePosterior) -> ProcessPosterior:
        prior, table = q.prior, fitted("basis")
        kernel, numbers = limit_of(prior.kernel), numbers_of(prior.kernel, table.size)
        basis = TableMean(prior.kernel, table, width=prior.X.shape[-1], whiten=True)
        limit = GaussianProcess(kernel, prior.X, jitter=prior.jitter)
        inducing, m, S_sqrt = self._inducing_posterior(fitted, limit)
        L, known = root_of_prior(inducing, limit), None
        if isinstance(inducing, AbstractPoints):
            # The weights say what u does not: their function less its interpolation from u.
            known = solve_lower(L, basis.mean_at(kernel, inducing.Z, numbers)[:, None])[:, 0]
        return InducingGaussian(inducing, L, m, S_sqrt, MeanPart(basis, numbers, known), kernel).process(q)

    def _inducing_posterior(self, param: Parameters, limit: GaussianProcess) -> tuple[AbstractInducing, Array, Array]:
        """The inducing variables u = L v, and q(v) = N(m, S_sqrt S_sqrtᵀ) by m and the lower root S_sqrt."""
        inducing = inducing_param(param, _some_inputs if self.inducing is None else self.inducing, limit, False)
        M, dtype = inducing.num_inducing, limit.X.dtype
        # What features share with u is seen at the inputs of u, which variables that are no function values lack.
        m = param("m", jnp.zeros(M, dtype)) if isinstance(inducing, AbstractPoints) else jnp.zeros(M, dtype)
        return inducing, m, jnp.tril(param("S_sqrt", jnp.eye(M, dtype=dtype)))

    def _part(self, param: Parameters, prior: GaussianProcess, kernel: Any) -> Part:
        limit = GaussianProcess(limit_of(kernel), prior.X, jitter=prior.jitter)
        inducing, m, S_sqrt = self._inducing_posterior(param, limit)
        blocks = project(inducing, limit.kernel, limit.X, limit.relative_jitter)
        q = whitened(m, S_sqrt, blocks.A, blocks.kff)._replace(kernel=limit.kernel)
        if not isinstance(inducing, AbstractPoints):
            return Part(q)
        return Part(q, inducing.Z, solve_lower_transposed(blocks.L, blocks.A))

    def _estimated_variance(
        self, part: Part, Phi: Array, squares: Array, now: Weights, sample: Inclusion
    ) -> tuple[Array, Array]:
        del Phi, squares, now, sample
        variance = part.moments.variance
        return variance, jnp.sqrt(variance)

    @staticmethod
    def _divergence_of_weights(weights: Weights, precision: Array | None, sample: Inclusion) -> Array:
        return mean_divergence(weights.mean, precision, sample)

    def _exact(self, kernel: Any, part: Part, table: WeightTable, f: Array, variance: Array) -> Moments:
        del kernel, table, variance
        q = part.moments
        return q._replace(mean=part.rest(f)[:, 0] + q.mean)


def _some_inputs(kernel: Callable, X: Array, rng_key: Array) -> Array:
    """Up to 200 rows of the first batch, at random."""
    distinct = len(np.unique(np.asarray(X), axis=0))
    return subset(kernel, X, rng_key, num_inducing=min(_DEFAULT_INDUCING, distinct))
