"""Finds operations that can be run some rows at a time, where that saves memory.

From a large value, a range grows: to what computes that value, as long as this is large
itself, and to all that reads it. All of these operations are to be maps along one axis,
or sums along it, with which the range ends. Where some of what reads a large value is
none, it gets a range of its own, along another axis perhaps, and the large value is
computed in both:

    a b --dot--> logits --logsumexp along columns-->    rows of a, and all of b
                     `----logsumexp along rows----->    rows of b, and all of a
"""

import dataclasses
import functools
import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np

from .._arrays import is_inexact, nbytes
from .._compat import form_of
from .._programs import aval_of, evaluated, value_of
from ..checkpointing import AxisMap
from ._by_rows import ByRows, Laid, Layouts, NotByRowsError, Place, RowAxis

# Values are large if they have this part of the bytes of that where a range begins.
_LARGE = 0.5
# What reads values that are so many times smaller is in the range, if that can be.
_FORWARD = 8
# No range begins at values that are so many times smaller than the largest.
_SMALL = 16
# So many large values of a chunk are alive at once, and so many chunks are small ones.
_ALIVE, _MOST_CHUNKS = 4, 64
# So many large values are tried in vain, and no more.
_MOST_TRIED = 48
# Values of so many entries are computed here, to see what they are.
_MOST_ENTRIES = 1 << 20

_Ranges = dict[int, Laid]


@dataclasses.dataclass(frozen=True)
class _Range:
    """Operations by their numbers, and how the rows of each lie."""

    length: int
    laid: Mapping[int, Laid]


def ranges_of(
    program: jex.ClosedJaxpr,
) -> list[tuple[jex.JaxprEqn, ByRows | None]]:
    """The operations of a program in a new order, with the range that each is in.

    Those of a range are one after the other. Some are in several ranges.
    """
    search = _RangeSearch(program)
    return [
        (eqn, by_rows)
        for numbers, by_rows in search.ordered(search.found())
        for eqn in (search.eqns[i] for i in numbers)
    ]


