"""Recurrent cells of many units as kernels, compiled for a GPU that need not be there.

    python -m tests.targets --only fused                      # all cells
    python -m tests.targets --only fused --match 'gru 64*'    # names like this
    python -m tests.targets --only fused --write docs/guides/fused.md

For the value and the gradient of each of them: how many kernels it starts and what a
thread of these takes, the bytes that they read and write, in the kernels' own loads and
stores, the memory that it takes and the seconds of a processor to compile it, beside
`jax.lax.scan`. What is no kernel here says why.
"""

import contextlib
import dataclasses
import fnmatch
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

import eqloop as el
from eqloop._arrays import nbytes
from eqloop._programs import lowered, registers_of
from eqloop.checkpointing.fused._pallas import NAME
from eqloop.checkpointing.fused._panel_kernels import PanelLoop

from ..benchmarks._report import table
from ._hlo import Optimised

_STEPS, _INPUTS = 1000, 16
_CELLS = {"gru": eqx.nn.GRUCell, "lstm": eqx.nn.LSTMCell}
# In the guide, the table is between these.
_MARKS = "<!-- cells -->", "<!-- /cells -->"


@dataclasses.dataclass(frozen=True)
class Cell:
    """What is compiled."""

    name: str
    units: int
    dtype: str
    rows: int

    def __str__(self) -> str:
        return f"{self.name} {self.units} {self.dtype}, {self.rows} rows"

    @property
    def args(self) -> Any:
        """The types of a cell, its carry, and `xs`."""
        make, key = _CELLS[self.name], jax.random.key(0)
        cell = make(_INPUTS, self.units, key=key, dtype=jnp.dtype(self.dtype))
        of = lambda *shape: jax.ShapeDtypeStruct((self.rows, *shape), self.dtype)
        h = of(self.units)
        return cell, (h, h) if self.name == "lstm" else h, of(_STEPS, _INPUTS)


def every() -> Iterator[Cell]:
    """All cells; those of other numbers of rows after them."""
    for rows in (256, 64, 1024):
        for name in _CELLS:
            for units in (64, 128, 256, 512) if rows == 256 else (64,):
                for dtype in ("float32", "bfloat16"):
                    yield Cell(name, units, dtype, rows)


def main(match: str, page: Path | None) -> None:
    """Compiles cells for an H100, prints a line for each, and writes the table."""
    warnings.simplefilter("ignore")
    found = list[list[str]]()
    with el.planning_for("h100"):
        for cell in every():
            if fnmatch.fnmatch(str(cell), match):
                found.append([str(cell), *_told(cell)])
                print("; ".join(found[-1]), flush=True)
    if page is not None:
        heads = ["cell", "kernels", "registers", "moved", "memory", "compiled in"]
        before, rest = page.read_text().split(_MARKS[0])
        after = rest.split(_MARKS[1])[1]
        made = table(heads, [[*one, ""][: len(heads)] for one in found])
        page.write_text(f"{before}{_MARKS[0]}\n{made}\n{_MARKS[1]}{after}")


def _told(cell: Cell) -> list[str]:
    f = _gradient(el.Fused())
    (loop, *_) = el.plans(f)(*cell.args)
    said = str(getattr(loop.plan, "kernel", None))
    if not said.startswith("one each way with") or "loop" in said:
        return [said.split("in several threads, ")[-1].split("is a loop, as ")[-1]]
    with _moved() as moved:
        compiled, seconds, *here = _compiled(f, cell)
    _, _, *there = _compiled(_gradient(None), cell)
    registers = registers_of(compiled, NAME)
    assert registers is not None
    _, _, xs = cell.args
    per_step = nbytes([xs]) * 2
    return [
        f"{here[0]} ({there[0]:,})",
        f"{registers.number}, {registers.stack} B",
        f"{sum(moved.values()) / 1e6:.0f} MB ({sum(moved.values()) / per_step:.1f})",
        f"{here[1] / 2**20:.0f} MiB ({there[1] / 2**20:.0f})",
        f"{seconds:.1f} s",
    ]


def _compiled(f: Callable[..., Any], cell: Cell) -> tuple[Any, float, int, int]:
    """A program, how long that took, the kernels that it starts, and its memory."""
    before = time.process_time()
    compiled: Any = lowered(f, *cell.args).compile()
    seconds = time.process_time() - before
    count = sum(one.times for one in Optimised(compiled.as_text()).started())
    return compiled, seconds, count, compiled.memory_analysis().temp_size_in_bytes


@contextlib.contextmanager
def _moved() -> Iterator[dict[Any, int]]:
    """The bytes that kernels read and write that are made within this."""
    found, run = dict[Any, int](), PanelLoop.__call__

    def told(self: PanelLoop, inputs: Any, nests: Any, *args: Any, **more: Any) -> Any:
        found[self] = _bytes_of(self, sum(nest.levels[0] for nest in nests))
        return run(self, inputs, nests, *args, **more)

    PanelLoop.__call__ = told
    try:
        yield found
    finally:
        PanelLoop.__call__ = run


def _bytes_of(of: PanelLoop, segments: int) -> int:
    """What the kernel of a loop reads and writes, but what rows share."""
    steps, rows = of.loop.length, of.rows
    size = lambda panels: sum(of.padded(p.width) * p.dtype.itemsize for p in panels)
    carry, going = size(of.steps[-1].nexts), size(of.step.nexts)
    given = lambda step: [p for p in step.of_kind("given") if p.of not in step.carried]
    total = (size(given(of.step)) + size(of.step.outs)) * steps
    total += carry * segments + 2 * going
    if of.again is not None:
        total += size(given(of.again)) * (steps - segments) + carry * steps
    far = sum(
        (many - near) * n * 64 * 4 * 2 * steps for n, (many, near) in of.totals.items()
    )
    shared = sum(
        2 * of.padded(a) * of.padded(b) * of.parts_of(factor.matrix)
        for factor in of.factors
        for a, b in [factor.sizes]
    )
    return total * rows + (far + shared) * of.blocks


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
