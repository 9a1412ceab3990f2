"""The scans against `jax.lax.scan`: the same numbers, in every mode."""

import functools
from typing import Any

import equinox as eqx
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import eqloop as el

from ..compiling import AS_USED
from .trees import DTYPES, INEXACT, advance, array, mean, trees


def step(scale: jax.Array, carry: Any, x: Any) -> tuple[Any, Any]:
    by = jnp.tanh(scale[0] * mean(x) + scale[1] * mean(carry))
    return jax.tree.map(lambda leaf: advance(leaf, by), carry), (x, by)


def lax_scan(f: Any, init: Any, xs: Any, length: int, **settings: Any) -> Any:
    """`jax.lax.scan`, given the static leaves that it cannot take."""
    init, static_init = eqx.partition(init, eqx.is_array)
    xs, static_xs = eqx.partition(xs, eqx.is_array)

    def body(carry: Any, x: Any) -> Any:
        out = f(eqx.combine(carry, static_init), eqx.combine(x, static_xs))
        return eqx.filter(out, eqx.is_array)

    carry, ys = jax.lax.scan(body, init, xs, length, **settings)
    return eqx.combine(carry, static_init), (eqx.combine(ys[0], static_xs), ys[1])


def assert_close(actual: Any, expected: Any, loose: bool = False) -> None:
    """Trees are the same, static leaves too, and arrays to float tolerance."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        if not eqx.is_array(e):
            assert a == e
            continue
        assert a.dtype == e.dtype
        assert a.shape == e.shape
        if jnp.issubdtype(e.dtype, jax.dtypes.prng_key):
            a, e = jax.random.key_data(a), jax.random.key_data(e)
        half = loose or e.dtype in (jnp.float16, jnp.bfloat16)
        wide = np.complex64 if e.dtype == jnp.complex64 else np.float32
        tolerance = (
            {"rtol": 5e-2, "atol": 5e-2} if half else {"rtol": 1e-4, "atol": 1e-5}
        )
        np.testing.assert_allclose(a.astype(wide), e.astype(wide), **tolerance)


def weigh(tree: Any) -> jax.Array:
    """A scalar to differentiate, in which every inexact number has its own weight."""
    total = jnp.zeros(())
    for leaf in jax.tree.leaves(eqx.filter(tree, eqx.is_inexact_array)):
        flat = (jnp.real(leaf) + jnp.imag(leaf)).astype(jnp.float32).ravel()
        total += flat @ jnp.cos(jnp.arange(flat.size, dtype=jnp.float32))
    return total


def primal(run: Any, *args: Any) -> Any:
    return run(*args)


def loss_of(run: Any, args: Any) -> tuple[Any, Any]:
    """A scalar function of the inexact leaves of the arguments, and these leaves."""
    inexact, other = eqx.partition(args, eqx.is_inexact_array)
    return lambda inexact: weigh(run(*eqx.combine(inexact, other))), inexact


def jvp(run: Any, *args: Any) -> Any:
    loss, inexact = loss_of(run, args)
    along = jax.tree.map(lambda leaf: jnp.ones_like(leaf) / 2, inexact)
    return jax.jvp(loss, (inexact,), (along,))


def vjp(run: Any, *args: Any) -> Any:
    loss, inexact = loss_of(run, args)
    return jax.value_and_grad(loss)(inexact)


def hessian(run: Any, scale: Any, *args: Any) -> Any:
    return jax.hessian(lambda scale: weigh(run(scale, *args)))(scale)


def vmap(run: Any, *args: Any) -> Any:
    loss, inexact = loss_of(run, args)
    batch = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf / 2]), inexact)
    return jax.vmap(jax.value_and_grad(loss))(batch)


MODES = (primal, jvp, vjp, hessian, vmap)


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    length = draw(st.integers(0, 12) | st.integers(0, 300))
    dtypes = st.sampled_from(DTYPES)
    seeds = st.integers(0, 9)
    shapes = st.sampled_from([(1,), (2,), (3, 2)])
    lead = lambda shape: (length, *shape)
    return {
        "mode": draw(st.sampled_from(MODES)),
        "init": draw(trees(st.builds(array, shapes, dtypes, seeds))),
        "xs": draw(trees(st.builds(array, shapes.map(lead), dtypes, seeds))),
        "length": length,
        "reverse": draw(st.booleans()),
        "unroll": draw(st.sampled_from([1, 1, 2, 5])),
        "schedule": draw(
            st.builds(el.Recursive, st.integers(2, 20))
            | st.builds(el.Chunked, st.integers(1, 40))
            | st.builds(el.Binomial, st.integers(1, 40))
            | st.just(el.StoreAll())
        ),
    }


def check(call: dict[str, Any]) -> None:
    mode, schedule = call.pop("mode"), call.pop("schedule")
    init, xs, length = call.pop("init"), call.pop("xs"), call.pop("length")
    scale = jnp.array([0.7, -0.3])

    def ours(scale: Any, init: Any, xs: Any) -> Any:
        scan = el.Scan(eqx.Partial(step, scale), schedule=schedule, **call)
        return scan(init, xs, length=length)

    def theirs(scale: Any, init: Any, xs: Any) -> Any:
        return lax_scan(eqx.Partial(step, scale), init, xs, length, **call)

    run = eqx.filter_jit(mode)
    half = any(
        leaf.dtype in (jnp.float16, jnp.bfloat16)
        for leaf in jax.tree.leaves(eqx.filter((init, xs), eqx.is_array))
    )
    assert_close(run(ours, scale, init, xs), run(theirs, scale, init, xs), half)


@hypothesis.given(calls())
@hypothesis.settings(max_examples=3)
def test_agrees_with_lax_scan(call):
    check(call)


@pytest.mark.slow
@hypothesis.given(calls())
@hypothesis.settings(max_examples=500)
def test_agrees_with_lax_scan_in_many_cases(call):
    check(call)


@pytest.mark.parametrize("dtype", INEXACT, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_primal_has_the_bits_of_lax_scan(dtype, reverse):
    xs = array((37, 3), dtype, 0)
    f = lambda h, x: (jnp.sin(h) + x, h * x)
    init = jnp.zeros(3, dtype)
    ours = el.CheckpointedScan(f, base=3, reverse=reverse)
    theirs = functools.partial(jax.lax.scan, f, reverse=reverse)
    actual, expected = (
        jax.jit(loop, compiler_options=AS_USED)(init, xs) for loop in (ours, theirs)
    )
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, e)


def test_a_gradient_outside_of_jit_keeps_no_copy_of_xs():
    step = lambda h, x: (x * h, h)
    xs = jnp.ones((8, 3))
    for loop in (el.Scan(step), lambda h, xs: jax.lax.scan(step, h, xs)):
        _, back = jax.vjp(lambda xs, loop=loop: loop(jnp.ones(3), xs), xs)
        assert any(leaf is xs for leaf in jax.tree.leaves(back.args_res))
