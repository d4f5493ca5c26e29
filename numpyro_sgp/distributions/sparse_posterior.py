"""The posterior that guides put at a Gaussian-process site: a Gaussian over f(X), and its KL from the prior."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import Array, lax
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.distributions.kl import kl_divergence

from numpyro_sgp._internal.curvature import is_quadratic
from numpyro_sgp._internal.eager import as_one_program
from numpyro_sgp.distributions.gaussian_process import GaussianProcess
from numpyro_sgp.math.linalg import cholesky
from numpyro_sgp.math.products import matvec
from numpyro_sgp.math.quadrature import gauss_hermite
from numpyro_sgp.posteriors.moments import AbstractCovariance, Moments, standard_deviation

__all__ = ["SparsePosterior"]


class SparsePosterior(dist.Distribution):
    """q(f(X)), a Gaussian given by its marginals and KL divergence: what a sparse guide puts at a GP site.

    Args:
        prior: the prior it approximates, at the inputs where it is wanted.
        moments: marginals of the centred process, divergence and covariance.
        batch_shape: one latent for each entry.
        joint: whether `sample` draws f(X) jointly, from the full covariance in O(N³), or row by row from the marginals
            in O(N), which is all that a likelihood factorising over rows needs.

    Attributes:
        kl: KL(q(u) ‖ p(u)), of shape `batch_shape`.
    """

    arg_constraints = {}
    support = constraints.real_vector  # pyright: ignore[reportAssignmentType]
    pytree_data_fields = ("prior", "moments")
    pytree_aux_fields = ("joint",)
    # Of a posterior that is joint with other sites: the Gaussian of all of them, q(u) of this one, and a draw of it.
    joint_run: Any = None
    # Of a posterior of its own, if terms depend on several rows: what a loss asks.
    independent_run: Any = None
    gaussian: Any = None
    drawn: Any = None

    def __init__(
        self, prior: GaussianProcess, moments: Moments, batch_shape: tuple[int, ...] = (), *, joint: bool = True
    ) -> None:
        self.prior = prior
        self.moments = moments
        self.joint = joint
        shape = jnp.broadcast_shapes(batch_shape, moments.mean.shape[:-1], prior.batch_shape)
        super().__init__(shape, prior.event_shape, validate_args=False)

    @property
    def mean(self) -> Array:
        """E[f(X)], with the prior mean, (..., N)."""
        return jnp.broadcast_to(self.moments.mean + self.prior.prior_mean, self.batch_shape + self.event_shape)

    @property
    def variance(self) -> Array:
        """Var[f(X)], (..., N)."""
        return jnp.broadcast_to(self.moments.variance, self.batch_shape + self.event_shape)

    @property
    def kernel(self) -> Callable:
        """The kernel that the covariance starts from: the prior's, or one that stands for it."""
        return self.prior.kernel if self.moments.kernel is None else self.moments.kernel

    @property
    def kl(self) -> Array:
        """KL(q(u) ‖ p(u)), (...)."""
        return jnp.broadcast_to(self.moments.kl, self.batch_shape)

    def covariance(self) -> Array:
        """Cov[f(X)], (..., N, N)."""
        K, of_u = self.covariance_given_inducing(), self._covariance.of_inducing()
        K = K if of_u is None else K + of_u
        return jnp.broadcast_to(K, (*self.batch_shape, *K.shape[-2:]))

    def covariance_given_inducing(self, jitter: ArrayLike = 0.0) -> Array:
        """Cov[f(X) | u], (..., N, N), where u are inducing variables; `jitter` is relative to the prior variances."""
        X, kernel = self.prior.X, self.kernel
        K = kernel(X, X)
        index = jnp.arange(K.shape[-1])
        return self._covariance.given_inducing(K.at[..., index, index].set(kernel(X) * (1.0 + jitter)))

    @property
    def _covariance(self) -> AbstractCovariance:
        if self.moments.covariance is None:
            msg = (
                "Only the marginals of this posterior are known. Use `.mean`, `.variance` or draws with `joint=False`."
            )
            raise TypeError(msg)
        return self.moments.covariance

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        shape = (*sample_shape, *self.batch_shape, *self.event_shape)
        if not self.joint:
            return _row_by_row(key, self.moments.mean, self.prior.prior_mean, self.moments.variance, shape)
        deviations = self._covariance.draw_deviations(key, shape)
        if deviations is not None:
            return self.mean + deviations
        noise = jax.random.normal(key, shape, self.moments.mean.dtype)
        # The posterior covariance may be singular; its jitter is relative to the prior's scale, as its rounding is.
        scale = jnp.mean(self.kernel(self.prior.X), axis=-1)[..., None, None]
        identity = jnp.eye(self.event_shape[0], dtype=noise.dtype)
        L = cholesky(self.covariance() + self.prior.relative_jitter * scale * identity)
        return self.mean + matvec(L, noise)

    def expectation(self, fn: Callable[[Array], Array], num_nodes: int = 20) -> Array:
        """E_q[fn(f_i)] for each row, by Gauss-Hermite quadrature at the marginals.

        Where the marginals are estimates from sampled basis functions, the result is unbiased for a quadratic `fn`, and
        at most that in the mean for a concave one.

        Args:
            fn: maps values of f, (..., N), to an array of which every entry depends on its own row.
            num_nodes: exact where `fn` is a polynomial of degree below 2 · num_nodes.
        """
        nodes, weights = (jnp.asarray(x, self.moments.mean.dtype) for x in gauss_hermite(num_nodes))
        mean, sampled = self.mean, self.moments.sampled
        if sampled is not None and is_quadratic(fn, mean):
            return expected_quadratic(fn, mean, sampled.excess + sampled.variance)
        scale = standard_deviation(self.variance) if sampled is None else sampled.scale
        values = jax.vmap(lambda node: fn(mean + scale * node))(nodes)
        return jnp.tensordot(weights, values, axes=1, precision=lax.Precision.HIGHEST)

    def quantile(self, q: ArrayLike) -> Array:
        """Quantiles of each marginal, of shape q.shape + (..., N)."""
        z = jax.scipy.special.ndtri(jnp.asarray(q, self.moments.mean.dtype))
        z = z.reshape(z.shape + (1,) * (len(self.batch_shape) + 1))
        return self.mean + standard_deviation(self.variance) * z

    def log_prob(self, value: Array) -> Array:
        msg = (
            "A loss or a sampler asked for log q(f) of a sparse posterior, which is a density over inducing values. "
            "The bound of `Trace_ELBO` would be wrong: use `numpyro_sgp.QuadratureELBO` or `TraceMeanField_ELBO`. "
            "Under MCMC leave out of the model what it predicts, and draw that with `Predictive` afterwards."
        )
        raise NotImplementedError(msg)


