"""Budgets of two places: they hold in both, and gradients are those of a scan."""

import dataclasses
import functools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqloop as el
from eqloop.checkpointing._schedules import Pinned
from eqloop.checkpointing.engine.orders._nested import Nested
from eqloop.checkpointing.engine.orders._revolved import Revolved
from eqloop.checkpointing.engine.orders._segmented import Segmented
from eqloop.checkpointing.engine.slots._file_slots import FileSlots
from eqloop.checkpointing.engine.slots._host_slots import HostSlots
from eqloop.checkpointing.engine.slots._slots import DeviceSlots
from eqloop.checkpointing.engine.slots._spill_files import SpillFiles
from eqloop.checkpointing.planning import _choice, _memory_guess
from eqloop.checkpointing.planning._paces import Far, paces

from .. import derivatives
from ..compiling import temp_bytes
from ..derivatives import CONTEXTS, MODES, assert_agrees, name, scan
from ..marks import slow, slow_if
from .memory import gradient
from .steps import recurrent

pytestmark = pytest.mark.sampled


@dataclasses.dataclass(frozen=True)
class Leaves(el.AbstractSchedule):
    """Equal leaves, as a budget of two places chooses them for larger loops.

    Attributes:
        far: How many leaves there are, at most.
        near: How many slots there are for each, on the device.
        block: How many steps the blocks of a leaf have.
        slots: Where the carries at the starts of leaves are.
    """

    far: int
    near: int
    block: int = 1
    slots: str = "host"

    def layout(self, loop):
        files = FileSlots(".", SpillFiles("."))
        slots = dict(host=HostSlots(), files=files, device=DeviceSlots())
        each = -(-loop.length // self.far)
        count, over = divmod(loop.length, each)
        parts = [(1, over)] * (over > 0) + [(count, each)]
        of = lambda length: Revolved(length, self.near, min(self.block, length))
        order = Segmented(tuple((count, of(length)) for count, length in parts))
        return el.Layout(order, slots[self.slots])


SCHEDULES = (
    Leaves(2, 2),
    Leaves(9, 1, slots="files"),
    Leaves(3, 2, block=2),
    Leaves(2, 1, block=3, slots="device"),
)
# In JAX 0.10 there are loops that it cannot transpose with slots on the host.
ON_DEVICE = [dataclasses.replace(one, slots="device") for one in SCHEDULES[:3]]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
@pytest.mark.parametrize(
    "mode",
    slow_if(lambda mode: mode is not derivatives.grad, MODES),
    ids=name,
)
def test_modes(mode, schedule):
    assert_agrees(mode, derivatives.plain, scan(schedule))


def test_under_vmap():
    assert_agrees(derivatives.vjp, derivatives.vmap, scan(SCHEDULES[0]))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ON_DEVICE, ids=repr)
@pytest.mark.parametrize("context", CONTEXTS, ids=name)
@pytest.mark.parametrize("mode", [derivatives.grad, derivatives.reverse_over_reverse])
def test_contexts(mode, context, schedule):
    assert_agrees(mode, context, scan(schedule))


def test_with_64_bits():
    with jax.enable_x64(True):
        mode = derivatives.forward_over_reverse
        assert_agrees(mode, derivatives.plain, scan(SCHEDULES[2]))


@pytest.mark.parametrize(
    "length", [1, slow(2), slow(3), slow(11), slow(24), 41], ids="{} steps".format
)
@pytest.mark.parametrize(
    "settings",
    [slow((1, 1)), slow((2, 3)), slow((3, 2, 4)), (3, 3, 3)],
    ids=str,
)
def test_gradients_agree(length, settings):
    args = recurrent(length, width=4)
    both = (jax.jit(gradient(s))(*args) for s in (Leaves(*settings), None))
    for a, b in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "schedule", [slow(SCHEDULES[0]), SCHEDULES[1], slow(SCHEDULES[2])], ids=repr
)
def test_loops_that_stop(schedule):
    """For as many steps as there may be, and for each example of a batch its own."""

    def loss(schedule, limit, h):
        f = lambda h, x: (jnp.sin(h) + x, h * x)
        cond = lambda h: jnp.sum(h) < limit
        loop = el.ScanWhile(cond, f, max_steps=20, schedule=schedule)
        carry, ys, _ = loop(h, jnp.linspace(0.1, 0.5, 20))
        return jnp.sum(carry**2) + jnp.sum(jnp.cos(ys))

    limits = jnp.array([0.0, 1.0, 3.0, 6.0, 9.0, 100.0])
    grads = [
        jax.jit(jax.vmap(jax.grad(functools.partial(loss, one), 1), (0, None)))
        for one in (schedule, None)
    ]
    found, expected = (grad(limits, jnp.array([0.1, 0.2])) for grad in grads)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    one = jax.jit(jax.grad(functools.partial(loss, schedule), 1))
    for limit, row in zip(limits[::2], expected[::2], strict=True):
        found = one(limit, jnp.array([0.1, 0.2]))
        np.testing.assert_allclose(found, row, rtol=1e-4)


