"""Waves in the open that are run backwards: what recording the rim takes, and gains.

`python -m tests.benchmarks.rims` prints the table of `docs/guides/reversible_loops.md`:
the gradient of what a receiver sees by the speed at every place.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import eqloop as el

from ._measure import Case, Measurement, measure

SIZE, RIM, STEPS = 128, 8, 2000
WITHIN = slice(RIM, -RIM)


def _accelerated(speed: jax.Array, u: jax.Array, push: jax.Array) -> jax.Array:
    near = [jnp.roll(u, by, axis) for by in (1, -1) for axis in (0, 1)]
    forced = speed**2 * (sum(near) - 4 * u)
    return forced.at[SIZE // 2, SIZE // 2].add(push)


def step(speed: jax.Array, carry: Any, push: jax.Array) -> Any:
    """A step of the wave, which a sponge around it damps."""
    now, before = carry
    sponge = jnp.full((SIZE, SIZE), 0.9).at[WITHIN, WITHIN].set(1.0)
    after = sponge * (2 * now - before + _accelerated(speed, now, push))
    return (after, now), now[RIM, RIM]


def saved(carry: Any, push: jax.Array) -> Any:
    """The rim of what the inverse cannot find there."""
    _, u = carry
    return u[:RIM], u[-RIM:], u[WITHIN, :RIM], u[WITHIN, -RIM:]


def undone(speed: jax.Array, carry: Any, push: jax.Array, strips: Any) -> Any:
    """The carry before a step."""
    after, now = carry
    before = 2 * now - after + _accelerated(speed, now, push)
    top, bottom, left, right = strips
    before = before.at[:RIM].set(top).at[-RIM:].set(bottom)
    before = before.at[WITHIN, :RIM].set(left).at[WITHIN, -RIM:].set(right)
    return now, before


def _reversible(speed: jax.Array, checkpoints: int = 1) -> el.Reversible:
    inverse = functools.partial(undone, speed)
    return el.Reversible(inverse, checkpoints=checkpoints, save=saved)


SCHEDULES = {
    "`StoreAll()`, as `jax.lax.scan`": lambda speed: el.StoreAll(),
    "`Reversible(inverse, save=rim)`": _reversible,
    "the same, `checkpoints=20`": lambda speed: _reversible(speed, 20),
    'the same, within `Cast(…, "bfloat16")`': lambda speed: el.Cast(
        _reversible(speed, 20), "bfloat16"
    ),
    "`Recursive(16)`: no inverse, no rim": lambda speed: el.Recursive(16),
}


@dataclasses.dataclass(frozen=True)
class Cost:
    """A gradient by one schedule.

    Attributes:
        name: The schedule.
        nbytes: What it allocates beside its inputs and outputs.
        off: By how much it is off, relative to the greatest entry.
        time: How long it takes over the first, if that was measured.
    """

    name: str
    nbytes: int
    off: float
    time: float | None

    @property
    def in_words(self) -> str:
        time = "" if self.time is None else f"{self.time:.2f}"
        off = f"{self.off:.0e}" if self.off else "0"
        return f"| {self.name} | {self.nbytes / 1e6:.1f} MB | {time} | {off} |"


def costs(rounds: int = 5) -> Iterator[Cost]:
    """What each schedule takes; without rounds, no times."""
    args = jnp.full((SIZE, SIZE), 0.5), jnp.sin(0.3 * jnp.arange(STEPS))
    at_rest = jnp.zeros((SIZE, SIZE)), jnp.zeros((SIZE, SIZE))

    def seen(schedule: Any, speed: jax.Array, pushes: jax.Array) -> jax.Array:
        scan = el.Scan(functools.partial(step, speed), schedule=schedule(speed))
        return jnp.sum(scan(at_rest, pushes)[1] ** 2)

    gradient = lambda schedule: jax.grad(functools.partial(seen, schedule))
    cases = [Case(name, gradient(each), args) for name, each in SCHEDULES.items()]
    measured = measure(cases, rounds=rounds).items()
    first = None
    for name, taken in measured:
        assert isinstance(taken, Measurement)
        # Whatever else the machine does, it keeps a run busy no shorter than that.
        busy = float(np.min(taken.busy)) if rounds else None
        first = first or busy
        yield Cost(name, taken.temp_bytes, taken.error, busy and busy / first)


HEAD = """\
| | memory | time | gradient off by |
|---|--:|--:|--:|"""

if __name__ == "__main__":
    print(HEAD)
    for cost in costs():
        print(cost.in_words, flush=True)
