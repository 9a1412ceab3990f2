"""Programs have one digest as long as they say the same, in every process."""

import os
import subprocess
import sys
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqloop as el
from eqloop._programs import digest_of, equation_bits, literal_bits

X = jnp.ones(64)
ZEROS = np.zeros((64, 64), np.float32)


def matrix(value: float = 0.0) -> np.ndarray:
    """Matrices that print alike."""
    array = ZEROS.copy()
    array[30, 30] = value
    return array


def jvp_rule(factor: Any) -> Any:
    @jax.custom_jvp
    def f(x: Any) -> Any:
        return jnp.sin(x)

    f.defjvp(lambda x, dot: (f(*x), factor * dot[0]))
    return f


def vjp_rule(factor: Any) -> Any:
    @jax.custom_vjp
    def f(x: Any) -> Any:
        return jnp.sin(x)

    f.defvjp(lambda x: (f(x), None), lambda _, ct: (factor * ct,))
    return f


def vmap_rule(factor: float) -> Any:
    @jax.custom_batching.custom_vmap
    def f(x: Any) -> Any:
        return jnp.sin(x)

    @f.def_vmap
    def rule(size: int, is_batched: Any, x: Any) -> Any:
        return factor * x, True

    return f


def saving(saves: Any) -> Any:
    """A function whose rule runs the same, and saves more or less of it."""

    @jax.custom_vjp
    def f(x: Any) -> Any:
        return jnp.sin(x)

    def there(x: Any) -> Any:
        return f(x), jnp.cos(x) if saves else x

    def back(saved: Any, ct: Any) -> Any:
        return (ct * (saved if saves else jnp.cos(saved)),)

    f.defvjp(there, back)
    return f


def times(held: Any) -> Any:
    return lambda x: x @ held


def noisy(key: Any) -> Any:
    return lambda x: x + jax.random.normal(key)


def in_jit(held: Any) -> Any:
    return jax.jit(lambda x: x @ held)


def in_cond(held: Any) -> Any:
    return lambda x: lax.cond(x[0] > 0, jax.jit(lambda x: x @ held), jnp.sin, x)


def in_loop(held: Any) -> Any:
    step = jax.jit(lambda x: x @ held)
    return lambda x: lax.fori_loop(0, 3, lambda _, x: step(x), x)


def in_our_loop(held: Any) -> Any:
    step = jax.jit(lambda x: x @ held)
    scan = el.CheckpointedScan(lambda x, _: (step(x), None))
    return lambda x: scan(x, length=3)[0]


def checkpointed(name: str) -> Any:
    keeps = jax.checkpoint_policies.save_only_these_names(name)
    return jax.checkpoint(jnp.sin, policy=keeps)


# For each name, functions whose programs say something else.
OTHERS = {
    "constants in jit": [in_jit(matrix(v)) for v in (0.0, 1e-9, -0.0, np.nan)],
    "constants in cond": [in_cond(matrix(v)) for v in (0.0, 1e-9)],
    "constants in a loop": [in_loop(matrix(v)) for v in (0.0, 1e-9)],
    "constants in our loop": [in_our_loop(matrix(v)) for v in (0.0, 1e-9)],
    "constants outside": [times(matrix(v)) for v in (0.0, 1e-9)],
    "constants of jvp rules": [
        jvp_rule(np.linspace(0, v, 64, dtype=np.float32)) for v in (1, 1 + 1e-6)
    ],
    "jvp rules": [jvp_rule(v) for v in (1.0, 2.0)],
    "vjp rules": [vjp_rule(v) for v in (1.0, 2.0)],
    "what vjp rules save": [saving(flag) for flag in (True, False)],
    "vmap rules": [vmap_rule(v) for v in (1.0, 2.0)],
    "numbers": [lambda x, v=v: x * v for v in (0.0, -0.0, 1.0, 1 + 1e-7)],
    "parameters": [lambda x, r=r: lax.cumsum(x, reverse=r) for r in (False, True)],
    "policies": [checkpointed(name) for name in "ab"],
    "keys": [noisy(jax.random.key(k)) for k in (0, 1)],
    "order": [lambda x: jnp.sin(x) - x, lambda x: x - jnp.sin(x)],
}


