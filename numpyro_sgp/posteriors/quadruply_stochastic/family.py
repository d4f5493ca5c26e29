"""The posterior over weights in a model: its parameters, and its moments from some weights or from all."""

from collections.abc import Callable
import dataclasses
from typing import Any, Literal, NamedTuple
import warnings

import jax
from jax import Array, lax
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

from numpyro_sgp._internal.checks import at_least, positive
from numpyro_sgp.distributions.gaussian_process import GaussianProcess
from numpyro_sgp.distributions.sparse_posterior import SparsePosterior
from numpyro_sgp.features import as_finite_rank
from numpyro_sgp.features.finite_rank import has_correlated_weights
from numpyro_sgp.inducing import AbstractInducing, InducingPoints, subset
from numpyro_sgp.math.linalg import cholesky, matmul, matvec, solve_lower, solve_lower_transposed
from numpyro_sgp.posteriors.family import AbstractPosteriorFamily, Inducing, at_prior, inducing_param, is_initial
from numpyro_sgp.posteriors.gaussian import FittedParameters, InducingGaussian, MeanPart, Parameters
from numpyro_sgp.posteriors.mean_basis import TableDraw, TableMean
from numpyro_sgp.posteriors.moments import Moments, project
from numpyro_sgp.posteriors.process import ProcessPosterior, TableProcess, process_over
from numpyro_sgp.posteriors.quadruply_stochastic.formulas import (
    Inclusion,
    Sampled,
    bounding_scale,
    chevron_divergence,
    chevron_variance,
    control_variate,
    inclusion,
    linear_and_square,
    mean_divergence,
    nystrom_residual,
)
from numpyro_sgp.posteriors.quadruply_stochastic.table_sums import Chevron, dense_divergence, streamed
from numpyro_sgp.posteriors.quadruply_stochastic.weight_table import (
    Control,
    SampledRows,
    Weights,
    WeightTable,
    features_at,
    limit_of,
    numbers_of,
)
from numpyro_sgp.posteriors.whitened.formulas import whitened

__all__ = ["ControlForm", "Covariance", "QuadruplyStochastic"]

Covariance = Literal["inducing", "chevron"]

ControlForm = Literal["nystrom", "paper"]

# Of the inducing inputs that are chosen where none are given: a Cholesky factorisation of this size costs a fraction of
# the features of a step with 1000 basis functions and 500 rows.
_DEFAULT_INDUCING = 200

# Features of all rows in the memory that a plain optimizer makes the loss work through in each step.
_LARGE = 2**30


