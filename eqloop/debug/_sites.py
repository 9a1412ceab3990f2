"""Where an operation is in the user's program, and how an error says so."""

import dataclasses
import importlib.util
import linecache
import os
from typing import Any

import jax

_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_JAX = os.path.dirname(jax.__file__) + os.sep


def _others() -> tuple[str, ...]:
    names = ("equinox", "jaxtyping", "beartype", "functools", "contextlib")
    specs = [importlib.util.find_spec(name) for name in names]
    origins = [spec.origin for spec in specs if spec is not None and spec.origin]
    is_package = lambda path: os.path.basename(path) == "__init__.py"
    return tuple(
        os.path.dirname(path) + os.sep if is_package(path) else path for path in origins
    )


# What stands between the user's line and the operation that it asked for.
_BETWEEN = (_OURS, _JAX, *_others(), "<frozen ", "<@beartype")


@dataclasses.dataclass(frozen=True)
class Place:
    """A line of the user's program."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.function})"

    @property
    def text(self) -> str:
        """The text of the line, if it can be read."""
        return linecache.getline(self.file, self.line).strip()


def place_of(source_info: Any) -> Place | None:
    """The innermost line of the user's code that led to an equation, if known."""
    for frame in _frames(source_info):
        if not frame.file_name.startswith(_BETWEEN):
            name = frame.function_name.rsplit(".", 1)[-1]
            return Place(frame.file_name, frame.line_num, name)
    return None


def is_ours(source_info: Any) -> bool:
    """Whether this library made an equation, rather than the user."""
    for frame in _frames(source_info):
        if not frame.file_name.startswith(_JAX):
            return frame.file_name.startswith(_OURS)
    return True


def is_of_jax(jaxpr: Any) -> bool:
    """Whether a jaxpr is that of a function of JAX itself, rather than the user's."""
    file = jaxpr.debug_info.func_filename
    return file is not None and file.startswith(_JAX)


def _frames(source_info: Any) -> Any:
    traceback = source_info.traceback
    return () if traceback is None else traceback.frames


@dataclasses.dataclass(frozen=True)
class Frame:
    """A loop around an operation.

    Attributes:
        name: The transform, or the function of JAX, that the loop is one of.
        place: Where it is called.
        unit: What its steps are called.
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
        operation: Its name.
        place: Where it is called.
        operands: The types of its operands.
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
        """The text of an error.

        Args:
            ranges: The least and the greatest number of the result, and of operands.
            iterations: How far the loops around are.
        """
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


def type_text(aval: Any) -> str:
    """A type for an error message."""
    shape = ",".join(map(str, aval.shape))
    return f"{aval.dtype}[{shape}]"
