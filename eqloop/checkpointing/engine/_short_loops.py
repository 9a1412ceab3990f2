"""Short loops within a step, written out where the step is reversed.

The stages of a Runge-Kutta method can be such a loop: a scan of seven iterations, each
of them a branch that is taken if there is another stage. Reversed by JAX, every branch
makes cotangents of all that the stages share, even if they are zeros, and every
iteration adds them up in buffers of its own. Written out, with the branches that are
known to be taken, these are a single sum.

It is done on the way back. Where steps are only run, it is worth a larger program if
branches are known then (`whiles/_later_steps.py`); as long as they are not, XLA takes
as long for the one as for the other.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._array_types import axes_of
from ..._axes import is_symbolic
from ..._compat import close, scan_counts
from ..._equations import equations
from ..._partition import split
from ..._programs import pruned
from ..._ranges import Range, range_of_literal, range_of_result
from ..._tangents import is_inexact
from ..._types import Aval, Value
from ._step import Step

# The most iterations that are written out, and the most equations that may come of
# them: beyond, it takes longer to compile than it may ever save. The seven stages of a
# Runge-Kutta method, with the interpolation and for a batch, are about 600.
_MOST_ITERATIONS = 16
_MOST_EQUATIONS = 1024

# The numbers that leaves of a carry are known to be, and `None` for the others.
Numbers: TypeAlias = tuple[int | None, ...]


class _Value(NamedTuple):
    """An array, and between which integers its entries lie, if that is known."""

    array: Value
    range: Range | None = None

    @property
    def number(self) -> int | None:
        """What all entries are, if that is known."""
        if self.range is None or self.range[0] != self.range[1]:
            return None
        return self.range[0]


@functools.lru_cache(maxsize=128)
def without_short_loops(step: Step) -> Step:
    """A step of the same meaning in which short loops are written out.

    It is the very same if there are none.
    """
    is_found = any(map(_is_short_loop, equations(step.jaxpr)))
    return with_known(step, ()) if is_found else step


@functools.lru_cache(maxsize=128)
def with_known(step: Step, known: Numbers) -> Step:
    """The step for a carry of which some numbers are known.

    Short loops in it are written out, and branches that are then known are taken.

    Args:
        step: The step.
        known: The numbers; there may be none for the last leaves.
    """
    if step.jaxpr.effects:
        return step
    run = lambda *flat: [value.array for value in _after_step(step, known, flat)]
    jaxpr = pruned(jax.make_jaxpr(run)(*step.jaxpr.in_avals))
    return step.rewritten(lambda _: jaxpr)


@functools.lru_cache(maxsize=128)
def numbers_after(step: Step) -> Numbers:
    """The numbers that leaves of the carry are after a step, whatever they were."""
    found = list[_Value]()

    def run(*flat: Value) -> list[Value]:
        found.extend(_after_step(step, (), flat)[: step.num_carry])
        return [value.array for value in found]

    jax.make_jaxpr(run)(*step.jaxpr.in_avals)
    pairs = zip(found, step.carry_types, strict=True)
    return tuple(value.number if _is_writable(aval) else None for value, aval in pairs)


def _after_step(step: Step, known: Numbers, flat: Sequence[Value]) -> list[_Value]:
    """What a step gives."""
    consts, carry, xs = split(list(map(_Value, flat)), step.num_consts, step.num_carry)
    for i, (number, aval) in enumerate(zip(known, step.carry_types, strict=False)):
        carry[i] = carry[i] if number is None else _written_down(number, aval)
    return _values_of(step.jaxpr, [*consts, *carry, *xs])


def _values_of(program: jex.ClosedJaxpr, inputs: Sequence[_Value]) -> list[_Value]:
    """What a program gives."""
    jaxpr = program.jaxpr
    values: dict[jex.Var, _Value] = dict(zip(jaxpr.invars, inputs, strict=True))
    values |= zip(jaxpr.constvars, map(_Value, program.consts), strict=True)

    def read(atom: jax.core.Atom) -> _Value:
        if not isinstance(atom, jex.Literal):
            return values[atom]
        number, aval = atom.val, atom.aval
        if isinstance(number, bool | int | float | complex):
            # A Python number would not say of which type it is.
            number = np.asarray(number, getattr(aval, "dtype", None))
        return _Value(number, range_of_literal(number))

    for eqn in jaxpr.eqns:
        outs = _results(jaxpr, eqn, list(map(read, eqn.invars)))
        values |= zip(eqn.outvars, outs, strict=True)
    return list(map(read, jaxpr.outvars))


def _results(jaxpr: jex.Jaxpr, eqn: jex.JaxprEqn, inputs: list[_Value]) -> list[_Value]:
    """What an equation of a program gives."""
    name, params = eqn.primitive.name, eqn.params
    if name == "jit" and _is_entered(eqn):
        return _values_of(close(params["jaxpr"]), inputs)
    if _is_short_loop(eqn):
        return _iterated(params, inputs)
    which = inputs[0].number if inputs else None
    if name == "cond" and which is not None:
        branches = params["branches"]
        taken = branches[min(max(which, 0), len(branches) - 1)]
        return _values_of(close(taken), inputs[1:])
    if name == "select_n" and which is not None:
        return [inputs[1 + which]]
    found = range_of_result(eqn, [value.range for value in inputs])
    if found is not None and found[0] == found[1] and _is_writable(eqn.outvars[0].aval):
        return [_written_down(found[0], eqn.outvars[0].aval)]
    pairs = zip(eqn.invars, inputs, strict=True)
    given = {x: value.array for x, value in pairs if isinstance(x, jex.Var)}
    unnamed = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    alone = jaxpr.replace(
        constvars=[],
        invars=[*given],
        eqns=[eqn],
        outvars=list(eqn.outvars),
        debug_info=unnamed,
    )
    outs = jax.core.eval_jaxpr(alone, [], *given.values())
    return [_Value(outs[0], found)] if len(outs) == 1 else list(map(_Value, outs))


def _iterated(params: dict[str, Any], inputs: list[_Value]) -> list[_Value]:
    """What a scan gives, without a loop."""
    program, indices = close(params["jaxpr"]), range(params["length"])
    consts, carry, xs = split(inputs, *scan_counts(params))
    most = max(map(_count_entries, carry), default=0)
    rows: dict[int, list[Value]] = {}
    for i in reversed(indices) if params["reverse"] else indices:
        x = [_Value(lax.index_in_dim(x.array, i, keepdims=False)) for x in xs]
        # The cotangent of a const is a sum over all iterations, too. XLA would keep the
        # terms of all of them for that one sum. Not so with a large const, a matrix of
        # weights: each term is a product, which is better added than kept.
        own = [_computed_once(c) if _count_entries(c) <= most else c for c in consts]
        outs = _values_of(program, [*own, *map(_computed_once, carry), *x])
        carry, y = split(outs, len(carry))
        rows[i] = [value.array for value in y]
    ys = zip(*(rows[i] for i in indices), strict=True)
    return [*carry, *(_Value(jnp.stack(y)) for y in ys)]


def _computed_once(value: _Value) -> _Value:
    """A leaf of a carry that XLA computes once between two iterations.

    The same goes for its cotangent, which is a sum over the later iterations. Without a
    barrier, XLA would fuse that sum into each equation that reads it, and so would
    compute it several times in every iteration, each time from the start.
    """
    # Each leaf has a barrier of its own: nothing is computed for one that is not used.
    if not is_inexact(value.array):
        return value
    return value._replace(array=lax.optimization_barrier(value.array))


def _count_entries(value: _Value) -> float:
    """How many entries an array has; more than any number if that is not known."""
    shape = jnp.shape(value.array)
    return math.inf if any(map(is_symbolic, shape)) else math.prod(shape)


def _is_short_loop(eqn: jex.JaxprEqn) -> bool:
    if eqn.primitive.name != "scan" or eqn.effects:
        return False
    length = eqn.params["length"]
    if is_symbolic(length) or not 0 < length <= _MOST_ITERATIONS:
        return False
    return length * sum(1 for _ in equations(eqn.params["jaxpr"])) <= _MOST_EQUATIONS


def _is_entered(eqn: jex.JaxprEqn) -> bool:
    """Whether there may be something in a call to write out, or to know beforehand."""
    if len(eqn.outvars) == 1 and _is_writable(eqn.outvars[0].aval):
        return True
    inside = equations(eqn.params["jaxpr"])
    return any(inner.primitive.name in ("cond", "scan", "select_n") for inner in inside)


def _is_writable(aval: Aval) -> bool:
    """Whether a number that is written down is of this type."""
    return getattr(aval, "shape", None) == () and not axes_of(aval)


def _written_down(number: int, aval: Aval) -> _Value:
    return _Value(np.asarray(number, aval.dtype), (number, number))