@dataclasses.dataclass(frozen=True)
class QuadruplyStochastic(AbstractPosteriorFamily):
    """q(f) with its mean in the weights of a kernel of finite rank, any rank: f = φ(x)ᵀw; starts at the prior.

    Where the covariance is that of function values u = L v, f = A(x)ᵀv + (φ(x) − Φ_uᵀKuu⁻¹k_u(x))ᵀw with v and w
    independent: the weights say what u does not, and q(v) has a mean of its own, m. The prior of f is then the kernel's
    at u, and elsewhere up to what features are off by.

    Args:
        basis_batch: how many basis functions a step samples.
        dense_columns: k, dense columns of the root of a chevron covariance; 0 is a diagonal one.
        covariance: "inducing", of function values at inducing inputs, or "chevron", of the weights.
        inducing: array (M, D), object or callable; None takes some rows of X.
        control: inputs (P, D) of a control variate for the mean, or how many rows of the first X to take.
        control_form: "nystrom" or "paper".
        relevance: a prior precision for each weight, trained, with a chevron covariance.
        jackknife: remove the bias of order 1/M of a likelihood that is not Gaussian.
        log_concave: names of observed sites with a log-concave likelihood that is not recognised as such.

    See `AutoQSGP` for more on each.
    """

    basis_batch: int = 1000
    dense_columns: int = 0
    covariance: Covariance = "inducing"
    inducing: Inducing | None = None
    control: int | ArrayLike | None = None
    control_form: ControlForm = "nystrom"
    relevance: bool = False
    jackknife: bool = False
    log_concave: tuple[str, ...] = ()
    has_cavities = False

    def __post_init__(self) -> None:
        _check_options(self)

    def moments(self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...]) -> Moments:
        kernel, X = as_finite_rank(prior.kernel), prior.X
        if batch_shape:
            msg = (
                f"`AutoQSGP` takes one latent for each GP site, got a batch of shape {batch_shape}. Give each latent a "
                "site of its own with an outcome of its own, or use another guide."
            )
            raise ValueError(msg)
        rank = jax.eval_shape(kernel.features, X).shape[-1]
        self._check(kernel, rank)
        basis = param("basis", lambda rng_key: self._table(kernel, X, rank, rng_key, prior.relative_jitter))
        given = self._inducing_part(param, prior, kernel) if self.covariance == "inducing" else None
        scale = None
        if self.covariance == "chevron":
            scale = param("log_scale", jnp.zeros((), X.dtype))
        if is_initial(param, "basis"):
            # The prior: not one feature is evaluated, of which there may be ten million.
            return at_prior(limit_of(kernel), X) if given is None else given.moments
        if isinstance(basis, SampledRows):
            return self._estimated(kernel, X, basis, given, scale)
        return self._exact(kernel, X, basis, given, predicting=bool(getattr(param, "predicting", True)))

    def gaussian(self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...]) -> None:
        """None: the weights of the mean are too many for a Gaussian over inducing variables alone."""
        del param, prior, batch_shape

    def process(self, fitted: FittedParameters, q: SparsePosterior) -> ProcessPosterior | TableProcess:
        prior, table = q.prior, fitted("basis")
        kernel, numbers = limit_of(prior.kernel), numbers_of(prior.kernel, table.size)
        options = {"width": prior.X.shape[-1], "whiten": not self.relevance}
        if self.covariance == "chevron":
            return TableProcess(kernel, prior.mean_function, TableDraw(prior.kernel, table, **options), numbers)
        basis = TableMean(prior.kernel, table, **options)
        limit = GaussianProcess(kernel, prior.X, jitter=prior.jitter)
        inducing, m, S_sqrt = self.inducing_posterior(fitted, limit)
        L, known = cholesky(inducing.Kuu(kernel), limit.relative_jitter), None
        if isinstance(inducing, InducingPoints):
            # The weights say what u does not: their function less its interpolation from u.
            known = solve_lower(L, basis.mean_at(kernel, inducing.Z, numbers)[:, None])[:, 0]
        return process_over(InducingGaussian(inducing, L, m, S_sqrt, MeanPart(basis, numbers, known)), q, kernel)

    # The parameters.

    def _check(self, kernel: Any, rank: int) -> None:
        if self.basis_batch > rank:
            msg = (
                f"`basis_batch` is {self.basis_batch}, but the kernel has only m = {rank} basis functions. Pass at "
                f"most {rank}; with exactly {rank} nothing is sampled."
            )
            raise ValueError(msg)
        if self.basis_batch == 1 < rank:
            msg = (
                f"`basis_batch=1` of m = {rank} basis functions has no pairs to estimate squares from. Pass 2 or more."
            )
            raise ValueError(msg)
        if self.dense_columns > rank:
            msg = f"`dense_columns` is {self.dense_columns}, more than the m = {rank} basis functions. Pass fewer."
            raise ValueError(msg)
        if has_correlated_weights(kernel) and self.covariance == "chevron" and not self.relevance:
            msg = (
                f"{type(kernel).__name__} has a dense prior precision S, and the divergence of a chevron covariance "
                'needs log|S| of an m × m matrix. Leave `covariance="inducing"`, whose divergence does not, or use '
                "a kernel whose weights are independent, such as `RandomFourier`."
            )
            raise ValueError(msg)

    def _table(self, kernel: Any, X: Array, rank: int, rng_key: Array, jitter: float) -> WeightTable:
        k = self.dense_columns if self.covariance == "chevron" else None
        columns = 1 if k is None else 2 + k + self.relevance
        control = None
        if self.control is not None:
            points = self.control
            if np.ndim(points) == 0:
                number = positive("control", points, "It is how many rows of X to take; or pass inputs (P, D).")
                rows = jax.random.permutation(rng_key, X.shape[-2])[: min(number, X.shape[-2])]
                points = X[rows]
            points = jnp.asarray(points, X.dtype)
            if points.ndim != 2 or points.shape[-1] != X.shape[-1]:
                msg = f"`control` has shape {points.shape}, but X has {X.shape[-1]} columns. Pass inputs (P, D)."
                raise ValueError(msg)
            control = Control.at(points, kernel, not self.relevance, float(jitter))
        return WeightTable(jnp.zeros((rank, columns), X.dtype), control, self.basis_batch, k)

    def inducing_posterior(self, param: Parameters, limit: GaussianProcess) -> tuple[AbstractInducing, Array, Array]:
        """The inducing variables u = L v, and q(v) = N(m, S_sqrt S_sqrtᵀ) by m and the lower root S_sqrt."""
        made = _some_inputs if self.inducing is None else self.inducing
        inducing = inducing_param(param, made, limit, False)
        M, dtype = inducing.num_inducing, limit.X.dtype
        # What features share with u is seen at the inputs of u, which variables that are no function values lack.
        m = param("m", jnp.zeros(M, dtype)) if isinstance(inducing, InducingPoints) else jnp.zeros(M, dtype)
        return inducing, m, jnp.tril(param("S_sqrt", jnp.eye(M, dtype=dtype)))

    def _inducing_part(self, param: Parameters, prior: GaussianProcess, kernel: Any) -> "_InducingPart":
        limit = GaussianProcess(limit_of(kernel), prior.X, jitter=prior.jitter)
        inducing, m, S_sqrt = self.inducing_posterior(param, limit)
        blocks = project(inducing, limit.kernel, limit.X, limit.relative_jitter)
        q = whitened(m, S_sqrt, blocks.A, blocks.kff)._replace(kernel=limit.kernel)
        if not isinstance(inducing, InducingPoints):
            return _InducingPart(q, None, None)
        return _InducingPart(q, inducing.Z, solve_lower_transposed(blocks.L, blocks.A))

    # The moments.

    def _features(self, kernel: Any, X: Array, index: Array) -> Array:
        return features_at(kernel, X, index, not self.relevance)

    def _precision(self, kernel: Any, index: Array, weights: Weights) -> Array | None:
        if weights.log_precision is not None:
            return jnp.exp(weights.log_precision)
        return kernel.prior_precision(index) if has_correlated_weights(kernel) else None

    def _estimated(
        self, kernel: Any, X: Array, rows: SampledRows, given: "_InducingPart | None", scale: Array | None
    ) -> Moments:
        sample = inclusion(rows.value.size, len(rows.index))
        Phi = _rest(given, self._features(kernel, _inputs(given, X), rows.index))
        now = rows.value.weights(rows.values + rows.zero.rows, rows.index)
        w = rows.value.weights(rows.values, rows.index).linear
        change = now.linear - w
        f, squares = self._mean_and_square(X, Phi, rows, w, change, sample, given)
        precision = self._precision(kernel, rows.index, now)
        kl = mean_divergence(now.mean, precision, sample)
        if given is None:
            assert now.d is not None
            assert now.log_diagonal is not None
            assert scale is not None
            variance = chevron_variance(squares[:, 1:], Phi, now.d, sample)
            kl = kl + chevron_divergence(now.U, now.d, now.log_diagonal, precision, sample)
            # With all weights the variance is exact; elsewhere c is the prior's deviation times a factor.
            c = jnp.exp(scale) * jnp.sqrt(limit_of(kernel)(X))
            whole = len(rows.index) == rows.value.size
            deviation = jnp.sqrt(variance) if whole else bounding_scale(variance, c)
            q = at_prior(limit_of(kernel), X)._replace(variance=variance)
        else:
            q = given.moments
            variance, deviation = q.variance, jnp.sqrt(q.variance)
            kl = kl + q.kl
        if rows.zero.numbers is not None:
            # Zero, whose derivatives are the kernel's numbers as they are now, and 1, times the factor of the loss.
            numbers = [*lax.stop_gradient(numbers_of(kernel, rows.value.size)), jnp.ones((), X.dtype)]
            kl = kl + sum(jnp.sum(zero * number) for zero, number in zip(rows.zero.numbers, numbers, strict=True))
        # The share of the inducing variables in the mean is exact.
        share = jnp.zeros_like(f[:, 0]) if given is None else q.mean
        sampled = Sampled(
            excess=squares[:, 0] - f[:, 0] ** 2,
            variance=variance,
            scale=deviation,
            halves=_halves(Phi, now.mean, rows, share) if self.jackknife else None,
            share=1.0 / sample.single,
            controlled=rows.tracked is not None,
            log_concave=self.log_concave,
            integrated=rows.integrated,
        )
        return q._replace(mean=f[:, 0] + share, kl=kl, sampled=sampled)

    def _mean_and_square(
        self,
        X: Array,
        Phi: Array,
        rows: SampledRows,
        w: Array,
        change: Array,
        sample: Inclusion,
        given: "_InducingPart | None",
    ) -> tuple[Array, Array]:
        """Estimates of Φμ and ΦU, and of their squares, with the control variate that there is."""
        if rows.tracked is None:
            return linear_and_square(Phi, w, change, sample)
        control = rows.value.control
        assert control is not None
        Phi_p = control.features(rows.index)
        if self.control_form == "nystrom":
            cross = _rest(given, control.cross(_inputs(given, X)).T).T
            residual = nystrom_residual(control.L, cross, Phi_p, rows.tracked)
            return linear_and_square(Phi, w, change, sample, residual)
        f, squares = linear_and_square(Phi, w, change, sample)
        return f, squares + control_variate(Phi_p, w, change, rows.tracked, sample)

    def _exact(
        self, kernel: Any, X: Array, table: WeightTable, given: "_InducingPart | None", *, predicting: bool
    ) -> Moments:
        """With all weights, block by block."""
        if not predicting:
            _warn_of_size(table, X)
        f, d_variance, kl = streamed(kernel, _inputs(given, X), table, not self.relevance)
        if has_correlated_weights(kernel) and not self.relevance:
            # All pairs of weights: what no prediction needs is not computed, and not a number.
            kl = jnp.full((), jnp.nan, X.dtype) if predicting else dense_divergence(kernel, table)
        if given is not None:
            q = given.moments
            return q._replace(mean=_rest(given, f)[:, 0] + q.mean, kl=kl + q.kl)
        variance = jnp.sum(f[:, 1:] ** 2, axis=-1) + d_variance
        q = at_prior(limit_of(kernel), X)
        return q._replace(mean=f[:, 0], variance=variance, kl=kl, kernel=Chevron(kernel, table, not self.relevance))


