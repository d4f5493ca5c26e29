"""Which rows each step takes, and how they are gathered from host memory or files.

The rows of step s are a pure function of (key, s): epoch s // (N // B) has a permutation of its own, computed from the
key and the number of the epoch. So a run can go on from any step.
"""

import dataclasses
from typing import Any

import jax
from jax import Array
from jax.core import Tracer
import numpy as np

from numpyro_sgp._internal.checks import positive

__all__ = ["TRACED", "Batches", "checked_batch_size", "checked_rows", "native"]

# Batches that travel to the device together. Three such chunks exist at a time: one being gathered, one waiting, one in
# use; and the first one is gathered before the first step.
_CHUNK_STEPS = 1024
_CHUNK_BYTES = 2**26
# Separates the stream of permutations from the keys that `svi.init` and `svi.update` split off the same key.
_ORDER_STREAM = 0x5EED


def checked_rows(others: Any, data: Any) -> int:
    """N, checked to be the same for all arrays."""
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((others, data))):
        raise TypeError(TRACED)
    rows = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(data):
        name = f"data{jax.tree_util.keystr(path)}"
        if isinstance(leaf, np.ma.MaskedArray):
            msg = (
                f"`{name}` is a masked array, whose mask a model does not see. Fill it, and pass the mask as an entry "
                "of its own for `numpyro.handlers.mask`."
            )
            raise TypeError(msg)
        if not isinstance(leaf, np.ndarray | Array) or leaf.ndim == 0 or leaf.dtype.kind in "OSUMm":
            msg = (
                f"Each entry of `data` must be an array of numbers with N rows, `{name}` is a {type(leaf).__name__} of "
                f"dtype {np.asarray(leaf).dtype} and shape {np.shape(leaf)}. Convert it with numpy.asarray, and bind "
                "what has no rows to the model (`functools.partial`)."
            )
            raise TypeError(msg)
        rows[name] = leaf.shape[0]
    if len(set(rows.values())) != 1 or 0 in rows.values():
        msg = (
            f"All entries of `data` must have the same number of rows, at least one, got {rows}. Pass (X, y), and bind "
            "what is not one value for each row to the model."
        )
        raise ValueError(msg)
    return next(iter(rows.values()))


def native(dtype: np.dtype) -> np.dtype:
    """A dtype in the byte order of this machine, which JAX needs."""
    return dtype if dtype.isnative else np.dtype(dtype.newbyteorder("=").str)


TRACED = (
    "`fit` runs its own compiled loop over data on the host, and was called with traced values. Call it outside "
    "`jit`, `vmap` and `grad`; inside, use `svi.update`."
)


def checked_batch_size(batch_size: Any, rows: int) -> int:
    """The number of rows of a batch, 1 … N."""
    batch_size = positive("batch_size", batch_size, "Usual values are 100 to 1000.")
    if batch_size > rows:
        msg = f"`batch_size` is {batch_size}, and `data` has {rows} rows. Use at most {rows}, for full batches."
        raise ValueError(msg)
    return batch_size


def _permutation(order: np.ndarray, epoch: int, rows: int) -> np.ndarray:
    """0 … rows − 1 in the random order of an epoch: random numbers sorted, each with its position as its last bits.

    A bit generator's stream is fixed for all versions of NumPy, that of `Generator.permutation` is not; and numbers
    that are all different have one order, whatever the algorithm that sorts them.
    """
    stream = np.random.Philox(counter=[0, 0, 0, epoch], key=order.view(np.uint64))
    position = np.uint64(2 ** max(rows - 1, 1).bit_length() - 1)
    numbers = (stream.random_raw(rows) & ~position) | np.arange(rows, dtype=np.uint64)
    numbers.sort()
    return (numbers & position).astype(np.int64)


@dataclasses.dataclass
class Batches:
    """The rows of every step, gathered on the host; used by one thread at a time.

    Args:
        data: arrays with N rows.
        dtypes: for each array, the one it has on the device.
        rows: N.
        batch_size: B.
        order: the key of the permutations, four words.
        positions: which rows of each batch are gathered here, ascending, or None for all.
        epoch: that of `permutation`.
    """

    data: Any
    dtypes: Any
    rows: int
    batch_size: int
    order: np.ndarray
    positions: np.ndarray | None = None
    epoch: int = -1
    permutation: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0, int))

    @classmethod
    def of(
        cls, rng_key: Array, data: Any, rows: int, batch_size: int, positions: np.ndarray | None = None
    ) -> "Batches":
        order = jax.random.bits(jax.random.fold_in(rng_key, _ORDER_STREAM), (4,), np.uint32)
        if isinstance(order, Tracer):
            raise TypeError(TRACED)
        data = jax.tree.map(lambda leaf: leaf if isinstance(leaf, np.ndarray) else np.asarray(leaf), data)
        # The precision is this thread's setting, so it is looked up here and not where rows are gathered.
        dtypes = jax.tree.map(lambda leaf: jax.dtypes.canonicalize_dtype(native(leaf.dtype)), data)
        return cls(data, dtypes, rows, batch_size, np.asarray(order), positions)

    @property
    def full(self) -> bool:
        return self.batch_size == self.rows

    @property
    def chunk_steps(self) -> int:
        """Steps for which batches travel to the device together; does not depend on the length of the run."""
        row_bytes = sum(
            dtype.itemsize * int(np.prod(leaf.shape[1:], dtype=int))
            for leaf, dtype in zip(jax.tree.leaves(self.data), jax.tree.leaves(self.dtypes), strict=True)
        )
        return max(1, min(_CHUNK_STEPS, _CHUNK_BYTES // max(1, row_bytes * self.batch_size)))

    def indices(self, step: int) -> np.ndarray:
        """Rows of one step."""
        epoch, position = divmod(step, self.rows // self.batch_size)
        if epoch != self.epoch:
            self.permutation = _permutation(self.order, epoch, self.rows)
            self.epoch = epoch
        return self.permutation[position * self.batch_size : (position + 1) * self.batch_size]

    def first(self) -> Any:
        """The whole batch of the first step, (B, …)."""
        whole = self if self.positions is None else dataclasses.replace(self, positions=None)
        return jax.tree.map(lambda leaf: leaf[0], whole.chunk(0, 1, 1))

    def chunk(self, first: int, count: int, length: int) -> Any:
        """Batches of the steps first … first + count − 1, (length, B, …), arbitrary beyond; one, of all rows, if B = N.

        With `positions` only those of the B rows.
        """
        here = slice(None) if self.positions is None else self.positions
        if self.full:
            return jax.tree.map(lambda leaf, dtype: np.asarray(leaf[here], dtype)[None], self.data, self.dtypes)
        size = self.batch_size if self.positions is None else len(self.positions)
        rows = np.concatenate([self.indices(step)[here] for step in range(first, first + count)])

        def gather(leaf: np.ndarray, dtype: Any) -> np.ndarray:
            batches = np.empty((length * size, *leaf.shape[1:]), dtype)
            if isinstance(leaf, np.memmap):
                ascending = np.argsort(rows)  # reads the file from front to back
                batches[ascending] = leaf[rows[ascending]]
            elif leaf.dtype == dtype:
                np.take(leaf, rows, axis=0, out=batches[: len(rows)], mode="clip")  # "raise" would copy once more
            else:
                batches[: len(rows)] = leaf[rows]
            return batches.reshape(length, size, *leaf.shape[1:])

        return jax.tree.map(gather, self.data, self.dtypes)
