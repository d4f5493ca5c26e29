"""What optimizers share that evaluate the loss themselves, because they ask it for more than a gradient."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import jax
from jax import Array, lax
import jax.numpy as jnp
from numpyro.optim import _NumPyroOptim
import optax

__all__ = [
    "AbstractEvaluatingOptimizer",
    "LossFn",
    "Params",
    "StepSize",
    "all_finite",
    "checked",
    "moved_or_kept",
    "scheduled",
    "stays_finite",
    "transformation",
]

Params = dict[str, Any]
LossFn = Callable[[Params], tuple[Array, Any]]
StepSize = float | Callable[[Array], Any]  # a number, or an optax schedule of it


def scheduled(step_size: StepSize, step: Array) -> Any:
    """The step size at a step."""
    return step_size(step) if callable(step_size) else step_size


def checked(name: str, value: Any, allowed: Callable[[Any], bool], needed: str, hint: str = "") -> Any:
    """An argument whose value, that of a schedule at the first step, is allowed, or an error that says what is."""
    first = scheduled(value, jnp.asarray(0))
    try:
        right = bool(allowed(first))
    except (TypeError, ValueError):
        right = False
    if not right:
        msg = f"`{name}` must {needed}, got {first!r}. {hint}".rstrip()
        raise ValueError(msg)
    return value


def transformation(name: str, value: Any, rate: str = "1e-2") -> optax.GradientTransformationExtraArgs:
    """An argument as an optax transformation that takes the loss too, or an error that names it."""
    if not isinstance(value, optax.GradientTransformation):
        msg = f"`{name}` must be an optax transformation, got {type(value).__name__}. For example optax.adam({rate})."
        raise TypeError(msg)
    return optax.with_extra_args_support(value)


def all_finite(tree: Any) -> Array:
    """Whether every number of a pytree is finite; integers are."""
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
    return jnp.stack([jnp.isfinite(x).all() for x in leaves] or [jnp.asarray(True)]).all()


def stays_finite(there: Any, here: Any) -> Array:
    """Whether all numbers of a state that were finite still are; some transformations start with infinite ones.

    The square of a finite gradient may not be finite, and a sum of squares that is infinite ends all training.
    """
    pairs = zip(jax.tree.leaves(there), jax.tree.leaves(here), strict=True)
    inexact = [(new, old) for new, old in pairs if jnp.issubdtype(jnp.result_type(new), jnp.inexact)]
    kept = [(jnp.isfinite(new) | ~jnp.isfinite(old)).all() for new, old in inexact]
    return jnp.stack(kept or [jnp.asarray(True)]).all()


def moved_or_kept(accepted: Array, there: Any, here: Any, refused: Array) -> tuple[Any, Array]:
    """Where an accepted step leads, or where a refused one stays, and how many were refused by then."""
    # A branch copies one of the trees; a select would compile and run an operation for each leaf.
    kept = lax.cond(accepted, lambda: there, lambda: here)
    return kept, refused + jnp.where(accepted, 0, 1).astype(refused.dtype)


class AbstractEvaluatingOptimizer(_NumPyroOptim, ABC):
    """An optimizer for `SVI` whose steps come from evaluations of the loss and not from a gradient that it is given."""

    @abstractmethod
    def init(self, params: Params) -> tuple[Array, Any]:
        """The state before the first step."""

    @abstractmethod
    def get_params(self, state: tuple[Array, Any]) -> Params:
        """The current parameters."""

    @abstractmethod
    def _step(self, fn: LossFn, state: tuple[Array, Any]) -> tuple[tuple[Array, Any], tuple[Array, Any], Array]:
        """The loss and auxiliary output, the new state, and whether the step was accepted."""

    def update(self, g: Any, state: Any, value: Any = None) -> Any:
        """Refused: gradients with respect to parameters are not enough."""
        del g, state, value
        msg = (
            f"`{type(self).__name__}` evaluates the loss itself. Call `eval_and_update`, as `SVI.update` and `SVI.run` "
            "do."
        )
        raise TypeError(msg)

    def eval_and_update(
        self, fn: LossFn, state: tuple[Array, Any], forward_mode_differentiation: bool = False
    ) -> tuple[tuple[Array, Any], tuple[Array, Any]]:
        """One update: the loss and auxiliary output where it was evaluated, and the new state."""
        self._check_mode(forward_mode_differentiation)
        out, new_state, _ = self._step(fn, state)
        return out, new_state

    def eval_and_stable_update(
        self, fn: LossFn, state: tuple[Array, Any], forward_mode_differentiation: bool = False
    ) -> tuple[tuple[Array, Any], tuple[Array, Any]]:
        """As `eval_and_update`, and the loss of a refused step is NaN."""
        self._check_mode(forward_mode_differentiation)
        (loss, aux), new_state, accepted = self._step(fn, state)
        return (jnp.where(accepted, loss, jnp.nan), aux), new_state

    def _check_mode(self, forward_mode_differentiation: bool) -> None:
        if forward_mode_differentiation:
            msg = (
                f"`{type(self).__name__}` works by reverse-mode differentiation. Leave `forward_mode_differentiation` "
                "False."
            )
            raise ValueError(msg)
