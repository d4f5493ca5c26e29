"""Posteriors over the weights of kernels of finite rank: f(x) = φ(x)ᵀw, exact where inducing inputs approximate."""

from collections.abc import Callable
import dataclasses
import math
from typing import Any, Literal

import jax
from jax import Array
import jax.numpy as jnp
from numpyro.infer.autoguide import AutoNormal

from numpyro_sgp._internal.checks import positive
from numpyro_sgp._internal.probed import value_of
from numpyro_sgp.distributions.gaussian_process import GaussianProcess
from numpyro_sgp.features import WeightVariables, as_finite_rank
from numpyro_sgp.features.finite_rank import (
    has_correlated_weights,
    weight_precision,
    whiten_features,
    whitened_features,
)
from numpyro_sgp.guides.guide import AbstractAutoSparseGP
from numpyro_sgp.math.linalg import cholesky, gram_of_rows, solve_lower
from numpyro_sgp.posteriors.dual.tied import tied, tied_mean_and_root
from numpyro_sgp.posteriors.family import AbstractPosteriorFamily
from numpyro_sgp.posteriors.gaussian import InducingGaussian, Parameters
from numpyro_sgp.posteriors.moments import Moments, perturbed_moments
from numpyro_sgp.posteriors.natural_parameters import Perturbed, TiedSites
from numpyro_sgp.posteriors.weight_space.adversary import Adversary
from numpyro_sgp.posteriors.weight_space.formulas import tempered_mean_and_root, weight_space, weight_space_mean
from numpyro_sgp.posteriors.weight_space.stale import StaleSites, stale_moments

__all__ = ["AutoWeightSpaceGP", "WeightSpace"]

Parametrization = Literal["natural", "mean", "root", "averaged", "adversarial"]
_PARAMETRIZATIONS = ("natural", "mean", "root", "averaged", "adversarial")
_WITH_SUMS = ("natural", "mean")

# R = 0 is a stationary point of the bound whatever the data say; this is a covariance within a percent of the prior.
_START_OF_ROOT = 0.1


