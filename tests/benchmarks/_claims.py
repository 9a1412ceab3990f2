"""What a comparison claims: one number from the measurements, and its bound.

Times are compared round by round, by the time that the cores of a CPU were busy with a
run: what else they had to do is not counted. A claim says how far its rounds differ, so
that the noise of a machine does not decide whether it holds.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from ._measure import Measurement

Measurements = Mapping[str, Measurement]

# A number, or one of each round.
Figure: TypeAlias = float | np.ndarray

# The bound of what is meant to be as fast as something else. Programs that are the same
# differ by less, and what is slower by less makes no difference to anybody.
NO_SLOWER = 1.05


@dataclasses.dataclass(frozen=True, eq=False)
class Claim:
    """A figure that stays under a bound.

    Args:
        text: what is claimed, in words.
        figure: computes it from the measurements, for each round or once; `None` where
            they say nothing of it.
        at_most: the bound.
        unit: written after figure and bound.
        cases: the names that `figure` reads; without one of them there is no claim.
    """

    text: str
    figure: Callable[[Measurements], Figure | None]
    at_most: float
    unit: str
    cases: tuple[str, ...]


def memory(name: str, at_most_bytes: float) -> Claim:
    """The temporary memory of a case."""
    return Claim(
        f"temporary memory of {name}",
        lambda measured: measured[name].temp_bytes / 1e6,
        at_most_bytes / 1e6,
        " MB",
        (name,),
    )


def memory_ratio(ours: str, theirs: str, at_most: float) -> Claim:
    """The temporary memory of one case over that of another."""
    return Claim(
        f"temporary memory, {ours} over {theirs}",
        lambda measured: measured[ours].temp_bytes / measured[theirs].temp_bytes,
        at_most,
        "x",
        (ours, theirs),
    )


def over_the_best(
    name: str, others: Sequence[str], nbytes: int, at_most: float
) -> Claim:
    """How many times as long as the fastest of all that fit into the same memory."""

    def figure(measured: Measurements) -> Figure | None:
        fits = [n for n in others if measured[n].temp_bytes <= nbytes]
        if not fits:
            return None
        best = min(fits, key=lambda n: np.median(measured[n].busy))
        return measured[name].busy / measured[best].busy

    text = f"time, {name} over the fastest of the others that fit"
    return Claim(text, figure, at_most, "x", (name, *others))


def time_ratio(
    ours: str, theirs: str, at_most: float, *, scale: float = 1.0, waits: bool = False
) -> Claim:
    """The time of one case over that of another, times `scale`, in each round.

    Args:
        ours: The one case.
        theirs: The other case.
        at_most: The bound.
        scale: What the ratio is multiplied by.
        waits: Whether the time counts that cores wait, as they do for a disk.
    """

    def figure(measured: Measurements) -> Figure:
        of = lambda one: one.seconds if waits else one.busy
        return scale * of(measured[ours]) / of(measured[theirs])

    return Claim(
        f"time, {ours} over {theirs}" + (" per step" if scale != 1 else ""),
        figure,
        at_most,
        "x",
        (ours, theirs),
    )


def compile_ratio(ours: str, theirs: str, at_most: float) -> Claim:
    """The time to trace and compile one case over that of another."""
    return Claim(
        f"trace and compile, {ours} over {theirs}",
        lambda measured: (
            measured[ours].compile_seconds / measured[theirs].compile_seconds
        ),
        at_most,
        "x",
        (ours, theirs),
    )


def time_difference(ours: str, theirs: str, at_most: float) -> Claim:
    """The time of one case beyond that of another, in milliseconds, as `time_ratio`."""
    return Claim(
        f"time, {ours} less {theirs}",
        lambda measured: 1e3 * (measured[ours].busy - measured[theirs].busy),
        at_most,
        " ms",
        (ours, theirs),
    )


def compile_time(name: str, at_most: float) -> Claim:
    """The time to trace and compile a case, or that of its first call."""
    return Claim(
        f"trace and compile, {name}",
        lambda measured: measured[name].compile_seconds,
        at_most,
        " s",
        (name,),
    )
