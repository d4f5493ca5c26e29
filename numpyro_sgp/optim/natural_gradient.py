"""`NaturalGradient`: natural steps for sites, any optax transformation for the rest, in one forward pass."""

import re
from typing import Any, NamedTuple

import jax
from jax import Array, lax
import jax.numpy as jnp
import optax

from numpyro_sgp._internal.checks import at_least
from numpyro_sgp._internal.pytrees import own_copy
from numpyro_sgp.optim.closure import (
    AbstractRefusingOptimizer,
    LossFn,
    Params,
    StepSize,
    Trial,
    all_finite,
    checked,
    descend,
    of_type,
    probe,
    scheduled,
    transformation,
)
from numpyro_sgp.posteriors.perturbation import Perturbation, Perturbed
from numpyro_sgp.posteriors.sites import AbstractSites, JointSites

__all__ = ["NaturalGradient", "NaturalGradientState"]

Sites = dict[str, AbstractSites]
Carry = tuple[Sites, Params, Any, Array]  # sites, other parameters, their state, whether all losses were finite

# Refused steps halve the length of the next one, down to this fraction, which is reached after 30 refusals in a row.
_SMALLEST_DAMPING = 2.0**-30
# How many of the largest of the last changes a loss may rise by.
_FAR = 3.0


class NaturalGradientState(NamedTuple):
    """State between steps.

    Attributes:
        params: current parameters, sites included.
        others_state: state of the transformation that trains the parameters that are not sites.
        accepted: the last parameters at which the loss was finite, and the transformation's state there.
        damping: factor on the last step's length: halved by a refusal, doubled up to 1 by a success.
        retrying: whether the last step was refused, so that the next one is not to be longer.
        refused: how many steps were refused so far.
        loss: the loss at the last accepted parameters.
        change: the largest change of that from one step to the next, of which each step forgets a tenth.
    """

    params: Params
    others_state: Any
    accepted: tuple[Params, Any]
    damping: Array
    retrying: Array
    refused: Array
    loss: Array
    change: Array


