"""`python -m tests.elsewhere KIND [LOOP NBYTES]`: see `tests/elsewhere/__init__.py`."""

import dataclasses
import json
import sys
from typing import Any

import jax

import eqloop as el

from .cases import budgeted, loss_of, offloaded
from .compiler import Compiler


def _say(case: str, **found: Any) -> None:
    print(json.dumps({"case": case, **found}), flush=True)


def _offload(compiler: Compiler) -> None:
    for name, function, args in offloaded():
        _say(name, **dataclasses.asdict(compiler(function, *args)))


def _budget(compiler: Compiler, loop: str, nbytes: int) -> None:
    """The plan for all inputs, and the gradients with respect to some of them."""
    scan, *args = budgeted(loop, nbytes)
    shown = scan.plan(*args).peak_bytes
    for argnums in ((0, 1), (0,), (1,)):
        grad = jax.grad(loss_of(scan), argnums)
        planned = el.plans(grad)(*args)[0].plan.peak_bytes
        temp = compiler(grad, *args).temp
        _say(str(argnums), shown=shown, planned=planned, temp=temp)


if __name__ == "__main__":
    kind, *rest = sys.argv[1:]
    compiler = Compiler(kind)
    if rest:
        compiler.plan_here()
        _budget(compiler, rest[0], int(rest[1]))
    else:
        _offload(compiler)
