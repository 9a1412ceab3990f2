"""What each pass does, and what it leaves alone."""

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

import eqloop as el
from eqloop import ir
from eqloop._compat import form_of
from eqloop._programs import equations
from eqloop.ir._atoms import count_equations

from ..asserts import assert_close

X = jnp.linspace(-1.0, 1.0, 3)


def names(jaxpr):
    """The operations, those inside of others after these."""
    return [form_of(eqn) for eqn in equations(jaxpr)]


def run(passed, f, *args):
    jaxpr = jax.make_jaxpr(f)(*args)
    new = passed(jaxpr)
    jex.check_jaxpr(new.jaxpr)
    return new


# Constant folding.


def test_what_depends_on_no_input_is_computed():
    table = np.arange(3.0, dtype=np.float32)
    new = run(ir.constant_fold, lambda x: x * jnp.sum(jnp.sin(table)), X)
    assert names(new) == ["mul"]
    (eqn,) = new.eqns
    np.testing.assert_allclose(eqn.invars[1].val, np.sin(table).sum(), rtol=1e-6)


@pytest.mark.parametrize("size", [1024, 1025])
def test_what_is_large_is_not_computed(size):
    new = run(ir.constant_fold, lambda x: x * jnp.sin(jnp.arange(size * 1.0)).sum(), X)
    assert ("sin" in names(new)) == (size > 1024)


def test_a_loop_is_not_run():
    f = lambda x: x * lax.fori_loop(0, 10**9, lambda _, c: c + 1.0, jnp.float32(0))
    assert "scan" in names(run(ir.constant_fold, f, X))


def test_what_is_cheaper_computed_stays():
    f = lambda x: x + jnp.arange(3.0) + jnp.zeros(3)
    assert {"iota", "broadcast_in_dim"} <= set(names(run(ir.constant_fold, f, X)))


def test_constants_are_carried_into_calls_branches_and_loops():
    scaled = jax.jit(lambda x, n: x * (n + 1.0))

    def f(x):
        y = scaled(x, 2.0)
        y, _ = lax.scan(lambda c, _: (scaled(c, 3.0), None), y, length=2)
        return lax.cond(y[0] > 0, lambda y, n: y * n, lambda y, n: y, y, 2.0)

    new = run(ir.optimize, f, X)
    assert "add" not in names(new)
    np.testing.assert_allclose(jex.jaxpr_as_fun(new)(X)[0], f(X), rtol=1e-6)


def test_a_branch_that_is_known_replaces_the_choice():
    f = lambda x: lax.switch(jnp.array(7), [jnp.cos, jnp.sin], x)
    assert names(run(ir.optimize, f, X)) == ["sin"]


def test_what_this_device_does_not_have_stays():
    precision = lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32

    def f(x):
        return x * lax.dot(np.ones(3, "f"), np.ones(3, "f"), precision=precision)

    assert "dot_general" in names(run(ir.constant_fold, f, X))


def test_random_bits_and_keys_stay():
    f = lambda x: x + jax.random.uniform(jax.random.key(0))
    assert {"random_seed", "random_bits"} <= set(names(run(ir.constant_fold, f, X)))


def test_weak_types_are_kept():
    weak = jnp.asarray(2.0)
    assert weak.weak_type
    for x in (jnp.float16(1), jnp.asarray(1.0)):
        jaxpr = jax.make_jaxpr(lambda x: (x * (weak * 3), weak * 3))(x)
        assert ir.constant_fold(jaxpr).out_avals == jaxpr.out_avals


def test_constants_that_are_traced_are_no_constants():
    @jax.jit
    def outer(c):
        jaxpr = jax.make_jaxpr(lambda x: x * jnp.sin(c))(X)
        return jex.jaxpr_as_fun(ir.optimize(jaxpr))(X)[0]

    np.testing.assert_allclose(outer(2.0), X * np.sin(2.0), rtol=1e-6)


def test_debugging_nans_does_not_run_into_those_that_are_never_computed():
    f = lambda x: lax.cond(x[0] > 0, lambda x: x * jnp.log(jnp.float32(-1)), abs, x)
    jaxpr = jax.make_jaxpr(f)(X)
    with jax.debug_nans(True):
        assert "log" in names(ir.constant_fold(jaxpr))


# Algebra.


