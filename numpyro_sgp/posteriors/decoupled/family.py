"""Decoupled posteriors of one GP site: parameters, and moments in each parametrisation."""

from collections.abc import Callable
import dataclasses
from typing import Any, Literal, NamedTuple

import jax
from jax import Array
from jax.core import Tracer
import jax.numpy as jnp
import numpyro

from numpyro_sgp._internal.checks import positive
from numpyro_sgp._internal.probed import value_of
from numpyro_sgp.distributions.gaussian_process import GaussianProcess
from numpyro_sgp.distributions.sparse_posterior import SparsePosterior
from numpyro_sgp.distributions.sparse_regression import RegressionPosterior, started_mean_and_root, started_sites
from numpyro_sgp.inducing import AbstractInducing, GrowingInducing, InducingPoints, find_rows
from numpyro_sgp.math.linalg import matmul
from numpyro_sgp.posteriors.decoupled.coefficients import Coefficients, ProbedCoefficients
from numpyro_sgp.posteriors.decoupled.formulas import (
    Span,
    at_data,
    coefficient_units,
    full,
    hybrid,
    mean_at,
    mean_projected,
    norm,
    norm_by_blocks,
    norm_from_rows,
    orthogonal,
    project_orthogonal,
    residual_variance,
    solve,
)
from numpyro_sgp.posteriors.dual.formulas import natural_mean, natural_mean_and_root, natural_whitened
from numpyro_sgp.posteriors.family import (
    AbstractPosteriorFamily,
    Inducing,
    inducing_param,
    refuse_growing,
    root_of_prior,
)
from numpyro_sgp.posteriors.gaussian import FittedParameters, InducingGaussian, Parameters, root_of_points
from numpyro_sgp.posteriors.mean_basis import InducingMean
from numpyro_sgp.posteriors.moments import Moments, Projection, perturbed_moments, project
from numpyro_sgp.posteriors.natural_parameters import Perturbed, TiedSites
from numpyro_sgp.posteriors.process import MeanPart, ProcessPosterior, process_over
from numpyro_sgp.posteriors.whitened.formulas import whitened

__all__ = ["Decoupled", "Parametrization"]

Parametrization = Literal["orthogonal", "hybrid", "full", "solve"]

_PARAMETRIZATIONS = ("orthogonal", "hybrid", "full", "solve")

# B = 0 is a stationary point of the bound whatever the data say; this is a covariance within a percent of the prior.
_START_OF_ROOT = 0.1


class _Block(NamedTuple):
    """A Gaussian over one set of whitened inducing variables.

    Attributes:
        q: its moments, as if it were all of the posterior.
        m: whitened mean, (..., M), or None where it is held by sites.
        value: the parameter with its sites, perturbed or not, or None.
    """

    q: Moments
    m: Array | None
    value: TiedSites | Perturbed | None

    def mean(self) -> Array:
        """E[v], as a function of the perturbation of the sites, (..., M)."""
        if self.m is not None:
            return self.m
        sites = value_of(self.value)
        m = natural_mean(sites.lambda1, sites.Lambda2)
        return m + self.value.zero.epsilon1 if isinstance(self.value, Perturbed) else m

    def perturb(self, q: Moments) -> Moments:
        """The moments of the whole posterior, as functions of the perturbation of this block's sites."""
        if not isinstance(self.value, Perturbed):
            return q
        # The sites are those of this block's variables, so theirs is its own part of the mean, not the whole.
        return perturbed_moments(self.value, self.q.prior_root, q, own_mean=self.q.mean)


