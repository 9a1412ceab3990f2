"""Rules for equations that run programs of their own."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax
from jax.extend import source_info_util
from jax.sharding import PartitionSpec

from .._arrays import Arrays, split, where_leading
from .._compat import CALLS, close, form_params, scan_counts
from .._programs import Formula, loop_name, watched
from .._types import PyTree, Value
from ._body import Body, Rule
from ._context import Context
from ._finding import Finding, first, nothing, of_all_devices, varying
from ._sites import Frame, is_of_jax, is_ours


def _watch_call(param: str) -> Rule:
    """Runs the program as part of the body that calls it."""

    def rule(
        body: Body, eqn: jex.JaxprEqn, operands: Arrays, context: Context
    ) -> Sequence[Value]:
        program = close(form_params(eqn)[param])
        if is_of_jax(program.jaxpr):
            # JAX remembers what it has traced, with the line that first called it.
            context = dataclasses.replace(context, place=context.place_of(eqn))
        if eqn.params.get("differentiated") and eqn.params.get("prevent_cse"):
            # XLA must not merge a recomputation with the first computation.
            operands = lax.optimization_barrier(list(operands))
        return body.run(program.jaxpr, program.consts, operands, context)

    return rule


def _watch_scan(
    body: Body, eqn: jex.JaxprEqn, operands: Arrays, context: Context
) -> Sequence[Value]:
    params, frame = eqn.params, _frame(eqn, context, "lax.scan")
    num_consts, num_carry = scan_counts(params)
    program, length, reverse = params["jaxpr"], params["length"], params["reverse"]
    consts, init, xs = split(operands, num_consts, num_carry)
    inner, index = _inside_loop(body, context, frame, length)

    def step(state: PyTree, x: list[Value]) -> PyTree:
        count, finding, carry = state
        args = [*consts, *carry, *x]
        outs, new = body.inner(program.jaxpr, program.consts, args, inner)
        carry, ys = split(outs, num_carry)
        new = index(new, length - 1 - count if reverse else count)
        return (count + 1, first(finding, new), carry), ys

    state = (jnp.int32(0), varying(nothing(), operands), init)
    (_, finding, carry), ys = lax.scan(
        step, state, xs, length, reverse=reverse, unroll=params["unroll"]
    )
    body.note(finding, context)
    return [*carry, *ys]


def _watch_while(
    body: Body, eqn: jex.JaxprEqn, operands: Arrays, context: Context
) -> Sequence[Value]:
    params, frame = eqn.params, _frame(eqn, context, "lax.while_loop")
    cond, program = params["cond_jaxpr"], params["body_jaxpr"]
    of_cond, of_body, init = split(
        operands, params["cond_nconsts"], params["body_nconsts"]
    )
    inner, index = _inside_loop(body, context, frame, None)

    def goes_on(carry: Arrays) -> tuple[Value, Finding]:
        args = [*of_cond, *carry]
        (again,), found = body.inner(cond.jaxpr, cond.consts, args, inner)
        return again, found

    def step(state: PyTree) -> PyTree:
        count, again, finding, before = state
        args = [*of_body, *before]
        after, new = body.inner(program.jaxpr, program.consts, args, inner)
        # Under `vmap`, examples that have stopped keep their carry.
        carry = after
        if again.shape:
            carry = list(map(functools.partial(where_leading, again), after, before))
        again, late = goes_on(carry)
        finding = first(finding, index(first(new, late), count))
        return count + 1, again & _may_go_on(finding), finding, carry

    again, early = goes_on(init)
    finding = varying(nothing(), operands)
    state = (jnp.int32(0), again, first(early, finding), init)
    _, _, finding, carry = lax.while_loop(lambda state: state[1].any(), step, state)
    body.note(finding, context)
    return carry


def _may_go_on(finding: Finding) -> Value:
    """Whether a loop should go on: with infinities in its carry it might never end."""
    # Inside `shard_map` it must: other devices may wait for this one.
    if jax.sharding.get_abstract_mesh().manual_axes:
        return True
    return finding.site == 0


def _watch_cond(
    body: Body, eqn: jex.JaxprEqn, operands: Arrays, context: Context
) -> Sequence[Value]:
    index, *operands = operands

    def run(branch: Any) -> PyTree:
        def evaluate(*args: PyTree) -> PyTree:
            outs, found = body.inner(branch.jaxpr, branch.consts, args, context)
            return outs, varying(found, args)

        return evaluate

    branches = [run(branch) for branch in eqn.params["branches"]]
    outs, finding = lax.switch(index.astype(jnp.int32), branches, *operands)
    body.note(finding, context)
    return outs


def _watch_shard_map(
    body: Body, eqn: jex.JaxprEqn, operands: Arrays, context: Context
) -> Sequence[Value]:
    params = eqn.params
    program = close(params["jaxpr"])

    def run(*args: PyTree) -> PyTree:
        outs, found = body.inner(program.jaxpr, program.consts, args, context)
        return tuple(outs), of_all_devices(found)

    mapped = jax.shard_map(
        run,
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=(tuple(params["out_specs"]), PartitionSpec()),
        axis_names=set(params["newly_manual_axes"]),
        check_vma=params["check_vma"],
    )
    outs, finding = mapped(*operands)
    body.note(finding, context)
    return outs


def _watch_formula(
    body: Body, eqn: jex.JaxprEqn, operands: Arrays, context: Context
) -> Sequence[Value]:
    """Checks the operations that a primitive of this library expands to."""
    formula = eqn.params["_prim"]
    if not isinstance(formula, Formula):
        return body.opaque(eqn, operands, context)
    program = _expanded(formula, eqn.source_info)
    label = loop_name(eqn.source_info.name_stack) or context.label
    if formula.unit is None:
        inner = dataclasses.replace(context, label=label, is_expanded=True)
        return body.run(program.jaxpr, program.consts, operands, inner)
    inner = context.inside(
        Frame(label or "the loop", context.place_of(eqn), formula.unit),
        has_position=True,
        is_expanded=True,
        is_backward=context.is_backward or formula.is_backward,
    )
    outs, finding = body.inner(program.jaxpr, program.consts, operands, inner)
    body.note(finding, context)
    return outs


def _expanded(formula: Formula, source_info: Any) -> jex.ClosedJaxpr:
    """The program of a primitive, with marks for the position of its loops."""
    # So the operations that it adds are reported where it was called.
    at_call = source_info_util.user_context(
        source_info.traceback, name_stack=source_info_util.new_name_stack()
    )
    with watched(), at_call:
        return formula.expanded


# Loops.


def _frame(eqn: jex.JaxprEqn, context: Context, name: str) -> Frame | None:
    """The loop that the user sees for an equation; `None` if it is part of another."""
    label = loop_name(eqn.source_info.name_stack)
    if label is None and context.is_expanded and is_ours(eqn.source_info):
        return None
    return Frame(label or name, context.place_of(eqn))


def _inside_loop(
    body: Body, context: Context, frame: Frame | None, length: int | None
) -> tuple[Context, Callable[[Finding, PyTree], Finding]]:
    """The context in a loop, and what notes with a finding which step it was."""
    # A loop that the user did not write may run over the steps of one block.
    depth, start = len(context.frames), body.index
    if frame is not None:
        context = context.inside(frame, has_position=False, is_expanded=False)
        return context, lambda finding, count: finding.at(depth, count)
    if start is not None and length == body.count:
        note = lambda finding, count: finding.at(depth - 1, start + count)
        return context.at_once(1), note
    return context, lambda finding, count: finding


RULES: dict[str, Rule] = {
    "scan": _watch_scan,
    "while": _watch_while,
    "cond": _watch_cond,
    "call_hi_primitive": _watch_formula,
    "shard_map": _watch_shard_map,
    **{name: _watch_call(param) for name, param in CALLS.items()},
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call"), _watch_call("call_jaxpr")),
}
