"""The guide with posteriors over weights: f(x) = φ(x)ᵀw, exact where inducing inputs approximate."""

from collections.abc import Callable
from typing import Any, Literal, get_args

from numpyro.infer.autoguide import AutoNormal

from numpyro_sgp._internal.checks import positive
from numpyro_sgp.guides.guide import AbstractAutoSparseGP
from numpyro_sgp.posteriors.family import AbstractPosteriorFamily
from numpyro_sgp.posteriors.weight_space.families import (
    AdversarialWeights,
    AveragedWeights,
    MeanWeights,
    NaturalWeights,
    RootWeights,
    StaleWeights,
)

__all__ = ["AutoWeightSpaceGP", "WeightSpace"]

Parametrization = Literal["natural", "mean", "root", "averaged", "adversarial"]


def WeightSpace(
    parametrization: Parametrization = "natural",
    root_scale: float = 1.0,
    memory_limit: float = 2.0**32,
    refresh: int = 1,
) -> AbstractPosteriorFamily:
    """q(w) over the weights of a kernel of finite rank, f(x) = φ(x)ᵀw, w ~ N(0, S⁻¹); starts at the prior.

    Args:
        parametrization: "natural", sums over the data above the prior's natural parameters, for `NaturalGradient`;
            "mean", such a sum for the precision, and a mean that its `others` train; "root", N(m, (S + R Rᵀ)⁻¹), for
            any optimizer; "averaged", N(m, σ²F̃⁻¹) with F̃ kept by `CompositionalMarginalLikelihood`; "adversarial",
            "root" with the maximising player of `MinimaxMarginalLikelihood`.
        root_scale: the unit of R; about √(N k/σ²), k the prior variance of f, for optimizers that take steps of a given
            length, as Adam does.
        memory_limit: bytes that a matrix of r × r may take for each latent; a step has about ten of them.
        refresh: after how many natural steps q(w) is made anew of the sums, for "natural" and "mean". In between it is
            held, as a posterior of whitened weights, and a step costs O(B r²) instead of O(r³ + B r²) where the prior's
            weights are independent (`InducingBasis` has others: their whitening costs r³ in each step). At first it is
            made anew after 1, 2, 4, … steps. Predictions have the posterior that is held.

    Returns:
        A posterior family.

    Raises:
        ValueError: an unknown parametrisation, or one without sums where `refresh` is more than 1; a number outside its
            range.
    """
    if parametrization not in get_args(Parametrization):
        msg = f"`parametrization` must be one of {get_args(Parametrization)}, got {parametrization!r}."
        raise ValueError(msg)
    if not root_scale > 0.0:
        msg = f"`root_scale` must be positive, got {root_scale!r}. The default is 1."
        raise ValueError(msg)
    refresh = positive("refresh", refresh, "The default is 1.")
    if refresh > 1 and parametrization not in ("natural", "mean"):
        msg = f"`refresh` is for 'natural' and 'mean', got {refresh!r} with {parametrization!r}. Leave it out."
        raise ValueError(msg)
    if refresh > 1:
        return StaleWeights(memory_limit, refresh, own_mean=parametrization == "mean")
    if parametrization == "root":
        return RootWeights(memory_limit, root_scale)
    if parametrization == "adversarial":
        return AdversarialWeights(memory_limit, root_scale)
    return {"natural": NaturalWeights, "mean": MeanWeights, "averaged": AveragedWeights}[parametrization](memory_limit)


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
        base: guide for the other latents: an autoguide class, or a guide. A class starts a latent at what was observed
            of it, if it is the location of an outcome, and near its prior median otherwise.
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
