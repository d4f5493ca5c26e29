"""Posteriors over the weights of a kernel of finite rank: one family for each parametrisation of q(w).

f(x) = φ(x)ᵀw with w ~ N(0, S⁻¹), S = L Lᵀ. All families start at or near the prior.
"""

from abc import abstractmethod
import dataclasses
from functools import partial
import math
from typing import Any, final

import jax
from jax import Array
import jax.numpy as jnp

from numpyro_sgp._internal.probed import value_of
from numpyro_sgp.distributions.gaussian_process import GaussianProcess
from numpyro_sgp.distributions.sparse_posterior import SparsePosterior
from numpyro_sgp.features import WeightVariables, as_finite_rank
from numpyro_sgp.features.finite_rank import (
    features_of,
    has_correlated_weights,
    weight_precision,
    whiten_features,
    whitened_features,
)
from numpyro_sgp.math.linalg import cholesky, solve_lower, solve_lower_transposed
from numpyro_sgp.math.products import gram_of_rows
from numpyro_sgp.posteriors.dual.tied import tied, tied_mean_and_root
from numpyro_sgp.posteriors.family import AbstractPosteriorFamily
from numpyro_sgp.posteriors.gaussian import InducingGaussian
from numpyro_sgp.posteriors.moments import Moments, perturbed_moments
from numpyro_sgp.posteriors.parameters import FittedParameters, Parameters
from numpyro_sgp.posteriors.perturbation import Perturbed
from numpyro_sgp.posteriors.sites import TiedSites
from numpyro_sgp.posteriors.weight_space.adversary import Adversary
from numpyro_sgp.posteriors.weight_space.formulas import tempered_mean_and_root, weight_space, weight_space_mean
from numpyro_sgp.posteriors.weight_space.stale import StaleSites, check_refresh, stale_moments

__all__ = ["AdversarialWeights", "AveragedWeights", "MeanWeights", "NaturalWeights", "RootWeights", "StaleWeights"]


def _kernel(prior: GaussianProcess, memory_limit: float, batch_shape: tuple[int, ...]) -> Any:
    """The kernel, which shows its features."""
    kernel, X = as_finite_rank(prior.kernel), prior.X
    r = jax.eval_shape(partial(features_of, kernel), X).shape[-1]
    size = r * r * jnp.finfo(X.dtype).bits // 8
    if size > memory_limit:
        msg = (
            f"The kernel has rank r = {r}: matrices of r × r take {size:,} bytes each, "
            f"{size * math.prod(batch_shape):,} for all latents, and a step has about ten. Use fewer features or "
            f"inducing inputs, or pass `memory_limit={float(size):.3g}` if the device has the memory."
        )
        raise ValueError(msg)
    return kernel


def _weights(prior: GaussianProcess) -> tuple[Any, WeightVariables, Array]:
    """The kernel, its weights u = S w as inducing variables, and L."""
    kernel, X = as_finite_rank(prior.kernel), prior.X
    weights = WeightVariables(jax.eval_shape(partial(features_of, kernel), X).shape[-1], X.shape[-1])
    return kernel, weights, cholesky(weights.Kuu(kernel).astype(X.dtype))


def _whitened_sites(kernel: Any, L: Array, Lambda2: Array) -> Array:
    """L⁻¹Λ₂L⁻ᵀ for independent weights; the sites of correlated ones are whitened already."""
    if has_correlated_weights(kernel):
        return Lambda2
    return solve_lower(L, solve_lower(L, Lambda2).mT)


def _tempered_root(Lambda2: Array) -> Array:
    return tempered_mean_and_root(jnp.zeros(Lambda2.shape[:-1], Lambda2.dtype), Lambda2)[1]


# Sums over the data, for `NaturalGradient`.


