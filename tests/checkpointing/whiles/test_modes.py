"""While loops in every mode and context, against `jax.lax.scan`.

A loop over `xs` is made of a while loop that counts its steps and indexes into `xs`,
and that writes each `y` into a buffer that it carries along.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqloop as el

from ...marks import slow_if
from .. import derivatives
from ..derivatives import CONTEXTS, MODES, inputs, mapped, rematerialised

pytestmark = pytest.mark.sampled

LOOPS = {
    "bounded": functools.partial(el.BoundedWhileLoop, max_steps=11, base=2),
    "checkpointed": functools.partial(el.CheckpointedWhileLoop, checkpoints=3),
}
# A while loop runs in one direction, and one step at a time.
OTHERS = ("backwards", "unrolled")
STANDING = [c for c in CONTEXTS if c.__name__ not in OTHERS]
QUICKLY = (
    derivatives.vmap,
    derivatives.collectives,
    derivatives.shard_map,
    derivatives.in_scan,
    derivatives.in_cond,
    derivatives.in_checkpoint,
)
FORWARD = ("primal", "jvp", "linearize", "jacfwd")

name = lambda f: getattr(f, "__name__", str(f))


def scan(kind: Any) -> Any:
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


def evaluate(mode: Any, context: Any, loop: Any) -> list[np.ndarray]:
    run = jax.jit(functools.partial(mode, context(loop)))
    return jax.tree.map(np.asarray, jax.tree.leaves(run(*inputs())))


@functools.cache
def expected(mode: Any, context: Any) -> list[np.ndarray]:
    return evaluate(mode, context, lax.scan)


def check(mode: Any, context: Any, kind: Any) -> None:
    actual = evaluate(mode, context, scan(kind))
    assert_close(actual, expected(mode, context))


def assert_close(actual: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for a, e in zip(actual, expected, strict=True):
        assert a.shape == e.shape
        assert a.dtype == e.dtype
        np.testing.assert_allclose(a, e, rtol=2e-4, atol=2e-5)


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
    check(mode, derivatives.plain, kind)


@pytest.mark.parametrize("mode", [m for m in MODES if name(m) in FORWARD], ids=name)
def test_forward_modes_of_a_loop_without_bounds(mode):
    check(mode, derivatives.vmap, el.WhileLoop)


@pytest.mark.slow
@pytest.mark.parametrize("context", QUICKLY, ids=name)
def test_contexts(context):
    turn = QUICKLY.index(context)
    mode = (derivatives.grad, derivatives.forward_over_reverse)[turn % 2]
    check(mode, context, list(LOOPS.values())[turn // 2 % 2])


@pytest.mark.parametrize(
    "kind",
    slow_if(lambda kind: kind is LOOPS["bounded"], LOOPS.values()),
    ids=LOOPS,
)
def test_with_64_bits(kind):
    mode = derivatives.forward_over_reverse
    with jax.enable_x64(True):
        loops = (scan(kind), lax.scan)
        assert_close(*(evaluate(mode, derivatives.plain, loop) for loop in loops))


def test_places():
    check(mapped(derivatives.vjp), derivatives.plain, LOOPS["checkpointed"])
    check(rematerialised(derivatives.jvp), derivatives.plain, LOOPS["bounded"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("context", STANDING, ids=name)
@pytest.mark.parametrize("mode", MODES, ids=name)
def test_modes_in_contexts(mode, context, kind):
    check(mode, context, kind)
