"""Loops that are one kernel each way, interpreted, beside `lax.scan`."""

import dataclasses
import functools
import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import eqloop as el
from eqloop._programs import Registers, registers_of
from eqloop.checkpointing.engine._layout import Layout
from eqloop.checkpointing.engine.orders._all_at_once import AllAtOnce
from eqloop.checkpointing.fused import _choice, _runner
from eqloop.checkpointing.fused._row_programs import Settings

from ..asserts import assert_close, assert_raises
from ..marks import slow
from .fused_loops import (
    FUSED,
    LENGTH,
    XS,
    H,
    W,
    alike,
    all_modes,
    both,
    check,
    gradient,
    rows,
    scanned,
    step,
    total,
    use_settings,
)
from .fused_steps import STEPS, numbers

FUSED_4 = el.Fused(4, interpret=True)
# Those that are interpreted in a moment.
QUICK = ("lorenz", "neuron", "izhikevich", "branches", "noisy", "newton")


@pytest.fixture(autouse=True)
def _no_loop_is_left_to_the_engine():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


@pytest.mark.sampled
@pytest.mark.parametrize("name", [*QUICK, *map(slow, sorted({*STEPS} - {*QUICK}))])
def test_values_and_gradients_are_those_of_lax_scan(name):
    check(name)


@pytest.mark.slow
def test_in_64_bits_they_are_close_to_all_of_them():
    with jax.enable_x64(True):
        for name in ("lorenz", "squid", "bodies"):
            actual, expected = both(name)
            assert_close(actual, expected, rtol=1e-12, atol=1e-13)


def test_every_mode_of_differentiation():
    alike(all_modes, W, H, XS)


def test_several_vmaps_are_rows_and_what_they_share_is_shared():
    def run(s, w, h, xs):
        one = lambda w, h, x: scanned(s, w, h, x)
        inner = jax.vmap(one, (None, 0, None))
        return jax.vmap(inner, (0, None, 0))(w, h, xs)

    alike(gradient(run), numbers(3, 2), numbers(4, 2), numbers(3, LENGTH))


def test_a_leaf_of_the_carry_and_xs_that_all_rows_share():
    def run(s, w, h, xs):
        def step(carry, x):
            h, t = carry
            return (jnp.sin(h + t * w[0] + x), t * w[1]), t

        scan = el.Scan(step, schedule=s)
        one = lambda h: scan((h, w[0]), xs)
        (h, t), ys = jax.vmap(one, out_axes=((0, None), None))(h)
        return h, t, ys

    alike(gradient(run), W, H, XS[0])


@pytest.mark.parametrize("kept", [dict(step=2, start=1), slow(dict(stop=0))])
def test_loops_in_reverse_that_keep_some_outputs(kept):
    def run(s, w, h, xs):
        f = functools.partial(step, w)
        scan = el.SlicedScan(f, schedule=s, reverse=True, **kept)
        return jax.vmap(scan)(h, xs)

    alike(gradient(run), W, H, XS)


def test_a_population_in_arrays_is_rows():
    def run(s, w, v, xs):
        def step(carry, x):
            v, u = carry
            return (jnp.tanh(w[0] * v + x) + jnp.arange(6.0) * 0.1, u * w[1] + v), v

        return el.Scan(step, schedule=s)((v, v), xs)

    alike(gradient(run), W, numbers(6), numbers(LENGTH, 6))


def test_noise_for_a_population():
    def run(s, v):
        keys = jax.random.split(jax.random.key(0), LENGTH)
        step = lambda v, k: (v * 0.9 + jax.random.normal(k, v.shape), None)
        return el.Scan(step, schedule=s)(v, keys)[0]

    alike(run, numbers(6))


