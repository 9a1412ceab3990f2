"""What the kernel of a loop by panels has in shared memory.

A block has 64 rows and some groups of warps, each with as many units of each panel.
Matrices stay in shared memory, as arrays of bfloat16 whose sum they are, and those for
which there is no room are copied there by parts, at each product. What they are
multiplied by is left there as well, and products are made by tensor cores:

    registers  --stored, waited for-->  shared memory  --product-->  registers

Cotangents of matrices are added up there as far as there is room, and in memory else.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from ..steps._loop import Loop
from ._classes import Val
from ._panels import NARROW, Factor, NotPanelsError, Panel, Panels, Same
from ._row_programs import RowPrograms

# The rows of a product of tensor cores.
ROWS = 64
# A block of an H100 has 227 KiB, of which barriers and sums within warps take some.
_MOST_SHARED = 224 * 1024
# The columns of a tile. With more of them, narrow `xs` take several times the memory.
TILE = 16
# So many units are those of a group, and there are no more groups: by four of them, of
# threads with half of the registers each, twice the bytes would be outside of these.
_UNITS, _MOST_GROUPS = 32, 2
# So many rows of a matrix are copied at once, and as many are on their way meanwhile.
_DEPTHS, TURNS = (64, 32), 2


@dataclasses.dataclass(frozen=True, eq=False)
class Total:
    """A part of a matrix, or of a vector, that is added up over rows and steps.

    Attributes:
        place: Where it is: which output, its first row and column there, how many of
            them it has, and whether rows and columns are those of the output.
        pairs: Panels of which some units from one on are its rows, each with a panel
            whose units are its columns; `None` if it is of a vector.
    """

    place: tuple[Any, ...]
    pairs: Sequence[tuple[Panel, int, Panel | None]]


@dataclasses.dataclass(frozen=True, eq=False)
class PanelStep:
    """What a kernel does at each step.

    Attributes:
        carried: The inputs that are carried.
        nexts: What is carried after it.
        outs: What is written.
        totals: What is added up.
    """

    carried: range
    nexts: Sequence[Panel]
    outs: Sequence[Panel] = ()
    totals: Sequence[Total] = ()

    @functools.cached_property
    def all(self) -> list[Panel]:
        """All panels, after those that they are made of."""
        found = dict[Panel, None]()

        def visit(panel: Panel) -> None:
            if panel not in found:
                for x in panel.panels:
                    visit(x)
                found[panel] = None

        for panel in (*self.nexts, *self.outs, *self._of_totals()):
            visit(panel)
        return list(found)

    def of_kind(self, kind: str, level: int | None = None) -> list[Panel]:
        return [p for p in self.all if p.kind == kind and level in (None, p.level)]

    @functools.cached_property
    def levels(self) -> int:
        return max(p.level for p in self.all)

    @functools.cached_property
    def operands(self) -> list[Panel]:
        """What is multiplied."""
        every = [x for p in self.of_kind("product") for x in p.panels]
        return list(dict.fromkeys([*every, *self._of_totals()]))

    def _of_totals(self) -> Iterator[Panel]:
        for total in self.totals:
            for left, _, right in total.pairs:
                yield from (left,) if right is None else (left, right)


@dataclasses.dataclass(frozen=True, eq=False)
class PanelRooms:
    """A loop of steps by panels, and the shared memory that its kernel takes.

    Attributes:
        of: The programs of one row, with which rows there are.
        panels: The program of a step.
        vals: Its inputs.
        times: For each input of rows that is not carried, the axis of steps; `None`
            without one.
        loop: The loop that these steps are of.
        step: What the kernel does at each of them.
        again: What runs a step again, if steps are taken back, from the last one on.
    """

    of: RowPrograms
    panels: Panels
    vals: Sequence[Val]
    times: dict[int, int | None]
    loop: Loop
    step: PanelStep
    again: PanelStep | None = None

    @functools.cached_property
    def steps(self) -> list[PanelStep]:
        return [step for step in (self.step, self.again) if step is not None]

    @property
    def blocks(self) -> int:
        return -(-self.of.found.count // ROWS)

    @property
    def rows(self) -> int:
        """The rows of all blocks, of which the last ones may be none."""
        return self.blocks * ROWS

    def of_kind(self, kind: str) -> list[Panel]:
        return list(dict.fromkeys(p for s in self.steps for p in s.of_kind(kind)))

    @functools.cached_property
    def factors(self) -> list[Factor]:
        """The parts of matrices that stay in shared memory."""
        return self.room[2]

    @functools.cached_property
    def depth(self) -> int:
        """How many rows of the others are copied at once."""
        return self.room[1]

    @functools.cached_property
    def streamed(self) -> dict[tuple[Any, int], Factor]:
        """Those that are copied there for each product, by how they are multiplied."""
        stay = {factor.key for factor in self.factors}
        return {(f.key, f.axis): f for f in self.every_factor if f.key not in stay}

    @functools.cached_property
    def every_factor(self) -> list[Factor]:
        """What panels are multiplied by."""
        return [f for p in self.of_kind("product") for f in p.factors]

    @functools.cached_property
    def most_parts(self) -> int:
        """How many arrays of bfloat16 a part of a matrix is at most."""
        return max((self.parts_of(f.matrix) for f in self.every_factor), default=0)

    @functools.cached_property
    def span(self) -> int:
        """How many columns of a group a product has at most."""
        widths = (self.own(p.width) for p in self.of_kind("product"))
        return max(widths, default=0)

    @functools.cached_property
    def operands(self) -> dict[Panel, int]:
        """What is multiplied, with the units that are read of each at once."""
        found = {x: x.width for s in self.steps for x in s.operands}
        for total in self.step.totals:
            found.update((x, -(-x.width // ROWS) * ROWS) for x, *_ in total.pairs)
        return found

    def parts_of(self, x: Panel | Same) -> int:
        """How many arrays of bfloat16 add up to one."""
        if x.is_narrow if isinstance(x, Same) else x.dtype == NARROW:
            return 1
        return 2 + any(factor.is_exact for factor in self.every_factor)

    @functools.cached_property
    def same(self) -> list[Any]:
        """The vectors and numbers that rows share."""
        every = [p.of for p in self.of_kind("same")]
        panels = [p for step in self.steps for p in step.all]
        every += [x for p in panels for x in p.ins if isinstance(x, Same)]
        return list(dict.fromkeys(x.var for x in every if x.value is None))

    @functools.cached_property
    def groups(self) -> int:
        """How many groups of warps a block has."""
        units = -(-self._widest // _UNITS)
        return min(1 << (units - 1).bit_length(), _MOST_GROUPS)

    @functools.cached_property
    def _widest(self) -> int:
        return max(p.width for step in self.steps for p in step.all)

    def _columns_of(self, total: Total) -> int:
        right = total.pairs[0][2]
        return -(-right.width // TILE) * TILE if right else 1

    def padded(self, width: int) -> int:
        """How many columns a panel has in memory: as many for each group."""
        unit = self.groups * TILE
        return 1 if width == 1 else -(-width // unit) * unit

    def own(self, width: int) -> int:
        """How many of them a group has."""
        return self.padded(width) // self.groups

    @functools.cached_property
    def room(self) -> tuple[int, int, list[Factor]]:
        """The bytes of shared memory, and the parts of matrices that stay there.

        Between these, how many rows of the others are copied at once. It is an error if
        there is no room for what is multiplied.
        """
        size = sum(
            self.padded(width) * self.parts_of(x) for x, width in self.operands.items()
        )
        size = 2 * ROWS * (size + TILE * bool(self.step.totals))
        size += 4 * ROWS * self.groups * len(self.of_kind("summed"))
        every, stay = {f.key: f for f in self.every_factor}, list[Factor]()
        sizes = [
            2 * math.prod(self.padded(n) for n in factor.sizes) * parts
            for factor in every.values()
            for parts in [self.parts_of(factor.matrix)]
        ]
        depth = 0
        if size + sum(sizes) > _MOST_SHARED:
            row = 2 * TURNS * self.groups * self.most_parts * self.span
            fits = (n for n in _DEPTHS if size + n * row <= _MOST_SHARED)
            depth = next(fits, TILE)
            size += depth * row
        if size > _MOST_SHARED:
            raise NotPanelsError(
                f"what these multiply takes {size // 1024} KiB of "
                f"{_MOST_SHARED // 1024}; fewer units take less, and bfloat16 half"
            )
        for factor, own in zip(every.values(), sizes, strict=True):
            if size + own <= _MOST_SHARED:
                size, stay = size + own, [*stay, factor]
        return size, depth, stay

    @functools.cached_property
    def places(self) -> dict[Total, tuple[int, int]]:
        """Where each total is: among those of so many columns, and its number there."""
        seen, found = collections.Counter[int](), dict[Total, tuple[int, int]]()
        for total in self.step.totals:
            n = self._columns_of(total)
            found[total], seen[n] = (n, seen[n]), seen[n] + 1
        return found

    @functools.cached_property
    def totals(self) -> dict[int, tuple[int, int]]:
        """How many totals have so many columns, and how many are in shared memory."""
        left, found = _MOST_SHARED - self.room[0], {}
        counts = collections.Counter(n for n, _ in self.places.values())
        for n, count in sorted(counts.items(), reverse=True):
            found[n] = count, min(count, left // (4 * ROWS * n))
            left -= 4 * ROWS * n * found[n][1]
        return found
