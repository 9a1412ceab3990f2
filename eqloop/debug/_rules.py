"""What is done for equations that run programs of their own."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax
from jax.extend import source_info_util
from jax.sharding import PartitionSpec

from .._compat import CALLS, close, scan_counts
from .._formula import Formula, Mapped, Selected
from .._loop_markers import loop_name, watched
from .._partition import Arrays, split
from ..checkpointing.engine._primitive import PlannedLoop, Reverse
from ..mapping._row_map import RowMap
from ._body import Body, Rule
from ._finding import Finding, first, nothing, of_all_devices, varying
from ._scope import Scope
from ._sites import Frame, is_of_jax, is_ours


def _call(param: str) -> Rule:
    """The program is run as part of the body that calls it."""

    def rule(body: Body, eqn: Any, operands: Arrays, scope: Scope) -> Sequence[Any]:
        program = close(eqn.params[param])
        if is_of_jax(program.jaxpr):
            # What JAX has traced it remembers, with the line that first called it.
            scope = dataclasses.replace(scope, place=scope.place_of(eqn))
        if eqn.params.get("differentiated") and eqn.params.get("prevent_cse"):
            # What is computed again must not become one with what was computed first.
            operands = lax.optimization_barrier(list(operands))
        return body.run(program.jaxpr, program.consts, operands, scope)

    return rule


def _scan(body: Body, eqn: Any, operands: Arrays, scope: Scope) -> Sequence[Any]:
    params, frame = eqn.params, _frame(eqn, scope, "lax.scan")
    num_consts, num_carry = scan_counts(params)
    program, length, reverse = params["jaxpr"], params["length"], params["reverse"]
    consts, init, xs = split(operands, num_consts, num_carry)
    inner, index = _inside(body, scope, frame, length)

    def step(state: Any, x: list[Any]) -> Any:
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
    body.note(finding, scope)
    return [*carry, *ys]


def _while(body: Body, eqn: Any, operands: Arrays, scope: Scope) -> Sequence[Any]:
    params, frame = eqn.params, _frame(eqn, scope, "lax.while_loop")
    cond, program = params["cond_jaxpr"], params["body_jaxpr"]
    of_cond, of_body, init = split(
        operands, params["cond_nconsts"], params["body_nconsts"]
    )
    inner, index = _inside(body, scope, frame, None)

    def goes_on(carry: Arrays) -> tuple[Any, Finding]:
        args = [*of_cond, *carry]
        (again,), found = body.inner(cond.jaxpr, cond.consts, args, inner)
        return again, found

    def step(state: Any) -> Any:
        count, again, finding, before = state
        args = [*of_body, *before]
        after, new = body.inner(program.jaxpr, program.consts, args, inner)
        # Under `vmap`, examples that have stopped keep their carry.
        carry = [_select(again, *pair) for pair in zip(after, before, strict=True)]
        again, late = goes_on(carry)
        finding = first(finding, index(first(new, late), count))
        return count + 1, again & _may_go_on(finding), finding, carry

    again, early = goes_on(init)
    finding = varying(nothing(), operands)
    state = (jnp.int32(0), again, first(early, finding), init)
    _, _, finding, carry = lax.while_loop(lambda state: state[1].any(), step, state)
    body.note(finding, scope)
    return carry


def _select(mask: Any, x: Any, other: Any) -> Any:
    if not mask.shape:
        return x
    shape = mask.shape + (1,) * (x.ndim - mask.ndim)
    return jnp.where(mask.reshape(shape), x, other)


def _may_go_on(finding: Finding) -> Any:
    """Whether a loop should go on: where there are infinities, it might for ever.

    Inside `shard_map` it must: other devices may wait for this one.
    """
    if jax.sharding.get_abstract_mesh().manual_axes:
        return True
    return finding.site == 0


def _cond(body: Body, eqn: Any, operands: Arrays, scope: Scope) -> Sequence[Any]:
    index, *operands = operands

    def run(branch: Any) -> Callable[..., Any]:
        def evaluate(*args: Any) -> Any:
            outs, found = body.inner(branch.jaxpr, branch.consts, args, scope)
            return outs, varying(found, args)

        return evaluate

    branches = [run(branch) for branch in eqn.params["branches"]]
    outs, finding = lax.switch(index.astype(jnp.int32), branches, *operands)
    body.note(finding, scope)
    return outs


def _shard_map(body: Body, eqn: Any, operands: Arrays, scope: Scope) -> Sequence[Any]:
    params = eqn.params
    program = close(params["jaxpr"])

    def run(*args: Any) -> Any:
        outs, found = body.inner(program.jaxpr, program.consts, args, scope)
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
    body.note(finding, scope)
    return outs


def _formula(body: Body, eqn: Any, operands: Arrays, scope: Scope) -> Sequence[Any]:
    """What a primitive of this library does is looked at, not the primitive."""
    formula = eqn.params["_prim"]
    if not isinstance(formula, Formula):
        return body.opaque(eqn, operands, scope)
    program = _expanded(formula, eqn.source_info)
    label = loop_name(eqn.source_info.name_stack) or scope.label
    loop = formula
    while isinstance(loop, Mapped | Selected):
        loop = loop.formula
    if not isinstance(loop, PlannedLoop | Reverse | RowMap):
        inner = dataclasses.replace(scope, label=label, is_expanded=True)
        return body.run(program.jaxpr, program.consts, operands, inner)
    unit = "row" if isinstance(loop, RowMap) else "iteration"
    inner = scope.inside(
        Frame(label or "the loop", scope.place_of(eqn), unit),
        has_position=True,
        is_expanded=True,
        is_backward=scope.is_backward or isinstance(loop, Reverse),
    )
    outs, finding = body.inner(program.jaxpr, program.consts, operands, inner)
    body.note(finding, scope)
    return outs


def _expanded(formula: Formula, source_info: Any) -> jex.ClosedJaxpr:
    """What a primitive does, with marks of the steps that it is at."""
    # So what it adds of its own is said to be where it was called.
    context = source_info_util.user_context(
        source_info.traceback, name_stack=source_info_util.new_name_stack()
    )
    with watched(), context:
        return formula.expanded


# Loops.


def _frame(eqn: Any, scope: Scope, name: str) -> Frame | None:
    """The loop that an equation is to the user; `None` if it is part of one."""
    label = loop_name(eqn.source_info.name_stack)
    if label is None and scope.is_expanded and is_ours(eqn.source_info):
        return None
    return Frame(label or name, scope.place_of(eqn))


def _inside(
    body: Body, scope: Scope, frame: Frame | None, length: int | None
) -> tuple[Scope, Callable[[Finding, Any], Finding]]:
    """The scope in a loop, and what notes with a finding which step it was.

    A loop that is none of the user's may be that over the steps of one block.
    """
    depth, start = len(scope.frames), body.index
    if frame is not None:
        scope = scope.inside(frame, has_position=False, is_expanded=False)
        return scope, lambda finding, count: finding.at(depth, count)
    if start is not None and length == body.count:
        note = lambda finding, count: finding.at(depth - 1, start + count)
        return scope.at_once(1), note
    return scope, lambda finding, count: finding


RULES: dict[str, Rule] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "call_hi_primitive": _formula,
    "shard_map": _shard_map,
    **{name: _call(param) for name, param in CALLS.items()},
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call"), _call("call_jaxpr")),
}
