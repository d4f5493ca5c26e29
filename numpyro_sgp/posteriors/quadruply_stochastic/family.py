"""The posterior over weights in a model: its parameters, and its moments from some weights or from all."""

from abc import abstractmethod
from collections.abc import Callable
import dataclasses
from typing import Any, Literal, NamedTuple, final
import warnings

import jax
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

from numpyro_sgp._internal.checks import positive
from numpyro_sgp._internal.probed import value_of
from numpyro_sgp.distributions.gaussian_process import GaussianProcess
from numpyro_sgp.distributions.sparse_posterior import SparsePosterior
from numpyro_sgp.features import as_finite_rank
from numpyro_sgp.features.finite_rank import has_correlated_weights
from numpyro_sgp.inducing import AbstractInducing, InducingPoints, subset
from numpyro_sgp.kernels.functional import AbstractFunctional
from numpyro_sgp.math.linalg import solve_lower, solve_lower_transposed
from numpyro_sgp.math.products import matmul, matvec
from numpyro_sgp.posteriors.family import (
    AbstractPosteriorFamily,
    Inducing,
    at_prior,
    inducing_param,
    is_initial,
    root_of_prior,
)
from numpyro_sgp.posteriors.gaussian import InducingGaussian, MeanPart
from numpyro_sgp.posteriors.mean_basis import TableDraw, TableMean
from numpyro_sgp.posteriors.moments import Moments, project
from numpyro_sgp.posteriors.parameters import FittedParameters, Parameters
from numpyro_sgp.posteriors.process import ProcessPosterior, TableProcess
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
    relevance_divergence,
)
from numpyro_sgp.posteriors.quadruply_stochastic.table_sums import Chevron, dense_divergence, streamed, sums_of_squares
from numpyro_sgp.posteriors.quadruply_stochastic.weight_table import (
    Control,
    SampledRows,
    Weights,
    WeightTable,
    features_at,
    limit_of,
    numbers_of,
    with_numbers,
)
from numpyro_sgp.posteriors.whitened.formulas import whitened

__all__ = ["ControlForm", "Covariance", "QuadruplyStochastic", "WithChevronCovariance", "WithInducingCovariance"]

Covariance = Literal["inducing", "chevron"]

ControlForm = Literal["nystrom", "paper"]

# Of the inducing inputs that are chosen where none are given: a Cholesky factorisation of this size costs a fraction of
# the features of a step with 1000 basis functions and 500 rows.
_DEFAULT_INDUCING = 200

# Rows that tell how large the columns of features of a relevance vector machine are.
_START_ROWS = 1000

# Features of all rows in the memory that a plain optimizer makes the loss work through in each step.
_LARGE = 2**30


