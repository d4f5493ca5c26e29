"""The compiled parts of a run: batches as arguments of the model, and many steps in one dispatch.

The number of steps in a dispatch is an argument of the compiled program and not a part of it. So one program serves the
whole run, and how the steps fall into dispatches cannot change a result.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

import jax
from jax import Array, lax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import SVI

from numpyro_sgp._internal.signatures import signature_of, with_num_data
from numpyro_sgp.fitting.batches import Batches, checked_rows, native
from numpyro_sgp.fitting.devices import Placement
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
                msg = (
                    f"`data` gives the {role} {len(positional)} positional argument(s){extra}, but its signature is "
                    f"{signature}: {error}. Pass a tuple with one entry for each argument (None to leave one out); "
                    "model and guide take the same arguments."
                )
                raise TypeError(msg) from error
        return cls(keywords)

    @staticmethod
    def positional(data: Any) -> tuple:
        return tuple(data) if type(data) in (tuple, list) else (data,)


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
        placement: Placement,
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
        checked_rows((), data)
        return float(self._loss(state, jax.tree.map(lambda leaf: np.asarray(leaf, native(leaf.dtype)), data)))

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
