"""The compiled parts of a run: batches as arguments of the model, and many steps in one dispatch.

The number of steps in a dispatch is an argument of the compiled program and not a part of it. So one program serves the
whole run, and how the steps fall into dispatches cannot change a result.
"""

from collections.abc import Callable, Mapping
import dataclasses
import inspect
from typing import Any

import jax
from jax import Array, lax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import SVI

from numpyro_sgp._internal.signatures import signature_of, with_num_data
from numpyro_sgp.fitting.batches import Batches, checked_rows, native
from numpyro_sgp.fitting.devices import AbstractPlacement
from numpyro_sgp.guides.scales import Scales
from numpyro_sgp.optim import num_refused

__all__ = ["Arguments", "Program", "initial_state"]


@dataclasses.dataclass(frozen=True)
class Arguments:
    """How data become arguments of the model: positional ones, and N."""

    keywords: Mapping[str, int]

    @classmethod
    def of(cls, svi: SVI, data: Any, rows: int) -> "Arguments":
        positional = cls.positional(data)
        _check_dict(svi.model, data)
        # An entry of the data is no N, whatever its position: it is cut into batches.
        keywords = {} if "num_data" in svi.static_kwargs else with_num_data(svi.model, (), {}, rows)
        for role, fn in (("model", svi.model), ("guide", svi.guide)):
            signature = signature_of(fn)
            if signature is None:
                continue
            try:
                signature.bind(*positional, **keywords, **svi.static_kwargs)
            except TypeError as error:
                extra = " and `num_data`" if keywords else ""
                remedy = _keyword_remedy(signature) or (
                    "Pass a tuple with one entry for each argument (None to leave one out); model and guide take the "
                    "same arguments."
                )
                msg = (
                    f"`data` gives the {role} {len(positional)} positional argument(s){extra}, but its signature is "
                    f"{signature}: {error}. {remedy}"
                )
                raise TypeError(msg) from error
        return cls(keywords)

    @staticmethod
    def positional(data: Any) -> tuple:
        return tuple(data) if type(data) in (tuple, list) else (data,)

    def most_rows(self, rows: int) -> int:
        """How many of some rows the model takes at once: a plate of size N is never smaller than its batch."""
        return min([rows, *self.keywords.values()])


def _check_dict(model: Any, data: Any) -> None:
    """Raise for a dict of arguments by name, which the model would be given as its first argument."""
    signature = signature_of(model)
    if not isinstance(data, Mapping) or signature is None or not data:
        return
    names = [
        name
        for name, parameter in signature.parameters.items()
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    if names and names[0] in data and set(data) <= set(names):
        given = [name for name in names if name in data]
        msg = (
            f"`data` is a dict with the keys {given}, which are arguments of the model, {signature}; a dict is one "
            f"argument, the first. Pass a tuple: ({', '.join(f'data[{name!r}]' for name in given)})."
        )
        raise TypeError(msg)


def _keyword_remedy(signature: inspect.Signature) -> str | None:
    """How to call a function whose arguments have no position."""
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items() if name != "num_data"}
    names = [name for name, kind in kinds.items() if kind is inspect.Parameter.KEYWORD_ONLY]
    if not names or len(names) < len(kinds):
        return None
    own = ["num_data"] if "num_data" in signature.parameters else []
    takes = ", ".join([*names, *(f"{name}=None" for name in own)])
    passes = ", ".join(f"{name}={name}" for name in [*names, *own])
    return (
        "Arguments that are taken by keyword only cannot be given by position: make guide and `SVI` of the model "
        f"`lambda {takes}: model({passes})`, and pass a tuple of {names}."
    )


