"""How long a compiled program takes, told from its text alone.

Each kernel takes what it costs to start it, and the greater of what it takes to move
its bytes and of what it takes to compute: the roofline model of Williams, Waterman and
Patterson, [CACM 52(4), 2009](https://doi.org/10.1145/1498765.1498785). XLA has decided
then what is fused and what is a loop, so nothing has to be known of operations but what
they read and write.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ..engine._costs import Rates

# %name = f32[8,128]{1,0} opcode(%operand, %operand), attribute=..., attribute=...
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](\{[^}]*\})?")
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
# What a TPU keeps in its vector memory is marked so, and costs next to nothing to read.
_VECTOR_MEMORY = "S(1)"

# fmt: off
_NOT_STARTED = frozenset({
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "reshape",
    "iota", "after-all", "opt-barrier", "partition-id", "replica-id",
})
_COSTLY = frozenset({
    "exponential", "exponential-minus-one", "log", "log-plus-one", "tanh", "logistic",
    "sine", "cosine", "tan", "power", "sqrt", "rsqrt", "cbrt", "atan2", "erf",
    "divide",
})
# fmt: on
# What runs beside others is started, and waited for.
_START, _WAITS = "-start", ("-update", "-done")
_WRITES = "dynamic-update-slice"
_OF_ROWS = ("dynamic-slice", _WRITES)


class _Array(NamedTuple):
    """An array in memory, or a part of a tuple of them."""

    shape: tuple[int, ...]
    itemsize: float
    is_near: bool

    @property
    def entries(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> float:
        return 0.0 if self.is_near else self.entries * self.itemsize


class _Instruction(NamedTuple):
    """An instruction: its name, what it gives, what it does, and what it reads."""

    name: str
    result: tuple[_Array, ...]
    opcode: str
    operands: tuple[str, ...]
    text: str

    def called(self, attribute: str) -> str:
        """The computation that an attribute names."""
        found = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.text)
        return found.group(1) if found else ""

    def dimensions(self, attribute: str) -> list[int]:
        """The numbers that an attribute lists in braces."""
        found = re.search(rf"\b{attribute}=\{{([\d,]*)\}}", self.text)
        return [int(i) for i in found.group(1).split(",") if i] if found else []


def roofline(text: str, rate: Rates) -> float:
    """The nanoseconds that a compiled program takes, loops multiplied out.

    `text` is the optimised program, as `Compiled.as_text` gives it.
    """
    computations, entry = _read(text)
    return _Roofline(computations, rate).time(entry)


class _Roofline:
    """Adds up the kernels of a program."""

    def __init__(self, computations: Mapping[str, list[_Instruction]], rate: Rates):
        self._computations = computations
        self._rate = rate

    def time(self, name: str) -> float:
        """The nanoseconds that a computation takes."""
        named = {one.name: one for one in self._computations[name]}
        return sum(self._time_of(one, named) for one in named.values())

    def _time_of(self, one: _Instruction, named: Mapping[str, _Instruction]) -> float:
        match one.opcode:
            case "while":
                body, condition = one.called("body"), one.called("condition")
                each = self.time(body) + self.time(condition) + self._rate.iteration
                return self._trips(one, condition) * each
            case "conditional":
                branches = re.findall(r"branch_computations=\{([^}]*)\}", one.text)
                names = branches[0].split(",") if branches else []
                names = names or [one.called("true_computation")]
                return max(self.time(name.strip().lstrip("%")) for name in names)
            case "call":
                return self.time(one.called("to_apply"))
            case opcode if opcode in _NOT_STARTED or opcode.endswith(_WAITS):
                return 0.0
        if one.opcode.endswith(_START):
            # Its operands come first in what it gives.
            own = sum(len(named[name].result) for name in one.operands if name in named)
            opcode = one.opcode.removesuffix(_START)
            one = one._replace(opcode=opcode, result=one.result[own:])
        moved = sum(map(self._time_to_move, self._moved(one, named)))
        computed = self._work(one, named)
        return self._rate.equation + max(moved, computed)

    def _time_to_move(self, nbytes: float) -> float:
        is_cached = nbytes <= self._rate.cache
        return nbytes * (self._rate.cached_byte if is_cached else self._rate.byte)

    def _trips(self, loop: _Instruction, condition: str) -> int:
        if found := _TRIPS.search(loop.text):
            return int(found.group(1))
        # Not all compilers write it down. A loop of known length compares its counter
        # with a constant; of others, one iteration is a lower bound.
        of_condition = self._computations[condition]
        constants = [re.match(r"(\d+)\)", c.text) for c in of_condition]
        numbers = [int(found.group(1)) for found in constants if found]
        return max(numbers, default=1)

    def _moved(
        self, one: _Instruction, near: Mapping[str, _Instruction]
    ) -> Iterator[float]:
        """The bytes that a kernel reads and writes, array by array."""
        inner = self._computations.get(one.called("calls"), [])
        whole = lambda name: sum(array.nbytes for array in near[name].result)
        if not inner and one.opcode in _OF_ROWS:
            # A row that is read or written does not move the others.
            row = one.operands[1] if one.opcode == _WRITES else ""
            size = whole(row) if row in near else sum(a.nbytes for a in one.result)
            yield from (size, size)
            return
        written = _rows_written(inner)
        for array in one.result:
            yield min(array.nbytes, written.get(array.entries, array.nbytes))
        for i, name in enumerate(one.operands):
            if name in near:
                yield min(whole(name), _read_of(i, inner, whole(name)))

    def _work(self, one: _Instruction, near: Mapping[str, _Instruction]) -> float:
        """The nanoseconds that a kernel computes."""
        if inner := one.called("calls") or one.called("to_apply"):
            if one.opcode != "fusion":
                return sum(array.entries for array in one.result) * self._rate.entry
            fused = {each.name: each for each in self._computations[inner]}
            return sum(self._work(each, fused) for each in fused.values())
        entries = sum(array.entries for array in one.result)
        shapes = [near[n].result[0].shape for n in one.operands if n in near]
        match one.opcode:
            case "dot":
                at = one.dimensions("lhs_contracting_dims")
                depth = math.prod(shapes[0][i] for i in at)
                return 2 * entries * depth * self._rate.flop
            case "convolution":
                kernel = re.search(r"dim_labels=\w+_(\w+)->", one.text)
                outputs = shapes[1][kernel.group(1).index("o")] if kernel else 1
                depth = math.prod(shapes[1]) // outputs
                return 2 * entries * depth * self._rate.flop
            case "custom-call":
                # A library's product of an m x k and a k x n matrix: of the sizes of
                # the three, m k n is the root.
                results = [array.shape for array in one.result[:1]]
                sizes = [math.prod(shape) for shape in (*shapes[:2], *results)]
                return 2 * math.sqrt(math.prod(sizes)) * self._rate.flop
            case opcode if opcode in _NOT_STARTED or opcode in _OF_ROWS:
                return 0.0
            case opcode if opcode in _COSTLY:
                return entries * self._rate.costly_entry
        return entries * self._rate.entry


def _rows_written(inner: Sequence[_Instruction]) -> dict[int, float]:
    """The bytes of the rows that are written into arrays, by the arrays' sizes."""
    named = {one.name: one for one in inner}
    return {
        one.result[0].entries: sum(a.nbytes for a in named[one.operands[1]].result)
        for one in inner
        if one.opcode == _WRITES and one.operands[1] in named
    }


