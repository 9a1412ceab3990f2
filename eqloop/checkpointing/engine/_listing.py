"""Lists the layouts that are decided while a program is traced, for `plans`.

A loop that stores residuals leaves no trace of its layout in a program: what is there
is JAX's own derivative of a scan. So where layouts are listed, such a loop is traced as
one that stores its carries. Nobody runs that program. What is compiled or run meanwhile
to make a plan is traced as ever, or it would be measured as what it is not.
"""

import contextlib
import contextvars
import copy
import dataclasses
import itertools
from collections.abc import Iterator
from typing import TypeVar

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
            its identity, so it is in one equation alone.
        active: Which inputs of the loop are differentiated.
        still: Which leaves of the initial carry are not, though the carry varies.
    """

    layout: AbstractLayout
    stands_for_it: AbstractLayout
    active: Active
    still: Flags = ()


_list: contextvars.ContextVar[list[Decided] | None] = contextvars.ContextVar(
    "_list", default=None
)
_which = itertools.count()


@contextlib.contextmanager
def listing() -> Iterator[list[Decided]]:
    """Lists the layouts that are decided in this context."""
    decided: list[Decided] = []
    token = _list.set(decided)
    try:
        # Functions that are jitted are traced anew, as JAX thinks that they would be
        # compiled to something else, and their traces are not those that are run.
        with set_xla_metadata(eqloop_listing=str(next(_which))):
            yield decided
    finally:
        _list.reset(token)


@contextlib.contextmanager
def unlisted() -> Iterator[None]:
    """Traces in this context what is to be measured, even where layouts are listed."""
    token = _list.set(None)
    try:
        yield
    finally:
        _list.reset(token)


def is_listing() -> bool:
    """Whether layouts are listed."""
    return _list.get() is not None


def stands_for_residuals(layout: object) -> bool:
    """Whether it is the stand-in of a layout that stores residuals."""
    return any(
        layout is decided.stands_for_it and decided.layout.stores_residuals
        for decided in _list.get() or ()
    )


def listed(layout: _Kind, active: Active, still: Flags) -> _Kind:
    """The layout to go on with; it is noted, if layouts are listed."""
    decided = _list.get()
    if decided is None:
        return layout
    stand_in = copy.copy(layout.by_carries())
    decided.append(Decided(layout, stand_in, active, still))
    return stand_in