@final
@dataclasses.dataclass(frozen=True)
class NaturalWeights(AbstractPosteriorFamily):
    """q(w) ∝ N(w | 0, S⁻¹) exp(λ₁ᵀw − ½wᵀΛ₂w) with the sites λ₁ = Σ_i g_i φ_i and Λ₂ = Σ_i β_i φ_iφ_iᵀ."""

    memory_limit: float
    over_weights = True
    parametrization = "natural"

    @property
    def couples_rows(self) -> bool:
        return False

    def moments(self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...]) -> Moments:
        kernel = _kernel(prior, self.memory_limit, batch_shape)
        Phi = features_of(kernel, prior.X)
        value = param("sites", TiedSites.zeros(batch_shape, Phi.shape[-1], prior.X.dtype))
        check_refresh(value, 1)
        sites = value_of(value)
        if not has_correlated_weights(kernel):
            q = weight_space(sites.lambda1, sites.Lambda2, Phi, weight_precision(kernel, Phi))
            return perturbed_moments(value, Phi.mT, q)
        # Sites as sums of S⁻¹φ_i, functions of u = S w, stay closer to what they were while hyperparameters move.
        q = tied(sites.lambda1, sites.Lambda2, kernel.prior_precision(), Phi.mT, kernel(prior.X))
        if not isinstance(value, Perturbed):
            return q.moments
        return perturbed_moments(value, jax.lax.stop_gradient(q).projections(), q.moments)

    def gaussian(self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...]) -> InducingGaussian:
        del batch_shape
        kernel, weights, L = _weights(prior)
        sites = value_of(param("sites", None))
        check_refresh(sites, 1)
        if has_correlated_weights(kernel):
            _, m, root = tied_mean_and_root(sites.lambda1, sites.Lambda2, kernel.prior_precision())
            return InducingGaussian(weights, L, m, root)
        lambda1 = solve_lower(L, sites.lambda1[..., None])[..., 0]
        Lambda2 = _whitened_sites(kernel, L, sites.Lambda2)
        return InducingGaussian(weights, L, *tempered_mean_and_root(lambda1, Lambda2))

    def updated(self, fitted: FittedParameters, q: SparsePosterior, linear: Array, precision: Array) -> dict[str, Any]:
        sites: Any = fitted("sites")
        check_refresh(sites, 1)
        kernel, _, L = _weights(q.prior)
        a = features_of(kernel, q.prior.X).mT
        if has_correlated_weights(kernel):
            # Sums of S⁻¹φ_i.
            a = solve_lower_transposed(L, solve_lower(L, a))
        return {"sites": sites.with_rows(a, linear, precision)}


@final
@dataclasses.dataclass(frozen=True)
class MeanWeights(AbstractPosteriorFamily):
    """q(v) = N(m, (I + Λ̃)⁻¹) with v = Lᵀw: Λ₂ is a sum over the data, and any optimizer trains the mean m."""

    memory_limit: float
    over_weights = True
    parametrization = "mean"

    @property
    def couples_rows(self) -> bool:
        return False

    def moments(self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...]) -> Moments:
        kernel = _kernel(prior, self.memory_limit, batch_shape)
        Phi = features_of(kernel, prior.X)
        r, dtype = Phi.shape[-1], Phi.dtype
        m = param("m", jnp.zeros((*batch_shape, r), dtype))
        start = TiedSites(jnp.zeros((*batch_shape, 0), dtype), jnp.zeros((*batch_shape, r, r), dtype))
        value = param("sites", start)
        check_refresh(value, 1)
        # The sums are over the features themselves, which the variance of a kernel does not move.
        s = jnp.ones(r, dtype)
        if has_correlated_weights(kernel):
            Phi = whiten_features(kernel, Phi)
        else:
            s = weight_precision(kernel, Phi)
        q = weight_space_mean(m / jnp.sqrt(s), value_of(value).Lambda2, Phi, s)
        return perturbed_moments(value, Phi.mT, q)

    def gaussian(self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...]) -> InducingGaussian:
        del batch_shape
        kernel, weights, L = _weights(prior)
        m, sites = param("m", None), value_of(param("sites", None))
        check_refresh(sites, 1)
        return InducingGaussian(weights, L, m, _tempered_root(_whitened_sites(kernel, L, sites.Lambda2)))


@final
@dataclasses.dataclass(frozen=True)
class StaleWeights(AbstractPosteriorFamily):
    """q(v) that is made of the sums once in several natural steps; see `StaleSites`.

    Args:
        memory_limit: bytes that a matrix of r × r may take for each latent.
        refresh: the most steps that q(v) is held.
        own_mean: whether the mean is a parameter that any optimizer trains.
    """

    memory_limit: float
    refresh: int
    own_mean: bool
    over_weights = True

    @property
    def couples_rows(self) -> bool:
        return False

    def moments(self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...]) -> Moments:
        A = (whitened_features(_kernel(prior, self.memory_limit, batch_shape), prior.X)).mT
        r, dtype, with_mean = A.shape[-2], prior.X.dtype, not self.own_mean
        m = param("m", jnp.zeros((*batch_shape, r), dtype)) if self.own_mean else None
        value = param("sites", lambda _: StaleSites.zeros(batch_shape, r, dtype, self.refresh, with_mean=with_mean))
        check_refresh(value, self.refresh)
        return perturbed_moments(value, A, stale_moments(value_of(value), m, A))

    def gaussian(self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...]) -> InducingGaussian:
        del batch_shape
        _, weights, L = _weights(prior)
        sites = value_of(param("sites", None))
        check_refresh(sites, self.refresh)
        m = param("m", None) if self.own_mean else sites.m
        return InducingGaussian(weights, L, m, sites.root.mT)