class NaturalGradient(AbstractRefusingOptimizer):
    """Natural-gradient steps on sites: λ ← λ − ρ ∂loss/∂ε at ε = 0, with ε a perturbation of expectation parameters.

    For a conjugate likelihood a full-batch step with ρ = 1 is the exact optimum, whatever factor `handlers.scale`
    gives the loss: the direction is divided by that of the divergence. The other parameters are trained by
    `others`; with one E-step and one M-step, both come from the same evaluation of the loss. A step whose loss, new
    sites or parameters are not finite is refused as a whole and counted (`num_refused`): the parameters go back to
    the last ones at which the loss was finite, and the next step is half as long. So is one that raises the loss of a
    joint posterior by more than three times the largest of its last changes, those between minibatches among them.

    Args:
        step_size: ρ in (0, 1], or an optax schedule of it, which may begin at 0.
        others: optax transformation for the parameters that are not sites.
        e_steps: natural steps in each update, one after the other.
        m_steps: steps of `others` in each update, after the natural ones.
        in_turn: take the natural step of each parameter with sites at the place where the step before has led, instead
            of all at once: one evaluation of the loss for each. For the two blocks of `AutoDecoupledGP` with "solve",
            and for several GP sites under one likelihood, with ρ = 1 it needs half as many steps or fewer.
        floor: smallest precision β of a datum's site, on a minibatch of (N/B) β, in units of the loss; with several
            particles, in each of them. 0 keeps Λ₂ positive semi-definite whatever the likelihood. None leaves β as it
            comes: for a likelihood that is not log-concave the fixed point is then exactly the optimum of the bound,
            and only refusals guard the steps; not for posteriors that are held for several steps (`refresh` of
            `AutoWeightSpaceGP`), nor for those that take roots of β (`AutoTSVGP(model, None)`, `AutoVecchiaGP`).

    Raises:
        ValueError: `step_size` outside (0, 1], a negative number of steps, or none at all.
        TypeError: `others` is not an optax transformation.

    References:
        Khan and Lin (2017), "Conjugate-computation variational inference"; Adam et al. (2021), equations 18, 22 and 23,
        corrects the missing factor N/B of the last two on minibatches.

    Example:
        >>> import optax, numpyro_sgp as sgp
        >>> optim = sgp.NaturalGradient(step_size=0.5, others=optax.adam(1e-2))
    """

    def __init__(
        self,
        step_size: StepSize = 0.5,
        others: optax.GradientTransformation | None = None,
        *,
        e_steps: int = 1,
        m_steps: int = 1,
        in_turn: bool = False,
        floor: float | None = 0.0,
    ) -> None:
        hint = "1 is a full step; minibatches want 0.1 or less."
        self.step_size = checked("step_size", step_size, lambda rho: 0.0 < rho <= 1.0, "lie in (0, 1]", hint)
        self.e_steps = at_least(0, "e_steps", e_steps, "The default is 1.")
        self.m_steps = at_least(0, "m_steps", m_steps, "The default is 1.")
        if e_steps + m_steps == 0:
            msg = "`e_steps` and `m_steps` are both 0, so that an update would do nothing. The default is 1 of each."
            raise ValueError(msg)
        self.others = transformation("others", optax.adam(1e-2) if others is None else others)
        self.in_turn = in_turn
        self.floor = floor

    def init(self, params: Params) -> tuple[Array, NaturalGradientState]:
        """The state before the first step; raises where no parameter is a site, or one of them needs a floor."""
        advice = "Use `AutoTSVGP` or `AutoSVGP(natural=True)` as the guide, or give SVI a plain optax optimizer."
        sites = self._own(params, AbstractSites, "sites", advice)
        others = of_type(params, AbstractSites)[1]
        if (self.floor is None or self.floor < 0.0) and any(value.needs_floor for value in sites.values()):
            msg = (
                f"A posterior made of the sums of several steps needs a `floor` of 0 or more, got {self.floor}. Leave "
                "`floor` out, or `refresh` of the guide."
            )
            raise ValueError(msg)
        others_state = self.others.init(others)
        dtype = next(iter(sites.values())).lambda1.dtype
        state = NaturalGradientState(
            params,
            others_state,
            own_copy((params, others_state)),
            jnp.ones((), dtype),
            jnp.asarray(False),
            jnp.zeros((), jnp.int32),
            jnp.full((), jnp.inf, dtype),
            jnp.zeros((), dtype),
        )
        return jnp.asarray(0), state

    def _try(self, fn: LossFn, step: Array, state: NaturalGradientState) -> Trial:
        damping = _damping(state)
        rate = jnp.asarray(scheduled(self.step_size, step), damping.dtype) * damping
        at_once = self.e_steps == self.m_steps == 1 and not self.in_turn
        iterate = self._simultaneous if at_once else self._alternating
        sites, others = of_type(state.params, AbstractSites)
        loss, aux, finite, params, others_state = iterate(fn, sites, others, state.others_state, rate, damping)
        # In the order of the parameters, which the state keeps.
        params = {name: params[name] for name in state.params}
        finite &= all_finite(params) & ~_is_far_up(loss, state)
        return Trial(loss, aux, {"params": params, "others_state": others_state}, finite)

    def _keep(self, trial: Trial, accepted: Array, state: NaturalGradientState) -> NaturalGradientState:
        """A refused step halves the length of the next one.

        A loss that is not finite here means that the step that led here was wrong: back to where it was finite.
        """
        here = state.params, state.others_state
        there = trial.changes["params"], trial.changes["others_state"]
        usable = jnp.isfinite(trial.loss) & ~_is_far_up(trial.loss, state)
        # (A switch copies one of the trees; a select would compile and run an operation for each leaf.)
        case = jnp.where(accepted, 0, jnp.where(usable, 1, 2))
        (params, others_state), good = lax.switch(
            case, [lambda: (there, here), lambda: (here, here), lambda: (state.accepted, state.accepted)]
        )
        # The step refused is this one, or the last one where the loss here is not finite.
        damping = _damping(state)
        damping = jnp.where(accepted, damping, 0.5 * jnp.where(usable, damping, state.damping))
        damping = jnp.maximum(damping, _SMALLEST_DAMPING)
        loss = jnp.where(accepted, trial.loss, state.loss).astype(state.loss.dtype)
        change = jnp.where(accepted & jnp.isfinite(state.loss), jnp.abs(loss - state.loss), 0.0)
        change = jnp.maximum(0.9 * state.change, change)
        return NaturalGradientState(params, others_state, good, damping, ~accepted, state.refused, loss, change)

    def _simultaneous(
        self, fn: LossFn, sites: Sites, others: Params, others_state: Any, rate: Array, damping: Array
    ) -> tuple[Array, Any, Array, Params, Any]:
        """One natural step and one step of the others, both from one evaluation of the loss."""
        (loss, aux), direction, grads = self._differentiate(fn, sites, others)
        moved, others_state = descend(self.others, grads, others, others_state, loss, damping)
        return loss, aux, jnp.isfinite(loss), {**moved, **_moved(sites, direction, rate, damping)}, others_state

    def _alternating(
        self, fn: LossFn, sites: Sites, others: Params, others_state: Any, rate: Array, damping: Array
    ) -> tuple[Array, Any, Array, Params, Any]:
        """Natural steps, then steps of the others; the loss is that of the first evaluation."""

        def e_step(carry: Carry) -> tuple[tuple[Array, Any], Carry]:
            sites, others, others_state, finite = carry
            outputs = []
            for group in _posteriors(sites) if self.in_turn else [list(sites)]:
                moving = {name: sites[name] for name in group}
                given = {**others, **_unperturbed({name: sites[name] for name in sites if name not in group})}
                output, direction, _ = self._differentiate(lambda params, given=given: fn({**given, **params}), moving)
                sites = {**sites, **_moved(moving, direction, rate, damping)}
                outputs.append(output)
                finite &= jnp.isfinite(output[0])
            return outputs[0], (sites, others, others_state, finite)

        def m_step(carry: Carry) -> tuple[tuple[Array, Any], Carry]:
            sites, others, others_state, finite = carry
            given = _unperturbed(sites)
            output, grads = jax.value_and_grad(lambda others: fn({**others, **given}), has_aux=True)(others)
            others, others_state = descend(self.others, grads, others, others_state, output[0], damping)
            return output, (sites, others, others_state, finite & jnp.isfinite(output[0]))

        first, carry = None, (sites, others, others_state, jnp.asarray(True))
        for number, step in ((self.e_steps, e_step), (self.m_steps, m_step)):
            if number:
                output, carry = step(carry)
                first = first or output
            if number > 1:
                carry = lax.fori_loop(1, number, lambda _, carry, step=step: step(carry)[1], carry)
        assert first is not None
        sites, others, others_state, finite = carry
        return *first, finite, {**others, **sites}, others_state

    def _differentiate(
        self, fn: LossFn, sites: Sites, others: Params | None = None
    ) -> tuple[tuple[Array, Any], dict[str, Perturbation], Params]:
        """Loss, auxiliary output, natural direction and gradient of the other parameters, from one forward pass."""
        zeros = {name: value.perturbation(for_step=True, floor=self.floor) for name, value in sites.items()}
        output, (found, grads) = probe(fn, lambda name, zero: Perturbed(sites[name], zero), zeros, others or {})
        return output, {name: d.of_unit_scale(sites[name]) for name, d in found.items()}, grads


