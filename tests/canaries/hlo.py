"""Reads optimised programs: which operations XLA left in its loops, and how large."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax

from ..compiling import AS_USED

# As users compile: `conftest.py` has other flags, to be quick.
_OPTIONS: dict[str, Any] = dict(AS_USED)
if jax.__version_info__ < (0, 11):
    _OPTIONS["xla_cpu_use_fusion_emitters"] = True

# They only say where a value is, or hand on what others have computed.
_MOVE_NOTHING = frozenset(
    {
        "bitcast",
        "call",
        "conditional",
        "constant",
        "get-tuple-element",
        "opt-barrier",
        "parameter",
        "tuple",
        "while",
    }
)
# They replace a part of their first operand in place, unless that was copied before.
_IN_PLACE = frozenset(["dynamic-update-slice", "scatter"])


def compiled(f: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """A function, compiled as users compile it.

    Args:
        f: The function.
        args: Its arguments, or their types.
        options: Further options of the compiler.
    """
    return jax.jit(f).lower(*args).compile(_OPTIONS | options)


def temporary(f: Callable[..., Any], *args: Any, **options: Any) -> int:
    """The bytes that a program allocates besides its inputs and outputs."""
    return compiled(f, *args, **options).memory_analysis().temp_size_in_bytes


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation of an optimised program.

    Attributes:
        kind: What it does, such as `copy`.
        size: The bytes of its result, or of the largest entry if it is a tuple.
        line: The text.
        is_root: Whether it is the result of its computation.
        calls: The computations in it.
    """

    kind: str
    size: int
    line: str
    is_root: bool
    calls: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Program:
    """An optimised program: operations by computation."""

    computations: dict[str, list[Operation]]

    def operations(self) -> list[Operation]:
        """All operations, those within fusions among them."""
        return [each for found in self.computations.values() for each in found]

    def count(self, *kinds: str) -> int:
        """How many operations of some kinds there are."""
        return sum(each.kind in kinds for each in self.operations())

    def in_loops(self) -> list[Operation]:
        """The operations of all bodies of loops and of what these call."""
        loops = [each for each in self.operations() if each.kind == "while"]
        left = [name for each in loops for name in each.calls]
        seen: dict[str, None] = {}
        while left:
            name = left.pop()
            if name not in seen:
                seen[name] = None
                # What is within a fusion is not an array in memory.
                inner = (e for e in self.computations[name] if e.kind != "fusion")
                left += [call for each in inner for call in each.calls]
        return [each for name in seen for each in self.computations[name]]

    def whole(self, nbytes: int) -> list[str]:
        """What computes an array of so many bytes or more in a loop, at each iteration.

        A part that is written in place does not count.
        """
        found = (each for each in self.in_loops() if each.size >= nbytes)
        return [each.line for each in found if not self._moves_nothing(each)]

    def _moves_nothing(self, operation: Operation) -> bool:
        if operation.kind != "fusion":
            return operation.kind in _MOVE_NOTHING | _IN_PLACE
        # In place if it returns what it has written to.
        (name,) = operation.calls
        return not any(
            each.size >= operation.size
            for each in self.computations[name]
            if each.kind not in _MOVE_NOTHING | _IN_PLACE
        )


def optimised(f: Callable[..., Any], *args: Any, **options: Any) -> Program:
    """The program that XLA makes of a function."""
    return parse(compiled(f, *args, **options).as_text())


def parse(text: str) -> Program:
    """Reads the text of a program."""
    computations: dict[str, list[Operation]] = {}
    inside: list[Operation] = []
    for line in text.splitlines():
        if start := re.match(r"(?:ENTRY )?%?(\S+) \(.*\) -> .* \{$", line):
            inside = computations.setdefault(start[1], [])
        elif found := _OPERATION.match(line):
            root, types, kind = found.groups()
            size = max(_sizes(types), default=0)
            calls = tuple(_calls(line))
            inside.append(Operation(kind, size, line.strip(), bool(root), calls))
    return Program(computations)


_OPERATION = re.compile(r"\s+(ROOT )?%?\S+ = (\(.*?\)|\S+) ([a-z][a-z0-9-]*)\(")
_CALL = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


def _calls(line: str) -> Iterator[str]:
    yield from _CALL.findall(line)
    for names in _BRANCHES.findall(line):
        yield from (name.strip().removeprefix("%") for name in names.split(","))


def _sizes(types: str) -> Iterator[int]:
    for dtype, shape in re.findall(r"([a-z]\w*)\[([\d,]*)\]", types):
        bits = re.match(r"[a-z]+(\d+)", dtype)
        entries = math.prod(int(n) for n in shape.split(",") if n)
        yield entries * (int(bits[1]) if bits else 8) // 8
