"""A run goes on with the same step, however it is written, and with no other one."""

import functools
import json
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqloop as el
from eqloop.resuming._in_words import fingerprint

from ..marks import slow_if
from .cases import numbers

XS = np.linspace(0, 1, 8, dtype=np.float32)


def forward(scan, folder, xs=XS, init=0.3):
    return el.Resumable(scan, folder, every=4)(jnp.float32(init), xs)


def gradient(scan, folder, loss=lambda carry, ys: carry**2, argnums=("init", "xs")):
    run = el.Resumable(scan, folder, every=4)
    return run.value_and_grad(loss, argnums=argnums)(jnp.float32(0.3), XS)


def pulled(scan, folder):
    _, pull = el.Resumable(scan, folder, every=4).vjp(jnp.float32(0.3), XS)
    return pull((jnp.float32(2.0), None))


def compared(run, one, other, folder):
    """What is said if a run is to go on with another scan; empty if it does."""
    first = numbers(run(one, folder))
    assert numbers(run(one, folder)) == first
    try:
        found = numbers(run(other, folder))
    except ValueError as error:
        if "which differs in" not in str(error):
            raise
        return str(error)
    assert found == first
    return ""


def source(text: str, **names: Any) -> Any:
    """`step` of a module with this text."""
    module = {"__name__": "model", "jnp": jnp, "jax": jax, "np": np} | names
    exec(text, module)
    return module["step"]


def module_of(text: str) -> Any:
    module = types.ModuleType("helpers")
    exec(text, module.__dict__)
    return module


def of_global(value):
    return source(
        "def step(h, x): return (h + x if A == 'a' else h * x), None", A=value
    )


def of_helper(value):
    helpers = module_of(f"def g(h): return h * {value}")
    return source("def step(h, x): return helpers.g(h) + x, None", helpers=helpers)


class Held(eqx.Module):
    """A step with something in a static field."""

    what: Any = eqx.field(static=True)

    def __call__(self, h, x):
        what = self.what
        if isinstance(what, frozenset):
            return h + x * len(what), None
        if isinstance(what, slice):
            return h + jnp.arange(5.0)[what].sum(), None
        if isinstance(what, type | np.dtype):
            return h + x.astype(what).astype(jnp.float32), None
        if isinstance(what, tuple):
            return h + jnp.copysign(x, what[0]), None
        return what(h, x), None


class Owner:
    """An object whose method is a step."""

    def __init__(self, rate):
        self.rate = rate

    def step(self, h, x):
        return h * self.rate + x, None


def closing_over(value):
    return lambda h, x: (h * value + x, None)


def in_lists(value):
    held = {"by": [value]}
    return lambda h, x: (h * held["by"][0] + x, None)


def by_partial(value):
    return functools.partial(lambda by, h, x: (h * by + x, None), value)


def itself(value):
    held: list[Any] = [value]
    held.append(held)
    return lambda h, x: (h * held[0] + x, None)


class Host:
    """An object that is called back."""

    def __init__(self, rate):
        self.rate = rate

    def __call__(self, x):
        return np.asarray(x * self.rate, np.float32)


def calling_back(value):
    host = value if callable(value) else lambda x: np.asarray(x * value, np.float32)
    result = jax.ShapeDtypeStruct((), jnp.float32)
    return lambda h, x: (jax.pure_callback(host, result, h) + x, None)


def reading(value, text="K"):
    """A step whose callback reads something of its module."""
    code = (
        f"def host(x): return np.asarray(x * {text}, np.float32)\n"
        "def step(h, x):\n"
        "    result = jax.ShapeDtypeStruct((), jnp.float32)\n"
        "    return jax.pure_callback(host, result, h) + x, None\n"
    )
    return source(code, K=value)