@dataclasses.dataclass(frozen=True)
class Decoupled(AbstractPosteriorFamily):
    """q(f) with a mean basis γ, a covariance basis β and u = f(β); starts at the prior.

    Args:
        mean_inducing: γ, inducing inputs (M_γ, D), an inducing object, or `(kernel, X, rng_key)` to one; None for the
            sparse variational posterior over β alone, which needs another parametrisation than "full".
        cov_inducing: β, likewise; None for the prior's covariance, with "full" and its plain optimizers only.
        parametrization: "orthogonal", m(x) = A(x)ᵀm + the part of k_xγ a that is orthogonal to β, with any q(u);
            "hybrid", m(x) = A(x)ᵀm + k_xγ a, the same posteriors by other numbers; "full", m(x) = k_xγ a and a
            covariance below the prior's; "solve", a second Gaussian over what u leaves of f(γ), which costs M_γ³.
        natural: hold the Gaussian blocks by natural parameters, for the optimizer `NaturalGradient`.
        learn_inducing: whether to train the inducing inputs of both bases.
        kl_rows: estimate the divergence of the mean in training from that many rows of the γ × γ matrix, drawn at
            each step, at a cost linear in M_γ and without bias in values and gradients; None is exact. Predictions
            have the exact divergence.
        init_from: the optimum of a regression at the inducing variables β, to start at in place of the prior; not
            with "full".

    Raises:
        ValueError: an unknown parametrisation, a basis missing that it needs, or an option that it cannot have.

    References:
        Cheng and Boots (2017), "Variational inference for Gaussian process models with linear complexity": "full",
        "hybrid"; Salimbeni, Cheng, Boots and Deisenroth (2018), "Orthogonally decoupled variational Gaussian
        processes"; Shi, Titsias and Mnih (2020), "Sparse orthogonal variational inference for Gaussian processes".
    """

    mean_inducing: Inducing | None
    cov_inducing: Inducing | None
    parametrization: Parametrization = "orthogonal"
    natural: bool = False
    learn_inducing: bool = False
    kl_rows: int | None = None
    init_from: RegressionPosterior | None = None

    def __post_init__(self) -> None:
        kind, rows = self.parametrization, self.kl_rows
        if kind not in _PARAMETRIZATIONS:
            msg = f"`parametrization` must be one of {_PARAMETRIZATIONS}, got {kind!r}. The default is 'orthogonal'."
            raise ValueError(msg)
        if kind == "full" and self.mean_inducing is None:
            msg = (
                '`mean_inducing=None` was given with `parametrization="full"`, whose mean has no other basis. '
                'Give the mean a basis, or use "orthogonal", which then is the sparse variational posterior.'
            )
            raise ValueError(msg)
        if self.cov_inducing is None and (kind != "full" or self.natural):
            what = "`natural=True`" if kind == "full" else f"`parametrization={kind!r}`"
            msg = (
                f"`cov_inducing=None` was given with {what}, which needs a covariance basis. Give it one, or use "
                '`parametrization="full"` with `natural=False` for a posterior with the covariance of the prior.'
            )
            raise ValueError(msg)
        if rows is not None:
            positive("kl_rows", rows, "The size of a minibatch is a good one; None is for all rows.")
        if rows is not None and kind == "solve":
            msg = (
                '`kl_rows` was given with `parametrization="solve"`, which factorises the matrix that it would sample. '
                'Leave it out, or use "orthogonal".'
            )
            raise ValueError(msg)
        if self.init_from is not None and kind == "full":
            msg = (
                '`init_from` was given with `parametrization="full"`, whose mean and covariance have no basis in '
                'common to start in. Use "orthogonal".'
            )
            raise ValueError(msg)

    @property
    def has_cavities(self) -> bool:
        # Nor with "solve": its two Gaussians are independent of each other, and a datum moves both means at once.
        return self.mean_inducing is None

    def moments(self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...]) -> Moments:
        gamma = beta = None
        if self.mean_inducing is not None:
            gamma = self._inducing(param, self.mean_inducing, prior, "mean_inducing", "mean_inducing")
        if self.cov_inducing is not None:
            beta = self._inducing(param, self.cov_inducing, prior, "inducing", "cov_inducing")
        if beta is None or self.parametrization == "full":
            assert gamma is not None
            return self._full(param, prior, batch_shape, gamma, beta)
        blocks = project(beta, prior.kernel, prior.X, prior.relative_jitter)
        block = self._gaussian(param, prior, batch_shape, beta, blocks, "", self.init_from)
        if gamma is None:
            return block.perturb(block.q)
        if self.parametrization != "hybrid":
            refuse_growing(beta, f"the covariance of `parametrization={self.parametrization!r}`")
        if self.parametrization == "solve":
            own = project_orthogonal(beta, gamma, blocks, prior.kernel, prior.X, prior.relative_jitter)
            second = self._gaussian(param, prior, batch_shape, gamma, own, "mean_", None)
            return second.perturb(block.perturb(solve(block.q, second.q, blocks.kff)))
        span = beta if self.parametrization == "orthogonal" else None
        value, unit = self._coefficients(param, prior, batch_shape, gamma, span, blocks.L)
        if isinstance(value, ProbedCoefficients):
            return block.perturb(self._in_a_dual_step(value, unit, prior, block.q, gamma, (beta, blocks.L)))
        a = value.values * unit
        function = mean_at(prior.kernel, prior.X, gamma, a)
        # The second as the divergence takes it, whose gradient with respect to a comes from the sampled rows.
        both = jnp.stack([a, jax.lax.stop_gradient(a)])
        t, fixed_t = mean_projected(prior.kernel, blocks.L, beta, gamma, both)
        if span is None:
            squared = self._norm(a, prior.kernel, gamma, None, None)
            return block.perturb(hybrid(block.q, block.mean(), function, t, squared))
        squared = self._norm(a, prior.kernel, gamma, t, Span(beta, blocks.L, fixed_t))
        return block.perturb(orthogonal(block.q, function, t, squared))

    def gaussian(
        self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...]
    ) -> InducingGaussian | None:
        found = self._gaussian_and_part(param, prior, batch_shape)
        return None if found is None else found[0]

    def process(self, fitted: FittedParameters, q: SparsePosterior) -> ProcessPosterior | None:
        found = self._gaussian_and_part(fitted, q.prior, q.batch_shape)
        return None if found is None else process_over(found[0], q, found[1])

    def _gaussian_and_part(
        self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...]
    ) -> tuple[InducingGaussian, MeanPart | None] | None:
        """q(u), and the part of the mean that has a basis of its own; None without a covariance basis."""
        if self.cov_inducing is None:
            return None
        kernel, jitter = prior.kernel, prior.relative_jitter
        beta, gamma = self._inducing(param, self.cov_inducing, prior, "inducing", "cov_inducing"), None
        if self.mean_inducing is not None:
            gamma = self._inducing(param, self.mean_inducing, prior, "mean_inducing", "mean_inducing")
        if self.parametrization == "full" and gamma is not None:
            m, S_sqrt = natural_mean_and_root(*self._precision(param, prior, batch_shape, beta))
        else:
            m, S_sqrt = self._mean_and_root(param, prior, batch_shape, beta, "", self.init_from)
        if self.parametrization == "solve" and gamma is not None:
            both = root_of_points(beta, gamma, kernel, jitter)
            if both is None:
                return None
            own = self._mean_and_root(param, prior, batch_shape, gamma, "mean_", None)
            m = jnp.concatenate([m, own[0]], axis=-1)
            return InducingGaussian(*both, m, _block_diagonal(S_sqrt, own[1])), None
        L = root_of_prior(beta, prior)
        if gamma is None:
            return InducingGaussian(beta, L, m, S_sqrt), None
        # m(x) = k_xu Kuu⁻¹m(u) + (k_xγ − k_xu Kuu⁻¹K_uγ)a, whatever of the second part the family has in m(u).
        span = beta if self.parametrization == "orthogonal" else None
        value, unit = self._coefficients(param, prior, batch_shape, gamma, span, L)
        a = value_of(value).values * unit
        t = mean_projected(kernel, L, beta, gamma, a)
        m = m if self.parametrization == "orthogonal" else m + t
        return InducingGaussian(beta, L, m, S_sqrt), MeanPart(InducingMean(gamma), a, t)

    def _inducing(
        self, param: Parameters, inducing: Inducing, prior: GaussianProcess, symbol: str, argument: str
    ) -> AbstractInducing:
        return inducing_param(param, inducing, prior, self.learn_inducing, symbol, argument)

    def _gaussian(
        self,
        param: Parameters,
        prior: GaussianProcess,
        batch_shape: tuple[int, ...],
        inducing: AbstractInducing,
        blocks: Projection,
        prefix: str,
        init_from: RegressionPosterior | None,
    ) -> _Block:
        """A free Gaussian over whitened inducing variables, by sites or by mean and root."""
        if self.natural:
            value = self._block_sites(param, prior, batch_shape, inducing, prefix, init_from)
            sites = value_of(value)
            return _Block(natural_whitened(sites.lambda1, sites.Lambda2, blocks.A, blocks.kff), None, value)
        m, S_sqrt = self._mean_and_root(param, prior, batch_shape, inducing, prefix, init_from)
        return _Block(whitened(m, S_sqrt, blocks.A, blocks.kff), m, None)

    def _block_sites(
        self,
        param: Parameters,
        prior: GaussianProcess,
        batch_shape: tuple[int, ...],
        inducing: AbstractInducing,
        prefix: str,
        init_from: RegressionPosterior | None,
    ) -> Any:
        zeros = TiedSites.zeros(batch_shape, inducing.num_inducing, prior.X.dtype)
        return param(f"{prefix}sites", started_sites(zeros, init_from, "natural", inducing, prior.X))

    def _mean_and_root(
        self,
        param: Parameters,
        prior: GaussianProcess,
        batch_shape: tuple[int, ...],
        inducing: AbstractInducing,
        prefix: str,
        init_from: RegressionPosterior | None,
    ) -> tuple[Array, Array]:
        """Mean and triangular root of a free Gaussian over whitened inducing variables."""
        if self.natural:
            sites = value_of(self._block_sites(param, prior, batch_shape, inducing, prefix, init_from))
            return natural_mean_and_root(sites.lambda1, sites.Lambda2)
        M, dtype = inducing.num_inducing, prior.X.dtype
        start = jnp.zeros(M, dtype), jnp.eye(M, dtype=dtype)
        m, S_sqrt = started_mean_and_root(
            param, batch_shape, start, init_from, "whitened", inducing, prior.X, prefix=prefix
        )
        return m, jnp.tril(S_sqrt)

    def _coefficients(
        self,
        param: Parameters,
        prior: GaussianProcess,
        batch_shape: tuple[int, ...],
        gamma: AbstractInducing,
        beta: AbstractInducing | None,
        L: Array | None,
    ) -> tuple[Coefficients | ProbedCoefficients, Array]:
        """The coefficients a₀, and what a unit of them is in a: 1 over the root of the variances left to them."""

        def init(rng_key: Array) -> Coefficients:
            del rng_key
            zeros = jnp.zeros((*batch_shape, gamma.num_inducing), prior.X.dtype)
            projected = 0 if beta is None else beta.num_inducing
            if beta is None or isinstance(gamma, GrowingInducing):  # where what is left is not known yet
                return Coefficients(zeros, None, projected, _holds(gamma, prior.X))
            # O(M² M_γ) operations, more than the rest of a step: measured once, while the scale follows the kernel.
            kgg = gamma.Kuu_diagonal(prior.kernel)
            assert L is not None
            residual = residual_variance(L, beta.Kuv(prior.kernel, gamma), kgg) / jnp.mean(kgg, axis=-1, keepdims=True)
            return Coefficients(zeros, residual, projected, _holds(gamma, prior.X))

        value: Coefficients | ProbedCoefficients = param("a", init)
        return value, coefficient_units(value_of(value), gamma, prior.kernel)

    def _in_a_dual_step(
        self,
        value: ProbedCoefficients,
        unit: Array,
        prior: GaussianProcess,
        q: Moments,
        gamma: AbstractInducing,
        covariance: tuple[AbstractInducing, Array] | None,
    ) -> Moments:
        """The moments in a step of `DualAscent`."""
        kind = self.parametrization
        if kind not in ("orthogonal", "full") or not isinstance(gamma, InducingPoints):
            what = f'`parametrization="{kind}"`' if isinstance(gamma, InducingPoints) else type(gamma).__name__
            msg = (
                f"`DualAscent` needs a mean basis that is the data, in the parametrization 'orthogonal' or 'full', got "
                f"{what}. Pass the training inputs as `mean_inducing`."
            )
            raise ValueError(msg)
        value.rows_seen.append(prior.X.shape[-2])
        kernel, response = prior.kernel, value.zero
        a = jax.lax.stop_gradient(value.value.values) * unit
        function = mean_at(kernel, prior.X, gamma, a)
        t = None
        if kind == "orthogonal":
            assert covariance is not None
            beta, L = covariance

            def anew() -> Array:
                return mean_projected(kernel, L, beta, gamma, jax.lax.stop_gradient(value.tracked) * unit)

            projected = anew() if value.refresh is True else jax.lax.cond(value.refresh, anew, lambda: value.projected)
            t = projected[0]
        moved = at_data(q, a, unit, function, t, find_rows(gamma.Z, prior.X), response)
        if t is None:
            return moved
        assert response.projected is not None
        tracked = jnp.sum(response.projected * jax.lax.stop_gradient(projected), axis=(0, -1))
        return moved._replace(kl=moved.kl + tracked)

    def _norm(self, a: Array, kernel: Callable, gamma: AbstractInducing, t: Array | None, span: Span | None) -> Array:
        if self.kl_rows is None or self.kl_rows >= gamma.num_inducing:
            return norm(a, gamma.Kuu(kernel), t)

        def rows_at(index: Array) -> Array:
            some = gamma.take(index)
            # As in Kuu: the kernel knows the variances, which are not those of two inputs that happen to be equal.
            return some.Kuv(kernel, gamma).at[..., jnp.arange(len(index)), index].set(some.Kuu_diagonal(kernel))

        rng_key = None if numpyro.get_mask() is False else numpyro.prng_key()
        if rng_key is None:  # a prediction
            return norm_by_blocks(a, rows_at, self.kl_rows, t)
        index = jax.random.choice(rng_key, gamma.num_inducing, (self.kl_rows,), replace=False)
        return norm_from_rows(a, index, kernel, gamma, span)

    def _full(
        self,
        param: Parameters,
        prior: GaussianProcess,
        batch_shape: tuple[int, ...],
        gamma: AbstractInducing,
        beta: AbstractInducing | None,
    ) -> Moments:
        q = self._covariance(param, prior, batch_shape, beta)
        value, unit = self._coefficients(param, prior, batch_shape, gamma, None, None)
        if isinstance(value, ProbedCoefficients):
            return self._in_a_dual_step(value, unit, prior, q, gamma, None)
        a = value.values * unit
        mean = mean_at(prior.kernel, prior.X, gamma, a)
        return q._replace(mean=mean, kl=q.kl + 0.5 * self._norm(a, prior.kernel, gamma, None, None))

    def _covariance(
        self,
        param: Parameters,
        prior: GaussianProcess,
        batch_shape: tuple[int, ...],
        beta: AbstractInducing | None,
    ) -> Moments:
        """The covariance of the full parametrisation, with a mean of zero."""
        kernel, dtype = prior.kernel, prior.X.dtype
        if beta is None:
            empty, kff = jnp.zeros((0, 0), dtype), kernel(prior.X)
            A = jnp.zeros((*kff.shape[:-1], 0, kff.shape[-1]), dtype)
            nothing, no_mean = jnp.zeros((*batch_shape, 0), dtype), jnp.zeros((0, kff.shape[-1]), dtype)
            return full(nothing, empty, empty, A, kff, no_mean, jnp.zeros(batch_shape, dtype))
        # In the whitened basis, where B and the identity of the prior are on one scale.
        blocks = project(beta, kernel, prior.X, prior.relative_jitter)
        if not self.natural:
            refuse_growing(beta, 'the covariance of `parametrization="full"` with `natural=False`')
            return natural_whitened(*self._precision(param, prior, batch_shape, beta), blocks.A, blocks.kff)
        value = param("sites", TiedSites.zeros(batch_shape, beta.num_inducing, dtype))
        # Only Λ₂ = B is used: the mean is not of this basis, and λ₁ has no gradient.
        sites = dataclasses.replace(value_of(value), lambda1=jnp.zeros_like(value_of(value).lambda1))
        q = natural_whitened(sites.lambda1, sites.Lambda2, blocks.A, blocks.kff)
        if isinstance(value, Perturbed):
            q = perturbed_moments(value, blocks.A, q, sites, own_mean=jnp.zeros_like(q.mean))
        return q

    def _precision(
        self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...], beta: AbstractInducing
    ) -> tuple[Array, Array]:
        """Whitened sites of the covariance of "full": no λ₁, and the precision B above the prior's."""
        M, dtype = beta.num_inducing, prior.X.dtype
        if self.natural:
            B = value_of(param("sites", TiedSites.zeros(batch_shape, M, dtype))).Lambda2
        else:
            start = jnp.broadcast_to(_START_OF_ROOT * jnp.eye(M, dtype=dtype), (*batch_shape, M, M))
            B_sqrt = jnp.tril(param("B_sqrt", start))
            B = matmul(B_sqrt, jnp.swapaxes(B_sqrt, -1, -2))
        return jnp.zeros(B.shape[:-1], dtype), B


def _block_diagonal(first: Array, second: Array) -> Array:
    batch = jnp.broadcast_shapes(first.shape[:-2], second.shape[:-2])
    M, M_own = first.shape[-1], second.shape[-1]
    whole = jnp.zeros((*batch, M + M_own, M + M_own), first.dtype)
    return whole.at[..., :M, :M].set(first).at[..., M:, M:].set(second)


def _holds(gamma: AbstractInducing, X: Array) -> bool | None:
    """Whether all rows of X are in a basis, or None where values are not known."""
    if not isinstance(gamma, InducingPoints):
        return False
    if isinstance(gamma.Z, Tracer) or isinstance(X, Tracer):
        return None
    return bool(jnp.all(find_rows(gamma.Z, X).index >= 0))
