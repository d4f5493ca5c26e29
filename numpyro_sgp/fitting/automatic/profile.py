"""The bound of all rows as a function of the parameters that are not sites, which are at their best: for L-BFGS.

The sites maximise the bound, so its total derivative is the partial one: no step is differentiated.
"""

from collections.abc import Callable, Collection, Sequence
import time
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np
from numpyro.infer import SVI
import optax

from numpyro_sgp.optim import NaturalGradient

__all__ = ["Profile"]

# Natural steps from one evaluation to the next change the sites little; the first ones change them much.
# Where outcomes are far from the prior, only short ones leave the sites a posterior at first.
_MOST_STEPS, _LEAST_LENGTH = 30, 1e-4
# Relative changes of the bound that are none; in float32 rounding is larger.
_SETTLED = 1e-8
# Differences of gradients want better sites: a gradient's error is of first order in that of the sites, not of second.
_SETTLED_SLOPES, _MOST_STEPS_FOR_SLOPES = 1e-11, 60
_CORRECTIONS = 20
# Unconstrained parameters move by e⁴ at most in one search, so that a step too long does not end in overflow.
_REACH = 4.0


class _Seen(NamedTuple):
    """What `_recorder` keeps as its state."""

    loss: Array
    grads: Any


def _recorder() -> optax.GradientTransformationExtraArgs:
    """A transformation that moves nothing, and keeps the loss and the gradients that it is given."""

    def init(params: Any) -> _Seen:
        return _Seen(
            jnp.zeros((), jnp.result_type(float, *jax.tree.leaves(params))), jax.tree.map(jnp.zeros_like, params)
        )

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, _Seen]:
        del params
        return jax.tree.map(jnp.zeros_like, updates), _Seen(extra["value"].astype(state.loss.dtype), updates)

    return optax.GradientTransformationExtraArgs(init, update)


def _flat(grads: dict[str, Any], names: Sequence[str]) -> np.ndarray:
    return np.concatenate([np.zeros(0), *(np.ravel(grads[name]) for name in names)])


