"""What the process of a unit does: compiles its programs, and runs them in turn."""

import collections
import contextlib
import dataclasses
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import equinox as eqx
import jax

import eqloop as el
from eqloop._device import planning_device
from eqloop._programs import lowered
from eqloop.checkpointing.engine._costs import Rates
from eqloop.checkpointing.planning._roofline import roofline
from eqloop.checkpointing.planning._work import rates

from ..benchmarks._machine import environment
from ..benchmarks._measure import relative_error
from ..targets._hlo import Optimised
from ._groups import GROUPS, Size, Unit
from ._processes import GO, READY, NotDone, Task
from ._rows import Row, today
from ._turns import Made, in_short, run_in_turn

# How many programs of a unit are compiled side by side.
_THREADS = 2

# Parts of the roofline, and the rates that they are proportional to.
_PARTS = {
    "starts": ("equation", "iteration"),
    "bytes": ("byte", "cached_byte", "entry", "costly_entry"),
    "products": ("flop",),
}


@dataclasses.dataclass(frozen=True)
class Mode:
    """How units are run.

    Attributes:
        platform: That of the device, which must be there.
        size: The sizes of the problems.
        target: The name of a device that is not here: programs are only compiled.
    """

    platform: str
    size: Size
    target: str | None = None


def work(mode: Mode, task: Task, pipe: Any) -> None:
    """Prepares a unit, waits for its turn, and measures it; sends its rows.

    What goes wrong with a program is in its row. Only what concerns the whole unit is
    sent as a `NotDone`.
    """
    try:
        with el.planning_for(mode.target) if mode.target else contextlib.nullcontext():
            _work(mode, task, pipe)
    except Exception as error:
        traceback.print_exc()
        pipe.send(NotDone(in_short(error)))


def _work(mode: Mode, task: Task, pipe: Any) -> None:
    if planning_device().platform != mode.platform:
        found = planning_device().kind
        raise RuntimeError(f"JAX has no {mode.platform} here, but a {found}")
    units = GROUPS[task.group].units(mode.size)
    unit = next(one for one in units if one.step == task.step)
    types = eqx.filter_eval_shape(unit.make)
    bench = _Bench(unit, types, _about(task))
    for made in bench.prepared(is_dry=mode.target is not None):
        pipe.send(made.row)
    if mode.target:
        return
    # The processor makes the arrays, in little time and without room on the device.
    with jax.default_device(jax.devices("cpu")[0]):
        values = jax.block_until_ready(eqx.filter_jit(unit.make)())
    pipe.send(READY)
    if pipe.recv() == GO:
        for made in bench.measured(values):
            pipe.send(made.row)


def _about(task: Task) -> Row:
    """A row that knows where and when it is."""
    where = environment()
    packages = [f"{name} {version}" for name, version in where.packages.items()]
    versions = [f"Python {where.python}", *packages, f"commit {where.commit}"]
    return Row(
        device=planning_device().kind,
        group=task.group,
        step=task.step,
        name="",
        versions=", ".join(versions),
        machine=where.machine,
        flags=os.environ.get("XLA_FLAGS", ""),
        date=today(),
    )


