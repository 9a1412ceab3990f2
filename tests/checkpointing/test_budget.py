"""`Budget`: it is kept to, plans are as predicted, errors say what would do."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqloop as el

from ..asserts import assert_close
from ..compiling import temp_bytes
from ..marks import slow
from .memory import gradient
from .steps import STEPS, recurrent

LENGTHS = {"recurrent": 4096, "gru": 2048, "field": 256, "ode": 16384}


def least(f, init, xs, policy=None):
    """The least budget that will do, as the error of one that does not says it."""
    with pytest.raises(ValueError, match="It needs at least") as error:
        el.Scan(f, schedule=el.Budget(1), policy=policy).plan(init, xs)
    return int(re.search(r"which is (\d+) bytes", str(error.value))[1])


def check(f, init, xs, nbytes, policy=None, measure=False):
    """The plan is within the budget, and so is the program, which is as predicted."""
    schedule = el.Budget(nbytes, measure=measure)
    plan = el.Scan(f, schedule=schedule, policy=policy).plan(init, xs)
    temp = temp_bytes(gradient(schedule, policy), f, init, xs)
    assert plan.length == jax.tree.leaves(xs)[0].shape[0]
    assert temp <= plan.peak_bytes <= nbytes
    assert plan.peak_bytes - temp <= max(0.15 * temp, 16 * 1024)
    return plan


@pytest.mark.parametrize("name", ["recurrent"])
def test_a_budget_holds(name):
    args = STEPS[name](LENGTHS[name])
    smallest = least(*args)
    plans = [check(*args, nbytes, measure=True) for nbytes in (smallest, 2**26)]
    times = [plan.relative_time for plan in plans]
    assert times == sorted(times, reverse=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_every_budget_holds(name):
    args = STEPS[name](LENGTHS[name])
    smallest = least(*args)
    powers = (2**power for power in range(10, 27))
    budgets = [smallest, *(nbytes for nbytes in powers if nbytes > smallest)]
    plans = [check(*args, nbytes, measure=True) for nbytes in budgets]
    times = [plan.relative_time for plan in plans]
    assert times == sorted(times, reverse=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["recurrent", "gru", "field"])
def test_a_smaller_budget_never_takes_more(name):
    """The fastest plan that fits into less fits into more: peaks grow with budgets."""
    args = STEPS[name](256)
    smallest = least(*args)
    budgets = [smallest, *(2**p for p in range(10, 24) if 2**p > smallest)]
    schedules = [el.Budget(nbytes, measure=False) for nbytes in budgets]
    peaks = [temp_bytes(gradient(schedule), *args) for schedule in schedules]
    assert peaks == sorted(peaks)
    assert peaks[-1] > 4 * peaks[0]


def branching(length):
    """A step whose steps cannot be reversed together."""
    f = lambda h, x: (jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, h + x), None)
    return f, jnp.ones(8), jnp.ones((length, 8))


def test_hardly_more_is_planned_than_is_taken():
    f, init, xs = branching(16384)
    schedule = el.Chunked(2048, batch=1)
    planned = el.Scan(f, schedule=schedule).plan(init, xs).peak_bytes
    assert planned - 1000 < temp_bytes(gradient_of_loop(f, schedule), init, xs)
    budget = el.Budget("512KiB", measure=False)
    plan = el.Scan(f, schedule=budget).plan(init, xs)
    exact = el.Budget(plan.peak_bytes, measure=False)
    assert el.Scan(f, schedule=exact).plan(init, xs).pinned == plan.pinned
    assert temp_bytes(gradient_of_loop(f, exact), init, xs) <= plan.peak_bytes


def gradient_of_loop(f, schedule):
    """The gradient for a step without parameters."""
    scan = el.Scan(f, schedule=schedule)
    return jax.grad(lambda init, xs: jnp.sum(scan(init, xs)[0] ** 2), (0, 1))


def test_with_a_policy_its_residuals_count():
    args = recurrent(256)
    check(*args, 32 * 1024, el.policies.save_dots)


@pytest.mark.parametrize("nbytes", [slow(8 * 1024), 32 * 1024, slow(160 * 1024)])
def test_lengths_without_divisors(nbytes):
    check(*recurrent(1009), nbytes)


def test_the_gradient_under_a_budget():
    args = recurrent(100)
    expected = jax.jit(gradient(None))(*args)
    smallest = least(*args)
    for nbytes in (smallest, 2**20):
        actual = jax.jit(gradient(el.Budget(nbytes, measure=False)))(*args)
        assert_close(actual, expected, atol=1e-6)


def test_under_vmap_the_budget_is_for_the_batch():
    f, init, xs = recurrent(512)
    budget = el.Budget("96KiB", measure=False)
    batch = (jnp.stack([init] * 8), jnp.stack([xs] * 8))

    def batched(f, init, xs):
        run = lambda init, xs: el.Scan(f, schedule=budget)(init, xs)[0]
        return jnp.sum(jax.vmap(run)(init, xs) ** 2)

    temp = temp_bytes(jax.grad(batched, argnums=(0, 1, 2)), f, *batch)
    assert temp <= 96 * 1024
    # One after the other, each would be allowed to take all of it.
    alone = el.Scan(f, schedule=budget).plan(init, xs)
    assert 8 * alone.peak_bytes > 96 * 1024


@pytest.mark.parametrize("around", [lambda f: f, jax.checkpoint], ids=["", "remat"])
def test_where_the_initial_carry_is_not_differentiated(around):
    """Its cotangent is no output, so what is carried back takes other memory."""

    def loss(schedule, w, init):
        step = lambda h, _: (jnp.sin(w * h), None)
        h, _ = el.Scan(step, schedule=schedule)(init, length=20)
        return jnp.sum(h**2)

    args = jnp.full(1000, 0.9), jnp.ones(1000)
    of_w = lambda schedule: jax.grad(around(lambda *args: loss(schedule, *args)))
    with pytest.raises(ValueError, match="It needs at least") as error:
        el.plans(of_w(el.Budget(1, measure=False)))(*args)
    smallest = int(re.search(r"which is (\d+) bytes", str(error.value))[1])
    for schedule in (el.Budget(smallest, measure=False), el.Binomial(5)):
        (found,) = el.plans(of_w(schedule))(*args)
        temp = temp_bytes(of_w(schedule), *args)
        assert temp <= found.plan.peak_bytes <= 1.1 * temp
    assert found.plan.peak_bytes > smallest


def test_a_million_steps_are_planned():
    f, init, _ = recurrent(1, width=64)
    xs = jax.ShapeDtypeStruct((1_000_000, 64), jnp.float32)
    plan = el.Scan(f, schedule=el.Budget("64MiB", measure=False)).plan(init, xs)
    assert plan.length == 1_000_000
    assert plan.evaluations <= 3_000_000
    assert plan.peak_bytes <= 64 * 2**20


def test_a_step_that_cannot_be_compiled_alone():
    args = recurrent(64)

    def mean(f, init, xs):
        step = lambda h, x: (jax.lax.pmean(f(h, x)[0], "batch"), None)
        run = lambda init: el.Scan(step, schedule=el.Budget("16KiB"))(init, xs)[0]
        return jnp.sum(jax.vmap(run, axis_name="batch")(init))

    init = jnp.stack([args[1], 2 * args[1]])
    grads = jax.grad(mean, argnums=1)(args[0], init, args[2])
    assert np.isfinite(grads).all()


@pytest.mark.parametrize(
    "nbytes",
    ["256MiB", "1.5GiB", "0.25TiB", "20GB", "16KiB", "4MB", "512KB", 512, "1.3GiB"],
)
def test_it_is_printed_as_one_writes_it(nbytes: int | str):
    budget = el.Budget(nbytes)
    assert eval(repr(budget), {"Budget": el.Budget}) == budget
    known = {"0.25TiB": "256GiB", "1.3GiB": budget.nbytes}
    assert repr(budget) == f"Budget(nbytes={known.get(nbytes, nbytes)!r})"


def test_no_steps():
    f, init, xs = recurrent(0)
    plan = el.Scan(f, schedule=el.Budget(100_000)).plan(init, xs)
    assert plan.evaluations == 0


def test_too_small_a_budget_is_told_the_least():
    f, init, xs = recurrent(100)
    with pytest.raises(ValueError, match="does not fit into 64 B") as error:
        jax.grad(lambda h: el.Scan(f, schedule=el.Budget(64))(h, xs)[0].sum())(init)
    assert "evaluations" in str(error.value)  # the table of that plan
    el.Scan(f, schedule=el.Budget(least(f, init, xs))).plan(init, xs)


def test_a_budget_is_told_in_the_unit_in_which_it_was_given():
    f, init, xs = recurrent(100)
    for written, told in (("0.1KB", "100 B"), ("1KB", "1 KB"), ("1 kib", "1 KiB")):
        scan = el.Scan(f, schedule=el.Budget(written, measure=False))
        with pytest.raises(ValueError, match=f"does not fit into {told}\\. It"):
            scan.plan(init, xs)
    assert repr(el.Budget("64kB")) == "Budget(nbytes='64KB')"


def test_too_small_a_budget_names_the_line_of_the_largest_array():
    def step(h, x):
        squares = jnp.outer(h, x) @ jnp.outer(x, h)
        return jnp.tanh(squares.max(0) + h), None

    least = el.Budget(64, measure=False)
    gradients = [
        jax.grad(lambda h, s=s: el.Scan(s, schedule=least)(h, xs)[0].sum())
        for s in (step, lambda h, x: step(h, x))  # that say the same
    ]
    xs = jnp.ones((6, 300))
    for of in gradients:
        with pytest.raises(ValueError, match=r"[(]step[)]") as error:
            of(jnp.ones(300))
        line = step.__code__.co_firstlineno + 1
        assert f"{__file__}:{line} (step)." in str(error.value)


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        (512, 512),
        (np.int64(7), 7),
        ("512MiB", 512 * 2**20),
        ("64 kB", 64_000),
        ("1.5GiB", 3 * 2**29),
        (" 100 b ", 100),
        (".5 KiB", 512),
    ],
)
def test_amounts_of_memory(value, nbytes):
    assert el.Budget(value).nbytes == nbytes
    assert el.Budget(value) == el.Budget(nbytes)


@pytest.mark.parametrize(
    "value", ["", "MiB", "512", "1 lb", "1,5 GB", "-1 kB", "0 B", 0, -5, "0.1B"]
)
def test_no_amounts_of_memory(value):
    with pytest.raises(ValueError, match="Budget: "):
        el.Budget(value)


@pytest.mark.parametrize("value", [None, True, 1.5, [1]])
def test_budgets_of_other_types(value):
    with pytest.raises(TypeError, match="must be an int, in bytes, or a string"):
        el.Budget(value)
