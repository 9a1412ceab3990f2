"""What Python is written; that it computes the same is shown by the corpus."""

import ast
import functools
import random
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqloop as el
from eqloop import ir
from eqloop.ir.codegen import _derivatives, _handlers, _lines

from ..marks import slow

X = jnp.linspace(-1.0, 1.0, 3)


def execute(text, name):
    namespace = {}
    exec(text, namespace)
    return namespace[name]


def test_a_module_as_it_is_meant_to_read():
    def simulate(params, xs):
        def cell(h, x):
            h = jnp.tanh(params["w"] * h + x)
            return h, h

        return lax.scan(cell, xs[0], xs)

    w, xs = X.astype(jnp.float32), jnp.ones((4, 3), jnp.float32)
    assert (
        ir.to_python(simulate)({"w": w}, xs)
        == '''\
"""`simulate`, as JAX traced it."""

import jax
from jax import lax


@jax.jit
def simulate(params_w, xs):
    """Computes `simulate`.

    Args:
        params_w: `params['w']`, float32[3]
        xs: float32[4,3]

    Returns:
        float32[3], float32[4,3]
    """
    a = lax.slice(xs, (0, 0), (1, 3))
    b = lax.squeeze(a, (0,))

    def cell(c, d):
        e = params_w * c
        f = e + d
        g = lax.tanh(f)
        return g, g

    h, i = lax.scan(cell, b, xs, length=4)
    return h, i
'''
    )


def test_sums_that_are_wider_than_what_is_shared():
    def total(w, xs):
        step = lambda h, x: (h + (w * x).astype(jnp.float32), None)
        return el.Scan(step)(jnp.float32(0), xs)[0]

    w, xs = jnp.ones((), "bfloat16"), jnp.full(600, 0.125, "bfloat16")
    again = execute(ir.to_python(total)(w, xs), "total")
    assert float(jax.grad(again)(w, xs)) == float(jax.grad(total)(w, xs)) == 75


def test_branches_and_loops_are_called_what_they_are():
    def f(x):
        x = lax.cond(x[0] > 0, jnp.sin, lambda x: x * 2, x)
        x = lax.switch(jnp.argmax(x), [jnp.cos, jnp.tan, abs], x)
        return lax.while_loop(lambda x: x[0] < 9, lambda x: x + 1, x)

    text = ir.to_python(f)(X)
    assert "lax.cond(" in text
    assert "def sin(" in text
    assert "def if_false(" in text
    assert "lax.switch(" in text
    assert "lax.while_loop(keep_going, body, " in text
    np.testing.assert_allclose(execute(text, "f")(X), f(X), rtol=1e-6)


def test_a_jaxpr_is_written_under_a_name():
    text = ir.jaxpr_to_python(jax.make_jaxpr(lambda u, v: u - v)(X, X), "difference")
    assert "def difference(u, v):" in text
    np.testing.assert_allclose(execute(text, "difference")(X, 2 * X), -X)


def test_numbers_are_these_very_numbers():
    numbers = np.array([0.1, -0.0, np.inf, -np.inf, np.nan, 1e-40, 3.4e38], np.float32)

    def f(x):
        halves = jnp.array([0.1, 65504], jnp.float16)
        wide = jnp.array([2**32 - 1], jnp.uint32)
        return x + numbers, halves, wide, jnp.array([1 - 0j, complex(-0.0, np.inf)])

    found = execute(ir.to_python(f)(X[0]), "f")(X[0])
    for x, y in zip(found, jax.jit(f)(X[0]), strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "int8"])
def test_larger_constants_are_embedded(dtype):
    table = np.arange(40).reshape(5, 8).astype(jnp.dtype(dtype))
    f = lambda i: jnp.asarray(table)[i]
    text = ir.jaxpr_to_python(jax.make_jaxpr(f)(1))
    assert "base64" in text
    found = execute(text, "f")(3)
    assert found.dtype == table.dtype
    np.testing.assert_array_equal(found, table[3])


def test_64_bits_are_asked_for():
    assert "x64" not in ir.to_python(jnp.sin)(X.astype(jnp.float32))
    with jax.enable_x64(True):
        text = ir.to_python(lambda x: x * 2.0)(jnp.arange(3.0))
    assert 'jax.config.update("jax_enable_x64", True)' in text


def test_derivatives_of_ones_own_are_kept():
    @jax.custom_jvp
    def straight(x, n):
        return jnp.round(x) * n

    @straight.defjvp
    def _(primals, tangents):
        return straight(*primals), tangents[0] * primals[1]

    @jax.custom_vjp
    def backwards(x, n):
        return jnp.sin(x), n

    backwards.defvjp(
        lambda x, n: (backwards(x, n), n), lambda n, ct: (-n * ct[0], None)
    )

    def f(x):
        y, _ = backwards(straight(x, 3), 2)
        return jnp.sum(jax.nn.relu(y) + jax.nn.relu(-y) * x)

    written = execute(ir.to_python(f)(X), "f")
    np.testing.assert_allclose(written(X), f(X), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(written)(X), jax.grad(f)(X), rtol=1e-6)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def power(order, x):
    return x**order