class _Bench:
    """The programs of a unit.

    Args:
        unit: The unit.
        types: Its arguments, with types in place of arrays.
        about: The row that those of all programs begin as.
    """

    def __init__(self, unit: Unit, types: Any, about: Row):
        is_type = lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)
        arrays, self._others = eqx.partition(types, is_type)
        self._types, self._tree = jax.tree.flatten(arrays)
        self._difference: Any = None
        # Threads are told, as they do not know what is planned for.
        self._rates = rates()
        self._made = [
            Made(program, dataclasses.replace(about, name=program.name))
            for program in unit.programs
        ]

    def prepared(self, is_dry: bool) -> Iterator[Made]:
        """Compiles all programs, but for those that are planned in quiet."""
        first, *others = self._made
        program_first = self._lowered(first)
        yield self._compile(first, program_first)
        with ThreadPoolExecutor(_THREADS) as pool:
            coming = collections.deque[Future[Made]]()
            for made in others:
                program = self._lowered(made)
                if made.program.is_measured and not is_dry:
                    self._rehearse(made, program)
                else:
                    coming.append(pool.submit(self._compile, made, program))
                while coming and coming[0].done():
                    yield coming.popleft().result()
            if program_first is not None and not is_dry:
                results = jax.tree.map(_type_of, program_first.out_info)
                difference = lowered(relative_error, results, results)
                self._difference = difference.compile()
            yield from (one.result() for one in coming)

    def measured(self, values: Any) -> Iterator[Made]:
        """Runs all programs in turn. Nothing else runs meanwhile."""
        with tempfile.TemporaryDirectory() as folder:
            # What was found out when there was no quiet does not count.
            el.measurements(Path(folder) / "times.json")
            for made in self._made:
                if made.program.is_measured:
                    self._compile(made, self._lowered(made))
                    yield made
            el.measurements(None)
        flat = jax.tree.leaves(eqx.filter(values, eqx.is_array))
        yield from run_in_turn(self._made, flat, self._compare)

    def _compare(self, result: Any, first: Any) -> float:
        """How far a result is from that of the first program."""
        return float(self._difference(*jax.tree.leaves((result, first))))

    def _function(self, made: Made) -> Callable[..., Any]:
        whole = self._made[0].row.temp or 0
        function = made.program.make(whole)

        def flat(*leaves: Any) -> Any:
            return function(*eqx.combine(self._tree.unflatten(leaves), self._others))

        return flat

    def _lowered(self, made: Made) -> Any:
        """A program to compile, with its plans; `None` if there is none."""
        start = time.perf_counter()
        try:
            function = self._function(made)
            program = lowered(function, *self._types)
            seconds = time.perf_counter() - start
            plans = []
            if made.program.is_planned:
                plans = [one.plan for one in el.plans(function)(*self._types)]
        except Exception as error:
            made.row = dataclasses.replace(made.row, wrong=in_short(error))
            return None
        made.row = dataclasses.replace(
            made.row,
            plan_seconds=seconds,
            planned=sum(plan.peak_bytes for plan in plans) or None,
            evaluations=sum(plan.evaluations for plan in plans) or None,
            wrong=None,
        )
        return program

    def _compile(self, made: Made, program: Any) -> Made:
        if program is None:
            return made
        start = time.perf_counter()
        try:
            made.compiled = program.compile()
            made.row = dataclasses.replace(
                made.row,
                compile_seconds=time.perf_counter() - start,
                **_of_program(made.compiled, self._rates),
            )
        except Exception as error:
            made.row = dataclasses.replace(made.row, wrong=in_short(error))
        return made

    def _rehearse(self, made: Made, program: Any) -> None:
        """Has JAX's cache know most of what is compiled once there is quiet."""
        if program is not None and jax.config.jax_compilation_cache_dir:
            # If it fails, it will fail again.
            with contextlib.suppress(Exception):
                program.compile()


def _type_of(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _of_program(compiled: Any, rate: Rates) -> dict[str, Any]:
    """What is read from a program: bytes, kernels, and the time to be expected."""
    memory, text = compiled.memory_analysis(), compiled.as_text()
    program = Optimised(text)
    found = {
        "temp": memory.temp_size_in_bytes,
        "host": memory.host_temp_size_in_bytes,
    }
    if any(loop.trips is None for loop in program.loops()):
        return found
    whole, foreseen = roofline(text, rate), dict[str, float]()
    for part, names in _PARTS.items():
        # It is linear in the rates that decide, and so a sum of these parts.
        more = {name: 1.01 * getattr(rate, name) for name in names}
        longer = roofline(text, dataclasses.replace(rate, **more))
        foreseen[part] = round((longer - whole) / 0.01) / 1e9
    kernels = sum(one.times for one in program.started())
    return {**found, "kernels": kernels, "foreseen": foreseen}
