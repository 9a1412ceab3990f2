"""One loop for two equations: a primal that was computed along with its tangents.

In forward mode a formula makes an equation for the tangents and one for the primal.
JAX has to be able to pull them apart: in `jax.checkpoint`, in a `scan` or a `cond` that
is linearized, the primal is evaluated in one program and the tangents, transposed, in
another. It has no rule by which a `hijax` primitive could say so of single outputs (JAX
0.10 to 0.12), so one equation for both will not do.

Where they stay together, that of the tangents runs first and computes the primal as
well; XLA, however, does not see that one loop contains the other. So it leaves the
primal in a `Leftover` that the two equations share, and nobody else.
"""

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.extend.core as jex
import numpy as np
from jax import lax

from ._compat import identity


@dataclasses.dataclass(frozen=True)
class _Known:
    formula: Any
    inputs: list[Callable[[], Any]]
    trace: Any
    outputs: list[Callable[[], Any]]
    tree: Any


class Leftover:
    """What the equation of the tangents leaves for that of the primal.

    Without `jit` both are evaluated while the formula is differentiated, and when that
    is over, nothing is left. In a program that is compiled they are expanded later, and
    as often as the program is lowered, maybe in several threads at once. Then each
    finds what is its own trace's, or nothing and computes the primal again: what is
    left is replaced as a whole, and never changed.
    """

    def __init__(self) -> None:
        self._known: _Known | None = None
        self._is_differentiating = True

    def leave(self, formula: Any, inputs: Sequence[Any], outputs: Any) -> None:
        """Keeps the outputs of a formula for when it is expanded for these inputs."""
        leaves, tree = jax.tree.flatten(outputs)
        inputs = list(map(identity, inputs))
        if self._is_differentiating:
            refer, kept = _hold, list(map(_hold, leaves))
        elif tracers := list(filter(_is_tracer, leaves)):
            # The program that holds this outlives the trace, so it must not hold the
            # tracers. An equation that reads them does, as long as there is the trace.
            lax.optimization_barrier(tracers)
            refer = _refer_to
            kept = [_refer_to(x) if _is_tracer(x) else _hold(x) for x in leaves]
        else:
            return  # arrays, which nothing would let go of if no primal follows
        self._known = _Known(formula, list(map(refer, inputs)), _trace(), kept, tree)

    def take(self, formula: Any, inputs: Sequence[Any]) -> Any | None:
        """The outputs of the formula, if they were left for these inputs; but once."""
        known, self._known = self._known, None
        if known is None or known.trace != _trace() or known.formula != formula:
            return None
        kept, mine = [refer() for refer in known.inputs], list(map(identity, inputs))
        if len(mine) != len(kept) or not all(map(_same, mine, kept)):
            return None
        return known.tree.unflatten([output() for output in known.outputs])

    def close(self) -> None:
        """Forgets what was left, as the formula has been differentiated."""
        self._known, self._is_differentiating = None, False


def recall(formula: Any, inputs: Sequence[Any]) -> Any | None:
    """The outputs of a formula that is expanded, if its tangents have left them."""
    leftover = formula.leftover
    return None if leftover is None else leftover.take(formula, inputs)


def _refer_to(x: Any) -> Callable[[], Any]:
    if _is_number(x):
        return _hold(x)  # nothing else may keep it alive, and it takes no room
    try:
        return weakref.ref(x)
    except TypeError:  # a variable of a program that is being lowered
        return _hold(x)


def _same(mine: Any, kept: Any) -> bool:
    """Whether two inputs are one. A number is made anew each time that it is read."""
    if not (_is_number(mine) and _is_number(kept)):
        return mine is kept
    return mine.dtype == kept.dtype and mine.tobytes() == kept.tobytes()


def _is_tracer(x: Any) -> bool:
    return isinstance(x, jax.core.Tracer)


def _hold(x: Any) -> Callable[[], Any]:
    return lambda: x


def _is_number(x: Any) -> bool:
    return isinstance(x, np.ndarray) and not x.ndim


def _trace() -> Any:
    return jex.get_opaque_trace_state(convention="eqloop")
