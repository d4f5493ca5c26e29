"""Linear predictors of GP sites and latents, and what a Gaussian says about them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

from numpyro_sgp.math.products import matmul
from numpyro_sgp.posteriors.joint.effects import Loading
from numpyro_sgp.posteriors.moments import standard_deviation
from numpyro_sgp.posteriors.perturbation import Perturbation, Perturbed, floored_matrix

__all__ = [
    "AbstractJointGaussian",
    "Columns",
    "Predictor",
    "Rows",
    "floored",
    "perturbed_covariance",
    "prior_covariance",
    "shared_effect",
]


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
        T: (D, E), with Cov(η | effects) = prior covariance − AᵀA + TᵀT.
        h: the vectors that the sites sum, (D, E).
        coefficient: of the effect of a group in each of them, (E,).
        index: which effect that is, (E,).
        unperturbed: the variance without its perturbation, (E,).
    """

    mean: Array
    variance: Array
    A: Array
    T: Array
    h: Array
    coefficient: Array
    index: Array
    unperturbed: Array

    @property
    def loading(self) -> Loading:
        """The effect in each of them."""
        return Loading(self.coefficient, self.index)

    def take(self, start: int, stop: int, shape: tuple[int, ...]) -> "Columns":
        """Some of them, in a shape of their own."""
        return Columns(*(each[..., start:stop].reshape(*each.shape[:-1], *shape) for each in self))


class AbstractJointGaussian(ABC):
    """A Gaussian over variables z of GP sites and other latents.

    Attributes:
        offset: b, the prior mean of w, (P,).
        root: R with R Rᵀ = B, the prior covariance of w, (P, P).
        effect_variance: prior variances of effects of groups, (G,).
        spans: where each site begins in z, with its number of latents and of variables for each.
    """

    offset: Array
    root: Array
    effect_variance: Array
    spans: dict[str, tuple[int, int, int]]

    @property
    @abstractmethod
    def size(self) -> int:
        """D, how many numbers z has."""

    @property
    def num_latents(self) -> int:
        """P, how many numbers w has."""
        return self.offset.shape[0]

    @abstractmethod
    def posterior(self, k: Array, variance: Array, loading: Loading | None = None) -> tuple[Columns, Array]:
        """Moments of linear predictors, and the divergence from the prior.

        Args:
            k: prior covariances of z with the predictors, (D, E).
            variance: prior variances of the predictors without the effects of groups, (E,).
            loading: these effects; None for predictors without any.
        """

    @abstractmethod
    def explained(self, one: Columns, other: Columns) -> Array:
        """What of Cov(η, η') z and the effects of groups explain, of predictors whose axes broadcast."""

    def unexplained(self, prior: Array, columns: Columns) -> Array:
        """What z leaves of the prior variances of predictors, (...).

        Args:
            prior: these, without the effects of groups.
            columns: their moments.
        """
        return prior - jnp.sum(columns.A * columns.A, axis=0)

    @abstractmethod
    def covariance(self, one: Columns, other: Columns, prior: ArrayLike, *, perturbed: bool = True) -> Array:
        """Cov(η, η') of predictors whose axes broadcast.

        Args:
            one: predictors η.
            other: predictors η'.
            prior: their prior covariance without the effects of groups.
            perturbed: whether it moves with a perturbation of the expectation parameters.
        """

    @abstractmethod
    def perturbation_of_covariance(self, one: Columns, other: Columns) -> Array:
        """What Cov(η, η') changes by with a perturbation of the expectation parameters: zero."""

    @abstractmethod
    def floored(self, perturbation: Array) -> Array:
        """The perturbation of covariances (..., F, F); the direction that is asked for is positive semi-definite."""

    def of_latents(self) -> tuple[Array, Array]:
        """The columns (D, P) and prior variances (P,) of w itself."""
        B = matmul(self.root, self.root.T)
        before = jnp.zeros((self.size - B.shape[0], B.shape[0]), B.dtype)
        return jnp.concatenate([before, B], axis=0), jnp.diagonal(B)

    def of_predictor(
        self,
        predictor: Callable[[dict[str, Array], Array, Array], Array],
        at: tuple[dict[str, Array], Array],
        rows: Mapping[str, Rows],
        moving: Array,
        *,
        has_effects: bool,
        covariances: Mapping[str, Array] | None = None,
        variances: Mapping[str, Array] | None = None,
    ) -> "Predictor":
        """The columns of an affine predictor η(f, w), whatever its coefficients are.

        Each row of Cov(u, f) is pushed through the linear part of η, which gives Cov(u, η).

        Args:
            predictor: η as a function of values of f by site, (C, N) each, of w, and of the effects of groups in their
                units, (G,); each entry depends on one effect, and on one row of each latent of a site without an entry
                in `covariances`.
            at: where to linearise.
            rows: the sites that it depends on.
            moving: 1 for each number of w that it is affine in, 0 for those that are fixed, (P,).
            has_effects: whether it depends on effects of groups.
            covariances: prior covariance between the rows of a site, (C, N, N), by site, where several rows of it meet
                in an entry of the term that the predictor is for.
            variances: in their place the prior variances of the predictor's own part in a site, (...), where its
                covariances with other predictors are not asked for.
        """
        f, w = at
        e = jnp.zeros_like(self.effect_variance)
        value = predictor(f, w, e)
        D, dtype = self.size, self.offset.dtype
        k, parts = jnp.zeros((D, *value.shape), dtype), []
        for site, (Kuf, kff) in rows.items():

            def push(tangent: Array, site: str = site) -> Array:
                return jax.jvp(lambda own: predictor({**f, site: own}, w, e), (f[site],), (tangent,))[1]

            start, C, M = self.spans[site]
            one_hot = jnp.eye(C, dtype=Kuf.dtype)[:, :, None]
            tangents = (one_hot[:, None] * Kuf[:, :, None, :]).reshape(C * M, C, -1)
            k = k.at[start : start + C * M].set(jax.vmap(push)(tangents))
            if variances is not None and site in variances:
                deviation = standard_deviation(variances[site])[None]
                parts.append((deviation, deviation))
                continue
            if covariances is not None and site in covariances:
                parts.append(_of_all_rows(push, covariances[site], value.size))
                continue
            shape = (C, C, kff.shape[-1])
            parts.append((jax.vmap(push)(jnp.broadcast_to(one_hot, shape)), jax.vmap(push)(one_hot * kff[:, None, :])))
        if self.num_latents:
            pushed = jax.vmap(lambda tangent: jax.jvp(lambda w: predictor(f, w, e), (w,), (tangent,))[1])(
                (self.root * moving[:, None]).T
            )
            k = k.at[D - self.num_latents :].set(jnp.tensordot(self.root, pushed, axes=1))
            parts.append((pushed, pushed))
        if not has_effects:
            return Predictor(value, k, parts, Loading(jnp.zeros_like(value), jnp.zeros(value.shape, int)))

        def along(tangent: Array) -> Array:
            return jax.jvp(lambda e: predictor(f, w, e), (e,), (tangent,))[1]

        # One effect in each entry: its number is what the coefficient multiplies.
        c = along(jnp.ones_like(e))
        numbered = along(jnp.arange(e.shape[0], dtype=e.dtype)) / jnp.where(c == 0.0, 1.0, c)
        return Predictor(value, k, parts, Loading(c, jnp.rint(jax.lax.stop_gradient(numbered)).astype(int)))


