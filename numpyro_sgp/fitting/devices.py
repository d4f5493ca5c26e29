"""Placement of a run's arrays: on the default device, or on a mesh whose devices share the rows of each batch.

On a mesh the state is a copy on each device, and the compiled step sums over the rows across devices. Where the mesh
has the devices of several processes, each of them runs the same program. What a callback answered in the first process
counts in all of them.
"""

from collections.abc import Mapping
import math
from typing import Any
import zlib

import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np

from numpyro_sgp._internal.pytrees import is_key, numbers_of

__all__ = ["Placement"]


class Placement:
    """Where batches and the state are placed, and what the processes of a run must agree on.

    Args:
        rows: the sharding of the rows of a batch, with a mesh whose axes XLA shards automatically; None for the default
            device.
        batch_size: B, a multiple of the number of shards.

    Attributes:
        positions: which of the B rows of a batch this process gathers, ascending, or None for all.
        several: whether other processes take part in the run.
        outputs: the sharding of what a dispatch returns, None where JAX is to choose.
        leads: whether this process writes checkpoints and shows progress.
    """

    def __init__(self, rows: NamedSharding | None, batch_size: int) -> None:
        self.batch_size = batch_size
        self.positions: np.ndarray | None = None
        self.chunks: Any = None
        self.outputs: Any = None
        self.several, self.leads = False, True
        if rows is None:
            return
        self.chunks = NamedSharding(rows.mesh, PartitionSpec(None, *rows.spec))
        self.outputs = NamedSharding(rows.mesh, PartitionSpec())
        self.several = not rows.is_fully_addressable
        self.leads = not self.several or jax.process_index() == 0
        slices: list[Any] = list(rows.addressable_devices_indices_map((batch_size,)).values())
        held = {position for (part,) in slices for position in range(*part.indices(batch_size))}
        self.positions = None if len(held) == batch_size else np.array(sorted(held))

    @classmethod
    def of(cls, sharding: Any, batch_size: int) -> "Placement":
        """The argument `sharding` of `fit`, a `NamedSharding` of the rows of a batch or None, as a placement."""
        if sharding is None:
            return cls(None, batch_size)
        example = 'NamedSharding(Mesh(jax.devices(), ("data",)), PartitionSpec("data"))'
        if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
            msg = f"`sharding` must be a `NamedSharding` on a mesh of devices, got {sharding!r}. Use {example}."
            raise TypeError(msg)
        if len(sharding.spec) != 1 or sharding.spec[0] is None:
            msg = f"`sharding` must split only the first axis of a batch, its rows, got {sharding.spec}. Use {example}."
            raise ValueError(msg)
        axes = sharding.spec[0] if isinstance(sharding.spec[0], tuple) else (sharding.spec[0],)
        shards = math.prod(sharding.mesh.shape[axis] for axis in axes)
        if batch_size % shards:
            msg = (
                f"`batch_size` is {batch_size}, and `sharding` splits the rows of a batch over {shards} devices. Use a "
                f"multiple of {shards}."
            )
            raise ValueError(msg)
        # An axis whose shardings are part of the types of arrays would need them in all models and guides.
        automatic = Mesh(sharding.mesh.devices, sharding.mesh.axis_names)
        return cls(NamedSharding(automatic, sharding.spec), batch_size)

    def place(self, chunk: Any) -> Any:
        """A chunk of batches as gathered, (steps, len(positions), …), on the devices as (steps, B, …)."""
        return jax.device_put(chunk, may_alias=True) if self.chunks is None else jax.tree.map(self._place, chunk)

    def _place(self, gathered: np.ndarray) -> Any:
        def shard(index: Any) -> np.ndarray:
            start, stop, _ = index[1].indices(self.batch_size)
            # What a process holds is gathered without gaps, and a shard has no gaps either.
            first = start if self.positions is None else int(np.searchsorted(self.positions, start))
            return gathered[:, first : first + stop - start]

        shape = (gathered.shape[0], self.batch_size, *gathered.shape[2:])
        return jax.make_array_from_callback(shape, self.chunks, shard)

    def replicate(self, state: Any) -> Any:
        """The state on each device; that of the first process in all of them."""
        if self.outputs is None:
            return state
        # Not even rounding may differ between processes: each would go on with a state of its own.
        words = jax.tree.map(numbers_of, state)
        words = multihost_utils.broadcast_one_to_all(words) if self.several else words

        def on_each(like: Any, words: Any) -> Any:
            words = np.asarray(words)
            return _as(like, jax.make_array_from_callback(words.shape, self.outputs, lambda index: words[index]))

        return jax.tree.map(on_each, state, words)

    def own(self, state: Any) -> Any:
        """A copy of the state that this process can keep and compute with on its own."""
        if self.outputs is None:
            return _copied(state)
        # Not committed to a device: it goes with arrays on any.
        return jax.tree.map(lambda leaf: _as(leaf, jnp.asarray(numbers_of(leaf))), state)

    def agreed(self, value: int) -> int:
        """The first process's value of a small number; called by all of them."""
        return int(multihost_utils.broadcast_one_to_all(np.int32(value))) if self.several else value

    def check_alike(self, facts: Mapping[str, Any]) -> None:
        """Raise in all processes unless all of them have the same facts."""
        if not self.several:
            return
        sums = np.array([zlib.crc32(repr(value).encode()) for value in facts.values()], np.uint32)
        everywhere = np.asarray(multihost_utils.process_allgather(sums))
        differ = (everywhere != everywhere[0]).any(axis=0)
        if differ.any():
            here = "; ".join(f"{name}: {facts[name]}" for name, one in zip(facts, differ, strict=True) if one)
            msg = (
                f"The {jax.process_count()} processes called `fit` differently. In process {jax.process_index()}, "
                f"{here}. Use the same key, options, data and checkpoint folder in all of them."
            )
            raise ValueError(msg)

    def wait(self, event: str) -> None:
        """Return when all processes are here."""
        if self.several:
            multihost_utils.sync_global_devices(event)


def _as(like: Any, words: Any) -> Any:
    return jax.random.wrap_key_data(words, impl=jax.random.key_impl(like)) if is_key(like) else words


@jax.jit
def _copied(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)
