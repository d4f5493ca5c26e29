"""`SparseGPRegression`: GP regression through inducing variables as one observed site, with q(u) integrated out."""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax
from jax import Array
from jax.core import Tracer
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np
import numpyro.distributions as dist
from numpyro.distributions import constraints

from numpyro_sgp.distributions.gaussian_process import GaussianProcess, as_rows, check_rows
from numpyro_sgp.distributions.sparse_posterior import SparsePosterior
from numpyro_sgp.inducing import AbstractInducing, as_inducing, check_new_inputs, check_width
from numpyro_sgp.kernels.functional import AbstractFunctional
from numpyro_sgp.math.linalg import (
    cholesky,
    solve_lower,
    solve_lower_transposed,
    triangular_inverse,
    with_jitter,
)
from numpyro_sgp.math.marginal_likelihood import BOUNDS, collapsed, collapsed_bound, evidence_upper_bound
from numpyro_sgp.math.products import matmul, matvec, matvec_transposed
from numpyro_sgp.posteriors.dual.formulas import divergence_of_covariance
from numpyro_sgp.posteriors.moments import moments
from numpyro_sgp.posteriors.sites import AbstractSites

__all__ = ["Marginals", "RegressionPosterior", "SparseGPRegression", "started_mean_and_root", "started_sites"]


# Rows of K that exist at once.
_BLOCK = 1024


class Marginals(NamedTuple):
    """Mean and variance of f at each input, in units of f and f².

    Attributes:
        mean: (..., N).
        variance: (..., N).
    """

    mean: Array
    variance: Array


def _broadcast_rows(value: ArrayLike | Callable, X: Any, name: str) -> Array:
    if callable(value) and isinstance(X, AbstractFunctional):
        msg = (
            f"`{name}` is a function of X, and rows that are functionals, {type(X).__name__}, have no inputs of their "
            "own. Give a number, or one for each row."
        )
        raise TypeError(msg)
    values = jnp.asarray(value(X) if callable(value) else value)
    N = X.shape[-2]
    if values.ndim > 0 and values.shape[-1] not in (1, N):
        msg = (
            f"`{name}` must be a scalar, have shape (N,) = ({N},), or be a function of X that gives it, got shape "
            f"{values.shape}. Give one value for each row of X; for a batch of latents (C, 1) or (C, N)."
        )
        raise ValueError(msg)
    return jnp.broadcast_to(values, (*values.shape[:-1], N)).astype(X.dtype)


