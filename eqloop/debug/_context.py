"""The surroundings of an equation: loops, calls, and its sweep."""

import dataclasses
from typing import Any, Self

import jax.extend.core as jex

from .._programs import Place, place_of
from ._sites import Frame


@dataclasses.dataclass(frozen=True)
class Context:
    """The surroundings of an equation.

    Attributes:
        has_position: Whether the innermost of them is one of this library, that says
            which step it is at.
        is_backward: Whether it is part of a backward sweep.
        is_tangent: Whether it is of a program that is being differentiated.
        is_expanded: Whether it is part of what a primitive of this library does.
        label: What the loop that such a primitive runs is called.
        place: Where the function of JAX is called that has it, if there is one.
        around: Where the loop or call is that has it.
    """

    frames: tuple[Frame, ...] = ()
    has_position: bool = False
    is_backward: bool = False
    is_tangent: bool = False
    is_expanded: bool = False
    label: str | None = None
    place: Place | None = None
    around: Place | None = None

    def of(self, eqn: jex.JaxprEqn) -> Self:
        """The context inside an equation."""
        stack = str(eqn.source_info.name_stack)
        is_backward = self.is_backward or "transpose(" in stack
        is_tangent = self.is_tangent or "jvp(" in stack
        return dataclasses.replace(
            self,
            is_backward=is_backward,
            is_tangent=is_tangent,
            around=self.place_of(eqn),
        )

    def inside(self, frame: Frame, **changes: Any) -> Self:
        """The context in a loop."""
        frames = (*self.frames, frame)
        return dataclasses.replace(self, frames=frames, label=None, **changes)

    def at_once(self, count: int) -> Self:
        """The context for several steps of the innermost loop at once."""
        *outer, frame = self.frames
        frame = dataclasses.replace(frame, count=count)
        return dataclasses.replace(self, frames=(*outer, frame))

    def place_of(self, eqn: jex.JaxprEqn) -> Place | None:
        """The place where the user asked for an equation."""
        return self.place or place_of(eqn.source_info) or self.around