# The most entries of the matrix of a linear map from the rows of a site.
_MOST_COEFFICIENTS = 2**25


def _of_all_rows(push: Callable[[Array], Array], K: Array, size: int) -> tuple[Array, Array]:
    """The matrix J of a linear map of f, and K J, (C N, ...) each.

    Args:
        push: the map, of (C, N).
        K: prior covariance of f, (C, N, N).
        size: how many numbers it makes.
    """
    C, N, _ = K.shape
    if C * N * size > _MOST_COEFFICIENTS:
        msg = (
            f"A term depends on {C * N} values of a GP site through {size} numbers, and its matrix would have "
            f"{C * N * size} entries. Give the site these sums as inputs (`numpyro_sgp.functionals`), or subsample."
        )
        raise ValueError(msg)
    J = jax.vmap(push)(jnp.eye(C * N, dtype=K.dtype).reshape(C * N, C, N))
    KJ = matmul(K, J.reshape(C, N, -1)).reshape(J.shape)
    return J, KJ


def shared_effect(one: Columns, other: Columns) -> Array:
    """The coefficients of the effect of a group that two predictors share, multiplied."""
    return jnp.where(one.index == other.index, one.coefficient * other.coefficient, 0.0)


def perturbed_covariance(zero: Perturbation, effects: Perturbation | None, one: Columns, other: Columns) -> Array:
    """What Cov(η, η') changes by with a perturbation of the expectation parameters: zero.

    Args:
        zero: of those of z.
        effects: of those of effects of groups, and between these and z; None where there are none.
        one: predictors η.
        other: predictors η', whose axes broadcast with theirs.
    """
    both, one, other = jax.lax.stop_gradient((shared_effect(one, other), one, other))
    # Symmetric, so that its gradient is.
    moved = jnp.tensordot(0.5 * (zero.epsilon2 + zero.epsilon2.T), other.h, axes=1)
    second = jnp.sum(one.h * moved, axis=0)
    first = [jnp.tensordot(zero.epsilon1, each.h, axes=1) for each in (one, other)]
    if effects is not None:
        first = [
            value + each.coefficient * effects.epsilon1[each.index]
            for value, each in zip(first, (one, other), strict=True)
        ]
        crossed = [
            a.coefficient * jnp.sum(b.h * jnp.moveaxis(effects.epsilon2[a.index, 1:], -1, 0), axis=0)
            for a, b in ((one, other), (other, one))
        ]
        second = second + 0.5 * (crossed[0] + crossed[1]) + both * effects.epsilon2[one.index, 0]
    return second - one.mean * first[1] - other.mean * first[0]


def floored(value: Any, perturbation: Array) -> Array:
    """The perturbation of covariances, (..., F, F), with the floor of the direction that sites are asked for."""
    floor = value.zero.floor if isinstance(value, Perturbed) else None
    return perturbation if floor is None else floored_matrix(perturbation, floor)


class Predictor(NamedTuple):
    """An affine predictor: its value where it was linearised, and what its prior covariances are made of.

    Attributes:
        value: (...).
        k: prior covariances with z, (D, ...).
        parts: pairs of coefficients and of prior covariances times these, of independent groups of variables other
            than effects of groups.
        loading: the effect in each entry.
    """

    value: Array
    k: Array
    parts: list[tuple[Array, Array]]
    loading: Loading

    def prior_covariance(self, other: "Predictor") -> Array:
        """Of predictors whose axes broadcast, without effects of groups."""
        pairs = zip(self.parts, other.parts, strict=True)
        return jnp.asarray(sum(jnp.sum(one[0] * another[1], axis=0) for one, another in pairs))


def prior_covariance(kernel: Callable, X: Any, batch_shape: tuple[int, ...]) -> Array:
    """Cov[f(X)] for each of C latents, (C, N, N)."""
    K = kernel(X, X)
    N = K.shape[-1]
    K = K.at[..., np.arange(N), np.arange(N)].set(kernel(X))
    return jnp.broadcast_to(K, (*batch_shape, N, N)).reshape(-1, N, N)
