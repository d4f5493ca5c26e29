"""Checkpoints: a pytree of arrays in one file, written atomically, read without executing anything from it.

A checkpoint is a zip archive without compression, which `numpy.load` opens too. Its members are

    manifest.json       what the file holds, below
    0.npy, 1.npy, …     one array for each leaf, in NumPy's format

and the manifest is an object with the fields

    format     "numpyro_sgp checkpoint"
    version    1: grows when a reader of this version could not read the file
    packages   versions of the packages that wrote it, for people to read
    leaves     for each leaf {"path", "file", "dtype", "shape"}

`path` is where the leaf is in the pytree, as a JSON pointer (RFC 6901) of names, keys and positions, such as
"/optim_state/1/params/f_auto_m". A PRNG key has the dtype "key<threefry2x32>" with the
name of its implementation, and its member holds `jax.random.key_data` of it. An array of a dtype that NumPy lacks, such
as bfloat16, is kept as its bytes in C order. The structure of the pytree is not in the file: a reader brings a pytree
like the one that was written, and leaves are matched by path.
"""

from collections.abc import Iterator, Mapping
import dataclasses
from importlib.metadata import PackageNotFoundError, version
import io
import json
import os
from pathlib import Path
import re
import struct
from typing import Any, NoReturn
import zipfile
import zlib

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from numpyro_sgp._internal.checks import positive
from numpyro_sgp._internal.pytrees import is_key

__all__ = ["Checkpoint", "StoredCheckpoint", "load_checkpoint", "read_checkpoint", "save_checkpoint"]

_FORMAT = "numpyro_sgp checkpoint"
_VERSION = 1
_PACKAGES = ("numpyro-sgp", "numpyro", "jax", "jaxlib", "optax", "numpy")
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
        ValueError: `every` or `keep` below 1, or `directory` is a file.

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
        if Path(self.directory).is_file():
            msg = f"`directory` must be a folder, got the file {os.fspath(self.directory)!r}. Name another."
            raise ValueError(msg)

    def files(self) -> dict[int, Path]:
        """The checkpoints there are, by step, oldest first."""
        folder = Path(self.directory)
        found = {}
        for path in folder.iterdir() if folder.is_dir() else ():
            if match := _FILE_NAME.fullmatch(path.name):
                found[int(match[1])] = path
        return dict(sorted(found.items()))

    def save(self, step: int, tree: Any) -> Path:
        """Write the checkpoint of a step, then remove those that are too old, and what killed runs left unfinished."""
        folder = Path(self.directory)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"step-{step:09d}.npz"
        save_checkpoint(path, tree)
        for old in list(self.files().values())[: -self.keep]:
            old.unlink()
        for unfinished in folder.glob(f".step-*{_UNFINISHED}"):
            unfinished.unlink()
        return path


