"""One Gaussian over the inducing values of several GPs and over other latents, by its linear predictors.

Let z = (u₁, …, u_K, w − b) with the prior N(0, K), K = blockdiag(Kuu₁, …, Kuu_K, B). A linear predictor η of f and w
has the prior covariance k = Cov(z, η) with z and the prior variance k_ηη. Given z it has the mean kᵀK⁻¹z and the
variance k_ηη − kᵀK⁻¹k. So the formulas of sparse posteriors hold with η in the place of f: z are its inducing
variables.
"""

from collections.abc import Callable, Mapping
import dataclasses
import math
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike

from numpyro_sgp._internal.probed import value_of
from numpyro_sgp.inducing import AbstractInducing
from numpyro_sgp.math.linalg import matmul, matvec
from numpyro_sgp.posteriors.dual.formulas import natural_mean_and_root, natural_whitened
from numpyro_sgp.posteriors.dual.tied import tied, tied_mean_and_root
from numpyro_sgp.posteriors.moments import perturbed_moments, whiten
from numpyro_sgp.posteriors.natural_parameters import Perturbed

__all__ = ["Columns", "JointGaussian", "Rows", "gaussian_prior", "stacked"]


class Rows(NamedTuple):
    """One GP site at the inputs of the model.

    Attributes:
        Kuf: prior covariances with its inducing variables, (C, M, N) for C latents.
        kff: prior variances, (C, N).
    """

    Kuf: Array
    kff: Array


class Columns(NamedTuple):
    """Moments of some linear predictors, with their perturbation.

    Attributes:
        mean: of the centred predictors, (E,).
        variance: (E,).
        A: L⁻¹k, (D, E).
        T: (D, E), with Cov(η) = prior covariance − AᵀA + TᵀT.
        h: the vectors that the sites sum, (D, E).
    """

    mean: Array
    variance: Array
    A: Array
    T: Array
    h: Array

    def take(self, start: int, stop: int, shape: tuple[int, ...]) -> "Columns":
        """Some of them, in a shape of their own."""
        return Columns(*(each[..., start:stop].reshape(*each.shape[:-1], *shape) for each in self))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class JointGaussian:
    """q(z) = N(0, K) times sites, in one of two parametrisations.

    Attributes:
        value: natural parameters above those of the prior, (D,) and (D, D), perturbed or not.
        K: prior covariance of z, (D, D).
        Kuv: Cov(z, z') with the variables that the sites refer to, (D, D); None where these are the same.
        inducing: the inducing variables by site.
        offset: b, the prior mean of w, (P,).
        root: R with R Rᵀ = B, the prior covariance of w, (P, P).
        spans: where each site begins in z, with its number of latents and of inducing variables.
        projected: whether sites stay fixed in z, rather than in whitened variables, while hyperparameters move.
    """

    value: Any
    K: Array
    Kuv: Array | None
    inducing: dict[str, AbstractInducing]
    offset: Array
    root: Array
    spans: dict[str, tuple[int, int, int]] = dataclasses.field(metadata={"static": True})
    projected: bool = dataclasses.field(metadata={"static": True})

    @property
    def num_latents(self) -> int:
        """P, how many numbers w has."""
        return self.offset.shape[0]

    def posterior(self, k: Array, variance: Array) -> tuple[Columns, Array]:
        """Moments of linear predictors, and KL(q(z) ‖ p(z)).

        Args:
            k: prior covariances of z with the predictors, (D, E).
            variance: prior variances of the predictors, (E,).
        """
        sites = value_of(self.value)
        if self.projected:
            q = tied(sites.lambda1, sites.Lambda2, self.K, k, variance, self.Kuv)
            moments, h = q.moments, jax.lax.stop_gradient(q).projections()
            if isinstance(self.value, Perturbed):
                if self.value.zero.transported is not None:
                    lambda1, Lambda2 = jax.lax.stop_gradient(q).projected_sites()
                    sites = dataclasses.replace(sites, lambda1=lambda1, Lambda2=Lambda2, reference=self.inducing)
                moments = perturbed_moments(self.value, h, moments, sites)
        else:
            _, h = whiten(self.K, k)
            moments = natural_whitened(sites.lambda1, sites.Lambda2, h, variance)
            if isinstance(self.value, Perturbed):
                moments = perturbed_moments(self.value, h, moments)
        T = moments.posterior_root
        assert T is not None
        return Columns(moments.mean, moments.variance, moments.prior_root, T, jax.lax.stop_gradient(h)), moments.kl

    def covariance(self, one: Columns, other: Columns, prior: ArrayLike) -> Array:
        """Cov(η, η') of predictors whose axes broadcast.

        Args:
            one: predictors η.
            other: predictors η'.
            prior: their prior covariance.
        """
        result = jnp.asarray(prior) - jnp.sum(one.A * other.A, axis=0) + jnp.sum(one.T * other.T, axis=0)
        if not isinstance(self.value, Perturbed):
            return result
        epsilon1, epsilon2 = self.value.zero.epsilon1, self.value.zero.epsilon2
        first, second = jax.lax.stop_gradient((one.mean, other.mean))
        # Symmetric, so that its gradient is.
        moved = jnp.tensordot(0.5 * (epsilon2 + epsilon2.T), other.h, axes=1)
        result = result + jnp.sum(one.h * moved, axis=0)
        return (
            result - first * jnp.tensordot(epsilon1, other.h, axes=1) - second * jnp.tensordot(epsilon1, one.h, axes=1)
        )

    def whitened(self) -> tuple[Array, Array, Array]:
        """L with L Lᵀ = K, and mean (D,) and root (D, D) of the covariance of L⁻¹z."""
        sites = value_of(self.value)
        if self.projected:
            return tied_mean_and_root(sites.lambda1, sites.Lambda2, self.K, self.Kuv)
        L, _ = whiten(self.K, self.K[:, :0])
        return L, *natural_mean_and_root(sites.lambda1, sites.Lambda2)

    def of_latents(self) -> tuple[Array, Array]:
        """The columns (D, P) and prior variances (P,) of w itself."""
        B = matmul(self.root, self.root.T)
        before = jnp.zeros((self.K.shape[0] - B.shape[0], B.shape[0]), B.dtype)
        return jnp.concatenate([before, B], axis=0), jnp.diagonal(B)

    def of_site(self, site: str, rows: Rows) -> Array:
        """The columns of f at all rows of a site's latents, (D, C N)."""
        start, C, M = self.spans[site]
        N = rows.Kuf.shape[-1]
        own = jnp.eye(C, dtype=rows.Kuf.dtype)[:, None, :, None] * rows.Kuf[:, :, None, :]
        own = own.reshape(C * M, C * N)
        return jnp.zeros((self.K.shape[0], C * N), own.dtype).at[start : start + C * M].set(own)

    def of_predictor(
        self,
        predictor: Callable[[dict[str, Array], Array], Array],
        at: tuple[dict[str, Array], Array],
        rows: Mapping[str, Rows],
        moving: Array,
    ) -> "Predictor":
        """The columns of an affine predictor η(f, w), whatever its coefficients are.

        Each row of Cov(u, f) is pushed through the linear part of η, which gives Cov(u, η).

        Args:
            predictor: η as a function of values of f by site, (C, N) each, and of w; each entry depends on one row of
                each latent.
            at: where to linearise.
            rows: the sites that it depends on.
            moving: 1 for each number of w that it is affine in, 0 for those that are fixed, (P,).
        """
        f, w = at
        value = predictor(f, w)
        D, dtype = self.K.shape[0], self.K.dtype
        k, parts = jnp.zeros((D, *value.shape), dtype), []
        for site, (Kuf, kff) in rows.items():

            def push(tangent: Array, site: str = site) -> Array:
                return jax.jvp(lambda own: predictor({**f, site: own}, w), (f[site],), (tangent,))[1]

            start, C, M = self.spans[site]
            one_hot = jnp.eye(C, dtype=Kuf.dtype)[:, :, None]
            tangents = (one_hot[:, None] * Kuf[:, :, None, :]).reshape(C * M, C, -1)
            k = k.at[start : start + C * M].set(jax.vmap(push)(tangents))
            shape = (C, C, kff.shape[-1])
            parts.append((jax.vmap(push)(jnp.broadcast_to(one_hot, shape)), jax.vmap(push)(one_hot * kff[:, None, :])))
        if self.num_latents:
            pushed = jax.vmap(lambda tangent: jax.jvp(lambda w: predictor(f, w), (w,), (tangent,))[1])(
                (self.root * moving[:, None]).T
            )
            k = k.at[D - self.num_latents :].set(jnp.tensordot(self.root, pushed, axes=1))
            parts.append((pushed, pushed))
        return Predictor(value, k, parts)


