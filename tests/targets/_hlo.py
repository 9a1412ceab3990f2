"""Reads an optimised program as XLA prints it: what is started, and how often.

The text is the only thing that XLA shows of it.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{")
_LINE = re.compile(r"(ROOT )?%?([\w.\-]+) = (.*? )([\w\-]+)\((.*)")
_TYPE = re.compile(r"\b([a-z]+(\d*)\w*)\[([\d,]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")

# Nothing is started for these: they name values, or wait for what was started.
_NOTHING = {
    "after-all",
    "bitcast",
    "constant",
    "get-tuple-element",
    "opt-barrier",
    "parameter",
    "partition-id",
    "replica-id",
    "tuple",
}
_SECOND_HALVES = "-done", "-update"


@dataclasses.dataclass(frozen=True)
class Array:
    """The type of an array: its dimensions, and its bytes without padding."""

    dims: tuple[int, ...]
    size: int


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A line of a program.

    Attributes:
        name: Its name.
        op: What it does.
        types: Its type as it is written.
        rest: Its operands and attributes, as they are written.
        is_root: Whether it is what its part of the program returns.
    """

    name: str
    op: str
    types: str
    rest: str
    is_root: bool

    @property
    def arrays(self) -> list[Array]:
        """The arrays in its result."""
        found = list[Array]()
        for _, bits, dims in _TYPE.findall(self.types):
            shape = tuple(int(n) for n in dims.split(",") if n)
            # `pred` has no number in its name, and takes a byte.
            found.append(Array(shape, math.prod(shape) * int(bits or 8) // 8))
        return found

    @property
    def operands(self) -> list[str]:
        """The names of its operands."""
        depth = 1
        for at, letter in enumerate(self.rest):
            depth += (letter == "(") - (letter == ")")
            if not depth:
                return _NAME.findall(self.rest[:at])
        return []

    @property
    def trips(self) -> int | None:
        """How often a loop runs, if XLA knows."""
        found = _TRIPS.search(self.rest)
        return int(found[1]) if found else None

    def called(self, role: str) -> str | None:
        """The name of the part that it runs in a role."""
        found = re.search(rf"\b{role}=%?([\w.\-]+)", self.rest)
        return found[1] if found else None

    @property
    def runs(self) -> list[str]:
        """The parts that it runs, which start things themselves: no kernels."""
        if self.op == "conditional" and (found := _BRANCHES.search(self.rest)):
            return [name.strip().lstrip("%") for name in found[1].split(",")]
        roles = {
            "while": ("body",),
            "call": ("to_apply",),
            "conditional": ("true_computation", "false_computation"),
        }
        named = map(self.called, roles.get(self.op, ()))
        return [name for name in named if name is not None]


@dataclasses.dataclass(frozen=True)
class Started:
    """Something that a device is told to do: a kernel, or a copy.

    Attributes:
        instruction: What is done.
        times: How often. Loops of which that is not known count once.
        is_in_loop: Whether the innermost loop around it has several iterations.
    """

    instruction: Instruction
    times: int
    is_in_loop: bool


class Optimised:
    """An optimised program, given its text."""

    def __init__(self, text: str) -> None:
        self._parts: dict[str, dict[str, Instruction]] = {}
        self._beside: dict[str, Mapping[str, Instruction]] = {}
        self._entry, part = "", dict[str, Instruction]()
        for line in text.splitlines():
            if head := _HEAD.match(line):
                part = self._parts.setdefault(head[2], {})
                self._entry = head[2] if head[1] else self._entry
            elif line.startswith("  ") and (found := _LINE.match(line.strip())):
                root, name, types, op, rest = found.groups()
                part[name] = Instruction(name, op, types, rest, bool(root))
                self._beside[name] = part

    def loops(self) -> Iterator[Instruction]:
        """All loops that run."""
        return (
            one.instruction for one in self._lines() if one.instruction.op == "while"
        )

    def started(self) -> Iterator[Started]:
        """All that is started."""
        for one in self._lines():
            op = one.instruction.op
            starts = op not in _NOTHING and not op.endswith(_SECOND_HALVES)
            if starts and not one.instruction.runs:
                yield one

    def _lines(self) -> Iterator[Started]:
        left = [Started(line, 1, False) for line in self._parts[self._entry].values()]
        while left:
            yield (one := left.pop())
            line, times, is_in_loop = one.instruction, one.times, one.is_in_loop
            if line.op == "while":
                times *= line.trips or 1
                is_in_loop = line.trips != 1
            for name in line.runs:
                inner = self._parts[name].values()
                left += (Started(each, times, is_in_loop) for each in inner)

    def written(self, line: Instruction) -> list[int]:
        """The bytes that are written of each array in a result.

        Updates are in place: XLA has made a copy where they could not be.
        """
        part = line.called("calls") if line.op == "fusion" else None
        if part is None:
            return self._written(self._beside[line.name], [line])
        inside = self._parts[part]
        root = next(one for one in inside.values() if one.is_root)
        outs = (
            [inside[name] for name in root.operands] if root.op == "tuple" else [root]
        )
        return self._written(inside, outs)

    def _written(
        self, beside: Mapping[str, Instruction], lines: list[Instruction]
    ) -> list[int]:
        sizes = list[int]()
        for line in lines:
            while line.op == "bitcast":
                line = beside[line.operands[0]]
            if line.op == "dynamic-update-slice":
                line = beside[line.operands[1]]
            sizes += (array.size for array in line.arrays)
        return sizes
