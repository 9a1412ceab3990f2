"""`Fit`: what a fitted function gives, takes and says."""

import functools
import pickle
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqloop as el
from eqloop._calls import format_bytes
from eqloop.fitting._options import EVERYTHING, TWICE
from eqloop.fitting._remembered import as_text, from_text

from ..asserts import assert_close, assert_same
from ..compiling import AS_USED, programs_compiled, temp_bytes
from ..marks import slow
from ..weights import normal
from .functions import TIGHT, W, X, layers, mixed, over_time

gradient = lambda f: jax.value_and_grad(f, (0, 1))
name = lambda value: getattr(value, "__name__", str(value))

# The gradient of each, in so many bytes: about the least, something between, and more
# than it takes.
BUDGETS = {layers: (9_400, 12_000, 20_000), over_time: (2_100, 3_500, 9_000)}
# The least is the hardest.
CASES = [(f, sizes[0]) for f, sizes in BUDGETS.items()] + [(mixed, 8_500)]
CASES += [slow(f, nbytes) for f, sizes in BUDGETS.items() for nbytes in sizes[1:]]


@pytest.mark.parametrize(("f", "nbytes"), CASES, ids=name)
def test_a_gradient_takes_no_more_than_its_budget(f: Any, nbytes: int):
    fit = el.Fit(f, nbytes)
    assert temp_bytes(gradient(fit), W, X) <= nbytes
    run = lambda f: jax.jit(gradient(f)).lower(W, X).compile(AS_USED)(W, X)
    (value, actual), (plain, expected) = run(fit), run(f)
    np.testing.assert_array_equal(value, plain)
    assert_close(actual, expected, 1e-3, 1e-4)


def test_with_room_for_all_nothing_changes():
    fit = el.Fit(layers, "1MiB")
    plan = fit.plan(W, X)
    assert {part.stores for part in plan.parts} == {"everything"}
    assert plan.relative_time == 1.0
    full = temp_bytes(gradient(layers), W, X)
    assert temp_bytes(gradient(fit), W, X) <= 1.02 * full


def test_a_total_includes_inputs_and_outputs():
    besides = 2 * (W.nbytes + X.nbytes) + 4
    fit = el.Fit(layers, total=TIGHT + besides)
    assert fit.plan(W, X).peak_bytes <= TIGHT
    assert temp_bytes(gradient(fit), W, X) <= TIGHT


def test_less_memory_takes_more_time():
    plans = [el.Fit(layers, nbytes).plan(W, X) for nbytes in BUDGETS[layers]]
    times = [plan.relative_time for plan in plans]
    assert times == sorted(times, reverse=True)
    assert times[0] > 1 == times[-1]


def test_the_least_that_an_error_names_is_enough():
    with pytest.raises(ValueError, match="which is ") as caught:
        el.Fit(layers, 100).plan(W, X)
    least = int(str(caught.value).split("which is ")[1].split()[0])
    fit = el.Fit(layers, least)
    assert fit.plan(W, X).peak_bytes <= least
    assert temp_bytes(gradient(fit), W, X) <= least


def test_what_takes_the_least_is_for_the_compiler_to_say(monkeypatch: Any):
    # As it was for an H100, where what stores the least takes more than all else.
    def taken(_: Any, ways: Any, with_value: bool) -> int:
        return 1000 if all(way.stores == "everything" for way in ways) else 5000

    def f(w: jax.Array, x: jax.Array) -> jax.Array:
        for k in range(8):
            x = jnp.tanh(jnp.cos(x @ w) + k)
        return jnp.sum(x)

    monkeypatch.setattr("eqloop.fitting._whole.Whole._bytes", taken)
    assert el.Fit(f, 2000).plan(W, X).peak_bytes == 1000
    with pytest.raises(ValueError, match="which is 1000 bytes"):
        el.Fit(f, 500).plan(W, X)


@pytest.mark.parametrize("factor", [0.5, 0.99, 2.0])
def test_a_leaner_gradient_is_taken_if_it_runs_faster(factor: float, monkeypatch: Any):
    monkeypatch.setattr("eqloop.fitting._decision._CACHED", 0)
    seen = [(1.0, 0.0), (factor, 0.0)]
    monkeypatch.setattr("eqloop.fitting._whole.run_times", lambda *_: seen)

    def f(w: jax.Array, x: jax.Array) -> jax.Array:
        for k in range(8):
            x = jnp.tanh(jnp.sin(x @ w) * factor + k)
        return jnp.sum(x)

    plan = el.Fit(f, "1MiB").plan(W, X)
    is_leaner = {part.stores for part in plan.parts} != {"everything"}
    assert is_leaner == (factor == 0.5)


