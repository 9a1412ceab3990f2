"""`_device.py`: which device a plan is for, and what is compiled and run for it."""

import importlib.util
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh

import eqloop as el
from eqloop import _device
from eqloop._device import PlannedDevice, planning_device, remembered_per_device
from eqloop._known_devices import KNOWN, compile_only_device, known_name
from eqloop._programs import _lowering, lowered, temporary_bytes
from eqloop.checkpointing.planning import _facts, _paces, _trials

from .asserts import assert_raises
from .mapping.devices import explicit_mesh_of, mesh_of
from .marks import slow


def elsewhere(name: str) -> jax.Device:
    """A device that is not here, for a test that is skipped without its compiler."""
    try:
        return compile_only_device(name)
    except ImportError as error:
        pytest.skip(str(error))


def stack(h, x):
    return jnp.tanh(h @ jnp.eye(8) + x), None


SCAN = el.Scan(stack, schedule=el.Budget("64KiB", measure=False))
ARGS = jnp.zeros((4, 8)), jnp.zeros((1000, 4, 8))


def test_by_default_it_is_that_on_which_a_program_runs():
    first, *_, last = jax.devices()
    assert planning_device() == PlannedDevice(first)
    with jax.default_device(last):
        assert planning_device() == PlannedDevice(last)
    with jax.default_device("cpu"):
        assert planning_device() == PlannedDevice(first)


@pytest.mark.parametrize("kind", [mesh_of, explicit_mesh_of])
def test_it_is_one_of_the_mesh_that_is_set(kind):
    seen = []

    def f(x):
        seen.append(planning_device())
        return x

    with jax.default_device(jax.devices()[-1]), jax.set_mesh(kind(a=8)):
        jax.jit(f)(jnp.zeros(8))
    assert seen == [PlannedDevice(jax.devices()[0])]


def test_nobody_else_asks_for_the_backend():
    asked = re.compile(r"default_backend\(|jax\.(local_)?devices\(\)\[0\]")
    examples = re.compile(r"(?m)^ *(>>>|\.\.\.).*$")
    for path in pathlib.Path(el.__file__).parent.rglob("*.py"):
        assert not asked.search(examples.sub("", path.read_text())), path


def test_the_innermost_context_decides():
    one, other, *_ = jax.devices()
    with el.planning_for(one), jax.default_device(other):
        assert planning_device().own is one
        with el.planning_for(Mesh([other], "a")):
            assert planning_device().own is other
        with el.planning_for("cpu"):
            assert planning_device().own is jax.devices()[0]
        assert planning_device().own is one


def test_what_was_traced_for_one_device_is_traced_again_for_another():
    seen = []

    @jax.jit
    def f(x):
        seen.append(planning_device().own)
        return x

    one, other, *_ = jax.devices()
    for device in (one, other, one):
        with el.planning_for(device):
            f(1.0)
    assert seen == [one, other]


def test_a_cache_has_the_device_in_its_key():
    seen = []

    @remembered_per_device(maxsize=8)
    def f(x, y=0):
        seen.append((planning_device().own, x, y))
        return x

    one, other, *_ = jax.devices()
    for device in (one, other, one):
        with el.planning_for(device):
            assert f(1) == f(1) == 1
    assert seen == [(one, 1, 0), (other, 1, 0)]
    f.cache_clear()
    f(1)
    assert len(seen) == 3


LAYERS = el.StackedLayers(
    jax.tree_util.Partial(lambda a, x: jnp.sin(a * x), jnp.ones(64)),
    schedule=SCAN.schedule,
)
ROWS = el.ForLoop(jnp.sin, schedule=SCAN.schedule)
UNTIL = el.ScanWhile(
    lambda h: h.sum() < 9, stack, max_steps=1000, schedule=SCAN.schedule
)
PLANNED = {
    "plan": lambda **on: SCAN.plan(*ARGS, **on),
    "plans": lambda **on: el.plans(jax.grad(lambda *a: SCAN(*a)[0].sum()), **on)(*ARGS),
    "frontier": lambda **on: SCAN.frontier(*ARGS, **on),
    "plan of layers": lambda **on: LAYERS.plan(jnp.ones(500), **on),
    "plan of a for loop": lambda **on: ROWS.plan(jnp.ones(500), **on),
    "plan of a scan that stops": lambda **on: UNTIL.plan(*ARGS, **on),
}


@pytest.mark.sampled
@pytest.mark.parametrize("i", range(len(PLANNED)), ids=list(PLANNED))
def test_plans_are_for_the_device_that_is_given(monkeypatch, i):
    compiled = []
    trace = _lowering._traced

    def noted(device, *about):
        compiled.append(device.own)
        return trace(device, *about)

    monkeypatch.setattr(_lowering, "_traced", noted)
    # Each has a device of its own, for which nothing is known yet.
    device = jax.devices()[i + 1]
    list(PLANNED.values())[i](device=device)
    assert set(compiled) == {device}


