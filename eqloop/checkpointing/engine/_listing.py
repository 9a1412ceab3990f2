"""Lists the layouts that are decided while a program is traced, for `el.plans`.

`plans` traces a function and looks for loops in the program, which may have been
batched since their layout was decided. A loop that stores residuals cannot be found:
JAX's own derivative of a scan is all that is left of it. So while layouts are listed,
such a loop is traced as one that stores carries. That program is never run.

Planning may compile and run other loops meanwhile, to measure them. These are traced as
they always are (`unlisted`), and so is a program that has to be seen without stand-ins.
"""

import contextlib
import copy
import dataclasses
from collections.abc import Iterator
from typing import Any, TypeAlias, TypeVar

import jax

from ..._arrays import Flags
from ._forward import Active
from ._layout import AbstractLayout

_Kind = TypeVar("_Kind", bound=AbstractLayout)


@dataclasses.dataclass(frozen=True)
class Decided:
    """A layout that was decided.

    Attributes:
        layout: The layout.
        stands_for_it: The layout that is in the program instead. It is found there by
            its identity, so each one is a copy of its own.
        active: Which inputs of the loop are differentiated.
        undifferentiated: See `Problem.undifferentiated`.
    """

    layout: AbstractLayout
    stands_for_it: AbstractLayout
    active: Active
    undifferentiated: Flags = ()


# By the identity of what stands for the layout.
Listed: TypeAlias = dict[int, Decided]


class _Listing:
    """What is listed: another one, and so another context, each time."""

    def __init__(self) -> None:
        self.decided: Listed = {}


# The key of JAX's caches contains it. So jitted functions are traced anew where layouts
# are listed, and a later run does not find a trace with stand-ins in it.
_listing: Any = jax.make_user_context(None)


@contextlib.contextmanager
def listing() -> Iterator[Listed]:
    """Lists the layouts that are decided in this context."""
    with _listing(found := _Listing()):
        yield found.decided


@contextlib.contextmanager
def unlisted() -> Iterator[None]:
    """Lists nothing in this context: loops are traced as they are run."""
    with _listing(None):
        yield


def is_listing() -> bool:
    """Whether layouts are listed."""
    return _listing.value is not None


def stands_for_residuals(layout: object) -> bool:
    """Whether a layout is the stand-in of one that stores residuals."""
    decided = is_listing() and _listing.value.decided.get(id(layout))
    return bool(decided) and decided.layout.stores_residuals


def listed(layout: _Kind, active: Active, undifferentiated: Flags) -> _Kind:
    """The layout to go on with: its stand-in, if layouts are listed."""
    if not is_listing():
        return layout
    stand_in = copy.copy(layout.by_carries())
    decided = Decided(layout, stand_in, active, undifferentiated)
    _listing.value.decided[id(stand_in)] = decided
    return stand_in