def _posteriors(sites: Sites) -> list[list[str]]:
    """Names of the sites by posterior: those of a joint one make no sense with others of them from before a step."""
    found: dict[str, list[str]] = {}
    for name in sites:
        found.setdefault(re.sub("_(joint_|effect_)?sites$", "", name), []).append(name)
    return list(found.values())


def _is_far_up(loss: Array, state: NaturalGradientState) -> Array:
    """Whether the last step made the loss of a joint posterior larger by far more than it has changed of late.

    A constant added to the loss does not matter, as the units of the outcomes add one. After a refusal the parameters
    are those that were accepted before: the loss there has changed as minibatches change it, and is none to refuse.
    """
    sizes = [value.lambda1.size for value in state.params.values() if isinstance(value, JointSites)]
    if not sizes:
        return jnp.asarray(False)
    return ~state.retrying & (loss > state.loss + _FAR * state.change + sum(sizes))


def _damping(state: NaturalGradientState) -> Array:
    # A step succeeds when the loss is found finite where it led, which is here; so the length doubles only now.
    return jnp.where(state.retrying, state.damping, jnp.minimum(2.0 * state.damping, 1.0))


def _moved(sites: Sites, direction: dict[str, Perturbation], rate: Array, damping: Array) -> Sites:
    return {name: value.natural_step(direction[name], rate, damping) for name, value in sites.items()}


def _unperturbed(sites: Sites) -> dict[str, Perturbed]:
    """Sites at zero perturbation: tells the guide that this is a training step, at the sites' own inputs."""
    return {name: Perturbed(value, value.perturbation(for_step=False)) for name, value in sites.items()}
