"""What all optimizers share: they evaluate the loss themselves, and accept or refuse a step as a whole."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
from jax import Array, lax
import jax.numpy as jnp
from numpyro.optim import _NumPyroOptim
import optax

__all__ = [
    "AbstractClosureOptimizer",
    "AbstractRefusingOptimizer",
    "LossFn",
    "Params",
    "StepSize",
    "Trial",
    "all_finite",
    "checked",
    "descend",
    "num_refused",
    "of_type",
    "probe",
    "scheduled",
    "transformation",
]

Params = dict[str, Any]
LossFn = Callable[[Params], tuple[Array, Any]]
StepSize = float | Callable[[Array], Any]  # a number, or an optax schedule of it


def scheduled(step_size: StepSize, step: Array) -> Any:
    """The step size at a step."""
    return step_size(step) if callable(step_size) else step_size


def checked(name: str, value: Any, allowed: Callable[[Any], bool], needed: str, hint: str) -> Any:
    """An argument whose value, that of a schedule at the first step, is allowed, or an error that says what is.

    A schedule may be 0 at the first step: many warm up from there.
    """
    first = scheduled(value, jnp.asarray(0))
    first = first.item() if isinstance(first, Array) and first.ndim == 0 else first
    if first is None or isinstance(first, str) or not (allowed(first) or (callable(value) and first == 0.0)):
        msg = f"`{name}` must {needed}, got {first!r}. {hint}"
        raise ValueError(msg)
    return value


def transformation(name: str, value: Any) -> optax.GradientTransformationExtraArgs:
    """An argument as an optax transformation that takes the loss too, or an error that names it."""
    if not isinstance(value, optax.GradientTransformation):
        msg = f"`{name}` must be an optax transformation, got {type(value).__name__}. For example optax.adam(1e-2)."
        raise TypeError(msg)
    return optax.with_extra_args_support(value)


def of_type(params: Params, kind: type) -> tuple[Params, Params]:
    """The parameters of a type, and the others."""
    chosen = {name: value for name, value in params.items() if isinstance(value, kind)}
    return chosen, {name: value for name, value in params.items() if name not in chosen}


def probe(
    fn: LossFn, probed: Callable[[str, Any], Any], zeros: Params, others: Params
) -> tuple[tuple[Array, Any], tuple[Params, Params]]:
    """The loss, its auxiliary output, and its gradients with respect to the zeros and the other parameters.

    Args:
        fn: the loss of all parameters.
        probed: `probed(name, zero)` is what takes the place of a parameter.
        zeros: a zero for each parameter that is probed.
        others: the other parameters.
    """

    def loss_fn(zeros: Params, others: Params) -> tuple[Array, Any]:
        return fn({**others, **{name: probed(name, zero) for name, zero in zeros.items()}})

    return jax.value_and_grad(loss_fn, (0, 1), has_aux=True)(zeros, others)


def descend(
    transformation: Any, grads: Params, params: Params, state: Any, loss: Array, length: Array | None = None
) -> tuple[Params, Any]:
    """A step of an optax transformation, `length` times as long, and its new state."""
    updates, state = transformation.update(grads, state, params, value=loss)
    if length is not None:
        updates = jax.tree.map(lambda u: (length * u).astype(u.dtype), updates)
    return cast(Params, optax.apply_updates(params, updates)), state


def all_finite(tree: Any) -> Array:
    """Whether every number of a pytree is finite; integers are."""
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
    return jnp.stack([jnp.isfinite(x).all() for x in leaves] or [jnp.asarray(True)]).all()


def _stays_finite(there: Any, here: Any) -> Array:
    """Whether all numbers that were finite still are; some transformations start with infinite ones.

    The square of a finite gradient may not be finite, and a sum of squares that is infinite ends all training.
    """
    pairs = zip(jax.tree.leaves(there), jax.tree.leaves(here), strict=True)
    inexact = [(new, old) for new, old in pairs if jnp.issubdtype(jnp.result_type(new), jnp.inexact)]
    kept = [(jnp.isfinite(new) | ~jnp.isfinite(old)).all() for new, old in inexact]
    return jnp.stack(kept or [jnp.asarray(True)]).all()


def num_refused(state: Any) -> Array:
    """How many steps an optimizer of this package has refused.

    Args:
        state: an `SVIState`, or the optimizer state in it.

    Raises:
        TypeError: the optimizer refuses no steps.
    """
    optim_state = getattr(state, "optim_state", state)
    for candidate in (optim_state, *optim_state):
        refused = getattr(candidate, "refused", None)
        if refused is not None:
            return refused
    msg = "`state` must come from an optimizer such as `NaturalGradient`. Pass `result.state` of `SVI.run`."
    raise TypeError(msg)


class AbstractClosureOptimizer(_NumPyroOptim, ABC):
    """An optimizer for `SVI` that evaluates the loss itself, because it asks for more than a gradient."""

    @abstractmethod
    def _update(self, fn: LossFn, state: Any, *, stable: bool) -> tuple[tuple[Array, Any], Any]:
        """The loss and auxiliary output, and the new state; the loss of a refused step is NaN where `stable`."""

    def eval_and_update(
        self, fn: LossFn, state: Any, forward_mode_differentiation: bool = False
    ) -> tuple[tuple[Array, Any], Any]:
        """One update: the loss and auxiliary output where it was evaluated, and the new state."""
        del forward_mode_differentiation  # the same gradient, by reverse mode
        return self._update(fn, state, stable=False)

    def eval_and_stable_update(
        self, fn: LossFn, state: Any, forward_mode_differentiation: bool = False
    ) -> tuple[tuple[Array, Any], Any]:
        """As `eval_and_update`, and the loss of a refused step is NaN."""
        del forward_mode_differentiation
        return self._update(fn, state, stable=True)

    def _own(self, params: Params, kind: type, what: str, advice: str) -> Params:
        """The parameters of the type that this optimizer is for, or an error where there are none."""
        found, _ = of_type(params, kind)
        if not found:
            msg = f"`{type(self).__name__}` found no {what} among the parameters {sorted(params)}. {advice}"
            raise ValueError(msg)
        return found


class Trial(NamedTuple):
    """A step before it is accepted or refused.

    Attributes:
        loss: where it was evaluated.
        aux: auxiliary output of the loss.
        changes: fields of the state as the step would leave them.
        finite: whether the rest of what the step computed is finite.
        rest: what else the optimizer needs to finish the step.
    """

    loss: Array
    aux: Any
    changes: dict[str, Any]
    finite: Array | bool = True
    rest: Any = None


class AbstractRefusingOptimizer(AbstractClosureOptimizer):
    """An optimizer that refuses a step whose loss or new state is not finite, and counts it.

    Its state is the number of steps and a named tuple with the fields `params` and `refused`, and others of its own.
    A new optimizer says in `_try` where a step leads. `_keep` may be overridden where a refused step does more than
    leave the state as it was.
    """

    @abstractmethod
    def _try(self, fn: LossFn, step: Array, state: Any) -> Trial:
        """Evaluate the loss, and say where a step leads."""

    def _keep(self, trial: Trial, accepted: Array, state: Any) -> Any:
        """The state after a step, but for the number of those refused."""
        here = {name: getattr(state, name) for name in trial.changes}
        # A branch copies one of the trees; a select would compile and run an operation for each leaf.
        return state._replace(**lax.cond(accepted, lambda: trial.changes, lambda: here))

    def get_params(self, state: tuple[Array, Any]) -> Params:
        """The current parameters."""
        return state[1].params

    def _update(
        self, fn: LossFn, state: tuple[Array, Any], *, stable: bool
    ) -> tuple[tuple[Array, Any], tuple[Array, Any]]:
        step, here = state
        trial = self._try(fn, step, here)
        before = {name: getattr(here, name) for name in trial.changes}
        accepted = jnp.isfinite(trial.loss) & trial.finite & _stays_finite(trial.changes, before)
        refused = here.refused + jnp.where(accepted, 0, 1).astype(here.refused.dtype)
        new = self._keep(trial, accepted, here)._replace(refused=refused)
        loss = jnp.where(accepted, trial.loss, jnp.nan) if stable else trial.loss
        return (loss, trial.aux), (step + 1, new)
