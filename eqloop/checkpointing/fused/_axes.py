"""Puts the axes of a program into classes: calls in it are opened."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from ..._compat import close, scan_counts
from ..._programs import (
    ELEMENTWISE,
    Formula,
    Selected,
    Vmapped,
    aval_of,
    formula_of,
    place_of,
    said,
    simpler,
)
from ..engine._layout import AbstractLayout, Layout
from ..engine._planned_loop import PlannedLoop
from ..engine._problem import Problem
from ..engine._reverse import AbstractReverse
from ..whiles._until_stop import ForwardOnly
from ._axis_rules import RULES, elementwise_axes, mixed
from ._classes import AxisProgram, Classes, Op, Val, refuse
from ._lowered import why_not


def program_of_jaxpr(classes: Classes, closed: jex.ClosedJaxpr) -> AxisProgram:
    """A program whose axes are in classes: calls in it are opened."""
    ins = [classes.array(aval) for aval in closed.in_avals]
    return _program(classes, closed, ins)


def _program(classes: Classes, closed: Any, ins: Sequence[Val]) -> AxisProgram:
    ops = list[Op]()
    return AxisProgram(list(ins), _opened(classes, close(closed), ins, ops), ops)


def open_call(
    classes: Classes, closed: jex.ClosedJaxpr, ins: Sequence[Val]
) -> tuple[list[Val], list[Op]]:
    """The outputs of a program that is called, and its operations."""
    program = _program(classes, closed, ins)
    return program.outs, program.ops


# Calls that are the program that they call. Nothing differentiates it any more.
_CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call")


_CALL_NAMES = {
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
    "remat",
    "remat2",
    "checkpoint",
    "custom_lin",
    "custom_vmap_call",
}


def _opened(
    classes: Classes, closed: jex.ClosedJaxpr, ins: Sequence[Val], ops: list[Op]
) -> list[Val]:
    """The operations of a program, added to `ops`. Returns its outputs."""
    jaxpr = closed.jaxpr
    env = dict(zip(jaxpr.invars, ins, strict=True))

    def constant(value: Any) -> Val:
        aval = jax.core.ShapedArray(np.shape(value), jax.typeof(value).dtype)
        val = classes.array(aval)
        if not val.shape and not jnp.issubdtype(val.aval.dtype, jax.dtypes.extended):
            val.literal = np.asarray(value)[()]
        else:
            classes.lifted.append((val, value))
        return val

    for var, value in zip(jaxpr.constvars, closed.consts, strict=True):
        env[var] = constant(value)
    read = lambda x: constant(x.val) if isinstance(x, jex.Literal) else env[x]
    for eqn in jaxpr.eqns:
        given, outs = list(map(read, eqn.invars)), None
        if (formula := formula_of(eqn)) is not None:
            outs = _opened(classes, _by_engine(formula).expanded, given, ops)
        elif eqn.primitive.name == "constant":
            array = np.asarray(eqn.params["numbers"], np.int32)
            outs = [constant(array.reshape(eqn.params["shape"]))]
        elif not _is_known(eqn) and (inner := simpler(eqn)) is not None:
            whole = classes.whole
            classes.whole = whole or eqn
            outs = _opened(classes, inner, given, ops)
            classes.whole = whole
        elif eqn.primitive.name in _CALL_NAMES:
            inner = next(eqn.params[n] for n in _CALLS if n in eqn.params)
            around = classes.around
            classes.around = eqn if place_of(eqn.source_info) else around
            outs = _opened(classes, close(inner), given, ops)
            classes.around = around
        if outs is None:
            outs = [classes.array(aval_of(var)) for var in eqn.outvars]
            of = functools.partial(said, classes.whole or eqn, classes.around)
            op = Op(eqn, given, outs, of)
            put_into_classes(classes, op)
            ops.append(op)
        env.update(zip(eqn.outvars, outs, strict=True))
    return list(map(read, jaxpr.outvars))


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
    return name in _RULES or name in ELEMENTWISE or name in _CALL_NAMES


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
    return _program(classes, closed, ins)


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
    body = _program(classes, closed, ins)
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
