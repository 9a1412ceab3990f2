"""`SlicedScan` against a scan whose outputs are sliced afterwards."""

import collections
import functools
import operator
from typing import Any

import equinox as eqx
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import eqloop as el

from ..asserts import assert_close
from ..checkpointing.counting import Counter
from ..marks import slow
from .random_scans import assert_agrees_with_lax_scan, calls, settings_of, weigh

pytestmark = pytest.mark.sampled

QUICK = (
    el.Recursive(3),
    el.Chunked(4, batch=2),
    el.Binomial(2, block=3),
)
SLOW = (el.Budget("1 MiB"), el.StoreAll(), el.Binomial(3), el.Offload(el.Binomial(3)))
name = lambda value: getattr(value, "__name__", str(value))


@st.composite
def slices(draw: st.DrawFn, length: int) -> slice:
    number = st.none() | st.integers(-length - 2, length + 2)
    return slice(draw(number), draw(number), draw(number.filter(lambda n: n != 0)))


@st.composite
def sliced_calls(draw: st.DrawFn) -> tuple[slice, dict[str, Any]]:
    call = draw(calls())
    return draw(slices(min(call["length"], 40))), call


@hypothesis.given(sliced_calls())
@hypothesis.settings(max_examples=2)
def test_agrees_with_slicing_afterwards(sliced_call):
    kept, call = sliced_call
    assert_agrees_with_lax_scan(call, el.SlicedScan, kept)


@pytest.mark.slow
@hypothesis.given(sliced_calls())
@hypothesis.settings(max_examples=300)
def test_agrees_with_slicing_afterwards_in_many_cases(sliced_call):
    kept, call = sliced_call
    assert_agrees_with_lax_scan(call, el.SlicedScan, kept)


LENGTH = 11
# Ascending and descending, at the ends and away from them; with as many steps after the
# last that is kept as lie between two, and with fewer.
SLICES = (
    slice(None, None, 3),
    slice(1, 9, 2),
    slice(None, None, -4),
    slice(-3, None),
    slice(0, 0),
)
REVERSED = (False, True, True, False, False)


