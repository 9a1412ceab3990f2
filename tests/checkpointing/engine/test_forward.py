"""The forward sweep that stores carries."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqloop as el
from eqloop._programs._equations import equations
from eqloop.checkpointing import Loop
from eqloop.checkpointing.engine.orders._levels import Nest, nests
from eqloop.checkpointing.engine.orders._nested import Nested
from eqloop.checkpointing.engine.orders._revolved import Revolved
from eqloop.checkpointing.engine.slots._host_slots import HostSlots
from eqloop.checkpointing.engine.slots._slots import DeviceSlots
from eqloop.checkpointing.steps._step import make_step

from ...compiling import temp_bytes

pytestmark = pytest.mark.sampled

H, XS = jnp.linspace(-1.0, 1.0, 3), jnp.sin(jnp.arange(31.0))
LOOP = Loop(31, x_axes=(0,))
ORDERS = {
    "every": Nested((Nest((31,)),)),
    "equal": Nested((Nest((1,), 31),)),
    "two nests": Nested((Nest((7, 4)), Nest((3,)))),
    "binomial": Revolved(31, 4),
}
LOOPS = {
    "all": LOOP,
    "in reverse": dataclasses.replace(LOOP, reverse=True, unroll=2),
    "some kept": dataclasses.replace(LOOP, kept=range(3, 31, 5)),
    "none kept": dataclasses.replace(LOOP, kept=range(0)),
}


def make(outputs):
    def run(consts, carry, x):
        h = jnp.tanh(carry[0] * consts[0] + x[0])
        return [h], [jnp.cos(h)] * outputs

    types = [[jax.typeof(H)], [jax.typeof(H)], [jax.typeof(XS[0])]]
    return make_step(run, *types)


@pytest.mark.parametrize("outputs", [0, 1])
@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_what_a_sweep_leaves(order, loop, outputs):
    step = make(outputs)

    def sweep(consts, init, xs):
        segments = order.in_segments(step, loop, consts, xs)
        return DeviceSlots().sweep(segments, (True,), init)

    reached, (slots,) = jax.jit(sweep)([2 * H], [H], [XS])
    (carry,), ys = reached.carry, reached.ys
    assert reached.position == loop.length
    each = [H]
    for x in XS[::-1] if loop.reverse else XS:
        each.append(jnp.tanh(each[-1] * 2 * H + x))
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    close(carry, each[-1])
    close(slots[: len(order.starts)], jnp.stack([each[i] for i in order.starts]))
    if outputs:
        after = each[:0:-1] if loop.reverse else each[1:]
        kept = range(31) if loop.kept is None else loop.kept
        close(ys[0], np.cos(np.stack(after))[np.array(kept, int)])
    else:
        assert not ys


@pytest.mark.parametrize("outputs", [0, 1])
def test_no_carry_is_stored_between_two_that_are_kept(outputs):
    """A loop over steps that carries the slots would write to them at every step."""
    order = Nested((Nest((5, 6)), Nest((1,))))
    step, slots = make(outputs), DeviceSlots()
    segments = order.in_segments(step, LOOP, [H], [XS])
    sweep = lambda init: slots.sweep(segments, (True,), init)
    program = jax.make_jaxpr(sweep)([H])
    (stored,) = slots.types([jax.typeof(H)], len(order.starts) + 1)
    loops = [eqn for eqn in equations(program) if eqn.primitive.name == "scan"]
    carrying = [stored.shape in [v.aval.shape for v in eqn.outvars] for eqn in loops]
    assert carrying == [True, False, True]


def test_outputs_that_nobody_needs_take_no_memory():
    """Of loops in loops, XLA drops them only where all trip counts are static."""
    xs = jnp.ones(1000)
    step = lambda h, x: (jnp.sin(h + x), jnp.outer(h, h))
    for schedule in (el.Chunked(30), el.Binomial(5), el.Recursive(6)):
        scan = el.Scan(step, schedule=schedule)
        run = jax.grad(lambda h, scan=scan: jnp.sum(scan(h, xs)[0]))
        assert temp_bytes(run, (30,)) < xs.size * 30 * 4


EQUAL = Nested((Nest((5, 6)),)), Nested((Nest((30,)),))
UNEQUAL = Nested((Nest((3, 6)), Nest((2, 5)), Nest((1,))))


@pytest.mark.parametrize(
    ("slots", "orders"),
    [(DeviceSlots(), (*EQUAL, UNEQUAL)), (HostSlots(), EQUAL)],
    ids=["on the device", "on the host"],
)
def test_nested_levels_have_static_trip_counts(slots, orders):
    """A GPU would wait for its host at each step of a loop that has another one."""
    for order in orders:
        loop = dataclasses.replace(LOOP, length=order.length)
        segments = order.in_segments(make(1), loop, [H], [XS[: order.length]])
        sweep = lambda h, segments=segments: slots.sweep(segments, (True,), h)
        program = jax.make_jaxpr(sweep)([H])
        assert "while" not in {eqn.primitive.name for eqn in equations(program)}


@pytest.mark.parametrize("base", [2, 3, 16])
def test_nests_are_few_enough_for_that(base):
    step = make(0)
    for length in range(2, 500):
        loop = dataclasses.replace(LOOP, length=length)
        order = Nested(nests(length, base))
        assert order.in_segments(step, loop, [], []).are_static