# A mean and a precision in the whitened basis, where R and the identity of the prior are on one scale.


class AbstractRootWeights(AbstractPosteriorFamily):
    """q(v) = N(m, (I + Λ̃)⁻¹), v = Lᵀw; subclasses say what Λ̃ is."""

    memory_limit: float
    over_weights = True

    @abstractmethod
    def precision(self, param: Parameters, r: int, dtype: Any, batch_shape: tuple[int, ...]) -> Array:
        """Λ̃, (..., r, r)."""

    def moments(self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...]) -> Moments:
        Phi = whitened_features(_kernel(prior, self.memory_limit, batch_shape), prior.X)
        r, dtype = Phi.shape[-1], prior.X.dtype
        m = param("m", jnp.zeros((*batch_shape, r), dtype))
        return weight_space_mean(m, self.precision(param, r, dtype, batch_shape), Phi, jnp.ones(r, Phi.dtype))

    def gaussian(self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...]) -> InducingGaussian:
        _, weights, L = _weights(prior)
        Lambda2 = self.precision(param, L.shape[-1], L.dtype, batch_shape)
        return InducingGaussian(weights, L, param("m", None), _tempered_root(Lambda2))


@final
@dataclasses.dataclass(frozen=True)
class RootWeights(AbstractRootWeights):
    """Λ̃ = R Rᵀ, for any optimizer; `root_scale` is the unit of R."""

    memory_limit: float
    root_scale: float
    parametrization = "root"

    def precision(self, param: Parameters, r: int, dtype: Any, batch_shape: tuple[int, ...]) -> Array:
        return _squared_root(param, self.root_scale, r, dtype, batch_shape)


@final
@dataclasses.dataclass(frozen=True)
class AdversarialWeights(AbstractRootWeights):
    """Λ̃ = R Rᵀ, and the maximising player B of `MinimaxMarginalLikelihood`; `root_scale` is the unit of R."""

    memory_limit: float
    root_scale: float
    parametrization = "adversarial"

    @property
    def couples_rows(self) -> bool:
        return False

    def precision(self, param: Parameters, r: int, dtype: Any, batch_shape: tuple[int, ...]) -> Array:
        # With this B, and the default penalty, the objective is the bound that `RootWeights` has.
        start = -jnp.eye(r, dtype=dtype) / (1.2 * r**0.5)
        param("B", Adversary(jnp.broadcast_to(start, (*batch_shape, r, r))))
        return _squared_root(param, self.root_scale, r, dtype, batch_shape)


@final
@dataclasses.dataclass(frozen=True)
class AveragedWeights(AbstractRootWeights):
    """I + Λ̃ = F̃/σ², both kept by `CompositionalMarginalLikelihood`."""

    memory_limit: float
    parametrization = "averaged"
    kept_by = "CompositionalMarginalLikelihood"

    @property
    def couples_rows(self) -> bool:
        return False

    def precision(self, param: Parameters, r: int, dtype: Any, batch_shape: tuple[int, ...]) -> Array:
        identity = jnp.eye(r, dtype=dtype)
        start = {
            "F": jnp.broadcast_to(identity, (*batch_shape, r, r)),
            "noise": jnp.ones(batch_shape, dtype),
            "step": jnp.zeros((), jnp.int32),
        }
        average = param.state("average", start)
        return average["F"] / average["noise"][..., None, None] - identity


# R = 0 is a stationary point of the bound whatever the data say; this is a covariance within a percent of the prior.
_START_OF_ROOT = 0.1


def _squared_root(param: Parameters, scale: float, r: int, dtype: Any, batch_shape: tuple[int, ...]) -> Array:
    start = jnp.broadcast_to((_START_OF_ROOT / scale) * jnp.eye(r, dtype=dtype), (*batch_shape, r, r))
    return gram_of_rows(scale * jnp.tril(param("R", start)))
