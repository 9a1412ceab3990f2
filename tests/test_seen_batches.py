"""Steps and rows that can see their batch: what is run again gives what ran before."""

import functools
from typing import Any

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqloop as el

from .asserts import assert_close
from .marks import slow

pytestmark = pytest.mark.sampled


@jax.custom_batching.custom_vmap
def mixed(n: Any) -> Any:
    return n


@mixed.def_vmap
def _(axis_size: int, in_batched: Any, n: Any) -> tuple[Any, bool]:
    return mixed(n + jnp.sum(n, 0) + axis_size), True


@jax.custom_vjp
def ruled(x: Any, n: Any) -> Any:
    return x


ruled.defvjp(
    lambda x, n: (x, n),
    lambda n, ct: (ct * (1 + el.unvmap(n, "max") % 3).astype(ct.dtype), None),
)


@jax.custom_jvp
def pushed(x: Any, n: Any) -> Any:
    return x


@pushed.defjvp
def _(primals: Any, tangents: Any) -> Any:
    (x, n), (dot, _) = primals, tangents
    return x, dot * (1 + el.unvmap(n, "max") % 3).astype(dot.dtype)


def weighed(of_n: Any) -> Any:
    return lambda x, n: x * (1.5 + jnp.sin(of_n(n).astype(x.dtype)))


def drawn(impl: str, x: Any, n: Any) -> Any:
    key = jax.random.fold_in(jax.random.key(3, impl=impl), n)
    return x * jax.random.uniform(key, x.shape)


def drawn_raw(x: Any, n: Any) -> Any:
    key = jnp.stack([n.astype(jnp.uint32)] * 4)
    bits = lax.rng_bit_generator(key, x.shape, jnp.uint32)[1]
    return x * (bits.astype(x.dtype) / 2.0**32)


# Linear in `x`, with a weight that depends on the integers `n` of the whole batch.
SEEING = {
    "unvmap": weighed(lambda n: el.unvmap(n, "max")),
    "equinox": weighed(eqxi.unvmap_max),
    "custom_vmap": weighed(mixed),
    "rbg": functools.partial(drawn, "rbg"),
    "unsafe_rbg": functools.partial(drawn, "unsafe_rbg"),
    "raw": drawn_raw,
}
# And these are the identity, with such a derivative.
IN_RULES = {"custom_vjp": ruled, "custom_jvp": pushed}
FEW = ["unvmap", "raw", *map(slow, ["equinox", "custom_vmap", "rbg", "unsafe_rbg"])]

W = jnp.cos(jnp.arange(64.0).reshape(8, 8)) / 3
XS = jnp.sin(jnp.arange(96.0) * 1.7).reshape(12, 8)
NS = jnp.arange(12) * 5 % 7

# Loops whose steps would be reversed together


@pytest.mark.parametrize("schedule", [el.Chunked(4, batch=4), el.Recursive(3, batch=3)])
@pytest.mark.parametrize("name", [*FEW, "custom_vjp", "custom_jvp"])
def test_steps_are_not_reversed_together(schedule, name):
    see = (SEEING | IN_RULES)[name]

    def gradient(schedule: Any) -> Any:
        step = lambda h, x: (jnp.tanh(see(W @ h, x[1]) + x[0]), None)
        loop = el.Scan(step, schedule=schedule)
        loss = lambda h, xs: jnp.sum(jnp.sin(loop(h, (xs, NS))[0]))
        return jax.jit(jax.grad(loss, (0, 1)))(jnp.zeros(8), XS)

    got, want = gradient(schedule), gradient(el.StoreAll())
    assert_close(got, want, atol=1e-6)


def cell(see: Any) -> Any:
    """A step with as many parameters as make it worth to reverse steps together."""
    weights = jnp.cos(jnp.arange(128.0 * 128).reshape(128, 128)) / 8
    step = lambda w, h, n: (jnp.tanh(see(w @ h, n) + 0.1), None)
    return weights, jnp.zeros(128), step


def scanned(loop: Any) -> Any:
    def run(see: Any) -> tuple[Any, Any]:
        weights, init, step = cell(see)
        made = lambda w: loop(lambda h, n: step(w, h, n))
        return weights, lambda w: jnp.sum(made(w)(init, jnp.arange(48) % 7)[0])

    return run


