"""Writes out short loops within a step, where the step is reversed.

The stages of a Runge-Kutta method can be such a loop: a scan of seven iterations, each
with a branch that is taken if there is another stage. When JAX reverses it, each branch
makes cotangents of everything that the stages share, even if they are zeros, and each
iteration adds them up in buffers of its own. Written out, with only the branches that
are known to be taken, all of this is a single sum.

This is done on the way back. Where steps are only run, it is worth a larger program if
branches are known there (`_later_steps.py`). As long as they are not, XLA runs
both programs equally fast.

The program is evaluated equation by equation, with arrays that may be known integers
(`_Value`). So it is known at a branch which side is taken.

It gains: without, the gradient of a solve by Diffrax takes 1.5 to 2.4 times as long on
a CPU.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._arrays import axes_of, is_inexact, is_symbolic, split
from ..._compat import close, scan_counts
from ..._programs import (
    Range,
    equations,
    evaluated,
    interpreted,
    pruned,
    range_of_literal,
    range_of_result,
    value_of,
)
from ..._types import Aval, Value
from ..steps._step import Step

# What a plan says of it.
NOTE = "short loops in a step are written out where it is reversed"

# The most iterations that are written out, and the most equations that may come of
# them: beyond, it takes longer to compile than it may ever save. The seven stages of a
# Runge-Kutta method, with the interpolation and for a batch, are about 600.
_MOST_ITERATIONS = 16
_MOST_EQUATIONS = 1024

# The integers that leaves of a carry are known to be, `None` for those not known.
Numbers: TypeAlias = tuple[int | None, ...]


class _Value(NamedTuple):
    """An array, and the range of integers that its entries lie in, if it is known."""

    array: Value
    range: Range | None = None

    @property
    def number(self) -> int | None:
        """The integer that all entries are, if it is known."""
        if self.range is None or self.range[0] != self.range[1]:
            return None
        return self.range[0]


@functools.lru_cache(maxsize=128)
def without_short_loops(step: Step) -> Step:
    """A step of the same meaning in which short loops are written out.

    It is the very same if there are none.
    """
    has_some = any(map(_is_short_loop, equations(step.jaxpr)))
    return with_known(step, ()) if has_some else step


@functools.lru_cache(maxsize=128)
def with_known(step: Step, known: Numbers) -> Step:
    """The step for a carry some leaves of which are known integers.

    There may be fewer of these than leaves in the carry.
    """
    # Short loops are written out, and a branch whose index is known is replaced by the
    # side that is taken.
    if step.jaxpr.effects:
        return step
    run = lambda *flat: [value.array for value in _after_step(step, known, flat)]
    jaxpr = pruned(jax.make_jaxpr(run)(*step.jaxpr.in_avals))
    return step.rewritten(lambda _: jaxpr)


@functools.lru_cache(maxsize=128)
def numbers_after(step: Step) -> Numbers:
    """The integers that leaves of the carry are after a step, whatever its inputs are.

    For example, a flag that tells the first step from the others.
    """
    after = list[_Value]()

    def run(*flat: Value) -> list[Value]:
        after.extend(_after_step(step, (), flat)[: step.num_carry])
        return [value.array for value in after]

    # Traced for the ranges alone; the program is dropped.
    jax.make_jaxpr(run)(*step.jaxpr.in_avals)
    pairs = zip(after, step.carry_types, strict=True)
    return tuple(value.number if _is_writable(aval) else None for value, aval in pairs)


def _after_step(step: Step, known: Numbers, flat: Sequence[Value]) -> list[_Value]:
    """The outputs of a step."""
    consts, carry, xs = split(list(map(_Value, flat)), step.num_consts, step.num_carry)
    for i, (number, aval) in enumerate(zip(known, step.carry_types, strict=False)):
        carry[i] = carry[i] if number is None else _written_down(number, aval)
    return _values_of(step.jaxpr, [*consts, *carry, *xs])


def _values_of(program: jex.ClosedJaxpr, inputs: Sequence[_Value]) -> list[_Value]:
    """The outputs of a program."""
    of_literal = lambda x: _Value(value_of(x), range_of_literal(x.val))
    return interpreted(program, inputs, of_literal, _results, _Value)


def _results(eqn: jex.JaxprEqn, inputs: list[_Value]) -> list[_Value]:
    """The results of an equation of a program."""
    name, params = eqn.primitive.name, eqn.params
    # Calls, short loops and branches that are known are entered. Any other equation is
    # evaluated as it is, and its range is found by interval arithmetic.
    if name == "jit" and _is_entered(eqn):
        return _values_of(close(params["jaxpr"]), inputs)
    if _is_short_loop(eqn):
        return _iterated(params, inputs)
    which = inputs[0].number if inputs else None
    if name in ("cond", "select_n") and which is not None:
        cases = params.get("branches", inputs[1:])
        # Clamped, as JAX does.
        taken = cases[min(max(which, 0), len(cases) - 1)]
        return _values_of(close(taken), inputs[1:]) if name == "cond" else [taken]
    result = range_of_result(eqn, [value.range for value in inputs])
    number = _Value(None, result).number
    if number is not None and _is_writable(aval := eqn.outvars[0].aval):
        return [_written_down(number, aval)]
    outs = evaluated(eqn, [value.array for value in inputs])
    return [_Value(outs[0], result)] if len(outs) == 1 else list(map(_Value, outs))


def _iterated(params: dict[str, Any], inputs: list[_Value]) -> list[_Value]:
    """The results of a scan, computed without a loop."""
    program, indices = close(params["jaxpr"]), range(params["length"])
    consts, carry, xs = split(inputs, *scan_counts(params))
    most = max(map(_count_entries, carry), default=0)
    rows: dict[int, list[Value]] = {}
    for i in reversed(indices) if params["reverse"] else indices:
        x = [_Value(lax.index_in_dim(x.array, i, keepdims=False)) for x in xs]
        # The cotangent of a const is a sum over all iterations as well, and XLA would
        # keep all terms for one sum at the end. A barrier in each iteration has it add
        # them up one by one. A large const, such as a matrix of weights, is left alone:
        # each of its terms is a product, which is better added than kept.
        own = [_computed_once(c) if _count_entries(c) <= most else c for c in consts]
        outs = _values_of(program, [*own, *map(_computed_once, carry), *x])
        carry, y = split(outs, len(carry))
        rows[i] = [value.array for value in y]
    ys = zip(*(rows[i] for i in indices), strict=True)
    return [*carry, *(_Value(jnp.stack(y)) for y in ys)]


def _computed_once(value: _Value) -> _Value:
    """Makes XLA compute a value once between two iterations, and its cotangent, too."""
    # The cotangent is a sum over the later iterations. Without a barrier, XLA would
    # fuse that sum into each equation that reads it, and so would compute it several
    # times in every iteration, each time from the start. Each value has a barrier of
    # its own: a barrier needs all of its operands, and so would keep those alive that
    # nothing uses.
    if not is_inexact(value.array):
        return value
    return value._replace(array=lax.optimization_barrier(value.array))


def _count_entries(value: _Value) -> float:
    """How many entries an array has; more than any number if that is not known."""
    shape = jnp.shape(value.array)
    return math.inf if any(map(is_symbolic, shape)) else math.prod(shape)


def _is_short_loop(eqn: jex.JaxprEqn) -> bool:
    """Whether an equation is a scan that is to be written out."""
    if eqn.primitive.name != "scan" or eqn.effects:
        return False
    length = eqn.params["length"]
    if is_symbolic(length) or not 0 < length <= _MOST_ITERATIONS:
        return False
    return length * sum(1 for _ in equations(eqn.params["jaxpr"])) <= _MOST_EQUATIONS


def _is_entered(eqn: jex.JaxprEqn) -> bool:
    """Whether a call is looked into: for loops to write out, or for known numbers."""
    if len(eqn.outvars) == 1 and _is_writable(eqn.outvars[0].aval):
        return True
    inside = equations(eqn.params["jaxpr"])
    return any(inner.primitive.name in ("cond", "scan", "select_n") for inner in inside)


def _is_writable(aval: Aval) -> bool:
    """Whether a value of this type can be replaced by a number: a scalar.

    Not one that differs between devices in a `shard_map`, which a number does not.
    """
    return getattr(aval, "shape", None) == () and not axes_of(aval)


def _written_down(number: int, aval: Aval) -> _Value:
    """A known number, as a literal of the program."""
    return _Value(np.asarray(number, aval.dtype), (number, number))
