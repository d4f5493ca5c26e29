"""What a posterior family is: a parametrisation of q(u), with its parameters.

A guide runs the model and calls the family of each GP site; a new posterior is one family. Here too is what families
share: inducing variables among the parameters, and options given by site.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

from numpyro_sgp._internal.eager import as_one_program
from numpyro_sgp._internal.pytrees import own_copy
from numpyro_sgp.distributions.gaussian_process import GaussianProcess
from numpyro_sgp.distributions.sparse_posterior import SparsePosterior
from numpyro_sgp.inducing import AbstractInducing, GrowingInducing, InducingGrid, as_inducing, check_width
from numpyro_sgp.kernels.functional import AbstractFunctional, nodes_of, same_rows
from numpyro_sgp.math.linalg import cholesky
from numpyro_sgp.posteriors.gaussian import AbstractGaussian
from numpyro_sgp.posteriors.joint.by_rows import AbstractSiteRows
from numpyro_sgp.posteriors.moments import Moments, Roots
from numpyro_sgp.posteriors.parameters import FittedParameters, Parameters
from numpyro_sgp.posteriors.perturbation import Perturbed
from numpyro_sgp.posteriors.process import AbstractProcess, TableProcess
from numpyro_sgp.posteriors.sites import AbstractSites

__all__ = [
    "AbstractPosteriorFamily",
    "AbstractRowFamily",
    "Inducing",
    "at_prior",
    "check_names",
    "for_site",
    "inducing_param",
    "is_initial",
    "refuse_growing",
    "root_of_prior",
    "started_at",
]


Inducing = ArrayLike | AbstractInducing | Callable[[Callable, Array, Array], ArrayLike | AbstractInducing]


class AbstractPosteriorFamily(ABC):
    """A parametrisation of q(u). A new one has to say what its Gaussian is: training and predictions follow.

    Attributes:
        over_weights: whether u are the weights of a kernel of finite rank, and not those of inducing variables.
        has_cavities: whether mean and covariance are those of one Gaussian, so that data can be taken out of it.
        kept_by: the loss that keeps the mutable state; under another one it would stay as it starts.
    """

    over_weights = False
    has_cavities = True
    kept_by: str | None = None

    @property
    def joins(self) -> str | None:
        """How one Gaussian over GPs and latents is held: "projected", "whitened", "rows", "grid", or None.

        "rows", of an `AbstractRowFamily`, and "grid" are for one GP site of one latent.
        """
        return None

    @property
    def couples_rows(self) -> bool:
        """Whether a term may depend on several rows of f.

        It may where training is that of mean and covariance, or of one Gaussian with others, and not where an optimizer
        asks for a direction that goes through the marginals of the rows.
        """
        return True

    @abstractmethod
    def gaussian(
        self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...]
    ) -> AbstractGaussian | None:
        """q(u); None for a family that has none, and gives `moments` and `process` itself.

        Args:
            param: declares the parameters of this site, or looks them up.
            prior: its kernel and jitter; the inputs do not matter.
            batch_shape: one latent for each entry.
        """

    def moments(self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...]) -> Moments:
        """Moments of q(f(X)): those of `gaussian`, where a family has no shorter way to them.

        Args:
            param: declares the parameters of this site and returns their values. `param.initial`, if it has that, are
                the symbols of those that had no value yet.
            prior: the prior at the inputs where the posterior is wanted.
            batch_shape: one latent for each entry.
        """
        q = self.gaussian(param, prior, batch_shape)
        assert q is not None, f"{type(self).__name__} has no `gaussian`, and must have `moments`."
        return q.moments(prior.kernel, prior.X)

    def updated(self, fitted: FittedParameters, q: SparsePosterior, linear: Array, precision: Array) -> dict[str, Any]:
        """The parameters of q(u) Π_i exp(lᵢ fᵢ − ½ pᵢ fᵢ²), by symbol, f being E[f | u] without the prior mean.

        Args:
            fitted: the fitted parameters of this site.
            q: the posterior at the rows of the factors.
            linear: l, (..., N).
            precision: p, (..., N); negative to take out what was in.

        Raises:
            TypeError: a family that has no closed form for it.
        """
        del fitted, q, linear, precision
        msg = (
            f"`{type(self).__name__}` cannot take in rows after its training: its mean and covariance are not those of "
            "one Gaussian with free parameters. Use `AutoTSVGP` or `AutoSVGP`."
        )
        raise TypeError(msg)

    def check_more_rows(self) -> None:  # noqa: B027 (most families can)
        """Raise where a posterior that is joint with other latents can take in no rows beside those it has."""

    def process(self, fitted: FittedParameters, q: SparsePosterior) -> AbstractProcess | TableProcess | None:
        """q(f) as a process, factorised; None where it is no Gaussian in variables of its own.

        Args:
            fitted: the fitted parameters of this site, and its mutable state.
            q: the posterior at some inputs.
        """
        found = self.gaussian(fitted, q.prior, q.batch_shape)
        return None if found is None else found.process(q)


class AbstractRowFamily(AbstractPosteriorFamily):
    """A family whose sites are sums over few rows, whose posterior is made without a matrix of all rows.

    Attributes:
        takes_roots: whether the posterior takes roots of the sites' precisions.
    """

    takes_roots = False

    @property
    def joins(self) -> str:
        return "rows"

    @property
    def couples_rows(self) -> bool:
        return False

    def gaussian(self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...]) -> None:
        del param, prior, batch_shape

    @abstractmethod
    def check_prior(self, prior: GaussianProcess) -> None:
        """Raise for inputs or a kernel that the family cannot take."""

    @abstractmethod
    def sites_of(self, num_latents: int, prior: GaussianProcess, rng_key: Array) -> AbstractSites:
        """Sites that change nothing, beside P latents."""

    @abstractmethod
    def in_rows(self, prior: GaussianProcess, sites: Any, *, new: bool) -> AbstractSiteRows:
        """The process at the rows of sites and those that are asked for.

        Args:
            prior: at the rows that are asked for.
            sites: with their inputs.
            new: whether these are other rows; else they are the last ones of the sites.
        """

    def check_rows(self, prior: GaussianProcess, sites: Any) -> None:
        """Raise where a training step came with another number of rows than at initialisation."""
        if sites.X.shape != prior.X.shape:
            msg = (
                f"`{type(self).__name__}` holds one site for each of the {sites.X.shape[0]} rows given at "
                f"initialisation; a training step came with X of shape {prior.X.shape}. Give all rows at every step. "
                "`AutoTSVGP` with inducing inputs takes minibatches, and so does `AutoMarkovGP` with inducing times."
            )
            raise ValueError(msg)

    def check_floor(self, value: Perturbed) -> None:
        """Raise where a step asks for precisions of either sign, and the posterior takes roots of them."""
        zero = value.zero
        if self.takes_roots and zero.scale is not None and (zero.floor is None or zero.floor < 0.0):
            msg = (
                f"`{type(self).__name__}` takes roots of the precisions of its sites, which need a `floor` of 0 or "
                f"more, got {zero.floor}. Leave `floor` out of `NaturalGradient`, or take `AutoTSVGP` with inducing "
                "inputs or `AutoMarkovGP`."
            )
            raise ValueError(msg)

    def has_rows(self, prior: GaussianProcess, sites: Any) -> Array:
        """Whether sites know of the rows that are asked for, ()."""
        return jnp.asarray(sites.X.shape == prior.X.shape and same_rows(sites.X, prior.X))


def inducing_param(
    param: Parameters,
    inducing: Inducing,
    prior: GaussianProcess,
    learn_inducing: bool,
    symbol: str = "inducing",
    argument: str = "inducing",
    *,
    takes_grids: bool = False,
) -> AbstractInducing:
    """The inducing object of a site, kept among the parameters so that they alone suffice for prediction.

    Args:
        param: declares a parameter of the site.
        inducing: inducing inputs (M, D), an inducing object, or `(kernel, X, rng_key)` to one, run at initialisation
            with the inputs of the site, or the nodes of its functionals.
        prior: the site's prior.
        learn_inducing: whether to train it.
        symbol: of the parameter.
        argument: what the user calls it.
        takes_grids: whether the family has no matrix of all values at an `InducingGrid`.

    Raises:
        ValueError: the inducing object has another number of columns than X.
        TypeError: inducing inputs that grow, at a site of functionals; an `InducingGrid` that is not taken.
    """

    def init(rng_key: Array) -> AbstractInducing:
        made = inducing(prior.kernel, nodes_of(prior.X), rng_key) if callable(inducing) else inducing
        if isinstance(made, GrowingInducing) and isinstance(prior.X, AbstractFunctional):
            msg = (
                f"Growing inducing inputs are rows of `X`, and this site has functionals, {type(prior.X).__name__}. "
                "Give inducing inputs, or choose them from its `nodes`, as with `kmeans`."
            )
            raise TypeError(msg)
        if isinstance(made, InducingGrid) and not takes_grids:
            msg = (
                f"`{argument}` is an `InducingGrid`, which `AutoSVGP(model, grid)` takes, itself and not from a "
                "function: then no matrix has all its values. Elsewhere give inducing inputs (M, D), `grid.Z`."
            )
            raise TypeError(msg)
        # The caller's array stays the caller's, also where the state is donated.
        return own_copy(as_inducing(made, argument))

    value = param(symbol, init)
    check_width(value, prior.X, argument)
    return value if learn_inducing else jax.lax.stop_gradient(value)


def root_of_prior(inducing: AbstractInducing, prior: GaussianProcess) -> Array:
    """The Cholesky factor of Kuu, with the prior's jitter, (..., M, M)."""
    return cholesky(inducing.Kuu(prior.kernel), prior.relative_jitter)