# Pairs of steps that print alike.
OTHER_STEPS = {
    "a text of its module": [of_global(v) for v in "ab"],
    "a helper of another module": [of_helper(v) for v in (2.0, 3.0)],
    "lambdas": [lambda h, x: (h + x, None), lambda h, x: (h * x, None)],
    "types": [Held(v) for v in (jnp.bfloat16, jnp.float16)],
    "dtypes": [Held(np.dtype(v)) for v in ("f2", "f4")],
    "ufuncs": [Held(v) for v in (jnp.add, jnp.multiply)],
    "sets": [Held(frozenset(v)) for v in ("a", "ab")],
    "slices": [Held(slice(0, v)) for v in (2, 3)],
    "signs": [Held((v,)) for v in (0.0, -0.0)],
    "partials in fields": [Held(functools.partial(max_of, v)) for v in (0.5, 0.6)]
    if (max_of := lambda by, h, x: jnp.maximum(h, by) + x)
    else [],
    "bound methods": [Owner(v).step for v in (2.0, 3.0)],
    "closures": [closing_over(v) for v in (2.0, 2.0000002)],
    "closed-over arrays": [closing_over(jnp.float32(v)) for v in (2.0, 2.5)],
    "lists": [in_lists(v) for v in (2.0, 2.5)],
    "partials": [by_partial(v) for v in (2.0, 2.5)],
    "what has itself": [itself(v) for v in (2.0, 2.5)],
    "callbacks": [calling_back(v) for v in (2.0, 2.5)],
    "objects that are called": [calling_back(Host(v)) for v in (2.0, 2.5)],
    "globals of callbacks": [reading(v) for v in (2.0, 2.5)],
    "lists of callbacks": [reading({"a": v}, "K['a']") for v in (2.0, 2.5)],
    "modules of callbacks": [
        reading(module_of(f"def g(): return {v}"), "K.g()") for v in (2.0, 2.5)
    ],
}


@pytest.mark.parametrize("name", slow_if(lambda n: n > "g", OTHER_STEPS))
def test_another_step_is_refused(name, tmp_path):
    one, other = map(el.Scan, OTHER_STEPS[name])
    assert compared(forward, one, other, tmp_path)


PLAIN = """
def step(h, x):
    rate = 0.5
    def inner(h): return rate * h
    return jax.jit(inner)(h) + x, None
"""
RENAMED = '''
# A comment.
FACTOR = 0.5


def halved(value):
    """What it does."""
    return FACTOR * value


def step(carry, element):
    """Adds them."""
    return jax.jit(halved)(carry) + element, None
'''
CALLBACK = """
def host(x): return np.asarray(x * rate, np.float32)
def step(h, x):
    return jax.pure_callback(host, jax.ShapeDtypeStruct((), jnp.float32), h) + x, None
"""
LATER = CALLBACK.replace("host(x): return", "host(y):\n    'Doc.'\n    return")
LATER = LATER.replace("x * rate", "y * speed").replace("host", "hosting")


def counting():
    calls = []

    def host(x):
        calls.append(1)
        return np.asarray(x * 2, np.float32)

    result = jax.ShapeDtypeStruct((), jnp.float32)
    return lambda h, x: (jax.pure_callback(host, result, h) + x, None)


def printing(text):
    def step(h, x):
        jax.debug.callback(lambda h: text and None, h)
        return el.Scan(closing_over(0.5), progress=len(text) > 1)(h, x[None])[0], None

    return step


SAME_STEPS = {
    "renamed": lambda: [source(PLAIN), source(RENAMED)],
    "callbacks": lambda: [source(CALLBACK, rate=2.0), source(LATER, speed=2.0)],
    "what a callback counts": lambda: [counting()] * 2,
    "what is shown": lambda: [printing("a"), printing("b")],
}


@pytest.mark.parametrize("name", SAME_STEPS)
def test_the_same_step_goes_on(name, tmp_path):
    one, other = map(el.Scan, SAME_STEPS[name]())
    assert compared(forward, one, other, tmp_path) == ""


def test_a_method_that_a_callback_calls(tmp_path):
    class Edited(Host):
        def __call__(self, x):
            return self.twice(x)

        def twice(self, x):
            return np.asarray(self.rate * x, np.float32)

    one, other = (el.Scan(calling_back(Edited(2.0))) for _ in range(2))
    assert compared(forward, one, other, tmp_path) == ""
    Edited.twice = lambda self, x: np.asarray(self.rate * x + 1, np.float32)
    assert "callback 0" in compared(
        forward, one, el.Scan(calling_back(Edited(2.0))), tmp_path
    )


