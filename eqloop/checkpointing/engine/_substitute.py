"""A loop that runs in place of another one.

Its carry may be packed, it may have more `xs`, or its carry and its outputs have what
is stored for the way back. There are maps for what goes in and what comes out, there
and back:

    inputs of the original  --inputs-->   problem  --outputs---->  its outputs
    their cotangents  <--cotangents--  way back  <-----ends--  cotangents of these

To the rest of the program the loop stays what it was: it is batched, and its outputs
are left out, as the user wrote it. Some substitutes run where a loop is differentiated
(`_planned_loop.py` lists them), others where it stores something (`_primal.py`). Those
are not differentiated themselves, and have no maps for the way back.
"""

import abc
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

from ..._arrays import Arrays
from ..._types import PyTree, Value
from ._forward import Active
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


class Differentiable(Substitute):
    """A substitute whose way back is that of the original."""

    @abc.abstractmethod
    def marks(self, marks: PyTree) -> PyTree:
        """Which of its inputs are marked if these of the original are."""

    def ends(self, cts: PyTree) -> PyTree:
        """The cotangents of its outputs, from those of the original's."""
        return cts

    def for_ends(self, problem: P, active: Active, cts: PyTree) -> P:
        """The loop whose way back takes these cotangents of the original's outputs.

        `active` says which inputs of the original are differentiated.
        """
        return problem

    @abc.abstractmethod
    def cotangents(self, cts: PyTree) -> tuple[PyTree, PyTree]:
        """The cotangents of the original's inputs, and a log or `None`."""


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
