"""Logs: what the backward rules of a step hand out beside their cotangents.

A rule that is defined by `jax.custom_vjp.defvjp_with_logs` names arrays, and whoever
asks for a cotangent can have them: `jax.vjp(f, x)[1].with_logs(ct)`. Those of a
`lax.scan` are stacked, with a row for each step.

The rules in a planned loop run within its reverse sweep, which hands out cotangents and
nothing else. So each array of a log becomes the cotangent of an input of the step that
the step does not read. The loop has a row of zeros for each step there, and in their
cotangents the rows that the rules have logged. A loop that may end has one for each
step that it may take, which stays zero if it takes fewer. A while loop without a
schedule has no rows, and so no log: JAX does not take cotangents past its own.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from ..._arrays import (
    Arrays,
    instantiated,
    is_inexact,
    pick,
    put,
    split,
    stack_type,
    zero_array,
)
from ..._compat import HAS_LOGS, with_logs
from ..._programs import has_backward_rules, joined, run, traced, without_dead_code
from ..._types import Aval, PyTree, Value
from ..steps._step import Step, make_step
from ._forward import Active
from ._layout import Saves
from ._problem import Problem
from ._substitute import Differentiable, P

# A cotangent is an inexact number. Of an integer this many bits are logged as one.
_BITS = 16


@dataclasses.dataclass(frozen=True)
class Logging(Differentiable):
    """A step whose logs are cotangents: a loop with more `xs`.

    Attributes:
        step: The step, whose `x` has more leaves at its end.
        types: The types of the arrays that are logged.
        tree: How the log is made of them.
        rows: The types of what is added to `xs`, for a loop of some length.
    """

    step: Step
    types: tuple[Aval, ...]
    tree: Any
    rows: tuple[Aval, ...] = ()

    @property
    def x_types(self) -> list[Aval]:
        """The types of the leaves that were added to `x`."""
        return list(map(_as_cotangent, self.types))

    def of(self, problem: P) -> P:
        axes = (*problem.loop.x_axes, *[0] * len(self.types))
        loop = dataclasses.replace(problem.loop, x_axes=axes)
        return dataclasses.replace(problem, step=self.step, loop=loop)

    def inputs(self, inputs: PyTree) -> PyTree:
        # Zeros will do: the step does not read these `xs`.
        consts, init, xs = inputs
        return consts, init, [*xs, *map(zero_array, self.rows)]

    def marks(self, marks: PyTree) -> PyTree:
        consts, init, xs = marks
        return consts, init, [*xs, *[True] * len(self.rows)]

    def cotangents(self, cts: PyTree) -> tuple[PyTree, PyTree]:
        consts, init, xs = cts
        xs, rows = split(xs, len(xs) - len(self.rows))
        pairs = zip(instantiated(rows), self.types, strict=True)
        log = jax.tree.unflatten(self.tree, [_decoded(x, aval) for x, aval in pairs])
        return (consts, init, xs), log


def logging_of(
    problem: Problem, active: Active, saves: Saves[Any] | None
) -> Logging | None:
    """The loop whose log is cotangents; `None` if nothing in its step logs."""
    logging = _logging_step(problem.step, active) if problem.has_xs else None
    if logging is None:
        return None
    rows = [stack_type(x, problem.loop.length) for x in logging.x_types]
    return dataclasses.replace(logging, rows=tuple(rows))


@functools.lru_cache(maxsize=128)
def _logging_step(step: Step, active: Active) -> Logging | None:
    """A step whose logs are cotangents; `None` if nothing in it logs.

    Args:
        step: The step.
        active: The inputs with respect to which it is differentiated.
    """
    if not (HAS_LOGS and has_backward_rules(step.jaxpr)):
        return None
    # Not with what it does not read: a loop that may end drops such a leaf.
    program, read = without_dead_code(step.jaxpr)
    marks, types = tuple(pick(joined(active), read)), program.in_avals
    of_outs = tuple(map(is_inexact, step.jaxpr.out_avals))

    def linearized(inputs: Arrays) -> PyTree:
        def of_marked(marked: Arrays) -> tuple[list[Value], list[Value]]:
            outs = run(program, *put(inputs, marks, marked))
            return pick(outs, of_outs), outs

        _, pull, outs = jax.vjp(of_marked, pick(inputs, marks), has_aux=True)
        return outs, pull

    def logged(*inputs: Value) -> PyTree:
        outs, pull = linearized(inputs)
        return with_logs(pull, list(map(jnp.ones_like, pick(outs, of_outs))))[1]

    own, shapes = jax.make_jaxpr(logged, return_shape=True)(*types)
    tree, count = jax.tree.structure(shapes), len(own.out_avals)
    if not count:
        return None

    @jax.custom_vjp
    def run_step(inputs: Arrays, zeros: Arrays) -> list[Value]:
        return run(program, *inputs)

    def backward(pull: PyTree, cts: Arrays) -> PyTree:
        (of_inputs,), logs = with_logs(pull, pick(cts, of_outs))
        none: list[Value] = [None] * len(types)
        return put(none, marks, of_inputs), list(map(_encoded, jax.tree.leaves(logs)))

    run_step.defvjp(lambda inputs, _: linearized(inputs), backward)

    def with_zeros(consts: Arrays, carry: Arrays, x: Arrays) -> Any:
        given, zeros = split([*consts, *carry, *x], len(read))
        return split(run_step(pick(given, read), zeros), step.num_carry)

    def without_zeros(consts: Arrays, carry: Arrays, x: Arrays) -> Any:
        return step.before(consts, carry, x[: len(x) - count]), []

    logs = Logging(step, tuple(own.out_avals), tree)
    groups = step.const_types, step.carry_types, [*step.x_types, *logs.x_types]
    inverse = step.inverse and make_step(without_zeros, *groups).jaxpr
    new = make_step(with_zeros, *groups)
    new = dataclasses.replace(new, inverse=inverse, saved=step.saved)
    return dataclasses.replace(logs, step=new)


def _encoded(x: Value) -> Value:
    """An array of a log as a cotangent: an integer as several inexact numbers."""
    if is_inexact(x):
        return x
    size = x.dtype.itemsize * 8
    number = x.astype(f"uint{size}")
    parts = [(number >> at) & (2**_BITS - 1) for at in range(0, size, _BITS)]
    return jnp.stack(parts, -1).astype(jnp.float32)


def _decoded(x: Value, aval: Aval) -> Value:
    """Rows of arrays of a log, from rows of what `_encoded` makes of them."""
    if is_inexact(aval):
        return x
    size = aval.dtype.itemsize * 8
    parts = jnp.unstack(x.astype(f"uint{size}"), axis=-1)
    places = range(0, size, _BITS)
    shifted = [part << at for part, at in zip(parts, places, strict=True)]
    return functools.reduce(jnp.bitwise_or, shifted).astype(aval.dtype)


def _as_cotangent(aval: Aval) -> Aval:
    return traced(lambda x: [_encoded(x)], [aval]).out_avals[0]