@power.defjvp
def _(order, primals, tangents):
    # Its derivative has a rule again, of another order: there is no last one.
    (x,), (t,) = primals, tangents
    return power(order, x), order * power(order - 1, x) * t


@jax.custom_jvp
def raising(x):
    return jnp.sin(x)


@raising.defjvp
def _(primals, tangents):
    raise RuntimeError("not to be differentiated")


@jax.custom_vjp
def raising_backwards(x):
    return jnp.sin(x)


raising_backwards.defvjp(raising, lambda residuals, ct: raising(ct))


HALF = jnp.asarray(0.5, float)


def derivatives(f, orders):
    """The value at a half, and the derivatives up to an order, compiled together."""
    fs = [f]
    for _ in range(orders):
        fs.append(jax.grad(fs[-1]))
    return jax.jit(lambda x: [f(x) for f in fs])(HALF)


def test_rules_without_end_are_written_up_to_some_order(monkeypatch):
    monkeypatch.setattr(_derivatives, "DEEPEST", 3)
    f = lambda x: power(3, x)
    written = execute(ir.to_python(f)(HALF), "f")
    found, expected = derivatives(written, 3), derivatives(f, 3)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    with pytest.raises(NotImplementedError, match="more than 3 orders are not written"):
        derivatives(written, 5)


@pytest.mark.parametrize(
    ("f", "why"),
    [
        (raising, "RuntimeError: not to be differentiated"),
        (raising_backwards, "has no derivative"),
    ],
)
def test_a_rule_that_raises_does_so_when_it_is_asked_for(f, why):
    written = execute(ir.to_python(lambda x: f(x) * 2)(HALF), "f")
    np.testing.assert_allclose(written(HALF), 2 * np.sin(0.5), rtol=1e-6)
    with pytest.raises(NotImplementedError, match=why):
        jax.grad(written)(HALF)


@pytest.mark.parametrize(
    "f", [jax.scipy.special.log_ndtr, slow(jax.scipy.special.expi)]
)
def test_derivatives_of_special_functions(f):
    written = execute(ir.to_python(lambda x: f(x))(HALF), "f")
    found, expected = derivatives(written, 2), derivatives(f, 2)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_what_jax_expands_by_itself_keeps_its_derivatives():
    def f(x):
        mantissa, exponent = jnp.frexp(x)
        step = lambda f, y: lax.fori_loop(0, 9, lambda _, y: y - f(y) / (3 * y**2), y)
        root = lax.custom_root(
            lambda y: y**3 - x, 1.0, step, lambda g, y: y / g(jnp.ones_like(y))
        )
        return jnp.ldexp(mantissa * x, exponent) + root

    written = execute(ir.to_python(f)(HALF), "f")
    found, expected = derivatives(written, 2), derivatives(f, 2)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_functions_that_are_called_twice_are_written_once():
    text = ir.to_python(lambda x: jax.nn.silu(x) + jax.nn.silu(2 * x))(X)
    assert text.count("def silu(") == 1


def test_what_is_fixed_in_the_call_is_fixed_in_the_module():
    text = ir.to_python(lambda x, n, f: f(x) * n)(X, 3, jnp.cos)
    np.testing.assert_allclose(execute(text, "f")(X), 3 * jnp.cos(X))


@pytest.fixture
def no_handlers(monkeypatch):
    monkeypatch.setattr(_handlers, "_registered", {})


def test_a_handler_of_ones_own(no_handlers):
    def f(x):
        return jax.pure_callback(np.cumsum, x, x) + 1

    with pytest.raises(ValueError, match="register_handler\\('pure_callback'"):
        ir.to_python(f)(X)
    ir.register_handler("pure_callback", lambda eqn, x: f"(jnp.cumsum({x[0]}),)")
    np.testing.assert_allclose(execute(ir.to_python(f)(X), "f")(X), np.cumsum(X) + 1)
    ir.register_handler(jex.primitives.sin_p, lambda eqn, x: f"-lax.sin({x[0]})")
    assert execute(ir.to_python(jnp.sin)(X), "sin")(X)[0] == -jnp.sin(X)[0]


def test_this_librarys_loops_are_written_out():
    f = el.CheckpointedScan(lambda c, x: (c * x, c + x), base=2)
    text = ir.to_python(lambda xs: f(0.5, xs))(X)
    assert "def planned_loop(" in text
    assert "eqloop" not in text


BARS = {
    "scan": lambda x, xs: el.Scan(lambda h, x: (jnp.sin(h * x), None), progress=True)(
        x, xs
    )[0],
    "binomial": lambda x, xs: el.Scan(
        lambda h, x: (jnp.sin(h * x), None), progress=True, schedule=el.Binomial(1)
    )(x, xs)[0],
    "while": lambda x, _: el.BoundedWhileLoop(
        lambda c: c < 1, lambda c: c * 1.5, progress=True, max_steps=5
    )(x),
    "map": lambda x, xs: jnp.sum(
        el.ChunkedVmap(lambda y: jnp.sin(x * y), chunk_size=2, progress=True)(xs)
    ),
}


