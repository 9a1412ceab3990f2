"""Buffers whose rows are written once: slots need not hold them.

Take a buffer of the carry to which each step writes one row, as a solver's history
`rows.at[i].set(h)` with a counter `i`, and nothing else. If no two steps write the same
row, then before any step a row is one of two: what it is at the end, if it has been
written already, and what it was at the start, if not. For a row that is never written
both are the same. So the initial and the final buffer, which are there once, serve all
reads of all steps, wherever these read:

    before = where(written, final, initial)

The counter tells what has been written. With `n` rows, and writes from row `i0` on by a
counter that has come from `i0` to `i`, these are the rows `r` with

    (r - i0) mod n < i - i0

That is right in two cases.

- The loop is too short for a counter to come round. Indices that are out of bounds are
  dropped, and negative ones may have been moved up by `n`; either way the row that is
  written, if one is, is the counter modulo `n`. Where it starts does not matter.
- It is known where the counter starts, at zero or above. If indices are clamped to the
  buffer, it must be known that the last one is within, too.

All is read off the program of the step: that the buffer comes out as it came in but for
one row, and that the row is a counter plus a fixed number. What is not understood is no
such buffer, and slots hold it.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax

from ..._axes import is_symbolic
from ..._compat import CALLS, close
from ..._equations import aval_of, equations
from ..._types import AnyJaxpr, Aval, Value
from ._in_place import WRITES
from ._lean import lean
from ._loop import Loop
from ._step import Step

# With fewer rows than this, no counter of 32 bits comes round to rows it has been at.
_MOST_ROWS = 2**29

# What is known of a value: a number, an `_Index`, a tuple of such, a `_Buffer`, or
# `None` for nothing.
_Understood: TypeAlias = Any

_DROPS = (
    lax.GatherScatterMode.FILL_OR_DROP,
    lax.GatherScatterMode.PROMISE_IN_BOUNDS,
)


@dataclasses.dataclass(frozen=True)
class RowsOnce:
    """How the rows of a buffer are written, each of them at most once.

    Attributes:
        axis: The axis of the rows.
        counter: The leaf of the carry that counts.
        offset: How many rows behind the counter the row of a step is.
    """

    axis: int
    counter: int
    offset: int

    def before(self, final: Value, initial: Value, first: Value, count: Value) -> Value:
        """The buffer before a step.

        Args:
            final: The buffer after the last step.
            initial: The buffer before the first one.
            first: The counter before the first one.
            count: The counter before this one.
        """
        rows, shape = initial.shape[self.axis], [1] * initial.ndim
        shape[self.axis] = rows
        signed = jnp.dtype(f"int{8 * first.dtype.itemsize}")
        first, count = first.astype(signed), count.astype(signed)
        row = lax.broadcasted_iota(signed, shape, self.axis)
        is_written = (row - (first + self.offset)) % rows < count - first
        return jnp.where(is_written, final, initial)


@functools.lru_cache(maxsize=256)
def rows_once(step: Step, loop: Loop) -> tuple[RowsOnce | None, ...]:
    """The leaves of the carry that are such buffers.

    Args:
        step: The step, without outputs.
        loop: The loop, with the `starts` of the carry of this step.
    """
    count = step.num_carry
    has_writes = any(eqn.primitive.name in WRITES for eqn in equations(step.jaxpr))
    if not has_writes or step.inverse is not None or is_symbolic(loop.length):
        return (None,) * count
    starts = loop.padded_starts(count)
    program = lean(step.jaxpr, (True,) * len(step.jaxpr.out_avals))
    types = step.carry_types
    known = [_leaf(i, aval) for i, aval in enumerate(types)]
    inputs = [*[None] * step.num_consts, *known, *[None] * len(step.x_types)]
    counters = _counters(_Reading({}).outputs(program, inputs)[:count], loop, starts)
    after = _Reading(counters).outputs(program, inputs)[:count]
    return tuple(
        _rows_of(i, aval, known, counters)
        for i, (aval, known) in enumerate(zip(types, after, strict=True))
    )


def _leaf(i: int, aval: Aval) -> _Understood:
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return None
    if any(is_symbolic(size) or not size for size in aval.shape):
        return None  # nothing to count, or nothing to save
    return _Index(i, frozenset([0])) if _counts(aval) else _Buffer(i)


def _counts(aval: Aval) -> bool:
    is_integer = jnp.issubdtype(aval.dtype, jnp.integer)
    return is_integer and not aval.shape and aval.dtype.itemsize >= 4


@dataclasses.dataclass(frozen=True)
class _Counter:
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


def _counters(
    after: Sequence[_Understood], loop: Loop, starts: Sequence[int | None]
) -> dict[int, _Counter]:
    """The leaves of the carry that count, given what steps make of the carry."""
    found: dict[int, _Counter] = {}
    for i, (out, start) in enumerate(zip(after, starts, strict=True)):
        if not (isinstance(out, _Index) and out.leaf == i and len(out.offsets) == 1):
            continue
        (stride,) = out.offsets
        if stride > 0:
            within = start is not None and 0 <= start < _MOST_ROWS
            # The positions of a loop have 32 bits: it has no more steps than that.
            within = within and stride * (loop.length - 1) < 2**31
            found[i] = _Counter(stride, loop.length, start if within else None)
    return found


@dataclasses.dataclass(frozen=True)
class _Index:
    """A leaf of the carry, plus one of some numbers."""

    leaf: int
    offsets: frozenset[int]

    def plus(self, number: int) -> "_Index | None":
        """What is known of a sum; nothing if that may have wrapped around."""
        offsets = frozenset(offset + number for offset in self.offsets)
        is_small = all(abs(offset) < _MOST_ROWS for offset in offsets)
        return _Index(self.leaf, offsets) if is_small else None


@dataclasses.dataclass(frozen=True)
class _Write:
    """A block of a buffer that may have been written.

    Attributes:
        starts: Where it starts along each axis, if that is understood.
        sizes: How long it is along each axis.
        is_clamped: Whether it is moved into the buffer.
    """

    starts: tuple[_Understood, ...]
    sizes: tuple[int, ...]
    is_clamped: bool


@dataclasses.dataclass(frozen=True)
class _Buffer:
    """A leaf of the carry, or zeros, but for some blocks.

    Attributes:
        leaf: Which leaf; `None` for zeros.
        writes: The blocks.
    """

    leaf: int | None
    writes: frozenset[_Write] = frozenset()

    def written(self, write: _Write) -> "_Buffer":
        return _Buffer(self.leaf, self.writes | {write})


def _rows_of(
    leaf: int, aval: Aval, after: _Understood, counters: dict[int, _Counter]
) -> RowsOnce | None:
    """How the rows of a leaf are written, given what a step makes of the carry."""
    if not isinstance(after, _Buffer) or after.leaf != leaf or not after.writes:
        return None
    for axis, rows in enumerate(aval.shape):
        places = {write.starts[axis] for write in after.writes}
        indices = [p for p in places if isinstance(p, _Index) and p.leaf in counters]
        if len(indices) < len(places) or len({p.leaf for p in indices}) != 1:
            continue
        offsets = frozenset[int]().union(*(p.offsets for p in indices))
        counter, offset = indices[0].leaf, min(offsets)
        height = max(write.sizes[axis] for write in after.writes)
        is_clamped = any(write.is_clamped for write in after.writes)
        block = _RowsOfStep(rows, height, offsets, is_clamped)
        if block.is_once(counters[counter]):
            return RowsOnce(axis, counter, offset)
    return None


@dataclasses.dataclass(frozen=True)
class _RowsOfStep:
    """The rows of a buffer that a step may write.

    Attributes:
        rows: How many rows the buffer has.
        height: How many of them follow one another.
        offsets: How far behind a counter the first of them may be.
        is_clamped: Whether they are moved into the buffer.
    """

    rows: int
    height: int
    offsets: frozenset[int]
    is_clamped: bool

    def is_once(self, counter: _Counter) -> bool:
        """Whether each row is written at most once."""
        if self.rows >= _MOST_ROWS or self.height > counter.stride:
            return False
        if counter.start is not None and len(self.offsets) == 1:
            (offset,) = self.offsets
            first = counter.start + offset
            last = first + counter.span + self.height
            return first >= 0 and (not self.is_clamped or last <= self.rows)
        same = len({offset % self.rows for offset in self.offsets}) == 1
        comes_round = counter.span + self.height > self.rows
        return same and not comes_round and not self.is_clamped


@dataclasses.dataclass(frozen=True)
class _Reading:
    """Follows counters and buffers through a program.

    Attributes:
        counters: The leaves of the carry that count, if they are known already.
    """

    counters: dict[int, _Counter]

    def outputs(
        self, program: AnyJaxpr, inputs: Sequence[_Understood]
    ) -> list[_Understood]:
        """What is known of the outputs of a program."""
        jaxpr = close(program).jaxpr
        known = dict(zip(jaxpr.invars, inputs, strict=True))
        of = lambda x: _literal(x) if isinstance(x, jex.Literal) else known.get(x)
        for eqn in jaxpr.eqns:
            found = self._equation(eqn, [of(x) for x in eqn.invars])
            known.update(zip(eqn.outvars, found, strict=True))
        return [of(x) for x in jaxpr.outvars]

    def _equation(self, eqn: jex.JaxprEqn, ins: list[_Understood]) -> list[_Understood]:
        name = eqn.primitive.name
        if name in CALLS:
            return self.outputs(eqn.params[CALLS[name]], ins)
        if name == "optimization_barrier":
            return ins
        if name in WRITES:
            return [self._write(eqn, ins)]
        if (rule := _FOLLOWED.get(name)) is not None:
            return [rule(self, eqn, ins)]
        return [None] * len(eqn.outvars)

    def _write(self, eqn: jex.JaxprEqn, ins: list[_Understood]) -> _Understood:
        if not isinstance(ins[0], _Buffer):
            return None
        if eqn.primitive.name == "dynamic_update_slice":
            sizes = aval_of(eqn.invars[1]).shape
            return ins[0].written(_Write(tuple(ins[2:]), sizes, True))
        write = _scattered(eqn, ins[1])
        return None if write is None else ins[0].written(write)

    def select(self, eqn: jex.JaxprEqn, ins: list[_Understood]) -> _Understood:
        which, *cases = ins
        if isinstance(which, bool):
            return cases[which]
        if all(isinstance(case, _Index) for case in cases):
            offsets = frozenset[int]().union(*(case.offsets for case in cases))
            same = len({case.leaf for case in cases}) == 1
            return _Index(cases[0].leaf, offsets) if same else None
        return _merged(cases)

    def is_less(self, eqn: jex.JaxprEqn, ins: list[_Understood]) -> bool | None:
        one, other = ins
        if not isinstance(one, _Index) or not _is_integer(other):
            return None
        counter = self.counters.get(one.leaf)
        if counter is None or counter.start is None:
            return None
        least = counter.start + min(one.offsets)
        return False if least >= other else None


def _merged(buffers: Sequence[_Understood]) -> _Understood:
    """What is one of several buffers."""
    if not all(isinstance(buffer, _Buffer) for buffer in buffers):
        return None
    (leaf, *others) = {buffer.leaf for buffer in buffers}
    writes = frozenset[_Write]().union(*(buffer.writes for buffer in buffers))
    return None if others else _Buffer(leaf, writes)


def _add(reading: _Reading, eqn: jex.JaxprEqn, ins: list[_Understood]) -> _Understood:
    if all(isinstance(known, _Buffer) for known in ins):
        return _sum(*ins)
    one, other = ins
    if _is_integer(one):
        one, other = other, one
    if not _is_integer(other):
        return None
    if isinstance(one, _Index):
        return one.plus(other)
    return one + other if _is_integer(one) else None


def _sum(one: _Buffer, other: _Buffer) -> _Buffer | None:
    leaves = [buffer.leaf for buffer in (one, other) if buffer.leaf is not None]
    if len(leaves) > 1:
        return None
    return _Buffer(leaves[0] if leaves else None, one.writes | other.writes)


def _subtract(
    reading: _Reading, eqn: jex.JaxprEqn, ins: list[_Understood]
) -> _Understood:
    one, other = ins
    is_index = isinstance(one, _Index) and _is_integer(other)
    return one.plus(-other) if is_index else None


def _repeated(
    reading: _Reading, eqn: jex.JaxprEqn, ins: list[_Understood]
) -> _Understood:
    (aval,) = (aval_of(var) for var in eqn.outvars)
    if aval.shape == (1,) and (isinstance(ins[0], _Index) or _is_integer(ins[0])):
        return (ins[0],)
    return _Buffer(None) if _is_literal_zero(eqn.invars[0]) else None


def _in_a_row(
    reading: _Reading, eqn: jex.JaxprEqn, ins: list[_Understood]
) -> _Understood:
    parts = [
        part if isinstance(part, tuple) else (None,) * math.prod(aval_of(x).shape)
        for part, x in zip(ins, eqn.invars, strict=True)
    ]
    return tuple(entry for part in parts for entry in part) if _is_flat(eqn) else None


def _reshape(
    reading: _Reading, eqn: jex.JaxprEqn, ins: list[_Understood]
) -> _Understood:
    if isinstance(ins[0], tuple):
        return ins[0] if _is_flat(eqn) else ins[0][0] if len(ins[0]) == 1 else None
    is_scalar = isinstance(ins[0], _Index) or _is_integer(ins[0])
    return (ins[0],) if is_scalar and _is_flat(eqn) else None


def _convert(
    reading: _Reading, eqn: jex.JaxprEqn, ins: list[_Understood]
) -> _Understood:
    before, after = aval_of(eqn.invars[0]), aval_of(eqn.outvars[0])
    if before.dtype == after.dtype:
        return ins[0]
    # Fewer bits would be the number modulo something else than the rows.
    is_wider = after.dtype.itemsize >= before.dtype.itemsize
    return ins[0] if _counts(before) and _counts(after) and is_wider else None


def _is_flat(eqn: jex.JaxprEqn) -> bool:
    return len(aval_of(eqn.outvars[0]).shape) == 1


def _unchanged(
    reading: _Reading, eqn: jex.JaxprEqn, ins: list[_Understood]
) -> _Understood:
    return ins[0]


_FOLLOWED: dict[
    str, Callable[[_Reading, jex.JaxprEqn, list[_Understood]], _Understood]
] = {
    "add": _add,
    "add_any": _add,
    "broadcast_in_dim": _repeated,
    "concatenate": _in_a_row,
    "convert_element_type": _convert,
    "copy": _unchanged,
    "lt": _Reading.is_less,
    "reshape": _reshape,
    "select_n": _Reading.select,
    "squeeze": _reshape,
    "sub": _subtract,
}


def _scattered(eqn: jex.JaxprEqn, indices: _Understood) -> _Write | None:
    """What a scatter with a single index writes."""
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
    return _Write(tuple(starts), tuple(sizes), eqn.params["mode"] not in _DROPS)


def _literal(atom: jex.Literal) -> int | None:
    """The number that a literal is, if it is an integer."""
    is_number = not aval_of(atom).shape and jnp.issubdtype(
        aval_of(atom).dtype, jnp.integer
    )
    return int(atom.val) if is_number else None


def _is_literal_zero(atom: jax.core.Atom) -> bool:
    return isinstance(atom, jex.Literal) and jnp.ndim(atom.val) == 0 and not atom.val


def _is_integer(known: _Understood) -> bool:
    return isinstance(known, int) and not isinstance(known, bool)
