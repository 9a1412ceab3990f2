"""`Cond` and `Switch` beside `jax.lax.cond` and `jax.lax.switch`."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

import eqloop as el

from ..asserts import assert_close

near = functools.partial(assert_close, rtol=1e-5, atol=1e-6)

X = jnp.linspace(-1.0, 2.0, 3)


def weigh(out: Any) -> jax.Array:
    return jnp.sum(jnp.cos(jnp.arange(3.0)) * out)


def linear(seed: int) -> eqx.nn.Linear:
    return eqx.nn.Linear(3, 3, key=jax.random.key(seed))


# Beside JAX


def ours(branches: Any, index: Any, x: Any) -> Any:
    return el.Switch(branches)(index, x)


def theirs(branches: Any, index: Any, x: Any) -> Any:
    return jax.lax.switch(index, [lambda x, f=f: f(x) for f in branches], x)


def test_switch_is_that_of_jax_and_clamps():
    branches = (linear(0), jnp.sin, linear(1))
    weights, static = eqx.partition(branches, eqx.is_array)

    def everything(run):
        def loss(weights, x, index):
            return weigh(run(eqx.combine(weights, static), index, x))

        def one(index):
            derive = jax.value_and_grad(loss, argnums=(0, 1))
            push = lambda x: jax.jvp(lambda x: loss(weights, x, index), (x,), (X,))
            hessian = jax.hessian(lambda x: loss(weights, x, index))
            return derive(weights, X, index), push(X), hessian(X)

        indices = jnp.array([-3, 0, 1, 2, 7])
        return jax.jit(lambda: (jax.lax.map(one, indices), jax.vmap(one)(indices)))()

    actual, expected = everything(ours), everything(theirs)
    near(actual, expected)
    in_turn, at_once = actual
    near(in_turn, at_once)


@pytest.mark.parametrize("index", [1, np.uint8(1), jnp.array(1), 9, -9])
@pytest.mark.usefixtures("either_width")
def test_indices_of_all_kinds(index):
    branches = [lambda: 0.5, lambda: 1.5, lambda: 9.5]
    assert el.Switch(branches)(index) == jax.lax.switch(index, branches)


def test_a_single_branch():
    assert el.Switch([jnp.negative])(5, 2.0) == -2


NUMBERS = [1, 0, -2.5, 0.0, float("nan"), np.int8(3), np.float32(0), jnp.uint32(0)]


@pytest.mark.parametrize("pred", [*NUMBERS, jax.lax.stop_gradient(2)])
@pytest.mark.usefixtures("either_width")
def test_a_number_holds_unless_it_is_zero(pred):
    ours = el.Cond(lambda x: x, lambda x: -x)
    theirs = lambda *args: jax.lax.cond(args[0], lambda x: x, lambda x: -x, args[1])
    assert ours(pred, 3.0) == theirs(pred, 3.0)
    assert jax.jit(ours)(pred, 3.0) == theirs(pred, 3.0)
    assert jax.grad(lambda x: ours(pred, x))(3.0) == (1 if pred else -1)
    many = jnp.stack([jnp.asarray(pred), jnp.zeros_like(pred)])
    pair = [1.0 if pred else -1.0, -1.0]
    np.testing.assert_array_equal(jax.vmap(ours, (0, None))(many, 1.0), pair)


def test_a_half_is_a_number_as_well():
    assert el.Cond(lambda: 1, lambda: 2)(jnp.bfloat16(0)) == 2


@pytest.mark.parametrize("pred", [True, np.bool_(True), jnp.array(True)])
@pytest.mark.usefixtures("either_width")
def test_conditions_of_all_kinds(pred):
    assert el.Cond(lambda: 1.0, lambda: 2.0)(pred) == 1
    assert el.Cond(lambda: 1.0, lambda: 2.0)(~jnp.asarray(pred)) == 2


def test_both_branches_are_traced_and_one_is_run():
    traced: list[str] = []
    ran: list[str] = []

    def branch(name):
        def f(x):
            traced.append(name)
            jax.debug.callback(lambda: ran.append(name))
            return x

        return f

    el.Cond(branch("true"), branch("false"))(True, X)
    jax.effects_barrier()
    assert sorted(traced) == ["false", "true"]
    assert ran == ["true"]


# Branches and operands


def test_the_arrays_of_the_branches_are_differentiated():
    @eqx.filter_jit
    @eqx.filter_grad
    def gradient(cond, pred):
        return weigh(cond(pred, X))

    cond = el.Cond(linear(0), linear(1))
    for pred in (True, False):
        grads = gradient(cond, jnp.array(pred))
        ran, other = (cond.true_f, cond.false_f)[:: 1 if pred else -1]
        expected = eqx.filter_grad(lambda f: weigh(f(X)))(ran)
        of_ran, of_other = (grads.true_f, grads.false_f)[:: 1 if pred else -1]
        near(of_ran, expected)
        near(of_other, jax.tree.map(jnp.zeros_like, eqx.filter(other, eqx.is_array)))


def test_closures_and_keywords():
    def run(scale, x):
        cond = el.Cond(lambda x, *, by: scale * by * x, lambda x, *, by: by * x)
        return weigh(cond(True, x, by=2.0))

    grads = jax.jit(jax.grad(run, argnums=(0, 1)))(3.0, X)
    near(grads, jax.grad(lambda s, x: weigh(2 * s * x), (0, 1))(3.0, X))


def test_leaves_that_are_no_arrays():
    def grow(tree):
        assert tree["act"] is jnp.tanh
        return {**tree, "x": tree["act"](tree["x"]), "n": None}

    def keep(tree):
        return {**tree, "n": None}

    tree = {"x": X, "act": jnp.tanh, "n": None, "rate": 0.5, "numpy": np.ones(2)}
    out = jax.jit(
        lambda pred, x: eqx.filter(
            el.Cond(grow, keep)(pred, {**tree, "x": x}), eqx.is_array
        )
    )
    near(out(True, X)["x"], jnp.tanh(X))
    static = el.Cond(grow, keep)(False, tree)
    assert static["act"] is jnp.tanh
    assert static["n"] is None
    assert type(static["rate"]) is float  # the same in both, so it is none to choose


def test_branches_may_return_modules():
    cond = el.Cond(lambda a, b: a, lambda a, b: b)
    chosen = cond(False, linear(0), linear(1))
    near(chosen.weight, linear(1).weight)
    assert chosen.use_bias is True


# What the branches return


@pytest.mark.parametrize(
    ("returned", "dtype", "weak"),
    [
        ((0, 1.5), jnp.float32, False),
        ((0, jnp.ones((), jnp.bfloat16)), jnp.bfloat16, False),
        ((jnp.ones((), jnp.int8), 1), jnp.int8, False),
        ((True, jnp.array(False)), jnp.bool_, False),
        ((1.5, 2.0), jnp.float32, True),
        ((jnp.ones(()), jnp.asarray(1.0)), jnp.float32, False),
    ],
)
def test_weak_types_give_way(returned, dtype, weak):
    for a, b in (returned, returned[::-1]):
        out = el.Cond(lambda a=a: a, lambda b=b: b)(True)
        assert out.dtype == dtype
        assert jax.typeof(out).weak_type == weak


def test_keys_are_leaves_like_others():
    keys = jax.random.split(jax.random.key(0))
    out = el.Cond(lambda k: k[0], lambda k: k[1])(False, keys)
    assert out == keys[1]


def test_nothing_to_return():
    assert el.Cond(lambda: None, lambda: None)(True) is None


def test_what_varies_over_a_mesh_in_one_branch_only():
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("i")

    def run(x):
        return el.Cond(lambda x: x, lambda x: jnp.zeros(2))(x[0] > 0, x)

    x = jnp.array([1.0, 2.0, -3.0, 4.0])
    out = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec))(x)
    np.testing.assert_array_equal(out, [1, 2, 0, 0])


def test_annotations_of_branches_are_enforced():
    def right(x: Float[Array, " n"]) -> Float[Array, " n"]:
        return x

    def wrong(x: Float[Array, " n"]) -> Float[Array, " n"]:
        return jnp.concatenate([x, x])[:4]

    assert el.Cond(right, right)(True, X).shape == (3,)
    with pytest.raises(TypeError, match="the return value") as info:
        el.Cond(right, wrong)(True, X)
    assert "while Cond traced `false_f` with" in "\n".join(info.value.__notes__)


# Modules


def test_a_branching_module_is_a_pytree():
    switch = el.Switch((linear(0), jnp.sin))
    assert len(jax.tree.leaves(eqx.filter(switch, eqx.is_array))) == 2
    zeroed = eqx.tree_at(lambda s: s.branches[0].bias, switch, jnp.zeros(3))
    near(zeroed(0, X), linear(0).weight @ X)
    assert "Switch" in repr(switch)
    assert eqx.tree_equal(*(el.Cond(linear(0), jnp.sin) for _ in range(2)))


def test_static_fields_that_are_equal_may_be_others():
    class Scaled(eqx.Module):
        x: jax.Array
        by: object = eqx.field(static=True)

    with pytest.raises(TypeError, match="Scaled with other static fields"):
        el.Cond(lambda x: Scaled(x, 1), lambda x: Scaled(x, 1.0))(True, jnp.ones(2))
    combine = lambda a, b: Scaled(a.x + b.x, 1.0)
    with pytest.raises(TypeError, match="static fields of the Scaled changed"):
        el.AssociativeScan(combine)(Scaled(jnp.ones(3), 1))