def test_loops_sorts_tables_and_complex_numbers_in_a_step():
    table = numbers(5, 3)

    def run(s, w, h, xs):
        def step(carry, x):
            h, k = carry
            h = lax.fori_loop(0, 6, lambda i, h: jnp.sin(w[0] * h + x + i * 0.1), h)
            h = jnp.sort(h) + lax.scan(lambda c, w: (c * w, c), x, w)[0]
            z = lax.complex(h, h[::-1]) * jnp.exp(lax.complex(jnp.zeros(()), w[1] * x))
            h = jnp.abs(z) * table[k] + jnp.cumsum(h)[jnp.argmax(h)]
            return (h, (k * 3 + 1) % 5), h[k % 3]

        scan = el.Scan(step, schedule=s)
        (h, _), ys = jax.vmap(lambda h, x: scan((h, jnp.int32(1)), x))(h, xs)
        return h, ys

    alike(gradient(run), W, numbers(5, 3), XS)


def test_branches_of_what_rows_share_and_scatters_into_what_is_in_memory():
    def run(s, w, h, xs):
        def step(carry, x):
            h, t = carry
            fast = lambda t: (t * w[0], t + w[1])
            t, u = lax.cond(t > 0.2, fast, lambda t: (w[1], t), t)
            at = jnp.int32(jnp.floor(h[0])) % 5
            h = jnp.tanh(h).at[at].add(xs[0, :3][at], mode="drop") * u
            return (h, t), h[1] + x

        scan = el.Scan(step, schedule=s)
        one = lambda h, x: scan((h, w[0]), x)
        (h, t), ys = jax.vmap(one, out_axes=((0, None), 0))(h, xs)
        return h, t, ys

    alike(gradient(run), W, numbers(5, 3), XS)


def test_bfloat16_is_added_up_in_float32():
    narrow = lambda x: x.astype(jnp.bfloat16)

    def run(s, w, h, xs):
        step = lambda h, x: (jnp.sin(w[0] * h + w[1] * x), None)
        h, _ = jax.vmap(lambda h, x: el.Scan(step, schedule=s)(h, x))(h, xs)
        return h.astype(jnp.float32)

    alike(gradient(run), *map(narrow, (W, H, XS)))


def test_products_of_bfloat16():
    def run(s, w, h, xs):
        step = lambda h, x: (jnp.sin(w @ h + x), None)
        h, _ = jax.vmap(lambda h, x: el.Scan(step, schedule=s)(h, x))(h, xs)
        return h.astype(jnp.float32)

    inputs = 0.3 * numbers(2, 2), numbers(3, 2), numbers(3, LENGTH, 2)
    inputs = [x.astype(jnp.bfloat16) for x in inputs]
    of = lambda s: jax.jit(functools.partial(gradient(run), s))(*inputs)
    assert_close(of(FUSED), of(el.StoreAll()), rtol=0.05, atol=0.05)


def test_products_by_tiles():
    """The weights are used twice, and in parts."""

    def run(s, w, h, xs):
        def step(h, x):
            h = jnp.tanh(w @ h + x)
            return h + jnp.tanh(w[:4] @ h).sum(), None

        return jax.vmap(lambda h, x: el.Scan(step, schedule=s)(h, x)[0])(h, xs)

    alike(gradient(run), numbers(9, 9), numbers(3, 9), numbers(3, LENGTH))


def test_loops_of_jax_are_one_kernel_by_reschedule():
    step = lambda h, x: (jnp.sin(h + x) + h[::-1], h.sum())
    f = lambda h, xs: jax.vmap(functools.partial(lax.scan, step))(h, xs)
    loss = lambda f: jax.value_and_grad(lambda *args: total(f(*args)), (0, 1))
    assert_close(loss(el.Reschedule(f, FUSED))(H, XS), loss(f)(H, XS))


def test_small_layers_are_one_kernel():
    make = lambda *, key: eqx.nn.Linear(5, 5, key=key)
    layers = el.StackedLayers.init(make, 6, key=jax.random.key(0))

    def run(s, w, h, xs):
        scaled = lambda leaf: leaf * w[0] if eqx.is_array(leaf) else leaf
        stack = el.StackedLayers(jax.tree.map(scaled, layers.layers), schedule=s)
        return jax.vmap(lambda h: stack(jnp.tanh(h)))(h)

    alike(gradient(run, (0, 1)), W, numbers(3, 5), XS)


