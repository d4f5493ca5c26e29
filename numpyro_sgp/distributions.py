"""The prior site `GaussianProcess`, the posterior that guides put in its place, and their one KL divergence."""

from collections.abc import Callable
from functools import partial
import math
from typing import Any

import jax
from jax import Array, lax
from jax.core import Tracer
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.distributions.distribution import ExpandedDistribution, Independent, MaskedDistribution
from numpyro.distributions.kl import kl_divergence

from numpyro_sgp.concavity import is_quadratic
from numpyro_sgp.conditionals import Moments, standard_deviation
from numpyro_sgp.eager import as_one_program
from numpyro_sgp.linalg import cholesky, default_jitter, log_determinant, matmul, matvec, solve_lower
from numpyro_sgp.pytrees import PytreeFunction
from numpyro_sgp.quadrature import gauss_hermite

__all__ = [
    "GaussianProcess",
    "SparsePosterior",
    "check_rows",
    "log_prob_of",
    "observed_mask",
    "rewrap",
    "unwrap",
]


def _check_inputs(X: ArrayLike) -> Array:
    X = jnp.asarray(X)
    if X.ndim < 2:
        msg = f"`X` must have shape (N, D), got {X.shape}. For one input use X[:, None]."
        raise ValueError(msg)
    if not jnp.issubdtype(X.dtype, jnp.floating):
        X = X.astype(jnp.result_type(float))
    if not isinstance(X, Tracer) and np.isnan(X).any():
        rows = int(np.isnan(X).any(axis=-1).sum())
        msg = f"`X` of shape {X.shape} contains NaN in {rows} rows. Drop or impute them: a kernel needs every input."
        raise ValueError(msg)
    return X


def _prior_mean(mean: ArrayLike | Callable, X: Array) -> Array:
    value = jnp.asarray(mean(X) if callable(mean) else mean)
    N = X.shape[-2]
    if value.ndim > 0 and value.shape[-1] != N:
        kind = "`mean(X)`" if callable(mean) else "`mean`"
        msg = (
            f"{kind} must be a scalar or have shape (N,) = ({N},), got {value.shape}. "
            "Squeeze or index it to one value for each row of X."
        )
        raise ValueError(msg)
    if value.ndim == 0 and not isinstance(value, Tracer):
        return jnp.asarray(np.full(N, value, X.dtype))
    return jnp.broadcast_to(value, (*value.shape[:-1], N)).astype(X.dtype)


