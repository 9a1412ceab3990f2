"""What a step does with the buffers in its carry: where it writes, what else it does.

A solver writes its state to a buffer, at a counter, unless the step was rejected:

    rows[i] = where(is_kept, h, rows[i]);  i = i + 1

Four answers save memory and time in proportion to the whole buffer. If each row is
written at most once, slots need not hold the buffer (`_rows_once.py`), and
neither if it is known beforehand where rows are written (`_row_lists.py`). If
rows are written but never computed with, an example of a batch that has stopped can
drop its writes, and nothing is selected (`rewrites/_masked_writes.py`). And if all rows
are moved by one, they may stay where they are (`rewrites/_delay_lines.py`).

All of these read what is found here, by abstract interpretation. The program is gone
through with something known in place of each value. For leaf 0 the counter and leaf 1
the buffer, of six rows:

    i                               CounterIndex(0, {0})
    j = select(i < 0, i, i + 6)     CounterIndex(0, {0, 6})    one of the two
    at = reshape(j)                 (j,)                       an array of it
    row = gather(rows, at)          Rows({1})                  moved out of leaf 1
    new = select(is_kept, row, h)   Rows({1})                  still only moved
    rows = scatter(rows, at, new)   Buffer(1, {Block((j, None), (1, 3))}, holds={1})
    i = i + 1                       CounterIndex(0, {1})

`None` stands for anything, and is what an equation without a rule gives. If one of its
operands is a buffer, or has rows of it, then the buffer is computed with. That is noted
beside the values, and so is a buffer of which one version is used twice.

Calls are entered. A loop of this library is not, but whoever asks may say which of its
buffers it only writes rows to (`Following.carried`). A `scan`, a `while` or a `cond` of
JAX has no rule.
"""

import dataclasses
import functools
from collections import Counter as Count
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp

from ..._arrays import is_symbolic
from ..._compat import called_by, close, is_through
from ..._programs import (
    READS,
    WRITES,
    RowWrite,
    aval_of,
    equations,
    interpreted,
    makes_zeros,
    row_write,
)
from ..._types import AnyJaxpr
from ._known_values import (
    Block,
    Buffer,
    CounterIndex,
    Moved,
    RingIndex,
    Rows,
    Understood,
    counts,
    leaves_in,
    moved_rows,
)


