"""Quadruply stochastic GPs: posteriors over the weights of ten million basis functions, a few of them in a step."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any, Literal, NamedTuple
import warnings

import jax
from jax import Array, lax
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np
from numpyro.infer.autoguide import AutoNormal

from numpyro_sgp.all_weights import Chevron, dense_divergence, streamed, sums_of_squares
from numpyro_sgp.autoguide import AbstractAutoSparseGP
from numpyro_sgp.checks import positive
from numpyro_sgp.conditionals import (
    Inclusion,
    Moments,
    Sampled,
    augmented_variance,
    bounding_scale,
    chevron_divergence,
    chevron_variance,
    control_variate,
    inclusion,
    linear_and_square,
    mean_divergence,
    nystrom_residual,
    optimal_diagonal,
    project,
    whitened,
)
from numpyro_sgp.distributions import GaussianProcess
from numpyro_sgp.families import AbstractPosteriorFamily, Inducing, check_names, for_site, inducing_param
from numpyro_sgp.features import as_finite_rank
from numpyro_sgp.finite_rank import has_correlated_weights
from numpyro_sgp.inducing import AbstractInducing, subset
from numpyro_sgp.linalg import matvec
from numpyro_sgp.predict import priors
from numpyro_sgp.tables import Control, Rows, Table, Weights, features_at, limit_of, numbers_of

__all__ = ["AutoQSGP", "QuadruplyStochastic", "RelevantVectors"]

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

    See `AutoQSGP` for the arguments.
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

    @property
    def has_process(self) -> bool:
        return self.covariance == "inducing"

    def __post_init__(self) -> None:
        _check_options(self)

    def moments(self, param: Callable, prior: GaussianProcess, batch_shape: tuple[int, ...]) -> Moments:
        kernel, X = as_finite_rank(prior.kernel), prior.X
        if batch_shape:
            msg = (
                f"`AutoQSGP` takes one latent for each GP site, got a batch of shape {batch_shape}. Give each latent a "
                "site of its own with an outcome of its own, or use another guide."
            )
            raise ValueError(msg)
        rank = jax.eval_shape(kernel.features, X).shape[-1]
        self._check(kernel, rank)
        fresh: list[bool] = []

        def start(rng_key: Array) -> Table:
            fresh.append(True)
            return self._table(kernel, X, rank, rng_key, prior.relative_jitter)

        basis = param("basis", start)
        given = self._inducing_moments(param, prior, kernel) if self.covariance == "inducing" else None
        scale = None
        if self.covariance == "chevron":
            scale = param("log_scale", jnp.zeros((), X.dtype))
        if fresh:
            # The prior: not one feature is evaluated, of which there may be ten million.
            return _at_prior(limit_of(kernel), X) if given is None else given
        if isinstance(basis, Rows):
            return self._estimated(kernel, X, basis, given, scale)
        return self._exact(kernel, X, basis, given, predicting=bool(getattr(param, "predicting", True)))

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

    def _table(self, kernel: Any, X: Array, rank: int, rng_key: Array, jitter: float) -> Table:
        k = self.dense_columns if self.covariance == "chevron" else None
        columns = 1 if k is None else 2 + k + self.relevance
        control = None
        if self.control is not None:
            points = self.control
            if isinstance(points, int):
                rows = jax.random.permutation(rng_key, X.shape[-2])[: min(points, X.shape[-2])]
                points = X[rows]
            points = jnp.asarray(points, X.dtype)
            if points.ndim != 2 or points.shape[-1] != X.shape[-1]:
                msg = f"`control` has shape {points.shape}, but X has {X.shape[-1]} columns. Pass inputs (P, D)."
                raise ValueError(msg)
            control = Control.at(points, kernel, not self.relevance, float(jitter))
        return Table(jnp.zeros((rank, columns), X.dtype), control, self.basis_batch, k)

    def covariance_of(self, param: Callable, limit: GaussianProcess) -> tuple[AbstractInducing, Array]:
        """The inducing variables of the covariance, and the root S_sqrt of that of v, S = S_sqrt S_sqrtᵀ."""
        made = _some_inputs if self.inducing is None else self.inducing
        inducing = inducing_param(param, made, limit, False)
        return inducing, jnp.tril(param("S_sqrt", jnp.eye(inducing.num_inducing, dtype=limit.X.dtype)))

    def _inducing_moments(self, param: Callable, prior: GaussianProcess, kernel: Any) -> Moments:
        limit = GaussianProcess(limit_of(kernel), prior.X, jitter=prior.jitter)
        inducing, S_sqrt = self.covariance_of(param, limit)
        blocks = project(inducing, limit.kernel, limit.X, limit.relative_jitter)
        q = whitened(jnp.zeros(inducing.num_inducing, prior.X.dtype), S_sqrt, blocks.A, blocks.kff)
        return q._replace(kernel=limit.kernel)

    # The moments.

    def _features(self, kernel: Any, X: Array, index: Array) -> Array:
        return features_at(kernel, X, index, not self.relevance)

    def _precision(self, kernel: Any, index: Array, weights: Weights) -> Array | None:
        if weights.log_precision is not None:
            return jnp.exp(weights.log_precision)
        return kernel.prior_precision(index) if has_correlated_weights(kernel) else None

    def _estimated(self, kernel: Any, X: Array, rows: Rows, given: Moments | None, scale: Array | None) -> Moments:
        sample = inclusion(rows.size, len(rows.index))
        Phi = self._features(kernel, X, rows.index)
        now = rows.table.weights(rows.values + rows.change, rows.index)
        w = rows.table.weights(rows.values, rows.index).linear
        change = now.linear - w
        f, squares = self._mean_and_square(X, Phi, rows, w, change, sample)
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
            whole = len(rows.index) == rows.size
            deviation = jnp.sqrt(variance) if whole else bounding_scale(variance, c)
            q = _at_prior(limit_of(kernel), X)._replace(variance=variance)
        else:
            variance, deviation, q = given.variance, jnp.sqrt(given.variance), given
            kl = kl + given.kl
        if rows.asked is not None:
            # Zero, whose derivatives are the kernel's numbers as they are now.
            numbers = lax.stop_gradient(numbers_of(kernel, rows.size))
            kl = kl + sum(jnp.sum(zero * number) for zero, number in zip(rows.asked, numbers, strict=True))
        sampled = Sampled(
            excess=squares[:, 0] - f[:, 0] ** 2,
            variance=variance,
            scale=deviation,
            halves=_halves(Phi, now.mean, rows) if self.jackknife else None,
            share=1.0 / sample.single,
            controlled=rows.tracked is not None,
            log_concave=self.log_concave,
            integrated=rows.integrated,
        )
        return q._replace(mean=f[:, 0], kl=kl, sampled=sampled)

    def _mean_and_square(
        self, X: Array, Phi: Array, rows: Rows, w: Array, change: Array, sample: Inclusion
    ) -> tuple[Array, Array]:
        """Estimates of Φμ and ΦU, and of their squares, with the control variate that there is."""
        if rows.tracked is None:
            return linear_and_square(Phi, w, change, sample)
        control = rows.table.control
        assert control is not None
        Phi_p = control.features(rows.index)
        if self.control_form == "nystrom":
            residual = nystrom_residual(control.L, control.cross(X), Phi_p, rows.tracked)
            return linear_and_square(Phi, w, change, sample, residual)
        f, squares = linear_and_square(Phi, w, change, sample)
        return f, squares + control_variate(Phi_p, w, change, rows.tracked, sample)

    def _exact(self, kernel: Any, X: Array, table: Table, given: Moments | None, *, predicting: bool) -> Moments:
        """With all weights, block by block."""
        if not predicting:
            _warn_of_size(table, X)
        f, d_variance, kl = streamed(kernel, X, table, not self.relevance)
        if has_correlated_weights(kernel) and not self.relevance:
            # All pairs of weights: what no prediction needs is not computed, and not a number.
            kl = jnp.full((), jnp.nan, X.dtype) if predicting else dense_divergence(kernel, table)
        if given is not None:
            return given._replace(mean=f[:, 0], kl=kl + given.kl)
        variance = jnp.sum(f[:, 1:] ** 2, axis=-1) + d_variance
        q = _at_prior(limit_of(kernel), X)
        return q._replace(mean=f[:, 0], variance=variance, kl=kl, kernel=Chevron(kernel, table, not self.relevance))


def _check_options(family: QuadruplyStochastic) -> None:
    positive("basis_batch", family.basis_batch, "It is how many basis functions a step samples; the default is 1000.")
    if family.covariance not in ("inducing", "chevron"):
        msg = f'`covariance` must be "inducing" or "chevron", got {family.covariance!r}. The default is "inducing".'
        raise ValueError(msg)
    if family.control_form not in ("nystrom", "paper"):
        msg = f'`control_form` must be "nystrom" or "paper", got {family.control_form!r}. The former has less variance.'
        raise ValueError(msg)
    columns = family.dense_columns
    if not isinstance(columns, int) or isinstance(columns, bool) or columns < 0:
        msg = f"`dense_columns` must be a non-negative integer, got {columns!r}. 0 is a diagonal covariance."
        raise ValueError(msg)
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


def _at_prior(limit: Callable, X: Array) -> Moments:
    zeros = jnp.zeros(X.shape[-2], X.dtype)
    return Moments(zeros, limit(X), jnp.zeros((), X.dtype), jnp.zeros((1, X.shape[-2]), X.dtype), None)


def _halves(Phi: Array, mean: Array, rows: Rows) -> tuple[Array, Array]:
    half = len(rows.index) // 2
    return (
        rows.size / half * matvec(Phi[:, :half], mean[:half]),
        rows.size / (len(mean) - half) * matvec(Phi[:, half:], mean[half:]),
    )


def _warn_of_size(table: Table, X: Array) -> None:
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


class RelevantVectors(NamedTuple):
    """The basis functions that a relevance vector machine has kept.

    Attributes:
        index: which of the m basis functions, (R,).
        precision: their prior precisions, (R,).
        mean: posterior means of their weights, (R,).
    """

    index: np.ndarray
    precision: np.ndarray
    mean: np.ndarray


class AutoQSGP(AbstractAutoSparseGP):
    """Posterior over the weights of up to ten million basis functions, of which each step samples a few.

    For GP sites with a kernel of `numpyro_sgp.features`, of any rank m: f(x) = φ(x)ᵀw. Train with `RowSparse` and
    `QuadratureELBO`; then a step costs O(B M + B k) for B rows of data and M basis functions, whatever m and N are.
    With a Gaussian likelihood loss and gradients are unbiased, those with respect to hyperparameters too. With another
    log-concave one (logits or a location affine in f, a rate that is the exponential of it), the loss is a bound that
    is tight at M = m. Other likelihoods are refused. Predictions work through all m in blocks of M.

    The mean alone is in the weights where the covariance is that of inducing variables, the default: that of the kernel
    which the features approximate. A covariance of the weights ("chevron") is diagonal but for k dense columns, and
    mean-field variances of random features come close to the prior's as m grows, whatever the data say.

    Args:
        model: a NumPyro model whose GP sites have kernels of `numpyro_sgp.features`, one latent each.
        basis_batch: M, how many basis functions a step samples.
        dense_columns: k, of a chevron covariance; 0 is mean-field.
        covariance: "inducing" or "chevron".
        inducing: inducing inputs of the covariance (M_u, D), an inducing object, `(kernel, X, rng_key)` to one, or a
            dict by site; by default up to 200 rows of the X that the guide is initialised with.
        base: guide for the other latents: an autoguide class, or a guide.
        control: inputs of a control variate for the mean, (P, D), or how many rows of the first X to take for them;
            only with a Gaussian likelihood. The features there are kept as they are until `RowSparse` computes them
            anew (`refresh`), and help as long as those of the kernel have not moved far from them.
        control_form: "nystrom", whose residual is estimated, or "paper", equation 3 of the source.
        relevance: a prior precision for each weight, trained (a relevance vector machine); with a chevron covariance.
        jackknife: remove the bias of order 1/M of a likelihood that is not Gaussian; then the loss is no bound.
        log_concave: names of observed sites with a log-concave likelihood that is not recognised as such.
        prefix: of the names of parameters, `{site}_{prefix}_{symbol}`.

    Raises:
        ValueError: an option outside its range; more basis functions in a batch than there are, a chevron covariance
            with correlated weights, a batch of latents (when the guide is first run); a likelihood that is not
            log-concave (when the loss is).
        TypeError: a kernel without features (when the guide is first run).

    References:
        Evans and Nair (2020), "Quadruply stochastic Gaussian processes"; corrects theorem 3, which is no bound as
        printed, and pairs the mean with a covariance of inducing variables as Cheng and Boots (2017).
    """

    def __init__(
        self,
        model: Callable,
        *,
        basis_batch: int = 1000,
        dense_columns: int = 0,
        covariance: Covariance = "inducing",
        inducing: Inducing | Mapping[str, Inducing] | None = None,
        base: Any = AutoNormal,
        control: int | ArrayLike | None = None,
        control_form: ControlForm = "nystrom",
        relevance: bool = False,
        jackknife: bool = False,
        log_concave: Sequence[str] = (),
        prefix: str = "auto",
    ) -> None:
        self.inducing = inducing
        first = next(iter(inducing.values()), None) if isinstance(inducing, Mapping) else inducing
        self._family = QuadruplyStochastic(
            basis_batch,
            dense_columns,
            covariance,
            first,
            control,
            control_form,
            relevance,
            jackknife,
            tuple(log_concave),
        )
        super().__init__(model, base=base, prefix=prefix)

    def family(self, site: str) -> AbstractPosteriorFamily:
        return dataclasses.replace(self._family, inducing=for_site(self.inducing, site, "inducing"))

    def check_sites(self, sites: set[str]) -> None:
        check_names(self.inducing, sites, "inducing")

    def relevant_vectors(
        self, params: Mapping[str, Any], site: str = "f", *, threshold: float = 1e4
    ) -> RelevantVectors:
        """The basis functions with a finite prior precision, s_k < threshold.

        Args:
            params: fitted parameters, of a guide with `relevance=True`.
            site: the GP site.
            threshold: in units of 1/w².

        Raises:
            ValueError: the site has no precisions for each weight.

        References:
            Evans and Nair (2020), appendix I.3.
        """
        table = self._relevance_table(params, site)
        values = np.asarray(table.values)
        precision = np.exp(values[:, -1])
        index = np.flatnonzero(precision < threshold)
        return RelevantVectors(index, precision[index], values[index, 0])

    def pruned(self, params: Mapping[str, Any], site: str = "f", *, threshold: float = 1e4) -> dict[str, Any]:
        """Parameters with the weights of all but the relevant vectors at zero, and their variances with them.

        Args:
            params: fitted parameters, of a guide with `relevance=True`.
            site: the GP site.
            threshold: of the prior precisions, in units of 1/w².

        Raises:
            ValueError: the site has no precisions for each weight.
        """
        table = self._relevance_table(params, site)
        kept = table.values[:, -1] < np.log(threshold)
        k = table.dense_columns or 0
        zeros = jnp.where(kept[:, None], table.values[:, : 1 + k], 0.0)
        # A standard deviation of 1e-19, whose square is the smallest that single precision holds.
        log_diagonal = jnp.where(kept, table.values[:, 1 + k], -43.0)
        values = jnp.concatenate([zeros, log_diagonal[:, None], table.values[:, 2 + k :]], axis=1)
        return self._with_values(params, site, table, values)

    def with_optimal_diagonal(
        self,
        rng_key: Array,
        params: Mapping[str, Any],
        *args: Any,
        noise_scale: ArrayLike,
        site: str = "f",
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Parameters with the best diagonal of a chevron covariance under Gaussian noise, in closed form.

        d_k² = σ² / (φ_kᵀφ_k + σ² s_k), for the weights below the dense columns. O(N m), once.

        Args:
            rng_key: draws the hyperparameters, where the base guide is random.
            params: parameters of a guide with a chevron covariance.
            args: arguments of the model, with all rows of the data.
            noise_scale: σ, in units of y.
            site: the GP site.
            kwargs: keyword arguments of the model.

        Raises:
            ValueError: the site has no chevron covariance.

        References:
            Evans and Nair (2020), proposition 1.
        """
        table = self._weights_table(params, site)
        kernel, X = priors(self, rng_key, params, *args, **kwargs)[site]
        squares = sums_of_squares(kernel, X, table, not self._family.relevance)
        k, values = table.dense_columns or 0, table.values
        precision = jnp.exp(values[:, 2 + k]) if self._family.relevance else jnp.ones(table.size, values.dtype)
        log_diagonal = jnp.log(optimal_diagonal(squares, precision, jnp.asarray(noise_scale, values.dtype) ** 2))
        log_diagonal = jnp.where(jnp.arange(table.size) < k, values[:, 1 + k], log_diagonal)
        return self._with_values(params, site, table, values.at[:, 1 + k].set(log_diagonal))

    def augmented_variance(
        self,
        rng_key: Array,
        params: Mapping[str, Any],
        X_new: ArrayLike,
        *args: Any,
        noise_scale: ArrayLike,
        site: str = "f",
        **kwargs: Any,
    ) -> Array:
        """Var f at other inputs with a basis function at each of them added, (N_new,).

        v + σ²k(x, x)² / (Σ_n k(x, x_n)² + σ²k(x, x)): far from the data the variance is the prior's, where that of a
        few relevant vectors vanishes. A heuristic; where the covariance is good it counts twice what the basis spans.

        Args:
            rng_key: draws the hyperparameters, where the base guide is random.
            params: parameters of a guide with a chevron covariance.
            X_new: inputs of the GP site, (N_new, D).
            args: arguments of the model, with all rows of the data.
            noise_scale: σ, in units of y.
            site: the GP site.
            kwargs: keyword arguments of the model.

        Raises:
            ValueError: the site has no chevron covariance; inputs of another width.

        References:
            Evans and Nair (2020), proposition 4 and appendix G; corrects V[y], which lacks σ².
        """
        table = self._weights_table(params, site)
        kernel, X = priors(self, rng_key, params, *args, **kwargs)[site]
        X_new = jnp.asarray(X_new, X.dtype)
        if X_new.ndim != 2 or X_new.shape[-1] != X.shape[-1]:
            msg = f"`X_new` has shape {X_new.shape}, but this GP has inputs of {X.shape[-1]} columns. Pass (N_new, D)."
            raise ValueError(msg)
        f, variance, _ = streamed(kernel, X_new, table, not self._family.relevance)
        variance = jnp.sum(f[:, 1:] ** 2, axis=-1) + variance
        limit = limit_of(kernel)
        squares = lax.map(lambda x: jnp.sum(limit(x[None], X) ** 2), X_new)
        return augmented_variance(variance, limit(X_new), squares, jnp.asarray(noise_scale, X.dtype) ** 2)

    def _weights_table(self, params: Mapping[str, Any], site: str) -> Table:
        table = params.get(f"{site}_{self.prefix}_basis")
        if not isinstance(table, Table) or table.dense_columns is None:
            msg = (
                f"The GP site {site!r} has no covariance of the weights. Pass fitted parameters of a guide with "
                '`AutoQSGP(model, covariance="chevron")`, and the name of its site.'
            )
            raise ValueError(msg)
        return table

    def _with_values(self, params: Mapping[str, Any], site: str, table: Table, values: Array) -> dict[str, Any]:
        return {**params, f"{site}_{self.prefix}_basis": dataclasses.replace(table, values=values)}

    def _relevance_table(self, params: Mapping[str, Any], site: str) -> Table:
        table = params.get(f"{site}_{self.prefix}_basis")
        if not isinstance(table, Table) or not self._family.relevance:
            msg = (
                f"The GP site {site!r} has no prior precision for each weight. Pass fitted parameters of a guide with "
                '`AutoQSGP(model, relevance=True, covariance="chevron")`, and the name of its site.'
            )
            raise ValueError(msg)
        return table
