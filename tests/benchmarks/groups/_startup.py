"""What a new user waits for: an import, a trace, a compilation, a plan.

All is told by the time that processors were busy, with empty caches, beside what
`lax.scan` takes in the same round. Programs are counted.
"""

import dataclasses
import functools
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import eqloop as el

from ...compiling import programs_compiled
from .. import _problems as problems
from .._loops import lax_scan, ours
from .._measure import forget, temp_bytes
from .._results import Outcome, Verdict

LENGTH, LEAVES, ROWS, CALLS = 1024, 1000, 4, 2000

STEPS: Mapping[str, Callable[[int], Any]] = {
    "tanh": lambda n: problems.tanh_rnn(n, 64),
    "GRU": problems.gru,
    "LSTM": lambda n: problems.lstm(n, 32, 1),
    "RK4": problems.pendulum,
    "40 scalars": problems.scalars,
    "transformer's layer": problems.transformer_layer,
    "arm": problems.arm,
}

Run = Callable[[], Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Startup:
    """Figures of what is done for the first time, each with its bound."""

    title: str
    figures: Callable[[int], Iterator[Verdict]]
    rounds: int = 2

    def once(self) -> "Startup":
        """All of it a single time."""
        return dataclasses.replace(self, rounds=1)

    def run(self) -> Outcome:
        """Measures all, in so many rounds."""
        verdicts = tuple(self.figures(self.rounds))
        return Outcome(self.title, None, self.rounds, 0.0, (), (), verdicts)


def planning() -> Iterator[Startup]:
    """A budget of a tenth of what `lax.scan` takes, and what follows from its plan."""
    for name, problem in STEPS.items():
        yield Startup(f"{name}: planned", functools.partial(_planned, problem))


def compiling() -> Iterator[Startup]:
    """Gradients of loops and of batches of them: traced, lowered and compiled."""
    schedules = el.Recursive(16), el.Chunked(32), el.Binomial(30)
    loops = {"`lax.scan`": lax_scan().run} | {str(s): ours(s).run for s in schedules}
    for name, problem in STEPS.items():
        for change, batch in ((problems.gradient, False), (_batch_gradient, True)):
            args = _in_rows(problem(LENGTH)) if batch else problem(LENGTH)
            runs = {
                loop: functools.partial(_compile, change(run), args)
                for loop, run in loops.items()
            }
            bounds = [
                2.0 if batch or "Bin" in loop else 1.5 for loop in list(loops)[1:]
            ]
            title = f"{name}{f', {ROWS} rows' if batch else ''}: gradient compiled"
            rounds = 1 if name == "arm" else 2  # it takes a minute
            yield Startup(title, functools.partial(_ratios, runs, bounds), rounds)


def tracing() -> Iterator[Startup]:
    """A carry of many leaves traced, and calls of what is compiled."""
    schedules = el.StoreAll(), el.Recursive(16), el.Chunked(32), el.Binomial(30)
    loops = {"`lax.scan`": lax_scan().run} | {str(s): ours(s).run for s in schedules}
    args = problems.scalars(LENGTH, LEAVES)
    for what, use in (("Value", problems.loss), ("Gradient", problems.gradient)):
        runs = {
            loop: functools.partial(lambda f: jax.jit(f).trace(*args), use(run))
            for loop, run in loops.items()
        }
        yield Startup(
            f"{what} of {LEAVES} leaves: traced",
            functools.partial(_ratios, runs, [1.5] * len(schedules)),
        )
    yield Startup("Calls under `jit`", _calls, rounds=5)


def importing() -> Iterator[Startup]:
    """In processes of their own, beside Equinox."""
    yield Startup("`import eqloop` after `import equinox`", _imported, rounds=5)


def _compile(f: Callable[..., Any], args: Any) -> jax.stages.Compiled:
    return jax.jit(f).lower(*args).compile()


def _in_rows(args: Any) -> Any:
    """The inputs of so many loops of one cell."""
    cell, *inputs = args
    return cell, *jax.tree.map(lambda x: jnp.stack([x] * ROWS), inputs)


def _batch_gradient(run: Callable[..., Any]) -> Callable[..., Any]:
    losses = jax.vmap(problems.loss(run), (None, 0, 0))
    return jax.grad(lambda *args: jnp.sum(losses(*args)), (0, 1, 2))


def _busy(run: Run) -> float:
    """Seconds of all processors."""
    start = time.process_time()
    run()
    return time.process_time() - start


def _in_turn(runs: Sequence[Run], rounds: int) -> list[list[float]]:
    """How long each takes with empty caches, in each round."""
    seconds: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for run, found in zip(runs, seconds, strict=True):
            forget()
            found.append(_busy(run))
    return seconds


def _verdict(text: str, figures: Any, at_most: float, unit: str) -> Verdict:
    low, median, high = np.quantile(figures, [0.25, 0.5, 0.75]).tolist()
    return Verdict(text, median, at_most, unit, (low, high))


def _beside(name: str, plain: list[float], own: list[float]) -> str:
    of = [f"{np.median(seconds):.2f} s" for seconds in (own, plain)]
    return f"{name}: {of[0]}, `lax.scan` {of[1]}"


def _ratios(
    runs: Mapping[str, Run], bounds: Sequence[float], rounds: int
) -> Iterator[Verdict]:
    """How often the time of the first run the others take."""
    plain, *others = _in_turn(list(runs.values()), rounds)
    for name, own, at_most in zip(list(runs)[1:], others, bounds, strict=True):
        ratios = np.divide(own, plain)
        yield _verdict(_beside(name, plain, own), ratios, at_most, "x")


def _planned(problem: Callable[[int], Any], rounds: int) -> Iterator[Verdict]:
    """The seconds of a first plan, and the programs of it and of those that follow."""
    args, twice = problem(LENGTH), problem(2 * LENGTH)
    batch = _in_rows(args)
    gradient = problems.gradient(lax_scan().run)
    nbytes = temp_bytes(_compile(gradient, args)) // 10

    def plan(args: Any, nbytes: int) -> el.Plan:
        cell, init, xs = args
        return el.Scan(cell, schedule=el.Budget(nbytes)).plan(init, xs)

    def of_batch() -> Any:
        return el.plans(_batch_gradient(ours(el.Budget(ROWS * nbytes)).run))(*batch)

    first = functools.partial(plan, args, nbytes)
    plain, own = _in_turn([lambda: _compile(gradient, args), first], rounds)
    more = np.subtract(own, np.multiply(2, plain))
    yield _verdict(f"{_beside('`Budget`', plain, own)}; over twice that", more, 1, " s")
    forget()
    for text, run, at_most in (
        ("the plan", first, 3),
        ("a tenth less", lambda: plan(args, nbytes * 9 // 10), 0),
        ("twice the length and bytes", lambda: plan(twice, 2 * nbytes), 0),
        (f"{ROWS} rows", of_batch, 0),
    ):
        before = programs_compiled()
        run()
        yield Verdict(text, programs_compiled() - before, at_most, " programs")


def _calls(rounds: int) -> Iterator[Verdict]:
    """Microseconds of a call beyond one of `lax.scan`, of loops of next to no work."""
    xs = jnp.ones((2, 1))
    step = lambda h, x: (h + x, None)
    scan, rows = el.CheckpointedScan(step, 16), el.ChunkedVmap(jnp.sin, 1)
    loop = el.WhileLoop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] + 1))
    runs = {
        "`lax.scan`": lambda xs: lax.scan(step, xs[0], xs)[0],
        "CheckpointedScan": lambda xs: scan(xs[0], xs)[0],
        "ChunkedVmap": rows,
        "WhileLoop": lambda xs: loop((jnp.zeros((), int), xs))[1],
    }
    calls: list[list[float]] = [[] for _ in runs]
    programs = [jax.jit(run) for run in runs.values()]
    for program in programs * rounds:
        program(xs)
        many = _busy(lambda program=program: [program(xs) for _ in range(CALLS)])
        calls[programs.index(program)].append(1e6 * many / CALLS)
    for name, own in zip(list(runs)[1:], calls[1:], strict=True):
        text = f"{name}: {np.median(own):.0f} us, `lax.scan` {np.median(calls[0]):.0f}"
        yield _verdict(f"{text}; more", np.subtract(own, calls[0]), 6, " us")


def _imported(rounds: int) -> Iterator[Verdict]:
    code = """if True:
        import time, equinox
        start = time.process_time()
        import eqloop
        {}
        print(time.process_time() - start)"""
    for text, more in (("alone", ""), ("and `el.Scan`", "eqloop.Scan")):
        command = [sys.executable, "-c", code.format(more)]
        run = lambda: float(subprocess.check_output(command))  # noqa: B023
        run()  # writes the compiled modules, where there are none yet
        yield _verdict(text, [run() for _ in range(rounds)], 0.3, " s")