@dataclasses.dataclass(frozen=True)
class Following:
    """Follows counters and buffers through a program.

    Attributes:
        starts: For leaves of the carry that count upwards, where they start.
        carried: From an equation that is a loop to the outputs of buffers that it only
            writes rows to, by the places of its operands.
        computed_with: The buffers that were computed with so far.
        copied: The buffers of which one version was used twice. To write to it, XLA has
            to copy it.
        known: What was found of the results of equations so far.
    """

    starts: Mapping[int, int] = dataclasses.field(default_factory=dict)
    carried: Callable[[jex.JaxprEqn], Mapping[int, int]] = lambda eqn: {}
    computed_with: set[int] = dataclasses.field(default_factory=set)
    copied: set[int | None] = dataclasses.field(default_factory=set)
    known: dict[jex.Var, Understood] = dataclasses.field(default_factory=dict)

    def outputs(
        self, program: AnyJaxpr, inputs: Sequence[Understood]
    ) -> list[Understood]:
        """What is known of the outputs of a program."""
        jaxpr = close(program).jaxpr
        uses = Count(x for x in jaxpr.outvars if isinstance(x, jex.Var))
        for eqn in jaxpr.eqns:
            # Reads do not count: they can all come before the write (`_in_place.py`).
            # Of some operands, `with_symbolic_zeros` only uses the tangents.
            if eqn.primitive.name not in READS:
                used = eqn.invars[-1:] if is_through(eqn) else eqn.invars
                uses.update(x for x in used if isinstance(x, jex.Var))

        def note_copies(variables: Sequence[jex.Var], known: Sequence[Any]) -> None:
            pairs = zip(variables, known, strict=True)
            buffers = [(x, k.leaf) for x, k in pairs if isinstance(k, Buffer)]
            self.copied.update(leaf for x, leaf in buffers if uses[x] > 1)

        def results(eqn: jex.JaxprEqn, ins: list[Understood]) -> list[Understood]:
            outs = self.results(eqn, ins)
            note_copies(eqn.outvars, outs)
            self.known.update(zip(eqn.outvars, outs, strict=True))
            return outs

        note_copies(jaxpr.invars, inputs)
        return interpreted(program, inputs, number_of, results, lambda value: None)

    def results(self, eqn: jex.JaxprEqn, ins: list[Understood]) -> list[Understood]:
        """What is known of the results of an equation."""
        name = eqn.primitive.name
        # What is computed with in a call is noted there.
        if (inner := called_by(eqn)) is not None:
            return self.outputs(inner, ins)
        if returns_operands(eqn):
            return ins[-len(eqn.outvars) :]
        if carried := self.carried(eqn):
            return self._loop(eqn, ins, carried)
        moved = range(len(ins))[_ONLY_MOVED.get(name, slice(0))]
        others = (known for i, known in enumerate(ins) if i not in moved)
        self.computed_with.update(*map(leaves_in, others))
        if (write := row_write(eqn)) is not None:
            return [_after_write(eqn, write, ins)]
        found = self._rule(eqn, ins) if ins and eqn.outvars else None
        if found is None:
            found = _something_of(ins[i] for i in moved)
        return [found] * len(eqn.outvars)

    def _loop(
        self, eqn: jex.JaxprEqn, ins: list[Understood], carried: Mapping[int, int]
    ) -> list[Understood]:
        outs: list[Understood] = [None] * len(eqn.outvars)
        for place, known in enumerate(ins):
            if place not in carried:
                self.computed_with.update(leaves_in(known))
            elif isinstance(known, Buffer):
                # It is not known where, or how often.
                shape = aval_of(eqn.invars[place]).shape
                block = Block((None,) * len(shape), shape, False, True)
                known = dataclasses.replace(known, blocks=known.blocks | {block})
                outs[carried[place]] = known
            elif isinstance(known, Rows):
                outs[carried[place]] = known
        return outs

    def _rule(self, eqn: jex.JaxprEqn, ins: list[Understood]) -> Understood:
        """What is known of the result of an equation that is no write and no call."""
        before, after = aval_of(eqn.invars[0]), aval_of(eqn.outvars[0])
        match eqn.primitive.name, *ins:
            # `i + 1`, and `2 + 3` of numbers.
            case "add", CounterIndex() as index, int(number):
                return index.plus(number)
            case "add", int(number), CounterIndex() as index:
                return index.plus(number)
            case "add", int(one), int(other):
                return one + other
            case "sub", CounterIndex() as index, int(number):
                return index.plus(-number)
            # `i < 0` is asked of each index, see below. Only that it is not less can be
            # known: what starts at or above a number, and counts upwards, stays there.
            case "lt", CounterIndex(leaf, offsets), int(number) if leaf in self.starts:
                return False if self.starts[leaf] + min(offsets) >= number else None
            # `i % n`, as `jnp` writes it. Nothing is corrected if `i` is not negative.
            case "rem", CounterIndex(leaf, offsets), int(number) if (
                number > 0 and leaf in self.starts and len(offsets) == 1
            ):
                (offset,) = offsets
                is_safe = self.starts[leaf] + offset >= 0
                return RingIndex(leaf, offset, number) if is_safe else None
            case "lt", RingIndex(), int(number) if number <= 0:
                return False
            case "lt", int(one), int(other):
                return one < other
            case "eq", int(one), int(other):
                return one == other
            case "ne", bool(one), bool(other):
                return one != other
            case "and", *cases if any(case is False for case in cases):
                return False
            # `where(i < 0, i + n, i)`, as `jnp` writes it for an index.
            case "select_n", bool(which), *cases:
                return cases[which]
            case "select_n", _, CounterIndex(leaf), *_ if _are_of(leaf, ins[1:]):
                return CounterIndex(leaf, _union(case.offsets for case in ins[1:]))
            # `where(p, rows.at[i].set(h), rows)`: it may have been written.
            case "select_n", _, Buffer(leaf), *_ if _are_of(leaf, ins[1:]):
                return _with_blocks_of(ins[1:])
            # `[i]`, `[i, j]`, and back.
            case (
                "broadcast_in_dim" | "reshape",
                CounterIndex() | RingIndex() | int() as number,
            ) if after.shape == (1,):
                return (number,)
            case "broadcast_in_dim", None | 0 if makes_zeros(eqn):
                return Buffer(None)
            # A buffer plus zeros that rows were written to, as transposes have it.
            case "add" | "add_any", Buffer(one), Buffer(other) if None in (one, other):
                return _with_blocks_of(ins)
            case "concatenate", *parts if tuple in map(type, parts):
                sizes = [aval_of(x).shape[0] for x in eqn.invars]
                if any(map(is_symbolic, sizes)):
                    return None
                whole = lambda part, n: part if isinstance(part, tuple) else (None,) * n
                return sum(map(whole, parts, sizes), ())
            case "slice", Buffer() | Moved() as known:
                return _slice_of(known, eqn)
            case "concatenate", *parts if any(
                isinstance(part, Moved | Buffer) for part in parts
            ):
                return _row_of_parts(parts, eqn)
            case "reshape" | "squeeze", tuple(numbers) if after.ndim < 2:
                return numbers if after.ndim else numbers[0]
            # Fewer bits would be the number modulo something else than the rows.
            case "convert_element_type", known if counts(before) and counts(after):
                return known if after.dtype.itemsize >= before.dtype.itemsize else None
        return None


