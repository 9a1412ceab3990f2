"""What the documentation of powerpax says of its scans, written anew with eqloop."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqloop as el

from ..asserts import assert_close
from ..checkpointing.counting import Counter
from ..compiling import temp_bytes
from ..marks import slow

pytestmark = pytest.mark.sampled

XS = {"angle": jnp.arange(10.0), "push": jnp.cos(jnp.arange(20.0)).reshape(10, 2)}


def step(carry: jax.Array, x: Any) -> tuple[Any, Any]:
    carry = jnp.sin(carry + x["angle"]) + jnp.sum(x["push"])
    return carry, {"carry": carry, "both": (x["push"], carry * x["push"])}


# sliced_scan


@pytest.mark.parametrize(
    "kept", [slice(2, None, 3), slice(-1, None, -4), slice(5), slice(7, 2)], ids=str
)
def test_every_leaf_of_ys_is_sliced_as_after_a_scan(kept):
    carry, ys = jax.lax.scan(step, 0.5, XS)
    expected = carry, jax.tree.map(lambda leaf: leaf[kept], ys)
    start, stop, by = kept.start, kept.stop, kept.step
    scan = el.SlicedScan(step, start=start, stop=stop, step=by)
    assert_close(scan(jnp.array(0.5), XS), expected)


def test_the_carry_is_that_of_all_iterations():
    count = el.SlicedScan(lambda n, _: (n + 1, n), stop=2)
    carry, ys = count(0, length=7)
    assert (int(carry), ys.tolist()) == (7, [0, 1])


def test_length_is_needed_without_xs_and_must_match_them():
    count = el.SlicedScan(lambda n, _: (n + 1, n), step=2)
    assert count(0, length=4)[1].tolist() == [0, 2]
    assert count(0, jnp.zeros(4), length=4)[1].tolist() == [0, 2]
    with pytest.raises(ValueError, match="the number of steps is unknown"):
        count(0)
    with pytest.raises(ValueError, match="length: 5\n  xs: 4"):
        count(0, jnp.zeros(4), length=5)


def test_in_reverse_ys_are_filled_from_right_to_left():
    count = el.SlicedScan(lambda n, x: (n + 1, (n, x)), step=3, reverse=True)
    _, (n, x) = count(0, jnp.arange(8))
    assert n.tolist() == [7, 4, 1]
    assert x.tolist() == [0, 3, 6]


@pytest.mark.parametrize("unroll", [3, 4, 25, True])
def test_unrolling_more_than_there_is_between_two_outputs(unroll):
    scan = el.SlicedScan(step, start=1, step=4, unroll=unroll)
    _, ys = jax.lax.scan(step, 0.5, XS)
    expected = jax.tree.map(lambda leaf: leaf[1::4], ys)
    assert_close(scan(jnp.array(0.5), XS)[1], expected)


def test_complete_ys_are_never_made():
    wide = lambda h, x: (jnp.sin(h) + x, jnp.outer(h, h))
    run = lambda h, xs: el.SlicedScan(wide, step=100)(h, xs)
    assert temp_bytes(run, (16,), (1000, 16)) < 4 * 16 * 16


# checkpoint_chunked_scan


@pytest.mark.parametrize(
    ("chunk_size", "reverse"),
    [
        (1, False),
        (3, True),
        (10, False),
        (99, True),
        *map(slow, (1, 3, 10, 99), (True, False, True, False)),
    ],
)
def test_a_chunked_scan_is_a_scan_with_the_same_gradient(chunk_size, reverse):
    schedule = el.Chunked(chunk_size)
    ours = el.Scan(step, schedule=schedule, reverse=reverse, unroll=2)
    theirs = lambda init, xs: jax.lax.scan(step, init, xs, reverse=reverse)

    def both(run: Any) -> Any:
        loss = lambda xs: jnp.sum(run(jnp.array(0.5), xs)[1]["both"][1] ** 2)
        return jax.jit(lambda xs: (run(jnp.array(0.5), xs), jax.grad(loss)(xs)))(XS)

    assert_close(both(ours), both(theirs))


def test_a_checkpoint_is_stored_at_the_start_and_every_chunk_size_steps():
    scan = el.Scan(step, schedule=el.Chunked(4))
    plan = scan.plan(jnp.array(0.5), XS)
    # Two chunks of four, and one of the two steps that are left over.
    assert plan.levels == ((2, 4), (2,))
    assert plan.evaluations == 10 + 10 + 2 * 3


def test_without_checkpoints_in_between_there_is_one_at_the_start():
    count = Counter()
    scan = el.Scan(count, schedule=el.Binomial(1, block=10))
    loss = lambda h: scan((h, 0), jnp.ones(10))[0][0]
    assert len(count.evaluations(jax.grad(loss), 0.5)) == 20
    assert scan.plan((0.5, 0), jnp.ones(10)).slots == 1


def test_peak_memory_of_a_gradient_is_reduced():
    def loss(schedule: Any) -> Any:
        f = lambda h, x: (jnp.tanh(jnp.sin(h) + x), jnp.sum(h))
        return lambda h, xs: jnp.sum(el.Scan(f, schedule=schedule)(h, xs)[1])

    shapes = (64,), (900, 64)
    chunked, stored = (
        temp_bytes(jax.grad(loss(schedule)), *shapes)
        for schedule in (el.Chunked(30), el.StoreAll())
    )
    assert chunked < stored / 8


def test_a_chunk_must_have_a_step():
    with pytest.raises(ValueError, match="`chunk_size` must be at least 1, not 0"):
        el.Chunked(0)


# Static


def test_static_values_need_no_wrapper():
    def f(carry: Any, x: Any) -> Any:
        how, total = carry
        return (how, total + getattr(jnp, how)(x["value"])), {
            "how": how,
            "total": total,
        }

    scan = el.SlicedScan(f, step=-1, in_axes={"value": 0, "name": None})
    xs = {"value": jnp.arange(3.0), "name": "static"}
    (how, total), ys = scan(("square", 0.0), xs)
    assert (how, float(total), ys["how"]) == ("square", 5.0, "square")
    np.testing.assert_array_equal(ys["total"], [1, 0, 0])