def test_on_a_cpu_it_is_chunked():
    scan = el.Scan(functools.partial(step, W), schedule=el.Fused(3))
    plan = scan.plan(H[0], XS[0])
    assert plan.kernel.startswith(
        "none: on a CPU it runs as `Chunked(3)` does. On a GPU: one"
    )
    assert plan.levels == ((2, 3), (1, 1))
    expected = el.Scan(functools.partial(step, W))(H[0], XS[0])
    assert_close(scan(H[0], XS[0]), expected)


def test_a_plan_says_how_many_rows_there_are_or_why_none():
    run = lambda h, xs: rows(FUSED, W, h, xs)[0].sum()
    (loop,) = el.plans(jax.grad(run))(H, XS)
    assert loop.plan.kernel.startswith("one each way, 5 rows")
    mean_field = lambda v, _: (jnp.sin(v + v.mean()), None)
    with pytest.warns(UserWarning, match="is not one kernel") as told:
        plan = el.Scan(mean_field, schedule=FUSED).plan(jnp.ones(300), length=LENGTH)
    assert {warning.filename for warning in told} == {__file__}
    assert "reads a sum over all of them" in plan.kernel
    assert "test_fused.py" in str(plan)


def test_a_warning_of_too_many_numbers_says_what_they_are_of_at_the_users_line():
    layout = Layout(AllAtOnce(8))
    kernel = _choice.Kernel(layout, 1.0, Registers(255, 352))
    with pytest.warns(
        UserWarning, match=r"rows of 8 .* 352 B .* carry of its row"
    ) as told:
        assert kernel.described("rows of 8 numbers").endswith("fit into them")
    assert [warning.filename for warning in told] == [__file__]


def test_a_mean_field_is_left_to_the_engine_with_a_warning():
    step = lambda v, _: (jnp.sin(v + v.mean()), None)
    of = lambda s: jax.grad(lambda v: el.Scan(step, schedule=s)(v, length=5)[0].sum())
    with pytest.warns(UserWarning, match="reads a sum over all of them"):
        actual = of(FUSED)(numbers(300))
    assert_close(actual, of(el.StoreAll())(numbers(300)))


def test_what_would_compile_for_minutes_is_left_to_the_engine(
    monkeypatch: pytest.MonkeyPatch,
):
    run = lambda s: gradient(rows)(s, W, H, XS)
    expected, too_many = run(el.StoreAll()), "operations, too many to compile"
    monkeypatch.setattr(_runner, "MOST_OF_A_STEP", 1)
    monkeypatch.setattr(_runner, "run_back", lambda *_: pytest.fail("a kernel back"))
    with pytest.warns(UserWarning, match=too_many):
        actual = run(FUSED)
    assert_close(actual, expected)
    with pytest.warns(UserWarning, match=too_many):
        (loop,) = el.plans(jax.grad(lambda w: total(rows(FUSED, w, H, XS))))(W)
    assert loop.plan.kernel.startswith("none: a row has")


def test_so_is_the_way_back_of_a_linear_one_which_reads_no_carry():
    step = lambda v, _: (v + 0.1 * (v - v.mean()), None)

    def operations(length: int) -> int:
        f = lambda v: el.Scan(step, schedule=FUSED)(v, length=6)[0].sum()
        return jax.jit(jax.grad(f)).lower(jnp.ones(length)).as_text().count(" = ")

    with warnings.catch_warnings(action="ignore"):  # of the way there, with JAX 0.10
        assert operations(600) == operations(300) < 200


@pytest.mark.parametrize("checks", [False, True])
def test_in_a_map_over_devices_it_is_a_kernel_unless_marks_are_checked(checks):
    mesh = jax.make_mesh((1,), ("devices",), axis_types=(AxisType.Auto,))
    split = PartitionSpec("devices")

    def run(s, h):
        f = jax.grad(lambda h: total(rows(s, W, h, XS)))
        return jax.shard_map(
            f, mesh=mesh, in_specs=split, out_specs=split, check_vma=checks
        )(h)

    said = pytest.warns(UserWarning, match="check_vma") if checks else nullcontext()
    with said:
        alike(run, H)


