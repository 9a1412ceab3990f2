"""Programs whose largest array is made by a line that ends in `# here`."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import lax

import eqloop as el


class Case(NamedTuple):
    """A program.

    Attributes:
        f: The function.
        args: Its arguments.
        kinds: Of what kind its largest array may be; compilers differ.
        loop: The loop that makes it, if one does.
        library: The file of the library whose line makes it, if one does.
    """

    f: Callable[..., Any]
    args: tuple[Any, ...]
    kinds: str
    loop: str | None = None
    library: str = ""

    @property
    def lines(self) -> list[int]:
        """The lines that may make it, of which compilers choose one."""
        lines, first = inspect.getsourcelines(inspect.unwrap(self.f))
        return [first + i for i, x in enumerate(lines) if x.endswith("# here\n")]


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def long_softmax(w, head, x):
    def loss(w, head):
        hidden = jnp.tanh(x @ w)
        logits = hidden @ head  # here
        return -jnp.mean(jax.nn.log_softmax(logits)[:, 0])  # here

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
            return lax.scan(inner, h, rows)[0] * jnp.float32(0.5), None

        return jnp.sum(lax.scan(outer, xs[0, 0], xs)[0])

    return jax.grad(loss)(w)


def waits(x):
    def body(c):
        wide = jnp.sin(c[1][:, None] * jnp.arange(512, dtype=jnp.float32)[None])  # here
        return c[0] + 1, jnp.sort(wide, axis=1)[:, 3]  # here

    return lax.while_loop(lambda c: c[0] < 10, body, (0, x))[1]


def convolved(kernel, images):
    def loss(kernel):
        y = lax.conv(images, kernel, (1, 1), "SAME")  # here
        return jnp.sum(jnp.cos(y) ** 2)  # here

    return jax.grad(loss)(kernel)


def attends(q, k, v):
    def loss(q, k, v):
        scores = jnp.einsum("hqd,hkd->hqk", q, k)  # here
        return jnp.sum(jax.nn.softmax(scores) @ v)  # here

    return jax.grad(loss, (0, 1, 2))(q, k, v)


def with_remat(w, x):
    @jax.checkpoint
    def block(w, x):
        wide = jnp.sin(x @ w)  # here
        return jnp.cos(wide) @ w.T  # here

    def loss(w):
        return jnp.sum(block(w, block(w, x)))

    return jax.grad(loss)(w)


def gradients_of_rows(w, x):
    def loss(w, row):
        return jnp.sum(jnp.tanh(row @ w) ** 2)  # here

    gradients = jax.vmap(jax.grad(loss), (None, 0))(w, x)
    return jnp.sum(jnp.sort(gradients, 0)[::2], 0)  # here


def of_eqloop(w, xs):
    def loss(w):
        def step(h, x):
            return jnp.sin(w * h + x), None  # here

        scan = el.Scan(step, schedule=el.StoreAll())
        return jnp.sum(scan(xs[0], xs)[0])

    return jax.grad(loss)(w)


def branches(w, x):
    def loss(w):
        wide = jnp.sin(x @ w)  # here
        heavy = lambda a: jnp.sum(jnp.exp(a) * jnp.cos(a))  # here
        return lax.cond(wide[0, 0] > 0, heavy, jnp.sum, wide)  # here

    return jax.grad(loss)(w)


def layers(model, x):
    def loss(model):
        return jnp.sum(jax.vmap(model)(x) ** 2)  # here

    return eqx.filter_grad(loss)(model)


_ADAM = optax.adam(1e-3)


def trains(params, state, x):
    def loss(params):
        hidden = jnp.tanh(x @ params["up"])  # here
        return jnp.sum((hidden @ params["down"]) ** 2)  # here

    updates, state = _ADAM.update(jax.grad(loss)(params), state, params)
    return optax.apply_updates(params, updates), state


_MLP = eqx.filter_eval_shape(eqx.nn.MLP, 8, 8, 512, 2, key=jax.random.key(0))
_PARAMS = {"up": floats(64, 2048), "down": floats(2048, 64)}
_STATE = jax.eval_shape(_ADAM.init, _PARAMS)

CASES = {
    "softmax": Case(
        long_softmax,
        (floats(16, 8), floats(8, 4096), floats(32, 16)),
        "temporary stored",
    ),
    "scan": Case(scanned, (floats(16, 16), floats(512, 16)), "stored", "loop"),
    "scan in scan": Case(
        scan_in_scan, (floats(32, 32), floats(16, 16, 32)), "stored", "loop"
    ),
    "while": Case(waits, (floats(64),), "temporary", "loop"),
    "conv": Case(
        convolved, (floats(16, 2, 3, 3), floats(2, 2, 32, 32)), "stored temporary"
    ),
    "attention": Case(attends, (floats(2, 64, 8),) * 3, "stored temporary"),
    "remat": Case(with_remat, (floats(8, 512), floats(64, 8)), "temporary stored"),
    "vmap": Case(gradients_of_rows, (floats(64, 64), floats(16, 64)), "temporary"),
    "eqloop": Case(of_eqloop, (floats(64), floats(256, 64)), "stored", "Scan"),
    "cond": Case(branches, (floats(64, 512), floats(256, 64)), "stored temporary"),
    "layers": Case(layers, (_MLP, floats(64, 8)), "stored", None, "_linear.py"),
    "optax": Case(
        jax.jit(trains, donate_argnums=(0, 1)),
        (_PARAMS, _STATE, floats(16, 64)),
        "stored temporary",
    ),
}
