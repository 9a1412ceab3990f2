"""What a comparison claims: one number from the measurements, and its bound."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ._measure import Measurement

Measurements = Mapping[str, Measurement]


@dataclasses.dataclass(frozen=True, eq=False)
class Claim:
    """A figure that stays under a bound.

    Args:
        text: what is claimed, in words.
        figure: computes it from the measurements; `None` where they say nothing of it.
        at_most: the bound.
        unit: written after figure and bound.
        cases: the names that `figure` reads; without one of them there is no claim.
    """

    text: str
    figure: Callable[[Measurements], float | None]
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

    def figure(measured: Measurements) -> float | None:
        fits = [n for n in others if measured[n].temp_bytes <= nbytes]
        if not fits:
            return None
        best = min(measured[n].seconds.min() for n in fits)
        return float(measured[name].seconds.min() / best)

    text = f"time, {name} over the fastest of the others that fit"
    return Claim(text, figure, at_most, "x", (name, *others))


def time_ratio(ours: str, theirs: str, at_most: float, *, scale: float = 1.0) -> Claim:
    """The time of one case over that of another, times `scale`.

    It is the median over the rounds of the ratio within a round: what slows the machine
    for a while slows both.
    """
    return Claim(
        f"time, {ours} over {theirs}" + (" per step" if scale != 1 else ""),
        lambda measured: (
            scale * float(np.median(measured[ours].seconds / measured[theirs].seconds))
        ),
        at_most,
        "x",
        (ours, theirs),
    )


def compile_ratio(ours: str, theirs: str, at_most: float) -> Claim:
    """The time to trace and compile one case over that of another."""
    return Claim(
        f"trace and compile, {ours} over {theirs}",
        lambda measured: float(
            np.median(measured[ours].compile_seconds / measured[theirs].compile_seconds)
        ),
        at_most,
        "x",
        (ours, theirs),
    )


def time_difference(ours: str, theirs: str, at_most: float) -> Claim:
    """The time of one case beyond that of another, in milliseconds, as `time_ratio`."""
    return Claim(
        f"time, {ours} less {theirs}",
        lambda measured: (
            1e3 * float(np.median(measured[ours].seconds - measured[theirs].seconds))
        ),
        at_most,
        " ms",
        (ours, theirs),
    )


def compile_time(name: str, at_most: float) -> Claim:
    """The time to trace and compile a case, or that of its first call."""
    return Claim(
        f"trace and compile, {name}",
        lambda measured: float(np.median(measured[name].compile_seconds)),
        at_most,
        " s",
        (name,),
    )