@dataclasses.dataclass(frozen=True)
class WeightSpace(AbstractPosteriorFamily):
    """q(w) over the weights of a kernel of finite rank, f(x) = φ(x)ᵀw, w ~ N(0, S⁻¹); starts at the prior.

    Args:
        parametrization: "natural", sums over the data above the prior's natural parameters, for `NaturalGradient`;
            "mean", the same sums for the precision alone, and the mean among the parameters that its `others` train;
            "root", N(m, (S + R Rᵀ)⁻¹), for any optimizer, which trains m, R and hyperparameters jointly; "averaged",
            N(m, σ²F̃⁻¹) with F̃ kept by `CompositionalMarginalLikelihood`; "adversarial", "root" with the maximising
            player of `MinimaxMarginalLikelihood`.
        root_scale: the unit of R; about √(N k/σ²) with k the prior variance of f, where an optimizer takes steps of a
            given length, as Adam does.
        memory_limit: bytes that a matrix of r × r may take for each latent; of such matrices a step has about ten.
        refresh: after how many natural steps q(w) is made anew of the sums, "natural" or "mean". More than 1 holds it
            in between, as a posterior of whitened weights, and those steps cost O(B r²) instead of O(r³ + B r²) where
            the prior's weights are independent (`InducingBasis` has others, whose whitening costs r³ in each step). At
            first it is made anew after 1, 2, 4, … steps. Predictions are those of the posterior that is held.

    Raises:
        ValueError: an unknown parametrisation, or one without sums where `refresh` is more than 1; a number outside its
            range.
    """

    parametrization: Parametrization = "natural"
    root_scale: float = 1.0
    memory_limit: float = 2.0**32
    refresh: int = 1
    over_weights = True

    @property
    def kept_by(self) -> str | None:
        """F̃ is an average that only one loss takes."""
        return "CompositionalMarginalLikelihood" if self.parametrization == "averaged" else None

    def __post_init__(self) -> None:
        if self.parametrization not in _PARAMETRIZATIONS:
            msg = (
                f"`parametrization` must be one of {_PARAMETRIZATIONS}, got {self.parametrization!r}. The default is "
                "'natural', for `NaturalGradient`."
            )
            raise ValueError(msg)
        if not self.root_scale > 0.0:
            msg = f"`root_scale` must be positive, got {self.root_scale!r}. The default is 1."
            raise ValueError(msg)
        object.__setattr__(self, "refresh", positive("refresh", self.refresh, "The default is 1."))
        if self.refresh > 1 and self.parametrization not in _WITH_SUMS:
            msg = (
                f"`refresh` is for {_WITH_SUMS}, whose natural steps collect sums that q(w) is made of, got "
                f"{self.refresh!r} with {self.parametrization!r}. Leave it out."
            )
            raise ValueError(msg)

    def moments(self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...]) -> Moments:
        kernel, X = as_finite_rank(prior.kernel), prior.X
        self._check_size(jax.eval_shape(kernel.features, X).shape[-1], batch_shape, X.dtype)
        if self.parametrization not in _WITH_SUMS:
            return self._with_mean(param, kernel, X, batch_shape)
        if self.refresh > 1:
            return self._held(param, kernel, X, batch_shape)
        Phi = kernel.features(X)
        if self.parametrization == "mean":
            return self._mean_and_sums(param, kernel, Phi, batch_shape)
        value = param("sites", TiedSites.zeros(batch_shape, Phi.shape[-1], X.dtype))
        sites = value_of(value)
        self._check_kind(value)
        if has_correlated_weights(kernel):
            # Sites as sums of S⁻¹φ_i, functions of u = S w, stay closer to what they were while hyperparameters move.
            Kuf = jnp.swapaxes(Phi, -1, -2)
            q = tied("projection", sites.lambda1, sites.Lambda2, kernel.prior_precision(), Kuf, prior.kernel(X))
            if not isinstance(value, Perturbed):
                return q.moments
            return perturbed_moments(value, jax.lax.stop_gradient(q).projections(), q.moments)
        q = weight_space(sites.lambda1, sites.Lambda2, Phi, weight_precision(kernel, Phi))
        return perturbed_moments(value, jnp.swapaxes(Phi, -1, -2), q) if isinstance(value, Perturbed) else q

    def gaussian(self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...]) -> InducingGaussian:
        kernel, X = as_finite_rank(prior.kernel), prior.X
        r = jax.eval_shape(kernel.features, X).shape[-1]
        weights = WeightVariables(r, X.shape[-1])
        L = cholesky(weights.Kuu(kernel).astype(X.dtype))
        return InducingGaussian(weights, L, *self._mean_and_root(param, kernel, r, L, batch_shape))

    def _mean_and_root(
        self, param: Parameters, kernel: Any, r: int, L: Array, batch_shape: tuple[int, ...]
    ) -> tuple[Array, Array]:
        """Mean and triangular root of q(v), v = Lᵀw the weights whitened by S = L Lᵀ."""
        if self.parametrization not in _WITH_SUMS:
            m, Lambda2 = self._mean_and_precision(param, r, L.dtype, batch_shape)
            return m, tempered_mean_and_root(jnp.zeros_like(m), Lambda2)[1]
        m = None
        if self.parametrization == "mean":
            m = param("m", jnp.zeros((*batch_shape, r), L.dtype))
        sites = value_of(param("sites", None))
        self._check_kind(sites)
        if isinstance(sites, StaleSites):
            return sites.m if m is None else m, jnp.swapaxes(sites.root, -1, -2)
        correlated = has_correlated_weights(kernel)
        lambda1, Lambda2 = sites.lambda1, sites.Lambda2
        if correlated and m is None:
            _, mean, root = tied_mean_and_root("projection", lambda1, Lambda2, kernel.prior_precision())
            return mean, root
        if not correlated:
            Lambda2 = solve_lower(L, jnp.swapaxes(solve_lower(L, Lambda2), -1, -2))
        if m is not None:
            return m, tempered_mean_and_root(jnp.zeros_like(m), Lambda2)[1]
        return tempered_mean_and_root(solve_lower(L, lambda1[..., None])[..., 0], Lambda2)

    def _held(self, param: Parameters, kernel: Any, X: Array, batch_shape: tuple[int, ...]) -> Moments:
        Phi = whitened_features(kernel, X)
        A, r, natural = jnp.swapaxes(Phi, -1, -2), Phi.shape[-1], self.parametrization == "natural"
        m = None if natural else param("m", jnp.zeros((*batch_shape, r), X.dtype))
        value = param("sites", lambda _: StaleSites.zeros(batch_shape, r, X.dtype, self.refresh, with_mean=natural))
        sites = value_of(value)
        self._check_kind(value)
        q = stale_moments(sites, m, A)
        return perturbed_moments(value, A, q) if isinstance(value, Perturbed) else q

    def _with_mean(self, param: Parameters, kernel: Any, X: Array, batch_shape: tuple[int, ...]) -> Moments:
        # In the whitened basis, where R and the identity of the prior are on one scale.
        Phi = whitened_features(kernel, X)
        m, Lambda2 = self._mean_and_precision(param, Phi.shape[-1], X.dtype, batch_shape)
        return weight_space_mean(m, Lambda2, Phi, jnp.ones(Phi.shape[-1], Phi.dtype))

    def _mean_and_precision(
        self, param: Parameters, r: int, dtype: Any, batch_shape: tuple[int, ...]
    ) -> tuple[Array, Array]:
        """Mean of the whitened weights, and their precision above the prior's."""
        identity = jnp.eye(r, dtype=dtype)
        m = param("m", jnp.zeros((*batch_shape, r), dtype))
        if self.parametrization == "averaged":
            start = {
                "F": jnp.broadcast_to(identity, (*batch_shape, r, r)),
                "noise": jnp.ones(batch_shape, dtype),
                "step": jnp.zeros((), jnp.int32),
            }
            average = param.state("average", start)
            Lambda2 = average["F"] / average["noise"][..., None, None] - identity
        else:
            start = jnp.broadcast_to((_START_OF_ROOT / self.root_scale) * identity, (*batch_shape, r, r))
            R = self.root_scale * jnp.tril(param("R", start))
            Lambda2 = gram_of_rows(R)
        if self.parametrization == "adversarial":
            # With this B, and the default penalty, the objective is the bound that "root" has.
            param("B", Adversary(jnp.broadcast_to(-identity / (1.2 * r**0.5), (*batch_shape, r, r))))
        return m, Lambda2

    def _mean_and_sums(self, param: Parameters, kernel: Any, Phi: Array, batch_shape: tuple[int, ...]) -> Moments:
        r, dtype = Phi.shape[-1], Phi.dtype
        m = param("m", jnp.zeros((*batch_shape, r), dtype))
        none = jnp.zeros((*batch_shape, 0), dtype)
        value = param("sites", TiedSites(none, jnp.zeros((*batch_shape, r, r), dtype)))
        self._check_kind(value)
        # The mean is that of whitened weights. The sums are over the features themselves, which the variance of a
        # kernel does not move.
        correlated = has_correlated_weights(kernel)
        basis = whiten_features(kernel, Phi) if correlated else Phi
        s = jnp.ones(r, dtype) if correlated else weight_precision(kernel, Phi)
        q = weight_space_mean(m / jnp.sqrt(s), value_of(value).Lambda2, basis, s)
        return perturbed_moments(value, jnp.swapaxes(basis, -1, -2), q) if isinstance(value, Perturbed) else q

    def _check_kind(self, value: Any) -> None:
        """Raise where sites come from a guide that holds its posterior otherwise.

        Sums of whitened features, in `StaleSites`, are in another basis; and an optimizer goes by the number that is in
        the sites.
        """
        sites = value_of(value)
        refresh = sites.refresh if isinstance(sites, StaleSites) else 1
        same = refresh == self.refresh if isinstance(value, Perturbed) else (refresh > 1) == (self.refresh > 1)
        if not same:
            msg = (
                f"The parameters are those of a guide with `refresh={refresh}`, and this guide has "
                f"`refresh={self.refresh}`. Give it the same."
            )
            raise ValueError(msg)

    def _check_size(self, r: int, batch_shape: tuple[int, ...], dtype: Any) -> None:
        size = r * r * jnp.finfo(dtype).bits // 8
        if size > self.memory_limit:
            total = size * math.prod(batch_shape)
            msg = (
                f"The kernel has rank r = {r}, and a posterior over its weights takes matrices of r × r: "
                f"{size:,} bytes each, {total:,} for all latents, about ten of them in a step. Use fewer features, or "
                f"a guide with inducing inputs; `memory_limit={float(size):.3g}` if the device has that much."
            )
            raise ValueError(msg)


