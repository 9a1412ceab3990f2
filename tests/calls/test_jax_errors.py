"""Errors of JAX through the transforms, beside those through JAX's own.

They name the same function, line and arguments, and their tracebacks have the frames of
the user alone.
"""

import re
import traceback
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import eqloop as el

from ..mapping.devices import mesh_of
from ..marks import slow

CARRY, XS = {"a": jnp.zeros(3)}, jnp.ones((4, 3))
MESH = mesh_of(data=2)


class Layer(eqx.Module):
    scale: jax.Array

    def __call__(self, x):
        return judged(self.scale) * x


def judged(x):
    """It needs a value."""
    return x if x.sum() > 0 else -x


def step(h, x):
    return {"a": judged(h["a"])}, x


def of_row(row):
    return judged(row)


def body(h):
    return {"a": judged(h["a"])}


def is_left(h):
    return bool(h["a"].sum() < 3)


def more(h):
    return h["a"].sum() < 3


def same(h):
    return h


def total(w):
    return judged(w).sum()


def add(a, b):
    return judged(a) + b


jitted = lambda f, *args: lambda: jax.jit(f)(*args)
LAYER = Layer(jnp.ones(3))
TRACED = jitted(of_row, XS)
PAIRS = {
    "Scan": (lambda: el.Scan(step)(CARRY, XS), lambda: lax.scan(step, CARRY, XS)),
    "CheckpointedScan": (
        lambda: el.CheckpointedScan(step)(CARRY, XS),
        lambda: lax.scan(step, CARRY, XS),
    ),
    "ScanWhile": (
        lambda: el.ScanWhile(more, step, max_steps=4)(CARRY, XS),
        lambda: lax.scan(step, CARRY, XS),
    ),
    "under jit": (
        jitted(lambda h: el.Scan(step)(h, XS), CARRY),
        jitted(lambda h: lax.scan(step, h, XS), CARRY),
    ),
    "in a gradient": (
        lambda: jax.grad(lambda h: el.Scan(step)(h, XS)[1].sum())(CARRY),
        lambda: jax.grad(lambda h: lax.scan(step, h, XS)[1].sum())(CARRY),
    ),
    "under vmap": (
        lambda: jax.vmap(lambda x: el.Scan(step)({"a": x}, XS))(XS),
        lambda: jax.vmap(lambda x: lax.scan(step, {"a": x}, XS))(XS),
    ),
    "ForLoop": (lambda: el.ForLoop(of_row)(XS), None),
    "WhileLoop": (
        lambda: el.WhileLoop(more, body)(CARRY),
        lambda: lax.while_loop(more, body, CARRY),
    ),
    "cond of a WhileLoop": (
        lambda: el.WhileLoop(is_left, same)(CARRY),
        lambda: lax.while_loop(is_left, same, CARRY),
    ),
    "BoundedWhileLoop": (
        lambda: el.BoundedWhileLoop(more, body, max_steps=3)(CARRY),
        lambda: lax.while_loop(more, body, CARRY),
    ),
    "CheckpointedWhileLoop": (
        lambda: el.CheckpointedWhileLoop(more, body)(CARRY),
        lambda: lax.while_loop(more, body, CARRY),
    ),
    "StackedLayers": (
        lambda: el.StackedLayers.from_layers([LAYER] * 3)(jnp.ones(3)),
        None,
    ),
    "AssociativeScan": (lambda: el.AssociativeScan(add)(XS), None),
    "Vmap": (lambda: el.Vmap(of_row)(XS), lambda: jax.vmap(of_row)(XS)),
    "ChunkedVmap": (lambda: el.ChunkedVmap(of_row, 2)(XS), None),
    "Map": (lambda: el.Map(of_row)(XS), None),
    "ParallelMap": (lambda: el.ParallelMap(of_row, mesh=MESH)(XS), None),
    "ShardMap": (
        lambda: el.ShardMap(of_row, mesh=MESH, in_specs=P("data"), out_specs=P("data"))(
            XS
        ),
        jitted(
            jax.shard_map(of_row, mesh=MESH, in_specs=P("data"), out_specs=P("data")),
            jax.device_put(XS, jax.NamedSharding(MESH, P("data"))),
        ),
    ),
    "Cond": (
        lambda: el.Cond(of_row, same)(jnp.array(True), XS),
        lambda: lax.cond(True, of_row, same, XS),
    ),
    "Switch": (
        lambda: el.Switch([of_row, same])(jnp.array(1), XS),
        lambda: lax.switch(jnp.array(1), [of_row, same], XS),
    ),
    "IfElse": (
        lambda: el.IfElse([of_row, same])([jnp.array(True), jnp.array(False)], XS),
        lambda: lax.cond(True, of_row, same, XS),
    ),
    "Remat": (lambda: el.Remat(of_row)(XS), lambda: jax.checkpoint(of_row)(XS)),
    "Jit": (lambda: el.Jit(of_row)(XS), TRACED),
    "EvalShape": (lambda: el.EvalShape(of_row)(XS), TRACED),
    "Trace": (lambda: el.Trace(of_row)(XS), TRACED),
    "DebugNonFinite": (lambda: el.DebugNonFinite(of_row)(XS), TRACED),
    "Reschedule": (lambda: el.Reschedule(of_row)(XS), TRACED),
    "Fit": (lambda: el.Fit(of_row, "1MB")(XS), TRACED),
    "gradient of a Fit": (
        lambda: jax.grad(lambda x: el.Fit(of_row, "1MB")(x).sum())(XS),
        lambda: jax.grad(lambda x: jax.jit(of_row)(x).sum())(XS),
    ),
    "plans": (lambda: el.plans(of_row)(XS), TRACED),
    "Optimize": (lambda: el.Optimize(of_row)(XS), TRACED),
    "to_python": (lambda: el.ir.to_python(of_row)(XS), TRACED),
    "draw": (lambda: el.ir.draw(of_row)(XS), TRACED),
    "Named, under jit": (jitted(el.Named(of_row, "a name"), XS), TRACED),
    "Grad, under jit": (jitted(el.Grad(total), XS[0]), jitted(jax.grad(total), XS[0])),
}
# What JAX says of its own maps is what it says of `vmap`, or of its own functions.
SAID = {
    "ForLoop": "of_row … scan … row",
    "ChunkedVmap": "of_row … vmap … row",
    "Map": "of_row … vmap … row",
    "ParallelMap": "of_row … vmap … row",
    "AssociativeScan": "add … associative_scan … xs",
    "StackedLayers": "__call__ … scan … self.scale",
}