class _InducingPart(NamedTuple):
    """What the inducing variables give: moments, and their inputs Z, (M_u, D), with H = Kuu⁻¹Kuf, (M_u, N), or None."""

    moments: Moments
    Z: Array | None
    H: Array | None


def _inputs(given: _InducingPart | None, X: Array) -> Array:
    """Where functions are needed for what u does not say of them at X: there and, below, at Z."""
    return X if given is None or given.Z is None else jnp.concatenate([X, given.Z])


def _rest(given: _InducingPart | None, values: Array) -> Array:
    """g(x) − H(x)ᵀg(Z) of functions g, given by their values at `_inputs` along the first axis."""
    if given is None or given.H is None:
        return values
    N = given.H.shape[-1]
    return values[:N] - matmul(jnp.swapaxes(given.H, -1, -2), values[N:])


def _check_options(family: QuadruplyStochastic) -> None:
    positive("basis_batch", family.basis_batch, "It is how many basis functions a step samples; the default is 1000.")
    if family.covariance not in ("inducing", "chevron"):
        msg = f'`covariance` must be "inducing" or "chevron", got {family.covariance!r}. The default is "inducing".'
        raise ValueError(msg)
    if family.control_form not in ("nystrom", "paper"):
        msg = f'`control_form` must be "nystrom" or "paper", got {family.control_form!r}. The former has less variance.'
        raise ValueError(msg)
    columns = at_least(0, "dense_columns", family.dense_columns, "0 is a diagonal covariance.")
    if family.covariance == "inducing" and columns:
        msg = (
            f"`dense_columns={columns}` was given with a covariance of inducing variables. Dense columns belong to "
            '`covariance="chevron"`; leave them out, or pass that.'
        )
        raise ValueError(msg)
    if family.covariance == "chevron" and family.inducing is not None:
        msg = "`inducing` was given with a chevron covariance, which has none. Leave it out, or leave out `covariance`."
        raise ValueError(msg)
    if family.relevance and family.covariance != "chevron":
        msg = (
            "`relevance=True` was given with a covariance of inducing variables. A relevance vector machine has a "
            'prior precision for each weight, and so a covariance of the weights: pass `covariance="chevron"`.'
        )
        raise ValueError(msg)
    if isinstance(family.control, int) and family.control < 1:
        msg = f"`control` must be a positive number of inputs, or inputs (P, D), got {family.control!r}. Or None."
        raise ValueError(msg)


def _some_inputs(kernel: Callable, X: Array, rng_key: Array) -> Array:
    """Up to 200 rows of the first batch, at random."""
    distinct = len(np.unique(np.asarray(X), axis=0))
    return subset(kernel, X, rng_key, num_inducing=min(_DEFAULT_INDUCING, distinct))


def _halves(Phi: Array, mean: Array, rows: SampledRows, share: Array) -> tuple[Array, Array]:
    half = len(rows.index) // 2
    return (
        share + rows.value.size / half * matvec(Phi[:, :half], mean[:half]),
        share + rows.value.size / (len(mean) - half) * matvec(Phi[:, half:], mean[half:]),
    )


def _warn_of_size(table: WeightTable, X: Array) -> None:
    size = table.size * X.shape[-2] * X.dtype.itemsize
    if size > _LARGE:
        held = 4 * table.values.size * table.values.dtype.itemsize
        warnings.warn(
            f"The loss is evaluated with all m = {table.size:,} basis functions: {size:,} bytes of features, block by "
            f"block, and an optimizer such as Adam touches {held:,} bytes of parameters in each step. Train with "
            "`numpyro_sgp.RowSparse`, which samples the basis functions.",
            UserWarning,
            stacklevel=2,
        )
