"""A stale posterior over weights: made of the sums over the data once in several natural steps, at a cost of O(r³).

In whitened weights v ~ N(0, I), f = Aᵀv, neither the prior nor q(v) = N(m, P⁻¹) depends on hyperparameters. So q(v) can
stay fixed for some steps, while the features are trained and sums over the data collect the next one,
q(v) = N(P⁻¹λ̃, P⁻¹) with P = I + Λ̃. A step then costs O(B r²). The bound is that of the stale q(v), whatever its age.
The sums collect a natural step from it with all rows seen in between.

The first q(v) is the prior, which says nothing about the features. A network that is trained under it for long drifts
to where the data do not bring it back from. So the first posterior is made after one step, and each lasts twice as long
as the one before, up to `refresh` steps.
"""

import dataclasses
from typing import Any

import jax
from jax import Array, lax
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

from numpyro_sgp._internal.eager import as_one_program
from numpyro_sgp._internal.probed import value_of
from numpyro_sgp.math.linalg import diagonal, triangular_inverse
from numpyro_sgp.math.products import gram_of_rows, lower_product, matvec, matvec_transposed
from numpyro_sgp.posteriors.dual.formulas import divergence_of_covariance, root_of_precision
from numpyro_sgp.posteriors.moments import Moments, Roots, given_tangents, tangents_like
from numpyro_sgp.posteriors.perturbation import Perturbation
from numpyro_sgp.posteriors.sites import AbstractSites
from numpyro_sgp.posteriors.weight_space.formulas import tempering

