"""Decoupled posteriors: one family for each parametrisation, with a mean basis γ, a covariance basis β and u = f(β)."""

import dataclasses
from typing import Any, Literal, cast, final, get_args

import jax
from jax import Array
import jax.numpy as jnp

from numpyro_sgp._internal.checks import positive
from numpyro_sgp._internal.probed import value_of
from numpyro_sgp.distributions.gaussian_process import GaussianProcess
from numpyro_sgp.distributions.sparse_regression import RegressionPosterior
from numpyro_sgp.inducing import AbstractInducing
from numpyro_sgp.math.products import matmul
from numpyro_sgp.posteriors.decoupled.blocks import (
    Free,
    coefficients,
    dual_step,
    mean_part,
    refuse_dual_step,
    squared_norm,
)
from numpyro_sgp.posteriors.decoupled.coefficients import ProbedCoefficients
from numpyro_sgp.posteriors.decoupled.formulas import (
    Span,
    hybrid,
    mean_at,
    mean_projected,
    orthogonal,
    project_orthogonal,
    solve,
)
from numpyro_sgp.posteriors.dual.formulas import natural_mean_and_root, natural_whitened
from numpyro_sgp.posteriors.family import (
    AbstractPosteriorFamily,
    Inducing,
    at_prior,
    inducing_param,
    refuse_growing,
    root_of_prior,
)
from numpyro_sgp.posteriors.gaussian import InducingGaussian, root_of_points
from numpyro_sgp.posteriors.moments import Moments, perturbed_moments, project
from numpyro_sgp.posteriors.parameters import Parameters
from numpyro_sgp.posteriors.sites import TiedSites
from numpyro_sgp.posteriors.whitened.guide import NaturalWhitened, Whitened

__all__ = ["Decoupled", "FullDecoupled", "HybridDecoupled", "OrthogonalDecoupled", "Parametrization", "SolveDecoupled"]

Parametrization = Literal["orthogonal", "hybrid", "full", "solve"]