def counted(schedule, length=23):
    """How often the step was run for a gradient, as a callback counts it."""
    calls = []

    def step(h, x):
        jax.debug.callback(lambda: calls.append(1))
        return jnp.sin(h + x), None

    run = lambda h: el.Scan(step, schedule=schedule)(h, jnp.ones(length))[0]
    jax.block_until_ready(jax.jit(jax.grad(run))(0.1))
    jax.effects_barrier()
    return len(calls), el.Scan(step, schedule=schedule).plan(0.1, jnp.ones(length))


@pytest.mark.parametrize(
    "schedule",
    [Leaves(3, 2), slow(Leaves(4, 1)), slow(Leaves(2, 3)), slow(Leaves(6, 2))],
    ids=repr,
)
def test_evaluations_are_those_of_the_plan(schedule):
    calls, plan = counted(schedule)
    assert calls == plan.evaluations


# Budgets


class Heavy(eqx.Module):
    """A step that takes long enough for its carry to be moved meanwhile."""

    weight: jax.Array

    def __call__(self, h, x):
        for _ in range(4):
            h = jnp.tanh(self.weight @ h + x)
        return h, None


def heavy(width=64, length=150):
    # Of the first steps, too, something is left at the end: their cotangents are not 0.
    init = jnp.full((width, width), 0.1)
    return Heavy(jnp.eye(width)), init, jnp.zeros(length)


ARGS = heavy()
BUDGETS = [
    el.Budget("160KiB", host="320KiB", measure=False),
    el.Budget("200KiB", host="4MiB", measure=False),
]


def on_device(plan, size):
    """What of some memory is the device's: on a CPU the host has the same."""
    return size - plan.bytes_elsewhere * (jax.default_backend() == "cpu")


@pytest.mark.parametrize("budget", [BUDGETS[0], slow(BUDGETS[1])], ids=repr)
@pytest.mark.slow
def test_a_budget_holds_in_both_places(budget):
    f, init, xs = ARGS
    plan = el.Scan(f, schedule=budget).plan(init, xs)
    assert 0 < plan.bytes_elsewhere <= budget.host
    temp = temp_bytes(gradient(budget), *ARGS)
    assert on_device(plan, temp) <= budget.nbytes
    assert temp <= plan.peak_bytes
    alone = el.Budget(budget.nbytes, measure=False)
    assert plan.evaluations < el.Scan(f, schedule=alone).plan(init, xs).evaluations
    pinned = el.Scan(f, schedule=plan.pinned).plan(init, xs)
    assert pinned.pinned == plan.pinned


def test_the_plan_says_what_is_where():
    plan = el.Scan(ARGS[0], schedule=BUDGETS[0]).plan(*ARGS[1:])
    far = len(plan._layout.order.starts)
    text = str(plan)
    assert f"{plan.slots}, 16 KiB each" in text
    assert plan.bytes_elsewhere == (far + 1) * 2**14
    assert f"elsewhere          {16 * (far + 1)} KiB on the host" in text


def test_gradients_under_a_budget():
    plan = el.Scan(ARGS[0], schedule=BUDGETS[0]).plan(*ARGS[1:])
    assert plan.bytes_elsewhere
    both = (jax.jit(gradient(s))(*ARGS) for s in (BUDGETS[0], None))
    for a, b in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("measure", [False, slow(True)], ids=["estimated", "measured"])
@pytest.mark.slow
def test_a_budget_of_files(tmp_path, measure):
    f, init, xs = heavy(128, 64)
    places = dict(disk="1.2MiB", directory=tmp_path)
    budget = el.Budget("600KiB", **places, measure=measure)
    plan = el.Scan(f, schedule=budget).plan(init, xs)
    if not measure:
        assert 0 < plan.bytes_elsewhere <= budget.disk
        assert f"MiB in files in {str(tmp_path)!r}" in str(plan)
    run = lambda schedule: jax.jit(
        jax.grad(lambda h: jnp.sum(el.Scan(f, schedule=schedule)(h, xs)[0] ** 2))
    )
    np.testing.assert_allclose(run(plan.pinned)(init), run(None)(init), rtol=1e-4)
    jax.effects_barrier()
    assert not list(tmp_path.iterdir())


def test_a_second_place_that_holds_nothing_changes_nothing():
    plain = el.Scan(ARGS[0], schedule=el.Budget("160KiB", measure=False))
    small = el.Scan(ARGS[0], schedule=el.Budget("160KiB", host="20KiB", measure=False))
    assert plain.plan(*ARGS[1:]).pinned == small.plan(*ARGS[1:]).pinned


@pytest.mark.slow
def test_too_small_a_budget_is_told_the_least():
    f, init, xs = recurrent(20, width=16)
    with pytest.raises(ValueError, match="does not fit into 64 B") as error:
        el.Scan(f, schedule=el.Budget(64, host="1MiB", measure=False)).plan(init, xs)
    least = int(str(error.value).split("which is ")[1].split()[0])
    enough = el.Budget(least, host="1MiB", measure=False)
    assert on_device_peak(el.Scan(f, schedule=enough).plan(init, xs)) <= least


