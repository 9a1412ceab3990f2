"""`AssociativeScan` beside `jax.lax.associative_scan`, in chunks and at once."""

import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

import eqloop as el

from ..asserts import assert_close, assert_raises
from ..compiling import temp_bytes
from ..marks import slow

pytestmark = pytest.mark.sampled

LENGTH = 9
# One chunk; chunks after the first element; chunks after the first three.
CHUNK_SIZES = (None, 1, 4, 5, 3, LENGTH)


def recurrence(one: Any, other: Any) -> Any:
    """`h = a h + b`, elementwise: associative, and not commutative."""
    (a, b), (c, d) = one["ab"], other["ab"]
    return {**other, "ab": (a * c, c * b + d)}


def elements(length: int = LENGTH, *shape: int) -> Any:
    drawn = np.random.default_rng(0).uniform(0.5, 1.0, (2, length, *shape))
    a, b = jnp.asarray(drawn)
    return {"ab": (a, b), "name": "static", "none": None}


class Scaled(eqx.Module):
    """Associative for any scale, which is a parameter."""

    scale: jax.Array

    def __call__(self, one: Any, other: Any) -> Any:
        return one + other + self.scale * one * other


def told(one: Any, other: Any) -> Any:
    io_callback(lambda: None, None)
    return one + other


def ours(f: Any, xs: Any, **settings: Any) -> Any:
    return el.AssociativeScan(f, **settings)(xs)


def theirs(f: Any, xs: Any, *, chunk_size: Any = None, **settings: Any) -> Any:
    return lax.associative_scan(f, xs, **settings)


# Beside JAX


X = jnp.linspace(-0.5, 0.5, LENGTH)
SCALE = jnp.array(0.3)


def number(run: Any, scale: Any, x: Any, **settings: Any) -> jax.Array:
    """A number in which each of the prefixes has its own weight."""
    ys = run(Scaled(scale), x, **settings)
    return jnp.sum(jnp.cos(jnp.arange(1.0 * LENGTH)) * ys**2)


def first_order(run: Any, **settings: Any) -> Any:
    loss = functools.partial(number, run, **settings)
    return (
        run(Scaled(SCALE), X, **settings),
        jax.value_and_grad(loss, (0, 1))(SCALE, X),
        jax.jvp(loss, (SCALE, X), (SCALE, X)),
    )


def higher_order_and_batched(run: Any, **settings: Any) -> Any:
    loss = functools.partial(number, run, **settings)
    batch = jnp.stack([X, 2 * X], 1)
    squared = lambda scale: jnp.sum(jax.grad(loss, 1)(scale, X) ** 2)
    at_once = lambda scale: jnp.sum(jax.vmap(loss, (None, 1))(scale, batch))
    return (
        jax.hessian(loss)(SCALE, X),
        jax.grad(squared)(SCALE),
        jax.value_and_grad(at_once)(SCALE),
        jax.vmap(jax.grad(loss, 1), (0, None))(jnp.array([0.1, 0.2]), X),
    )


@pytest.mark.parametrize(
    ("derive", "chunk_size", "reverse"),
    [
        (first_order, 4, False),
        slow(first_order, 4, True),
        slow(first_order, 3, False),
        (first_order, 3, True),
        (higher_order_and_batched, 3, False),
    ],
)
def test_beside_jax(derive, chunk_size, reverse):
    @jax.jit
    def both():
        settings = {"reverse": reverse, "chunk_size": chunk_size}
        return derive(ours, **settings), derive(theirs, **settings)

    assert_close(*both())


@pytest.mark.parametrize("reverse", [False, True])
def test_trees_and_chunks_of_all_sizes(reverse):
    @eqx.filter_jit
    def everything(xs):
        return [
            ours(recurrence, xs, reverse=reverse, chunk_size=s) for s in CHUNK_SIZES
        ]

    xs = elements()
    combine = lambda a, b: recurrence({"ab": a}, {"ab": b})["ab"]
    of_jax = functools.partial(lax.associative_scan, combine, reverse=reverse)
    expected = jax.jit(of_jax)(xs["ab"])
    for ys in everything(xs):
        assert_close(ys["ab"], expected)
        assert ys["name"] == "static"
        assert ys["none"] is None


