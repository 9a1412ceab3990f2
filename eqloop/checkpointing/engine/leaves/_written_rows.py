"""Follows counters and buffers through the program of a step.

A counter is an integer in the carry that each step adds a number to. A buffer is an
array in the carry that the step returns as it came, except for some blocks that it
writes at counters. Both are followed from the inputs of the program to its outputs,
through all equations that pass them on. Nothing is known of other values: this is an
abstract interpretation in which `None` means "anything".
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax

from ...._arrays import is_symbolic
from ...._compat import called_by, close
from ...._programs import aval_of
from ...._types import AnyJaxpr, Aval
from .._in_place import WRITES

# With fewer rows than this, no counter of 32 bits wraps around to a row that it has
# passed.
MOST_ROWS = 2**29

# What is known of a value: a number, a `CounterIndex`, a tuple of such, a
# `WrittenBuffer`, or `None` for nothing.
Understood: TypeAlias = Any

_DROPS = (
    lax.GatherScatterMode.FILL_OR_DROP,
    lax.GatherScatterMode.PROMISE_IN_BOUNDS,
)


def known_of_leaf(i: int, aval: Aval) -> Understood:
    """What is known of a leaf of the carry before a step."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return None
    if any(is_symbolic(size) or not size for size in aval.shape):
        return None  # symbolic sizes cannot be compared, and empty arrays have no rows
    return CounterIndex(i, frozenset([0])) if _counts(aval) else WrittenBuffer(i)


def _counts(aval: Aval) -> bool:
    is_integer = jnp.issubdtype(aval.dtype, jnp.integer)
    return is_integer and not aval.shape and aval.dtype.itemsize >= 4


@dataclasses.dataclass(frozen=True)
class Counter:
    """A leaf of the carry that each step adds a positive number to.

    Attributes:
        stride: The number.
        steps: How many steps there are, at most.
        start: What it is before the first step, if that is known and not negative.
    """

    stride: int
    steps: int
    start: int | None

    @property
    def span(self) -> int:
        """How far it comes until the last step."""
        return self.stride * (self.steps - 1)


@dataclasses.dataclass(frozen=True)
class CounterIndex:
    """A leaf of the carry, plus one of several numbers."""

    leaf: int
    offsets: frozenset[int]

    def plus(self, number: int) -> "CounterIndex | None":
        """The index plus a number; `None` if the sum may have wrapped around."""
        offsets = frozenset(offset + number for offset in self.offsets)
        is_small = all(abs(offset) < MOST_ROWS for offset in offsets)
        return CounterIndex(self.leaf, offsets) if is_small else None


@dataclasses.dataclass(frozen=True)
class WrittenBlock:
    """A block of a buffer that may have been written.

    Attributes:
        starts: Where it starts along each axis, as far as this is understood.
        sizes: How long it is along each axis.
        is_clamped: Whether a block out of bounds is moved into the buffer (as by
            `dynamic_update_slice`) instead of dropped (as by most scatters).
    """

    starts: tuple[Understood, ...]
    sizes: tuple[int, ...]
    is_clamped: bool


@dataclasses.dataclass(frozen=True)
class WrittenBuffer:
    """A leaf of the carry, or an array of zeros, with some blocks written to.

    Attributes:
        leaf: Which leaf; `None` for zeros.
        writes: The blocks.
    """

    leaf: int | None
    writes: frozenset[WrittenBlock] = frozenset()

    def written(self, write: WrittenBlock) -> "WrittenBuffer":
        return WrittenBuffer(self.leaf, self.writes | {write})


