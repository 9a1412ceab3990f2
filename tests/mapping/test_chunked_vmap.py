"""`ChunkedVmap` against `equinox.filter_vmap`: the same numbers, from fewer rows."""

import collections
import inspect

import equinox as eqx
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import eqloop as el

from ..asserts import assert_close, has_16_bits
from ..loops.trees import DTYPES, advance, array, mean
from ..weights import without_key
from .rows import MATRIX, ROWS, derivatives, layer

pytestmark = pytest.mark.sampled


def row(scale, mapped, shared, static):
    by = jnp.tanh(scale * mean(mapped) + mean(shared))
    return {
        "tree": jax.tree.map(lambda leaf: advance(leaf, by), mapped),
        "by": by,
        "shared": jax.tree.map(lambda leaf: advance(leaf, scale), shared),
        "static": static,
    }


@st.composite
def calls(draw):
    """Arguments of `row` with their axes, the axes of what it returns, and a chunk."""
    rows = draw(st.integers(0, 30) | st.integers(31, 200))
    mapped, in_axes, out_axes = {}, {}, {}
    for name in draw(st.sets(st.sampled_from("abc"), min_size=1)):
        shape = draw(st.lists(st.integers(1, 3), max_size=2))
        in_axes[name] = draw(st.integers(-len(shape) - 1, len(shape)))
        out_axes[name] = draw(st.integers(-len(shape) - 1, len(shape)))
        place = in_axes[name] % (len(shape) + 1)
        shape = (*shape[:place], rows, *shape[place:])
        mapped[name] = array(shape, draw(st.sampled_from(DTYPES)), ord(name))
    shared = [array((2,), draw(st.sampled_from(DTYPES)), 7), "static"]
    args = (jnp.float32(0.3), mapped, shared, draw(st.sampled_from([None, "a", 3])))
    whole = lambda leaf: None
    in_axes = (None, in_axes, draw(st.sampled_from([None, whole])), None)
    out_axes = {
        "tree": out_axes,
        "by": 0,
        "shared": draw(st.sampled_from([None, eqx.if_array(0)])),
        "static": None,
    }
    return args, in_axes, out_axes, draw(st.integers(1, rows + 2))


def check_against_filter_vmap(call, is_by_name):
    """Maps in chunks, at once and of arguments by name: as Equinox, in every mode."""
    args, in_axes, out_axes, chunk_size = call
    by_name = dict(zip(("scale", "mapped", "shared", "static"), in_axes, strict=True))
    axes = {"in_axes": by_name if is_by_name else in_axes, "out_axes": out_axes}
    maps = [
        eqx.filter_vmap(row, in_axes=in_axes, out_axes=out_axes),
        el.ChunkedVmap(row, chunk_size, **axes),
        el.Vmap(row, **axes),
    ]
    compare = lambda *args: [derivatives(f, *args) for f in maps]
    expected, *found = eqx.filter_jit(compare)(*args)
    near = dict(rtol=5e-2, atol=5e-2) if has_16_bits(args) else {}
    for derivative in found:
        assert_close(derivative, expected, **near)


@hypothesis.given(calls(), st.booleans())
@hypothesis.settings(max_examples=2, phases=[hypothesis.Phase.generate])
def test_is_filter_vmap_with_its_derivatives(call, is_by_name):
    check_against_filter_vmap(call, is_by_name)


@pytest.mark.slow
@hypothesis.given(calls(), st.booleans())
@hypothesis.settings(max_examples=150, phases=[hypothesis.Phase.generate])
def test_is_filter_vmap_with_its_derivatives_at_length(call, is_by_name):
    check_against_filter_vmap(call, is_by_name)


@pytest.mark.parametrize(
    ("in_axes", "args"),
    [
        (eqx.if_array(0), (jnp.stack([MATRIX] * 7), ROWS)),
        ((None, 0), (MATRIX, ROWS)),
        ([None, 1], (MATRIX, ROWS.T)),
        ((None, -1), (MATRIX, ROWS.T)),
        ({"matrix": None}, (MATRIX, ROWS)),
        ({"x": -1, "matrix": None}, (MATRIX, ROWS.T)),
        ((lambda leaf: None, eqx.if_array(0)), (MATRIX, ROWS)),
        (1, (jnp.stack([MATRIX] * 7, 1), ROWS.T)),
    ],
)
@pytest.mark.parametrize("out_axes", [0, 1, -2])
def test_axes(in_axes, args, out_axes):
    chunked = el.ChunkedVmap(layer, 3, in_axes=in_axes, out_axes=out_axes)
    expected = jax.vmap(lambda x: layer(MATRIX, x), out_axes=out_axes)(ROWS)
    assert_close(eqx.filter_jit(chunked)(*args), expected)