@pytest.mark.parametrize("length", [0, 1, 2])
@pytest.mark.parametrize("chunk_size", [None, 1])
def test_few_elements(length, chunk_size):
    xs = jnp.arange(2.0, 2.0 + length)
    ys = ours(jnp.multiply, xs, chunk_size=chunk_size)
    np.testing.assert_array_equal(ys, jnp.cumprod(xs))
    grad = jax.grad(lambda xs: jnp.sum(ours(jnp.multiply, xs, chunk_size=chunk_size)))
    expected = jax.grad(lambda xs: jnp.sum(jnp.cumprod(xs)))
    np.testing.assert_array_equal(*(jax.jit(f)(xs) for f in (grad, expected)))


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_axes(chunk_size):
    xs = {"wide": jnp.arange(24.0).reshape(2, 3, 4), "long": jnp.arange(4.0)}
    add = lambda a, b: jax.tree.map(jnp.add, a, b)
    ys = ours(add, xs, axis=-1, chunk_size=chunk_size)
    assert_close(ys, jax.tree.map(lambda x: jnp.cumsum(x, -1), xs))
    settings = dict(axis=1, reverse=True)
    ys = ours(jnp.add, xs["wide"], chunk_size=1, **settings)
    of_jax = functools.partial(lax.associative_scan, jnp.add, **settings)
    assert_close(ys, jax.jit(of_jax)(xs["wide"]))


@pytest.mark.usefixtures("either_width")
def test_integers_keys_and_numpy_arrays():
    keys = jax.random.split(jax.random.key(0), 5)
    xs = {"n": np.arange(5), "key": keys, "x": jnp.ones(5, jnp.bfloat16)}

    def f(a, b):
        return {"n": jnp.maximum(a["n"], b["n"]), "key": b["key"], "x": a["x"] * b["x"]}

    for chunk_size in (None, 2):
        ys = ours(f, xs, chunk_size=chunk_size)
        np.testing.assert_array_equal(ys["n"], xs["n"])
        assert jnp.all(ys["key"] == keys)
        assert ys["x"].dtype == jnp.bfloat16
        gradient = jax.grad(
            lambda x, s=chunk_size: jnp.sum(
                ours(f, {**xs, "x": x}, chunk_size=s)["x"].astype(float)
            )
        )
        grads = jax.jit(gradient)(jnp.ones(5))
        np.testing.assert_array_equal(grads, [5, 4, 3, 2, 1])


def test_closures_are_differentiated():
    def number(scale, chunk_size):
        f = lambda a, b: a + b + scale * a * b
        return jnp.sum(ours(f, jnp.arange(1.0, 6.0), chunk_size=chunk_size))

    gradient = jax.jit(jax.grad(number), static_argnums=1)
    np.testing.assert_allclose(gradient(0.1, 2), gradient(0.1, None), rtol=1e-5)


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_parameters_that_vary_over_a_mesh(chunk_size):
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    scales = jnp.array([0.1, 0.2])

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P("i"), P()), out_specs=P("i")
    )
    def sharded(scales, x):
        return ours(Scaled(scales[0]), x, chunk_size=chunk_size)[None]

    def plain(scales, x):
        return jnp.stack([theirs(Scaled(scale), x) for scale in scales])

    @jax.jit
    def derive():
        loss = lambda run: lambda *args: jnp.sum(run(*args) ** 2)
        return [jax.grad(loss(run), (0, 1))(scales, X) for run in (sharded, plain)]

    assert_close(*derive())


def test_as_a_decorator_and_a_method():
    class Model(eqx.Module):
        scale: jax.Array

        @el.AssociativeScan(chunk_size=2)
        def prefixes(self, a, b):
            return a + self.scale * b / self.scale

    model = Model(jnp.array(2.0))
    np.testing.assert_allclose(model.prefixes(jnp.ones(5)), jnp.arange(1.0, 6.0))


def test_annotations_are_enforced():
    def f(a: Float[Array, " n"], b: Float[Array, " n"]) -> Float[Array, " n"]:
        return a + b

    assert el.AssociativeScan(f)(jnp.ones(3)).shape == (3,)
    with pytest.raises(TypeError) as info:
        el.AssociativeScan(f)(jnp.ones((4, 2)))
    notes = "\n".join(info.value.__notes__)
    assert "while AssociativeScan traced `f(a, b)` with\n  a = f32[2,2]" in notes


# Memory


def test_memory_is_that_of_a_chunk():
    xs = elements(2_003)["ab"]
    size = sum(x.nbytes for x in xs)
    f = lambda a, b: recurrence({"ab": a}, {"ab": b})["ab"]

    def forward(xs):
        return ours(f, xs, chunk_size=40)

    def pull(xs, cts):
        return jax.vjp(forward, xs)[1](cts)

    assert temp_bytes(forward, xs) < 0.15 * size
    assert temp_bytes(lambda xs: jax.jvp(forward, (xs,), (xs,)), xs) < 0.2 * size
    # Their cotangents are held, and of each chunk the last prefix, but no others.
    loss = lambda xs: jnp.sum(forward(xs)[1] ** 2)
    assert temp_bytes(jax.grad(loss), xs) < 1.4 * size
    even = elements(2_001)["ab"]
    assert temp_bytes(pull, even, even) < 1.4 * size


# What `f` returns goes by its leaves


class Affine(NamedTuple):
    scale: Any
    shift: Any


def joined(a, b):
    (p, q), (r, s) = a, b
    return p * r, q * r + s