@dataclasses.dataclass(frozen=True)
class Reading:
    """Follows counters and buffers through a program.

    Attributes:
        counters: The counters, if they are known already.
    """

    counters: dict[int, Counter]

    def outputs(
        self, program: AnyJaxpr, inputs: Sequence[Understood]
    ) -> list[Understood]:
        """What is known of the outputs of a program."""
        jaxpr = close(program).jaxpr
        known = dict(zip(jaxpr.invars, inputs, strict=True))
        of = lambda x: _literal(x) if isinstance(x, jex.Literal) else known.get(x)
        for eqn in jaxpr.eqns:
            found = self._equation(eqn, [of(x) for x in eqn.invars])
            known.update(zip(eqn.outvars, found, strict=True))
        return [of(x) for x in jaxpr.outvars]

    def _equation(self, eqn: jex.JaxprEqn, ins: list[Understood]) -> list[Understood]:
        name = eqn.primitive.name
        if (inner := called_by(eqn)) is not None:
            return self.outputs(inner, ins)
        if name == "optimization_barrier":
            return ins
        if name in WRITES:
            return [self._write(eqn, ins)]
        if (rule := _FOLLOWED.get(name)) is not None:
            return [rule(self, eqn, ins)]
        return [None] * len(eqn.outvars)

    def _write(self, eqn: jex.JaxprEqn, ins: list[Understood]) -> Understood:
        if not isinstance(ins[0], WrittenBuffer):
            return None
        if eqn.primitive.name == "dynamic_update_slice":
            sizes = aval_of(eqn.invars[1]).shape
            return ins[0].written(WrittenBlock(tuple(ins[2:]), sizes, True))
        write = _scattered(eqn, ins[1])
        return None if write is None else ins[0].written(write)

    def select(self, eqn: jex.JaxprEqn, ins: list[Understood]) -> Understood:
        # `jnp` writes `where(i < 0, i + n, i)` for an index. If `i < 0` is decided by
        # `is_less`, the index is one of the two; otherwise it is either.
        which, *cases = ins
        if isinstance(which, bool):
            return cases[which]
        if all(isinstance(case, CounterIndex) for case in cases):
            offsets = frozenset[int]().union(*(case.offsets for case in cases))
            same = len({case.leaf for case in cases}) == 1
            return CounterIndex(cases[0].leaf, offsets) if same else None
        return _merged(cases)

    def is_less(self, eqn: jex.JaxprEqn, ins: list[Understood]) -> bool | None:
        # Only "not less" can be known: a counter that starts at or above a number stays
        # there. That is the test of an index for being negative.
        one, other = ins
        if not isinstance(one, CounterIndex) or not _is_integer(other):
            return None
        counter = self.counters.get(one.leaf)
        if counter is None or counter.start is None:
            return None
        least = counter.start + min(one.offsets)
        return False if least >= other else None


def _merged(buffers: Sequence[Understood]) -> Understood:
    """What is known of a value that is one of several buffers."""
    if not all(isinstance(buffer, WrittenBuffer) for buffer in buffers):
        return None
    (leaf, *others) = {buffer.leaf for buffer in buffers}
    writes = frozenset[WrittenBlock]().union(*(buffer.writes for buffer in buffers))
    return None if others else WrittenBuffer(leaf, writes)


def _add(reading: Reading, eqn: jex.JaxprEqn, ins: list[Understood]) -> Understood:
    if all(isinstance(known, WrittenBuffer) for known in ins):
        return _sum(*ins)
    one, other = ins
    if _is_integer(one):
        one, other = other, one
    if not _is_integer(other):
        return None
    if isinstance(one, CounterIndex):
        return one.plus(other)
    return one + other if _is_integer(one) else None


def _sum(one: WrittenBuffer, other: WrittenBuffer) -> WrittenBuffer | None:
    """A buffer plus zeros that blocks were written to."""
    leaves = [buffer.leaf for buffer in (one, other) if buffer.leaf is not None]
    if len(leaves) > 1:
        return None
    return WrittenBuffer(leaves[0] if leaves else None, one.writes | other.writes)


def _subtract(reading: Reading, eqn: jex.JaxprEqn, ins: list[Understood]) -> Understood:
    one, other = ins
    is_index = isinstance(one, CounterIndex) and _is_integer(other)
    return one.plus(-other) if is_index else None


