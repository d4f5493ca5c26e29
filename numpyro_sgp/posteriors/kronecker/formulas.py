"""q(u) on a grid of inducing inputs, by Kronecker products.

With one root for each axis, L = L₁ ⊗ L₂ ⊗ …, L_d L_dᵀ = K_d, and u = L v, the prior of v is N(0, I), and row n of the
data sees v through a_n = a₁ₙ ⊗ a₂ₙ ⊗ …, a_d = L_d⁻¹k_d. The posterior is q(v) = N(m, R diag(s²) Rᵀ), R = R₁ ⊗ R₂ ⊗ …:

    mean_n = aₙᵀm,   v_n = k_nn − Π_d |a_dₙ|² + Σ_j s_j² Π_d (R_dᵀa_dₙ)²_j,
    KL = ½ [ Σ_j s_j² Π_d |column j of R_d|² + |m|² − M ] − Σ_j log|s_j| − Σ_d (M/M_d) log|det R_d|.

With latents beside f that move the mean, v has the covariance R diag(s²) Rᵀ + TᵀT, with T (P, M): then v_n has the
term |T aₙ|² more, KL ½|T|² − ½ log|I + Y Yᵀ| with Y = T (R diag(s))⁻ᵀ, where M × M is nowhere, either.

Where w = Lw ω are these latents, ω ~ N(μ, Tw Twᵀ) and v | ω ~ N(m + Cᵀ(ω − μ), R diag(s²) Rᵀ), the prior of both being
N(0, I), T is TwᵀC, and the divergence of both together is

    KL(v, ω) = KL above without T + ½|TwᵀC|² + ½ (|μ|² + |Tw|² − P) − Σ_p log|(Tw)_pp|.

Nothing has M × M or M × N numbers.
"""

from collections.abc import Sequence
import dataclasses
from functools import reduce
import math

import jax
from jax import Array
import jax.numpy as jnp

from numpyro_sgp._internal.eager import as_one_program
from numpyro_sgp.math.products import matmul
from numpyro_sgp.posteriors.moments import AbstractCovariance, Moments, unexplained_variance

__all__ = [
    "GridCovariance",
    "contract",
    "deviation_of",
    "divergence_of_latents",
    "grid_moments",
    "in_units_of_root",
    "log_root",
]


def contract(values: Array, vectors: Sequence[Array]) -> Array:
    """Σ_jk… values_jk… a_jn b_kn …, (..., N).

    Args:
        values: numbers on the grid, (..., M₁, M₂, …).
        vectors: for each axis, (..., M_d, N).
    """
    *others, last = vectors
    batch, N = values.shape[: values.ndim - len(vectors)], last.shape[-1]
    found = matmul(values.reshape(*batch, -1, last.shape[-2]), last)
    for vector in reversed(others):
        found = found.reshape(*found.shape[:-2], -1, vector.shape[-2], N)
        found = jnp.sum(found * vector[..., None, :, :], axis=-2)
    return found[..., 0, :]


def _between_rows(weights: Array, vectors: Sequence[Array]) -> Array:
    """Σ_jk… weights_jk… a_jn a_jm b_kn b_km …, (..., N, N), without an array of M × N numbers."""
    first, *others = vectors
    if not others:
        return matmul(first.mT, weights[..., None] * first)
    axis = weights.ndim - len(vectors)
    slices = jnp.moveaxis(weights, axis, 0), jnp.moveaxis(first, -2, 0)

    def add(total: Array, at: tuple[Array, Array]) -> tuple[Array, None]:
        weight, row = at
        return total + row[..., :, None] * row[..., None, :] * _between_rows(weight, others), None

    batch, N = jnp.broadcast_shapes(weights.shape[:axis], first.shape[:-2]), first.shape[-1]
    return jax.lax.scan(add, jnp.zeros((*batch, N, N), first.dtype), slices)[0]


