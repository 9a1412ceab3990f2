"""What derivatives say when they are called in a way that they cannot be."""

import jax
import jax.numpy as jnp
import pytest

import eqloop as el

from ..asserts import assert_raises

X, KEY, C = jnp.ones(3), jax.random.key(0), jnp.ones(2, jnp.complex64)


def total(x, y=1.0):
    return jnp.sum(x) * y


WRONG = {
    "no function": (lambda: el.Grad(3), "TypeError: Grad: `f` must be callable"),
    "an unknown setting": (
        lambda: el.Grad(argnum=1),
        "TypeError: Grad has no setting 'argnum' … argnums",
    ),
    "argnums that are a flag": (
        lambda: el.Grad(total, argnums=(0, True)),
        "TypeError: … `argnums` must be … (0, True)",
    ),
    "no argnums": (
        lambda: el.Hessian(total, argnums=()),
        "ValueError: Hessian: `argnums` is empty",
    ),
    "an argument that is not there": (
        lambda: el.Grad(total, argnums=2)(X, 2.0),
        "ValueError: Grad: `argnums` has 2 … these arguments: x, y",
    ),
    "an argument before the first": (
        lambda: el.Grad(total, argnums=-3)(X, 2.0),
        "ValueError: … `argnums` has -3",
    ),
    "a name that is not there": (
        lambda: el.JacFwd(total, argnums="z")(X),
        "ValueError: JacFwd: `argnums` has 'z' … arguments: x.",
    ),
    "an argument that was not passed": (
        lambda: el.Grad(total, argnums="y")(X),
        "ValueError: Only an argument that is passed can be differentiated",
    ),
    "an argument twice": (
        lambda: el.Grad(total, argnums=(0, "x"))(X),
        "ValueError: … `argnums` is (0, 'x'), which names the argument x twice",
    ),
    "no argument": (
        lambda: el.Grad(lambda: 1.0)(),
        "ValueError: … these arguments: (none)",
    ),
    "an integer": (
        lambda: el.Grad(total)(jnp.arange(3)),
        "TypeError: Grad: cannot differentiate with respect to x, which is int32[3] … "
        "argnums",
    ),
    "a Python integer": (
        lambda: el.Grad(total, argnums=1)(X, 2),
        "TypeError: … with respect to y, which is 2",
    ),
    "a tree of numbers": (
        lambda: el.Grad(lambda t: t["a"])({"a": 1.0}),
        "TypeError: … nothing to differentiate … t: {'a': 1.0} … jnp.asarray",
    ),
    "a vector": (
        lambda: el.Grad(jnp.sin)(X),
        "TypeError: Grad: f must return a floating-point scalar … float32[3] … "
        "`JacRev`",
    ),
    "a pair without has_aux": (
        lambda: el.Grad(lambda x: (jnp.sum(x), x))(X),
        "TypeError: … ('float32[]', 'float32[3]') … `has_aux=True`",
    ),
    "no pair with has_aux": (
        lambda: el.Grad(total, has_aux=True)(X),
        "TypeError: … with `has_aux=True` f must return a pair … f32[]",
    ),
    "an integer value": (
        lambda: el.JacRev(lambda x: {"n": jnp.arange(2)})(X),
        "TypeError: JacRev: there is nothing to differentiate in what f returned … "
        "int32[2]",
    ),
    "a complex value in reverse mode": (
        lambda: el.JacRev(lambda c: {"y": 2 * c})(C),
        "TypeError: … f returned out['y'], which is complex64[2] … holomorphic=True",
    ),
    "complex arguments in forward mode": (
        lambda: el.JacFwd(lambda c: 2 * c["a"])({"a": C}),
        "TypeError: JacFwd: c['a'] is complex64[2] … real arrays only",
    ),
    "real arguments of a holomorphic function": (
        lambda: el.Grad(total, holomorphic=True)(X),
        "TypeError: … with `holomorphic=True` … x is float32[3]",
    ),
    "a chunk of a wrong type": (
        lambda: el.Hessian(total, chunk_size="1GiB"),
        "TypeError: Hessian: `chunk_size` must be an int … `Budget` … '1GiB'",
    ),
    "directions that are no number": (
        lambda: el.SofoGrad(total, tangents=True),
        "TypeError: SofoGrad: `tangents` must be an int … True",
    ),
    "no key": (lambda: el.ForwardGrad(total)(X), "TypeError: … 'key'"),
    "several keys": (
        lambda: el.SofoGrad(total)(X, key=jax.random.split(KEY)),
        "TypeError: SofoGrad: `key` must be a PRNG key … [2]",
    ),
    "a loss without curvature": (
        lambda: el.SofoGrad(total)(X, key=KEY),
        "ValueError: SofoGrad: f called no `SofoLoss` … el.losses.mean_squared",
    ),
    "a step by complex arrays": (
        lambda: el.SofoGrad(lambda c: jnp.sum(jnp.abs(c)))(C, key=KEY),
        "TypeError: SofoGrad: c is complex64[2]",
    ),
    "damping of several": (
        lambda: el.SofoGrad(total, damping=X),
        "TypeError: … `damping` must be a scalar, but it is float32[3]",
    ),
    "a loss that is no scalar": (
        lambda: el.SofoLoss(jnp.sin)(X),
        "TypeError: SofoLoss: f must return a real floating-point scalar … float32[3]",
    ),
    "targets of another shape": (
        lambda: el.losses.mean_squared(X, jnp.ones(2)),
        "TypeError: … shape",
    ),
    "tangents that are another tree": (
        lambda: el.Jvp(total)(({"a": X},), ({"b": X},)),
        "ValueError: Jvp: primals and tangents must be the same trees … "
        "primals[0]['a'] … None",
    ),
    "tangents of too many": (
        lambda: el.Jvp(total)((X,), (X, X)),
        "ValueError: … the same trees",
    ),
    "a tangent of another shape": (
        lambda: el.Jvp(total)((X,), (jnp.ones(2),)),
        "TypeError: … "
        "tangent of primals[0], which is float32[3], cannot be float32[2]. A tangent",
    ),
    "a tangent of an integer": (
        lambda: el.Jvp(total)((X, 2), (None, 1.0)),
        "TypeError: … tangent of primals[1] … of its primal, or is None",
    ),
}


@pytest.mark.parametrize("call", WRONG)
def test_wrong_calls(call):
    assert_raises(*WRONG[call])
