"""Derivatives of a map over rows: of any order and anywhere, in one chunk's memory."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import eqloop as el

from ..asserts import assert_close
from ..compiling import temp_bytes
from ..marks import slow, slow_if
from ..weights import without_key

near = functools.partial(assert_close, rtol=2e-4)

pytestmark = pytest.mark.sampled

W = jnp.cos(jnp.arange(6.0)).reshape(2, 3)
X = jnp.sin(jnp.arange(15.0)).reshape(5, 3)


def row(w, x):
    return jnp.tanh(w @ x) * x[:2]


CHUNKED = {
    "row by row": lambda w, x: el.ChunkedVmap(row, 1, in_axes=(None, 0))(w, x),
    "a shorter one": lambda w, x: el.ChunkedVmap(row, 3, in_axes=(None, 0))(w, x),
    "closure": lambda w, x: el.ChunkedVmap(functools.partial(row, w), 4)(x),
    "along axis 1": lambda w, x: (
        el.ChunkedVmap(row, 2, in_axes=(None, 1), out_axes=1)(w, x.T).T
    ),
    "policy": lambda w, x: el.ChunkedVmap(
        row, 2, in_axes=(None, 0), policy="save_nothing"
    )(w, x),
    "within a budget": lambda w, x: el.ChunkedVmap(
        row, el.Budget(500), in_axes=(None, 0)
    )(w, x),
    "one by one": lambda w, x: el.Map(functools.partial(row, w), unroll=2)(x),
    "two by two": lambda w, x: el.Map(functools.partial(row, w), batch_size=2)(x),
    "policy, a shorter one": lambda w, x: el.ChunkedVmap(
        row, 2, in_axes=(None, 0), policy="save_dots"
    )(w, x),
    "nested": lambda w, x: el.ChunkedVmap(
        el.ChunkedVmap(row, 1, in_axes=(None, 0)), 2, in_axes=(None, 1), out_axes=1
    )(w, jnp.stack([x, x + 1, x - 1], 1)).sum(1),
}


def whole(w, x):
    return jax.vmap(row, (None, 0))(w, x)


def whole_nested(w, x):
    return whole(w, x) + whole(w, x + 1) + whole(w, x - 1)


TANGENTS = (jnp.ones_like(W), jnp.flip(X))
STACKS = (jnp.stack([W, 2 * W]), jnp.stack([X, X + 1]))


def loss(f):
    return lambda w, x: jnp.sum(f(w, x) ** 2)


MODES = {
    "primal": lambda f: f(W, X),
    "jvp": lambda f: jax.jvp(f, (W, X), TANGENTS),
    "jvp of w": lambda f: jax.jvp(lambda w: f(w, X), (W,), TANGENTS[:1]),
    "linearize": lambda f: jax.linearize(f, W, X)[1](*TANGENTS),
    "vjp": lambda f: jax.vjp(f, W, X)[1](jnp.ones((5, 2))),
    "vjp of x": lambda f: jax.vjp(lambda x: f(W, x), X)[1](jnp.ones((5, 2))),
    "jacfwd": lambda f: jax.jacfwd(f)(W, X),
    "jacrev": lambda f: jax.jacrev(f, (0, 1))(W, X),
    "hessian": lambda f: jax.hessian(loss(f), (0, 1))(W, X),
    "reverse over reverse": lambda f: jax.jacrev(jax.grad(loss(f)), (0, 1))(W, X),
    "reverse over forward": lambda f: jax.grad(
        lambda *args: jnp.sum(jax.jvp(f, args, TANGENTS)[1] ** 2), (0, 1)
    )(W, X),
    "forward over reverse": lambda f: jax.jvp(
        jax.grad(loss(f), (0, 1)), (W, X), TANGENTS
    ),
    "third order": lambda f: jax.grad(
        lambda *args: jnp.sum(jax.jvp(jax.grad(loss(f)), args, TANGENTS)[1] ** 2)
    )(W, X),
    "vmap": lambda f: jax.vmap(f)(*STACKS),
    "vmap of grad": lambda f: jax.vmap(jax.grad(loss(f), (0, 1)), (None, 0))(
        W, STACKS[1]
    ),
    "grad of vmap": lambda f: jax.grad(
        lambda *args: jnp.sum(jax.vmap(loss(f), (None, 0))(*args)), (0, 1)
    )(W, STACKS[1]),
    "in scan": lambda f: jax.grad(
        lambda w, x: jnp.sum(
            jax.lax.scan(lambda x, _: (x.at[:, :2].add(f(w, x)), None), x, None, 3)[0]
        ),
        (0, 1),
    )(W, X),
    "in cond": lambda f: jax.grad(
        lambda w, x: jnp.sum(jax.lax.cond(x[0, 1] > 0, f, lambda w, x: x @ w.T, w, x)),
        (0, 1),
    )(W, X),
    "in checkpoint": lambda f: jax.grad(loss(jax.checkpoint(f)), (0, 1))(W, X),
    "in CheckpointedScan": lambda f: jax.grad(
        lambda w, x: jnp.sum(
            el.CheckpointedScan(lambda x, _: (x.at[:, :2].add(f(w, x)), None), 2)(
                x, length=4
            )[0]
        ),
        (0, 1),
    )(W, X),
}


@functools.cache
def expected_in(mode, nested):
    f = whole_nested if nested else whole
    return jax.jit(lambda: MODES[mode](f))()


LIKE_OTHERS = {"jvp of w", "vjp of x", "jacfwd", "reverse over forward"}
LIKE_OTHERS |= {"jacrev", "hessian"}


@pytest.mark.parametrize("mode", slow_if(LIKE_OTHERS.__contains__, MODES))
def test_is_vmap_in_every_mode_and_place(mode):
    found = jax.jit(lambda: MODES[mode](CHUNKED["a shorter one"]))()
    near(found, expected_in(mode, False))


@pytest.mark.parametrize("mode", [slow("jvp"), "vjp", slow("vmap of grad")])
def test_is_vmap_however_it_is_mapped(mode):
    found = jax.jit(lambda: {name: MODES[mode](f) for name, f in CHUNKED.items()})()
    for name, value in found.items():
        near(value, expected_in(mode, name == "nested"))


@pytest.mark.parametrize(
    "mode", ["jvp", "jacfwd", slow("hessian"), slow("reverse over reverse")]
)
def test_without_jit(mode):
    near(MODES[mode](CHUNKED["a shorter one"]), expected_in(mode, False))


def test_without_jit_where_vmap_cannot_tell_the_primal_from_the_tangents():
    def loop(x):
        return jax.lax.scan(lambda c, _: (jnp.sin(c * x), None), x, None, 2)[0]

    jac = lambda f: jax.jacfwd(lambda x: f(x) * 1.0)(jnp.arange(5.0))
    near(jac(el.ChunkedVmap(loop, 3)), jac(jax.vmap(loop)))


@pytest.mark.parametrize(
    ("chunk_size", "either_width"),
    [
        *[(1, False), (3, True)],
        *[slow(1, True), slow(2, False), slow(2, True)],
        *[slow(3, False), slow(4, False), slow(4, True)],
    ],
    indirect=["either_width"],
)
@pytest.mark.usefixtures("either_width")
def test_a_row_counts_once_where_f_is_singular(chunk_size):
    sqrt = el.ChunkedVmap(jnp.sqrt, chunk_size)
    at = jnp.zeros(5)
    np.testing.assert_array_equal(jax.grad(lambda x: sqrt(x).sum())(at), jnp.inf)
    _, tangent = jax.jvp(sqrt, (at,), (jnp.ones(5),))
    np.testing.assert_array_equal(tangent, jnp.inf)
    scaled = el.ChunkedVmap(lambda w, x: jnp.sqrt(w * x), 3, in_axes=(None, 0))
    of_const = jax.grad(lambda w: scaled(w, jnp.ones(5)).sum())
    assert of_const(0.0) == jnp.inf
    curve = el.ChunkedVmap(lambda x: x**1.5, chunk_size)
    gradient = jax.grad(lambda x: curve(x).sum())
    np.testing.assert_array_equal(jax.vjp(gradient, at)[1](jnp.ones(5))[0], jnp.inf)


@pytest.mark.parametrize("schedule", [el.StoreAll(), el.Recursive(2)])
def test_around_a_loop(schedule):
    def loop(w, x):
        step = lambda h, _: (jnp.tanh(w @ x + h), h)
        return el.Scan(step, schedule=schedule)(x[:2], length=4)[0]

    def derivatives(f):
        grad = jax.grad(lambda w, x: jnp.sum(f(w, x) ** 2), (0, 1))
        return grad(W, X), jax.jvp(grad, (W, X), TANGENTS)[1]

    chunked = el.ChunkedVmap(loop, 2, in_axes=(None, 0))
    run = lambda: (derivatives(chunked), derivatives(jax.vmap(loop, (None, 0))))
    near(*jax.jit(run)())


def test_integers_keys_and_flags_are_not_differentiated():
    def f(x, n, key, flag):
        y = jnp.where(flag, x, -x) * n.astype(float) + jax.random.normal(key)
        return y, n + 1, jax.random.fold_in(key, 1), ~flag

    args = (
        X[:, 0],
        jnp.arange(5),
        jax.random.split(jax.random.key(0), 5),
        X[:, 1] > 0,
    )
    total = lambda f: jax.grad(lambda x: f(x, *args[1:])[0].sum())(args[0])
    near(total(el.ChunkedVmap(f, 2)), total(jax.vmap(f)))


@pytest.mark.parametrize("which", [0, 1])
def test_one_output_of_two_with_stored_residuals(which):
    f = lambda x: (jnp.sin(x), jnp.cos(x))
    chunked = el.ChunkedVmap(f, 2, policy=el.policies.save_everything)
    found, expected = (
        jax.grad(lambda x, g=g: jnp.sum(g(x)[which]))(jnp.arange(5.0))
        for g in (chunked, f)
    )
    near(found, expected)


@pytest.mark.parametrize(
    "transform",
    [lambda f: el.ChunkedVmap(f, 3), lambda f: el.Map(f, batch_size=3)],
    ids=["ChunkedVmap", "Map"],
)
def test_collectives_along_an_axis_outside(transform):
    def normalised(x):
        i = jax.lax.axis_index("batch").astype(x.dtype)
        return x * i - jax.lax.pmean(x, "batch") ** 2

    def both(f):
        outer = jax.vmap(f, axis_name="batch")
        per_example = jax.vmap(jax.grad(lambda x: f(x).sum()), axis_name="batch")
        return (
            outer(stacks),
            jax.grad(lambda x: jnp.sum(outer(x) ** 2))(stacks),
            per_example(stacks),
        )

    # The chunk that remains is another one, and is traced later.
    stacks = jnp.sin(jnp.arange(42.0)).reshape(2, 7, 3)
    chunked = transform(normalised)
    found, expected = jax.jit(lambda: (both(chunked), both(jax.vmap(normalised))))()
    near(found, expected)


def test_in_shard_map():
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(AxisType.Auto,))
    x = jnp.sin(jnp.arange(60.0)).reshape(20, 3)

    def total(f):
        local = lambda w, x: jax.lax.psum(jnp.sum(f(w, x) ** 2), "rows")
        specs = (PartitionSpec(), PartitionSpec("rows"))
        return jax.shard_map(
            local, mesh=mesh, in_specs=specs, out_specs=PartitionSpec()
        )

    def derivatives(f):
        grad = jax.grad(total(f), (0, 1))
        return grad(W, x), jax.jvp(grad, (W, x), (W, x))[1]

    found, expected = jax.jit(
        lambda: (derivatives(CHUNKED["a shorter one"]), derivatives(whole))
    )()
    near(found, expected)


# A perceptron that is wide enough for the memory of its rows to stand out.

MLP = without_key(eqx.nn.MLP, 4, 2, 64, 2, jax.nn.silu)


def temporary(derive, f, rows):
    """The bytes that a compiled derivative takes beside its inputs and outputs."""
    arrays, static = eqx.partition(MLP, eqx.is_array)
    program = derive(lambda arrays, x: jnp.sum(f(eqx.combine(arrays, static), x) ** 2))
    return temp_bytes(program, arrays, (rows, 4))


def chunked(mlp, x):
    return el.ChunkedVmap(mlp, 32)(x)


DERIVATIVES = {
    "grad of both": lambda f: jax.grad(f, (0, 1)),
    "forward over reverse": lambda f: lambda *args: jax.jvp(jax.grad(f), args, args)[1],
    "reverse over reverse": lambda f: jax.grad(
        lambda *args: sum(jnp.sum(g**2) for g in jax.tree.leaves(jax.grad(f)(*args)))
    ),
}


@pytest.mark.parametrize(
    "derive",
    slow_if(lambda f: f is not DERIVATIVES["grad of both"], DERIVATIVES.values()),
    ids=DERIVATIVES,
)
def test_memory_is_that_of_a_chunk_whatever_the_number_of_rows(derive):
    few, many = (temporary(derive, chunked, rows) for rows in (133, 2048))
    of_rows = 4 * 4 * 2048  # arrays as large as the arguments and results
    assert many < few + 4 * of_rows
    assert many < temporary(derive, lambda f, x: jax.vmap(f)(x), 2048) / 5


def test_nothing_is_done_for_what_is_not_differentiated():
    text = lambda argnums: (
        jax.jit(jax.grad(loss(CHUNKED["row by row"]), argnums)).lower(W, X).as_text()
    )
    products = text(1).count("dot_general")
    assert text((0, 1)).count("dot_general") > products


def test_forward_mode_evaluates_the_primal_once():
    push = lambda x: jax.jvp(el.ChunkedVmap(jnp.cumsum, 2), (x,), (x,))
    text = jax.jit(push).lower(X[:4]).as_text()
    plain = jax.jit(lambda x: jax.jvp(jax.vmap(jnp.cumsum), (x,), (x,))).lower(X[:4])
    assert text.count("reduce_window") == plain.as_text().count("reduce_window")


def test_a_policy_stores_values_of_all_rows():
    rows = 2045

    def program(policy):
        f = lambda mlp, x: el.ChunkedVmap(mlp, 32, policy=policy)(x)
        return temporary(jax.grad, f, rows)

    hidden = 4 * 64 * rows  # the bytes of one layer of hidden units
    assert program("save_dots") > program(None) + 1.5 * hidden
    assert program("save_nothing") < program(None) + hidden


def test_what_a_policy_stores_is_not_computed_again():
    def products(policy):
        f = lambda mlp, x: el.ChunkedVmap(mlp, 3, policy=policy)(x)
        grad = eqx.filter_jit(eqx.filter_grad(lambda mlp, x: jnp.sum(f(mlp, x) ** 2)))
        return grad.lower(MLP, jnp.ones((9, 4))).as_text().count("dot_general")

    assert products("save_dots") == products(None) - 2  # no need of the last layer's
    assert products(el.policies.save_dots) == products("dots_saveable")
