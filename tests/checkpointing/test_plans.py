"""`el.plans`: the loops of a function, and what they are going to do."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax import lax

import eqloop as el

from ..marks import slow_if

XS = jnp.ones((64, 5))


def step(h, x):
    return jnp.sin(h + x), h


def loss(schedule, w, xs):
    h, ys = el.Scan(lambda h, x: step(w * h, x), schedule=schedule)(jnp.ones(5), xs)
    return h.sum() + ys.sum()


def grad_of(schedule):
    return jax.grad(lambda w, xs: loss(schedule, w, xs), (0, 1))


SCHEDULES = (
    el.Recursive(4),
    el.Recursive(4, block=4),
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
    assert found.plan.layout == asked.layout
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

    @jax.jit
    def gradient(w, xs):
        return grad_of(el.Budget("1GiB"))(w, xs)

    before = gradient.lower(1.0, XS).as_text()
    (found,) = el.plans(gradient)(1.0, XS)
    assert found.plan.layout.stores_residuals
    assert found.plan.evaluations == 64
    assert gradient.lower(1.0, XS).as_text() == before
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
    assert len(el.plans(grad_of(el.StoreAll()))(1.0, XS)) == 0
    (found,) = el.plans(jax.grad(lambda xs: loss(el.Recursive(2), 1.0, xs)))(XS)
    both = el.plans(grad_of(el.Recursive(2)))(1.0, XS)[0]
    assert found.plan.peak_bytes <= both.plan.peak_bytes
    assert str(el.plans(forward)(XS)).endswith("at once: 0 B")


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
    one = lambda c: el.BoundedWhileLoop(lambda c: c < 3, jnp.exp, max_steps=4)(c)
    assert len(el.plans(jax.grad(one))(0.5)) == 0
    batched = jax.vmap(lambda m, xs: gradient(m, xs), (None, 0))
    (found,) = el.plans(batched)(ends, jnp.ones((2, 64, 5)))
    assert (found.batch, found.plan.length) == (2, 64)


def test_the_table():
    text = str(el.plans(grad_of(el.Chunked(8)))(1.0, XS))
    head, row, place, total = text.split("\n")
    titles = "loop steps batch schedule stored evaluations memory"
    assert head.split() == titles.split()
    assert row.startswith(
        "Scan  64     1      Chunked(chunk_size=8, block=1)  16 carries"
    )
    assert place.strip().startswith(__file__)
    assert total.startswith("at once: ")


@pytest.mark.parametrize("wrong", [3, None, "f"])
def test_what_is_no_function(wrong):
    with pytest.raises(TypeError, match="plans: `f` must be callable, but"):
        el.plans(wrong)


def test_errors_are_those_of_the_function():
    scan = el.Scan(step, schedule=el.Budget(16))
    with pytest.raises(ValueError, match="Budget"):
        el.plans(jax.grad(lambda xs: scan(jnp.ones(5), xs)[0].sum()))(XS)
    with pytest.raises(ValueError, match="must all be the same"):
        el.plans(lambda xs: scan(jnp.ones(5), xs, length=3))(XS)
