"""A cotangent that is one number, repeated, is made once, and not at every step.

XLA likes to repeat such a number where it is read. In a loop that reads a few entries,
within another loop, it would make all of the array each time: the time of a step would
grow with the length.
"""

import re

import jax
import jax.numpy as jnp
import pytest

import eqloop as el

LENGTH = 4096


@pytest.mark.parametrize("schedule", [el.Chunked(4), el.Recursive(8)], ids=str)
def test_no_array_of_full_length_is_made_in_a_loop(schedule):
    def loss(w: jax.Array, h: jax.Array, xs: jax.Array) -> jax.Array:
        def step(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            h = jnp.tanh(w @ h + x)
            return h, jnp.sum(h**2)

        h, ys = el.Scan(step, schedule=schedule)(h, xs)
        return jnp.sum(h) + jnp.mean(ys)

    arguments = jnp.eye(8), jnp.zeros(8), jnp.ones((LENGTH, 8))
    program = jax.jit(jax.grad(loss)).lower(*arguments).compile().as_text()
    # The bodies of loops are the computations that are neither the whole nor fused.
    bodies = [
        part
        for part in program.split("\n\n")
        if not re.match(r"\s*(ENTRY|%?(fused|wrapped)_)", part)
    ]
    assert any(" while(" in body for body in bodies)
    made = rf"= f32\[{LENGTH}\]\S* (broadcast|fusion)\("
    assert not [line for body in bodies for line in re.findall(rf".*{made}.*", body)]
