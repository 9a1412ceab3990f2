"""`el.plans`: the loops of a function, and what they are going to do."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import checkify, io_callback

import eqloop as el

from ..compiling import temp_bytes
from ..marks import slow_if

XS = jnp.ones((64, 5))
WHILES = {
    "bounded": el.BoundedWhileLoop(
        lambda c: c.sum() < 9, jnp.exp, max_steps=64, base=4
    ),
    "online": el.CheckpointedWhileLoop(
        lambda c: c.sum() < 9, jnp.exp, max_steps=64, checkpoints=11
    ),
    "unbounded": el.CheckpointedWhileLoop(lambda c: c.sum() < 9, jnp.exp),
}


def step(h, x):
    return jnp.sin(h + x), h


def loss(schedule, w, xs):
    h, ys = el.Scan(lambda h, x: step(w * h, x), schedule=schedule)(jnp.ones(5), xs)
    return h.sum() + ys.sum()


def grad_of(schedule):
    return jax.grad(lambda w, xs: loss(schedule, w, xs), (0, 1))


SCHEDULES = (
    el.Recursive(4),
    el.Recursive(4, batch=4),
    el.Chunked(8),
    el.Binomial(5, block=2),
    el.Offload(el.Binomial(3)),
)


@pytest.mark.parametrize(
    "schedule", slow_if(lambda s: s != el.Binomial(5, block=2), SCHEDULES), ids=str
)
def test_one_loop_alone(schedule):
    (found,) = el.plans(grad_of(schedule))(1.0, XS)
    scan = el.Scan(step, schedule=schedule)
    asked = scan.plan(jnp.ones(5), XS)
    assert found.plan.pinned == asked.pinned
    assert (found.name, found.batch, found.depth) == ("Scan", 1, 0)
    assert found.place.file == __file__
    assert found.place.function == "loss"


def test_inside_and_outside_of_vmap_and_jit_it_is_the_same():
    schedule = el.Binomial(4)
    batch = jnp.ones((3, 64, 5))
    each = lambda w, xs: grad_of(schedule)(w, xs)
    outside = jax.vmap(each, (None, 0))
    inside = jax.grad(
        lambda w, batch: jax.vmap(lambda xs: loss(schedule, w, xs))(batch).sum(), (0, 1)
    )
    tables = {str(el.plans(f)(1.0, batch)) for f in (inside, outside, jax.jit(inside))}
    tables |= {str(el.plans(jax.jit(jax.vmap(jax.jit(each), (None, 0))))(1.0, batch))}
    lines = {table.replace(":", "").split("\n")[1] for table in tables}
    assert len(tables) == len(lines) == 1
    assert el.plans(inside)(1.0, batch)[0].batch == 3


def test_a_budget_is_for_the_batch_that_is_differentiated():
    budget = el.Budget("16KiB")
    batch = jnp.ones((4, 64, 5))
    inside = jax.grad(lambda w: jax.vmap(lambda xs: loss(budget, w, xs))(batch).sum())
    (found,) = el.plans(inside)(1.0)
    assert found.plan.peak_bytes <= 16 * 1024
    assert found.batch == 4


def test_what_stores_residuals_is_listed_and_still_runs_so():
    """The program that was looked at is not the one that is run."""
    count = 0

    def tick(_):
        nonlocal count
        count += 1

    def told(h, x):
        jax.debug.callback(tick, h[0])
        return step(h, x)

    scan = el.Scan(told, schedule=el.Budget("1GiB"))
    new = jax.jit(jax.grad(lambda xs: scan(jnp.ones(5), xs)[0].sum()))
    assert el.plans(new)(XS)[0].plan.evaluations == 64
    new(XS).block_until_ready()
    jax.effects_barrier()
    assert count == 64


def test_what_is_not_differentiated_has_no_plan():
    scan = el.Scan(step, schedule=el.Recursive(2))
    forward = lambda xs: scan(jnp.ones(5), xs)
    assert len(el.plans(forward)(XS)) == 0
    assert len(el.plans(lambda xs: jax.jvp(forward, (xs,), (xs,)))(XS)) == 0
    assert len(el.plans(lambda c: WHILES["online"](c))(0.5)) == 0
    (found,) = el.plans(jax.grad(lambda xs: loss(el.Recursive(2), 1.0, xs)))(XS)
    both = el.plans(grad_of(el.Recursive(2)))(1.0, XS)[0]
    assert found.plan.peak_bytes <= both.plan.peak_bytes
    assert "el.plans(jax.grad(f))" in str(el.plans(forward)(XS))


@pytest.mark.slow
def test_loops_in_loops_branches_and_derivatives():
    def inner(h, x):
        return el.Scan(step, schedule=el.Binomial(3))(h, jnp.ones((9, 1)) * x[None])[
            0
        ], None

    def outer(w, xs):
        h, _ = el.Scan(inner, schedule=el.Chunked(8))(w, xs)
        one = lambda h: el.CheckpointedScan(step)(h, xs)[0]
        h = lax.cond(h[0] > 0, one, lambda h: h, h)
        return h.sum()

    found = el.plans(jax.grad(outer))(jnp.ones(5), XS)
    sizes = sorted((loop.plan.length, loop.depth) for loop in found)
    assert sizes == [(9, 1), (64, 0), (64, 0)]
    assert {type(loop.plan.schedule).__name__ for loop in found} == {
        "Chunked",
        "Recursive",
        "Binomial",
    }
    twice = jax.grad(lambda w: jax.grad(outer)(w, XS).sum())
    assert len(el.plans(twice)(jnp.ones(5))) >= 3


def test_what_lives_at_once():
    """Losses that are added up, and losses that are differentiated one by one."""
    losses = [lambda w, s=s: loss(s, w, XS) for s in SCHEDULES[:3]]
    together = el.plans(jax.grad(lambda w: sum(f(w) for f in losses)))(1.0)
    each = [loop.plan.peak_bytes for loop in together]
    assert len(together) == 3
    assert together.peak_bytes == sum(each)
    in_turn = el.plans(lambda w: [jax.grad(f)(w) for f in losses])(1.0)
    assert in_turn.peak_bytes == max(each)
    looped = lambda w: lax.fori_loop(0, 3, lambda i, w: jax.grad(losses[0])(w), w)
    assert el.plans(looped)(1.0).peak_bytes == each[0]


def test_models_and_scans_that_end():
    class Cell(eqx.Module):
        rate: jax.Array
        name: str

        def __call__(self, h, x):
            return jnp.tanh(self.rate * h + x), h

    ends = el.ScanWhile(
        lambda h: h.sum() < 9,
        Cell(jnp.ones(5), "c"),
        max_steps=64,
        schedule=el.StoreAll(),
    )

    @eqx.filter_jit
    @eqx.filter_grad
    def gradient(model, xs):
        return model(jnp.zeros(5), xs)[1].sum()

    (found,) = el.plans(gradient)(ends, jax.ShapeDtypeStruct((64, 5), jnp.float32))
    assert (found.name, found.plan.length, found.plan.slots) == ("ScanWhile", 64, 64)
    batched = jax.vmap(lambda m, xs: gradient(m, xs), (None, 0))
    (found,) = el.plans(batched)(ends, jnp.ones((2, 64, 5)))
    assert (found.batch, found.plan.length) == (2, 64)


def test_batches_of_hessians_of_while_loops_and_gradients_of_loops_in_loops():
    def ends(w, x):
        body = lambda c: (jnp.sin(w * c[0] + 0.1), c[1] + 1)
        settings = dict(checkpoints=8, max_steps=64)
        loop = el.CheckpointedWhileLoop(lambda c: c[1] < 60, body, **settings)
        return loop((x, 0))[0].sum()

    w, x = jnp.array([0.4, 0.5]), jnp.ones(16)
    hessians = jax.vmap(jax.hessian(ends), (0, None))
    (found,), taken = el.plans(hessians)(w, x), temp_bytes(hessians, w, x)
    assert (found.is_second, found.batch) == (True, 2)
    assert taken <= found.plan.peak_bytes <= 1.2 * taken

    def nested(w, xs):
        inner = el.Scan(lambda g, _: (jnp.sin(w * g), None), schedule=el.Chunked(4))
        outer = lambda h, x: (inner(h + x, length=8)[0], None)
        return el.Scan(outer, schedule=el.Recursive(4))(x, xs)[0].sum()

    args = w[0], jnp.ones((32, 16))
    of = lambda f: [(x.depth, x.is_second) for x in el.plans(f)(*args)]
    assert of(jax.grad(nested)) == [(0, False), (1, False)]
    product = lambda w, xs: jax.jvp(lambda w: jax.grad(nested)(w, xs), (w,), (w,))[1]
    assert of(product) == [(0, True), (1, False), (1, True)]


def test_outputs_that_are_used_are_told_beside_the_plan():
    def scan(w, xs):
        step = lambda h, x: (jnp.sin(w * h + x), h)
        return el.Scan(step, schedule=el.Recursive(4))(jnp.ones(32), xs)

    xs = jnp.linspace(0, 1, 512 * 32).reshape(512, 32)
    both = lambda w, xs: jnp.sum(scan(w, xs)[1] ** 2)
    last = lambda w, xs: jnp.sum(scan(w, xs)[0] ** 2)
    (found,) = el.plans(jax.grad(both))(1.0, xs)
    assert found.output_bytes == 2 * 4 * xs.size
    whole = found.plan.peak_bytes + found.output_bytes
    assert temp_bytes(jax.grad(both), 1.0, xs) == pytest.approx(whole, rel=0.1)
    batch = jnp.stack([xs, xs])
    (found,) = el.plans(jax.vmap(jax.grad(both), (None, 0)))(1.0, batch)
    assert found.output_bytes == 2 * 4 * batch.size
    (found,) = el.plans(jax.grad(last))(1.0, xs)
    assert found.output_bytes == 0
    assert "outputs" not in str(found.notes)


SECOND = {
    "forward over reverse": lambda f: lambda w: jax.jvp(jax.grad(f), (w,), (w,))[1],
    "reverse over reverse": lambda f: jax.grad(lambda w: 2 * jax.grad(f)(w)),
}


@pytest.mark.parametrize("order", SECOND)
@pytest.mark.parametrize(
    "schedule", [el.Recursive(4), el.Budget("100KiB", measure=False)], ids=str
)
def test_of_a_product_with_a_hessian_what_is_run_is_listed(schedule, order):
    def total(w, xs):
        scan = el.Scan(lambda h, x: (jnp.sin(w * h + x), None), schedule=schedule)
        return scan(jnp.ones(32), xs)[0].sum()

    xs = jnp.linspace(0, 1, 512 * 32).reshape(512, 32)
    product = lambda w, xs: SECOND[order](lambda w: total(w, xs))(w)
    plans = el.plans(product)(1.0, xs)
    (found,), taken = plans, temp_bytes(product, 1.0, xs)
    assert found.is_second
    assert "of: a derivative of the gradient" in str(plans)
    assert taken <= found.plan.peak_bytes <= 1.1 * taken + 2**10
    both = lambda w, xs: (jax.grad(total)(w, xs), product(w, xs))
    assert [loop.is_second for loop in el.plans(both)(1.0, xs)] == [False, True]


def test_the_table():
    text = str(el.plans(grad_of(el.Chunked(8)))(1.0, XS))
    head, row, place, total = text.split("\n")
    titles = "loop steps batch schedule stored evaluations memory"
    assert head.split() == titles.split()
    assert row.startswith(
        "Scan  64     1      Chunked(chunk_size=8, batch=1)  16 carries"
    )
    assert place.strip().startswith(__file__)
    assert total.startswith("at once: ")
    fused = str(el.plans(grad_of(el.Fused(8)))(1.0, XS)).split("\n")
    assert fused[3].startswith("  kernel: none: on a CPU")


@pytest.mark.parametrize("wrong", [3, None, "f"])
def test_what_is_no_function(wrong):
    with pytest.raises(TypeError, match="plans: `f` must be a function, not "):
        el.plans(wrong)


def test_errors_are_those_of_the_function():
    scan = el.Scan(step, schedule=el.Budget(16, measure=False))
    with pytest.raises(ValueError, match="Budget"):
        el.plans(jax.grad(lambda xs: scan(jnp.ones(5), xs)[0].sum()))(XS[:2])
    with pytest.raises(ValueError, match="must all be the same"):
        el.plans(lambda xs: scan(jnp.ones(5), xs, length=3))(XS)


def assert_about(plan, bytes_taken):
    assert bytes_taken <= plan.peak_bytes <= 1.1 * bytes_taken + 1024


@pytest.mark.parametrize("kind", ["online", *slow_if(bool, ["bounded", "unbounded"])])
def test_while_loops(kind):
    loop = WHILES[kind]
    one = lambda c: loop(c).sum()
    inside = jax.grad(lambda batch: jax.vmap(one)(batch).sum())
    outside = jax.vmap(jax.grad(one))
    alone = el.plans(jax.grad(one))(jnp.zeros(5))
    place = alone[0].place
    assert (place.file, place.function) == (__file__, "<lambda>")
    assert place.text == "one = lambda c: loop(c).sum()"
    steps, slots, evaluations = {
        "bounded": (64, 12, 224),
        "online": (64, 11, 181),
        "unbounded": (None, 64, None),
    }[kind]
    batch = jnp.zeros((300, 5))
    for run in (inside, outside):
        (found,) = el.plans(jax.jit(run))(batch)
        plan = found.plan
        assert (found.name, found.batch) == (type(loop).__name__, 300)
        assert (plan.length, plan.slots) == (steps, slots)
        assert plan.evaluations == evaluations
        assert found.place == place
        assert_about(plan, temp_bytes(run, batch))
    assert alone.peak_bytes == alone[0].plan.peak_bytes


def test_the_table_of_a_while_loop():
    tables = {
        kind: str(el.plans(jax.grad(lambda c, kind=kind: WHILES[kind](c).sum()))(XS[0]))
        for kind in ("online", "unbounded")
    }
    assert "<= 64  1      checkpoints=11  11 carries  <= 181 " in tables["online"]
    assert (
        "any    1      checkpoints=64  64 carries  3 a step up to 2144 steps"
        in (tables["unbounded"])
    )
    few = el.CheckpointedWhileLoop(
        lambda c: c.sum() < 9, jnp.exp, checkpoints=2, max_steps=64
    )
    (found,) = el.plans(jax.grad(lambda c: few(c).sum()))(XS[0])
    lines = str(found.plan).split("\n")
    assert lines[0] == "checkpoints=2"
    assert lines[1].split() == ["steps", "<=", "64"]
    assert lines[3].split() == ["evaluations", "about", str(found.plan.evaluations)]


def test_a_loop_that_reads_nothing_but_counters_stores_one_carry():
    scales = jnp.ones(32)
    loop = el.CheckpointedWhileLoop(
        lambda c: c[0] < 5,
        lambda c: (c[0] + 1, c[1] * scales[c[0]]),
        checkpoints=8,
        max_steps=32,
    )
    (found,) = el.plans(jax.grad(lambda x: loop((0, x))[1]))(1.0)
    assert (found.plan.slots, found.plan.evaluations) == (1, 64)
    assert "2 a step" in str(found.plan)


def test_a_loop_that_knows_its_first_step_stores_its_carry_in_addition():
    def body(carry):
        is_first, x = carry
        return False, jnp.sin(lax.cond(is_first, jnp.cos, lambda x: 2 * x, x))

    loop = el.CheckpointedWhileLoop(
        lambda c: c[1] < 9, body, checkpoints=3, max_steps=9
    )
    (found,) = el.plans(jax.grad(lambda x: loop((True, x))[1]))(1.0)
    assert (found.plan.slots, found.plan.evaluations) == (4, 18 + 5)


def test_loops_that_jax_differentiates():
    """Traced to be looked at, they are planned like the others, and are not run so."""
    gradient = grad_of(el.StoreAll())
    before = jax.jit(gradient).lower(1.0, XS).as_text()
    (found,) = el.plans(gradient)(1.0, XS)
    assert found.plan._layout.stores_residuals
    assert (found.name, found.plan.evaluations) == ("Scan", 64)
    assert found.place.function == "loss"
    assert_about(found.plan, temp_bytes(gradient, 1.0, XS))
    assert jax.jit(gradient).lower(1.0, XS).as_text() == before
    batch = jnp.ones((3, 64, 5))
    (found,) = el.plans(jax.vmap(gradient, (None, 0)))(1.0, batch)
    assert found.batch == 3


def test_what_a_plan_measures_is_not_what_is_listed():
    """What stores residuals was measured as what stands for it in the listing."""

    def run(schedule, w, xs):
        f = lambda h, x: (jnp.tanh(w @ jnp.tanh(w @ h + x)), None)
        return el.Scan(f, schedule=schedule)(jnp.ones(31), xs)[0].sum()

    w, xs = jnp.full((31, 31), 0.1), jnp.ones((999, 31))
    everything = el.Scan(step, schedule=el.StoreAll()).plan(jnp.ones(31), xs).pinned
    gradient = lambda schedule: jax.grad(lambda w, xs: run(schedule, w, xs))
    (found,) = el.plans(gradient(everything))(w, xs)
    taken = temp_bytes(gradient(el.StoreAll()), w, xs)
    assert found.plan._layout.stores_residuals
    assert_about(found.plan, taken)


@pytest.mark.parametrize("schedule", [el.StoreAll(), "pinned"], ids=str)
def test_effects_that_are_not_repeated(schedule):
    """A loop that runs each step once may have them, whoever asks for its plan."""

    def told(h, x):
        io_callback(lambda x: None, None, x[0])
        return jnp.sin(h * x), None

    if schedule == "pinned":
        plain = el.Scan(step, schedule=el.StoreAll())
        schedule = plain.plan(jnp.ones(5), XS).pinned
    run = lambda h: el.Scan(told, schedule=schedule)(h, XS)[0].sum()
    (found,) = el.plans(jax.grad(run))(jnp.ones(5))
    assert found.plan.evaluations == 64
    again = lambda h: el.Scan(told, schedule=el.Chunked(8))(h, XS)[0].sum()
    with pytest.raises(ValueError, match="runs steps again"):
        el.plans(jax.grad(again))(jnp.ones(5))


def test_a_loop_with_checks_has_a_plan():
    def checked(h, x):
        checkify.check(h[0] < 9, "too large")
        return h * x, None

    run = lambda h: el.Scan(checked, schedule=el.StoreAll())(h, XS)[0].sum()
    run = checkify.checkify(run)
    assert len(el.plans(jax.grad(lambda h: run(h)[1]))(jnp.ones(5))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("outer", [el.StoreAll(), el.Chunked(8)], ids=str)
def test_while_loops_and_plain_loops_within_loops(outer):
    def inner(h, x):
        h = WHILES["online"](h + x)
        return el.Scan(step, schedule=el.StoreAll())(h, jnp.ones((9, 5)))[0], None

    run = lambda h: el.Scan(inner, schedule=outer)(h, XS)[0].sum()
    gradient = jax.grad(run)
    for f, shape in (
        (gradient, (5,)),
        (jax.jit(gradient), (5,)),
        (jax.vmap(jax.jit(jax.vmap(gradient)), 1), (3, 2, 5)),
    ):
        found = el.plans(f)(jnp.ones(shape))
        assert {loop.batch for loop in found} == {math.prod(shape[:-1])}
        listed = sorted((x.name, x.plan.length, x.depth) for x in found)
        assert listed == [
            ("CheckpointedWhileLoop", 64, 1),
            ("Scan", 9, 1),
            ("Scan", 64, 0),
        ]


# Loops that no gradient goes through

STARTS, ROWS = jnp.ones(8), jnp.ones((20, 8))


def _tanh(h, x):
    return jnp.tanh(h + x), h


def _sine(c):
    return jnp.sin(c[0]), c[1] + 1.0


def _total(tree):
    return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(tree))


OF_MANY_KINDS = {
    "CheckpointedScan": lambda x: el.CheckpointedScan(_tanh)(x, ROWS),
    "Scan": lambda x: el.Scan(_tanh)(x, ROWS),
    "CheckpointedForLoop": lambda x: el.CheckpointedForLoop(lambda r: jnp.tanh(r * x))(
        ROWS
    ),
    "ScanWhile": lambda x: el.ScanWhile(lambda h: h[0] < 9, _tanh, max_steps=20)(
        x, ROWS
    )[0],
    "BoundedWhileLoop": lambda x: el.BoundedWhileLoop(
        lambda c: c[1] < 3.0, _sine, max_steps=5
    )((x, 0.0)),
}
stop = jax.lax.stop_gradient
NOT_NEEDED = {
    "another argument": lambda run: (
        lambda x: jax.grad(lambda w: w * _total(run(x)))(1.0)
    ),
    "of a batch": lambda run: (
        lambda x: jax.vmap(jax.grad(lambda w, x: w * _total(run(x))), (None, 0))(
            1.0, jnp.stack([x, x])
        )
    ),
    "no inexact argument": lambda run: (
        lambda x: jax.grad(lambda w: w * _total(run(stop(x * w))))(1.0)
    ),
    "auxiliary": lambda run: jax.grad(lambda x: (jnp.sum(x), run(x)), has_aux=True),
    "stopped": lambda run: jax.grad(lambda x: jnp.sum(x) * stop(_total(run(x)))),
    "compared": lambda run: jax.grad(
        lambda x: jnp.sum(jnp.where(_total(run(x)) > 0, x, -x))
    ),
    "of a factor, twice": lambda run: (
        lambda x: jax.hessian(lambda w: w**3 * _total(run(x)))(1.0)
    ),
    "not at all": lambda run: run,
}


@pytest.mark.sampled
@pytest.mark.parametrize("case", NOT_NEEDED)
@pytest.mark.parametrize("kind", slow_if(lambda k: k == "ScanWhile", OF_MANY_KINDS))
def test_a_loop_that_no_gradient_goes_through_has_no_plan(kind, case):
    found = el.plans(NOT_NEEDED[case](OF_MANY_KINDS[kind]))(STARTS)
    assert not found, str(found)
    assert found.peak_bytes == 0


@pytest.mark.parametrize("kind", OF_MANY_KINDS)
def test_one_that_it_goes_through_has_one_beside_it(kind):
    run = OF_MANY_KINDS[kind]

    def loss(w, x):
        return w * _total(run(x)) + jnp.sum(x) * stop(_total(run(x + 1)))

    assert len(el.plans(jax.grad(loss))(1.0, STARTS)) == 0
    assert len(el.plans(jax.jit(jax.grad(loss, 1)))(1.0, STARTS)) == 1
    assert len(el.plans(jax.grad(loss, (0, 1)))(1.0, STARTS)) == 1


def test_what_needs_no_gradient_may_call_back():
    seen = []

    def step(h, x):
        h = io_callback(
            lambda h: (seen.append(1), h)[1], jax.typeof(h), h, ordered=True
        )
        return h + x, None

    scan = el.CheckpointedScan(step)
    grad = jax.grad(lambda w, x: w * scan(x, jnp.ones(3))[0])
    assert jax.jit(grad)(1.0, jnp.float32(2.0)) == 5.0
    assert len(seen) == 3


@pytest.mark.parametrize(
    ("way", "is_told"),
    [
        (lambda x: x.swapaxes(0, 1), True),
        (jax.jit(lambda x: jnp.moveaxis(x, 1, 0)), True),
        (lambda x: x.reshape(400, 8, 16), False),
    ],
)
def test_transposed_xs_are_told_beside_the_plan(way, is_told):
    @jax.jit
    def run(w, xs):
        scan = el.CheckpointedScan(lambda h, x: (jnp.tanh(h @ w + x), None))
        return jnp.sum(scan(jnp.zeros((8, 16)), xs)[0])

    w, x = jnp.eye(16), jax.ShapeDtypeStruct((8, 400, 16), "float32")
    gradient = jax.grad(lambda w, x: run(w, way(x)))
    found = el.plans(gradient)(w, x)
    (loop,) = found
    assert loop.copied_bytes == (is_told and 8 * 400 * 16 * 4)
    assert ("in_axes=1" in str(found)) == is_told
    assert found.peak_bytes >= temp_bytes(gradient, w, x) >= loop.copied_bytes
