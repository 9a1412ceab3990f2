"""From which line, and which loop, the memory of a compiled program comes, and why.

XLA keeps for most instructions the frames of Python that they come from. What it makes
itself (copies, zeros to begin with) has none: then what is moved there tells.
"""

import re
import sysconfig
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from .._programs import Place, is_between, is_later
from ._alive import Alive, LoopAt
from ._lives import Life
from ._program import CompiledProgram, Instruction

# What gives what it is given, in another form or in another place.
# fmt: off
_MOVES = frozenset({
    "async-done", "async-start", "async-update", "bitcast", "bitcast-convert",
    "broadcast", "call", "conditional", "constant", "copy", "copy-done", "copy-start",
    "dynamic-slice", "get-tuple-element", "iota", "opt-barrier", "pad", "parameter",
    "reshape", "slice", "transpose", "tuple", "while",
})
# What hands on a buffer that it does not read.
_HANDS_ON = frozenset({
    "bitcast", "call", "get-tuple-element", "opt-barrier", "tuple", "while",
})
# fmt: on
_WRITES, _FUSION = "dynamic-update-slice", "fusion"
_OURS = re.compile(r"eqloop\.([\w.]+)")
# The sum of cotangents.
_SUM = "add_any"
# It runs again what was not stored.
_AGAIN = "rematted_computation"
# What an instruction gives, or a part of it.
_Value: TypeAlias = tuple[Instruction, tuple[int, ...]]
# No more instructions are looked at to explain one.
_MOST_SEEN = 256


# Where files of libraries are.
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")
_STANDARD = sysconfig.get_path("stdlib")