def test_the_least_does_if_less_is_taken_than_was_counted(monkeypatch):
    counted = _memory_guess.counted_bytes
    more = lambda layout, cost: counted(layout, cost) + 2**20
    monkeypatch.setattr(_memory_guess, "counted_bytes", more)
    taken = _choice.device_bytes
    near = lambda *args: taken(*args) + 2**20 * (not args[-1].is_elsewhere)
    monkeypatch.setattr(_choice, "device_bytes", near)
    f, init, xs = recurrent(20, width=16)
    plan = lambda nbytes: el.Scan(
        f, schedule=el.Budget(nbytes, host="1MiB", measure=False)
    ).plan(init, xs)
    with pytest.raises(ValueError, match=" on the host") as error:
        plan(64)
    least = int(str(error.value).split("which is ")[1].split()[0])
    assert on_device_peak(plan(least)) <= least


@pytest.mark.parametrize(
    ("near", "far", "move", "expected"),
    [
        # Few far slots and dear moves: leaves that are reversed on the device.
        (12, 4, 8.0, Segmented),
        # Cheap moves: all slots far.
        (2, 40, 0.01, Revolved),
        # There is room for each carry: they are read once.
        (2, 1000, 0.01, Nested),
    ],
    ids=str,
)
def test_what_is_chosen(near, far, move, expected, monkeypatch):
    """By the pace and the bytes that are counted, without compiling anything."""
    problem, times = planned()
    cost, guess = times.base.cost, _memory_guess.Guess
    of_far = lambda guess, one: guess.counted(one) if one.is_elsewhere else math.inf
    monkeypatch.setattr(guess, "at_best", of_far)
    second = Far(HostSlots(), far, move * times.base.advance)
    times = dataclasses.replace(times, are_tried=False, far=second)
    room = (near + 1) * (cost.held + 8)
    layout = _choice._chosen.__wrapped__(problem, room, times, ())
    assert isinstance(layout.order, expected)
    assert layout.bytes_elsewhere(cost) <= (far + 1) * cost.held


def planned():
    """A loop of 400 steps, and its estimated pace."""
    seen = []

    @dataclasses.dataclass(frozen=True)
    class Seen(el.AbstractSchedule):
        def layout(self, loop):
            seen.append((loop._problem, loop._active))
            return el.Layout(Revolved(loop.length, 2))

    f, init, xs = heavy(length=400)
    el.Scan(f, schedule=Seen()).plan(init, xs)
    return seen[0][0], paces(*seen[0], measure=False)


@pytest.mark.parametrize(
    "settings", [(60, 19), (60, 60), (61, 10, 4), (400, 40, 8)], ids=str
)
def test_moves_of_far_slots_are_about_as_many_as_estimated(settings, monkeypatch):
    moves = []
    for which in ("read", "write"):
        move = getattr(SpillFiles, which)
        counting = lambda *args, move=move: (moves.append(1), move(*args))[1]
        monkeypatch.setattr(SpillFiles, which, counting)
    order = Revolved(*settings)
    pinned = Pinned(el.Layout(order, FileSlots(".", SpillFiles("."))))
    run = lambda h: el.Scan(lambda h, x: (jnp.sin(h) + x, None), schedule=pinned)(
        h, jnp.zeros(order.length)
    )
    jax.block_until_ready(jax.jit(jax.grad(lambda h: run(h)[0]))(0.1))
    jax.effects_barrier()
    assert 0.85 < order.moves / len(moves) < 1.15


def on_device_peak(plan):
    return plan.peak_bytes - round(1.005 * plan.bytes_elsewhere)


def test_what_budget_takes(tmp_path):
    with pytest.raises(ValueError, match="`host` or `disk`, and not both"):
        el.Budget("1MiB", host="1GiB", disk="1GiB", directory=tmp_path)
    for wrong in (dict(disk="1GiB"), dict(directory=tmp_path)):
        with pytest.raises(ValueError, match="`disk` and `directory` belong together"):
            el.Budget("1MiB", **wrong)
    with pytest.raises(ValueError, match="Budget: `host='1 lb'` is not an amount"):
        el.Budget("1MiB", host="1 lb")
    with pytest.raises(TypeError, match="Budget: `disk` must be an int"):
        el.Budget("1MiB", disk=1.5, directory=tmp_path)
    with pytest.raises(NotADirectoryError, match="Budget: `directory` must be an"):
        el.Budget("1MiB", disk="1GiB", directory=tmp_path / "none")
    budget = el.Budget("1MiB", disk="1GiB", directory=tmp_path)
    text = f"Budget(nbytes='1MiB', disk='1GiB', directory={str(tmp_path)!r})"
    assert repr(budget) == text
    assert budget == dataclasses.replace(budget)
    assert hash(budget) == hash(el.Budget(2**20, disk=2**30, directory=str(tmp_path)))


def test_maps_have_no_second_place():
    budget = el.Budget("1MiB", host="1GiB")
    with pytest.raises(ValueError, match="ChunkedVmap: the budget of a map"):
        el.ChunkedVmap(jnp.sin, budget)(jnp.ones(3))