class _RangeSearch:
    """A search for ranges in a program in which nothing is called."""

    def __init__(self, program: jex.ClosedJaxpr):
        self.eqns, self.jaxpr = program.jaxpr.eqns, program.jaxpr
        self.made_by = {
            x: (i, n)
            for i, eqn in enumerate(self.eqns)
            for n, x in enumerate(eqn.outvars)
        }
        self.readers = dict[Any, list[tuple[int, int]]]()
        # What each operation depends on, as bits; an input of the program is the lowest.
        self.before = list[int]()
        for i, eqn in enumerate(self.eqns):
            mask = 2 << i
            for n, x in enumerate(eqn.invars):
                if isinstance(x, jex.Var):
                    self.readers.setdefault(x, []).append((i, n))
                    made = x in self.made_by
                    mask |= self.before[self.made_by[x][0]] if made else 1
            self.before.append(mask)
        self.outs = {x for x in program.jaxpr.outvars if isinstance(x, jex.Var)}
        self._maps = dict[int, tuple[jex.JaxprEqn, list[AxisMap]]]()
        self._constants = dict[Any, np.ndarray | None]()

    # Ranges that begin at a large value.

    def found(self) -> list[_Range]:
        """Ranges that save memory, those of the largest values first."""
        size = lambda x: nbytes([aval_of(x)])
        values = [x for x in self.made_by if self._depends(x) and aval_of(x).shape]
        values.sort(key=lambda x: (-size(x), self.made_by[x][0]))
        found, inside, tried = list[_Range](), set[int](), 0
        for x in values:
            if tried == _MOST_TRIED or size(x) * _SMALL < size(values[0]):
                break
            if self.made_by[x][0] in inside:
                continue
            ranges = self._trimmed(self._from(x, inside), size(x) * _LARGE)
            every = [*found, *ranges]
            if ranges and self.ordered(every) and self._can_be(ranges, every):
                found += ranges
                inside = inside.union(*(r.laid for r in ranges))
            else:
                tried += 1
        # Some have all been computed in larger ones.
        for one in [*found]:
            if not self.by_rows(one, found).outs:
                found.remove(one)
        return found

    def _trimmed(self, ranges: Sequence[_Range], least: float) -> list[_Range]:
        """Ranges that do not begin with small values which others need as well."""
        ranges, is_same = [*ranges], False
        while not is_same:
            is_same = True
            for k, found in enumerate(ranges):
                of_others = [
                    i for i in found.laid if self._is_spare(i, found, ranges, least)
                ]
                if of_others:
                    laid = {
                        i: each for i, each in found.laid.items() if i not in of_others
                    }
                    ranges[k], is_same = _Range(found.length, laid), False
        return ranges

    def _is_spare(
        self, i: int, found: _Range, every: Sequence[_Range], least: float
    ) -> bool:
        eqn = self.eqns[i]
        begins = not any(
            x in self._made and self.made_by[x][0] in found.laid for x in eqn.invars
        )
        is_small = nbytes(map(aval_of, eqn.outvars)) < least
        is_out = (self._is_out(x, found, every) for x in eqn.outvars)
        return begins and is_small and any(is_out)

    def _can_be(self, ranges: Sequence[_Range], every: Sequence[_Range]) -> bool:
        return all(self.by_rows(found, every).can_be for found in ranges)

    def _depends(self, x: Any) -> bool:
        """Whether a value depends on an input of the program."""
        return bool(self.before[self.made_by[x][0]] & 1)

    def _from(self, x: Any, taken: set[int]) -> list[_Range]:
        """The ranges around a large value, along the best of its axes."""
        least, best = nbytes([aval_of(x)]) * _LARGE, list[Any]()
        for axis, length in enumerate(aval_of(x).shape):
            i, n = self.made_by[x]
            start = (i, (1, n), RowAxis(axis))
            if length > 1 and (found := self._all_from(start, length, least, taken)):
                best.append((*self._prices(found), found))
        best = [option for option in best if option[0] <= nbytes([aval_of(x)])]
        *_, found = min(best, key=lambda option: sum(option[:2]), default=[[]])
        return found

    def _all_from(
        self,
        start: tuple[int, Place, RowAxis],
        length: int,
        least: float,
        taken: set[int],
    ) -> list[_Range]:
        found, inside = list[_Range](), set(taken)
        grown = self._grown(start, length, least, inside)
        while grown is not None:
            laid, left = grown
            found.append(_Range(length, laid))
            inside.update(laid)
            left = [(i, n) for i, n in left if i not in inside]
            if not left:
                return found
            i, n = left[0]
            shape = aval_of(self.eqns[i].invars[n]).shape
            options = [
                (size, option)
                for axis, size in enumerate(shape)
                if size > 1
                and (
                    option := self._grown(
                        (i, (0, n), RowAxis(axis)), size, least, inside
                    )
                )
            ]
            # As few are left as can be, in chunks as small as can be.
            best = lambda option: (len(option[1][1]), -min(option[0], _MOST_CHUNKS))
            length, grown = min(options, key=best, default=(0, None))
        return []

    def _prices(self, ranges: Sequence[_Range]) -> tuple[float, float]:
        """About the bytes that are there besides chunks, and those of small chunks."""
        besides = chunks = 0.0
        for found in ranges:
            by_rows = self.by_rows(found, ranges)
            given = [x for x, _ in by_rows.inputs if x in self._made]
            besides += nbytes(map(aval_of, {*given, *(x for x, _ in by_rows.outs)}))
            # On the way back, the cotangents of what all rows share are there, too.
            shared = (aval_of(x) for x, rows in by_rows.inputs if rows is None)
            chunks += nbytes(filter(is_inexact, shared))
            inside = (x for i in found.laid for x in self.eqns[i].outvars)
            largest = max(nbytes([aval_of(x)]) for x in inside)
            chunks += _ALIVE * largest / min(found.length, _MOST_CHUNKS)
        return besides, chunks

    def _grown(
        self,
        start: tuple[int, Place, RowAxis],
        length: int,
        least: float,
        taken: set[int],
    ) -> tuple[_Ranges, list[tuple[int, int]]] | None:
        """The range from here, and the operations that read its large values besides."""
        layouts = Layouts(length, self._maps, self._known)
        is_large = lambda x: nbytes([aval_of(x)]) >= least
        laid, left = _Ranges(), list[tuple[int, int]]()
        tasks = [start]
        while tasks:
            i, place, rows = tasks.pop(0)
            if i in laid or (place[0] == 0 and i in taken):
                continue
            found = layouts.of(self.eqns[i], place, rows)
            new = found and self._closed(laid, i, found, layouts, is_large, taken)
            if not new:
                if not laid:
                    return None
                if place[0] == 0 and is_large(self.eqns[i].invars[place[1]]):
                    left.append((i, place[1]))
                continue
            laid |= new
            for j, each in new.items():
                eqn = self.eqns[j]
                for x, r in zip(eqn.outvars, each.outs, strict=True):
                    if r is not None and nbytes([aval_of(x)]) * _FORWARD >= least:
                        tasks += [(k, (0, n), r) for k, n in self.readers.get(x, [])]
                for x, r in zip(eqn.invars, each.ins, strict=True):
                    if r is not None and self._shrinks(x):
                        k, n = self.made_by[x]
                        tasks.append((k, (1, n), r))
        return laid, [(i, n) for i, n in left if i not in laid]

    def _shrinks(self, x: Any) -> bool:
        """Whether it takes less to have what a value is computed from than to have it."""
        if x not in self._made:
            return False
        if not self._depends(x):
            return True
        reads = {y for y in self.eqns[self.made_by[x][0]].invars if y in self._made}
        return nbytes(map(aval_of, reads)) < nbytes([aval_of(x)])

    @functools.cached_property
    def _made(self) -> "_Made":
        return _Made(self.made_by)

    def _closed(
        self,
        laid: _Ranges,
        start: int,
        first: Laid,
        layouts: Layouts,
        is_large: Callable[[Any], bool],
        taken: set[int],
    ) -> _Ranges | None:
        """What a range needs to have another operation; `None` if it cannot have it."""
        new, tasks = _Ranges(), [(start, first)]
        while True:
            while tasks:
                i, each = tasks.pop()
                if i in new:
                    continue
                new[i] = each
                for x, rows in zip(self.eqns[i].invars, each.ins, strict=True):
                    if rows is None or x not in self._made or not is_large(x):
                        continue
                    j, n = self.made_by[x]
                    if j in laid or j in new:
                        continue
                    if (found := layouts.of(self.eqns[j], (1, n), rows)) is None:
                        return None
                    tasks.append((j, found))
            every = laid | new
            if not self._agree(every):
                return None
            between = self._between(every, taken)
            if not between:
                return new
            # What lies between operations of a range is in it, the first of them first.
            i, eqn = between[0], self.eqns[between[0]]
            places = (
                (n, self.made_by[x])
                for n, x in enumerate(eqn.invars)
                if x in self._made and self.made_by[x][0] in every
            )
            at = ((n, every[j].outs[k]) for n, (j, k) in places)
            n, rows = next((pair for pair in at if pair[1] is not None), (0, None))
            if rows is None or (found := layouts.of(eqn, (0, n), rows)) is None:
                return None
            tasks.append((i, found))

    def _agree(self, laid: _Ranges) -> bool:
        """Whether each value has rows as those who read it need."""
        for i, each in laid.items():
            for x, rows in zip(self.eqns[i].invars, each.ins, strict=True):
                if x in self._made and (made := self.made_by[x])[0] in laid:
                    given = laid[made[0]].outs[made[1]]
                    if given is None or given != rows:
                        return False
        return True

    def _between(self, laid: _Ranges, taken: set[int]) -> list[int]:
        """The operations that depend on some of these, and some of these on them."""
        # Others read what another range computes as well from that one.
        own = sum(2 << i for i in laid if i not in taken)
        mask = sum(2 << i for i in laid)
        needed = 0
        for i in laid:
            needed |= self.before[i]
        rest = (needed & ~mask) >> 1
        return [i for i in _bits(rest) if self.before[i] & own]

    def _known(self, x: Any, column: int) -> np.ndarray | None:
        """A column of an array of indices, if it depends on no input."""
        if (
            x in self._made
            and form_of(eqn := self.eqns[self.made_by[x][0]]) == "concatenate"
        ):
            if eqn.params["dimension"] == 1:
                for part in eqn.invars:
                    width = aval_of(part).shape[1]
                    if column < width:
                        x = part
                        break
                    column -= width
        value = self._constant(x)
        return None if value is None else value[:, column]

    def _constant(self, x: Any) -> np.ndarray | None:
        if isinstance(x, jex.Literal):
            return np.asarray(value_of(x))
        if x not in self._constants:
            self._constants[x] = None
            if x in self.made_by and aval_of(x).size <= _MOST_ENTRIES:
                eqn = self.eqns[self.made_by[x][0]]
                given = list(map(self._constant, eqn.invars))
                if all(v is not None for v in given) and not eqn.effects:
                    with jax.ensure_compile_time_eval():
                        outs = evaluated(eqn, given)
                    self._constants |= zip(
                        eqn.outvars, map(np.asarray, outs), strict=True
                    )
        return self._constants[x]

    # Ranges as parts of the program.

    def by_rows(self, found: _Range, every: Sequence[_Range]) -> ByRows:
        """The operations of a range, with what they read and what others need of it."""
        order = sorted(found.laid)
        inputs = dict[tuple[Any, RowAxis | None], None]()
        lies = dict[Any, RowAxis | None]()
        for i in order:
            eqn, each = self.eqns[i], found.laid[i]
            lies |= zip(eqn.outvars, each.outs, strict=True)
            for x, rows in zip(eqn.invars, each.ins, strict=True):
                if isinstance(x, jex.Var) and x not in lies:
                    inputs[x, rows] = None
        outs = [(x, lies[x]) for x in lies if self._is_out(x, found, every)]
        outs.sort(key=lambda pair: pair[1] is not None)
        laid = tuple(found.laid[i] for i in order)
        eqns = tuple(self.eqns[i] for i in order)
        return ByRows(eqns, laid, found.length, tuple(inputs), tuple(outs))

    def _is_out(self, x: Any, found: _Range, every: Sequence[_Range]) -> bool:
        i, _ = self.made_by[x]
        having = [other for other in every if i in other.laid]
        if not self._depends(x) or (found in having and having[0] is not found):
            return False  # it is computed again, or another range gives it
        return x in self.outs or any(
            self._reads_outside(r, having, every) for r, _ in self.readers.get(x, [])
        )

    def _reads_outside(
        self, reader: int, having: Sequence[_Range], every: Sequence[_Range]
    ) -> bool:
        """Whether an operation is anywhere but in these ranges."""
        of = [other for other in every if reader in other.laid]
        return not of or not all(other in having for other in of)

    def ordered(
        self, ranges: Sequence[_Range]
    ) -> list[tuple[list[int], ByRows | None]]:
        """All operations, those of each range together; nothing if that cannot be."""
        inside = set[int]().union(*(found.laid for found in ranges))
        within = [self.by_rows(found, ranges) for found in ranges]
        alone = [i for i in range(len(self.eqns)) if i not in inside]
        # What depends on no input is computed for each of those who need it.
        needed = [x for by_rows in within for x, _ in by_rows.inputs]
        needed += [x for i in alone for x in self.eqns[i].invars]
        needed += self.outs
        while needed:
            x = needed.pop()
            if x in self._made and not self._depends(x):
                i, _ = self.made_by[x]
                if i in inside:
                    inside.remove(i)
                    alone.append(i)
                    needed += self.eqns[i].invars
        units = [*([i] for i in sorted(alone)), *(sorted(r.laid) for r in ranges)]
        gives, reads = dict[Any, int](), list[set[Any]]()
        programs = [*[None] * len(alone), *within]
        for k, (numbers, by_rows) in enumerate(zip(units, programs, strict=True)):
            eqn = self.eqns[numbers[0]]
            outs = eqn.outvars if by_rows is None else [x for x, _ in by_rows.outs]
            gives |= dict.fromkeys(outs, k)
            ins = eqn.invars if by_rows is None else [x for x, _ in by_rows.inputs]
            reads.append({x for x in ins if isinstance(x, jex.Var)})
        needs = [
            {gives[x] for x in each if x in gives} - {k} for k, each in enumerate(reads)
        ]
        after = [list[int]() for _ in units]
        for k, each in enumerate(needs):
            for j in each:
                after[j].append(k)
        missing = list(map(len, needs))
        ready = [(units[k][-1], k) for k, n in enumerate(missing) if n == 0]
        heapq.heapify(ready)
        order = list[Any]()
        while ready:
            _, k = heapq.heappop(ready)
            order.append((units[k], programs[k]))
            for j in after[k]:
                missing[j] -= 1
                if missing[j] == 0:
                    heapq.heappush(ready, (units[j][-1], j))
        return order if len(order) == len(units) else []


class _Made:
    """The variables that are computed, and no literals."""

    def __init__(self, made_by: Mapping[Any, Any]):
        self._made_by = made_by

    def __contains__(self, x: object) -> bool:
        return isinstance(x, jex.Var) and x in self._made_by


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