@partial(as_one_program, static_argnums=4)
def _row_by_row(key: Array, mean: Array, prior_mean: Array, variance: Array, shape: tuple[int, ...]) -> Array:
    mean, deviation = (jnp.broadcast_to(each, shape) for each in (mean + prior_mean, standard_deviation(variance)))
    return mean + deviation * jax.random.normal(key, shape, mean.dtype)


def expected_quadratic(fn: Callable[[Array], Array], mean: Array, variance: Array) -> Array:
    """E[fn(f_i)] for each row of a quadratic `fn`: fn + ½ v fn″, for any estimates of the mean and of the variance.

    Args:
        fn: every entry depends on its own row.
        mean: (..., N).
        variance: less than zero where it is an estimate, (..., N).
    """

    def slope(f: Array) -> Array:
        return jax.jvp(fn, (f,), (jnp.ones_like(f),))[1]

    curvature = jax.jvp(slope, (mean,), (jnp.ones_like(mean),))[1]
    return fn(mean) + 0.5 * variance * curvature


@kl_divergence.register(SparsePosterior, GaussianProcess)
def _kl_sparse_posterior_gaussian_process(p: SparsePosterior, q: GaussianProcess) -> Array:
    """KL(q(u) ‖ p(u)), which is the divergence between the two processes (Matthews et al. 2016, section 3)."""
    del q  # the posterior was made from this prior
    if p.joint_run is not None:
        p.joint_run.check_loss()
    return p.kl