def stacked(see: Any) -> tuple[Any, Any]:
    weights, init, step = cell(see)

    def run(weights: Any) -> Any:
        layers = el.StackedLayers(
            _Layer(jnp.stack([weights] * 12), jnp.arange(12) % 7, step),
            schedule=el.Recursive(3, batch=3),
        )
        return jnp.sum(layers(init))

    return weights, run


class _Layer(eqx.Module):
    weights: Any
    n: Any
    step: Any = eqx.field(static=True)

    def __call__(self, h: Any) -> Any:
        return self.step(self.weights, h, self.n)[0]


DEFAULTS = {
    "CheckpointedScan": scanned(el.CheckpointedScan),
    "Budget": scanned(el.Scan(schedule=el.Budget("200KiB", measure=False))),
    "StackedLayers": stacked,
}


@pytest.mark.parametrize("loop", DEFAULTS)
@pytest.mark.parametrize("name", ["unvmap", slow("raw")])
def test_loops_that_decide_by_themselves(loop, name):
    weights, run = DEFAULTS[loop](SEEING[name])
    got = jax.jit(jax.jvp, static_argnums=0)(run, (weights,), (weights,))[1]
    want = jnp.vdot(jax.jit(jax.grad(run))(weights), weights)
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)


# Maps, whose value and derivatives have the same chunks

ROWS = jnp.cos(jnp.arange(31.0)), jnp.arange(31) * 5 % 7
# By a function, and how many examples there are of each map.
MAPS = {
    "rows": lambda f, n: el.ChunkedVmap(f, 7, in_axes={"w": None}),
    "budget": lambda f, n: el.ChunkedVmap(f, el.Budget(n * 2**13), in_axes={"w": None}),
    "policy": lambda f, n: el.ChunkedVmap(
        f, el.Budget(n * 2**14), in_axes={"w": None}, policy="save_dots"
    ),
    "reduced": lambda f, n: el.ChunkedVmap(
        f, el.Budget(n * 2**13), in_axes={"w": None}, reduce="sum"
    ),
    "parallel": lambda f, n: el.ParallelMap(
        f, in_axes={"w": None}, chunk_size=7, devices=jax.devices()[:1]
    ),
    # Their last row is there twice.
    "padded": lambda f, n: el.ParallelMap(f, in_axes={"w": None}),
    "padded chunks": lambda f, n: el.ParallelMap(
        f, in_axes={"w": None}, chunk_size=7, devices=jax.devices()[:2]
    ),
}


def row(see: Any) -> Any:
    """A row, homogeneous of degree 1 in `w`."""
    mix = jnp.cos(jnp.arange(64.0 * 64).reshape(64, 64)) / 8

    def f(w: Any, x: Any, n: Any) -> Any:
        seen = see(mix @ (w * jnp.sin(x + jnp.arange(64.0))), n)
        return jnp.sum(mix @ jnp.sqrt(seen**2 + 0.01 * w * w))

    return f


@pytest.mark.parametrize("derive", [jax.value_and_grad, *map(slow, ["jvp", "vmap"])])
@pytest.mark.parametrize("kind", MAPS)
@pytest.mark.parametrize("name", FEW)
def test_a_map_and_its_derivative_belong_together(name, kind, derive):
    weights = jnp.cos(jnp.arange(31.0))
    mapped = MAPS[kind](row(SEEING[name]), 2 if derive == "vmap" else 1)
    total = lambda w: jnp.sum(
        (1.0 if kind == "reduced" else weights) * mapped(w, *ROWS)
    )
    if derive == "jvp":
        value, slope = jax.jit(lambda w: jax.jvp(total, (w,), (w,)))(jnp.float32(2.0))
    elif derive == "vmap":
        w = jnp.array([2.0, 0.5])
        value, slope = jax.jit(jax.vmap(jax.value_and_grad(total)))(w)
        slope = w * slope
    else:
        value, slope = jax.jit(jax.value_and_grad(total))(jnp.float32(2.0))
        slope = 2.0 * slope
    np.testing.assert_allclose(value, slope, rtol=2e-3)