class AbstractQuadruplyStochastic(AbstractPosteriorFamily):
    """q(f) with its mean in the weights of a kernel of finite rank, f = φ(x)ᵀw; a subclass adds the covariance."""

    basis_batch: int
    control: int | ArrayLike | None
    control_form: ControlForm
    jackknife: bool
    log_concave: tuple[str, ...]
    dense_columns: int | None
    relevance: bool
    has_cavities = False

    @property
    def couples_rows(self) -> bool:
        return False

    @abstractmethod
    def _part(self, param: Parameters, prior: GaussianProcess, kernel: Any) -> "_Part":
        """What the posterior is without the weights."""

    @abstractmethod
    def _estimated_covariance(
        self, part: "_Part", Phi: Array, squares: Array, now: Weights, precision: Array | None, sample: Inclusion
    ) -> tuple[Array, Array, Array]:
        """The variance, a number whose mean is at least the standard deviation, and the covariance's divergence.

        In a relevance vector machine, the divergence of both.
        """

    @abstractmethod
    def _exact(self, kernel: Any, part: "_Part", table: WeightTable, f: Array, variance: Array, kl: Array) -> Moments:
        """The moments from the sums over all weights, those of `streamed`."""

    def moments(self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...]) -> Moments:
        if isinstance(prior.X, AbstractFunctional):
            msg = (
                f"`AutoQSGP` takes inputs, got the functionals {type(prior.X).__name__}. Use `AutoWeightSpaceGP`, or a "
                "guide with inducing inputs."
            )
            raise TypeError(msg)
        kernel, X = as_finite_rank(prior.kernel), prior.X
        if batch_shape:
            msg = (
                f"`AutoQSGP` takes one latent for each GP site, got a batch of shape {batch_shape}. Give each latent a "
                "site of its own with an outcome of its own, or use another guide."
            )
            raise ValueError(msg)
        rank = jax.eval_shape(kernel.features, X).shape[-1]
        basis = param("basis", lambda rng_key: self._table(kernel, X, rank, rng_key, prior.relative_jitter))
        size = value_of(basis).size
        if size != rank:
            msg = (
                f"The kernel has m = {rank} basis functions here and had {size} when the guide was first run. A kernel "
                "made from the rows of X changes with them: make it from fixed inputs."
            )
            raise ValueError(msg)
        if not min(2, rank) <= self.basis_batch <= rank:
            msg = (
                f"`basis_batch` is {self.basis_batch}, but the kernel has m = {rank} basis functions. Pass at least 2 "
                f"and at most {rank}."
            )
            raise ValueError(msg)
        if self.dense_columns is not None and has_correlated_weights(kernel) and not self.relevance:
            kernel = with_numbers(kernel, [_fixed(number) for number in numbers_of(kernel, size)], size)
        part = self._part(param, prior, kernel)
        if is_initial(param, "basis"):
            # The prior: not one feature is evaluated, of which there may be ten million.
            return part.moments
        if isinstance(basis, SampledRows):
            return self._estimated(kernel, X, basis, part)
        predicting = bool(getattr(param, "predicting", True))
        if not predicting:
            _warn_of_size(basis, X)
        f, variance, kl = streamed(kernel, part.inputs(X), basis, not self.relevance)
        if has_correlated_weights(kernel) and not self.relevance:
            # All pairs of weights: what no prediction needs is not computed, and not a number.
            kl = jnp.full((), jnp.nan, X.dtype) if predicting else dense_divergence(kernel, basis)
        return self._exact(kernel, part, basis, f, variance, kl)

    def gaussian(self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...]) -> None:
        """None: the weights of the mean are too many for a Gaussian over inducing variables alone."""
        del param, prior, batch_shape

    def _table(self, kernel: Any, X: Array, rank: int, rng_key: Array, jitter: float) -> WeightTable:
        k, control = self.dense_columns, None
        columns = 1 if k is None else 2 + k
        if self.control is not None:
            points = self.control
            if np.ndim(points) == 0:
                number = positive("control", points, "It is how many rows of X to take; or pass inputs (P, D).")
                points = X[jax.random.permutation(rng_key, X.shape[-2])[: min(number, X.shape[-2])]]
            control = Control.at(jnp.asarray(points, X.dtype), kernel, not self.relevance, float(jitter))
        table = WeightTable(jnp.zeros((rank, columns), X.dtype), control, self.basis_batch, k)
        if not self.relevance:
            return table
        # With means of zero all variances have the same divergence. They start at those that the data would leave with
        # noise of a tenth of the prior's deviation.
        squares = sums_of_squares(kernel, X[:_START_ROWS], table, False) * max(1.0, len(X) / _START_ROWS)
        noise = 0.01 * jnp.mean(limit_of(kernel)(X[:_START_ROWS]))
        log_diagonal = 0.5 * jnp.log(noise / jnp.maximum(squares, 1e-6 * jnp.mean(squares)))
        return dataclasses.replace(table, values=table.values.at[:, -1].set(log_diagonal.astype(X.dtype)))

    def _estimated(self, kernel: Any, X: Array, rows: SampledRows, part: "_Part") -> Moments:
        table, q = rows.value, part.moments
        sample = inclusion(table.size, len(rows.index))
        Phi = part.rest(features_at(kernel, part.inputs(X), rows.index, not self.relevance))
        now = table.weights(rows.values + rows.zero.rows, rows.index)
        w = table.weights(rows.values, rows.index).linear
        f, squares = self._mean_and_square(X, Phi, rows, w, now.linear - w, sample, part)
        correlated = has_correlated_weights(kernel) and not self.relevance
        precision = kernel.prior_precision(rows.index) if correlated else None
        variance, deviation, kl = self._estimated_covariance(part, Phi, squares[:, 1:], now, precision, sample)
        if not self.relevance:
            kl = mean_divergence(now.mean, precision, sample) + kl
        if rows.zero.numbers is not None:
            # Zero, whose derivatives are the kernel's numbers as they are now, and 1, times the factor of the loss.
            numbers = [*lax.stop_gradient(numbers_of(kernel, table.size)), jnp.ones((), X.dtype)]
            kl = kl + sum(jnp.sum(zero * number) for zero, number in zip(rows.zero.numbers, numbers, strict=True))
        halves = None
        if self.jackknife:
            half, M = len(rows.index) // 2, len(rows.index)
            first = matvec(Phi[:, :half], now.mean[:half])
            second = matvec(Phi[:, half:], now.mean[half:])
            halves = q.mean + table.size / half * first, q.mean + table.size / (M - half) * second
        sampled = Sampled(
            excess=squares[:, 0] - f[:, 0] ** 2,
            variance=variance,
            scale=deviation,
            halves=halves,
            share=1.0 / sample.single,
            controlled=rows.tracked is not None,
            log_concave=self.log_concave,
            integrated=rows.integrated,
        )
        return q._replace(mean=f[:, 0] + q.mean, variance=variance, kl=kl, sampled=sampled)

    def _mean_and_square(
        self, X: Array, Phi: Array, rows: SampledRows, w: Array, change: Array, sample: Inclusion, part: "_Part"
    ) -> tuple[Array, Array]:
        """Estimates of Φμ and ΦU, and of their squares, with the control variate that there is."""
        control = rows.value.control
        if control is None or rows.tracked is None:
            return linear_and_square(Phi, w, change, sample)
        Phi_p = control.features(rows.index)
        if self.control_form == "nystrom":
            cross = part.rest(control.cross(part.inputs(X)).T).T
            residual = nystrom_residual(control.L, cross, Phi_p, rows.tracked)
            return linear_and_square(Phi, w, change, sample, residual)
        f, squares = linear_and_square(Phi, w, change, sample)
        return f, squares + control_variate(Phi_p, w, change, rows.tracked, sample)


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
    relevance = False

    def process(self, fitted: FittedParameters, q: SparsePosterior) -> ProcessPosterior:
        prior, table = q.prior, fitted("basis")
        kernel, numbers = limit_of(prior.kernel), numbers_of(prior.kernel, table.size)
        basis = TableMean(prior.kernel, table, width=prior.X.shape[-1], whiten=True)
        limit = GaussianProcess(kernel, prior.X, jitter=prior.jitter)
        inducing, m, S_sqrt = self._inducing_posterior(fitted, limit)
        L, known = root_of_prior(inducing, limit), None
        if isinstance(inducing, InducingPoints):
            # The weights say what u does not: their function less its interpolation from u.
            known = solve_lower(L, basis.mean_at(kernel, inducing.Z, numbers)[:, None])[:, 0]
        return InducingGaussian(inducing, L, m, S_sqrt, MeanPart(basis, numbers, known), kernel).process(q)

    def _inducing_posterior(self, param: Parameters, limit: GaussianProcess) -> tuple[AbstractInducing, Array, Array]:
        """The inducing variables u = L v, and q(v) = N(m, S_sqrt S_sqrtᵀ) by m and the lower root S_sqrt."""
        inducing = inducing_param(param, _some_inputs if self.inducing is None else self.inducing, limit, False)
        M, dtype = inducing.num_inducing, limit.X.dtype
        # What features share with u is seen at the inputs of u, which variables that are no function values lack.
        m = param("m", jnp.zeros(M, dtype)) if isinstance(inducing, InducingPoints) else jnp.zeros(M, dtype)
        return inducing, m, jnp.tril(param("S_sqrt", jnp.eye(M, dtype=dtype)))

    def _part(self, param: Parameters, prior: GaussianProcess, kernel: Any) -> "_Part":
        limit = GaussianProcess(limit_of(kernel), prior.X, jitter=prior.jitter)
        inducing, m, S_sqrt = self._inducing_posterior(param, limit)
        blocks = project(inducing, limit.kernel, limit.X, limit.relative_jitter)
        q = whitened(m, S_sqrt, blocks.A, blocks.kff)._replace(kernel=limit.kernel)
        if not isinstance(inducing, InducingPoints):
            return _Part(q)
        return _Part(q, inducing.Z, solve_lower_transposed(blocks.L, blocks.A))

    def _estimated_covariance(
        self, part: "_Part", Phi: Array, squares: Array, now: Weights, precision: Array | None, sample: Inclusion
    ) -> tuple[Array, Array, Array]:
        del Phi, squares, now, precision, sample
        q = part.moments
        return q.variance, jnp.sqrt(q.variance), q.kl

    def _exact(self, kernel: Any, part: "_Part", table: WeightTable, f: Array, variance: Array, kl: Array) -> Moments:
        del kernel, table, variance
        q = part.moments
        return q._replace(mean=part.rest(f)[:, 0] + q.mean, kl=kl + q.kl)


