"""Steps with products of matrices, and the derivatives of loops over them."""

import jax
import jax.numpy as jnp
import numpy as np

import eqloop as el

WIDTH, LENGTH = 16, 13
W = jnp.sin(jnp.arange(WIDTH * WIDTH * 1.0)).reshape(WIDTH, WIDTH) / WIDTH**0.5
HS = jnp.cos(jnp.arange(WIDTH * 1.0))
XS = jnp.sin(jnp.arange(LENGTH * WIDTH * 1.0)).reshape(LENGTH, WIDTH)


def network(w, h, x):
    """A rule of its own within, and a product that is only added."""
    hidden = jax.nn.relu(w @ h + x)
    return h + 0.1 * jnp.tanh(hidden @ w), w @ x


def two_in_one(w, h, x):
    return jnp.tanh(w @ h + w.T @ x), h[:2]


def read_twice(w, h, x):
    product = w @ h
    return jnp.sin(product) + 0.1 * product * x, None


def squared(w, h, x):
    outer = jnp.outer(h, x)
    return jnp.tanh((outer @ outer) @ w @ h), None


def accumulated(w, carry, x):
    """Slots hold the first leaf alone."""
    h, total = carry
    h = jnp.tanh(w @ h + x)
    return (h, total + jnp.sum(h) * 0.1), None


def plain(w, h, x):
    return jnp.tanh(w @ h + x), None


STEPS = [network, two_in_one, read_twice, squared, accumulated]
LEVELS = el.Recursive(4, batch=4)


def of_loop(step, schedule=None, **settings):
    """Numbers that all leaves of a loop's results are in."""

    def run(w, h, xs):
        init = (h, jnp.zeros(())) if step is accumulated else h
        f = lambda carry, x: step(w, carry, x)
        if schedule is None:
            after, ys = jax.lax.scan(
                f, init, xs, reverse=settings.get("reverse", False)
            )
        else:
            after, ys = el.Scan(f, schedule=schedule, **settings)(init, xs)
        leaves = jax.tree.leaves((after, ys))
        weights = [jnp.cos(jnp.arange(x.size)).astype(x.dtype) for x in leaves]
        return sum(jnp.vdot(w, x) for w, x in zip(weights, leaves, strict=True))

    return run


def gradient(run):
    return jax.grad(run, (0, 1, 2))


MODES = {
    "gradient": gradient,
    "hessian": lambda f: jax.hessian(lambda h: f(W, h, XS)),
    "forward over reverse": lambda f: (
        lambda w, h, xs: jax.jvp(lambda *a: gradient(f)(*a), (w, h, xs), (w, h, xs))[1]
    ),
    "reverse over reverse": lambda f: jax.grad(
        lambda w, h, xs: sum(jnp.sum(jnp.sin(g)) for g in gradient(f)(w, h, xs))
    ),
    "a batch": lambda f: jax.vmap(gradient(f), (None, 0, None)),
    "a batch of weights": lambda f: jax.vmap(gradient(f), (0, None, None)),
}
INPUTS = {
    "hessian": (HS,),
    "a batch": (W, jnp.stack([HS, 2 * HS]), XS),
    "a batch of weights": (jnp.stack([W, W.T]), HS, XS),
}


def assert_equal(found, expected, rtol=1e-4):
    """Trees are close, by the largest number of each array."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        atol = rtol * float(jnp.abs(b).max())
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


def assert_as_scan(step, mode="gradient", schedule=LEVELS, **settings):
    """A mode under a schedule is that of `jax.lax.scan`."""
    inputs = INPUTS.get(mode, (W, HS, XS))
    plain = {k: v for k, v in settings.items() if k == "reverse"}
    runs = of_loop(step, schedule, **settings), of_loop(step, **plain)
    assert_equal(*(jax.jit(MODES[mode](run))(*inputs) for run in runs))
