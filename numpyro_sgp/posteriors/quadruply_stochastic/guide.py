"""The guide of quadruply stochastic GPs, and what its fitted weights give beside predictions."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any, NamedTuple, cast

from jax import Array, lax
from jax.core import Tracer
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np
from numpyro.infer.autoguide import AutoNormal

from numpyro_sgp.features.finite_rank import has_correlated_weights
from numpyro_sgp.guides.guide import AbstractAutoSparseGP
from numpyro_sgp.inducing import AbstractPoints, check_new_inputs
from numpyro_sgp.math.linalg import default_jitter
from numpyro_sgp.posteriors.family import AbstractPosteriorFamily, Inducing, check_names, for_site
from numpyro_sgp.posteriors.functions import priors
from numpyro_sgp.posteriors.process import ProcessPosterior
from numpyro_sgp.posteriors.quadruply_stochastic.abstract import ControlForm
from numpyro_sgp.posteriors.quadruply_stochastic.family import Covariance, QuadruplyStochastic
from numpyro_sgp.posteriors.quadruply_stochastic.formulas import augmented_variance
from numpyro_sgp.posteriors.quadruply_stochastic.inducing_covariance import WithInducingCovariance
from numpyro_sgp.posteriors.quadruply_stochastic.table_sums import interpolated, streamed, sums_of_squares
from numpyro_sgp.posteriors.quadruply_stochastic.weight_covariance import (
    AbstractWeightCovariance,
    RelevanceVectorMachine,
)
from numpyro_sgp.posteriors.quadruply_stochastic.weight_table import WeightTable, limit_of

__all__ = ["AutoQSGP", "RelevantVectors"]

# Log of a standard deviation of 1e-19, whose square is the smallest that single precision holds.
_NO_DEVIATION = -43.0


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

    By default the covariance is that of inducing variables u = L v under the kernel which the features approximate, and
    weights add to the mean what u cannot say: E f(x) = A(x)ᵀm + (φ(x) − Φ_uᵀKuu⁻¹k_u(x))ᵀμ with A = L⁻¹k_u. So it can
    start at a trained `AutoSVGP` (`with_posterior`). A covariance of the weights ("chevron") is diagonal but for k
    dense columns, and mean-field variances of random features come close to the prior's as m grows, whatever the data
    say.

    Args:
        model: a NumPyro model whose GP sites have kernels of `numpyro_sgp.features`, one latent each.
        basis_batch: M, how many basis functions a step samples.
        dense_columns: k, of a chevron covariance; 0 is mean-field.
        covariance: "inducing" or "chevron". Where weights have a dense prior precision S (`InducingBasis`), the loss of
            the latter leaves out the constant −½ log|S|, and hyperparameters have to be fixed numbers.
        inducing: inducing inputs of the covariance (M_u, D), an inducing object, `(kernel, X, rng_key)` to one, or a
            dict by site; by default up to 200 rows of the X that the guide is initialised with.
        base: guide for the other latents: an autoguide class, or a guide. A class starts a latent at what was observed
            of it, if it is the location of an outcome, and near its prior median otherwise.
        control: inputs of a control variate for the mean, (P, D), or how many rows of the first X to take for them;
            only with a Gaussian likelihood. The features there are kept as they are until `RowSparse` computes them
            anew (`refresh`), and help as long as those of the kernel have not moved far from them.
        control_form: "nystrom", whose residual is estimated, or "paper", equation 3 of the source.
        relevance: a prior precision for each weight, at each step the one of the largest bound, s_k = 1/E w_k² (a
            relevance vector machine); with a chevron covariance. Weights are those of features as they are, and the
            step of `RowSparse` is in their units: 0.03 or less for 500 columns of a kernel matrix.
        jackknife: remove the bias of order 1/M of a likelihood that is not Gaussian; then the loss is no bound.
        log_concave: names of observed sites with a log-concave likelihood that is not recognised as such.
        prefix: of the names of parameters, `{site}_{prefix}_{symbol}`.

    Raises:
        ValueError: an option outside its range; more basis functions in a batch than there are, a batch of latents
            (when the guide is first run); a likelihood that is not log-concave, hyperparameters to be trained with a
            chevron covariance of weights with a dense prior precision (when the loss is).
        TypeError: a kernel without features (when the guide is first run).

    References:
        Evans and Nair (2020), "Quadruply stochastic Gaussian processes"; corrects theorem 3, which is no bound as
        printed, and pairs the mean with a covariance of inducing variables as Cheng and Boots (2017), orthogonally as
        Salimbeni, Cheng, Boots and Deisenroth (2018).
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
        self._family = QuadruplyStochastic(
            basis_batch,
            dense_columns,
            covariance,
            cast(Any, inducing),
            control,
            control_form,
            relevance,
            jackknife,
            tuple(log_concave),
        )
        super().__init__(model, base=base, prefix=prefix)

    def family(self, site: str) -> AbstractPosteriorFamily:
        if not isinstance(self._family, WithInducingCovariance):
            return self._family
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
        table = self._table(params, site, relevance=True)
        weights = table.all_weights()
        precision = 1.0 / np.asarray(weights.second_moment)
        index = np.flatnonzero(precision < threshold)
        return RelevantVectors(index, precision[index], np.asarray(weights.mean)[index])

    def pruned(self, params: Mapping[str, Any], site: str = "f", *, threshold: float = 1e4) -> dict[str, Any]:
        """Parameters with the weights of all but the relevant vectors at zero, and their variances with them.

        Arguments and errors are those of `relevant_vectors`.
        """
        table = self._table(params, site, relevance=True)
        kept = table.all_weights().second_moment > 1.0 / threshold
        k = table.dense_columns or 0
        zeros = jnp.where(kept[:, None], table.values[:, : 1 + k], 0.0)
        log_diagonal = jnp.where(kept, table.values[:, 1 + k], _NO_DEVIATION)
        values = jnp.concatenate([zeros, log_diagonal[:, None]], axis=1)
        return self._with_values(params, site, table, values)

    def with_posterior(self, params: Mapping[str, Any], process: ProcessPosterior, site: str = "f") -> dict[str, Any]:
        """Parameters with the posterior of an SVGP: its inducing inputs, mean and covariance, and weights of zero.

        Training then adds what the inducing variables cannot say, and what is estimated from sampled weights is that
        alone. Hyperparameters are to be those of the other guide: give them to `init_params`.

        Args:
            params: parameters of this guide, with a covariance of inducing variables.
            process: what `process_posterior` gives for the same site of an `AutoSVGP`.
            site: the GP site.

        Raises:
            ValueError: a chevron covariance; a posterior with another form than u = L v, q(v) = N(m, RᵀR) at inducing
                inputs.
        """
        table = self._table(params, site)
        if table.dense_columns is not None:
            msg = "`with_posterior` needs a covariance of inducing variables. For a chevron covariance use `with_mean`."
            raise ValueError(msg)
        R, plain = process.R, process.W_sqrt is None and process.mean_basis is None and not process.batch_shape
        if R is None or not plain or not isinstance(process.inducing, AbstractPoints):
            msg = "`process` must be the posterior of one latent at inducing inputs, as that of an `AutoSVGP`."
            raise ValueError(msg)
        name = f"{site}_{self.prefix}"
        # RᵀR by its lower root, without squaring R; signs of columns do not matter.
        S_sqrt = jnp.linalg.qr(R, mode="r").T
        S_sqrt = jnp.where(jnp.diagonal(S_sqrt) < 0.0, -S_sqrt, S_sqrt)
        start = {f"{name}_inducing": process.inducing, f"{name}_m": process.m, f"{name}_S_sqrt": S_sqrt}
        return {**self._with_values(params, site, table, table.values.at[:, 0].set(0.0)), **start}

    def with_mean(
        self, rng_key: Array, params: Mapping[str, Any], values: ArrayLike, *args: Any, site: str = "f", **kwargs: Any
    ) -> dict[str, Any]:
        """Parameters of a chevron covariance whose posterior mean has given values at some inputs.

        Of all weights that give them the smallest, w = S⁻¹Φᵀ(ΦS⁻¹Φᵀ + εI)⁻¹(values − prior mean), with ε the jitter of
        the dtype or, of many inputs, what rounding makes of the matrix. For the mean of another guide, such as
        `AutoSVGP`, at its inducing inputs and some rows of the data; where features are random, the more inputs the
        closer in between. O(m P²) for P inputs, once. With a covariance of inducing variables, see `with_posterior`.

        Args:
            rng_key: draws the hyperparameters, where the base guide is random.
            params: parameters of this guide, those of the kernel as they are to be.
            values: E f at the inputs, (P,).
            args: arguments of the model with these inputs, P rows.
            site: the GP site.
            kwargs: keyword arguments of the model.

        Raises:
            ValueError: no chevron covariance at the site; inputs so many and so close that no weights can be found in
                their precision; weights with a dense prior precision.
        """
        table = self._table(params, site, chevron=True)
        kernel, X, prior_mean = priors(self, rng_key, params, *args, **kwargs)[site]
        values = jnp.asarray(values, X.dtype)
        jitter = max(default_jitter(X.dtype), len(X) * float(jnp.finfo(X.dtype).eps))
        whiten = self._family.whitens
        if whiten and has_correlated_weights(kernel):
            msg = (
                "The smallest weights of a dense prior precision S need S⁻¹, an m × m matrix. Start at a mean of zero, "
                "or use independent weights."
            )
            raise ValueError(msg)
        weights = interpolated(kernel, X, table, values - prior_mean, jnp.asarray(jitter, X.dtype), whiten)
        if not isinstance(weights, Tracer) and np.isnan(weights).any():
            msg = (
                f"No weights give the {len(X)} values: in {X.dtype} the covariance at these inputs is singular. Pass "
                "fewer inputs, or inputs in double precision."
            )
            raise ValueError(msg)
        return self._with_values(params, site, table, table.values.at[:, 0].set(weights))

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

        d_k² = σ² / (φ_kᵀφ_k + σ² S_kk), for the weights below the dense columns. O(N m), once. In a relevance vector
        machine it is the best for the means as they are, zero for a mean of zero.

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
        table, family = self._table(params, site, chevron=True), cast(AbstractWeightCovariance, self._family)
        kernel, X, _ = priors(self, rng_key, params, *args, **kwargs)[site]
        squares = sums_of_squares(kernel, X, table, family.whitens)
        k, values = family.dense_columns, table.values
        diagonal = family.optimal_diagonal(kernel, table, squares, jnp.asarray(noise_scale, values.dtype) ** 2)
        log_diagonal = jnp.maximum(jnp.log(diagonal), _NO_DEVIATION)
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
        table = self._table(params, site, chevron=True)
        kernel, X, _ = priors(self, rng_key, params, *args, **kwargs)[site]
        check_new_inputs(X.shape[-1], X_new)
        X_new = jnp.asarray(X_new, X.dtype)
        f, variance = streamed(kernel, X_new, table, self._family.whitens)
        variance = jnp.sum(f[:, 1:] ** 2, axis=-1) + variance
        limit = limit_of(kernel)
        squares = lax.map(lambda x: jnp.sum(limit(x[None], X) ** 2), X_new)
        return augmented_variance(variance, limit(X_new), squares, jnp.asarray(noise_scale, X.dtype) ** 2)

    def _table(
        self, params: Mapping[str, Any], site: str, *, chevron: bool = False, relevance: bool = False
    ) -> WeightTable:
        table = params.get(f"{site}_{self.prefix}_basis")
        if not isinstance(table, WeightTable):
            msg = f"`params` has no weights for a GP site {site!r}. Pass parameters of this guide and one of its sites."
            raise ValueError(msg)  # noqa: TRY004 - the right type, of another guide
        is_machine = isinstance(self._family, RelevanceVectorMachine)
        if (chevron and table.dense_columns is None) or (relevance and not is_machine):
            options = 'covariance="chevron"' + ", relevance=True" * relevance
            msg = f"This needs a covariance of the weights. Use a guide `AutoQSGP(model, {options})`."
            raise ValueError(msg)
        return table

    def _with_values(self, params: Mapping[str, Any], site: str, table: WeightTable, values: Array) -> dict[str, Any]:
        return {**params, f"{site}_{self.prefix}_basis": dataclasses.replace(table, values=values)}
