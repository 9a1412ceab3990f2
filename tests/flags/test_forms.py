"""Names, checkpoints and custom rules are the same to this library in either form.

`JAX_REMAT3=1 python -m pytest` runs all tests with JAX's next form of checkpoints, and
`CONTRIBUTING.md` says how to run them with the others. What depends on the form is
tested here every day, with each flag and with all.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import eqloop as el
from eqloop import ir
from eqloop._compat import called_by, form_of, form_params
from eqloop._programs import (
    equations,
    has_backward_rules,
    has_rules,
    map_equations,
    rewritable_programs,
)
from eqloop._programs._reaching import names_axis
from eqloop.checkpointing.planning._work import rates, work

from .flags import FLAGS, SETS, names_of, only_with_flags, turned_on

pytestmark = only_with_flags

X = jnp.linspace(0.1, 0.9, 4)
W = jnp.eye(4) + 0.1
WIDE = jnp.eye(64)


@pytest.fixture(params=SETS, ids=names_of, autouse=True)
def flags(request: pytest.FixtureRequest) -> Iterator[tuple[str, ...]]:
    with turned_on(request.param):
        yield request.param


@jax.custom_jvp
def forward(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


@forward.defjvp
def _forward_jvp(primals: Any, tangents: Any) -> Any:
    return forward(primals[0]), 3.0 * jnp.cos(primals[0]) * tangents[0]


@jax.custom_vjp
def backward(x: jax.Array) -> jax.Array:
    return jnp.tanh(x)


backward.defvjp(lambda x: (jnp.tanh(x), x), lambda x, ct: (2.0 * jnp.cos(x) * ct,))


def inner(w: jax.Array, x: jax.Array) -> jax.Array:
    return backward(forward(checkpoint_name(w @ x, "product"))) + x


def layer(w: jax.Array, x: jax.Array) -> jax.Array:
    keep = jax.checkpoint_policies.save_only_these_names("product")
    return jax.checkpoint(inner, policy=keep)(w, x)


def forms(f: Any, *args: Any) -> Counter[str]:
    return Counter(form_of(eqn) for eqn in equations(jax.make_jaxpr(f)(*args)))


def test_what_an_equation_is():
    found = forms(layer, W, X)
    for form in ("remat2", "name", "custom_jvp_call", "custom_vjp_call"):
        assert found[form] == 1, form
    assert found["dot_general"] == found["tanh"] == found["sin"] == 1
    assert found["call_hi_primitive"] == 0


def test_names_of_forward_rules_alone():
    name = lambda x: jax.ad_checkpoint.checkpoint_name_fwd(x, "a")
    (eqn,) = jax.make_jaxpr(name)(X).eqns
    assert (form_of(eqn), form_params(eqn)["name"]) == ("name", "a")


def test_parameters_and_programs():
    (eqn,) = jax.make_jaxpr(layer)(W, X).eqns
    program = called_by(eqn)
    assert program is not None
    assert program.in_avals == [jax.typeof(W), jax.typeof(X)]
    assert form_params(eqn)["prevent_cse"]
    assert form_params(eqn)["policy"] is not None
    for inside in program.eqns:
        is_rule = form_of(inside).startswith("custom")
        assert len(rewritable_programs(inside)) == is_rule
        assert called_by(inside) is None


def test_rules_are_told_apart():
    program = jax.make_jaxpr(layer)(W, X)
    assert has_rules(program)
    assert has_backward_rules(program)
    only_forward = jax.make_jaxpr(jax.checkpoint(forward))(X)
    assert has_rules(only_forward)
    assert not has_backward_rules(only_forward)
    plain = lambda x: jax.checkpoint(jnp.sin)(checkpoint_name(x, "a"))
    assert not has_rules(jax.make_jaxpr(plain)(X))


@pytest.mark.sampled
def test_programs_in_them_are_rewritten():
    def change(eqn: Any) -> Any:
        if eqn.primitive.name != "tanh":
            return eqn
        return eqn.replace(primitive=jax.make_jaxpr(jnp.exp)(X).eqns[0].primitive)

    program = jax.make_jaxpr(layer)(W, X)
    new = map_equations(program, change)
    (actual,) = jax.core.eval_jaxpr(new.jaxpr, new.consts, W, X)
    np.testing.assert_allclose(actual, jnp.exp(jnp.sin(W @ X)) + X, rtol=1e-5)
    (same,) = jax.core.eval_jaxpr(program.jaxpr, program.consts, W, X)
    np.testing.assert_allclose(same, jnp.tanh(jnp.sin(W @ X)) + X, rtol=1e-5)
    assert map_equations(program, lambda eqn: eqn) is program


def test_work_in_a_checkpoint_counts():
    of = lambda f: work(jax.make_jaxpr(f)(W, X).jaxpr, rates())
    assert of(layer) == of(inner) > 0


@pytest.mark.sampled
def test_collectives_in_a_checkpoint_are_seen():
    f = lambda x: jax.checkpoint(lambda x: x - jax.lax.pmean(x, "batch"))(x)
    program = jax.make_jaxpr(f, axis_env=[("batch", 4)])(X)
    assert names_axis(program, "batch")

    def run(loop: Any) -> Any:
        final = lambda x: loop(lambda c, _: (f(jnp.sin(c) + x), None), x)
        return jax.grad(lambda xs: jax.vmap(final, axis_name="batch")(xs).sum() ** 2)(X)

    ours = run(lambda f, x: el.CheckpointedScan(f, base=2)(x, length=3)[0])
    plain = run(lambda f, x: jax.lax.scan(f, x, length=3)[0])
    np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.sampled
@pytest.mark.parametrize("schedule", [el.StoreAll(), el.Recursive(2)], ids=str)
@pytest.mark.parametrize("policy", [None, "save_everything", el.policies.save_dots])
def test_loops_have_the_derivatives_of_the_loop_written_out(schedule, policy):
    def written_out(w: jax.Array, x: jax.Array) -> jax.Array:
        for _ in range(4):
            x = layer(w, x)
        return x

    def ours(w: jax.Array, x: jax.Array) -> jax.Array:
        loop = el.Scan(
            lambda x, _: (layer(w, x), None), schedule=schedule, policy=policy
        )
        return loop(x, length=4)[0]

    def derivatives(f: Any) -> Any:
        loss = lambda w: jnp.sum(jnp.sin(f(w, X)))
        return jax.jit(lambda w: (jax.grad(loss)(w), jax.jacrev(jax.grad(loss))(w)))(W)

    for a, b in zip(derivatives(ours), derivatives(written_out), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5)


def residuals(f: Any, *args: Any) -> int:
    """How many arrays a gradient keeps that are no arguments."""
    _, pull = jax.vjp(jax.jit(f), *args)
    given = {id(arg) for arg in args}
    return sum(id(leaf) not in given for leaf in jax.tree.leaves(pull))


def test_policies_keep_what_they_say():
    def f(w: jax.Array, x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = jnp.sin(el.name(jnp.sin(jnp.sin(w @ x)), "a"))
        return x.sum()

    kept = lambda policy: residuals(el.Remat(f, policy=policy), W, X)
    least, everything = kept(None), residuals(f, W, X)
    assert kept(el.policies.save_nothing) == least
    assert least < kept(el.policies.save_names("a")) < everything
    assert least < kept(el.policies.save_dots) < everything
    for policy in (
        el.policies.save_everything,
        jax.checkpoint_policies.everything_saveable,
        el.policies.either("save_everything", el.policies.save_names("a")),
    ):
        assert kept(policy) == everything


def test_a_budget_chooses_among_the_same_values():
    def step(x: jax.Array, _: None) -> Any:
        # Products that are dear, and more residuals than these give.
        named = el.name(WIDE @ (WIDE @ (WIDE @ (WIDE @ x))), "named")
        y = jax.jit(jnp.tanh)(named)
        return jnp.sin(jnp.sin(jnp.sin(jnp.sin(y)))), None

    scan = el.Scan(step, schedule=el.Budget("200KiB", measure=False), policy="auto")
    plan = lambda: scan.plan(jnp.ones((64, 32)), length=6)
    found = plan().kept
    with turned_on(()):
        assert plan().kept == found
    assert found


def test_python_is_written_with_names_checkpoints_and_rules():
    text = ir.to_python(layer)(W, X)
    for part in ("jax.checkpoint(", "checkpoint_name(", "custom_jvp", "custom_vjp"):
        assert part in text
    namespace: dict[str, Any] = {}
    exec(text, namespace)
    loss = lambda f: jax.jit(jax.value_and_grad(lambda w: f(w, X).sum()))(W)
    for a, b in zip(loss(namespace["layer"]), loss(layer), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_programs_are_simplified_within_them():
    def f(x: jax.Array) -> jax.Array:
        unused = lambda x: (jnp.cos(x), jnp.sin(x) * 1.0)[1]
        return jax.checkpoint(unused)(x)

    found = Counter(
        eqn.primitive.name for eqn in equations(ir.optimize(jax.make_jaxpr(f)(X)))
    )
    assert (found["cos"], found["mul"], found["sin"]) == (0, 0, 1)
    assert "checkpoint" in ir.to_dot(jax.make_jaxpr(f)(X))


def test_usage_is_followed_into_them():
    f = lambda tree: jax.checkpoint(lambda a, b: (jnp.sin(a), b))(*tree)
    assert el.Trace(f).leaf_usage((X, X)) == {"tree[0]": "read", "tree[1]": "passed"}


def test_operations_in_them_are_checked():
    f = el.DebugNonFinite(jax.checkpoint(lambda x: jnp.sum(forward(jnp.log(x)))))
    with pytest.raises(el.NonFiniteError, match="`log` gave -inf"):
        f(X - X[0])


def test_references_are_refused_in_backward_rules():
    @jax.custom_vjp
    def noted(ref: Any, x: jax.Array) -> jax.Array:
        return jnp.sin(x)

    def bwd(res: Any, ct: jax.Array) -> Any:
        ref, x = res
        ref[...] = ct
        return None, ct * jnp.cos(x)

    noted.defvjp(lambda ref, x: (jnp.sin(x), (ref, x)), bwd)

    def loss(x: jax.Array) -> jax.Array:
        ref = jax.new_ref(jnp.zeros(4))
        step = lambda c, _: (noted(ref, c), None)
        return el.CheckpointedScan(step)(x, length=3)[0].sum()

    with pytest.raises(
        ValueError, match=r"`jax.custom_vjp` in the step is given a ref"
    ):
        jax.grad(loss)(X)


def test_all_flags_are_tried(flags: tuple[str, ...]):
    assert [getattr(jax.config, flag) for flag in FLAGS] == [
        flag in flags for flag in FLAGS
    ]


CALLS = {
    "Scan": lambda: el.Scan(lambda c, x: (c + x, c))(0.0, X),
    "CheckpointedScan": lambda: el.CheckpointedScan(lambda c, x: (c + x, c))(0.0, X),
    "ChunkedVmap": lambda: el.ChunkedVmap(jnp.sin, 2)(X),
    "WhileLoop": lambda: el.WhileLoop(lambda c: c < 3.0, lambda c: c + 1.0)(0.0),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_next_form_of_scans_is_refused(name: str, flags: tuple[str, ...]):
    if flags not in ((), FLAGS):
        return
    jax.config.update("jax_scan3", True)
    try:
        with pytest.raises(ValueError, match="cannot run with JAX's flag `jax_scan3`"):
            CALLS[name]()
    finally:
        jax.config.update("jax_scan3", False)
    CALLS[name]()
