"""What is alive where a program takes the most memory, for the user to read."""

import dataclasses
import functools
import os
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from .._calls import format_bytes
from .._compiled import (
    Alive,
    CompiledProgram,
    Heap,
    Kind,
    Life,
    LoopAt,
    Origins,
    arrays_at_peak,
    heaps_of,
)
from .._programs import FITTED, Place
from ..checkpointing import Plans, axes_to_draw_on, format_axis
from ._advice import advice, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH, _LINES = 80, 10
# Of names, so much is shown beside other columns.
_NAME = 30
# Plans of larger programs take longer than one waits for a table.
_QUICK = 5_000
# So many areas in a picture, and so many lines in a comparison.
_AREAS, _CHANGES = 8, 8
# With more points, no more can be seen.
_MOST_POINTS = 2_000


@dataclasses.dataclass(frozen=True)
class MemoryProfile:
    """What is alive where a program takes the most memory. Printed, it is a table.

    Attributes:
        name: The function.
        device: The kind of device that it was compiled for, as JAX calls it.
        peak_bytes: The bytes that XLA assigned besides inputs and outputs, on each
            device.
        total_bytes: The same with inputs, outputs and constants.
        host_bytes: The bytes in the memory of the host, which are not among these.
        alive: What is alive where most memory is taken, the largest first. What does
            not lie on the host adds up to `total_bytes`.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import eqloop as el
        >>> def f(x):
        ...     wide = jnp.sin(x[:, None] * x)
        ...     return jnp.sum(jnp.sort(wide, axis=0))
        >>> before = el.memory_profile(f)(jnp.ones(256))
        >>> [(one.kind, one.type_in_words) for one in before.alive][:1]
        [('temporary', 'f32[256,256]')]
        >>> print(before.compare(el.memory_profile(jnp.sum)(jnp.ones(256))))
         before  after  kind       line
        ...
    """

    name: str
    device: str
    peak_bytes: int
    total_bytes: int
    host_bytes: int
    alive: tuple[Alive, ...]
    _program: CompiledProgram = dataclasses.field(repr=False, compare=False)
    _plans: Callable[[], Plans] | None = dataclasses.field(repr=False, compare=False)
    _heap: Heap | None = dataclasses.field(repr=False, compare=False)

    def __getstate__(self) -> Mapping[str, object]:
        # In another process there is nothing to make plans of.
        return vars(self) | {"_plans": None}

    @property
    def largest(self) -> Alive | None:
        """The largest of what XLA assigned besides inputs and outputs."""
        return next(filter(lambda one: one.is_at_peak, self.alive), None)

    @property
    def loops(self) -> Mapping[LoopAt, int]:
        """The bytes that each loop stores for the way back."""
        found = Counter[LoopAt]()
        for one in self.alive:
            if one.loop is not None and one.kind == "stored":
                found[one.loop] += one.nbytes
        return found

    @functools.cached_property
    def advice(self) -> tuple[str, ...]:
        """What would take less, where that is known.

        Figures are from the plans of the loops, which for a large program take about as
        long as to compile it. So its table goes without them.
        """
        return tuple(self._advice(self._plans))

    def _advice(self, plans: Callable[[], Plans] | None) -> Iterator[str]:
        each = self._program.instructions.values()
        has_fit = any(FITTED in one.scope for one in each)
        return advice(self.alive, self.peak_bytes, plans, has_fit)

    def __str__(self) -> str:
        size, total = map(format_bytes, (self.peak_bytes, self.total_bytes))
        host = f", {format_bytes(self.host_bytes)} on the host"
        head = f"{_cut(self.name, _NAME)}: {size} at the peak, {total} in all"
        head += (host if self.host_bytes else "") + f", on {self.device}"
        is_quick = len(self._program.instructions) <= _QUICK
        texts = self.advice if is_quick else tuple(self._advice(None))
        help_lines = list[str]()
        # As many whole sentences as three lines have room for, and one if there is any.
        for count in range(len(texts), 0, -1):
            rest = f"; {len(texts) - count} more: .advice" if texts[count:] else ""
            text = f"help: {'; '.join(texts[:count])}{rest}"
            if len(help_lines := textwrap.wrap(text, _WIDTH)) <= 3:
                break
        rows, count = _by_line(self.alive), _LINES - 2 - len(help_lines)
        if len(rows) > count:
            rest, rows = rows[count - 1 :], rows[: count - 1]
            rows.append((sum(row[0] for row in rest), "", f"{len(rest)} more", ""))
        table = [(format_bytes(size), *columns) for size, *columns in rows]
        lines = _in_columns([("memory", "kind", "what", "line"), *table])
        return "\n".join([head, *lines, *help_lines])

    def compare(self, other: "MemoryProfile") -> "MemoryChange":
        """What another profile has in the place of this one, such as after a change.

        Lines are told by their text, as a change moves their numbers.

        Args:
            other: The other profile.

        Returns:
            The differences. Printed, they are a table.

        Raises:
            TypeError: If `other` is no profile.
        """
        if not isinstance(other, MemoryProfile):
            raise TypeError(
                f"MemoryProfile.compare: pass another profile, not {other!r} of type "
                f"{type(other).__name__}."
            )
        before, after = _by_text(self.alive), _by_text(other.alive)
        size = lambda side, key: sum(one.nbytes for one in side.get(key, ()))
        rows = [
            LineChange(one.place, one.kind, size(before, key), size(after, key))
            for key, (one, *_) in (after | before).items()
        ]
        rows = [row for row in rows if row.before != row.after]
        rows.sort(key=lambda row: -abs(row.after - row.before))
        return MemoryChange(self.peak_bytes, other.peak_bytes, tuple(rows))

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draws the memory that is alive over the program, by the lines that made it.

        Args:
            ax: The axes to draw on; by default, new ones.

        Returns:
            The axes.

        Raises:
            ImportError: If matplotlib is not installed.
        """
        axes, heap = axes_to_draw_on(ax), self._heap
        if heap is None:  # nothing comes and goes
            return axes
        origins = Origins(self._program)
        areas = defaultdict[str, list[Life]](list)
        for life in heap.lives:
            place = origins.of(life, life.end).place
            areas[short(place) if place else "unknown"].append(life)
        live = {name: heap.live(lives) for name, lives in areas.items()}
        names = sorted(live, key=lambda name: -max(live[name]))
        every = max(1, heap.length // _MOST_POINTS)
        times = sorted({*range(0, heap.length, every), heap.peak})
        series = [[live[name][t] for t in times] for name in names[:_AREAS]]
        if others := names[_AREAS:]:
            series.append([sum(live[name][t] for name in others) for t in times])
        labels = [*names[:_AREAS], "other lines"]
        axes.stackplot(times, series, labels=labels[: len(series)], step="post")
        top = sum(life.nbytes for life in heap.at_peak)
        label = f"peak, {format_bytes(top)}"
        axes.plot([heap.peak], [top], "v", color="black", label=label)
        axes.set(xlabel="events of the heap, in order", ylabel="bytes alive")
        axes.set_title(self.name, fontsize="medium")
        axes.yaxis.set_major_formatter(format_axis)
        axes.legend(fontsize="small", frameon=False)
        return axes


@dataclasses.dataclass(frozen=True)
class LineChange:
    """What a line of the program has at the peak, before and after a change."""

    place: Place | None
    kind: Kind
    before: int
    after: int


@dataclasses.dataclass(frozen=True)
class MemoryChange:
    """How two profiles differ. Printed, it is a table.

    Attributes:
        before: The peak of the first.
        after: That of the other.
        lines: The lines that have more or less at the peak, the largest change first.
    """

    before: int
    after: int
    lines: tuple[LineChange, ...]

    def __str__(self) -> str:
        table = [("before", "after", "kind", "line")]
        both = lambda before, after: (format_bytes(before), format_bytes(after))
        table.append((*both(self.before, self.after), "peak", ""))
        for row in self.lines[:_CHANGES]:
            place = "" if row.place is None else short(row.place)
            table.append((*both(row.before, row.after), row.kind, place))
        return "\n".join(_in_columns(table))


def profile_of(
    program: CompiledProgram,
    name: str,
    device: str,
    inputs: Mapping[int, str] | None = None,
    assigned: int | None = None,
    plans: Callable[[], Plans] | None = None,
) -> MemoryProfile:
    """The profile of a compiled program.

    `inputs` has their paths, and `assigned` the bytes besides inputs and outputs.
    """
    heaps, found = heaps_of(program), arrays_at_peak(program)
    of_device = [heap for heap in heaps if not heap.is_on_host]
    size = sum(heap.nbytes for heap in of_device) if assigned is None else assigned
    rest = size - sum(one.nbytes for one in found if not one.is_on_host)
    if rest > 0:
        found.append(Alive(rest, (), "", None, "padding"))
    found += _ends(program, inputs or {})
    found.sort(key=lambda one: -one.nbytes)
    total = sum(one.nbytes for one in found if not one.is_on_host)
    host = sum(heap.nbytes for heap in heaps if heap.is_on_host)
    largest = max(of_device, key=lambda heap: heap.nbytes, default=None)
    return MemoryProfile(
        name, device, size, total, host, tuple(found), program, plans, largest
    )


def _ends(program: CompiledProgram, inputs: Mapping[int, str]) -> list[Alive]:
    """What the inputs, the outputs and the constants of a program take."""
    origins, found = Origins(program), list[Alive]()
    for one in program.allocations:
        if one.parameter is not None:
            parameter = program.parameters[one.parameter]
            name = inputs.get(one.parameter, parameter.scope)
            given = Alive(one.nbytes, *parameter.type_at(()), None, "input", name=name)
            on_host, donated = one.is_on_host, one.is_output
            found.append(replace(given, is_on_host=on_host, is_donated=donated))
        elif not one.is_temporary and one.buffers:
            life = Life(one.nbytes, 0, 1, (program.result_in(one),), (0,))
            kind = "output" if one.is_output else "constant"
            about = origins.of(life, 0)
            found.append(replace(about, kind=kind, is_on_host=one.is_on_host))
    return found


def _by_line(alive: Sequence[Alive]) -> list[tuple[int, str, str, str]]:
    """What is of one kind and from one line together: bytes, kind, what, and line."""
    groups = defaultdict[tuple[object, ...], list[Alive]](list)
    for one in alive:
        groups[one.kind, one.place, one.library, one.loop].append(one)
    rows = list[tuple[int, str, str, str]]()
    for first, *others in groups.values():
        size = sum(one.nbytes for one in (first, *others))
        what = _cut(first.name or first.type_in_words, _NAME)
        what += f" +{len(others)}" if others else ""
        line, around = "", first.loop.place if first.loop else None
        if first.place is not None:
            line = short(first.place)
            if first.library is not None:
                line += f", {os.path.basename(first.library.file)}:{first.library.line}"
            elif around is not None and first.loop is not None:
                is_near = around.file == first.place.file
                at = f":{around.line}" if is_near else f" at {short(around)}"
                line += f" in {first.loop.name}{at}"
        rows.append((size, first.kind, what, line))
    return sorted(rows, key=lambda row: -row[0])


def _by_text(alive: Sequence[Alive]) -> dict[tuple[str, Kind], list[Alive]]:
    found = defaultdict[tuple[str, Kind], list[Alive]](list)
    for one in alive:
        place = one.place
        text = one.name if place is None else f"{place.function} {place.text or place}"
        found[text, one.kind].append(one)
    return found


def _in_columns(table: Sequence[Sequence[str]]) -> list[str]:
    one, two, three = (max(len(row[i]) for row in table) for i in range(3))
    lines = [f"{a:>{one}}  {b:<{two}}  {c:<{three}}  {d}" for a, b, c, d in table]
    return [_cut(line.rstrip(), _WIDTH, from_start=True) for line in lines]


def _cut(text: str, width: int, from_start: bool = False) -> str:
    """A text, or the end of one that is too long, as paths tell by their ends."""
    if len(text) <= width:
        return text
    return f"{text[: width - 1]}…" if from_start else f"…{text[1 - width :]}"
