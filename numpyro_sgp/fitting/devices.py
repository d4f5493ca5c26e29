"""Placement of a run's arrays: on the default device, or on a mesh whose devices share the rows of each batch.

On a mesh the state is a copy on each device, and the compiled step sums over the rows across devices. Where the mesh
has the devices of several processes, each of them runs the same program; what only one of them can know (how long a
dispatch took, what a callback answered) is that of the first process in all of them.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
import math
from typing import Any
import zlib

import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np

from numpyro_sgp._internal.pytrees import is_key

__all__ = ["AbstractPlacement", "checked_placement"]


class AbstractPlacement(ABC):
    """Where batches and the state are placed, and what the processes of a run must agree on.

    Attributes:
        positions: which of the B rows of a batch this process gathers, ascending, or None for all.
        several: whether other processes take part in the run.
        outputs: the sharding of what a dispatch returns, None where JAX is to choose.
        leads: whether this process writes checkpoints and shows progress.
    """

    positions: np.ndarray | None
    several: bool
    outputs: NamedSharding | None
    leads: bool

    @abstractmethod
    def place(self, chunk: Any) -> Any:
        """A chunk of batches as gathered, (steps, len(positions), …), on the devices as (steps, B, …)."""

    @abstractmethod
    def replicate(self, state: Any) -> Any:
        """The state on each device; that of the first process in all of them."""

    @abstractmethod
    def own(self, state: Any) -> Any:
        """A copy of the state that this process can keep and compute with on its own."""

    @abstractmethod
    def agreed(self, value: int) -> int:
        """The first process's value of a small number; called by all of them."""

    @abstractmethod
    def check_alike(self, facts: Mapping[str, Any]) -> None:
        """An error in all processes unless all of them have the same facts."""

    @abstractmethod
    def wait(self, event: str) -> None:
        """Return when all processes are here."""


class DefaultDevice(AbstractPlacement):
    """Everything on the default device of this process."""

    positions = None
    several = False
    outputs = None
    leads = True

    def place(self, chunk: Any) -> Any:
        return jax.device_put(chunk, may_alias=True)

    def replicate(self, state: Any) -> Any:
        return state

    def own(self, state: Any) -> Any:
        return _copied(state)

    def agreed(self, value: int) -> int:
        return value

    def check_alike(self, facts: Mapping[str, Any]) -> None:
        del facts

    def wait(self, event: str) -> None:
        del event