def _read_of(index: int, inner: Sequence[_Instruction], whole: float) -> float:
    """The bytes that a kernel reads of one of its operands."""
    at = f"{index})"
    names = {p.name for p in inner if p.opcode == "parameter" and p.text.startswith(at)}
    total, is_used = 0.0, False
    # Operations come after what they read. Another view of the operand is the operand.
    for one in inner:
        if names.isdisjoint(one.operands):
            continue
        is_used = True
        if one.opcode in ("bitcast", "reshape"):
            names.add(one.name)
        elif one.opcode not in _OF_ROWS or one.operands[0] not in names:
            return whole
        elif one.opcode != _WRITES:  # An array into which is written is not read.
            total += sum(array.nbytes for array in one.result)
    return total if is_used else whole


def _read(text: str) -> tuple[dict[str, list[_Instruction]], str]:
    """The computations of a program, and the name of the one that is run."""
    found: dict[str, list[_Instruction]] = {}
    entry, name = "", ""
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            name = head.group(2)
            found[name] = []
            entry = name if head.group(1) else entry
        elif name and (match := _INSTRUCTION.match(line)):
            own, result, opcode, rest = match.groups()
            operands = re.split(r"\)(?:,|$)", rest, maxsplit=1)[0]
            names = tuple(re.findall(r"%([\w.\-]+)", operands))
            found[name].append(_Instruction(own, _arrays(result), opcode, names, rest))
    return found, entry


def _arrays(text: str) -> tuple[_Array, ...]:
    return tuple(
        _Array(
            tuple(int(n) for n in dims.split(",") if n),
            _itemsize(dtype),
            _VECTOR_MEMORY in (layout or ""),
        )
        for dtype, dims, layout in _ARRAY.findall(text)
    )


def _itemsize(dtype: str) -> float:
    """The bytes of an entry: `bf16` has 16 bits, `pred` a byte."""
    bits = re.search(r"\d+", dtype)
    return int(bits.group()) / 8 if bits else 1.0
