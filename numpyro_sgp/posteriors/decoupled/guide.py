"""The guide with decoupled posteriors, its warning of small bases, and step sizes for `DualAscent`."""

from collections.abc import Callable, Collection, Mapping
from typing import Any
import warnings

import jax
from jax import Array
from jax.core import Tracer
import jax.numpy as jnp
from numpyro.infer.autoguide import AutoNormal

from numpyro_sgp._internal.probed import value_of
from numpyro_sgp.distributions.gaussian_process import GaussianProcess
from numpyro_sgp.distributions.sparse_posterior import SparsePosterior
from numpyro_sgp.distributions.sparse_regression import RegressionPosterior
from numpyro_sgp.guides.guide import AbstractAutoSparseGP
from numpyro_sgp.inducing import AbstractInducing, GrowingInducing, InducingPoints, ProbedInducing
from numpyro_sgp.math.linalg import largest_eigenvalue
from numpyro_sgp.math.products import matmul
from numpyro_sgp.posteriors.decoupled.family import Decoupled, Parametrization
from numpyro_sgp.posteriors.decoupled.formulas import largest_residual_variance
from numpyro_sgp.posteriors.family import AbstractPosteriorFamily, Inducing, check_names, for_site, started_at
from numpyro_sgp.posteriors.moments import project

__all__ = ["AutoDecoupledGP"]

# On kin40k (N = 36000), hyperparameters trained jointly for two minutes, the bound came to −18000 nats with 128
# covariance inducing inputs, −8600 with 256 and −3200 with 512; to −1800 for SVGP with 512 (one run of each).
_SMALL_BASIS = 200

# Few data need few inducing inputs; and where these explain the prior variance, little is left to be lost.
_ROWS_FOR_EACH, _UNEXPLAINED = 10, 0.05


