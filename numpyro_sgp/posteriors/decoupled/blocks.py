"""What decoupled families share: Gaussians over whitened inducing variables, and means with a basis of their own."""

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import jax
from jax import Array
from jax.core import Tracer
import jax.numpy as jnp
import numpyro

from numpyro_sgp._internal.probed import value_of
from numpyro_sgp.distributions.gaussian_process import GaussianProcess
from numpyro_sgp.distributions.sparse_regression import RegressionPosterior, started_mean_and_root, started_sites
from numpyro_sgp.inducing import AbstractInducing, GrowingInducing, InducingPoints, find_rows
from numpyro_sgp.kernels.functional import AbstractFunctional
from numpyro_sgp.posteriors.decoupled.coefficients import Coefficients, ProbedCoefficients
from numpyro_sgp.posteriors.decoupled.formulas import (
    Span,
    at_data,
    coefficient_units,
    mean_at,
    mean_projected,
    norm,
    norm_by_blocks,
    norm_from_rows,
    residual_variance,
)
from numpyro_sgp.posteriors.dual.formulas import natural_mean_and_root, natural_whitened
from numpyro_sgp.posteriors.gaussian import MeanPart
from numpyro_sgp.posteriors.mean_basis import InducingMean
from numpyro_sgp.posteriors.moments import Moments, Projection, perturbed_moments, roots_of
from numpyro_sgp.posteriors.parameters import Parameters
from numpyro_sgp.posteriors.perturbation import Perturbed
from numpyro_sgp.posteriors.sites import TiedSites
from numpyro_sgp.posteriors.whitened.formulas import whitened

__all__ = ["Block", "Free", "coefficients", "dual_step", "mean_part", "refuse_dual_step", "squared_norm"]


class Block(NamedTuple):
    """A Gaussian over one set of whitened inducing variables.

    Attributes:
        q: its moments, as if it were all of the posterior.
        m: whitened mean, (..., M), or None where it is held by sites.
        value: the parameter with its sites, perturbed or not, or None.
    """

    q: Moments
    m: Array | None
    value: Any

    def mean(self) -> Array:
        """E[v], as a function of the perturbation of the sites, (..., M)."""
        if self.m is not None:
            return self.m
        sites = value_of(self.value)
        m, _ = natural_mean_and_root(sites.lambda1, sites.Lambda2)
        return m + self.value.zero.epsilon1 if isinstance(self.value, Perturbed) else m

    def perturb(self, q: Moments) -> Moments:
        """The moments of the whole posterior, as functions of the perturbation of this block's sites."""
        # The sites are those of this block's variables, so theirs is its own part of the mean, not the whole.
        return perturbed_moments(self.value, roots_of(self.q).A, q, own_mean=self.q.mean)


class Free(NamedTuple):
    """How the parameters of a free Gaussian over whitened inducing variables are held.

    Attributes:
        natural: by natural parameters, or by mean and root.
        init_from: where it starts in place of the prior.
        prefix: of its parameters.
    """

    natural: bool
    init_from: RegressionPosterior | None
    prefix: str = ""

    def sites(
        self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...], inducing: AbstractInducing
    ) -> Any:
        zeros = TiedSites.zeros(batch_shape, inducing.num_inducing, prior.X.dtype)
        return param(f"{self.prefix}sites", started_sites(zeros, self.init_from, "natural", inducing, prior.X))

    def mean_and_root(
        self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...], inducing: AbstractInducing
    ) -> tuple[Array, Array]:
        """Mean and triangular root, (..., M) and (..., M, M)."""
        if self.natural:
            sites = value_of(self.sites(param, prior, batch_shape, inducing))
            return natural_mean_and_root(sites.lambda1, sites.Lambda2)
        M, dtype = inducing.num_inducing, prior.X.dtype
        start = jnp.zeros(M, dtype), jnp.eye(M, dtype=dtype)
        m, S_sqrt = started_mean_and_root(
            param, batch_shape, start, self.init_from, "whitened", inducing, prior.X, prefix=self.prefix
        )
        return m, jnp.tril(S_sqrt)

    def block(
        self,
        param: Parameters,
        prior: GaussianProcess,
        batch_shape: tuple[int, ...],
        inducing: AbstractInducing,
        blocks: Projection,
    ) -> Block:
        """The Gaussian, with its moments from the covariance blocks."""
        if self.natural:
            value = self.sites(param, prior, batch_shape, inducing)
            sites = value_of(value)
            return Block(natural_whitened(sites.lambda1, sites.Lambda2, blocks.A, blocks.kff), None, value)
        m, S_sqrt = self.mean_and_root(param, prior, batch_shape, inducing)
        return Block(whitened(m, S_sqrt, blocks.A, blocks.kff), m, None)