def residual(w: jax.Array, x: jax.Array) -> jax.Array:
    for _ in range(12):
        x = x + jnp.tanh(x @ w)
    return jnp.mean(x**2)


WIDE = normal(0, (64, 64), scale=0.1), normal(1, (256, 64))


def test_no_leaner_gradient_is_run_beside_one_that_takes_little(monkeypatch: Any):
    runs = list[Any]()
    monkeypatch.setattr("eqloop.fitting._decision._CACHED", 0)
    monkeypatch.setattr("eqloop.fitting._whole.run_times", lambda *of: runs.append(of))
    plain = el.Fit(residual, "8MiB").plan(*WIDE).peak_bytes
    assert len(runs) == 1
    assert el.Fit(residual, 6 * plain // 10).plan(*WIDE).peak_bytes > plain // 4
    assert len(runs) == 1


def test_what_lies_between_the_least_and_too_much_is_found(monkeypatch: Any):
    def in_vain(wholes: Any, most: int, fits: Any) -> list[Any]:
        whole = wholes[-1]
        tried = whole.decision(whole.choice.within(2 * most), is_exact=False)
        assert tried.peak_bytes > most
        return []

    # By a row at a time it would take a two-hundredth.
    plain = temp_bytes(gradient(residual), *WIDE)
    monkeypatch.setattr("eqloop.fitting._decision._that_fit", in_vain)
    found = el.Fit(residual, plain // 2).plan(*WIDE)
    assert plain // 10 < found.peak_bytes <= plain // 2


def test_a_gradient_in_some_of_the_inputs():
    fit = el.Fit(layers, TIGHT)
    found, expected = (jax.jit(jax.grad(f))(W, X) for f in (fit, layers))
    assert_close(found, expected, 1e-3, 1e-4)
    assert temp_bytes(jax.grad(fit), W, X) <= TIGHT


def test_auxiliary_outputs_and_trees():
    def f(params: Any, batch: Any) -> Any:
        x = layers(params["w"], batch["x"]) * batch["scale"]
        return x, {"count": batch["n"] + 1, "name": params["name"], "x": jnp.sin(x)}

    params = {"w": W, "name": "model"}
    batch = {"x": X, "scale": 2.0, "n": jnp.arange(2)}
    run = lambda f: eqx.filter_value_and_grad(f, has_aux=True)(params, batch)
    assert_close(run(el.Fit(f, TIGHT)), run(f), 1e-3, 1e-4)


def test_keywords_and_settings_reach_the_function():
    def f(x: Any, *, power: int = 2, scale: Any) -> Any:
        return jnp.sum(x**power * scale)

    fit = el.Fit(f, TIGHT)
    run = lambda f: jax.grad(lambda x: f(x, power=3, scale=X))(X)
    assert_close(run(fit), run(f))


# It is a transform like all others.


def test_a_decorator_and_a_method():
    class Model(eqx.Module):
        w: jax.Array

        @el.Fit(budget=TIGHT)
        def loss(self, x: jax.Array) -> jax.Array:
            return layers(self.w, x)

    actual = eqx.filter_grad(lambda model: model.loss(X))(Model(W))
    assert_close(actual.w, jax.grad(layers)(W, X), 1e-3, 1e-4)


def test_its_function_may_be_a_module():
    class Model(eqx.Module):
        w: jax.Array

        def __call__(self, x: jax.Array) -> jax.Array:
            return layers(self.w, x)

    fit = el.Fit(Model(W), TIGHT)
    grads = eqx.filter_grad(lambda fit: fit(X))(fit)
    assert_close(grads.f.w, jax.grad(layers)(W, X), 1e-3, 1e-4)
    assert eqx.tree_at(lambda fit: fit.f.w, fit, 2 * W).f.w[0, 0] == 2 * W[0, 0]
    assert fit.plan(X).peak_bytes <= TIGHT


def test_what_it_closes_over_is_differentiated():
    f = lambda f: jax.grad(lambda w: f(lambda x: layers(w, x))(X))(W)
    assert_close(f(functools.partial(el.Fit, budget=TIGHT)), f(lambda f: f), 1e-3, 1e-4)


def test_strings_of_amounts():
    assert el.Fit(layers, "9.5 kB")._limit == el.Fit(layers, 9500)._limit
    assert "9.5 kB" in repr(el.Fit(layers, "9.5 kB"))


# Loops in it.


def test_a_loop_with_a_schedule_keeps_it():
    def f(w: Any, x: Any) -> Any:
        step = lambda h, u: (jnp.tanh(h @ w + u), None)
        return jnp.sum(el.Scan(step, schedule=el.Binomial(3))(x[0], x)[0])

    (loop,) = el.plans(jax.grad(el.Fit(f, "1MiB")))(W, X)
    assert loop.plan.schedule == el.Binomial(3)


def test_stacks_of_layers_and_loops_without_a_carry():
    def f(w: Any, x: Any) -> Any:
        layers = [eqx.nn.Linear(8, 8, key=jax.random.key(i)) for i in range(3)]
        x = jax.vmap(el.StackedLayers.from_layers(layers))(x)
        ys = el.ForLoop(lambda u: jnp.tanh(jnp.sin(w @ u)))(x[:5])
        until = lambda h: jnp.sum(h) < 1e9
        step = lambda h, u: (jnp.tanh(jnp.sin(h @ w) + u), None)
        h, _, _ = el.ScanWhile(until, step, max_steps=5)(x[0], x[:5])
        return jnp.sum(h) + jnp.sum(ys**2)

    fit = el.Fit(f, 8_300)
    run = lambda f: jax.jit(gradient(f))(W, X)
    assert_close(run(fit), run(f), 1e-3, 1e-4)
    names = {part.name for part in fit.plan(W, X).parts}
    assert {"StackedLayers", "ForLoop"} <= names


def nested(w: Any, x: Any) -> Any:
    """A loop over time in each step of another one, and one that stops by itself."""
    step = lambda h, _: (jnp.tanh(jnp.sin(h @ w)), None)

    def outer(h: Any, u: Any) -> Any:
        h, _ = jax.jit(lambda h: el.Scan(step)(h, length=100))(h + u)
        until = el.CheckpointedWhileLoop(
            lambda c: c[0] < 20, lambda c: (c[0] + 1, jnp.sin(c[1] @ w)), max_steps=40
        )
        return until((0, h))[1], h[0]

    h, ys = el.Scan(outer)(x[0], x)
    return jnp.sum(h**2) + jnp.sum(ys)


@pytest.mark.slow
def test_a_loop_in_the_step_of_a_loop_is_decided_with_it():
    x, budget = X[:4], 6_000
    # A step of the outer loop that stores everything takes 16 KiB and more.
    fit = el.Fit(nested, budget)
    plan = fit.plan(W, x)
    (loop,) = (part for part in plan.parts if part.name == "Scan")
    assert loop.stores.endswith("with loops in its step")
    assert plan.peak_bytes <= budget
    assert temp_bytes(gradient(fit), W, x) <= budget
    run = lambda f: jax.jit(gradient(f))(W, x)
    assert_close(run(plan.pinned), run(nested), 1e-3, 1e-4)
    assert from_text(as_text(plan.pinned.ways) or "") == plan.pinned.ways


def test_loops_of_jax_if_it_is_told_to():
    def f(w: Any, x: Any) -> Any:
        step = lambda h, u: (jnp.tanh(jnp.sin(h @ w) + u), None)
        h, _ = jax.lax.scan(step, x[0], x)
        return jnp.sum(jax.lax.while_loop(lambda h: h[0] > 0.1, lambda h: h / 2, h))

    fit = el.Fit(f, 3_000, foreign=True)
    (loop,) = (part for part in fit.plan(W, X).parts if part.name == "lax.scan")
    assert "carries" in loop.stores
    actual = jax.jit(jax.grad(fit))(W, X)
    expected = jax.grad(el.Reschedule(f, whiles=64))(W, X)
    assert_close(actual, expected, 1e-3, 1e-4)


@pytest.mark.parametrize("is_told", [False, True])
def test_an_error_advises_only_what_was_not_done(is_told: bool):
    def one(w: Any, xs: Any) -> Any:
        step = lambda h, x: (jnp.tanh(h * x) @ w, None)
        return jax.nn.logsumexp(jax.lax.scan(step, jnp.ones(16), xs)[0])

    # Told of it, it runs the loop by rows, in a part of which that is a piece.
    f = lambda w, xs: jnp.mean(jax.vmap(one, (None, 0))(w, xs))
    with pytest.raises(ValueError, match="It needs at least") as error:
        el.Fit(f, 4_000, foreign=is_told).plan(
            jnp.ones((16, 16)), jnp.ones((64, 24, 16))
        )
    assert ("pass `foreign=True`" in str(error.value)) == (not is_told)


# Its plan.


@pytest.fixture(scope="module")
def plan() -> el.FitPlan:
    return el.Fit(mixed, 8_500).plan(W, X)


def test_a_plan_of_types_is_that_of_arrays(plan: el.FitPlan):
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (W, X)]
    before = programs_compiled()
    again = el.Fit(mixed, 8_500).plan(*types)
    assert str(again) == str(plan)
    assert programs_compiled() == before


def test_a_plan_is_a_table(plan: el.FitPlan):
    lines = str(plan).splitlines()
    assert lines[0].split() == ["part", "stores", "stored", "peak", "time", "place"]
    assert len(lines) == len(plan.parts) + 2
    assert "(over_time)" in next(line for line in lines if line.startswith("Scan"))
    assert lines[-1].startswith("in all: ")
    assert "compiled" in lines[-1]


def test_a_plan_says_what_is_stored_and_where_most_is_taken(plan: el.FitPlan):
    assert plan.peak_bytes <= 8_500
    assert plan.peak_at in plan.parts
    assert plan.peak_at.peak_bytes == max(part.peak_bytes for part in plan.parts)
    assert 0 <= sum(part.stored_bytes for part in plan.parts) <= plan.peak_bytes
    assert plan.relative_time == pytest.approx(
        sum(part.relative_time for part in plan.parts)
    )
    assert plan.device == jax.devices()[0].device_kind


@pytest.mark.parametrize("share", [0.0, 0.4])
def test_no_part_takes_more_than_the_whole(share: float, monkeypatch: Any):
    # Where the compiler finds room that no estimate foresees.
    taken = lambda whole, *_: int(share * whole.choice.peak(whole.choice.fastest))
    monkeypatch.setattr("eqloop.fitting._whole.Whole._bytes", taken)
    plan = el.Fit(lambda w: mixed(w, 1.02 * X), "1MiB").plan(W)
    assert plan.peak_at.peak_bytes == plan.peak_bytes
    assert sum(part.stored_bytes for part in plan.parts) <= plan.peak_bytes
    assert all(part.stored_bytes <= part.peak_bytes for part in plan.parts)


def test_a_pinned_function_needs_no_search(plan: el.FitPlan):
    before = programs_compiled()
    jax.jit(gradient(plan.pinned)).lower(W, X)
    assert programs_compiled() == before
    assert temp_bytes(gradient(plan.pinned), W, X) <= 8_500
    fitted = jax.jit(gradient(el.Fit(mixed, 8_500)))(W, X)
    assert_same(jax.jit(gradient(plan.pinned))(W, X), fitted)


def test_a_pinned_function_has_derivatives_and_batches():
    pinned = el.Fit(layers, 3 * TIGHT).plan(W, X).pinned
    twice = lambda f: lambda w, x: jnp.sum(jax.jvp(f, (w, x), (w, x))[1])
    mean = lambda f: lambda w, x: jnp.mean(jax.vmap(f, (None, 0))(w, x))
    batch = jnp.stack([X, X[::-1]])

    @functools.partial(jax.jit, static_argnums=0)
    def both(f: Any, w: Any, x: Any, batch: Any) -> Any:
        return jax.grad(twice(f))(w, x), jax.grad(mean(f))(w, batch)

    actual, expected = (both(f, W, X, batch) for f in (pinned, layers))
    assert_close(actual, expected, 1e-3, 1e-4)


def test_decisions_can_be_sent_to_other_processes(plan: el.FitPlan):
    ways = pickle.loads(pickle.dumps(plan.pinned.ways))
    pinned = el.Fit(mixed, 8_500, ways=ways)
    assert temp_bytes(gradient(pinned), W, X) <= 8_500


def test_a_plan_is_drawn(plan: el.FitPlan):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    ax = plan.plot()
    assert len(ax.collections) == len(plan.parts)
    assert ax.get_ylabel() == "bytes"
    pyplot.close(ax.figure)
    axes = pyplot.figure().subplots()
    assert plan.plot(axes) is axes
    pyplot.close(axes.figure)


def test_outside_of_jit():
    fit = el.Fit(layers, TIGHT)
    assert_close(gradient(fit)(W, X), gradient(layers)(W, X), 1e-3, 1e-4)
    assert_close(fit(W, X), layers(W, X))


def test_a_device_that_is_named():
    plan = el.Fit(layers, TIGHT, device="cpu").plan(W, X)
    assert plan.device == "cpu"


def test_nobody_is_refused_what_the_plain_gradient_takes(monkeypatch: Any):
    # As on a TPU, whose compiler does not count what lies close to its cores.
    taken = lambda _, ways, with_value: 100 if set(ways) == {EVERYTHING} else 1000
    monkeypatch.setattr("eqloop.fitting._whole.Whole._bytes", taken)
    f = lambda w: over_time(w, 1.01 * X)
    assert el.Fit(f, 500).plan(W).peak_bytes == 100
    with pytest.raises(ValueError, match="at least 100 B"):
        el.Fit(f, 50).plan(W)


# What XLA fuses so that nothing of it is stored.


def exponentials(x: Any) -> Any:
    """Of the distances of all pairs."""
    return jnp.sum(jnp.exp(-jnp.sum((x[:, None] - x[None]) ** 2, -1)))


def charges(x: Any) -> Any:
    """Energy with numbers, of which XLA would share arrays that are full of one."""
    near = 1.0 / (1.0 + jnp.sum((x[:, None] - x[None]) ** 2, -1))
    return jnp.sum(near**6 - 0.5 * near**3)


# XLA fuses sums over so many pairs, and writes fewer.
POINTS = jnp.sin(jnp.arange(1500 * 3.0)).reshape(1500, 3)


@pytest.mark.parametrize("f", [exponentials, charges])
def test_what_the_plain_gradient_does_not_store_is_not_run_by_rows(f: Any):
    plain = temp_bytes(jax.grad(f), POINTS)
    assert plain < 1000 < 1e7 < temp_bytes(jax.value_and_grad(f), POINTS)
    fit, before = el.Fit(f, "4KiB"), programs_compiled()
    plan = fit.plan(POINTS)
    assert programs_compiled() - before <= 3
    assert [part.stores for part in plan.parts] == ["nothing"]
    for of in (jax.grad, jax.value_and_grad):
        for fitted in (fit, plan.pinned):
            assert temp_bytes(of(fitted), POINTS) <= 4096
    # As many operations as the plain gradient has: nothing is run twice.
    flops = lambda f: jax.jit(jax.grad(f)).lower(POINTS).compile().cost_analysis()
    assert flops(fit)["flops"] <= 1.01 * flops(f)["flops"]
    run = lambda f: jax.jit(jax.value_and_grad(f))(POINTS)
    assert_close(run(fit), run(f), 1e-3)


def test_with_room_for_the_plain_gradient_that_is_the_plan():
    few = POINTS[:500]
    plain = temp_bytes(jax.value_and_grad(charges), few)
    before = programs_compiled()
    plan = el.Fit(charges, plain).plan(few)
    assert {part.stores for part in plan.parts} == {"everything"}
    assert programs_compiled() - before <= 2


def test_a_function_that_is_run_twice_has_all_derivatives():
    def f(w: Any, x: Any, n: Any, key: Any) -> Any:
        noise = jax.random.normal(key, x.shape)
        y = jnp.tanh(x @ w + noise) * (n.astype(float) + 0.5)[None] + np.ones(
            (1, 8), "float32"
        )
        return jnp.sum(jnp.sin(y) ** 2), (n + 1, y[0])

    twice = el.Fit(f, 1, ways=(TWICE,))
    n, key = jnp.arange(8), jax.random.key(0)

    def every(f: Any) -> Any:
        g = lambda w, x: jax.value_and_grad(f, (0, 1), has_aux=True)(w, x, n, key)
        both = jax.jvp(g, (W, X), (X[:8], 2 * X))
        rows = jax.vmap(jax.grad(lambda x: f(W, x[None], n, key)[0]))(X)
        mean = lambda w: jnp.mean(jax.vmap(lambda x: f(w, x[None], n, key)[0])(X))
        return both, rows, jax.grad(mean)(W), f(W, X, n, key)

    assert_close(jax.jit(lambda: every(twice))(), jax.jit(lambda: every(f))(), 1e-3)


def test_planning_that_takes_long_says_how_far_it_is(
    caplog: pytest.LogCaptureFixture, monkeypatch: Any
):
    f = lambda w: layers(w, 1.03 * X)
    monkeypatch.setattr("eqloop.checkpointing.planning._notice._LONG", 1e-3)
    plan = el.Fit(f, TIGHT).plan(W)
    first, *others = caplog.messages
    assert "planning the gradient of a function" in first
    assert [line.split()[:3] for line in others] == [
        ["Fit:", "plan", str(i)] for i in range(1, len(others) + 1)
    ]
    said = [line.partition("takes ")[2].partition(", after")[0] for line in others]
    assert format_bytes(plan.peak_bytes) in said
    monkeypatch.setattr("eqloop.checkpointing.planning._notice._LONG", 1e3)
    el.Fit(f, TIGHT + 500).plan(W)
    assert len(caplog.messages) == 1 + len(others)


def test_on_a_cpu_the_host_has_no_memory_of_its_own():
    plan = el.Fit(mixed, 8_500, host="1GiB").plan(W, X)
    assert plan.host_bytes == 0
    assert str(plan) == str(el.Fit(mixed, 8_500).plan(W, X))