COUNTS = jnp.arange(3)
KEPT = {
    "x + 0.0": (lambda x: x + 0.0, X),
    "0.0 - x": (lambda x: 0.0 - x, X),
    "x - (-0.0)": (lambda x: x - (-0.0), X),
    "x * 0.0": (lambda x: x * 0.0, X),
    "x - x": (lambda x: x - x, X),
    "x / x": (lambda x: x / x, X),
    "complex * 1": (lambda x: x * 1, lax.complex(X, 0 * X)),
    "complex / 1": (lambda x: x / 1, lax.complex(X, 0 * X)),
    "0.0 or -0.0": (lambda x: x - jnp.array([0.0, -0.0, 0.0]), X),
    "narrower and back": (lambda x: x.astype("float16").astype("float32"), X),
    "float to int and back": (lambda x: x.astype(int).astype("float32"), X),
    "other float16": (lambda x: x.astype("bfloat16").astype("float16"), X.astype("e")),
    "1 / x": (lambda x: 1 / x, X),
    "8 bits and back": (
        lambda x: x.astype("float32").astype("float8_e4m3fn"),
        X.astype("float8_e4m3fn"),
    ),
    "dequantized": (
        lambda x: x.astype("float32").astype("float16"),
        X.astype("float8_e5m2"),
    ),
    "whether small numbers are zero": (
        lambda x: lax.convert_element_type(x.astype("float32"), bool),
        X.astype("bfloat16"),
    ),
    "sign of a complex sign": (lambda x: jnp.sign(jnp.sign(x)), lax.complex(X, X)),
    "beyond the last case": (lambda x: lax.select_n(jnp.int32(5), x, -x), X),
    "before the first": (lambda x: lax.select_n(jnp.full(3, -1), x, -x), X),
    "no case for some": (lambda i: lax.select_n(i, COUNTS, COUNTS), COUNTS),
}
SIMPLIFIED = {
    "x * 1.0": (lambda x: x * 1.0, X),
    "1.0 * x": (lambda x: 1.0 * x, X),
    "x * ones": (lambda x: x * jnp.ones(3), X),
    "x / 1.0": (lambda x: x / 1.0, X),
    "x - 0.0": (lambda x: x - 0.0, X),
    "x + -0.0": (lambda x: x + -0.0, X),
    "i + 0": (lambda i: i + 0, COUNTS),
    "i * 1": (lambda i: i * 1, COUNTS),
    "i ^ 0": (lambda i: i ^ 0, COUNTS),
    "i << 0": (lambda i: i << 0, COUNTS),
    "i & i": (lambda i: i & i, COUNTS),
    "max(x, x)": (lambda x: jnp.maximum(x, x), X),
    "--x": (lambda x: jnp.negative(-x), X),
    "~~i": (lambda i: jnp.invert(~i), COUNTS),
    "x ** 1": (lambda x: lax.integer_pow(x, 1), X),
    "pow(x, 1.0)": (lambda x: lax.pow(x, 1.0), X),
    "select": (lambda x: lax.select(x > 0, x, x), X),
    "known select": (lambda x: lax.select(jnp.ones(3, bool), x, -x), X),
    "transposes": (lambda x: lax.transpose(x.T, (1, 0)), jnp.ones((2, 3))),
    "reshapes": (lambda x: x.reshape(2, 3).reshape(6), jnp.ones(6)),
    "reversed twice": (lambda x: x[::-1][::-1], X),
    "wider and back": (lambda x: x.astype("float32").astype("float16"), X.astype("e")),
    "integers": (lambda x: x.astype("int32").astype("int8"), COUNTS.astype("int8")),
    "wider and narrower": (
        lambda i: i.astype("uint8").astype("uint32").astype("uint16").astype("uint8"),
        COUNTS.astype("uint8"),
    ),
    "known case": (lambda x: lax.select_n(jnp.full(3, 2), -x, 2 * x, x), X),
    "real part": (lambda x: lax.complex(x, x).real, X),
}


@pytest.mark.parametrize("identity", KEPT)
def test_what_is_no_identity_stays(identity):
    f, x = KEPT[identity]
    jaxpr = jax.make_jaxpr(f)(x)
    assert count_equations(ir.optimize(jaxpr)) == count_equations(jaxpr)


@pytest.mark.parametrize("identity", SIMPLIFIED)
def test_identities(identity):
    f, x = SIMPLIFIED[identity]
    passes = [ir.simplify_algebra, ir.propagate_copies, ir.eliminate_dead_code]
    new = run(lambda jaxpr: ir.optimize(jaxpr, passes), f, x)
    assert new.jaxpr.outvars == new.jaxpr.invars
    assert not new.eqns


