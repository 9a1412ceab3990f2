"""Wrong calls of `SlicedScan`, `ForLoop` and `frontier`, and what their errors say."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jaxtyping import Array, Float

import eqloop as el

from ..asserts import assert_raises

XS = jnp.arange(4.0)


def keep(carry: Any, x: Any) -> Any:
    return carry, x


def sliced(**settings: Any) -> Any:
    return el.SlicedScan(keep, **settings)(0.0, XS)


def annotated(x: Float[Array, "3"]) -> Float[Array, ""]:
    return jnp.sum(x)


def fails(x: Any, y: Any, key: Any = None) -> Any:
    raise RuntimeError("of the user")


WRONG = {
    "step that is a bool": (
        lambda: sliced(step=True),
        "TypeError: SlicedScan: `step` … int … None … True … bool",
    ),
    "start that is traced": (
        lambda: jax.jit(lambda start: sliced(start=start))(1),
        "TypeError: SlicedScan: `start` … int … None … JitTracer",
    ),
    "a slice for a start": (
        lambda: sliced(start=slice(3)),
        "TypeError: SlicedScan: `start` … int … None … slice(None, 3, None) … slice",
    ),
    "setting of another scan": (
        lambda: el.SlicedScan(base=3),
        "TypeError: SlicedScan … no setting 'base' … f_axes",
    ),
    "no pair": (
        lambda: el.SlicedScan(lambda c, x: x, step=2)(0.0, XS),
        "TypeError: SlicedScan: … pair `(carry, y)` … f32[]",
    ),
    "lengths": (
        lambda: el.ForLoop(jnp.add)(XS, {"a": jnp.ones(3)}),
        "ValueError: ForLoop: … xs[0]: 4 … xs[1]['a']: 3",
    ),
    "length and xs": (
        lambda: el.CheckpointedForLoop(jnp.sin)(XS, length=5),
        "ValueError: CheckpointedForLoop: … length: 5",
    ),
    "no length": (
        lambda: el.ForLoop(lambda: 1)(),
        "ValueError: ForLoop: no leaf … number … unknown: … `length=`",
    ),
    "nothing but what is whole": (
        lambda: el.ForLoop(jnp.sin, in_axes=None)(XS),
        "ValueError: ForLoop: no leaf … number … unknown",
    ),
    "axes of fewer xs": (
        lambda: el.ForLoop(jnp.add, in_axes=(0,))(XS, XS),
        "ValueError: … in_axes=(0,) … prefix",
    ),
    "axis out of range": (
        lambda: el.ForLoop(jnp.add, in_axes=(0, 1))(XS, XS),
        "ValueError: … in_axes[1] … axis 1 … xs[1] … float32[4] … axes -1 … 0",
    ),
    "xs by keyword": (
        lambda: el.ForLoop(jnp.sin)(xs=XS),
        "TypeError: ForLoop(*xs, length=None, key=None): … "
        "unexpected keyword argument 'xs'",
    ),
    "annotation": (
        lambda: el.ForLoop(annotated)(jnp.ones((5, 2))),
        "TypeError: … 'x' … f32[2]",
    ),
    "output that differs": (
        lambda: el.ForLoop(jnp.sin, out_axes=None)(XS),
        "ValueError: ForLoop: out_axes … None … depend",
    ),
    "key for each step": (
        lambda: el.ForLoop(fails)(XS, key=jax.random.split(jax.random.key(0), 4)),
        "ValueError: ForLoop: `key` … key",
    ),
    "frontier without arguments": (
        lambda: el.Scan(keep).frontier(),
        "TypeError: Scan.frontier: missing … argument: 'init'. Pass … Scan … "
        "(init, xs=None, *, length=None, key=None, log=None, device=None)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(name):
    assert_raises(*WRONG[name])


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
