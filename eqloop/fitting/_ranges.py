"""Finds operations that can be run some rows at a time, where that saves memory.

From a large value, a range grows: to what computes that value, as long as this is large
itself, and to what reads it. All of these operations are to be maps along one axis, or
sums along it, with which the range ends. Where some of what reads a large value is
none, it gets a range of its own, along another axis perhaps, and the large value is
computed in both:

    a b --dot--> scores --logsumexp of each row------>    rows of a, and all of b
                     `----logsumexp of each column--->    rows of b, and all of a

Or all that is along one dimension is in ranges: axes of values belong together if they
are those of one map. From a value, a range then grows as far as it can, there and back,
so that a whole function may be one. Where rows see each other it ends, and what comes
after is another one.
"""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax.extend.core as jex

from .._arrays import is_inexact, nbytes
from .._programs import aval_of, equations_of
from ..checkpointing import has_steps
from ._by_rows import ByRows
from ._dataflow import Dataflow, in_order
from ._row_axes import Laid, Layouts, Place, RowAxis

# Values are large if they have this part of the bytes of that where a range begins.
_LARGE = 0.5
# What reads values that are so many times smaller is in the range, if that can be.
_FORWARD = 8
# No range begins at values that are so many times smaller than the largest. What it is
# given and gives is so many times smaller than what is inside.
_SMALL, _LITTLE = 16, 8
# So many large values of a chunk are alive at once, and so many chunks are small ones.
_ALIVE, _MOST_CHUNKS = 4, 64
# So many operations are looked at in vain for each one that there is, and no more.
_MOST_IN_VAIN = 8

# The operations of a range by their numbers, and how the rows of each lie.
_Operations = Mapping[int, Laid]
# An operation that reads a value, and which of its operands that is.
_Reader = tuple[int, int]
# How rows lie in an operation with this number, if it is in a range.
_LaidAt = Callable[[int], Laid | None]
# Operations that are run together, by their numbers.
_Unit = tuple[list[int], ByRows | None]


@dataclasses.dataclass(frozen=True)
class _Range:
    length: int
    laid: _Operations


@dataclasses.dataclass(frozen=True)
class _Start:
    """Where rows lie first: in an operand or a result of an operation."""

    operation: int
    place: Place
    rows: RowAxis


@dataclasses.dataclass(frozen=True)
class _Growth:
    """How a range grows.

    Attributes:
        least: The bytes of a large value.
        others: The operations that are in other ranges. Those that a range needs are
            computed again, and others are left to these.
    """

    layouts: Layouts
    least: float
    others: frozenset[int]

    def is_large(self, x: Any) -> bool:
        """Whether a value is not to be there for all rows."""
        return _size([x]) >= self.least


@dataclasses.dataclass
class _Grown:
    """A range that grows, or what is added to one.

    Attributes:
        every: Its operations, as bits.
        needed: The operations that these depend on.
        behind: Those that depend on them, but for what is in another range as well: it
            is read from that one.
    """

    laid: dict[int, Laid] = dataclasses.field(default_factory=dict)
    every: int = 0
    needed: int = 0
    behind: int = 0

    def add(self, other: "_Grown") -> None:
        """Adds what another one has."""
        self.laid |= other.laid
        self.every |= other.every
        self.needed |= other.needed
        self.behind |= other.behind


def ranges_of(
    program: jex.ClosedJaxpr, along_dimension: bool
) -> list[tuple[jex.JaxprEqn, ByRows | None]]:
    """The operations of a program in a new order, with the range that each is in.

    Those of a range are one after the other. Some are in several ranges.
    """
    # Along a dimension all operations are in ranges, each in one. Otherwise those
    # around large values are.
    search = _RangeSearch(program, along_dimension)
    return [
        (search.eqns[i], by_rows)
        for numbers, by_rows in search.ordered(search.found())
        for i in numbers
    ]


