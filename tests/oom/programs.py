"""Programs whose largest array is made by the line that ends in `# here`."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

import eqloop as el




class Case(NamedTuple):
    """A program, with its arguments, and the kind of its largest array."""

    f: Callable[..., Any]
    args: tuple[Any, ...]
    kind: str
    in_loop: bool = False
    library: str = ""

    @property
    def line(self) -> int:
        """The line that makes most."""
        lines, first = inspect.getsourcelines(inspect.unwrap(self.f))
        return first + next(i for i, x in enumerate(lines) if x.endswith("# here\n"))


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def long_softmax(w, head, x):
    def loss(w, head):
        hidden = jnp.tanh(x @ w)
        logits = hidden @ head  # here
        return -jnp.mean(jax.nn.log_softmax(logits)[:, 0])

    return jax.grad(loss, (0, 1))(w, head)


def scanned(w, xs):
    def loss(w):
        def step(h, x):
            h = jnp.tanh(w @ h + x)  # here
            return h, None

        return jnp.sum(lax.scan(step, xs[0], xs)[0])

    return jax.grad(loss)(w)


def scan_in_scan(w, xs):
    def loss(w):
        def inner(h, x):
            return jnp.sin(h @ w + x), None  # here

        def outer(h, rows):
            return lax.scan(inner, h, rows)[0] * 0.5, None

        return jnp.sum(lax.scan(outer, xs[0, 0], xs)[0])

    return jax.grad(loss)(w)


def waits(x):
    def body(c):
        wide = jnp.sin(c[1][:, None] * jnp.arange(512.0))  # here
        return c[0] + 1, jnp.sort(wide, axis=1)[:, 3]

    return lax.while_loop(lambda c: c[0] < 10, body, (0, x))[1]


def convolved(kernel, images):
    def loss(kernel):
        y = lax.conv(images, kernel, (1, 1), "SAME")  # here
        return jnp.sum(jnp.cos(y) ** 2)

    return jax.grad(loss)(kernel)


def attends(q, k, v):
    def loss(q, k, v):
        scores = jnp.einsum("hqd,hkd->hqk", q, k)  # here
        return jnp.sum(jax.nn.softmax(scores) @ v)

    return jax.grad(loss, (0, 1, 2))(q, k, v)


def with_remat(w, x):
    @jax.checkpoint
    def block(w, x):
        wide = jnp.sin(x @ w)  # here
        return jnp.cos(wide) @ w.T

    def loss(w):
        return jnp.sum(block(w, block(w, x)))

    return jax.grad(loss)(w)


def gradients_of_rows(w, x):
    def loss(w, row):
        return jnp.sum(jnp.tanh(row @ w) ** 2)  # here

    return jnp.sum(jax.vmap(jax.grad(loss), (None, 0))(w, x) ** 2, 0)


def of_eqloop(w, xs):
    def loss(w):
        def step(h, x):
            return jnp.sin(w * h + x), None  # here

        scan = el.Scan(step, schedule=el.StoreAll())
        return jnp.sum(scan(xs[0], xs)[0])

    return jax.grad(loss)(w)


def layers(model, x):
    def loss(model):
        return jnp.sum(jax.vmap(model)(x) ** 2)  # here

    return eqx.filter_grad(loss)(model)


_MLP = eqx.filter_eval_shape(eqx.nn.MLP, 8, 8, 512, 2, key=jax.random.key(0))

CASES = {
    "softmax": Case(
        long_softmax, (floats(16, 8), floats(8, 4096), floats(32, 16)), "temporary"
    ),
    "scan": Case(scanned, (floats(16, 16), floats(512, 16)), "stored", True),
    "scan in scan": Case(
        scan_in_scan, (floats(32, 32), floats(16, 16, 32)), "stored", True
    ),
    "while": Case(waits, (floats(64),), "temporary", True),
    "conv": Case(convolved, (floats(16, 2, 3, 3), floats(2, 2, 32, 32)), "stored"),
    "attention": Case(attends, (floats(2, 64, 8),) * 3, "temporary"),
    "remat": Case(with_remat, (floats(8, 512), floats(64, 8)), "temporary"),
    "vmap": Case(gradients_of_rows, (floats(64, 64), floats(16, 64)), "temporary"),
    "eqloop": Case(of_eqloop, (floats(64), floats(256, 64)), "stored", True),
    "layers": Case(layers, (_MLP, floats(64, 8)), "stored", False, "linear"),
}
