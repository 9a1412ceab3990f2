"""A loop that runs in place of another one where that is differentiated.

Its carry may be packed, or it may have more `xs`. The gradient of the original is that
of the other loop, with maps for what goes in and what comes out, there and back:

    inputs of the original  --inputs-->   problem  --carry------>  its outputs
    their cotangents  <--cotangents--  way back  <-----ends--  cotangents of these

To the rest of the program the loop stays what it was: it is batched, and its outputs
are left out, as the user wrote it. `_primitive.py` lists the substitutes.
"""

import abc
from typing import Any, TypeVar

from ..._arrays import Arrays
from ..._types import PyTree, Value
from ._forward import Active
from ._problem import Problem

P = TypeVar("P", bound=Problem[Any])


class Substitute(abc.ABC):
    """How a step, and with it a loop, is replaced. The maps are total, and cheap."""

    @abc.abstractmethod
    def of(self, problem: P) -> P:
        """The loop in place of one of the original step."""

    @abc.abstractmethod
    def inputs(self, inputs: PyTree) -> PyTree:
        """Its consts, initial carry and `xs`, from those of the original."""

    @abc.abstractmethod
    def marks(self, marks: PyTree) -> PyTree:
        """Which of its inputs are marked if these of the original are."""

    def carry(self, carry: Arrays) -> list[Value]:
        """The carry of the original, from its own. Outputs are the same."""
        return list(carry)

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