def f(w: jax.Array, h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    h = jnp.tanh(w * h + x)
    return h, jnp.sin(h) * x


def arguments() -> tuple[jax.Array, ...]:
    xs = jnp.cos(jnp.arange(LENGTH * 2.0)).reshape(LENGTH, 2)
    return jnp.array([0.9, -1.1]), jnp.ones(2), xs


def everything(w: Any, h: Any, xs: Any, reverse: bool) -> Any:
    return jax.lax.scan(functools.partial(f, w), h, xs, reverse=reverse)


def sliced(w: Any, h: Any, xs: Any, kept: slice, **settings: Any) -> Any:
    step = functools.partial(f, w)
    return el.SlicedScan(step, **settings_of(kept), **settings)(h, xs)


def gradients(run: Any) -> Any:
    """Values and gradients for all the slices; `run` has one, and a direction."""

    def loss(args: Any, kept: slice, reverse: bool) -> Any:
        out = run(*args, kept, reverse)
        return weigh(out), out

    each = jax.value_and_grad(loss, has_aux=True)
    return jax.jit(
        lambda args: [each(args, *kept) for kept in zip(SLICES, REVERSED, strict=True)]
    )


def slice_of_everything(*args: Any) -> Any:
    *args, kept, reverse = args
    carry, ys = everything(*args, reverse)
    return carry, ys[kept]


@functools.cache
def expected() -> Any:
    return gradients(slice_of_everything)(arguments())


@pytest.mark.parametrize("schedule", [*QUICK, *map(slow, SLOW)], ids=str)
def test_values_and_gradients_under_every_schedule(schedule):
    run = lambda *args: sliced(*args[:-1], reverse=args[-1], schedule=schedule)
    assert_close(gradients(run)(arguments()), expected())


def test_blocks_of_which_a_policy_keeps_the_residuals():
    settings = {"schedule": el.Recursive(3), "policy": el.policies.save_everything}
    run = lambda *args: sliced(*args[:-1], reverse=args[-1], **settings)
    assert_close(gradients(run)(arguments()), expected())


@pytest.mark.slow
@pytest.mark.parametrize("schedule", QUICK + SLOW, ids=str)
@pytest.mark.parametrize("reverse", [False, True])
def test_every_slice_of_five_steps(schedule, reverse):
    bounds = (None, *range(-6, 7))
    steps = [step for step in bounds if step != 0]
    some = {
        range(5)[a:b:c]: slice(a, b, c) for a in bounds for b in bounds for c in steps
    }
    w, h, xs = arguments()

    def loss(args: Any, run: Any) -> Any:
        out = run(*args)
        return weigh(out), out

    def ours(args: Any, kept: slice) -> Any:
        run = lambda *args: sliced(*args, kept, reverse=reverse, schedule=schedule)
        return jax.value_and_grad(lambda args: loss(args, run), has_aux=True)(args)

    def theirs(args: Any, kept: slice) -> Any:
        run = lambda *args: slice_of_everything(*args, kept, reverse)
        return jax.value_and_grad(lambda args: loss(args, run), has_aux=True)(args)

    run = lambda one: jax.jit(lambda args: [one(args, k) for k in some.values()])
    args = (w, h, xs[:5])
    assert_close(run(ours)(args), run(theirs)(args))


def test_shapes_are_those_of_the_slice_in_all_modes_of_vmap():
    w, h, xs = arguments()
    batch = jnp.stack([xs, 2 * xs], axis=1)
    run = lambda xs: sliced(w, h, xs, slice(1, None, 3), schedule=el.Binomial(2))[1]
    ys = jax.jit(jax.vmap(run, in_axes=1, out_axes=2))(batch)
    assert ys.shape == (4, 2, 2)
    np.testing.assert_allclose(ys[..., 0], everything(w, h, xs, False)[1][1::3], 1e-5)


def test_unrolled_as_a_whole():
    w, h, xs = arguments()
    ys = sliced(w, h, xs, slice(1, None, 4), unroll=True)[1]
    np.testing.assert_allclose(ys, everything(w, h, xs, False)[1][1::4], 1e-5)


def test_out_axes_are_sliced_where_they_are_stacked():
    w, h, xs = arguments()
    ys = sliced(w, h, xs, slice(1, None, 3), out_axes=-1)[1]
    np.testing.assert_allclose(ys, everything(w, h, xs, False)[1][1::3].T, 1e-5)


def test_outputs_that_are_the_same_at_every_step_are_not_sliced():
    scan = el.SlicedScan(
        lambda c, x: (c + x, (x, "a", 3 * 2)), stop=2, out_axes=(0, None, None)
    )
    carry, ys = scan(0.0, jnp.arange(5.0))
    assert carry == 10
    assert ys[1:] == ("a", 6)
    assert ys[0].shape == (2,)


def test_leaves_of_all_kinds():
    def step(key: Any, x: Any) -> Any:
        key, out = jax.random.split(key)
        return key, {"key": out, "even": x % 2 == 0, "half": x.astype(jnp.bfloat16)}

    init, xs = jax.random.key(0), jnp.arange(7)
    _, expected = jax.lax.scan(step, init, xs)
    for n in (3, 4, -2):
        ys = el.SlicedScan(step, step=n, schedule=el.Recursive(2))(init, xs)[1]
        assert_close(
            ys, jax.tree.map(operator.itemgetter(slice(None, None, n)), expected)
        )


def test_keys_are_those_of_the_whole_loop():
    draw = lambda c, x, key: (c, jax.random.normal(key))
    arguments = {"length": 6, "key": jax.random.key(1)}
    _, ys = el.SlicedScan(draw, step=4)(None, **arguments)
    np.testing.assert_array_equal(ys, el.Scan(draw)(None, **arguments)[1][::4])


# What is evaluated


@pytest.mark.parametrize("kept", SLICES, ids=str)
def test_the_primal_evaluates_each_step_once(kept):
    step = Counter(ordered=True)
    scan = el.SlicedScan(step, schedule=el.Recursive(2), **settings_of(kept))
    places = step.evaluations(lambda xs: scan((0.5, 0), xs), jnp.ones(LENGTH))
    assert places == list(range(LENGTH))


@pytest.mark.parametrize("schedule", [el.Recursive(2), el.Binomial(3)], ids=str)
def test_a_gradient_evaluates_what_its_plan_says(schedule):
    step = Counter()
    scan = el.SlicedScan(step, step=4, schedule=schedule)
    xs = jnp.ones(LENGTH)
    loss = lambda h: jnp.sum(scan((h, 0), xs)[1])
    places = step.evaluations(jax.grad(loss), 0.5)
    assert len(places) == scan.plan((0.5, 0), xs).evaluations


@pytest.mark.parametrize("kept", SLICES, ids=str)
def test_no_outputs_are_computed_but_those_that_are_kept(kept):
    calls = collections.Counter()

    def read(h: Any) -> Any:
        calls["outputs"] += 1
        return h

    def step(h: Any, x: Any) -> Any:
        y = jax.pure_callback(read, jax.ShapeDtypeStruct((), jnp.float32), h)
        return jnp.sin(h + x), y

    run = jax.jit(lambda xs: el.SlicedScan(step, **settings_of(kept))(0.5, xs)[1])
    ys = jax.block_until_ready(run(jnp.ones(LENGTH)))
    jax.effects_barrier()
    assert calls["outputs"] == len(ys) == len(range(LENGTH)[kept])


# As a transform


def test_as_a_decorator_and_as_a_layer():
    @el.SlicedScan(step=2)
    def count(n: Any, _: Any) -> Any:
        return n + 1, n

    assert count(0, length=5)[1].tolist() == [0, 2, 4]
    assert eqx.tree_equal(
        el.SlicedScan(jnp.add, step=2), el.SlicedScan(jnp.add, step=2)
    )
    assert repr(el.SlicedScan(jnp.add, step=2)).startswith("SlicedScan(")


def test_numbers_of_numpy_will_do():
    scan = el.SlicedScan(lambda c, x: (c, x), start=np.int64(1), step=jnp.asarray(2))
    assert scan(0.0, jnp.arange(5))[1].tolist() == [1, 3]
    assert (type(scan.start), type(scan.step)) == (int, int)
