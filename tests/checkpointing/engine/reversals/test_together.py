"""Steps reversed together: where that is done, and what it takes.

That the numbers are right is tested with those of all other schedules.
"""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqloop as el
from eqloop.checkpointing.engine import _backward_step
from eqloop.checkpointing.engine.reversals._block_reversals import ByResiduals
from eqloop.checkpointing.engine.reversals._together import Together
from eqloop.checkpointing.planning._search import layouts

from ....asserts import assert_close
from ....compiling import temp_bytes
from ....marks import slow, slow_if
from ....weights import normal
from ...memory import gradient
from ...steps import gru, recurrent

pytestmark = pytest.mark.sampled


@jax.custom_jvp
def branching_rule(x):
    return x


@branching_rule.defjvp
def _(primals, tangents):
    (x,), (t,) = primals, tangents
    return x, jax.lax.cond(x[0] > 0, lambda: t, lambda: 2 * t)


def branch(h, x):
    return jax.lax.cond(h[0] > 0, jnp.sin, jnp.cos, h) + x, None


def inner_loop(h, x):
    return jax.lax.scan(lambda h, _: (jnp.sin(h + x), None), h, length=2)[0], None


def branch_in_a_loop(h, x):
    return jax.lax.scan(lambda h, _: branch(h, x), h, length=2)[0], None


def inner_planned_loop(h, x):
    return el.CheckpointedForLoop(jnp.sin)(h + x), None


def ruled(h, x):
    return branching_rule(jnp.sin(h + x)), None


def plain(h, x):
    return jax.nn.gelu(h + x), None


def reversal(step):
    plan = el.Scan(step, schedule=el.Recursive(4, batch=3)).plan(
        jnp.ones(3), jnp.ones(40)
    )
    return plan._layout.reversal


@pytest.mark.parametrize("step", [branch, branch_in_a_loop, inner_planned_loop, ruled])
def test_steps_with_branches_are_reversed_one_by_one(step):
    assert reversal(step) == ByResiduals()


def test_other_steps_are_reversed_together():
    assert reversal(plain) == reversal(inner_loop) == Together(3)
    one_by_one = el.Scan(plain, schedule=el.Recursive(4))
    assert one_by_one.plan(jnp.ones(3), jnp.ones(40))._layout.reversal == ByResiduals()


def test_a_branch_that_was_not_taken_has_no_part_in_the_gradient():
    def step(h, x):
        root = lambda: jnp.sqrt(jnp.abs(h - 1))
        return jax.lax.cond(h > 1, root, lambda: h) * x, None

    scan = el.Scan(step, schedule=el.Chunked(8, batch=4))
    xs = jnp.array([2.0, 0.5, 1.0, 3.0, 0.25, 1.0])
    loss = lambda scan: jax.jit(jax.grad(lambda h: scan(h, xs)[0]))
    expected = loss(lambda h, xs: jax.lax.scan(step, h, xs))(1.0)
    np.testing.assert_allclose(loss(scan)(1.0), expected, rtol=1e-6)


MODES = {
    "hessian": jax.hessian,
    "reverse over reverse": lambda f: jax.jacrev(jax.jacrev(f)),
    "a batch": lambda f: lambda h: jax.vmap(jax.grad(f))(jnp.stack([h, 2 * h])),
}


@pytest.mark.parametrize("mode", slow_if(("hessian", "a batch").__contains__, MODES))
def test_a_loop_in_the_step(mode):
    w, xs = 0.9 * jnp.eye(3) + 0.1, jnp.linspace(0, 1, 24).reshape(8, 3)

    def step(h, x):
        sweep = lambda h, _: (jnp.tanh(w @ h + x), None)
        return jax.lax.scan(sweep, h, None, 3)[0], None

    def derivative(schedule):
        scan = el.Scan(step, schedule=schedule)
        return jax.jit(MODES[mode](lambda h: jnp.sum(scan(h, xs)[0] ** 2)))

    found = derivative(el.Chunked(4, batch=2))(jnp.ones(3))
    expected = derivative(el.StoreAll())(jnp.ones(3))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("length", "batch"), [(1, 4), slow(10, 2), slow(23, 3), (23, 7), slow(23, 50)]
)
def test_any_number_of_steps_at_once(length, batch):
    f, init, xs = gru(length, 4)
    xs = jnp.sin(jnp.arange(xs.size).reshape(xs.shape))
    schedule = el.Chunked(10, batch=batch)
    found = jax.jit(gradient(schedule))(f, init, xs)
    expected = jax.jit(gradient(el.StoreAll()))(f, init, xs)
    assert_close(found, expected, atol=1e-6)


def test_the_cotangents_of_a_weight_are_one_product():
    width, batch = 64, 32
    args = recurrent(128, width)
    found = temp_bytes(gradient(el.Chunked(128, batch=batch)), *args)
    # One more set of cotangents, the carries, and some 10 vectors for each step at
    # once; not a matrix for each.
    assert found < 4 * width * (2 * width + 128 + 14 * batch) < 4 * batch * width**2


