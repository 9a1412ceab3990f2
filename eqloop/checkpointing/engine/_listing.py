"""Lists the layouts that are decided while a program is traced, for `el.plans`.

`plans` traces a function and looks for loops in the program, which may have been
batched since their layout was decided. A loop that stores residuals cannot be found:
JAX's own derivative of a scan is all that is left of it. So while layouts are listed,
such a loop is traced as one that stores carries. That program is never run.

Planning may compile and run other loops meanwhile, to measure them. These are traced as
they always are (`unlisted`).
"""

import contextlib
import contextvars
import copy
import dataclasses
import itertools
from collections.abc import Iterator
from typing import TypeAlias, TypeVar

from jax.experimental.xla_metadata import set_xla_metadata

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
_list = contextvars.ContextVar[Listed | None]("_list", default=None)
_which = itertools.count()


@contextlib.contextmanager
def listing() -> Iterator[Listed]:
    """Lists the layouts that are decided in this context."""
    token = _list.set(decided := {})
    try:
        # JAX remembers the traces of jitted functions. The metadata is a part of their
        # key, and is new each time: so they are traced anew here, and a later run does
        # not find a trace with stand-ins in it.
        with set_xla_metadata(eqloop_listing=str(next(_which))):
            yield decided
    finally:
        _list.reset(token)


@contextlib.contextmanager
def unlisted() -> Iterator[None]:
    """Lists nothing in this context, which traces loops that are to be measured."""
    token = _list.set(None)
    try:
        yield
    finally:
        _list.reset(token)


@contextlib.contextmanager
def as_run() -> Iterator[None]:
    """Lists nothing in this context, which traces the program that will be run."""
    with unlisted(), set_xla_metadata(eqloop_listing="none"):
        yield


def is_listing() -> bool:
    """Whether layouts are listed."""
    return _list.get() is not None


def stands_for_residuals(layout: object) -> bool:
    """Whether a layout is the stand-in of one that stores residuals."""
    decided = (_list.get() or {}).get(id(layout))
    return decided is not None and decided.layout.stores_residuals


def listed(layout: _Kind, active: Active, undifferentiated: Flags) -> _Kind:
    """The layout to go on with: its stand-in, if layouts are listed."""
    decided = _list.get()
    if decided is None:
        return layout
    stand_in = copy.copy(layout.by_carries())
    decided[id(stand_in)] = Decided(layout, stand_in, active, undifferentiated)
    return stand_in
