"""Find the rows of one matrix in another."""

from typing import NamedTuple

from jax import Array, lax
import jax.numpy as jnp

__all__ = ["RowMatch", "find_rows"]


class RowMatch(NamedTuple):
    """Where rows were found.

    Attributes:
        index: the first equal row, or −1 where there is none, (N,).
        count: how many rows are equal, (N,).
    """

    index: Array
    count: Array


def _finalise(bits: Array) -> Array:
    """The finaliser of MurmurHash3: each bit of the result depends on all bits, (...), as unsigned integers."""
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)


def _hashes(rows: Array) -> tuple[Array, Array]:
    """Two independent hashes of each row, equal for equal rows in whatever matrix they stand, (N,) each."""
    rows = jnp.where(rows == 0, 0, rows)  # −0 and 0 are equal
    bits = lax.bitcast_convert_type(rows, jnp.uint32).reshape(rows.shape[0], -1)
    column = jnp.arange(bits.shape[-1], dtype=jnp.uint32)
    first, second = (
        jnp.sum(_finalise(bits ^ _finalise(2 * column + seed)), axis=-1, dtype=jnp.uint32) for seed in (0, 1)
    )
    return first, second


def find_rows(rows: Array, queries: Array) -> RowMatch:
    """Where each query is among the rows, in O((M + N) log M).

    Args:
        rows: (M, D), of 32 or 64 bits a number.
        queries: (N, D), of the same type; equal means equal to the last bit.
    """
    M = rows.shape[0]
    order = jnp.arange(M, dtype=jnp.int32)
    first, second, order = lax.sort((*_hashes(rows), order), num_keys=3)
    wanted_first, wanted_second = _hashes(queries)

    def bound(after_equal: bool) -> Array:
        """How many sorted rows come before the query, or up to the last that is equal."""

        def halve(_: int, limits: tuple[Array, Array]) -> tuple[Array, Array]:
            low, high = limits
            middle = (low + high) // 2
            at = jnp.minimum(middle, M - 1)
            tail = second[at] <= wanted_second if after_equal else second[at] < wanted_second
            before = (first[at] < wanted_first) | ((first[at] == wanted_first) & tail)
            before &= low < high
            return jnp.where(before, middle + 1, low), jnp.where(before, high, middle)

        limits = jnp.zeros(len(queries), jnp.int32), jnp.full(len(queries), M, jnp.int32)
        return lax.fori_loop(0, M.bit_length() + 1, halve, limits)[0]

    start, stop = bound(False), bound(True)
    index = order[jnp.minimum(start, M - 1)]
    # Equal hashes are no proof.
    found = (start < stop) & jnp.all(rows[index] == queries, axis=-1)
    return RowMatch(jnp.where(found, index, -1), jnp.where(found, stop - start, 0))
