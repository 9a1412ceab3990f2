"""Steps: what a traced function closes over, and what depends on what."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqloop.checkpointing import Loop, StoreAll, run_loop, trace_step
from eqloop.checkpointing.steps._step import reaching

NUMBER = jax.ShapeDtypeStruct((), jnp.float32)


def traced(f: Any, num_carry: int, num_x: int = 1) -> Any:
    return trace_step(f, [NUMBER] * num_carry, [NUMBER] * num_x)


def test_closes_over_nothing():
    w = jnp.arange(3.0)
    step, consts = traced(lambda c, x: ([c[0] * w.sum() + x[0]], [w]), 1)
    assert not step.jaxpr.consts
    assert [const.shape for const in consts] == [(3,)]
    (carry,), (y,) = step(consts, [2.0], [1.0])
    assert carry == 7.0
    np.testing.assert_array_equal(y, w)


def test_tracers_become_consts():
    def loss(w: Any) -> Any:
        step, consts = traced(lambda c, x: ([c[0] * w + x[0]], []), 1)
        loop = Loop(length=3, x_axes=(0,))
        init, xs = [jnp.zeros(())], [jnp.ones(3)]
        (carry,), _ = run_loop(step, consts, init, xs, loop=loop, schedule=StoreAll())
        return carry

    # 1 + w + w**2
    assert jax.value_and_grad(loss)(2.0) == (7.0, 5.0)


def test_the_types_of_its_inputs_and_outputs():
    step, _ = traced(lambda c, x: ([c[1], c[0]], [x[0] > 0]), 2)
    assert [aval.dtype for aval in step.carry_types] == [jnp.float32] * 2
    assert [aval.dtype for aval in step.x_types] == [jnp.float32]
    assert [aval.dtype for aval in step.y_types] == [jnp.bool_]
    assert step.const_types == []


def test_no_output_is_weakly_typed():
    step, _ = traced(lambda c, x: ([c[0]], [1.0, jnp.asarray(2)]), 1)
    assert not any(aval.weak_type for aval in step.jaxpr.out_avals)


@pytest.mark.parametrize(
    ("marked", "carry", "y"),
    [
        ("consts", [False, True, True], [False, True]),
        ("first", [True, True, True], [False, True]),
        ("third", [False, False, True], [False, False]),
        ("x", [False, False, False], [True, False]),
        ("none", [False, False, False], [False, False]),
    ],
)
def test_what_depends_on_what_over_all_steps(marked, carry, y):
    w = jnp.ones(())

    def f(c: list, x: list) -> Any:
        # The third leaf is two steps behind the first.
        return [c[0] * 2, c[0] + jnp.sin(w), c[1] * c[2]], [
            x[0],
            jax.jit(jnp.cos)(c[1]),
        ]

    step, _ = traced(f, 3)
    out = reaching(
        step,
        consts=[marked == "consts"],
        carry=[marked == "first", False, marked == "third"],
        x=[marked == "x"],
    )
    assert out == (tuple(carry), tuple(y))


def test_a_dependence_may_not_pass_through_integers():
    f = lambda c, x: ([c[0], c[0].astype(int).astype(float) + c[1]], [])
    step, _ = traced(f, 2)
    marks = dict(consts=[], carry=[True, False], x=[False])
    assert reaching(step, **marks)[0] == (True, True)
    assert reaching(step, **marks, is_derivative=True)[0] == (True, False)


def test_collectives_know_their_place_along_the_axis():
    def f(c: list, x: list) -> Any:
        index = jax.jit(lambda: jax.lax.axis_index("batch"))()
        return [c[0] + index.astype(float), c[1] + 1], []

    def marks(h: Any) -> Any:
        step, _ = traced(f, 2)
        undifferentiated = dict(consts=[], carry=[False, False], x=[False])
        found.append(reaching(step, **undifferentiated, axis_name="batch")[0])
        found.append(reaching(step, **undifferentiated, axis_name="other")[0])
        return h

    found: list[Any] = []
    jax.vmap(marks, axis_name="batch")(jnp.ones(2))
    assert found == [(True, False), (False, False)]