@final
@dataclasses.dataclass(frozen=True)
class WithChevronCovariance(AbstractQuadruplyStochastic):
    """The covariance is that of the weights, CCᵀ with k dense columns. The arguments are those of the function."""

    basis_batch: int
    dense_columns: int
    control: int | ArrayLike | None
    control_form: ControlForm
    relevance: bool
    jackknife: bool
    log_concave: tuple[str, ...]

    def process(self, fitted: FittedParameters, q: SparsePosterior) -> TableProcess:
        prior, table = q.prior, fitted("basis")
        draw = TableDraw(prior.kernel, table, width=prior.X.shape[-1], whiten=not self.relevance)
        return TableProcess(limit_of(prior.kernel), prior.mean_function, draw, numbers_of(prior.kernel, table.size))

    def _part(self, param: Parameters, prior: GaussianProcess, kernel: Any) -> "_Part":
        scale = param("log_scale", jnp.zeros((), prior.X.dtype))
        return _Part(at_prior(limit_of(kernel), prior.X), log_scale=scale)

    def _estimated_covariance(
        self, part: "_Part", Phi: Array, squares: Array, now: Weights, precision: Array | None, sample: Inclusion
    ) -> tuple[Array, Array, Array]:
        variance = chevron_variance(squares, Phi, now.d, sample)
        # With all weights the variance is exact; elsewhere c is the prior's deviation times a factor.
        if sample.single == 1.0:
            deviation = jnp.sqrt(variance)
        else:
            deviation = bounding_scale(variance, jnp.exp(part.log_scale) * jnp.sqrt(part.moments.variance))
        if self.relevance:
            return variance, deviation, relevance_divergence(now.second_moment, now.log_diagonal, sample)
        return variance, deviation, chevron_divergence(now.U, now.d, now.log_diagonal, precision, sample)

    def _exact(self, kernel: Any, part: "_Part", table: WeightTable, f: Array, variance: Array, kl: Array) -> Moments:
        variance = jnp.sum(f[:, 1:] ** 2, axis=-1) + variance
        chevron = Chevron(kernel, table, not self.relevance)
        return part.moments._replace(mean=f[:, 0], variance=variance, kl=kl, kernel=chevron)


