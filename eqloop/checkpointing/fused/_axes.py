"""Puts the axes of a program into classes: calls in it are opened."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.extend.core as jex
import numpy as np

from ..._compat import CALLS, close, form_of, scan_counts
from ..._programs import (
    ELEMENTWISE,
    Formula,
    Selected,
    Vmapped,
    aval_of,
    formula_of,
    inlined,
    simpler,
)
from ..engine._layout import AbstractLayout, Layout
from ..engine._planned_loop import PlannedLoop
from ..engine._problem import Problem
from ..engine._reverse import AbstractReverse
from ..whiles._while_layout import ForwardOnly
from ._axis_rules import RULES, elementwise_axes, mixed
from ._classes import AxisProgram, Classes, Op, Val, refuse
from ._lowered import why_not


def program_of_jaxpr(classes: Classes, closed: jex.ClosedJaxpr) -> AxisProgram:
    """A program whose axes are in classes: calls in it are opened."""
    ins = [classes.array(aval) for aval in closed.in_avals]
    return program_of_vals(classes, closed, ins)


def program_of_vals(
    classes: Classes,
    closed: Any,
    ins: Sequence[Val],
    whole: jex.JaxprEqn | None = None,
) -> AxisProgram:
    """The program of these arrays. `whole` is the operation that it stands for."""
    opened = inlined(close(closed), _is_call, _expanded)
    ops, constants = list[Op](), dict[int, Val]()
    env = dict(zip(opened.jaxpr.invars, ins, strict=True))

    def constant(value: Any) -> Val:
        # An array that is read several times is one.
        if id(value) not in constants:
            constants[id(value)] = classes.constant(value)
        return constants[id(value)]

    for var, value in zip(opened.jaxpr.constvars, opened.consts, strict=True):
        env[var] = constant(value)
    read = lambda x: constant(x.val) if isinstance(x, jex.Literal) else env[x]
    for eqn in opened.jaxpr.eqns:
        given = list(map(read, eqn.invars))
        if eqn.primitive.name == "constant":
            numbers = np.asarray(eqn.params["numbers"], np.int32)
            outs = [classes.constant(numbers.reshape(eqn.params["shape"]))]
        elif not _is_known(eqn) and (others := simpler(eqn)) is not None:
            inner = program_of_vals(classes, others, given, whole or eqn)
            outs, ops = inner.outs, ops + inner.ops
        else:
            outs = [classes.array(aval_of(var)) for var in eqn.outvars]
            ops.append(Op(eqn, given, outs, whole))
            put_into_classes(classes, ops[-1])
        env.update(zip(eqn.outvars, outs, strict=True))
    return AxisProgram(list(ins), list(map(read, opened.jaxpr.outvars)), ops)


def _is_call(eqn: jex.JaxprEqn) -> bool:
    # Functions with derivative rules, too: nothing differentiates them any more.
    return form_of(eqn) in (*CALLS, "custom_jvp_call", "custom_vjp_call")


def _expanded(eqn: jex.JaxprEqn) -> jex.ClosedJaxpr | None:
    if eqn.primitive.name == "custom_vmap_call":
        return eqn.params["call"]
    formula = formula_of(eqn)
    return formula and _by_engine(formula).expanded


def _by_engine(formula: Formula) -> Formula:
    """A loop in a step, which is a part of its kernel and none of its own."""
    if isinstance(formula, Vmapped | Selected):
        return formula.with_params(formula=_by_engine(formula.formula))
    if isinstance(formula, AbstractReverse):
        layout = _without_runner(formula.layout)
        return formula.with_params(layout=layout, problem=_planned_anyhow(formula))
    if isinstance(formula, PlannedLoop):
        saves = formula.saves
        if saves is not None:
            saves = dataclasses.replace(saves, layout=_without_runner(saves.layout))
        return formula.with_params(saves=saves, problem=_planned_anyhow(formula))
    return formula


def _without_runner(layout: AbstractLayout) -> AbstractLayout:
    if isinstance(layout, Layout) and layout.runner is not None:
        return dataclasses.replace(layout, runner=None)
    return layout


def _planned_anyhow(loop: PlannedLoop | AbstractReverse) -> Problem:
    # What is stored is decided, so nobody asks for more than what runs it.
    if loop.problem.planner.runner is None:
        return loop.problem
    return dataclasses.replace(loop.problem, planner=ForwardOnly())


def _is_known(eqn: jex.JaxprEqn) -> bool:
    name = eqn.primitive.name
    if name == "reshape" and eqn.params["dimensions"] is not None:
        return False
    return name in _RULES or name in ELEMENTWISE


def put_into_classes(classes: Classes, op: Op) -> None:
    """Puts the axes of one operation into classes."""
    rule = _RULES.get(op.name)
    if rule is None and op.name not in ELEMENTWISE:
        refuse(op.said())
    if classes.is_kernel and (why := why_not(op.eqn)) is not None:
        refuse(op.said(), why)
    (rule or elementwise_axes)(classes, op)


def _while(classes: Classes, op: Op) -> None:
    n, m = op.params["cond_nconsts"], op.params["body_nconsts"]
    carry = op.ins[n + m :]
    # Each program has arrays of its own, tied to those outside.
    cond = _inner(classes, op.params["cond_jaxpr"], [*op.ins[:n], *carry])
    body = _inner(classes, op.params["body_jaxpr"], [*op.ins[n : n + m], *carry])
    (goes_on,) = cond.outs
    for before, after, out in zip(body.ins[m:], body.outs, op.outs, strict=True):
        classes.tie(before, after)
        classes.tie(before, out)
        # Each entry of the flag is for as many first axes of all that is carried.
        for i in range(len(goes_on.shape)):
            classes.same(goes_on, i, before, i)
    op.inner = [cond, body]


def _inner(classes: Classes, closed: Any, given: Sequence[Val]) -> AxisProgram:
    ins = [classes.array(val.aval) for val in given]
    for a, b in zip(given, ins, strict=True):
        classes.tie(a, b)
    return program_of_vals(classes, closed, ins)


def _cond(classes: Classes, op: Op) -> None:
    for closed in op.params["branches"]:
        branch = _inner(classes, closed, op.ins[1:])
        for a, b in zip(branch.outs, op.outs, strict=True):
            classes.tie(a, b)
        op.inner.append(branch)


def _scan(classes: Classes, op: Op) -> None:
    n, m = scan_counts(op.params)
    closed = close(op.params["jaxpr"])
    ins = [classes.array(aval) for aval in closed.in_avals]
    for a, b in zip(op.ins[: n + m], ins, strict=False):
        classes.tie(a, b)
    for a, b in zip(op.ins[n + m :], ins[n + m :], strict=True):
        for i in range(len(b.shape)):
            classes.same(a, i + 1, b, i)
        mixed(classes, op, a, [0])
    body = program_of_vals(classes, closed, ins)
    for before, after, out in zip(ins[n : n + m], body.outs, op.outs, strict=False):
        classes.tie(before, after)
        classes.tie(before, out)
    for y, out in zip(body.outs[m:], op.outs[m:], strict=True):
        for i in range(len(y.shape)):
            classes.same(y, i, out, i + 1)
        mixed(classes, op, out, [0])
    op.inner = [body]


def _unvmapped(classes: Classes, op: Op) -> None:
    if not classes.saves_work:
        mixed(classes, op, op.ins[0], range(len(op.ins[0].shape)))


_RULES: dict[str, Callable[[Classes, Op], None]] = {
    **RULES,
    "unvmap_any": _unvmapped,
    "while": _while,
    "cond": _cond,
    "scan": _scan,
}