class Predictor(NamedTuple):
    """An affine predictor: its value where it was linearised, and what its prior covariances are made of.

    Attributes:
        value: (...).
        k: prior covariances with z, (D, ...).
        parts: pairs of coefficients and of coefficients times prior variances, of independent variables.
    """

    value: Array
    k: Array
    parts: list[tuple[Array, Array]]

    def prior_covariance(self, other: "Predictor") -> Array:
        """Of predictors whose axes broadcast."""
        pairs = zip(self.parts, other.parts, strict=True)
        return jnp.asarray(sum(jnp.sum(one[0] * another[1], axis=0) for one, another in pairs))


def gaussian_prior(precision: Array, linear: Array) -> tuple[Array, Array]:
    """Mean b = Q⁻¹l and a root R of the covariance, R Rᵀ = Q⁻¹, of a density ∝ exp(lᵀw − ½ wᵀQw).

    Args:
        precision: Q, (P, P).
        linear: l, (P,).
    """
    _, inverse = whiten(precision, jnp.eye(precision.shape[0], dtype=precision.dtype))
    return matvec(inverse.T, matvec(inverse, linear)), inverse.T


def stacked(
    blocks: Mapping[str, Array], batch_shapes: Mapping[str, tuple[int, ...]], root: Array
) -> tuple[Array, dict[str, tuple[int, int, int]]]:
    """The prior covariance of z, and where each site begins in it.

    Args:
        blocks: Kuu by site, (..., M, M).
        batch_shapes: of the sites; each latent has inducing variables of its own.
        root: of the prior covariance of w.
    """
    covariances, spans, start = [], {}, 0
    for site, block in blocks.items():
        M, C = block.shape[-1], math.prod(batch_shapes[site])
        covariances += list(jnp.broadcast_to(block, (*batch_shapes[site], M, M)).reshape(C, M, M))
        spans[site] = (start, C, M)
        start += C * M
    return jax.scipy.linalg.block_diag(*covariances, matmul(root, root.T)), spans
