"""The posterior over weights in a model: its parameters, and its mean from some weights or from all."""

from abc import abstractmethod
from typing import Any, Literal, NamedTuple
import warnings

import jax
from jax import Array, lax
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

from numpyro_sgp._internal.checks import positive
from numpyro_sgp._internal.probed import value_of
from numpyro_sgp.distributions.gaussian_process import GaussianProcess
from numpyro_sgp.features import as_finite_rank
from numpyro_sgp.features.finite_rank import has_correlated_weights
from numpyro_sgp.kernels.functional import AbstractFunctional
from numpyro_sgp.math.products import matmul, matvec
from numpyro_sgp.posteriors.family import AbstractPosteriorFamily, is_initial
from numpyro_sgp.posteriors.moments import Moments
from numpyro_sgp.posteriors.parameters import Parameters
from numpyro_sgp.posteriors.quadruply_stochastic.formulas import (
    Inclusion,
    Sampled,
    control_variate,
    inclusion,
    linear_and_square,
    nystrom_residual,
)
from numpyro_sgp.posteriors.quadruply_stochastic.table_sums import dense_divergence, independent_divergence, streamed
from numpyro_sgp.posteriors.quadruply_stochastic.weight_table import (
    Control,
    SampledRows,
    Weights,
    WeightTable,
    features_at,
    numbers_of,
)

__all__ = ["AbstractQuadruplyStochastic", "ControlForm", "Part"]

ControlForm = Literal["nystrom", "paper"]

# Features of all rows in the memory that a plain optimizer makes the loss work through in each step.
_LARGE = 2**30


class Part(NamedTuple):
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
        return values[:N] - matmul(self.H.mT, values[N:])


class AbstractQuadruplyStochastic(AbstractPosteriorFamily):
    """q(f) with its mean in the weights of a kernel of finite rank, f = φ(x)ᵀw; a subclass adds the covariance.

    Attributes:
        whitens: whether weights that are independent in the prior are those of features with a prior precision of one.
    """

    basis_batch: int
    control: int | ArrayLike | None
    control_form: ControlForm
    jackknife: bool
    log_concave: tuple[str, ...]
    dense_columns: int | None
    whitens = True
    has_cavities = False

    @property
    def couples_rows(self) -> bool:
        return False

    @abstractmethod
    def _part(self, param: Parameters, prior: GaussianProcess, kernel: Any) -> Part:
        """What the posterior is without the weights."""

    @abstractmethod
    def _estimated_variance(
        self, part: Part, Phi: Array, squares: Array, now: Weights, sample: Inclusion
    ) -> tuple[Array, Array]:
        """The variance, and a number whose mean is at least the standard deviation."""

    @staticmethod
    @abstractmethod
    def _divergence_of_weights(weights: Weights, precision: Array | None, sample: Inclusion) -> Array:
        """The divergence of the weights, up to a constant: a sum over those that are given.

        Args:
            weights: q(w) at some weights.
            precision: their block of a dense prior precision S, (M, M), or None where weights are independent.
            sample: the factors.
        """

    @abstractmethod
    def _exact(self, kernel: Any, part: Part, table: WeightTable, f: Array, variance: Array) -> Moments:
        """The moments from the sums over all weights, those of `streamed`, with the divergence of `part`."""

    def _started(self, kernel: Any, X: Array, table: WeightTable) -> WeightTable:
        """The table with the values it starts from, where these are not zero."""
        del kernel, X
        return table

    def _checked(self, kernel: Any, size: int) -> Any:
        """The kernel, with what must not happen to it refused."""
        del size
        return kernel

    def _correlated(self, kernel: Any) -> bool:
        """Whether the prior precision of the weights is dense."""
        return self.whitens and has_correlated_weights(kernel)

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
        kernel = self._checked(kernel, size)
        part = self._part(param, prior, kernel)
        if is_initial(param, "basis"):
            # The prior: not one feature is evaluated, of which there may be ten million.
            return part.moments
        if isinstance(basis, SampledRows):
            return self._estimated(kernel, X, basis, part)
        predicting = bool(getattr(param, "predicting", True))
        if not predicting:
            _warn_of_size(basis, X)
        f, variance = streamed(kernel, part.inputs(X), basis, self.whitens)
        if not self._correlated(kernel):
            kl = independent_divergence(basis, self._divergence_of_weights)
        elif predicting:
            # All pairs of weights: what no prediction needs is not computed, and not a number.
            kl = jnp.full((), jnp.nan, X.dtype)
        else:
            kl = dense_divergence(kernel, basis)
        q = self._exact(kernel, part, basis, f, variance)
        return q._replace(kl=q.kl + kl)

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
            control = Control.at(jnp.asarray(points, X.dtype), kernel, self.whitens, float(jitter))
        return self._started(kernel, X, WeightTable(jnp.zeros((rank, columns), X.dtype), control, self.basis_batch, k))

    def _estimated(self, kernel: Any, X: Array, rows: SampledRows, part: Part) -> Moments:
        table, q = rows.value, part.moments
        sample = inclusion(table.size, len(rows.index))
        Phi = part.rest(features_at(kernel, part.inputs(X), rows.index, self.whitens))
        now = table.weights(rows.values + rows.zero.rows, rows.index)
        w = table.weights(rows.values, rows.index).linear
        f, squares = self._mean_and_square(X, Phi, rows, w, now.linear - w, sample, part)
        variance, deviation = self._estimated_variance(part, Phi, squares[:, 1:], now, sample)
        precision = kernel.prior_precision(rows.index) if self._correlated(kernel) else None
        kl = q.kl + self._divergence_of_weights(now, precision, sample)
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
        self, X: Array, Phi: Array, rows: SampledRows, w: Array, change: Array, sample: Inclusion, part: Part
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


def _warn_of_size(table: WeightTable, X: Array) -> None:
    size = table.size * X.shape[-2] * X.dtype.itemsize
    if size > _LARGE:
        warnings.warn(
            f"The loss is evaluated with all m = {table.size:,} basis functions: {size:,} bytes of features in each "
            "step. Train with `numpyro_sgp.RowSparse`, which samples the basis functions.",
            UserWarning,
            stacklevel=2,
        )
