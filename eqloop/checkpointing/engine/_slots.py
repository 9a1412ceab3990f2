"""Slots: room for stored carries, on the device or in the memory of its host."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from ..._compat import is_widened
from ..._lists import Arrays
from ._loop import element, stack_of, stack_type, store

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def slot_type(aval: Any, rows: int, on_host: bool) -> Any:
    """The type of so many slots for a leaf of the carry."""
    stacked = stack_type(aval.update(dtype=_stored_as(aval.dtype, on_host)), rows)
    return stacked.update(memory_space=HOST) if on_host else stacked


def new_slots(carry: Arrays, rows: int) -> list[Any]:
    """Slots on the device, with a carry in each of them."""
    return [stack_of(c, rows) for c in packed(carry)]


def packed(carry: Arrays, on_host: bool = False) -> list[Any]:
    """A carry as slots hold it."""
    return [_as(leaf, _stored_as(jax.typeof(leaf).dtype, on_host)) for leaf in carry]


def _stored_as(dtype: Any, on_host: bool) -> Any:
    """What slots hold: bits, of what XLA would widen there, and on the host.

    Bits have no cotangents. JAX makes the zero cotangents of slots that a loop around
    hands on, and makes them on the device, which those of slots on the host are not.
    """
    # Of a complex number JAX cannot take the bits.
    as_bits = is_widened(dtype) or (on_host and jnp.issubdtype(dtype, jnp.floating))
    return jnp.dtype(f"uint{8 * dtype.itemsize}") if as_bits else dtype


def _as(leaf: Any, dtype: Any) -> Any:
    # A literal of the program is a leaf, too, and has no dtype of its own.
    is_so = jax.typeof(leaf).dtype == dtype
    return leaf if is_so else lax.bitcast_convert_type(leaf, dtype)


def write(slots: Arrays, carry: Arrays, row: Any) -> list[Any]:
    """The slots with a carry in a row, sent to the host if that is where they are."""

    def write_leaf(slot: Any, leaf: Any) -> Any:
        leaf = _as(leaf, slot.dtype)
        if not _is_on_host(slot):
            return store(slot, leaf, row)
        return _store_at(0)(slot, jax.device_put(leaf, HOST), row)

    return list(map(write_leaf, slots, carry))


def read(slots: Arrays, row: Any, types: Arrays) -> list[Any]:
    """The carry in a row, on the device, given the types of its leaves."""

    def read_leaf(slot: Any, aval: Any) -> Any:
        if not _is_on_host(slot):
            return _as(element(slot, row), aval.dtype)
        leaf = jax.device_put(_element_at(0)(slot, row), DEVICE)
        return _as(leaf, aval.dtype)

    return list(map(read_leaf, slots, types))


def _is_on_host(x: Any) -> bool:
    return jax.typeof(x).memory_space == HOST


# JAX makes gathers and scatters of slices under `vmap`, whose indices would have to be
# on the host as well. The rows are the same for the whole batch, so slices will do.


@functools.cache
def _element_at(axis: int) -> Callable[..., Any]:
    @custom_vmap
    def at(slot: Any, row: Any) -> Any:
        return element(slot, row, axis)

    @at.def_vmap
    def batched(size: int, is_batched: Any, slot: Any, row: Any) -> Any:
        del size
        return _element_at(axis + 1)(slot, row), is_batched[0]

    return at


@functools.cache
def _store_at(axis: int) -> Callable[..., Any]:
    @custom_vmap
    def at(slot: Any, leaf: Any, row: Any) -> Any:
        return store(slot, leaf, row, axis)

    @at.def_vmap
    def batched(size: int, is_batched: Any, slot: Any, leaf: Any, row: Any) -> Any:
        repeated = lambda x: jnp.broadcast_to(x, (size, *x.shape))
        slot = slot if is_batched[0] else repeated(slot)
        leaf = leaf if is_batched[1] else repeated(leaf)
        return _store_at(axis + 1)(slot, leaf, row), True

    return at
