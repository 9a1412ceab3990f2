"""`ScanWhile` as a user sees it: what it returns, what it costs, and wrong calls."""

import functools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqloop as el

from ..asserts import assert_close, assert_raises
from ..compiling import temp_bytes
from ..marks import slow, slow_if

pytestmark = pytest.mark.sampled


def below(limit):
    return lambda carry: carry < limit


def add(total, x):
    return total + x, total


def test_it_is_the_loop_written_out():
    xs = jnp.arange(8.0)
    total, ys, steps = el.ScanWhile(below(10.0), add, max_steps=8)(0.0, xs)
    assert (total, steps) == (10.0, 5)
    assert ys.tolist() == [0.0, 0.0, 1.0, 3.0, 6.0, 0.0, 0.0, 0.0]


def test_the_most_steps_are_run_if_nothing_stops_it():
    always = lambda carry: True
    total, ys, steps = el.ScanWhile(always, add, max_steps=4)(0.0, jnp.ones(4))
    assert (total, steps, ys.tolist()) == (4.0, 4, [0.0, 1.0, 2.0, 3.0])


@pytest.mark.parametrize("max_steps", [0, 1])
@pytest.mark.parametrize("limit", [-1.0, 9.0])
def test_no_steps(max_steps, limit):
    loop = el.ScanWhile(below(limit), add, max_steps=max_steps)
    run = jax.value_and_grad(lambda init: loop(init, jnp.ones(max_steps))[0])
    runs = max_steps * (limit > 0)
    assert run(0.0) == (runs, 1.0)
    total, ys, steps = loop(0.0, jnp.ones(max_steps))
    assert (total, ys.shape, steps) == (runs, (max_steps,), runs)


def test_the_last_element_comes_first_in_reverse():
    loop = el.ScanWhile(below(10.0), add, max_steps=8, reverse=True)
    total, ys, steps = loop(0.0, jnp.arange(8.0))
    assert (total, steps) == (13.0, 2)
    assert ys.tolist() == [0.0] * 6 + [7.0, 0.0]


def test_leaves_of_all_kinds():
    class Cell(eqx.Module):
        rate: jax.Array
        name: str

        def __call__(self, carry, x, *, key):
            h, words, i, _ = carry
            h = h + self.rate * x["u"] + jax.random.normal(key, h.shape)
            key = jax.random.split(key)[0]
            return (h, words, i + 1, key), (h, key, i, None, self.name)

    loop = el.ScanWhile(
        lambda carry: carry[2] < 3, Cell(jnp.ones(2), "cell"), max_steps=5
    )
    xs = {"u": jnp.ones((5, 2)), "static": "x"}
    init = (jnp.zeros(2), "words", 0, jax.random.key(1))
    (h, words, i, _), ys, steps = loop(init, xs, key=jax.random.key(0))
    assert (words, i, steps, ys[3:]) == ("words", 3, 3, (None, "cell"))
    keys = jax.random.split(jax.random.key(0), 5)
    by_hand = sum(1 + jax.random.normal(key, (2,)) for key in keys[:3])
    np.testing.assert_allclose(h, by_hand, rtol=1e-6)
    assert ys[1].shape == (5,)
    assert (jax.random.key_data(ys[1][3:]) == 0).all()
    grads = eqx.filter_grad(
        lambda loop: loop(init, xs, key=jax.random.key(0))[0][0].sum()
    )(loop)
    assert grads.f.rate.tolist() == [3.0, 3.0]


def test_it_is_a_decorator():
    @el.ScanWhile(cond=below(3.0), max_steps=7)
    def count(carry, x):
        return carry + 1.0, None

    assert count(0.0)[2] == 3


def test_what_the_condition_reads_is_not_differentiated():
    def loss(limit, x):
        loop = el.ScanWhile(lambda c: c < lax.stop_gradient(limit), add, max_steps=4)
        return loop(0.0, x * jnp.ones(4))[0]

    both = lambda limit, x: el.ScanWhile(below(limit), add, max_steps=4)(
        0.0, x * jnp.ones(4)
    )[0]
    assert jax.grad(both, (0, 1))(1.5, 1.0) == (0.0, 2.0)
    assert jax.grad(loss, 1)(1.5, 1.0) == 2.0


