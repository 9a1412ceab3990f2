"""Loops within branches, checkpoints, steps of other loops, and shares of devices."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import eqloop as el

from ..asserts import assert_close
from ..compiling import taken_and_made, temp_bytes
from ..marks import slow_if

W, X = jnp.eye(32) / 2, jnp.linspace(0.0, 1.0, 16 * 32).reshape(16, 32)
DEVICES = 4


def loop(w, x):
    return el.Scan(lambda h, _: (jnp.tanh(h @ w), None))(x, length=64)[0]


def other(w, x):
    return jnp.sin(loop(w, 2 * x))


def squares(x):
    return jnp.sum(x**2)


def in_shares(w):
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
    share = lambda w, x: jax.lax.pmean(squares(loop(w, x)), "data")
    specs = (P(), P("data"))
    return jax.shard_map(share, mesh=mesh, in_specs=specs, out_specs=P())(w, X)


def in_branches(w):
    branches = lambda w: loop(w, X), lambda w: other(w, X)
    return squares(jax.lax.cond(w[0, 0] > 0, *branches, w))


def in_branches_of_ours(w):
    return squares(el.Cond(loop, other)(w[0, 0] > 0, w, X))


def in_a_checkpoint(w):
    return squares(jax.checkpoint(loop)(w, X))


def in_a_remat(w):
    return squares(el.Remat(loop)(w, X))


def in_a_scan(w):
    return squares(jax.lax.scan(lambda h, _: (loop(w, h), None), X, length=3)[0])


def in_a_batch(w):
    return squares(jax.vmap(lambda x: loop(w, x))(X))


def in_chunks(w):
    return squares(el.ChunkedVmap(lambda x: loop(w, x), 6)(X))


def in_chunks_with_a_rest(w):
    mean = el.ChunkedVmap(lambda x: squares(loop(w, x)), 5, reduce="mean")
    return 16 * mean(X)


def in_chunks_of_devices(w):
    return squares(el.ParallelMap(lambda x: loop(w, x), chunk_size=2)(X))


def in_shares_of_ours(w):
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
    specs = dict(in_specs=(P(), P("data")), out_specs=P("data"))
    return squares(el.ShardMap(loop, mesh=mesh, **specs)(w, X))


@jax.custom_jvp
def with_rule(w, x):
    return loop(w, x)


@with_rule.defjvp
def _(primals, tangents):
    y, dot = jax.jvp(loop, primals, tangents)
    return y, 2 * dot


def in_a_rule(w):
    return squares(with_rule(w, X))


def in_a_tangent(w):
    return squares(jax.jvp(lambda x: loop(w, x), (X,), (jnp.cos(X),))[1])


def in_a_batch_of_whiles(w):
    def one(x):
        until = lambda c: (c[0] < 60) & (jnp.sum(c[1]) < 1e3)
        step = lambda c: (c[0] + 1, jnp.tanh(c[1] @ w))
        return el.CheckpointedWhileLoop(until, step, max_steps=200)((0, x))[1]

    return squares(jax.vmap(one)(X))


def in_a_batch_of_scans_that_end(w):
    step = lambda h, _: (jnp.tanh(h @ w), None)
    until = lambda h: jnp.sum(h) > 1e-3
    return squares(jax.vmap(el.ScanWhile(until, step, max_steps=64))(X)[0])


ROOMS = {
    "shard_map": in_shares,
    "cond": in_branches,
    "Cond": in_branches_of_ours,
    "checkpoint": in_a_checkpoint,
    "Remat": in_a_remat,
    "scan": in_a_scan,
    "vmap": in_a_batch,
    "ChunkedVmap": in_chunks,
    "chunks with a rest": in_chunks_with_a_rest,
    "ParallelMap": in_chunks_of_devices,
    "ShardMap": in_shares_of_ours,
    "custom_jvp": in_a_rule,
    "jvp": in_a_tangent,
    "batch of whiles": in_a_batch_of_whiles,
    "batch of ScanWhile": in_a_batch_of_scans_that_end,
}
NAMES = ("Scan", "CheckpointedWhileLoop", "ScanWhile")


EVERY_DAY = ("shard_map", "ChunkedVmap", "custom_jvp")


@pytest.mark.parametrize("name", slow_if(lambda name: name not in EVERY_DAY, ROOMS))
def test_loops_are_decided_in_every_room(name):
    f = ROOMS[name]
    plain, expected = taken_and_made(jax.grad(f), W)
    budget = plain * 2 // 5
    fit = el.Fit(f, budget)
    taken, found = taken_and_made(jax.grad(fit), W)
    assert taken <= budget
    assert_close(found, expected, 1e-5, 1e-6)
    assert any(part.name in NAMES for part in fit.plan(W).parts)


def test_loops_of_jax_in_chunks_are_decided_for():
    step = lambda w: lambda h, _: (jnp.tanh(h @ w), None)
    one = lambda w, x: jax.lax.scan(step(w), x, length=64)[0]
    f = lambda w: squares(el.ChunkedVmap(lambda x: one(w, x), 4)(X))
    plain, expected = taken_and_made(jax.grad(f), W)
    fit = el.Fit(f, plain // 3, foreign=True)
    assert_close(jax.jit(jax.grad(fit))(W), expected, 1e-5, 1e-6)


def test_chunks_of_a_budget_keep_their_loops():
    f = lambda w: squares(el.ChunkedVmap(lambda x: loop(w, x), el.Budget("64KiB"))(X))
    assert all(part.name != "Scan" for part in el.Fit(f, "1MiB").plan(W).parts)


def test_two_loops_of_a_room_are_named_by_what_they_store():
    fit = el.Fit(in_branches, temp_bytes(jax.grad(in_branches), W) // 4)
    (part,) = [part for part in fit.plan(W).parts if part.name == "Scan"]
    assert "carries" in part.stores


def test_a_room_in_which_another_fit_decides_is_left_to_it():
    inner = el.Fit(loop, "1MiB")
    f = lambda w: squares(jax.checkpoint(inner)(w, X))
    plain, expected = taken_and_made(jax.grad(f), W)
    fit = el.Fit(f, 2 * plain)
    assert all(part.name != "Scan" for part in fit.plan(W).parts)
    assert_close(jax.grad(fit)(W), expected, 1e-5, 1e-6)


def test_a_collective_over_the_axis_of_a_map_leaves_a_loop_undecided():
    step = lambda h, _: (jnp.tanh(h + jax.lax.pmean(h, "rows")), None)
    run = lambda x: el.Scan(step)(x, length=8)[0]
    f = lambda x: squares(jax.vmap(jax.checkpoint(run), axis_name="rows")(x))
    fit = el.Fit(f, "1MiB")
    assert_close(jax.grad(fit)(X), jax.grad(f)(X), 1e-5, 1e-6)
