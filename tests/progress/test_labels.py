"""`desc`, a string or a function of iteration, carry and `y`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqloop as el

XS = jnp.arange(6.0)


@pytest.fixture
def seen() -> list:
    return []


def labelled(seen: list, **settings):
    def desc(i, carry, y):
        seen.append((i, carry, y))
        return f"step {i}"

    def step(carry, x):
        total = carry["total"] + x
        return {**carry, "total": total}, (x, total)

    bar = el.ProgressBar(3, desc=desc)
    return el.Scan(step, progress=bar, **settings)


# What never changes is no part of the loop that is run, but of the carry that is told.
INIT = {"fixed": jnp.array(0.5), "total": 0.0, "name": "sum"}


def test_it_is_called_for_the_last_step_that_was_run(seen, recorder):
    jax.jit(lambda xs: labelled(seen)(INIT, xs)[1])(XS)
    assert seen == [
        (2, {**INIT, "total": 3.0}, (2.0, 3.0)),
        (5, {**INIT, "total": 15.0}, (5.0, 15.0)),
    ]
    assert recorder.bars[0].labels == ["step 2", "step 5"]


def test_it_knows_the_order_of_execution(seen):
    jax.jit(lambda xs: labelled(seen, reverse=True)(INIT, xs)[1])(XS)
    assert [(i, y) for i, _, y in seen] == [(2, (3.0, 12.0)), (5, (0.0, 15.0))]


def test_it_is_told_of_the_first_example_of_a_batch(seen, shown):
    run = lambda xs: labelled(seen)(INIT, xs)[1][1][-1]
    jax.jit(jax.vmap(jax.value_and_grad(run)))(jnp.stack([XS, 2 * XS]))
    assert [carry["total"] for _, carry, _ in seen] == [3.0, 15.0]
    assert list(shown().values()) == [1, 1]


def test_arrays_are_those_of_numpy(seen):
    keys = jax.random.split(jax.random.key(0), 6)
    desc = lambda i, carry, y: seen.append((carry, y)) or ""
    step = lambda h, x: (h + 1, (h > 2, x["key"]))
    bar = el.ProgressBar(6, desc=desc)
    el.Scan(step, progress=bar)(jnp.zeros(2), {"key": keys})
    ((carry, (flags, key)),) = seen
    assert isinstance(carry, np.ndarray)
    np.testing.assert_array_equal(flags, [True, True])
    np.testing.assert_array_equal(key, jax.random.key_data(keys[-1]))


@pytest.mark.parametrize("schedule", [el.Binomial(2), el.Offload(el.Recursive(2))])
def test_every_way_to_run_a_loop_forward_has_it(schedule, seen):
    run = lambda xs: labelled(seen, schedule=schedule)(INIT, xs)[0]["total"] ** 2
    jax.jit(jax.grad(run))(XS)
    assert [carry["total"] for _, carry, _ in seen] == [3.0, 15.0]