def test_on_a_cpu_the_plan_says_what_would_be_an_error_on_a_gpu():
    step = lambda v, _: (jnp.fft.fft(v).real, None)
    scan = el.Scan(step, schedule=el.Fused(3))
    said = scan.plan(H[0], length=LENGTH).kernel
    assert "On a GPU: an error" in said
    assert "`fft` at" in said
    assert scan(H[0], length=LENGTH)[0].shape == (2,)


@dataclasses.dataclass(frozen=True)
class Cut(el.AbstractSchedule):
    """Segments, each with a schedule of its own."""

    lengths: tuple[int, ...]
    schedules: tuple[el.AbstractSchedule, ...]

    def layout(self, loop):
        return loop.cut(zip(self.lengths, self.schedules, strict=True))


@pytest.mark.parametrize(
    ("lengths", "schedules", "levels", "said"),
    [
        ((8, 8, 8), (FUSED_4,) * 3, ((3, 2, 4),), "one each way"),
        slow(
            (5, 8),
            (FUSED_4, el.Fused(1, interpret=True)),
            ((1, 1, 4), (1, 1, 1), (1, 8)),
            "one each way",
        ),
        ((8, 8), (FUSED_4, el.Chunked(4)), (), "none: the segments"),
        ((9,) * 6, (FUSED_4,) * 6, (), "none: it would have the step 12 times"),
        ((8, 8), (el.Fused(4),) * 2, (), "none: on a CPU"),
    ],
)
def test_segments_of_a_cut_are_one_kernel_or_the_plan_says_why_not(
    lengths, schedules, levels, said
):
    step = lambda v, _: (jnp.sin(v) + 0.1 * v, v)
    scan = lambda s: el.Scan(step, schedule=s)
    schedule, v = Cut(lengths, schedules), numbers(30)
    plan = scan(schedule).plan(v, length=sum(lengths))
    assert plan.kernel.startswith(said)
    assert plan.levels == levels
    of = lambda s: jax.grad(lambda v: total(scan(s)(v, length=sum(lengths))))
    assert_close(jax.jit(of(schedule))(v), jax.jit(of(el.StoreAll()))(v))


@pytest.mark.parametrize("around", [el.Offload, slow(lambda s: el.StoreLast(s, 2))])
def test_a_schedule_around_it_leaves_the_loop_to_the_engine(around):
    plan = el.Scan(functools.partial(step, W), schedule=around(FUSED)).plan(H[0], XS[0])
    assert plan.kernel.startswith("none: a schedule around")
    of = lambda s: jax.grad(lambda h: total(rows(s, W, h, XS)))(H)
    assert_close(of(around(FUSED)), of(el.StoreAll()))


