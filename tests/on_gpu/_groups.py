"""What is measured: groups, the most important first, of units.

The programs of a unit are run in turn, so that they can be compared. Arrays are made
by `make`, so that a program can be compiled from their types alone.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
from jax.experimental import rnn

import eqloop as el

from ..benchmarks import _loops as loops
from ..benchmarks import _problems as problems
from ..benchmarks.groups._regret import fixed_schedules
from . import _gpt2 as gpt2


@dataclasses.dataclass(frozen=True)
class Program:
    """A way to compute what a unit computes.

    Attributes:
        name: What it is called in the unit.
        make: The function, of what the unit makes. It is given the bytes that the first
            program of the unit takes, of which budgets are shares.
        is_planned: Whether its loops have plans.
        is_measured: Whether these are made from times, for which there must be quiet.
    """

    name: str
    make: Callable[[int], Callable[..., Any]]
    is_planned: bool = False
    is_measured: bool = False


@dataclasses.dataclass(frozen=True)
class Unit:
    """Programs that are run in turn.

    Attributes:
        step: What they have in common.
        make: Makes their arguments.
        programs: The programs. The others are compared with the first.
    """

    step: str
    make: Callable[[], tuple[Any, ...]]
    programs: tuple[Program, ...]


# In place of a size of a problem: itself, or a tiny one.
Size = Callable[[int], int]


@dataclasses.dataclass(frozen=True)
class Group:
    """Units that answer one question.

    Attributes:
        title: What it is called on the page.
        about: What was done, for the page.
        minutes: How many of nine minutes it may measure before others have measured.
        units: Makes the units, given their sizes.
    """

    title: str
    about: str
    minutes: float
    units: Callable[[Size], Iterator[Unit]]


def as_it_is(size: int) -> int:
    """The sizes that are measured."""
    return size


def tiny(size: int) -> int:
    """Sizes with which everything takes no time."""
    return max(size // 16, 8)


@dataclasses.dataclass(frozen=True)
class _Problem:
    """A loop: over a row, or over many under `vmap`.

    Attributes:
        make: The cell, the initial carry and `xs`.
        axes: Where each of them has the axis of the rows, if there are several.
    """

    make: Callable[[], Any]
    axes: tuple[int | None, ...] | None = None

    def gradient(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """The gradient in all inputs, of the sum over rows."""
        loss = problems.loss(run)
        if self.axes is not None:
            of_rows = jax.vmap(loss, self.axes)
            loss = lambda *args: jnp.sum(of_rows(*args))
        return jax.grad(loss, (0, 1, 2))


def _over_rows(make: Callable[[], Any], rows: int, has_own_xs: bool = True) -> _Problem:
    """A problem for so many rows: each has an initial carry, and `xs` or the same."""

    def of_all() -> Any:
        cell, init, xs = make()
        noise = lambda key, shape: 0.1 * jr.normal(jr.key(key), shape)
        init = jax.tree.map(lambda x: x + noise(0, (rows, *x.shape)), init)
        if has_own_xs:
            xs = xs[:, None] + noise(1, (xs.shape[0], rows, *xs.shape[1:]))
        return cell, init, xs

    return _Problem(of_all, (None, 0, 1 if has_own_xs else None))


def _problems(size: Size) -> Mapping[str, _Problem]:
    """The steps of which gradients are taken: small and large, one row and many."""
    of = functools.partial
    length, many, layers = size(1000), size(65_536), max(size(48), 8)
    return {
        "GRU, 192 x 24": _over_rows(of(problems.gru, length, size(192)), size(24)),
        "LSTM, 512 x 256": _Problem(of(problems.lstm, length, size(512), size(256))),
        "tanh, 768 x 96": _over_rows(
            of(problems.tanh_rnn, length, size(768)), size(96)
        ),
        "light recurrent step, 64": _Problem(of(problems.recurrent, 2 * length)),
        "Lorenz, 65,536 rows": _over_rows(
            of(problems.lorenz, length), many, has_own_xs=False
        ),
        "spiking neurons, 65,536 rows": _over_rows(of(problems.spiking, length), many),
        "wave, 256 x 256": _Problem(of(problems.wave, length, size(256))),
        "attention, 48 layers": _Problem(
            of(problems.attention, layers, size(1024), size(512))
        ),
    }


def _as_loop(loop: loops.Loop, problem: _Problem) -> Program:
    return Program(loop.name, lambda _: problem.gradient(loop.run))


def _scheduled(
    problem: _Problem, schedule: el.AbstractSchedule, name: str = ""
) -> Program:
    loop = loops.ours(schedule)
    gradient = problem.gradient(loop.run)
    return Program(name or loop.name, lambda _: gradient, is_planned=True)


def _budget(problem: _Problem, share: float, measure: bool) -> Program:
    """A budget of a share of what `lax.scan` takes."""

    def make(whole: int) -> Callable[..., Any]:
        schedule = el.Budget(max(int(share * whole), 1), measure=measure)
        return problem.gradient(loops.ours(schedule).run)

    how = "measured" if measure else "by the roofline"
    return Program(f"Budget of {share:g}, {how}", make, True, measure)


def times(size: Size) -> Iterator[Unit]:
    """Gradients by plain JAX, and by schedules."""
    for step, problem in _problems(size).items():
        yield Unit(
            step,
            problem.make,
            (
                _as_loop(loops.lax_scan(), problem),
                _as_loop(loops.lax_scan_of_remat(), problem),
                _scheduled(problem, el.Recursive(16)),
                _scheduled(problem, el.Chunked(1, batch=32), "Chunked(1, batch=32)"),
                _scheduled(problem, el.Binomial(30)),
            ),
        )


def budgets(size: Size) -> Iterator[Unit]:
    """Gradients within a quarter of what `lax.scan` takes."""
    for step, problem in _problems(size).items():
        both = (_budget(problem, 0.25, measure) for measure in (False, True))
        yield Unit(step, problem.make, (_as_loop(loops.lax_scan(), problem), *both))


def regret(size: Size) -> Iterator[Unit]:
    """Budgets, and all that fits into them."""
    every = _problems(size)
    for step in ("GRU, 192 x 24", "wave, 256 x 256", "LSTM, 512 x 256"):
        problem, length = every[step], size(1000)
        fixed = [_scheduled(problem, one) for one in fixed_schedules(length)]
        within = [
            _budget(problem, share, measure)
            for measure in (False, True)
            for share in (0.5, 0.15, 0.05)
        ]
        plain = _as_loop(loops.lax_scan(), problem)
        checkpointed = _as_loop(loops.lax_scan_of_remat(), problem)
        yield Unit(step, problem.make, (plain, checkpointed, *fixed, *within))


def offload(size: Size) -> Iterator[Unit]:
    """Schedules with slots here and on the host, and copies alone."""
    numbers = lambda: (jnp.ones((size(1024), size(1024), size(256))),)
    yield Unit(
        "copies", numbers, (Program("there and back", lambda _: _there_and_back),)
    )
    every = _problems(size)
    for step in ("LSTM, 512 x 256", "wave, 256 x 256"):
        problem = every[step]
        schedules: dict[str, el.AbstractSchedule] = {
            "Chunked(1)": el.Chunked(1),
            "Chunked(8)": el.Chunked(8),
            "Recursive(16)": el.Recursive(16),
            "Binomial(30)": el.Binomial(30),
            "Cast(Chunked(1))": el.Cast(el.Chunked(1), jnp.bfloat16),
        }
        here = [_scheduled(problem, one, name) for name, one in schedules.items()]
        there = [
            _scheduled(problem, el.Offload(one), f"Offload({name})")
            for name, one in schedules.items()
        ]
        yield Unit(step, problem.make, (*here, *there))


def _there_and_back(numbers: jax.Array) -> jax.Array:
    """A copy to the host, and one back when it is there."""
    there = jax.device_put(2 * numbers, jax.memory.Space.Host)
    there = jax.lax.optimization_barrier(there)
    return jax.device_put(there, jax.memory.Space.Device)


def fit(size: Size) -> Iterator[Unit]:
    """A whole function with one budget."""
    sizes = gpt2.sizes(size)
    model = gpt2.gpt2(sizes)

    def gradient(name: str, loss: Callable[..., Any]) -> Program:
        return Program(name, lambda _: jax.value_and_grad(loss))

    # It measures as well, but takes a minute to plan: others would wait too long.
    def fitted(share: float) -> Program:
        def make(whole: int) -> Callable[..., Any]:
            nbytes = max(int(share * whole), 1)
            return jax.value_and_grad(el.Fit(model.plain, nbytes, foreign=True))

        return Program(f"Fit of {share:g}", make)

    yield Unit(
        "GPT-2 small, 8 x 1,024",
        lambda: gpt2.inputs(sizes),
        (
            gradient("plain JAX", model.plain),
            gradient("`jax.checkpoint` on each block", model.by_parts),
            fitted(0.5),
            fitted(0.25),
        ),
    )


def kernels(size: Size) -> Iterator[Unit]:
    """Gradients of loops as one kernel each way, by XLA's kernels, and by cuDNN's."""
    of, length, rows = functools.partial, size(1000), max(size(256), 64)
    make_gru = of(problems.gru, length, size(64))
    wide = of(_narrowed, of(problems.gru, length, size(256)))
    lstm = lambda units: _Problem(of(problems.lstm, length, size(units), rows))
    every = {
        "GRU of 64 units, 256 rows": _over_rows(make_gru, rows),
        "LSTM of 64 units, 256 rows": lstm(64),
        "LSTM of 128 units, 256 rows": lstm(128),
        "GRU of 256 units, 256 rows, bfloat16": _over_rows(wide, rows),
    }
    others = "Lorenz, 65,536 rows", "spiking neurons, 65,536 rows"
    every.update((step, _problems(size)[step]) for step in others)
    for step, problem in every.items():
        loops_of = [loops.lax_scan(), loops.lax_scan_of_remat()]
        programs = [_as_loop(loop, problem) for loop in loops_of]
        programs.append(_scheduled(problem, el.Fused(), "Fused()"))
        if "LSTM" in step:
            by_hand = problem.gradient(_by_cudnn)
            programs.append(Program("cuDNN", lambda _, by_hand=by_hand: by_hand))
        yield Unit(step, problem.make, tuple(programs))


def _narrowed(make: Callable[[], Any]) -> Any:
    """A problem in bfloat16."""
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), make())


def _by_cudnn(lstm: problems.Lstm, init: Any, xs: jax.Array) -> tuple[Any, None]:
    """The last carry of a batch of LSTMs, by the kernels of a library."""
    length, rows, width = xs.shape
    of, (h, c) = lstm.cell, init
    leaves = of.weight_ih, of.weight_hh, of.bias, jnp.zeros_like(of.bias)
    weights = jnp.concatenate([leaf.ravel() for leaf in leaves])
    lengths, sizes = jnp.full(rows, length, jnp.int32), (width, of.hidden_size, 1)
    along = jnp.swapaxes(xs, 0, 1), h[None], c[None], weights, lengths
    _, h, c = rnn.lstm(*along, *sizes, 0.0, False)
    return (h[0], c[0]), None


# A group that is new has its line here, where its importance puts it.
GROUPS: Mapping[str, Group] = {
    "kernels": Group(
        "One kernel each way",
        "`Fused()`, beside loops of which XLA starts kernels for each step, and the "
        "LSTM of cuDNN, which stores all. In float32, kernels of cells multiply by "
        "numbers of 16 bits, and XLA by TF32, of 11.",
        2.0,
        kernels,
    ),
    "times": Group(
        "Times of gradients",
        "Gradients in all inputs, of 1,000 steps (2,000 of the light one). "
        "`Recursive(16)` is what `CheckpointedScan` does by default.",
        3.0,
        times,
    ),
    "budgets": Group(
        "A quarter of the memory",
        "`Budget` with a quarter of the memory that `lax.scan` takes: planned by the "
        "roofline, and by times that were measured.",
        2.0,
        budgets,
    ),
    "regret": Group(
        "Budgets and the fastest plan that fits",
        "`Budget` with shares of the memory that `lax.scan` takes, over the fastest of "
        "all others that take no more than the budget.",
        1.5,
        regret,
    ),
    "offload": Group(
        "Slots on the host",
        "The same schedules with slots on the device and on its host, and a copy there "
        "and back by itself. If more bytes are moved in the time that is added than a "
        "copy by itself moves, copies run beside steps.",
        1.0,
        offload,
    ),
    "fit": Group(
        "A whole function with one budget",
        "The gradient of GPT-2 small with shares of the memory that it takes.",
        1.5,
        fit,
    ),
}
