"""How much memory a program takes: found sooner than by compiling it as it is used."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.experimental import checkify
from jax.sharding import AbstractMesh

import eqloop as el
from eqloop._programs import NotCompiledError, _compiled, by_itself, temporary_bytes
from eqloop.checkpointing.planning import _trials

SCHEDULES = (
    el.StoreAll(),
    el.Recursive(4),
    el.Recursive(8, batch=8),
    el.Chunked(128, batch=16),
    el.Binomial(5, block=4),
)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_small_loops_take_the_memory_of_their_programs_in_use(schedule: Any):
    """XLA makes one function of such a loop."""

    def step(h: Any, x: jax.Array) -> tuple[Any, Any]:
        h = [jnp.sin(leaf + x) for leaf in h]
        return h, sum(h)

    def loss(h: Any, xs: jax.Array) -> Any:
        h, ys = el.Scan(step, schedule=schedule)(h, xs)
        return jnp.sum(ys) + sum(map(jnp.sum, h))

    gradient, types = jax.grad(loss, (0, 1)), ([jnp.ones(4)] * 6, jnp.ones((128, 4)))
    in_use: Any = jax.jit(gradient).lower(*types).compile().memory_analysis()
    assert temporary_bytes(gradient, *types) == in_use.temp_size_in_bytes


def test_batches_of_steps_lie_in_memory_as_in_programs_in_use():
    """XLA packs them in another way once it has made one function of a small loop."""
    schedule = el.Recursive(246, batch=82)

    def loss(cell: eqx.nn.GRUCell, h: jax.Array, xs: jax.Array) -> jax.Array:
        scan = el.Scan(lambda h, x: (cell(x, h), None), schedule=schedule)
        return jnp.sum(scan(h, xs)[0] ** 2)

    cell = eqx.nn.GRUCell(64, 64, key=jax.random.key(0))
    gradient, types = (
        jax.grad(loss, (0, 1, 2)),
        (cell, jnp.ones(64), jnp.ones((246, 64))),
    )
    in_use: Any = jax.jit(gradient).lower(*types).compile().memory_analysis()
    assert temporary_bytes(gradient, *types) == in_use.temp_size_in_bytes


# What cannot be compiled by itself is said to be estimated; all else is a fault.


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_compiled, "_said", set())


def in_a_vmap() -> None:
    summed = lambda x: jax.lax.psum(jnp.sin(x), "batch")

    def row(x: jax.Array) -> jax.Array:
        assert temporary_bytes(summed, jax.typeof(x)) is None
        assert temporary_bytes(summed, jax.typeof(x)) is None  # and said once
        return summed(x)

    jax.eval_shape(jax.vmap(row, axis_name="batch"), jnp.ones((3, 4)))


def after_a_vmap() -> None:
    summed = lambda x: jax.lax.psum(jnp.sin(x), "batch")
    assert temporary_bytes(summed, jnp.ones(4)) is None


def in_checkify() -> None:
    def checked(x: jax.Array) -> jax.Array:
        checkify.check(x[0] > 0, "negative")
        return x

    assert temporary_bytes(checked, jnp.ones(4)) is None


def on_many_devices() -> None:
    with jax.sharding.use_abstract_mesh(AbstractMesh((1000,), ("d",))):
        assert temporary_bytes(jnp.sin, jax.ShapeDtypeStruct((1000,), "f4")) is None


REASONS = {
    "a collective over 'batch'": in_a_vmap,
    "unbound axis name: batch": after_a_vmap,
    "a `checkify.check`": in_checkify,
    "split over 1000 devices, and of .* there are": on_many_devices,
}


@pytest.mark.parametrize("why", REASONS)
def test_that_something_is_estimated_is_said_once(why: str):
    match = f"eqloop: The memory of a plan is estimated, .*{why}"
    with pytest.warns(UserWarning, match=match) as said:
        REASONS[why]()
    assert [one.filename for one in said] == [__file__]


def test_faults_are_no_reasons(monkeypatch: pytest.MonkeyPatch):
    def fault(x: jax.Array) -> jax.Array:
        raise KeyError("a fault of this library")

    with pytest.raises(KeyError, match="a fault of this library"):
        temporary_bytes(fault, jnp.ones(3))
    with pytest.raises(ZeroDivisionError), by_itself((jnp.sin, [jnp.ones(3)])):
        raise ZeroDivisionError
    with pytest.raises(NotCompiledError, match="no room"), by_itself():
        raise jax.errors.JaxRuntimeError("no room\nfor this program")


@pytest.mark.parametrize("name", ["_side_by_side", "_timed"])
def test_trials_that_fail(name: str, monkeypatch: pytest.MonkeyPatch):
    plan = lambda size: el.Scan(
        lambda h, x: (jnp.tanh(h + x), None), schedule=el.Budget("64KiB")
    ).plan(jnp.ones(size), jnp.ones((20_000, size)))

    def failing(error: Exception) -> None:
        def fail(*args: Any) -> Any:
            raise error

        monkeypatch.setattr(_trials, name, fail)

    failing(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no room"))
    with pytest.warns(UserWarning, match=r"time of a plan is .*: RESOURCE_EXHAUSTED"):
        assert "estimated" in str(plan(17))
    failing(IndexError("a fault of this library"))
    with pytest.raises(IndexError, match="a fault of this library"):
        plan(18)
    if name == "_timed":
        with pytest.raises(IndexError, match="a fault of this library"):
            _trials.run_times([jnp.sin], [jax.typeof(jnp.ones(3))])