@pytest.mark.parametrize("name", ["h100", "v5e"])
def test_arrays_that_were_put_on_a_device_are_planned_for_there(name):
    mesh = Mesh(elsewhere(name).client.devices()[:8], "b")
    spread = jax.NamedSharding(mesh, jax.P(None, "b"))
    init = jax.ShapeDtypeStruct((4, 8), jnp.float32)
    xs = jax.ShapeDtypeStruct((1000, 8, 8), jnp.float32, sharding=spread)
    step = lambda h, x: (jnp.tanh(h + x[:4]), None)
    scan = el.Scan(step, schedule=el.Chunked(10))
    assert scan.plan(init, xs).device == KNOWN[name].compiler.kind
    assert scan.plan(init, xs, device="cpu").device is None
    gradient = jax.grad(lambda h, xs: scan(h, xs)[0].sum())
    assert el.plans(gradient)(init, xs)[0].plan.device == KNOWN[name].compiler.kind


def test_times_are_taken_on_the_device_and_nowhere_else(monkeypatch):
    ran_on = []

    def times(programs, compiled):
        (sharding,) = {jax.tree.leaves(one.input_shardings)[0] for one in compiled}
        ran_on.extend(sharding.device_set)
        return [(1e6, 0.0)] * len(programs)

    monkeypatch.setattr(_trials, "_best_times", times)
    monkeypatch.setattr(_paces, "_is_quick", lambda *_: False)
    scan = el.Scan(lambda h, x: (jnp.sin(h + x), None), schedule=el.Budget("1MiB"))
    one, other, *_ = jax.devices()
    for device in (one, other):
        el.measurements(None)
        plan = scan.plan(*ARGS, device=device)
        assert plan.is_measured
        assert set(ran_on) == {device}
        ran_on.clear()
    monkeypatch.setattr(_device, "_local_devices", lambda platform: [])
    el.measurements(None)
    with el.planning_for(one):
        assert not scan.plan(*ARGS).is_measured
    assert not ran_on
    el.measurements(None)


def test_memory_is_that_of_one_device_of_a_mesh():
    def doubled(x):
        return jnp.cumsum(jnp.sin(x) * 3, 1)

    alone = temporary_bytes(doubled, jax.typeof(jnp.ones((8, 2000))))
    assert alone > 8000
    mesh = explicit_mesh_of(b=8)
    with jax.set_mesh(mesh):
        split = jax.device_put(jnp.ones((64, 2000)), jax.P("b"))
    # Neither has to be set: the type of the array knows it.
    assert temporary_bytes(doubled, jax.typeof(split)) == alone


@pytest.mark.parametrize("is_checked", [True, False])
def test_memory_within_a_shard_map_is_that_of_one_device(is_checked):
    found = []

    def ours(x):
        return jnp.cumsum(jnp.sin(x) * 3, 1)

    def summed(x):
        return jax.lax.psum(ours(x), "b")

    def of_one(x, weight):
        types = [jax.typeof(x), jax.typeof(weight)]
        found.append(temporary_bytes(lambda x, w: ours(x) + w, *types))
        found.append(temporary_bytes(lambda x, w: summed(x) + w, *types))
        return x

    types = [jax.typeof(jnp.ones((8, 2000))), jax.typeof(jnp.float32(1))]
    alone = temporary_bytes(lambda x, w: ours(x) + w, *types)
    spread = jax.shard_map(
        of_one,
        mesh=mesh_of(b=8),
        in_specs=(jax.P("b"), jax.P()),
        out_specs=jax.P("b"),
        check_vma=is_checked,
    )
    jax.jit(spread)(jnp.ones((64, 2000)), jnp.float32(1))
    own, with_sum = found
    assert own == alone
    assert with_sum >= alone


def test_measured_times_are_of_a_kind_of_device():
    one, other, *_ = jax.devices()
    with el.planning_for(one):
        key = _facts.key_of(["a step"])
    with el.planning_for(other):
        assert _facts.key_of(["a step"]) == key
    assert PlannedDevice(one).key.startswith("cpu cpu")


def test_a_device_is_known_by_what_jax_calls_it():
    for name, known in KNOWN.items():
        assert known_name(known.compiler.platform, known.compiler.kind) == name
    assert known_name("tpu", "TPU v5p") == "v5p"
    assert known_name("gpu", "NVIDIA A100-PCIE-40GB") == "a100"
    assert known_name("cpu", "cpu") is None
    assert PlannedDevice(jax.devices()[0]).rates.memory > 1e9


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("h1000", "ValueError: planning_for: … 'h1000' … 'h100' … jax.Device"),
        (8, "TypeError: planning_for: … jax.Device … 'h100' … 8 … int"),
        (Mesh([], "a"), "TypeError: planning_for: … jax.sharding.Mesh … Mesh"),
    ],
)
def test_a_wrong_device(device, said):
    def plan():
        with el.planning_for(device):
            pass

    assert_raises(plan, said)


