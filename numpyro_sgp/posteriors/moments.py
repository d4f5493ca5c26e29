"""What every parametrisation returns, and the quantities all of them start from."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
import dataclasses
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.custom_derivatives import SymbolicZero
import jax.numpy as jnp
from jax.typing import ArrayLike

from numpyro_sgp._internal.eager import as_one_program
from numpyro_sgp.inducing import AbstractInducing
from numpyro_sgp.math.linalg import cholesky, root_of, with_jitter
from numpyro_sgp.math.products import matmul, matvec, matvec_transposed
from numpyro_sgp.posteriors.perturbation import Perturbed, perturb_kl, perturb_marginals
from numpyro_sgp.posteriors.sites import AbstractSites, Past

__all__ = [
    "AbstractCovariance",
    "Moments",
    "Parts",
    "Projection",
    "Roots",
    "draw_given_inducing",
    "frozen",
    "given_tangents",
    "joined",
    "moments",
    "perturbed_moments",
    "project",
    "roots_of",
    "standard_deviation",
    "tangents_like",
    "unexplained_variance",
    "variance_given",
    "whiten",
    "with_past",
]


class AbstractCovariance(ABC):
    """The covariance of q(f) between rows, evaluated on request; a pytree.

    Cov(f) = Cov(f | u) + Cov(E[f | u]), where the first term is the prior's, and draws of the second one need
    `num_noise` standard normal numbers, whatever the rows are.
    """

    @property
    @abstractmethod
    def num_noise(self) -> int | None:
        """How many numbers E[f | u] is drawn with; None where u are the values of f at the training inputs."""

    @abstractmethod
    def given_inducing(self, Kff: Array) -> Array:
        """Cov(f | u) from the prior covariance, (..., N, N); Cov(f) where there is no other term."""

    @abstractmethod
    def of_inducing(self) -> Array | None:
        """Cov(E[f | u]), (..., N, N); None where u are the values of f at the training inputs."""

    @abstractmethod
    def variance_of_inducing(self) -> Array | None:
        """Its diagonal, (..., N)."""

    @abstractmethod
    def deviation(self, noise: Array) -> Array:
        """E[f | u] − E[f] for a draw of u by standard normal numbers, (..., num_noise) to (..., N)."""

    def unexplained(self, kff: Array) -> Array | None:
        """What u leaves of the prior variances of f, kff, (..., N); None where that is nothing, or not known."""
        del kff
        return None

    def draw_deviations(self, rng_key: Array, shape: tuple[int, ...]) -> Array | None:
        """Joint draws of f − E[f], shape (..., N), if a posterior has a way of its own; else None."""
        del rng_key, shape
        return None

    def draw_parts(self, rng_key: Array, shape: tuple[int, ...], *, of_inducing: Array | None = None) -> "Parts | None":
        """Joint draws of E[f | u] − E[f] and of f − E[f | u], shape (..., N), if a posterior has a way of its own.

        Args:
            rng_key: a key.
            shape: (..., N).
            of_inducing: the key of u, where these do not depend on the rows; None for one that is made of `rng_key`.
        """
        del rng_key, shape, of_inducing
        return None


class AbstractDenseCovariance(AbstractCovariance):
    """The covariance of a posterior whose u are the values of f at the training inputs.

    Or what its sites see of these: then f has more beside u, and a class says what in `of_inducing` and `draw_parts`.
    """

    @property
    def sees_all(self) -> bool:
        """Whether sites see all of f, so that `of_inducing` is None."""
        return True

    @property
    def num_noise(self) -> None:
        return None

    def of_inducing(self) -> None:
        return None

    def variance_of_inducing(self) -> None:
        return None

    def deviation(self, noise: Array) -> Array:
        raise NotImplementedError

    @abstractmethod
    def draw_deviations(self, rng_key: Array, shape: tuple[int, ...]) -> Array:
        """Joint draws of f − E[f], shape (..., N)."""

    def draw_parts(self, rng_key: Array, shape: tuple[int, ...], *, of_inducing: Array | None = None) -> "Parts":
        del of_inducing
        deviations = self.draw_deviations(rng_key, shape)
        return Parts(deviations, jnp.zeros_like(deviations))


class Parts(NamedTuple):
    """Joint draws of the two parts of f.

    Attributes:
        explained: E[f | u] − E[f], (..., N).
        rest: f − E[f | u], (..., N).
        log_sites: log of the sites at u, (...), where they are no sites of E[f | u] in the rows; else None.
        log_normaliser: log Z of these, (...).
    """

    explained: Array
    rest: Array
    log_sites: Array | None = None
    log_normaliser: Array | None = None


def draw_given_inducing(
    covariance: AbstractCovariance,
    kernel: Callable,
    X: Any,
    jitter: ArrayLike,
    rng_key: Array,
    shape: tuple[int, ...],
) -> Array:
    """Joint draws of f − E[f | u], (..., N), by a matrix of all rows.

    Args:
        covariance: of the posterior.
        kernel: the prior's.
        X: rows, (N, D).
        jitter: added to the covariance, which may be singular, relative to the mean prior variance.
        rng_key: a key.
        shape: (..., N).
    """
    K, kff = kernel(X, X), kernel(X)
    index = jnp.arange(K.shape[-1])
    K = covariance.given_inducing(K.at[..., index, index].set(kff))
    scale = jnp.mean(kff, axis=-1)[..., None, None]
    L = cholesky(K + jitter * scale * jnp.eye(K.shape[-1], dtype=K.dtype))
    return matvec(L, jax.random.normal(rng_key, shape, K.dtype))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Roots(AbstractCovariance):
    """Cov(f) = Kff − AᵀA + TᵀT, by dense roots.

    Attributes:
        A: (..., M, N).
        T: (..., M, N), or None where u are the values of f at the training inputs.
    """

    A: Array
    T: Array | None

    @property
    def num_noise(self) -> int | None:
        return None if self.T is None else self.T.shape[-2]

    def given_inducing(self, Kff: Array) -> Array:
        return Kff - matmul(self.A.mT, self.A)

    def of_inducing(self) -> Array | None:
        return None if self.T is None else matmul(self.T.mT, self.T)

    def variance_of_inducing(self) -> Array | None:
        return None if self.T is None else jnp.sum(self.T * self.T, axis=-2)

    def unexplained(self, kff: Array) -> Array | None:
        return None if self.T is None else jnp.maximum(kff - jnp.sum(self.A * self.A, axis=-2), 0.0)

    def deviation(self, noise: Array) -> Array:
        assert self.T is not None
        return matvec_transposed(self.T, noise)


class Moments(NamedTuple):
    """What a loss needs of q(f): marginals and divergence; and its covariance between rows, on request.

    Attributes:
        mean: posterior mean of the centred process (without the prior mean), (..., N).
        variance: posterior variances, (..., N).
        kl: KL(q(u) ‖ p(u)), for each latent, (...).
        covariance: between rows; None where only marginals are known.
        kernel: the kernel of Kff, where it is not the prior's; else None.
        sampled: what a loss needs to know where mean and variance are estimates from sampled weights; else None.
    """

    mean: Array
    variance: Array
    kl: Array
    covariance: AbstractCovariance | None
    kernel: Any = None
    sampled: Any = None

    def given(self, noise: Array, kl: ArrayLike) -> "Moments":
        """The moments given a draw of u.

        Args:
            noise: the standard normal numbers that u is drawn with, (..., num_noise).
            kl: what takes the place of the divergence, (...).
        """
        assert self.covariance is not None
        of_u = self.covariance.variance_of_inducing()
        assert of_u is not None
        variance = jnp.maximum(self.variance - of_u, jnp.finfo(of_u.dtype).eps * self.variance)
        mean = self.mean + self.covariance.deviation(noise)
        # The values at the rows given u have the prior's covariance given u.
        covariance = Roots(self.covariance.A, None) if isinstance(self.covariance, Roots) else None
        return Moments(mean, variance, jnp.asarray(kl), covariance, self.kernel)


def roots_of(q: Moments) -> Roots:
    """The dense roots of a posterior, where its formulas are built on them."""
    if not isinstance(q.covariance, Roots):
        msg = f"Dense roots of a covariance are needed, and this posterior has {type(q.covariance).__name__}."
        raise TypeError(msg)
    return q.covariance


class Projection(NamedTuple):
    """The prior's covariance blocks between inducing variables and data.

    Attributes:
        L: Cholesky factor of Kuu, (..., M, M).
        Kuf: (..., M, N).
        A: L⁻¹ Kuf, (..., M, N).
        kff: prior variances, (..., N).
    """

    L: Array
    Kuf: Array
    A: Array
    kff: Array


def project(inducing: AbstractInducing, kernel: Callable, X: Array, jitter: ArrayLike) -> Projection:
    """Evaluate and factorise the covariance blocks once.

    Args:
        inducing: inducing variables.
        kernel: a kernel.
        X: inputs, (N, D).
        jitter: added to the diagonal of Kuu, relative to its mean.
    """
    Kuf = inducing.Kuf(kernel, X)
    L, A = whiten(with_jitter(inducing.Kuu(kernel), jitter), Kuf)
    return Projection(L, Kuf, A, kernel(X))


def frozen(q: Moments) -> Moments:
    """The moments as functions of what u leaves unexplained: the rest has no derivative."""
    assert q.covariance is not None
    explained = q.covariance.variance_of_inducing()
    assert explained is not None
    mean, explained_fixed = jax.lax.stop_gradient((q.mean, explained))
    return q._replace(mean=mean, variance=explained_fixed + (q.variance - explained))


def standard_deviation(variance: Array) -> Array:
    """√v, with the derivative 0 where v = 0.

    A variance that is zero is at its least, so it does not change to first order: as where all features of a row
    vanish, those of a network of rectified linear units, say. The derivative of the root alone is infinite there.

    Args:
        variance: v ≥ 0, any shape; NaN where it is negative.
    """
    vanishes = variance == 0.0
    return jnp.where(vanishes, 0.0, jnp.sqrt(jnp.where(vanishes, 1.0, variance)))


def given_tangents(tangents: tuple) -> tuple:
    """The tangents that a rule was given, None in the place of those that are known to be zero."""
    return tuple(None if isinstance(tangent, SymbolicZero) else tangent for tangent in tangents)


def tangents_like(values: Any, derivatives: Sequence[ArrayLike | None]) -> Any:
    """The derivatives of the leaves of a pytree, in their order, in its structure and their shapes; None is zero."""
    leaves, structure = jax.tree.flatten(values)

    def tangent_like(value: Array, derivative: ArrayLike | None) -> Array:
        derivative = jnp.asarray(0.0 if derivative is None else derivative, value.dtype)
        return jnp.broadcast_to(derivative, value.shape)

    return structure.unflatten(tangent_like(*pair) for pair in zip(leaves, derivatives, strict=True))


@as_one_program
def _whiten(Kuu: Array, Kuf: Array) -> tuple[Array, Array]:
    root = root_of(Kuu)
    return root.L, root.whiten(Kuf)


@jax.custom_jvp
def whiten(Kuu: Array, Kuf: Array) -> tuple[Array, Array]:
    """L with Kuu = L Lᵀ, and A = L⁻¹Kuf, with their derivative written out: no factorisation is differentiated.

    With F = Φ(L⁻¹ dKuu L⁻ᵀ), the lower triangle with its diagonal halved: dL = L F and dA = L⁻¹dKuf − F A. So one
    sandwich between L⁻ᵀ and L⁻¹ makes the gradient with respect to Kuu, which is right for symmetric changes of Kuu and
    not itself symmetric.

    Args:
        Kuu: prior covariance of the inducing variables, with jitter, (..., M, M); only the upper triangle is read.
        Kuf: (..., M, N).
    """
    return _whiten(Kuu, Kuf)


def _whiten_jvp(
    primals: tuple[Array, Array], tangents: tuple[Any, Any]
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    root = root_of(primals[0])
    L, A = root.L, root.whiten(primals[1])
    dKuu, dKuf = given_tangents(tangents)
    dL, dA = None, None if dKuf is None else root.whiten_tangent(dKuf)
    if dKuu is not None:
        F = root.whiten_half(dKuu)
        dL, FA = matmul(L, F), matmul(F, A)
        dA = -FA if dA is None else dA - FA
    return (L, A), tangents_like((L, A), (dL, dA))


whiten.defjvp(_whiten_jvp, symbolic_zeros=True)


# Rounding makes k_ii − |A_i|² negative by 3e-5 k_ii in float32 (measured, M = 512). Where it is a thousandth and more,
# the covariance blocks contradict each other: distances lost in float32, or a kernel that is not positive definite.
# Relative to the largest variance of the rows, as the rounding of a small difference of large numbers is: f(x) − f(x′)
# for x close to x′.
_CONTRADICTION = 1e-3


def _residual(kff: Array, explained: Array) -> Array:
    residual = kff - explained
    largest = jnp.max(kff, axis=-1, keepdims=True, initial=0.0)
    return jnp.where(residual < -_CONTRADICTION * largest, jnp.nan, residual)


def unexplained_variance(kff: Array, explained: Array) -> Array:
    """What inducing variables leave of prior variances, (..., N): not negative, NaN where more than rounding would
    make it so.

    Args:
        kff: prior variances, (..., N).
        explained: what they explain of these, |L⁻¹k_ui|², (..., N).
    """
    return jnp.maximum(_residual(kff, explained), 0.0)


def variance_given(kff: Array, A: Array) -> Array:
    """What inducing variables leave of prior variances, k_ii − |A_i|², (..., N), from A = L⁻¹Kuf, (..., M, N)."""
    return unexplained_variance(kff, jnp.sum(A * A, axis=-2))


@as_one_program
def moments(mean: Array, kff: Array, A: Array, T: Array | None, kl: Array) -> Moments:
    """v_i = (k_ii − |A_i|²) + |T_i|², the bracket kept non-negative against rounding, NaN where it is no rounding."""
    residual = _residual(kff, jnp.sum(A * A, axis=-2))
    if T is None:
        # The bracket is all of the variance, and positive: its rounding error is of the order of the machine epsilon.
        variance = jnp.maximum(residual, jnp.finfo(residual.dtype).eps * kff)
    else:
        variance = jnp.maximum(residual, 0.0) + jnp.sum(T * T, axis=-2)
    return Moments(mean, variance, kl, Roots(A, T))


def perturbed_moments(
    value: AbstractSites | Perturbed,
    a: Array | None,
    q: Moments,
    sites: AbstractSites | None = None,
    own_mean: Array | None = None,
) -> Moments:
    """The moments as functions of a perturbation of the expectation parameters; values unchanged at zero.

    Args:
        value: sites with a perturbation; sites alone leave the moments as they are.
        a: vectors of the sites' basis, (..., M, N), or None where each datum has its own site.
        q: moments at zero perturbation.
        sites: the sites expressed in that basis, where it is not the one they are held in.
        own_mean: the part of the mean that these sites make, (..., N), where the mean has other parts.
    """
    if not isinstance(value, Perturbed):
        return q
    mean, variance = perturb_marginals(value, a, q.mean, q.variance, own_mean)
    kl = perturb_kl(value.zero, value.value if sites is None else sites, q.kl)
    return q._replace(mean=mean, variance=variance, kl=kl)


def joined(x: Array, y: Array) -> Array:
    """Arrays side by side along their last axis, the axes before it broadcast."""
    shape = jnp.broadcast_shapes(x.shape[:-1], y.shape[:-1])
    return jnp.concatenate([jnp.broadcast_to(each, (*shape, each.shape[-1])) for each in (x, y)], axis=-1)


def with_past(q: Moments, unperturbed: Moments, num_rows: int) -> Moments:
    """Moments of the rows, with the expectation of past sites in the divergence.

    Args:
        q: moments of the rows, and of the linear functions in the past sites after them.
        unperturbed: the same at zero perturbation.
        num_rows: how many rows there are.
    """
    roots = roots_of(q)
    assert roots.T is not None
    # Nothing of them is left unexplained, so their variance has no rounding error of a difference.
    variance = jnp.sum(roots.T * roots.T, axis=-2) + (q.variance - unperturbed.variance)
    kl = q.kl - Past.expected(q.mean[..., num_rows:], variance[..., num_rows:])
    rows = Roots(roots.A[..., :num_rows], roots.T[..., :num_rows])
    return q._replace(mean=q.mean[..., :num_rows], variance=q.variance[..., :num_rows], kl=kl, covariance=rows)
