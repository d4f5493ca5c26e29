"""Sparse variational GP: q(u) by mean and root, trained by any optimizer, or by natural parameters."""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

from jax import Array
import jax.numpy as jnp
from numpyro.infer.autoguide import AutoNormal

from numpyro_sgp._internal.probed import value_of
from numpyro_sgp.distributions.gaussian_process import GaussianProcess
from numpyro_sgp.distributions.sparse_posterior import SparsePosterior
from numpyro_sgp.distributions.sparse_regression import RegressionPosterior, started_mean_and_root, started_sites
from numpyro_sgp.guides.guide import AbstractAutoSparseGP
from numpyro_sgp.guides.members import Joint
from numpyro_sgp.inducing import AbstractInducing, GrowingInducing, InducingGrid
from numpyro_sgp.math.linalg import solve_lower, solve_lower_transposed
from numpyro_sgp.posteriors.dual.formulas import natural_mean_and_root, natural_whitened
from numpyro_sgp.posteriors.family import (
    AbstractPosteriorFamily,
    Inducing,
    at_prior,
    check_names,
    for_site,
    inducing_param,
    is_initial,
    refuse_growing,
    root_of_prior,
    started_at,
)
from numpyro_sgp.posteriors.gaussian import InducingGaussian
from numpyro_sgp.posteriors.kronecker.family import Kronecker
from numpyro_sgp.posteriors.moments import Moments, perturbed_moments, project
from numpyro_sgp.posteriors.parameters import FittedParameters, Parameters
from numpyro_sgp.posteriors.perturbation import Perturbed
from numpyro_sgp.posteriors.sites import TiedSites
from numpyro_sgp.posteriors.whitened.formulas import times_factors, unwhitened, whitened

__all__ = ["AutoSVGP", "NaturalWhitened", "Unwhitened", "Whitened"]


@dataclasses.dataclass(frozen=True)
class Whitened(AbstractPosteriorFamily):
    """q(v) = N(m, S_sqrt S_sqrtᵀ), u = L v with L Lᵀ = Kuu; starts at the prior.

    Args:
        inducing: inducing inputs (M, D), an inducing object, or `(kernel, X, rng_key)` to one.
        learn_inducing: whether to train the inducing inputs.
        init_from: the optimum of a regression with the same inducing variables, to start at in place of the prior.
    """

    inducing: Inducing
    learn_inducing: bool = False
    init_from: RegressionPosterior | None = None

    def gaussian(self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...]) -> InducingGaussian:
        inducing, m, S_sqrt = self._parameters(param, prior, batch_shape)
        return InducingGaussian(inducing, root_of_prior(inducing, prior), m, S_sqrt)

    def moments(self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...]) -> Moments:
        inducing, m, S_sqrt = self._parameters(param, prior, batch_shape)
        if self.init_from is None and is_initial(param, "m", "S_sqrt"):
            return at_prior(prior.kernel, prior.X)
        blocks = project(inducing, prior.kernel, prior.X, prior.relative_jitter)
        return whitened(m, S_sqrt, blocks.A, blocks.kff)

    def updated(self, fitted: FittedParameters, q: SparsePosterior, linear: Array, precision: Array) -> dict[str, Any]:
        A = project(fitted("inducing"), q.prior.kernel, q.prior.X, q.prior.relative_jitter).A
        m, S_sqrt = times_factors(fitted("m"), jnp.tril(fitted("S_sqrt")), A, linear, precision)
        return {"m": m, "S_sqrt": S_sqrt}

    def _parameters(
        self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...]
    ) -> tuple[AbstractInducing, Array, Array]:
        inducing = inducing_param(param, self.inducing, prior, self.learn_inducing)
        M, dtype = inducing.num_inducing, prior.X.dtype
        start = jnp.zeros(M, dtype), jnp.eye(M, dtype=dtype)
        m, S_sqrt = started_mean_and_root(param, batch_shape, start, self.init_from, "whitened", inducing, prior.X)
        return inducing, m, jnp.tril(S_sqrt)


