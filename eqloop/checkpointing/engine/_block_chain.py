"""A chain of blocks of equally many steps, of which the first may be shorter.

Integers only: how the chain is reversed is in `_revolve.py`.
"""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class BlockChain:
    """The chain.

    Attributes:
        steps: How many steps there are.
        size: How many of them a block has.
    """

    steps: int
    size: int

    @property
    def count(self) -> int:
        """How many blocks there are."""
        return -(-self.steps // self.size)

    @property
    def missing(self) -> int:
        """How many steps the first block is short of a full one."""
        return self.count * self.size - self.steps

    @property
    def sizes(self) -> Sequence[int]:
        """The sizes that there are."""
        return [self.size, self.size - self.missing] if self.missing else [self.size]

    def position(self, block: int) -> int:
        """The position at which a block starts."""
        return max(block * self.size - self.missing, 0)