# Which operands an equation only moves elsewhere. It computes with all others.
_ONLY_MOVED = {
    **dict.fromkeys(("broadcast_in_dim", "reshape", "squeeze", "transpose"), slice(1)),
    **dict.fromkeys(READS, slice(1)),
    "dynamic_update_slice": slice(2),
    "scatter": slice(0, 3, 2),
    "scatter-add": slice(1),
    "select_n": slice(1, None),
}


def _after_write(
    eqn: jex.JaxprEqn, write: RowWrite, ins: list[Understood]
) -> Understood:
    """A buffer after a write, or rows in an array that is none."""
    buffer, update = ins[0], ins[write.place]
    start = starts_of(eqn, write, ins)
    moved = _moved_after_write(eqn, write, ins, start)
    if not isinstance(buffer, Buffer):
        return moved or _something_of([buffer, update])
    block = Block(
        tuple(map(start.get, range(len(write.sizes)))),
        write.sizes,
        write.is_clamped,
        write.can_be_dropped,
        eqn.outvars[0],
    )
    holds = buffer.holds | leaves_in(update)
    return Buffer(buffer.leaf, buffer.blocks | {block}, holds, moved)


def _moved_after_write(
    eqn: jex.JaxprEqn,
    write: RowWrite,
    ins: list[Understood],
    starts: Mapping[int, Understood],
) -> Moved | None:
    """Which rows lie where after a write of whole rows at a known place."""
    if (at := place_of_new_rows(eqn, starts)) is None:
        return None
    axis, first, last = at
    aval, new = aval_of(eqn.invars[0]), aval_of(eqn.invars[write.place])
    if (moved := moved_rows(ins[0], axis, aval)) is None:
        return None
    parts: tuple[tuple[int, int] | int, ...] = (last - first,)
    if new.shape == write.sizes:
        own = moved_rows(ins[write.place], axis, new)
        parts = own.parts if own is not None and own.leaves == moved.leaves else parts
    before, after = moved.cut(0, first), moved.cut(last, aval.shape[axis])
    parts = (*before.parts, *parts, *after.parts)
    return dataclasses.replace(moved, parts=parts)


def _slice_of(known: Buffer | Moved, eqn: jex.JaxprEqn) -> Moved | None:
    """Consecutive rows of a leaf of the carry, or of moved rows."""
    aval = aval_of(eqn.invars[0])
    starts, stops = eqn.params["start_indices"], eqn.params["limit_indices"]
    strides = eqn.params["strides"] or (1,) * aval.ndim
    bounds = list(zip(starts, stops, strict=True))
    cut = [axis for axis, size in enumerate(aval.shape) if bounds[axis] != (0, size)]
    if len(cut) != 1 or any(stride != 1 for stride in strides):
        return None
    (axis,) = cut
    moved = moved_rows(known, axis, aval)
    return None if moved is None else moved.cut(*bounds[axis])