def coefficients(
    param: Parameters,
    prior: GaussianProcess,
    batch_shape: tuple[int, ...],
    gamma: AbstractInducing,
    span: tuple[AbstractInducing, Array] | None,
) -> tuple[Coefficients | ProbedCoefficients, Array]:
    """The coefficients a₀ of a mean, and what a unit of them is in a.

    `span` is β with the Cholesky factor of Kuu where the mean is orthogonal to β, else None.
    """

    def init(rng_key: Array) -> Coefficients:
        del rng_key
        zeros = jnp.zeros((*batch_shape, gamma.num_inducing), prior.X.dtype)
        if span is None:
            return Coefficients(zeros, None, 0, _holds(gamma, prior.X))
        beta, L = span
        residual = None
        if not isinstance(gamma, GrowingInducing):  # where what is left is not known yet
            # O(M² M_γ) operations, more than the rest of a step: measured once, while the scale follows the kernel.
            kgg = gamma.Kuu_diagonal(prior.kernel)
            left = residual_variance(L, beta.Kuv(prior.kernel, gamma), kgg)
            residual = left / jnp.mean(kgg, axis=-1, keepdims=True)
        return Coefficients(zeros, residual, beta.num_inducing, _holds(gamma, prior.X))

    value: Coefficients | ProbedCoefficients = param("a", init)
    return value, coefficient_units(value_of(value), gamma, prior.kernel)


def _holds(gamma: AbstractInducing, X: Array) -> bool | None:
    """Whether all rows of X are in a basis, or None where values are not known."""
    if not isinstance(gamma, InducingPoints) or isinstance(X, AbstractFunctional):
        return False
    if isinstance(gamma.Z, Tracer) or isinstance(X, Tracer):
        return None
    return bool(jnp.all(find_rows(gamma.Z, X).index >= 0))


def mean_part(
    param: Parameters, kernel: Callable, gamma: AbstractInducing, beta: AbstractInducing, L: Array
) -> MeanPart:
    """The fitted mean k_xγ a, and what β knows of it."""
    value = value_of(param("a", None))
    a = value.values * coefficient_units(value, gamma, kernel)
    return MeanPart(InducingMean(gamma), a, mean_projected(kernel, L, beta, gamma, a[None])[0])


def squared_norm(
    a: Array, kernel: Callable, gamma: AbstractInducing, kl_rows: int | None, t: Array | None, span: Span | None
) -> Array:
    """aᵀC a, or aᵀK_γγ a without a span; in training estimated from `kl_rows` rows that are drawn."""
    if kl_rows is None or kl_rows >= gamma.num_inducing:
        return norm(a, gamma.Kuu(kernel), t)

    def rows_at(index: Array) -> Array:
        some = gamma.take(index)
        # As in Kuu: the kernel knows the variances, which are not those of two inputs that happen to be equal.
        return some.Kuv(kernel, gamma).at[..., jnp.arange(len(index)), index].set(some.Kuu_diagonal(kernel))

    rng_key = None if numpyro.get_mask() is False else numpyro.prng_key()
    if rng_key is None:  # a prediction
        return norm_by_blocks(a, rows_at, kl_rows, t)
    index = jax.random.choice(rng_key, gamma.num_inducing, (kl_rows,), replace=False)
    return norm_from_rows(a, index, kernel, gamma, span)


def refuse_dual_step(what: str) -> NoReturn:
    """Raise for a mean without steps of `DualAscent`."""
    msg = (
        f"`DualAscent` needs a mean basis that is the data, in the parametrization 'orthogonal' or 'full', got {what}. "
        "Pass the training inputs as `mean_inducing`."
    )
    raise ValueError(msg)


def dual_step(
    value: ProbedCoefficients,
    unit: Array,
    prior: GaussianProcess,
    q: Moments,
    gamma: AbstractInducing,
    span: tuple[AbstractInducing, Array] | None,
) -> Moments:
    """The moments in a step of `DualAscent`; the arguments are those of `coefficients`, and q has no mean of γ yet."""
    if not isinstance(gamma, InducingPoints):
        refuse_dual_step(type(gamma).__name__)
    if isinstance(prior.X, AbstractFunctional):
        refuse_dual_step(f"the functionals {type(prior.X).__name__} as data")
    value.rows_seen.append(prior.X.shape[-2])
    kernel, response = prior.kernel, value.zero
    a = jax.lax.stop_gradient(value.value.values) * unit
    function, match = mean_at(kernel, prior.X, gamma, a), find_rows(gamma.Z, prior.X)
    if span is None:
        return at_data(q, a, unit, function, None, match, response)
    beta, L = span

    def anew() -> Array:
        return mean_projected(kernel, L, beta, gamma, jax.lax.stop_gradient(value.tracked) * unit)

    projected = anew() if value.refresh is True else jax.lax.cond(value.refresh, anew, lambda: value.projected)
    moved = at_data(q, a, unit, function, projected[0], match, response)
    assert response.projected is not None
    tracked = jnp.sum(response.projected * jax.lax.stop_gradient(projected), axis=(0, -1))
    return moved._replace(kl=moved.kl + tracked)
