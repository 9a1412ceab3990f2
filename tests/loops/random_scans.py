"""Random calls of scans, and modes of differentiation for trees of any leaves."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from hypothesis import strategies as st

import eqloop as el

from ..asserts import assert_close, has_16_bits
from .trees import DTYPES, advance, array, mean, trees


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


def assert_agrees_with_lax_scan(
    call: dict[str, Any], transform: Any = el.Scan, kept: slice | None = None
) -> None:
    """A scan of a random call, of which some outputs are kept, has JAX's numbers."""
    call = dict(call)
    mode, schedule = call.pop("mode"), call.pop("schedule")
    init, xs, length = call.pop("init"), call.pop("xs"), call.pop("length")
    scale = jnp.array([0.7, -0.3])
    kept_by = {} if kept is None else settings_of(kept)

    def ours(scale: Any, init: Any, xs: Any) -> Any:
        scan = transform(eqx.Partial(step, scale), schedule=schedule, **kept_by, **call)
        return scan(init, xs, length=length)

    def theirs(scale: Any, init: Any, xs: Any) -> Any:
        carry, ys = lax_scan(eqx.Partial(step, scale), init, xs, length, **call)
        if kept is None:
            return carry, ys
        return carry, jax.tree.map(lambda y: y[kept] if eqx.is_array(y) else y, ys)

    run = eqx.filter_jit(mode)
    near = dict(rtol=5e-2, atol=5e-2) if has_16_bits((init, xs)) else {}
    assert_close(run(ours, scale, init, xs), run(theirs, scale, init, xs), **near)


def settings_of(kept: slice) -> dict[str, Any]:
    return {"start": kept.start, "stop": kept.stop, "step": kept.step}
