"""While loops in every mode and context, against `jax.lax.scan`.

A loop over `xs` is made of a while loop that counts its steps and indexes into `xs`,
and that writes each `y` into a buffer that it carries along.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import eqloop as el

from ... import derivatives
from ...derivatives import (
    CONTEXTS,
    MODES,
    assert_agrees,
    mapped,
    name,
    rematerialised,
)
from ...marks import slow_if

pytestmark = pytest.mark.sampled

LOOPS = {
    "bounded": functools.partial(el.BoundedWhileLoop, max_steps=11, base=2),
    "checkpointed": functools.partial(el.CheckpointedWhileLoop, checkpoints=3),
}
# A while loop runs in one direction, and one step at a time.
OTHERS = ("backwards", "unrolled")
STANDING = [c for c in CONTEXTS if c.__name__ not in OTHERS]
FORWARD = ("primal", "jvp", "linearize", "jacfwd")


def counted(kind: Any) -> Any:
    """What `jax.lax.scan` does, by a while loop."""

    def loop(f: Any, init: Any, xs: Any) -> Any:
        (length,) = {x.shape[0] for x in jax.tree.leaves(xs)}
        element = lambda i: jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, i, 0, False), xs
        )
        _, y = jax.eval_shape(f, init, element(0))
        ys = jax.tree.map(lambda y: jnp.zeros((length, *y.shape), y.dtype), y)

        def body(state: Any) -> Any:
            i, carry, ys = state
            carry, y = f(carry, element(i))
            return i + 1, carry, jax.tree.map(lambda b, y: b.at[i].set(y), ys, y)

        _, carry, ys = kind(lambda state: state[0] < length, body)((0, init, ys))
        return carry, ys

    return loop


LIKE_OTHERS = (
    derivatives.vjp,
    derivatives.jacfwd,
    derivatives.grad_of_parameters,
    derivatives.reverse_over_reverse,
    derivatives.reverse_over_forward,
    derivatives.hessian,
    derivatives.jacrev,
)


@pytest.mark.parametrize("mode", slow_if(LIKE_OTHERS.__contains__, MODES), ids=name)
def test_modes(mode):
    # They take turns; all of them are tried by the slow test.
    kind = list(LOOPS.values())[MODES.index(mode) % 2]
    assert_agrees(mode, derivatives.plain, counted(kind))


@pytest.mark.parametrize("mode", [m for m in MODES if name(m) in FORWARD], ids=name)
def test_forward_modes_of_a_loop_without_bounds(mode):
    assert_agrees(mode, derivatives.vmap, counted(el.WhileLoop))


@pytest.mark.parametrize(
    "kind",
    slow_if(lambda kind: kind is LOOPS["bounded"], LOOPS.values()),
    ids=LOOPS,
)
def test_with_64_bits(kind):
    mode = derivatives.forward_over_reverse
    with jax.enable_x64(True):
        assert_agrees(mode, derivatives.plain, counted(kind))


def test_places():
    checkpointed, bounded = counted(LOOPS["checkpointed"]), counted(LOOPS["bounded"])
    assert_agrees(mapped(derivatives.vjp), derivatives.plain, checkpointed)
    assert_agrees(rematerialised(derivatives.jvp), derivatives.plain, bounded)


@pytest.mark.slow
@pytest.mark.parametrize("kind", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("context", STANDING, ids=name)
@pytest.mark.parametrize("mode", MODES, ids=name)
def test_modes_in_contexts(mode, context, kind):
    assert_agrees(mode, context, counted(kind))
