"""What is compiled for devices that are not here."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

import eqloop as el

from ..checkpointing.fused_steps import STEPS

# Gradients whose slots are on the host. Each is a function of a matrix, three initial
# carries and some `xs`.
_SCHEDULES = {
    "Recursive": el.Recursive(3, batch=1),
    "Chunked": el.Chunked(8, batch=4),
    "Binomial": el.Binomial(5),
    "Binomial with blocks": el.Binomial(4, block=7),
    "Cast": el.Cast(el.Binomial(5), jnp.bfloat16),
}


def _loss(schedule: el.AbstractSchedule, w: Any, h: Any, xs: Any) -> jax.Array:
    f = lambda c, x: ((jnp.tanh(c[0] @ w + x) * c[1], 0.9 * c[1]), c[1])
    scan = el.Scan(f, schedule=el.Offload(schedule))
    (h, _), ys = scan((h, jnp.ones(())), xs)
    return jnp.sum(h**2) + jnp.sum(ys)


def _through(schedule: el.AbstractSchedule) -> dict[str, Callable[..., Any]]:
    loss = lambda w, h, xs: _loss(schedule, w, h, xs)
    grad = jax.grad(loss, (0, 1, 2))
    of_h = lambda w, h, xs: jax.grad(loss, 1)(w, h, xs)
    one = (None, 0, None)

    def descent(w: Any, h: Any, xs: Any) -> Any:
        move = lambda h, _: (h - of_h(w, h, xs), None)
        return jax.lax.scan(move, h, length=3)[0]

    def pushed(w: Any, h: Any, xs: Any) -> Any:
        return jax.jvp(lambda h: of_h(w, h, xs), (h,), (h,))

    def rows(w: Any, h: Any, xs: Any) -> Any:
        f = lambda h, x: (jnp.tanh(h @ w + x), None)
        scan = el.Scan(f, schedule=el.Offload(schedule))
        return jax.vmap(lambda h: scan(h, xs)[0][0, :3])(h)

    return {
        "vmap of grad": jax.vmap(grad, one),
        "vmap of vmap of grad": jax.vmap(
            lambda w, h, xs: jax.vmap(grad, (None, None, 1))(
                w, h, jnp.stack([xs, 2 * xs], 1)
            ),
            one,
        ),
        "vmap of jit of grad": jax.vmap(jax.jit(grad), one),
        "vmap of a scan of grad": jax.vmap(descent, one),
        "vmap of a Hessian's product": jax.vmap(pushed, one),
        "jacrev": jax.jacrev(rows, (0, 1)),
        "grad of vmap": jax.grad(
            lambda *args: jnp.sum(jax.vmap(loss, one)(*args)), (0, 1, 2)
        ),
    }


def offloaded() -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """The name of each case, its function, and its arguments."""
    args = jnp.eye(128), jnp.ones((3, 8, 128)), jnp.ones((40, 8, 128))
    for name, schedule in _SCHEDULES.items():
        for how, function in _through(schedule).items():
            yield f"{name}: {how}", function, args


# Loops with a budget: a step, the initial carry, and `xs`.


def _lorenz(y: Any, x: Any) -> tuple[Any, None]:
    def f(y: Any) -> Any:
        a, b, c = y
        return jnp.stack([10 * (b - a), a * (28.0 - c) - b, a * b - 8 / 3 * c])

    k1 = f(y)
    k2 = f(y + 0.005 * k1)
    k3 = f(y + 0.005 * k2)
    k4 = f(y + 0.01 * k3)
    return y + 0.01 / 6 * (k1 + 2 * k2 + 2 * k3 + k4), None


def _wave(c: Any, x: Any) -> tuple[Any, Any]:
    u, v = c
    around = sum(jnp.roll(u, by, axis) for axis in (0, 1) for by in (-1, 1))
    v = v + 0.1 * (around - 4 * u) + x - 0.01 * u**3
    return (u + 0.1 * v, v), u[3, 3]


def _tanh(h: Any, x: Any) -> tuple[Any, None]:
    return jnp.tanh(h @ jnp.eye(64) + x), None


def _gru() -> Callable[..., Any]:
    cell = eqx.nn.GRUCell(16, 64, key=jax.random.key(0))
    return lambda h, x: (cell(x, h), None)


LOOPS: dict[str, Callable[[], tuple[Callable[..., Any], Any, Any]]] = {
    "lorenz": lambda: (_lorenz, jnp.ones(3), jnp.zeros(20_000)),
    "wave": lambda: (_wave, (jnp.ones((64, 64)), jnp.zeros((64, 64))), jnp.zeros(500)),
    "tanh": lambda: (_tanh, jnp.ones((8, 64)), jnp.zeros((500, 8, 64))),
    "gru": lambda: (_gru(), jnp.ones(64), jnp.zeros((1000, 16))),
}


def budgeted(name: str, nbytes: int) -> tuple[el.Scan, Any, Any]:
    """A loop with a budget, and its arguments."""
    f, init, xs = LOOPS[name]()
    return el.Scan(f, schedule=el.Budget(nbytes, measure=False)), init, xs


def loss_of(scan: el.Scan) -> Callable[[Any, Any], jax.Array]:
    """Of the last carry, some of which is read in a linear way."""

    def loss(init: Any, xs: Any) -> jax.Array:
        first, *others = jax.tree.leaves(scan(init, xs)[0])
        return sum(map(jnp.sum, others), jnp.sum(first**2))

    return loss


def fitted() -> tuple[Callable[..., jax.Array], tuple[Any, Any]]:
    """Layers that take longer than to move what lies between them, and a head."""

    def loss(layers: Any, x: Any) -> jax.Array:
        def step(x: Any, w: Any) -> tuple[Any, None]:
            mean = jnp.mean(x, -1, keepdims=True)
            return x + jax.nn.gelu((x - mean) @ w[0]) @ w[1], None

        x, _ = el.Scan(step)(x, layers)
        return jnp.mean(jax.nn.logsumexp(x.astype(jnp.float32), -1))

    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    return loss, ((of(24, 512, 2048), of(24, 2048, 512)), of(8, 1024, 512))


def fitted_rows() -> tuple[Callable[..., jax.Array], tuple[Any, Any]]:
    """A function of many rows that run the same small steps."""

    def loss(scale: Any, y: Any) -> jax.Array:
        step = lambda y, x: _lorenz(y, x)
        last = jax.vmap(lambda y: el.Scan(step)(y, length=1000)[0])(y * scale)
        return jnp.mean(jnp.sin(last) ** 2)

    rows = jax.ShapeDtypeStruct((65_536, 3), jnp.float32)
    return loss, (jax.ShapeDtypeStruct((), jnp.float32), rows)


def _crowded(consts: Any, h: Any, x: Any) -> Any:
    """A step of more numbers than there are registers."""
    return jnp.sin(h + consts * jnp.roll(h, 1)), None


def operations() -> Iterator[tuple[str, Callable[..., Any], Any]]:
    """Loops of 64 rows that are kernels, by an operation that is all of their step."""
    of = lambda dtype, *shape: jax.ShapeDtypeStruct((64, 3, *shape), dtype)
    for name, f, x in (
        ("division", lambda x: x / (x + 1), of("complex64")),
        ("frexp", jnp.frexp, of("float64")),
        ("no entries", lambda x: (x[:0], jnp.cumsum(x[:0])), of("float32", 4)),
        ("bits", lambda x: jax.lax.clz(x) ^ ~x % 7, of("uint64")),
    ):
        scan = el.Scan(lambda h, x, f=f: (h, f(x)), schedule=el.Fused())
        yield name, jax.vmap(lambda xs, scan=scan: scan(0.0, xs)[1]), (x,)


def gru(schedule: Any) -> tuple[Callable[..., Any], Any]:
    """The gradient of 64 GRUs of 32 units, in float32."""
    cell = eqx.nn.GRUCell(16, 32, key=jax.random.key(0))

    def loss(cell: Any, h: Any, xs: Any) -> jax.Array:
        scan = el.Scan(lambda h, x: (cell(x, h), None), schedule=schedule)
        return jnp.sum(jax.vmap(scan)(h, xs)[0] ** 2)

    of = lambda *shape: jax.ShapeDtypeStruct((64, *shape), "float32")
    return jax.grad(loss, (0, 1, 2)), (cell, of(32), of(9, 16))


def fused(name: str, schedule: Any) -> tuple[Callable[..., Any], Any]:
    """The gradient of a loop over 8,192 rows that can be one kernel each way."""
    crowd = _crowded, lambda rows, _: (jnp.ones(()), jnp.ones((rows, 64)), None)
    step, make = crowd if name == "crowded" else STEPS[name]
    args = jax.eval_shape(lambda: make(8192, 100))

    def loss(*args: Any) -> jax.Array:
        consts, init, xs = args
        scan = el.Scan(functools.partial(step, consts), schedule=schedule)
        one = lambda h, x: scan(h, x, length=100)
        carry, _ = jax.vmap(one, (0, 1), (0, 1))(init, xs)
        return jnp.sum(jax.tree.leaves(carry)[0] ** 2)

    return jax.grad(loss), args
