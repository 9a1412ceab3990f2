"""Where the carries of a loop are stored and in which order it is reversed: no JAX.

A layout is what a schedule comes down to for one loop, and all that the engine needs
to know. There are three.
"""

import dataclasses
from typing import TypeAlias

from . import _binomial
from ._levels import Nest


@dataclasses.dataclass(frozen=True)
class Stored:
    """Every residual is kept while the primal runs; nothing is run again."""

    length: int

    @property
    def block(self) -> int:
        return self.length

    @property
    def slots(self) -> int:
        return 0

    @property
    def advances(self) -> int:
        return 0

    @property
    def evaluations(self) -> int:
        """How often the step is evaluated for a gradient: once by the primal."""
        return self.length


@dataclasses.dataclass(frozen=True)
class Nested:
    """Nests one after the other; static trip counts throughout.

    Attributes:
        nests: The nests.
        on_host: Whether the carries that the primal leaves behind are kept in the
            memory of the host.
    """

    nests: tuple[Nest, ...]
    on_host: bool = dataclasses.field(default=False, kw_only=True, repr=False)

    @property
    def length(self) -> int:
        return sum(nest.length for nest in self.nests)

    @property
    def block(self) -> int:
        return max((nest.block for nest in self.nests), default=1)

    @property
    def is_flat(self) -> bool:
        """Whether blocks are reversed one after the other, and no step is run again."""
        return all(len(nest.levels) == 1 for nest in self.nests)

    @property
    def primal_slots(self) -> int:
        """The carries that the primal leaves behind."""
        return sum(nest.levels[0] for nest in self.nests)

    @property
    def starts(self) -> list[int]:
        """The position that each slot of the primal starts at."""
        result, start = list[int](), 0
        for nest in self.nests:
            result += range(start, start + nest.length, nest.stride)
            start += nest.length
        return result

    @property
    def slots(self) -> int:
        """The carries that are stored at once, at the most."""
        before = most = 0
        for nest in self.nests:
            most = max(most, before + nest.slots)
            before += nest.levels[0]
        return most

    @property
    def advances(self) -> int:
        return sum(nest.advances for nest in self.nests)

    @property
    def evaluations(self) -> int:
        """The primal, the reversal of every step, and the advances in between."""
        return 2 * self.length + self.advances


@dataclasses.dataclass(frozen=True)
class Revolved:
    """Binomial checkpointing: the fewest evaluations that the slots allow.

    The chain is made of blocks; where their size does not divide the length the first
    one is shorter. Trip counts depend on the position, so they are dynamic.
    """

    length: int
    slots: int
    block: int = 1
    on_host: bool = dataclasses.field(default=False, kw_only=True, repr=False)

    @property
    def is_flat(self) -> bool:
        """Never: how often a loop goes round is found out by another one around it."""
        return False

    @property
    def blocks(self) -> int:
        return -(-self.length // self.block)

    @property
    def missing(self) -> int:
        """How many steps the first block is short of a full one."""
        return self.blocks * self.block - self.length

    @property
    def primal_slots(self) -> int:
        return min(self.slots, self.blocks)

    @property
    def segments(self) -> list[tuple[int, int]]:
        """The length, in blocks, and the rank of what lies between the slots."""
        return _binomial.segments(self.blocks, self.slots)

    @property
    def block_starts(self) -> list[int]:
        """The block that each slot of the primal starts at."""
        lengths = [length for length, _ in self.segments]
        return [sum(lengths[:i]) for i in range(len(lengths))]

    @property
    def starts(self) -> list[int]:
        """The position that each slot of the primal starts at."""
        return [max(b * self.block - self.missing, 0) for b in self.block_starts]

    @property
    def advances(self) -> int:
        in_blocks = _binomial.sweep_advances(self.blocks, self.slots)
        if not self.missing:
            return in_blocks * self.block
        # The first block, which may be shorter, is the first of the first segment.
        length, rank = _binomial.first_segment(self.blocks, self.slots)
        crossings = _binomial.crossings(length, self.primal_slots, rank)
        return in_blocks * self.block - crossings * self.missing

    @property
    def evaluations(self) -> int:
        """The primal, the reversal of every step, and the advances in between."""
        return 2 * self.length + self.advances


Layout: TypeAlias = Stored | Nested | Revolved
