"""Wrong calls of `SlicedScan`, `ForLoop` and `frontier`, and what their errors say."""

import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jaxtyping import Array, Float

import eqloop as el

XS = jnp.arange(4.0)


def keep(carry: Any, x: Any) -> Any:
    return carry, x


def sliced(**settings: Any) -> Any:
    return el.SlicedScan(keep, **settings)(0.0, XS)


def annotated(x: Float[Array, "3"]) -> Float[Array, ""]:
    return jnp.sum(x)


def fails(x: Any, y: Any, key: Any = None) -> Any:
    raise RuntimeError("of the user")


AN_INT = "must be an int that is known when tracing, or None, not "

WRONG = {
    "step of zero": (
        lambda: sliced(step=0),
        ValueError,
        "SlicedScan: `step` must not be 0. To keep no outputs, return None for them.",
    ),
    "start that is a float": (
        lambda: sliced(start=1.5),
        TypeError,
        f"SlicedScan: `start` {AN_INT}1.5 of type float.",
    ),
    "stop that is a string": (
        lambda: sliced(stop="end"),
        TypeError,
        f"SlicedScan: `stop` {AN_INT}'end' of type str.",
    ),
    "step that is a bool": (
        lambda: sliced(step=True),
        TypeError,
        f"SlicedScan: `step` {AN_INT}True of type bool.",
    ),
    "start that is traced": (
        lambda: jax.jit(lambda start: sliced(start=start))(1),
        TypeError,
        f"SlicedScan: `start` {AN_INT}JitTracer",
    ),
    "several starts": (
        lambda: sliced(start=jnp.arange(2)),
        TypeError,
        f"SlicedScan: `start` {AN_INT}Array([0, 1], dtype=int32) of type",
    ),
    "a slice for a start": (
        lambda: sliced(start=slice(3)),
        TypeError,
        f"SlicedScan: `start` {AN_INT}slice(None, 3, None) of type slice.",
    ),
    "setting of another scan": (
        lambda: el.SlicedScan(base=3),
        TypeError,
        "SlicedScan has no setting 'base'. Its settings are: backward, f_axes, ",
    ),
    "no pair": (
        lambda: el.SlicedScan(lambda c, x: x, step=2)(0.0, XS),
        TypeError,
        "SlicedScan: f must return a pair `(carry, y)`, but it returned f32[].",
    ),
    "lengths": (
        lambda: el.ForLoop(jnp.add)(XS, {"a": jnp.ones(3)}),
        ValueError,
        "ForLoop: these lengths must all be the same:\n  xs[0]: 4\n  xs[1]['a']: 3",
    ),
    "length and xs": (
        lambda: el.CheckpointedForLoop(jnp.sin)(XS, length=5),
        ValueError,
        "CheckpointedForLoop: these lengths must all be the same:\n  length: 5\n  xs",
    ),
    "no length": (
        lambda: el.ForLoop(lambda: 1)(),
        ValueError,
        "ForLoop: no leaf is scanned over, so the number of steps is unknown: pass "
        "`length=`.",
    ),
    "nothing but what is whole": (
        lambda: el.ForLoop(jnp.sin, in_axes=None)(XS),
        ValueError,
        "ForLoop: no leaf is scanned over, so the number of steps is unknown",
    ),
    "axes of fewer xs": (
        lambda: el.ForLoop(jnp.add, in_axes=(0,))(XS, XS),
        ValueError,
        "in_axes=(0,) is not a prefix of xs",
    ),
    "axis out of range": (
        lambda: el.ForLoop(jnp.add, in_axes=(0, 1))(XS, XS),
        ValueError,
        "in_axes[1] gives axis 1 for xs[1], which is float32[4] and has the axes -1 to "
        "0.",
    ),
    "xs by keyword": (
        lambda: el.ForLoop(jnp.sin)(xs=XS),
        TypeError,
        "ForLoop(*xs, length=None, key=None): got an unexpected keyword argument 'xs'.",
    ),
    "annotation": (
        lambda: el.ForLoop(annotated)(jnp.ones((5, 2))),
        TypeError,
        "whilst typechecking parameter 'x'.\nActual value: f32[2]",
    ),
    "output that differs": (
        lambda: el.ForLoop(jnp.sin, out_axes=None)(XS),
        ValueError,
        "ForLoop: out_axes gives None for outputs that depend on",
    ),
    "number of calls": (
        lambda: el.ForLoop(jnp.sin)(XS, length=4.0),
        TypeError,
        "whilst typechecking parameter 'length'.\nActual value: 4.0",
    ),
    "key for each step": (
        lambda: el.ForLoop(fails)(XS, key=jax.random.split(jax.random.key(0), 4)),
        ValueError,
        "ForLoop: `key` must be one key, which is split for the steps, but it is",
    ),
    "base": (
        lambda: el.CheckpointedForLoop(jnp.sin, 1),
        ValueError,
        "Recursive: `base` must be at least 2, not 1.",
    ),
    "schedule": (
        lambda: el.ForLoop(jnp.sin, schedule=16),
        TypeError,
        "ForLoop: `schedule` must be a schedule, such as `el.Recursive(16)`, not 16.",
    ),
    "no function": (
        lambda: el.ForLoop(3),
        TypeError,
        "ForLoop: `f` must be callable, but 3 is not.",
    ),
    "frontier without arguments": (
        lambda: el.frontier(el.Scan(keep)),
        TypeError,
        "frontier: missing a required argument: 'init'. Pass what the Scan is called "
        "with: (init, xs=None, *, length=None, key=None).",
    ),
    "frontier of a function": (
        lambda: el.frontier(jnp.sin, XS),
        TypeError,
        "whilst typechecking parameter 'loop'.",
    ),
}


@pytest.mark.parametrize(("call", "kind", "message"), WRONG.values(), ids=WRONG)
def test_wrong_calls(call, kind, message):
    with pytest.raises(kind, match=re.escape(message)):
        call()


def notes(call: Any) -> str:
    with pytest.raises(RuntimeError, match="of the user") as caught:
        call()
    return "\n".join(caught.value.__notes__)


def test_errors_of_the_function_tell_what_it_was_called_with():
    note = notes(lambda: el.ForLoop(fails)(XS, {"a": XS}, key=jax.random.key(0)))
    assert "while ForLoop traced `f(x0, x1, key=" in note
    assert "  x0 = f32[]\n  x1 = {'a': f32[]}" in note
    one = notes(lambda: el.ForLoop(eqx.Partial(fails, 1))(XS))
    assert "while ForLoop traced `f(x)` with\n  x = f32[]" in one


def test_errors_of_a_function_of_nothing():
    def fails():
        raise RuntimeError("of the user")

    note = notes(lambda: el.ForLoop(fails)(length=3))
    assert note.startswith("This was raised while ForLoop traced `f()`")
