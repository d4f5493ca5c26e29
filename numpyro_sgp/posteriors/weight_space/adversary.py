"""The maximising player of a minimax objective as a parameter; its type tells an optimizer to ascend."""

import dataclasses

import jax
from jax import Array
import jax.numpy as jnp

from numpyro_sgp._internal.probed import Probed
from numpyro_sgp.math.products import mirrored

__all__ = ["Adversary", "ProbedAdversary", "adversary_of"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adversary:
    """A symmetric matrix with a Frobenius norm of at most one.

    Args:
        matrix: B, (..., r, r).
    """

    matrix: Array

    def projected(self) -> "Adversary":
        """The nearest symmetric matrix in the ball."""
        B = 0.5 * mirrored(self.matrix)
        norm = jnp.sqrt(jnp.sum(B * B, axis=(-2, -1), keepdims=True))
        return Adversary(B / jnp.maximum(1.0, norm))


@dataclasses.dataclass(frozen=True)
class ProbedAdversary(Probed):
    """What `DescentAscent` puts in the place of an adversary when it asks for the gradient with respect to it."""

    value: Adversary
    zero: Adversary


def adversary_of(parameter: Adversary | ProbedAdversary) -> Array:
    """The matrix, a constant for any optimizer but `DescentAscent`, since another one would descend."""
    if isinstance(parameter, ProbedAdversary):
        return jax.lax.stop_gradient(parameter.value.matrix) + parameter.zero.matrix
    return jax.lax.stop_gradient(parameter.matrix)