def counted(loop_of):
    """From a limit to how often the step is evaluated, by a primal and a gradient."""
    count = 0

    def tick():
        nonlocal count
        count += 1

    def step(carry, x):
        jax.debug.callback(tick)
        return (carry[0] + 1, jnp.sin(carry[1]) + x), carry[1]

    @functools.partial(jax.jit, static_argnums=1)
    def run(limit, is_gradient):
        def loss(x):
            loop = loop_of(lambda carry: carry[0] < limit, step)
            (_, x), ys, _ = loop((0, x), jnp.zeros(64))
            return x + ys.sum()

        return jax.grad(loss)(0.5) if is_gradient else loss(0.5)

    def evaluations(limit, is_gradient=True):
        nonlocal count
        jax.effects_barrier()
        count = 0
        run(limit, is_gradient).block_until_ready()
        jax.effects_barrier()
        return count

    return evaluations


@pytest.mark.parametrize(
    ("schedule", "again"),
    [
        (el.StoreAll(), lambda n: 0),
        (el.Chunked(8), lambda n: n - -(-n // 8)),
        (el.Binomial(1), lambda n: n * (n - 1) // 2),
    ],
    ids=["every carry", "chunks", "one carry"],
)
def test_what_is_not_run_is_not_reversed(schedule, again):
    """Twice for each step that is run, and for the carries in between."""
    count = counted(
        lambda cond, f: el.ScanWhile(cond, f, max_steps=64, schedule=schedule)
    )
    for n in (0, 1, 5, 8, 9, 64):
        assert count(n, is_gradient=False) == n
        assert count(n) == 2 * n + again(n)


def test_a_binomial_loop_of_few_steps_needs_few_again():
    count = counted(
        lambda cond, f: el.ScanWhile(cond, f, max_steps=64, schedule=el.Binomial(4))
    )
    plan = el.ScanWhile(below(1), add, max_steps=64, schedule=el.Binomial(4)).plan(
        0.0, jnp.zeros(64)
    )
    assert count(64) == plan.evaluations
    for n in (1, 3, 10):
        assert 2 * n <= count(n) <= 2 * n + n * (n - 1) // 2


def test_no_slots_and_outputs_are_copied_in_a_batch_of_gradients():
    """Each example ends by itself, and yet no buffer is selected as a whole."""
    loop = el.ScanWhile(lambda h: h.sum() < 4.0, lambda h, x: (h + x, h), max_steps=99)

    def loss(xs):
        h, ys, _ = loop(jnp.zeros(3), xs)
        return h.sum() + (ys**2).sum()

    xs = jnp.ones((2, 99, 3))
    text = str(jax.make_jaxpr(jax.vmap(jax.grad(loss)))(xs))
    compiled = jax.jit(jax.vmap(jax.grad(loss))).lower(xs).as_text()
    assert "select" in text + compiled
    selected = re.findall(r"stablehlo\.select.*tensor<2x99x3xf32>", compiled)
    selected += re.findall(r"stablehlo\.select.*tensor<99x2x3xf32>", compiled)
    assert not selected


def singular(p, left, xs):
    """Infinite derivatives where the loop has ended: of `sqrt` and `1 / left`."""

    def step(carry, x):
        left, h = carry
        h = jnp.sin(h + p[0] * jnp.sqrt(left) + p[1] / left + x)
        return (left - 1, h), h / left

    loop = el.ScanWhile(lambda carry: carry[0] > 0, step, max_steps=6)
    (_, h), ys, _ = loop((left, jnp.ones(2)), xs)
    return h.sum() + ys.sum()


def safe(p, left, xs):
    def step(carry, x):
        left, h = carry
        runs, at = left > 0, jnp.where(left > 0, left, 1)
        new = jnp.sin(h + p[0] * jnp.sqrt(at) + p[1] / at + jnp.where(runs, x, 0))
        h = jnp.where(runs, new, h)
        return (left - 1, h), jnp.where(runs, h / at, 0)

    (_, h), ys = lax.scan(step, (left, jnp.ones(2)), xs)
    return h.sum() + ys.sum()


@pytest.mark.parametrize("mode", [jax.grad, slow(jax.hessian)], ids=["once", "twice"])
def test_steps_that_are_not_run_leak_into_no_derivative(mode):
    """Not even if what they would have read is no number."""
    p, lefts = jnp.array([0.7, 0.2]), jnp.array([0.0, 2.0, 6.0, 1.0])
    xs = jnp.sin(jnp.arange(4 * 6 * 2.0)).reshape(4, 6, 2)
    is_run = jnp.arange(6.0)[None, :, None] < lefts[:, None, None]
    xs = jnp.where(is_run, xs, jnp.nan)
    total = lambda f: lambda p, xs: jax.vmap(f, (None, 0, 0))(p, lefts, xs).sum()
    each = lambda f: jax.vmap(jax.grad(f, (0, 2)), (None, 0, 0))
    actual, expected = (
        jax.jit(mode(total(f), (0, 1)))(p, xs) for f in (singular, safe)
    )
    assert_close(actual, expected, atol=1e-4)
    actual, expected = (jax.jit(each(f))(p, lefts, xs) for f in (singular, safe))
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-4)


def test_the_plan_is_that_of_all_steps():
    loop = el.ScanWhile(lambda h: h.sum() > 1, lambda h, x: (h * x, h), max_steps=100)
    plan = loop.plan(jnp.zeros(8), jnp.zeros(100))
    assert (plan.length, plan.schedule) == (100, el.Recursive(16))
    schedule = el.StoreAll()
    all_carries = el.ScanWhile(loop.cond, loop.f, max_steps=100, schedule=schedule)
    assert all_carries.plan(jnp.zeros(8), jnp.zeros(100)).slots == 100


@pytest.mark.slow
def test_a_frontier_has_no_plan_that_stores_residuals():
    loop = el.ScanWhile(lambda h: h.sum() > 1, lambda h, x: (h * x, h), max_steps=100)
    plans = loop.frontier(jnp.zeros(8), jnp.zeros(100))
    assert len(plans) > 0
    assert not any(plan._layout.stores_residuals for plan in plans)


@pytest.mark.slow
def test_a_budget_is_kept_to():
    h, xs = jnp.ones(512), jnp.ones((256, 512))
    step = lambda h, x: (jnp.sin(h * x), None)
    loop = el.ScanWhile(
        lambda h: h[0] > 0, step, max_steps=256, schedule=el.Budget("64KiB")
    )
    plan = loop.plan(h, xs)
    assert plan.peak_bytes <= 64 * 1024

    def loss(h, xs):
        return loop(h, xs)[0].sum()

    assert temp_bytes(jax.grad(loss), h, xs) <= 64 * 1024


@pytest.mark.slow
def test_a_budget_is_kept_to_where_residuals_are_small():
    """None are stored in such a loop, and carries are what its plan is made for."""
    step = lambda h, _: (h + 0.1 * jnp.sin(h[0] * h[1]), None)

    def gradient(schedule):
        settings = dict(max_steps=100, schedule=schedule)
        loop = el.ScanWhile(lambda h: h[0] < 9, step, **settings)
        return jax.grad(lambda h: jnp.sum(loop(h)[0] ** 2))

    h = jnp.linspace(0.0, 1.0, 1000)
    with pytest.raises(ValueError, match="It needs at least") as error:
        el.plans(gradient(el.Budget(1, measure=False)))(h)
    least = int(re.search(r"which is (\d+) bytes", str(error.value))[1])
    assert least < 100 * h.nbytes / 4
    for nbytes in (least, 4 * least):
        of_budget = gradient(el.Budget(nbytes, measure=False))
        (found,) = el.plans(of_budget)(h)
        taken = temp_bytes(of_budget, h)
        assert taken <= found.plan.peak_bytes <= nbytes


STOPPING = {
    "ScanWhile": lambda cond, body: el.ScanWhile(
        cond, lambda h, _: (body(h), None), max_steps=64, schedule=el.Binomial(6)
    ),
    "BoundedWhileLoop": lambda cond, body: el.BoundedWhileLoop(
        cond, body, max_steps=64, base=8
    ),
    "CheckpointedWhileLoop": lambda cond, body: el.CheckpointedWhileLoop(
        cond, body, checkpoints=6
    ),
}


@pytest.mark.parametrize("kind", slow_if(lambda k: k != "ScanWhile", STOPPING))
def test_what_a_loop_starts_from_is_counted_once(kind):
    """Whether it starts from an input, or from what another operation has made.

    A batch of loops holds it once more, for examples that have stopped.
    """
    make = STOPPING[kind]
    loop = make(lambda h: h.sum() < 1e9, lambda h: jnp.tanh(1.1 * h + 1))
    last = lambda h: jnp.sum((loop(h)[0] if kind == "ScanWhile" else loop(h)) ** 2)
    h = jnp.ones(20_000)
    batch = lambda h: jax.vmap(last)(h.reshape(4, 5000)).sum()
    for of_loop in (last, lambda h: last(jnp.sin(h) * h), batch):
        gradient = jax.grad(of_loop)
        (found,) = el.plans(gradient)(h)
        taken = temp_bytes(gradient, h)
        assert taken <= found.plan.peak_bytes <= taken + h.nbytes / 4


WRONG = {
    "more rows than steps": (
        lambda: el.ScanWhile(below(1), add, max_steps=5)(0.0, jnp.ones(20)),
        "ValueError: … Pass `xs[:5]`, or `max_steps=20`.",
    ),
    "more rows than steps, in a tree": (
        lambda: el.ScanWhile(below(1), add, max_steps=5)(0.0, [jnp.ones(20)] * 2),
        "ValueError: … Pass `jax.tree.map(lambda x: x[:5], xs)`, or `max_steps=20`.",
    ),
    "fewer rows than steps": (
        lambda: el.ScanWhile(below(1), add, max_steps=5)(0.0, jnp.ones(3)),
        "ValueError: … Pass `max_steps=3`, or longer arrays.",
    ),
    "rows of several lengths": (
        lambda: el.ScanWhile(below(1), add, max_steps=5)(
            0.0, [jnp.ones(3), jnp.ones(2)]
        ),
        "ValueError: … Check the axes.",
    ),
    "no max_steps": (
        lambda: el.ScanWhile(below(1), add),
        "TypeError: … missing a required argument: 'max_steps'",
    ),
    "unroll": (
        lambda: el.ScanWhile(below(1), add, max_steps=2, unroll=2),
        "ValueError: ScanWhile: `unroll` must be 1, not 2: `cond` is called after",
    ),
    "setting": (
        lambda: el.ScanWhile(below(1), add, max_steps=2, length=3),
        "TypeError: … ScanWhile has no setting 'length'",
    ),
    "no boolean": (
        lambda: el.ScanWhile(lambda c: c, add, max_steps=2)(0.0, jnp.ones(2)),
        "TypeError: ScanWhile: `cond` must return a scalar boolean, but it returned",
    ),
    "length": (
        lambda: el.ScanWhile(below(1), add, max_steps=2)(0.0, jnp.ones(3)),
        "ValueError: ScanWhile: these lengths must all be the same:\n  max_steps: "
        "2\n  xs: 3",
    ),
    "no pair": (
        lambda: el.ScanWhile(below(1), lambda c, x: c, max_steps=2)(0.0),
        "TypeError: ScanWhile: f must return a pair `(carry, y)`, but it returned",
    ),
    "carry": (
        lambda: el.ScanWhile(below(1), lambda c, x: (jnp.ones(2), x), max_steps=2)(
            jnp.zeros(())
        ),
        "TypeError: ScanWhile: the carry must keep its shape, dtype and structure",
    ),
    "key": (
        lambda: el.ScanWhile(below(1), add, max_steps=2)(
            0.0, key=jax.random.split(jax.random.key(0))
        ),
        "ValueError: ScanWhile: `key` must be one key",
    ),
    "positional max_steps": (
        lambda: el.ScanWhile(below(1), add, 4),
        "TypeError: ScanWhile(cond, f, *, max_steps): too many positional "
        "arguments. Pass",
    ),
    "truth as max_steps": (
        lambda: el.ScanWhile(below(1), add, max_steps=True),
        "TypeError: … but it is True, of type bool.",
    ),
    "cond of a vector": (
        lambda: el.ScanWhile(lambda c: c < jnp.ones(3), add, max_steps=2)(
            0.0, jnp.ones(2)
        ),
        "TypeError: ScanWhile: `cond` must return a scalar boolean, but it returned "
        "bool[3].",
    ),
    "cond of nothing": (
        lambda: el.ScanWhile(lambda c: None, add, max_steps=2)(0.0, jnp.ones(2)),
        "TypeError: ScanWhile: `cond` must return a scalar boolean, but it returned "
        "None.",
    ),
    "class of schedules": (
        lambda: el.ScanWhile(below(1), add, max_steps=2, schedule=el.Recursive),
        "TypeError: ScanWhile: `schedule` must be a schedule, such as "
        "`el.Recursive(16)`, not <cl",
    ),
    "auto without a budget": (
        lambda: el.ScanWhile(
            below(1), add, max_steps=2, policy="auto", schedule=el.Binomial(3)
        ),
        "ValueError: ScanWhile: with `policy='auto'` a budget chooses what each "
        "step keeps",
    ),
    "no initial carry": (
        lambda: el.ScanWhile(below(1), add, max_steps=2)(),
        "TypeError: ScanWhile(init, xs=None, *, key=None, log=None): missing a "
        "required argument: 'init'.",
    ),
    "length at the call": (
        lambda: el.ScanWhile(below(1), add, max_steps=2)(0.0, length=2),
        "TypeError: … length",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(name):
    assert_raises(*WRONG[name])


def test_callbacks_are_not_run_for_examples_that_have_stopped():
    def step(carry, x):
        return carry + 1, jax.pure_callback(lambda x: x, carry, carry)

    def told(carry, x):
        jax.experimental.io_callback(lambda: None, None)
        return carry + 1, None

    loop = el.ScanWhile(below(2), told, max_steps=3)
    with pytest.raises(ValueError, match="Under `vmap`, a while loop also runs"):
        jax.vmap(loop)(jnp.arange(3))


def test_collectives_in_a_batch_of_gradients():
    step = lambda c, x: (c + lax.psum(c, "batch"), None)
    loop = el.ScanWhile(below(2.0), step, max_steps=3)
    init = jnp.array([0.5, 0.25])  # 0.5, 1.25, 3.0 beside 0.25, 1.0, 2.25

    def of_each(loop):
        return jax.vmap(jax.grad(lambda c: loop(c)[0]), axis_name="batch")(init)

    def written_out(c):
        for _ in range(3):
            c = jnp.where(c < 2.0, step(c, None)[0], c)
        return c, None

    np.testing.assert_allclose(of_each(loop), of_each(written_out))


def test_a_rule_that_clips_twice_in_reverse():
    @jax.custom_vjp
    def clipped(x):
        return x

    clipped.defvjp(lambda x: (x, None), lambda _, ct: (jnp.clip(ct, -1, 1),))
    step = lambda c, x: (clipped(jnp.sin(c)), None)
    loop = el.ScanWhile(below(2.0), step, max_steps=3)
    with pytest.raises(ValueError, match="cannot be differentiated twice in reverse"):
        jax.grad(jax.grad(lambda c: loop(c)[0]))(1.0)
