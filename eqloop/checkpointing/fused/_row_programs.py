"""Programs of one row, and how the arrays around them lie in memory."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from ..._arrays import pick, split
from ..._programs import aval_of, equations
from ..._types import Index, Value
from ..planning._work import CPU, work
from ..steps._loop import Loop
from ._classes import AxisProgram, Classes, FoundRows, Rows, Val
from ._entries import InMemory
from ._leaves import Leaf, RowNumbers
from ._lowered import lowered
from ._mosaic import BLOCK, why_not, why_not_on_tpu, written
from ._numbers import Numbers
from ._one_row import OneRow
from ._pallas import (
    by_mosaic,
    by_tiles,
    call,
    has_tensor_cores,
    memory_of_tpu,
    precision_of_tiles,
    waiting,
)
from ._panels import EXTREMES
from ._products import is_large
from ._scope import BlockScope, from_vectors, numbers_of, objects
from ._tiles import Tiles, padded
from ._tpu import TILE


@dataclasses.dataclass(frozen=True)
class Settings:
    """How kernels are made.

    Attributes:
        block: How many rows a block has; `None` to choose.
        interpret: Whether they are interpreted.
        most: The most steps that one launch runs; `None` for as many as take a second
            or so. A device that also draws a screen stops kernels of several seconds,
            and none can be interrupted.
        mosaic: Whether they are compiled by Mosaic GPU, where that can make them.
        panels: Whether they are by panels, where that can be.
        tiles: Whether they are compiled for a TPU.
    """

    block: int | None = None
    interpret: bool = False
    most: int | None = None
    mosaic: bool = dataclasses.field(default_factory=by_mosaic)
    panels: bool = dataclasses.field(default_factory=has_tensor_cores)
    tiles: bool = dataclasses.field(default_factory=by_tiles)

    def of(self, loop: Loop) -> "Settings":
        """Those for a loop."""
        # The rows of a block wait for the one that goes on longest, which a single warp
        # does without a barrier.
        block = self.block or (32 if loop.stops else None)
        return dataclasses.replace(self, block=block)

    def block_of(self, rows: int, mosaic: bool) -> int:
        """How many rows a block has if there are so many: a power of two."""
        if self.block is not None:
            return self.block
        if mosaic and self.tiles:
            return TILE
        if mosaic:
            return min(BLOCK, 1 << (rows.bit_length() - 1))
        # One row a thread. With few rows, small blocks reach more processors.
        block = 128 if rows >= 128 * 128 else 32
        # A thread has to find in memory what it left there itself. So no row has more
        # than one thread, and no thread more than one row.
        least = 1 if self.interpret else 32
        return max(min(block, 1 << (rows - 1).bit_length()), least)


# What a GPU of the size of an H100 does, in nanoseconds: an operation on a number of
# one of many rows, and one after the other; and how many registers it has in all.
_OPERATION, _OPERATION_ALONE = 3e-5, 3.3
# And what a TPU v5e does, by the compiler: about one on a tile in each of its cycles.
_OPERATION_OF_A_TILE = 0.7


_REGISTERS_IN_ALL, _MOST_REGISTERS = 132 * 2**16, 255


# Operations are counted, with those of which a function consists.
_OPERATIONS = dataclasses.replace(
    CPU, flop=0.5, entry=1.0, costly_entry=16.0, equation=0.0
)


# Tables of no more numbers are known to the compiler.
MOST_KNOWN = 4096


class RowPrograms:
    """Programs of one row, as far as a kernel needs them.

    Attributes:
        classes: The classes of axes in the programs.
        found: The rows.
        settings: How kernels are made.
    """

    # Whether all that a loop carries are vectors, even if rows have the same numbers.
    carries = False
    # Why Mosaic GPU does not compile the kernel, once that is known; "" if it does.
    why_not_mosaic: str | None = None

    def __init__(self, classes: Classes, found: FoundRows, settings: Settings):
        self.classes, self.found, self.settings = classes, found, settings
        self.all_rows = frozenset(found.roots)
        # Small tables are numbers in the program, unless each row has its own part.
        is_small = lambda val: val.aval.size <= MOST_KNOWN and not self.differs(val)
        known = [is_small(val) for val, _ in classes.lifted]
        self._known = pick(classes.lifted, known)
        self._read = pick(classes.lifted, [not flag for flag in known])
        self.lifted = [self.leaf(val) for val, _ in self._read]
        self.lifted_values = [value for _, value in self._read]

    @functools.cached_property
    def block(self) -> int:
        """How many rows a block has, once the programs are made."""
        return self.settings.block_of(self.found.count, self.is_sliced)

    @property
    def blocks(self) -> int:
        """How many blocks there are."""
        return -(-self.found.count // self.block)

    @property
    def is_sliced(self) -> bool:
        """Whether the kernel is one of Mosaic GPU, which reads slices of arrays."""
        assert self.why_not_mosaic is not None
        return not self.why_not_mosaic

    @property
    def is_tiled(self) -> bool:
        """Whether the kernel is one for a TPU."""
        return self.settings.tiles and self.is_sliced

    def for_backend(
        self, programs: Sequence[jex.ClosedJaxpr], leaves: Sequence[Leaf]
    ) -> list[jex.ClosedJaxpr]:
        """Programs of one row for the backend of Pallas that makes a kernel of them."""
        settings, count = self.settings, len(self.found.sizes)
        block = TILE if settings.tiles else BLOCK
        made = programs = list(map(lowered, programs))
        if not settings.mosaic and not settings.tiles:
            why = "it is not there"
        elif settings.block not in (None, block):
            why = f"blocks have {settings.block} rows, and not {block}"
        elif self.found.count < BLOCK and not settings.interpret:
            why = f"there are fewer than {BLOCK} rows"
        elif not settings.tiles and any(map(_dot_sizes, _dots(programs))):
            why = "there are products of larger matrices"
        elif not all(leaf.is_sliced(count) for leaf in (*leaves, *self.lifted)):
            why = "an array has some of the axes of rows, or has them in another order"
        else:
            made = list(map(written, programs))
            why = why_not(made) or (settings.tiles and why_not_on_tpu(made)) or ""
        self.why_not_mosaic = why
        return programs if why else made

    def why_not_tiled(self, times: Iterable[tuple[Sequence[Val], int]]) -> str | None:
        """Why no TPU has a kernel with so many of some values, if none has."""
        if self.why_not_mosaic:
            return self.why_not_mosaic
        needs: dict[str, int] = {"scalars": 0, "vectors": 0}
        for vals, count in times:
            for val in vals:
                # The part of the next block is there as well.
                own, one = self.differs(val), count * self.leaf(val).count
                needs["vectors" if own else "scalars"] += one * (8 * TILE if own else 4)
        for name, most in memory_of_tpu().items():
            if needs[name] > 0.9 * most:
                size, most = (f"{n / 2**20:.1f} MiB" for n in (needs[name], most))
                return f"{size} do not fit into a TPU's memory of {name}, {most}"
        return None

    def leaf(self, val: Val, time: tuple[int, int] | None = None) -> Leaf:
        """How an array lies in memory."""
        return Leaf.of(val.aval, self.rows(val), time)

    def rows(self, val: Val) -> list[int | None]:
        """For each axis of an array, which axis of rows it is."""
        roots = self.found.roots
        return [roots.index(r) if r in roots else None for r in self.classes.of(val)]

    def numbered(self, number: Any) -> RowNumbers:
        """The rows of a block."""
        are = self.is_sliced, self.is_tiled
        return RowNumbers(self.found.sizes, self.block, number, *are)

    def program(
        self, program: AxisProgram, want: Sequence[Rows] | None = None
    ) -> jex.ClosedJaxpr:
        """What one row computes, from its inputs, row numbers and constant arrays.

        It is `lowered`, but for what panels have besides.
        """
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
        return lowered(jax.make_jaxpr(run)(*types), but=EXTREMES)

    def room(self, *programs: jex.ClosedJaxpr) -> list[jax.ShapeDtypeStruct]:
        """Memory by which numbers become tiles, if any product is one of tiles."""
        dots = _dots(programs)
        sizes = [n for eqn in dots for n in _dot_sizes(eqn)]
        if not sizes or self.is_tiled:
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
        differs = self.carries or self.differs(val)
        return numbers_of(BlockScope(self.block), [array], [dtype], [differs])

    def nanoseconds(self, work: float, registers: int = _MOST_REGISTERS) -> float:
        """How long a GPU takes for `work` operations on numbers of each row."""
        if self.is_tiled:
            return work * self.blocks * _OPERATION_OF_A_TILE
        # With fewer registers for each thread, more threads are there at once, and some
        # compute while others wait.
        count = self.found.count
        turns = max(count * registers / _REGISTERS_IN_ALL, 1)
        return work * max(count * _OPERATION, turns * _OPERATION_ALONE)

    def steps_at_once(self, *programs: jex.ClosedJaxpr) -> int:
        """How many steps one launch runs, if these programs are a step of it."""
        if self.is_tiled:
            return 2**31 - 1
        if self.settings.most is not None:
            return self.settings.most
        step = self.nanoseconds(sum(map(operations, programs)))
        return max(int(1e9 / step), 1) if step else 2**31 - 1

    def run(
        self,
        kernel: Callable[..., None],
        inputs: Sequence[Value],
        outputs: Sequence[Leaf | jax.ShapeDtypeStruct],
        aliases: dict[int, int] | None = None,
        leaves: Sequence[Leaf | None] = (),
    ) -> list[Value]:
        """Runs a kernel. `aliases` says which inputs become which outputs.

        `leaves` are the inputs, `None` for what is no leaf.
        """
        types = list(map(type_of, outputs))
        axes = [[_row_axis(x) for x in leaves], [_row_axis(x) for x in outputs]]
        return call(
            kernel,
            inputs,
            types,
            aliases=aliases,
            blocks=self.blocks,
            block=self.block,
            interpret=self.settings.interpret,
            mosaic=self.is_sliced,
            axes=(axes[0], axes[1]) if self.is_tiled else None,
        )


def operations(program: jex.ClosedJaxpr) -> float:
    return work(program.jaxpr, _OPERATIONS)


def _dots(programs: Sequence[jex.ClosedJaxpr]) -> list[jex.JaxprEqn]:
    every = [eqn for program in programs for eqn in equations(program)]
    return [eqn for eqn in every if eqn.primitive.name == "dot_general"]


def _dot_sizes(eqn: jex.JaxprEqn) -> list[int]:
    """The sizes of a product of matrices, if it is one of tiles."""
    (lc, _), (lb, _) = eqn.params["dimension_numbers"]
    left, right = (aval_of(v) for v in eqn.invars)
    k, b = (math.prod(left.shape[i] for i in axes) for axes in (lc, lb))
    m, n = left.size // max(k * b, 1), right.size // max(k * b, 1)
    is_tile = b == 1 and jnp.issubdtype(aval_of(eqn.outvars[0]).dtype, jnp.floating)
    return [m, n, k] if is_tile and is_large(m, n, k) else []


def zeros_of(aval: jax.ShapeDtypeStruct) -> Value:
    return jnp.zeros(aval.shape, aval.dtype)


def read_all(
    rows: RowNumbers, leaves: Sequence[Leaf], refs: Sequence[Any], *time: Index
) -> list[np.ndarray]:
    """The numbers of arrays, at a step if they have a row for each."""
    pairs = zip(leaves, refs, strict=True)
    return [leaf.read(ref, rows, *time) for leaf, ref in pairs]


def carried_of(
    of: RowPrograms, vals: Sequence[Val], arrays: Sequence[np.ndarray]
) -> list[list[Value]]:
    return [of.vectors(a, val) for a, val in zip(arrays, vals, strict=True)]


def opened(
    vals: Sequence[Val], leaves: Sequence[Leaf], carry: Sequence[list[Value]]
) -> list[np.ndarray]:
    return [
        from_vectors(values, leaf.shape, val.aval.dtype)
        for values, leaf, val in zip(carry, leaves, vals, strict=True)
    ]


def sum_is_carried() -> str:
    return "a sum over them is carried to the next step, or returned"


def _row_axis(leaf: Leaf | jax.ShapeDtypeStruct | None) -> int | None:
    """The axis of rows, which is the last one of a scratch."""
    if isinstance(leaf, Leaf):
        return leaf.row_axis
    return None if leaf is None else len(leaf.shape) - 1


def type_of(leaf: Leaf | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return leaf.type if isinstance(leaf, Leaf) else leaf