class OnMesh(AbstractPlacement):
    """The rows of each batch shared by the devices of a mesh, the state on each of them.

    Args:
        sharding: of the rows of a batch, with a mesh whose axes XLA shards automatically.
        batch_size: B, a multiple of the number of shards.
    """

    def __init__(self, sharding: NamedSharding, batch_size: int) -> None:
        mesh = sharding.mesh
        self.chunks = NamedSharding(mesh, PartitionSpec(None, *sharding.spec))
        self.outputs = self.replicated = NamedSharding(mesh, PartitionSpec())
        self.several = not sharding.is_fully_addressable
        self.leads = not self.several or jax.process_index() == 0
        slices: list[Any] = list(sharding.addressable_devices_indices_map((batch_size,)).values())
        held = {position for (rows,) in slices for position in range(*rows.indices(batch_size))}
        self.positions = None if len(held) == batch_size else np.array(sorted(held))
        self.batch_size = batch_size

    def place(self, chunk: Any) -> Any:
        return jax.tree.map(self._place, chunk)

    def _place(self, gathered: np.ndarray) -> Any:
        def shard(index: Any) -> np.ndarray:
            start, stop, _ = index[1].indices(self.batch_size)
            # What a process holds is gathered without gaps, and a shard has no gaps either.
            first = start if self.positions is None else int(np.searchsorted(self.positions, start))
            return gathered[:, first : first + stop - start]

        shape = (gathered.shape[0], self.batch_size, *gathered.shape[2:])
        return jax.make_array_from_callback(shape, self.chunks, shard)

    def replicate(self, state: Any) -> Any:
        # Not even rounding may differ between processes: each would go on with a state of its own.
        words = jax.tree.map(_words, state)
        words = multihost_utils.broadcast_one_to_all(words) if self.several else words
        return jax.tree.map(self._replicate, state, words)

    def _replicate(self, like: Any, words: Any) -> Any:
        words = np.asarray(words)
        array = jax.make_array_from_callback(words.shape, self.replicated, lambda index: words[index])
        return jax.random.wrap_key_data(array, impl=jax.random.key_impl(like)) if is_key(like) else array

    def own(self, state: Any) -> Any:
        def copy(leaf: Any) -> Any:
            array = jnp.asarray(_words(leaf))  # not committed to a device: it goes with arrays on any
            return jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf)) if is_key(leaf) else array

        return jax.tree.map(copy, state)

    def agreed(self, value: int) -> int:
        return int(multihost_utils.broadcast_one_to_all(np.int32(value))) if self.several else value

    def check_alike(self, facts: Mapping[str, Any]) -> None:
        if not self.several:
            return
        sums = np.array([zlib.crc32(repr(value).encode()) for value in facts.values()], np.uint32)
        everywhere = np.asarray(multihost_utils.process_allgather(sums))
        differ = (everywhere != everywhere[0]).any(axis=0)
        names = [name for name, one in zip(facts, differ, strict=True) if one]
        if names:
            here = "; ".join(f"{name}: {facts[name]}" for name in names)
            msg = (
                f"`fit` was called differently in the {jax.process_count()} processes. What differs has here, in "
                f"process {jax.process_index()}, {here}. Call it with the same key, options and data in all of them, "
                "and with checkpoints in a folder that all see; each process reads only its own rows of every batch."
            )
            raise ValueError(msg)

    def wait(self, event: str) -> None:
        if self.several:
            multihost_utils.sync_global_devices(event)


def checked_placement(sharding: Any, batch_size: int, rows: int) -> AbstractPlacement:
    """The argument `sharding` as a placement.

    Args:
        sharding: a `NamedSharding` of the rows of a batch, or None.
        batch_size: B.
        rows: N.
    """
    if sharding is None:
        return DefaultDevice()
    example = 'NamedSharding(Mesh(jax.devices(), ("data",)), PartitionSpec("data"))'
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        msg = f"`sharding` must be a `NamedSharding` on a mesh of devices, got {sharding!r}. Use {example}."
        raise TypeError(msg)
    if len(sharding.spec) != 1 or sharding.spec[0] is None:
        msg = (
            f"`sharding` must lay out the rows of a batch, its first axis, and nothing else; got {sharding.spec}. Use "
            f"{example}."
        )
        raise ValueError(msg)
    # An axis whose shardings are part of the types of arrays would need them in all models and guides.
    automatic = NamedSharding(Mesh(sharding.mesh.devices, sharding.mesh.axis_names), sharding.spec)
    processes = {device.process_index for device in sharding.mesh.devices.flat}
    if not sharding.is_fully_addressable and processes != set(range(jax.process_count())):
        msg = (
            f"The mesh of `sharding` has devices of the processes {sorted(processes)}, and there are "
            f"{jax.process_count()}. Make it of all `jax.devices()`, or of `jax.local_devices()` only."
        )
        raise ValueError(msg)
    axes = sharding.spec[0] if isinstance(sharding.spec[0], tuple) else (sharding.spec[0],)
    shards = math.prod(sharding.mesh.shape[axis] for axis in axes)
    if batch_size % shards:
        below, above = batch_size // shards * shards, -(-batch_size // shards) * shards
        fitting = [str(size) for size in (below, above) if 0 < size <= rows]
        hint = f"Use a multiple of {shards}, such as {' or '.join(fitting)}." if fitting else "Use fewer devices."
        msg = f"`batch_size` is {batch_size}, and `sharding` lays the rows of a batch over {shards} devices. {hint}"
        raise ValueError(msg)
    return OnMesh(automatic, batch_size)


def _words(leaf: Any) -> np.ndarray:
    """The numbers of an array or of keys, on the host."""
    return np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)


@jax.jit
def _copied(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)