def error_of(call: Any) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        call()
    return caught.value


def told(error: Exception) -> tuple[str, ...]:
    """The function, its line, what it is traced for, and the arguments."""
    function = r"while tracing the function (\S+) at (\S+):(\d+) for ([\w /]+)\."
    found = re.search(function, str(error))
    argument = re.search(r"of the arguments? (.*?)\.\n", str(error))
    return (*(found.groups() if found else ()), argument[1] if argument else "")


def places(error: Exception) -> list[tuple[str, str | None]]:
    """The lines of the traceback within the user's functions."""
    frames = traceback.extract_tb(error.__traceback__)
    return [
        (f.filename, f.name) for f in frames if f.name not in ("error_of", "<lambda>")
    ]


@pytest.mark.parametrize("name", PAIRS)
def test_a_value_that_is_needed(name):
    ours, of_jax = PAIRS[name]
    error = error_of(ours)
    assert isinstance(error, jax.errors.TracerBoolConversionError)
    assert error.__cause__ is error.__context__ is None
    if of_jax is not None:
        expected = error_of(of_jax)
        assert told(error) == told(expected)
        assert places(error) == places(expected)
        return
    function, file, _, kind, argument = told(error)
    assert f"{function} … {kind} … {argument}" == SAID[name]
    assert file == __file__
    assert {file for file, _ in places(error)} == {__file__}


def leaked(run):
    """The error of a value that has left the function that made it."""
    left = []

    def leaving(x):
        left.append(x * 2)
        return x

    run(leaving)
    return error_of(lambda: left[-1] + 1)


LEAKS = {
    "Scan": (
        lambda f: el.CheckpointedScan(lambda h, x: (f(h), x))(XS[0], XS),
        lambda f: lax.scan(lambda h, x: (f(h), x), XS[0], XS),
    ),
    "WhileLoop": (
        lambda f: el.WhileLoop(lambda x: x.sum() < 3, f)(XS),
        lambda f: lax.while_loop(lambda x: x.sum() < 3, f, XS),
    ),
    "Cond": (
        lambda f: el.Cond(f, same)(jnp.array(True), XS),
        lambda f: lax.cond(True, f, same, XS),
    ),
    "Remat": (lambda f: el.Remat(f)(XS), lambda f: jax.checkpoint(f)(XS)),
    "Vmap": (lambda f: el.Vmap(f)(XS), lambda f: jax.vmap(f)(XS)),
}


@pytest.mark.parametrize("name", LEAKS)
def test_a_value_that_has_left(name):
    ours, of_jax = map(leaked, LEAKS[name])
    assert type(ours) is type(of_jax) is jax.errors.UnexpectedTracerError
    lines = lambda error: [
        re.sub(r"0x\w+|:\d+", "", line)
        for line in str(error).splitlines()
        if "being traced when" in line or "from line" in line or "lambda" in line
    ]
    assert lines(ours) == lines(of_jax)


@pytest.mark.parametrize(
    "mode", ["auto", "remove_frames", slow("quiet_remove_frames"), "off"]
)
def test_frames_are_left_out_as_those_of_jax(mode):
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", mode)
    try:
        error = error_of(PAIRS["Scan"][0])
    finally:
        jax.config.update("jax_traceback_filtering", before)
    files = [file for file, _ in places(error)]
    assert ({*files} != {__file__}) == (mode == "off")


def test_ipython_hides_frames_by_itself():
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "tracebackhide")
    try:
        error = error_of(PAIRS["Scan"][0])
    finally:
        jax.config.update("jax_traceback_filtering", before)
    shown = [
        frame.f_code.co_filename
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if not frame.f_locals.get("__tracebackhide__")
    ]
    assert {file for file in shown if "eqloop/" in file.replace("\\", "/")} <= {
        __file__
    }


def test_a_mistake_of_ours_is_seen_where_it_is(monkeypatch):
    def broken(*_):
        raise AssertionError

    monkeypatch.setattr("eqloop.loops._open_loop.refuse_refs", broken)
    broken.__globals__["__name__"], before = "eqloop.broken", __name__
    try:
        error = error_of(lambda: el.Scan(step)(CARRY, XS))
    finally:
        broken.__globals__["__name__"] = before
    assert any("_open_loop" in file for file, _ in places(error))
