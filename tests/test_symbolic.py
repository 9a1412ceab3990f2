"""Sizes that `jax.export` does not know."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import export, lax

import eqloop as el

from .asserts import assert_close

pytestmark = pytest.mark.sampled

STEP = lambda h, x: (jnp.sin(h + x), h)
(N,) = export.symbolic_shape("n")
XS = jnp.linspace(0.1, 1.0, 7)
COND, BODY = lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.sin(c[1]))


def scan(schedule: Any) -> Any:
    return lambda x: el.Scan(STEP, schedule=schedule)(0.0, x)


def batched(schedule: Any) -> Any:
    """A loop of known length, of a state of unknown size."""
    step = lambda h, x: (jnp.sin(h * x), None)
    run = lambda h: el.Scan(step, schedule=schedule)(h, jnp.ones(5))[0]
    return jax.grad(lambda h: jnp.sum(run(h)))


def stopped(loop: Any) -> Any:
    return jax.grad(lambda h: jnp.sum(loop((0, h))[1]))


def weighted(w: Any, x: Any) -> Any:
    step = lambda h, y: (jnp.tanh(w @ h + y), None)
    return jnp.sum(el.Scan(step, schedule=el.Recursive(4, batch=4))(x, XS)[0])


def history(x: Any) -> Any:
    """Steps that read a buffer, and write a row of it."""

    def step(carry: Any, _: Any) -> Any:
        i, h, rows = carry
        return (i + 1, jnp.sin(h + jnp.sum(rows)), rows.at[i].set(h)), None

    scan = el.Scan(step, schedule=el.Recursive(2))
    return scan((0, 0.5, x), length=5)[0][1]


def iterated(x: Any) -> Any:
    """A while loop with loops in its step."""
    again = lambda i: jnp.any(jnp.broadcast_to(i < 1, (x.shape[0] - 1,)))
    inner = lambda h: lax.scan(lambda h, x: (jnp.sin(h + x), None), h, x)[0]
    move = lambda i, h: jnp.where(again(i), inner(h), h)
    body = lambda c: (c[0] + 1, lax.fori_loop(0, 2, move, c[1]))
    return el.BoundedWhileLoop(COND, body, max_steps=4)((0, 0.5))[1]


def exported(f: Any) -> Any:
    return export.export(jax.jit(f))(jax.ShapeDtypeStruct((N,), jnp.float32))


WORKS = {
    "a scan": scan(None),
    "its gradient": jax.grad(lambda x: scan(el.StoreAll())(x)[0]),
    "a planned scan": scan(el.Recursive(3)),
    "its tangents": lambda x: jax.jvp(scan(el.Binomial(2)), (x,), (x,)),
    "a for loop": el.CheckpointedForLoop(jnp.sin),
    "a map": jax.grad(lambda x: jnp.sum(el.Map(jnp.sin)(x))),
    "a state": batched(el.Recursive(2)),
    "a state together": batched(el.Recursive(2, batch=2)),
    "a state in blocks": batched(el.Binomial(2, block=2)),
    "a bounded while loop": stopped(el.BoundedWhileLoop(COND, BODY, max_steps=4)),
    "a batch of whiles": jax.vmap(
        stopped(el.CheckpointedWhileLoop(COND, BODY, checkpoints=2))
    ),
    "a weight": lambda x: jax.grad(weighted)(jnp.outer(x, x), x),
    "a history": jax.grad(history),
    "loops in a while loop": jax.grad(iterated),
    "rows of another number": lambda x: el.ChunkedVmap(lambda y: y * x, 2)(XS),
}


@pytest.mark.parametrize("f", WORKS.values(), ids=WORKS)
def test_what_does_not_depend_on_the_number(f):
    assert_close(exported(f).call(XS), jax.jit(f)(XS), rtol=1e-5, atol=1e-6)


def key_of_each_step(x: Any) -> Any:
    step = lambda h, x, key: (h + x * jax.random.normal(key), None)
    return el.Scan(step)(0.0, x, key=jax.random.key(0))


REFUSED = {
    "Recursive: planning the gradient of a loop .* symbolic, n. .*StoreAll": jax.grad(
        lambda x: scan(el.Recursive(3))(x)[0]
    ),
    "Budget: the size of an array in the step .* Recursive": batched(el.Budget("1MB")),
    "ChunkedVmap: to cut rows into chunks": el.ChunkedVmap(jnp.sin, 4),
    "Map: to cut rows into chunks": el.Map(jnp.sin, batch_size=2),
    "SlicedScan: a slice of the outputs": lambda x: el.SlicedScan(STEP, step=2)(0.0, x),
    "Scan: a key for each step .* `split_keys=False`": key_of_each_step,
    "Scan: `unroll=True`": lambda x: el.Scan(STEP, unroll=True)(0.0, x),
    "Scan: the number of steps of a progress bar": lambda x: el.Scan(
        STEP, progress=True
    )(0.0, x),
    "AssociativeScan: a tree of elements .* `el.Scan`": el.AssociativeScan(jnp.add),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_does(message):
    with pytest.raises(ValueError, match=message):
        exported(REFUSED[message])