# Copies.


def test_copies_are_read_through():
    def f(x):
        y = jnp.copy(x.reshape(3)).astype(x.dtype)
        return jnp.sin(jnp.squeeze(y, ())[0:3])

    assert names(run(ir.propagate_copies, f, X)) == ["sin"]


def test_what_calls_and_loops_hand_on_is_read_through():
    def f(x, y):
        x, one = jax.jit(lambda x: (x, 1.0))(x)
        (x, n), _ = lax.scan(lambda c, _: ((c[0], c[1] + 1), None), (x, 0), None, 2)
        x, y = lax.cond(n > 0, lambda x, y: (x, y), lambda x, y: (x, -y), x, y)
        return jnp.sin(x) * one, y

    new = run(ir.propagate_copies, f, X, X)
    sine = next(eqn for eqn in new.eqns if eqn.primitive.name == "sin")
    assert sine.invars == new.jaxpr.invars[:1]


# Common subexpressions.


def test_the_same_is_computed_once():
    f = lambda x: jnp.sin(x) * 2.0 + jnp.sin(x) * 2.0
    new = run(ir.eliminate_common_subexpressions, f, X)
    assert names(new) == ["sin", "mul", "add"]


def test_the_order_of_a_sum_does_not_matter():
    f = lambda x, y: (x + y, y + x, x - y, y - x)
    new = run(ir.eliminate_common_subexpressions, f, X, X)
    assert names(new) == ["add", "sub", "sub"]


def test_the_order_of_a_complex_product_matters():
    f = lambda x, y: (x * y, y * x, x + y, y + x)
    z = lax.complex(X, X)
    new = run(ir.eliminate_common_subexpressions, f, z, z)
    assert names(new) == ["mul", "mul", "add"]


def test_what_differs_in_a_detail_stays():
    f = lambda x: (x + 0.0, x + -0.0, jnp.sum(x[None], 0), jnp.sum(x[None], 1))
    jaxpr = jax.make_jaxpr(f)(X)
    new = ir.eliminate_common_subexpressions(jaxpr)
    assert [n for n in names(new) if n in ("add", "reduce_sum")] == [
        "add",
        "add",
        "reduce_sum",
        "reduce_sum",
    ]


def test_constants_that_print_alike_stay():
    one, other = np.zeros((2, 512), np.float32), np.zeros((2, 512), np.float32)
    other[0, 200] = 1e-9
    g = jax.jit(lambda x: (x * one, x * other, x * one.copy()))
    new = ir.optimize(ir.inline_jit(jax.make_jaxpr(g)(X[0])))
    assert names(new) == ["mul", "mul"]
    outs = jex.jaxpr_as_fun(new)(jnp.float32(2))
    for out, held in zip(outs, (one, other, one), strict=True):
        np.testing.assert_array_equal(out, 2 * held)


def test_calls_of_one_function_are_merged_and_stay_shared():
    g = jax.jit(lambda x: jnp.sin(x * 1.0))
    f = lambda x, y: (g(x), g(x), g(y))
    new = run(ir.optimize, f, X, X)
    assert names(new) == ["jit", "sin", "jit", "sin"]
    assert new.eqns[0].params["jaxpr"] is new.eqns[1].params["jaxpr"]


def test_what_is_computed_twice_on_purpose_stays():
    sine = jax.checkpoint(jnp.sin)
    assert names(run(ir.optimize, lambda x: sine(x) + sine(x), X)).count("sin") == 2
    twice = jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))
    jaxpr = jax.make_jaxpr(jax.value_and_grad(twice))(1.0)
    # Two in the forward pass, and one that is computed again.
    assert names(ir.optimize(jaxpr)).count("sin") == 3
    barrier = lambda x: lax.optimization_barrier(x) + lax.optimization_barrier(x)
    assert names(run(ir.optimize, barrier, X)).count("optimization_barrier") == 2


# Dead code.


