"""Loops that stop, made so that the examples of a batch keep in step.

Under `vmap` each example stops at its own time, and its gradient goes back from its own
last step. Then one example is at its step 5 where another is at its step 2, and neither
has the neighbours that it had when these steps were run. Most steps do not notice. For
a step that can see its batch, by `unvmap`, a key of `rbg` or a collective, this would
be another step. So such a loop is one for all examples, as `jax.lax.while_loop` is
under `vmap`: it runs while any of them goes on, and those that have stopped keep their
carry.

    carry    (any(goes_on), steps, goes_on, the rest)
    step     new = step(goes_on, the rest);  the rest = where(goes_on, new, the rest)

`any` is that of `unvmap`, and the steps are those of all examples: neither is batched.
So the loop is batched as a loop is whose examples run equally long, forwards and
backwards, and whether it is differentiated before or after.
"""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp

from ..._arrays import (
    Arrays,
    Flags,
    axes_of,
    over_examples,
    pick,
    put,
    put_on_mesh,
    vary,
    where_leading,
)
from ..._programs import ROW_BY_ROW, has_collectives, sees_batch
from ..._types import Value
from ..engine._problem import Problem
from ..rewrites._masked_writes import NOTE, with_masked_writes, written_leaves
from ..steps._step import Step, StepResult, make_step

_any = over_examples(jnp.any)

# How many leaves are added, all of them at the start of the carry.
_ADDED = 2

_trusted: contextvars.ContextVar[frozenset[str]] = contextvars.ContextVar(
    "_trusted", default=ROW_BY_ROW
)


@contextlib.contextmanager
def trusting(names: frozenset[str]) -> Iterator[None]:
    """A context for steps that see their batch by some primitives only to save work.

    The names are those of primitives of Equinox.
    """
    token = _trusted.set(ROW_BY_ROW | names)
    try:
        yield
    finally:
        _trusted.reset(token)


def in_lockstep(problem: Problem) -> Problem:
    """A loop, put in lockstep if its step can see its batch."""
    if not needs_lockstep(problem):
        return problem
    loop = problem.loop.noting(NOTE, _written(problem.step))
    starts = (None,) * _ADDED + loop.starts if loop.starts else ()
    paths = loop.carry_paths
    if paths:
        paths = ("whether any example goes on", "the number of steps", *paths)
    loop = dataclasses.replace(
        loop, starts=starts, carry_paths=paths, meter=loop.meter.moved(_ADDED)
    )
    return dataclasses.replace(
        problem.in_lockstep(), step=_joint_step(problem.step), loop=loop
    )


def needs_lockstep(problem: Problem) -> bool:
    """Whether a loop has to be `in_lockstep`."""
    if not problem.lead:
        return False  # it does not stop
    jaxpr = problem.step.jaxpr
    return sees_batch(jaxpr, _trusted.get()) or has_collectives(jaxpr)


def started_together(init: Arrays) -> list[Value]:
    """The initial carry of such a loop."""
    count = vary(put_on_mesh(jnp.zeros((), jnp.int32)), axes_of(init[0]))
    return [_any(init[0]), count, *init]


def without_lockstep(carry: Sequence[Value]) -> list[Value]:
    """The carry of the loop that was put in lockstep."""
    return [*carry[_ADDED:]]


def _written(step: Step) -> Flags:
    return (False, *written_leaves(step)[1:])


@functools.lru_cache(maxsize=128)
def _joint_step(step: Step) -> Step:
    # Selecting between an old and a new buffer would take as long as the whole buffer
    # does. So an example that has stopped writes no rows, see `_masked_writes.py`.
    written = _written(step)
    is_selected = [not mark for mark in written[1:]]
    masked = with_masked_writes(step, written) if any(written) else None

    def joint(consts: list[Value], carry: list[Value], x: list[Value]) -> StepResult:
        _, steps, goes_on, *before = carry
        own = [goes_on, *before]
        moved = masked([*consts, goes_on], own, x) if masked else step(consts, own, x)
        (again, *after), y = jax.tree.map(jnp.asarray, moved)
        pairs = zip(pick(after, is_selected), pick(before, is_selected), strict=True)
        kept = [where_leading(goes_on, new, old) for new, old in pairs]
        # Rows for steps that an example does not run are zeros.
        y = [where_leading(goes_on, e, jnp.zeros_like(e)) for e in y]
        # A step is also evaluated for examples that have stopped, and may say that they
        # go on. So `goes_on` only ever loses examples.
        goes_on = goes_on & again
        return [_any(goes_on), steps + 1, goes_on, *put(after, is_selected, kept)], y

    types = jax.make_jaxpr(started_together)([*step.carry_types]).out_avals
    return make_step(joint, step.const_types, types, step.x_types)