@pytest.mark.parametrize("functions", OTHERS.values(), ids=OTHERS)
def test_other_programs(functions: Any):
    trace = lambda f: digest_of(jax.make_jaxpr(lambda x: f(x))(X))
    digests = list(map(trace, functions))
    assert len(set(digests)) == len(functions)
    assert list(map(trace, functions)) == digests


def test_types_of_the_inputs():
    programs = [jax.make_jaxpr(lambda x: x)(x) for x in (1.0, jnp.float32(1), X)]
    assert len(set(map(digest_of, programs))) == 3


def everything() -> str:
    """A digest of a program with all kinds of things in it, and of other things."""

    def f(x: Any) -> Any:
        x = jvp_rule(0.5)(vjp_rule(0.5)(vmap_rule(0.5)(checkpointed("a")(x))))
        x = in_cond(matrix(0.5))(in_our_loop(matrix(0.5))(jax.nn.relu(x)))
        result = jax.ShapeDtypeStruct(x.shape, x.dtype)
        x = jax.pure_callback(lambda x: np.sin(x), result, x)
        jax.debug.print("{}", x[0])
        return x + jax.random.normal(jax.random.key(1), x.shape)

    policy = jax.checkpoint_policies.save_only_these_names("a", "b")
    others = el.Recursive(4), policy, {"b": {"x", "y"}, "a": None}, jnp.float32
    return digest_of(jax.make_jaxpr(f)(X), *others)


@pytest.mark.slow
def test_it_is_the_same_in_another_process():
    assert everything() == everything()
    code = f"from {__name__} import everything; print(everything())"
    folder = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    env = os.environ | {"PYTHONHASHSEED": "3", "PYTHONPATH": folder}
    run = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True
    )
    assert run.stdout.strip() == everything(), run.stderr


def test_a_rule_that_refuses_is_like_no_other():
    """It cannot be told what it does if it is not asked in the way it wants."""

    @jax.custom_jvp
    def f(x: Any, y: Any) -> Any:
        return x * y

    @f.defjvp
    def _(primals: Any, dots: Any) -> Any:
        raise RuntimeError("only by `x`")

    program, other = (jax.make_jaxpr(lambda x: f(x, 2.0))(1.0) for _ in range(2))
    assert digest_of(program) == digest_of(program)
    assert digest_of(program) != digest_of(other)


def test_a_rule_may_refuse_some_inputs():
    def made(factor: float) -> Any:
        @jax.custom_jvp
        def f(x: Any, y: Any) -> Any:
            return x * y

        def rule(primals: Any, dots: Any) -> Any:
            assert isinstance(dots[1], jax.custom_derivatives.SymbolicZero)
            return f(*primals), factor * dots[0]

        f.defjvp(rule, symbolic_zeros=True)
        return digest_of(jax.make_jaxpr(f)(1.0, 2.0))

    assert made(2.0) == made(2.0)
    assert made(2.0) != made(3.0)


def test_callbacks_may_hold_anything():
    """What they have seen is no part of the program, and is not even looked at."""

    class Never:
        @property
        def __dict__(self) -> Any:
            raise AssertionError

    seen, never = list[Any](), Never()
    f = lambda x: jax.debug.callback(lambda v: seen.append((v, never)), x)
    before = digest_of(jax.make_jaxpr(f)(1.0))
    seen.append(X)
    assert digest_of(jax.make_jaxpr(f)(1.0)) == before


def test_functions_that_refer_to_themselves():
    def f(x: Any) -> Any:
        return f(x) if x > 3 else held[0]

    held: list[Any] = [1.0, f]
    before = digest_of(f)
    held[0] = 2.0
    assert digest_of(f) != before


def test_literals_and_parameters():
    eqn = lambda f: jax.make_jaxpr(f)(X).eqns[0]
    literal = lambda value: literal_bits(jex.Literal(value, jax.typeof(value)))
    assert literal(np.float32(0)) != literal(np.float32(-0.0))
    assert literal(matrix()) != literal(matrix(1e-9))
    assert literal(matrix()) == literal(jnp.asarray(matrix()))
    for one, other in ((0.0, -0.0), (1, True), (1, 1.0)):
        pair = [eqn(jnp.sin).replace(params={"accuracy": p}) for p in (one, other)]
        assert equation_bits(pair[0]) != equation_bits(pair[1])
