"""`DualAscent`: natural steps on the coefficients of a mean whose basis is the data."""

import dataclasses
from typing import Any, NamedTuple, cast

import jax
from jax import Array
import jax.numpy as jnp
import optax

from numpyro_sgp._internal.checks import positive
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
    probe,
    scheduled,
    transformation,
)
from numpyro_sgp.posteriors.decoupled.coefficients import Coefficients, ProbedCoefficients, Response
from numpyro_sgp.posteriors.sites import AbstractSites

__all__ = ["DualAscent", "DualAscentState"]


class _Vectors(NamedTuple):
    """The vectors of one set of coefficients, in the units of their parameters, and the projections that follow them.

    Attributes:
        ahead: coefficients at which the next loss is evaluated, (..., M_γ).
        velocity: (..., M_γ).
        average: of the coefficients so far, (..., M_γ).
        projected: L⁻¹K_uγ times the first two, (2, ..., M), or None.
    """

    ahead: Array
    velocity: Array
    average: Array
    projected: Array | None


class DualAscentState(NamedTuple):
    """State between steps.

    Attributes:
        params: current parameters; those of the coefficients are in `vectors`.
        others_state: state of the transformation that trains the other parameters, or None.
        vectors: of each set of coefficients.
        refused: how many steps were refused so far.
    """

    params: Params
    others_state: Any
    vectors: dict[str, _Vectors]
    refused: Array