class Profile:
    """The loss at the best sites, max over λ, and its gradient.

    Args:
        model: a model.
        guide: a guide with sites.
        loss: a loss.
        rng_key: the same at every evaluation.
        args: arguments of the model, with all rows.
        kwargs: keyword arguments of the model.
        init_params: constrained parameters to start at.
    """

    def __init__(
        self, model: Any, guide: Any, loss: Any, rng_key: Array, args: tuple, kwargs: dict, init_params: dict | None
    ) -> None:
        optim = NaturalGradient(1.0, _recorder(), in_turn=True)
        self.svi = SVI(model, guide, optim, loss)
        self.args, self.kwargs = args, kwargs

        def init(key: Array, params: dict[str, Any] | None, args: tuple) -> Any:
            return self.svi.init(key, *args, init_params=params, **kwargs)

        # A guide that has been run before has nothing to find out by values, and can start in one program.
        state = (init if init_params is None else jax.jit(init))(rng_key, init_params, args)
        self.state = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.asarray(leaf).dtype), state)  # none of weak type
        self.key = self.state.rng_key
        eps = float(jnp.finfo(self.state.optim_state[1].loss.dtype).eps)
        self.settled, self._rounding = max(_SETTLED, 20.0 * eps), 20.0 * eps
        self._is_single = eps > 1e-10  # float32, which rounds gradients by some hundredths
        self.evaluations = 0
        self.seconds = 0.0  # of the last evaluation
        # Whether one natural step leads to the best sites, as with Gaussian noise: not known yet.
        self.exact: bool | None = None

        @jax.jit
        def step(state: Any, length: Array, rng_key: Array, args: tuple) -> tuple:
            number, here = state.optim_state
            here = here._replace(
                damping=length.astype(here.damping.dtype),
                retrying=jnp.asarray(True),
                loss=jnp.full_like(here.loss, jnp.inf),
            )
            state = state._replace(optim_state=(number, here), rng_key=rng_key)
            state = self.svi.update(state, *args, **kwargs)[0]
            after = state.optim_state[1]
            return state, after.others_state, after.refused == here.refused

        self._step = step

    @property
    def unconstrained(self) -> dict[str, Any]:
        """All parameters, where they are unconstrained."""
        return self.svi.optim.get_params(self.state.optim_state)

    @property
    def params(self) -> dict[str, Any]:
        """All parameters."""
        return self.svi.get_params(self.state)

    def move(self, others: dict[str, Any]) -> None:
        """Put values in the place of unconstrained parameters."""
        number, here = self.state.optim_state
        self.state = self.state._replace(optim_state=(number, here._replace(params={**here.params, **others})))

    def evaluate(
        self,
        others: dict[str, Any],
        rng_key: Array | None = None,
        *,
        slopes: Sequence[str] = (),
        max_change: float = np.inf,
    ) -> tuple[float, dict[str, Any]]:
        """The loss and its gradients at other values of some parameters; infinite where it is not finite.

        Args:
            others: parameters and their unconstrained values.
            rng_key: a key other than that of all evaluations.
            slopes: parameters for whose gradients the sites have to be better than for the loss.
            max_change: by which a step may change these gradients at the end.
        """
        start, begun = self.state, time.perf_counter()
        self.move(others)
        most_steps = 1 if self.exact else _MOST_STEPS_FOR_SLOPES if slopes else _MOST_STEPS
        allowed = max(_SETTLED_SLOPES, self._rounding) if slopes else self.settled
        length, longest, before, seen = 1.0, 1.0, np.inf, None
        slope = change = np.zeros(1)
        for number in range(most_steps):
            key = self.key if rng_key is None else rng_key
            state, now, taken = self._step(self.state, jnp.asarray(length), key, self.args)
            self.evaluations += 1
            value = float(now.loss)
            if not (bool(taken) and np.isfinite(value)):
                if length < _LEAST_LENGTH:
                    break
                length *= 0.25
                continue
            settled = abs(value - before) <= allowed * (1.0 + abs(value))
            if self.exact is None and number == 1:
                self.exact = settled
            self.state, seen = state, now
            last = change
            slope, change = (found := _flat(now.grads, slopes)), found - slope
            if settled and (self.exact or np.max(np.abs(change), initial=0.0) <= max_change):
                break
            if value > before:  # too long a step, since without one the value stays
                longest = max(0.5 * length, 0.05)
            # Between sites of nearly the same loss, to and fro: in the middle are better ones.
            is_between = number > 1 and length == longest and np.sum(change * last) < 0.0
            length, before = 0.5 * length if is_between else min(2.0 * length, longest), value
        self.seconds = time.perf_counter() - begun
        if seen is None:
            self.state = start
            return np.inf, {}
        return float(seen.loss), seen.grads

    def value_beside(self, others: dict[str, Any]) -> float:
        """The loss at other values of some parameters, with the sites as they are."""
        state = self.state
        self.move(others)
        value = float(self._step(self.state, jnp.asarray(0.0), self.key, self.args)[1].loss)
        self.evaluations += 1
        self.state = state
        return value

    def is_deterministic(self, rng_key: Array) -> bool:
        """Whether gradients and best sites do not depend on the key; the value has a draw of log q in it.

        Raises:
            ValueError: the loss is not finite.
        """
        start, found = self.state, []
        for key in jax.random.split(rng_key):
            self.state = start
            value, grads = self.evaluate({}, key)
            if not np.isfinite(value):
                msg = (
                    "The bound is not finite where the fit starts. Look for entries of the data that are not finite, "
                    "and for priors that are far from the units of the data."
                )
                raise ValueError(msg)
            sites = {name: value for name, value in self.unconstrained.items() if name not in grads}
            found.append(np.asarray(ravel_pytree((grads, sites))[0]))
        self.state = start
        first, second = found
        allowed = (1e-2 if self._is_single else 1e-3) * np.max(np.abs(first), initial=1.0)
        return bool(np.max(np.abs(first - second), initial=0.0) <= allowed)

    def minimise(self, fixed: Collection[str], max_iterations: int, is_over: Callable[[], bool]) -> tuple[float, bool]:
        """Move all parameters but the fixed ones to the least loss by L-BFGS; returns it, and whether it has converged.

        Args:
            fixed: names of parameters.
            max_iterations: of L-BFGS.
            is_over: asked after each iteration whether to stop.
        """
        import scipy.optimize  # slow to import, and for nothing else

        names = self.others - set(fixed)
        moving = {name: value for name, value in self.unconstrained.items() if name in names}
        start, unravel = ravel_pytree(moving)
        best: list[tuple[float, Any]] = []
        worst = 0.0

        def fn(x: np.ndarray) -> tuple[float, np.ndarray]:
            nonlocal worst
            value, grads = self.evaluate(unravel(jnp.asarray(x, start.dtype)))
            if not grads:  # a wall: higher than all that was seen, so that the search comes back
                return worst + 1.0 + abs(worst), np.zeros(len(x))
            worst = max(worst, abs(value))
            if not best or value < best[0][0]:
                best[:] = [(value, self.state)]
            return value, np.asarray(ravel_pytree({name: grads[name] for name in moving})[0], float)

        def watch(_: np.ndarray) -> None:
            if is_over():
                raise StopIteration

        x = np.asarray(start, float)
        if len(x) == 0:
            return fn(x)[0], True
        found = scipy.optimize.minimize(
            fn,
            x,
            jac=True,
            method="L-BFGS-B",
            bounds=np.stack([x - _REACH, x + _REACH], axis=1),
            callback=watch,
            options={
                "maxiter": max_iterations,
                "maxfun": 2 * max_iterations + 20,
                "maxcor": _CORRECTIONS,
                "ftol": 0.1 * self.settled,
            },
        )
        if not best:
            return np.inf, False
        self.state = best[0][1]
        return best[0][0], found.status == 0

    @property
    def others(self) -> set[str]:
        """Names of the parameters that are no sites."""
        return set(self.state.optim_state[1].others_state.grads)

    def curvature(self, names: Sequence[str]) -> np.ndarray:
        """Second derivatives of the loss with respect to all entries of some parameters, by differences of gradients.

        Returns:
            The entries of the first parameter come first. It is as symmetric as rounding lets it be, and NaN where the
            loss is not finite.
        """
        step, max_change = (0.1, np.inf) if self._is_single else (1e-3, 1e-5)
        D = sum(np.size(self.unconstrained[name]) for name in names)
        _, slopes = self.on_both_sides(names, step * np.eye(D), max_change)
        return (slopes[:, 0] - slopes[:, 1]) / (2.0 * step)

    def on_both_sides(
        self, names: Sequence[str], directions: np.ndarray, max_change: float | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """The loss and its gradients, at the best sites, where some parameters are moved along directions and back.

        Args:
            names: of the parameters; the entries of the first come first.
            directions: (K, D).
            max_change: by which a step may change the gradients at the end; None where they need no better sites than
                the loss.

        Returns:
            Losses, (K, 2), infinite where they are not finite, and gradients, (K, 2, D), which are NaN there.
        """
        better = {} if max_change is None else {"slopes": names, "max_change": max_change}
        state, flat, unravel = self.state, *ravel_pytree([self.unconstrained[name] for name in names])
        losses, slopes = np.zeros((len(directions), 2)), np.full((len(directions), 2, len(flat)), np.nan)
        for index, direction in enumerate(directions):
            for side, sign in enumerate((1.0, -1.0)):
                self.state = state
                moved = unravel(flat + jnp.asarray(sign * direction, flat.dtype))
                losses[index, side], grads = self.evaluate(dict(zip(names, moved, strict=True)), **better)
                if grads:
                    slopes[index, side] = _flat(grads, names)
        self.state = state
        return losses, slopes