FORMS = {
    "a tuple": joined,
    "a list": lambda a, b: list(joined(a, b)),
    "a dictionary": lambda a, b: dict(zip("ab", joined(a, b), strict=True)),
    "in one of one": lambda a, b: (joined(a, b),),
    "and nothing": lambda a, b: (*joined(a, b), None),
    "the same": lambda a, b: (
        type(a)(*joined(a, b)) if hasattr(a, "scale") else joined(a, b)
    ),
}


@pytest.mark.parametrize("chunk_size", [None, 3])
@pytest.mark.parametrize("form", FORMS)
def test_what_is_returned_may_be_in_other_containers(form, chunk_size):
    f, pair = FORMS[form], (jnp.linspace(0.5, 1.0, 9), jnp.arange(9.0))

    def run(scan):
        def both(xs):
            value, pull = jax.vjp(scan, xs)
            return value, pull(value)

        return jax.jit(lambda: [both(xs) for xs in (Affine(*pair), pair)])()

    found = run(lambda xs: ours(f, xs, chunk_size=chunk_size))
    assert_close(found, run(lambda xs: theirs(f, xs)), rtol=1e-5, atol=1e-6)


def test_of_trees_with_static_leaves():
    f = lambda a, b: [a["a"] + b["a"], None, a["name"]]
    xs = {"a": jnp.arange(4.0), "b": None, "name": "sum"}
    found = ours(f, xs)
    assert found["name"] == "sum"
    assert found["b"] is None
    np.testing.assert_array_equal(found["a"], jnp.cumsum(xs["a"]))


# Wrong calls

MATRIX = jnp.ones((4, 3))
RETURNED = (
    "TypeError: AssociativeScan: f(a, b) must return the structure, shapes and dtypes "
    "that a and b have, but it changed them:\n"
)

WRONG = {
    "shape": (
        lambda: ours(lambda a, b: {"h": a["h"][0]}, {"h": MATRIX}),
        RETURNED + "  a['h']: float32[2,3] came in, float32[3] came out",
    ),
    "shape, in chunks": (
        lambda: ours(lambda a, b: a[0], MATRIX, chunk_size=2),
        RETURNED + "  a: float32[1,3] came in, float32[3] came out",
    ),
    "dtype": (
        lambda: ours(lambda a, b: (a + b).astype(int), MATRIX),
        RETURNED + "  a: float32[2,3] came in, int32[2,3] came out",
    ),
    "structure": (
        lambda: ours(lambda a, b: {"h": a["h"]}, {"h": MATRIX, "c": MATRIX}),
        RETURNED + "  a['c'] came in, but did not come out",
    ),
    "too many leaves": (
        lambda: ours(lambda a, b: (a, b), MATRIX),
        RETURNED + "  a: float32[2,3] came in, tuple of 2 came out",
    ),
    "shape, in another container": (
        lambda: ours(lambda a, b: [a[0][0], a[1]], (MATRIX, MATRIX)),
        RETURNED + "  a[0]: float32[2,3] came in, float32[3] came out",
    ),
    "static leaf": (
        lambda: ours(lambda a, b: ("other", a[1]), ("one", MATRIX)),
        "ValueError: AssociativeScan: f must return the leaves that are not arrays "
        "unchanged, but it changed them:\n  a[0]: 'one' came in, 'other' came out",
    ),
    "lengths": (
        lambda: ours(jnp.add, {"a": MATRIX, "b": (MATRIX[1:],)}),
        "ValueError: AssociativeScan: all arrays must have the same number of "
        "elements along axis 0, but they do not:\n  xs['a']: 4\n  xs['b'][0]: 3",
    ),
    "nothing to scan": (
        lambda: ours(jnp.add, "abc"),
        "ValueError: AssociativeScan: xs holds no array, so there is nothing to "
        "scan: it is 'abc'.",
    ),
    "axis out of range": (
        lambda: ours(jnp.add, MATRIX, axis=2),
        "ValueError: … axis gives axis 2 for xs, which is float32[4,3] and has the "
        "axes -2 to 1.",
    ),
    "axis": (
        lambda: el.AssociativeScan(jnp.add, axis=None),
        "TypeError: AssociativeScan: `axis` must be an int, the axis along which "
        "the elements lie, but it is None, of type NoneType.",
    ),
    "chunk_size": (
        lambda: el.AssociativeScan(jnp.add, chunk_size=0),
        "ValueError: AssociativeScan: `chunk_size` must be at least 1, but it is 0. "
        "To scan all elements at once, pass None.",
    ),
    "effects": (
        lambda: jax.grad(lambda xs: ours(told, xs, chunk_size=2).sum())(jnp.ones(5)),
        "ValueError: … Use `schedule=el.StoreAll()`, or no `chunk_size` for an "
        "`el.AssociativeScan`",
    ),
    "arity": (
        lambda: ours(lambda a: a, MATRIX),
        "TypeError: AssociativeScan: `f` does not take what it is given",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_call(name):
    assert_raises(*WRONG[name])