class DualAscent(AbstractRefusingOptimizer):
    """Natural steps on the coefficients of a mean basis that is the data: a_n ← a_n + step (∂E log p(y_n)/∂m_n − a_n).

    For the rows n of a batch. Such a step needs no matrix of the basis; with a Gaussian likelihood it ends at
    a_n = (y_n − m_n)/σ². It refines the mean of a fitted posterior: pass the parameters of an `AutoSVGP` as
    `init_params` of `SVI.run`, with `AutoDecoupledGP(model, X, Z)` as the guide. Sites, hyperparameters and inducing
    inputs stay as they are, unless `others` trains those that are not sites. Momentum is Nesterov's, and predictions
    use an average of the coefficients. A step costs B rows of the kernel matrix, and what the covariance costs. One
    whose loss or coefficients are not finite is refused and counted (`num_refused`); a row of data that is not in the
    basis makes the loss NaN.

    Args:
        step_size: step in (0, 1], or an optax schedule of it; `AutoDecoupledGP.dual_step_size` finds one.
        others: optax transformation for the hyperparameters and other parameters; None leaves them as they are. With
            it, the projection on the covariance basis costs M rows of the kernel matrix more in each step.
        momentum: in [0, 1).
        averaging: share of a step in the average, or None for predictions with the last coefficients.
        refresh: after how many steps the projections on the covariance basis, which follow the coefficients at a cost
            of M·B, are computed anew at one of M·N, against rounding; 1 where hyperparameters are sampled.

    Raises:
        ValueError: a number outside its range; coefficients missing among the parameters, or not of the data (when the
            state is made).
        TypeError: `others` is not an optax transformation.

    References:
        Cheng and Boots (2017), "Variational inference for Gaussian process models with linear complexity", for the
        posterior; the step is the natural gradient in the metric of the prior, whose matrix cancels.

    Example:
        >>> import numpyro_sgp as sgp
        >>> optim = sgp.DualAscent(step_size=0.01)
    """

    def __init__(
        self,
        step_size: StepSize = 0.01,
        others: optax.GradientTransformation | None = None,
        *,
        momentum: float = 0.9,
        averaging: float | None = 0.01,
        refresh: int = 1000,
    ) -> None:
        hint = "`AutoDecoupledGP.dual_step_size` finds one."
        self.step_size = checked("step_size", step_size, lambda x: 0.0 < x <= 1.0, "lie in (0, 1]", hint)
        self.momentum = checked("momentum", momentum, lambda x: 0.0 <= x < 1.0, "lie in [0, 1)", "The default is 0.9.")
        if averaging is not None:
            checked(
                "averaging", averaging, lambda x: 0.0 < x <= 1.0, "lie in (0, 1] or be None", "The default is 0.01."
            )
        self.averaging = averaging
        self.others = None if others is None else transformation("others", others)
        self.refresh = positive("refresh", refresh, "The default is 1000.")

    def init(self, params: Params) -> tuple[Array, DualAscentState]:
        """The state before the first step; raises where no parameter is a set of coefficients of the data."""
        advice = "Use `AutoDecoupledGP` with the training inputs as `mean_inducing`."
        found = self._own(params, Coefficients, "coefficients of a mean", advice)
        vectors = {}
        for name, value in found.items():
            if value.of_data is False:
                msg = (
                    f"The mean basis of {name!r} lacks rows of the X that the guide was initialised with. Pass all "
                    "training inputs as `mean_inducing`, in the same dtype and after the same scaling."
                )
                raise ValueError(msg)
            a = value.values
            vectors[name] = _Vectors(own_copy(a), jnp.zeros_like(a), own_copy(a), _projections(value))
        others_state = None if self.others is None else self.others.init(_others(params))
        return jnp.asarray(0), DualAscentState(params, others_state, vectors, jnp.zeros((), jnp.int32))

    def get_params(self, state: tuple[Array, DualAscentState]) -> Params:
        """The current parameters, with averaged coefficients."""
        inner = state[1]
        return {**inner.params, **{name: self._at(inner, name) for name in inner.vectors}}

    def _at(self, inner: DualAscentState, name: str) -> Coefficients:
        vectors = inner.vectors[name]
        values = vectors.ahead - self.momentum * vectors.velocity if self.averaging is None else vectors.average
        return dataclasses.replace(inner.params[name], values=values)

    def _try(self, fn: LossFn, step: Array, state: DualAscentState) -> Trial:
        params = state.params
        others = {} if self.others is None else _others(params)
        # The first step computes the projections, since parameters may come from anywhere; what a refused step has
        # computed is lost, so steps that were accepted count.
        done = step - state.refused.astype(step.dtype)
        refresh = True if self.others is not None or self.refresh == 1 else done % self.refresh == 0
        rows_seen: dict[str, list[int]] = {name: [] for name in state.vectors}

        def probed(name: str, zero: Response) -> ProbedCoefficients:
            vectors = state.vectors[name]
            value = dataclasses.replace(params[name], values=vectors.ahead)
            tracked = jnp.stack([vectors.ahead, vectors.velocity])
            return ProbedCoefficients(value, zero, tracked, vectors.projected, refresh, rows_seen[name])

        zeros = {name: _zero(params[name]) for name in state.vectors}
        (loss, aux), (responses, grads) = probe(lambda some: fn({**params, **some}), probed, zeros, others)
        rate = scheduled(self.step_size, step)
        vectors = {
            name: self._moved(done, rate, vectors, responses[name], _only(rows_seen[name], name))
            for name, vectors in state.vectors.items()
        }
        changes = {"vectors": vectors}
        if self.others is not None:
            moved, others_state = descend(self.others, grads, others, state.others_state, loss)
            changes |= {"params": {**params, **moved}, "others_state": others_state}
        return Trial(loss, aux, changes, all_finite(changes["vectors"]))

    def _moved(self, done: Array, rate: Any, vectors: _Vectors, response: Response, rows: int) -> _Vectors:
        """Nesterov's step, and what it does to the projections, which are linear."""
        dtype = vectors.ahead.dtype
        # What `handlers.scale` makes of the loss is a matter of its units.
        inside = response.scale[..., None] > 0.0
        factor = jnp.where(inside, response.scale[..., None], 1.0)
        response = jax.tree.map(lambda x: x / factor, dataclasses.replace(response, scale=factor))
        rate, momentum = jnp.asarray(rate, dtype), jnp.asarray(self.momentum, dtype)
        # The loss is that of all N rows, which are those of the basis, estimated from some of them.
        share = rows / vectors.ahead.shape[-1]
        direction = -share * response.gradient - response.seen * vectors.ahead
        velocity = momentum * vectors.velocity + rate * direction
        values = vectors.ahead + rate * direction
        ahead = values + momentum * velocity
        average = values
        if self.averaging is not None:
            # A plain mean until there are enough steps.
            weight = jnp.maximum(1.0 / (done + 1), self.averaging).astype(dtype)
            average = vectors.average + weight * (values - vectors.average)
        gradient, seen, projected = response.gradient_projected, response.seen_projected, vectors.projected
        if gradient is None or seen is None or projected is None:
            return _Vectors(ahead, velocity, average, None)
        projected_ahead, projected_velocity = jnp.where(inside, cast(Array, response.projected), projected)
        direction = -share * gradient - seen
        projected_velocity = momentum * projected_velocity + rate * direction
        projected_ahead = projected_ahead + rate * direction + momentum * projected_velocity
        return _Vectors(ahead, velocity, average, jnp.stack([projected_ahead, projected_velocity]))


def _others(params: Params) -> Params:
    """The parameters that an optax transformation may train."""
    return {name: value for name, value in params.items() if not isinstance(value, AbstractSites | Coefficients)}


def _projections(coefficients: Coefficients) -> Array | None:
    if not coefficients.num_projected:
        return None
    shape = (2, *coefficients.values.shape[:-1], coefficients.num_projected)
    return jnp.zeros(shape, coefficients.values.dtype)


def _zero(coefficients: Coefficients) -> Response:
    zeros, projected = jnp.zeros_like(coefficients.values), _projections(coefficients)
    once = None if projected is None else projected[0]
    return Response(zeros, zeros, once, once, projected, jnp.zeros(zeros.shape[:-1], zeros.dtype))


def _only(rows: list[int], name: str) -> int:
    found = set(rows)
    if len(found) != 1:
        msg = f"The coefficients {name!r} met several sets of inputs in one loss. Give each set a site of its own."
        raise ValueError(msg)
    return found.pop()