class Mixed(eqx.Module):
    """Large weights: one that is used twice, one transposed, one of an odd size."""

    twice: jax.Array
    transposed: jax.Array
    odd: jax.Array

    def __call__(self, h, x):
        h = jnp.tanh(self.twice @ jnp.tanh(self.twice @ h + x))
        h = jnp.tanh(h @ self.transposed.T)
        return h, self.odd @ h


def mixed():
    shapes = (128, 128), (128, 128), (131, 128)
    weights = [normal(i, shape, scale=1 / 11) for i, shape in enumerate(shapes)]
    xs = jnp.sin(jnp.arange(10 * 128.0).reshape(10, 128))
    return Mixed(*weights), jnp.ones(128), xs


def _of_mixed(schedule):
    def loss(cell, init, xs):
        h, ys = el.Scan(cell, schedule=schedule)(init, xs)
        return jnp.sum(h**2) + jnp.sum(ys**3)

    return jax.grad(loss, (0, 1, 2))


MODES_OF_GRADIENTS = {
    "grad": lambda grad: grad,
    "jvp of grad": lambda grad: lambda *args: jax.jvp(grad, args, args),
    "vmap of grad": lambda grad: (
        lambda cell, init, xs: jax.vmap(grad, (None, 0, None))(
            cell, jnp.stack([init, 2 * init]), xs
        )
    ),
    "grad of grad": lambda grad: (
        lambda *args: jax.grad(lambda *args: jnp.sum(grad(*args)[1] ** 2))(*args)
    ),
}


@pytest.mark.parametrize("mode", slow_if("vmap of grad".__ne__, MODES_OF_GRADIENTS))
def test_large_products_are_added_part_by_part(mode):
    args = mixed()
    of = MODES_OF_GRADIENTS[mode]
    found = jax.jit(of(_of_mixed(el.Chunked(10, batch=4))))(*args)
    expected = jax.jit(of(_of_mixed(el.StoreAll())))(*args)
    assert_close(found, expected, atol=1e-4)


@pytest.mark.slow
def test_loops_without_a_carry_are_reversed_together_by_default():
    cell, _, xs = mixed()
    xs = jnp.tile(xs, (5, 1))

    def grad(loop):
        def loss(cell, xs):
            row = lambda x: jnp.sum(cell(jnp.ones(128), x)[1] ** 2)
            return jnp.sum(loop(row, xs))

        return jax.grad(loss, (0, 1))

    default = grad(lambda row, xs: el.CheckpointedForLoop(row)(xs))
    alone = el.Recursive(16, batch=1)
    one_by_one = grad(lambda row, xs: el.CheckpointedForLoop(row, schedule=alone)(xs))
    (loop,) = el.plans(default)(cell, xs)
    assert isinstance(loop.plan._layout.reversal, Together)
    assert loop.plan.evaluations == 2 * len(xs)
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(cell))
    least = temp_bytes(one_by_one, cell, xs)
    assert least < temp_bytes(default, cell, xs) <= least + weights + 2**16
    expected = grad(lambda row, xs: jax.lax.map(row, xs))
    twice = lambda f: lambda *args: jax.jvp(f, args, args)
    each = lambda f: jax.vmap(f, (None, 0))
    for mode, x in ((lambda f: f, xs), (twice, xs), (each, jnp.stack([xs, 2 * xs]))):
        a, b = (jax.tree.leaves(jax.jit(mode(f))(cell, x)) for f in (default, expected))
        for left, right in zip(a, b, strict=True):
            np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-3)


def test_products_of_several_weights_are_not_in_memory_at_once():
    width, batch = 256, 8
    cell, init, xs = gru(64, width)
    products = 2 * 3 * width * width * 4
    taken = temp_bytes(gradient(el.Chunked(64, batch=batch)), cell, init, xs)
    # Half of the product of one of the two weights, carries, and the batch.
    assert taken < products // 4 + 4 * width * (64 + 30 * batch) < products // 2


@pytest.mark.parametrize(("rows", "parts"), [(256, 4), (512, 1), (1024, 2), (2048, 4)])
def test_parts_of_a_product_are_large_enough_for_several_cores(rows, parts):
    weight, h = jnp.ones((rows, 256)), jnp.ones(256)
    step = lambda h, x: (jnp.tanh((weight @ h)[:256] + x), None)
    plan = el.Scan(step, schedule=el.Chunked(8, batch=8)).plan(h, jnp.ones((8, 256)))
    assert plan._cost.products == weight.nbytes // parts


def test_a_program_with_the_step_once_is_taken_where_it_is_about_as_fast():
    """Otherwise it was (30, 30), (10, 10): the same evaluations, compiled twice."""
    cell, init, xs = gru(1000, 64)
    assert len(el.Scan(cell, schedule=el.Recursive()).plan(init, xs).levels) == 1


