"""What becomes of the bars in a program that is run again, or that may fail."""

import abc
import dataclasses
import functools
from typing import Any

import jax.extend.core as jex

from .._programs import Formula, map_equations, map_params
from .._types import PyTree
from . import _display
from ._meter import NO_BARS, Meter


class BarChange(abc.ABC):
    """A change of the bars in a program: a frozen, hashable dataclass."""

    @abc.abstractmethod
    def meter(self, meter: Meter) -> Meter:
        """The bars of a loop in the program."""

    @property
    def in_reverse(self) -> "BarChange":
        """The same for a reverse sweep in the program."""
        return self

    def equation(self, eqn: jex.JaxprEqn) -> jex.JaxprEqn:
        """An equation of the program."""
        change = lambda p: p.with_bars(self) if isinstance(p, Formula) else p
        return map_params(eqn, change)

    def __call__(self, program: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
        """The program; the very same if there are no bars in it."""
        return _changed(program, self)


@dataclasses.dataclass(frozen=True)
class Again(BarChange):
    """A program is run again: without the bars that have been shown.

    Attributes:
        backward: Whether to leave out those of backward sweeps, too.
    """

    backward: bool = False

    def meter(self, meter: Meter) -> Meter:
        return NO_BARS if self.backward else meter.again

    @property
    def in_reverse(self) -> BarChange:
        # A sweep that is there already is one whose bar has been shown.
        return Again(backward=True)


@dataclasses.dataclass(frozen=True)
class Guarded(BarChange):
    """Callbacks close all bars when they raise.

    When a callback raises, as that of `eqx.error_if` does, the program is abandoned,
    and no report closes its bars.
    """

    def meter(self, meter: Meter) -> Meter:
        return meter

    def equation(self, eqn: jex.JaxprEqn) -> jex.JaxprEqn:
        if eqn.primitive.name.endswith("_callback"):
            callback = _closing(eqn.params["callback"])
            return eqn.replace(params={**eqn.params, "callback": callback})
        return super().equation(eqn)


@functools.lru_cache(maxsize=256)
def _changed(program: jex.ClosedJaxpr, change: BarChange) -> jex.ClosedJaxpr:
    return map_equations(program, change.equation)


def _closing(callback: Any) -> Any:
    @functools.wraps(callback, updated=())
    def call(*args: PyTree, **kwargs: PyTree) -> PyTree:
        try:
            return callback(*args, **kwargs)
        except BaseException:
            _display.close_all()
            raise

    return call
