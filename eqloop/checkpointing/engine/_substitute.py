"""A loop that runs in place of another one.

Its carry may be packed, or its carry and its outputs have what is stored for the way
back. There are maps for what goes in and what comes out:

    inputs of the original  --inputs-->   problem  --outputs---->  its outputs

To the rest of the program the loop stays what it was: it is batched, and its outputs
are left out, as the user wrote it. One substitute runs where a loop is differentiated,
and has maps for the way back as well (`_packing.py`). The others run where a loop
stores something (`_primal.py`), and are not differentiated themselves.
"""

import abc
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

from ..._arrays import Arrays
from ..._types import PyTree, Value
from ._layout import AbstractLayout, Saves, Stored
from ._problem import Problem

P = TypeVar("P", bound=Problem[Any])

# The final carry, `ys`, and what is stored.
Outputs: TypeAlias = tuple[list[Value], list[Value], Stored]

# What a loop stores, if anything.
MaybeSaves: TypeAlias = Saves[AbstractLayout] | None


class Substitute(abc.ABC):
    """How a step, and with it a loop, is replaced. The maps are total, and cheap."""

    @abc.abstractmethod
    def of(self, problem: P) -> P:
        """The loop in place of one of the original step."""

    def saves(self, saves: MaybeSaves) -> MaybeSaves:
        """What it stores in place of the original."""
        return saves

    def inputs(self, inputs: PyTree) -> PyTree:
        """Its consts, initial carry and `xs`, from those of the original."""
        return inputs

    def outputs(self, carry: Arrays, ys: Arrays, stored: Stored) -> Outputs:
        """The outputs of the original, from its own."""
        return list(carry), list(ys), stored


def run_in_place_of(
    run: Callable[..., Outputs],
    kinds: Sequence[Callable[[Problem[Any], MaybeSaves], Substitute | None]],
    problem: Problem[Any],
    saves: MaybeSaves,
    inputs: PyTree,
) -> Outputs:
    """Runs a loop by the substitutes of some kinds, each in place of the one before.

    `run` runs a loop, given what it stores, and its inputs.
    """
    for at, kind in enumerate(kinds, 1):
        if (instead := kind(problem, saves)) is not None:
            loop = instead.of(problem), instead.saves(saves), instead.inputs(inputs)
            return instead.outputs(*run_in_place_of(run, kinds[at:], *loop))
    return run(problem, saves, inputs)
