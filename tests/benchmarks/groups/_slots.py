"""What slots hold, where they are, and in which form."""

import functools
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import eqloop as el

from .._claims import NO_SLOWER, memory, memory_ratio, time_ratio
from .._comparison import Comparison
from .._loops import Loop, equinox, lax_scan, ours
from .._measure import Case

STEPS, WIDTH, LARGE = 1000, 64, 100_000


def slots() -> Sequence[Comparison]:
    """Leaves that are not read, rows that are written, and other places and forms."""
    return [
        _monitored(),
        _written(),
        _cast(),
        _spilled(),
        _reversible(),
        _two_places(),
    ]


def _weight() -> jax.Array:
    return 0.9 * jnp.eye(WIDTH) + 0.01


def _inputs() -> jax.Array:
    return 0.1 * jnp.sin(jnp.arange(STEPS * 1.0 * WIDTH)).reshape(STEPS, WIDTH)


def _monitored() -> Comparison:
    def loss(run: Callable[..., Any], weight: jax.Array, xs: jax.Array) -> jax.Array:
        def step(carry: Any, x: jax.Array) -> Any:
            h, total, largest = carry
            h = jnp.tanh(weight @ h + x)
            return (h, total + jnp.sum(h), jnp.maximum(largest, h)), None

        init = (jnp.ones(WIDTH), jnp.zeros(LARGE), jnp.zeros(WIDTH))
        (h, total, largest), _ = run(step, init, xs)
        return jnp.sum(h) + jnp.mean(total) + jnp.sum(largest**2)

    ours_, theirs = ours(el.Binomial(20)), equinox(20)
    return Comparison(
        f"A state of {WIDTH}, a sum of {LARGE:,} and a maximum: {STEPS} steps",
        [_case(loop, loss) for loop in (lax_scan(), theirs, ours_)],
        [memory(ours_.name, 1.3e6), time_ratio(ours_.name, theirs.name, 0.5)],
        tolerance=1e-2,
    )


def _written() -> Comparison:
    def loss(
        is_carried: bool, run: Callable[..., Any], weight: jax.Array, xs: jax.Array
    ) -> jax.Array:
        def step(carry: Any, x: jax.Array) -> Any:
            h, rows, i = carry
            h = jnp.tanh(weight @ h + x)
            if not is_carried:
                return (h, rows, i), h
            return (h, rows.at[i].set(h), i + 1), None

        rows = jnp.zeros((STEPS if is_carried else 0, WIDTH))
        (_, rows, _), ys = run(step, (jnp.ones(WIDTH), rows, 0), xs)
        return jnp.sum((rows if is_carried else ys) ** 2)

    plan, theirs = ours(el.Binomial(20)), equinox(20)
    carried, stacked = (functools.partial(loss, flag) for flag in (True, False))
    rows = {
        "rows as `ys`, Binomial(20)": (plan, stacked),
        "rows in the carry, `lax.scan`": (lax_scan(), carried),
        "rows in the carry, Equinox internal, 20 slots": (theirs, carried),
        "rows in the carry, Binomial(20)": (plan, carried),
    }
    as_ys, by_jax, _, in_carry = rows
    return Comparison(
        f"A state of {WIDTH}, and {STEPS} rows that are written once",
        [_case(loop, f, name) for name, (loop, f) in rows.items()],
        [
            memory(in_carry, 0.8e6),
            time_ratio(in_carry, as_ys, 1.1),
            time_ratio(in_carry, by_jax, 1.1),
        ],
        tolerance=1e-2,
    )


def _wave(carry: Any, _: jax.Array) -> Any:
    u, v = carry
    force = jnp.roll(u, 1) + jnp.roll(u, -1) - 2 * u - 0.1 * u**3
    v = v + 0.1 * force
    return (u + 0.1 * v, v), None


def _energy(run: Callable[..., Any], u: jax.Array, xs: jax.Array) -> jax.Array:
    (u, _), _ = run(_wave, (u, jnp.zeros_like(u)), xs)
    return jnp.sum(u**2)