class SparseGPRegression(dist.Distribution):
    """Observations of a GP with Gaussian noise: `log_prob` is the collapsed bound, the best over all q(u), in O(N M²).

    log N(y | mean, Q + σ²I) − ½ Σ_n log(1 + d_n/σ²) with Q = Kfu Kuu⁻¹ Kuf and d_n = k_nn − q_nn. Under `AutoDelta` its
    maximum is the type-II estimate of the hyperparameters, under NUTS it is the target of a fully Bayesian sparse GP.
    It needs all N rows at each evaluation; for minibatches, or another likelihood, use a `GaussianProcess` site and a
    guide.

    `sample` draws y from the prior: of the exact GP in O(N³) for "tight" and "titsias", which bound its evidence, of
    the approximate prior in O(N M²) for "dtc" and "fitc". Predictions come from `condition(y)`.

    Args:
        kernel: a kernel; leading axes are a batch of latents.
        X: inputs, (N, D).
        inducing: inducing inputs (M, D), or an inducing object.
        noise_scale: σ in units of y, positive: a scalar, (..., N) for heteroskedastic noise, or a function of X.
        mean: prior mean in units of y: a scalar, (..., N), or a function of X.
        bound: "tight", a lower bound of the evidence; "titsias", a looser one, with ½ Σ_n d_n/σ² in the place of the
            logarithms; "dtc" without either; "fitc" with d_n as noise. The last two are no bounds: they change the
            model, and can overfit. All but "fitc" have the same q(u).
        jitter: added to the diagonal of Kuu, relative to its mean; by default 1e-6 in float64 and 1e-4 in float32.

    Raises:
        ValueError: unknown `bound`; inducing inputs of another width than X; `noise_scale` of another length; a plate
            or a mask of N entries around the site, which would count the density once for each of its rows. For N
            latents give the kernel a batch.

    References:
        Titsias (2025), "New bounds for sparse variational Gaussian processes", for "tight"; Titsias (2009),
        "Variational learning of inducing variables in sparse Gaussian processes", equation 9, for "titsias";
        Quiñonero-Candela and Rasmussen (2005), "A unifying view of sparse approximate Gaussian process regression"
        (DTC, FITC).

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_sgp as sgp
        >>> X = jnp.linspace(0.0, 6.0, 50)[:, None]
        >>> y = jnp.sin(X[:, 0])
        >>> site = sgp.SparseGPRegression(sgp.kernels.SquaredExponential(1.0), X, X[::10], noise_scale=0.1)
        >>> q = site.condition(y)
        >>> q.marginals(jnp.array([[1.0], [2.0], [3.0]])).mean.shape
        (3,)
    """

    arg_constraints = {"noise_scale": constraints.positive}
    reparametrized_params = ["noise_scale"]
    support = constraints.real_vector  # pyright: ignore[reportAssignmentType]
    pytree_data_fields = ("prior", "inducing")
    pytree_aux_fields = ("bound",)

    def __init__(
        self,
        kernel: Callable,
        X: ArrayLike,
        inducing: ArrayLike | AbstractInducing,
        noise_scale: ArrayLike | Callable,
        mean: ArrayLike | Callable = 0.0,
        *,
        bound: Literal["tight", "titsias", "dtc", "fitc"] = "tight",
        jitter: float | None = None,
        validate_args: bool | None = None,
    ) -> None:
        if bound not in BOUNDS:
            msg = f"`bound` must be one of {BOUNDS}, got {bound!r}. 'tight' is the best bound."
            raise ValueError(msg)
        self.prior = GaussianProcess(kernel, X, mean, jitter=jitter)
        self.inducing = as_inducing(inducing)
        check_width(self.inducing, self.prior.X)
        self.noise_scale = _broadcast_rows(noise_scale, self.prior.X, "noise_scale")
        self.bound = bound
        batch_shape = np.broadcast_shapes(self.prior.batch_shape, self.noise_scale.shape[:-1])
        super().__init__(batch_shape, self.prior.event_shape, validate_args=validate_args)

    def _blocks(self) -> tuple[Array, Array, Array]:
        """Kuu with its jitter, Kuf and kff."""
        prior = self.prior
        Kuu = with_jitter(self.inducing.Kuu(prior.kernel), prior.relative_jitter)
        return Kuu, self.inducing.Kuf(prior.kernel, prior.X), prior.kernel(prior.X)

    def _residual(self, y: ArrayLike) -> Array:
        return jnp.asarray(y, self.prior.X.dtype) - self.prior.prior_mean

    def expand(self, batch_shape: Sequence[int]) -> dist.Distribution:
        # Plates and masks expand a distribution to their shape.
        own, N = self.batch_shape, self.event_shape[0]
        for axis in range(-len(batch_shape), 0):
            if batch_shape[axis] == N > 1 and (len(own) < -axis or own[axis] == 1):
                msg = (
                    f"A plate or a mask of size {N} around `SparseGPRegression` counts the density of all {N} rows {N} "
                    "times. Sample it outside the plate of its rows, and drop rows in the place of masking them. For "
                    f"{N} latents give the kernel a batch."
                )
                raise ValueError(msg)
        return self if tuple(batch_shape) == own else super().expand(tuple(batch_shape))

    def log_prob(self, value: Array) -> Array:
        check_rows(value, self.event_shape)
        return collapsed_bound(*self._blocks(), self._residual(value), self.noise_scale**2, self.bound)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        key_u, key_f, key_noise = jax.random.split(key, 3)
        prior, shape = self.prior, (*sample_shape, *self.batch_shape)
        if self.bound in ("tight", "titsias"):
            f = prior.expand(self.batch_shape).sample(key_f, sample_shape)
        else:
            Kuu, Kuf, kff = self._blocks()
            A = solve_lower(cholesky(Kuu), Kuf)
            f = prior.prior_mean + matvec_transposed(A, jax.random.normal(key_u, (*shape, A.shape[-2]), A.dtype))
            if self.bound == "fitc":
                unexplained = jnp.maximum(kff - jnp.sum(A * A, axis=-2), 0.0)
                f = f + jnp.sqrt(unexplained) * jax.random.normal(key_f, (*shape, A.shape[-1]), A.dtype)
        return f + self.noise_scale * jax.random.normal(key_noise, (*shape, *self.event_shape), f.dtype)

    @property
    def mean(self) -> Array:
        return jnp.broadcast_to(self.prior.prior_mean, self.batch_shape + self.event_shape)

    @property
    def variance(self) -> Array:
        """Var[y], of the exact GP, (..., N); "dtc" draws have less."""
        variance = self.prior.kernel(self.prior.X)
        if self.bound == "dtc":
            Kuu, Kuf, _ = self._blocks()
            variance = jnp.sum(solve_lower(cholesky(Kuu), Kuf) ** 2, axis=-2)
        return jnp.broadcast_to(variance + self.noise_scale**2, self.batch_shape + self.event_shape)

    def upper_bound(self, y: ArrayLike, *, num_iterations: int = 10) -> Array:
        """An upper bound of the log evidence log N(y | mean, K + σ²I) of the exact GP, in O(N²) for each iteration.

        With `log_prob` of "tight" or "titsias" it says how much inducing variables lose at these hyperparameters.

        Args:
            y: observations, (N,).
            num_iterations: of conjugate gradients; more make it tighter.

        Raises:
            ValueError: `y` of another length than X; a batch of latents.

        References:
            Gibbs and MacKay (1997), "Efficient implementation of Gaussian processes"; Titsias (2014), "Variational
            inference for Gaussian and determinantal point processes".
        """
        check_rows(y, self.event_shape)
        if self.batch_shape:
            msg = (
                f"`upper_bound` is for one latent, and this site has a batch {self.batch_shape}. Make a site for each."
            )
            raise ValueError(msg)
        prior, residual, noise = self.prior, self._residual(y), self.noise_scale**2
        N = len(residual)
        starts = jnp.arange(0, N, min(_BLOCK, N))

        def product(v: Array) -> Array:
            """K v, in blocks of rows; the last one may repeat rows of the one before."""

            def of_block(start: Array) -> Array:
                rows = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, start, size), prior.X)
                return matvec(prior.kernel(rows, prior.X), v)

            size = min(_BLOCK, N)
            parts = jax.lax.map(of_block, starts)
            index = jnp.minimum(starts, N - size)[:, None] + jnp.arange(size)
            return jnp.zeros(N, v.dtype).at[index].set(parts)

        return evidence_upper_bound(*self._blocks(), residual, noise, product, num_iterations)

    def condition(self, y: ArrayLike) -> "RegressionPosterior":
        """The optimal q(u) given observations: N(v | B⁻¹A y/σ², B⁻¹) with B = I + AAᵀ/σ², u = L v.

        Args:
            y: observations, (..., N).

        Raises:
            ValueError: `y` of another length than X.
        """
        check_rows(y, self.event_shape)
        residual = self._residual(y)
        q = collapsed(*self._blocks(), residual, self.noise_scale**2, self.bound)
        return RegressionPosterior(self.prior, self.inducing, q.L, q.m, q.L_B, residual, q.precision)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RegressionPosterior:
    """The optimal posterior of GP regression through inducing variables, q(u) = N(L m, L B⁻¹ Lᵀ), B = L_B L_Bᵀ.

    Made by `SparseGPRegression.condition`. A pytree: it can be returned from `jit`, mapped over draws of the
    hyperparameters, and given to a guide as `init_from`.

    Attributes:
        prior: the prior at the training inputs.
        inducing: the inducing variables u.
        L: Cholesky factor of Kuu, (..., M, M).
        m: whitened mean, (..., M).
        L_B: Cholesky factor of the whitened precision, (..., M, M).
        residual: observations less the prior mean, (..., N).
        precision: of the noise, (..., N).
    """

    prior: GaussianProcess
    inducing: AbstractInducing
    L: Array
    m: Array
    L_B: Array
    residual: Array
    precision: Array

    def posterior(self, X_new: ArrayLike) -> SparsePosterior:
        """q(f(X_new)) as a distribution, which a model can sample: `.mean`, `.variance`, `.covariance()`, `.sample`.

        Args:
            X_new: inputs, (N_new, D).

        Raises:
            ValueError: the prior mean was given as values at the training inputs.
        """
        if self.prior.mean_function is None:
            msg = (
                f"The prior mean was given as values of shape {self.prior.prior_mean.shape} at the training inputs, "
                "which say nothing about `X_new`. Give `mean` as a scalar or as a function of X."
            )
            raise ValueError(msg)
        X_new = as_rows(X_new, self.prior.X.dtype)
        check_new_inputs(self.inducing.width, X_new)
        prior = GaussianProcess(self.prior.kernel, X_new, self.prior.mean_function, jitter=self.prior.jitter)
        A = solve_lower(self.L, self.inducing.Kuf(prior.kernel, prior.X))
        T = solve_lower(self.L_B, A)
        q = moments(matvec_transposed(A, self.m), prior.kernel(prior.X), A, T, self._kl())
        return SparsePosterior(prior, q)

    def _kl(self) -> Array:
        covariance = divergence_of_covariance(self.L_B, triangular_inverse(self.L_B))
        return covariance + 0.5 * jnp.sum(self.m * self.m, axis=-1)

    def marginals(self, X_new: ArrayLike) -> Marginals:
        """Mean and variance of f at each row of X_new, (N_new, D); those of y add σ² to the variance."""
        q = self.posterior(X_new)
        return Marginals(q.mean, q.variance)

    def covariance(self, X_new: ArrayLike) -> Array:
        """Cov[f(X_new)], (..., N_new, N_new), for X_new (N_new, D)."""
        return self.posterior(X_new).covariance()

    def sample(self, rng_key: Array, X_new: ArrayLike, sample_shape: tuple[int, ...] = ()) -> Array:
        """Joint draws of f(X_new), sample_shape + (..., N_new), for X_new (N_new, D)."""
        return self.posterior(X_new).sample(rng_key, sample_shape)

    def start(self, form: str, inducing: AbstractInducing | None, X: Array) -> tuple[Array, Array]:
        """This posterior in the parameters of another family: what a guide begins with.

        Args:
            form: "whitened" and "unwhitened" (m, S_sqrt); "natural" (B m, B − I); "projection", sums of
                sites in the basis Kuu⁻¹k_ui; "datum" (y/σ², 1/σ²), one site for each row.
            inducing: the guide's inducing variables, which must be these; None for one site for each row.
            X: the guide's inputs, which must be the training inputs for one site for each row.

        Raises:
            ValueError: other inducing variables, or other rows.
        """
        same = jnp.ones((), bool)
        if inducing is not None:
            same = _same(self.inducing, inducing, "inducing variables", "`inducing=init_from.inducing`")
        if form == "datum":
            same &= _same(self.prior.X, X, "rows of X", "the same rows of X")
            first, second = self.precision * self.residual, jnp.broadcast_to(self.precision, self.residual.shape)
        elif form in ("whitened", "unwhitened"):
            L_B_inverse = triangular_inverse(self.L_B)
            first, second = self.m, cholesky(matmul(L_B_inverse.mT, L_B_inverse))
            if form == "unwhitened":
                first, second = matvec(self.L, first), matmul(self.L, second)
        else:
            B = matmul(self.L_B, self.L_B.mT)
            first, second = matvec(B, self.m), B - jnp.eye(B.shape[-1], dtype=B.dtype)
            if form == "projection":
                first = solve_lower_transposed(self.L, first[..., None])[..., 0]
                half = solve_lower_transposed(self.L, second)
                second = solve_lower_transposed(self.L, half.mT)
        # Traced values cannot be compared now; where they turn out to differ, the start is NaN.
        return jnp.where(same, first, jnp.nan).astype(X.dtype), jnp.where(same, second, jnp.nan).astype(X.dtype)


