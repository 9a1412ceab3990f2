"""Values of types made with `jax.experimental.hijax`, in steps.

They are made and used up there, or closed over; the type here has no batches.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import hijax

import eqloop as el

from ..asserts import assert_close
from ..marks import slow

# JAX 0.12 and JAX 0.10.
Primitive = getattr(hijax, "HiPrim", None) or hijax.VJPHiPrimitive


@dataclasses.dataclass(frozen=True)
class Boxed:
    array: jax.Array


@dataclasses.dataclass(frozen=True)
class BoxedType(hijax.HiType):
    shape: tuple

    @property
    def array_type(self):
        return hijax.ShapedArray(self.shape, jnp.dtype("float32"))

    def lo_ty(self):
        return [self.array_type]

    def lower_val(self, boxed):
        return [boxed.array]

    def raise_val(self, array):
        return Boxed(array)

    def to_tangent_aval(self):
        return self.array_type

    def str_short(self, short_dtypes=False, **_):
        return "boxed"


hijax.register_hitype(Boxed, lambda boxed: BoxedType(boxed.array.shape))


class Made(Primitive):
    """Primitives that hand their argument on, and its cotangent back."""

    def __init__(self, before, after):
        self.in_avals, self.out_aval, self.params = (before,), after, {}
        super().__init__()

    def vjp_fwd(self, moves, x):
        return self(x), None

    def vjp_bwd_retval(self, residuals, ct):
        return (ct,)


class Into(Made):
    def expand(self, x):
        return Boxed(x)


class Out(Made):
    def expand(self, boxed):
        return boxed.array


def into(x):
    return Into(jax.typeof(x), BoxedType(x.shape))(x)


def out(boxed):
    aval = jax.typeof(boxed)
    return Out(aval, aval.array_type)(boxed)


def through(x):
    return out(into(x))


def plainly(x):
    return x


BODIES = {
    "direct": lambda f: lambda p, c: jnp.sin(p * f(c)),
    "jit": lambda f: lambda p, c: jax.jit(lambda c: jnp.sin(p * f(c)))(c),
    "cond": lambda f: (
        lambda p, c: lax.cond(
            jnp.sum(c) < 100, lambda c: jnp.sin(p * f(c)), lambda c: p * f(c), c
        )
    ),
    "Cond": lambda f: (
        lambda p, c: el.Cond(lambda c: jnp.sin(p * f(c)), lambda c: p * f(c))(
            jnp.sum(c) < 100, c
        )
    ),
    "scan": lambda f: (
        lambda p, c: lax.scan(lambda c, _: (jnp.sin(p * f(c)), None), c, length=3)[0]
    ),
    "Scan": lambda f: (
        lambda p, c: el.CheckpointedScan(
            lambda c, _: (jnp.sin(p * f(c)), None), base=2
        )(c, length=3)[0]
    ),
}


def scanned(schedule):
    def loop(body, x):
        step = lambda c, _: (body(c), jnp.cos(c))
        return el.Scan(step, schedule=schedule)(x, length=6)

    return loop


def while_loop(make):
    def loop(body, x):
        step = lambda c: (c[0] + 1, body(c[1]))
        return make(lambda c: c[0] < 6, step)((0, x))[1]

    return loop


def scan_while(body, x):
    step = lambda c, _: ((c[0] + 1, body(c[1])), None)
    settings = dict(max_steps=8, schedule=el.Recursive(2))
    return el.ScanWhile(lambda c: c[0] < 6, step, **settings)((0, x))[0][1]


def mapped(make):
    rows = lambda x: x[None] * jnp.linspace(0.1, 0.9, 6)[:, None]
    return lambda body, x: make(body)(rows(x))


def by_steps(body, x):
    ys = []
    for _ in range(6):
        ys.append(jnp.cos(x))
        x = body(x)
    return x, jnp.stack(ys)


def last(body, x):
    return by_steps(body, x)[0]


by_rows = mapped(lambda body: lambda rows: jnp.stack(list(map(body, rows))))
LOOPS = {
    "store_all": (scanned(el.StoreAll()), by_steps),
    "recursive": (scanned(el.Recursive(2)), by_steps),
    "together": (scanned(el.Recursive(2, batch=2)), by_steps),
    "chunked": (scanned(el.Chunked(3)), by_steps),
    "binomial": (scanned(el.Binomial(2)), by_steps),
    "budget": (scanned(el.Budget("1MiB", measure=False)), by_steps),
    "offload": (scanned(el.Offload(el.Recursive(2))), by_steps),
    "scan_while": (scan_while, last),
    "bounded_while": (
        while_loop(lambda *f: el.BoundedWhileLoop(*f, max_steps=8, base=2)),
        last,
    ),
    "checkpointed_while": (
        while_loop(lambda *f: el.CheckpointedWhileLoop(*f, checkpoints=2)),
        last,
    ),
    "for": (mapped(lambda f: el.CheckpointedForLoop(f, 2)), by_rows),
}
X, P = np.array([0.3, -0.7, 1.1], "f4"), np.array([1.1, 0.9, 1.3], "f4")


def assert_same_gradients(ours, by_hand):
    total = lambda f: lambda *args: sum(map(jnp.sum, jax.tree.leaves(f(*args))))
    for run in (jax.value_and_grad, lambda f, at: f):
        pairs = (jax.jit(run(total(f), (0, 1)))(P, X) for f in (ours, by_hand))
        assert_close(*pairs)


# Every loop and every body once.
QUICK = {("recursive", "scan"), ("binomial", "Cond"), ("checkpointed_while", "cond")}
QUICK |= {("together", "jit"), ("scan_while", "direct"), ("for", "Scan")}


@pytest.mark.parametrize(
    ("loop", "body"),
    [c if c in QUICK else slow(*c) for c in itertools.product(LOOPS, BODIES)],
)
def test_made_and_used_up(loop, body):
    ours, by_hand = LOOPS[loop]

    def end(run, f):
        return lambda p, x: run(lambda c: BODIES[body](f)(jnp.mean(p), c), x)

    assert_same_gradients(end(ours, through), end(by_hand, plainly))


@pytest.mark.parametrize(
    "loop",
    [name if name in ("recursive", "bounded_while") else slow(name) for name in LOOPS],
)
def test_closed_over(loop):
    ours, by_hand = LOOPS[loop]

    def end(p, x):
        boxed = into(p)
        return ours(lambda c: jnp.sin(out(boxed) * c), x)

    assert_same_gradients(end, lambda p, x: by_hand(lambda c: jnp.sin(p * c), x))


def test_carried():
    """Those that do not change are no arrays, and so are carried by no loop."""
    step = lambda c, _: ((jnp.sin(c[0] * out(c[1])), c[1]), None)
    loop = el.Scan(step, schedule=el.Recursive(2))
    ours = lambda p, x: loop((x, into(p)), length=6)[0][0]
    assert_same_gradients(ours, lambda p, x: last(lambda c: jnp.sin(c * p), x))
    changing = el.Scan(lambda c, _: (into(jnp.sin(out(c))), None))
    with pytest.raises(ValueError, match="only arrays and numbers can change"):
        changing(into(X), length=3)


@pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_returned(run):
    scan = el.Scan(lambda c, _: (jnp.sin(c), {"a": c, "b": into(c)}))
    with pytest.raises(TypeError, match=r"only arrays can be stacked.*\n  ys\['b'\]: "):
        run(lambda x: scan(x, length=3)[0])(X)
    rows = el.CheckpointedForLoop(into, 2)
    with pytest.raises(TypeError, match=r"only arrays can be stacked.*\n  ys: "):
        run(lambda x: jnp.zeros(len(jax.tree.leaves(rows(x)))))(np.ones((4, 3), "f4"))
