"""What a step tells the host (`jax.debug`), once for each of the user's steps.

A planned loop runs steps again. The user's function would have printed once.
"""

from collections.abc import Hashable, Sequence
from typing import Self

import jax.extend.core as jex

from .._programs import Formula, batched, run
from .._types import BatchAxis, PyTree, Value
from ..progress import Again, BarChange


class ToldOnce(Formula):
    """A callback without results, which is left out where its step is run again."""

    program: jex.ClosedJaxpr
    is_again: bool

    def __init__(self, program: jex.ClosedJaxpr, is_again: bool = False):
        self.in_avals, self.out_aval = tuple(program.in_avals), ()
        self.params = dict(program=program, is_again=is_again)
        self.effects = frozenset([] if is_again else program.effects)
        super().__init__()

    def expand(self, *inputs: Value) -> tuple[()]:
        if not self.is_again:
            run(self.program, *inputs)
        return ()

    def pull(self, perturbed: PyTree, inputs: PyTree, cts: PyTree) -> PyTree:
        return self.zero_cts()

    def reached_out(self, marks: Sequence[bool], axis_name: Hashable) -> list[bool]:
        return []

    def batched(
        self, axis_data: BatchAxis, args: PyTree, dims: PyTree
    ) -> tuple[Formula, PyTree, list[int | None]]:
        program = batched(self.program, axis_data, tuple(dims), ())
        return ToldOnce(program, self.is_again), args, []

    def with_bars(self, change: BarChange) -> Self:
        again = isinstance(change, Again)
        return self.with_params(is_again=True) if again else self
