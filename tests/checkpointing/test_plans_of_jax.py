"""`el.plans` of loops that JAX runs itself: which there are, and what they take."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding

import eqloop as el
from eqloop.checkpointing._jax_loops import JaxPlan

from ..compiling import temp_bytes
from ..mapping.devices import DEVICES, mesh_of
from ..marks import slow, slow_if

STEPS, ROWS, WIDTH = 128, 8, 16
WEIGHTS = {
    "gates": jnp.zeros((2 * WIDTH, 2 * WIDTH)),
    "new": jnp.zeros((2 * WIDTH, WIDTH)),
}
XS = jnp.ones((STEPS, ROWS, WIDTH))


def cell(w, h, x):
    """A gated recurrent unit."""
    both = jnp.concatenate([h, x], -1)
    z, r = jnp.split(jax.nn.sigmoid(both @ w["gates"]), 2, -1)
    new = jnp.tanh(jnp.concatenate([r * h, x], -1) @ w["new"])
    return (1 - z) * new + z * h


def last(w, xs):
    step = lambda h, x: (cell(w, h, x), None)
    return lax.scan(step, jnp.zeros(xs.shape[1:]), xs)[0].sum()


@jax.jit
def states(w, xs):
    """As a library has it."""

    def step(h, x):
        h = cell(w, h, x)
        return h, h

    return lax.scan(step, jnp.zeros(xs.shape[1:]), xs)[1]


def outputs(w, xs):
    return jnp.mean(states(w, xs) ** 2)


def twice(w, xs):
    return outputs(w, states(w, xs))


def checkpointed(w, xs):
    step = jax.checkpoint(lambda h, x: (cell(w, h, x), None))
    return lax.scan(step, jnp.zeros(xs.shape[1:]), xs)[0].sum()


def with_policy(w, xs):
    policy = jax.checkpoint_policies.dots_saveable
    return jax.checkpoint(last, policy=policy)(w, xs)


def inner(w, h, x):
    repeat = lambda h, _: (cell(w, h, x), None)
    return lax.scan(repeat, h, None, length=5)[0]


def nested(w, xs):
    step = lambda h, x: (inner(w, h, x), None)
    return lax.scan(step, jnp.zeros(xs.shape[1:]), xs)[0].sum()


def nested_checkpointed(w, xs):
    step = jax.checkpoint(lambda h, x: (inner(w, h, x), None))
    return lax.scan(step, jnp.zeros(xs.shape[1:]), xs)[0].sum()


def mapped(w, xs):
    return lax.map(lambda x: jnp.sin(jnp.sin(x @ w["new"][:WIDTH])).sum(), xs).mean()


def rows(w, xs):
    return lax.map(lambda x: inner(w, x, x).sum(), xs).mean()


def counted(w, xs):
    step = lambda i, h: cell(w, h, xs[i])
    return lax.fori_loop(0, STEPS, step, jnp.zeros(xs.shape[1:])).sum()


def branch(w, xs):
    return lax.cond(xs[0, 0, 0] > 0, last, lambda w, xs: w["new"].sum(), w, xs)


def by_examples(w, xs):
    """Of a batch of gradients, one for each row."""
    each = lambda xs: jax.grad(last)(w, xs)
    return jax.vmap(each, 1)(xs)


def of_a_batch(w, xs):
    loss = lambda w: jax.vmap(lambda xs: last(w, xs), 1)(xs).sum()
    return jax.value_and_grad(loss)(w)


@jax.jit
def train(w, xs):
    """A training run."""

    def step(_, w):
        return jax.tree.map(lambda a, b: a - b, w, jax.grad(last)(w, xs))

    return lax.fori_loop(0, 3, step, w)


def linearised(w, xs):
    return jax.jvp(jax.grad(last), (w, xs), (w, xs))


def both(w, xs):
    planned = lambda h, x: (cell(w, h, x), None)
    scan = el.CheckpointedScan(planned)
    return last(w, xs) + scan(jnp.zeros(xs.shape[1:]), xs)[0].sum()


def storing_inside(w, xs):
    scan = el.Scan(lambda h, x: (cell(w, h, x), None), schedule=el.StoreAll())
    step = lambda h, x: (scan(h, jnp.stack([x] * 4))[0], None)
    return lax.scan(step, jnp.zeros(xs.shape[1:]), xs)[0].sum()


def storing_outside(w, xs):
    step = lambda h, x: (inner(w, h, x), None)
    scan = el.Scan(step, schedule=el.StoreAll())
    return scan(jnp.zeros(xs.shape[1:]), xs)[0].sum()


def hoisted(w, xs):
    """The inner loop does not depend on the carry, so JAX runs it only once."""
    step = lambda h, x: (jnp.sin(h * inner(w, xs[0], xs[1])) + x, None)
    return lax.scan(step, jnp.zeros(xs.shape[1:]), xs)[0].sum()


def reversed_and_unrolled(w, xs):
    step = lambda h, x: (cell(w, h, x), None)
    return lax.scan(step, xs[0], xs, reverse=True, unroll=2)[0].sum()


SCAN, FIVE = ("lax.scan", STEPS, 0), ("lax.scan", 5, 1)
LOSSES = {
    last: [SCAN],
    checkpointed: [SCAN],
    with_policy: [SCAN, SCAN],
    nested: [SCAN, FIVE],
    nested_checkpointed: [SCAN, FIVE],
    mapped: [("lax.map", STEPS, 0)],
    rows: [("lax.map", STEPS, 0), FIVE],
    counted: [("lax.fori_loop", STEPS, 0)],
    both: [SCAN, ("CheckpointedScan", STEPS, 0)],
    storing_inside: [SCAN, ("Scan", 4, 1)],
    storing_outside: [("Scan", STEPS, 0), FIVE],
    hoisted: [("lax.scan", 5, 0), SCAN],
    reversed_and_unrolled: [SCAN],
}
WHOLE = {by_examples: [SCAN], of_a_batch: [SCAN], train: [SCAN], linearised: [SCAN]}
CASES = [(jax.grad(f), listed, f.__name__) for f, listed in LOSSES.items()]
CASES += [(f, listed, f.__name__) for f, listed in WHOLE.items()]
QUICK = {"last", "nested_checkpointed", "storing_inside", "by_examples", "train"}


@pytest.mark.parametrize(
    ("run", "listed"),
    [
        pytest.param(f, listed, id=name) if name in QUICK else slow(f, listed, id=name)
        for f, listed, name in CASES
    ],
)
def test_the_loops_and_what_they_take(run, listed):
    found = el.plans(run)(WEIGHTS, XS)
    assert [(x.name, x.plan.length, x.depth) for x in found] == listed
    assert {x.place.file for x in found} == {__file__}
    assert found.peak_bytes == pytest.approx(temp_bytes(run, WEIGHTS, XS), rel=0.05)
    for loop in found:
        if isinstance(loop.plan, JaxPlan):
            assert loop.plan.evaluations == loop.plan.length
            assert loop.plan.rescheduled.evaluations > loop.plan.length


@pytest.mark.parametrize("loss", slow_if(lambda f: f is twice, [outputs, twice]))
def test_outputs_come_on_top(loss):
    found = el.plans(jax.grad(loss))(WEIGHTS, XS)
    assert [x.place.function for x in found] == ["states"] * len(found)
    assert found[-1].plan.output_bytes == 2 * 4 * XS.size
    whole = found.peak_bytes + found[-1].plan.output_bytes
    assert whole == pytest.approx(temp_bytes(jax.grad(loss), WEIGHTS, XS), rel=0.05)
    assert "outputs: 128 KiB more, with their cotangents" in str(found)


@pytest.mark.parametrize("loss", [last, *slow_if(bool, [mapped, nested])])
def test_what_a_loop_would_take_is_what_it_takes(loss):
    before = el.plans(jax.grad(loss))(WEIGHTS, XS)[0].plan.rescheduled
    run = jax.grad(el.Reschedule(loss, el.Recursive(16)))
    after = el.plans(run)(WEIGHTS, XS)[0].plan
    assert before.evaluations == after.evaluations
    assert before.peak_bytes == pytest.approx(after.peak_bytes, rel=0.2, abs=2048)


def test_a_loop_in_a_branch_is_listed():
    (found,) = el.plans(jax.grad(branch))(WEIGHTS, XS)
    alone = el.plans(jax.grad(last))(WEIGHTS, XS)[0]
    assert found.plan.peak_bytes == alone.plan.peak_bytes
    assert found.place == alone.place


def test_loops_of_two_calls_live_at_once():
    """What a call has stored is there until it is read, not only in the call."""
    found = el.plans(jax.grad(twice))(WEIGHTS, XS)
    assert found.peak_bytes == sum(loop.plan.peak_bytes for loop in found)
    scan = jax.jit(
        lambda w, xs: el.CheckpointedScan(lambda h, x: (cell(w, h, x), h))(
            jnp.zeros(xs.shape[1:]), xs
        )[1]
    )
    planned = lambda w, xs: jnp.mean(scan(w, scan(w, xs)))
    found = el.plans(jax.grad(planned))(WEIGHTS, XS)
    assert len(found) == 2
    assert found.peak_bytes == sum(loop.plan.peak_bytes for loop in found)


def linear(w, xs):
    step = lambda h, x: (h @ w["new"][:WIDTH] + x, None)
    return lax.scan(step, jnp.zeros(xs.shape[1:]), xs)[0].sum()


NOTHING_STORED = {
    "not differentiated": last,
    "forward mode": lambda w, xs: jax.jvp(nested, (w, xs), (w, xs)),
    "stopped": jax.grad(lambda w, xs: lax.stop_gradient(last(w, xs)) * w["new"].sum()),
    "auxiliary": jax.grad(lambda w, xs: (w["new"].sum(), last(w, xs)), has_aux=True),
    "linear": jax.grad(lambda xs, w: linear(w, xs)),
    "while": jax.grad(
        lambda w, xs: (
            lax.stop_gradient(
                lax.while_loop(
                    lambda h: h.sum() < 9, lambda h: cell(w, h, xs[0]), xs[0]
                )
            ).sum()
            * w["new"].sum()
        )
    ),
}


@pytest.mark.parametrize("case", NOTHING_STORED)
def test_a_loop_that_stores_nothing_is_not_listed(case):
    args = (XS, WEIGHTS) if case == "linear" else (WEIGHTS, XS)
    found = el.plans(NOTHING_STORED[case])(*args)
    assert not found, str(found)
    assert found.peak_bytes == 0


def test_loops_that_a_rule_has_written_are_left_to_the_rule():
    @jax.custom_vjp
    def total(xs):
        return lax.scan(lambda h, x: (jnp.sin(h + x), None), xs[0], xs)[0].sum()

    def forward(xs):
        step = lambda h, x: (jnp.sin(h + x), jnp.cos(h + x))
        h, slopes = lax.scan(step, xs[0], xs)
        return h.sum(), slopes

    def backward(slopes, ct):
        step = lambda c, slope: (c * slope, c * slope)
        c = ct * jnp.ones(slopes.shape[1:])
        first, cts = lax.scan(step, c, slopes, reverse=True)
        return (cts.at[0].add(first),)

    total.defvjp(forward, backward)
    assert len(el.plans(jax.grad(total))(XS)) == 0


def test_a_step_whose_rules_have_no_derivative():
    """What it would take is not known then."""

    @jax.custom_vjp
    def act(x):
        return jnp.tanh(x)

    def forward(x):
        y = jax.pure_callback(jnp.tanh, x, x)
        return y, y

    act.defvjp(forward, lambda y, ct: (ct * (1 - y**2),))
    run = lambda x: lax.scan(lambda h, x: (act(h + x), None), x, XS)[0].sum()
    (found,) = el.plans(jax.grad(run))(XS[0])
    assert found.plan.rescheduled is None
    assert found.plan.peak_bytes >= 4 * XS.size
    assert re.search(r"rescheduled +not known: Pure callbacks do not", str(found.plan))


def test_second_derivatives():
    norm = lambda w, xs: sum(
        map(jnp.vdot, *[jax.tree.leaves(jax.grad(last)(w, xs))] * 2)
    )
    found = el.plans(jax.grad(norm))(WEIGHTS, XS)
    taken = temp_bytes(jax.grad(norm), WEIGHTS, XS)
    assert [(x.name, x.depth) for x in found] == [("lax.scan", 0)] * 2
    assert 0.7 * taken <= found.peak_bytes <= 1.1 * taken


@pytest.mark.parametrize("is_mapped", [False, slow(True)])
def test_bytes_are_those_of_one_device(is_mapped):
    mesh = mesh_of(d=DEVICES)
    place = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, jax.P(*spec)))
    w = jax.tree.map(place, WEIGHTS)
    xs = place(jnp.ones((STEPS, DEVICES * ROWS, WIDTH)), None, "d")
    loss = lambda w, xs: lax.scan(
        lambda h, x: (cell(w, h, x), None), jnp.zeros_like(xs[0]), xs
    )[0].sum()
    run = jax.jit(jax.grad(loss))
    if is_mapped:
        specs = (jax.P(), jax.P(None, "d"))
        of_one = lambda w, xs: lax.psum(loss(w, xs), "d")
        run = jax.grad(
            jax.shard_map(of_one, mesh=mesh, in_specs=specs, out_specs=jax.P())
        )
    (found,) = el.plans(run)(w, xs)
    taken = jax.jit(run).lower(w, xs).compile().memory_analysis().temp_size_in_bytes
    assert found.plan.peak_bytes == pytest.approx(taken, rel=0.05)
    (alone,) = el.plans(jax.grad(loss))(WEIGHTS, XS)
    assert found.plan.peak_bytes == pytest.approx(alone.plan.peak_bytes, rel=0.05)
    rescheduled = alone.plan.rescheduled.peak_bytes
    assert found.plan.rescheduled.peak_bytes == pytest.approx(rescheduled, rel=0.4)


def test_the_table():
    found = el.plans(jax.grad(nested))(WEIGHTS, XS)
    head, *rows, total, hint = str(found).split("\n")
    assert head.split()[:4] == ["loop", "steps", "batch", "schedule"]
    assert rows[0].split()[:6] == [
        "lax.scan",
        str(STEPS),
        "1",
        "none",
        "residuals",
        str(STEPS),
    ]
    assert rows[1] == f"  {found[0].place}"
    assert rows[2].startswith("  rescheduled: ")
    assert rows[2].endswith(" KiB, 368 evaluations")
    assert rows[3].startswith("  lax.scan  5 ")
    assert total.startswith("at once: ")
    assert "el.Reschedule(loss, el.Recursive(16))" in hint
    first, *others = str(found[0].plan).split("\n")
    assert first == "schedule: none"
    assert [line.split()[0] for line in others] == [
        "steps",
        "stored",
        "evaluations",
        "peak",
        "rescheduled",
    ]
