"""What a guide gives from fitted parameters: posteriors, draws, summaries, and parameters after other rows of data."""

from collections.abc import Callable, Mapping
import math
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike
from numpyro.infer.autoguide import AutoNormal

from numpyro_sgp.distributions.sparse_posterior import SparsePosterior
from numpyro_sgp.guides.conditioning import conditioned, removed
from numpyro_sgp.guides.members import Joint
from numpyro_sgp.guides.run import AbstractGuideRun
from numpyro_sgp.losses.quadrature_elbo import QuadratureELBO
from numpyro_sgp.posteriors.family import AbstractPosteriorFamily, check_names, for_site
from numpyro_sgp.posteriors.functions import FunctionDraws, sample_functions

__all__ = ["AbstractAutoSparseGP", "AutoSparseGP"]


def _joint_latents(posteriors: Mapping[str, SparsePosterior], z: ArrayLike) -> dict[str, Array]:
    """The latents that are joint with GP sites, z standard deviations above the mean where they are unconstrained."""
    found = {}
    for run in {id(q.joint_run): q.joint_run for q in posteriors.values() if q.joint_run is not None}.values():
        found.update(run.quantiles(z))
    return found


class AbstractAutoSparseGP(AbstractGuideRun):
    """A guide with a sparse posterior for each GP site; subclasses say which."""

    def posterior(
        self, rng_key: Array, params: Mapping[str, Any], *args: Any, **kwargs: Any
    ) -> dict[str, SparsePosterior]:
        """The posterior of each GP site at the model's inputs, in O(N) for N of them.

        The model's terms are not evaluated, so their data may be missing.

        Where a GP takes values of another one, as in a deep GP, they are a joint draw of these, in O(N³). Where a prior
        mean is not linear in latents of a joint posterior, its moments are those of the linear function at their means;
        draws are exact.

        Args:
            rng_key: draws the hyperparameters, where the base guide is random.
            params: fitted parameters.
            args: arguments of the model, at the inputs where the posterior is wanted.
            kwargs: keyword arguments of the model.

        Returns:
            By site name: `.mean`, `.variance`, `.covariance()`, `.sample(key)`, given one draw of the hyperparameters.
        """

        def run() -> dict[str, SparsePosterior]:
            base_trace, runs = self._prepared(True, args, kwargs)
            sites = self._known(params).sites
            joint = self._is_chained(base_trace, sites, args, kwargs)
            return self._run_model(base_trace, runs, True, args, kwargs, joint=joint, only=sites)[1]

        return self._conditioned(rng_key, params)(run)

    def sample_posterior(
        self,
        rng_key: Array,
        params: Mapping[str, Any],
        *args: Any,
        sample_shape: tuple[int, ...] = (),
        **kwargs: Any,
    ) -> dict[str, Array]:
        """Joint draws of every latent, with the GP sites at the model's inputs, and of the deterministic sites.

        Args:
            rng_key: a key.
            params: fitted parameters.
            args: arguments of the model.
            sample_shape: leading shape of the draws.
            kwargs: keyword arguments of the model.
        """

        def draw(key: Array) -> dict[str, Array]:
            def run() -> dict[str, Array]:
                trace, _ = self._run_model(*self._prepared(True, args, kwargs), True, args, kwargs)
                return {n: site["value"] for n, site in trace.items() if site["type"] in ("sample", "deterministic")}

            return self._conditioned(key, params)(run)

        if not sample_shape:
            return draw(rng_key)
        draws = jax.lax.map(draw, jax.random.split(rng_key, math.prod(sample_shape)))
        return jax.tree.map(lambda x: x.reshape(*sample_shape, *x.shape[1:]), draws)

    def sample_functions(
        self,
        rng_key: Array,
        params: Mapping[str, Any],
        *args: Any,
        num_samples: int,
        num_features: int = 1024,
        **kwargs: Any,
    ) -> dict[str, FunctionDraws]:
        """Functions drawn from the posterior of each GP site, consistent across calls; see `FunctionDraws`.

        Each has its own draw of the hyperparameters, and of the prior by random Fourier features, corrected where the
        posterior knows better (Matheron's rule).

        Args:
            rng_key: a key.
            params: fitted parameters.
            args: arguments of the model; the rows in them do not matter.
            num_samples: S, the number of functions.
            num_features: random Fourier features of each term of the kernel; more make single functions closer to a GP.
            kwargs: keyword arguments of the model.

        Returns:
            By site name f with `f(X_new)` of shape (S, ..., N_new), X_new inputs of that site, (N_new, D).

        Raises:
            TypeError: a kernel without a known spectral density.
            ValueError: a prior mean given as an array; a kernel or mean that closes over values of the model's run.

        References:
            Wilson et al. (2020), "Efficiently sampling functions from Gaussian process posteriors", equations 12, 13.
        """
        options = {"num_samples": num_samples, "num_features": num_features}
        return sample_functions(self, rng_key, params, *args, **options, **kwargs)

    def median(self, params: Mapping[str, Any], *args: Any, **kwargs: Any) -> dict[str, Array]:
        """Posterior medians of the other latents, and of the GP sites where the model's arguments are given.

        Deterministic sites are left out: those of draws (`sample_posterior`) have medians of their own.

        Args:
            params: fitted parameters.
            args: arguments of the model; with them the GP sites are included, given the median of the other latents.
            kwargs: keyword arguments of the model.
        """
        values = self._base_summary(params, args, kwargs, "median")
        if not args and not kwargs:
            self._check_joint_summary(params, "median")
            return values
        posteriors = self.posteriors_at(params, values, args, kwargs)
        latents = _joint_latents(posteriors, 0.0)
        return {**values, **latents, **{site: q.mean for site, q in posteriors.items()}}

    def _check_joint_summary(self, params: Mapping[str, Any], method: str) -> None:
        joint = self._known(params).joint
        if joint:
            msg = (
                f"`{method}` was called without the model's arguments, and {sorted(joint)} have a joint "
                f"posterior with GP sites, whose priors these arguments make. Call `{method}` with them."
            )
            raise ValueError(msg)

    def quantiles(self, params: Mapping[str, Any], quantiles: ArrayLike, *args: Any, **kwargs: Any) -> dict[str, Array]:
        """Posterior quantiles of the other latents, and of the GP sites where the model's arguments are given.

        Deterministic sites are left out: those of draws (`sample_posterior`) have quantiles of their own.

        Args:
            params: fitted parameters.
            quantiles: probabilities in (0, 1); their shape leads the result's.
            args: arguments of the model; with them the GP sites are included, given the median of the other latents.
            kwargs: keyword arguments of the model.
        """
        values = self._base_summary(params, args, kwargs, "quantiles", quantiles)
        if not args and not kwargs:
            self._check_joint_summary(params, "quantiles")
            return values
        medians = self._base_summary(params, args, kwargs, "median")
        posteriors = self.posteriors_at(params, medians, args, kwargs)
        z = jax.scipy.special.ndtri(jnp.asarray(quantiles))[..., None]
        latents = _joint_latents(posteriors, z)
        return {**values, **latents, **{site: q.quantile(quantiles) for site, q in posteriors.items()}}

    def condition(
        self,
        params: Mapping[str, Any],
        *args: Any,
        num_steps: int = 50,
        loss: QuadratureELBO | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Parameters of the posterior after more rows of data, for any likelihood and without the old data.

        The posterior is the prior of the new rows. Natural steps on their sites minimise

            −Σ_n E_q[log p(y_n | f_n)] + KL(q ‖ q_before),

        and each step lowers it. The latents that are not joint with GP sites stay at their posterior medians. With
        Gaussian noise and fixed hyperparameters the result is the posterior of all rows, whatever their order.

        A pure function, for `jit`, and for `vmap` over outcomes that have not been observed.

        Args:
            params: fitted parameters.
            args: arguments of the model, with the new rows alone; each of these counts once if N is theirs.
            num_steps: the most evaluations of the bound; it ends sooner where a step changes nothing any more.
            loss: a `QuadratureELBO` with nodes and draws of its own; None for the default.
            kwargs: keyword arguments of the model.

        Raises:
            TypeError: a posterior without a closed form for more rows; a base guide without medians.
            ValueError: GP sites on top of one another.

        Warns:
            UserWarning: the steps had not converged.

        References:
            Bui, Nguyen and Turner (2017), "Streaming sparse Gaussian process approximations", equation 5, with the
            inducing inputs and hyperparameters kept; the steps are those of Khan and Lin (2017).
        """
        return conditioned(self, params, args, kwargs, num_steps, loss)

    def remove(
        self, params: Mapping[str, Any], *args: Any, loss: QuadratureELBO | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Parameters of the posterior without some rows of the data that it was trained on.

        Their sites, which follow from q itself once it has converged, are taken out of q(u): what is left is the
        cavity. With Gaussian noise and fixed hyperparameters it is the posterior of the other rows; with another
        likelihood the sites of the other rows stay as they are. Latents in a joint posterior whose priors are not
        Gaussian take what these sites leave of them, by natural steps. It undoes `condition`.

        Args:
            params: fitted parameters.
            args: arguments of the model, with the rows to be removed alone.
            loss: as in `condition`.
            kwargs: keyword arguments of the model.

        Raises:
            TypeError: as `condition`; a posterior that has a site for each row of X.
            ValueError: GP sites on top of one another.

        Warns:
            UserWarning: these steps had not converged.
        """
        return removed(self, params, args, kwargs, loss)


class AutoSparseGP(AbstractAutoSparseGP):
    """A sparse posterior for each GP site of a model, family by family.

    Args:
        model: a NumPyro model with `GaussianProcess` sites.
        families: a posterior family for every site, or a dict of them by site name.
        base: guide for the other latents: an autoguide class, or a guide. A class starts a latent at what was observed
            of it, if it is the location of an outcome, and near its prior median otherwise.
        joint: which GP sites and other latents have one joint Gaussian: "auto" for all that meet in a term of the
            model, False for none, or a tuple of names. Latents that a kernel depends on stay with `base`, and so do
            those of a guide of your own or of `AutoDelta`.
        prefix: of the names of parameters, `{site}_{prefix}_{symbol}`.

    Raises:
        TypeError: `families` that are not posterior families.
        ValueError: a GP site without a family, or a family without a site (when the guide is first run).
    """

    def __init__(
        self,
        model: Callable,
        families: AbstractPosteriorFamily | Mapping[str, AbstractPosteriorFamily],
        *,
        base: Any = AutoNormal,
        joint: Joint = "auto",
        prefix: str = "auto",
    ) -> None:
        for value in families.values() if isinstance(families, Mapping) else (families,):
            if not isinstance(value, AbstractPosteriorFamily):
                msg = (
                    f"`families` must be a posterior family or a dict of them by site, got {type(value).__name__}. "
                    "For inducing inputs Z write numpyro_sgp.Whitened(Z) or numpyro_sgp.Dual(Z)."
                )
                raise TypeError(msg)
        self.families = families
        super().__init__(model, base=base, prefix=prefix, joint=joint)

    def family(self, site: str) -> AbstractPosteriorFamily:
        return for_site(self.families, site, "families")

    def check_sites(self, sites: set[str]) -> None:
        check_names(self.families, sites, "families")
