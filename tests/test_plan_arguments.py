"""What is asked for a plan takes the arguments of the call, of whatever kind these are.

Each way to say the same arguments gives the same plan, and each call runs.
"""

import enum
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqloop as el

Function = Callable[..., Any]


class Mode(enum.Enum):
    FAST = "fast"


class Said(NamedTuple):
    """Arguments, by position and by name."""

    args: tuple[Any, ...]
    named: Mapping[str, Any] = MappingProxyType({})


STEPS = 8
XS, KEY = jnp.linspace(0.1, 0.9, STEPS * 3).reshape(STEPS, 3), jax.random.key(0)
RAW = jax.random.PRNGKey(0)
STATIC = {"f": jnp.sin, "mode": Mode.FAST, "text": "sin", "none": None, "factor": 2}
types_of = lambda tree: eqx.filter_eval_shape(lambda: tree)


def step(h: Any, x: Any) -> Any:
    return jnp.sin(h) + jnp.sum(x), None


def static_step(state: Any, x: Any) -> Any:
    assert state["mode"] is Mode.FAST
    assert state["text"] == x["text"] == "sin"
    h = state["factor"] * state["f"](state["h"]) + jnp.sum(x["rows"])
    return {**state, "h": h}, None


def keyed_step(h: Any, x: Any, *, key: Any) -> Any:
    return jnp.sin(h) * jax.random.uniform(key) + jnp.sum(x), None


# Groups of ways to say the same, for loops over `xs`: the step, and the ways.
INIT = jnp.float32(0.5)
OF_SCANS: dict[str, tuple[Function, dict[str, Said]]] = {
    "arrays": (
        step,
        {
            "jax": Said((INIT, XS)),
            "numpy": Said((np.float32(0.5), np.asarray(XS))),
            "number": Said((0.5, XS)),
            "by name": Said((INIT,), {"xs": XS}),
            "all by name": Said((), {"init": INIT, "xs": XS}),
            "types": Said(types_of((INIT, XS))),
        },
    ),
    "static": (
        static_step,
        {
            "jax": Said(({**STATIC, "h": INIT}, {"rows": XS, **STATIC})),
            "numpy": Said(
                ({**STATIC, "h": np.float32(0.5)}, {"rows": np.asarray(XS), **STATIC})
            ),
            "types": Said(types_of(({**STATIC, "h": INIT}, {"rows": XS, **STATIC}))),
        },
    ),
    "key": (
        keyed_step,
        {
            "typed": Said((INIT, XS), {"key": KEY}),
            "types": Said(types_of((INIT, XS)), {"key": types_of(KEY)}),
        },
    ),
    "raw key": (
        keyed_step,
        {
            "jax": Said((INIT, XS), {"key": RAW}),
            "numpy": Said((INIT, XS), {"key": np.asarray(RAW)}),
            "types": Said((INIT, XS), {"key": types_of(RAW)}),
        },
    ),
}
LENGTH = {
    "python": Said((INIT,), {"length": STEPS}),
    "numpy": Said((INIT,), {"length": np.int64(STEPS)}),
    "by name": Said((), {"init": 0.5, "length": STEPS}),
}
COUNTED = {
    "Scan": el.Scan,
    "CheckpointedScan": el.CheckpointedScan,
    "SlicedScan": lambda f: el.SlicedScan(f, step=2, schedule=el.Chunked(2)),
    "Budget": lambda f: el.Scan(f, schedule=el.Budget("1MiB", measure=False)),
}
SCANS = {
    **COUNTED,
    "ScanWhile": lambda f: el.ScanWhile(lambda h: True, f, max_steps=STEPS),
}


class Layer(eqx.Module):
    weight: jax.Array
    dropout: eqx.nn.Dropout

    def __call__(self, x: Any, scale: Any = 1.0, *, key: Any) -> Any:
        return self.dropout(jnp.tanh(x * self.weight), key=key) * scale


