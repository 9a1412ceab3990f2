"""What every transform is: a PyTree, a decorator, something to bind in a class."""

import inspect
import io
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqloop as el
from eqloop._calls._transform import AbstractTransform


class Decay(eqx.Module):
    """h -> rate * h + x, with a leaf that is not an array, and a static field."""

    rate: jax.Array
    activation: Any = jnp.tanh
    name: str = eqx.field(default="decay", static=True)

    def __call__(self, h, x):
        return self.activation(self.rate * h + x), None


@pytest.fixture
def scan() -> el.CheckpointedScan:
    return el.CheckpointedScan(Decay(jnp.array([0.5, 0.25])), base=3)


XS = jnp.linspace(-1.0, 1.0, 12).reshape(6, 2)


def final(scan: Any) -> jax.Array:
    return scan(jnp.zeros(2), XS)[0]


def loss(scan: Any) -> jax.Array:
    return jnp.sum(final(scan) ** 2)


# As a PyTree


def test_its_arrays_are_those_of_f(scan):
    assert [leaf.shape for leaf in jax.tree.leaves(eqx.filter(scan, eqx.is_array))] == [
        (2,)
    ]
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(scan)]
    assert paths == [".f.rate", ".f.activation"]


def test_partition_and_combine(scan):
    arrays, static = eqx.partition(scan, eqx.is_array)
    assert eqx.combine(arrays, static) == scan
    np.testing.assert_array_equal(final(eqx.combine(arrays, static)), final(scan))


def test_gradient_with_respect_to_the_transform(scan):
    grads = eqx.filter_grad(loss)(scan)
    assert isinstance(grads, el.CheckpointedScan)
    by_hand = jax.grad(lambda rate: loss(el.Scan(Decay(rate))))(scan.f.rate)
    np.testing.assert_allclose(grads.f.rate, by_hand, rtol=1e-5)
    stepped = eqx.apply_updates(scan, jax.tree.map(lambda g: -0.1 * g, grads))
    assert loss(stepped) < loss(scan)


def test_tree_at_reaches_the_cell_and_the_policy(scan):
    half = eqx.tree_at(lambda s: s.f.rate, scan, jnp.zeros(2))
    np.testing.assert_allclose(final(half), jnp.tanh(XS[-1]), rtol=1e-6)
    policy = el.policies.save_dots
    with_policy = eqx.tree_at(
        lambda s: s.policy, scan, policy, is_leaf=lambda x: x is None
    )
    assert with_policy.policy == policy
    assert with_policy == el.CheckpointedScan(scan.f, base=3, policy=policy)
    np.testing.assert_allclose(
        eqx.filter_grad(loss)(with_policy).f.rate,
        eqx.filter_grad(loss)(scan).f.rate,
        rtol=1e-5,
    )


def test_tree_map(scan):
    doubled = jax.tree.map(lambda leaf: 2 * leaf if eqx.is_array(leaf) else leaf, scan)
    np.testing.assert_array_equal(doubled.f.rate, 2 * scan.f.rate)


def test_serialise(scan):
    buffer = io.BytesIO()
    eqx.tree_serialise_leaves(buffer, scan)
    buffer.seek(0)
    like = eqx.tree_at(lambda s: s.f.rate, scan, jnp.zeros(2))
    assert eqx.tree_deserialise_leaves(buffer, like) == scan


def test_equality(scan):
    assert scan == el.CheckpointedScan(scan.f, base=3)
    assert scan != el.CheckpointedScan(scan.f, base=4)
    assert scan != el.Scan(scan.f)
    assert scan != el.CheckpointedScan(Decay(jnp.ones(2)), base=3)


def test_repr_says_what_is_not_a_default(scan):
    def step(h, x):
        return h, x

    text = repr(el.CheckpointedScan(step, 3, reverse=True))
    assert text.startswith("CheckpointedScan(")
    assert "step" in text
    assert "base=3" in text
    assert "reverse=True" in text
    assert "unroll" not in text
    assert "save_dots" in repr(el.Scan(step, policy=el.policies.save_dots))
    assert "rate=f32[2]" in repr(scan)
    assert "{'a': 1}" in repr(el.Scan(step, in_axes={"a": 1}))