def QuadruplyStochastic(
    basis_batch: int = 1000,
    dense_columns: int = 0,
    covariance: Covariance = "inducing",
    inducing: Inducing | None = None,
    control: int | ArrayLike | None = None,
    control_form: ControlForm = "nystrom",
    relevance: bool = False,
    jackknife: bool = False,
    log_concave: tuple[str, ...] = (),
) -> WithInducingCovariance | WithChevronCovariance:
    """The posterior family of `AutoQSGP`: q(f) with its mean in the weights of a kernel of finite rank, of any rank.

    Args:
        basis_batch: how many basis functions a step samples.
        dense_columns: k, dense columns of the root of a chevron covariance; 0 is a diagonal one.
        covariance: "inducing", of function values at inducing inputs, or "chevron", of the weights.
        inducing: array (M, D), object or callable; None takes some rows of X.
        control: inputs (P, D) of a control variate for the mean, or how many rows of the first X to take.
        control_form: "nystrom" or "paper".
        relevance: a prior precision for each weight, the one of the largest bound, with a chevron covariance.
        jackknife: remove the bias of order 1/M of a likelihood that is not Gaussian.
        log_concave: names of observed sites with a log-concave likelihood that is not recognised as such.

    See `AutoQSGP` for more on each.
    """
    if control_form not in ("nystrom", "paper"):
        msg = f'`control_form` must be "nystrom" or "paper", got {control_form!r}. The former has less variance.'
        raise ValueError(msg)
    if covariance not in ("inducing", "chevron"):
        msg = f'`covariance` must be "inducing" or "chevron", got {covariance!r}. The default is "inducing".'
        raise ValueError(msg)
    if covariance == "chevron":
        if inducing is not None:
            msg = "A chevron covariance has no `inducing` inputs. Leave `inducing` out, or leave out `covariance`."
            raise ValueError(msg)
        return WithChevronCovariance(
            basis_batch, dense_columns, control, control_form, relevance, jackknife, log_concave
        )
    if dense_columns or relevance:
        msg = (
            f"`dense_columns={dense_columns}` and `relevance={relevance}` belong to a covariance of the weights. Pass "
            '`covariance="chevron"`, or leave them out.'
        )
        raise ValueError(msg)
    return WithInducingCovariance(basis_batch, inducing, control, control_form, jackknife, log_concave)


