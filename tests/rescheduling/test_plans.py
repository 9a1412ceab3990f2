"""Which loops `el.Reschedule` takes, at what depth, and why it leaves others."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import checkify, io_callback
from jax.sharding import AxisType, PartitionSpec

import eqloop as el

from ..asserts import assert_close
from ..compiling import temp_bytes
from .functions import XS, W, nested, root, simulate

pytestmark = pytest.mark.sampled

Function = Callable[..., Any]


@jax.custom_jvp
def with_tangents(w: Any, xs: Any) -> Any:
    return simulate(w, xs)


@with_tangents.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return jax.jvp(simulate, primals, tangents)


@jax.custom_vjp
def with_cotangents(w: Any, xs: Any) -> Any:
    return simulate(w, xs)


with_cotangents.defvjp(
    lambda w, xs: (simulate(w, xs), (w, xs)),
    lambda args, ct: jax.vjp(simulate, *args)[1](ct),
)


def in_shard_map(w: Any, xs: Any) -> Any:
    mesh = jax.make_mesh((2,), ("device",), axis_types=(AxisType.Auto,))
    rows = PartitionSpec("device")
    run = lambda ws, xs: simulate(ws[0], xs)[None]
    specs = dict(in_specs=(rows, PartitionSpec()), out_specs=rows)
    return jnp.sum(jax.shard_map(run, mesh=mesh, **specs)(w * XS[:2], xs))


def in_linear_solve(w: Any, xs: Any) -> Any:
    def solve(product: Function, b: Any) -> Any:
        return lax.scan(lambda x, _: (x + b - product(x), None), b, length=24)[0]

    product = lambda x: w * x
    return jnp.sum(lax.custom_linear_solve(product, xs, solve, symmetric=True))


# The loops that are taken: their names, lengths, and how many loops they are inside of.
DEPTHS: dict[str, tuple[Function, list[tuple[str, int, int]]]] = {
    "alone": (simulate, [("lax.scan", 24, 0)]),
    "jit": (jax.jit(simulate), [("lax.scan", 24, 0)]),
    "checkpoint": (jax.checkpoint(simulate), [("lax.scan", 24, 0)]),
    "vmap": (
        lambda w, xs: jnp.sum(jax.vmap(simulate, (0, None))(w * XS, xs)),
        [("lax.scan", 24, 0)],
    ),
    "branch": (
        lambda w, xs: lax.cond(w > 0, simulate, lambda w, xs: w, w, xs),
        [("lax.scan", 24, 0)],
    ),
    "custom_jvp": (with_tangents, [("lax.scan", 24, 0)]),
    "shard_map": (in_shard_map, [("lax.scan", 24, 0)]),
    "map": (
        lambda w, xs: jnp.sum(lax.map(lambda x: jnp.sin(w * x), xs)),
        [("lax.map", 24, 0)],
    ),
    "fori_loop": (
        lambda w, xs: lax.fori_loop(0, 9, lambda i, h: jnp.sin(w * h), w),
        [("lax.fori_loop", 9, 0)],
    ),
    "a scan of eqloop": (
        lambda w, xs: el.Scan(lambda h, x: (h + simulate(w * x, xs), None))(w, xs)[0],
        [("lax.scan", 24, 0), ("lax.scan", 24, 1)],  # by `StoreAll` it is one of JAX
    ),
    "a planned loop of eqloop": (
        lambda w, xs: el.CheckpointedScan(
            lambda h, x: (h + simulate(w * x, xs), None), 3
        )(w, xs)[0],
        [("lax.scan", 24, 1)],
    ),
    "reverse": (
        lambda w, xs: lax.scan(
            lambda h, x: (jnp.sin(w * h + x), h), w, xs, reverse=True
        )[0],
        [("lax.scan", 24, 0)],
    ),
}


@pytest.mark.parametrize("name", DEPTHS)
def test_taken(name):
    f, expected = DEPTHS[name]
    seen: list[el.ForeignLoop] = []
    note = lambda loop: not seen.append(loop)
    el.Reschedule(f, el.Chunked(5), only=note).plans(W, XS)
    assert [(loop.name, loop.length, loop.depth) for loop in seen] == expected
    frugal = el.Reschedule(f, el.Chunked(5), only=lambda loop: True)
    found = frugal.plans(W, XS)
    # The gradient of a `custom_jvp` goes through its rule, not through its function.
    assert len(found.left) == (f is with_tangents)
    expected = [] if f is with_tangents else expected
    # While plans are listed, a loop of this library is a primitive of it.
    expected = [one for one in expected if name != "a scan of eqloop" or one[2]]
    taken = [loop.name for loop in found.taken if loop.name.startswith("lax.")]
    assert taken == [name for name, _, _ in expected]
    for change in (lambda f: f, jax.jit, jax.grad):
        assert_close(change(frugal)(W, XS), change(f)(W, XS))


def told(effect: Callable[[Any], None]) -> Function:
    def library(w: Any, xs: Any) -> Any:
        def step(h: Any, x: Any) -> tuple[Any, None]:
            effect(lax.stop_gradient(h))
            return jnp.sin(w * h + x), None

        return lax.scan(step, w, xs)[0]

    return library


LEFT: dict[str, tuple[Function, str, str]] = {
    "custom_vjp": (with_cotangents, "lax.scan", "it belongs to a `custom_vjp_call"),
    "io_callback": (
        told(lambda h: io_callback(lambda h: None, None, h)),
        "lax.scan",
        "it has effects that must not be repeated",
    ),
    "ordered": (
        told(lambda h: jax.debug.callback(lambda h: None, h, ordered=True)),
        "lax.scan",
        "it has effects that must not be repeated",
    ),
    "while": (lambda w, xs: root(w), "lax.while_loop", "there are no `whiles`"),
    "linear solve": (
        in_linear_solve,
        "lax.scan",
        "it belongs to a `custom_linear_solve`, which JAX differentiates as a whole",
    ),
    "nested": (
        nested,
        "lax.scan",
        "is computed again with the step of the loop around it",
    ),
}


@pytest.mark.parametrize("name", LEFT)
@pytest.mark.filterwarnings("ignore:Reschedule. no loop")
def test_left(name):
    f, loop, why = LEFT[name]
    frugal = el.Reschedule(f, el.Chunked(5))
    if name != "while":  # which has no gradient
        found = frugal.plans(W, XS)
        assert found.left
        for left, reason in found.left:
            assert left.name == loop
            assert why in reason
            assert f"left to JAX:\n  {left}: {reason}" in str(found)
        assert_close(jax.grad(frugal)(W, XS), jax.grad(f)(W, XS))
    assert_close(frugal(W, XS), f(W, XS))
    jax.effects_barrier()


def in_a_scan(f: Function) -> Function:
    return lambda w, xs: lax.scan(lambda h, _: (f(h, xs), None), w, length=3)[0]


@pytest.mark.parametrize("put_in", [lambda f: f, jax.jit, jax.checkpoint, in_a_scan])
def test_what_a_rule_stores_of_its_loops_is_said(put_in):
    """There, and if the function takes the gradient itself: no schedule is for it."""

    @jax.custom_vjp
    def last(w, xs):
        return lax.scan(lambda h, x: (jnp.sin(w * h + x), None), w, xs)[0]

    def forward(w, xs):
        h, hs = lax.scan(lambda h, x: (jnp.sin(w * h + x), h), w, xs)
        return h, (w, hs, xs)

    last.defvjp(forward, lambda stored, ct: (ct * jnp.sum(stored[1]), stored[2]))
    f = lambda w, xs: jnp.sum(put_in(last)(w, xs))
    rows, starts = jnp.ones((24, 1000)), jnp.ones(1000)
    found = el.Reschedule(f, el.Recursive(2)).plans(starts, rows)
    _, why = found.left[-1]
    assert why.endswith("its rule stores 93.8 KiB of its loops")


@pytest.mark.filterwarnings("ignore:Reschedule. no loop")
def test_nothing_is_planned_for_a_gradient_that_the_function_takes():
    def loss(w, xs):
        step = lambda h, x: (jnp.cos(jnp.tanh(w * h + x)), None)
        return jnp.sum(lax.scan(step, w, xs)[0])

    frugal = el.Reschedule(jax.grad(loss), el.Recursive(2))
    args = jnp.ones(32), jnp.ones((500, 32))
    found = frugal.plans(*args)
    assert len(found.taken) == found.taken.peak_bytes == 0
    there, back = (why for _, why in found.left)
    assert back == "it is the way back of a gradient that the function takes itself"
    size, unit = re.match(r"it stores ([\d.]+) (KiB) for a gradient", there).groups()
    assert unit == "KiB"
    taken = temp_bytes(frugal, *args) / 1024
    assert float(size) == pytest.approx(taken, rel=0.1)


@pytest.mark.filterwarnings("ignore:Reschedule. no loop")
def test_checks_are_seen():
    def check(h: Any) -> None:
        checkify.check(h < 0, "h is {h}", h=h)

    frugal = el.Reschedule(told(check), el.Chunked(5))
    error, _ = checkify.checkify(frugal)(W, XS)
    assert error.get().startswith("h is 0.8999")


# Loops in loops


def deep(w: Any, xs: Any) -> Any:
    """A loop of 256 steps in each step of one of 4."""
    inner = lambda h, _: (jnp.sin(w * h), None)
    outer = lambda h, _: (lax.scan(inner, h, length=256)[0], None)
    return jnp.sum(lax.scan(outer, xs, length=4)[0])


def test_an_inner_loop_gets_the_schedule_if_the_outer_one_would_take_twice_the_memory():
    frugal = el.Reschedule(deep, el.Chunked(16))
    found = frugal.plans(W, XS)
    assert [(x.plan.length, x.depth) for x in found.taken] == [(4, 0), (256, 1)]
    assert found.left == ()
    outer_alone = el.Reschedule(deep, el.Chunked(16), only=lambda loop: not loop.depth)
    alone = outer_alone.plans(W, XS).taken
    assert 2 * found.taken[0].plan.peak_bytes < alone[0].plan.peak_bytes
    assert_close(jax.grad(frugal)(W, XS), jax.grad(deep)(W, XS))


def test_an_inner_loop_has_half_of_a_budget():
    budget = el.Budget("64KiB", measure=False)
    outer, inner = el.Reschedule(deep, budget).plans(W, XS).taken
    assert outer.plan.peak_bytes <= 64 * 1024
    assert inner.plan.peak_bytes <= 32 * 1024


def test_plans_need_types_only():
    types = jax.eval_shape(lambda: (W, XS))
    frugal = el.Reschedule(simulate, el.Binomial(4))
    found = frugal.plans(*types)
    assert found.taken[0].plan == frugal.plans(W, XS).taken[0].plan
    assert found.taken[0].place.function == "simulate"


def test_numbers_of_python_are_differentiated_if_there_is_nothing_else():
    frugal = el.Reschedule(lambda w: simulate(w, XS), el.Binomial(4))
    assert len(frugal.plans(0.9).taken) == len(frugal.plans(W).taken) == 1


def test_a_function_without_loops():
    found = el.Reschedule(jnp.sin).plans(W)
    assert (len(found.taken), found.left) == (0, ())
    assert str(found) == "no loop is planned"


@pytest.mark.parametrize(("inner", "width"), [(3, 64), (2, 27)])
def test_the_least_budget_that_an_error_names_is_enough(inner: int, width: int):
    # With more for the outer loop, the inner one has more as well, and may use it.
    def step(h: Any, x: Any) -> Any:
        g, _ = lax.scan(lambda c, _: (jnp.sin(1.1 * c), None), h, length=inner)
        return jnp.tanh(g + x), None

    def loss(h: Any, xs: Any) -> Any:
        return jnp.sum(lax.scan(step, h, xs)[0] ** 2)

    def traced(nbytes: int, host: str | None) -> None:
        schedule = el.Budget(nbytes, host=host, measure=False)
        gradient = jax.grad(el.Reschedule(loss, schedule))
        jax.jit(gradient).trace(jnp.ones(width), jnp.ones((40, width)))

    def least(host: str | None) -> int:
        with pytest.raises(ValueError, match="It needs at least") as error:
            traced(1, host)
        said = re.search(r"which is (\d+) bytes", str(error.value))
        assert said is not None
        return int(said[1])

    near, far = least(None), least("1MiB")
    traced(near, None)
    traced(far, "1MiB")
    # Large carries are stored on the host.
    assert far < near or width < 64


@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize("axis", [1, 2])
def test_xs_that_are_transposed_before_a_loop_are_read_where_they_are(
    axis: int, is_reversed: bool
):
    def along(axis: int, w: Any, xs: Any) -> Any:
        step = lambda h, x: (jnp.tanh(w * h + x), h[:1])
        start, moved = jnp.zeros_like(jnp.take(xs, 0, axis)), jnp.moveaxis(xs, axis, 0)
        h, ys = lax.scan(step, start, moved, reverse=is_reversed)
        return jnp.sum(h) + jnp.sum(ys**2)

    def loss(w: Any, xs: Any) -> Any:
        if axis == 2:
            return along(2, w, xs)
        return jnp.sum(jax.vmap(lambda xs: along(0, w, xs))(xs))

    w, shape = jnp.float32(0.5), (16, 400, 8) if axis == 1 else (16, 8, 400)
    xs = jnp.sin(jnp.arange(16 * 400 * 8.0)).reshape(shape)
    frugal = el.Reschedule(loss, el.Recursive(8))
    for by in (0, 1):
        assert_close(jax.grad(frugal, by)(w, xs), jax.grad(loss, by)(w, xs))
    (loop,) = el.plans(jax.grad(frugal))(w, xs)
    assert (loop.batch, loop.copied_bytes) == (1, 0)
    assert temp_bytes(jax.grad(frugal), w, xs) < xs.nbytes / 2


def test_a_loop_that_reads_nothing():
    def loss(w: Any) -> Any:
        _, ones = lax.scan(lambda c, _: (c, jnp.ones(())), None, None, length=5)
        return w * jnp.sum(ones)

    assert jax.grad(el.Reschedule(loss, el.Recursive(4)))(2.0) == 5
