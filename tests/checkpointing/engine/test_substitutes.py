"""Every loop that runs in place of another one has its outputs and its derivatives."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqloop as el
from eqloop.checkpointing import trace_step
from eqloop.checkpointing.engine import _packing
from eqloop.checkpointing.engine._layout import Stored
from eqloop.checkpointing.engine._planned_loop import PlannedLoop
from eqloop.checkpointing.engine._primal import (
    lists_of,
    residuals_of,
    saves_of_gradient,
)
from eqloop.checkpointing.engine._problem import Counted
from eqloop.checkpointing.engine._transformed import activity, all_active
from eqloop.checkpointing.steps._loop import Loop

from ...asserts import assert_close
from ...marks import slow

SEEDS = 0, slow(1), slow(2)
LENGTH, COUNT = 7, 12
OPERATIONS = (jnp.sin, jnp.tanh, jnp.cos, lambda v: v * v, lambda v: 0.3 * v + 1)


def alike(draw: np.random.Generator) -> Any:
    """Leaves that are computed by the same operations, which are drawn."""
    chosen = [OPERATIONS[i] for i in draw.integers(len(OPERATIONS), size=4)]
    shift, rate = int(draw.integers(1, COUNT)), jnp.float32(draw.uniform(0.1, 0.5))

    def step(leaves: Any, x: Any) -> Any:
        others = [*leaves[shift:], *leaves[:shift]]
        after = []
        for a, b in zip(leaves, others, strict=True):
            for operation in chosen:
                b = operation(b)
            after.append(a + rate * b + 0.1 * x[0])
        return after, [v * x[0] for v in leaves]

    return step, [jnp.float32(v) for v in draw.normal(size=COUNT)]


def delays(draw: np.random.Generator) -> Any:
    """A delay line of a length that is drawn, which is read at another place."""
    rows, behind = int(draw.integers(3, 6)), int(draw.integers(1, 3))

    def step(carry: Any, x: Any) -> Any:
        count, line, h = carry
        h = jnp.tanh(h + line[(count + behind) % rows] + x[0])
        return [count + 1, line.at[count % rows].set(h), h], [h * x[0]]

    line = jnp.asarray(draw.normal(size=(rows, 4)), jnp.float32)
    return step, [jnp.zeros((), jnp.int32), line, line[0]]


def made(kind: Any, seed: int, schedule: Any) -> Any:
    """A loop, its inputs, and the same as a scan."""
    draw = np.random.default_rng(seed)
    f, init = kind(draw)
    xs = [jnp.asarray(draw.normal(size=LENGTH), jnp.float32)]
    types = [jax.typeof(v) for v in init], [jax.ShapeDtypeStruct((), jnp.float32)]
    step, consts = trace_step(f, *types)
    loop = Loop(LENGTH, x_axes=(0,), starts=(0,) if kind is delays else ())

    def scan(consts: Any, init: Any, xs: Any) -> Any:
        return lax.scan(functools.partial(step, consts), list(init), list(xs))

    return Counted(step, loop, None, schedule), (consts, init, xs), scan


def batch_of(inputs: Any) -> Any:
    twice = lambda v: jnp.stack([v, 0.5 * v]) if v.dtype == jnp.float32 else v
    return inputs[0], *(jax.tree.map(twice, group) for group in inputs[1:])


def in_both(f: Any, inputs: Any) -> Any:
    """What a function gives, and its batch."""
    axes = [0 if v.dtype == jnp.float32 else None for v in inputs[1]]
    batched = jax.vmap(f, in_axes=(None, axes, 0))
    both = lambda inputs: (f(*inputs), batched(*batch_of(inputs)))
    return jax.jit(both)(inputs)


@pytest.mark.parametrize("seed", SEEDS)
def test_loops_that_are_packed(seed: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_packing, "_GAIN_ON_CPU", _packing._GAIN)
    problem, inputs, scan = made(alike, seed, el.Recursive(2))
    instead = _packing.packing_of(problem, all_active(problem.step))
    assert instead is not None

    def pulled(*inputs: Any) -> Any:
        ends = jax.tree.map(jnp.ones_like, scan(*inputs))
        loop = functools.partial(PlannedLoop, instead.of(problem), None)
        out, pull = jax.vjp(lambda *ins: loop(ins)(*ins), *given(inputs))
        cts = instead.ends((*ends, Stored.of()))
        return instead.outputs(*out)[:2], instead.cotangents(pull(cts))

    def given(inputs: Any) -> Any:
        consts, init, xs = instead.inputs(inputs)
        return list(consts), list(init), list(xs)

    def expected(*inputs: Any) -> Any:
        out, pull = jax.vjp(scan, *inputs)
        return out, pull(jax.tree.map(jnp.ones_like, out))

    actual, wanted = (in_both(f, inputs) for f in (pulled, expected))
    leaves = zip(*map(jax.tree.leaves, (actual, wanted)), strict=True)
    for one, other in leaves:
        assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("kind", "schedule"),
    [(delays, el.Chunked(1)), (alike, el.StoreLast(el.Chunked(2), 3))],
)
def test_loops_that_store_more(kind: Any, schedule: Any, seed: int):
    problem, inputs, scan = made(kind, seed, schedule)
    marks = [[v.dtype == jnp.float32 for v in group] for group in inputs]
    active, y_active = activity(problem.step, marks)
    saves, _ = saves_of_gradient(problem, None, active, y_active)
    residuals = residuals_of(saves.layout, problem, active, y_active)
    lists = lists_of(problem, saves)
    instead = residuals or lists
    assert instead is not None

    def stored(*inputs: Any) -> Any:
        more = lists.saves(saves) if lists else saves
        given = lists.inputs(inputs) if lists else inputs
        loop = PlannedLoop(instead.of(problem), more, given)
        *out, stored = instead.outputs(*loop(*given))
        assert stored.rows if residuals else stored.last
        return out

    actual, wanted = (in_both(f, inputs) for f in (stored, scan))
    for one, other in zip(*map(jax.tree.leaves, (actual, wanted)), strict=True):
        assert_close(one, other, rtol=1e-5, atol=1e-6)