class _RangeSearch(Dataflow):
    """A search for ranges in a program in which nothing is called."""

    def __init__(self, program: jex.ClosedJaxpr, along_dimension: bool):
        super().__init__(program)
        self._along_dimension = along_dimension
        self._dimension: object = None  # the one that ranges are along
        self.looked_at = 0
        # The bytes of what each operation computes, and of what a step of a loop does.
        self._sizes = [
            [_size([x]) for inner in equations_of(eqn) for x in inner.outvars]
            for eqn in self.eqns
        ]

    # Ranges that save memory.

    def found(self) -> list[_Range]:
        """Ranges that save memory, those of the largest values first."""
        values = [x for x in self.makers if self.depends(x) and aval_of(x).shape]
        # A loop is as large as the largest of what a step computes.
        size = lambda x: max(self._sizes[self.makers[x][0]])
        values.sort(key=lambda x: (-size(x), self.makers[x]))
        found, inside, in_vain = list[_Range](), frozenset[int](), 0
        for x in values:
            is_small = size(x) * _SMALL < size(values[0])
            if is_small or in_vain > _MOST_IN_VAIN * len(self.eqns):
                break
            if self.makers[x][0] in inside:
                continue
            self.looked_at = 0
            search = self._along if self._along_dimension else self._around
            ranges = search(x, inside)
            is_valid = len(ranges) == 1 or (ranges and self.ordered(ranges))
            if is_valid and all(self._by_rows(r, ranges).can_be for r in ranges):
                found += ranges
                inside = inside.union(*(r.laid for r in ranges))
                if self._along_dimension:
                    i, n = self.makers[x]
                    rows: Any = ranges[0].laid[i].outs[n]
                    self._dimension = self.dimension_of(x, rows.axis)
            else:
                in_vain += self.looked_at
        # Some have all been computed in larger ones.
        found = [one for one in found if self._by_rows(one, found).outs]
        while found and not self.ordered(found):
            found.pop()
        return found

    def _around(self, x: Any, taken: frozenset[int]) -> list[_Range]:
        """The ranges around a large value, along the best of its axes."""
        least, options = _size([x]) * _LARGE, list[tuple[float, list[_Range]]]()
        for axis, length in enumerate(aval_of(x).shape):
            i, n = self.makers[x]
            start = _Start(i, (1, n), RowAxis(axis))
            if length > 1 and (found := self._all_from(start, length, least, taken)):
                besides, chunks, inside = self._prices(found)
                if besides <= max(least, inside / _LITTLE):
                    options.append((besides + chunks, found))
        _, best = min(options, key=lambda option: option[0], default=(0.0, []))
        return self._trimmed(best, least)

    def _along(self, x: Any, taken: frozenset[int]) -> list[_Range]:
        """All that is along the best axis of a value, of those of the dimension."""
        options, (i, n) = list[tuple[int, _Range]](), self.makers[x]
        for axis, length in enumerate(aval_of(x).shape):
            if length > 1 and self._dimension in (None, self.dimension_of(x, axis)):
                start = _Start(i, (1, n), RowAxis(axis))
                if grown := self._grown(start, length, 0.0, taken):
                    inside = sum(size for j in grown[0] for size in self._sizes[j])
                    options.append((inside, _Range(length, grown[0])))
        return [one for _, one in sorted(options, key=lambda option: -option[0])[:1]]

    def _prices(self, ranges: Sequence[_Range]) -> tuple[float, float, float]:
        """About the bytes besides chunks, of small chunks, and of all rows at once."""
        besides = chunks = whole = 0.0
        for found in ranges:
            by_rows = self._by_rows(found, ranges)
            given = {x for x, _ in by_rows.inputs if self.maker(x)}
            besides += _size(given | {x for x, _ in by_rows.outs})
            # On the way back, the cotangents of what all rows share are there, too.
            shared = (x for x, rows in by_rows.inputs if rows is None)
            chunks += _size(x for x in shared if is_inexact(aval_of(x)))
            sizes = [size for i in found.laid for size in self._sizes[i]]
            chunks += _ALIVE * max(sizes) / min(found.length, _MOST_CHUNKS)
            whole += sum(sizes)
        return besides, chunks, whole

    def _all_from(
        self, start: _Start, length: int, least: float, taken: frozenset[int]
    ) -> list[_Range]:
        """A range, and others for what else reads its large values."""
        found = list[_Range]()
        grown = self._grown(start, length, least, taken)
        while grown is not None:
            laid, left = grown
            found.append(_Range(length, laid))
            taken = taken.union(laid)
            if (reader := next((r for r in left if r[0] not in taken), None)) is None:
                return found
            i, n = reader
            options = list[Any]()
            for axis, size in enumerate(aval_of(self.eqns[i].invars[n]).shape):
                start = _Start(i, (0, n), RowAxis(axis))
                if size > 1 and (one := self._grown(start, size, least, taken)):
                    options.append((size, one))
            # As few are left as can be, in chunks as small as can be.
            best = lambda option: (len(option[1][1]), -min(option[0], _MOST_CHUNKS))
            length, grown = min(options, key=best, default=(0, None))
        return []

    def _trimmed(self, ranges: Sequence[_Range], least: float) -> list[_Range]:
        """Ranges that do not begin with small values which others need as well."""
        holders = _holders(ranges)
        for found in ranges:
            is_inside = lambda x, found=found: (
                (maker := self.maker(x)) is not None and maker[0] in found.laid
            )
            for i in found.laid:
                eqn = self.eqns[i]
                begins = not any(map(is_inside, eqn.invars))
                is_out = any(self._is_out(x, found, holders) for x in eqn.outvars)
                if begins and is_out and _size(eqn.outvars) < least:
                    laid = {j: each for j, each in found.laid.items() if j != i}
                    rest = [other for other in ranges if other is not found]
                    return self._trimmed([*rest, _Range(found.length, laid)], least)
        return [*ranges]

    # A range.

    def _grown(
        self, start: _Start, length: int, least: float, taken: frozenset[int]
    ) -> tuple[_Operations, list[_Reader]] | None:
        """A range, and what reads its large values besides."""
        layouts = Layouts(length, self.maps, self.known_column)
        how = _Growth(layouts, least, taken)
        grown, left = _Grown(), list[_Reader]()
        tasks = collections.deque([start])
        while tasks:
            task = tasks.popleft()
            i, (is_result, n) = task.operation, task.place
            is_left = i in taken and (self._along_dimension or not is_result)
            if is_left or i in grown.laid:
                continue
            found = layouts.of(self.eqns[i], task.place, task.rows)
            new = None if found is None else self._closed(grown, i, found, how)
            if new is not None:
                grown.add(new)
                tasks += self._next(new.laid, how)
            elif not grown.laid:
                return None
            elif not is_result and how.is_large(self.eqns[i].invars[n]):
                left.append((i, n))
        return grown.laid, [reader for reader in left if reader[0] not in grown.laid]

    def _next(self, new: _Operations, how: _Growth) -> Iterator[_Start]:
        """What may be in a range that has these operations."""
        for i, laid in new.items():
            for x, rows in zip(self.eqns[i].outvars, laid.outs, strict=True):
                if rows is not None and _size([x]) * _FORWARD >= how.least:
                    for k, n in self.readers.get(x, []):
                        yield _Start(k, (0, n), rows)
            for x, rows in zip(self.eqns[i].invars, laid.ins, strict=True):
                maker = self.maker(x)
                if rows is not None and maker is not None and self._grows(x):
                    yield _Start(maker[0], (1, maker[1]), rows)

    def _grows(self, x: Any) -> bool:
        """Whether a value takes more than what it is computed from."""
        if self._along_dimension:
            return True
        # What depends on no input is computed for each of those who need it.
        read = {y for y in self.eqns[self.makers[x][0]].invars if self.maker(y)}
        return not self.depends(x) or _size(read) < _size([x])

    def _closed(
        self, grown: _Grown, i: int, first: Laid, how: _Growth
    ) -> _Grown | None:
        """What a range needs to have another operation; `None` if it cannot have it."""
        new, tasks, seen = _Grown(), [(i, first)], 0
        laid_at = lambda j: new.laid.get(j) or grown.laid.get(j)
        while tasks:
            i, each = tasks.pop()
            if i in new.laid:
                continue
            self.looked_at += 1
            if self._along_dimension and i in how.others:
                return None
            behind = 0 if i in how.others else self.behind[i]
            new.add(_Grown({i: each}, 2 << i, self.before[i], behind))
            # Along a dimension, what is before a range may be there for all rows.
            ins = (
                ()
                if self._along_dimension
                else zip(self.eqns[i].invars, each.ins, strict=True)
            )
            for x, rows in ins:
                maker = self.maker(x)
                if rows is None or maker is None or not how.is_large(x):
                    continue
                if laid_at(maker[0]) is None:
                    j, n = maker
                    found = how.layouts.of(self.eqns[j], (1, n), rows)
                    if found is None:
                        return None
                    tasks.append((j, found))
            if not tasks:
                added, seen = itertools.islice(new.laid, seen, None), len(new.laid)
                if not all(self._agrees(j, laid_at) for j in added):
                    return None
                # What lies between operations of a range is in it, the first one first.
                between = grown.needed | new.needed
                between &= (grown.behind | new.behind) & ~(grown.every | new.every)
                if between:
                    j = (between & -between).bit_length() - 2
                    if (found := self._within(j, laid_at, how.layouts)) is None:
                        return None
                    tasks.append((j, found))
        return new

    def _agrees(self, i: int, laid_at: _LaidAt) -> bool:
        """Whether the values of an operation have rows as all who have them need."""
        each = laid_at(i)
        assert each is not None
        for x, rows in zip(self.eqns[i].invars, each.ins, strict=True):
            maker = self.maker(x)
            made = None if maker is None else laid_at(maker[0])
            if maker is not None and made is not None:
                given = made.outs[maker[1]]
                is_same = given is rows is None and has_steps(self.eqns[maker[0]])
                if not is_same and (given is None or given != rows):
                    return False
        for x, rows in zip(self.eqns[i].outvars, each.outs, strict=True):
            for j, n in self.readers.get(x, []):
                reader = laid_at(j)
                if reader is None:
                    continue
                is_same = rows is reader.ins[n] is None and has_steps(self.eqns[i])
                if not is_same and (rows is None or reader.ins[n] != rows):
                    return False
        return True

    def _within(self, i: int, laid_at: _LaidAt, layouts: Layouts) -> Laid | None:
        """How rows lie in an operation that reads results of these."""
        for n, x in enumerate(self.eqns[i].invars):
            maker = self.maker(x)
            made = None if maker is None else laid_at(maker[0])
            if maker is not None and made is not None:
                rows = made.outs[maker[1]]
                return rows and layouts.of(self.eqns[i], (0, n), rows)
        return None

    # Ranges as parts of the program.

    def _by_rows(self, found: _Range, every: Sequence[_Range]) -> ByRows:
        """The operations of a range, with what they read and what others need of it."""
        holders, order = _holders(every), sorted(found.laid)
        return ByRows.of(
            eqns=[self.eqns[i] for i in order],
            laid=[found.laid[i] for i in order],
            length=found.length,
            is_out=lambda x: self._is_out(x, found, holders),
        )

    def _is_out(
        self, x: Any, found: _Range, holders: Mapping[int, list[_Range]]
    ) -> bool:
        """Whether a range gives a value that it computes to others."""
        i, _ = self.makers[x]
        if not self.depends(x) or holders[i][0] is not found:
            return False  # they compute it again, or another range gives it

        def is_outside(reader: int) -> bool:
            of = holders.get(reader, [])
            return not of or any(i not in other.laid for other in of)

        readers = (reader for reader, _ in self.readers.get(x, []))
        return x in self.outs or any(map(is_outside, readers))

    def ordered(self, ranges: Sequence[_Range]) -> list[_Unit]:
        """All operations, those of each range together; nothing if that cannot be."""
        inside = set[int]().union(*(found.laid for found in ranges))
        within = [self._by_rows(found, ranges) for found in ranges]
        alone = [i for i in range(len(self.eqns)) if i not in inside]
        needed = [x for by_rows in within for x, _ in by_rows.inputs]
        needed += [x for i in alone for x in self.eqns[i].invars] + [*self.outs]
        while needed:
            x = needed.pop()
            maker = self.maker(x)
            if maker is not None and maker[0] in inside and not self.depends(x):
                inside.remove(maker[0])
                alone.append(maker[0])
                needed += self.eqns[maker[0]].invars
        units: list[_Unit] = [([i], None) for i in sorted(alone)]
        units += zip((sorted(r.laid) for r in ranges), within, strict=True)
        gives, reads = dict[Any, int](), list[set[Any]]()
        for k, (numbers, by_rows) in enumerate(units):
            eqn = self.eqns[numbers[0]]
            outs = eqn.outvars if by_rows is None else [x for x, _ in by_rows.outs]
            ins = eqn.invars if by_rows is None else [x for x, _ in by_rows.inputs]
            gives |= dict.fromkeys(outs, k)
            reads.append({x for x in ins if isinstance(x, jex.Var)})
        needs = [{gives[x] for x in each if x in gives} for each in reads]
        # What has an effect comes after what had one before it. None is in a range.
        do = [k for k, (i, _) in enumerate(units) if self.eqns[i[0]].effects]
        for before, after in itertools.pairwise(do):
            needs[after].add(before)
        order = in_order(needs, [numbers[-1] for numbers, _ in units])
        return [units[k] for k in order] if len(order) == len(units) else []


def _holders(every: Sequence[_Range]) -> dict[int, list[_Range]]:
    """The ranges that each operation is in."""
    found = dict[int, list[_Range]]()
    for one in every:
        for i in one.laid:
            found.setdefault(i, []).append(one)
    return found


def _size(values: Iterable[Any]) -> int:
    return nbytes([aval_of(x) for x in values])
