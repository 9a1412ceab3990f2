"""Recurrent cells of many units as kernels, compiled for a GPU that need not be there.

    python -m tests.targets.cells                       # all cells, 64 to 512 units
    python -m tests.targets.cells --only 'gru 64*'      # those with names like this

For each of them: what its plan says, the kernels that a gradient starts and the bytes
that it takes, beside `jax.lax.scan`, and the seconds of a processor to compile it. What
is no kernel here says why.
"""

import argparse
import fnmatch
import time
import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

import eqloop as el
from eqloop._programs import lowered

from ._hlo import Optimised

_STEPS, _INPUTS = 1000, 16
_CELLS = {"gru": eqx.nn.GRUCell, "lstm": eqx.nn.LSTMCell}


def main() -> None:
    """Compiles the cells that are asked for, and prints a line for each."""
    parser = argparse.ArgumentParser(prog="python -m tests.targets.cells")
    parser.add_argument("--kind", default="h100", metavar="DEVICE")
    parser.add_argument("--only", default="*", metavar="NAMES")
    parser.add_argument("--rows", type=int, default=256)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    for name, units, dtype in (
        (name, units, dtype)
        for name in _CELLS
        for units in (64, 128, 256, 512)
        for dtype in ("float32", "bfloat16")
    ):
        case = f"{name} {units} {dtype}"
        if fnmatch.fnmatch(case, options.only):
            print(case, *_told(name, units, dtype, options), sep="; ", flush=True)


def _told(name: str, units: int, dtype: str, options: Any) -> list[str]:
    cell = _CELLS[name](_INPUTS, units, key=jax.random.key(0), dtype=jnp.dtype(dtype))
    of = lambda *shape: jax.ShapeDtypeStruct(shape, dtype)
    start = of(options.rows, units)
    start = (start, start) if name == "lstm" else start
    given = cell, start, of(options.rows, _STEPS, _INPUTS)
    found = list[str]()
    with el.planning_for(options.kind):
        fused = _gradient(el.Fused())
        (loop, *_) = el.plans(fused)(*given)
        found.append(str(getattr(loop.plan, "kernel", None)))
        for said, f in (("kernels", fused), ("lax.scan", _gradient(None))):
            before = time.process_time()
            compiled: Any = lowered(f, *given).compile()
            seconds = time.process_time() - before
            count = sum(one.times for one in Optimised(compiled.as_text()).started())
            size = compiled.memory_analysis().temp_size_in_bytes
            found.append(f"{said}: {count:,} started, {size:,} B, {seconds:.1f} s")
    return found


def _gradient(schedule: Any) -> Callable[..., Any]:
    def loss(cell: Any, start: Any, xs: Any) -> jax.Array:
        def run(start: Any, xs: Any) -> Any:
            step = lambda h, x: (cell(x, h), None)
            if schedule is None:
                return jax.lax.scan(step, start, xs)[0]
            return el.Scan(step, schedule=schedule)(start, xs)[0]

        leaves = jax.tree.leaves(jax.vmap(run)(start, xs))
        return sum((jnp.sum(x.astype(jnp.float32) ** 2) for x in leaves), jnp.zeros(()))

    return jax.value_and_grad(loss, (0, 1, 2))


if __name__ == "__main__":
    main()
