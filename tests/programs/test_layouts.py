"""Programs in the layouts of a CPU compute what they computed."""

import functools
import random

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from eqloop._programs import _layouts
from eqloop._programs._layouts import laid_out


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    # The tests run with several devices, among which products would be left alone, and
    # their convolutions are so small that they would be.
    monkeypatch.setattr(_layouts, "_is_alone", lambda: True)
    monkeypatch.setattr(_layouts, "_gains", lambda eqn: True)


def program_of(f, *args):
    return jax.make_jaxpr(f)(*args)


def operations(program):
    return [eqn.primitive.name for eqn in program.jaxpr.eqns]


def numbers(shape, seed, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def assert_same(f, *args, rtol=1e-5):
    program = program_of(f, *args)
    ours = laid_out(program)
    assert ours.in_avals == program.in_avals
    assert [a.str_short() for a in ours.out_avals] == [
        a.str_short() for a in program.out_avals
    ]
    run = lambda p: jax.jit(jex.jaxpr_as_fun(p))(*args)
    for a, b in zip(run(ours), run(program), strict=True):
        a, b = (np.asarray(x, np.complex128) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol, rtol * max(1, np.abs(b).max(initial=0)))
    return ours


def convolution(seed):
    """A convolution in any layout, with any parameters."""
    choose = random.Random(seed)
    space = choose.choice((1, 2, 2, 2, 3))
    groups, batches = choose.choice(((1, 1), (1, 1), (2, 1), (1, 2)))
    ins, outs, batch = choose.choice((1, 3)) * groups, 2 * groups * batches, 2 * batches
    many = lambda low, high: tuple(choose.randint(low, high) for _ in range(space))
    sizes, window = many(5, 7), many(1, 3)
    spec = lambda: tuple(choose.sample(range(space + 2), space + 2))
    numbers_of = lax.ConvDimensionNumbers(spec(), spec(), spec())

    def placed(spec, first, second, others):
        shape = [0] * (space + 2)
        for at, size in zip(spec, (first, second, *others), strict=True):
            shape[at] = size
        return tuple(shape)

    params = dict(
        window_strides=many(1, 2),
        padding=[(a, b) for a, b in zip(many(-1, 2), many(0, 2), strict=True)],
        lhs_dilation=many(1, 2),
        rhs_dilation=many(1, 2),
        dimension_numbers=numbers_of,
        feature_group_count=groups,
        batch_group_count=batches,
    )
    x = numbers(placed(numbers_of.lhs_spec, batch, ins, sizes), seed)
    w = numbers(placed(numbers_of.rhs_spec, outs, ins // groups, window), seed + 1)
    return functools.partial(lax.conv_general_dilated, **params), x, w


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(12))
def test_a_convolution_in_any_layout_and_its_derivatives(seed):
    f, x, w = convolution(seed)
    assert_same(f, x, w)
    loss = lambda x, w: jnp.sum(jnp.sin(f(x, w)))
    gradient = jax.grad(loss, (0, 1))
    assert_same(gradient, x, w, rtol=1e-4)
    second = lambda x, w: jax.vjp(gradient, x, w)[1]((x, w))
    assert_same(second, x, w, rtol=1e-3)


def product(seed):
    """A product of two arrays, transposed before and behind."""
    choose = random.Random(seed)
    batch, contracted = choose.choice(((0, 1), (0, 1), (0, 2), (1, 1), (2, 1), (0, 0)))
    own = choose.randint(0, 2), choose.randint(0, 2)
    names = [f"b{i}" for i in range(batch)], [f"c{i}" for i in range(contracted)]
    sizes, sides = {}, []
    for side, count in enumerate(own):
        every = [*names[0], *names[1], *[f"{side}{i}" for i in range(count)]]
        sides.append(choose.sample(every, len(every)))
        sizes |= {name: choose.randint(2, 4) for name in every if name not in sizes}
    at = lambda side, group: tuple(map(side.index, group))
    dims = tuple(
        tuple(at(side, group) for side in sides) for group in (names[1], names[0])
    )
    count = batch + sum(own)
    orders = [choose.sample(range(len(side)), len(side)) for side in sides]
    behind = choose.sample(range(count), count)

    def f(a, b):
        a, b = (x.transpose(order) for x, order in zip((a, b), orders, strict=True))
        return jnp.sin(lax.dot_general(a, b, dims).transpose(behind))

    shapes = [
        [sizes[side[i]] for i in np.argsort(order)]
        for side, order in zip(sides, orders, strict=True)
    ]
    return f, *(numbers(shape, seed + i) for i, shape in enumerate(shapes))


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(30))
def test_a_product_with_transpositions_around_it(seed):
    f, a, b = product(seed)
    assert_same(f, a, b)
    assert_same(jax.grad(lambda a, b: jnp.sum(f(a, b)), (0, 1)), a, b, rtol=1e-4)


def test_transpositions_are_folded_into_products():
    w, h, x = numbers((3, 4), 0), numbers(4, 1), numbers((5, 4), 2)
    step = lambda w, h: w.T @ (w @ h)
    assert operations(assert_same(step, w, h)) == ["dot_general", "dot_general"]
    spread = lambda w, x: jnp.einsum("ij,bj->bi", w, x)
    for f in (spread, lambda w, x: (w @ x.T).T):
        assert operations(assert_same(f, w, x)) == ["dot_general"]


def test_what_is_as_it_should_be_is_the_very_same():
    program = program_of(lambda w, x: jnp.tanh(x @ w), jnp.ones((3, 3)), jnp.ones(3))
    assert laid_out(program) is program
    program = program_of(lambda x: x.T + 1, jnp.ones((3, 2)))
    assert laid_out(program) is program
    last = ("NHWC", "HWIO", "NHWC")
    f = lambda x, w: lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=last
    )
    program = program_of(f, jnp.ones((2, 8, 8, 3)), jnp.ones((3, 3, 3, 4)))
    assert laid_out(program) is program


