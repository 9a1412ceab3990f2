"""Everything stored of the last steps, under other schedules for the first ones."""

import collections
import functools

import hypothesis
import jax
import jax.numpy as jnp
import pytest
from hypothesis import strategies as st

import eqloop as el
from eqloop.checkpointing.engine.orders._all_at_once import AllAtOnce
from eqloop.checkpointing.engine.orders._first_and_last import FirstAndLast
from eqloop.checkpointing.engine.orders._levels import nests
from eqloop.checkpointing.engine.orders._nested import Nested
from eqloop.checkpointing.engine.orders._revolved import Revolved

from ..asserts import assert_close
from ..compiling import temp_bytes
from ..marks import slow, slow_if
from .counting import Counter, count_gradient

pytestmark = pytest.mark.sampled

LENGTH = 13
W = jnp.sin(jnp.arange(16.0)).reshape(4, 4)
H, XS = jnp.linspace(-1, 1, 4), jnp.sin(jnp.arange(LENGTH * 4.0)).reshape(LENGTH, 4)


def step(w, carry, x):
    """A key and a counter; a residual that is the same for all steps, and a loop."""
    h, key, count = carry
    key, of_step = jax.random.split(key)
    noise = jax.random.uniform(of_step, h.shape)
    inner = lambda h, v: (jnp.sin(h + v), h)
    z, hs = jax.lax.scan(inner, jnp.sin(w) @ h, jnp.stack([x, noise]))
    return (z * h, key, count + 1), (h * count.astype(h.dtype), jnp.sum(hs), count)


def loss(loop):
    def run(w, h, xs):
        init = h, jax.random.key(0), jnp.int32(1)
        (h, _, _), ys = loop(functools.partial(step, w), init, xs)
        return jnp.sum(h) + sum(jnp.sum(y * jnp.cos(y)) for y in ys[:2])

    return run


def of(schedule, **settings):
    return lambda f, init, xs: el.Scan(f, schedule=schedule, **settings)(init, xs)


def gradient(run):
    return jax.jit(jax.grad(run, (0, 1, 2)))


def assert_as_scan(schedule, change=gradient, **settings):
    plain = functools.partial(jax.lax.scan, reverse=settings.get("reverse", False))
    found = change(loss(of(schedule, **settings)))(W, H, XS)
    assert_close(found, change(loss(plain))(W, H, XS), rtol=2e-4, atol=2e-5)


FIRST = (
    el.Chunked(1),
    el.Chunked(3, batch=3),
    el.Recursive(2),
    el.Binomial(2),
    el.Binomial(2, block=2),
    el.Offload(el.Chunked(2)),
    el.Cast(el.Chunked(3), jnp.float32),
    el.StoreLast(el.Binomial(2), 3),
)


@pytest.mark.parametrize(
    "first", slow_if(lambda first: first not in FIRST[3:6], FIRST), ids=str
)
@pytest.mark.parametrize("steps", [slow(1), 5, slow(12)])
def test_schedules_of_the_first_steps(first, steps):
    assert_as_scan(el.StoreLast(first, steps))


@pytest.mark.parametrize("around", [el.Offload, slow(lambda s: el.Cast(s, "float32"))])
def test_slots_of_other_kinds(around):
    assert_as_scan(around(el.StoreLast(el.Chunked(3), 5)))


LAST = el.StoreLast(el.Chunked(3), 5)


