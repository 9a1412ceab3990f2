"""Tries an installed wheel: what fails on one system, or with one Python, fails here.

    python -P .github/try_wheel.py

Gradients of loops are compared with those of `jax.lax.scan`, under schedules that store
on the device and in files; a run is resumed, and a budget is kept. It prints the file
that was imported, and one line if all is well.
"""

import tempfile

import equinox as eqx
import jax
import jax.numpy as jnp

import eqloop as el

XS = jnp.sin(jnp.arange(48.0)).reshape(24, 2)
CELL = eqx.nn.GRUCell(2, 4, key=jax.random.key(0))
H = jnp.zeros(4)


def step(h, x):
    """A step of a recurrent cell."""
    h = CELL(x, h)
    return h, h[0]


def gradient(loop, h=H):
    """The gradient of a loop by its inputs."""

    def loss(h, xs):
        last, ys = loop(h, xs)
        return jnp.sum(last**2) + jnp.sum(ys)

    return jax.jit(jax.grad(loss, (0, 1)))(h, XS)


def agree(ours, theirs):
    """Whether two trees have the same numbers."""
    leaves = zip(*map(jax.tree.leaves, (ours, theirs)), strict=True)
    return all(jnp.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in leaves)


def main():
    """Raises an `AssertionError` at the first thing that is wrong."""
    print(el.__file__)
    plain = lambda h, xs: jax.lax.scan(step, h, xs)
    expected = gradient(plain)
    with tempfile.TemporaryDirectory() as folder:
        schedules = [
            el.StoreAll(),
            el.Recursive(4),
            el.Chunked(8, batch=4),
            el.Binomial(3),
            el.Budget("64KiB"),
            el.Spill(el.Chunked(6), folder),
        ]
        for schedule in schedules:
            loop = el.Scan(step, schedule=schedule)
            assert agree(gradient(loop), expected), schedule
            assert loop.plan(H, XS).length == len(XS)
    with tempfile.TemporaryDirectory() as folder:
        run = el.Resumable(el.Scan(step), folder, every=5)
        assert agree(run(H, XS), plain(H, XS))
    loop = el.CheckpointedWhileLoop(lambda h: jnp.sum(h) < 9, lambda h: 1.5 * h + 0.1)
    assert jnp.isfinite(jax.grad(lambda h: jnp.sum(loop(h)))(H)).all()
    mapped = el.ChunkedVmap(lambda x: jnp.sum(x**2), 5)(XS)
    assert agree(mapped, jnp.sum(XS**2, axis=1))
    message = ""
    try:
        el.Scan(lambda h, x: (h[:2], None))(H, XS)
    except TypeError as error:
        message = str(error)
    assert "carry" in message
    print(f"eqloop {el.__version__} with JAX {jax.__version__}: all is well")


if __name__ == "__main__":
    main()