def test_what_a_function_of_xs_has_seen(tmp_path):
    def made(factor, seen):
        def xs(start, stop):
            seen.append(start)
            return factor * XS[start:stop]

        return xs

    run = lambda xs: el.Resumable(
        el.Scan(lambda h, x: (h + x, None)), tmp_path, every=4
    )(jnp.float32(0), xs, length=8)
    first = numbers(run(made(2.0, [])))
    assert numbers(run(made(2.0, ["another"]))) == first
    with pytest.raises(ValueError, match="  xs: its code and what it reads, other va"):
        run(made(2.0 + 1e-6, []))


def test_functions_of_axes(tmp_path):
    matrix = jnp.arange(64.0).reshape(8, 8)
    at = lambda axis: el.Scan(
        lambda h, x: (h * x.sum() + x[0], None), in_axes=lambda leaf: axis
    )
    run = functools.partial(forward, xs=matrix)
    assert compared(run, at(0), at(0), tmp_path / "same") == ""
    assert compared(run, at(0), at(1), tmp_path / "other")


# What derivatives depend on.


def with_rule(kind, value):
    f = kind(jnp.sin)
    if kind is jax.custom_jvp:
        f.defjvp(lambda x, dot: (f(*x), value * dot[0]))
    else:
        f.defvjp(lambda x: (f(x), None), lambda _, ct: (value * ct,))
    return el.Scan(lambda h, x: (f(h) + x, None))


def with_backward(value, scan=el.Scan):
    def scaled(ct):
        return ct * value

    return scan(lambda h, x: (jnp.sin(h) + x, None), backward=scaled)


def with_inverse(value, by_save=False):
    step = lambda h, x: (2 * h + x, None)
    inverse = lambda h, x, *saved: saved[0] if saved else (h - value * x) / 2
    save = (lambda h, x: h * value) if by_save else None
    schedule = el.Reversible(inverse, save=save, check=False)
    return el.Scan(step, schedule=schedule)


def with_policy(name):
    step = lambda h, x: (jnp.sin(h) * x, None)
    policy = jax.checkpoint_policies.save_only_these_names(name)
    return el.CheckpointedScan(step, policy=policy)


def with_backward_called(value):
    host = lambda ct: np.asarray(ct * value, np.float32)
    result = jax.ShapeDtypeStruct((), jnp.float32)
    step = lambda h, x: (jnp.sin(h) + x, None)
    return el.Scan(step, backward=lambda ct: jax.pure_callback(host, result, ct))


OTHER_RULES = {
    "callback of backward": with_backward_called,
    "jvp": functools.partial(with_rule, jax.custom_jvp),
    "vjp": functools.partial(with_rule, jax.custom_vjp),
    "backward": with_backward,
    "backward, planned": functools.partial(with_backward, scan=el.CheckpointedScan),
    "inverse": with_inverse,
    "save": functools.partial(with_inverse, by_save=True),
    "policy": lambda value: with_policy(f"at {value}"),
    "truncated": lambda value: el.Scan(
        lambda h, x: (jnp.sin(h) + x, None), backward=el.Truncate(int(value))
    ),
}


@pytest.mark.parametrize(
    "name", slow_if(("jvp", "backward, planned", "save").__contains__, OTHER_RULES)
)
def test_another_rule_is_refused_by_gradients(name, tmp_path):
    make = OTHER_RULES[name]
    assert compared(gradient, make(2.0), make(2.0), tmp_path / "same") == ""
    message = compared(gradient, make(2.0), make(3.0), tmp_path / "other")
    if name in ("jvp", "vjp", "inverse"):
        assert "2.0" in message or "3.0" in message
        assert "test_same_step.py" in message


def test_another_rule_makes_no_other_loop(tmp_path):
    one, other = with_backward(2.0), with_backward(3.0)
    forward(one, tmp_path)
    assert numbers(gradient(other, tmp_path)) == numbers(
        gradient(other, tmp_path / "own")
    )
    assert compared(pulled, one, other, tmp_path / "pulled")


