"""What slots hold: leaves of all kinds of use, against `jax.lax.scan`, in all modes."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqloop as el

from ..asserts import assert_close
from ..compiling import temp_bytes
from ..derivatives import (
    LENGTH,
    MODES,
    WIDTH,
    grad,
    grad_of_parameters,
    inputs,
    jacrev,
    mapped,
    primal,
    reverse_over_reverse,
    vjp,
)
from ..marks import slow, slow_if

pytestmark = pytest.mark.sampled


@jax.custom_vjp
def clipped(x):
    return x


def _clip_forward(x):
    return x, jnp.tanh(x)


def _clip_backward(scale, ct):
    return (ct * (1 + scale),)


clipped.defvjp(_clip_forward, _clip_backward)


@jax.custom_jvp
def ruled(x, unused):
    return 2 * x


@ruled.defjvp
def _ruled_jvp(primals, tangents):
    (x, unused), (dx, d_unused) = primals, tangents
    # It reads what the function does not.
    return 2 * x, jnp.cos(unused) * dx + d_unused


def rows_of(h):
    return jnp.broadcast_to(h, (LENGTH, WIDTH))


# For each kind of leaf: how it starts, given the state; and from the leaf, the state
# and the number of the step to the next leaf, and to what the next state depends on.
KINDS = {
    "sum": (jnp.sum, lambda v, h, i: (v + jnp.sum(h * h), 0.0)),
    "largest": (jnp.sin, lambda v, h, i: (jnp.maximum(v, h), 0.0)),
    "count": (lambda h: jnp.zeros((), jnp.int32), lambda v, h, i: (v + 1, 0.0)),
    "argmax": (
        lambda h: jnp.zeros((), jnp.int32),
        lambda v, h, i: (jnp.argmax(h).astype(jnp.int32), 0.0),
    ),
    "stays": (jnp.cos, lambda v, h, i: (v, v)),
    "rate": (jnp.sin, lambda v, h, i: (0.9 * v, v)),
    "ratio": (jnp.sin, lambda v, h, i: (0.9 * v, v * h)),
    "own square": (jnp.sin, lambda v, h, i: (0.5 * v * v + h, 0.0)),
    "ruled": (jnp.sin, lambda v, h, i: (ruled(h, v), 0.0)),
    "clipped": (jnp.sin, lambda v, h, i: (clipped(v) + h, 0.1)),
    "written": (
        rows_of,
        lambda v, h, i: (lax.dynamic_update_index_in_dim(v, h, i, 0), 0.0),
    ),
    "set": (rows_of, lambda v, h, i: (v.at[i].set(jnp.sin(h)), 0.0)),
    "added to": (rows_of, lambda v, h, i: (v.at[i].add(h), 0.0)),
    "read back": (
        rows_of,
        lambda v, h, i: (v.at[i].set(h), jnp.sin(v[jnp.maximum(i - 2, 0)])),
    ),
    "ring": (
        rows_of,
        lambda v, h, i: (v.at[i % 3].set(h), jnp.sin(v[(i - 2) % 3])),
    ),
    "key": (
        lambda h: jax.random.key(3),
        lambda v, h, i: (
            jax.random.split(v)[0],
            jax.random.normal(v, (WIDTH,), h.dtype),
        ),
    ),
    "unread key": (lambda h: jax.random.key(4), lambda v, h, i: (v[None][0], 0.0)),
}


def step(kinds, w, carry, x):
    i, leaves, h = carry
    pairs = [KINDS[k][1](v, h, i) for k, v in zip(kinds, leaves, strict=True)]
    leaves = [after for after, _ in pairs]
    given = sum((jnp.asarray(more, h.dtype) for _, more in pairs), jnp.zeros_like(h))
    h = jnp.tanh(w[0] * h + w[1] * jnp.mean(h) + x + 0.3 * given)
    return (i + 1, leaves, h), h * x


def start(kinds, h):
    return jnp.zeros((), jnp.int32), [KINDS[kind][0](h) for kind in kinds], h


def floats(tree):
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.inexact)
    return list(filter(is_float, jax.tree.leaves(tree)))


def of_scan(kinds, loop, w, h, us):
    carry, ys = loop(functools.partial(step, kinds, w), start(kinds, h), us)
    return floats(carry), ys


def of_while(kinds, loop, w, h, us):
    def body(carry):
        return step(kinds, w, carry, us[carry[0]])[0]

    return floats(loop(lambda carry: carry[0] < LENGTH, body)(start(kinds, h)))


def as_while(cond, body):
    """The same while loop with a length that `jax.lax.scan` can reverse."""
    return lambda init: lax.scan(lambda c, _: (body(c), None), init, length=LENGTH)[0]


SCHEDULES = (
    el.Binomial(3),
    el.Binomial(1),
    el.Binomial(2, block=2),
    el.Recursive(2),
    el.Recursive(2, batch=3),
    el.Chunked(3),
    el.Chunked(1, batch=4),
    el.Offload(el.Binomial(2)),
)
SCANS = [lambda f, c, x, s=s: el.Scan(f, schedule=s)(c, x) for s in SCHEDULES] + [
    lambda f, c, x: el.Scan(f, schedule=el.Recursive(3), policy="dots_saveable")(c, x),
    lambda f, c, x: el.Scan(f, schedule=el.Binomial(2), reverse=True, unroll=2)(c, x),
    lambda f, c, x: el.SlicedScan(f, step=3, schedule=el.Chunked(2))(c, x),
]
PLAIN = [lax.scan] * len(SCHEDULES) + [
    lax.scan,
    lambda f, c, x: lax.scan(f, c, x, reverse=True),
    lambda f, c, x: (lambda c, ys: (c, ys[::3]))(*lax.scan(f, c, x)),
]
WHILES = (
    functools.partial(el.CheckpointedWhileLoop, checkpoints=2),
    functools.partial(el.CheckpointedWhileLoop, checkpoints=3, max_steps=20),
    functools.partial(el.BoundedWhileLoop, max_steps=10, base=3),
)

# The modes that a `jax.custom_vjp` has.
REVERSE = (primal, vjp, grad, grad_of_parameters, jacrev, reverse_over_reverse)

kinds_of_leaves = st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=4)


def assert_agree(mode, run, expected):
    actual, expected = (
        jax.jit(functools.partial(mode, f))(*inputs()) for f in (run, expected)
    )
    assert_close(actual, expected, rtol=3e-4, atol=3e-5)


def check_scan(kinds, at, mode, is_mapped):
    hypothesis.assume("clipped" not in kinds or mode in REVERSE)
    mode = mapped(mode) if is_mapped else mode
    runs = [functools.partial(of_scan, kinds, loop[at]) for loop in (SCANS, PLAIN)]
    assert_agree(mode, *runs)


def check_while(kinds, loop, mode):
    hypothesis.assume("clipped" not in kinds or mode in REVERSE)
    runs = [functools.partial(of_while, kinds, loop) for loop in (loop, as_while)]
    assert_agree(mode, *runs)


of_a_scan = (
    kinds_of_leaves,
    st.integers(0, len(SCANS) - 1),
    st.sampled_from(MODES),
    st.booleans(),
)
of_a_while = kinds_of_leaves, st.sampled_from(WHILES), st.sampled_from(MODES)


@hypothesis.settings(max_examples=3)
@hypothesis.given(*of_a_scan)
def test_scans_with_leaves_of_all_kinds(kinds, at, mode, is_mapped):
    check_scan(kinds, at, mode, is_mapped)


@hypothesis.settings(max_examples=2)
@hypothesis.given(*of_a_while)
def test_while_loops_with_leaves_of_all_kinds(kinds, loop, mode):
    check_while(kinds, loop, mode)


@pytest.mark.slow
@hypothesis.settings(max_examples=200)
@hypothesis.given(*of_a_scan)
def test_many_scans_with_leaves_of_all_kinds(kinds, at, mode, is_mapped):
    check_scan(kinds, at, mode, is_mapped)


@pytest.mark.slow
@hypothesis.settings(max_examples=100)
@hypothesis.given(*of_a_while)
def test_many_while_loops_with_leaves_of_all_kinds(kinds, loop, mode):
    check_while(kinds, loop, mode)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_gradient_with_a_leaf_of_each_kind(kind, schedule):
    check_scan([kind], SCHEDULES.index(schedule), grad, False)


def plan_of(kinds, schedule):
    w, h, us = inputs()
    scan = el.Scan(functools.partial(step, kinds, w), schedule=schedule)
    return scan.plan(start(kinds, h), us)


HELD = {
    "largest": True,
    "rate": False,
    "ratio": True,
    "own square": True,
    "clipped": True,
    "read back": False,
    "ring": False,
    "key": True,
    "sum": False,
    "written": False,
    "set": False,
    "added to": False,
    "count": False,
    "argmax": False,
    "unread key": False,
}


@pytest.mark.parametrize("kind", HELD)
def test_a_slot_holds_what_is_read(kind):
    held = dict(plan_of([kind], el.Binomial(3)).holds)
    assert held["carry[2]"]
    # Whatever leads to the state of later steps is computed again, as that is read.
    leads_there = kind in ("rate", "key")
    assert held["carry[1][0]"] == (HELD[kind] or leads_there)
    indexes = ("written", "set", "added to", "read back", "ring")
    assert held["carry[0]"] == (kind in indexes)


def test_the_plan_says_what_a_slot_holds():
    kinds = ["sum", "ratio", "written", "count", "argmax", "largest", "set"]
    text = str(plan_of(kinds, el.Binomial(3)))
    each = 4 + 3 * 4 * WIDTH
    assert f"stored carries     3, {each} B each" in text
    assert "each holds         carry[0], carry[1][1], carry[1][5], carry[2]\n" in text
    others = "carry[1][0], carry[1][2], carry[1][3], carry[1][4], 1 more"
    assert f"and not            {others}\n" in text
    assert "each holds" not in str(plan_of(["ratio", "written"], el.StoreAll()))


def test_a_loop_that_is_linear_stores_nothing():
    step = lambda h, x: (0.5 * h + x, h)
    scan = el.Scan(step, schedule=el.Recursive(2))
    plan = scan.plan(jnp.ones(8), jnp.ones((32, 8)))
    assert (plan.slot_bytes, plan.evaluations) == (0, 64)
    loss = lambda loop: lambda h, xs: jnp.sum(jnp.sin(loop(h, xs)[1]))
    of = lambda loop: jax.jit(jax.grad(loss(loop), (0, 1)))
    args = jnp.arange(8.0), jnp.ones((32, 8))
    expected = of(functools.partial(lax.scan, step))(*args)
    assert_close(of(scan)(*args), expected, rtol=1e-7, atol=0)


LARGE = 10_000


def monitored(carry, x):
    h, total, largest = carry
    h = jnp.tanh(0.9 * h + x)
    return (h, total + jnp.sum(h), jnp.maximum(largest, h)), None


def writing(carry, x):
    h, rows, i = carry
    h = jnp.tanh(0.9 * h + x)
    return (h, rows.at[i].set(h), i + 1), None


CASES = {
    "monitored": (monitored, (jnp.ones(8), jnp.zeros(LARGE), jnp.zeros(8))),
    "writing": (
        writing,
        (jnp.ones(8), jnp.zeros((LARGE // 8, 8)), jnp.zeros((), jnp.int32)),
    ),
}


LOOPS_WITHIN = {
    "scan": lambda body, init: el.Scan(lambda c, _: (body(c), None))(init, length=3)[0],
    "while": lambda body, init: el.CheckpointedWhileLoop(
        lambda carry: carry[2] % 3 != 2, body, checkpoints=3
    )(init),
}


@pytest.mark.parametrize("derive", [jax.grad, slow(jax.hessian)], ids=["once", "twice"])
@pytest.mark.parametrize(
    "run",
    slow_if(lambda run: run is LOOPS_WITHIN["scan"], LOOPS_WITHIN.values()),
    ids=LOOPS_WITHIN,
)
def test_rows_that_a_loop_in_the_step_writes(run, derive):
    """The loop counts on and writes rows; only the count is needed on the way back."""

    def step(carry, x):
        def body(inner):
            h, rows, i = inner
            h = jnp.tanh(0.9 * h + x)
            return h, rows.at[i].set(h), i + 1

        return run(body, carry), None

    def loss(schedule, h, xs):
        init = (h, jnp.zeros((20, 4)), jnp.zeros((), jnp.int32))
        h, rows, _ = el.Scan(step, schedule=schedule)(init, xs)[0]
        return jnp.sum(h) + jnp.sum(rows**2)

    h, xs = jnp.ones(4), jnp.linspace(-1, 1, 6)
    schedule = el.Binomial(3)
    of = lambda s: jax.jit(derive(functools.partial(loss, s)))
    found, expected = of(schedule)(h, xs), of(None)(h, xs)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    init = (h, jnp.zeros((20, 4)), jnp.zeros((), jnp.int32))
    plan = el.Scan(step, schedule=schedule).plan(init, xs)
    assert dict(plan.holds) == {"carry[0]": True, "carry[1]": False, "carry[2]": True}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "schedule", [SCHEDULES[0], *map(slow, SCHEDULES[1:])], ids=repr
)
def test_memory_is_that_of_what_is_read(name, schedule):
    """A large leaf that is not read lives once, with one cotangent."""
    f, init = CASES[name]
    xs = jnp.ones((60, 8))

    def loss(init, xs):
        carry, _ = el.Scan(f, schedule=schedule)(init, xs)
        return sum(jnp.sum(leaf**2) for leaf in floats(carry))

    temp = temp_bytes(jax.grad(loss, (0, 1), allow_int=True), init, xs)
    plan = el.Scan(f, schedule=schedule).plan(init, xs)
    # Where several steps are reversed at once, XLA copies the cotangent for each loop.
    at_once = plan._layout.reversal.batch(plan._layout.block)
    copies = 2 if at_once == 1 else 5
    assert temp <= copies * 4 * LARGE + 6000
    # Of a loop that starts with a segment of its own, XLA need not copy the leaf first.
    assert temp <= plan.peak_bytes <= 1.02 * temp + 1024 + 4 * LARGE


@pytest.mark.parametrize("loop", WHILES[1:])
def test_memory_of_while_loops(loop):
    def loss(h):
        init = (h, *CASES["writing"][1][1:])
        body = lambda carry: writing(carry, h)[0]
        final = loop(lambda carry: carry[2] < 9, body)(init)
        return jnp.sum(jnp.sin(final[1])) + jnp.sum(final[0])

    # The rows, their cotangents, and once what is made of them.
    assert temp_bytes(jax.grad(loss), jnp.ones(8)) <= 3 * 4 * LARGE + 6000