@pytest.mark.parametrize(("rows", "devices"), [(5, 2), (9, 8), slow(3, 8), slow(8, 2)])
@pytest.mark.parametrize("name", FEW)
def test_copies_of_the_last_row_do_not_count(name, rows, devices):
    # Beside other rows, or on another device, a copy has a weight of its own.
    xs, ns = ROWS[0][:rows], ROWS[1][:rows]
    mapped = el.ParallelMap(SEEING[name], devices=jax.devices()[:devices])
    values = jax.jit(mapped)(xs, ns)
    slopes = jax.jit(jax.jvp, static_argnums=0)(lambda x: mapped(x, ns), (xs,), (xs,))
    pulled = jax.jit(jax.grad(lambda x: jnp.vdot(mapped(x, ns), ROWS[0][:rows])))(xs)
    np.testing.assert_allclose(slopes, (values, values), rtol=1e-5)
    np.testing.assert_allclose(pulled * xs, values * ROWS[0][:rows], rtol=1e-5)


def test_a_second_derivative_has_the_chunks_of_the_first():
    # Each value of `f` is one of the function whose chunks have these sizes.
    see = lambda x, n: x * jnp.sqrt(1 + el.unvmap(n, "max"))
    f = lambda w, n: jnp.sum(see(jnp.sin(w * jnp.arange(64.0)), n)) * w
    mapped = el.ChunkedVmap(f, el.Budget("4KiB"), in_axes={"w": None}, reduce="sum")
    push = lambda w: jax.jvp(jax.grad(lambda w: mapped(w, ROWS[1])), (w,), (1.0,))
    once, twice = jax.jit(push)(0.1)
    size = 1e-3
    near = [jax.jit(push)(0.1 + by)[0] for by in (size, -size)]
    np.testing.assert_allclose(twice, (near[0] - near[1]) / (2 * size), rtol=2e-2)
    assert jnp.isfinite(once)


@jax.custom_jvp
def curved(x: Any, n: Any) -> Any:
    return jnp.sin(x)


@curved.defjvp
def _(primals: Any, tangents: Any) -> Any:
    # The rule of this rule sees its batch.
    return curved(*primals), pushed(jnp.cos(primals[0]), primals[1]) * tangents[0]


def test_second_derivatives_in_all_orders_where_a_rule_of_a_rule_sees():
    def loss(w: Any) -> Any:
        return jnp.sum(el.ChunkedVmap(curved, 5)(w * ROWS[0], ROWS[1]))

    once = jax.grad(loss), lambda w: jax.jvp(loss, (w,), (1.0,))[1]
    twice = [by(f) for f in once for by in (jax.jacfwd, jax.jacrev)]
    first, *others = (jax.jit(f)(0.7) for f in twice)
    np.testing.assert_allclose(others, [first] * 3, rtol=1e-4)


def test_a_derivative_that_takes_more_than_the_budget_is_refused():
    f = lambda w, n: jnp.sum(drawn_raw(jnp.sin(w), n) ** 2)
    mapped = el.ChunkedVmap(f, el.Budget("2KiB"), in_axes={"w": None}, reduce="sum")
    total = lambda w: mapped(w, ROWS[1])
    w = jnp.linspace(0.1, 1.0, 32)
    jax.jit(jax.grad(total))(w)
    with pytest.raises(ValueError, match=r"the same chunks, of .* rows"):
        jax.jit(jax.hessian(total))(w)


# While loops, whose examples keep in step

LIMITS, KEYS = jnp.array([2, 5, 3, 0, 7]), jnp.array([3, 1, 4, 1, 6])


def scan_while(cond: Any, body: Any) -> Any:
    loop = el.ScanWhile(cond, lambda c, _: (body(c), None), max_steps=8)
    return lambda init: loop(init)[0]


def masked(cond: Any, body: Any) -> Any:
    """Eight steps, of which those after the end change nothing."""

    def step(c: Any, _: Any) -> tuple[Any, None]:
        on = cond(c)
        return jax.tree.map(lambda a, b: jnp.where(on, a, b), body(c), c), None

    return lambda init: lax.scan(step, init, length=8)[0]


