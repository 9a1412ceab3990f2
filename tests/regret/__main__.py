"""`python -m tests.regret`: see `tests/regret/__init__.py`."""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

import eqloop as el

from ..benchmarks import _loops as loops
from ..benchmarks import _problems as problems
from ..benchmarks.groups._regret import by_hand, fixed_schedules

# Of the memory that storing everything takes.
_PARTS = (0.5, 0.15, 0.03)
# A gradient takes about so long at the least and at the most, in seconds.
_SECONDS = (2e-3, 0.1)
_ROUNDS, _ROUNDS_OF_TWO = 5, 15
_MOST_BYTES, _SMALL = 2**29, 2**11


class Program(NamedTuple):
    """A compiled gradient, with its arguments and its memory."""

    name: str
    run: Callable[..., Any]
    args: tuple[Any, ...]
    nbytes: int

    def seconds(self) -> float:
        start = time.perf_counter()
        jax.block_until_ready(self.run(*self.args))
        return time.perf_counter() - start


def random_loop(seed: int) -> tuple[str, Callable[[int], Any]]:
    """A kind of step with its sizes, and what makes the loop of so many steps."""
    of = random.Random(seed)
    width, batch = of.choice((8, 24, 64, 96, 160, 256, 448)), of.choice((1, 4, 8, 24))
    size, channels = of.choice((16, 24, 48, 96)), of.choice((4, 8, 16))
    kinds: dict[str, Callable[[int], Any]] = {
        f"GRU of {width}": lambda n: problems.gru(n, width),
        f"{batch} LSTMs of {width}": lambda n: problems.lstm(n, width, batch),
        f"tanh of {width}": lambda n: problems.tanh_rnn(n, width),
        f"tanh W tanh of {width}": lambda n: problems.recurrent(n, width),
        f"wave on {size} x {size}": lambda n: problems.wave(n, size),
        "Lorenz": problems.lorenz,
        "spiking": problems.spiking,
        f"RK4, a field of {width}": lambda n: problems.pendulum(n, width),
        f"five sweeps of {width}": lambda n: problems.relaxation(n, width),
        f"convolutions, {channels} channels on {size} x {size}": lambda n: (
            problems.convolutions(n, size, channels)
        ),
        f"convolutional GRU of {channels}": lambda n: problems.conv_gru(n, channels),
        f"attention of {size} tokens of {width}": lambda n: problems.attention(
            n, size, width
        ),
        f"there and back, {width}": lambda n: problems.there_and_back(n, width),
    }
    return of.choice(list(kinds.items()))


def regrets(seed: int) -> list[tuple[float, str]]:
    """For each budget, its time over the best other plan's, and what these are."""
    name, make = random_loop(seed)
    plain, of = loops.lax_scan(), random.Random(seed)
    # A length of which the gradient takes a while. Calling a short loop takes longer
    # than running it, so it is found in two turns.
    enough, length = _SECONDS[0] * (_SECONDS[1] / _SECONDS[0]) ** of.random(), 64
    for _ in range(2):
        short = _compiled(plain, make(length))
        longer = enough / min(short.seconds() for _ in range(3))
        most = _MOST_BYTES / max(short.nbytes, 1)
        length = round(min(max(length * min(longer, most), 32), 2**16))
    args, cell = make(length), make(length)[0]
    whole = el.Scan(cell).plan(*args[1:]).peak_bytes
    every = el.Scan(cell, schedule=el.Recursive()).frontier(*args[1:])
    least = min(plan.peak_bytes for plan in every)
    sizes = list(dict.fromkeys(max(round(p * whole), least) for p in _PARTS))
    others = [plain, *by_hand(length), *map(loops.ours, fixed_schedules(length))]
    programs = [_compiled(one, args) for one in others]
    budgets = [_compiled(loops.ours(el.Budget(n)), args) for n in sizes]
    times = _times([*programs, *budgets], _ROUNDS)
    found = list[tuple[float, str]]()
    for nbytes, budget in zip(sizes, budgets, strict=True):
        # Plans allow for small buffers, which are much of very little memory alone.
        fitting = [one for one in programs if one.nbytes + _SMALL <= nbytes]
        if not fitting:
            continue
        best = min(fitting, key=lambda one: times[one.name])
        two = _times([budget, best], _ROUNDS_OF_TWO)
        ratio = two[budget.name] / two[best.name]
        about = f"{name}, {length} steps, {nbytes} bytes: {best.name} of {best.nbytes}"
        found.append((ratio, f"{about}, and {budget.nbytes} in {two[budget.name]:.4f}"))
    return found


def _compiled(loop: loops.Loop, args: tuple[Any, ...]) -> Program:
    run = jax.jit(problems.gradient(loop.run)).lower(*args).compile()
    memory: Any = run.memory_analysis()
    program = Program(loop.name, run, args, memory.temp_size_in_bytes)
    program.seconds()
    return program


def _times(programs: Sequence[Program], rounds: int) -> dict[str, float]:
    taken = [[one.seconds() for one in programs] for _ in range(rounds)]
    medians = map(statistics.median, zip(*taken, strict=True))
    return dict(zip((one.name for one in programs), medians, strict=True))


def main() -> None:
    """Prints the regret of each budget, and the worst and the median of all."""
    known = argparse.ArgumentParser(prog="python -m tests.regret")
    known.add_argument("--random", type=int, default=10, help="how many loops")
    known.add_argument("--from", type=int, default=0, dest="start", help="first seed")
    options = known.parse_args()
    every = list[tuple[float, str]]()
    for seed in range(options.start, options.start + options.random):
        for ratio, about in regrets(seed):
            every.append((ratio, about))
            print(f"{ratio:5.2f}  {seed}: {about}", flush=True)
        jax.clear_caches()
    ratios = [ratio for ratio, _ in every]
    print(f"{len(every)} budgets, median {statistics.median(ratios):.2f}, the worst:")
    for ratio, about in sorted(every, reverse=True)[:5]:
        print(f"{ratio:5.2f}  {about}")


if __name__ == "__main__":
    main()
