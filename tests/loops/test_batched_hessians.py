"""`vmap` of second derivatives of loops that stop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqloop as el

from ..marks import slow_if

XS = jnp.array([[0.1, 0.2], [0.5, 0.1], [1.4, 1.2]])


def on(carry):
    return jnp.sum(carry[0]) < 2


def step(a, carry):
    return jnp.sin(carry[0] * a) + 0.3, jnp.sum(carry[0] ** 2)


def scan_while(schedule):
    def run(a):
        loop = el.ScanWhile(
            on, lambda c, _: (step(a, c), None), max_steps=4, schedule=schedule
        )
        return loop((a, jnp.float32(0)))[0]

    return run


def while_loop(kind, **settings):
    return lambda a: kind(on, lambda c: step(a, c), **settings)((a, jnp.float32(0)))


def by_hand(a):
    def one(carry, _):
        pairs = zip(step(a, carry), carry, strict=True)
        return tuple(jnp.where(on(carry), *pair) for pair in pairs), None

    # The end is within reach of no example but the last, which never runs.
    return jax.lax.scan(one, (a, jnp.float32(0)), length=4)[0]


LOOPS = {
    "nested": scan_while(el.Recursive(2)),
    "binomial": scan_while(el.Binomial(2)),
    "chunks": scan_while(el.Chunked(2, batch=2)),
    "stored": scan_while(el.StoreAll()),
    "bounded": while_loop(el.BoundedWhileLoop, max_steps=4, base=2),
    "bound": while_loop(el.CheckpointedWhileLoop, checkpoints=2, max_steps=4),
}
LOSSES = {
    # No step reads this leaf.
    "a leaf that is not read": lambda carry: carry[1],
    "both": lambda carry: carry[1] * jnp.sum(carry[0] ** 3),
}
MODES = {
    "hessian": jax.hessian,
    "reverse over reverse": lambda f: jax.jacrev(jax.jacrev(f)),
    "jacobian": jax.jacrev,
}


def derivatives(run):
    """All of them, of each example, by one program."""
    of_each = [
        jax.vmap(mode(lambda a, loss=loss: loss(run(a))))
        for loss in LOSSES.values()
        for mode in MODES.values()
    ]
    return jax.jit(lambda xs: [f(xs) for f in of_each])(XS)


@pytest.fixture(scope="module")
def expected():
    return derivatives(by_hand)


@pytest.mark.parametrize("name", slow_if(lambda n: n != "nested", LOOPS))
def test_each_example_has_its_own(name, expected):
    for one, other in zip(derivatives(LOOPS[name]), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
