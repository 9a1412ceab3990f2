"""The two kernels of a loop: there, and back.

Each block of rows runs the whole loop by itself. What a row carries is in registers,
and the carries that the way back starts from are in memory. On the way back a block
runs the steps of a segment again, leaves their carries in a scratch, and reverses them
one by one, level by level.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._arrays import Arrays, Flags, pick, split, sum_dtype, zero_array
from ..._programs import aval_of, equations
from ..._types import Index, Value
from ..engine._backward_step import BackwardStep, program_of
from ..engine._loop import Loop
from ..engine._step import Step
from ..engine.orders._levels import Nest
from ..planning._work import CPU, work
from ._axes import NO_ROWS, AxisProgram, Classes, FoundRows, Rows, Val, program_of_jaxpr
from ._entries import InMemory
from ._leaves import Leaf, RowNumbers
from ._numbers import (
    Numbers,
    as_vectors,
    from_vectors,
    is_large,
    mapped_number,
    objects,
)
from ._one_row import OneRow
from ._pallas import call, precision_of_tiles, waiting, when
from ._pending import find_rows, mark, refuse_pending
from ._tiles import NotTiledError, Tiles, padded


@dataclasses.dataclass(frozen=True)
class Settings:
    """How kernels are made.

    Attributes:
        block: How many rows a block has; `None` to choose.
        interpret: Whether they are interpreted.
        most: The most steps that one launch runs; `None` for as many as take a second
            or so. A device that also draws a screen stops kernels of several seconds,
            and none can be interrupted.
    """

    block: int | None = None
    interpret: bool = False
    most: int | None = None

    def block_of(self, rows: int) -> int:
        """How many rows a block has if there are so many: a power of two."""
        if self.block is not None:
            return self.block
        # One row a thread. With few rows, small blocks reach more processors.
        block = 128 if rows >= 128 * 128 else 32
        # A thread has to find in memory what it left there itself. So no row has more
        # than one thread, and no thread more than one row.
        least = 1 if self.interpret else 32
        return max(min(block, 1 << (rows - 1).bit_length()), least)


# What a GPU of the size of an H100 does, in nanoseconds: an operation on a number of
# one of many rows, and one after the other; and how many registers it has in all.
_OPERATION, _OPERATION_ALONE = 3e-5, 3.3
_REGISTERS_IN_ALL, _MOST_REGISTERS = 132 * 2**16, 255
# Operations are counted, with those of which a function consists.
_OPERATIONS = dataclasses.replace(
    CPU, flop=0.5, entry=1.0, costly_entry=16.0, equation=0.0
)

# Tables of no more numbers are known to the compiler.
MOST_KNOWN = 4096


class _Traced:
    """Programs of one row, as far as a kernel needs them.

    Attributes:
        classes: The classes of axes in the programs.
        found: The rows.
        settings: How kernels are made.
    """

    # Whether all that a loop carries are vectors, even if rows have the same numbers.
    carries = False

    def __init__(self, classes: Classes, found: FoundRows, settings: Settings):
        self.classes, self.found, self.settings = classes, found, settings
        self.all_rows = frozenset(found.roots)
        self.block = settings.block_of(found.count)
        self.blocks = -(-found.count // self.block)
        # Small tables are numbers in the program, unless each row has its own part.
        is_small = lambda val: val.aval.size <= MOST_KNOWN and not self.differs(val)
        known = [is_small(val) for val, _ in classes.lifted]
        self._known = [
            pair for pair, flag in zip(classes.lifted, known, strict=True) if flag
        ]
        self._read = [
            pair for pair, flag in zip(classes.lifted, known, strict=True) if not flag
        ]
        self.lifted = [self.leaf(val) for val, _ in self._read]
        self.lifted_values = [value for _, value in self._read]

    def leaf(self, val: Val, time: tuple[int, int] | None = None) -> Leaf:
        """How an array lies in memory."""
        return Leaf.of(val.aval, self.rows(val), time)

    def rows(self, val: Val) -> list[int | None]:
        """For each axis of an array, which axis of rows it is."""
        roots = self.found.roots
        return [roots.index(r) if r in roots else None for r in self.classes.of(val)]

    def numbered(self, number: Any) -> RowNumbers:
        """The rows of a block."""
        return RowNumbers(self.found.sizes, self.block, number)

    def program(
        self, program: AxisProgram, want: Sequence[Rows] | None = None
    ) -> jex.ClosedJaxpr:
        """The program of one row, from its inputs, row numbers and constant arrays."""
        counts = len(program.ins), len(self.found.roots)

        def run(*flat: Value) -> list[Value]:
            ins, numbers, lifted = split(flat, *counts)
            row = OneRow(self.classes, self.found, numbers)
            values = [np.asarray(value) for _, value in self._known]
            pairs = zip((*self._known, *self._read), (*values, *lifted), strict=True)
            row.with_lifted({id(val): value for (val, _), value in pairs})
            return row.run(program, ins, want)

        row = OneRow(self.classes, self.found, ())
        number = jax.core.ShapedArray((), np.dtype("int32"))
        types = [row.type_of(val) for val in program.ins]
        types += [number] * counts[1]
        types += [row.type_of(val) for val, _ in self._read]
        return jax.make_jaxpr(run)(*types)

    def room(self, *programs: jex.ClosedJaxpr) -> list[jax.ShapeDtypeStruct]:
        """Memory by which numbers become tiles, if any product is one of tiles."""
        dots = [
            eqn
            for program in programs
            for eqn in equations(program)
            if eqn.primitive.name == "dot_general"
        ]
        sizes = [n for eqn in dots for n in _dot_sizes(eqn)]
        if not sizes:
            return []
        dtypes = [aval_of(eqn.outvars[0]).dtype for eqn in dots]
        dtype = max((d for d in dtypes), key=lambda d: d.itemsize)
        rows = padded(max(sizes))
        return [jax.ShapeDtypeStruct((rows, self.blocks * self.block), dtype)]

    def evaluating(self, rows: RowNumbers, room: Sequence[Any]) -> Numbers:
        """What evaluates programs in a kernel."""
        if not room:
            return Numbers(self.block)
        interpret = self.settings.interpret
        how = waiting(interpret), precision_of_tiles(interpret)
        return Numbers(self.block, Tiles(room[0], rows.own, rows.are_there, *how))

    def differs(self, val: Val) -> bool:
        """Whether rows have other numbers of an array."""
        return bool(val.pending) or any(r is not None for r in self.rows(val))

    def known(self, rows: RowNumbers) -> list[np.ndarray]:
        """The numbers of the rows, axis by axis, as inputs of programs."""
        axes = range(len(self.found.sizes))
        return [
            objects([InMemory(lambda _, i=i: rows.along(i, i), 0)], ()) for i in axes
        ]

    def vectors(self, array: np.ndarray, val: Val, dtype: Any = None) -> list[Value]:
        """The numbers of an array while a loop carries them."""
        dtype = dtype or val.aval.dtype
        return as_vectors(self.block, array, dtype, self.carries or self.differs(val))

    def nanoseconds(self, work: float, registers: int = _MOST_REGISTERS) -> float:
        """How long a GPU takes for so many operations on numbers of each row.

        Args:
            work: How many they are.
            registers: How many registers a thread takes. With fewer, more threads are
                there at once, and some compute while others wait.
        """
        count = self.found.count
        turns = max(count * registers / _REGISTERS_IN_ALL, 1)
        return work * max(count * _OPERATION, turns * _OPERATION_ALONE)

    def steps_at_once(self, *programs: jex.ClosedJaxpr) -> int:
        """How many steps one launch runs, if these programs are a step of it."""
        if self.settings.most is not None:
            return self.settings.most
        step = self.nanoseconds(sum(map(_operations, programs)))
        return max(int(1e9 / step), 1) if step else 2**31 - 1

    def run(
        self,
        kernel: Callable[..., None],
        inputs: Sequence[Value],
        outputs: Sequence[Leaf | jax.ShapeDtypeStruct],
        aliases: dict[int, int] | None = None,
    ) -> list[Value]:
        """Runs a kernel. `aliases` says which inputs become which outputs."""
        types = list(map(_type_of, outputs))
        return call(
            kernel,
            inputs,
            types,
            aliases=aliases,
            blocks=self.blocks,
            block=self.block,
            interpret=self.settings.interpret,
        )


def _operations(program: jex.ClosedJaxpr) -> float:
    return work(program.jaxpr, _OPERATIONS)


def _dot_sizes(eqn: jex.JaxprEqn) -> list[int]:
    """The sizes of a product of matrices, if it is one of tiles."""
    (lc, _), (lb, _) = eqn.params["dimension_numbers"]
    left, right = (aval_of(v) for v in eqn.invars)
    k, b = (math.prod(left.shape[i] for i in axes) for axes in (lc, lb))
    m, n = left.size // max(k * b, 1), right.size // max(k * b, 1)
    is_tile = b == 1 and jnp.issubdtype(aval_of(eqn.outvars[0]).dtype, jnp.floating)
    return [m, n, k] if is_tile and is_large(m, n, k) else []


class _Kernel:
    """What both kernels have.

    Attributes:
        programs: Those of one row.
    """

    programs: _Traced

    @property
    def found(self) -> FoundRows:
        """The rows of the loop."""
        return self.programs.found


class Forward(_Kernel):
    """The kernel that runs a loop, and stores carries.

    Attributes:
        step: The step.
        loop: The loop around it.
    """

    def __init__(self, step: Step, loop: Loop, settings: Settings):
        classes = Classes()
        program = program_of_jaxpr(classes, step.jaxpr)
        consts, carry, x = split(program.ins, step.num_consts, step.num_carry)
        after, y = split(program.outs, step.num_carry)
        for a, b in zip(carry, after, strict=True):
            classes.tie(a, b)

        def settle() -> None:
            outs = mark(classes, program, [NO_ROWS] * len(program.ins))
            refuse_pending(classes, NO_ROWS.union(*outs), _leaves)

        found = find_rows(classes, [program], carry or [*x, *y], settle)
        self.step, self.loop = step, loop
        self.programs = _Traced(classes, found, settings)
        self._program = program
        self._vals = consts, carry, x, after, y

    @functools.cached_property
    def of_row(self) -> jex.ClosedJaxpr:
        """The program of a step of one row."""
        return self.programs.program(self._program)

    @property
    def work(self) -> float:
        """How many operations a step has on numbers of each row."""
        return _operations(self.of_row)

    def __call__(
        self,
        nests: Sequence[Nest],
        held: Flags,
        slots: int,
        keeps_last: bool,
        consts: Arrays,
        init: Arrays,
        xs: Arrays,
    ) -> tuple[list[Value], list[Value], list[Value]]:
        """Runs the loop: the final carry, `ys`, and stored carries.

        Args:
            nests: Where segments begin, whose carries are stored.
            held: Which leaves of the carry are stored.
            slots: How many rows the arrays for these have.
            keeps_last: Whether the last carry is stored as well.
            consts: The consts of the step.
            init: The initial carry.
            xs: The `xs` of the loop.
        """
        loop, of = self.loop, self.programs
        c_vals, h_vals, x_vals, after, y_vals = self._vals
        c_leaves, h_leaves = map(of.leaf, c_vals), list(map(of.leaf, h_vals))
        c_leaves = list(c_leaves)
        x_leaves = [
            of.leaf(v, (axis, x.shape[axis]))
            for v, axis, x in zip(x_vals, loop.x_axes, xs, strict=True)
        ]
        has_rows = loop.rows > 0
        y_leaves = [of.leaf(v, (0, loop.rows)) for v in y_vals if has_rows]
        held = held or (False,) * len(h_vals)
        s_leaves = [of.leaf(v, (0, slots)) for v in pick(h_vals, held)]
        program = self.of_row
        ins = [*c_leaves, *of.lifted, *h_leaves, *x_leaves]
        outs, room = [*h_leaves, *y_leaves, *s_leaves], of.room(program)
        counts = len(c_leaves), len(of.lifted), len(h_leaves), len(x_leaves)
        joined = _joined(nests)
        at_once = of.steps_at_once(program)
        if not any(held) and len(joined) == 1 and joined[0][1] > at_once:
            joined = [(Nest((-(-joined[0][1] // at_once), at_once)), joined[0][1])]
        pieces = _Pieces.of(joined, at_once)
        kept = [*y_leaves, *s_leaves]
        counts = (1, *counts, len(kept) * pieces.are_several)
        counts = (*counts, len(h_leaves), len(y_leaves), len(s_leaves))

        def kernel(number: Any, *refs: Any) -> None:
            rows = of.numbered(number)
            first, c, lifted, h, x, _, out, y, stored, scratch = split(refs, *counts)
            numbers = of.evaluating(rows, scratch)
            read = functools.partial(_read, rows)
            const = read(c_leaves, c)
            more = [*of.known(rows), *read(of.lifted, lifted)]
            carry = _carried(of, h_vals, read(h_leaves, h))

            def store(row: Index, carry: list[list[Value]]) -> None:
                for leaf, ref, values in zip(
                    s_leaves, stored, pick(carry, held), strict=True
                ):
                    leaf.write(ref, rows, values, row)

            def move(position: Index, carry: list[list[Value]]) -> list[list[Value]]:
                index = loop.index(position)
                x_now = read(x_leaves, x, index)
                made = numbers.run(
                    program, [*const, *_opened(h_vals, h_leaves, carry), *x_now, *more]
                )
                made, ys = split(made, len(h_leaves))
                if y:
                    _write_kept(of, loop, index, y_vals, y_leaves, y, rows, ys)
                return _carried(of, h_vals, made)

            start = row = 0
            for nest, length in joined:

                def segment(
                    i: Index, carry: Any, nest=nest, start=start, row=row, end=length
                ) -> Any:
                    if stored:
                        store(row + i, carry)
                    first = i * nest.stride
                    go = lambda j, carry: move(start + first + j, carry)
                    return lax.fori_loop(0, _steps(nest, first, end), go, carry)

                count = -(-length // nest.stride)
                carry = lax.fori_loop(*pieces.bounds(count, first), segment, carry)
                start, row = start + length, row + count
            if keeps_last and stored:
                store(row, carry)
            for leaf, ref, values in zip(h_leaves, out, carry, strict=True):
                leaf.write(ref, rows, values)

        arrays = [*consts, *of.lifted_values, *init, *xs]
        given = [leaf.opened(a) for leaf, a in zip(ins, arrays, strict=True)]
        before, carry, after = split(given, len(given) - len(xs) - len(init), len(init))

        def launch(first: Value, carry: Arrays, so_far: Arrays) -> list[Value]:
            inputs = [first, *before, *carry, *after]
            at = {len(inputs) + i: len(carry) + i for i in range(len(so_far))}
            return of.run(kernel, [*inputs, *so_far], [*outs, *room], at)

        def next_piece(i: Value, state: list[Value]) -> list[Value]:
            made = launch(pieces.first(i), *split(state, len(carry)))
            return made[: len(state)]

        if pieces.are_several:
            state = [*carry, *(_zeros(leaf.type) for leaf in kept)]
            made = lax.fori_loop(0, pieces.count, next_piece, state)
        else:
            made = launch(pieces.first(0), carry, [])
        made = [leaf.closed(a) for leaf, a in zip(outs, made, strict=False)]
        carry, ys, stored = split(made, len(h_leaves), len(y_leaves))
        if not has_rows:
            ys = list(map(zero_array, loop.stacked_types(self.step.y_types)))
        return carry, ys, stored


@dataclasses.dataclass(frozen=True)
class _Pieces:
    """A loop in several launches, each of so many segments.

    Attributes:
        count: How many launches there are.
        size: How many segments each of them runs.
    """

    count: int
    size: int

    @classmethod
    def of(cls, joined: Sequence[tuple[Nest, int]], most: int) -> "_Pieces":
        """For launches of so many steps at most, or of one segment."""
        if len(joined) > 1:
            return cls(1, 0)
        ((nest, length),) = joined
        segments, size = -(-length // nest.stride), max(most // nest.stride, 1)
        return cls(-(-segments // size), size)

    @property
    def are_several(self) -> bool:
        return self.count > 1

    def first(self, piece: Index) -> Value:
        """The first segment of a piece, as an array for a kernel."""
        return jnp.full((1,), piece * self.size, np.dtype("int32"))

    def bounds(self, segments: int, refs: Sequence[Any]) -> tuple[Index, Index]:
        """From which segment on, and up to which, a launch runs."""
        if not self.are_several:
            return 0, segments
        first = refs[0][0]
        return first, jnp.minimum(first + self.size, segments)


def _zeros(aval: jax.ShapeDtypeStruct) -> Value:
    return jnp.zeros(aval.shape, aval.dtype)


def _joined(nests: Sequence[Nest]) -> list[tuple[Nest, int]]:
    """Nests with the number of their steps; a shorter last segment is part of one.

    A kernel has the step once for each of them, and so compiles in half of the time.
    """
    joined = [(nest, nest.length) for nest in nests]
    if len(nests) == 2:
        first, last = nests
        is_short = last.levels[0] == 1 and last.length < first.stride
        if is_short and len(first.levels) == 2:
            return [(first, first.length + last.length)]
    return joined


def _steps(nest: Nest, first: Index, end: Any) -> Any:
    """How many steps the segment has that starts at a step, if there are so many."""
    if isinstance(end, int) and end % nest.stride == 0:
        return nest.stride
    return jnp.minimum(nest.stride, end - first)


def _write_kept(
    of: _Traced,
    loop: Loop,
    index: Index,
    vals: Sequence[Val],
    leaves: Sequence[Leaf],
    refs: Sequence[Any],
    rows: RowNumbers,
    ys: Sequence[np.ndarray],
) -> None:
    row, is_kept = loop.row(index)
    values = [of.vectors(y, val) for y, val in zip(ys, vals, strict=True)]

    def write() -> None:
        for leaf, ref, value in zip(leaves, refs, values, strict=True):
            leaf.write(ref, rows, value, row)

    write() if is_kept is True else when(is_kept)(write)


def _leaves() -> str:
    return "a sum over them is carried to the next step, or returned"


def _read(
    rows: RowNumbers, leaves: Sequence[Leaf], refs: Sequence[Any], *time: Index
) -> list[np.ndarray]:
    """The numbers of arrays, at a step if they have a row for each."""
    pairs = zip(leaves, refs, strict=True)
    return [leaf.read(ref, rows, *time) for leaf, ref in pairs]


def _carried(
    of: _Traced, vals: Sequence[Val], arrays: Sequence[np.ndarray]
) -> list[list[Value]]:
    return [of.vectors(a, val) for a, val in zip(arrays, vals, strict=True)]


def _opened(
    vals: Sequence[Val], leaves: Sequence[Leaf], carry: Sequence[list[Value]]
) -> list[np.ndarray]:
    return [
        from_vectors(values, leaf.shape, val.aval.dtype)
        for values, leaf, val in zip(carry, leaves, vals, strict=True)
    ]


class _Summed(NamedTuple):
    """An output of the way back.

    Attributes:
        of_step: It, at one step.
        leaf: How it lies in memory, one entry for each block or row if it is a sum.
        over: The axes of rows over which it is added up, as axes of the leaf's array.
        by_block: Whether there is one entry for each block.
    """

    of_step: Val
    leaf: Leaf
    over: tuple[int, ...]
    by_block: bool

    @classmethod
    def of(
        cls, of: _Traced, val: Val, dtype: Any, time: tuple[int, int] | None = None
    ) -> "_Summed":
        aval = val.aval.update(dtype=dtype)
        rows = of.rows(val)
        if not val.pending:
            return cls(val, Leaf.of(aval, rows, time), (), False)
        own = [r for r in rows if r is not None]
        if not own:
            # Added up within a block, which has an axis of blocks in front.
            aval = aval.update(shape=(of.blocks, *aval.shape))
            at = time and (time[0] + 1, time[1])
            leaf = Leaf.of(aval, [-1, *rows], at)
            return cls(val, leaf, (0,), True)
        more = [i for i in range(len(of.found.sizes)) if i not in own]
        sizes = [of.found.sizes[i] for i in more]
        aval = aval.update(shape=(*sizes, *aval.shape))
        at = time and (time[0] + len(more), time[1])
        leaf = Leaf.of(aval, [*more, *rows], at)
        return cls(val, leaf, tuple(range(len(more))), False)

    def zeros(self, of: _Traced) -> list[Value]:
        """What is carried before the first term."""
        return [jnp.zeros(of.block, self.leaf.number)] * of.leaf(self.of_step).count

    def added(
        self, of: _Traced, numbers: Numbers, total: list[Value], array: np.ndarray
    ) -> list[Value]:
        """What is carried after another term."""
        values = of.vectors(array, self.of_step, self.leaf.dtype)
        return [t + v for t, v in zip(total, values, strict=True)]

    def write(
        self, ref: Any, rows: RowNumbers, values: Sequence[Value], time: Any = None
    ) -> None:
        if not self.by_block:
            self.leaf.write(ref, rows, values, time)
            return
        there = rows.are_there
        for k, value in enumerate(values):
            if there is not None:
                value = jnp.where(there, value, jnp.zeros_like(value))
            index = list(self.leaf.at(_OfBlock(rows), k, time))
            ref[tuple(index)] = jnp.sum(value).astype(self.leaf.number)

    def total(self, x: Value) -> Value:
        """The sum, from what the kernel has written."""
        x = self.leaf.closed(x)
        return jnp.sum(x, self.over) if self.over else x


class _Matrix(NamedTuple):
    """A sum of products of two vectors over steps and rows, in a tile of each block.

    Attributes:
        of_step: It, at one step.
        blocks: How many blocks there are.
    """

    of_step: Val
    blocks: int

    @property
    def leaf(self) -> jax.ShapeDtypeStruct:
        m, n = map(padded, self.of_step.shape)
        return jax.ShapeDtypeStruct((self.blocks, m, n), self.of_step.aval.dtype)

    def zeros(self, of: _Traced) -> Value:
        return jnp.zeros(self.leaf.shape[1:], self.leaf.dtype)

    def added(
        self, of: _Traced, numbers: Numbers, total: Value, array: np.ndarray
    ) -> Value:
        return total + numbers.outer(array, self.leaf.dtype)

    def write(self, ref: Any, rows: RowNumbers, total: Value) -> None:
        m, n = total.shape
        index = [lax.broadcasted_iota(np.dtype("int32"), (m, n), i) for i in range(2)]
        ref[(jnp.full((m, n), rows.number, np.dtype("int32")), *index)] = total

    def total(self, x: Value) -> Value:
        m, n = self.of_step.shape
        return jnp.sum(x, 0)[:m, :n]


def _is_matrix(out: _Summed, room: Sequence[jax.ShapeDtypeStruct]) -> bool:
    """Whether a sum may be one of products of two vectors, in a tile."""
    val, shape = out.of_step, out.of_step.shape
    return (
        out.by_block
        and len(shape) == 2
        and is_large(*shape, 1)
        and len(room) > 0
        and room[0].dtype == out.leaf.dtype == val.aval.dtype
        and padded(max(shape)) <= room[0].shape[0]
    )


@dataclasses.dataclass
class _OfBlock:
    """Stands for the rows of a block where they are added up."""

    rows: RowNumbers

    def along(self, first: int, last: int | None) -> Value:
        return self.rows.number


class Backward(_Kernel):
    """The kernel that takes cotangents back through a loop."""

    def __init__(self, step: Step, loop: Loop, back: BackwardStep, settings: Settings):
        classes = Classes()
        again = program_of_jaxpr(classes, step.jaxpr)
        pull = program_of_jaxpr(classes, program_of(back))
        (_, _, x), (carried, z) = back.types, back.end_types
        counts = step.num_consts, step.num_carry
        c1, h1, x1 = split(again.ins, *counts)
        c2, h2, x2, z2, g2 = split(pull.ins, *counts, len(x), len(z))
        sums, before, ct_x = split(pull.outs, len(back.const_of), len(carried))
        pairs = [*zip((*c1, *h1, *x1), (*c2, *h2, *x2), strict=True)]
        pairs += [*zip(h1, again.outs, strict=True), *zip(g2, before, strict=True)]
        pairs += [(s, c2[i]) for s, i in zip(sums, back.const_of, strict=True)]
        pairs += [(s, x2[i]) for s, i in zip(ct_x, back.x_of, strict=True)]
        for a, b in pairs:
            classes.tie(a, b)

        def settle() -> None:
            outs = mark(classes, again, [NO_ROWS] * len(again.ins))
            refuse_pending(classes, NO_ROWS.union(*outs), _leaves)
            pending = [NO_ROWS] * len(g2)
            none = [NO_ROWS] * (len(pull.ins) - len(g2))
            while True:
                outs = mark(classes, pull, [*none, *pending])[len(sums) :]
                grown = [a | b for a, b in zip(pending, outs, strict=False)]
                if grown == pending:
                    break
                pending = grown

        found = find_rows(classes, [again, pull], [*h1, *g2] or x1, settle)
        self.step, self.loop, self.back = step, loop, back
        self.programs = _Traced(classes, found, settings)
        # A scratch has a number for each row: one row must not read that of another.
        self.programs.carries = True
        self._again, self._pull = again, pull
        # Which sums are no matrices in tiles, and which was added to last.
        self._not_tiled, self._added = set[int](), 0
        self._vals = c2, h2, x2, z2, g2, sums, before, ct_x

    def _over(self, val: Val) -> Rows:
        """The rows over which a sum is yet to be added up."""
        of = self.programs
        return of.all_rows - frozenset(of.classes.of(val)) if val.pending else NO_ROWS

    @functools.cached_property
    def of_row(self) -> tuple[jex.ClosedJaxpr, jex.ClosedJaxpr]:
        """The programs of one row: of a step, and of its way back."""
        *_, going, sums, before, ct_x = self._vals
        for a, b in zip(going, before, strict=True):
            b.pending = a.pending = a.pending | b.pending
        want = list(map(self._over, (*sums, *before, *ct_x)))
        of = self.programs
        return of.program(self._again), of.program(self._pull, want)

    @property
    def work(self) -> float:
        """How many operations it takes to take a step back, on numbers of each row."""
        return _operations(self.of_row[1])

    def __call__(
        self,
        nests: Sequence[Nest],
        consts: Arrays,
        xs: Arrays,
        zs: Arrays,
        stored: Arrays,
        carried: Arrays,
    ) -> tuple[list[Value], list[Value], list[Value]]:
        """Goes back: the cotangents of consts, of the initial carry, and of `xs`.

        Args:
            nests: Where the stored carries are from, and how to go back between them.
            consts: The consts of the step.
            xs: The `xs` of the loop.
            zs: The `z` of all steps.
            stored: The stored carries.
            carried: What is carried back from the end.
        """
        loop, of = self.loop, self.programs
        c_vals, h_vals, x_vals, z_vals, g_vals, sums, before, ct_x = self._vals
        again, pull = self.of_row
        c_leaves, g_leaves = list(map(of.leaf, c_vals)), list(map(of.leaf, g_vals))
        h_leaves = list(map(of.leaf, h_vals))
        x_leaves = [
            of.leaf(v, (axis, x.shape[axis]))
            for v, axis, x in zip(x_vals, loop.x_axes, xs, strict=True)
        ]
        z_leaves = [
            of.leaf(v, (0, z.shape[0])) for v, z in zip(z_vals, zs, strict=True)
        ]
        s_leaves = [
            of.leaf(v, (0, s.shape[0])) for v, s in zip(h_vals, stored, strict=True)
        ]
        wide = [sum_dtype(v.aval.dtype, loop.sums) for v in sums]
        times = [(loop.x_axes[i], xs[i].shape[loop.x_axes[i]]) for i in self.back.x_of]
        sum_outs = [_Summed.of(of, v, d) for v, d in zip(sums, wide, strict=True)]
        g_outs = [_Summed.of(of, v, v.aval.dtype) for v in before]
        x_outs = [
            _Summed.of(of, v, v.aval.dtype, t) for v, t in zip(ct_x, times, strict=True)
        ]
        depth = max(len(nest.levels) for nest in nests) - 1
        rooms = [
            max(nest.levels[d + 1] for nest in nests if len(nest.levels) > d + 1)
            for d in range(depth)
        ]
        columns = of.blocks * of.block
        # A scratch for each level, in which rows are adjacent.
        scratch = [
            jax.ShapeDtypeStruct((n, max(leaf.count, 1), columns), leaf.number)
            for n in rooms
            for leaf in h_leaves
        ]
        ins = [*c_leaves, *of.lifted, *x_leaves, *z_leaves, *s_leaves, *g_leaves]
        counts = [
            len(group)
            for group in (c_leaves, of.lifted, x_leaves, z_leaves, s_leaves, g_leaves)
        ]
        room = of.room(again, pull)
        sum_outs = [
            _Matrix(out.of_step, of.blocks)
            if _is_matrix(out, room) and i not in self._not_tiled
            else out
            for i, out in enumerate(sum_outs)
        ]
        groups = (sum_outs, g_outs, x_outs)
        joined = _joined(nests)
        pieces = _Pieces.of(joined, of.steps_at_once(again, pull))
        counts = [1, *counts, len(x_outs) * pieces.are_several]

        def kernel(number: Any, *refs: Any) -> None:
            rows = of.numbered(number)
            parts = split(refs, *counts, *map(len, groups))
            first_piece, c, lifted, x, z, s, g, _, *outs = parts
            scratch, own_room = split(outs[3], depth * len(h_leaves))
            numbers = of.evaluating(rows, own_room)
            read = functools.partial(_read, rows)
            const = read(c_leaves, c)
            more = [*of.known(rows), *read(of.lifted, lifted)]
            levels = [
                scratch[d * len(h_leaves) : (d + 1) * len(h_leaves)]
                for d in range(depth)
            ]

            def advance(position: Index, carry: Any) -> Any:
                x_now = read(x_leaves, x, loop.index(position))
                ins = [*const, *_opened(h_vals, h_leaves, carry), *x_now, *more]
                return _carried(of, h_vals, numbers.run(again, ins))

            def taken(position: Index, carry: Any, state: Any) -> Any:
                totals, going = state
                index = loop.index(position)
                row, is_kept = loop.row(index)
                zs_now = read(z_leaves, z, row)
                if is_kept is not True:
                    zs_now = [_or_zeros(array, is_kept) for array in zs_now]
                made = numbers.run(
                    pull,
                    [
                        *const,
                        *_opened(h_vals, h_leaves, carry),
                        *read(x_leaves, x, index),
                        *zs_now,
                        *_opened(g_vals, g_leaves, going),
                        *more,
                    ],
                )
                terms, going, cts = split(made, len(sums), len(g_vals))
                triples = zip(sum_outs, totals, terms, strict=True)
                totals = list[Any]()
                for self._added, (out, total, array) in enumerate(triples):
                    totals.append(out.added(of, numbers, total, array))
                for out, ref, a in zip(x_outs, outs[2], cts, strict=True):
                    out.write(ref, rows, of.vectors(a, out.of_step), index)
                return totals, _carried(of, before, going)

            def stored_at(level: int, row: Index) -> Any:
                if level < 0:
                    return _carried(of, h_vals, read(s_leaves, s, row))
                return [
                    [ref[row, k, rows.own] for k in range(leaf.count)]
                    for leaf, ref in zip(h_leaves, levels[level], strict=True)
                ]

            def reverse(
                level: int,
                nest: Nest,
                start: Index,
                first: Index,
                end: Any,
                state: Any,
                only: tuple[Index, Index] | None = None,
            ) -> Any:
                """Takes back the segments of a level, the last one first.

                There are steps up to `end`, counted from `start`; `only` some of the
                segments are taken back.
                """
                low, count = only or (0, -(-end // nest.stride))

                def segment(i: Index, state: Any) -> Any:
                    i = count - 1 - (i - low)
                    position = start + i * nest.stride
                    carry = stored_at(level, first + i)
                    if len(nest.levels) == 1:
                        return taken(position, carry, state)
                    within, steps = nest.within, _steps(nest, i * nest.stride, end)
                    parts = -(-steps // within.stride)

                    def fill(j: Index, carry: Any) -> Any:
                        put(j, carry)
                        at = position + j * within.stride
                        go = lambda k, carry: advance(at + k, carry)
                        return lax.fori_loop(0, within.stride, go, carry)

                    def put(j: Index, carry: Any) -> None:
                        for refs, values in zip(levels[level + 1], carry, strict=True):
                            for k, value in enumerate(values):
                                refs[j, k, rows.own] = jnp.broadcast_to(
                                    value, (of.block,)
                                )

                    # After its last carry, a segment does not have to be run on.
                    last = carry
                    if within.levels[0] > 1:
                        last = lax.fori_loop(0, parts - 1, fill, carry)
                    put(parts - 1, last)
                    return reverse(level + 1, within, position, 0, steps, state)

                return lax.fori_loop(low, count, segment, state)

            going = [
                of.vectors(_first_only(of, a, self._over(v), more), v)
                for a, v in zip(read(g_leaves, g), g_vals, strict=True)
            ]
            state = ([out.zeros(of) for out in sum_outs], going)
            position = sum(length for _, length in joined)
            row = sum(nest.levels[0] for nest in nests)
            for nest, length in reversed(joined):
                segments = -(-length // nest.stride)
                position, row = position - length, row - segments
                only = pieces.bounds(segments, first_piece)
                state = reverse(-1, nest, position, row, length, state, only)
            for group, refs, arrays in zip(groups[:2], outs[:2], state, strict=True):
                for out, ref, values in zip(group, refs, arrays, strict=True):
                    out.write(ref, rows, values)

        arrays = [*consts, *of.lifted_values, *xs, *zs, *stored, *carried]
        given = [leaf.opened(a) for leaf, a in zip(ins, arrays, strict=True)]
        outputs = [out.leaf for group in groups for out in group]

        def launch(first: Value, g: Arrays, so_far: Arrays) -> list[list[Value]]:
            inputs = [first, *given[: len(given) - len(g)], *g]
            at = len(sum_outs) + len(g_outs)
            aliases = {len(inputs) + i: at + i for i in range(len(so_far))}
            outs = [*outputs, *scratch, *room]
            made = of.run(kernel, [*inputs, *so_far], outs, aliases)
            return split(made, *map(len, groups))[:3]

        def piece_before(i: Value, state: Any) -> Any:
            totals, g, so_far = state
            g = [leaf.opened(x) for leaf, x in zip(g_leaves, g, strict=True)]
            terms, g, so_far = launch(pieces.first(pieces.count - 1 - i), g, so_far)
            totals = [t + x for t, x in zip(totals, terms, strict=True)]
            return totals, _totals(g_outs, g), so_far

        try:
            if pieces.are_several:
                zeros = lambda outs: [_zeros(_type_of(out.leaf)) for out in outs]
                state = zeros(sum_outs), list(carried), zeros(x_outs)
                made = lax.fori_loop(0, pieces.count, piece_before, state)
                return _totals(sum_outs, made[0]), made[1], _totals(x_outs, made[2])
            made = launch(pieces.first(0), given[len(given) - len(carried) :], [])
        except NotTiledError:
            self._not_tiled.add(self._added)
            return self(nests, consts, xs, zs, stored, carried)
        sums, before, ct_xs = map(_totals, groups, made)
        return sums, before, ct_xs


def _totals(outs: Sequence[Any], made: Sequence[Value]) -> list[Value]:
    return [out.total(x) for out, x in zip(outs, made, strict=True)]


def _type_of(leaf: Leaf | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return leaf.type if isinstance(leaf, Leaf) else leaf


def _or_zeros(array: np.ndarray, is_kept: Value) -> np.ndarray:
    """The numbers of a row of `zs`, or zeros."""

    def of(x: Value) -> Value:
        flag = jnp.broadcast_to(is_kept, jnp.shape(x))
        return jnp.where(flag, x, jnp.zeros_like(x))

    entries = [mapped_number(of, x) for x in array.reshape(-1)]
    return objects(entries, array.shape)


def _first_only(
    of: _Traced, array: np.ndarray, over: Rows, more: Sequence[np.ndarray]
) -> np.ndarray:
    """What all rows share, as a sum over rows."""
    if not over:
        return array
    known: list[Any] = [more[of.found.roots.index(root)][()] for root in over]
    firsts = [x.read(0) == 0 for x in known]
    is_first = functools.reduce(lambda a, b: a & b, firsts)

    def of_entry(x: Value) -> Value:
        return jnp.where(is_first, x, jnp.zeros_like(x))

    entries = [mapped_number(of_entry, x) for x in array.reshape(-1)]
    return objects(entries, array.shape)