def is_initial(param: Any, *symbols: str) -> bool:
    """Whether parameters had no value yet, as when `SVI.init` runs a guide, and so are their initial values."""
    return set(symbols) <= getattr(param, "initial", set())


def at_prior(kernel: Callable, X: Array) -> Moments:
    """Moments of q = p: what a posterior that starts at the prior is at first, without one matrix."""
    variance, dtype = _variance(kernel, X), X.dtype
    zeros = np.zeros(variance.shape, dtype)
    return Moments(
        jnp.asarray(zeros), variance, jnp.asarray(np.zeros((), dtype)), Roots(jnp.asarray(zeros[..., None, :]), None)
    )


@as_one_program
def _variance(kernel: Callable, X: Array) -> Array:
    return kernel(X)


def refuse_growing(inducing: AbstractInducing, form: str) -> None:
    """Raise where a posterior would not stay as it is when an inducing input is added."""
    if isinstance(inducing, GrowingInducing):
        msg = (
            f"Growing inducing inputs were given with {form}, whose posterior changes when one is added. Those that "
            'can grow are the whitened ones of `AutoSVGP`, both bases of `AutoDecoupledGP` with "hybrid", or "full" '
            "and `natural=True`, and its mean basis alone with the others."
        )
        raise ValueError(msg)  # noqa: TRY004 - the right type for another guide


def for_site(value: Any, site: str, argument: str) -> Any:
    """The entry of a dict by site, or the one value for all sites."""
    if not isinstance(value, Mapping):
        return value
    if site not in value:
        msg = f"`{argument}` has entries for {sorted(value)}, none for the GP site {site!r}. Add one."
        raise ValueError(msg)
    return value[site]


def started_at(init_from: Any, site: str) -> Any:
    """The start given for a site; with a dict by site, the sites without an entry start at the prior."""
    return init_from.get(site) if isinstance(init_from, Mapping) else init_from


def check_names(value: Any, sites: set[str], argument: str) -> None:
    """Raise if a dict by site names something that is not a GP site."""
    if isinstance(value, Mapping) and set(value) - sites:
        unknown = sorted(set(value) - sites)
        msg = f"`{argument}` names {unknown}, but the GP sites of the model are {sorted(sites)}. Rename the entries."
        raise ValueError(msg)
