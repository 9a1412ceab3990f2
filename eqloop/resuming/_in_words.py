"""What a run is called with, in words that can be written down and compared."""

import hashlib
import math
import platform
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from .._arrays import describe, flatten, is_dynamic, is_key, paths, raw_bytes, unmarked
from .._types import PyTree, Value
from ._code_digest import (
    callable_name,
    captured,
    code_digest,
    functions_in,
    is_plain,
    nodes,
)
from ._processes import digest_of_all
from ._sources import forget_pages, is_mapped

# Arrays are read in blocks of so many bytes. Of those that are larger than so much in
# all only evenly spaced blocks are, unless they are in memory: they may be files that
# take hours to read.
_BLOCK, _BYTES = 2**18, 64 * 2**20

# What of JAX's settings changes the numbers without changing any type.
_JAX_SETTINGS = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_enable_x64",
    "jax_threefry_partitionable",
)

Described = dict[str, Any]


def fingerprint(array: Value, axis: int = 0) -> str:
    """A digest of the numbers in an array."""
    digest = hashlib.blake2b(digest_size=16)
    for piece in _pieces(array, axis):
        digest.update(raw_bytes(piece))
    return digest_of_all(digest.digest()).hex()


def _pieces(array: Value, axis: int) -> Iterator[np.ndarray]:
    if isinstance(array, jax.Array):
        data = jax.random.key_data(array) if is_key(array) else array
        yield from (np.asarray(s.data) for s in data.addressable_shards)
    elif not math.prod(array.shape) or not array.shape:
        yield np.asarray(array[...])
    elif isinstance(array, np.ndarray) and not is_mapped(array):
        yield array
    else:
        for start, stop in _looked_at(array, array.shape[axis]):
            yield np.array(array[(slice(None),) * axis + (slice(start, stop),)])
            forget_pages(array)


def _looked_at(array: Value, length: int) -> Iterator[tuple[int, int]]:
    """The parts of an axis that are read: all of it, if the array is not too large."""
    size = math.prod(array.shape) * np.dtype(array.dtype).itemsize
    block = max(1, length * _BLOCK // size)
    starts = range(0, length, block)
    most = max(1, _BYTES // max(block * size // length, 1))
    if len(starts) > most:
        starts = np.linspace(0, length - block, most).astype(int)
    yield from ((int(start), min(int(start) + block, length)) for start in starts)


def leaves_in_words(tree: PyTree, name: str, axes: Sequence[int | None]) -> Described:
    """The leaves of a tree: types and digests of arrays, and the values of others."""
    leaves, _ = flatten(tree)
    words: Described = {}
    for path, leaf, axis in zip(paths(tree, name), leaves, axes, strict=True):
        if is_dynamic(leaf) or hasattr(leaf, "shape"):
            words[path] = [describe(leaf), fingerprint(leaf, axis or 0)]
        elif callable(leaf):
            words[path] = [f"function {callable_name(leaf)}", ""]
        else:
            words[path] = [text_of(leaf), ""]
    return words


def functions_in_words(tree: PyTree, name: str, is_deep: bool = True) -> Described:
    """The functions in a tree, and what they close over, by digests."""
    # And what else is in the tree that JAX does not see: static fields, for example.
    # What functions read is looked into if it is deep. They may keep there what they
    # have seen, as one that reads a file does.
    words: Described = {}
    for path, node, is_hidden in nodes(tree, name):
        if functions := functions_in(node):
            words[path] = [
                f"code of {callable_name(node)}",
                code_digest(functions, is_deep),
            ]
            for captive, array in captured(functions, is_deep).items():
                place = f"{path}, which closes over {captive}"
                words[place] = [describe(array), fingerprint(array)]
        elif is_hidden and is_dynamic(node):
            words[path] = [describe(node), fingerprint(node)]
        elif is_hidden and is_plain(node):
            words[path] = [text_of(node), ""]
    return words


def text_of(value: object) -> str:
    """A value as text that is the same in another process."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(unmarked(value)))


def jax_settings() -> Described:
    """What of JAX's settings changes numbers."""
    return {name: text_of(getattr(jax.config, name)) for name in _JAX_SETTINGS}


def python_version() -> str:
    """The version that code was compiled by, which is the same for all `3.11.x`."""
    return ".".join(platform.python_version_tuple()[:2])
