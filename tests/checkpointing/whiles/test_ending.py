"""Scans that end early in every mode and context, against a masked `jax.lax.scan`."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import eqloop as el
from eqloop.checkpointing import trace_step
from eqloop.checkpointing.steps._loop import Loop
from eqloop.checkpointing.whiles._ending import Ending

from ... import derivatives
from ...asserts import assert_close
from ...derivatives import (
    CONTEXTS,
    MODES,
    assert_agrees,
    mapped,
    name,
    rematerialised,
)
from ...marks import slow_if

pytestmark = pytest.mark.sampled

SCHEDULES = (
    el.StoreAll(),
    el.Recursive(2),
    el.Recursive(2, batch=2),
    el.Chunked(3, batch=2),
    el.Chunked(3),
    el.Binomial(3),
    el.Binomial(1),
    el.Binomial(2, block=2),
    el.Offload(el.Recursive(2)),
    el.Offload(el.Binomial(3)),
)
LESS = (el.Recursive(2), el.Chunked(3), el.Binomial(1))
QUICK_IN_A_BATCH = (el.Binomial(2, block=2),)
# Unrolled it cannot be.
STANDING = [context for context in CONTEXTS if context.__name__ != "unrolled"]
# On each device a loop with collectives has to run as many steps as on the others, and
# one with parameters that are the same on all of them.
JOINTLY = ("shard_map", "shard_map_with_collectives")
QUICKLY = (
    derivatives.vmap,
    derivatives.collectives,
)


def squares(tree: Any) -> Any:
    first, *_ = jax.tree.leaves(tree)
    return lax.stop_gradient(jnp.sum(first.astype(float) ** 2))


def steps_of(init: Any, xs: Any) -> Any:
    """How many steps are run: another number for other data, and less than 7."""
    return 3 + (squares(init) > 1).astype(int) + 2 * (squares(xs) > 8).astype(int)


def jointly(init: Any, xs: Any) -> Any:
    return 4 + 0 * len(jax.tree.leaves(xs))


def ended(schedule: Any, steps_of: Any = steps_of, policy: Any = None) -> Any:
    """The loop, whose carry counts the steps that are left."""

    def loop(f: Any, init: Any, xs: Any, reverse: bool = False) -> Any:
        def step(state: Any, x: Any) -> Any:
            carry, y = f(state[0], x)
            return (carry, state[1] - 1), y

        (length,) = {x.shape[0] for x in jax.tree.leaves(xs)}
        scan = el.ScanWhile(
            lambda state: state[1] > 0,
            step,
            max_steps=length,
            schedule=schedule,
            policy=policy,
            reverse=reverse,
        )
        left = jnp.asarray(steps_of(init, xs))
        (carry, _), ys, steps = scan((init, left), xs)
        del steps
        return carry, ys

    return loop


@functools.cache
def masked(steps_of: Any) -> Any:
    """The same with all steps, of which the last ones do nothing."""

    def loop(f: Any, init: Any, xs: Any, reverse: bool = False) -> Any:
        def step(state: Any, x: Any) -> Any:
            before, left = state
            carry, y = f(before, x)
            carry, y = jax.tree.map(
                lambda new, old: jnp.where(left > 0, new, old),
                (carry, y),
                (before, jax.tree.map(jnp.zeros_like, y)),
            )
            return (carry, left - 1), y

        left = jnp.asarray(steps_of(init, xs))
        (carry, _), ys = lax.scan(step, (init, left), xs, reverse=reverse)
        return carry, ys

    return loop


def check(mode: Any, context: Any, schedule: Any, policy: Any = None) -> None:
    how = jointly if context.__name__ in JOINTLY else steps_of
    assert_agrees(mode, context, ended(schedule, how, policy), masked(how))


LIKE_OTHERS = (
    derivatives.primal,
    derivatives.grad_of_parameters,
    derivatives.linear_transpose,
    derivatives.jacfwd,
    derivatives.jacrev,
    derivatives.vjp,
    derivatives.jvp,
    derivatives.linearize,
    derivatives.hessian,
    derivatives.forward_over_reverse,
    derivatives.reverse_over_forward,
    derivatives.reverse_over_reverse,
)


@pytest.mark.parametrize("mode", slow_if(LIKE_OTHERS.__contains__, MODES), ids=name)
def test_modes(mode):
    check(mode, derivatives.plain, el.Recursive(2))


@pytest.mark.parametrize("schedule", slow_if(LESS.__contains__, SCHEDULES), ids=str)
def test_schedules(schedule):
    check(derivatives.grad, derivatives.plain, schedule)


@pytest.mark.parametrize(
    "schedule", slow_if(lambda s: s not in QUICK_IN_A_BATCH, SCHEDULES), ids=str
)
def test_schedules_in_a_batch_of_gradients(schedule):
    check(mapped_grad, derivatives.plain, schedule)


def test_any_number_of_steps():
    """Each by itself, and all of them as a batch: a block may be run in part."""
    inputs, counts = derivatives.inputs(), jnp.arange(derivatives.LENGTH + 1)

    def gradient(loop_of: Any) -> Any:
        def total(steps: Any, *inputs: Any) -> Any:
            loop = loop_of(lambda init, xs: steps)
            return derivatives.loss(functools.partial(derivatives.run, loop))(*inputs)

        return jax.grad(total, (1, 2, 3))

    batch = lambda f: jax.jit(jax.vmap(f, (0, None, None, None)))(counts, *inputs)
    expected = batch(gradient(masked.__wrapped__))
    for schedule in (el.Recursive(2), el.Recursive(4, batch=2)):
        ours = gradient(functools.partial(ended, schedule))
        assert_close(batch(ours), expected, rtol=1e-4)
        alone = jax.jit(ours)
        each = [alone(count, *inputs) for count in counts]
        assert_close(jax.tree.map(lambda *x: jnp.stack(x), *each), expected, rtol=1e-4)


@pytest.mark.parametrize(
    "schedule", [el.Recursive(2), el.Binomial(2, block=2)], ids=str
)
@pytest.mark.slow
def test_policies(schedule):
    for mode in (derivatives.grad, mapped_grad):
        check(mode, derivatives.plain, schedule, el.policies.save_dots)


mapped_grad = mapped(derivatives.grad)


@pytest.mark.parametrize(
    "context", slow_if(lambda c: c not in QUICKLY, STANDING), ids=name
)
def test_contexts(context):
    check(derivatives.grad, context, el.Binomial(2))


@pytest.mark.slow
@pytest.mark.parametrize("context", STANDING, ids=name)
@pytest.mark.parametrize("mode", MODES, ids=name)
@pytest.mark.parametrize(
    "schedule", [el.Recursive(2), el.Binomial(2, block=2)], ids=str
)
def test_modes_in_contexts(mode, context, schedule):
    check(mode, context, schedule)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES, ids=name)
def test_modes_of_mapped_and_rematerialised_derivatives(mode):
    for change in (mapped, rematerialised):
        loops = ended(el.Recursive(2)), masked(steps_of)
        assert_agrees(change(mode), derivatives.plain, *loops, rtol=3e-4, atol=5e-5)


def test_a_loop_is_planned_as_another_and_run_as_itself():
    """Each is all that the other is, whatever that may come to be."""
    step, _ = trace_step(
        lambda carry, x: (carry, x), [jax.typeof(True), jax.typeof(1)], []
    )
    settings = dict[str, Any](
        step=step,
        loop=Loop(9, stops=True),
        policy=el.policies.save_dots,
        planner=el.Recursive(3),
        undifferentiated=(False, True),
        chooses_policy=True,
        placed=((), (None, None), ()),
        carries=5,
        original=None,
        count_at=1,
        joints=0,
    )
    assert settings.keys() == {field.name for field in dataclasses.fields(Ending)}
    loop = Ending(**settings)
    planned = loop.as_planned
    own = settings.keys() - {"loop", "count_at", "joints"}
    assert {name: vars(planned)[name] for name in own} == {n: settings[n] for n in own}
    assert planned.as_run == loop
    fewer = dataclasses.replace(planned, carries=0)
    assert fewer.as_run.as_planned == dataclasses.replace(fewer, ending=fewer.as_run)
