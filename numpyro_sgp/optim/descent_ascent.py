"""`DescentAscent`: minimisation over most parameters, maximisation over the one that plays against them."""

from typing import Any, NamedTuple, cast

import jax
from jax import Array
import jax.numpy as jnp
import optax

from numpyro_sgp.optim.evaluating import (
    AbstractEvaluatingOptimizer,
    LossFn,
    Params,
    all_finite,
    moved_or_kept,
    stays_finite,
    transformation,
)
from numpyro_sgp.posteriors.weight_space.adversary import Adversary, Playing

__all__ = ["DescentAscent", "DescentAscentState"]


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


class DescentAscent(AbstractEvaluatingOptimizer):
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
        self.descent = transformation("descent", descent)
        self.ascent = transformation("ascent", ascent)

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

    def _step(
        self, fn: LossFn, state: tuple[Array, DescentAscentState]
    ) -> tuple[tuple[Array, Any], tuple[Array, DescentAscentState], Array]:
        step, inner = state
        others, adversaries = _split(inner.params)

        def loss_fn(others: Params, adversaries: Params) -> tuple[Array, Any]:
            return fn({**others, **{name: Playing(value) for name, value in adversaries.items()}})

        (loss, aux), (down, up) = jax.value_and_grad(loss_fn, (0, 1), has_aux=True)(others, adversaries)
        updates, descent_state = self.descent.update(down, inner.descent_state, others, value=loss)
        others = cast(Params, optax.apply_updates(others, updates))
        finite = all_finite((loss, down, up))
        up = jax.tree.map(jnp.negative, up)
        updates, ascent_state = self.ascent.update(up, inner.ascent_state, adversaries, value=-loss)
        moved = cast(Params, optax.apply_updates(adversaries, updates))
        moved = {name: value.projected() for name, value in moved.items()}
        params = {**others, **moved}
        there = (params, descent_state, ascent_state)
        here = (inner.params, inner.descent_state, inner.ascent_state)
        accepted = finite & all_finite(params) & stays_finite(there[1:], here[1:])
        (params, descent_state, ascent_state), refused = moved_or_kept(accepted, there, here, inner.refused)
        return (loss, aux), (step + 1, DescentAscentState(params, descent_state, ascent_state, refused)), accepted


def _split(params: Params) -> tuple[Params, Params]:
    adversaries = {name: value for name, value in params.items() if isinstance(value, Adversary)}
    return {name: value for name, value in params.items() if name not in adversaries}, adversaries