class AutoWeightSpaceGP(AbstractAutoSparseGP):
    """Posterior over the weights for every GP site of a model, all of whose kernels are of finite rank.

    The posterior is the exact one where the likelihood is Gaussian, and nothing is approximated by inducing inputs. On
    minibatches both steps of training are unbiased, whatever the size of the batch: `NaturalGradient` averages the sums
    Φᵀg and Φᵀdiag(β)Φ over steps, and the bound is linear in the data given q(w). Networks in the features (deep
    kernels) are so trained on small batches. A step costs O(r³ + B r²), or with `refresh` O(B r²) and O(r³) once in so
    many steps, for weights that are independent in the prior: where a batch has fewer rows than a kernel has features,
    the r³ are most of the time, and the average is over many batches anyway.

    Args:
        model: a NumPyro model whose GP sites have kernels of `numpyro_sgp.features`, or `Linear`, `Polynomial` and
            `Constant`, sums and products of them, and `Warp` and `Select` of them.
        parametrization: "natural" or "mean" for `NaturalGradient`, "root" for any optimizer, "averaged" and
            "adversarial" for the losses `CompositionalMarginalLikelihood` and `MinimaxMarginalLikelihood`: see
            `WeightSpace`.
        base: guide for the other latents: an autoguide class, or a guide.
        root_scale: the unit of the root R: see `WeightSpace`.
        memory_limit: bytes that a matrix of r × r may take for each latent.
        prefix: of the names of parameters, `{site}_{prefix}_{symbol}`.
        refresh: after how many natural steps q(w) is made anew of the sums: see `WeightSpace`.

    Raises:
        TypeError: a kernel without features (when the guide is first run).
        ValueError: an unknown parametrisation, or one without sums where `refresh` is more than 1; a rank whose
            matrices do not fit (when the guide is first run).

    References:
        Shoham and Avron (2025), "Unbiased stochastic optimization for Gaussian processes on finite dimensional RKHS":
        the natural steps are the recursion of their section 3.2 for F̃, and those on hyperparameters descend a bound
        that is tight where F̃ = F.
    """

    def __init__(
        self,
        model: Callable,
        *,
        parametrization: Parametrization = "natural",
        base: Any = AutoNormal,
        root_scale: float = 1.0,
        memory_limit: float = 2.0**32,
        prefix: str = "auto",
        refresh: int = 1,
    ) -> None:
        self._family = WeightSpace(parametrization, root_scale, memory_limit, refresh)
        super().__init__(model, base=base, prefix=prefix)

    def family(self, site: str) -> AbstractPosteriorFamily:
        del site
        return self._family
