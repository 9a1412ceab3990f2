"""`python -m tests.elsewhere KIND [LOOP NBYTES | fused | cell | operations | fit]`."""

import dataclasses
import json
import re
import sys
import warnings
from typing import Any

import jax

import eqloop as el
from eqloop._programs import lowered

from .cases import (
    budgeted,
    fitted,
    fitted_rows,
    fused,
    gru,
    loss_of,
    offloaded,
    operations,
)
from .compiler import compiled_for


def _say(case: str, **found: Any) -> None:
    print(json.dumps({"case": case, **found}), flush=True)


def _offload(kind: str) -> None:
    for name, function, args in offloaded():
        _say(name, **dataclasses.asdict(compiled_for(kind, function, *args)))


def _budget(kind: str, loop: str, nbytes: int) -> None:
    """The plan for all inputs, and the gradients with respect to some of them."""
    scan, *args = budgeted(loop, nbytes)
    shown = scan.plan(*args).peak_bytes
    for argnums in ((0, 1), (0,), (1,)):
        grad = jax.grad(loss_of(scan), argnums)
        plans = el.plans(grad)(*args)
        if not plans:  # for inputs without influence
            continue
        temp = compiled_for(kind, grad, *args).temp
        _say(str(argnums), shown=shown, planned=plans[0].plan.peak_bytes, temp=temp)


def _fused() -> None:
    """What a plan foresees for a kernel each way, and what it takes."""
    for name in ("lorenz", "neuron", "izhikevich", "newton", "crowded"):
        plans = []
        with warnings.catch_warnings(record=True) as said:
            for schedule in (el.Fused(), el.Budget("256MiB")):
                grad, args = fused(name, schedule)
                plans.append(el.plans(grad)(*args)[0].plan)
                if len(plans) == 1:
                    temp = compiled_for("h100", grad, *args).temp
        _say(
            name,
            planned=plans[0].peak_bytes,
            temp=temp,
            kernels=[plan.kernel for plan in plans],
            times=[plan.relative_time for plan in plans],
            said=[str(warning.message) for warning in said],
        )


def _cell(kind: str) -> None:
    """A cell in float32, whose matrices are sums of narrow ones."""
    grad, args = gru(el.Fused())
    plan = el.plans(grad)(*args)[0].plan
    program = lowered(grad, *args).compile()
    # What is rounded is less than what it was.
    nothing = re.findall(r"subtract\(%(\S+), %\1\)", program.as_text())
    temp = compiled_for(kind, grad, *args).temp
    told = dict(kernel=plan.kernel, plan=str(plan), planned=plan.peak_bytes)
    _say("gru", **told, nothing=nothing, temp=temp)


def _operations(kind: str) -> None:
    """Operations that a kernel is made of."""
    with jax.enable_x64(True):
        for name, function, args in operations():
            _say(name, temp=compiled_for(kind, function, *args).temp)


def _fit(kind: str) -> None:
    """Functions with one budget: with memory of the host or not, and of many rows."""
    for host in (None, "100MiB", "1GiB"):
        loss, args = fitted()
        plan = el.Fit(loss, "120MiB", host=host).plan(*args)
        grad = jax.grad(plan.pinned, (0, 1))
        _say(
            str(host),
            planned=plan.peak_bytes,
            on_host=plan.host_bytes,
            time=plan.relative_time,
            **dataclasses.asdict(compiled_for(kind, grad, *args)),
        )
    loss, args = fitted_rows()
    plan = el.Fit(loss, "24MiB").plan(*args)
    grad = jax.value_and_grad(plan.pinned, (0, 1))
    stores = [part.stores for part in plan.parts]
    temp = compiled_for(kind, grad, *args).temp
    _say("rows", stores=stores, planned=plan.peak_bytes, temp=temp)


if __name__ == "__main__":
    kind, *rest = sys.argv[1:]
    with el.planning_for(kind):
        if rest == ["fused"]:
            _fused()
        elif rest == ["cell"]:
            _cell(kind)
        elif rest == ["operations"]:
            _operations(kind)
        elif rest == ["fit"]:
            _fit(kind)
        elif rest:
            _budget(kind, rest[0], int(rest[1]))
        else:
            _offload(kind)