@dataclasses.dataclass(frozen=True)
class Unwhitened(AbstractPosteriorFamily):
    """q(u) = N(m, S_sqrt S_sqrtᵀ); starts at the prior.

    Args:
        inducing: inducing inputs (M, D), an inducing object, or `(kernel, X, rng_key)` to one.
        learn_inducing: whether to train the inducing inputs.
        init_from: the optimum of a regression with the same inducing variables, to start at in place of the prior.
    """

    inducing: Inducing
    learn_inducing: bool = False
    init_from: RegressionPosterior | None = None

    def gaussian(self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...]) -> InducingGaussian:
        inducing = inducing_param(param, self.inducing, prior, self.learn_inducing)
        L = root_of_prior(inducing, prior)
        m, S_sqrt = self._parameters(param, prior, batch_shape, inducing, L)
        return InducingGaussian(inducing, L, solve_lower(L, m[..., None])[..., 0], solve_lower(L, S_sqrt))

    def moments(self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...]) -> Moments:
        inducing = inducing_param(param, self.inducing, prior, self.learn_inducing)
        refuse_growing(inducing, "the unwhitened form")
        blocks = project(inducing, prior.kernel, prior.X, prior.relative_jitter)
        m, S_sqrt = self._parameters(param, prior, batch_shape, inducing, blocks.L)
        return unwhitened(m, S_sqrt, blocks.L, blocks.A, blocks.kff)

    def updated(self, fitted: FittedParameters, q: SparsePosterior, linear: Array, precision: Array) -> dict[str, Any]:
        blocks = project(fitted("inducing"), q.prior.kernel, q.prior.X, q.prior.relative_jitter)
        V = solve_lower_transposed(blocks.L, blocks.A)
        m, S_sqrt = times_factors(fitted("m"), jnp.tril(fitted("S_sqrt")), V, linear, precision)
        return {"m": m, "S_sqrt": S_sqrt}

    def _parameters(
        self,
        param: Parameters,
        prior: GaussianProcess,
        batch_shape: tuple[int, ...],
        inducing: AbstractInducing,
        L: Array,
    ) -> tuple[Array, Array]:
        start = jnp.zeros(inducing.num_inducing, prior.X.dtype), L
        m, S_sqrt = started_mean_and_root(param, batch_shape, start, self.init_from, "unwhitened", inducing, prior.X)
        return m, jnp.tril(S_sqrt)


@dataclasses.dataclass(frozen=True)
class NaturalWhitened(AbstractPosteriorFamily):
    """q(v) by natural parameters above the prior's, for `NaturalGradient`; u = L v; starts at the prior.

    Args:
        inducing: inducing inputs (M, D), an inducing object, or `(kernel, X, rng_key)` to one.
        learn_inducing: whether to train the inducing inputs.
        init_from: the optimum of a regression with the same inducing variables, to start at in place of the prior.
    """

    inducing: Inducing
    learn_inducing: bool = False
    init_from: RegressionPosterior | None = None

    @property
    def couples_rows(self) -> bool:
        return self.joins is not None

    @property
    def joins(self) -> str | None:
        grows = isinstance(self.inducing, GrowingInducing)
        return "whitened" if self.init_from is None and not grows else None

    def gaussian(self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...]) -> InducingGaussian:
        inducing, value = self._parameters(param, prior, batch_shape)
        sites = value_of(value)
        return InducingGaussian(
            inducing, root_of_prior(inducing, prior), *natural_mean_and_root(sites.lambda1, sites.Lambda2)
        )

    def moments(self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...]) -> Moments:
        inducing, value = self._parameters(param, prior, batch_shape)
        if self.init_from is None and is_initial(param, "sites"):
            return at_prior(prior.kernel, prior.X)
        sites = value_of(value)
        blocks = project(inducing, prior.kernel, prior.X, prior.relative_jitter)
        q = natural_whitened(sites.lambda1, sites.Lambda2, blocks.A, blocks.kff)
        return perturbed_moments(value, blocks.A, q) if isinstance(value, Perturbed) else q

    def updated(self, fitted: FittedParameters, q: SparsePosterior, linear: Array, precision: Array) -> dict[str, Any]:
        A = project(fitted("inducing"), q.prior.kernel, q.prior.X, q.prior.relative_jitter).A
        return {"sites": fitted("sites").with_rows(A, linear, precision)}

    def _parameters(
        self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...]
    ) -> tuple[AbstractInducing, Any]:
        inducing = inducing_param(param, self.inducing, prior, self.learn_inducing)
        zeros = TiedSites.zeros(batch_shape, inducing.num_inducing, prior.X.dtype)
        return inducing, param("sites", started_sites(zeros, self.init_from, "natural", inducing, prior.X))


