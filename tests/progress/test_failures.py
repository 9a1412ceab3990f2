"""What fails: wrong calls, and loops that raise."""

import sys
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import eqloop as el
from eqloop.progress import _display
from eqloop.progress._meter import Label

IDENTITY = lambda h, x: (h, None)
WRONG = [
    (lambda: el.ProgressBar(True), TypeError, "`every` must be an int"),
    (
        lambda: el.ProgressBar(desc=lambda i: "x"),
        TypeError,
        r"ProgressBar: `desc` .* too many .* `desc\(i, carry, y\)`",
    ),
    (
        lambda: el.Scan(IDENTITY, progress="yes"),
        TypeError,
        "`progress` must be `True`, an int .* or an `el.ProgressBar",
    ),
    (
        lambda: el.Scan(IDENTITY, progress=el.ProgressBar),
        TypeError,
        "`progress` must be `True`",
    ),
    (lambda: el.Map(IDENTITY, progress=0), ValueError, "at least 1, but it is 0"),
    (
        lambda: el.Scan(IDENTITY, progress=el.ProgressBar(total=3))(0, length=4),
        ValueError,
        "Scan: `progress` expects 3 steps in all, but there are 4. Leave `total` out",
    ),
    (
        lambda: el.Map(jnp.sin, progress=el.ProgressBar(desc=str))(jnp.ones(3)),
        TypeError,
        "Map: `desc` of a progress bar must be a string here",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), WRONG)
def test_wrong_calls(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    "call",
    [
        lambda: el.ForLoop(lambda x: x, progress=True)(jnp.ones(3)),
        lambda: el.ChunkedVmap(lambda x: x, 2, progress=True)(jnp.ones(3)),
        lambda: el.WhileLoop(lambda h: h < 3, lambda h: h + 1, progress=True)(0),
    ],
)
def test_without_tqdm_the_error_names_the_extra(call, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(ImportError, match=r"pip install tqdm"):
        call()


def test_without_tqdm_there_are_plans(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    assert el.Scan(IDENTITY, progress=True).plan(0.0, length=4).length == 4


def checked(h: Any, x: Any) -> Any:
    return eqx.error_if(h + x, x > 5, "x is too large"), None


def nested(h: Any, x: Any) -> Any:
    return el.Scan(checked)(h, jnp.arange(4.0) + x)[0], None


def mapped(h: Any, x: Any) -> Any:
    rows = el.Map(lambda y: el.CheckpointedScan(checked)(h, y[None])[0])
    return rows(jnp.arange(4.0) + x)[0], None


def raising(h: Any, x: Any) -> Any:
    def callback(x: Any) -> None:
        if x > 5:
            raise ValueError("x is too large")

    jax.debug.callback(callback, x)
    return h + x, None


def _finished(run: Any, *args: Any) -> None:
    jax.block_until_ready(run(*args))
    jax.effects_barrier()


@pytest.mark.parametrize("f", [checked, nested, mapped, raising])
def test_a_loop_that_raises_closes_its_bar_and_the_next_starts_anew(f, recorder):
    bar = el.ProgressBar(1)
    run = jax.jit(lambda xs: el.Scan(f, progress=bar)(0.0, xs)[0])
    run(jnp.zeros(3))
    with pytest.raises(Exception, match="x is too large"):
        _finished(run, jnp.arange(10.0))
    assert not _display._runs
    run(jnp.zeros(3))
    jax.effects_barrier()
    first, failed, last = recorder.bars
    assert first.counts == last.counts == [0, 1, 2, 3]
    assert failed.n < 10
    assert failed.closed


def test_what_desc_must_return():
    label = Label(lambda i, carry, y: i, (), (), lambda carry: carry, lambda y: y)
    with pytest.raises(TypeError, match="`desc` must return a string, but it returned"):
        label(1, [])


def test_what_desc_returns_is_checked(recorder):
    scan = el.Scan(IDENTITY, progress=el.ProgressBar(desc=lambda i, h, y: i))
    with pytest.raises(Exception, match=r"`desc` must return a string, .* returned 0"):
        jax.block_until_ready(scan(jnp.zeros(()), length=1))
    assert recorder.bars[0].closed


def test_a_bar_that_did_not_come_to_its_end_is_closed_by_the_next(recorder):
    source = _display.Source("a", 3)
    for total in (1, 3):
        number = _display.report(source, "", 0, 0, 3)
        _display.report(source, "", number, total, 3)
    assert [(bar.n, bar.closed) for bar in recorder.bars] == [(1, True), (3, True)]


def test_the_user_may_interrupt(recorder, monkeypatch):
    def interrupt(self: Any, n: int) -> None:
        raise KeyboardInterrupt

    source = _display.Source("a", 3)
    number = _display.report(source, "", 0, 0, 3)
    monkeypatch.setattr(recorder, "update", interrupt)
    with pytest.raises(KeyboardInterrupt):
        _display.report(source, "", number, 1, 3)
    assert recorder.bars[0].closed