def save_checkpoint(path: str | os.PathLike, tree: Any) -> None:
    """Write a pytree of arrays to a file, which appears complete or not at all, even if the process is killed.

    Args:
        path: the file; one that is there is replaced.
        tree: a pytree of arrays, PRNG keys and numbers, such as an `SVIState`.

    Raises:
        ValueError: two leaves have the same path (a dict with the keys 1 and "1").
        TypeError: a leaf is not an array of numbers.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}{_UNFINISHED}")  # same folder, so that a rename is atomic
    try:
        with temporary.open("wb") as file:
            _write(file, tree)
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


def load_checkpoint(path: str | os.PathLike, like: Any) -> Any:
    """Read a pytree that `save_checkpoint` wrote.

    Args:
        path: the file.
        like: a pytree with the structure, shapes and dtypes of the one that was written, such as a fresh
            `svi.init(...)`; its numbers are not used.

    Returns:
        A pytree like `like`, on the devices of its leaves.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is no checkpoint, is damaged, was written by a newer version, or holds something else than
            `like`: leaves with other paths, shapes or dtypes.

    Example:
        >>> import os, tempfile, jax.numpy as jnp, numpyro_sgp as sgp
        >>> path = os.path.join(tempfile.mkdtemp(), "state.npz")
        >>> sgp.save_checkpoint(path, {"w": jnp.arange(3)})
        >>> sgp.load_checkpoint(path, like={"w": jnp.zeros(3, int)})
        {'w': Array([0, 1, 2], dtype=int32)}
    """
    return read_checkpoint(path).restored(like)


@dataclasses.dataclass(frozen=True)
class StoredCheckpoint:
    """The contents of a checkpoint file, before they are matched with a pytree.

    Args:
        path: the file.
        dtypes: dtype of each leaf by its path in the pytree, as the manifest names it.
        shapes: shapes, by path.
        arrays: what the members of the archive hold, by path.
    """

    path: Path
    dtypes: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    arrays: Mapping[str, np.ndarray]

    def restored(self, like: Any, root: str = "") -> Any:
        """The leaves below `root`, in the structure of `like`.

        Args:
            like: a pytree with the structure, shapes and dtypes that are expected.
            root: JSON pointer to where it is in the file.
        """
        leaves, structure = jax.tree_util.tree_flatten_with_path(like)
        wanted = {root + _pointer(path): leaf for path, leaf in leaves}
        stored = {path for path in self.arrays if path == root or path.startswith(root + "/")}
        if stored != set(wanted):
            self._refuse(f"it lacks {_few(set(wanted) - stored)} and has {_few(stored - set(wanted))} too much.")
        differences, dtype_only = [], True
        for path, leaf in wanted.items():
            needed = _dtype_name(leaf), tuple(np.shape(leaf))
            found = self.dtypes[path], self.shapes[path]
            if needed != found:
                differences.append(f"{path} is {found[0]} {list(found[1])}, needed is {needed[0]} {list(needed[1])}")
                dtype_only &= needed[1] == found[1] and "key<" not in needed[0] + found[0]
        if differences:
            hint = " Run with the same precision (`numpyro.enable_x64`) as then." if dtype_only else ""
            self._refuse(f"{'; '.join(differences[:3])}{'; …' if len(differences) > 3 else '.'}{hint}")
        return jax.tree.unflatten(structure, [self._leaf(path, leaf) for path, leaf in wanted.items()])

    def entries(self, root: str) -> dict[str, dict[str, Any]]:
        """The dicts of arrays right below `root`, by their path, each array as it was given to be written."""
        found: dict[str, dict[str, Any]] = {}
        for path, stored in self.arrays.items():
            above, _, name = path.rpartition("/")
            if above.startswith(root + "/"):
                dtype, value = self.dtypes[path], stored
                if dtype.startswith("key<"):
                    value = _keys(stored, dtype)
                elif str(stored.dtype) != dtype:
                    value = _from_bytes(stored, dtype, self.shapes[path])
                found.setdefault(above, {})[name.replace("~1", "/").replace("~0", "~")] = value
        return found

    def _leaf(self, path: str, like: Any) -> Any:
        stored = self.arrays[path]
        if is_key(like):
            value = _keys(stored, self.dtypes[path])
            return jax.device_put(value, like.sharding) if like.committed else value
        if isinstance(like, bool | int | float | complex):
            return stored.item()
        if stored.dtype != like.dtype:
            stored = _from_bytes(stored, like.dtype, like.shape)
        if not isinstance(like, Array):
            return stored
        return jax.device_put(stored, like.sharding) if like.committed else jnp.asarray(stored)

    def _refuse(self, difference: str) -> NoReturn:
        msg = (
            f"The checkpoint {str(self.path)!r} does not fit the state it is to be read into: {difference} Use the "
            "model, guide, optimizer and data of the run that wrote it, or another path to start anew."
        )
        raise ValueError(msg)


def read_checkpoint(path: str | os.PathLike) -> StoredCheckpoint:
    """Read and check a whole file; see `load_checkpoint` for what it raises."""
    path = Path(path)
    with path.open("rb") as file:
        start = file.read(4)
        try:
            return _read(path, file)
        except _RefusedError:
            raise
        except _UNREADABLE as error:
            if not b"PK\x03\x04".startswith(start):
                raise _RefusedError(_foreign(path)) from error
            msg = (
                f"The checkpoint {str(path)!r} is truncated or damaged ({error or type(error).__name__}). Delete it, "
                "so that an older one is used, or copy it anew."
            )
            raise ValueError(msg) from error


# What `zipfile` and NumPy raise at bytes that are not as they should be.
_UNREADABLE = (
    zipfile.BadZipFile,
    EOFError,
    KeyError,
    NotImplementedError,
    OSError,
    OverflowError,
    RuntimeError,
    ValueError,
    struct.error,
    zlib.error,
)


class _RefusedError(ValueError):
    """The file is sound and not for this reader."""


def _foreign(path: Path) -> str:
    return f"{str(path)!r} is not a checkpoint of numpyro_sgp. Give the path of a file that it wrote."


def _write(file: Any, tree: Any) -> None:
    entries: list[dict[str, Any]] = []
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            content = _npy(leaf, _pointer(path))
            name = f"{len(entries)}.npy"
            archive.writestr(zipfile.ZipInfo(name), content)  # with a constant date: equal states, equal files
            entries.append(
                {
                    "path": _pointer(path),
                    "file": name,
                    "dtype": _dtype_name(leaf),
                    "shape": list(np.shape(leaf)),
                }
            )
        paths = [entry["path"] for entry in entries]
        if twice := {path for path in paths if paths.count(path) > 1}:
            msg = f"Two leaves have the same path {_few(twice)}. Give the keys of dicts different texts."
            raise ValueError(msg)
        manifest = {"format": _FORMAT, "version": _VERSION, "packages": _package_versions(), "leaves": entries}
        archive.writestr(zipfile.ZipInfo("manifest.json"), json.dumps(manifest, indent=1))


def _read(path: Path, file: Any) -> StoredCheckpoint:
    with zipfile.ZipFile(file) as archive:
        if "manifest.json" not in archive.namelist():
            raise _RefusedError(_foreign(path))
        manifest = json.loads(archive.read("manifest.json"))  # the archive's CRC-32 shows damage, here and below
        if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
            raise _RefusedError(_foreign(path))
        if manifest["version"] > _VERSION:
            written_by = manifest.get("packages", {}).get("numpyro-sgp", "a newer version")
            msg = (
                f"The checkpoint {str(path)!r} has format {manifest['version']}, written by numpyro_sgp {written_by}; "
                f"this version reads formats up to {_VERSION}. Update numpyro_sgp."
            )
            raise _RefusedError(msg)
        dtypes, shapes, arrays = {}, {}, {}
        for entry in manifest["leaves"]:
            content = io.BytesIO(archive.read(entry["file"]))
            arrays[entry["path"]] = np.lib.format.read_array(content, allow_pickle=False)
            dtypes[entry["path"]], shapes[entry["path"]] = entry["dtype"], tuple(entry["shape"])
    return StoredCheckpoint(path, dtypes, shapes, arrays)


def _npy(leaf: Any, path: str) -> bytes:
    array = np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)
    if array.dtype.kind not in "biufcV" or array.dtype.names is not None:
        msg = f"A checkpoint holds arrays of numbers, got {type(leaf).__name__} of dtype {array.dtype} at {path!r}."
        raise TypeError(msg)
    if array.dtype.kind == "V" or array.dtype.isbuiltin == 2:
        array = np.frombuffer(array.tobytes(), np.uint8)
    file = io.BytesIO()
    np.lib.format.write_array(file, array, allow_pickle=False)
    return file.getvalue()


def _keys(stored: np.ndarray, dtype: str) -> Array:
    return jax.random.wrap_key_data(jnp.asarray(stored), impl=dtype.removeprefix("key<").removesuffix(">"))


def _from_bytes(stored: np.ndarray, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
    """An array of a dtype that NumPy lacks."""
    return np.frombuffer(stored.tobytes(), jnp.dtype(dtype)).reshape(shape)


def _dtype_name(leaf: Any) -> str:
    if is_key(leaf):
        return f"key<{jax.random.key_impl(leaf)}>"
    return str(np.asarray(leaf).dtype if isinstance(leaf, bool | int | float | complex) else leaf.dtype)


def _pointer(path: tuple) -> str:
    return "".join("/" + name.replace("~", "~0").replace("/", "~1") for name in _names(path))


def _names(path: tuple) -> Iterator[str]:
    for entry in path:
        if isinstance(entry, jax.tree_util.GetAttrKey):
            yield entry.name
        elif isinstance(entry, jax.tree_util.SequenceKey):
            yield str(entry.idx)
        else:  # DictKey, FlattenedIndexKey
            yield str(entry.key)


def _few(paths: set[str]) -> str:
    ordered = sorted(paths)
    return str(ordered[:3])[:-1] + (", …]" if len(ordered) > 3 else "]")


def _package_versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # run from a source tree that was not installed
            found[name] = "unknown"
    return found
