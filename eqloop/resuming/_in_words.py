"""What a run is called with, in words that can be written down and compared.

A step is known by its traced program, which shows whatever its numbers depend on. What
a program does not show are functions that are called from Python: callbacks, and one
that makes `xs`. They are known by their code and by what they read.
"""

import hashlib
import math
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np

from .._arrays import (
    describe,
    flatten,
    host_parts,
    is_dynamic,
    is_key,
    paths,
    raw_bytes,
    unmarked,
)
from .._programs import called_by, equation_digests, function_digest
from .._types import PyTree, Value
from ..progress import Again
from ._processes import digest_of_all
from ._sources import forget_pages, mapping_of

# Arrays are read in blocks of so many bytes. Of those that are larger than so much in
# all only evenly spaced blocks are, unless they are in memory: they may be files that
# take hours to read.
_BLOCK, _BYTES = 2**18, 64 * 2**20

# So many equations of a program are written down; its digest is of all of them.
_MOST = 10_000

Described = dict[str, Any]


def fingerprint(array: Value, axis: int = 0) -> str:
    """A digest of the numbers in an array."""
    digest = hashlib.blake2b(digest_size=16)
    for part in _parts(array, axis):
        digest.update(part)
    return digest_of_all(digest.digest()).hex()


def _parts(array: Value, axis: int) -> Iterator[bytes | memoryview]:
    if isinstance(array, jax.Array):
        yield from host_parts(jax.random.key_data(array) if is_key(array) else array)
    elif not math.prod(array.shape) or not array.shape:
        yield raw_bytes(np.asarray(array[...]))
    elif isinstance(array, np.ndarray) and mapping_of(array) is None:
        yield raw_bytes(array)
    else:
        for start, stop in _looked_at(array, array.shape[axis]):
            part = array[(slice(None),) * axis + (slice(start, stop),)]
            yield raw_bytes(np.array(part))
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


def array_in_words(array: Value, axis: int | None = None) -> list[str]:
    """The type of an array, and a digest of it."""
    return [describe(array), fingerprint(array, axis or 0)]


def leaves_in_words(tree: PyTree, name: str, axes: Sequence[int | None]) -> Described:
    """The leaves of a tree: arrays, and the values of others that are no functions."""
    leaves, _ = flatten(tree)
    words: Described = {}
    for path, leaf, axis in zip(paths(tree, name), leaves, axes, strict=True):
        if is_dynamic(leaf) or hasattr(leaf, "shape"):
            words[path] = array_in_words(leaf, axis)
        elif not callable(leaf):
            words[path] = text_of(leaf)
    return words


def program_in_words(program: jex.ClosedJaxpr, has_rules: bool) -> list[str]:
    """The equations of a program, and last the whole of it: depth, digest and text."""
    shown = Again(backward=True)(program)  # no bar changes a number
    words = (" ".join(map(str, eqn)) for eqn in equation_digests(shown, has_rules))
    *eqns, whole = words
    return [*eqns[:_MOST], whole]


def constants_in_words(program: jex.ClosedJaxpr, name: str) -> Described:
    """The arrays that a program closes over."""
    named = enumerate(program.consts)
    return {f"{name}, constant {i}": array_in_words(x) for i, x in named}


def callbacks_in_words(
    program: jex.ClosedJaxpr, name: str, has_rules: bool
) -> Described:
    """The functions that a program, or its derivatives, call back."""
    named = enumerate(called_by(program, has_rules))
    return {f"{name}, callback {i}": function_in_words(x, True) for i, x in named}


_known: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def function_in_words(function: Callable[..., PyTree], has_states: bool) -> list[str]:
    """A digest of a function, as it was when it was first seen in this process."""
    # It may keep in what it reads what it has seen, as one that reads a file does.
    try:
        if function not in _known:
            _known[function] = function_digest(function, has_states)
        digest = _known[function]
    except TypeError:  # it has no hash
        digest = function_digest(function, has_states)
    return ["its code and what it reads", digest]


def text_of(value: object) -> str:
    """A value as text that is the same in another process, whatever functions do."""
    text = re.sub("<.*>", "<function>", repr(unmarked(value)), flags=re.DOTALL)
    return re.sub(r" at 0x[0-9a-f]+", "", text)
