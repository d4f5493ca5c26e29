"""The prior site of a model: function values of a Gaussian process."""

from collections.abc import Callable
import math
from typing import Any

import jax
from jax import Array
from jax.core import Tracer
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np
import numpyro.distributions as dist
from numpyro.distributions import constraints

from numpyro_sgp._internal.pytrees import PytreeFunction
from numpyro_sgp.kernels import Kernel
from numpyro_sgp.kernels.algebra import Foreign
from numpyro_sgp.kernels.functional import AbstractFunctional
from numpyro_sgp.math.linalg import cholesky, default_jitter, log_determinant, solve_lower
from numpyro_sgp.math.products import matvec

__all__ = ["GaussianProcess", "as_rows", "check_rows"]


def check_rows(value: Any, event_shape: tuple[int, ...]) -> None:
    """Raise unless a value has one number for each row; other shapes would broadcast to all pairs of rows."""
    if np.shape(value)[-1:] != event_shape:
        msg = (
            f"The value must have shape (..., {event_shape[0]}), a number for each row of `X` along the last axis, got "
            f"{np.shape(value)}. For a column of outcomes use y[:, 0]."
        )
        raise ValueError(msg)


def as_rows(X: Any, dtype: Any = None) -> Any:
    """Inputs, or a functional, as JAX arrays."""
    if isinstance(X, AbstractFunctional):
        return jax.tree.map(jnp.asarray, X)
    return jnp.asarray(X, dtype)


def _check_inputs(X: Any) -> Any:
    X = as_rows(X)
    if isinstance(X, AbstractFunctional):
        _check_finite_rows(X)
        return X
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


def _check_finite_rows(X: AbstractFunctional) -> None:
    for leaf in jax.tree.leaves(X):
        if not isinstance(leaf, Tracer) and np.isnan(leaf).any():
            msg = (
                f"The functional `X`, {type(X).__name__} of shape {X.shape}, contains NaN. Drop these rows; terms that "
                "a row does not have get the weight zero and inputs that are numbers."
            )
            raise ValueError(msg)


def _prior_mean(mean: ArrayLike | Callable, X: Any) -> Array:
    N = X.shape[-2]
    if isinstance(X, AbstractFunctional) and (callable(mean) or jnp.ndim(mean) == 0):
        return X.apply(lambda P: _prior_mean(mean, P)).astype(X.dtype)
    value = jnp.asarray(mean(X) if callable(mean) else mean)
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
        X: inputs, (N, D); or linear functionals of f of `numpyro_sgp.functionals`, which make a site of N rows ℓ_n f.
        mean: prior mean in units of f: a scalar, (..., N), or a function of X. Functionals are applied to a number and
            to a function; an array is the mean of the rows.
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
        X: ArrayLike | AbstractFunctional,
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
        functional = isinstance(self.X, AbstractFunctional)
        self.kernel = kernel = Foreign(kernel) if functional and not isinstance(kernel, Kernel) else kernel
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

    def prior_mean_of(self, batch_shape: tuple[int, ...]) -> Array:
        """The mean at X for a number of latents, (..., N)."""
        return jnp.broadcast_to(self.prior_mean, batch_shape + self.event_shape)
