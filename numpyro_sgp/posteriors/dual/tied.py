"""t-SVGP with tied sites, from the covariance blocks: the derivatives of the whole are written out.

Differentiated piece by piece, through L and A, the sites in the whitened basis and their posterior, it would take up to
four more products of matrices of size M, because most of what flows back through L cancels.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import jax
from jax import Array
import jax.numpy as jnp

from numpyro_sgp._internal.eager import as_one_program
from numpyro_sgp.inducing import AbstractInducing
from numpyro_sgp.math.linalg import Root, root_of
from numpyro_sgp.math.products import (
    congruence_of_upper,
    matmul,
    matvec,
    matvec_transposed,
    mirrored,
    symmetric_product,
    transposed,
)
from numpyro_sgp.posteriors.dual.formulas import (
    Whitened,
    by_posterior_root,
    by_sites,
    curvature,
    natural_mean_and_root,
    whitened_moments,
)
from numpyro_sgp.posteriors.moments import Moments, given_tangents, roots_of, tangents_like

__all__ = ["Tied", "shared_covariance", "tied", "tied_mean_and_root"]


class Tied(NamedTuple):
    """The posterior of tied sites.

    Attributes:
        moments: of q(f).
        root: of Kuu.
        lambda1: whitened sites λ̃, (..., M).
        Lambda2: whitened sites Λ̃, (..., M, M).
    """

    moments: Moments
    root: Root
    lambda1: Array
    Lambda2: Array

    def projections(self) -> Array:
        """Kuu⁻¹k_ui = L⁻ᵀA_i, (..., M, N): the vectors that the sites sum."""
        return self.root.unwhiten(roots_of(self.moments).A)

    def projected_sites(self) -> tuple[Array, Array]:
        """The sites as sums of projections on u itself, (L⁻ᵀλ̃, L⁻ᵀΛ̃L⁻¹)."""
        return self.root.unwhiten(self.lambda1[..., None])[..., 0], self.root.unwhiten_both(self.Lambda2)


@partial(jax.custom_jvp, nondiff_argnums=(6,))
def tied(
    lambda1: Array,
    Lambda2: Array,
    Kuu: Array,
    Kuf: Array,
    kff: Array,
    Kuv: Array | None = None,
    blocks: tuple[int, ...] | None = None,
) -> Tied:
    """q(u) ∝ p(u) exp(λ₁ᵀw − ½wᵀΛ₂w) with w = E[u' | u]: t-SVGP, sites as sums of the projections Kuu⁻¹k_ui.

    The sites do not move with the hyperparameters nor with u. Whitened they are λ̃ = L_uλ₁ and Λ̃ = L_uΛ₂L_uᵀ with
    L_u = L⁻¹Cov(u, u'), which is Lᵀ where u' = u. No factorisation is differentiated: with G = L⁻¹dKuu L⁻ᵀ,
    R = I − P⁻¹, U = P⁻¹A, E = A − U and p = P⁻¹m,

        dm_i = −E_iᵀG m,   dv_i = E_iᵀG E_i,   dKL = ½ tr(R²G) + (p − ½m)ᵀG m

    where u' = u, and elsewhere

        dm_i = −U_iᵀG m,   dv_i = A_iᵀG A_i − U_iᵀG U_i,   dKL = −½ tr(R²G) − (p − ½m)ᵀG m,

    beside the terms of dKuf, dk_ii, and of dλ₁, dΛ₂ and dKuv at fixed L, which are those of `natural_whitened`. The
    gradient with respect to Kuu is right for symmetric changes of it and not itself symmetric; that with respect to Λ₂
    is symmetric.

    Args:
        lambda1: Σ_i g_i a_i with a_i = K_u'u'⁻¹k_u'i, (..., M).
        Lambda2: Σ_i β_i a_i a_iᵀ, positive semi-definite, (..., M, M).
        Kuu: prior covariance of the inducing variables u, with jitter, (..., M, M).
        Kuf: (..., M, N).
        kff: prior variances, (..., N).
        Kuv: Cov(u, u') with the inducing variables u' that the sites refer to, (..., M, M); None where u' = u.
        blocks: sizes of the diagonal blocks of Kuu, outside of which it is zero; None for a single one.

    References:
        Adam, Chang, Khan and Solin (2021), "Dual parameterization of sparse variational Gaussian processes".
    """
    return _evaluate(lambda1, Lambda2, Kuu, Kuf, kff, Kuv, blocks)[0]


class _Parts(NamedTuple):
    value: Tied
    posterior: Whitened
    Lu: Array | None
    moving: Array | None


def _whitened_sites(root: Root, Lu: Array | None, lambda1: Array, Lambda2: Array) -> tuple[Array, Array, Array | None]:
    """λ̃ and Λ̃, linear in the sites, and L_uΛ₂ where it is at hand."""
    if Lu is None:
        return matvec_transposed(root.L, lambda1), congruence_of_upper(transposed(root.L), Lambda2), None
    moving = matmul(Lu, Lambda2)
    return matvec(Lu, lambda1), symmetric_product(moving, Lu), moving


@partial(as_one_program, static_argnums=4)
def tied_mean_and_root(
    lambda1: Array, Lambda2: Array, Kuu: Array, Kuv: Array | None = None, blocks: tuple[int, ...] | None = None
) -> tuple[Array, Array, Array]:
    """L with L Lᵀ = Kuu, and mean and root of q(v), u = L v; the arguments are those of `tied`."""
    root = root_of(Kuu, blocks)
    Lu = None if Kuv is None else root.whiten(Kuv)
    linear, precision, _ = _whitened_sites(root, Lu, lambda1, Lambda2)
    return root.L, *natural_mean_and_root(linear, precision)


@partial(as_one_program, static_argnums=6)
def _evaluate(
    lambda1: Array,
    Lambda2: Array,
    Kuu: Array,
    Kuf: Array,
    kff: Array,
    Kuv: Array | None,
    blocks: tuple[int, ...] | None,
) -> _Parts:
    root = root_of(Kuu, blocks)
    A, Lu = root.whiten(Kuf), None if Kuv is None else root.whiten(Kuv)
    linear, precision, moving = _whitened_sites(root, Lu, lambda1, Lambda2)
    q = whitened_moments(linear, precision, A, kff)
    return _Parts(Tied(q.moments, root, linear, precision), q, Lu, moving)


def _tied_jvp(blocks: tuple[int, ...] | None, primals: tuple, tangents: tuple) -> tuple[Tied, Tied]:
    lambda1, Lambda2, Kuu, Kuf, kff, Kuv = primals
    dlambda1, dLambda2, dKuu, dKuf, dkff, dKuv = given_tangents(tangents)
    value, q, Lu, moving = _evaluate(lambda1, Lambda2, Kuu, Kuf, kff, Kuv, blocks)
    c, root, A = curvature(q), value.root, roots_of(q.moments).A
    explained = q.explained[..., None, :]
    dmean: Any = 0.0
    dvariance: Any = 0.0
    dkl: Any = 0.0
    dA = None

    # At fixed L: dλ̃ = d, dΛ̃ = D + Dᵀ.
    d, D = jnp.zeros_like(q.m), None
    if dlambda1 is not None or dLambda2 is not None:
        dlambda1 = jnp.zeros_like(lambda1) if dlambda1 is None else dlambda1
        half = jnp.zeros_like(Lambda2) if dLambda2 is None else 0.25 * mirrored(dLambda2)
        d, D, _ = _whitened_sites(root, Lu, dlambda1, half)
    if dKuv is not None:
        dLu = root.whiten_tangent(dKuv)
        d = d + matvec(dLu, lambda1)
        turned = matmul(dLu, cast(Array, moving).mT)
        D = turned if D is None else D + turned
    if D is not None:
        dmean, dvariance, dkl = by_sites(q, c, d, D)
    dLambda2 = None if D is None else mirrored(D)
    if dKuf is not None:
        dA = root.whiten_tangent(dKuf)
        dmean = dmean + matvec_transposed(dA, q.m)
        dvariance = dvariance + 2.0 * jnp.sum((c.U - jnp.where(explained, A, 0.0)) * dA, axis=-2)
    if dkff is not None:
        dvariance = dvariance + jnp.where(q.explained, dkff, 0.0)

    droot = (None,) * len(jax.tree.leaves(root))
    if dKuu is not None:
        F = root.whiten_half(dKuu)
        G, E = mirrored(F), A - c.U
        # R² = I − 2P⁻¹ + P⁻² = I − P⁻¹ − Q
        R_squared = jnp.eye(A.shape[-2], dtype=A.dtype) - c.P_inverse - c.Q
        Gm = matvec(G, q.m)
        drift = jnp.sum(R_squared * F, axis=(-2, -1)) + jnp.sum((c.p - 0.5 * q.m) * Gm, axis=-1)
        # One product for both terms of the variance; where rounding made k_ii − |A_i|² negative, A_iᵀG A_i drops out.
        if Lu is None:
            turn = F.mT
            dmean, dkl = dmean - matvec_transposed(E, Gm), dkl + drift
            left, right = jnp.where(explained, E, c.U), jnp.where(explained, E, c.U - 2.0 * A)
        else:
            turn = -F
            dmean, dkl = dmean - matvec_transposed(c.U, Gm), dkl - drift
            left, right = jnp.where(explained, E, -c.U), jnp.where(explained, A + c.U, c.U)
        dvariance = dvariance + jnp.sum(left * root.product(matmul, G, right), axis=-2)
        # The rest is for the roots and the whitened sites, which training does not differentiate.
        d = d + matvec(turn, value.lambda1)
        both = mirrored(matmul(turn, value.Lambda2))
        dLambda2 = both if dLambda2 is None else dLambda2 + both
        dA = -matmul(F, A) if dA is None else dA - matmul(F, A)
        droot = (matmul(root.L, F),)
        if root.inverse is not None and root.inverse_transposed is not None:
            droot += -matmul(F, root.inverse), -matmul(root.inverse_transposed, F.mT)
    derivatives = [dmean, dvariance, dkl, dA, by_posterior_root(q, dA, dLambda2), *droot, d, dLambda2]
    # In the order of the leaves of `Tied`, which has no inverses in float32.
    return value, tangents_like(value, derivatives)


tied.defjvp(_tied_jvp, symbolic_zeros=True)


def shared_covariance(
    inducing: AbstractInducing, reference: AbstractInducing, kernel: Callable, jitter: float
) -> Array:
    """Cov(u, u') for inducing variables that moved from u' to u, the jitter's noise moving along, (..., M, M)."""
    reference = jax.lax.stop_gradient(reference)
    K = inducing.Kuv(kernel, reference)
    scale = jnp.mean(reference.Kuu_diagonal(kernel), axis=-1)[..., None, None]
    return K + jitter * scale * jnp.eye(K.shape[-1], dtype=K.dtype)