@pytest.mark.parametrize(
    ("in_axes", "scale"),
    [
        (eqx.if_array(0), jnp.arange(7.0)),
        ({"scale": None}, 2.0),
        ({"scale": None}, jnp.float32(2.0)),
        ({"scale": 1}, jnp.ones((2, 7))),
        ((0,), jnp.arange(7.0)),
    ],
)
def test_keyword_arguments_are_mapped_as_well(in_axes, scale):
    f = lambda x, *, scale: scale * x[:2]
    found = el.ChunkedVmap(f, 3, in_axes=in_axes)(ROWS, scale=scale)
    axis = {0: None, 1: 0, 2: 1}[jnp.ndim(scale)]
    expected = jax.vmap(lambda x, s: f(x, scale=s), (0, axis))(ROWS, scale)
    assert_close(found, expected)


def test_positional_arguments_without_a_name():
    f = lambda *args, **kwargs: sum(args) + kwargs["x"]
    found = el.ChunkedVmap(f, 3)(ROWS, ROWS, x=ROWS)
    assert_close(found, 3 * ROWS)


def test_numpy_arrays_and_python_scalars():
    f = lambda x, y, z: (x + y, y, z)
    x = np.arange(7, dtype=np.float32)
    found = el.ChunkedVmap(f, 3)(x, 2.5, x > 3)
    assert_close(found, (jnp.asarray(x + 2.5), 2.5, jnp.asarray(x > 3)))


def test_a_result_that_is_the_same_for_every_row():
    def f(matrix, x):
        inner = jax.jit(lambda a, b: (a * 2, b @ a[0]))
        doubled, product = inner(matrix, x)
        return {"same": doubled, "each": product, "constant": jnp.ones(2)}

    out_axes = {"same": None, "each": 0, "constant": None}
    found = el.ChunkedVmap(f, 3, in_axes=(None, 0), out_axes=out_axes)
    out = found(MATRIX, ROWS)
    assert_close(out["same"], 2 * MATRIX)
    assert_close(out["constant"], jnp.ones(2))
    assert_close(out["each"], ROWS @ MATRIX[0])
    grad = jax.grad(lambda matrix: jnp.sqrt(found(matrix, ROWS)["same"]).sum())
    # One infinite derivative, not as many as chunks: that would be no number.
    assert_close(grad(jnp.zeros((4, 3))), jnp.full((4, 3), jnp.inf))


def test_a_module_with_its_arrays_shared():
    mlp = without_key(eqx.nn.MLP, 3, 2, 8, 1)
    chunked = el.ChunkedVmap(mlp, 3)
    assert_close(chunked(ROWS), jax.vmap(mlp)(ROWS))
    loss = lambda f: jnp.sum(f(ROWS) ** 2)
    gradient = lambda loss: eqx.filter_jit(eqx.filter_grad(loss))
    found = gradient(loss)(chunked)
    expected = gradient(lambda mlp: loss(jax.vmap(mlp)))(mlp)
    assert_close(found.f, expected)
    assert found.chunk_size == 3


def test_as_a_decorator_and_as_a_method():
    class Model(eqx.Module):
        matrix: jax.Array

        @el.ChunkedVmap(chunk_size=3, in_axes={"bias": None})
        def __call__(self, x, bias):
            """Says what it does."""
            return layer(self.matrix, x) + bias

    model = Model(MATRIX)
    expected = lambda model: jax.vmap(lambda x: layer(model.matrix, x))(ROWS) + 1
    assert_close(model(ROWS, 1.0), expected(model))
    assert_close(model(x=ROWS, bias=jnp.ones(4)), expected(model))
    loss = lambda call: lambda model: jnp.sum(call(model) ** 2)
    found = jax.jit(jax.grad(loss(lambda model: model(ROWS, 1.0))))(model)
    assert_close(found, jax.jit(jax.grad(loss(expected)))(model))