class GaussianProcess(dist.Distribution):
    """Function values of a Gaussian process, f(X) ~ N(mean(X), k(X, X)): the prior site of a model.

    `sample` and `log_prob` are those of the exact dense prior, O(N³), so a small model runs under NUTS as it stands;
    a sparse guide replaces the site and never forms the N × N matrix.

    Args:
        kernel: `k(X) -> (..., N)` the diagonal, `k(X, Z) -> (..., N, M)`; leading axes are a batch of latents.
        X: inputs, (N, D).
        mean: prior mean in units of f: a scalar, (..., N), or a function of X.
        jitter: added to the diagonal of covariance matrices, relative to its mean; by default 1e-6 in float64 and
            1e-4 in float32.

    Attributes:
        prior_mean: the mean at X, (..., N).
        mean_function: the mean at any inputs, a number or a function; None where it was given as values at X.

    Raises:
        ValueError: `X` is not (N, D) or contains NaN; `mean` is of another length; `jitter` is negative.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import numpyro_sgp as sgp
        >>> X = jnp.linspace(0.0, 1.0, 4)[:, None]
        >>> prior = sgp.GaussianProcess(sgp.kernels.SquaredExponential(0.3), X)
        >>> prior.event_shape, prior.sample(jax.random.key(0), (2,)).shape
        ((4,), (2, 4))
    """

    arg_constraints = {}
    support = constraints.real_vector  # pyright: ignore[reportAssignmentType]
    pytree_data_fields = ("kernel", "X", "prior_mean", "mean_function", "jitter")

    def __init__(
        self,
        kernel: Callable,
        X: ArrayLike,
        mean: ArrayLike | Callable = 0.0,
        *,
        jitter: float | None = None,
        validate_args: bool | None = None,
    ) -> None:
        if not callable(kernel) or isinstance(kernel, type):
            got = f"the class {kernel.__name__}" if isinstance(kernel, type) else type(kernel).__name__
            msg = (
                f"`kernel` must be callable as k(X) and k(X, Z), got {got}. Take one from `numpyro_sgp.kernels` or "
                "tinygp, with its hyperparameters."
            )
            raise TypeError(msg)
        self.X = _check_inputs(X)
        self.kernel = kernel
        if jitter is not None and not isinstance(jitter, Tracer) and jitter < 0:
            msg = f"`jitter` must not be negative, got {jitter}. Leave it out for the default of the dtype."
            raise ValueError(msg)
        self.jitter = jitter
        self.prior_mean = _prior_mean(mean, self.X)
        extends = callable(mean) or np.ndim(mean) == 0
        self.mean_function = (PytreeFunction.of(mean) if callable(mean) else mean) if extends else None
        variances = jax.eval_shape(lambda X: kernel(X), self.X)
        if variances.shape[-1:] != self.X.shape[-2:-1] or variances.shape[-2:] == 2 * self.X.shape[-2:-1]:
            pairs = jax.eval_shape(lambda X: kernel(X, X), self.X)
            if pairs.shape != (*variances.shape, self.X.shape[-2]):
                msg = (
                    f"`kernel` must give variances k(X), (..., N), and covariances k(X, Z), (..., N, M), got shapes "
                    f"{variances.shape} and {pairs.shape} at N = M = {self.X.shape[-2]}. Where k(X) is the matrix, "
                    "give a function whose k(X) is its diagonal."
                )
                raise ValueError(msg)
        batch_shape = np.broadcast_shapes(variances.shape[:-1], self.prior_mean.shape[:-1], self.X.shape[:-2])
        super().__init__(batch_shape, (self.X.shape[-2],), validate_args=validate_args)

    @property
    def has_rsample(self) -> bool:
        """Draws have gradients with respect to everything that they are made of."""
        return True

    @property
    def relative_jitter(self) -> float:
        """The jitter in use: the one given, or the default of the dtype."""
        return default_jitter(self.X.dtype) if self.jitter is None else self.jitter

    def _root(self) -> Array:
        K = self.kernel(self.X, self.X)
        index = jnp.arange(K.shape[-1])
        return cholesky(K.at[..., index, index].set(self.kernel(self.X)), self.relative_jitter)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        noise = jax.random.normal(key, (*sample_shape, *self.batch_shape, *self.event_shape), self.X.dtype)
        return self.prior_mean + matvec(self._root(), noise)

    def log_prob(self, value: Array) -> Array:
        check_rows(value, self.event_shape)
        L = self._root()
        residual = solve_lower(L, (value - self.prior_mean)[..., None])[..., 0]
        N = self.event_shape[0]
        return -0.5 * (jnp.sum(residual * residual, axis=-1) + log_determinant(L) + N * math.log(2.0 * math.pi))

    @property
    def mean(self) -> Array:
        return jnp.broadcast_to(self.prior_mean, self.batch_shape + self.event_shape)

    @property
    def variance(self) -> Array:
        return jnp.broadcast_to(self.kernel(self.X), self.batch_shape + self.event_shape)


