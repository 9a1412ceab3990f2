"""Where an operation is in the user's program, and how an error says so."""

import dataclasses
from typing import Any

from .._programs import JAX_FILES, OUR_FILES, Place, frames_of, traced_function
from .._types import AnyJaxpr


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
        is_backward: Whether it is part of a backward sweep.
        is_tangent: Whether it is of a program that is being differentiated.
    """

    operation: str
    place: Place | None
    operands: tuple[str, ...]
    frames: tuple[Frame, ...] = ()
    is_backward: bool = False
    is_tangent: bool = False

    @property
    def sweep(self) -> str:
        """The sweep that it is part of."""
        if self.is_backward:
            return "backward"
        return "forward, as it is differentiated" if self.is_tangent else "forward"

    def describe(self, ranges: Any, iterations: Any) -> str:
        """The text of an error."""
        result, *operands = [(float(low), float(high)) for low, high in ranges]
        lines = [f"`{self.operation}` gave {_kind(*result)}.", ""]
        if self.place is not None:
            lines.append(f"  at: {self.place}")
            if self.place.text:
                lines.append(f"      {self.place.text}")
        for i, (kind, (low, high)) in enumerate(
            zip(self.operands, operands, strict=False)
        ):
            lines.append(f"  operand {i}: {kind} from {low:.6g} to {high:.6g}")
        at = [*map(int, iterations), *[-1] * len(self.frames)]
        lines += [
            f"  in: {frame.at(i)}" for frame, i in zip(self.frames, at, strict=False)
        ]
        lines.append(f"  sweep: {self.sweep}")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Argument:
    """An argument that was NaN from the start."""

    name: str

    def describe(self, ranges: Any, iterations: Any) -> str:
        """The text of an error."""
        return (
            f"{self.name} came in with NaN, which reaches the results. No operation "
            f"made one."
        )


def _kind(low: float, high: float) -> str:
    if low != low or high != high:
        return "NaN"
    infinite = [str(x) for x in (low, high) if abs(x) == float("inf")]
    return " and ".join(dict.fromkeys(infinite))