@pytest.mark.parametrize(
    "settings",
    [
        dict(reverse=True),
        slow(dict(unroll=2)),
        dict(policy=el.policies.save_nothing),
        slow(dict(policy=el.policies.save_dots)),
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings(settings):
    assert_as_scan(LAST, **settings)


def reverse_over_reverse(run):
    of_first = lambda w, h, xs: jax.grad(run, (0, 1))(w, h, xs)
    return gradient(lambda *args: sum(jnp.sum(jnp.sin(g)) for g in of_first(*args)))


def forward_over_reverse(run):
    return jax.jit(jax.jacfwd(jax.grad(run, 1), 1))


def of_cotangents(run):
    """Only these have tangents: the way back needs the carries after all."""

    def push(*args):
        _, pull = jax.vjp(run, *args)
        return jax.jvp(pull, (jnp.float32(1),), (jnp.float32(2),))

    return jax.jit(push)


@pytest.mark.parametrize(
    "change", [slow(reverse_over_reverse), forward_over_reverse, of_cotangents]
)
def test_derivatives_of_the_gradient(change):
    assert_as_scan(LAST, change)


def test_a_batch():
    batch = jnp.stack([H, 2 * H])
    in_batch = lambda run: jax.jit(
        lambda w, h, xs: jax.vmap(jax.grad(run, (0, 1)), (None, 0, None))(w, batch, xs)
    )
    assert_as_scan(LAST, in_batch)


def test_where_outputs_are_left_out():
    sliced = lambda f, init, xs: el.SlicedScan(f, step=3, schedule=LAST)(init, xs)

    def plain(f, init, xs):
        carry, ys = jax.lax.scan(f, init, xs)
        return carry, jax.tree.map(lambda y: y[::3], ys)

    found, wanted = (gradient(loss(loop))(W, H, XS) for loop in (sliced, plain))
    assert_close(found, wanted, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("rule", [False, True])
def test_cotangents_that_do_not_arrive(rule):
    """Residuals are stored for all of them. Zero times infinity would be NaN."""

    @jax.custom_vjp
    def doubled(h):
        return 2 * h

    # Not linear in the cotangent: there zeros are multiplied.
    doubled.defvjp(lambda h: (2 * h, h), lambda h, ct: (jnp.exp(ct) * h,))

    def loop(schedule):
        def step(carry, x):
            h, unused = carry
            h = doubled(h) if rule else jnp.sin(h * x)
            return (h, unused * h * (1.0 if rule else 1e30)), (jnp.cos(h), h)

        def run(h, xs):
            init = h, jnp.float32(1)
            (h, _), ys = el.Scan(step, schedule=schedule)(init, xs)
            return jnp.sin(h) + jnp.sum(ys[0])

        return jax.jit(jax.grad(run, (0, 1)))(0.5, jnp.linspace(0.5, 1, LENGTH))

    assert_close(loop(LAST), loop(el.Chunked(1)))


def test_slots_that_hold_nothing():
    """No step reads the carry: residuals are stored all the same."""

    def total(schedule):
        def run(xs):
            add = lambda h, x: (h + jnp.sin(x), None)
            return jnp.sum(el.Scan(add, schedule=schedule)(H, xs)[0])

        return jax.jit(jax.grad(run))(XS)

    assert_close(total(LAST), total(el.StoreAll()))


def test_a_loop_that_may_stop():
    """Nobody knows which of its steps will be the last."""

    def run(schedule):
        goes_on, grow = lambda h: h[0] < 3, lambda h, x: (jnp.sin(h) + h * x, h)

        def last(h, xs):
            scan = el.ScanWhile(goes_on, grow, max_steps=13, schedule=schedule)
            h, ys, _ = scan(h, xs)
            return jnp.sum(jnp.sin(h)) + jnp.sum(ys**2)

        return jax.jit(jax.grad(last, (0, 1)))(jnp.ones(2), jnp.linspace(0.5, 1, 13))

    assert_close(run(LAST), run(el.StoreAll()))


def test_bars_there_and_back(capsys):
    assert_as_scan(LAST, progress=el.ProgressBar(desc="rows"))
    assert capsys.readouterr().err.count("13/13") >= 2


class Halves(el.AbstractSchedule):
    """Two segments that are planned alike."""

    def layout(self, loop):
        half = loop.length // 2
        return loop.cut([(half, LAST), (loop.length - half, LAST)])


def test_as_a_segment_of_an_own_schedule():
    """There the residuals are those of a block, for which the steps are run again."""
    assert_as_scan(Halves())
    places = collections.Counter(count_gradient(Halves(), LENGTH))
    assert {places[i] for i in (1, 5, 12)} == {2}
    assert sum(places.values()) == plan_of(Halves()).evaluations


# How often steps are evaluated.


def plan_of(schedule, length=LENGTH, **settings):
    scan = el.Scan(lambda h, x: (jnp.sin(h + x), h), schedule=schedule, **settings)
    return scan.plan(0.5, jnp.ones(length))


@pytest.mark.parametrize("first", [el.Chunked(1), el.Binomial(2), el.Recursive(2)])
def test_what_is_stored_is_evaluated_once(first):
    schedule = el.StoreLast(first, 5)
    places = collections.Counter(count_gradient(schedule, LENGTH))
    assert {places[i] for i in range(8, LENGTH)} == {1}
    assert min(places[i] for i in range(8)) == 2
    assert sum(places.values()) == plan_of(schedule).evaluations
    of_first = len(count_gradient(first, 8))
    assert sum(places.values()) == of_first + 5


def test_a_loop_in_the_step_runs_once_with_it():
    """The step and its residuals are one program."""
    counter = Counter()

    def run(h):
        inner = lambda carry, _: counter(carry, 1.0)
        outer = lambda carry, _: (jax.lax.scan(inner, carry, None, 2)[0], None)
        scan = el.Scan(outer, schedule=el.StoreLast(el.Chunked(1), 3))
        return scan((h, 0), length=4)[0][0]

    places = collections.Counter(counter.evaluations(jax.grad(run), 0.5))
    assert places == {i: 2 if i < 2 else 1 for i in range(8)}


def test_carries_in_files(tmp_path):
    """What is run again to write them are the steps that have carries."""
    schedule = el.Spill(LAST, tmp_path)
    assert_as_scan(schedule)
    assert not list(tmp_path.iterdir())
    places = count_gradient(schedule, LENGTH)
    assert len(places) == plan_of(schedule).evaluations == plan_of(LAST).evaluations + 8


@pytest.mark.parametrize("steps", [0, 13, 20])
def test_all_or_none(steps):
    whole = plan_of(el.StoreLast(el.Chunked(3), steps))
    other = plan_of(el.StoreAll() if steps else el.Chunked(3))
    assert whole.pinned == other.pinned


def test_a_policy_has_steps_evaluated_again():
    nothing = dict(policy=el.policies.save_nothing)
    plan = plan_of(el.StoreLast(el.Chunked(1), 5), **nothing)
    assert plan.evaluations == 8 * 2 + 5 * 2


# What a plan says, and whether it is so.


def test_a_plan_says_what_is_stored():
    text = str(plan_of(LAST))
    assert "stored carries     5, " in text
    assert "the last 5 of 13 steps store everything, " in text
    assert "evaluations        25, 1.92 a step" in text


WIDTH, LAYERS, ROWS = 128, 12, 128
LAYER_XS = (jnp.ones((LAYERS, WIDTH, 4 * WIDTH)), jnp.ones((LAYERS, 4 * WIDTH, WIDTH)))


def layer(h, w):
    return h + jax.nn.gelu(h @ w[0]) @ w[1], None


def of_layers(schedule):
    def run(h, w):
        return jnp.sum(el.Scan(layer, schedule=schedule)(h, w)[0] ** 2)

    return jax.grad(run, (0, 1))


def plan_of_layers(schedule):
    return el.Scan(layer, schedule=schedule).plan(jnp.ones((ROWS, WIDTH)), LAYER_XS)


@pytest.mark.parametrize(
    "schedule",
    [
        el.StoreLast(el.Chunked(1), 9),
        slow(el.StoreLast(el.Chunked(2), 6)),
        el.StoreLast(el.Binomial(1), 6),
    ],
    ids=str,
)
def test_memory(schedule):
    """No copy of `xs`, or of what is stored: no more than what was counted."""
    plan = plan_of_layers(schedule)
    taken = temp_bytes(of_layers(schedule), jnp.ones((ROWS, WIDTH)), LAYER_XS)
    assert taken <= plan.peak_bytes < 1.05 * taken
    layout, cost = plan._layout, plan._cost
    counted = layout.order.stored_bytes(cost, layout.reversal, True)
    assert counted <= taken <= counted + 4 * cost.carry + 2 * cost.residuals


def test_the_list_of_plans_has_the_plan_of_the_loop():
    schedule = el.StoreLast(el.Chunked(1), 9)
    (found,) = el.plans(of_layers(schedule))(jnp.ones((ROWS, WIDTH)), LAYER_XS)
    asked = plan_of_layers(schedule)
    assert found.plan.pinned == asked.pinned
    assert found.plan.peak_bytes == asked.peak_bytes


@pytest.mark.parametrize("share", [0.95, slow(0.8), 0.5])
def test_a_budget_fills_its_room(share):
    full = plan_of_layers(el.StoreAll()).peak_bytes
    plan = plan_of_layers(el.Budget(int(share * full), measure=False))
    assert plan.peak_bytes <= share * full
    # One of the layers is less than a tenth of the memory.
    assert plan.evaluations <= LAYERS * (2 - share) + 2
    assert plan._layout.steps_with_residuals > 0


def test_a_picture():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    plan = plan_of_layers(el.StoreLast(el.Chunked(1), 9))
    (line, *_) = plan.plot().lines
    sizes = line.get_ydata()
    # All is stored where the way back begins, and then it is given back.
    assert list(sizes).index(max(sizes)) == LAYERS - 1
    assert sizes[-1] < max(sizes) / 4


@pytest.mark.parametrize(
    ("args", "error"), [((16, 3), TypeError), ((el.Chunked(1), "3"), TypeError)]
)
def test_wrong_settings(args, error):
    with pytest.raises(error, match="StoreLast"):
        el.StoreLast(*args)
    with pytest.raises(ValueError, match="at least 0, not -1"):
        el.StoreLast(el.Chunked(1), -1)
    with pytest.raises(ValueError, match="Use it alone"):
        el.StoreLast(el.Budget("1MiB"), 3)


@hypothesis.given(st.data(), st.integers(1, 40), st.integers(1, 40))
@hypothesis.settings(max_examples=50)
def test_history_and_bytes_are_what_the_order_counts(data, first, last):
    kinds = (
        Nested(nests(first, 3)),
        Nested(nests(first, 2, 3)),
        Revolved(first, 3),
        Revolved(first, 4, 2),
    )
    order = FirstAndLast(data.draw(st.sampled_from(kinds)), AllAtOnce(last))
    assert order.length == first + last
    events, of_first = list(order.history()), list(order.first.history())
    again = [[e.position for e in of if e.kind == "again"] for of in (events, of_first)]
    assert again[0] == again[1]
    assert order.evaluations == order.first.evaluations + last
    # Where the way back begins, all that the primal stores is there.
    plan = plan_of(LAST)
    cost, reversal = plan._cost, plan._layout.reversal
    turn = next(event for event in events if event.kind == "reversal")
    stored = order.primal_slots * cost.held + last * cost.residuals
    assert order.event_bytes(cost, turn) == stored
    assert order.stored_bytes(cost, reversal, True) >= stored
    assert order.stored_bytes(cost, reversal, False) >= last * cost.residuals
