"""Steps that do more than compute: references, callbacks with effects, checks."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify, io_callback

import eqloop as el

from ..schedules import BLOCKS, LAST, NESTED, SLOTS, STORING

pytestmark = pytest.mark.sampled

SCHEDULES = (STORING, NESTED, SLOTS, BLOCKS, LAST)
MODES = {
    "primal": lambda f: f,
    "jvp": lambda f: lambda h: jax.jvp(f, (h,), (jnp.ones_like(h),)),
    "gradient": jax.grad,
}


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_a_reference_is_updated_once_a_step(schedule, mode):
    count = jax.new_ref(jnp.zeros(()))

    def step(h: Any, x: Any) -> Any:
        count[...] += 1.0
        return jnp.sin(h * x), None

    run = lambda h: el.Scan(step, schedule=schedule)(h, jnp.ones(6))[0]
    MODES[mode](run)(jnp.float32(0.5))
    assert count[...] == 6


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_a_reference_in_a_compiled_function_and_what_is_read_from_it(schedule):
    def f(loop: Any, h: Any) -> Any:
        ref = jax.new_ref(jnp.array([1.0, 2.0]))

        def step(h: Any, x: Any) -> Any:
            ref[0] = ref[0] * h
            return jnp.sin(h + x * ref[1]), ref[0]

        h, ys = loop(step)(h, jnp.linspace(0.1, 0.5, 5))
        return h + jnp.sum(ys**2) + jnp.sum(ref[...])

    ours = lambda h: f(lambda step: el.Scan(step, schedule=schedule), h)

    def scan(step: Any) -> Any:
        return lambda h, xs: jax.lax.scan(step, h, xs)

    every = lambda g: jax.jit(lambda h: (g(h), jax.grad(g)(h)))(0.4)
    np.testing.assert_allclose(every(ours), every(lambda h: f(scan, h)), rtol=1e-5)


def test_a_reference_in_a_while_loop():
    def run(loop: Any, h: Any) -> Any:
        ref = jax.new_ref(jnp.zeros((), jnp.int32))

        def body(c: Any) -> Any:
            ref[...] += 2
            return c[0] + 1, jnp.sin(c[1])

        return loop(lambda c: c[0] < 4, body)((0, h))[1], ref[...]

    loop = lambda cond, body: el.CheckpointedWhileLoop(cond, body, checkpoints=2)
    f = jax.jit(jax.value_and_grad(lambda h: run(loop, h), has_aux=True))
    (_, count), slope = f(0.5)
    wanted = jax.grad(lambda h: jnp.sin(jnp.sin(jnp.sin(jnp.sin(h)))))(0.5)
    assert count == 8
    np.testing.assert_allclose(slope, wanted, rtol=1e-6)


@pytest.mark.parametrize("loop", [el.CheckpointedWhileLoop, el.BoundedWhileLoop])
@pytest.mark.parametrize("mode", [None, jax.grad], ids=["primal", "gradient"])
def test_a_condition_reads_and_writes_references(loop, mode):
    def run(h: Any) -> Any:
        limit, count = jax.new_ref(jnp.array(3.0)), jax.new_ref(jnp.zeros(()))

        def cond(h: Any) -> Any:
            count[...] += 1
            return h < limit[...]

        end = loop(cond, lambda h: 1.1 * h + 1, max_steps=20)(h)
        return end, count[...]

    run = run if mode is None else mode(run, has_aux=True)
    end, count = jax.jit(run)(1.1)
    np.testing.assert_allclose(end, 3.431 if mode is None else 1.21, rtol=1e-6)
    assert count == 3


@pytest.mark.parametrize("loop", [el.Scan, el.CheckpointedScan])
def test_no_step_updates_no_reference(loop):
    def run(xs: Any) -> Any:
        ref = jax.new_ref(jnp.ones(()))

        def step(h: Any, x: Any) -> Any:
            ref[...] += 1
            return h, x

        loop(step, policy=el.policies.save_dots)(0.0, xs)
        return ref[...]

    assert jax.jit(run)(jnp.ones(0)) == 1


def test_references_are_no_arguments_and_rows_share_none():
    ref = jax.new_ref(jnp.arange(3.0))
    message = r"xs is a reference \(`jax.new_ref`\). Pass arrays, `xs\[...\]`"
    with pytest.raises(TypeError, match="Scan: " + message):
        el.Scan(lambda c, x: (c, None))(0.0, ref)
    with pytest.raises(TypeError, match=r"Scan: carry\['r'\] is a reference"):
        el.Scan(lambda c, x: (c, None))({"r": ref}, jnp.ones(2))
    with pytest.raises(TypeError, match=r"Map: x\[0\] is a reference"):
        el.Map(lambda x: x)((ref,))
    with pytest.raises(TypeError, match="WhileLoop: carry is a reference"):
        el.WhileLoop(lambda c: c[0] < 1, lambda c: c)(ref)

    def row(x: Any) -> Any:
        ref[0] = x
        return x

    with pytest.raises(ValueError, match=r"ChunkedVmap: f closes over a reference"):
        el.ChunkedVmap(row, 2)(jnp.arange(5.0))


def noisy(calls: list[Any], h: Any) -> Any:
    io_callback(lambda: calls.append(1), None, ordered=True)
    return jnp.sin(h)


def test_a_callback_with_effects_is_called_once_or_refused():
    for schedule in SCHEDULES:
        calls: list[Any] = []
        step = lambda h, x, calls=calls: (noisy(calls, h) * x, None)
        run = lambda h, s=schedule, f=step: el.Scan(f, schedule=s)(h, jnp.ones(4))[0]
        jax.block_until_ready(jax.jit(run)(0.5))
        jax.effects_barrier()
        assert len(calls) == 4
        if schedule == el.StoreAll():
            jax.grad(run)(0.5)
        else:
            message = r"runs steps again, and there is an `io_callback` .*StoreAll\(\)"
            with pytest.raises(ValueError, match=message):
                jax.grad(run)(0.5)
    loop = el.CheckpointedWhileLoop(lambda c: c < 0.9, lambda c: noisy([], c) + 1)
    with pytest.raises(ValueError, match=r"io_callback.*el\.Scan"):
        jax.grad(loop)(0.5)
    with pytest.raises(ValueError, match=r"map runs its function again.*el\.Vmap"):
        jax.grad(lambda x: jnp.sum(el.Map(lambda x: noisy([], x))(x)))(jnp.ones(2))


def test_examples_that_have_stopped_call_nobody():
    def body(c: Any) -> Any:
        io_callback(lambda i: None, None, c[0])
        return c[0] + 1, c[1]

    loop = el.WhileLoop(lambda c: c[0] < c[1], body)
    with pytest.raises(ValueError, match=r"steps of examples that have stopped.*Map"):
        jax.vmap(lambda n: loop((0, n)))(jnp.array([1, 3]))


def test_checks_are_seen():
    def checked(h: Any) -> Any:
        checkify.check(h < 1.5, "too large")
        return h + 1.0

    step = lambda h, x: (checked(h), None)
    run = lambda s: lambda h: el.Scan(step, schedule=s)(h, length=3)[0]
    for f, x in (
        (run(el.StoreAll()), jnp.float32(1)),
        (run(el.Recursive(2)), jnp.float32(1)),
        (el.WhileLoop(lambda h: h < 3, checked), jnp.float32(1)),
        (el.Map(checked), jnp.arange(3.0)),
        (el.Fit(checked, "1MiB"), jnp.float32(2)),
    ):
        for run_checked in (checkify.checkify(f), jax.jit(checkify.checkify(f))):
            error, _ = run_checked(x)
            assert "too large" in (error.get() or "")
        error, _ = checkify.checkify(f)(x - 9)
        assert error.get() is None or isinstance(f, el.WhileLoop)


def test_a_backward_rule_that_writes_to_a_reference():
    @jax.custom_vjp
    def stash(ref: Any, x: Any) -> Any:
        return x

    def backward(ref: Any, ct: Any) -> Any:
        ref[...] = ct
        return None, ct

    stash.defvjp(lambda ref, x: (x, ref), backward)
    ref = jax.new_ref(jnp.float32(0.0))
    step = lambda h, _: (jnp.sin(stash(ref, h)), None)
    run = lambda loop: lambda h: loop(step)(h, length=1)[0]
    jax.grad(run(el.Scan))(jnp.float32(1.0))
    np.testing.assert_allclose(ref[...], np.cos(1.0), rtol=1e-6)
    planned = run(el.CheckpointedScan)
    np.testing.assert_allclose(planned(jnp.float32(1.0)), np.sin(1.0), rtol=1e-6)
    message = r"`jax.custom_vjp` in the step is given a reference .*StoreAll\(\)"
    with pytest.raises(ValueError, match=message):
        jax.grad(planned)(jnp.float32(1.0))


def counted(calls: list[None]) -> Any:
    """A row whose callback with effects counts how often it is called."""

    def row(x: Any) -> Any:
        io_callback(lambda _: calls.append(None), None, jax.lax.stop_gradient(x))
        return jnp.sin(x)

    return row


LOOPS = {
    "scan": lambda row: el.CheckpointedScan(lambda h, x: (row(h * x), None)),
    "while": lambda row: (
        lambda h, _: el.WhileLoop(lambda c: c[1] < 3, lambda c: (row(c[0]), c[1] + 1))(
            (h, 0)
        )
    ),
    "map": lambda row: lambda h, xs: el.Map(lambda x: row(h * x))(xs),
    "fit": lambda row: el.Fit(
        lambda h, xs: jax.lax.scan(lambda h, x: (row(h * x), None), h, xs), "1MiB"
    ),
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_callback_is_called_once_in_forward_mode_or_refused(name):
    calls = list[None]()
    loop = LOOPS[name](counted(calls))
    run = lambda h: jax.tree.map(jnp.sum, loop(h, jnp.linspace(0.5, 1.0, 3)))
    jax.block_until_ready(jax.jvp(run, (0.3,), (1.0,)))
    jax.effects_barrier()
    assert len(calls) == 3
    for mode in (
        jax.linearize,
        jax.jit(lambda run, h: jax.linearize(run, h)[0], static_argnums=0),
    ):
        with pytest.raises(ValueError, match=r"`jax.linearize` runs .* Use `jax.jvp`"):
            mode(run, 0.3)
    assert len(calls) == 3


def test_a_loop_is_not_looked_into_where_its_callback_would_be_repeated():
    run = el.DebugNonFinite(LOOPS["scan"](counted([])))
    with pytest.raises(ValueError, match=r"DebugNonFinite runs .* Leave it out"):
        jax.jvp(lambda h: run(h, jnp.ones(3))[0], (0.3,), (1.0,))
