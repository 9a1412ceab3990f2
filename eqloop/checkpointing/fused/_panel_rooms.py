"""What the kernel of a loop by panels has in shared memory.

A block has 64 rows and some groups of warps, each with as many units of each panel.
Matrices stay in shared memory, as arrays of bfloat16 whose sum they are. What they are
multiplied by is left there as well, and products are made by tensor cores:

    registers  --stored, waited for-->  shared memory  --product-->  registers
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

from ..steps._loop import Loop
from ._classes import Val
from ._panels import NARROW, Factor, NotPanelsError, Panel, Panels, Same
from ._row_programs import RowPrograms

# The rows of a product of tensor cores.
ROWS = 64
# A block of an H100 has 227 KiB, of which barriers and sums within warps take some.
_MOST_SHARED = 225 * 1024
# So many units are those of a group, and there are no more groups.
_UNITS, _MOST_GROUPS = 32, 4


@dataclasses.dataclass(frozen=True, eq=False)
class PanelRooms:
    """A loop of steps by panels, and the shared memory that its kernel takes.

    Attributes:
        of: The programs of one row, with which rows there are.
        panels: The program of a step.
        vals: Its inputs.
        carried: Those that are carried.
        times: For each other input of rows, the axis of steps; `None` without one.
        nexts: What is carried after a step.
        outs: What is written at each step.
        loop: The loop that these steps are of.
        stored: Inputs with an entry for each step of a segment. If there are any, steps
            are taken back, from the last one to the first.
    """

    of: RowPrograms
    panels: Panels
    vals: Sequence[Val]
    carried: range
    times: dict[int, tuple[int] | None]
    nexts: Sequence[Panel]
    outs: Sequence[Panel]
    loop: Loop
    stored: frozenset[int] = frozenset()

    @functools.cached_property
    def all(self) -> list[Panel]:
        """All panels, after those that they are made of."""
        found = dict[Panel, None]()

        def visit(panel: Panel) -> None:
            if panel not in found:
                for x in panel.panels:
                    visit(x)
                found[panel] = None

        for panel in (*self.nexts, *self.outs):
            visit(panel)
        return list(found)

    def of_kind(self, kind: str, level: int | None = None) -> list[Panel]:
        return [p for p in self.all if p.kind == kind and level in (None, p.level)]

    @functools.cached_property
    def levels(self) -> int:
        return max(p.level for p in self.all)

    @functools.cached_property
    def matrices(self) -> list[tuple[Factor, int]]:
        """The parts of matrices in shared memory, each with the number of its parts."""
        found = {f.key: f for p in self.of_kind("product") for f in p.factors}
        return [(f, self._count(f.matrix.is_narrow)) for f in found.values()]

    def _count(self, is_narrow: bool) -> int:
        """How many arrays of bfloat16 add up to one."""
        is_exact = any(f.is_exact for p in self.of_kind("product") for f in p.factors)
        return 1 if is_narrow else 2 + is_exact

    def operands(self, level: int) -> list[tuple[Panel, int]]:
        """What products of a level multiply, each with the number of its parts."""
        every = (x for p in self.of_kind("product", level) for x in p.panels)
        return [(x, self._count(x.dtype == NARROW)) for x in dict.fromkeys(every)]

    @functools.cached_property
    def same(self) -> list[Any]:
        """The vectors and numbers that rows share."""
        every = [p.of for p in self.of_kind("same")]
        every += [x for p in self.all for x in p.ins if isinstance(x, Same)]
        return list(dict.fromkeys(x.var for x in every if x.value is None))

    @functools.cached_property
    def groups(self) -> int:
        """How many groups of warps a block has."""
        units = -(-self._widest // _UNITS)
        return min(1 << (units - 1).bit_length(), _MOST_GROUPS)

    @functools.cached_property
    def _widest(self) -> int:
        return max(p.width for p in self.all)

    @functools.cached_property
    def _room(self) -> tuple[bool, int]:
        """Whether levels share room, and how many columns a tile has that fits.

        If each level has room of its own, what is multiplied is left there as soon as
        it is computed, and takes no registers.
        """
        tiles = [t for t in (64, 32) if self.groups * t <= self._widest]
        every = list(itertools.product([False, True], [*tiles, 16]))
        sizes = [self._shared(*how) for how in every]
        if min(sizes) > _MOST_SHARED:
            raise NotPanelsError(f"they take {min(sizes)} B of shared memory")
        return next(
            how for how, n in zip(every, sizes, strict=True) if n <= _MOST_SHARED
        )

    @property
    def is_shared(self) -> bool:
        """Whether operands of a level are where those of the one before were."""
        return self._room[0]

    @property
    def tile(self) -> int:
        """How many columns a tile in shared memory has."""
        return self._room[1]

    def padded(self, width: int, tile: int | None = None) -> int:
        """How many columns a panel has in memory: as many for each group."""
        unit = self.groups * (tile or self.tile)
        return 1 if width == 1 else -(-width // unit) * unit

    def own(self, width: int) -> int:
        """How many of them a group has."""
        return self.padded(width) // self.groups

    def rooms(self, is_shared: bool, tile: int) -> list[int]:
        """The columns of rooms for operands, level by level, or of the widest level."""
        levels = [
            [self.padded(x.width, tile) for x, n in of_level for _ in range(n)]
            for of_level in map(self.operands, range(self.levels + 1))
        ]
        if is_shared:
            return list(map(max, itertools.zip_longest(*levels, fillvalue=0)))
        return [width for widths in levels for width in widths]

    def _shared(self, is_shared: bool, tile: int) -> int:
        size = 2 * ROWS * sum(self.rooms(is_shared, tile))
        for factor, count in self.matrices:
            a, b = (self.padded(n, tile) for n in factor.sizes)
            size += 2 * a * b * count
        return size + 4 * ROWS * self.groups * len(self.of_kind("summed"))

    @functools.cached_property
    def own_inputs(self) -> list[int]:
        """The inputs of rows."""
        return sorted([*self.carried, *self.times])