def _cast() -> Comparison:
    full, cast = el.Binomial(40), el.Cast(el.Binomial(40), jnp.bfloat16)
    names = "Binomial(40)", "Cast(Binomial(40), bfloat16)"
    pairs = zip(names, (full, cast), strict=True)
    return Comparison(
        "A nonlinear wave at 4096 points, 1000 steps",
        [_of_wave(ours(schedule), name, 4096) for name, schedule in pairs],
        [memory_ratio(names[1], names[0], 0.6), time_ratio(names[1], names[0], 2.0)],
        tolerance=2e-2,
    )


def _spilled() -> Comparison:
    schedule = el.Chunked(32)
    spill = el.Spill(schedule, tempfile.gettempdir())
    names = "Chunked(32)", "Spill(Chunked(32), directory)"
    pairs = zip(names, (schedule, spill), strict=True)
    return Comparison(
        "The same at 65,536 points, with slots in files",
        [_of_wave(ours(each), name, 65_536) for name, each in pairs],
        [
            memory_ratio(names[1], names[0], 0.7),
            time_ratio(names[1], names[0], 2.0, waits=True),
        ],
        rounds=7,
    )


def _reversible() -> Comparison:
    inverse = ours(el.Reversible(_undo_wave, checkpoints=1))
    levels = ours(el.Recursive(16))
    name = "Reversible(inverse)"
    plain = lax_scan()
    cases = [_of_wave(loop, loop.name, 4096) for loop in (plain, levels)]
    return Comparison(
        "The same at 4096 points, undone step by step",
        [*cases, _of_wave(inverse, name, 4096)],
        [
            memory_ratio(name, levels.name, 0.5),
            time_ratio(name, levels.name, NO_SLOWER),
        ],
        tolerance=1e-3,
    )


def _two_places() -> Comparison:
    def step(h: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
        for _ in range(4):
            h = jnp.tanh(0.9 * (weight @ h) + x)
        return h, None

    def loss(run: Callable[..., Any], h: jax.Array, xs: jax.Array) -> jax.Array:
        return jnp.sum(run(step, h, xs)[0] ** 2)

    weight, args = jnp.eye(256), (jnp.ones((256, 64)), jnp.zeros(500))
    device, more = "1600KiB", "16MiB"
    schedules = {
        "Budget(1600KiB)": el.Budget(device),
        "the same, host=16MiB": el.Budget(device, host=more),
        "the same, disk=16MiB": el.Budget(
            device, disk=more, directory=tempfile.gettempdir()
        ),
    }
    gradient = lambda schedule: jax.grad(functools.partial(loss, ours(schedule).run))
    pairs = schedules.items()
    cases = [Case(name, gradient(schedule), args) for name, schedule in pairs]
    alone, host, disk = schedules
    return Comparison(
        "Four products of 256 x 256 and 256 x 64, 500 steps, with a second place",
        cases,
        [
            memory(alone, 1600 * 1024),
            memory(disk, 1600 * 1024),
            time_ratio(host, alone, 1.0),
            # Where files save no time, the plan is the same as without.
            time_ratio(disk, alone, NO_SLOWER),
        ],
        rounds=5,
    )


def _undo_wave(carry: Any, _: jax.Array) -> Any:
    u, v = carry
    u = u - 0.1 * v
    force = jnp.roll(u, 1) + jnp.roll(u, -1) - 2 * u - 0.1 * u**3
    return u, v - 0.1 * force


def _of_wave(loop: Loop, name: str, points: int) -> Case:
    u = jnp.exp(-(jnp.linspace(-5, 5, points) ** 2))
    xs = jnp.zeros(STEPS)
    return Case(name, jax.grad(functools.partial(_energy, loop.run)), (u, xs))


def _case(loop: Loop, loss: Callable[..., Any], name: str | None = None) -> Case:
    of_weight = jax.grad(functools.partial(loss, loop.run))
    return Case(name or loop.name, of_weight, (_weight(), _inputs()), loop.requires)