class AutoDecoupledGP(AbstractAutoSparseGP):
    """Decoupled sparse posterior for every GP site of a model: the mean has a basis of its own, as large as wanted.

    A step costs M_β³ for the covariance and is linear in M_γ for the mean ("solve": M_γ³). It pays as an addition to a
    sparse posterior that is good already. The hyperparameters see the covariance basis: with a small one, and
    hyperparameters trained jointly, the variance that it cannot explain makes the prior flat and the noise large. So
    give β as many inducing inputs as `AutoSVGP` would get, train the hyperparameters with them or with "solve", and
    refine the mean with the hyperparameters fixed; a warning tells when β is small for the data. The parameters of the
    covariance block have the names that `AutoSVGP` gives them: pass those of a fit as `init_params` of `SVI.run`.

    Args:
        model: a NumPyro model with `GaussianProcess` sites.
        mean_inducing: the mean basis γ: inducing inputs (M_γ, D) beside those of the covariance, an inducing object, a
            dict of them by site, or a function `(kernel, X, rng_key)` that makes them when the guide is initialised.
            None leaves the sparse variational posterior.
        cov_inducing: the covariance basis β, likewise; None, with "full" only, for the prior's covariance.
        parametrization: "orthogonal" (in doubt), "hybrid", "full" or "solve": see `Decoupled`.
        natural: hold the Gaussian blocks by natural parameters, for `NaturalGradient`: the covariance block, with its
            own part of the mean; for "solve" both blocks, to be moved in turn (`in_turn=True`) or, where all steps are
            taken at once, with a step size of 0.5 or less.
        base: guide for the other latents: an autoguide class, or a guide. A class starts a latent at what was observed
            of it, if it is the location of an outcome, and near its prior median otherwise.
        learn_inducing: whether to train the inducing inputs of both bases.
        kl_rows: how many rows to estimate the divergence of the mean from; None for the exact one, O(M_γ²).
        init_from: where the covariance block starts in place of the prior: what `SparseGPRegression.condition` gives
            with the inducing variables `cov_inducing`, or a dict of them by site.
        prefix: of the names of parameters, `{site}_{prefix}_{symbol}`.

    Raises:
        ValueError: an unknown parametrisation, a basis missing that it needs, an option that it cannot have, or a
            basis of another width than X.

    References:
        Cheng and Boots (2017), "Variational inference for Gaussian process models with linear complexity"; Salimbeni,
        Cheng, Boots and Deisenroth (2018), "Orthogonally decoupled variational Gaussian processes"; Shi, Titsias and
        Mnih (2020), "Sparse orthogonal variational inference for Gaussian processes".
    """

    def __init__(
        self,
        model: Callable,
        mean_inducing: Inducing | Mapping[str, Inducing | None] | None,
        cov_inducing: Inducing | Mapping[str, Inducing | None] | None,
        *,
        parametrization: Parametrization = "orthogonal",
        natural: bool = False,
        base: Any = AutoNormal,
        learn_inducing: bool = False,
        kl_rows: int | None = None,
        init_from: RegressionPosterior | Mapping[str, RegressionPosterior] | None = None,
        prefix: str = "auto",
    ) -> None:
        self.mean_inducing = mean_inducing
        self.cov_inducing = cov_inducing
        self.init_from = init_from
        self._options: dict[str, Any] = {
            "parametrization": parametrization,
            "natural": natural,
            "learn_inducing": learn_inducing,
            "kl_rows": kl_rows,
        }
        # A mistake in the options raises here, not at the first run; entries of dicts wait for their sites.
        bases = [next(iter(b.values()), None) if isinstance(b, Mapping) else b for b in (mean_inducing, cov_inducing)]
        start = next(iter(init_from.values()), None) if isinstance(init_from, Mapping) else init_from
        Decoupled(bases[0], bases[1], **self._options, init_from=start)
        super().__init__(model, base=base, prefix=prefix)

    def dual_step_size(
        self,
        rng_key: Array,
        params: Mapping[str, Any],
        *args: Any,
        batch_size: int,
        curvature: float,
        **kwargs: Any,
    ) -> dict[str, float]:
        """A step size for `DualAscent` at each GP site, from the largest eigenvalue of what the mean is left to fit.

        With λ the largest eigenvalue of K − Q over all N rows ("full": of K), scaled up from the rows given, κ the
        largest diagonal entry over the whole mean basis and w the curvature: min(1.3 N/B / (1 + λw), 0.1/(κw), 1).
        Momentum of 0.9 is stable up to 1.36 N/B / (1 + λw) on average; and it moves a row's own mean by ten steps
        before the row is seen again, which diverges from 0.2/(κw) on, if only for one row that lies by itself.

        Args:
            rng_key: draws the hyperparameters, where the base guide is random.
            params: fitted parameters, with those of this guide.
            args: arguments of the model, at one or two thousand rows drawn from the data.
            batch_size: B of the steps.
            curvature: the largest −∂²E log p(y | f)/∂m² of a datum: 1/σ² for a normal likelihood, 1/4 for a Bernoulli
                with logits, the largest mean count for a Poisson with a log link.
            kwargs: keyword arguments of the model.

        Returns:
            By site name.

        Raises:
            ValueError: a curvature or batch size that is not positive.
            KeyError: a site without a mean basis.
        """
        if not curvature > 0.0 or not batch_size > 0:
            msg = f"`curvature` and `batch_size` must be positive, got {curvature!r} and {batch_size!r}."
            raise ValueError(msg)
        projected = self._options["parametrization"] != "full"

        @jax.jit
        def spectra(params: Mapping[str, Any]) -> dict[str, tuple[Array, Array]]:
            found = {}
            for site, q in self.posterior(rng_key, params, *args, **kwargs).items():
                kernel, X = q.prior.kernel, q.prior.X
                gamma = params[f"{site}_{self.prefix}_mean_inducing"]
                K, span = InducingPoints(X).Kuu(kernel), None
                if projected:
                    beta = params[f"{site}_{self.prefix}_inducing"]
                    blocks = project(beta, kernel, X, q.prior.relative_jitter)
                    K, span = K - matmul(blocks.A.mT, blocks.A), (beta, blocks.L)
                variance = largest_residual_variance(kernel, gamma, span)
                found[site] = (jnp.max(largest_eigenvalue(K)) / X.shape[-2], jnp.max(variance))
            return found

        found, sizes = spectra(params), {}
        for site, (eigenvalue, variance) in found.items():
            N = params[f"{site}_{self.prefix}_mean_inducing"].num_inducing
            stable = 1.3 * N / (batch_size * (1.0 + N * float(eigenvalue) * curvature))
            sizes[site] = min(stable, 0.1 / (float(variance) * curvature), 1.0)
        return sizes

    def family(self, site: str) -> AbstractPosteriorFamily:
        return Decoupled(
            for_site(self.mean_inducing, site, "mean_inducing"),
            for_site(self.cov_inducing, site, "cov_inducing"),
            **self._options,
            init_from=started_at(self.init_from, site),
        )

    def check_sites(self, sites: set[str]) -> None:
        check_names(self.mean_inducing, sites, "mean_inducing")
        check_names(self.cov_inducing, sites, "cov_inducing")
        check_names(self.init_from, sites, "init_from")

    def _run_model(
        self,
        base_trace: dict[str, dict],
        runs: dict[str, Any],
        predicting: bool,
        args: tuple,
        kwargs: dict,
        *,
        joint: bool = True,
        only: Collection[str] = (),
    ) -> tuple[dict[str, dict], dict[str, SparsePosterior]]:
        trace, posteriors = super()._run_model(base_trace, runs, predicting, args, kwargs, joint=joint, only=only)
        if not predicting and self._options["parametrization"] != "solve":
            own = tuple(f"{site}_{self.prefix}_" for site in posteriors)
            trained = any(site["type"] == "sample" for site in base_trace.values()) or any(
                site["type"] == "param" and not name.startswith(own) for name, site in trace.items()
            )
            num_data = max((site["args"][0] for site in trace.values() if site["type"] == "plate"), default=0)
            for name, q in posteriors.items() if trained else ():
                inducing, a = (trace.get(f"{name}_{self.prefix}_{symbol}") for symbol in ("inducing", "a"))
                # A mean basis that is the data is for `DualAscent`, which leaves hyperparameters as they are.
                refined = a is not None and value_of(a["value"]).of_data
                if inducing is not None and not refined:
                    _warn_of_a_small_basis(name, inducing["value"], q.prior, num_data)
        return trace, posteriors


