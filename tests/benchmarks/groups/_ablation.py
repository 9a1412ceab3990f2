"""What each special case of the package gains: programs with it, and without it."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr

import eqloop as el

from .._claims import time_ratio
from .._comparison import Comparison
from .._measure import Case, forget_programs, is_installed
from .._problems import (
    conv_lstm,
    diffusion,
    gradient,
    gru,
    lstm,
    pendulum,
    tanh_rnn,
    there_and_back,
    wave,
)
from .._special_cases import AS_IT_IS, SPECIAL_CASES, SpecialCase
from ._diffrax import OURS
from ._diffrax import gradient_of as gradient_of_solve
from ._diffrax import kinds as solves

# What storing everything takes, by these factors, or the least that is feasible.
_PARTS = (0.5, 0.1, 0.015)
_ROUNDS = 9
# On a CPU, the time that its cores are busy with the program: what else they do is not
# counted, and neither is that several of them may share the work.
_CLOCKS = {"cpu": time.process_time}
# Of those that a step of a kind can have to do with, most change no program of others.
_OF_LOOPS = ("products kept per batch", "products in parts")
_OF_BUFFERS = ("rows once", "in-place writes")
_OF_STAGES = (
    "short loops",
    "later steps",
    "short sums",
    "in-place writes",
    "masked writes",
    "rows once",
)


@dataclasses.dataclass(frozen=True, eq=False)
class _Program:
    """A program that special cases may change.

    Attributes:
        title: What it computes.
        fn: The program.
        args: Its arguments.
        what: The names of these special cases.
        plan: Makes its plan, if it has one.
    """

    title: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    what: Sequence[str]
    plan: Callable[[], el.Plan] | None = None

    @property
    def text(self) -> str:
        """The program before XLA compiles it."""
        forget_programs()
        # JAX remembers a program by its function, so it is given a new one.
        again = functools.partial(self.fn)
        return jax.jit(again).lower(*self.args).as_text()

    def case(self, without: SpecialCase | None = None) -> Case:
        """The program as it is, or without a special case."""
        name = AS_IT_IS if without is None else f"without {without.name}"
        case = Case(name, self.fn, self.args, plan=self.plan, on_h100=True)
        return case if without is None else dataclasses.replace(case, under=without.off)

    @property
    def requires(self) -> str | None:
        """The package that it lacks where that is not installed."""
        return "diffrax" if self.what == _OF_STAGES else None


class _Decided(el.AbstractSchedule):
    """A schedule that decides once, so that programs differ in one thing only."""

    __eq__, __hash__ = object.__eq__, object.__hash__

    def __init__(self, schedule: el.AbstractSchedule):
        self._schedule, self.layouts = schedule, list[Any]()

    def layout(self, loop: el.LoopSpec) -> Any:
        if not self.layouts:
            self.layouts.append(self._schedule.layout(loop))
        return self.layouts[0]


def ablation() -> Iterator[Comparison]:
    """One comparison for each program that a special case changes."""
    for title, args in _problems().items():
        yield from _of_loop(title, args)
    for program in (*_with_buffers(), *_with_stages(), *_with_images()):
        yield from _compared(program)


def _problems() -> dict[str, tuple[Any, ...]]:
    return {
        "tanh RNN of width 512, 1000 steps": tanh_rnn(1000, 512),
        "GRU of width 128, 1000 steps": gru(1000, 128),
        "4 LSTMs of width 512, 200 steps": lstm(200, 512, 4),
        "wave equation on 32 x 32, 1024 steps": wave(1024, 32),
        "neural ODE by Runge and Kutta, 1024 steps": pendulum(1024),
    }


def _of_loop(title: str, args: tuple[Any, ...]) -> Iterator[Comparison]:
    """A loop under several schedules, and within several budgets."""
    cell, init, xs = args
    length = len(xs)
    root = math.isqrt(length)
    whole = el.Scan(cell).plan(init, xs).peak_bytes
    every = el.Scan(cell, schedule=el.Recursive()).frontier(init, xs)
    least = min(plan.peak_bytes for plan in every)
    sizes = dict.fromkeys(max(round(part * whole), least) for part in _PARTS)
    for schedule in (
        el.Recursive(16),
        el.Chunked(length, batch=32),
        el.Chunked(root, batch=32),
        *map(el.Budget, sizes),
    ):
        yield from _of_schedule(f"{title}: {schedule!r}", schedule, args)


def _of_schedule(
    title: str, schedule: el.AbstractSchedule, args: tuple[Any, ...]
) -> Iterator[Comparison]:
    cell, init, xs = args

    def program(decided: _Decided) -> _Program:
        scan = lambda f, init, xs: el.Scan(f, schedule=decided)(init, xs)
        plan = lambda: el.Scan(cell, schedule=decided).plan(init, xs)
        plan()  # decides
        return _Program(title, gradient(scan), args, _OF_LOOPS, plan)

    own = _Decided(schedule)
    as_it_is = program(own)
    others = list[Case]()
    for special in SPECIAL_CASES:
        chosen_in = special.chosen_in
        if chosen_in is None or not chosen_in(schedule, own.layouts[0]):
            continue
        without = _Decided(schedule)
        with special.off():
            case = program(without).case()
        if without.layouts != own.layouts:
            others.append(dataclasses.replace(case, name=f"without {special.name}"))
    yield from _compared(as_it_is, others)


def _compared(program: _Program, others: Sequence[Case] = ()) -> Iterator[Comparison]:
    """A program beside those without a special case that differ from it."""
    if not is_installed(program.requires):
        return
    text, changed = program.text, list[Case]()
    for special in SPECIAL_CASES:
        if special.name in program.what:
            with special.off():
                if program.text != text:
                    changed.append(program.case(special))
    if cases := [*others, *changed]:
        yield Comparison(
            program.title,
            [program.case(), *cases],
            [time_ratio(AS_IT_IS, case.name, 1.05) for case in cases],
            # Equations of chaos are among them.
            tolerance=1e-2,
            rounds=_ROUNDS,
            clock=_CLOCKS.get(jax.default_backend(), time.perf_counter),
        )


def _with_buffers() -> Iterator[_Program]:
    """Loops whose carry has a buffer, of which each step writes a row."""
    for steps, width, lag in ((1000, 64, 0), (1000, 64, 20)):
        history = f"a delay of {lag} steps" if lag else "rows that are not read"
        for schedule in (el.Binomial(20), el.Recursive(16)):
            yield _Program(
                f"{steps} steps of width {width}, {history}: {schedule!r}",
                jax.grad(functools.partial(_history, schedule, lag), (0, 1)),
                (0.9 * jr.orthogonal(jr.key(0), width), jnp.ones((steps, width))),
                _OF_BUFFERS,
            )


def _history(
    schedule: el.AbstractSchedule, lag: int, weight: jax.Array, xs: jax.Array
) -> jax.Array:
    """A state that depends on an earlier one, found in the buffer of all of them."""
    steps, width = xs.shape

    def step(carry: Any, x: jax.Array) -> Any:
        h, rows, i = carry
        before = rows[jnp.maximum(i - lag, 0)] if lag else h
        h = jnp.tanh(weight @ h + 0.1 * before + 0.1 * x)
        return (h, rows.at[i].set(h), i + 1), None

    init = jnp.ones(width), jnp.zeros((steps, width)), 0
    (_, rows, _), _ = el.Scan(step, schedule=schedule)(init, xs)
    return jnp.sum(rows**2)


def _with_images() -> Iterator[_Program]:
    """Loops of convolutions, and of products with a transposed matrix."""
    for title, args in (
        ("convolutional LSTM, 30 steps", conv_lstm(30)),
        ("diffusion on 32 x 32, 50 steps", diffusion(50, (32, 32))),
        ("tanh(W.T W h + x), 100 steps of width 384", there_and_back(100, 384)),
    ):
        for schedule in (el.StoreAll(), el.Recursive(8)):
            scan = functools.partial(_scanned, schedule)
            what = ("layouts of a CPU",)
            yield _Program(f"{title}: {schedule!r}", gradient(scan), args, what)


def _scanned(schedule: el.AbstractSchedule, f: Any, init: Any, xs: Any) -> Any:
    return el.Scan(f, schedule=schedule)(init, xs)


def _with_stages() -> Iterator[_Program]:
    """Solves by Diffrax, and a batch of while loops that write rows."""
    what = ("masked writes", "in-place writes", "rows once")
    args = jr.orthogonal(jr.key(0), 16), jr.normal(jr.key(1), (32, 16))
    for loop in (el.BoundedWhileLoop, el.CheckpointedWhileLoop):
        title = f"32 loops of up to 500 steps that write rows: {loop.__name__}"
        fn = jax.grad(functools.partial(_stopping, loop), (0, 1))
        yield _Program(title, fn, args, what)
    for title, field, saved, adapts, args in solves():
        if "every step" in title:
            continue
        fn = functools.partial(gradient_of_solve, field, saved, adapts, OURS)
        yield _Program(title, fn, args, _OF_STAGES)


def _stopping(loop: Any, weight: jax.Array, states: jax.Array) -> jax.Array:
    """A batch of while loops that stop at different times, and write what they saw."""
    steps = jnp.linspace(1, 500, len(states)).astype(int)

    def one(h: jax.Array, steps: jax.Array) -> jax.Array:
        def body(carry: Any) -> Any:
            i, h, rows = carry
            h = jnp.tanh(weight @ h)
            return i + 1, h, rows.at[i].set(h)

        init = jnp.zeros((), int), h, jnp.zeros((500, *h.shape))
        _, _, rows = loop(lambda c: c[0] < steps, body, max_steps=500)(init)
        return jnp.sum(rows**2)

    return jnp.sum(jax.vmap(one)(states, steps))
