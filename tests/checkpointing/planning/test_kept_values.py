"""What a step keeps by `policy="auto"`: the model's bytes and times, and the search."""

import dataclasses
import itertools
import math
import random

import jax
import jax.numpy as jnp
import pytest

import eqloop as el
from eqloop._compat import form_of, form_params
from eqloop.checkpointing.engine._kept_names import with_named_dots
from eqloop.checkpointing.engine._layout import Layout
from eqloop.checkpointing.engine._loop_spec import LoopSpec
from eqloop.checkpointing.engine.orders._all_at_once import AllAtOnce
from eqloop.checkpointing.planning._cost import step_cost
from eqloop.checkpointing.planning._kept_values import (
    KeptValues,
    Operation,
    costs_by_kept,
    kept_values,
)
from eqloop.checkpointing.planning._memory import peak_bytes
from eqloop.checkpointing.planning._paces import paces

from .transformer import stacked


class Asked(Exception):
    """A schedule was asked to plan a loop."""


@dataclasses.dataclass(frozen=True)
class Spy(el.AbstractSchedule):
    def layout(self, loop: LoopSpec) -> Layout:
        raise Asked(loop)


def loop_of(plan, *args) -> LoopSpec:
    with pytest.raises(Asked) as asked:
        plan(*args)
    (loop,) = asked.value.args
    problem = dataclasses.replace(loop._problem, planner=el.StoreAll())
    return LoopSpec(problem, loop._active)


def loop_of_layers(depth: int = 4) -> LoopSpec:
    layers, x = stacked(depth, schedule=Spy())
    return loop_of(layers.plan, x)


def test_the_values_of_a_transformer():
    loop = loop_of_layers()
    names = kept_values(loop._problem, loop._active).names
    # A dot that the user has named has no other name, and no reversal reads the last.
    assert {"attention", "up"} <= set(names)
    assert sum(name.startswith("dot ") for name in names) == 4
    assert all("at transformer.py:" in n for n in names if n.startswith("dot "))


def test_bytes_and_time_are_those_of_the_step_as_it_is_differentiated():
    loop = loop_of_layers()
    values = kept_values(loop._problem, loop._active)
    none = step_cost(loop._problem.keeping(()), loop._active)
    sets = random.Random(0).sample(list(_subsets(values.names)), 8)
    for kept in [values.names, *sets]:
        found = step_cost(loop._problem.keeping(kept), loop._active)
        size, work = values.cost(kept)
        assert found.residuals - none.residuals == size
        saved = values.cost(())[1] - work
        assert math.isclose(none.reversal - found.reversal, saved, rel_tol=1e-9)


def test_costs_are_told_from_that_of_keeping_nothing():
    loop = loop_of_layers()
    for kept, cost in costs_by_kept(loop._problem, loop._active):
        found = step_cost(loop._problem.keeping(kept), loop._active)
        assert math.isclose(found.reversal, cost.reversal, rel_tol=1e-9)
        # Of slots and of batches nobody asks where values are kept, which is in blocks.
        same = ("reversal", "started_once", "dots_once", "maps")
        own = {name: getattr(found, name) for name in same}
        assert dataclasses.replace(cost, **own) == found


def test_dots_are_named_once():
    step = jax.make_jaxpr(lambda w, x: jnp.tanh(el.name(w @ (w @ x), "second")))
    program = step(jnp.ones((2, 2)), jnp.ones(2))
    named = with_named_dots(program)
    equations = [e for e in named.eqns if form_of(e) == "name"]
    names = [form_params(e)["name"] for e in equations]
    assert [name.split(" at ")[0] for name in names] == ["dot 1", "second"]
    assert with_named_dots(named) is named
    nothing = jax.make_jaxpr(jnp.sin)(1.0)
    assert with_named_dots(nothing) is nothing


def test_dots_in_inner_calls_are_values_too():
    inner = jax.jit(lambda w, h: jnp.tanh(w @ h))
    scan = el.Scan(lambda h, w: (inner(w, h), None), schedule=Spy())
    loop = loop_of(scan.plan, jnp.ones(3), jnp.ones((5, 3, 3)))
    values = kept_values(loop._problem, loop._active)
    (name,) = values.names
    assert name.startswith("dot 1")
    assert values.cost((name,))[0] == 3 * 4


def _subsets(names):
    for count in range(len(names) + 1):
        yield from itertools.combinations(names, count)


def graph(count: int, seed: int) -> KeptValues:
    """Values of random sizes that take random times, each read by others at random."""
    rng = random.Random(seed)
    operations = []
    for i in range(count):
        reads = tuple(j for j in range(i) if rng.random() < 2 / max(i, 1))
        work, size = rng.uniform(1, 20), rng.randint(1, 50)
        operations.append(Operation(reads, (i,), work, f"v{i}", size))
    read = frozenset(i for i in range(count) if rng.random() < 0.5) | {count - 1}
    return KeptValues(tuple(operations), read)


def best_within(sets, nbytes):
    return min(work for _, size, work in sets if size <= nbytes)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("count", "bound"), [(7, 1.0), (13, 1.05)])
def test_no_other_set_is_better(seed, count, bound):
    values = graph(count, seed)
    every = [(kept, *values.cost(kept)) for kept in _subsets(values.names)]
    found = values.best()
    sizes = [size for _, size, _ in found]
    assert sizes == sorted(set(sizes))
    whole = values.cost(values.names)[0]
    base = sum(operation.work for operation in values.operations)
    for part in (0, 0.1, 0.25, 0.5, 0.75, 1):
        best = best_within(every, part * whole)
        # A gradient takes the time of the step, there and back, besides.
        took = 3 * base + best_within(found, part * whole)
        assert took <= bound * (3 * base + best) + 1e-9


@pytest.mark.slow
def test_a_budget_beside_all_sets_of_values():
    """At five budgets, by the plan's own times, within the memory that was measured."""
    loop = loop_of_layers()
    names = kept_values(loop._problem, loop._active).names
    layout = lambda kept: Layout(AllAtOnce(loop.length), kept=kept)
    problem = dataclasses.replace(loop._problem, chooses_policy=True)
    times = paces(problem, loop._active, measure=False)
    every = []
    for kept in _subsets(names):
        size = peak_bytes(loop._problem, loop._active, layout(kept))
        bare = step_cost(loop._problem.keeping(kept), loop._active)
        own = dataclasses.replace(times.base, cost=bare)
        every.append((size, layout(kept).duration(own)))
    smallest, largest = min(every)[0], max(every)[0]
    for part in (0.02, 0.25, 0.5, 0.75, 1):
        nbytes = round(smallest + part * (largest - smallest))
        budget = el.Budget(nbytes, measure=False)
        layers, x = stacked(4, schedule=budget, policy="auto")
        plan = layers.plan(x)
        assert plan.peak_bytes <= nbytes
        everything = layout(None).duration(times.base)
        best = min(time for size, time in every if size <= nbytes)
        assert plan.relative_time * everything <= 1.05 * best
