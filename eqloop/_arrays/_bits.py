"""What tells values apart: their types and their bits.

`==` takes 1, 1.0 and True for the same, and 0.0 and -0.0, and no NaN for itself. What
is printed of an array lacks digits, and the middle of a large one. So wherever it is
decided that two values are the same, be they constants of a program or static leaves,
their `bits` are compared.
"""

import dataclasses
import hashlib
import struct
import weakref
from collections.abc import Hashable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from .._compat import MARKED_NUMBERS
from .._types import Value

# Up to so many bytes of an array are kept as they are, and of more a digest. Digests of
# arrays that are larger than `_LARGE` are computed once: those of JAX never change.
_FEW, _LARGE = 64, 2**20
_known: dict[int, tuple[weakref.ref[jax.Array], bytes]] = {}


def bits(x: Value) -> Hashable:
    """What tells a value from all others: a number, an array, or what consists of them.

    >>> bits(1.0) == bits(1), bits(0.0) == bits(-0.0), bits((2, "a")) == bits((2, "a"))
    (False, False, True)
    """
    # Whatever else there is, a function say, is told by `==`, and a tracer by identity.
    kind = type(x)
    if kind is str or x is None:
        return x
    if kind is int or kind is bool:
        return kind, x
    if kind is float or kind is complex or kind in MARKED_NUMBERS:
        return kind, str(getattr(x, "dtype", "")), _number_bytes(x)
    if isinstance(x, tuple | list):
        return (kind, *map(bits, x))
    if isinstance(x, dict):
        return (kind, *((bits(key), bits(value)) for key, value in x.items()))
    if isinstance(x, slice | range):
        return (kind, *map(bits, (x.start, x.stop, x.step)))
    if isinstance(x, set | frozenset):
        return kind, frozenset(map(bits, x))
    if isinstance(x, jax.Array | np.ndarray | np.generic):
        return _array_bits(x)
    if is_compared_by_fields(x):
        return (kind, *(bits(value) for _, value in compared_fields(x)))
    return kind, x


def structure_bits(treedef: Any) -> Hashable:
    """What tells the structure of a tree from all others, static fields included."""
    if (node := treedef.node_data()) is None:
        return treedef.num_leaves
    return (node[0], bits(node[1]), *map(structure_bits, treedef.children()))


def is_compared_by_fields(x: Value) -> bool:
    """Whether a value is told from others by its fields: a dataclass, or a module."""
    kind: Any = type(x)
    if not dataclasses.is_dataclass(kind):
        return False
    return vars(kind)["__dataclass_params__"].eq or isinstance(x, eqx.Module)


def compared_fields(x: Any) -> Iterator[tuple[str, Value]]:
    """The fields of a dataclass that tell it from others, by name."""
    for field in dataclasses.fields(x):
        # One that is not there yet, or was taken out of the tree.
        if field.compare and hasattr(x, field.name):
            yield field.name, getattr(x, field.name)


def raw_bytes(array: np.ndarray) -> memoryview:
    """The numbers of an array, in C's order."""
    return np.require(array, requirements="C").reshape(-1).view(np.uint8).data


def _number_bytes(x: complex) -> bytes:
    if isinstance(x, int):
        return repr(int(x)).encode()
    return struct.pack("<dd", x.real, x.imag)


def _array_bits(x: Value) -> Hashable:
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    is_foreign = jnp.issubdtype(x.dtype, jax.dtypes.extended) and not is_key
    if isinstance(x, jax.core.Tracer) or is_foreign or x.dtype == object:
        return type(x), id(x)
    is_weak = bool(getattr(x, "weak_type", False))
    return str(x.dtype), x.shape, is_weak, _content(x)


def _content(x: Value) -> bytes:
    if not isinstance(x, jax.Array):
        return _told(raw_bytes(np.asarray(x)))
    # Neither may this be a part of the program that is being traced, nor has the user
    # asked for a transfer that could be refused.
    with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return _content(jax.random.key_data(x))
        if x.nbytes <= _LARGE:
            return _told(*_parts(x))
        if (key := id(x)) not in _known:
            forget = lambda _: _known.pop(key, None)
            _known[key] = weakref.ref(x, forget), _told(*_parts(x))
        return _known[key][1]


def _parts(x: jax.Array) -> Iterator[bytes | memoryview]:
    """What this process has of an array, each part once."""
    # Part by part, as JAX would keep a copy of the whole on the host.
    if x.is_fully_addressable and len(x.sharding.device_set) == 1:
        yield raw_bytes(np.asarray(x.addressable_data(0)))
        return
    shards = {str(shard.index): shard for shard in x.addressable_shards}
    for index in sorted(shards):
        yield index.encode()
        yield raw_bytes(np.asarray(shards[index].data))


def _told(*parts: Any) -> bytes:
    if len(parts) == 1 and len(parts[0]) <= _FEW:
        return bytes(parts[0])
    digest = hashlib.blake2b(digest_size=20)
    for part in parts:
        digest.update(part)
    return digest.digest()
