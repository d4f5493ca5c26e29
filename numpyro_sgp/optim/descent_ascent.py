"""`DescentAscent`: minimisation over most parameters, maximisation over the one that plays against them."""

from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
import optax

from numpyro_sgp.optim.closure import (
    AbstractRefusingOptimizer,
    LossFn,
    Params,
    Trial,
    all_finite,
    descend,
    of_type,
    probe,
    transformation,
)
from numpyro_sgp.posteriors.weight_space.adversary import Adversary, ProbedAdversary

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


class DescentAscent(AbstractRefusingOptimizer):
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
        advice = 'Use `AutoWeightSpaceGP(model, parametrization="adversarial")` as the guide.'
        adversaries = self._own(params, Adversary, "matrix to maximise over", advice)
        states = self.descent.init(of_type(params, Adversary)[1]), self.ascent.init(adversaries)
        return jnp.asarray(0), DescentAscentState(params, *states, jnp.zeros((), jnp.int32))

    def _try(self, fn: LossFn, step: Array, state: DescentAscentState) -> Trial:
        del step
        adversaries, others = of_type(state.params, Adversary)
        zeros = jax.tree.map(jnp.zeros_like, adversaries)
        (loss, aux), (up, down) = probe(fn, lambda name, zero: ProbedAdversary(adversaries[name], zero), zeros, others)
        lower, descent_state = descend(self.descent, down, others, state.descent_state, loss)
        up = jax.tree.map(jnp.negative, up)
        upper, ascent_state = descend(self.ascent, up, adversaries, state.ascent_state, -loss)
        moved = {**lower, **{name: value.projected() for name, value in upper.items()}}
        params = {name: moved[name] for name in state.params}
        changes = {"params": params, "descent_state": descent_state, "ascent_state": ascent_state}
        return Trial(loss, aux, changes, all_finite((down, up, params)))