def test_dead_code_goes_from_loops_branches_and_calls():
    def f(x):
        unused = jnp.exp(x)
        (y, _), (ys, _) = lax.scan(
            lambda c, x: ((c[0] + x, c[1] * jnp.tan(x)), (c[0], jnp.cos(x))),
            (0.0, 1.0),
            x,
        )
        state = lax.while_loop(
            lambda c: c[0] < 3.0, lambda c: (c[0] + 1, c[1] * 2, c[1] + c[2]), (y, x, x)
        )
        z, _ = lax.cond(y > 0, lambda x: (x, jnp.log(x)), lambda x: (x, x), x)
        return state[0], ys, jax.jit(lambda x, y: (x * 2, jnp.tanh(y)))(z, unused)[0]

    gone = {"exp", "tan", "cos", "log", "tanh"}
    assert gone <= set(names(jax.make_jaxpr(f)(X)))
    new = run(ir.eliminate_dead_code, f, X)
    assert gone.isdisjoint(names(new))
    loop = next(eqn for eqn in new.eqns if eqn.primitive.name == "while")
    assert len(loop.outvars) == 1 or jax.__version_info__ < (0, 12)
    for found, expected in zip(jex.jaxpr_as_fun(new)(X), f(X), strict=True):
        np.testing.assert_allclose(found, expected)


def test_unused_constants_go():
    table = np.ones(100)

    def f(x):
        jnp.asarray(table) * x[0]
        return x

    assert not run(ir.eliminate_dead_code, f, X).consts


# What all of them keep.


def test_effects_stay_in_their_order():
    def f(log):
        def note(i):
            io_callback(log, None, i, ordered=True)
            return i * 1

        def g(x):
            note(jnp.int32(0))
            jax.debug.callback(lambda: None)
            _, ys = lax.scan(lambda c, i: (c, note(i)), x, jnp.arange(1, 4))
            n = lax.cond(x[0] > 0, note, lambda i: note(i + 10), jnp.int32(4))
            jax.jit(note)(jnp.int32(5) + 0)
            jax.jit(note)(jnp.int32(5) + 0)
            return ys, n

        return g

    seen = [], []
    for log, wrap in zip(seen, (lambda f: f, ir.Optimize), strict=True):
        jax.jit(wrap(f(lambda i: log.append(int(i)))))(X)  # noqa: B023
        jax.effects_barrier()
    assert seen[0] == [0, 1, 2, 3, 14, 5, 5]
    assert seen[1] == seen[0]


def test_references_are_read_and_written_as_before():
    def f(x):
        ref = jax.new_ref(x)
        before = ref[...]
        ref[...] = before * 1.0 + x
        jax.jit(lambda: ref.__setitem__(..., ref[...] * 2))()
        return before, ref[...], ref[...]

    for passed in (ir.optimize, lambda j: ir.optimize(ir.inline_jit(j))):
        found = jex.jaxpr_as_fun(passed(jax.make_jaxpr(f)(X)))(X)
        np.testing.assert_allclose(found[0], X)
        np.testing.assert_allclose(found[1], 4 * X)


@jax.custom_jvp
def straight(x):
    return jnp.round(x) * 1.0


@straight.defjvp
def _(primals, tangents):
    return straight(*primals), tangents[0]


def test_derivatives_of_ones_own_are_kept():
    f = ir.Optimize(lambda x: jnp.sum(straight(x) * X + straight(x) * X))
    np.testing.assert_allclose(jax.grad(f)(X), 2 * X, rtol=1e-6)


def test_inside_this_librarys_loops():
    @el.CheckpointedScan(base=2)
    def loop(c, x):
        return jnp.sin(c * 1.0 + x), jnp.sin(c * 1.0 + x)

    jaxpr = jax.make_jaxpr(lambda x: loop(x[0], x))(X)
    new = ir.optimize(jaxpr)
    assert count_equations(jaxpr) - count_equations(new) == 4
    losses = [lambda x, j=j: jex.jaxpr_as_fun(j)(x)[0] for j in (new, jaxpr)]
    found, expected = (jax.value_and_grad(loss)(X) for loss in losses)
    assert_close(found, expected, rtol=1e-7, atol=0)


def test_inside_shard_map():
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("i",), axis_types=auto)
    spec = jax.sharding.PartitionSpec("i")

    @jax.jit
    def f(x):
        def local(x):
            one = jnp.sin(jnp.float32(0)) + 1.0
            return (x * one + lax.psum(x, "i")) * 1.0 + lax.axis_index("i").astype(
                x.dtype
            )

        return jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)(x)

    x = jnp.arange(4.0)
    jaxpr = jax.make_jaxpr(f)(x)
    new = ir.optimize(jaxpr)
    assert count_equations(new) < count_equations(jaxpr)
    np.testing.assert_allclose(jex.jaxpr_as_fun(new)(x)[0], f(x))
