"""What a `Fit` decided for one function, for the user to read."""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .._calls import format_bytes, says_floats_left
from .._device import planning_device
from .._programs import Place
from ..checkpointing import axes_to_draw_on, format_axis
from ._whole import Decision

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclasses.dataclass(frozen=True)
class FittedPart:
    """One of the parts that a function was cut into.

    Attributes:
        name: The transform, for a loop. For what lies between loops, the layer or the
            function that computes most of it; `"code"` if that is not known.
        place: The line where it begins, if that is known.
        stores: What it stores, in words, or how many of its rows it runs at a time.
        stored_bytes: The bytes that it adds to what is stored, from its forward pass to
            its way back. A value that several parts need is counted for the first.
        peak_bytes: The bytes that are taken at once while it is taken back, as
            estimated: no more than the whole takes by its compiler.
        relative_time: Its time there and back, relative to that of the whole function
            with everything stored.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import eqloop as el
        >>> fit = el.Fit(lambda x: jnp.sum(jnp.sin(x) ** 2), "1MiB")
        >>> [(part.name, part.stores) for part in fit.plan(jnp.ones(64)).parts]
        [('code', 'everything')]
    """

    name: str
    place: Place | None
    stores: str
    stored_bytes: int
    peak_bytes: int
    relative_time: float


@dataclasses.dataclass(frozen=True)
class FitPlan:
    """What is stored of each part of a function. Printed, it is a table.

    Attributes:
        parts: The parts, in the order in which they are run.
        peak_bytes: The bytes that a gradient takes at once besides its inputs and
            outputs, on each device.
        is_compiled: Whether the compiler says so. Otherwise it is estimated.
        relative_time: The time of a gradient, relative to storing everything.
        is_measured: Whether both were run to see that. Otherwise it is estimated.
        host_bytes: The bytes that loops store in the memory of the host.
        pinned: The function with these decisions: it needs no search, and can be passed
            to other processes.
        device: What it was made for: a kind of device, as JAX calls it.
        undifferentiated: Arguments that are numbers of Python, such as `0.3`. They stay
            what they are, and the gradient that is planned is not one by them.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import eqloop as el
        >>> def loss(x):
        ...     return jnp.sum(jnp.sin(x) ** 2)
        >>> fit = el.Fit(loss, "1MiB")
        >>> plan = fit.plan(jnp.ones(64))
        >>> print(plan)
        part  stores      stored ...
        loss  everything  ...
        in all: ... on cpu, compiled; 1.00 x the time of storing everything, estimated
        >>> float(jax.grad(plan.pinned)(jnp.zeros(64))[0])
        0.0
    """

    parts: tuple[FittedPart, ...]
    peak_bytes: int
    is_compiled: bool
    relative_time: float
    is_measured: bool
    host_bytes: int
    pinned: Callable[..., Any] = dataclasses.field(repr=False)
    device: str
    undifferentiated: tuple[str, ...] = ()

    @property
    def peak_at(self) -> FittedPart | None:
        """The part while which is taken back the most memory is taken."""
        return max(self.parts, key=lambda part: part.peak_bytes, default=None)

    def __str__(self) -> str:
        head = ("part", "stores", "stored", "peak", "time", "place")
        # Of what takes nothing, such as numbers for others, nothing is said.
        weighs = lambda part: part.stored_bytes or part.relative_time > 0.005
        heavy = list(filter(weighs, self.parts))
        rows = [head, *_rows(heavy or self.parts)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        how = "compiled" if self.is_compiled else "estimated"
        if self.host_bytes:
            how += f", and {format_bytes(self.host_bytes)} on its host"
        lines.append(
            f"in all: {format_bytes(self.peak_bytes)} on {self.device}, {how}; "
            f"{self.relative_time:.2f} x the time of storing everything, "
            f"{'measured' if self.is_measured else 'estimated'}"
        )
        lines += says_floats_left(self.undifferentiated)
        return "\n".join(lines)

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draws the bytes that are stored over the gradient, a band for each part.

        Args:
            ax: The axes to draw on; new ones by default.

        Returns:
            The axes.

        Raises:
            ImportError: If matplotlib is not installed.
        """
        ax = axes_to_draw_on(ax)
        count = len(self.parts)
        below = [0] * (2 * count)
        for k, part in enumerate(self.parts):
            # Stored when it has been run, until it has been taken back.
            is_there = [k <= t < 2 * count - k for t in range(2 * count)]
            size = part.stored_bytes
            above = [
                low + size * there for low, there in zip(below, is_there, strict=True)
            ]
            ax.fill_between(range(2 * count), below, above, step="mid", linewidth=0)
            below = above
        peaks = [part.peak_bytes for part in self.parts]
        back = range(count, 2 * count)
        ax.plot(back, peaks[::-1], "k.", ms=4, label="taken on the way back")
        ax.set(xlabel="parts, there and back", ylabel="bytes", ylim=(0, None))
        ax.yaxis.set_major_formatter(format_axis)
        ax.legend(loc="upper left", frameon=False)
        return ax


def plan_of_decision(decision: Decision, pinned: Callable[..., Any]) -> FitPlan:
    """The plan of a decision."""
    choice, chosen = decision.choice, decision.chosen
    whole = decision.whole.time_of_everything
    # The compiler may find room that is not foreseen. Of what it finds, each part takes
    # the share that it is estimated to take.
    peaks, stored = choice.peaks(chosen), choice.stored(chosen)
    most = max((decision.peak_bytes, *peaks))
    of_all = lambda sizes: [size * decision.peak_bytes // (most or 1) for size in sizes]
    if most > decision.peak_bytes:
        peaks, stored = of_all(peaks), of_all(stored)
    rows = zip(decision.cut.parts, decision.ways, chosen, strict=True)
    parts = tuple(
        FittedPart(
            name=part.name,
            place=part.place,
            stores=way.stores,
            stored_bytes=stored[k],
            peak_bytes=peaks[k],
            relative_time=choice.parts[k][i].nanoseconds / whole,
        )
        for k, (part, way, i) in enumerate(rows)
    )
    return FitPlan(
        parts=parts,
        peak_bytes=decision.peak_bytes,
        is_compiled=decision.is_compiled,
        relative_time=decision.relative_time,
        is_measured=decision.seen is not None,
        host_bytes=choice.on_host(chosen),
        pinned=pinned,
        device=planning_device().kind,
    )


def _rows(parts: Sequence[FittedPart]) -> Iterator[tuple[str, ...]]:
    """A row for each part; one for all that look alike, such as those of equal layers.

    Of these it has what they store in all, the highest peak, and their time.
    """
    alike = defaultdict[tuple[object, ...], list[FittedPart]](list)
    for part in parts:
        alike[part.name, part.stores, part.place].append(part)
    for (name, stores, place), group in alike.items():
        yield (
            f"{len(group)} x {name}" if len(group) > 1 else str(name),
            str(stores),
            format_bytes(sum(part.stored_bytes for part in group)),
            format_bytes(max(part.peak_bytes for part in group)),
            f"{sum(part.relative_time for part in group):.2f}",
            str(place or ""),
        )
