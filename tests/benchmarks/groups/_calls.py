"""What a call takes beside its program: outside of `jit`, and under it; and a plan.

Also what it takes to trace loops that are given a schedule, see `_reschedule.py`.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import eqloop as el

from .._claims import compile_time, time_difference
from .._comparison import Comparison
from .._measure import Case
from ._reschedule import reschedule

LENGTH, WIDTH, LEAVES = 64, 16, 50

# Milliseconds. JAX 0.10 calls a program with primitives like ours by way of Python.
OUTSIDE_OF_JIT = 5
UNDER_JIT = 0.03 if jax.__version_info__ >= (0, 12) else 0.3

WEIGHT = jnp.eye(WIDTH)

Function = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Family:
    """Transforms that do what one of JAX's does, as functions of the same array.

    Args:
        plain: the name of that of JAX.
        theirs: it.
        ours: ours, by their names.
        is_reversed: whether they have a gradient.
    """

    plain: str
    theirs: Function
    ours: Mapping[str, Function]
    is_reversed: bool = True


def calls() -> Sequence[Comparison]:
    """Calls of small programs, again and again, of the same functions and types."""
    families = list(_families())
    reversible = [family for family in families if family.is_reversed]
    outside = "outside of `jit`"
    return [
        *(
            _compare(f, f"calls {outside}", lambda f: f, OUTSIDE_OF_JIT, rounds=25)
            for f in families
        ),
        *(
            _compare(f, f"gradients {outside}", jax.grad, OUTSIDE_OF_JIT, rounds=5)
            for f in reversible
        ),
        *(
            _compare(f, "calls under `jit`", jax.jit, UNDER_JIT, rounds=200)
            for f in families
        ),
        *reschedule(),
        _planning(),
    ]


def _compare(
    family: Family, title: str, change: Callable[..., Any], at_most: float, rounds: int
) -> Comparison:
    """A family as it is called; `at_most` is in milliseconds."""
    args = (jnp.ones((LENGTH, WIDTH)),)
    functions = {family.plain: family.theirs, **family.ours}
    return Comparison(
        f"{family.plain}: {title}",
        [Case(n, change(f), args, is_compiled=False) for n, f in functions.items()],
        [time_difference(name, family.plain, at_most) for name in family.ours],
        rounds=rounds,
    )


def _step(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    h = jnp.tanh(WEIGHT @ h + x)
    return h, h


def _row(x: jax.Array) -> jax.Array:
    return jnp.tanh(WEIGHT @ x)


def _goes_on(carry: Any) -> jax.Array:
    return carry[0] < LENGTH


def _next(carry: Any) -> tuple[jax.Array, jax.Array]:
    return carry[0] + 1, _row(carry[1])


def _families() -> Iterator[Family]:
    """All transforms that trace their function, and `Vmap`, which does not."""
    of_scan = lambda scan: lambda xs: jnp.sum(scan(xs[0], xs)[0])
    of_rows = lambda mapped: lambda xs: jnp.sum(mapped(xs))
    of_one = lambda f: lambda xs: jnp.sum(f(xs[0]))
    of_while = lambda loop: lambda xs: jnp.sum(loop((jnp.zeros((), int), xs[0]))[1])

    schedules = (
        el.StoreAll(),
        el.Recursive(4),
        el.Recursive(4, batch=4),
        el.Chunked(8),
        el.Binomial(5),
        el.Budget("8KiB"),
    )
    scans = {
        **{str(schedule): el.Scan(_step, schedule=schedule) for schedule in schedules},
        "SlicedScan": el.SlicedScan(_step, step=4),
    }
    yield Family(
        "`lax.scan`",
        of_scan(functools.partial(lax.scan, _step)),
        {name: of_scan(scan) for name, scan in scans.items()},
    )
    maps = (
        el.ForLoop(_row),
        el.CheckpointedForLoop(_row),
        el.Map(_row),
        el.ChunkedVmap(_row, 16),
        el.ParallelMap(_row),
    )
    yield Family(
        "`lax.map`",
        of_rows(functools.partial(lax.map, _row)),
        {type(mapped).__name__: of_rows(mapped) for mapped in maps},
    )
    yield Family(
        "`lax.while_loop`",
        of_while(functools.partial(lax.while_loop, _goes_on, _next)),
        {"WhileLoop": of_while(el.WhileLoop(_goes_on, _next))},
        is_reversed=False,
    )
    loops = (
        el.BoundedWhileLoop(_goes_on, _next, max_steps=LENGTH),
        el.CheckpointedWhileLoop(_goes_on, _next),
    )
    yield Family(
        "`lax.scan` of as many steps",
        of_scan(functools.partial(lax.scan, lambda h, _: (_row(h), None))),
        {type(loop).__name__: of_while(loop) for loop in loops},
    )
    yield Family(
        "`lax.associative_scan`",
        of_rows(functools.partial(lax.associative_scan, jnp.multiply)),
        {"AssociativeScan": of_rows(el.AssociativeScan(jnp.multiply, chunk_size=8))},
    )
    yield Family(
        "`lax.cond`",
        of_one(functools.partial(lax.cond, True, _row, jnp.negative)),
        {"Cond": of_one(functools.partial(el.Cond(_row, jnp.negative), True))},
    )
    yield Family(
        "`jax.checkpoint`",
        of_one(jax.checkpoint(_row)),
        {"Remat": of_one(el.Remat(_row)), "Optimize": of_one(el.ir.Optimize(_row))},
    )
    specs = dict(mesh=jax.make_mesh((1,), ("i",)), in_specs=P(), out_specs=P())
    yield Family(
        "`jax.shard_map`",
        of_one(jax.jit(jax.shard_map(_row, **specs))),
        {"ShardMap": of_one(el.ShardMap(_row, **specs))},
    )
    yield Family(
        "`jax.vmap`", of_rows(jax.vmap(_row)), {"Vmap": of_rows(el.Vmap(_row))}
    )


def _planning() -> Comparison:
    """The plan of a step with many leaves, found for the first time."""
    carry = [jnp.zeros(WIDTH) for _ in range(LEAVES)]
    args = (carry, [jnp.ones(WIDTH)] * LEAVES, jnp.ones((1024, WIDTH)))

    def plan(carry: Any, weights: Any, xs: jax.Array) -> jax.Array:
        def step(h: Any, x: jax.Array) -> tuple[Any, jax.Array]:
            h = [jnp.tanh(a * w + x) for a, w in zip(h, weights, strict=True)]
            return h, sum(map(jnp.sum, h))

        scan = el.Scan(step, schedule=el.Budget("1MB"))
        return jnp.asarray(scan.plan(carry, xs).evaluations)

    return Comparison(
        f"The plan for a carry of {LEAVES} leaves",
        [Case("`Budget`", plan, args, is_compiled=False)],
        [compile_time("`Budget`", 1)],
        rounds=5,
        compile_rounds=5,
    )
