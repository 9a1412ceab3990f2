"""How much memory a program takes: found sooner than by compiling it as it is used."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import eqloop as el
from eqloop._programs import temporary_bytes

SCHEDULES = (
    el.StoreAll(),
    el.Recursive(4),
    el.Recursive(8, batch=8),
    el.Chunked(128, batch=16),
    el.Binomial(5, block=4),
)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_small_loops_take_the_memory_of_their_programs_in_use(schedule: Any):
    """XLA makes one function of such a loop, but not where only memory is asked for."""

    def step(h: Any, x: jax.Array) -> tuple[Any, Any]:
        h = [jnp.sin(leaf + x) for leaf in h]
        return h, sum(h)

    def loss(h: Any, xs: jax.Array) -> Any:
        h, ys = el.Scan(step, schedule=schedule)(h, xs)
        return jnp.sum(ys) + sum(map(jnp.sum, h))

    gradient, types = jax.grad(loss, (0, 1)), ([jnp.ones(4)] * 6, jnp.ones((128, 4)))
    in_use: Any = jax.jit(gradient).lower(*types).compile().memory_analysis()
    assert temporary_bytes(gradient, *types) == in_use.temp_size_in_bytes


def test_passes_that_the_user_leaves_out_stay_out(monkeypatch: pytest.MonkeyPatch):
    given = list[Any]()
    compile = jax.stages.Lowered.compile

    def noting(self: Any, options: Any) -> Any:
        given.append(set(options))
        return compile(self, options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", noting)
    for flags in ("", "--xla_disable_hlo_passes=dce"):
        monkeypatch.setenv("XLA_FLAGS", flags)
        assert temporary_bytes(jnp.sin, jnp.ones(4)) is not None
    ours = {"xla_backend_optimization_level"}
    assert given == [{*ours, "xla_disable_hlo_passes"}, ours]
