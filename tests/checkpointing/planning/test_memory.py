"""Temporary memory of compiled derivatives, as XLA gives it: nothing is run."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import pytest

import eqloop as el

from ...compiling import temp_bytes
from ...marks import slow
from ..steps import cell

pytestmark = pytest.mark.sampled

BATCH = 32


def loss(schedule: Any) -> Callable[..., jax.Array]:
    """A number to differentiate with respect to `w`, `h` and `xs`."""

    def run(w: Any, h: Any, xs: Any) -> jax.Array:
        f = lambda h, x: (cell(w, h, x), None)
        return jnp.sum(el.Scan(f, schedule=schedule)(h, xs)[0])

    return run


def equinox_loss(checkpoints: int) -> Callable[..., jax.Array]:
    def run(w: Any, h: Any, xs: Any) -> jax.Array:
        f = lambda h, x: (cell(w, h, x), None)
        scan = eqxi.scan(f, h, xs, kind="checkpointed", checkpoints=checkpoints)
        return jnp.sum(scan[0])

    return run


def summed(loss: Callable[..., jax.Array], *axes: int | None) -> Callable[..., Any]:
    """The sum over a batch, whose axes in `w`, `h` and `xs` are given."""
    return lambda *args: jnp.sum(jax.vmap(loss, axes)(*args))


def shapes(length: int, width: int) -> tuple[tuple[int, ...], ...]:
    return (width, width), (width,), (length, width)


ALL = (0, 1, 2)
LONG = shapes(4096, 64)
SHORT = shapes(1024, 16)
XS_BYTES = 4 * 1024 * 16


@pytest.mark.parametrize(
    ("schedule", "slots"),
    [
        (el.Recursive(16, batch=1), 3 * 16),
        (el.Chunked(64), 2 * 64),
        (el.Binomial(30), 30),
        (el.Binomial(3), 3),
    ],
    ids=str,
)
def test_a_gradient_takes_its_slots_and_little_besides(schedule, slots):
    carry = 4 * 64
    taken = temp_bytes(jax.grad(loss(schedule), ALL), *LONG)
    assert slots * carry <= taken <= (slots + 16) * carry


@pytest.mark.parametrize("size", [slow((1000, 64)), (300, 256)], ids=str)
def test_by_default_steps_are_reversed_together_in_little_more_memory(size):
    # Besides the products that are added to the cotangents of the weights, which are
    # used twice.
    args, weights = shapes(*size), 2 * 4 * size[1] ** 2
    alone, default = el.Recursive(16, batch=1), el.Recursive(16)
    w, h, xs = (jnp.zeros(shape) for shape in args)
    scan = el.Scan(lambda h, x: (cell(w, h, x), None), schedule=alone)
    slots = scan.plan(h, xs).slots * h.nbytes
    alone = temp_bytes(jax.grad(loss(alone), ALL), *args)
    default = temp_bytes(jax.grad(loss(default), ALL), *args)
    assert alone < default <= alone + weights + max(slots, 2**16)


CELLS = [(eqx.nn.GRUCell, 32), *map(slow, [eqx.nn.GRUCell] * 2, [64, 128])]
CELLS += [slow(eqx.nn.LSTMCell, width) for width in (32, 64, 128)]


@pytest.mark.parametrize(("kind", "width"), CELLS)
@pytest.mark.parametrize("length", [128, *map(slow, (100, 700))])
def test_by_default_recurrent_cells_keep_to_their_room(kind, width, length):
    """Small ones have weights whose product is less than what a batch saves."""
    cell = kind(width, width, key=jax.random.key(0))
    carry, xs = jnp.zeros(width), jnp.zeros((length, width))
    init = (carry, carry) if kind is eqx.nn.LSTMCell else carry

    def taken(schedule: el.AbstractSchedule) -> int:
        def of(cell: Any, init: Any, xs: Any) -> jax.Array:
            f = lambda carry, x: (cell(x, carry), None)
            last, _ = el.Scan(f, schedule=schedule)(init, xs)
            return sum(map(jnp.sum, jax.tree.leaves(last)), jnp.zeros(()))

        params, static = eqx.partition(cell, eqx.is_array)
        run = jax.grad(lambda p, *rest: of(eqx.combine(p, static), *rest), (0, 1, 2))
        return temp_bytes(run, params, init, xs)

    alone = el.Recursive(16, batch=1)
    f = lambda carry, x: (cell(x, carry), None)
    plan = el.Scan(f, schedule=alone).plan(init, xs)
    slots = plan.slots * sum(leaf.nbytes for leaf in jax.tree.leaves(init))
    weights = sum(
        leaf.nbytes for leaf in jax.tree.leaves(eqx.filter(cell, eqx.is_array))
    )
    assert taken(el.Recursive(16)) <= taken(alone) + weights + max(slots, 2**16)


def test_a_gradient_with_stored_residuals_takes_what_lax_scan_takes():
    def plain(w: Any, h: Any, xs: Any) -> jax.Array:
        return jnp.sum(jax.lax.scan(lambda h, x: (cell(w, h, x), None), h, xs)[0])

    ours = temp_bytes(jax.grad(loss(el.StoreAll()), ALL), *SHORT)
    assert ours == temp_bytes(jax.grad(plain, ALL), *SHORT)


def test_no_more_than_equinox_takes():
    ours = temp_bytes(jax.grad(loss(el.Binomial(30)), ALL), *LONG)
    assert ours <= temp_bytes(jax.grad(equinox_loss(30), ALL), *LONG)


@pytest.mark.slow
def test_no_more_than_equinox_takes_of_a_batch():
    w, h, xs = SHORT
    args = (w, (BATCH, *h), (BATCH, *xs))
    ours, theirs = loss(el.Binomial(30)), equinox_loss(30)
    ours = temp_bytes(jax.grad(summed(ours, None, 0, 0)), *args)
    assert ours <= temp_bytes(jax.grad(summed(theirs, None, 0, 0)), *args)


def test_memory_does_not_grow_with_the_length():
    gradient = jax.grad(loss(el.Binomial(12)), (0, 1))
    longer = temp_bytes(gradient, *shapes(100_000, 16))
    assert longer <= temp_bytes(gradient, *shapes(1_000, 16)) + 1024


@pytest.mark.parametrize("schedule", [el.Recursive(16), el.Binomial(30)], ids=str)
def test_xs_that_are_not_differentiated_have_no_cotangents(schedule):
    # A buffer for them would be temporary: it is no output.
    assert temp_bytes(jax.grad(loss(schedule), (0, 1)), *SHORT) < XS_BYTES / 8


@pytest.mark.parametrize("schedule", [el.Recursive(4), el.Binomial(4)], ids=str)
def test_parameters_that_are_not_batched_have_one_accumulator(schedule):
    width = 64
    w, h, xs = shapes(64, width)
    gradient = jax.grad(summed(loss(schedule), None, 0, 0))
    taken = temp_bytes(gradient, w, (BATCH, *h), (BATCH, *xs))
    assert taken < BATCH * (4 * width * width) / 2


@pytest.mark.parametrize("schedule", [el.Recursive(16), el.Binomial(30)], ids=str)
def test_xs_that_are_not_batched_have_one_accumulator(schedule):
    w, h, xs = SHORT
    gradient = jax.grad(summed(loss(schedule), None, 0, None), ALL)
    assert temp_bytes(gradient, w, (BATCH, *h), xs) < BATCH * XS_BYTES / 8


@pytest.mark.parametrize("axis", [0, 2])
def test_xs_are_not_copied_to_bring_their_loop_axis_to_the_front(axis):
    w, h, (length, width) = SHORT
    xs = (BATCH, length, width) if axis == 0 else (length, width, BATCH)
    gradient = jax.grad(summed(loss(el.Binomial(30)), None, 0, axis), ALL)
    assert temp_bytes(gradient, w, (BATCH, *h), xs) < BATCH * XS_BYTES / 8


@pytest.mark.parametrize("schedule", [el.Recursive(16), el.Binomial(30)], ids=str)
def test_forward_over_reverse_keeps_to_the_slots(schedule):
    gradient = jax.grad(loss(schedule))
    push = lambda w, h, xs: jax.jvp(lambda w: gradient(w, h, xs), (w,), (w,))
    assert temp_bytes(push, *SHORT) < XS_BYTES / 2


def test_reverse_over_reverse_keeps_to_the_slots():
    gradient = jax.grad(loss(el.Binomial(30)))
    norm = lambda *args: jnp.sum(gradient(*args) ** 2)
    assert temp_bytes(jax.grad(norm), *SHORT) < XS_BYTES / 2


def test_forward_mode_stores_nothing():
    run = loss(el.Binomial(30))
    push = lambda w, h, xs: jax.jvp(lambda w: run(w, h, xs), (w,), (w,))
    assert temp_bytes(push, *SHORT) < 20 * 4 * 16


def wave(c: Any, x: Any) -> Any:
    """Two leaves of the carry, and a `y` that no loss has to read."""
    u, v = c
    around = sum(jnp.roll(u, by, axis) for axis in (0, 1) for by in (-1, 1))
    v = v + 0.1 * (around - 4 * u) + x - 0.01 * u**3
    return (u + 0.1 * v, v), u[3, 3]


def last_carry(c: Any) -> dict[str, jax.Array]:
    """Losses whose cotangents depend on the last carry, or do not."""
    leaves = jax.tree.leaves(c)
    return {
        "squares": sum(map(jnp.sum, [x**2 for x in leaves]), jnp.zeros(())),
        "sum": sum(map(jnp.sum, leaves), jnp.zeros(())),
        "sum of one": jnp.sum(leaves[0]),
    }


@pytest.mark.parametrize("kind", ["squares", "sum", "sum of one"])
@pytest.mark.parametrize(
    "schedule",
    [
        el.StoreAll(),
        el.Chunked(6, batch=1),
        slow(el.Chunked(6, batch=3)),
        el.Binomial(5),
        slow(el.Binomial(4, block=3)),
        el.Budget(100_000, measure=False),
        slow(el.Budget(200_000, measure=False)),
    ],
    ids=str,
)
@pytest.mark.parametrize("argnums", [0, slow((0, 1))])
def test_plans_count_cotangents_that_are_constants(schedule, kind, argnums):
    args = (jnp.ones((32, 32)), jnp.zeros((32, 32))), jnp.zeros(36)
    scan = el.Scan(wave, schedule=schedule)
    grad = jax.grad(lambda c, xs: last_carry(scan(c, xs)[0])[kind], argnums)
    planned = el.plans(grad)(*args)[0].plan.peak_bytes
    # JAX 0.10 also keeps constants of orders that reverse in several loops, which plans
    # do not count: at most one carry.
    uncounted = 2 * 4 * 32 * 32 if jax.__version_info__ < (0, 11) else 0
    assert temp_bytes(grad, *args) <= planned + uncounted


@pytest.mark.parametrize(
    "schedule",
    [el.Chunked(64), el.Binomial(9), slow(el.Budget("20kB", measure=False))],
    ids=str,
)
def test_plans_count_on_no_memory_of_inputs_without_influence(schedule):
    # XLA could use the memory of their cotangents, if it were asked for them.
    scan = el.Scan(lambda h, x: (jnp.sin(h) * 1.1, None), schedule=schedule)
    args = jnp.ones(8), jnp.ones((512, 64))
    loss = lambda h, xs: jnp.sum(scan(h, xs)[0] ** 2)
    plan = scan.plan(*args)
    for argnums in (0, (0, 1)):
        grad = jax.grad(loss, argnums)
        assert el.plans(grad)(*args)[0].plan.peak_bytes <= plan.peak_bytes
        assert temp_bytes(grad, *args) <= plan.peak_bytes