def conv(x, w):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME")


def pooled(x):
    window = (1, 1, 2, 2)
    return lax.reduce_window(x, -jnp.inf, lax.max, window, window, "VALID")


# Images, kernels, and whether the library is the faster one.
GAINS = {
    "sixteen features": ((4, 16, 32, 32), (16, 16, 3, 3), True),
    "a stencil": ((1, 1, 64, 64), (1, 1, 3, 3), False),
    "a small image": ((1, 4, 8, 8), (4, 4, 3, 3), False),
    "its first layer": ((8, 3, 32, 32), (16, 3, 3, 3), True),
    "in one dimension": ((4, 8, 256), (8, 8, 3), True),
    "in three": ((1, 2, 16, 16, 16), (2, 2, 3, 3, 3), False),
    "two groups": ((4, 16, 16, 16), (16, 8, 3, 3), True),
    "a group for each feature": ((4, 16, 16, 16), (16, 1, 3, 3), False),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("case", GAINS)
def test_a_loop_of_xla_is_left_where_it_is_faster(case, dtype, monkeypatch):
    monkeypatch.undo()
    image, kernel, gains = GAINS[case]
    f = lambda x, w: lax.conv_general_dilated(
        x,
        w,
        (1,) * (len(image) - 2),
        "SAME",
        feature_group_count=image[1] // kernel[1],
    )
    with jax.enable_x64(dtype == "float64"):
        types = (jax.ShapeDtypeStruct(shape, dtype) for shape in (image, kernel))
        program = program_of(f, *types)
    assert (laid_out(program) is not program) == (gains and dtype == "float32")


BETWEEN = {
    "elementwise": lambda x: jnp.tanh(x) * jax.nn.relu(x) + jax.nn.silu(x),
    "a bias": lambda x: x + jnp.arange(4.0)[None, :, None, None],
    "another": lambda x: x * numbers(x.shape, 7),
    "split": lambda x: jnp.concatenate(jnp.split(x, 2, 1)[::-1], 1),
    "slices": lambda x: jnp.concatenate([x[:, 2:], x[:, :2, ::-1]], 1),
    "mean": lambda x: x - x.mean((0, 2, 3), keepdims=True),
    "norm": lambda x: x / (1 + x.std(1, keepdims=True)),
    "pool": lambda x: jnp.repeat(jnp.repeat(pooled(x), 2, 2), 2, 3),
    "pad": lambda x: jnp.pad(x, ((0, 0), (0, 0), (1, 1), (0, 2)))[:, :, 2:, 1:-1],
    "reshape": lambda x: x.reshape(2, 2, 2, 6, 6).swapaxes(1, 2).reshape(x.shape),
    "where": lambda x: jnp.where(x > 0, x, x[:, ::-1]),
    "a branch": lambda x: lax.cond(x.sum() > 0, lambda x: x, lambda x: -x, x),
    "types": lambda x: x.astype(jnp.float16).astype(jnp.float32),
    "a loop": lambda x: lax.fori_loop(0, 2, lambda _, x: jnp.sin(x), x),
    "transposed": lambda x: x.transpose(0, 1, 3, 2),
    "sorted": lambda x: jnp.sort(x, 1),
}


@pytest.mark.sampled
@pytest.mark.parametrize("case", BETWEEN)
def test_what_lies_between_two_convolutions(case):
    between = BETWEEN[case]
    f = lambda x, w: conv(between(conv(x, w)), w)
    x, w = numbers((2, 4, 6, 6), 0), numbers((4, 4, 3, 3), 1) / 6
    assert_same(f, x, w, rtol=1e-4)
    assert_same(jax.grad(lambda x, w: jnp.sum(f(x, w) ** 2), (0, 1)), x, w, rtol=1e-3)


def test_between_convolutions_nothing_is_transposed():
    f = lambda x, w: conv(jax.nn.relu(conv(x, w)) + conv(x, w), w)
    ours = assert_same(f, numbers((2, 4, 6, 6), 0), numbers((4, 4, 3, 3), 1))
    # The image and the kernel once, and the result.
    assert operations(ours).count("transpose") == 3


def test_outputs_that_are_known():
    xs, w = numbers((3, 2, 4, 6, 6), 0), numbers((4, 4, 3, 3), 1) / 6
    f = lambda xs, w: lax.scan(lambda h, x: (conv(h + x, w), (0.0, x)), xs[0], xs)
    assert_same(f, xs, w)
    assert_same(lambda x, w: (conv(x, w), 1.0, x), xs[0], w)


def test_what_is_placed_lies_as_it_is_written():
    x, w = numbers((2, 4, 6, 6), 0), numbers((4, 4, 3, 3), 1)
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("rows"))
    f = lambda x, w: jnp.sin(lax.with_sharding_constraint(conv(x, w), rows))
    ours = laid_out(program_of(f, x, w))
    (eqn,) = (e for e in ours.jaxpr.eqns if e.primitive.name == "sharding_constraint")
    assert eqn.invars[0].aval.shape == (2, 4, 6, 6)
    assert operations(ours).count("transpose") == 3