__all__ = ["StaleSites", "check_refresh", "stale_moments"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StaleSites(AbstractSites):
    """Sums over the data, and the posterior that was last made of them.

    Args:
        lambda1: λ̃ = Σ_i g_i A_i, (..., r), or (..., 0) where the mean is a parameter of its own.
        Lambda2: Λ̃ = Σ_i β_i A_i A_iᵀ, (..., r, r).
        m: mean of the whitened weights, with the shape of `lambda1`.
        root: lower triangular L_P⁻¹ with L_P L_Pᵀ = P, (..., r, r).
        divergence: ½ [tr P⁻¹ − r + log|P|], what the covariance adds to KL(q(v) ‖ p(v)), (...).
        age: how many natural steps were taken since.
        interval: after how many of them the posterior is made anew: 1, 2, 4, … and then `refresh`.
        refresh: the longest that a posterior is held.
    """

    lambda1: Array
    Lambda2: Array
    m: Array
    root: Array
    divergence: Array
    # Not integers: an optimizer that asks for gradients of all parameters would refuse those, and not say why.
    age: Array
    interval: Array
    refresh: int = dataclasses.field(metadata={"static": True})

    # Sums that have no posterior would be found out only when one is made of them, and be refused there each time.
    needs_floor = True

    @classmethod
    def zeros(
        cls, batch_shape: tuple[int, ...], r: int, dtype: jax.typing.DTypeLike, refresh: int, *, with_mean: bool
    ) -> "StaleSites":
        """Sites that change nothing: q is the prior."""
        # NumPy's, since for each shape of its own JAX would compile a program; in buffers of their own, to be donated.
        shape, matrix = (*batch_shape, r if with_mean else 0), (*batch_shape, r, r)
        return cls(
            lambda1=jnp.array(np.zeros(shape, dtype)),
            Lambda2=jnp.array(np.zeros(matrix, dtype)),
            m=jnp.array(np.zeros(shape, dtype)),
            root=jnp.array(np.broadcast_to(np.eye(r, dtype=dtype), matrix)),
            divergence=jnp.array(np.zeros(batch_shape, dtype)),
            age=jnp.array(np.zeros((), dtype)),
            interval=jnp.array(np.ones((), dtype)),
            refresh=refresh,
        )

    def natural_step(self, direction: Perturbation, step_size: ArrayLike, damping: ArrayLike = 1.0) -> "StaleSites":
        """The step of the sums, and where it is time one of the posterior, of length `damping`.

        The posterior that the sums have may be one at which the loss is not finite, however short their last step was:
        they have the steps before it too.
        """
        moved = super().natural_step(direction, step_size)
        assert isinstance(moved, StaleSites)
        due = self.age + 1 >= self.interval
        m, root, divergence = lax.cond(
            due,
            lambda: _posterior(moved, jnp.asarray(damping, self.root.dtype)),
            lambda: (self.m, self.root, self.divergence),
        )
        age = jnp.where(due, 0, self.age + 1).astype(self.age.dtype)
        interval = jnp.where(due, jnp.minimum(2 * self.interval, self.refresh), self.interval).astype(self.age.dtype)
        return dataclasses.replace(moved, m=m, root=root, divergence=divergence, age=age, interval=interval)


def _posterior(sites: StaleSites, length: Array) -> tuple[Array, Array, Array]:
    """m, L_P⁻¹ and ½ [tr P⁻¹ − r + log|P|], with natural parameters `length` of the way from those held to the sums'.

    The sums' are those of q(v) ∝ N(v | 0, I) exp(α (λ̃ᵀv − ½ vᵀΛ̃v)); see `tempering` for α.
    """
    identity = jnp.eye(sites.root.shape[-1], dtype=sites.root.dtype)
    alpha = tempering(jnp.sum(diagonal(sites.Lambda2), axis=-1))[..., None]
    whole = alpha * sites.lambda1, identity + alpha[..., None] * sites.Lambda2

    def between() -> tuple[Array, Array]:
        L = triangular_inverse(sites.root)
        held = gram_of_rows(L)
        lambda1 = matvec(held, sites.m) if sites.m.shape[-1] else sites.m
        return lambda1 + length * (whole[0] - lambda1), held + length * (whole[1] - held)

    lambda1, P = lax.cond(length >= 1.0, lambda: whole, between)
    L, root = root_of_precision(P)
    divergence = divergence_of_covariance(L, root)
    if not lambda1.shape[-1]:
        return lambda1, root, divergence
    return matvec_transposed(root, matvec(root, lambda1)), root, divergence


def check_refresh(value: Any, refresh: int) -> None:
    """Raise where sites are those of a guide that holds its posterior for another number of steps."""
    sites = value_of(value)
    given = sites.refresh if isinstance(sites, StaleSites) else 1
    if given != refresh:
        msg = f"The parameters are those of a guide with `refresh={given}`, and this guide has `refresh={refresh}`."
        raise ValueError(msg)


@jax.custom_jvp
def _fixed(*parts: Array) -> tuple[Array, ...]:
    """The parts of a posterior that is held, which nothing trains but the sums that it is made of."""
    return parts


def _fixed_jvp(primals: tuple, tangents: tuple) -> tuple[tuple, tuple]:
    if any(tangent is not None for tangent in given_tangents(tangents)):
        msg = (
            "A posterior that is held for several steps is made of the sums of natural steps: its parameters have no "
            "gradient, which other optimizers ask for. Use `NaturalGradient`, or leave out `refresh` of the guide."
        )
        raise TypeError(msg)
    return primals, tangents_like(primals, [None] * len(primals))


_fixed.defjvp(_fixed_jvp, symbolic_zeros=True)


@as_one_program
def stale_moments(sites: StaleSites, m: Array | None, A: Array) -> Moments:
    """m_i = A_iᵀm, v_i = |L_P⁻¹A_i|², and the divergence.

    Args:
        sites: with the posterior.
        m: mean of the whitened weights, (..., r), where it is a parameter of its own.
        A: features of independent weights with variance one, (..., r, N).

    Raises:
        TypeError: the sites are differentiated.
    """
    held, root, divergence = _fixed(sites.m, sites.root, sites.divergence)
    m = held if m is None else m
    T = lower_product(root, A)
    return Moments(
        matvec_transposed(A, m), jnp.sum(T * T, axis=-2), divergence + 0.5 * jnp.sum(m * m, axis=-1), Roots(A, T)
    )
