"""The guide of dual posteriors, t-SVGP and t-VGP."""

from collections.abc import Callable, Mapping
import copy
from typing import Any, Self

from numpyro.infer.autoguide import AutoNormal

from numpyro_sgp.distributions.sparse_regression import RegressionPosterior
from numpyro_sgp.guides.guide import AbstractAutoSparseGP
from numpyro_sgp.guides.members import Joint
from numpyro_sgp.posteriors.dual.family import Dual, Sites
from numpyro_sgp.posteriors.family import AbstractPosteriorFamily, Inducing, check_names, for_site, started_at

__all__ = ["AutoTSVGP"]


class AutoTSVGP(AbstractAutoSparseGP):
    """Dual (t-SVGP) posterior for every GP site of a model, to be trained with `NaturalGradient`.

    Between natural steps the sites stay fixed while hyperparameters move, so the bound follows the prior and is tighter
    than with q(u) fixed.

    Args:
        model: a NumPyro model with `GaussianProcess` sites.
        inducing: inducing inputs (M, D), an inducing object, a dict of them by site, or a function
            `(kernel, X, rng_key)` that makes them when the guide is initialised; None for t-VGP, the dense posterior.
        sites: "tied" keeps sums over the data and takes minibatches; "per_datum" keeps one site for each row of X and
            needs the whole X at each step.
        base: guide for the other latents: an autoguide class, or a guide. A class starts a latent at what was observed
            of it, if it is the location of an outcome, and near its prior median otherwise.
        learn_inducing: whether to train the inducing inputs.
        joint: which GP sites and other latents have one joint Gaussian: "auto" for all that meet in a term of the
            model, False for none, or a tuple of names. Latents that a kernel depends on stay with `base`, and so do
            those of a guide of your own or of `AutoDelta`.
        init_from: where to start in place of the prior: what `SparseGPRegression.condition` gives with the same
            inducing variables, or a dict of them by site.
        prefix: of the names of parameters, `{site}_{prefix}_{symbol}`.

    Raises:
        ValueError: unknown `sites`; inducing inputs of another width than X.

    References:
        Adam, Chang, Khan and Solin (2021), "Dual parameterization of sparse variational Gaussian processes".
    """

    def __init__(
        self,
        model: Callable,
        inducing: Inducing | Mapping[str, Inducing | None] | None,
        *,
        sites: Sites = "tied",
        base: Any = AutoNormal,
        learn_inducing: bool = False,
        init_from: RegressionPosterior | Mapping[str, RegressionPosterior] | None = None,
        joint: Joint = "auto",
        prefix: str = "auto",
    ) -> None:
        self.inducing = inducing
        self._options = {"sites": sites, "learn_inducing": learn_inducing}
        self.init_from = init_from
        Dual(None, **self._options)  # a mistake in the options raises here, not at the first run
        super().__init__(model, base=base, prefix=prefix, joint=joint)

    @property
    def learns_inducing(self) -> bool:
        """Whether the inducing inputs are trained."""
        return bool(self._options["learn_inducing"])

    def with_inducing(
        self, inducing: Inducing | Mapping[str, Inducing | None] | None, *, learn_inducing: bool = False
    ) -> Self:
        """The same guide with other inducing inputs; it keeps its base guide, with what that has found in the model.

        Args:
            inducing: inducing inputs (M, D), an inducing object, or a dict of them by site; None for none.
            learn_inducing: whether to train them.
        """
        guide = copy.copy(self)
        guide.inducing = inducing
        guide._options = {**self._options, "learn_inducing": learn_inducing}
        return guide

    def family(self, site: str) -> AbstractPosteriorFamily:
        start = started_at(self.init_from, site)
        return Dual(for_site(self.inducing, site, "inducing"), **self._options, init_from=start)

    def check_sites(self, sites: set[str]) -> None:
        check_names(self.inducing, sites, "inducing")
        check_names(self.init_from, sites, "init_from")