def _row_of_parts(known: Sequence[Understood], eqn: jex.JaxprEqn) -> Moved | None:
    """Moved rows with others before or behind them."""
    axis, parts = eqn.params["dimension"], list[tuple[int, int] | int]()
    avals = list(map(aval_of, eqn.invars))
    if any(is_symbolic(aval.shape[axis]) for aval in avals):
        return None
    pairs = zip(known, avals, strict=True)
    moved = [moved_rows(each, axis, aval) for each, aval in pairs]
    for each, aval in zip(moved, avals, strict=True):
        parts += [aval.shape[axis]] if each is None else each.parts
    leaves = _union(each.leaves for each in moved if each is not None)
    return Moved(leaves, axis, tuple(parts)) if len(leaves) == 1 else None


def starts_of(
    eqn: jex.JaxprEqn, write: RowWrite, ins: Sequence[Understood]
) -> dict[int, Understood]:
    """For axes of a buffer, where the block starts that an equation writes."""
    numbers = ins[2:]
    if eqn.primitive.name != "dynamic_update_slice":
        # With several indices, blocks are written that have no place in common.
        is_one = aval_of(eqn.invars[1]).shape == (len(write.axes),)
        is_known = is_one and isinstance(ins[1], tuple)
        numbers = ins[1] if is_known else [None] * len(write.axes)
    return dict(zip(write.axes, numbers, strict=True))


def place_of_new_rows(
    eqn: jex.JaxprEqn, starts: Mapping[int, Understood]
) -> tuple[int, int, int] | None:
    """Where an equation writes, if that is known and it writes whole rows.

    That is the axis of the rows, the first of these, and the one after the last.
    """
    shape, write = aval_of(eqn.invars[0]).shape, row_write(eqn)
    if write is None or eqn.primitive.name == "scatter-add":
        return None
    bounds = [
        (start, start + size) if isinstance(start := starts.get(axis, 0), int) else None
        for axis, size in enumerate(write.sizes)
    ]
    cut = [axis for axis, size in enumerate(shape) if bounds[axis] != (0, size)]
    if len(cut) != 1 or (found := bounds[cut[0]]) is None:
        return None
    return (cut[0], *found) if 0 <= found[0] <= found[1] <= shape[cut[0]] else None


def _with_blocks_of(buffers: Sequence[Buffer]) -> Buffer:
    """A buffer with the blocks of several, at most one of which is no zeros."""
    leaf = next((each.leaf for each in buffers if each.leaf is not None), None)
    blocks = _union(each.blocks for each in buffers)
    return Buffer(leaf, blocks, _union(each.holds for each in buffers))


def _union(sets: Iterable[frozenset[Any]]) -> frozenset[Any]:
    return frozenset[Any]().union(*sets)


def _something_of(known: Iterable[Understood]) -> Rows | None:
    leaves = _union(map(leaves_in, known))
    return Rows(leaves) if leaves else None


def returns_operands(eqn: jex.JaxprEqn) -> bool:
    """Whether an equation returns its operands, or the last of them, as they are."""
    name = eqn.primitive.name
    if name == "convert_element_type":  # only the weak type may differ
        return aval_of(eqn.invars[0]).dtype == aval_of(eqn.outvars[0]).dtype
    return name in ("copy", "optimization_barrier") or is_through(eqn)


def number_of(atom: jex.Literal) -> int | None:
    """The number that a literal is, if it is an integer."""
    aval = aval_of(atom)
    is_number = not aval.shape and jnp.issubdtype(aval.dtype, jnp.integer)
    return int(atom.val) if is_number else None


def _are_of(leaf: int | None, cases: Sequence[Understood]) -> bool:
    """Whether several values are counters, or buffers, of one leaf."""
    same = len(set(map(type, cases))) == 1
    return same and all(case.leaf == leaf for case in cases)


@functools.lru_cache(maxsize=512)
def writes_rows(program: jex.ClosedJaxpr) -> bool:
    """Whether a program writes rows of a buffer, at any depth."""
    return any(eqn.primitive.name in WRITES for eqn in equations(program))