def test_the_signature_is_that_of_f():
    chunked = el.ChunkedVmap(el.Remat(layer), 3, in_axes={"matrix": None})
    assert inspect.signature(chunked) == inspect.signature(layer)
    assert_close(chunked(MATRIX, ROWS), jax.vmap(lambda x: layer(MATRIX, x))(ROWS))


def test_is_a_module_with_static_settings():
    chunked = el.ChunkedVmap(eqx.nn.Identity(), 3, in_axes={"x": [0, None]})
    assert jax.tree.leaves(chunked) == []
    assert chunked == el.ChunkedVmap(eqx.nn.Identity(), 3, in_axes={"x": [0, None]})
    assert chunked != el.ChunkedVmap(eqx.nn.Identity(), 4, in_axes={"x": [0, None]})
    assert repr(chunked).endswith("chunk_size=3, in_axes={'x': [0, None]})")
    assert chunked != el.ChunkedVmap(eqx.nn.Identity(), el.Budget(3))
    assert "save_dots" in repr(el.ChunkedVmap(layer, np.int64(3), policy="save_dots"))


def test_compiles_once_for_modules_that_differ_in_arrays_only():
    traces = []

    @eqx.filter_jit
    def call(f, x):
        traces.append(f)
        return f(x)

    for seed in range(2):
        linear = eqx.nn.Linear(3, 2, key=jax.random.key(seed))
        call(el.ChunkedVmap(linear, 3, in_axes=[0]), ROWS)
    assert len(traces) == 1


def evaluations(f, rows, **settings):
    """How often `f` is evaluated on each of the rows, in order of the rows."""
    seen = collections.Counter()

    def counted(x):
        jax.debug.callback(lambda x: seen.update([int(x)]), x)
        return f(x)

    found = el.ChunkedVmap(counted, **settings)(jnp.arange(rows))
    jax.effects_barrier()
    np.testing.assert_array_equal(found, f(jnp.arange(rows)))
    return [seen.pop(i) for i in range(rows)], seen


@pytest.mark.parametrize(
    ("rows", "chunk_size"),
    [(12, 4), (12, 5), (11, 4), (12, 100), (13, 4), (3, 2), (0, 4)],
)
def test_each_row_is_evaluated_once(rows, chunk_size):
    counts, others = evaluations(jnp.square, rows, chunk_size=chunk_size)
    assert counts == [1] * rows
    assert not others  # no padding


@pytest.mark.parametrize("rows", [10, 12])
def test_f_is_traced_once_and_is_in_the_program_once(rows):
    traces = []

    def f(x):
        traces.append(x.shape)
        return jnp.cumsum(x)  # stands out in a program

    chunked = el.ChunkedVmap(f, 5)
    text = jax.jit(chunked).lower(jnp.ones((rows, 3))).as_text()
    assert traces == [(3,)]
    once = jax.jit(jax.vmap(f)).lower(jnp.ones((5, 3))).as_text()
    assert text.count("reduce_window") == once.count("reduce_window") == 1


def test_a_chunk_that_is_shorter_is_in_the_program_by_itself():
    text = jax.jit(el.ChunkedVmap(jnp.cumsum, 4)).lower(jnp.ones((13, 3)))
    assert text.as_text().count("reduce_window") == 2


def test_no_more_rows_than_asked_for_at_once():
    text = jax.jit(el.ChunkedVmap(jnp.tan, 4)).lower(jnp.ones((13, 5))).as_text()
    results = [line.split("->")[-1] for line in text.splitlines() if "tan" in line]
    assert any("4x5xf32" in result for result in results if "main" not in result)
    tangents = [line for line in text.splitlines() if "tan %" in line]
    assert all("<4x5xf32>" in line or "tensor<5xf32>" in line for line in tangents)
    assert len(tangents) == 2


def test_jaxtyping_annotations_hold():
    from jaxtyping import Array, Float

    def f(x: Float[Array, "n n"]) -> Float[Array, "n"]:
        return x[0]

    el.ChunkedVmap(f, 2)(jnp.ones((5, 3, 3)))
    with pytest.raises(TypeError, match="n n"):
        el.ChunkedVmap(f, 2)(jnp.ones((5, 3, 4)))
