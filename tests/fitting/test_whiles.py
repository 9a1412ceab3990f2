"""Loops that end by themselves in a `Fit`: how many carries they store is decided."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import eqloop as el

from ..asserts import assert_close
from ..compiling import taken_and_made, temp_bytes

W = jax.random.normal(jax.random.key(0), (16, 16)) / 4
X = jnp.ones((8, 16))
ROW = X.nbytes
is_small = lambda h: jnp.sum(h) < 1e9


def until(w: jax.Array, x: jax.Array, **settings: Any) -> jax.Array:
    settings.setdefault("max_steps", 300)
    loop = el.CheckpointedWhileLoop(
        lambda c: (c[0] < 200) & is_small(c[1]),
        lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)),
        **settings,
    )
    return jnp.sum(loop((0, x))[1] ** 2)


def scan_while(w: jax.Array, x: jax.Array, **settings: Any) -> jax.Array:
    step = lambda h, _: (jnp.tanh(h @ w), jnp.sum(h))
    loop = el.ScanWhile(is_small, step, max_steps=300, **settings)
    h, sums, _ = loop(x)
    return jnp.sum(h**2) + jnp.sum(sums)


def of_jax(w: jax.Array, x: jax.Array) -> jax.Array:
    body = lambda c: (c[0] + 1, jnp.tanh(c[1] @ w))
    return jnp.sum(jax.lax.while_loop(lambda c: c[0] < 200, body, (0, x))[1] ** 2)


@pytest.mark.sampled
@pytest.mark.parametrize("rows", [16, 80])
@pytest.mark.parametrize("f", [until, scan_while])
def test_checkpoints_are_chosen_within_a_budget(f: Any, rows: int):
    budget = rows * ROW + 4 * ROW
    taken, found = taken_and_made(jax.grad(el.Fit(f, budget), (0, 1)), W, X)
    assert taken <= budget
    assert_close(found, jax.jit(jax.grad(f, (0, 1)))(W, X), 1e-4, 1e-4)


@pytest.mark.sampled
@pytest.mark.parametrize("f", [until, scan_while])
def test_more_memory_stores_more_carries(f: Any):
    budgets = (16 * ROW, 60 * ROW, 400 * ROW)
    plans = [el.Fit(f, budget).plan(W, X) for budget in budgets]
    stored = [max(part.stored_bytes for part in plan.parts) for plan in plans]
    assert stored == sorted(stored)
    assert len(set(stored)) == len(stored)
    times = [plan.relative_time for plan in plans]
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize(
    ("f", "settings"),
    [(until, {"checkpoints": 7}), (scan_while, {"schedule": el.Binomial(7)})],
    ids=["checkpoints", "schedule"],
)
def test_a_number_that_is_given_is_kept(f: Any, settings: dict[str, Any]):
    fit = el.Fit(lambda w, x: f(w, x, **settings), "1MiB")
    assert all(not part.name.endswith("Loop") for part in fit.plan(W, X).parts)


def test_without_a_bound_on_the_steps():
    f = lambda w, x: until(w, x, max_steps=None)
    (loop,) = [p for p in el.Fit(f, "1GiB").plan(W, X).parts if p.name.endswith("Loop")]
    assert loop.stores == "2144 carries"
    taken, found = taken_and_made(jax.grad(el.Fit(f, 30 * ROW)), W, X)
    assert taken <= 30 * ROW
    assert_close(found, jax.jit(jax.grad(f))(W, X), 1e-4, 1e-4)


def test_those_of_jax_if_it_is_told_to():
    fit = el.Fit(of_jax, 30 * ROW, foreign=True)
    taken, found = taken_and_made(jax.grad(fit), W, X)
    assert taken <= 30 * ROW
    assert_close(found, jax.jit(jax.grad(until))(W, X), 1e-4, 1e-4)


def test_an_error_says_what_a_little_more_memory_is_worth():
    w, x = jnp.eye(64), jnp.ones((128, 64))
    with pytest.raises(ValueError, match="which is") as error:
        jax.grad(el.Fit(until, 1))(w, x)
    pattern = r"With (\d+) bytes it should take (\S+) times as long"
    ((more, share),) = re.findall(pattern, str(error.value))
    assert temp_bytes(jax.grad(el.Fit(until, int(more))), w, x) <= int(more)
    assert float(share) < 0.7
