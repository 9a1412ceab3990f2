"""`Offload`: the slots are in the memory of the host, and nothing else changes."""

import re

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import hijax

import eqloop as el
from eqloop.checkpointing.engine.slots import _host_slots

from ..asserts import assert_close
from ..marks import slow
from .memory import gradient
from .steps import recurrent

pytestmark = pytest.mark.sampled

SCHEDULES = [el.Recursive(3), el.Chunked(4, batch=4), el.Binomial(4)]
MORE = [el.Binomial(4, block=3), slow(el.Budget("8KiB"), id="a budget")]


def stacked_loss(schedule, reverse=False):
    """With `ys`, which the sweep that fills the slots stacks."""

    def loss(f, init, xs):
        step = lambda h, x: (f(h, x)[0], h[:2])
        carry, ys = el.Scan(step, schedule=schedule, reverse=reverse)(init, xs)
        return jnp.sum(carry**2) + jnp.arange(1.0 * len(xs)) @ ys.sum(1)

    return loss


@pytest.mark.parametrize("schedule", SCHEDULES + MORE, ids=repr)
def test_gradients_agree(schedule):
    args = recurrent(31, width=8)
    both = (jax.jit(gradient(s))(*args) for s in (el.Offload(schedule), None))
    assert_close(*both)


@pytest.mark.parametrize("schedule", [slow(SCHEDULES[0]), *SCHEDULES[1:]], ids=repr)
@pytest.mark.parametrize("reverse", [slow(False), True])
def test_gradients_agree_with_outputs(schedule, reverse):
    args = recurrent(27, width=8)
    losses = (stacked_loss(s, reverse) for s in (el.Offload(schedule), None))
    run = lambda loss: jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*args)
    assert_close(*map(run, losses))


def test_under_vmap_where_integers_have_64_bits():
    loops = [el.Scan(jax.jit(_decay), schedule=s) for s in (_OFFLOADED, None)]
    with jax.enable_x64(True):
        xs = jnp.linspace(0.1, 1.0, 9)
        one = lambda loop: jax.grad(lambda h: loop(h, xs)[0])
        assert_close(*(jax.jit(jax.vmap(one(loop)))(xs[:2]) for loop in loops))


_OFFLOADED = el.Offload(el.Binomial(3))


def _decay(h, x):
    return jnp.sin(h) * x, None


def test_under_vmap():
    f, init, xs = recurrent(9, width=4)
    inits = jnp.stack([init, 2 * init])
    run = lambda schedule: jax.jit(
        jax.vmap(lambda init: gradient(schedule)(f, init, xs)[1])
    )
    assert_close(run(el.Offload(el.Binomial(3)))(inits), run(None)(inits))


def through_vmaps(schedule):
    """Derivatives under `vmap`, of a carry some of whose leaves are not batched."""

    def run(w, h, xs):
        f = lambda c, x: ((jnp.tanh(w @ c[0] * c[1] + x), 0.9 * c[1]), c[1])
        (h, t), ys = el.Scan(f, schedule=schedule)((h, jnp.ones(())), xs)
        return jnp.sum(h**2) + t * jnp.sum(ys) + h[0]

    grad = jax.grad(run, (0, 1, 2))
    pushed = lambda w, h, xs: jax.jvp(lambda h: grad(w, h, xs)[:2], (h,), (h,))
    row = lambda w, h, xs: jax.vmap(run, (None, 0, None))(w, jnp.stack([h, -h]), xs)
    return {
        "twice": jax.vmap(jax.vmap(grad, (None, 0, None)), (None, None, 0)),
        "of weights": lambda w, h, xs: jax.vmap(grad, (0, None, None))(
            jnp.stack([w, -w, 2 * w]), h[0], xs[0]
        ),
        "of jit": lambda w, h, xs: jax.vmap(jax.jit(grad), (None, 0, None))(
            w, h, xs[0]
        ),
        "of jvp": lambda w, h, xs: jax.vmap(pushed, (None, 0, None))(w, h, xs[0]),
        "of jacrev": lambda w, h, xs: jax.vmap(
            jax.jacrev(row, (0, 1)), (None, 0, None)
        )(w, h, xs[0]),
    }