def test_compiles_once_when_only_arrays_change(scan):
    traces = 0

    @eqx.filter_jit
    def run(scan, h):
        nonlocal traces
        traces += 1
        return scan(h, {"a": XS})[0]

    def step(rate, h, x):
        return rate * h + x["a"], None

    for rate in (0.5, 0.25):
        scan = el.Scan(
            eqx.Partial(step, jnp.array(rate)),
            in_axes={"a": 0},  # a dict, which has no hash
            policy="dots_saveable",
        )
        run(scan, jnp.zeros(2))
    assert traces == 1


# As a decorator


def test_decorator():
    @el.CheckpointedScan(base=4, reverse=True)
    def scan(h, x):
        return h + x, h

    assert isinstance(scan, el.CheckpointedScan)
    assert scan.base == 4
    carry, ys = scan(0.0, jnp.arange(4.0))
    assert carry == 6
    np.testing.assert_array_equal(ys, [6.0, 5.0, 3.0, 0.0])


def test_decorator_without_settings():
    @el.Scan
    def scan(h, x):
        return h + x, None

    assert scan(0.0, jnp.arange(4.0)) == (6, None)


def test_repr_of_decorator():
    assert repr(el.CheckpointedScan(base=4)) == "CheckpointedScan(base=4)"


def test_signature_is_that_of_the_call(scan):
    names = ["init", "xs", "length", "key", "log"]
    assert list(inspect.signature(scan).parameters) == names
    assert next(iter(inspect.signature(el.Scan).parameters)) == "f"


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: el.Fit(f, "1GiB"),
        *(el.Reschedule, el.Optimize, el.Jit, el.DebugNonFinite, el.Vmap, el.Map),
        *(el.Grad, el.Vjp, el.Trace, el.EvalShape),
        lambda f: el.Named(f, "name"),
    ],
)
def test_signature_is_that_of_the_function_where_calls_are_alike(transform):
    def f(x, *, scale=2.0):
        return scale * x

    assert inspect.signature(transform(f)) == inspect.signature(f)


def test_f_by_keyword(scan):
    assert el.CheckpointedScan(f=scan.f, base=3) == scan


# In a class


class Model(eqx.Module):
    rate: jax.Array

    @el.CheckpointedScan(base=3)
    def run(self, h, x):
        return jnp.tanh(self.rate * h + x), None

    @el.Remat
    @el.ChunkedVmap(chunk_size=2)
    def scale(self, x):
        return self.rate * x


def test_method_of_a_module_is_differentiated_with_respect_to_it(scan):
    model = Model(scan.f.rate)
    expected = eqx.filter_grad(loss)(scan)
    grads = eqx.filter_grad(lambda model: loss(model.run))(model)
    np.testing.assert_allclose(grads.rate, expected.f.rate, rtol=1e-5)
    # The bound method is a PyTree itself, with the arrays of the model.
    grads = eqx.filter_grad(loss)(model.run)
    np.testing.assert_allclose(grads.f.args[0].rate, expected.f.rate, rtol=1e-5)


def test_method_does_not_map_self():
    model = Model(jnp.array([2.0, 3.0]))
    x = jnp.arange(10.0).reshape(5, 2)
    np.testing.assert_array_equal(model.scale(x), x * model.rate[None])


def test_method_of_an_ordinary_class():
    class Sum:
        offset = 1.0

        @el.Scan(unroll=2)
        def run(self, total, x):
            return total + x + self.offset, None

    assert Sum().run(0.0, jnp.arange(4.0))[0] == 10


def test_on_the_class_it_is_the_transform_itself():
    assert isinstance(Model.run, el.CheckpointedScan)
    assert Model.run.base == 3


# Abstract or final


def test_final_classes_cannot_be_subclassed():
    with pytest.raises(TypeError, match=r"Mine cannot subclass Scan, which is final"):

        class Mine(el.Scan):
            pass


def test_abstract_classes_cannot_be_instantiated():
    with pytest.raises(TypeError, match="abstract"):
        AbstractTransform(lambda x: x)


def test_f_must_be_callable():
    with pytest.raises(TypeError, match=r"CheckpointedScan: `f` must be callable.* 16"):
        el.CheckpointedScan(16)


def test_unknown_setting_of_a_decorator():
    with pytest.raises(TypeError, match=r"Scan has no setting 'bse'.*: .*f_axes"):
        el.Scan(bse=16)