class Origins:
    """Tells where the memory of one program comes from."""

    def __init__(self, program: CompiledProgram):
        self._program = program

    def of(self, life: Life, time: int) -> Alive:
        """Where what is alive comes from, at an event."""
        makers = [self._made(buffer) for buffer in life.buffers]
        come = [i for i, at in enumerate(life.comes) if at <= time]
        rows = [i for i, (one, _) in enumerate(makers) if self._writes_rows(one)]
        computed = [i for i, (one, _) in enumerate(makers) if not self._moves(one)]
        before = [i for i in reversed(come) if i in computed]
        # What has been filled with zeros is named by what is written there later.
        chosen = next(iter((*rows, *before, *computed, *reversed(come))), 0)
        instruction, index = makers[chosen]
        maker = self._explained(instruction, index)
        place, library = self._places(maker)
        buffers = life.buffers if rows else life.buffers[chosen:]
        is_stored = self._is_stored(maker, buffers)
        loop = self._loop_around(instruction)
        # What a kernel stores of its loop, or a reversal by an inverse, no loop of XLA
        # has made.
        if loop is None and is_stored and (names := _OURS.findall(maker.scope)):
            loop = LoopAt(names[-1], place, None)
        return Alive(
            life.nbytes,
            *instruction.type_at(index),
            place,
            "stored" if is_stored else "temporary",
            library,
            loop,
        )

    def _made(self, buffer: int) -> _Value:
        made = self._program.buffers[buffer].made
        return self._program.instructions[made.instruction], made.index

    def _places(self, maker: Instruction) -> tuple[Place | None, Place | None]:
        """The user's line, and that of a library which it calls, if it calls one."""
        places = self._program.places(maker.frame)
        if maker.scope.endswith(_SUM):
            # It is made where the gradient is taken. What is added up has the line.
            added = (self._program.places(x.frame) for x in self._back_from(maker))
            places = next((x for x in added if len(x) > len(places)), places)
        places = [place for place in places if not is_between(place.file)]
        inner = next(iter(places), None)
        installed = lambda file: _INSTALLED.search(file) or file.startswith(_STANDARD)
        own = next((place for place in places if not installed(place.file)), inner)
        return own, None if inner is own else inner

    # Explaining instructions.

    def _inside(self, one: Instruction) -> Sequence[Instruction]:
        """The instructions of a fusion; any other one itself."""
        return self._program.bodies[one.calls[0]] if one.opcode == _FUSION else [one]

    def _moves(self, one: Instruction) -> bool:
        return all(each.opcode in _MOVES for each in self._inside(one))

    def _writes_rows(self, one: Instruction) -> bool:
        is_row = any(each.opcode == _WRITES for each in self._inside(one))
        return is_row and self._loop_around(one) is not None

    def _explained(self, one: Instruction, index: Sequence[int]) -> Instruction:
        """What computed the result of an instruction, and has a line of Python."""
        moved = None
        for each in self._back_from(one, tuple(index)):
            if each.opcode not in _MOVES:
                return each
            moved = moved or each
        if moved is not None or one.frame:
            return moved or one
        users, known = deque([one]), 0
        while users and (known := known + 1) < _MOST_SEEN:
            if (user := users.popleft()).frame:
                return user
            users.extend(self._users(user))
        return one

    def _back_from(
        self, one: Instruction, index: tuple[int, ...] = ()
    ) -> Iterator[Instruction]:
        """What led to the result of an instruction, and has a line of Python."""
        seen, queue = set[_Value](), deque([(one, index)])
        while queue and len(seen) < _MOST_SEEN:
            each, at = queue.popleft()
            if (each, at) in seen:
                continue
            seen.add((each, at))
            if each.frame and each.opcode not in (_FUSION, _WRITES, "parameter"):
                yield each
            queue.extend(self._sources(each, at))

    def _users(self, one: Instruction) -> Iterator[Instruction]:
        """What reads an instruction, or runs it as the last of a computation."""
        yield from self._program.readers.get(one.id, ())
        caller = self._program.callers.get(one.computation)
        if caller is not None and one.id == self._program.roots[one.computation]:
            yield caller

    def _sources(self, one: Instruction, index: tuple[int, ...]) -> list[_Value]:
        """What the result of an instruction, or a part of it, is made of."""
        roots = self._program.roots
        found = [(operand, ()) for operand in one.operands]
        match one.opcode:
            case "fusion" | "call" | "conditional" | "async-start":
                found = [(roots[called], index) for called in one.calls]
            case "while":  # What a step leaves there, and what the loop begins with.
                found = [(roots[one.calls[0]], index), (one.operands[0], index)]
            case "get-tuple-element":
                found = [(one.operands[0], (one.index, *index))]
            case "dynamic-update-slice":  # The rows, and what they are written into.
                found = [found[1], found[0]]
            case "dynamic-slice":  # The others say which rows.
                found = found[:1]
            case "parameter" if one.computation in self._program.callers:
                caller = self._program.callers[one.computation]
                if caller.opcode == "while":
                    return self._sources(caller, index)
                # The first operand of a branch says which.
                is_branch = caller.opcode == "conditional"
                at = 1 + caller.calls.index(one.computation) if is_branch else one.index
                found = [(x, index) for x in caller.operands[at : at + 1]]
        known = self._program.instructions
        return [self._part(known[x], part) for x, part in found if x in known]

    def _part(self, one: Instruction, index: tuple[int, ...]) -> _Value:
        if one.opcode != "tuple" or not index:
            return one, index
        return self._program.instructions[one.operands[index[0]]], index[1:]

    # Loops.

    def _loop_around(self, one: Instruction) -> LoopAt | None:
        """The innermost loop that runs an instruction."""
        caller = self._program.callers.get(one.computation)
        while caller is not None and caller.opcode != "while":
            caller = self._program.callers.get(caller.computation)
        if caller is None:
            return None
        names = _OURS.findall(caller.scope)
        place, _ = self._places(caller)
        return LoopAt(names[-1] if names else "loop", place, caller.steps)

    # The way back.

    def _is_stored(self, maker: Instruction, buffers: Sequence[int]) -> bool:
        """Whether what is in some buffers is read on the way back of what made it."""
        if _AGAIN in maker.scope:
            return False
        for reader in self._readers([self._made(buffer) for buffer in buffers]):
            scope = reader.scope or self._explained(reader, ()).scope
            if is_later(scope, maker.scope):
                return True
        return False

    def _readers(self, values: Sequence[_Value]) -> Iterator[Instruction]:
        """What reads values, wherever they are handed on to."""
        seen, queue = set(values), deque(values)
        while queue and len(seen) < _MOST_SEEN:
            one, index = queue.popleft()
            for reader in self._program.readers.get(one.id, ()):
                if reader.opcode not in _HANDS_ON:
                    yield reader
            for value in self._handed_on(one, index):
                if value not in seen:
                    seen.add(value)
                    queue.append(value)

    def _handed_on(self, one: Instruction, index: tuple[int, ...]) -> Iterator[_Value]:
        """Where else a value is, one step further."""
        if one.id == self._program.roots[one.computation]:
            caller = self._program.callers.get(one.computation)
            if caller is not None and caller.opcode in _HANDS_ON:
                yield caller, index
        for reader in self._program.readers.get(one.id, ()):
            match reader.opcode:
                case "tuple":
                    for i, operand in enumerate(reader.operands):
                        if operand == one.id:
                            yield reader, (i, *index)
                case "get-tuple-element":
                    if index[:1] == (reader.index,):
                        yield reader, index[1:]
                case "while" | "call":
                    for called in reader.calls:
                        for each in self._program.bodies[called]:
                            is_input = each.opcode == "parameter"
                            if is_input and reader.operands[each.index] == one.id:
                                yield each, index
                case "bitcast" | "opt-barrier":
                    yield reader, index