def _product(factors: Sequence[Array]) -> Array:
    return reduce(jnp.multiply, factors)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GridCovariance(AbstractCovariance):
    """Cov(f) = Kff − ∘_d A_dᵀA_d + Σ_j s_j² t_j t_jᵀ + BᵀB, where t_j is the product of row j_d of each T_d.

    Attributes:
        A: of each axis, (..., M_d, N).
        T: R_dᵀA_d of each axis, (..., M_d, N).
        s: (..., M₁, M₂, …).
        B: what other latents move, (P, N); None where there are none.
    """

    A: tuple[Array, ...]
    T: tuple[Array, ...]
    s: Array
    B: Array | None = None

    @property
    def num_noise(self) -> int:
        return self._size + (0 if self.B is None else self.B.shape[-2])

    @property
    def _size(self) -> int:
        return math.prod(T.shape[-2] for T in self.T)

    def given_inducing(self, Kff: Array) -> Array:
        return Kff - _product([matmul(A.mT, A) for A in self.A])

    def of_inducing(self) -> Array:
        own = _between_rows(self.s**2, self.T)
        return own if self.B is None else own + matmul(self.B.mT, self.B)

    def variance_of_inducing(self) -> Array:
        own = contract(self.s**2, [T**2 for T in self.T])
        return own if self.B is None else own + jnp.sum(self.B**2, axis=-2)

    def unexplained(self, kff: Array) -> Array:
        return jnp.maximum(kff - _explained(self.A), 0.0)

    def deviation(self, noise: Array) -> Array:
        own, of_latents = jnp.split(noise, [self._size], axis=-1)
        f = contract(self.s * own.reshape(*own.shape[:-1], *(T.shape[-2] for T in self.T)), self.T)
        return f if self.B is None else f + matmul(of_latents, self.B)


def _explained(A: Sequence[Array]) -> Array:
    return _product([jnp.sum(each * each, axis=-2) for each in A])


@as_one_program
def grid_moments(
    m: Array, s: Array, R: tuple[Array, ...], A: tuple[Array, ...], kff: Array, T: Array | None = None
) -> Moments:
    """The marginals and the divergence.

    Args:
        m: mean of v, (..., M₁, M₂, …).
        s: (..., M₁, M₂, …).
        R: square, of each axis, (..., M_d, M_d).
        A: L_d⁻¹k_d of each axis, (..., M_d, N).
        kff: prior variances, (..., N).
        T: what other latents move, (P, M₁, M₂, …); None where there are none.
    """
    turned = tuple(matmul(root.mT, each) for root, each in zip(R, A, strict=True))
    covariance = GridCovariance(A, turned, s, None if T is None else contract(T, A))
    variance = unexplained_variance(kff, _explained(A)) + covariance.variance_of_inducing()
    trace = contract(s**2, [jnp.sum(root**2, axis=-2)[..., None] for root in R])[..., 0]
    M = math.prod(root.shape[-1] for root in R)
    if T is not None:
        trace = trace + jnp.sum(T * T)
    kl = 0.5 * (trace + jnp.sum(m * m, axis=tuple(range(-len(R), 0))) - M) - log_root(s, R, T)
    return Moments(contract(m, A), variance, kl, covariance)


def log_root(s: Array, R: Sequence[Array], T: Array | None = None) -> Array:
    """log|det| of a root of the covariance of v, (...): of R diag(s), or with TᵀT."""
    M = math.prod(root.shape[-1] for root in R)
    of_axes = [M // root.shape[-1] * jnp.linalg.slogdet(root)[1] for root in R]
    own = jnp.sum(jnp.log(jnp.abs(s)), axis=tuple(range(-len(R), 0))) + sum(of_axes)
    if T is None:
        return own
    Y = in_units_of_root(T, s, R)
    return own + 0.5 * jnp.linalg.slogdet(jnp.eye(len(Y), dtype=Y.dtype) + matmul(Y, Y.mT))[1]


def in_units_of_root(T: Array, s: Array, R: Sequence[Array]) -> Array:
    """Y = T (R diag(s))⁻ᵀ, (P, M), of T (P, M₁, M₂, …)."""
    inverses = [jnp.linalg.inv(root) for root in R]
    return (along_axes(T, inverses) / s).reshape(len(T), -1)


def divergence_of_latents(mean: Array, root: Array, slopes: Array) -> Array:
    """What latents add to the divergence of v, ().

    Args:
        mean: μ, (P,).
        root: Tw, lower triangular, (P, P).
        slopes: C, (P, M₁, M₂, …).
    """
    moved = matmul(root.mT, slopes.reshape(len(slopes), -1))
    squares = jnp.sum(moved**2) + jnp.sum(root**2) + jnp.sum(mean**2)
    return 0.5 * (squares - len(mean)) - jnp.sum(jnp.log(jnp.abs(jnp.diagonal(root))))


def deviation_of(noise: Array, s: Array, R: Sequence[Array]) -> Array:
    """What a draw of v is beyond m, R diag(s) ε, (..., M₁, M₂, …), from ε of that shape."""
    return along_axes(s * noise, R)


def along_axes(v: Array, matrices: Sequence[Array]) -> Array:
    """(B₁ ⊗ B₂ ⊗ …) v, (..., M₁, M₂, …)."""
    for number, matrix in enumerate(matrices):
        axis = number - len(matrices)
        v = jnp.moveaxis(v, axis, -1)
        flat = v.reshape(*v.shape[: v.ndim - len(matrices)], -1, v.shape[-1])
        v = jnp.moveaxis(matmul(flat, matrix.mT).reshape(v.shape), -1, axis)
    return v