def _repeated(reading: Reading, eqn: jex.JaxprEqn, ins: list[Understood]) -> Understood:
    (aval,) = (aval_of(var) for var in eqn.outvars)
    if aval.shape == (1,) and (isinstance(ins[0], CounterIndex) or _is_integer(ins[0])):
        return (ins[0],)
    return WrittenBuffer(None) if _is_literal_zero(eqn.invars[0]) else None


def _in_a_row(reading: Reading, eqn: jex.JaxprEqn, ins: list[Understood]) -> Understood:
    parts = [
        part if isinstance(part, tuple) else (None,) * math.prod(aval_of(x).shape)
        for part, x in zip(ins, eqn.invars, strict=True)
    ]
    return tuple(entry for part in parts for entry in part) if _is_flat(eqn) else None


def _reshape(reading: Reading, eqn: jex.JaxprEqn, ins: list[Understood]) -> Understood:
    if isinstance(ins[0], tuple):
        return ins[0] if _is_flat(eqn) else ins[0][0] if len(ins[0]) == 1 else None
    is_scalar = isinstance(ins[0], CounterIndex) or _is_integer(ins[0])
    return (ins[0],) if is_scalar and _is_flat(eqn) else None


def _convert(reading: Reading, eqn: jex.JaxprEqn, ins: list[Understood]) -> Understood:
    before, after = aval_of(eqn.invars[0]), aval_of(eqn.outvars[0])
    if before.dtype == after.dtype:
        return ins[0]
    # Fewer bits would be the number modulo something else than the rows.
    is_wider = after.dtype.itemsize >= before.dtype.itemsize
    return ins[0] if _counts(before) and _counts(after) and is_wider else None


def _is_flat(eqn: jex.JaxprEqn) -> bool:
    return len(aval_of(eqn.outvars[0]).shape) == 1


def _unchanged(
    reading: Reading, eqn: jex.JaxprEqn, ins: list[Understood]
) -> Understood:
    return ins[0]


_FOLLOWED: dict[
    str, Callable[[Reading, jex.JaxprEqn, list[Understood]], Understood]
] = {
    "add": _add,
    "add_any": _add,
    "broadcast_in_dim": _repeated,
    "concatenate": _in_a_row,
    "convert_element_type": _convert,
    "copy": _unchanged,
    "lt": Reading.is_less,
    "reshape": _reshape,
    "select_n": Reading.select,
    "squeeze": _reshape,
    "sub": _subtract,
}


def _scattered(eqn: jex.JaxprEqn, indices: Understood) -> WrittenBlock | None:
    """The block that a scatter with a single index writes."""
    numbers, (operand, at, updates) = (
        eqn.params["dimension_numbers"],
        (aval_of(var) for var in eqn.invars[:3]),
    )
    axes = [int(axis) for axis in numbers.scatter_dims_to_operand_dims]
    if at.shape != (len(axes),) or not isinstance(indices, tuple):
        return None
    starts, sizes = [None] * operand.ndim, [1] * operand.ndim
    window = [updates.shape[axis] for axis in numbers.update_window_dims]
    inserted = set(map(int, numbers.inserted_window_dims))
    inserted |= set(map(int, numbers.operand_batching_dims))
    for axis in range(operand.ndim):
        sizes[axis] = 1 if axis in inserted else window.pop(0)
    for axis, start in zip(axes, indices, strict=True):
        starts[axis] = start
    return WrittenBlock(tuple(starts), tuple(sizes), eqn.params["mode"] not in _DROPS)


def _literal(atom: jex.Literal) -> int | None:
    """The number that a literal is, if it is an integer."""
    is_number = not aval_of(atom).shape and jnp.issubdtype(
        aval_of(atom).dtype, jnp.integer
    )
    return int(atom.val) if is_number else None


def _is_literal_zero(atom: jax.core.Atom) -> bool:
    return isinstance(atom, jex.Literal) and jnp.ndim(atom.val) == 0 and not atom.val


def _is_integer(known: Understood) -> bool:
    return isinstance(known, int) and not isinstance(known, bool)
