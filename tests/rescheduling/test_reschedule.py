"""`el.Reschedule`: loops of JAX run by a schedule, and what it is as a PyTree."""

import functools
import operator
import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax import lax

import eqloop as el

from ..asserts import assert_close, assert_same
from ..compiling import programs_compiled, temp_bytes
from ..derivatives import CONTEXTS, MODES, assert_agrees, grad, name, plain
from .functions import XS, Counted, W, nested, root, simulate

pytestmark = pytest.mark.sampled

SCHEDULES = (
    el.StoreAll(),
    el.Recursive(3),
    el.Recursive(2, batch=2),
    el.Chunked(5),
    el.Binomial(3),
    el.StoreLast(el.Chunked(4), 6),
    el.Budget("2KiB", measure=False),
)


def as_loop(schedule: Any, **settings: Any) -> Callable[..., Any]:
    """`lax.scan`, rescheduled, as a loop."""

    def loop(f: Any, init: Any, xs: Any, **more: Any) -> Any:
        scan = functools.partial(lax.scan, f, **more)
        return el.Reschedule(scan, schedule, **settings)(init, xs)

    return loop


@pytest.mark.parametrize("mode", MODES, ids=name)
def test_has_the_numbers_of_f_in_every_mode(mode):
    assert_agrees(mode, plain, as_loop(el.Recursive(2)))


@pytest.mark.parametrize("context", CONTEXTS, ids=name)
def test_has_the_numbers_of_f_in_every_context(context):
    assert_agrees(grad, context, as_loop(el.Binomial(3)))


# What it does with its settings


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_a_gradient_evaluates_steps_as_its_schedule_says(schedule):
    counted = Counted()
    frugal = el.Reschedule(counted, schedule)
    (loop,) = frugal.plans(W, XS).taken
    gradient = jax.grad(frugal, (0, 1))
    assert counted.in_a_run(gradient, W, XS) == loop.plan.evaluations
    assert counted.in_a_run(frugal, W, XS) == len(XS)
    assert_close(gradient(W, XS), jax.grad(simulated, (0, 1))(W, XS))


def simulated(w: Any, xs: Any) -> Any:
    return lax.scan(lambda h, x: (jnp.tanh(w * h + x), None), jnp.ones_like(w), xs)[0]


def test_a_gradient_takes_the_memory_of_the_same_loop_written_with_eqloop():
    def by_hand(schedule: Any, w: Any, xs: Any) -> Any:
        step = lambda h, x: (jnp.tanh(w * h + x), None)
        return jnp.sum(el.Scan(step, schedule=schedule)(jnp.zeros(512), xs)[0])

    def library(w: Any, xs: Any) -> Any:
        step = lambda h, x: (jnp.tanh(w * h + x), None)
        return jnp.sum(lax.scan(step, jnp.zeros(512), xs)[0])

    def taken(f: Any) -> int:
        return temp_bytes(jax.grad(f), jnp.float32(1), (1024, 512))

    plain = taken(library)
    assert plain > 1024 * 512 * 4
    for schedule, at_most in ((el.Recursive(4), 30), (el.Binomial(8), 50)):
        found = taken(el.Reschedule(library, schedule))
        assert at_most * found < plain
        assert found == taken(functools.partial(by_hand, schedule))


def test_a_policy_says_what_is_stored_of_a_step():
    def library(w: Any, xs: Any) -> Any:
        return jnp.sum(lax.scan(lambda h, x: (jnp.tanh(w @ h + x), None), *xs)[0])

    xs = jnp.ones(8), jnp.ones((20, 8))
    policies = "nothing_saveable", el.policies.save_dots
    few, many = (el.Reschedule(library, policy=policy) for policy in policies)
    bytes_of = lambda f: f.plans(jnp.eye(8), xs).taken[0].plan.peak_bytes
    assert bytes_of(few) < bytes_of(many)
    expected = jax.grad(library)(jnp.eye(8), xs)
    for f in (few, many):
        assert_close(jax.grad(f)(jnp.eye(8), xs), expected)


