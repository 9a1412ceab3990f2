"""Runs a loop of this library in the place of one of JAX's: same inputs, same outputs.

The program of the new loop is traced as if it were called where the old one was: with
its line, its scopes, and the settings of JAX that it was traced under.
"""

from collections.abc import Callable, Sequence

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.extend import source_info_util

from .._arrays import split, where_leading, with_weak_types
from .._compat import scan_counts
from .._programs import (
    aval_of,
    loop_scope,
    run,
    with_casts,
    without_casts,
    without_derivatives,
    without_shifted_writes,
)
from .._types import Value
from ..checkpointing import (
    AbstractSchedule,
    AsScan,
    ForwardOnly,
    Loop,
    LoopPolicy,
    Online,
    Step,
    make_step,
    run_loop,
    run_while,
)
from ..progress import Label, ProgressBar, make_meter
from ._foreign_loop import ForeignLoop


def scan_in_place(
    eqn: jex.JaxprEqn,
    axes: Sequence[int],
    found: ForeignLoop,
    program: jex.ClosedJaxpr,
    schedule: AbstractSchedule,
    policy: LoopPolicy,
    progress: ProgressBar | None,
) -> jex.ClosedJaxpr:
    """The program of a scan whose steps run a program, in place of an equation.

    It reads its operands along these axes.
    """
    length, unroll = eqn.params["length"], eqn.params["unroll"]
    num_consts, num_carry = scan_counts(eqn.params)
    # What the equation casts in each step, this step is given.
    program, casts = without_casts(without_shifted_writes(program), num_consts)
    step = Step(program, num_consts - len(casts), num_carry)
    types = step.carry_types, step.y_types
    label = lambda desc: Label.of(desc, *types, tuple, tuple)
    meter = make_meter("Reschedule", progress, length, label)
    x_axes = tuple(axes[num_consts + num_carry :])
    loop = Loop(length, eqn.params["reverse"], unroll, x_axes, meter=meter)

    def scan(*operands: Value) -> list[Value]:
        consts, init, xs = split(operands, num_consts, num_carry)
        inputs = step, with_casts(consts, casts), init, xs
        with loop_scope(found.name):
            carry, ys = run_loop(*inputs, loop=loop, schedule=schedule, policy=policy)
        return [*carry, *ys]

    return in_place_of(eqn, scan)


def while_in_place(
    eqn: jex.JaxprEqn,
    found: ForeignLoop,
    cond: jex.ClosedJaxpr,
    body: jex.ClosedJaxpr,
    planner: ForwardOnly | Online | AsScan,
    progress: ProgressBar | None,
) -> jex.ClosedJaxpr:
    """The program of a while loop with the inputs and outputs of an equation."""
    counts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    # If JAX has batched the loop, examples that have stopped keep their carry. As a
    # scan it has a leaf that says of each whether it goes on.
    is_batched = bool(cond.out_avals[0].shape)
    joints = int(is_batched and isinstance(planner, AsScan))

    def holds(of_cond: list[Value], carry: list[Value]) -> Value:
        # As in JAX, the condition is not differentiated.
        (flag,) = run(cond, *without_derivatives([*of_cond, *carry]))
        return flag

    def step(
        consts: list[Value], carry: list[Value], _: list[Value]
    ) -> tuple[list[Value], list[Value]]:
        of_cond, of_body = split(consts, counts[0])
        _, flags, before = split(carry, 1, joints)
        after = run(body, *of_body, *before)
        if is_batched:
            again = flags[0] if flags else holds(of_cond, before)
            after = [where_leading(again, *x) for x in zip(after, before, strict=True)]
        return [*started(of_cond, after), *after], []

    def started(of_cond: list[Value], carry: list[Value]) -> list[Value]:
        """The leaves before the carry."""
        flag = holds(of_cond, carry)
        return [flag.any(), *[flag] * joints]

    def loop(*operands: Value) -> list[Value]:
        of_cond, of_body, init = split(operands, *counts)
        consts, carry = [*of_cond, *of_body], [*started(of_cond, init), *init]
        types = list(map(jax.typeof, consts)), list(map(jax.typeof, carry))
        opened = make_step(step, *types, [])
        label = lambda desc: Label.of(
            desc, opened.carry_types, [], lambda h: tuple(h[at:]), lambda y: None
        )
        meter = make_meter("Reschedule", progress, None, label)
        arguments = opened, consts, carry, (*[None] * at, *starts), planner, meter
        with loop_scope(found.name):
            return run_while(*arguments, joints)[at:]

    at = 1 + joints
    literals = eqn.invars[sum(counts) :]
    starts = [_integer(x) for x in literals]
    return in_place_of(eqn, loop)


def _integer(atom: object) -> int | None:
    """The integer that an atom is, as far as the program says."""
    if not isinstance(atom, jex.Literal) or jnp.ndim(atom.val):
        return None
    is_integer = jnp.issubdtype(jnp.result_type(atom.val), jnp.integer)
    return int(atom.val) if is_integer else None


def in_place_of(
    eqn: jex.JaxprEqn, run: Callable[..., Sequence[Value]]
) -> jex.ClosedJaxpr:
    """The program of a function, as if it were called in the place of an equation."""
    source = eqn.source_info
    weak = [getattr(aval_of(x), "weak_type", False) for x in eqn.outvars]

    def in_place(*operands: Value) -> list[Value]:
        stack = source_info_util.current_name_stack() + source.name_stack
        at_call = source_info_util.user_context(source.traceback, name_stack=stack)
        with at_call, eqn.ctx.manager:
            return with_weak_types(run(*operands), weak)

    return jax.make_jaxpr(in_place)(*map(aval_of, eqn.invars))
