"""What a step costs, where that can be counted by hand; what a budget chooses from."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import eqloop as el
from eqloop.checkpointing.engine._layout import Layout
from eqloop.checkpointing.engine._pace import Pace
from eqloop.checkpointing.engine.orders import _binomial
from eqloop.checkpointing.engine.orders._all_at_once import AllAtOnce
from eqloop.checkpointing.engine.orders._levels import Nest
from eqloop.checkpointing.engine.orders._nested import Nested
from eqloop.checkpointing.engine.orders._revolved import Revolved
from eqloop.checkpointing.engine.reversals._block_reversals import ByResiduals
from eqloop.checkpointing.engine.reversals._together import Together
from eqloop.checkpointing.planning._search import MOST_ADVANCES, layouts, orders
from eqloop.checkpointing.planning._work import CPU, work

from ..steps import field, gru, ode, recurrent

pytestmark = pytest.mark.sampled

F32 = 4


def cost(args, policy=None):
    return el.Scan(args[0], policy=policy).plan(*args[1:])._cost


def test_a_recurrent_step():
    found = cost(recurrent(10, width=32))
    vector, matrix = 32 * F32, 32 * 32 * F32
    assert (found.carry, found.read, found.x, found.ct_x) == (vector,) * 4
    assert found.ct_consts == matrix
    # The carry, and both tanh with their derivatives; the weight is no residual. From
    # JAX 0.12 on one tanh does for its derivative, too.
    assert found.residuals in (4 * vector, 5 * vector)
    # Both products of the cotangents are of values that are computed from residuals.
    assert found.reversal > found.evaluation > 0


def test_sums_are_wider_than_weights():
    step, init, xs = recurrent(10, width=32)
    narrow = jax.tree.map(lambda x: x.astype("bfloat16"), (step, init, xs))
    assert cost(narrow).ct_consts == 32 * 32 * F32
    with el.accumulating_in(None):
        assert cost(narrow).ct_consts == 32 * 32 * F32 // 2


def test_a_linear_carry_is_not_read():
    found = cost(field(10, size=8))
    assert found.carry == 2 * 8 * 8 * F32
    assert found.read == 8 * 8 * F32
    assert found.residuals == 8 * 8 * F32


def test_what_leads_to_a_leaf_that_is_read_is_held():
    def step(carry, x):
        h, rate, total = carry
        return (jnp.sin(h * rate), rate * 0.9 + jnp.mean(rate), total + h), None

    init = (jnp.ones(3), jnp.ones(3), jnp.ones(3))
    found = cost((step, init, jnp.ones(5)))
    assert found.carry == 9 * F32
    # The next `h` needs both; the total is needed by nothing.
    assert found.read == found.held == 6 * F32
    slow = lambda carry, x: ((carry[0] + carry[1], jnp.sin(carry[1])), None)
    found = cost((slow, (jnp.ones(3), jnp.ones(3)), jnp.ones(5)))
    assert found.read == found.held == 3 * F32
    turns = lambda carry, x: ((jnp.sin(carry[0]), carry[2], carry[1] * 2), None)
    found = cost((turns, (jnp.ones(3), jnp.ones(3), jnp.ones(3)), jnp.ones(5)))
    assert found.read == found.held == 3 * F32
    # A direction that no cotangent needs, but by which later carries are found.
    later = lambda carry, x: ((jnp.sin(carry[0]) + carry[1], carry[1] * 2), None)
    found = cost((later, (jnp.ones(3), jnp.ones(3)), jnp.ones(5)))
    assert (found.read, found.held) == (3 * F32, 6 * F32)


def test_xs_are_no_residuals():
    found = cost((lambda h, x: (h * x, None), jnp.ones(4), jnp.ones((10, 4))))
    assert found.residuals == 4 * F32  # the carry alone
    # Those along another axis are moved for JAX's derivative of a block.
    step = lambda h, x: (h * x, None)
    scan = el.Scan(step, in_axes=1)
    assert scan.plan(jnp.ones(4), jnp.ones((4, 10)))._cost.residuals == 2 * 4 * F32


def test_a_policy_takes_residuals_away():
    args = gru(10)
    everything = cost(args).residuals
    some = cost(args, el.policies.save_dots).residuals
    none = cost(args, el.policies.save_nothing).residuals
    assert none < some < everything
    assert none == 16 * F32  # the carry alone


def test_integers_and_keys_in_the_carry():
    def step(carry, x):
        h, n, key = carry
        return (jnp.sin(h) * x, n + 1, jax.random.fold_in(key, n)), None

    init = (jnp.ones(3), jnp.int32(0), jax.random.key(0))
    found = cost((step, init, jnp.ones(5)))
    assert found.carry == 3 * F32 + 4 + 8
    # Neither the counter nor the key is needed to reverse a step.
    assert found.read <= 3 * F32


def test_work_is_counted():
    a, b = jnp.ones((3, 5)), jnp.ones((5, 7))
    product = jax.make_jaxpr(jnp.dot)(a, b).jaxpr
    assert work(product, CPU) == pytest.approx(CPU.equation + 2 * 3 * 5 * 7 * CPU.flop)
    loop = jax.make_jaxpr(
        lambda a: jax.lax.scan(lambda c, _: (c + a, None), a, None, 9)
    )
    assert work(loop(a).jaxpr, CPU) == pytest.approx(
        9 * (CPU.equation + 15 * CPU.entry)
    )


def many_leaves(length, count=50):
    """A step of small operations on many leaves."""
    step = lambda h, x: ([jnp.tanh(a * x + x) for a in h], None)
    return step, [jnp.ones(16)] * count, jnp.ones((length, 16))


def test_a_batch_starts_most_operations_once():
    light, heavy = cost(many_leaves(10, 7)), cost(recurrent(10))
    work = light.evaluation + light.reversal
    # The rest are products by which cotangents go back, and the entries of all.
    assert 0.4 * work < light.started_once < 0.8 * work
    assert light.dots_once == 0
    # Two of the step, and two of the weight's cotangent.
    assert heavy.dots_once == 4
    branching = lambda h, x: (jax.lax.cond(x > 0, jnp.sin, jnp.cos, h), None)
    alone = cost((branching, jnp.ones(3), jnp.ones(5)))
    assert (alone.started_once, alone.dots_once) == (0, 0)


@pytest.mark.parametrize(
    ("args", "nbytes", "kind"),
    [
        (gru(512, 32), 180_000, Together),
        (field(512), 2_000_000, ByResiduals),
        (field(512), 200_000, ByResiduals),
    ],
    ids=["gru", "field", "field in little"],
)
def test_steps_are_estimated_to_be_faster_together_where_they_are(args, nbytes, kind):
    schedule = el.Budget(nbytes, measure=False)
    plan = el.Scan(args[0], schedule=schedule).plan(*args[1:])
    assert isinstance(plan._layout.reversal, kind)


def test_an_order_that_runs_more_takes_longer():
    def times(args, *orders):
        found = cost(args)
        return [Layout(order).duration(Pace(found, CPU)) for order in orders]

    slower = (
        Nested((Nest((64,)),)),
        Nested((Nest((8, 8)),)),
        Nested((Nest((4, 4, 4)),)),
        Revolved(64, 2),
        Revolved(64, 1),
    )
    found = times(recurrent(10), *slower)
    assert found == sorted(found)
    everything, revolved = times(ode(10), AllAtOnce(64), Revolved(64, 32))
    assert everything < revolved


@dataclasses.dataclass(frozen=True)
class Told(Pace):
    """What a step and the reversal of one take, and nothing else takes any time."""

    run: float = 0.0
    back: float = 0.0
    back_if_known: float = 0.0

    @property
    def of_known(self):
        return dataclasses.replace(self, back=self.back_if_known)

    @property
    def advance(self):
        return self.run

    def block(self, reversal, count):
        return count * self.back


def test_batches_that_keep_their_products_take_less_time():
    rate = dataclasses.replace(CPU, byte=1.0, iteration=0.0)
    own = dataclasses.replace(cost(recurrent(10)), held=0, known=3)
    pace = Told(own, rate, run=10.0, back=100.0, back_if_known=60.0)
    order = Nested((Nest((2, 4)), Nest((3, 4))))
    none, kept = (Layout(order, reversal=Together(size)) for size in (2, 4))
    # Where a segment is one batch, it keeps the products of its own.
    assert none.duration(pace) - none.reversal.start == (20 + 15) * 10 + 20 * 100
    assert none.duration(pace) - kept.duration(pace) == 20 * 40


def test_whose_time_depends_on_that_of_steps_with_known_products():
    rate = dataclasses.replace(CPU, byte=0.0, iteration=0.0)
    own = dataclasses.replace(cost(recurrent(10)), held=0)
    pace = Told(own, rate, run=0.0, back=100.0, back_if_known=60.0)
    alone = lambda nest, size: Nested((nest,)).reversed_in(pace, Together(size))
    keeps = lambda nest, size: alone(nest, size) == 60 * nest.length
    # A segment that is one batch keeps them.
    assert keeps(Nest((2, 4)), 4)
    assert keeps(Nest((2, 4)), 5)
    assert not keeps(Nest((2, 4)), 3)
    assert not keeps(Nest((4,)), 4)
    assert not keeps(Nest((2, 4), 2), 8)
    assert not keeps(Nest((4, 1)), 4)


def test_more_is_stored_for_the_last_steps_as_far_as_there_is_room():
    def in_batches(length):
        found = layouts(length, joins=True)
        nested = [one for one in found if isinstance(one.order, Nested)]
        assert all(one.order.length == length for one in nested)
        levels = [n for one in nested for nest in one.order.levels for n in nest]
        assert min(levels) >= 1
        joined = [one for one in nested if isinstance(one.reversal, Together)]
        return {(one.order.levels, one.reversal.size) for one in joined}

    found = in_batches(46)
    assert found >= {(((14,), (1, 16), (16,)), 16), (((1, 23), (23,)), 23)}
    # Of many segments not every number is tried.
    parts = {levels for levels, size in in_batches(1600) if size == 16}
    last = [levels[-1] for levels in parts if len(levels) == 2 and len(levels[0]) == 2]
    assert len(last) >= 15


@pytest.mark.parametrize("length", [1, 2, 3, 7, 64, 1009, 100_000])
def test_orders_to_choose_from(length):
    found = list(orders(length))
    assert all(order.length == length for order in found)
    assert all(order.evaluations <= (2 + MOST_ADVANCES) * length for order in found)
    assert AllAtOnce(length) in found
    assert Nested((Nest((length,)),)) in found
    assert len(found) < 3000


def test_the_first_segment_alone():
    for length in (*range(1, 80), 1000):
        for slots in (1, 2, 3, 8, 60):
            first, *_ = _binomial.segments(length, slots)
            assert _binomial.first_segment(length, slots) == first


@pytest.mark.parametrize("length", [100, 96, 90])
def test_batches_leave_no_steps_over_if_they_need_not(length):
    every = (
        layout
        for layout in layouts(length, joins=True)
        if isinstance(layout.reversal, Together) and layout.order.block == 1
    )
    sizes = {(one.order.adjacent, one.reversal.size) for one in every}
    assert {size for adjacent, size in sizes if adjacent == length} == {
        100: {4, 5, 10, 25, 50},
        96: {4, 8, 16, 32, 48},
        90: {3, 6, 15, 30, 45},
    }[length]
    # There is no such size where the number of steps has few divisors.
    assert all(
        adjacent % size == 0
        or not any(adjacent % n == 0 for n in range(size // 2 + 1, size))
        for adjacent, size in sizes
    )


def test_a_loop_in_a_program_costs_as_much_as_all_of_its_steps():
    step = lambda h, _: (jnp.tanh(h), None)
    of = lambda run: work(jax.make_jaxpr(run)(jnp.ones(50)), CPU)
    once, plain = of(jnp.tanh), of(lambda h: jax.lax.scan(step, h, length=100)[0])
    assert plain == 100 * once
    loop = el.CheckpointedScan(step)
    assert of(lambda h: loop(h, length=100)[0]) >= plain
    assert of(jax.vmap(lambda h: loop(h, length=100)[0])) >= plain