@pytest.mark.parametrize("whiles", [3, el.Binomial(3), el.Recursive(1024)], ids=str)
def test_while_loops_have_every_mode(whiles):
    f = el.Reschedule(root, whiles=whiles)
    slope = lambda a: 0.5 * a**-0.5
    rows = jnp.linspace(0.5, 9.0, 8)
    of_rows = lambda rows: jax.vmap(f)(rows).sum()
    derivatives = jax.grad(f), jax.jacfwd(f), jax.grad(jax.grad(f))
    one = jax.jit(lambda a: [derive(a) for derive in derivatives])(9.0)
    assert_close(one, [slope(9.0), slope(9.0), -0.25 * 9**-1.5])
    batch = jax.jit(lambda rows: (jax.vmap(jax.grad(f))(rows), jax.grad(of_rows)(rows)))
    assert_close(batch(rows), (slope(rows), slope(rows)))


def test_while_loops_are_as_those_of_eqloop():
    is_far, improve = lambda x: jnp.abs(x * x - 9) > 1e-5 * 9, lambda x: (x + 9 / x) / 2
    online = el.CheckpointedWhileLoop(is_far, improve, checkpoints=3)
    bounded = el.BoundedWhileLoop(is_far, improve, base=8, max_steps=2**31 - 1)
    for loop, whiles in ((online, 3), (bounded, el.Recursive(8))):
        (expected,) = el.plans(jax.grad(loop))(1.0)
        (found,) = el.Reschedule(root, whiles=whiles).plans(9.0).taken
        assert found.name == "lax.while_loop"
        assert found.plan.columns == expected.plan.columns


def test_only_sees_what_a_person_knows_a_loop_by():
    seen = []

    def note(loop: el.ForeignLoop) -> bool:
        seen.append(loop)
        return False

    def library(w: Any, xs: Any) -> Any:
        with jax.named_scope("train"):
            rows = lax.map(lambda x: root(w * x), xs)
        return lax.fori_loop(0, 5, lambda i, h: h + i * rows, rows)

    el.Reschedule(library, only=note)(W, XS)
    found = [(loop.name, loop.length, loop.depth) for loop in seen]
    names = ("lax.map", 24, 0), ("lax.while_loop", None, 1), ("lax.fori_loop", 5, 0)
    assert found == list(names)
    mapped, inner, counted = seen
    assert mapped.place.function == counted.place.function == "library"
    assert mapped.place.file == __file__
    assert mapped.place.text.startswith("rows = lax.map")
    assert (inner.place.function, inner.scope) == ("root", "")
    assert mapped.scope == "train"
    shapes = [tuple(x.shape for x in loop.carry) for loop in seen]
    assert shapes == [(), ((),), ((), (24,))]
    text = "lax.fori_loop of 5 steps at "
    assert str(counted).startswith(text)
    assert str(inner).startswith("lax.while_loop at ")


def test_only_picks():
    shorter = el.Reschedule(nested, el.Chunked(2), only=lambda loop: loop.length < 24)
    found = shorter.plans(W, XS)
    assert [loop.plan.length for loop in found.taken] == [4]
    assert [(loop.length, why) for loop, why in found.left] == [
        (24, "`only` does not pick it")
    ]
    for change in (lambda f: f, jax.grad, jax.jit):  # inside a scan of JAX's own
        assert_close(change(shorter)(W, XS), change(nested)(W, XS))


# Functions without loops, and those whose loops are all left


