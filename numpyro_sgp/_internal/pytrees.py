"""Callables as pytrees, so that a user's function can be a part of a kernel or a mean."""

from collections.abc import Callable
import dataclasses
import functools
import types
from typing import Any, TypeVar, cast

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

__all__ = ["PytreeFunction", "is_key", "numbers_of", "own_copy", "register_unchecked", "split_arrays"]

T = TypeVar("T")


def is_key(leaf: Any) -> bool:
    """Whether a leaf is an array of typed random keys."""
    return isinstance(leaf, Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def numbers_of(leaf: Any) -> np.ndarray:
    """The numbers of an array or of keys, on the host."""
    return np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)


def own_copy(tree: Any) -> Any:
    """A pytree in buffers of its own, so that a state that holds it twice can be donated."""
    return jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), tree)


def split_arrays(tree: Any) -> tuple[Callable[[list], Any], list]:
    """The numeric arrays of a pytree, and a function that puts others in their place."""
    leaves, structure = jax.tree.flatten(tree)
    is_array = [isinstance(x, Array | np.ndarray) and not is_key(x) and x.dtype.kind in "biufc" for x in leaves]

    def fixed(dynamic: list) -> Any:
        rest = iter(dynamic)
        return jax.tree.unflatten(structure, [next(rest) if a else x for x, a in zip(leaves, is_array, strict=True)])

    return fixed, [leaf for leaf, a in zip(leaves, is_array, strict=True) if a]


def register_unchecked(cls: type[T]) -> type[T]:
    """A dataclass as a pytree that transformations rebuild without `__post_init__`, whatever they put into it."""
    fields = dataclasses.fields(cast(Any, cls))
    names = {
        kind: [field.name for field in fields if bool(field.metadata.get("static")) is kind] for kind in (False, True)
    }

    def with_keys(value: Any) -> tuple[list, tuple]:
        children = [(jax.tree_util.GetAttrKey(name), getattr(value, name)) for name in names[False]]
        return children, tuple(getattr(value, name) for name in names[True])

    def flatten(value: Any) -> tuple[list, tuple]:
        children, static = with_keys(value)
        return [child for _, child in children], static

    def unflatten(static: tuple, children: Any) -> T:
        value = object.__new__(cls)
        for name, part in [*zip(names[False], children, strict=True), *zip(names[True], static, strict=True)]:
            object.__setattr__(value, name, part)
        return value

    jax.tree_util.register_pytree_with_keys(cls, with_keys, unflatten, flatten)
    return cls


class _Static:
    """The leaves of a pytree that are not arrays, compared by identity; integers, texts and bound methods by value."""

    def __init__(self, tree: Any) -> None:
        self.tree = tree

    def _key(self) -> tuple:
        # Bound methods and literals are new objects at each use; any other object may have an `==` that is not a bool.
        by_value = (int, str, bytes, types.MethodType)
        leaves, structure = jax.tree.flatten(self.tree)
        return structure, tuple((type(leaf), leaf) if isinstance(leaf, by_value) else id(leaf) for leaf in leaves)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Static) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class PytreeFunction:
    """A callable as a pytree: its arrays and Python floats are children, everything else is static.

    A plain function is one static leaf compared by identity, and may close over traced values. It goes into `jit`,
    `grad`, `vmap` and `scan`, but each new function object is compiled again, what it closes over has no gradient as a
    part of the kernel, and a traced value in it must not leave its trace with it. A callable pytree (an Equinox module,
    `jax.tree_util.Partial(fn, params)`) or a `functools.partial` shows its arrays to JAX and has none of these limits.
    """

    arrays: Any
    static: _Static = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, fn: Callable) -> "PytreeFunction":
        """`fn` as a `PytreeFunction`; one that is already is returned as it is."""
        if isinstance(fn, PytreeFunction):
            return fn
        if type(fn) is functools.partial:  # what NumPyro's helpers for networks return: the parameters are in it
            fn = jax.tree_util.Partial(fn.func, *fn.args, **fn.keywords)
        leaves, structure = jax.tree.flatten(fn)
        # The split is made once, here: leaves that a transformation replaces by placeholders must stay children.
        dynamic = [isinstance(leaf, Array | np.ndarray | np.generic | float | complex) for leaf in leaves]
        arrays = [leaf if is_dynamic else None for leaf, is_dynamic in zip(leaves, dynamic, strict=True)]
        static = [None if is_dynamic else leaf for leaf, is_dynamic in zip(leaves, dynamic, strict=True)]
        return cls(jax.tree.unflatten(structure, arrays), _Static(jax.tree.unflatten(structure, static)))

    def __call__(self, *args: Any) -> Any:
        def merge(array: Any, static: Any) -> Any:
            return static if array is None else array

        return jax.tree.map(merge, self.arrays, self.static.tree, is_leaf=lambda leaf: leaf is None)(*args)