@pytest.mark.parametrize(
    "schedule",
    [el.Recursive(2, batch=1), el.Chunked(4, batch=2), el.Binomial(3)],
    ids=repr,
)
@pytest.mark.parametrize(
    "how", ["twice", "of weights", "of jit", "of jvp", "of jacrev"]
)
def test_under_vmaps(schedule, how):
    w, h, xs = 0.3 * jnp.eye(3), jnp.arange(6.0).reshape(2, 3) / 6, jnp.ones((2, 9, 3))
    run = lambda schedule: jax.jit(through_vmaps(schedule)[how])(w, h, xs)
    assert_close(run(el.Offload(schedule)), run(None))


@pytest.mark.parametrize("schedule", SCHEDULES + MORE[:1], ids=repr)
def test_slots_stay_where_they_are_under_vmap(schedule):
    # The host would have to move them, or to look up each example's row.
    f, init, xs = recurrent(31, width=8)
    inits = jnp.stack([init] * 3)
    grad = jax.vmap(lambda init: gradient(el.Offload(schedule))(f, init, xs)[1:])
    lowered = jax.jit(grad).trace(inits).lower(lowering_platforms=("cuda",))
    moves = re.compile(
        r"stablehlo\.(transpose|gather|scatter|reverse)\b.*<\d+x\d+x\d+xui32>"
    )
    assert "x3x8xui32>" in lowered.as_text()
    assert list(filter(moves.search, lowered.as_text().splitlines())) == []


@pytest.mark.parametrize("schedule", [SCHEDULES[0], slow(SCHEDULES[2])], ids=repr)
def test_a_batch_that_is_split_over_devices(schedule):
    explicit = (jax.sharding.AxisType.Explicit,)
    with jax.set_mesh(jax.make_mesh((2,), ("batch",), axis_types=explicit)):
        split = jax.sharding.PartitionSpec("batch", None)
        inits = jax.device_put(jnp.linspace(0, 1, 32).reshape(4, 8), split)
        xs = jnp.linspace(0, 1, 72).reshape(9, 8)

        def run(schedule):
            scan = el.Scan(lambda h, x: (jnp.tanh(h + x), None), schedule=schedule)
            loss = lambda h: jnp.sum(scan(h, xs)[0] ** 2)
            return jax.jit(jax.vmap(jax.grad(loss)))(inits)

        grads = run(el.Offload(schedule))
        assert jax.typeof(grads).sharding.spec == split
        assert_close(grads, run(None))


@pytest.mark.skipif(
    not hasattr(hijax, "HiPrim"),
    reason="JAX 0.10 transposes no scan with integers on the host",
)
@pytest.mark.parametrize("schedule", [el.Recursive(2), slow(el.Binomial(2))], ids=repr)
def test_reverse_over_reverse_inside_a_scan(schedule):
    xs = jnp.linspace(0.1, 1.0, 5)

    def twice(schedule):
        scan = el.Scan(lambda h, x: (jnp.sin(h * x), h * x), schedule=schedule)
        body = lambda h, _: (scan(h, xs)[1].sum(), None)
        return lambda h: jax.lax.scan(body, h, length=2)[0]

    second = lambda schedule: jax.jit(jax.grad(jax.grad(twice(schedule))))(0.7)
    np.testing.assert_allclose(second(el.Offload(schedule)), second(None), rtol=1e-4)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_slots_are_on_the_host(schedule):
    args = recurrent(31, width=8)
    plan = el.Scan(args[0], schedule=el.Offload(schedule)).plan(*args[1:])
    order = plan._layout.order
    on_host = f"u32<host>[{len(order.starts) + order.needs_spare},8,1]"
    assert on_host in str(jax.make_jaxpr(gradient(el.Offload(schedule)))(*args))
    assert "<host>" not in str(jax.make_jaxpr(gradient(schedule))(*args))