def initial_state(svi: SVI, rng_key: Array, init_state: Any, arguments: Arguments, batches: Batches) -> Any:
    """A copy of the state to start from; `svi.init` is run on the rows of the first step where it is needed."""
    state = init_state
    # `svi.init` also makes the transformations that `svi.get_params` needs, which a new `SVI` object lacks.
    if init_state is None or svi.constrain_fn is None:
        first = jax.tree.map(jnp.asarray, batches.first())
        fresh = svi.init(rng_key, *arguments.positional(first), **arguments.keywords)
        state = fresh if init_state is None else init_state
    return jax.tree.map(_owned, state)


def _owned(leaf: Any) -> Array:
    """A copy that may be donated, with a dtype of its own so that the first dispatch compiles for all."""
    return jnp.array(leaf, dtype=jnp.asarray(leaf).dtype, copy=True)


class Program:
    """The compiled parts of a run."""

    def __init__(
        self,
        svi: SVI,
        arguments: Arguments,
        state: Any,
        batches: Batches,
        placement: AbstractPlacement,
        stable: bool,
    ) -> None:
        self.svi = svi
        self.placement = placement
        self.arguments = arguments
        self.length = batches.chunk_steps
        method: Callable = svi.stable_update if stable else svi.update

        # Compiled as a part of `steps`; a `jit` of its own so that it is traced only once.
        @jax.jit
        def update(state: Any, batch: Any) -> tuple[Any, Array]:
            return method(state, *arguments.positional(batch), **arguments.keywords)

        one_batch = jax.tree.map(
            lambda leaf, dtype: jax.ShapeDtypeStruct((batches.batch_size, *leaf.shape[1:]), dtype),
            batches.data,
            batches.dtypes,
        )
        self.scales = Scales()
        with self.scales:
            loss_type = jax.eval_shape(update, state, one_batch)[1]
        self.loss_dtype = np.dtype(loss_type.dtype)
        self.counts_refused = _counts_refused(state)

        def steps(state: Any, chunk: Any, start: Array, stop: Array) -> tuple[Any, Array, Array]:
            def step(index: Array, carry: tuple[Any, Array]) -> tuple[Any, Array]:
                state, losses = carry
                batch = jax.tree.map(
                    # The remainder is for full batches, a chunk with one batch for every step.
                    lambda leaf: lax.dynamic_index_in_dim(leaf, index % leaf.shape[0], keepdims=False),
                    chunk,
                )
                state, loss = update(state, batch)
                return state, losses.at[index - start].set(loss)

            losses = jnp.zeros(self.length, loss_type.dtype)
            state, losses = lax.fori_loop(start, stop, step, (state, losses))
            # Not the leaf of the state itself, whose buffer is donated to the next dispatch.
            refused = num_refused(state) + 0 if self.counts_refused else jnp.zeros((), jnp.int32)
            return state, losses, refused

        self.steps = jax.jit(steps, donate_argnums=0, out_shardings=placement.outputs)
        self._loss = jax.jit(self._held_out_loss)

    def evaluate(self, state: Any, data: Any) -> float:
        """The loss at other data."""
        rows = checked_rows((), data)
        data = jax.tree.map(lambda leaf: np.asarray(leaf, native(leaf.dtype)), data)
        most = self.arguments.most_rows(rows)
        total = 0.0
        # The loss of more rows than N is the mean over parts, each of which is scaled to N.
        for start in range(0, rows, most):
            part = jax.tree.map(lambda leaf, start=start: leaf[start : start + most], data)
            total += min(most, rows - start) / rows * float(self._loss(state, part))
        return total

    def _held_out_loss(self, state: Any, data: Any) -> Array:
        svi = self.svi
        params = {**svi.get_params(state), **(state.mutable_state or {})}
        return svi.loss.loss(
            jax.random.key(0),  # the same at every evaluation, so that their differences have less noise
            params,
            svi.model,
            svi.guide,
            *self.arguments.positional(data),
            **self.arguments.keywords,
            **svi.static_kwargs,
        )


def _counts_refused(state: Any) -> bool:
    try:
        num_refused(state)
    except TypeError:
        return False
    return True