def inner(program, name):
    """The operations in the body of a loop in a program."""
    (loop,) = (eqn for eqn in program.jaxpr.eqns if eqn.primitive.name == name)
    return operations(loop.params["jaxpr" if name == "scan" else "body_jaxpr"])


def test_kernels_are_transposed_before_a_scan():
    xs, w = numbers((3, 2, 4, 6, 6), 0), numbers((4, 4, 3, 3), 1) / 6
    f = lambda xs, w: lax.scan(lambda h, x: (conv(h + x, w), h.sum()), xs[0], xs)
    ours = assert_same(f, xs, w)
    # The image there and back, and the kernel before.
    assert inner(ours, "scan").count("transpose") == 2
    assert operations(ours).count("transpose") == 1
    backwards = lambda xs, w: lax.scan(
        lambda h, x: (w.T @ h + x, w.T), xs[0], xs, reverse=True
    )
    ours = assert_same(backwards, numbers((3, 4), 0), numbers((4, 4), 1))
    assert "transpose" not in inner(ours, "scan")


def test_kernels_are_transposed_before_a_while_loop():
    x, w = numbers((2, 4, 6, 6), 0), numbers((4, 4, 3, 3), 1) / 6
    limit = jnp.float32(1e-3)

    def f(x, w, limit):
        going = lambda s: (s[0] < 3) & (jnp.abs(s[1]).max() > limit)
        move = lambda s: (s[0] + 1, conv(s[1], w) * (1 + limit))
        return lax.while_loop(going, move, (0, x))

    ours = assert_same(f, x, w, limit)
    assert inner(ours, "while").count("transpose") == 2
    nested = lambda x, w, limit: lax.fori_loop(0, 2, lambda i, x: f(x, w, limit)[1], x)
    ours = assert_same(nested, x, w, limit)
    assert operations(ours).count("transpose") == 1
