"""How the two equations of a formula in forward mode share their work.

In forward mode a formula makes an equation for the tangents and one for the primal. JAX
has to be able to separate them: in `jax.checkpoint`, and in a `scan` or a `cond` that
is linearized, it evaluates the primal in one program and transposes the tangents in
another. A single equation could be divided (`_partial_eval.py`), but not every rule of
JAX would do so where only the primal is needed.

If the two equations stay in one program, the loop would run twice: that of the tangents
computes the primal as well, and XLA does not see that one loop contains the other. So
the equation of the tangents, which comes first, leaves the primal in a `Leftover`. Only
these two equations share it: there is no global cache.
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

from .._arrays import bits
from .._compat import identity
from .._types import PyTree, Value
from ._equations import HoldsPrograms


@dataclasses.dataclass(frozen=True)
class _Known:
    formula: HoldsPrograms
    inputs: list[Callable[[], object]]
    trace: Any
    outputs: list[Callable[[], object]]
    tree: Any


class Leftover:
    """The place where the equation of the tangents leaves outputs for the primal's.

    Without `jit`, both equations are evaluated while the formula is differentiated, and
    after that nothing may be left. Under `jit`, they are expanded when the program is
    lowered: later, maybe more than once, and in several threads at the same time. Then
    each takes what its own trace has left. If another one has replaced that, it
    computes the primal again. No lock is needed for this, as an entry is replaced as a
    whole and never changed.
    """

    def __init__(self) -> None:
        self._known: _Known | None = None
        self._is_differentiating = True

    def leave(
        self, formula: HoldsPrograms, inputs: Sequence[Value], outputs: PyTree
    ) -> None:
        """Keeps the outputs of a formula for when it is expanded for these inputs."""
        leaves, tree = jax.tree.flatten(outputs)
        inputs = list(map(identity, inputs))
        if self._is_differentiating:
            refer, kept = _hold, list(map(_hold, leaves))
        elif tracers := list(filter(_is_tracer, leaves)):
            # The program that holds this outlives the trace, so it must not keep the
            # tracers alive. The equations that read them do, while the trace lasts.
            lax.optimization_barrier(tracers)
            refer = _refer_to
            kept = [_refer_to(x) if _is_tracer(x) else _hold(x) for x in leaves]
        else:
            return  # nobody would free these arrays, should no primal follow
        self._known = _Known(
            formula, list(map(refer, inputs)), _trace_state(), kept, tree
        )

    def take(self, formula: HoldsPrograms, inputs: Sequence[Value]) -> PyTree | None:
        """The outputs that were left for these inputs, if any; they serve once."""
        # Taken out first: what is in `known` does not change any more.
        known, self._known = self._known, None
        if known is None or known.trace != _trace_state() or known.formula != formula:
            return None
        kept, mine = [refer() for refer in known.inputs], list(map(identity, inputs))
        if len(mine) != len(kept) or not all(map(_is_same_input, mine, kept)):
            return None
        return known.tree.unflatten([output() for output in known.outputs])

    def close(self) -> None:
        """Forgets what was left, as the formula has been differentiated."""
        self._known, self._is_differentiating = None, False


def _refer_to(x: object) -> Callable[[], object]:
    if _is_number(x):
        return _hold(x)  # nothing else may keep it alive, and it takes no room
    try:
        return weakref.ref(x)
    except TypeError:  # a variable of a program that is being lowered
        return _hold(x)


def _is_same_input(mine: Value, kept: Value) -> bool:
    """Whether two inputs are the same object.

    Numbers are compared by their bits, as JAX makes a new array each time it reads one.
    """
    if not (_is_number(mine) and _is_number(kept)):
        return mine is kept
    return bits(mine) == bits(kept)


def _is_tracer(x: object) -> bool:
    return isinstance(x, jax.core.Tracer)


def _hold(x: object) -> Callable[[], object]:
    return lambda: x


def _is_number(x: object) -> bool:
    return isinstance(x, np.ndarray) and not x.ndim


def _trace_state() -> object:
    return jex.get_opaque_trace_state(convention="eqloop")
