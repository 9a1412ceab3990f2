"""Online checkpointing in plain Python, one step at a time.

Each model is told of the steps as they come, and says which carries it then has stored.
`Ours` is the rule of `_spread.py`, written from its docstring. `Theirs` is what
`equinox.internal.while_loop(..., kind="checkpointed")` does: Stumm and Walther's first
algorithm, then that of Wang, Moin and Iaccarino, and a reverse sweep that halves.
"""

import dataclasses
from math import comb, inf

from eqloop.checkpointing.engine.orders._binomial import advances


class Ours:
    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.starts: list[int] = []
        self.rank = 1

    def reach(self, place: int) -> int:
        return comb(self.slots - place + self.rank, self.rank)

    def pass_step(self, position: int) -> None:
        """Stores the carry before a step, or does not."""
        if len(self.starts) < self.slots:
            self.starts.append(position)
            return
        if self.slots == 1 or not self._looks_again(position):
            return
        ends = [*self.starts[2:], position]
        fits = [
            place
            for place, (start, end) in enumerate(zip(self.starts, ends, strict=False))
            if end - start <= self.reach(place)
        ]
        if fits:
            del self.starts[(fits[0] if self.rank == 1 else fits[-1]) + 1]
            self.starts.append(position)
        else:
            self.rank += 1
            self.raised_at = position

    raised_at = -1

    def _looks_again(self, position: int) -> bool:
        if self.rank == 1:
            return True
        before, last = self.starts[-2:]
        grown = self.rank + 1
        if self.rank > 2 and last + self.rank - before <= comb(2 + self.rank, 2):
            grown = self.rank
        return position == max(last + grown, self.raised_at + 1)

    def advances(self, length: int) -> int:
        """Of the reverse sweep after so many steps: the least that the slots allow."""
        ends = [*self.starts[1:], length]
        return sum(
            advances(end - start, self.slots - place)
            for place, (start, end) in enumerate(zip(self.starts, ends, strict=True))
        )


class Theirs:
    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.steps: list[float] = [inf] * slots
        self.index, self.offset, self.pause, self.saves = 0, slots, slots, True
        self.levels: list[float] = [inf] + [0] * (slots - 1)
        self.dispensable: set[int] = set()

    @property
    def starts(self) -> list[int]:
        return sorted(int(step) for step in self.steps if step < inf)

    def pass_step(self, position: int) -> None:
        if position < (self.slots + 1) * (self.slots + 2) // 2 - 1:
            self._stumm_walther(position)
        elif self.slots > 1:
            self._wang_moin(position)

    def _stumm_walther(self, position: int) -> None:
        if self.saves:
            self.steps[self.index] = position
            self.index += 1
            if self.index > self.offset:
                self.index = 1
        if position + 1 == self.pause:
            self.saves = False
        if position == self.pause:
            self.pause += self.offset
            self.offset -= 1
            self.index = self.offset
            self.saves = self.offset > 0

    def _wang_moin(self, position: int) -> None:
        among = self.dispensable or range(self.slots)
        index = max(among, key=lambda i: self.steps[i])
        level = self.levels[index]
        if not self.dispensable:
            self.dispensable = {i for i in among if self.levels[i] < level}
            self.levels[index] = level + 1
        else:
            self.dispensable.discard(index)
            self.levels[index] = 0
        self.steps[index] = position

    def advances(self, length: int) -> int:
        return _Halving(self.slots, self.starts, length).run()


@dataclasses.dataclass
class _Halving:
    """Between the last carry and the next step to reverse it stores one halfway."""

    slots: int
    stack: list[int]
    length: int

    def run(self) -> int:
        stack, total = list(self.stack), 0
        for stop in range(self.length, 0, -1):
            # The carry from which the step that ends here is reached.
            at = stack[-1]
            if at + 1 == stop:
                stack.pop()
            next_stored = self._next(at, stop, len(stack))
            while at + 1 < stop:
                at, total = at + 1, total + 1
                if at == next_stored:
                    stack.append(at)
                    next_stored = self._next(at, stop, len(stack))
        return total

    def _next(self, at: int, stop: int, used: int) -> float:
        distance = stop - at
        if used == self.slots or distance <= 2:
            return inf
        return at + 1 if distance - 2 <= self.slots - used else at + distance // 2
