"""The plan of a map: its chunks, and what they take."""

import dataclasses
from typing import Any

import jax

from .._arrays import is_dynamic, is_inexact, pick, put
from .._calls import format_bytes, open_gradient
from .._device import planning_for_call
from .._programs import equations, formula_of, programs_in, temporary_bytes
from .._types import AnyJaxpr, PyTree, Value
from ..checkpointing import as_table, unlisted
from ._chunk_loop import Chunks
from ._planned_map import PlannedMap


@dataclasses.dataclass(frozen=True)
class MapCost:
    """What one run of a map takes.

    Attributes:
        chunk_size: How many rows are run at once; `None` for all.
        chunks: How many chunks there are.
        peak_bytes: Bytes that it allocates at once, besides its inputs and outputs;
            `None` if it cannot be compiled by itself.
    """

    chunk_size: int | None
    chunks: int
    peak_bytes: int | None

    def __str__(self) -> str:
        size = "unknown" if self.peak_bytes is None else format_bytes(self.peak_bytes)
        if self.chunk_size is None:
            return f"{size}, all rows at once"
        return f"{size}, {self.chunks} x {self.chunk_size} rows"


@dataclasses.dataclass(frozen=True)
class MapPlan:
    """How a map cuts its rows into chunks, and what that takes.

    `plan` of a map returns it. Printed, it is a table.

    Attributes:
        name: The name of the transform.
        value: What a call takes.
        gradient: What its gradient by all inputs takes, which runs each chunk again,
            as nothing but the arguments is stored. `None` if there is none.

    Examples:
        >>> import eqloop as el, jax, jax.numpy as jnp
        >>> plan = el.ChunkedVmap(jnp.sin, 300).plan(jnp.ones((1000, 8)))
        >>> plan.value.chunk_size, plan.value.chunks
        (250, 4)
        >>> print(plan)
        ChunkedVmap
          value              ... B, 4 x 250 rows
          gradient           ... B, 4 x 250 rows
    """

    name: str
    value: MapCost
    gradient: MapCost | None

    def __str__(self) -> str:
        costs = {"value": self.value, "gradient": self.gradient}
        rows = [(name, str(cost)) for name, cost in costs.items() if cost is not None]
        return as_table(self.name, rows)


def plan_of_map(run: Any, args: tuple[PyTree, ...], kwargs: dict[str, Any]) -> MapPlan:
    """The plan of a call of a map."""
    arrays, rest = open_gradient(run, args, kwargs)
    nonzeros = list(map(is_inexact, arrays))

    def value(*arrays: Value) -> list[Value]:
        run, args, kwargs = rest.join(arrays)
        return list(filter(is_dynamic, jax.tree.leaves(run(*args, **kwargs))))

    def gradient(arrays: list[Value], cts: list[Value]) -> PyTree:
        moving = lambda *xs: list(filter(is_inexact, value(*put(arrays, nonzeros, xs))))
        return jax.vjp(moving, *pick(arrays, nonzeros))[1](cts)

    def cost(of: Any, *types: PyTree) -> MapCost:
        chunks = _chunks(jax.make_jaxpr(of)(*types))
        size = temporary_bytes(of, *types)
        if chunks is None:
            return MapCost(None, 1, size)
        return MapCost(chunks.size, chunks.count + bool(chunks.rest), size)

    with planning_for_call(None, arrays), unlisted():
        found = cost(value, *arrays)
        cts = list(filter(is_inexact, jax.eval_shape(value, *arrays)))
        of_gradient = cost(gradient, arrays, cts) if cts and any(nonzeros) else None
    return MapPlan(type(run).__name__, found, of_gradient)


def _chunks(program: AnyJaxpr) -> Chunks | None:
    """The chunks of the map that ends a program; `None` if all rows are run at once."""
    outside = lambda eqn: [] if formula_of(eqn) else programs_in(eqn)
    formulas = map(formula_of, equations(program, outside))
    maps = [formula for formula in formulas if isinstance(formula, PlannedMap)]
    return maps[-1].planner.loop(maps[-1].f).chunks if maps else None