def test_a_function_without_loops_is_the_function():
    f = el.Reschedule(lambda x: {"y": 2 * x, "s": "static"}, el.Recursive(2))
    with pytest.warns(
        UserWarning, match="no loop of .*<lambda>.*, as it has none"
    ) as w:
        assert_same(f(XS), {"y": 2 * XS, "s": "static"})
    assert w[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        f(XS)  # it was said once
        el.Reschedule(jnp.sin)(XS)  # it was told to do nothing


def test_a_function_that_takes_its_gradient_itself_is_told_so():
    loss = lambda w: jnp.sum(
        lax.scan(lambda h, x: (jnp.sin(w * h + x), None), 0.0, XS)[0]
    )
    with pytest.warns(UserWarning, match=r"inside: `jax.grad\(el.Reschedule"):
        el.Reschedule(jax.grad(loss), el.Recursive(2))(1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.grad(el.Reschedule(loss, el.Recursive(2)))(1.0)
        el.Reschedule(jax.grad(loss))(1.0)  # it was told to do nothing
        # It was told to leave the way back alone.
        there = lambda loop: not loop.is_of_gradient
        el.Reschedule(jax.grad(loss), el.Recursive(2), only=there)(1.0)


def test_what_is_left_is_said_where_nothing_is_taken():
    f = el.Reschedule(root, el.Recursive(2))
    with pytest.warns(
        UserWarning, match=r"left to JAX:\n  lax.while_loop at .*: .*whil"
    ):
        f(W)


# What it is


class Model(eqx.Module):
    rate: jax.Array

    @el.Reschedule(schedule=el.Recursive(3))
    def run(self, xs: Any, *, scale: float = 1.0) -> Any:
        return simulate(scale * self.rate, xs)


def test_methods_and_gradients_of_their_models():
    model = Model(W)
    loss = lambda run: run(XS, scale=2.0)
    expected = jax.grad(simulate)(2 * W, XS) * 2
    assert_close(eqx.filter_grad(lambda model: loss(model.run))(model).rate, expected)
    grads = eqx.filter_jit(eqx.filter_grad(loss))(model.run)
    assert isinstance(grads, el.Reschedule)
    assert_close(grads.f.args[0].rate, expected)
    assert Model.run.schedule == el.Recursive(3)


def test_is_a_module():
    f = el.Reschedule(Model(W).run.f, el.Recursive(3))
    assert_same(jax.tree.leaves(eqx.filter(f, eqx.is_array)), [W])
    assert f == el.Reschedule(f.f, el.Recursive(3))
    assert f != el.Reschedule(f.f, el.Recursive(4))
    assert f != el.Reschedule(f.f, el.Recursive(3), whiles=3)
    other = eqx.tree_at(
        lambda f: f.policy, f, el.policies.save_dots, is_leaf=lambda x: x is None
    )
    assert other == el.Reschedule(f.f, el.Recursive(3), policy="save_dots")
    assert_close(jax.grad(lambda xs: other(xs))(XS), jax.grad(simulate, 1)(W, XS))
    half = eqx.tree_at(lambda f: f.f.args[0].rate, f, W / 2)
    assert_close(half(XS), simulate(W / 2, XS))


def test_shows_what_it_was_told():
    decorator = el.Reschedule(schedule=el.Binomial(4), whiles=8)
    assert (
        repr(decorator)
        == "Reschedule(schedule=Binomial(checkpoints=4, block=1), whiles=8)"
    )
    text = repr(decorator(simulate))
    assert "simulate" in text
    assert "whiles=8" in text
    assert "progress" not in text


def test_leaves_of_all_kinds_reach_f_and_come_back():
    def library(tree: Any, how: Callable[..., Any], *, key: Any) -> Any:
        h = simulate(tree["w"], XS) + jax.random.normal(key)
        return {**tree, "h": how(h)}, tree["n"] + 1

    tree = {"w": W, "n": jnp.arange(3), "s": "static", "none": None}
    key = jax.random.key(0)
    actual = el.Reschedule(library, el.Recursive(3))(tree, jnp.tanh, key=key)
    assert_close(actual, library(tree, jnp.tanh, key=key))


def test_calls_outside_of_jit_are_compiled_once():
    f = el.Reschedule(simulate, el.Recursive(3))
    others = W + 1, XS + 1
    for call in (f, jax.grad(f)):
        call(W, XS)
        before = programs_compiled()
        call(*others)
        assert programs_compiled() == before


def test_a_step_tells_what_it_tells_once():
    told = []

    def library(w: Any) -> Any:
        def step(h: Any, i: Any) -> tuple[Any, None]:
            jax.debug.callback(told.append, i)
            return jnp.sin(w * h), None

        outer = lambda h, i: lax.scan(step, h, 3 * i + jnp.arange(3))
        outer_step = lambda h, i: (outer(h, i)[0], None)
        return lax.scan(outer_step, jnp.ones_like(w), jnp.arange(5))[0]

    for only in (None, lambda loop: loop.depth == 0, lambda loop: loop.depth == 1):
        told.clear()
        jax.jit(jax.grad(el.Reschedule(library, el.Recursive(2), only=only)))(W)
        jax.effects_barrier()
        assert sorted(map(operator.index, told)) == list(range(15))