def test_names_may_be_in_capitals(monkeypatch):
    monkeypatch.setattr(_device, "compile_only_device", lambda name: name)
    for name in ("h100", "H100", "V5e", "TPU7x"):
        with el.planning_for(name):
            assert planning_device() == PlannedDevice(name.lower())
    with el.planning_for("CPU"):
        assert planning_device() == PlannedDevice(jax.devices("cpu")[0])


@pytest.mark.parametrize("name", ["h100", "v5e"])
def test_a_missing_compiler_is_named(monkeypatch, name):
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    compile_only_device.cache_clear()
    packages = "'jax[cuda12-local,tpu]' nvidia-cuda-nvcc-cu12"
    said = f"ImportError: planning_for: … {name!r} … `pip install {packages}`"
    assert_raises(lambda: SCAN.plan(*ARGS, device=name), said)


@pytest.mark.parametrize(
    "name", ["h100", "v5e", *map(slow, sorted(KNOWN.keys() - {"h100", "v5e"}))]
)
def test_plans_for_devices_that_are_not_here(name):
    device = PlannedDevice(elsewhere(name))
    assert not device.is_here
    assert device.platform == KNOWN[name].compiler.platform
    assert device.kind == KNOWN[name].compiler.kind
    assert device.rates == KNOWN[name].rates
    assert len(device.own.client.devices()) >= 8
    plan = SCAN.plan(*ARGS, device=name)
    assert not plan.is_measured
    assert f"device             {device.kind}" in str(plan)

    def gradient(h, xs):
        return jax.grad(lambda h: SCAN(h, xs)[0].sum())(h)

    planned = el.plans(gradient, device=name)(*ARGS).peak_bytes
    with el.planning_for(name):
        memory: Any = lowered(gradient, *ARGS).compile().memory_analysis()
    assert memory.temp_size_in_bytes <= planned <= SCAN.schedule.nbytes


@pytest.mark.parametrize("name", ["h100", "v5e"])
def test_a_mesh_of_devices_that_are_not_here(name):
    devices = elsewhere(name).client.devices()
    with el.planning_for(Mesh(devices[:8], "b")):
        assert planning_device().kind == KNOWN[name].compiler.kind
        split = jax.ShapeDtypeStruct(
            (64, 2048),
            jnp.float32,
            sharding=jax.NamedSharding(explicit_mesh_of(b=8), jax.P("b")),
        )
        compiled: Any = lowered(jnp.sin, split).compile()
        assert compiled.memory_analysis().output_size_in_bytes == 8 * 2048 * 4


def tree_like(schedule):
    """A loop whose step has a function that is compiled, and a loop, within it."""
    inner = jax.jit(
        lambda h, x: jax.lax.fori_loop(0, 5, lambda _, h: stack(h, x)[0], h)
    )
    return el.Scan(lambda h, x: (inner(h, x), None), schedule=schedule)


@pytest.mark.parametrize("context", [jax.disable_jit, jax.checking_leaks])
def test_plans_are_those_of_what_is_compiled(context):
    init, xs = jnp.zeros((2, 8)), jnp.zeros((16, 2, 8))
    budget = el.Budget("4KiB", measure=False)
    loss = lambda init, xs: jnp.sum(tree_like(el.Chunked(4))(init, xs)[0])
    plain = lambda init, xs: jnp.sum(jax.lax.scan(tree_like(None).f, init, xs)[0])

    def found():
        chunks = el.ChunkedVmap(lambda x: tree_like(None).f(x, x)[0], budget)
        return [
            str(tree_like(budget).plan(init, xs)),
            str(el.plans(jax.grad(loss))(init, xs)),
            el.memory_profile(jax.grad(loss))(init, xs).peak_bytes,
            str(el.Reschedule(plain, el.Recursive(4)).plans(init, xs)),
            str(chunks.plan(jnp.zeros((64, 2, 8)))),
        ]

    with context():
        within = found()
    # What was found out there is no other than what is found now.
    el.measurements(None)
    jax.clear_caches()
    assert within == found()


def test_a_step_has_the_loops_that_it_has_without_jit():
    with jax.disable_jit():
        program = jax.make_jaxpr(tree_like(el.Recursive(4)))(*ARGS)
    assert "fori_loop" in str(program) or "scan[" in str(program)


def test_facts_are_those_of_a_setting():
    settings = _device.compiler_settings
    with jax.enable_x64(True):
        wide = settings()
    assert wide != settings()
    with jax.threefry_partitionable(False):
        assert settings() != wide