def _warn_of_a_small_basis(site: str, beta: AbstractInducing, prior: GaussianProcess, num_data: int) -> None:
    """Warn where the covariance basis is small, the data are many, and it leaves much of their variance unexplained.

    Values that are being traced say nothing: so this speaks when a guide is initialised, and is silent in its steps.
    """
    if isinstance(beta, GrowingInducing | ProbedInducing):  # which explains nothing yet
        return
    M, N = beta.num_inducing, max(num_data, prior.X.shape[-2])
    if M >= _SMALL_BASIS or _ROWS_FOR_EACH * M > N:
        return
    blocks = project(beta, prior.kernel, prior.X, prior.relative_jitter)
    unexplained = 1.0 - jnp.mean(jnp.sum(blocks.A**2, axis=-2)) / jnp.mean(blocks.kff)
    if isinstance(unexplained, Tracer) or not unexplained > _UNEXPLAINED:
        return
    warnings.warn(
        f"The covariance basis of the GP site {site!r} has {M} inducing inputs for {N} rows of data, leaves "
        f"{float(unexplained):.0%} of the prior variance unexplained, and hyperparameters are trained with it. "
        "Decoupled posteriors then tend to a flat prior and much noise, and end below `AutoSVGP`. Give "
        '`cov_inducing` several hundred inducing inputs, use `parametrization="solve"`, or train the hyperparameters '
        "with `AutoSVGP` and fix them.",
        UserWarning,
        stacklevel=2,
    )
