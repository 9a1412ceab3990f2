"""What XLA computes is what the program says."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import eqloop as el

from .hlo import compiled
from .registry import canary

ROWS, WIDTH, LENGTH = 8, 16, 12


def inputs() -> tuple[jax.Array, jax.Array]:
    entries = np.random.default_rng(0).normal(size=(ROWS + LENGTH, WIDTH))
    entries = entries.astype(np.float32)
    return jnp.asarray(entries[:ROWS]), jnp.asarray(entries[ROWS:])


def delay(rows: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A delay line: the step of a filter, or of a model of a nerve."""
    rows = jnp.sin(rows) + 1
    shifted = rows.at[1:].set(rows[:-1])
    return shifted.at[0].set(x), shifted


def delay_by_concatenating(
    rows: jax.Array, x: jax.Array
) -> tuple[jax.Array, jax.Array]:
    rows = jnp.sin(rows) + 1
    shifted = jnp.concatenate([rows[:1], rows[:-1]])
    return jnp.concatenate([x[None], shifted[1:]]), shifted


def with_gradient(scan: Callable[..., Any]) -> Callable[..., Any]:
    def run(rows: jax.Array, xs: jax.Array) -> jax.Array:
        rows, ys = scan(rows, xs)
        weights = jnp.arange(ys.size, dtype=ys.dtype).reshape(ys.shape) / ys.size
        return (rows**2).sum() + (jnp.cos(ys) * weights).sum()

    return jax.value_and_grad(run, (0, 1))


def delays(**ways: Any) -> Iterator[str]:
    """What is wrong with delay lines that are looped over in some ways."""
    plain = lambda *args: lax.scan(delay_by_concatenating, *args)
    wanted = with_gradient(plain)(*inputs())
    for name, scan in ways.items():
        found = compiled(with_gradient(scan), *inputs())(*inputs())
        yield from _differences(name, found, wanted)


@canary("xla #49176")
def shifted_writes_in_loops_read_what_was_there_before() -> Iterator[str]:
    """A delay line, `rows.at[1:].set(rows[:-1])`, is right in loops, and backwards.

    Where XLA puts into one kernel what computes the rows, the write, and a `reshape` of
    the result, as that of one row of a stack, it reads its own output. That is so on
    the CPU, see the next one; so loops write elsewhere (`_shifted_writes.py`).
    """
    schedules = el.StoreAll(), el.Recursive(4), el.Chunked(4, batch=4), el.Binomial(3)
    for unroll in (1, 4):
        loops = {str(s): el.Scan(delay, schedule=s, unroll=unroll) for s in schedules}
        yield from delays(**loops)


@canary("xla #49176", is_known=True)
def shifted_writes_read_what_was_there_before() -> Iterator[str]:
    """The same as it was reported, outside of loops: `_compat` says that it fails."""

    def shift(rows: jax.Array) -> jax.Array:
        rows = rows + 1
        return rows.at[1:].set(rows[:-1])[None]

    rows, _ = inputs()
    after = np.asarray(rows) + 1
    wanted = np.concatenate([after[:1], after[:-1]])[None]
    yield from _differences("one write", compiled(shift, rows)(rows), wanted)


@canary("xla #46231")
def what_is_offloaded_is_read_in_reverse() -> Iterator[str]:
    """Carries and residuals on the host come back for the step that they are of.

    Carries are sent there by `HostSlots` (`slots/_host_slots.py`), and residuals by
    `policies.offload_names`. A GPU read those of the first step for the last one.
    """

    def step(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
        return el.name(jnp.sin(carry), "inner") * x + carry, None

    def gradient(**settings: Any) -> Callable[..., Any]:
        scan = el.Scan(step, **settings)
        return jax.grad(lambda rows, xs: (scan(rows[0], xs)[0] ** 2).sum(), (0, 1))

    wanted = gradient(schedule=el.StoreAll())(*inputs())
    offloads = el.policies.offload_names("inner")
    ways = [
        dict(schedule=el.Offload(schedule))
        for schedule in (el.Chunked(3), el.Recursive(2), el.Binomial(3))
    ]
    for way in (*ways, dict(schedule=el.Chunked(4), policy=offloads)):
        found = compiled(gradient(**way), *inputs())(*inputs())
        yield from _differences(str(way), found, wanted)


def _differences(name: str, found: Any, wanted: Any) -> Iterator[str]:
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    for i, (one, other) in enumerate(pairs):
        if not np.allclose(one, other, rtol=1e-4, atol=1e-4):
            off = np.abs(np.asarray(one) - np.asarray(other)).max()
            yield f"{name}: output {i} is off by {off:.2g}"
