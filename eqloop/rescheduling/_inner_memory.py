"""What a scan stores, with loops in its step or without, from its program alone.

A plan is exact, and takes a gradient of the step. To make two of them for each loop
that has others in it would take longer than to trace all that JAX does.
"""

import math
from collections.abc import Iterable

import jax.extend.core as jex

from .._arrays import is_inexact, is_symbolic, lowered_types, own_shape, split
from .._compat import scan_counts
from .._programs import aval_of, foreign_programs
from .._types import AnyJaxpr, Aval
from ..checkpointing import AbstractSchedule, usually_stored

# About so much of what a step computes is stored for its derivative.
_RESIDUALS = 0.5


def bytes_stored(
    eqn: jex.JaxprEqn, schedule: AbstractSchedule, inner: AbstractSchedule
) -> float:
    """The bytes that a gradient of a scan stores at once, about.

    Args:
        eqn: A `scan`.
        schedule: How it is run.
        inner: How those in its step are run.
    """
    _, carry, _ = split(eqn.invars, *scan_counts(eqn.params))
    slots, block = usually_stored(schedule, eqn.params["length"])
    step = _residuals(eqn.params["jaxpr"], inner)
    return slots * _nbytes(map(aval_of, carry)) + block * step


def _residuals(program: AnyJaxpr, schedule: AbstractSchedule) -> float:
    """The bytes that one run of a program stores for its derivative."""
    total = 0.0
    for eqn in program.eqns:
        if eqn.primitive.name == "scan":
            total += bytes_stored(eqn, schedule, schedule)
        elif programs := foreign_programs(eqn):
            total += sum(_residuals(program, schedule) for program in programs)
        else:
            total += _RESIDUALS * _nbytes(filter(is_inexact, map(aval_of, eqn.outvars)))
    return total


def _nbytes(types: Iterable[Aval]) -> int:
    """The bytes of arrays of these types; for each place along symbolic axes."""
    arrays = [lo for aval in types for lo in lowered_types(aval)]
    known = lambda x: (size for size in own_shape(x) if not is_symbolic(size))
    return sum(math.prod(known(x)) * x.dtype.itemsize for x in arrays)