def test_a_loss_that_comes_out_with_another_rounding(tmp_path):
    """As from another process with a GPU, which may compile it to something else."""
    scan = el.Scan(lambda h, x: (0.5 * h + x, h))
    loss = lambda weight: lambda carry, ys: weight * carry + ys.sum()
    gradient(scan, tmp_path, loss(1.0))
    path = tmp_path / "gradient/gradient.json"
    record = json.loads(path.read_text())
    record["arguments"]["cotangent of carry"][1] = "00"
    path.write_text(json.dumps(record))
    gradient(scan, tmp_path, loss(1.0))
    with pytest.raises(ValueError, match=r"cotangent of carry: float32\[\], other va"):
        gradient(scan, tmp_path, loss(2.0))


def test_a_loss_that_is_written_otherwise(tmp_path):
    scan = el.Scan(lambda h, x: (0.5 * h + x, h))
    first = gradient(scan, tmp_path, lambda carry, ys: 2 * carry)
    assert numbers(gradient(scan, tmp_path, lambda c, y: c + c)) == numbers(first)


# Other processes, and other devices.


def everything():
    """A gradient with a callback, rules and a schedule in its step."""

    def step(h, x):
        (h, _), y = OTHER_RULES["vjp"](2.0).f(h, x), None
        h, _ = el.CheckpointedScan(closing_over(0.5))(h, jnp.ones(3) * x)
        return h, y

    return el.CheckpointedScan(step, policy="save_dots", backward=lambda ct: 2 * ct)


@pytest.mark.slow
def test_another_process_goes_on(tmp_path):
    before = numbers(gradient(everything(), tmp_path / "run"))
    code = (
        f"from {__name__} import everything, gradient, forward, calling_back, el\n"
        f"print(gradient(everything(), {str(tmp_path / 'run')!r}))\n"
        f"forward(el.Scan(calling_back(2.0)), {str(tmp_path / 'called')!r})\n"
    )
    env = os.environ | {
        "PYTHONHASHSEED": "3",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    found = subprocess.run([sys.executable, "-c", code], env=env, check=False)
    assert found.returncode == 0
    assert numbers(gradient(everything(), tmp_path / "run")) == before
    forward(el.Scan(calling_back(2.0)), tmp_path / "called")
    with pytest.raises(ValueError, match="f, callback 0: its code and what it reads"):
        forward(el.Scan(calling_back(3.0)), tmp_path / "called")


@pytest.mark.parametrize("where", ["init", "typed init", "closed over"])
def test_another_number_of_devices_goes_on(where, tmp_path):
    rows = jnp.linspace(0, 1, 4)
    kind = getattr(jax.sharding.AxisType, "Explicit" if "typed" in where else "Auto")

    def run(count, folder):
        devices = jax.devices()[:count]
        mesh = jax.make_mesh((count,), ("d",), (kind,), devices=devices)
        place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        put = lambda x: jax.device_put(x, place) if count > 1 else x
        init, held = (rows, put(rows)) if where == "closed over" else (put(rows), rows)
        scan = el.Scan(lambda h, x: (jnp.sin(h) + x + held.sum(), None))
        run = el.Resumable(scan, folder, every=4)
        take = run.value_and_grad(lambda carry, ys: carry.sum(), argnums="init")
        return numbers(jax.tree.map(np.asarray, take(init, XS)))

    first = run(2, tmp_path)
    assert run(1, tmp_path) == run(4, tmp_path) == first
    shutil.rmtree(tmp_path / "gradient")
    assert run(1, tmp_path) == first


def test_spread_values_are_known_by_their_numbers():
    """However they are spread over devices; and other ones are told from them."""
    rows = np.arange(8, dtype=np.float32)
    spec = jax.sharding.PartitionSpec("d")
    meshes = [jax.sharding.Mesh(jax.devices()[:n], ("d",)) for n in (1, 2, 4)]
    places = [jax.sharding.NamedSharding(mesh, spec) for mesh in meshes]
    spread = lambda x: {fingerprint(jax.device_put(x, place)) for place in places}
    assert spread(rows) == {fingerprint(rows)}
    assert spread(rows) != spread(rows[::-1])
