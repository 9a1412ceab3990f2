"""Finds the buffers of a step that a list of rows can stand for."""

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax.extend.core as jex
import jax.numpy as jnp

from ..._arrays import Flags, explicit_sharding, is_symbolic, nbytes
from ..._calls import format_bytes
from ..._programs import RowWrite, aval_of, pruned, row_write, run, traced, with_parts
from ..._types import Value
from ._buffers import Following, writes_rows
from ._counts import Count, Counts, counts_of
from ._known_values import (
    MOST_ROWS,
    Block,
    Buffer,
    CounterIndex,
    Moved,
    RingIndex,
    Understood,
    leaves_in,
)
from ._loop import Loop
from ._row_lists import RowList
from ._rows_once import (
    Counter,
    carry_after,
    counter_strides,
    counters_of,
    followed,
    program_to_follow,
)
from ._step import Step


@functools.lru_cache(maxsize=256)
def row_lists(step: Step, loop: Loop) -> tuple[RowList | None, ...]:
    """For each leaf of the carry, the list of its rows, if steps write some of them.

    The step has no outputs, and the loop has the `starts` of the carry.
    """
    is_unknown = step.inverse is not None or is_symbolic(loop.length)
    if is_unknown or not writes_rows(step.jaxpr):
        return (None,) * step.num_carry
    program, counters = program_to_follow(step), counters_of(step, loop)
    counts = counts_of(step, loop, counters)
    starts = {i: c.start for i, c in counters.items() if c.start is not None}
    # A remainder is never less than zero.
    starts |= {i: 0 for i, c in enumerate(counts.formulas) if c and c.modulus}
    after = followed(program, step, Following(starts))
    firsts = loop.padded_starts(step.num_carry)
    found = CountedStep(program, step, counters, counts, tuple(firsts))
    return tuple(
        _list_of(found, leaf, known)
        if isinstance(known, Buffer) and known.leaf == leaf and known.blocks
        else None
        for leaf, known in enumerate(after)
    )


def reasons_for_whole(
    step: Step, loop: Loop, carries: int, paths: Sequence[str]
) -> list[str | None]:
    """For each leaf of the carry, why no list stands for it, in the words of a plan.

    `None` if one does, or if it is always whole. At most `carries` are on the device.
    """
    lists = row_lists(step, loop)
    if step.inverse is not None or is_symbolic(loop.length):
        return [None] * step.num_carry
    program, counters = program_to_follow(step), counters_of(step, loop)
    counts = counts_of(step, loop, counters)

    def reason(leaf: int, known: Understood) -> str | None:
        if (rows := lists[leaf]) is not None:
            is_larger = not rows.takes_less(carries)
            size = format_bytes(rows.nbytes)
            return f"a list of its rows takes more, {size}" if is_larger else None
        # Of other values with some of it, most are chosen entry by entry.
        if leaf not in leaves_in(known) or not isinstance(known, Moved | Buffer):
            return None
        if not isinstance(known, Buffer) or known.leaf != leaf:
            return "its rows are moved"
        made = {block.made for block in known.blocks}
        writes = [row_write(e) for e in program.eqns if made.intersection(e.outvars)]
        atoms = [atom for write in writes if write is not None for atom in write.at]
        unknown = counts.unknown_to(with_parts(program, outvars=atoms))
        if not unknown:
            return None
        return f"where a row goes depends on {', '.join(paths[i] for i in unknown)}"

    after = enumerate(carry_after(program, step, counters))
    return [reason(leaf, known) for leaf, known in after]


def lacks_counter(step: Step) -> bool:
    """Whether a step writes rows of a buffer, and no leaf of its carry counts."""
    if step.inverse is not None or not writes_rows(step.jaxpr):
        return False
    if any(stride is not None and stride > 0 for stride in counter_strides(step)):
        return False
    return any(leaves_written(step))


@functools.lru_cache(maxsize=256)
def leaves_written(step: Step) -> Flags:
    """The leaves of the carry of which a step writes rows."""
    after = carry_after(program_to_follow(step), step, {})
    return tuple(
        isinstance(known, Buffer) and known.leaf == leaf and bool(known.blocks)
        for leaf, known in enumerate(after)
    )