class AutoSVGP(AbstractAutoSparseGP):
    """Sparse variational GP posterior for every GP site of a model.

    Args:
        model: a NumPyro model with `GaussianProcess` sites.
        inducing: inducing inputs (M, D), an inducing object, a dict of them by site, or a function
            `(kernel, X, rng_key)` that makes them when the guide is initialised. An `InducingGrid` itself, not from a
            function, has a covariance that is no matrix of M × M (see `Kronecker`).
        whiten: parametrise v with u = L v, L Lᵀ = Kuu (better conditioned), instead of u itself.
        natural: hold q by natural parameters, for the optimizer `NaturalGradient`.
        base: guide for the other latents: an autoguide class, or a guide. A class starts a latent at what was observed
            of it, if it is the location of an outcome, and near its prior median otherwise.
        learn_inducing: whether to train the inducing inputs.
        joint: which GP sites and other latents have one joint Gaussian: "auto" for all that meet in a term of the
            model, False for none, or a tuple of names. Latents that a kernel depends on stay with `base`, and so do
            those of a guide of your own or of `AutoDelta`. Without `natural` there is none, but on an `InducingGrid`.
        init_from: where to start in place of the prior: what `SparseGPRegression.condition` gives with the same
            inducing variables, or a dict of them by site.
        prefix: of the names of parameters, `{site}_{prefix}_{symbol}`.

    Raises:
        ValueError: `natural` without `whiten`; names in `joint` without `natural`; inducing inputs of another width
            than X; an `InducingGrid` with `natural`, `init_from`, or without `whiten`.
        TypeError: an `InducingGrid` with a kernel that is no product over its axes.

    References:
        Hensman, Fusi and Lawrence (2013), "Gaussian processes for big data"; Hensman, Matthews and Ghahramani (2015),
        "Scalable variational Gaussian process classification".
    """

    def __init__(
        self,
        model: Callable,
        inducing: Inducing | Mapping[str, Inducing],
        *,
        whiten: bool = True,
        natural: bool = False,
        base: Any = AutoNormal,
        learn_inducing: bool = False,
        init_from: RegressionPosterior | Mapping[str, RegressionPosterior] | None = None,
        joint: Joint = "auto",
        prefix: str = "auto",
    ) -> None:
        if natural and not whiten:
            msg = (
                "`natural=True` was given with `whiten=False`. A natural step moves q the same way in both, and the "
                "whitened form is the better conditioned one while hyperparameters move: leave `whiten=True`, "
                "or use `AutoTSVGP`, whose sites stay fixed instead."
            )
            raise ValueError(msg)
        self.inducing = inducing
        self.learn_inducing = learn_inducing
        self.init_from = init_from
        self._family = NaturalWhitened if natural else Whitened if whiten else Unwhitened
        # A grid has a joint posterior of its own, for any optimizer.
        chosen = inducing.values() if isinstance(inducing, Mapping) else (inducing,)
        joins = natural or any(isinstance(each, InducingGrid) for each in chosen)
        if not joins and isinstance(joint, tuple | list):
            msg = f"`joint={joint!r}` was given without `natural=True`, which it needs. Or use `AutoTSVGP`."
            raise ValueError(msg)
        super().__init__(model, base=base, prefix=prefix, joint=joint if joins else False)

    def family(self, site: str) -> AbstractPosteriorFamily:
        inducing, start = for_site(self.inducing, site, "inducing"), started_at(self.init_from, site)
        if not isinstance(inducing, InducingGrid):
            return self._family(inducing, self.learn_inducing, start)
        if self._family is not Whitened or start is not None:
            natural = "natural=True" if self._family is NaturalWhitened else "whiten=False"
            given = natural if start is None else "init_from"
            msg = (
                f"`{given}` was given with an `InducingGrid`, whose posterior is held by products of small matrices. "
                "Leave it out, or give the grid as inducing inputs (M, D): `inducing=grid.Z`."
            )
            raise ValueError(msg)
        return Kronecker(inducing, self.learn_inducing)

    def check_sites(self, sites: set[str]) -> None:
        check_names(self.inducing, sites, "inducing")
        check_names(self.init_from, sites, "init_from")
