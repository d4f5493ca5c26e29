"""Checkpoints: a pytree of arrays in one `.npz` file, written atomically, read without executing anything from it.

Each leaf is one array of the file. Its name is the place of the leaf in the pytree, such as
`.optim_state[1].params['f_auto_m']`. For a PRNG key the file holds `jax.random.key_data`. The structure of the pytree
is not in the file: a reader brings a pytree like the one that was written.
"""

import dataclasses
import os
from pathlib import Path
import re
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from numpyro_sgp._internal.checks import positive
from numpyro_sgp._internal.pytrees import is_key, numbers_of

__all__ = ["Checkpoint", "load_checkpoint", "named_leaves", "read_arrays", "restored", "save_checkpoint"]

_FILE_NAME = re.compile(r"step-(\d+)\.npz")
_UNFINISHED = ".unfinished"


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Where and how often `fit` writes checkpoints.

    Args:
        directory: folder for the checkpoints of one run, made if needed.
        every: steps from one to the next; one more is written at the end of the run.
        keep: how many are kept; older ones are removed.

    Raises:
        ValueError: `every` or `keep` below 1.

    Example:
        >>> import numpyro_sgp as sgp
        >>> checkpoint = sgp.Checkpoint("runs/banana", every=500)
    """

    directory: str | os.PathLike
    every: int = 1000
    keep: int = 2

    def __post_init__(self) -> None:
        for name in ("every", "keep"):
            number = positive(name, getattr(self, name), "The defaults are every=1000 and keep=2.")
            object.__setattr__(self, name, number)

    def files(self) -> dict[int, Path]:
        """The checkpoints there are, by step, oldest first."""
        matches = {path: _FILE_NAME.fullmatch(path.name) for path in Path(self.directory).glob("step-*.npz")}
        return dict(sorted((int(match[1]), path) for path, match in matches.items() if match))

    def save(self, step: int, arrays: dict[str, np.ndarray]) -> None:
        """Write the checkpoint of a step. Then remove old ones, and what killed runs left unfinished."""
        folder = Path(self.directory)
        folder.mkdir(parents=True, exist_ok=True)
        write_arrays(folder / f"step-{step:09d}.npz", arrays)
        for old in [*list(self.files().values())[: -self.keep], *folder.glob(f".step-*{_UNFINISHED}")]:
            old.unlink()


def save_checkpoint(path: str | os.PathLike, tree: Any) -> None:
    """Write a pytree of arrays to a file, which appears complete or not at all, even if the process is killed.

    Args:
        path: the file; one that is there is replaced.
        tree: a pytree of arrays, PRNG keys and numbers, such as an `SVIState`.

    Raises:
        TypeError: a leaf is not an array of numbers.
    """
    write_arrays(Path(path), named_leaves(tree))


def load_checkpoint(path: str | os.PathLike, like: Any, *, any_size: bool = False) -> Any:
    """Read a pytree that `save_checkpoint` wrote.

    Args:
        path: the file.
        like: a pytree with the structure, shapes and dtypes of the one that was written, such as a fresh
            `svi.init(...)`; its numbers are not used.
        any_size: whether the axes of an array may have other sizes than in `like`, as in a `StreamingState`, whose
            memory fills.

    Returns:
        A pytree like `like`, on the devices of its leaves.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is no checkpoint, is damaged, or holds something else than `like`: leaves with other
            places, shapes or dtypes.

    Example:
        >>> import os, tempfile, jax.numpy as jnp, numpyro_sgp as sgp
        >>> path = os.path.join(tempfile.mkdtemp(), "state.npz")
        >>> sgp.save_checkpoint(path, {"w": jnp.arange(3)})
        >>> sgp.load_checkpoint(path, like={"w": jnp.zeros(3, int)})
        {'w': Array([0, 1, 2], dtype=int32)}
    """
    return restored(path, read_arrays(path), like, any_size=any_size)


def named_leaves(tree: Any, root: str = "") -> dict[str, np.ndarray]:
    """The leaves of a pytree as NumPy arrays, by their place below `root`."""
    arrays = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        array = arrays[root + jax.tree_util.keystr(path)] = numbers_of(leaf)
        if array.dtype.kind not in "biufcV":
            msg = f"A checkpoint holds arrays of numbers, got {type(leaf).__name__} at {jax.tree_util.keystr(path)}."
            raise TypeError(msg)
    return arrays


def write_arrays(path: Path, arrays: dict[str, Any]) -> None:
    """Write arrays by name to a file, atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}{_UNFINISHED}")  # same folder, so that a rename is atomic
    try:
        with temporary.open("wb") as file:
            np.savez(file, **arrays)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    if os.name == "posix":  # elsewhere a folder cannot be opened
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def read_arrays(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """All arrays of a file by name; see `load_checkpoint` for what it raises."""
    with Path(path).open("rb") as file:
        try:
            with np.load(file, allow_pickle=False) as archive:
                _check_sizes(archive)
                return {name: archive[name] for name in archive.files}
        except Exception as error:  # NumPy and `zipfile` raise many kinds at bytes that are not as they should be
            msg = (
                f"{os.fspath(path)!r} is no checkpoint, or is damaged ({error}). Delete it, so that an older one is "
                "used, or copy it anew."
            )
            raise ValueError(msg) from error


def _check_sizes(archive: Any) -> None:
    """Raise where an entry of an archive has two sizes: nothing is compressed. Python 3.13 would notice by itself."""
    if any(entry.compress_size != entry.file_size for entry in archive.zip.infolist()):
        msg = "an entry has two sizes"
        raise ValueError(msg)


def restored(
    path: str | os.PathLike, arrays: dict[str, np.ndarray], like: Any, root: str = "", *, any_size: bool = False
) -> Any:
    """Those of the arrays in the file at `path` whose names start with `root`, in the structure of `like`."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(like)
    wanted = {root + jax.tree_util.keystr(place): leaf for place, leaf in leaves}
    stored = {name for name in arrays if name.startswith(root)}
    differences = [f"{name} is missing" for name in wanted.keys() - stored]
    differences += [f"{name} is not needed" for name in stored - wanted.keys()]
    for name in wanted.keys() & stored:
        found, needed = arrays[name], numbers_of(wanted[name])
        if found.dtype.kind == "V" and found.dtype.itemsize == needed.dtype.itemsize:
            found = arrays[name] = found.view(needed.dtype)  # one that NumPy lacks, such as bfloat16
        shapes = [len(array.shape) if any_size else array.shape for array in (found, needed)]
        if found.dtype != needed.dtype or shapes[0] != shapes[1]:
            has, needs = (f"{array.dtype}{list(array.shape)}" for array in (found, needed))
            differences.append(f"{name} is {has}, needed is {needs}")
    if differences:
        msg = (
            f"The checkpoint {os.fspath(path)!r} does not fit the state it is to be read into: "
            f"{'; '.join(sorted(differences)[:3])}. Use the model, guide, optimizer, data and precision of the run "
            "that wrote it, or another path to start anew."
        )
        raise ValueError(msg)
    return jax.tree.unflatten(structure, [_leaf(arrays[name], leaf) for name, leaf in wanted.items()])


def _leaf(stored: np.ndarray, like: Any) -> Any:
    if isinstance(like, bool | int | float | complex):
        return stored.item()
    if not isinstance(like, Array):
        return stored
    value = jnp.asarray(stored)
    if is_key(like):
        value = jax.random.wrap_key_data(value, impl=jax.random.key_impl(like))
    return jax.device_put(value, like.sharding) if like.committed else value