WHILES = {
    "Checkpointed": lambda c, b: el.CheckpointedWhileLoop(c, b, checkpoints=2),
    "Bounded": lambda c, b: el.BoundedWhileLoop(c, b, max_steps=8, base=2),
    "ScanWhile": scan_while,
}


def looped(loop: Any, see: Any, w: Any, limit: Any, n: Any) -> Any:
    def body(c: Any) -> Any:
        i, n, h = c
        return i + 1, (3 * n + i) % 11, jnp.sin(see(h, n)) + 0.1 * w

    return jnp.sum(loop(lambda c: c[0] < limit, body)((jnp.array(0), n, w * W[0]))[2])


@pytest.mark.parametrize("kind", WHILES)
@pytest.mark.parametrize("name", [*FEW, slow("custom_vjp"), slow("custom_jvp")])
def test_examples_of_a_while_loop_keep_in_step(name, kind):
    see = (SEEING | IN_RULES)[name]

    def batch(loop: Any) -> Any:
        of_one = lambda w, limit, n: looped(loop, see, w, limit, n)
        inside = lambda w: jnp.sum(jax.vmap(of_one, (None, 0, 0))(w, LIMITS, KEYS))
        outside = jax.vmap(jax.value_and_grad(of_one), (None, 0, 0))
        return outside(1.5, LIMITS, KEYS), jax.value_and_grad(inside)(1.5)

    got, want = (jax.jit(lambda f=f: batch(f))() for f in (WHILES[kind], masked))
    assert_close(got, want, rtol=1e-3, atol=0)


@pytest.mark.parametrize("kind", ["Checkpointed", slow("Bounded"), slow("ScanWhile")])
def test_a_batch_of_batches_and_of_second_derivatives(kind):
    def batch(loop: Any) -> Any:
        one = lambda w, limit, n: looped(loop, drawn_raw, w, limit, n)
        slope = lambda w, *ns: jax.jvp(lambda w: jax.grad(one)(w, *ns), (w,), (1.0,))
        rows = jax.vmap(slope, (None, 0, 0))
        limits, keys = (jnp.stack([x, x[::-1]]) for x in (LIMITS, KEYS))
        return jax.vmap(rows, (0, 0, 0))(jnp.array([1.5, 0.5]), limits, keys)

    got, want = (jax.jit(lambda f=f: batch(f))() for f in (WHILES[kind], masked))
    assert_close(got, want, rtol=2e-3, atol=0)


def test_buffers_are_written_by_those_that_go_on():
    def run(loop: Any, w: Any, limit: Any, n: Any) -> Any:
        def body(c: Any) -> Any:
            i, h, rows = c
            h = jnp.sin(drawn_raw(h, n + i)) + w
            return i + 1, h, rows.at[i].set(h)

        init = jnp.array(0), jnp.full(2, w), jnp.zeros((8, 2))
        return jnp.sum(loop(lambda c: c[0] < limit, body)(init)[2])

    def batch(loop: Any) -> Any:
        one = lambda w, limit, n: run(loop, w, limit, n)
        return jax.vmap(jax.value_and_grad(one), (None, 0, 0))(1.5, LIMITS, KEYS)

    got, want = (jax.jit(lambda f=f: batch(f))() for f in (WHILES["ScanWhile"], masked))
    assert_close(got, want, rtol=1e-3, atol=0)


def test_rows_of_a_scan_that_ends_and_its_bar():
    step = lambda c, x: ((c[0] + 1, drawn_raw(c[1] + x, c[0])), c[1])
    loop = el.ScanWhile(lambda c: jnp.all(c[0] < 5), step, max_steps=6, progress=2)

    def one(first: Any, x: Any) -> Any:
        (_, h), ys, steps = loop((first, jnp.ones(2)), x * jnp.ones((6, 2)))
        return jnp.sum(h) + jnp.sum(ys), steps

    firsts, xs = jnp.array([0, 3, 7]), jnp.array([0.5, 1.0, 2.0])
    grad = jax.value_and_grad(one, argnums=1, has_aux=True)
    (value, steps), _ = jax.jit(jax.vmap(grad))(firsts, xs)
    assert steps.tolist() == [5, 2, 0]
    assert jnp.all(jnp.isfinite(value))