LAYERS = el.StackedLayers(
    Layer(jnp.ones(4), eqx.nn.Dropout(0.5)), schedule=el.Chunked(2)
)


def loss(
    w: Any, xs: Any, f: Any = jnp.sin, *, flag: Any = True, more: Any = None
) -> Any:
    """Of a vector; what is not an array is static."""
    w = f(w) if flag else w
    if more is not None:
        w = w * more["f"](jax.random.uniform(more["key"], (3,)) * more["factor"])
    return jnp.sum(lax.scan(lambda h, x: (jnp.sin(h * w + x), None), w, xs)[0])


W = jnp.full(3, 0.5)
MORE = {**STATIC, "key": KEY}
OF_FUNCTIONS = {
    "arrays": {
        "jax": Said((W, XS)),
        "numpy": Said((np.asarray(W), np.asarray(XS))),
        "by name": Said((), {"w": W, "xs": XS}),
        "types": Said(types_of((W, XS))),
    },
    "static": {
        "jax": Said((W, XS, jnp.cos), {"flag": True}),
        "module": Said((W, XS, eqx.nn.Lambda(jnp.cos))),
        "by name": Said((W,), {"xs": XS, "f": jnp.cos, "flag": True}),
        "types": Said((*types_of((W, XS)), jnp.cos)),
    },
    "keys": {
        "jax": Said((W, XS), {"more": MORE}),
        "types": Said(types_of((W, XS)), {"more": types_of(MORE)}),
    },
    "raw keys": {
        "jax": Said((W, XS), {"more": {**MORE, "key": RAW}}),
        "numpy": Said((W, XS), {"more": {**MORE, "key": np.asarray(RAW)}}),
    },
}


def by_filter_grad(f: Function) -> Function:
    return eqx.filter_grad(lambda given: f(*given[0], **given[1]))


# How a transform is made, what is called, and what is asked: a plan, or many.
FUNCTIONS: dict[str, tuple[Function, Function]] = {
    "Fit": (
        lambda f: el.Fit(f, "1MiB"),
        lambda f, /, *a, **k: f.plan(*a, **k).peak_bytes,
    ),
    "Fit, total": (
        lambda f: el.Fit(f, total="1MiB"),
        lambda f, /, *a, **k: f.plan(*a, **k).peak_bytes,
    ),
    "Reschedule": (
        lambda f: el.Reschedule(f, el.Recursive(2)),
        lambda f, /, *a, **k: [one.plan for one in f.plans(*a, **k).taken],
    ),
    "plans": (
        lambda f: el.Reschedule(f, el.Recursive(2)),
        lambda f, /, *a, **k: [
            one.plan
            for one in el.plans(lambda *a, **k: by_filter_grad(f)((a, k)))(*a, **k)
        ],
    ),
}

CASES = {
    **{
        f"{name}, {group}": (make(f), lambda scan, *a, **k: scan.plan(*a, **k), ways)
        for name, make in SCANS.items()
        for group, (f, ways) in OF_SCANS.items()
    },
    **{
        f"{name}, length": (
            make(lambda h, _: (jnp.sin(h), None)),
            lambda scan, *a, **k: scan.plan(*a, **k),
            LENGTH,
        )
        for name, make in COUNTED.items()
    },
    **{
        f"{name}, {group}": (loop, lambda loop, *a, **k: loop.plan(*a, **k), ways)
        for name, make in {
            "ForLoop": el.ForLoop,
            "CheckpointedForLoop": el.CheckpointedForLoop,
        }.items()
        for group, loop, ways in [
            (
                "arrays",
                make(lambda x, given: given["f"](x) * given["factor"]),
                {
                    "jax": Said((XS, STATIC)),
                    "numpy": Said((np.asarray(XS), STATIC)),
                    "types": Said((types_of(XS), STATIC)),
                },
            ),
            (
                "keys",
                make(lambda *, key: jax.random.uniform(key)),
                {
                    "jax": Said((), {"length": STEPS, "key": KEY}),
                    "numpy": Said((), {"length": np.int32(STEPS), "key": KEY}),
                    "types": Said((), {"length": STEPS, "key": types_of(KEY)}),
                },
            ),
        ]
    },
    "StackedLayers": (
        LAYERS,
        lambda layers, *a, **k: layers.plan(*a, **k),
        {
            "jax": Said((INIT, jnp.float32(2.0)), {"key": KEY}),
            "numpy": Said((np.float32(0.5), np.float32(2.0)), {"key": KEY}),
            "types": Said(types_of((INIT, INIT)), {"key": types_of(KEY)}),
        },
    ),
    **{
        f"{name}, {group}": (make(loss), ask, ways)
        for name, (make, ask) in FUNCTIONS.items()
        for group, ways in OF_FUNCTIONS.items()
    },
}