# Each is broken up into tiles, of which a TPU writes whole ones only.
SHAPES = [(), (1,), (3,), (1, 1), (1, 2), (2, 1, 1)]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
@pytest.mark.parametrize("examples", [None, 1, slow(3)])
def test_leaves_of_every_shape(schedule, examples):
    def loss(schedule, weights, xs):
        def step(carry, x):
            move = lambda w, y: jnp.sin(w * x + y.sum() * y)
            return list(map(move, weights, carry)), None

        carry, _ = el.Scan(step, schedule=schedule)([0.3 * w for w in weights], xs)
        return sum(map(jnp.sum, carry))

    rng = np.random.default_rng(0)
    of_batch = () if examples is None else (examples,)
    weights = [jnp.asarray(rng.uniform(size=of_batch + shape)) for shape in SHAPES]
    xs = jnp.asarray(rng.uniform(size=(*of_batch, 9)))

    def run(schedule):
        grad = jax.grad(lambda *args: loss(schedule, *args), (0, 1))
        return jax.jit(grad if examples is None else jax.vmap(grad))

    offloaded = run(el.Offload(schedule))
    assert_close(offloaded(weights, xs), run(None)(weights, xs))
    program = str(jax.make_jaxpr(offloaded)(weights, xs))
    rows = re.findall(r"<host>\[\d+,([\d,]*)\]", program)
    assert len(rows) >= len(SHAPES)
    for shape in (tuple(map(int, row.split(","))) for row in rows):
        assert len(shape) > 1
        assert np.prod(shape) > 1


def test_transfers_are_in_the_program_for_a_gpu():
    args = recurrent(31, width=8)
    texts = [
        jax.jit(lambda *args, s=schedule: gradient(s)(*args))
        .trace(*args)
        .lower(lowering_platforms=("cuda",))
        .as_text()
        for schedule in (el.Binomial(4), el.Offload(el.Binomial(4)))
    ]
    plain, offloaded = (text.count("annotate_device_placement") for text in texts)
    assert plain == 0
    assert offloaded >= 2
    assert "pinned_host" in texts[1]


def test_the_plan_is_that_of_the_schedule():
    f, init, xs = recurrent(31)
    plan = el.Scan(f, schedule=el.Offload(el.Binomial(4))).plan(init, xs)
    plain = el.Scan(f, schedule=el.Binomial(4)).plan(init, xs)
    assert plan.evaluations == plain.evaluations
    assert plan.slots == plain.slots
    assert "Offload" in str(plan)


def test_store_all_has_no_slots():
    with pytest.raises(ValueError, match="so there are no slots"):
        el.Offload(el.StoreAll())


def test_what_offload_takes():
    with pytest.raises(TypeError, match="must be a schedule"):
        el.Offload(16)
    with pytest.raises(ValueError, match="on the host already"):
        el.Offload(el.Offload(el.Binomial(3)))
    with pytest.raises(ValueError, match="must be 'pinned_host'"):
        el.Offload(el.Binomial(3), memory_kind="device")


@pytest.mark.parametrize("is_jitted", [slow(False), True], ids=["op by op", "jit"])
@pytest.mark.parametrize(
    "schedule", [*map(slow, SCHEDULES[:2]), SCHEDULES[2]], ids=repr
)
def test_carries_of_every_kind(schedule, is_jitted):
    dtypes = "bool_ int4 uint8 bfloat16 float16 float8_e5m2 complex64"
    others = [jnp.ones(2, getattr(jnp, name)) for name in dtypes.split()]
    others += [jax.random.split(jax.random.key(0, impl=i)) for i in ("rbg", None)]

    def step(carry, x):
        h, *others = carry
        noise = jax.random.uniform(others[-1][0]) + jax.random.uniform(others[-2][0])
        # All of them are read, and so all are stored.
        for leaf in others[:-2]:
            real = leaf.real if jnp.iscomplexobj(leaf) else leaf
            noise += real[0].astype(noise.dtype)
        return (jnp.sin(h * x + noise), *(leaf[::-1] for leaf in others)), None

    def loss(schedule):
        scan = el.Scan(step, schedule=schedule)
        return lambda h, xs: scan((h, *others), xs)[0][0]

    args = jnp.array(0.3), jnp.linspace(0.5, 1.0, 7)
    grad = jax.grad(loss(el.Offload(schedule)), (0, 1))
    grad = jax.jit(grad) if is_jitted else grad
    assert_close(grad(*args), jax.grad(loss(el.StoreAll()), (0, 1))(*args))


def test_slots_are_not_batched_behind_the_back_of_those_who_hold_them():
    """Each `vmap` is asked once, when the way back is expanded within it."""
    x = jnp.ones((2, 3, 4))
    asked = _host_slots._of_all_examples
    f = lambda x: asked(x, ()).rows
    assert jax.vmap(f)(x).shape == (2, 3, 2, 4)
    staged = jex.jaxpr_as_fun(jax.make_jaxpr(f)(x[0]))
    assert staged(x[0])[0].shape == (3, 4)
    with pytest.raises(AssertionError, match="cannot be batched after"):
        jax.vmap(staged)(x)
