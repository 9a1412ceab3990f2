"""`el.plans` of loops that JAX runs itself: which there are, and what they take."""

import re

import equinox as eqx
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


# Loops in the rules of others. Each stores 4 bytes for each entry of `XS`, a few rules
# those of a carry as well.


def sines(h, xs):
    return lax.scan(lambda h, x: (jnp.sin(h + x), None), h, xs)[0]


def storing(h, xs):
    step = lambda h, x: (jnp.sin(h + x), jnp.cos(h + x))
    return lax.scan(step, h, xs)


def by_slopes(slopes, ct):
    step = lambda c, slope: (c * slope, c * slope)
    return lax.scan(step, ct, slopes, reverse=True)


def storing_in_while(h, xs):
    def step(state):
        i, h, slopes = state
        return i + 1, jnp.sin(h + xs[i]), slopes.at[i].set(jnp.cos(h + xs[i]))

    start = (0, h, jnp.zeros(xs.shape))
    i, h, slopes = lax.while_loop(lambda s: s[0] < len(xs), step, start)
    return h, (i, slopes)


def by_slopes_in_while(stored, ct):
    def step(state):
        i, c, cts = state
        c = c * stored[1][i - 1]
        return i - 1, c, cts.at[i - 1].set(c)

    start = (stored[0], ct, jnp.zeros(stored[1].shape))
    return lax.while_loop(lambda s: s[0] > 0, step, start)[1:]


def with_rules(forward, backward):
    function = jax.custom_vjp(lambda h, xs: sines(h, xs))
    function.defvjp(forward, backward)
    return function


def by_equinox(h, xs):
    function = eqx.filter_custom_vjp(lambda args: sines(*args))
    function.def_fwd(lambda perturbed, args: storing(*args))
    function.def_bwd(lambda stored, ct, perturbed, args: by_slopes(stored, ct))
    return function((h, xs))


def with_tangents(h, xs):
    function = jax.custom_jvp(lambda h, xs: sines(h, xs))
    function.defjvp(lambda primals, dots: jax.jvp(sines, primals, dots))
    return function(h, xs)


RULES = {
    "scan": (with_rules(storing, by_slopes), "lax.scan", XS.nbytes),
    # And a counter.
    "while": (
        with_rules(storing_in_while, by_slopes_in_while),
        "lax.while_loop",
        XS.nbytes + 4,
    ),
    "jax": (
        with_rules(lambda *args: jax.vjp(sines, *args), lambda pull, ct: pull(ct)),
        "lax.scan",
        XS.nbytes,
    ),
    # Nothing is stored until the way back.
    "again": (
        with_rules(
            lambda *args: (sines(*args), args),
            lambda args, ct: jax.vjp(sines, *args)[1](ct),
        ),
        "lax.scan",
        XS.nbytes,
    ),
    "equinox": (by_equinox, "lax.scan", XS.nbytes),
    "custom_jvp": (with_tangents, "lax.scan", XS.nbytes),
}

# What a rule is in, how many loops that has, and how often it is stored at once.
AROUND = {
    "alone": (lambda f: f, 0, 1),
    "jit": (jax.jit, 0, 1),
    "checkpoint": (jax.checkpoint, 0, 1),
    "branch": (
        lambda f: lambda h, xs: lax.cond(xs[0, 0, 0] > 0, f, lambda h, _: h, h, xs),
        0,
        1,
    ),
    "vmap": (
        lambda f: (
            lambda h, xs: jnp.sum(jax.vmap(f, (0, None))(jnp.stack([h, 2 * h]), xs), 0)
        ),
        0,
        2,
    ),
    "scan": (
        lambda f: lambda h, xs: lax.scan(lambda h, _: (f(h, xs), None), h, length=3)[0],
        1,
        1,
    ),
    "planned": (
        lambda f: (
            lambda h, xs: el.CheckpointedScan(lambda h, _: (f(h, xs), None))(
                h, length=3
            )[0]
        ),
        1,
        1,
    ),
}


@pytest.mark.sampled
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("rule", RULES)
def test_loops_in_rules_and_what_these_store(rule, around):
    (f, name, size), (put_in, depth, batch) = RULES[rule], AROUND[around]
    loss = lambda h, xs: jnp.sum(put_in(f)(h, xs))
    found = el.plans(jax.grad(loss, (0, 1)))(XS[0], XS)
    assert found[-1].depth == depth
    loop, kind = found[-1], "custom_jvp" if rule == "custom_jvp" else "custom_vjp"
    assert (loop.name, loop.plan.rule.kind) == (name, kind)
    assert loop.plan.length == (None if rule == "while" else STEPS)
    assert loop.plan.peak_bytes == pytest.approx(batch * size, abs=4)  # a counter
    assert loop.place.file == loop.plan.rule.place.file == __file__
    assert f"left: the `jax.{kind}` at {__file__}" in str(found)
    assert loop.plan.notes.keys() == {"left"}
    # That of a loop around it contains it. The counter is the same in all its steps.
    outer = found[-2] if depth else loop
    assert found.peak_bytes == pytest.approx(outer.plan.peak_bytes, abs=4)


def test_what_rules_store_is_what_is_alive():
    f, _, size = RULES["while"]
    twice = lambda h, xs: jnp.sum(f(f(h, xs), xs))
    found = el.plans(jax.grad(twice))(XS[0], XS)
    assert [loop.plan.peak_bytes for loop in found] == [size, size]
    assert found.peak_bytes == 2 * size
    taken = temp_bytes(jax.grad(twice), XS[0], XS)
    assert found.peak_bytes == pytest.approx(taken, rel=0.05)


def test_a_loop_is_planned_as_it_was_before_rules_replaced_functions_in_it():
    """The plan of a loop whose step has a rule, of which JAX has run one way there."""
    f, *_ = RULES["while"]
    step = lambda h, x: (f(h, XS[:4]), None)
    scan = el.CheckpointedScan(step)
    loss = lambda h: jnp.sum(scan(h, length=64)[0])
    alone = scan.plan(XS[0], length=64)
    for gradient, args in [
        (jax.grad(loss), XS[0]),
        (jax.vmap(jax.grad(loss)), XS[:2]),
    ]:
        outer, _ = el.plans(gradient)(args)
        assert outer.plan.evaluations == alone.evaluations
        assert outer.plan.peak_bytes == pytest.approx(
            outer.batch * alone.peak_bytes, rel=0.3
        )


def test_a_rule_that_stores_nothing_of_a_loop():
    f = with_rules(lambda h, xs: (sines(h, xs), xs), lambda xs, ct: (ct, xs))
    assert len(el.plans(jax.grad(lambda h: jnp.sum(f(h, XS))))(XS[0])) == 0


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
