"""`DescentAscent`: minimisation over most parameters, maximisation over the one that plays against them."""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
from jax import Array, lax
import jax.numpy as jnp
from numpyro.optim import _NumPyroOptim
import optax

from numpyro_sgp.adversary import Adversary, Playing

__all__ = ["DescentAscent", "DescentAscentState"]

Params = dict[str, Any]
LossFn = Callable[[Params], tuple[Array, Any]]


class DescentAscentState(NamedTuple):
    """State between steps.

    Attributes:
        params: current parameters.
        descent_state: state of the transformation that minimises.
        ascent_state: state of the transformation that maximises.
        refused: how many steps were refused so far.
    """

    params: Params
    descent_state: Any
    ascent_state: Any
    refused: Array


class DescentAscent(_NumPyroOptim):
    """Descent on all parameters but `Adversary`, ascent on those, projected on their ball; both from one gradient.

    For `MinimaxMarginalLikelihood`. A step whose loss, gradients or parameters are not finite is refused as a whole and
    counted (`num_refused`).

    Args:
        descent: optax transformation for the parameters that minimise.
        ascent: optax transformation for those that maximise, which is given minus their gradient.

    Raises:
        TypeError: `descent` or `ascent` is not an optax transformation.
        ValueError: no parameter maximises (when the state is made).

    References:
        Shoham and Avron (2025), "Unbiased stochastic optimization for Gaussian processes on finite dimensional RKHS",
        section 3.1, with one batch for both players.

    Example:
        >>> import optax, numpyro_sgp as sgp
        >>> optim = sgp.DescentAscent(optax.adam(1e-2), optax.sgd(1e-2))
    """

    def __init__(self, descent: optax.GradientTransformation, ascent: optax.GradientTransformation) -> None:
        for name, value in (("descent", descent), ("ascent", ascent)):
            if not isinstance(value, optax.GradientTransformation):
                got = type(value).__name__
                msg = f"`{name}` must be an optax transformation, got {got}. For example optax.adam(1e-2)."
                raise TypeError(msg)
        self.descent = optax.with_extra_args_support(descent)
        self.ascent = optax.with_extra_args_support(ascent)

    def init(self, params: Params) -> tuple[Array, DescentAscentState]:
        """The state before the first step; raises where no parameter maximises."""
        others, adversaries = _split(params)
        if not adversaries:
            msg = (
                f"`DescentAscent` found nothing to maximise over among the parameters {sorted(params)}. Use "
                '`AutoWeightSpaceGP(model, parametrization="adversarial")` as the guide, or a plain optax optimizer.'
            )
            raise ValueError(msg)
        states = self.descent.init(others), self.ascent.init(adversaries)
        return jnp.asarray(0), DescentAscentState(params, *states, jnp.zeros((), jnp.int32))

    def get_params(self, state: tuple[Array, DescentAscentState]) -> Params:
        """The current parameters."""
        return state[1].params

    def update(self, g: Any, state: Any, value: Any = None) -> Any:
        """Refused: which parameters maximise is told to the loss, so the loss must be evaluated here."""
        del g, state, value
        msg = "`DescentAscent` evaluates the loss itself. Call `eval_and_update`, as `SVI.update` and `SVI.run` do."
        raise TypeError(msg)

    def eval_and_update(
        self, fn: LossFn, state: tuple[Array, DescentAscentState], forward_mode_differentiation: bool = False
    ) -> tuple[tuple[Array, Any], tuple[Array, DescentAscentState]]:
        """One update: the loss and auxiliary output at the current parameters, and the new state."""
        out, new_state, _ = self._step(fn, state, forward_mode_differentiation)
        return out, new_state

    def eval_and_stable_update(
        self, fn: LossFn, state: tuple[Array, DescentAscentState], forward_mode_differentiation: bool = False
    ) -> tuple[tuple[Array, Any], tuple[Array, DescentAscentState]]:
        """As `eval_and_update`, and the loss of a refused step is NaN."""
        (loss, aux), new_state, accepted = self._step(fn, state, forward_mode_differentiation)
        return (jnp.where(accepted, loss, jnp.nan), aux), new_state

    def _step(
        self, fn: LossFn, state: tuple[Array, DescentAscentState], forward_mode_differentiation: bool
    ) -> tuple[tuple[Array, Any], tuple[Array, DescentAscentState], Array]:
        if forward_mode_differentiation:
            msg = "`DescentAscent` works by reverse-mode differentiation. Leave `forward_mode_differentiation` False."
            raise ValueError(msg)
        step, inner = state
        others, adversaries = _split(inner.params)

        def loss_fn(others: Params, adversaries: Params) -> tuple[Array, Any]:
            return fn({**others, **{name: Playing(value) for name, value in adversaries.items()}})

        (loss, aux), (down, up) = jax.value_and_grad(loss_fn, (0, 1), has_aux=True)(others, adversaries)
        updates, descent_state = self.descent.update(down, inner.descent_state, others, value=loss)
        others = cast(Params, optax.apply_updates(others, updates))
        up = jax.tree.map(jnp.negative, up)
        updates, ascent_state = self.ascent.update(up, inner.ascent_state, adversaries, value=-loss)
        moved = cast(Params, optax.apply_updates(adversaries, updates))
        moved = {name: value.projected() for name, value in moved.items()}
        params = {**others, **moved}
        leaves = [x for x in jax.tree.leaves((loss, params)) if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
        accepted = jnp.stack([jnp.isfinite(x).all() for x in leaves]).all()
        there = (params, descent_state, ascent_state)
        here = (inner.params, inner.descent_state, inner.ascent_state)
        params, descent_state, ascent_state = lax.cond(accepted, lambda: there, lambda: here)
        refused = inner.refused + jnp.where(accepted, 0, 1).astype(inner.refused.dtype)
        return (loss, aux), (step + 1, DescentAscentState(params, descent_state, ascent_state, refused)), accepted


def _split(params: Params) -> tuple[Params, Params]:
    adversaries = {name: value for name, value in params.items() if isinstance(value, Adversary)}
    return {name: value for name, value in params.items() if name not in adversaries}, adversaries
