"""A compiled program as its compiler wrote it down, with the memory that it assigned.

XLA writes a `HloProto` when it is asked to (`xla_dump_to`), on every platform: the
scheduled program, the frames of Python that each instruction comes from, which buffers
are in which allocation, and in which order those in the heap come and go. The numbers
of fields are those of XLA's `hlo.proto` and `xla_data.proto`.
"""

import dataclasses
import functools
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .._programs import Place
from ._wire import Message

# By XLA's `PrimitiveType`.
_DTYPES = {
    1: "bool", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "uint8", 7: "uint16",
    8: "uint32", 9: "uint64", 10: "float16", 11: "float32", 12: "float64",
    15: "complex64", 16: "bfloat16", 18: "complex128", 19: "float8_e5m2",
    20: "float8_e4m3fn", 21: "int4", 22: "uint4",
}  # fmt: skip
# The memory of the device, and that of its host: XLA numbers memories by colours.
_DEVICE, _HOST = 0, 5
_STEPS = re.compile(rb'known_trip_count":\{"n":"(\d+)"')


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """An instruction of the program.

    Attributes:
        computation: The computation that it is in.
        id: What it is known by.
        opcode: What it does, such as `"fusion"`.
        operands: The instructions that it reads.
        calls: The computations that it runs.
        frame: The innermost frame of Python that it comes from; 0 if that is unknown.
        scope: JAX's names around it.
        index: Which of the parts of a tuple, or which parameter, it is.
        steps: How many steps a loop has, if the compiler knows.
        shape: Its type, as XLA wrote it down.
    """

    computation: int
    id: int
    opcode: str
    operands: list[int]
    calls: list[int]
    frame: int
    scope: str
    index: int
    steps: int | None
    shape: Message = dataclasses.field(repr=False)

    @classmethod
    def of(cls, read: Message, computation: int) -> "Instruction":
        """Reads an instruction."""
        opcode, (about, shape) = read.text(2), (Message(read.data(i)) for i in (7, 3))
        is_part = opcode == "get-tuple-element"
        steps = _STEPS.search(read.data(43)) if opcode == "while" else None
        links = (read.integers(36), read.integers(38))
        origin = (about.integer(15), about.text(2), read.integer(13 if is_part else 9))
        count = int(steps.group(1)) if steps else None
        return cls(computation, read.integer(35), opcode, *links, *origin, count, shape)

    def type_at(self, index: Sequence[int]) -> tuple[tuple[int, ...], str]:
        """The shape and the dtype of what it gives, or of a part of it.

        The dtype of what is no array, such as a tuple, is `""`.
        """
        shape = self.shape
        for i in index:
            shape = shape.every(4)[i]
        return (tuple(shape.integers(3)), _DTYPES.get(shape.integer(2), ""))


@dataclasses.dataclass(frozen=True)
class Position:
    """Where a value is: in what an instruction gives, or in a part of it."""

    instruction: int
    index: tuple[int, ...]


class AssignedBuffer(NamedTuple):
    """A value that has memory: how much, and where it is made."""

    nbytes: int
    made: Position


@dataclasses.dataclass(frozen=True)
class Allocation:
    """Memory that is assigned to buffers.

    Attributes:
        nbytes: Its size.
        buffers: The buffers, which may take turns, each with where it begins.
        parameter: The number of the input that it holds, if it holds one.
        is_output: Whether it holds an output.
        is_temporary: Whether it holds neither these nor constants.
        is_on_host: Whether it is in the memory of the host.
    """

    nbytes: int
    buffers: Mapping[int, int]
    parameter: int | None
    is_output: bool
    is_temporary: bool
    is_on_host: bool

    @classmethod
    def of(cls, read: Message) -> "Allocation | None":
        """Reads an allocation; `None` for what is neither on the device nor the host.

        Those are the memory that is local to a thread, and small ones close to cores.
        """
        is_local, memory = read.integer(3), read.integer(8)
        if is_local or memory not in (_DEVICE, _HOST):
            return None
        is_input, is_output, is_constant = 5 in read, 7 in read, 12 in read
        return cls(
            read.integer(2),
            {x.integer(1): x.integer(2) for x in read.every(9)},
            read.integer(6) if is_input else None,
            is_output,
            not (is_input or is_output or is_constant),
            memory == _HOST,
        )


