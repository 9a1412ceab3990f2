"""The plan of a map: its chunks, and what its programs take."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import eqloop as el

from ..compiling import temp_bytes
from ..weights import normal

X, W = normal(0, (100, 8)), normal(1, (8, 64))
row = lambda x: jnp.tanh(jnp.tanh(x @ W) @ W.T)
MAPS: dict[str, tuple[Any, int, int | None, int]] = {
    "chunks": (el.ChunkedVmap(row, 30), 100, 25, 4),
    "a shorter one": (el.ChunkedVmap(row, 40), 97, 33, 3),
    "one by one": (el.Map(row), 100, 1, 100),
    "all": (el.ChunkedVmap(row, 100), 100, None, 1),
}


@pytest.mark.parametrize("name", MAPS)
def test_a_plan_is_what_is_compiled(name: str):
    run, length, size, count = MAPS[name]
    x = X[:length]
    plan = run.plan(jax.ShapeDtypeStruct(x.shape, x.dtype))
    assert (plan.name, plan.value.chunk_size) == (type(run).__name__, size)
    assert plan.value.chunks == plan.gradient.chunks == count
    assert plan.gradient.chunk_size == size
    gradient = lambda x, ct: jax.vjp(run, x)[1](ct)
    for cost, program, args in (
        (plan.value, run, (x,)),
        (plan.gradient, gradient, (x, x)),
    ):
        assert cost.peak_bytes == pytest.approx(temp_bytes(program, *args), rel=0.1)
    assert str(plan).splitlines()[0] == plan.name
    rows = "all rows at once" if size is None else f"{count} x {size} rows"
    assert rows in str(plan)


def test_the_chunks_of_a_budget_are_told_apart_from_those_of_its_gradient():
    mean = el.ChunkedVmap(lambda x: jnp.sum(row(x)), el.Budget("20KiB"), reduce="mean")
    plan = mean.plan(X)
    assert 0 < plan.gradient.chunk_size < plan.value.chunk_size < 100
    assert max(plan.value.peak_bytes, plan.gradient.peak_bytes) <= 20 * 2**10
    with pytest.raises(ValueError, match="a single row takes"):
        el.ChunkedVmap(row, el.Budget("100B")).plan(X)


def test_what_has_no_gradient_has_no_plan_of_one():
    plan = el.ChunkedVmap(lambda i: i + 1, 8).plan(jnp.arange(20))
    assert plan.gradient is None
    assert "gradient" not in str(plan)
    with pytest.raises(ValueError, match="with a `policy`, values of all rows"):
        el.ChunkedVmap(row, 8, policy="save_dots").plan(X)
    assert "ChunkedVmap(f, n).plan(...)" in str(el.plans(el.ChunkedVmap(row, 8))(X))
