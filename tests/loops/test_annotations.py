"""jaxtyping annotations of `f`, which need no decorator to hold in a loop."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import pytest
from jaxtyping import Array, Float, Key, TypeCheckError

import eqloop as el

XS = jnp.ones((4, 2))


def step(
    h: Float[Array, " hidden"], x: Float[Array, " input"]
) -> tuple[Float[Array, " hidden"], Float[Array, " input"]]:
    return jnp.concatenate([h, h[:1]]), x


class Cell(eqx.Module):
    weight: jax.Array

    def __call__(
        self, h: Float[Array, " hidden"], x: Float[Array, " input"]
    ) -> tuple[Float[Array, " hidden"], Float[Array, " output"]]:
        return self.weight @ h, h

    def method(
        self, h: Float[Array, " hidden"], x: Float[Array, " input"]
    ) -> tuple[Float[Array, " hidden"], Float[Array, " output"]]:
        return self.weight @ h, h


WIDE = Cell(jnp.ones((3, 2)))


@pytest.mark.parametrize(
    "f",
    [
        step,
        WIDE,
        WIDE.method,
        functools.partial(step),
        eqx.Partial(Cell.method, WIDE),
        lambda *args: step(*args),
    ],
)
def test_a_carry_must_keep_its_annotated_size(f):
    """By its annotation where it has one, or else because carries must."""
    with pytest.raises(TypeError) as info:
        el.CheckpointedScan(f)(jnp.ones(2), XS)
    if isinstance(info.value, TypeCheckError):
        assert "hidden=2" in str(info.value)
        assert "return value" in str(info.value)
        note = "\n".join(info.value.__notes__)
        assert "raised while CheckpointedScan traced `f(carry, x)` with" in note
        assert "carry = f32[2]" in note
    else:
        assert "carry: float32[2] came in, float32[3] came out" in str(info.value)


def test_names_bind_across_carry_x_and_y():
    def f(
        h: Float[Array, " n"], x: Float[Array, " n"]
    ) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
        return h + x, jnp.ones(3)

    with pytest.raises(TypeCheckError, match="n=2"):
        el.Scan(f)(jnp.ones(2), XS)
    with pytest.raises(TypeCheckError, match="parameter 'x'"):
        el.Scan(f)(jnp.ones(3), XS)


def test_x_is_one_element():
    def f(h: Float[Array, ""], x: Float[Array, "2"]) -> tuple[Any, None]:
        return h, None

    el.Scan(f)(jnp.zeros(()), XS)
    with pytest.raises(TypeCheckError, match="parameter 'x'"):
        el.Scan(f)(jnp.zeros(()), jnp.ones((2, 4)))


def test_keys():
    def f(h: Float[Array, ""], x: None, *, key: Key[Array, ""]) -> tuple[Any, None]:
        return h, None

    el.Scan(f)(jnp.zeros(()), length=2, key=jax.random.key(0))
    with pytest.raises(TypeCheckError, match="parameter 'key'"):
        el.Scan(f)(jnp.zeros(()), length=2, key=jax.random.PRNGKey(0))


def test_a_number_becomes_an_array_where_the_annotation_asks_for_one():
    def f(h: Float[Array, ""], x: Float[Array, "2"]) -> tuple[Float[Array, ""], None]:
        return h, None

    carry, _ = el.Scan(f)(1.0, XS)
    assert isinstance(carry, jax.Array)


def test_what_a_transform_of_f_returns_is_checked():
    widened = lambda cell: eqx.tree_at(lambda c: c.weight, cell, jnp.ones((3, 2)))
    scan = el.Scan(Cell(jnp.ones((2, 2))), f_transform=widened)
    with pytest.raises(TypeCheckError, match="hidden=2"):
        scan(jnp.ones(2), XS)


def test_switch_of_jaxtyping_turns_it_off():
    def f(h: Float[Array, "5"], x: Float[Array, "5"]) -> tuple[Float[Array, "5"], None]:
        return h, None

    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        el.Scan(f)(jnp.ones(2), XS)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
    with pytest.raises(TypeCheckError):
        el.Scan(f)(jnp.ones(2), XS)


def test_nothing_is_checked_at_run_time():
    checks = 0

    def f(h: Float[Array, " n"], x: Float[Array, " m"]) -> tuple[Any, None]:
        nonlocal checks
        checks += 1
        return h, None

    run = jax.jit(el.Scan(f))
    for _ in range(3):
        run(jnp.ones(2), XS)
    assert checks == 1