class HeapEvent(NamedTuple):
    """What happens to a buffer in the heap: 0 it comes, 1 it goes, 2 it joins one."""

    kind: int
    buffer: int


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """A compiled program.

    Attributes:
        name: What JAX calls it.
        instructions: Its instructions by their ids, each computation as scheduled.
        roots: What each computation gives, by the computations' ids.
        entry: The computation that is run.
        buffers: The buffers by their ids.
        allocations: The memory of the device, and that of the host.
        heaps: For each heap what happens in it.
        frames: For each frame of Python, the place and the frame around it.
    """

    name: str
    instructions: Mapping[int, Instruction]
    roots: Mapping[int, int]
    entry: int
    buffers: Mapping[int, AssignedBuffer]
    allocations: Sequence[Allocation]
    heaps: Sequence[Sequence[HeapEvent]]
    frames: Sequence[tuple[Place, int]]

    @classmethod
    def of(cls, data: bytes) -> "CompiledProgram | None":
        """Reads a program; `None` if its memory has not been assigned."""
        read = Message(data)
        if 1 not in read or 3 not in read:
            return None
        module, memory = Message(read.data(1)), Message(read.data(3))
        instructions, roots = dict[int, Instruction](), dict[int, int]()
        for one in module.every(3):
            roots[one.integer(5)] = one.integer(6)
            for each in one.every(2):
                instruction = Instruction.of(each, one.integer(5))
                instructions[instruction.id] = instruction
        buffers = dict[int, AssignedBuffer]()
        for one in memory.every(1):
            at = Message(one.data(3))
            made = Position(at.integer(4), tuple(at.integers(3)))
            buffers[one.integer(1)] = AssignedBuffer(one.integer(2), made)
        return cls(
            module.text(1),
            instructions,
            roots,
            module.integer(6),
            buffers,
            [one for one in map(Allocation.of, memory.every(3)) if one is not None],
            [
                [HeapEvent(*map(event.integer, (1, 2))) for event in heap.every(1)]
                for heap in memory.every(4)
            ],
            _frames(Message(module.data(17))),
        )

    @functools.cached_property
    def readers(self) -> Mapping[int, Sequence[Instruction]]:
        """What reads an instruction, by its id."""
        found = defaultdict[int, list[Instruction]](list)
        for each in self.instructions.values():
            for operand in each.operands:
                found[operand].append(each)
        return found

    @functools.cached_property
    def bodies(self) -> Mapping[int, Sequence[Instruction]]:
        """The instructions of a computation, by its id."""
        found = defaultdict[int, list[Instruction]](list)
        for each in self.instructions.values():
            found[each.computation].append(each)
        return found

    @functools.cached_property
    def callers(self) -> Mapping[int, Instruction]:
        """What runs a computation, by its id."""
        found = dict[int, Instruction]()
        for each in self.instructions.values():
            found.update(dict.fromkeys(each.calls, each))
        return found

    @functools.cached_property
    def parameters(self) -> Mapping[int, Instruction]:
        """The inputs of the program, by their numbers."""
        own = self.bodies[self.entry]
        return {each.index: each for each in own if each.opcode == "parameter"}

    def result_in(self, allocation: Allocation) -> int:
        """The buffer in an allocation that is an output, or else the first."""
        made = {self.buffers[buffer].made: buffer for buffer in allocation.buffers}
        found = (made[at] for at in self._results if at in made)
        return next(found, next(iter(allocation.buffers)))

    @functools.cached_property
    def _results(self) -> Sequence[Position]:
        """What the program gives, where it is made."""
        root = self.instructions[self.roots[self.entry]]
        if root.opcode != "tuple":
            return [self._made(Position(root.id, ()))]
        return [self._made(Position(x, ())) for x in root.operands]

    def _made(self, at: Position) -> Position:
        while True:
            one = self.instructions[at.instruction]
            match one.opcode:
                case "get-tuple-element":
                    at = Position(one.operands[0], (one.index, *at.index))
                case "bitcast":
                    at = Position(one.operands[0], at.index)
                case "call":
                    at = Position(self.roots[one.calls[0]], at.index)
                case "tuple" if at.index:
                    at = Position(one.operands[at.index[0]], at.index[1:])
                case _:
                    return at

    def places(self, frame: int) -> list[Place]:
        """The lines of Python that led to a frame, the innermost first."""
        found = list[Place]()
        while 0 < frame <= len(self.frames) and len(found) <= len(self.frames):
            place, frame = self.frames[frame - 1]
            found.append(place)
        return found


def _frames(read: Message) -> list[tuple[Place, int]]:
    files, functions = read.texts(1), read.texts(2)
    places = [
        Place(
            files[one.integer(1) - 1],
            one.integer(3),
            functions[one.integer(2) - 1].rsplit(".", 1)[-1],
        )
        for one in read.every(3)
    ]
    frames = ((each.integer(1) - 1, each.integer(2)) for each in read.every(4))
    return [(places[at], around) for at, around in frames]
