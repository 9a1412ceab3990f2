"""Bars on the other loops, and on the maps."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqloop as el

from ..marks import slow, slow_if

pytestmark = pytest.mark.sampled

XS = jnp.linspace(0.1, 1.0, 20)
STEPS = 21
COUNTS = {
    "value": [("a", 20)],
    "grad": [("a", 20), ("a (backward)", 20)],
}


def sliced(w: Any, progress: Any) -> Any:
    step = lambda h, x: (jnp.sin(w * h + x), h)
    return el.SlicedScan(step, step=3, progress=progress)(0.5, XS)[1]


LOOPS: dict[str, Callable[[Any, Any], Any]] = {
    "SlicedScan": sliced,
    "ForLoop": lambda w, p: el.ForLoop(lambda x: jnp.sin(w * x), progress=p)(XS),
    "CheckpointedForLoop": lambda w, p: el.CheckpointedForLoop(
        lambda x: jnp.sin(w * x), progress=p
    )(XS),
    "Map": lambda w, p: el.Map(lambda x: jnp.sin(w * x), progress=p)(XS),
    "ChunkedVmap": lambda w, p: el.ChunkedVmap(lambda x: jnp.sin(w * x), 7, progress=p)(
        XS
    ),
    "in one chunk": lambda w, p: el.ChunkedVmap(
        lambda x: jnp.sin(w * x), 64, progress=p
    )(XS),
    "with a rest": lambda w, p: el.ChunkedVmap(
        lambda x: jnp.sin(w * x), 7, reduce="sum", progress=p
    )(XS),
    "with a policy": lambda w, p: el.ChunkedVmap(
        lambda x: jnp.sin(w * x), 7, policy=el.policies.save_everything, progress=p
    )(XS),
}


# These differ from others in what the tests of maps look at.
SLOW = {"ForLoop", "CheckpointedForLoop", "in one chunk", "with a rest"}


@pytest.mark.parametrize("name", slow_if(SLOW.__contains__, LOOPS))
def test_loops_and_maps(name, shown):
    run, bar = LOOPS[name], el.ProgressBar(5, desc="a")
    grad = lambda p: jax.grad(lambda w: jnp.sum(run(w, p) ** 2))
    for mode, f in (("value", lambda p: lambda w: run(w, p)), ("grad", grad)):
        out = jax.jit(f(bar))(1.3)
        assert shown() == dict.fromkeys(COUNTS[mode], 1)
        np.testing.assert_array_equal(out, jax.jit(f(None))(1.3))
    assert not shown()


def test_loops_in_maps_are_not_counted_again(shown):
    inner = el.Scan(lambda h, _: (jnp.sin(h), None), progress=el.ProgressBar(desc="in"))
    rows = el.Map(lambda h: inner(h, length=5)[0], progress=el.ProgressBar(desc="out"))
    jax.jit(jax.value_and_grad(lambda hs: jnp.sum(rows(hs) ** 2)))(XS[:3])
    inners = {("in", 5): 3, ("in (backward)", 5): 3}
    assert shown() == {("out", 3): 1, ("out (backward)", 3): 1, **inners}


def while_loop(kind: str, w: Any, dt: Any, progress: Any) -> Any:
    """Runs until the time is up: `STEPS` steps if `dt` is 0.05."""
    cond = lambda carry: carry[1] < 1.02
    body = lambda carry: (jnp.sin(w * carry[0]), carry[1] + carry[2], carry[2])
    loop = {
        "forward": lambda: el.WhileLoop(cond, body, progress=progress),
        "bounded": lambda: el.BoundedWhileLoop(
            cond, body, max_steps=64, base=3, progress=progress
        ),
        "online": lambda: el.CheckpointedWhileLoop(
            cond, body, checkpoints=4, progress=progress
        ),
        "a scan": lambda: el.ScanWhile(
            cond, lambda c, _: (body(c), c[0]), max_steps=64, progress=progress
        ),
    }[kind]()
    if kind == "a scan":
        (w, _, _), ys, _ = loop((w, 0.0, dt))
        return w + jnp.sum(ys)
    return loop((w, 0.0, dt))[0]


# With 64 bits, which the counters have then.
@pytest.mark.parametrize("either_width", [slow(False), True], indirect=True)
@pytest.mark.parametrize("kind", ["forward", slow("bounded"), "online", slow("a scan")])
@pytest.mark.usefixtures("either_width")
def test_while_loops(kind, shown):
    bar = el.ProgressBar(4, desc="a")
    run = lambda w, dt, p: while_loop(kind, w, dt, p)

    def modes(p: Any) -> Any:
        batch = lambda w: jax.vmap(lambda dt: run(w, dt, p))(jnp.array([0.05, 0.2]))
        yield lambda w: run(w, jnp.float32(0.05), p)
        yield batch
        if kind != "forward":
            yield jax.value_and_grad(lambda w: jnp.sum(batch(w) ** 2))

    for with_bar, plain in zip(modes(bar), modes(None), strict=True):
        out = jax.jit(with_bar)(1.1)
        backward = {("a (backward)", STEPS): 1} if isinstance(out, tuple) else {}
        assert shown() == {("a", STEPS): 1, **backward}
        np.testing.assert_array_equal(out, jax.jit(plain)(1.1))
    assert not shown()


def test_a_while_loop_shows_the_steps_that_are_expected(recorder):
    bar = el.ProgressBar(total=30)
    while_loop("bounded", 1.1, jnp.float32(0.05), bar)
    assert [(bar.total, bar.n) for bar in recorder.bars] == [(30, STEPS)]


def test_a_scan_that_ends_is_described_by_its_carry(recorder):
    told = []

    def desc(i, carry, y):
        told.append((i, float(carry), y))
        return "a"

    step = lambda c, x: (c + 1, c)
    bar = el.ProgressBar(1, desc=desc)
    loop = el.ScanWhile(lambda c: c < 2, step, max_steps=9, progress=bar)
    assert jax.jit(loop)(0.0)[2] == 2
    assert told[:2] == [(0, 1.0, None), (1, 2.0, None)]
    assert [bar.n for bar in recorder.bars] == [2]