@pytest.mark.parametrize("batch", [10, 20])
def test_what_a_batch_takes_is_counted(batch):
    cells = jax.vmap(eqx.nn.LSTMCell(64, 64, key=jax.random.key(0)))
    f = lambda carry, x: (cells(x, carry), None)
    init, xs = (jnp.zeros((16, 64)),) * 2, jnp.zeros((400, 16, 64))
    scan = el.Scan(f, schedule=el.Recursive(20, batch=batch))
    plan = scan.plan(init, xs)

    def loss(init, xs):
        return jnp.sum(scan(init, xs)[0][0])

    measured = temp_bytes(jax.grad(loss, (0, 1)), init, xs)
    counted = plan._layout.stored_bytes(plan._cost)
    assert 0.9 * measured < counted < 1.3 * measured


def test_what_a_batch_of_loops_takes_is_counted():
    weight, h, xs = normal(0, (32, 32)), jnp.ones(32), jnp.ones((256, 32))

    def step(weight, h, x):
        sweep = lambda h, _: (jnp.tanh(weight @ h + x), None)
        return jax.lax.scan(sweep, h, None, 5)[0], None

    def scan(weight):
        step_of = lambda h, x: step(weight, h, x)
        return el.Scan(step_of, schedule=el.Chunked(256, batch=64))

    def loss(weight, h):
        return jnp.sum(scan(weight)(h, xs)[0])

    plan = scan(weight).plan(h, xs)
    measured = temp_bytes(jax.grad(loss, (0, 1)), weight, h)
    assert 0.9 * measured < plan._layout.stored_bytes(plan._cost) < 1.5 * measured


def test_rows_of_a_table_are_not_made_dense_at_each_step():
    table, batch = jnp.ones((500, 8)), 16
    ids = jnp.arange(64) % 7

    def loss(table, h):
        step = lambda h, i: (jnp.tanh(h + table[i]), None)
        return jnp.sum(el.Scan(step, schedule=el.Chunked(64, batch=batch))(h, ids)[0])

    found = temp_bytes(jax.grad(loss), table, jnp.ones(8))
    assert found < 3 * table.nbytes


def test_a_plan_knows_what_it_takes():
    f, init, xs = gru(200)
    schedule = el.Chunked(200, batch=20)
    plan = el.Scan(f, schedule=schedule).plan(init, xs)
    measured = temp_bytes(gradient(schedule), f, init, xs)
    assert measured <= plan.peak_bytes <= 1.2 * measured + 4096
    assert plan.evaluations == 400


@dataclasses.dataclass(frozen=True)
class Fixed(el.AbstractSchedule):
    """The layout that a budget has found."""

    only: object

    def layout(self, loop):
        return self.only


def found_by_budgets(length):
    """One of each kind of layout. That of batches of a block is tried every day."""
    every = layouts(length, joins=True)
    kinds = {(one.kind, one.order.block > 1): one for one in every}.values()
    is_quick = lambda one: one.order.block > 1 and isinstance(one.reversal, Together)
    first, *others = sorted(kinds, key=is_quick, reverse=True)
    return [first, *map(slow, others)]


@pytest.mark.parametrize("layout", found_by_budgets(12), ids=repr)
def test_gradients_of_gradients_under_all_that_a_budget_may_find(layout):
    w, v, xs = 0.3 * jnp.eye(4), jnp.ones((4, 4)), normal(0, (12, 4))

    def of_gradient(loop):
        step = lambda w: lambda h, x: (jnp.tanh(w @ h + x), None)
        f = lambda w: jnp.sum(loop(step(w))(jnp.zeros(4), xs)[0])
        return jax.grad(lambda w: jnp.vdot(jax.grad(f)(w), v))(w)

    ours = lambda step: el.Scan(step, schedule=Fixed(layout))
    plain = lambda step: lambda h, xs: jax.lax.scan(step, h, xs)
    assert_close(of_gradient(ours), of_gradient(plain), 1e-5, 1e-6)


def test_a_jvp_of_a_gradient_takes_steps_back_together(
    monkeypatch: pytest.MonkeyPatch,
):
    steps = list[int]()
    differentiate = _backward_step._differentiated

    def counting(back, block, is_batch):
        steps.append(1 if block is None else block.length)
        return differentiate(back, block, is_batch)

    monkeypatch.setattr(_backward_step, "_differentiated", counting)
    scan = el.Scan(
        lambda h, x: (jnp.tanh(h + x), None), schedule=el.Recursive(3, batch=3)
    )
    first = jax.grad(lambda h: jnp.sum(scan(h, jnp.ones((9, 4)))[0]))
    h = jnp.ones(4)
    jax.jit(lambda h: jax.jvp(first, (h,), (h,))).lower(h)
    # The batch that is differentiated is that of the gradient, and only once.
    assert steps.count(3) == 1
