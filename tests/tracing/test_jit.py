"""`Jit` and `Named`: what is compiled, how often, and what it is called."""

import enum

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

import eqloop as el

from ..weights import without_key

X = jnp.arange(3.0)


def test_compiles_once_for_arrays_of_a_type():
    traces = []

    @el.Jit
    def f(tree, power=2, *, scale):
        traces.append(power)
        return {"y": tree["x"] ** power * scale, "name": tree["name"]}

    for x in (X, 2 * X):
        out = f({"x": x, "name": "a"}, scale=3.0)
        np.testing.assert_allclose(out["y"], 3 * x**2)
        assert out["name"] == "a"
    assert traces == [2]
    f({"x": X, "name": "a"}, 3, scale=3.0)
    f({"x": X[:2], "name": "a"}, 3, scale=3.0)
    assert traces == [2, 3, 3]


def test_the_arrays_of_a_module_are_inputs():
    traces = []

    class Scale(eqx.Module):
        by: jax.Array

        def __call__(self, x):
            traces.append(None)
            return self.by * x

        @el.Jit(name="scaled")
        def method(self, x):
            return self(x)

    for by in (2.0, 3.0):
        scale = Scale(jnp.array(by))
        # A new transform each time: the program is shared all the same.
        np.testing.assert_allclose(el.Jit(scale)(X), by * X)
        np.testing.assert_allclose(scale.method(X), by * X)
    assert len(traces) == 2
    gradient = eqx.filter_grad(lambda jit: jnp.sum(jit(X)))(el.Jit(scale))
    np.testing.assert_allclose(gradient.f.by, 3.0)


def module_name(lowered):
    return lowered.as_text().splitlines()[0].split()[1]


def test_names():
    def energy(x, n):
        return jnp.sum(x) * n

    names = {
        "energy": el.Jit(energy),
        "mine": el.Jit(energy, name="mine"),
        "Grad_energy": el.Jit(el.Grad(energy)),
        "Linear": el.Jit(eqx.Partial(without_key(eqx.nn.Linear, 3, 1))),
    }
    for name, jit in names.items():
        lowered = jit.lower(X, n=2) if name != "Linear" else jit.lower(X)
        assert module_name(lowered) == f"@jit_{name}"
        assert f"jit_{name}" in lowered.compile().as_text()


def test_what_is_lowered_is_compiled_and_called_as_the_function():
    f = el.Jit(lambda tree, *, n: {"y": tree["x"] * n, "s": tree["s"]}, name="f")
    compiled = f.lower({"x": X, "s": "static"}, n=2).compile()
    out = compiled({"x": 2 * X, "s": "static"}, n=2)
    np.testing.assert_allclose(out["y"], 4 * X)
    assert out["s"] == "static"
    assert compiled.memory_analysis().output_size_in_bytes >= X.nbytes
    assert compiled.cost_analysis() is not None


@pytest.mark.parametrize(
    ("donate", "gone"),
    [
        ("all", [True, True, True]),
        ("all-except-first", [False, True, True]),
        ("none", [False, False, False]),
    ],
)
def test_donation(donate, gone):
    # Shapes that occur once each, so that it is certain which result takes which.
    arrays = jnp.ones(7), jnp.ones(8), jnp.ones(9)
    add = lambda shift, x, y: (x + 1, y + 1, shift + 1)
    f = el.Jit(eqx.Partial(add, arrays[2]), donate=donate)
    f(*arrays[:2])
    assert [x.is_deleted() for x in arrays] == gone


def test_donation_may_warn():
    with pytest.warns(UserWarning, match="donated buffers were not usable"):
        el.Jit(lambda x: jnp.sum(x).astype(int), donate="warn")(jnp.ones(5))


def test_a_name_stands_before_those_of_operations():
    @el.Named(name="outer")
    def f(x):
        return el.Named(jnp.sin, "inner")(x) * 2

    text = jax.jit(f).lower(X).as_text(debug_info=True)
    assert "outer/inner/sin" in text
    assert "outer/mul" in text
    np.testing.assert_allclose(jax.grad(lambda x: f(x).sum())(X), 2 * jnp.cos(X))


def test_annotations_of_the_function_hold():
    def f(x: Float[Array, "2"]):
        return x

    for transform in (el.Jit(f), el.Named(f, "f")):
        with pytest.raises(TypeError, match="Float"):
            transform(X)


WRONG = {
    "an unknown donation": (
        lambda: el.Jit(jnp.sin, donate="some"),
        ValueError,
        "Jit: `donate` must be one of 'all', .*'none', not 'some'",
    ),
    "an empty name": (lambda: el.Named(jnp.sin, ""), ValueError, "Named: .* is empty"),
    "no name": (lambda: el.Named(jnp.sin), TypeError, "name"),
}


@pytest.mark.parametrize("call", WRONG)
def test_wrong_calls(call):
    run, error, message = WRONG[call]
    with pytest.raises(error, match=message):
        run()


class Kind(enum.Enum):
    A = "a"


class Word(enum.StrEnum):
    A = "a"


class Scaled(eqx.Module):
    by: object = eqx.field(static=True)

    def __call__(self, x):
        return x, repr(self.by)


EQUAL = [
    (2, 2.0),
    (1, True, 1.0),
    (0.0, -0.0),
    (float("nan"), -float("nan")),
    ("a", Word.A, Kind.A),
    ((1,), (1.0,), (True,)),
    (frozenset([1]), frozenset([1.0])),
    (slice(0, 2), slice(False, 2)),
]


@pytest.mark.parametrize("values", EQUAL, ids=str)
@pytest.mark.parametrize("transform", [el.Jit, el.DebugNonFinite, el.EvalShape])
def test_what_is_equal_and_not_the_same_is_another_program(transform, values):
    told = lambda x, value: (x, repr(value))
    run, of_a_field = transform(told), transform(lambda x, scaled: scaled(x))
    for value in (*values, *values):
        assert run(X, {"in": [value]})[1] == repr({"in": [value]})
        assert of_a_field(X, Scaled(value))[1] == repr(value)


@pytest.mark.parametrize("transform", [el.Jit, el.DebugNonFinite, el.EvalShape])
def test_none_in_the_place_of_an_array_is_another_call(transform):
    f = lambda a, b: {"a": a} if b is None else {"b": b}
    run = transform(f)
    assert [list(run(*args)) for args in ((X, None), (None, X))] == [["a"], ["b"]]
    traced = el.Trace(f)
    assert [list(traced(*args).out) for args in ((X, None), (None, X))] == [
        ["a"],
        ["b"],
    ]


def test_types_stand_for_arrays_where_a_program_is_lowered():
    f = el.Jit(lambda tree, *, n: tree["x"] * n)
    lowered = f.lower({"x": jax.ShapeDtypeStruct((3,), jnp.float32)}, n=2)
    np.testing.assert_allclose(lowered.compile()({"x": X}, n=2), 2 * X)
