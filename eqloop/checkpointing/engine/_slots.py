"""Slots: room for stored carries, on the device or in the memory of its host."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from ..._lists import Arrays
from ._loop import element, stack_type, store

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def slot_type(aval: Any, rows: int, on_host: bool) -> Any:
    """The type of so many slots for a leaf of the carry."""
    stacked = stack_type(aval, rows)
    return stacked.update(memory_space=HOST) if on_host else stacked


def write(slots: Arrays, carry: Arrays, row: Any) -> list[Any]:
    """The slots with a carry in a row, sent to the host if that is where they are."""

    def write_leaf(slot: Any, leaf: Any) -> Any:
        if not _is_on_host(slot):
            return store(slot, leaf, row)
        return _store_at(0)(slot, jax.device_put(leaf, HOST), row)

    return list(map(write_leaf, slots, carry))


def read(slots: Arrays, row: Any) -> list[Any]:
    """The carry in a row, on the device."""

    def read_leaf(slot: Any) -> Any:
        if not _is_on_host(slot):
            return element(slot, row)
        return jax.device_put(_element_at(0)(slot, row), DEVICE)

    return list(map(read_leaf, slots))


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
