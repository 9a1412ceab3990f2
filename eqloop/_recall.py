"""One loop for two equations: a primal that was computed along with its tangents.

In forward mode a formula makes an equation for the tangents and one for the primal.
That of the tangents runs first and computes the primal as well; XLA, however, does not
see that one loop contains the other. So when the second is expanded, it takes its
outputs from the first, provided that both are expanded by the same trace and for the
same inputs. They are apart where JAX has pulled them apart: in `jax.checkpoint` the
primal is evaluated in one program and the tangents, transposed, in another.
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


# The two equations follow upon each other, so there is only ever one to remember.
_last: list[_Known] = []


def remember(formula: Any, inputs: Sequence[Any], outputs: Any) -> None:
    """Keeps the outputs of a formula for when it is expanded for the same inputs."""
    leaves, tree = jax.tree.flatten(outputs)
    references = [_refer_to(identity(x)) for x in inputs]
    # A tracer kept here would keep all of its trace, until the next loop is
    # differentiated. So an equation that reads it does, as long as there is the trace.
    if tracers := list(filter(_is_tracer, leaves)):
        lax.optimization_barrier(tracers)
    kept = [_refer_to(x) if _is_tracer(x) else _hold(x) for x in leaves]
    _last[:] = [_Known(formula, references, _trace(), kept, tree)]


def recall(formula: Any, inputs: Sequence[Any]) -> Any | None:
    """The outputs of the formula, if they are what was last kept; but once."""
    known, _last[:] = list(_last), []
    for last in known:
        if last.trace == _trace() and last.formula == formula:
            kept = [reference() for reference in last.inputs]
            mine = list(map(identity, inputs))
            if len(mine) == len(kept) and all(map(_same, mine, kept)):
                return last.tree.unflatten([output() for output in last.outputs])
    return None


def _refer_to(x: Any) -> Callable[[], Any]:
    """A reference that keeps no array alive: outputs are forgotten with the inputs."""
    if _is_number(x):
        return _hold(x)  # nothing else may keep it alive, and it takes no room
    forget = _last.clear  # by itself, as at exit the module has lost its globals
    try:
        return weakref.ref(x, lambda _: forget())
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
