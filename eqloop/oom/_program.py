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
_TUPLE = 13
# The memory of the device, and that of its host: XLA numbers memories by colours.
_DEVICE, _HOST = 0, 5
_STEPS = re.compile(rb'known_trip_count":\{"n":"(\d+)"')


class Type(NamedTuple):
    """The type of an array; `""` as dtype is of what is none, such as a token."""

    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """An instruction of the program.

    Attributes:
        id: What it is known by.
        name: Its name.
        opcode: What it does, such as `"fusion"`.
        computation: The computation that it is in.
        operands: The instructions that it reads.
        calls: The computations that it runs.
        frame: The innermost frame of Python that it comes from; 0 if that is unknown.
        scope: JAX's names around it.
        index: Which of the parts of a tuple, or which parameter, it is.
        steps: How many steps a loop has, if the compiler knows.
        shape: Its type, as XLA wrote it down.
    """

    id: int
    name: str
    opcode: str
    computation: int
    operands: tuple[int, ...]
    calls: tuple[int, ...]
    frame: int
    scope: str
    index: int
    steps: int | None
    shape: bytes = dataclasses.field(repr=False)

    @classmethod
    def of(cls, data: bytes, computation: int) -> "Instruction":
        """Reads an instruction."""
        read = Message(data)
        about = Message(read.data(7))
        opcode = read.text(2)
        steps = _STEPS.search(read.data(43)) if opcode == "while" else None
        return cls(
            read.integer(35),
            read.text(1),
            opcode,
            computation,
            tuple(read.integers(36)),
            tuple(read.integers(38)),
            about.integer(15),
            about.text(2),
            read.integer(13 if opcode == "get-tuple-element" else 9),
            int(steps.group(1)) if steps else None,
            read.data(3),
        )

    def type_at(self, index: Sequence[int]) -> Type:
        """The type of what it gives, or of a part of the tuple that it gives."""
        shape = Message(self.shape)
        for i in index:
            shape = Message(shape.every(4)[i])
        is_tuple = shape.integer(2) == _TUPLE
        dims = () if is_tuple else tuple(shape.integers(3))
        return Type(dims, _DTYPES.get(shape.integer(2), ""))


class Position(NamedTuple):
    """Where a value is: in what an instruction gives, or in a part of it."""

    instruction: int
    index: tuple[int, ...]

    @classmethod
    def of(cls, data: bytes) -> "Position":
        """Reads a position."""
        read = Message(data)
        return cls(read.integer(4), tuple(read.integers(3)))


class Buffer(NamedTuple):
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
        is_constant: Whether it holds a constant.
        is_temporary: Whether it is none of these.
        is_on_host: Whether it is in the memory of the host.
    """

    nbytes: int
    buffers: Mapping[int, int]
    parameter: int | None
    is_output: bool
    is_constant: bool
    is_temporary: bool
    is_on_host: bool

    @classmethod
    def of(cls, data: bytes) -> "Allocation | None":
        """Reads an allocation; `None` for what is neither on the device nor the host.

        Those are the memory that is local to a thread, and small ones close to cores.
        """
        read = Message(data)
        is_input, is_output, is_constant = 5 in read, 7 in read, 12 in read
        if read.integer(3) or read.integer(8) not in (_DEVICE, _HOST):
            return None
        return cls(
            read.integer(2),
            {x.integer(1): x.integer(2) for x in map(Message, read.every(9))},
            read.integer(6) if is_input else None,
            is_output,
            is_constant,
            not (is_input or is_output or is_constant),
            read.integer(8) == _HOST,
        )


class Event(NamedTuple):
    """What happens to a buffer in the heap: 0 it comes, 1 it goes, 2 it joins one."""

    kind: int
    buffer: int
    joined: int


@dataclasses.dataclass(frozen=True)
class Program:
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
    buffers: Mapping[int, Buffer]
    allocations: Sequence[Allocation]
    heaps: Sequence[Sequence[Event]]
    frames: Sequence[tuple[Place, int]]

    @classmethod
    def of(cls, data: bytes) -> "Program | None":
        """Reads a program; `None` if its memory has not been assigned."""
        read = Message(data)
        if 1 not in read or 3 not in read:
            return None
        module, memory = Message(read.data(1)), Message(read.data(3))
        instructions, roots = dict[int, Instruction](), dict[int, int]()
        for one in map(Message, module.every(3)):
            computation = one.integer(5)
            roots[computation] = one.integer(6)
            for each in one.every(2):
                instruction = Instruction.of(each, computation)
                instructions[instruction.id] = instruction
        buffers = dict[int, Buffer]()
        for one in map(Message, memory.every(1)):
            made = Position.of(one.data(3))
            buffers[one.integer(1)] = Buffer(one.integer(2), made)
        found = map(Allocation.of, memory.every(3))
        allocations = [one for one in found if one is not None]
        heaps = [
            [Event(*map(event.integer, (1, 2, 5))) for event in map(Message, events)]
            for events in (Message(heap).every(1) for heap in memory.every(4))
        ]
        return cls(
            module.text(1),
            instructions,
            roots,
            module.integer(6),
            buffers,
            allocations,
            heaps,
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
    names = [[x.decode(errors="replace") for x in read.every(i)] for i in (1, 2)]
    known = lambda texts, i: texts[i - 1] if 0 < i <= len(texts) else "<unknown>"
    places = list[Place]()
    for one in map(Message, read.every(3)):
        function = known(names[1], one.integer(2)).rsplit(".", 1)[-1]
        file = known(names[0], one.integer(1))
        places.append(Place(file, one.integer(3), function))
    frames = list[tuple[Place, int]]()
    for one in map(Message, read.every(4)):
        place = places[one.integer(1) - 1]
        frames.append((place, one.integer(2)))
    return frames
