"""Products that are kept for the reversal of a block, and not computed again."""

import dataclasses
import math

import hypothesis
import jax
import jax.numpy as jnp
import pytest
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import eqloop as el
from eqloop._programs._equations import aval_of
from eqloop.checkpointing import trace_step
from eqloop.checkpointing.engine.orders._levels import Nest
from eqloop.checkpointing.engine.orders._nested import Nested
from eqloop.checkpointing.engine.reversals._known_products import groups_of
from eqloop.checkpointing.engine.reversals._together import Together

from ....marks import slow, slow_if
from .products import (
    HS,
    LEVELS,
    MODES,
    STEPS,
    WIDTH,
    XS,
    W,
    accumulated,
    assert_as_scan,
    assert_equal,
    gradient,
    network,
    of_loop,
    read_twice,
    squared,
    two_in_one,
)

pytestmark = pytest.mark.sampled


@pytest.mark.parametrize("step", STEPS)
def test_gradients(step):
    assert_as_scan(step)


@pytest.mark.parametrize("mode", slow_if("hessian".__ne__, list(MODES)[1:]))
@pytest.mark.parametrize("step", [network, slow(accumulated)])
def test_modes(step, mode):
    assert_as_scan(step, mode)


@pytest.mark.parametrize(
    "schedule", [el.Chunked(4, batch=5), slow(el.Binomial(3, block=3))], ids=str
)
def test_schedules(schedule):
    assert_as_scan(network, schedule=schedule)


@pytest.mark.parametrize(
    "settings",
    [
        dict(reverse=True),
        slow(dict(unroll=2)),
        dict(policy=jax.checkpoint_policies.dots_saveable),
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings(settings):
    assert_as_scan(two_in_one, **settings)


def test_half_precision():
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (W, HS, XS))
    run = of_loop(two_in_one, LEVELS)
    found = jax.jit(gradient(run))(*half)
    assert {x.dtype for x in found} == {jnp.dtype("bfloat16")}
    expected = jax.jit(gradient(of_loop(two_in_one)))(*half)
    to_float = lambda tree: jax.tree.map(lambda x: x.astype(jnp.float32), tree)
    assert_equal(to_float(found), to_float(expected), rtol=0.05)


def kept(step, width=WIDTH):
    """The shapes of what may be kept of a step."""
    types = [jax.ShapeDtypeStruct((width,), jnp.float32)]
    w = jnp.ones((width, width))
    f = lambda carry, x: tuple(map(jax.tree.leaves, step(w, *carry, *x)))
    traced, _ = trace_step(f, types, types)
    return [aval_of(var).shape for var in groups_of(traced)]


def test_what_is_kept():
    assert kept(network) == [(16,)] * 3
    # The sum of both takes no more room than one of them.
    assert kept(two_in_one) == kept(read_twice) == [(16,)]
    assert kept(squared) == [(16, 16), (16, 16), (16,)]
    # Nor is it kept in the place of one that is read elsewhere, too.
    added = lambda w, h, x: ((product := w @ h) * (product + w @ x), None)
    assert kept(added) == [(16,)] * 2
    # Of so few terms each sum is quickly computed again.
    assert kept(read_twice, 15) == []
    assert kept(lambda w, h, x: (jnp.sin(w[0] * h + w @ w @ w[0]), x)) == []


@pytest.mark.parametrize(
    ("step", "least"),
    [
        # By the primal, where steps are run again, and for the cotangents of both
        # factors.
        (read_twice, 1 + 1 + 2),
        (two_in_one, 2 + 2 + 4),
        # Of one no derivative needs the value, and nobody computes it twice.
        (network, 3 + 2 + 6),
    ],
)
def test_no_product_is_computed_where_a_step_is_linearised(step, least):
    run = jax.jit(gradient(of_loop(step, LEVELS)))
    # A number of steps that blocks divide: all of them are reversed by one loop.
    assert run.lower(W, HS, XS[:12]).compile().as_text().count(" dot(") == least


@pytest.mark.slow
def test_shards():
    mesh = jax.make_mesh((4,), ("device",), axis_types=(jax.sharding.AxisType.Auto,))
    batch = jnp.stack([HS * i for i in range(8)])

    def derivative(schedule):
        run = jax.vmap(gradient(of_loop(network, schedule)), (None, 0, None))
        specs = (P(), P("device"), P())
        shards = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=P("device"))
        return jax.jit(shards)(W, batch, XS)

    assert_equal(derivative(LEVELS), derivative(None))


def test_double_precision():
    with jax.enable_x64(True):
        inputs = jax.tree.map(lambda x: x.astype(jnp.float64), (W, HS, XS))
        runs = of_loop(accumulated, LEVELS), of_loop(accumulated)
        assert_equal(*(jax.jit(gradient(run))(*inputs) for run in runs), rtol=1e-12)


@dataclasses.dataclass(frozen=True)
class InNests(el.AbstractSchedule):
    """Nests, whose steps are reversed in batches."""

    nests: tuple[Nest, ...]
    size: int

    def layout(self, loop):
        return el.Layout(Nested(self.nests), reversal=Together(self.size))


@pytest.mark.slow
@hypothesis.given(st.data())
def test_random_nests(data):
    nests, left = list[Nest](), 13
    while left:
        levels = data.draw(st.lists(st.integers(1, left), min_size=1, max_size=2))
        hypothesis.assume(math.prod(levels) <= left)
        nests.append(Nest(tuple(levels)))
        left -= nests[-1].length
    size, step = data.draw(st.integers(1, 5)), data.draw(st.sampled_from(STEPS))
    assert_as_scan(step, schedule=InNests(tuple(nests), size))
