"""Inducing inputs that are added during training: arrays of fixed size, and a mask of those in use.

An inducing input that is not there yet has a variance of its own, and no covariance with anything: in the whitened
basis it is one more independent N(0, 1), whose posterior is its prior. So nothing depends on how many there are, and a
new one, put after the others, leaves q(f) as it was.

Which rows of a batch are worth adding is asked for as natural directions are, by derivatives with respect to a zero.
"""

from collections.abc import Callable, Sequence
import dataclasses

import jax
from jax import Array, lax
import jax.numpy as jnp
from jax.typing import ArrayLike

from numpyro_sgp._internal.checks import positive
from numpyro_sgp._internal.probed import Probed
from numpyro_sgp.inducing.points import AbstractInducing
from numpyro_sgp.inducing.rows import find_rows
from numpyro_sgp.math.products import matvec_transposed

__all__ = ["Candidates", "GrowingInducing", "ProbedInducing", "added", "growing", "report_candidates"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GrowingInducing(AbstractInducing):
    """Function values at inducing inputs of which some are in use: made by `growing`, extended by `GrowBasis`.

    Args:
        reference: where the inducing inputs were added, (C, D); zero where there is none yet.
        offset: what training moved them by, (C, D).
        active: 1 for those that are there, which come first, and 0 for the others, (C,).
        rows: how many rows a batch has.
    """

    reference: Array
    offset: Array
    active: Array
    rows: int = dataclasses.field(metadata={"static": True})

    @property
    def Z(self) -> Array:
        """Inducing inputs in the units of X, (C, D); those that are not there lie at zero."""
        return lax.stop_gradient(self.reference) + self.offset

    @property
    def num_active(self) -> Array:
        """How many there are."""
        return jnp.sum(self._there, dtype=jnp.int32)

    @property
    def num_inducing(self) -> int:
        """The capacity C."""
        return self.reference.shape[-2]

    @property
    def width(self) -> int:
        return self.reference.shape[-1]

    @property
    def _there(self) -> Array:
        return lax.stop_gradient(self.active) > 0

    @property
    def _inputs(self) -> Array:
        # For kernels: they look for a centre among their inputs, which empty room is not to decide.
        return jnp.where(self._there[:, None], self.Z, self.Z[:1])

    def Kuu(self, kernel: Callable) -> Array:
        there, Z = self._there, self._inputs
        K = jnp.where(there[:, None] & there, kernel(Z, Z), 0.0)
        index = jnp.arange(self.num_inducing)
        return K.at[..., index, index].set(self.Kuu_diagonal(kernel))

    def Kuu_diagonal(self, kernel: Callable) -> Array:
        variances, there = kernel(self.Z), self._there
        # Those that are not there get the mean of the others, which the jitter is relative to.
        number = jnp.sum(there, dtype=variances.dtype)
        mean = jnp.sum(jnp.where(there, variances, 0.0), axis=-1, keepdims=True) / jnp.maximum(number, 1.0)
        return jnp.where(there, variances, jnp.where(number > 0, mean, 1.0))

    def Kuf(self, kernel: Callable, X: Array) -> Array:
        return jnp.where(self._there[:, None], kernel(self._inputs, X), 0.0)

    def Kuv(self, kernel: Callable, other: AbstractInducing) -> Array:
        return jnp.where(self._there[:, None], other.Kuf(kernel, self._inputs).mT, 0.0)

    def take(self, index: Array) -> "GrowingInducing":
        reference, offset = jnp.take(self.reference, index, axis=-2), jnp.take(self.offset, index, axis=-2)
        return GrowingInducing(reference, offset, jnp.take(self.active, index), self.rows)


def growing(kernel: Callable | None, X: ArrayLike, rng_key: Array | None = None, *, capacity: int) -> GrowingInducing:
    """An empty basis with room for `capacity` inducing inputs, which the optimizer `GrowBasis` adds from minibatches.

    Args:
        kernel: not used.
        X: the inputs that the guide is initialised with, (B, D): of each later batch the first B rows may be added.
        rng_key: not used.
        capacity: C, the largest number of inducing inputs; a step costs as much as with all of them.

    Raises:
        ValueError: a capacity below 1.

    Example:
        >>> from functools import partial
        >>> import numpyro_sgp as sgp
        >>> inducing = partial(sgp.growing, capacity=256)  # for `AutoSVGP(model, inducing)`
    """
    del kernel, rng_key
    capacity = positive("capacity", capacity, "It is the largest number of inducing inputs.")
    X = jnp.asarray(X)
    zeros = jnp.zeros((capacity, X.shape[-1]), jnp.result_type(X, jnp.float32))
    return GrowingInducing(zeros, jnp.zeros_like(zeros), jnp.zeros(capacity, zeros.dtype), X.shape[-2])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Candidates:
    """What derivatives with respect to a zero of this form are, up to their factor `scale`.

    Args:
        X: inputs of the batch, (rows, D).
        score: the share of the prior variance that is unexplained at a row when it is chosen, or 0, (rows,).
        scale: 1, times whatever the loss was multiplied by.
    """

    X: Array
    score: Array
    scale: Array

    @classmethod
    def zeros(cls, basis: GrowingInducing) -> "Candidates":
        dtype = basis.reference.dtype
        return cls(jnp.zeros((basis.rows, basis.width), dtype), jnp.zeros(basis.rows, dtype), jnp.zeros((), dtype))


@dataclasses.dataclass(frozen=True)
class ProbedInducing(Probed):
    """What `GrowBasis` puts in the place of inducing inputs.

    Args:
        value: those there are.
        zero: candidates of zero, to be differentiated.
        num_new: how many to choose.
        tolerance: the smallest share of the prior variance that must be unexplained at a row.
    """

    value: GrowingInducing
    zero: Candidates
    num_new: int
    tolerance: float


def report_candidates(bases: Sequence[ProbedInducing], kernel: Callable, X: Array, root: Array) -> Array:
    """Zero, whose derivatives with respect to the candidates are the rows of the batch to be added to each basis.

    Rows are chosen one by one, each where the share of the prior variance that is unexplained, given the variables
    there are and the rows chosen before, is largest: first those for the first basis, then those for the second.

    Args:
        bases: the bases of one process, in this order.
        kernel: a kernel.
        X: inputs of the batch, (N, D).
        root: what of the prior covariance at X is explained, as rootᵀroot, (..., M, N).
    """
    kernel, X, root = lax.stop_gradient((kernel, jnp.asarray(X), root))
    N = X.shape[-2]
    room = jnp.stack([one.value.num_inducing - one.value.num_active for one in bases])

    def chosen() -> Array:
        return _choose([one.value for one in bases], room, kernel, X, root, bases[0].num_new, bases[0].tolerance)

    scores = lax.cond(jnp.any(room > 0), chosen, lambda: jnp.zeros((len(bases), N), X.dtype))
    zero = jnp.zeros((), X.dtype)
    for one, score in zip(bases, scores, strict=True):
        first = min(N, one.value.rows)
        report = one.zero
        zero += jnp.sum(report.score[:first] * score[:first]) + jnp.sum(report.X[:first] * X[:first]) + report.scale
    return zero


def _choose(
    bases: Sequence[GrowingInducing],
    room: Array,
    kernel: Callable,
    X: Array,
    root: Array,
    num_new: int,
    tolerance: float,
) -> Array:
    """The scores of the rows chosen for each basis, (number of bases, N): pivots of a Cholesky factorisation."""
    N = X.shape[-2]
    num_new = min(num_new, N)
    kff = kernel(X)
    variance = jnp.maximum(kff - jnp.sum(root * root, axis=-2), 0.0)
    factor = jnp.zeros((*variance.shape[:-1], num_new * len(bases), N), variance.dtype)
    scores = jnp.zeros((len(bases), N), variance.dtype)

    def found(basis: GrowingInducing) -> Array:
        index = find_rows(basis.Z, X).index
        return (index >= 0) & (basis.active[index] > 0)

    present = jnp.stack([found(basis) for basis in bases])

    def choose(step: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        variance, factor, scores = state
        number = step // num_new
        unexplained = jnp.mean((variance / kff).reshape(-1, N), axis=0)
        unexplained = jnp.where(present[number], -jnp.inf, unexplained)
        pivot = jnp.argmax(unexplained)
        share = unexplained[pivot]
        wanted = (step - number * num_new < room[number]) & (share > tolerance)
        explained = matvec_transposed(root, root[..., pivot]) + matvec_transposed(factor, factor[..., pivot])
        left = variance[..., pivot, None]
        row = (kernel(X[pivot][None], X)[..., 0, :] - explained) / jnp.sqrt(jnp.where(left > 0, left, 1.0))
        row = jnp.where(wanted & (left > 0), row, 0.0)
        variance = jnp.maximum(variance - row * row, 0.0)
        factor = factor.at[..., step, :].set(row)
        return variance, factor, scores.at[number, pivot].add(jnp.where(wanted, share, 0.0))

    return lax.fori_loop(0, num_new * len(bases), choose, (variance, factor, scores))[2]


def added(basis: GrowingInducing, candidates: Candidates, num_new: int) -> GrowingInducing:
    """The basis with the rows of a batch that were chosen, after those there are, as far as there is room.

    Args:
        basis: the inducing inputs.
        candidates: derivatives with respect to a zero of that form.
        num_new: at most so many.
    """
    score, index = lax.top_k(candidates.score, min(num_new, basis.rows))
    X = candidates.X[index] / candidates.scale
    # What is not a number is not larger than zero.
    wanted = (score > 0) & jnp.isfinite(X).all(axis=-1)
    slot = jnp.where(wanted, basis.num_active + jnp.cumsum(wanted) - 1, basis.num_inducing)
    return dataclasses.replace(
        basis,
        reference=basis.reference.at[slot].set(X, mode="drop"),
        active=basis.active.at[slot].set(1.0, mode="drop"),
    )
