"""Sparse variational GP: q(u) by mean and root, trained by any optimizer, or by natural parameters."""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

import jax.numpy as jnp
from numpyro.infer.autoguide import AutoNormal

from numpyro_sgp.autoguide import (
    AbstractAutoSparseGP,
    AbstractPosteriorFamily,
    Inducing,
    check_names,
    for_site,
    inducing_param,
)
from numpyro_sgp.conditionals import Moments, natural_whitened, perturbed_moments, project, unwhitened, whitened
from numpyro_sgp.distributions import GaussianProcess
from numpyro_sgp.sites import Perturbed, TiedSites, sites_of

__all__ = ["AutoSVGP", "NaturalWhitened", "Unwhitened", "Whitened"]


@dataclasses.dataclass(frozen=True)
class Whitened(AbstractPosteriorFamily):
    """q(v) = N(m, S_sqrt S_sqrtᵀ), u = L v with L Lᵀ = Kuu; starts at the prior.

    Args:
        inducing: inducing inputs (M, D), an inducing object, or `(kernel, X, rng_key)` to one.
        learn_inducing: whether to train the inducing inputs.
    """

    inducing: Inducing
    learn_inducing: bool = False

    def moments(self, param: Callable, prior: GaussianProcess, batch_shape: tuple[int, ...]) -> Moments:
        inducing = inducing_param(param, self.inducing, prior, self.learn_inducing)
        M, dtype = inducing.num_inducing, prior.X.dtype
        m = param("m", jnp.zeros((*batch_shape, M), dtype))
        S_sqrt = param("S_sqrt", jnp.broadcast_to(jnp.eye(M, dtype=dtype), (*batch_shape, M, M)))
        blocks = project(inducing, prior.kernel, prior.X, prior.relative_jitter)
        return whitened(m, jnp.tril(S_sqrt), blocks.A, blocks.kff)


@dataclasses.dataclass(frozen=True)
class Unwhitened(AbstractPosteriorFamily):
    """q(u) = N(m, S_sqrt S_sqrtᵀ); starts at the prior.

    Args:
        inducing: inducing inputs (M, D), an inducing object, or `(kernel, X, rng_key)` to one.
        learn_inducing: whether to train the inducing inputs.
    """

    inducing: Inducing
    learn_inducing: bool = False

    def moments(self, param: Callable, prior: GaussianProcess, batch_shape: tuple[int, ...]) -> Moments:
        inducing = inducing_param(param, self.inducing, prior, self.learn_inducing)
        blocks = project(inducing, prior.kernel, prior.X, prior.relative_jitter)
        M = inducing.num_inducing
        m = param("m", jnp.zeros((*batch_shape, M), prior.X.dtype))
        S_sqrt = param("S_sqrt", jnp.broadcast_to(blocks.L, (*batch_shape, M, M)))
        return unwhitened(m, jnp.tril(S_sqrt), blocks.L, blocks.A, blocks.kff)


@dataclasses.dataclass(frozen=True)
class NaturalWhitened(AbstractPosteriorFamily):
    """q(v) by natural parameters above the prior's, for `NaturalGradient`; u = L v; starts at the prior.

    Args:
        inducing: inducing inputs (M, D), an inducing object, or `(kernel, X, rng_key)` to one.
        learn_inducing: whether to train the inducing inputs.
    """

    inducing: Inducing
    learn_inducing: bool = False

    def moments(self, param: Callable, prior: GaussianProcess, batch_shape: tuple[int, ...]) -> Moments:
        inducing = inducing_param(param, self.inducing, prior, self.learn_inducing)
        value = param("sites", TiedSites.zeros(batch_shape, inducing.num_inducing, prior.X.dtype))
        sites = sites_of(value)
        blocks = project(inducing, prior.kernel, prior.X, prior.relative_jitter)
        q = natural_whitened(sites.lambda1, sites.Lambda2, blocks.A, blocks.kff)
        return perturbed_moments(value, blocks.A, q) if isinstance(value, Perturbed) else q


class AutoSVGP(AbstractAutoSparseGP):
    """Sparse variational GP posterior for every GP site of a model.

    Args:
        model: a NumPyro model with `GaussianProcess` sites.
        inducing: inducing inputs (M, D), an inducing object, a dict of them by site, or a function
            `(kernel, X, rng_key)` that makes them when the guide is initialised.
        whiten: parametrise v with u = L v, L Lᵀ = Kuu (better conditioned), instead of u itself.
        natural: hold q by natural parameters, for the optimizer `NaturalGradient`.
        base: guide for the other latents: an autoguide class, or a guide.
        learn_inducing: whether to train the inducing inputs.
        prefix: of the names of parameters, `{site}_{prefix}_{symbol}`.

    Raises:
        ValueError: `natural` without `whiten`; inducing inputs of another width than X.

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
        self._family = NaturalWhitened if natural else Whitened if whiten else Unwhitened
        super().__init__(model, base=base, prefix=prefix)

    def family(self, site: str) -> AbstractPosteriorFamily:
        return self._family(for_site(self.inducing, site, "inducing"), self.learn_inducing)

    def check_sites(self, sites: set[str]) -> None:
        check_names(self.inducing, sites, "inducing")