@pytest.mark.parametrize("name", BARS)
def test_progress_bars_are_left_out(name, capfd):
    f = BARS[name]
    both = jax.jit(lambda x, xs: jax.value_and_grad(f)(x, xs))
    text = ir.jaxpr_to_python(jax.make_jaxpr(both)(HALF, X))
    assert "callback" not in text
    found = jax.block_until_ready(execute(text, "f")(HALF, X))
    assert not capfd.readouterr().err
    expected = both(HALF, X)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    jax.effects_barrier()
    assert "it/s" in capfd.readouterr().err


@pytest.mark.parametrize(
    "f",
    [
        lambda xs: el.DebugNonFinite(BARS["binomial"])(xs[0], xs),
        lambda xs: jax.grad(lambda x: el.DebugNonFinite(BARS["scan"])(x, xs))(xs[0]),
        slow(lambda xs: el.DebugNonFinite(jax.grad(BARS["while"]))(0.4, xs)),
        lambda xs: jax.vmap(el.DebugNonFinite(jnp.sin))(xs),
    ],
    ids=["value", "grad of", "of grad", "vmap"],
)
def test_checks_for_numbers_that_are_not_finite_are_left_out(f):
    text = ir.to_python(f)(X)
    assert "callback" not in text
    np.testing.assert_allclose(execute(text, "f")(X), f(X), rtol=1e-6)


def test_a_condition_for_each_example_is_named_as_before():
    def f(x):
        def is_small(c):
            return c < 9

        def double(c):
            return 2 * c

        return jax.vmap(lambda x: lax.while_loop(is_small, double, x))(x)

    text = ir.to_python(f)(X + 2)
    assert "lax.while_loop(is_small, double, x)" in text
    np.testing.assert_allclose(execute(text, "f")(X + 2), f(X + 2))


def test_an_application_has_its_function_and_no_updates():
    text = ir.to_python(lambda x: x.at[jnp.array([0, 2])].apply(jnp.sin))(X)
    assert "lax.scatter_apply(" in text
    assert "def apply(" in text
    assert "jnp.full" not in text.split("scatter_apply")[0].split("return")[0]


def a_text(draw, depth):
    if depth == 0 or draw.random() < 0.3:
        return "x" * draw.randint(1, 12)
    items = [a_text(draw, depth - 1) for _ in range(draw.randint(0, 5))]
    kind = draw.randint(0, 2)
    if kind == 0:
        return _lines.tuple_of(items)
    if kind == 1:
        return _lines.list_of(items)
    named = {f"k{i}": a_text(draw, depth - 1) for i in range(draw.randint(0, 2))}
    return _lines.call("f" * draw.randint(1, 20), *items, **named)


def test_lines_are_broken_as_ruff_breaks_them(tmp_path):
    ruff = shutil.which("ruff", path=Path(sys.executable).parent) or shutil.which(
        "ruff"
    )
    if ruff is None:
        pytest.skip("ruff is not installed")
    draw = random.Random(0)
    lines = []
    for _ in range(300):
        text = a_text(draw, 4)
        lines += _lines.lines(text, prefix="a = ")
        lines += ["", "", "def f():"]
        node = ast.parse(text, mode="eval").body
        is_bare = isinstance(node, ast.Tuple) and len(node.elts) > 1
        text = text[1:-1] if is_bare else text
        lines += [*_lines.lines(text, indent=1, prefix="return "), "", ""]
    path = tmp_path / "lines.py"
    path.write_text("\n".join(lines).rstrip() + "\n")
    found = subprocess.run(
        [ruff, "format", "--isolated", "--diff", str(path)],
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stdout


def test_a_rule_may_call_a_function_of_the_same_name():
    def named(rule):
        @jax.custom_jvp
        def same(x):
            return jnp.sin(x)

        same.defjvp(
            lambda primals, tangents: (same(*primals), rule(*primals) * tangents[0])
        )
        return same

    inner = named(lambda x: 3.0 * x)
    outer = named(lambda x: inner(x))
    slope = lambda f: jax.grad(jax.grad(lambda x: f(x)))(0.5)
    text = ir.jaxpr_to_python(jax.make_jaxpr(outer)(0.5), "f")
    np.testing.assert_allclose(slope(execute(text, "f")), slope(outer), rtol=1e-6)


def test_types_of_results_are_those_that_were_asked_for(either_width):
    del either_width
    wide = jnp.dtype("float64" if jax.config.jax_enable_x64 else "float32")
    x = jnp.ones((2, 2), jnp.bfloat16)
    numbers = (((1,), (0,)), ((), ()))

    def f(x):
        return lax.dot_general(x, x, numbers, preferred_element_type=wide)

    assert execute(ir.to_python(f)(x), "f")(x).dtype == wide


def test_what_says_how_an_operation_is_computed_is_written():
    highest = lax.AccuracyMode.HIGHEST
    text = ir.to_python(lambda x: lax.sin(x, accuracy=highest))(X)
    assert "lax.sin(x, accuracy=lax.AccuracyMode.HIGHEST)" in text
