"""What the bars have counted to, wherever a loop is run: its length, exactly, once."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import eqloop as el

from ..marks import slow
from ..weights import normal

pytestmark = pytest.mark.sampled

LENGTH = 12
W = normal(0, (3, 3))
H = jnp.linspace(0.5, 1.0, 3)
XS = normal(1, (LENGTH, 3))
ONE, BACK, DOTS = (("a", LENGTH), ("a (backward)", LENGTH), ("a (tangents)", LENGTH))
BACK_OF_DOTS = ("a (tangents, backward)", LENGTH)
SCHEDULES = [
    el.StoreAll(),
    el.Recursive(3),
    el.Binomial(3, block=2),
    el.Chunked(5),
    el.Chunked(4, batch=2),
]

Loop = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def scan(schedule: Any, progress: Any) -> Loop:
    """A loop as a function of weight, carry and `xs`."""

    def step(w: jax.Array, h: jax.Array, x: jax.Array) -> Any:
        h = jnp.tanh(w @ h + x)
        return h, 2 * h

    def run(w: jax.Array, h: jax.Array, xs: jax.Array) -> Any:
        f = eqx.Partial(step, w)
        return el.Scan(f, schedule=schedule, progress=progress)(h, xs)

    return run


def bar(**settings: Any) -> el.ProgressBar:
    return el.ProgressBar(**{"every": 5, "desc": "a"} | settings)


def loss(run: Loop) -> Loop:
    return lambda *args: sum(jnp.sum(leaf**2) for leaf in run(*args))


def batch(run: Loop) -> Loop:
    """`run` for the same weight, and three initial carries."""
    return lambda w, h, xs: jax.vmap(run, (None, 0, None))(
        w, jnp.outer(jnp.arange(1.0, 4.0), h), xs
    )


def total(run: Loop) -> Loop:
    return lambda *args: sum(map(jnp.sum, jax.tree.leaves(run(*args))))


CONTEXTS: dict[str, tuple[Callable[[Loop], Any], list[Any]]] = {
    "jit": (lambda run: run, [ONE]),
    "jvp": (lambda run: lambda *args: jax.jvp(run, args, args), [DOTS]),
    "linearize": (lambda run: lambda *a: jax.linearize(run, *a)[1](*a), [DOTS]),
    "grad": (lambda run: jax.grad(loss(run), argnums=(0, 1, 2)), [ONE, BACK]),
    "vmap": (batch, [ONE]),
    "vmap of grad": (lambda run: batch(jax.grad(loss(run))), [ONE, BACK]),
    "grad of vmap": (lambda run: jax.grad(loss(batch(run))), [ONE, BACK]),
    "hessian": (
        lambda run: lambda w, h, xs: jax.hessian(lambda h: loss(run)(w, h, xs))(h),
        None,
    ),
    "grad of grad": (lambda run: jax.grad(total(jax.grad(loss(run)))), None),
    "cond": (
        lambda run: jax.grad(
            lambda w, h, xs: lax.cond(h[0] > 0, loss(run), lambda *_: 0.0, w, h, xs)
        ),
        [ONE, BACK],
    ),
    "scan": (
        lambda run: jax.grad(
            lambda w, h, xs: lax.scan(
                lambda c, _: (c + loss(run)(w, c * h, xs), None), 1.0, length=2
            )[0]
        ),
        [ONE, BACK] * 2,
    ),
    # What comes after the loop is linear, so it is only run again to be reversed.
    "checkpoint": (lambda run: jax.grad(jax.checkpoint(total(run))), [BACK]),
}


def cases() -> Iterator[Any]:
    """Most contexts for one schedule, and for the others those that are quick."""
    like_others = ("hessian", "grad of vmap", "cond", "scan", "linearize")
    for schedule in SCHEDULES:
        for context in CONTEXTS:
            quick = context == "grad" or (
                schedule == el.Recursive(3) and context not in like_others
            )
            case = pytest.param if quick else slow
            yield case(schedule, context, id=f"{schedule}-{context}")


@pytest.mark.parametrize(("schedule", "context"), list(cases()))
def test_a_bar_counts_to_the_length_and_changes_nothing(schedule, context, shown):
    transform, expected = CONTEXTS[context]
    args = (W, H, XS)
    out = jax.jit(transform(scan(schedule, bar())))(*args)
    counts = shown()
    plain = jax.jit(transform(scan(schedule, None)))(*args)
    assert not shown()
    for leaf, same in zip(jax.tree.leaves(out), jax.tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(leaf, same)
    if expected is not None:
        assert counts == Counter(expected)
    # Derivatives of the backward sweep are sweeps of their own, but for `StoreAll`.
    assert set(counts) <= {ONE, DOTS, BACK, BACK_OF_DOTS}


def test_a_compiled_function_has_a_bar_each_time(shown):
    run = jax.jit(scan(None, bar()))
    for _ in range(3):
        run(W, H, XS)
    assert shown() == {ONE: 3}


@pytest.mark.parametrize("length", [0, 1, 7])
def test_any_length_will_do(length, shown):
    jax.jit(jax.grad(loss(scan(el.Recursive(3), bar()))))(W, H, XS[:length])
    expected = {("a", length): 1, ("a (backward)", length): 1}
    assert shown() == (expected if length else {})


def test_a_bar_moves_every_so_many_steps(recorder):
    jax.jit(scan(None, bar(every=5)))(W, H, XS)
    assert recorder.bars[0].counts == [0, 5, 10, LENGTH]
    jax.jit(scan(None, 4))(W, H, XS)
    assert recorder.bars[1].counts == [0, 4, 8, LENGTH]
    jax.jit(jax.grad(loss(scan(el.Binomial(3), 5))))(W, H, XS)
    assert [bar.counts for bar in recorder.bars[2:]] == [[0, 5, 10, LENGTH]] * 2


@pytest.mark.parametrize("schedule", [el.Binomial(3), el.Offload(el.Recursive(3))])
def test_between_slots_nothing_but_the_step_is_run(schedule, recorder):
    def final(progress: Any) -> Callable[..., Any]:
        step = lambda h, x: (jnp.tanh(W @ h + x), None)
        return lambda h: el.Scan(step, schedule=schedule, progress=progress)(h, XS)[0]

    derivative = lambda progress: jax.jit(jax.grad(lambda h: final(progress)(h).sum()))
    np.testing.assert_array_equal(derivative(5)(H), derivative(None)(H))
    assert [bar.counts for bar in recorder.bars] == [[0, 5, 10, LENGTH]] * 2


@pytest.mark.parametrize(("length", "moves"), [(20_000, 25), (101, 21), (7, 7)])
def test_a_bar_moves_some_25_times_by_default(length, moves, recorder):
    scan = el.Scan(lambda h, _: (h + 1, None), progress=True)
    jax.jit(lambda: scan(0, length=length))()
    assert len(recorder.bars[0].counts) == moves + 1


@pytest.mark.parametrize(
    "schedule", [*map(slow, SCHEDULES[:2]), SCHEDULES[2]], ids=repr
)
def test_loops_in_loops_have_bars_of_their_own(schedule, shown):
    def inner(h: Any, _: Any) -> Any:
        step = lambda h, _: (jnp.sin(h) + h, None)
        progress = bar(every=1, desc="inner")
        return el.CheckpointedScan(step, base=2, progress=progress)(h, length=5)[0], 0.0

    def run(h: Any, progress: Any) -> Any:
        return el.Scan(inner, schedule=schedule, progress=progress)(h, length=4)[0]

    inners = {("inner", 5): 4, ("inner (backward)", 5): 4}
    jax.jit(jax.grad(lambda h: run(h, bar()) ** 2))(1.0)
    assert shown() == {**inners, ("a", 4): 1, ("a (backward)", 4): 1}
    jax.jit(jax.grad(lambda h: run(h, None) ** 2))(1.0)
    assert shown() == inners


def test_a_bar_within_another_leaves_nothing_behind(recorder):
    inner = el.Scan(lambda h, _: (h + 1, None), progress=True)
    outer = el.Scan(lambda h, _: (inner(h, length=3)[0], None), progress=True)
    jax.jit(lambda: outer(0, length=2))()
    assert [bar.leave for bar in recorder.bars] == [True, False, False]


def test_a_loop_that_nobody_needs_is_not_run_for_its_bar(shown):
    jax.jit(lambda *args: (scan(None, bar())(*args), 0)[1])(W, H, XS)
    assert not shown()


def test_one_bar_for_all_devices(shown):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("d")
    run = scan(el.Recursive(3), bar())
    hs = jax.device_put(jnp.stack([H] * 4), NamedSharding(mesh, spec))
    one = lambda w, h, xs: run(w, h[0], xs)[0][None]
    specs = dict(in_specs=(PartitionSpec(), spec, PartitionSpec()), out_specs=spec)
    mapped = jax.shard_map(one, mesh=mesh, **specs)
    jax.jit(jax.grad(total(mapped)))(W, hs, XS)
    assert shown() == {ONE: 1, BACK: 1}
    jax.jit(jax.vmap(run, (None, 0, None)))(W, hs, XS)
    assert shown() == {ONE: 1}


@dataclasses.dataclass(frozen=True)
class Halves(el.AbstractSchedule):
    """Two segments, each of whose carries are stored when it is run again."""

    def layout(self, loop: el.LoopSpec) -> el.Layout:
        half = loop.length // 2
        every = el.Chunked(1)
        return loop.cut([(half, every), (loop.length - half, every)])


@pytest.mark.parametrize("steps", [3, 6, 9, LENGTH])
def test_a_loop_in_segments_that_ends_early(shown, steps):
    settings = dict(max_steps=LENGTH, schedule=Halves(), progress=bar(every=1))
    scan = el.ScanWhile(
        lambda c: c < steps - 0.5, lambda c, x: (c + x, None), **settings
    )
    run = jax.grad(lambda c, xs: scan(c, xs)[0])
    jax.block_until_ready(jax.jit(run)(0.0, jnp.ones(LENGTH)))
    assert shown() == {("a", steps): 1, ("a (backward)", steps): 1}