class _Part(NamedTuple):
    """What the posterior is without the weights.

    Attributes:
        moments: those of the inducing variables, or of the prior.
        Z: inputs of the inducing variables, (M_u, D), or None.
        H: Kuu⁻¹Kuf, (M_u, N), or None.
        log_scale: log of a factor on the prior's deviation, of a chevron covariance.
    """

    moments: Moments
    Z: Array | None = None
    H: Array | None = None
    log_scale: Any = None

    def inputs(self, X: Array) -> Array:
        """Where functions are needed for what u does not say of them at X: there and, below, at Z."""
        return X if self.Z is None else jnp.concatenate([X, self.Z])

    def rest(self, values: Array) -> Array:
        """g(x) − H(x)ᵀg(Z) of functions g, given by their values at `inputs` along the first axis."""
        if self.H is None:
            return values
        N = self.H.shape[-1]
        return values[:N] - matmul(jnp.swapaxes(self.H, -1, -2), values[N:])


@jax.custom_jvp
def _fixed(number: Array) -> Array:
    """A hyperparameter that nothing may train."""
    return number


def _refuse(primals: tuple[Array], tangents: tuple[Any]) -> tuple[Array, Any]:
    if not isinstance(tangents[0], SymbolicZero):
        msg = (
            "The loss was differentiated with respect to a hyperparameter of the kernel. With a chevron covariance and "
            "weights of a dense prior precision S, the loss leaves out −½ log|S| of an m × m matrix, so its "
            "hyperparameters have to be fixed numbers: train them with another guide, on some of the rows. Or leave "
            '`covariance="inducing"`.'
        )
        raise ValueError(msg)  # noqa: TRY004 - a hyperparameter of the right type, which may not be trained
    return primals[0], tangents[0]


_fixed.defjvp(_refuse, symbolic_zeros=True)


def _some_inputs(kernel: Callable, X: Array, rng_key: Array) -> Array:
    """Up to 200 rows of the first batch, at random."""
    distinct = len(np.unique(np.asarray(X), axis=0))
    return subset(kernel, X, rng_key, num_inducing=min(_DEFAULT_INDUCING, distinct))


def _warn_of_size(table: WeightTable, X: Array) -> None:
    size = table.size * X.shape[-2] * X.dtype.itemsize
    if size > _LARGE:
        warnings.warn(
            f"The loss is evaluated with all m = {table.size:,} basis functions: {size:,} bytes of features in each "
            "step. Train with `numpyro_sgp.RowSparse`, which samples the basis functions.",
            UserWarning,
            stacklevel=2,
        )