class CountedStep(NamedTuple):
    """A step, and what in its carry counts.

    Attributes:
        program: The program of the step.
        step: The step.
        counters: The leaves of the carry that count upwards.
        counts: The integers in it that are known before every step.
        starts: For each leaf, what it starts from, if that is known.
    """

    program: jex.ClosedJaxpr
    step: Step
    counters: Mapping[int, Counter]
    counts: Counts
    starts: tuple[int | None, ...]

    @property
    def clock(self) -> int | None:
        """The leaf that tells which step it is, if there is one."""
        enough = {i: c for i, c in self.counters.items() if c.span < 2**31}
        return min(enough, key=lambda i: enough[i].stride, default=None)

    def ring_of(self, index: Understood, rows: int) -> tuple[int, int] | None:
        """A counter, and what to add to it for an index that comes round in a ring."""
        if isinstance(index, RingIndex) and index.modulus == rows:
            counter = self.counters.get(index.leaf)
            is_known = counter is not None and counter.is_by_one
            return (index.leaf, index.offset) if is_known else None
        clock = self.clock
        # A leaf that counts in a ring itself, as the position does.
        if not isinstance(index, CounterIndex) or clock is None:
            return None
        formula, start = self.counts.formulas[index.leaf], self.starts[index.leaf]
        if formula != Count(1, rows) or index.offsets != {0} or start is None:
            return None
        by = self.counters[clock]
        return (
            (clock, start - by.start) if by.is_by_one and by.start is not None else None
        )


def _list_of(counted: CountedStep, leaf: int, known: Buffer) -> RowList | None:
    """The list of the rows of a leaf, along the axis for which it is the smallest.

    `known` is what is known of the leaf after the step.
    """
    aval = counted.step.carry_types[leaf]
    if explicit_sharding(aval) is not None or any(map(is_symbolic, aval.shape)):
        return None
    made = {block.made: block for block in known.blocks}
    # In the order of the program, so that it is the same whoever asks.
    writes = [eqn for eqn in counted.program.eqns if made.keys() & {*eqn.outvars}]
    if len(writes) < len(known.blocks):  # some are in a loop, or in a rule
        return None
    pairs = [(eqn, made[eqn.outvars[0]]) for eqn in writes]
    lists = [_list_along(counted, axis, pairs) for axis in range(aval.ndim)]
    return min(filter(None, lists), key=lambda one: one.nbytes, default=None)


def _list_along(
    counted: CountedStep, axis: int, writes: Sequence[tuple[jex.JaxprEqn, Block]]
) -> RowList | None:
    """The list of rows along an axis, if it is one that steps write rows along."""
    found = [row_write(eqn) for eqn, _ in writes]
    whole = aval_of(writes[0][0].invars[0])
    rows = whole.shape[axis]
    if not 0 < rows < MOST_ROWS or any(w is None or axis not in w.axes for w in found):
        return None
    writes_found = [write for write in found if write is not None]
    program, _, counters, counts, _ = counted
    at = _rows_written(program, writes_found, axis, rows)
    if at.effects or (known := counts.to_compute(at)) is None:
        return None
    (count,) = at.out_avals[0].shape
    ring = counted.ring_of(writes[0][1].starts[axis], rows) if count == 1 else None
    counter, offset = ring or (counted.clock, None)
    if counter is None:
        return None
    by = counters[counter]
    settings = axis, rows, by.steps, count, counter, by.stride
    row_bytes = nbytes([whole]) // rows
    found = RowList(*settings, at, known, offset, row_bytes)
    # Places in the list have 32 bits.
    return found if found.length < 2**31 else None


def _rows_written(
    program: jex.ClosedJaxpr, writes: Sequence[RowWrite], axis: int, rows: int
) -> jex.ClosedJaxpr:
    """A program from the inputs of a step to the rows of a buffer that it writes.

    The writes are in their order, and the axis has so many rows.
    """
    atoms = [atom for write in writes for atom in write.at]
    indices = pruned(with_parts(program, outvars=atoms))

    def rows_at(*inputs: Value) -> list[Value]:
        found, at = iter(run(indices, *inputs)), list[Value]()
        for write in writes:
            numbers = [next(found) for _ in write.at]
            place = write.axes.index(axis)
            # A number for each axis, or arrays of them.
            is_apart = len(numbers) == len(write.axes) and not numbers[0].ndim
            first = numbers[place] if is_apart else numbers[0][..., place]
            at.append(_block_rows(first, write.sizes[axis], rows, write.is_clamped))
        return [jnp.concatenate(at)]

    return traced(rows_at, program.in_avals)


def _block_rows(first: Value, size: int, rows: int, is_clamped: bool) -> Value:
    """The rows of blocks that start at some rows; `rows` for those that are dropped."""
    if first.dtype.itemsize < 4:
        first = first.astype(jnp.int32)
    inside = jnp.clip(first, 0, rows - size)
    is_inside = jnp.ones(first.shape, bool) if is_clamped else inside == first
    blocks = inside.astype(jnp.int32).reshape(-1, 1)
    at = blocks + jnp.arange(size, dtype=jnp.int32)[None]
    return jnp.where(is_inside.reshape(-1, 1), at, rows).reshape(-1)