@pytest.mark.parametrize(("most", "mosaic"), [(2, False), slow(6, False), (6, True)])
def test_a_long_loop_takes_several_launches(monkeypatch, most, mosaic):
    """Of one segment each, or of two, of which the last launch has one."""
    use_settings(monkeypatch, most=most, mosaic=mosaic)
    alike(gradient(lambda s, *args: rows(s, *args)), W, H, XS)
    shared = lambda s, w, h, x: jax.vmap(lambda h: scanned(s, w, h, x))(h)
    alike(gradient(shared), W, H, XS[0])


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Budgets take kernels into account, which are interpreted and fast."""
    device = SimpleNamespace(platform="gpu", is_here=False)
    monkeypatch.setattr(_choice, "planning_device", lambda: device)
    settings = functools.partial(Settings, interpret=True)
    monkeypatch.setattr(_choice, "Settings", settings)
    monkeypatch.setattr(_choice.Kernel, "beats_all", True)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_budget_takes_a_kernel_that_fits():
    budget = el.Budget("256KiB", measure=False)
    of = lambda s: jax.value_and_grad(lambda *args: total(rows(s, *args)), (0, 1, 2))
    (loop,) = el.plans(of(budget))(W, H, XS)
    assert loop.plan.kernel.startswith("one each way, 5 rows")
    assert loop.plan.peak_bytes <= 2**18
    assert_close(of(budget)(W, H, XS), of(el.StoreAll())(W, H, XS))


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    "step",
    [
        lambda v, _: (jnp.sin(v + v.mean()), None),
        lambda v, _: (jnp.fft.fft(v).real, None),
        lambda v, _: (jnp.sin(v), jax.debug.callback(lambda: None)),
        lambda v, _: (v + jax.pure_callback(np.sin, v, lax.stop_gradient(v)), None),
    ],
)
def test_a_budget_takes_none_of_what_cannot_be_one_and_says_nothing(step):
    scan = el.Scan(step, schedule=el.Budget("1MiB", measure=False))
    assert scan.plan(jnp.ones(300), length=LENGTH).kernel is None


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_kernel_is_run_to_see_how_long_it_takes(monkeypatch):
    here = SimpleNamespace(platform="gpu", is_here=True)
    monkeypatch.setattr(_choice, "planning_device", lambda: here)
    took = []

    def trials(*args):
        took.extend(found := real(*args))
        return found

    real = _choice.trials
    monkeypatch.setattr(_choice, "trials", trials)
    scan = el.Scan(lambda h, x: (jnp.sin(h) + x, None), schedule=el.Budget("1MiB"))
    assert scan.plan(jnp.ones(8), jnp.ones((300, 8))).kernel.startswith("one each way")
    assert all(trial.was_run for trial in took)


def test_of_a_program_that_is_for_no_gpu_no_registers_are_known():
    compiled = jax.jit(jnp.sin).lower(1.0).compile()
    assert registers_of(compiled, "") is None


def test_wrong_calls():
    assert_raises(lambda: el.Fused(0), "ValueError: … every … 0")
    assert_raises(lambda: el.Fused(block=48), "ValueError: … block … power of two … 48")
    step = lambda v, _: (jnp.fft.fft(v).real, None)
    run = jax.vmap(lambda v: el.Scan(step, schedule=FUSED)(v, length=3)[0])
    said = "TypeError: Fused: … `fft` at … test_fused.py … cannot … el.Chunked(32)"
    assert_raises(lambda: run(H), said)


def test_a_loop_of_any_length_has_at_most_twice_the_slots_of_recursive():
    for length in (1, 7, 17, 1000, 100_000):
        usual = el.Recursive(16)
        slots = []
        for schedule in (el.Fused(), usual):
            scan = el.Scan(lambda h, _: (jnp.sin(h), None), schedule=schedule)
            plan = scan.plan(0.0, length=length)
            assert plan.length == length
            slots.append(plan.slots)
        assert slots[0] <= 2 * slots[1] + 1


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_budget_compiles_no_kernel_that_would_take_long(monkeypatch):
    class CompiledError(Exception):
        pass

    def compiled(*_):
        raise CompiledError

    monkeypatch.setattr(_choice, "peak_bytes", compiled)
    w = jnp.zeros((64, 64))
    step = lambda h, _: (jnp.tanh(h @ w), None)
    scan = el.Scan(step, schedule=el.Budget("1MiB", measure=False))
    said = scan.plan(jnp.ones((100, 64)), length=LENGTH).kernel
    assert said.startswith("none: a row has")
    assert "`Fused()`" in said
    monkeypatch.setattr(_choice, "MOST_OF_A_STEP", 1)
    said = scan.plan(jnp.ones((100, 64)), length=LENGTH).kernel
    assert said.endswith("too many to compile")
    # A small one is.
    small = el.Scan(lambda h, _: (jnp.tanh(h), None), schedule=scan.schedule)
    with pytest.raises(CompiledError):
        small.plan(jnp.ones(100), length=LENGTH)