def started_mean_and_root(
    param: Callable,
    batch_shape: tuple[int, ...],
    prior_start: tuple[Array, Array],
    init_from: RegressionPosterior | None,
    form: str,
    inducing: AbstractInducing,
    X: Array,
    prefix: str = "",
) -> tuple[Array, Array]:
    """The parameters m, (..., M), and S_sqrt, (..., M, M), which start at the prior or at a regression's optimum."""
    shape = (*batch_shape, inducing.num_inducing)
    start = functools.cache(lambda: prior_start if init_from is None else init_from.start(form, inducing, X))
    return (
        param(f"{prefix}m", lambda _: jnp.broadcast_to(start()[0], shape)),
        param(f"{prefix}S_sqrt", lambda _: jnp.broadcast_to(start()[1], (*shape, shape[-1]))),
    )


def started_sites(
    zeros: AbstractSites,
    init_from: RegressionPosterior | None,
    form: str,
    inducing: AbstractInducing | None,
    X: Array,
) -> AbstractSites | Callable[[Array], AbstractSites]:
    """What a parameter of sites is initialised with: `zeros`, or those of `init_from` when the guide is first run."""
    if init_from is None:
        return zeros

    def init(rng_key: Array) -> AbstractSites:
        del rng_key
        lambda1, Lambda2 = init_from.start(form, inducing, X)
        return dataclasses.replace(
            zeros,
            lambda1=jnp.broadcast_to(lambda1, zeros.lambda1.shape),
            Lambda2=jnp.broadcast_to(Lambda2, zeros.Lambda2.shape),
        )

    return init


def _same(own: Any, other: Any, what: str, remedy: str) -> Array:
    """Whether two pytrees are equal, as a traced value if need be; raises where it is known that they are not."""
    (leaves, form), (other_leaves, other_form) = jax.tree.flatten(own), jax.tree.flatten(other)
    pairs = list(zip(leaves, other_leaves, strict=False))
    equal = form == other_form and all(jnp.shape(a) == jnp.shape(b) for a, b in pairs)
    if equal and not any(isinstance(x, Tracer) for pair in pairs for x in pair):
        equal = all(np.array_equal(a, b) for a, b in pairs)
    if not equal:
        msg = f"`init_from` was conditioned at other {what} than the guide got. Give the guide {remedy}."
        raise ValueError(msg)
    return jnp.stack([jnp.array_equal(a, b) for a, b in pairs]).all()