@pytest.mark.sampled
@pytest.mark.parametrize("case", CASES)
def test_each_way_to_say_it_gives_the_same_plan(case):
    transform, ask, ways = CASES[case]
    plans = {}
    for way, (args, named) in ways.items():
        plans[way] = ask(transform, *args, **named)
        if way != "types":
            transform(*args, **named)
    first, *others = plans
    assert plans[first]
    for way in others:
        assert plans[way] == plans[first], way


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Scan", "ScanWhile"])
@pytest.mark.parametrize("group", OF_SCANS)
def test_a_frontier_takes_them_as_well(name, group):
    f, ways = OF_SCANS[group]
    for way, (args, named) in ways.items():
        assert SCANS[name](f).frontier(*args, **named), way


# A number of Python is static, unless there is nothing else to differentiate; where it
# is traced, as `jax.grad` does, it is an array.
def test_numbers_of_python_are_what_they_are_in_the_call():
    def of_number(x: Any, xs: Any) -> Any:
        return loss(x * jnp.ones(3), xs)

    seen = list[bool]()

    def noting(x: Any, xs: Any) -> Any:
        seen.append(isinstance(x, jax.Array))
        return of_number(x, xs)

    for make, ask in (FUNCTIONS["Fit"], FUNCTIONS["Reschedule"]):
        f = make(noting)
        for run in (f, lambda *args, f=f, ask=ask: ask(f, *args)):
            seen.clear()
            run(0.5, XS)
            assert set(seen) == {False}
            seen.clear()
            run(jnp.float32(0.5), XS)
            assert set(seen) == {True}
    seen.clear()
    el.plans(jax.grad(FUNCTIONS["Fit"][0](noting)))(0.5, XS)
    assert set(seen) == {True}


def test_numbers_of_python_that_are_not_differentiated_are_named():
    def loss(rates: Any, xs: Any, module: Any = None) -> Any:
        step = lambda h, x: (jnp.tanh(rates["fast"] * h + x), None)
        return jnp.sum(lax.scan(step, xs[0], xs)[0])

    xs, rates = jnp.ones((STEPS, 3)), {"fast": 0.5, "none": None, "count": 2}
    module = eqx.nn.Sequential([eqx.nn.Dropout(0.5), eqx.nn.Lambda(jnp.sin)])
    fit, planned = el.Fit(loss, "1MiB"), el.Reschedule(loss, el.Recursive())
    for plans in (fit.plan, planned.plans):
        some, all_of_it = plans(rates, xs, module), plans({"fast": jnp.array(0.5)}, xs)
        assert some.undifferentiated == ("rates['fast']",)
        assert "not differentiated: rates['fast'] (a Python number" in str(some)
        assert all_of_it.undifferentiated == ()
        assert "not differentiated" not in str(all_of_it)
    # If there is nothing else to differentiate, it is, as by `jax.grad`.
    alone = el.Reschedule(jnp.sin, el.Recursive())
    assert alone.plans(0.5).undifferentiated == ()