class SparsePosterior(dist.Distribution):
    """q(f(X)), a Gaussian given by its marginals and KL divergence: what a sparse guide puts at a GP site.

    Args:
        prior: the prior it approximates, at the inputs where it is wanted.
        moments: marginals of the centred process, divergence and covariance roots.
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

    def __init__(
        self, prior: GaussianProcess, moments: Moments, batch_shape: tuple[int, ...] = (), *, joint: bool = True
    ) -> None:
        self.prior = prior
        self.moments = moments
        self.joint = joint
        shape = jnp.broadcast_shapes(batch_shape, moments.mean.shape[:-1], prior.batch_shape)
        super().__init__(shape, prior.event_shape, validate_args=False)

    @property
    def has_rsample(self) -> bool:
        """Draws have gradients with respect to everything that they are made of."""
        return True

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
        """Cov[f(X)] = Kff − AᵀA + TᵀT, (..., N, N)."""
        X, kernel = self.prior.X, self.kernel
        K = kernel(X, X)
        index = jnp.arange(K.shape[-1])
        K = K.at[..., index, index].set(kernel(X))
        A, T = self.moments.prior_root, self.moments.posterior_root
        K = K - matmul(jnp.swapaxes(A, -1, -2), A)
        if T is not None:
            K = K + matmul(jnp.swapaxes(T, -1, -2), T)
        return jnp.broadcast_to(K, (*self.batch_shape, *K.shape[-2:]))

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        shape = (*sample_shape, *self.batch_shape, *self.event_shape)
        if not self.joint:
            return _row_by_row(key, self.moments.mean, self.prior.prior_mean, self.moments.variance, shape)
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
            "A loss or a sampler asked for log q(f) of a sparse posterior. It is a density over inducing values, not "
            "over the values f(X), so the bound that `Trace_ELBO` forms from it would be wrong. "
            "Use `numpyro_sgp.QuadratureELBO` or `numpyro.infer.TraceMeanField_ELBO`, which use its KL divergence. "
            "Under MCMC leave out of the model what it predicts (`X_new`), and draw that with `Predictive` afterwards."
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
    return p.kl


def check_rows(value: Any, event_shape: tuple[int, ...]) -> None:
    """Raise where a value has not one number for each row, which would be broadcast to a table of all pairs."""
    if np.shape(value)[-1:] != event_shape:
        msg = (
            f"The value must have shape (..., {event_shape[0]}), a number for each row of `X` along the last axis, got "
            f"{np.shape(value)}. For a column of outcomes use y[:, 0]."
        )
        raise ValueError(msg)


def unwrap(fn: dist.Distribution) -> dist.Distribution:
    """The distribution inside plates' expansions, masks and `to_event`."""
    while isinstance(fn, ExpandedDistribution | MaskedDistribution | Independent):
        fn = fn.base_dist
    return fn


def rewrap(fn: dist.Distribution, replace: Callable[[Any, tuple[int, ...]], dist.Distribution]) -> dist.Distribution:
    """`fn` with the distribution inside replaced by `replace(inner, batch_shape)`, masks and `to_event` kept.

    An expansion is taken over by the replacement, which is given its batch shape.
    """
    if isinstance(fn, MaskedDistribution):
        return rewrap(fn.base_dist, replace).mask(fn._mask)  # pyright: ignore[reportArgumentType]
    if isinstance(fn, Independent):
        return rewrap(fn.base_dist, replace).to_event(fn.reinterpreted_batch_ndims)
    if isinstance(fn, ExpandedDistribution):
        # What lies between (masks, `to_event`) may have moved axes of the inside's batch to the event.
        own, expanded = len(fn.base_dist.batch_shape), fn.batch_shape
        return rewrap(fn.base_dist, lambda inner, shape: replace(inner, expanded + shape[own:]))
    return replace(fn, fn.batch_shape)


def log_prob_of(fn: dist.Distribution, value: Array) -> Array:
    """The log density of a site, also where a mask of False, which tells a guide to predict, covers all of it."""
    if isinstance(fn, MaskedDistribution) and fn._mask is False:
        fn = fn.base_dist
    return jnp.asarray(fn.log_prob(value))


def observed_mask(fn: dist.Distribution) -> Array:
    """Which entries of a site's log density count: an array that broadcasts to the batch shape of `fn`."""
    if isinstance(fn, MaskedDistribution):
        return jnp.logical_and(jnp.asarray(fn._mask), observed_mask(fn.base_dist))
    if isinstance(fn, Independent):
        inner = jnp.broadcast_to(observed_mask(fn.base_dist), fn.base_dist.batch_shape)
        return jnp.any(inner, axis=tuple(range(-fn.reinterpreted_batch_ndims, 0)))
    return observed_mask(fn.base_dist) if isinstance(fn, ExpandedDistribution) else jnp.asarray(True)