def Decoupled(
    mean_inducing: Inducing | None,
    cov_inducing: Inducing | None,
    parametrization: Parametrization = "orthogonal",
    natural: bool = False,
    learn_inducing: bool = False,
    kl_rows: int | None = None,
    init_from: RegressionPosterior | None = None,
) -> AbstractPosteriorFamily:
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

    Returns:
        A posterior family.

    Raises:
        ValueError: an unknown parametrisation, a basis missing that it needs, or an option that it cannot have.

    References:
        Cheng and Boots (2017), "Variational inference for Gaussian process models with linear complexity": "full",
        "hybrid"; Salimbeni, Cheng, Boots and Deisenroth (2018), "Orthogonally decoupled variational Gaussian
        processes"; Shi, Titsias and Mnih (2020), "Sparse orthogonal variational inference for Gaussian processes".
    """
    kind = parametrization
    if kind not in get_args(Parametrization):
        msg = f"`parametrization` must be one of {get_args(Parametrization)}, got {kind!r}."
        raise ValueError(msg)
    if kind == "full" and mean_inducing is None:
        msg = (
            '`mean_inducing=None` was given with `parametrization="full"`. Give the mean a basis, or use "orthogonal".'
        )
        raise ValueError(msg)
    if cov_inducing is None and (kind != "full" or natural):
        what = "`natural=True`" if kind == "full" else f"`parametrization={kind!r}`"
        msg = (
            f"`cov_inducing=None` was given with {what}, which needs a covariance basis. Give it one, or use "
            '`parametrization="full"` with `natural=False` for the covariance of the prior.'
        )
        raise ValueError(msg)
    if kl_rows is not None:
        positive("kl_rows", kl_rows, "The size of a minibatch is a good one; None is for all rows.")
    if kl_rows is not None and kind == "solve":
        msg = '`kl_rows` was given with `parametrization="solve"`, which factorises the matrix. Leave it out.'
        raise ValueError(msg)
    if init_from is not None and kind == "full":
        msg = (
            '`init_from` was given with `parametrization="full"`: its mean and covariance have no basis in common to '
            'start in. Use "orthogonal".'
        )
        raise ValueError(msg)
    if mean_inducing is None:
        return (NaturalWhitened if natural else Whitened)(cast(Inducing, cov_inducing), learn_inducing, init_from)
    bases = mean_inducing, cov_inducing, natural, learn_inducing
    if kind == "orthogonal":
        return OrthogonalDecoupled(*bases, kl_rows, init_from)
    if kind == "hybrid":
        return HybridDecoupled(*bases, kl_rows, init_from)
    return FullDecoupled(*bases, kl_rows) if kind == "full" else SolveDecoupled(*bases, init_from)


@dataclasses.dataclass(frozen=True)
class AbstractDecoupled(AbstractPosteriorFamily):
    """What the families have in common; the arguments are those of `Decoupled`."""

    mean_inducing: Inducing
    cov_inducing: Inducing | None
    natural: bool
    learn_inducing: bool

    # Not one Gaussian from which data can be taken: with two bases, or two blocks, a datum moves both means at once.
    has_cavities = False

    @property
    def couples_rows(self) -> bool:
        return not self.natural

    def mean_basis(self, param: Parameters, prior: GaussianProcess) -> AbstractInducing:
        """The inducing variables γ."""
        return inducing_param(
            param, self.mean_inducing, prior, self.learn_inducing, symbol="mean_inducing", argument="mean_inducing"
        )

    def covariance_basis(self, param: Parameters, prior: GaussianProcess) -> AbstractInducing:
        """The inducing variables β."""
        assert self.cov_inducing is not None
        return inducing_param(param, self.cov_inducing, prior, self.learn_inducing, argument="cov_inducing")


@final
@dataclasses.dataclass(frozen=True)
class OrthogonalDecoupled(AbstractDecoupled):
    """m(x) = A(x)ᵀm + the part of k_xγ a that is orthogonal to β, with any q(u)."""

    kl_rows: int | None
    init_from: RegressionPosterior | None

    def moments(self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...]) -> Moments:
        gamma, beta = self.mean_basis(param, prior), self.covariance_basis(param, prior)
        refuse_growing(beta, 'the covariance of `parametrization="orthogonal"`')
        blocks = project(beta, prior.kernel, prior.X, prior.relative_jitter)
        block = Free(self.natural, self.init_from).block(param, prior, batch_shape, beta, blocks)
        value, unit = coefficients(param, prior, batch_shape, gamma, (beta, blocks.L))
        if isinstance(value, ProbedCoefficients):
            return block.perturb(dual_step(value, unit, prior, block.q, gamma, (beta, blocks.L)))
        a = value.values * unit
        # The second as the divergence takes it, whose gradient with respect to a comes from the sampled rows.
        both = jnp.stack([a, jax.lax.stop_gradient(a)])
        t, fixed_t = mean_projected(prior.kernel, blocks.L, beta, gamma, both)
        squared = squared_norm(a, prior.kernel, gamma, self.kl_rows, t, Span(beta, blocks.L, fixed_t))
        return block.perturb(orthogonal(block.q, mean_at(prior.kernel, prior.X, gamma, a), t, squared))

    def gaussian(self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...]) -> InducingGaussian:
        gamma, beta = self.mean_basis(param, prior), self.covariance_basis(param, prior)
        m, S_sqrt = Free(self.natural, self.init_from).mean_and_root(param, prior, batch_shape, beta)
        L = root_of_prior(beta, prior)
        return InducingGaussian(beta, L, m, S_sqrt, mean_part(param, prior.kernel, gamma, beta, L))


@final
@dataclasses.dataclass(frozen=True)
class HybridDecoupled(AbstractDecoupled):
    """m(x) = A(x)ᵀm + k_xγ a, with any q(u)."""

    kl_rows: int | None
    init_from: RegressionPosterior | None

    def moments(self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...]) -> Moments:
        gamma, beta = self.mean_basis(param, prior), self.covariance_basis(param, prior)
        blocks = project(beta, prior.kernel, prior.X, prior.relative_jitter)
        block = Free(self.natural, self.init_from).block(param, prior, batch_shape, beta, blocks)
        value, unit = coefficients(param, prior, batch_shape, gamma, None)
        if isinstance(value, ProbedCoefficients):
            refuse_dual_step('`parametrization="hybrid"`')
        a = value_of(value).values * unit
        t = mean_projected(prior.kernel, blocks.L, beta, gamma, a[None])[0]
        squared = squared_norm(a, prior.kernel, gamma, self.kl_rows, None, None)
        return block.perturb(hybrid(block.q, block.mean(), mean_at(prior.kernel, prior.X, gamma, a), t, squared))

    def gaussian(self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...]) -> InducingGaussian:
        gamma, beta = self.mean_basis(param, prior), self.covariance_basis(param, prior)
        m, S_sqrt = Free(self.natural, self.init_from).mean_and_root(param, prior, batch_shape, beta)
        L = root_of_prior(beta, prior)
        part = mean_part(param, prior.kernel, gamma, beta, L)
        return InducingGaussian(beta, L, m + part.projected, S_sqrt, part)


# B = 0 is a stationary point of the bound whatever the data say; this is a covariance within a percent of the prior.
_START_OF_ROOT = 0.1


@final
@dataclasses.dataclass(frozen=True)
class FullDecoupled(AbstractDecoupled):
    """m(x) = k_xγ a and the covariance k − k_xu L⁻ᵀ(B⁻¹ + I)⁻¹L⁻¹k_ux, or the prior's without a basis β.

    B is in the whitened basis, where it and the identity of the prior are on one scale.
    """

    kl_rows: int | None

    def moments(self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...]) -> Moments:
        gamma = self.mean_basis(param, prior)
        q = at_prior(prior.kernel, prior.X)
        if self.cov_inducing is not None:
            q = self._covariance(param, prior, batch_shape)
        value, unit = coefficients(param, prior, batch_shape, gamma, None)
        if isinstance(value, ProbedCoefficients):
            return dual_step(value, unit, prior, q, gamma, None)
        a = value.values * unit
        squared = squared_norm(a, prior.kernel, gamma, self.kl_rows, None, None)
        return q._replace(mean=mean_at(prior.kernel, prior.X, gamma, a), kl=q.kl + 0.5 * squared)

    def gaussian(
        self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...]
    ) -> InducingGaussian | None:
        if self.cov_inducing is None:
            return None
        gamma, beta = self.mean_basis(param, prior), self.covariance_basis(param, prior)
        L = root_of_prior(beta, prior)
        B = self._sites(param, prior, batch_shape, beta)[1]
        part = mean_part(param, prior.kernel, gamma, beta, L)
        _, S_sqrt = natural_mean_and_root(jnp.zeros(B.shape[:-1], B.dtype), B)
        return InducingGaussian(beta, L, part.projected, S_sqrt, part)

    def _covariance(self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...]) -> Moments:
        """Moments with a mean of zero."""
        beta = self.covariance_basis(param, prior)
        if not self.natural:
            refuse_growing(beta, 'the covariance of `parametrization="full"` with `natural=False`')
        blocks = project(beta, prior.kernel, prior.X, prior.relative_jitter)
        value, B = self._sites(param, prior, batch_shape, beta)
        # The mean is not of this basis: λ₁ has no gradient.
        sites = TiedSites(jnp.zeros(B.shape[:-1], B.dtype), B)
        q = natural_whitened(sites.lambda1, B, blocks.A, blocks.kff)
        return perturbed_moments(value, blocks.A, q, sites, own_mean=jnp.zeros_like(q.mean))

    def _sites(
        self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...], beta: AbstractInducing
    ) -> tuple[Any, Array]:
        """The parameter with the sites, if there is one, and B."""
        M, dtype = beta.num_inducing, prior.X.dtype
        if self.natural:
            value = param("sites", TiedSites.zeros(batch_shape, M, dtype))
            return value, value_of(value).Lambda2
        start = jnp.broadcast_to(_START_OF_ROOT * jnp.eye(M, dtype=dtype), (*batch_shape, M, M))
        B_sqrt = jnp.tril(param("B_sqrt", start))
        return None, matmul(B_sqrt, B_sqrt.mT)


@final
@dataclasses.dataclass(frozen=True)
class SolveDecoupled(AbstractDecoupled):
    """Independent Gaussians over u and over what u leaves of f(γ)."""

    init_from: RegressionPosterior | None

    def moments(self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...]) -> Moments:
        gamma, beta = self.mean_basis(param, prior), self.covariance_basis(param, prior)
        refuse_growing(beta, 'the covariance of `parametrization="solve"`')
        blocks = project(beta, prior.kernel, prior.X, prior.relative_jitter)
        first = Free(self.natural, self.init_from).block(param, prior, batch_shape, beta, blocks)
        own = project_orthogonal(beta, gamma, blocks, prior.kernel, prior.X, prior.relative_jitter)
        second = Free(self.natural, None, "mean_").block(param, prior, batch_shape, gamma, own)
        return second.perturb(first.perturb(solve(first.q, second.q, blocks.kff)))

    def gaussian(
        self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...]
    ) -> InducingGaussian | None:
        gamma, beta = self.mean_basis(param, prior), self.covariance_basis(param, prior)
        both = root_of_points(beta, gamma, prior.kernel, prior.relative_jitter)
        if both is None:
            return None
        m, S_sqrt = Free(self.natural, self.init_from).mean_and_root(param, prior, batch_shape, beta)
        own = Free(self.natural, None, "mean_").mean_and_root(param, prior, batch_shape, gamma)
        whole = _block_diagonal(S_sqrt, own[1])
        return InducingGaussian(*both, jnp.concatenate([m, own[0]], axis=-1), whole)


def _block_diagonal(first: Array, second: Array) -> Array:
    batch = jnp.broadcast_shapes(first.shape[:-2], second.shape[:-2])
    M, M_own = first.shape[-1], second.shape[-1]
    whole = jnp.zeros((*batch, M + M_own, M + M_own), first.dtype)
    return whole.at[..., :M, :M].set(first).at[..., M:, M:].set(second)
