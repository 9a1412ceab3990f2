"""Where an operation is in the user's program, and how an error says so."""

import dataclasses
import enum
import math
from typing import Any

import numpy as np

from .._arrays import describe
from .._programs import JAX_FILES, OUR_FILES, Place, frames_of, traced_function
from .._types import AnyJaxpr, Aval
from ._finding import NOWHERE

_SWEEPS = "forward", "forward, as it is differentiated", "backward"


class SweepKind(enum.IntEnum):
    """The later of two that something is part of counts."""

    FORWARD, DIFFERENTIATED, BACKWARD = range(3)


def is_ours(source_info: Any) -> bool:
    """Whether this library made an equation, rather than the user."""
    for frame in frames_of(source_info):
        if not frame.file_name.startswith(JAX_FILES):
            return frame.file_name.startswith(OUR_FILES)
    return True


def is_of_jax(jaxpr: AnyJaxpr) -> bool:
    """Whether a jaxpr is that of a function of JAX itself, rather than the user's."""
    _, file = traced_function(jaxpr)
    return file is not None and file.startswith(JAX_FILES)


@dataclasses.dataclass(frozen=True)
class Frame:
    """A loop around an operation.

    Attributes:
        name: The transform, or the function of JAX, that the loop is one of.
        count: How many of them are done at once.
    """

    name: str
    place: Place | None
    unit: str = "iteration"
    count: int = 1

    def at(self, index: int) -> str:
        """The step, if it is known."""
        where = f", {self.place}" if self.place else ""
        which = f"{self.unit} {index} of "
        if index < 0:
            which = ""
        elif self.count > 1:
            which = f"{self.unit}s {index} to {index + self.count - 1} of "
        return f"{which}{self.name}{where}"


@dataclasses.dataclass(frozen=True)
class Site:
    """An operation that is checked, or an argument.

    Attributes:
        frames: The loops around it, the outermost first.
        result: The type of its result.
    """

    operation: str
    place: Place | None
    operands: tuple[str, ...]
    frames: tuple[Frame, ...]
    sweep: SweepKind
    result: Aval

    def describe(self, iterations: Any, ranges: Any, where: Any) -> str:
        """The text of an error."""
        result, *operands = [(float(low), float(high)) for low, high in ranges]
        kind = _kind(*result)
        lines = [f"`{self.operation}` gave {kind}.", ""]
        if self.place is not None:
            lines.append(f"  at: {self.place}")
            if self.place.text:
                lines.append(f"      {self.place.text}")
        if at := _entry(self.result, where):
            first = "NaN" if kind == "NaN" else "infinity"
            lines.append(
                f"  result: {describe(self.result)}, the first {first} at {at}"
            )
        for i, (kind, (low, high)) in enumerate(
            zip(self.operands, operands, strict=False)
        ):
            lines.append(f"  operand {i}: {kind} from {low:.6g} to {high:.6g}")
        at = [*map(int, iterations), *[-1] * len(self.frames)]
        lines += [
            f"  in: {frame.at(i)}" for frame, i in zip(self.frames, at, strict=False)
        ]
        lines.append(f"  sweep: {_SWEEPS[self.sweep]}")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Argument:
    """An argument that was NaN from the start."""

    name: str
    type: Aval

    def describe(self, iterations: Any, ranges: Any, where: Any) -> str:
        """The text of an error."""
        entry = _entry(self.type, where)
        at = f" at {entry}" if entry else ""
        return (
            f"{self.name} came in with NaN{at}, which reaches the results. No "
            f"operation made one."
        )


def _entry(aval: Aval, where: Any) -> str:
    """The index of an entry, which under `vmap` says which row it is of."""
    shape = aval.shape
    if not shape or where == NOWHERE:
        return ""
    index = np.unravel_index(int(where) % math.prod(shape), shape)
    return f"[{', '.join(map(str, index))}]"


def _kind(low: float, high: float) -> str:
    if low != low or high != high:
        return "NaN"
    infinite = [str(x) for x in (low, high) if abs(x) == float("inf")]
    return " and ".join(dict.fromkeys(infinite))
