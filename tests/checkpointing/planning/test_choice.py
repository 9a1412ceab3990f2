"""In which order layouts are compiled, and what of others is told from it."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import eqloop as el
from eqloop.checkpointing.engine._layout import Layout
from eqloop.checkpointing.engine._pace import Pace
from eqloop.checkpointing.engine.orders._levels import Nest
from eqloop.checkpointing.engine.orders._nested import Nested
from eqloop.checkpointing.engine.orders._revolved import Revolved
from eqloop.checkpointing.engine.reversals._together import Together
from eqloop.checkpointing.planning import _choice
from eqloop.checkpointing.planning._cost import step_cost
from eqloop.checkpointing.planning._memory_guess import Guess
from eqloop.checkpointing.planning._paces import Paces
from eqloop.checkpointing.planning._work import CPU

from ..noted import Noted
from ..steps import recurrent


class Cell(eqx.Module):
    """A step with many parameters."""

    weight: jax.Array

    def __call__(self, h: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(h @ self.weight + x), None


def nested(*levels: tuple[int, ...], batch: int = 8) -> Layout:
    return Layout(Nested(tuple(map(Nest, levels))), reversal=Together(batch))


@pytest.fixture(scope="module")
def guess_of_cell() -> tuple[Any, Any]:
    """What a recurrent step costs, and how to guess what its layouts take."""
    asked = []
    f, init, xs = recurrent(256)
    schedule = Noted(el.Chunked(8), asked)
    loss = lambda f: jnp.sum(el.Scan(f, schedule=schedule)(init, xs)[0])
    jax.make_jaxpr(jax.grad(loss))(f)
    ((problem, active, _),) = asked
    cost = step_cost(problem, active)
    return cost, lambda: Guess(Paces(Pace(cost, CPU)))


def test_the_simpler_of_two_layouts_has_fewer_nests_and_is_of_the_same_kind():
    two, one = nested((10, 8), (16,)), nested((12, 8))
    assert _choice._is_simpler(one, two)
    assert not _choice._is_simpler(two, one)
    assert not _choice._is_simpler(Layout(Revolved(96, 8, 1)), two)


def test_nothing_is_hoped_for_where_programs_compile_slowly(
    guess_of_cell: tuple[Any, Any],
):
    cost, _ = guess_of_cell
    guess = Guess(Paces(Pace(cost, CPU), compiles_slowly=True))
    one, other = Layout(Revolved(256, 8)), Layout(Nested((Nest((16, 16)),)))
    guess.learn(one, guess.counted(one) + 10**6)
    expected = guess.counted(other) + 3 * 10**6 // 2
    assert guess(other) == guess.at_best(other) == expected


def test_what_a_batch_takes_less_than_counted_is_not_taken_off_the_slots(
    guess_of_cell: tuple[Any, Any],
):
    cost, make = guess_of_cell
    guess = make()
    seen, more_slots = nested((16, 16), batch=16), nested((128, 16), batch=16)
    blocks = Together(16).block_bytes(cost, 1)
    guess.learn(seen, guess.counted(seen) - blocks // 2)
    added = guess.counted(more_slots) - guess.counted(seen)
    assert guess(more_slots) - guess(seen) == pytest.approx(added, abs=1)


def test_what_no_guess_foresees_is_told_from_another_kind(
    guess_of_cell: tuple[Any, Any],
):
    # As of a step with a checkpoint of its own, which computes much on its way back.
    _, make = guess_of_cell
    guess = make()
    flat, deep = nested((256,)), nested((16, 16))
    foreseen = guess(deep)
    guess.learn(flat, guess.counted(flat) + 2 * (foreseen - guess.counted(deep)))
    assert guess(deep) == foreseen
    guess.learn(flat, guess.counted(flat) + 10**8)
    assert guess(deep) == guess.counted(deep) + 10**8


def test_there_is_hope_for_a_kind_until_one_that_is_like_it_was_compiled(
    guess_of_cell: tuple[Any, Any],
):
    _, make = guess_of_cell
    guess = make()
    flat, deep = nested((256,)), nested((16, 16))
    assert guess.at_best(deep) == guess.counted(deep) < guess(deep)
    more = 2 * (guess(deep) - guess.counted(deep))
    guess.learn(flat, guess.counted(flat) + more)
    assert guess.at_best(deep) == guess(deep) == guess.counted(deep) + more // 2
    guess.learn(flat, guess.counted(flat) + 1000)
    assert guess.at_best(deep) == guess.counted(deep) + 1000
    guess.learn(deep, guess.counted(deep) + 500)
    assert guess.at_best(deep) == guess(deep) == guess.counted(deep) + 500


def test_of_a_smaller_batch_less_is_hoped_for(guess_of_cell: tuple[Any, Any]):
    cost, make = guess_of_cell
    guess = make()
    small, like_it, large = (nested((16, 16), batch=size) for size in (4, 8, 16))
    guess.learn(nested((256,)), guess.counted(nested((256,))) + 1000)
    part = Together(4).block_bytes(cost, 1) / Together(8).block_bytes(cost, 1)
    assert part < 0.9
    hope = lambda layout: guess.at_best(layout) - guess.counted(layout)
    assert [hope(small), hope(like_it), hope(large)] == [int(1000 * part), 1000, 1000]


def test_the_fastest_that_may_fit_is_compiled_first(monkeypatch: pytest.MonkeyPatch):
    """Of parameters a batch takes no more than is counted, however many they are."""
    tried = list[Layout]()
    taken = _choice.device_bytes

    def noted(problem: Any, active: Any, layout: Layout, *rest: Any) -> int:
        tried.append(layout)
        return taken(problem, active, layout, *rest)

    monkeypatch.setattr(_choice, "device_bytes", noted)
    scan = el.Scan(Cell(jnp.eye(192)), schedule=el.Budget(300_000, measure=False))
    found = scan.plan(jnp.zeros((1, 192)), jnp.ones((128, 1, 192)))
    assert tried == [found._layout]


def test_room_that_is_left_is_filled():
    """Of a kind that takes less than was guessed, more is stored after all."""
    layers = jnp.zeros((24, 128, 512)), jnp.zeros((24, 512, 128))
    step = lambda h, w: (h + jax.nn.gelu(h @ w[0]) @ w[1], None)
    plan = lambda schedule: el.Scan(step, schedule=schedule).plan(
        jnp.zeros((128, 128)), layers
    )
    full = plan(el.StoreAll()).peak_bytes
    for part in (0.95, 0.75):
        found = plan(el.Budget(int(part * full), measure=False))
        assert found.evaluations <= 24 * (1 + 1.1 * (1 - part)) + 2
        assert found.peak_bytes <= part * full
