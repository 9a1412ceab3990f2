"""jaxtyping annotations that hold without a decorator."""

import functools
import gc
import types
import weakref
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import pytest
from beartype import beartype
from jaxtyping import Array, Float, PyTree, TypeCheckError, jaxtyped

import eqloop as el
from eqloop._calls._opening import enforce_annotations, explained


def double(x: Float[Array, " n"], times: int = 2) -> Float[Array, " n"]:
    """Not what it says."""
    return jnp.concatenate([x] * times)


class Doubler(eqx.Module):
    scale: Float[Array, ""]

    def __call__(self, x: Float[Array, " n"]) -> Float[Array, " n"]:
        return double(self.scale * x)

    def method(self, x: Float[Array, " n"]) -> Float[Array, " n"]:
        return double(self.scale * x)


class Ordinary:
    def method(self, x: Float[Array, " n"]) -> Float[Array, " n"]:
        return double(x)


doubler = Doubler(jnp.array(1.0))


@pytest.mark.parametrize(
    "f",
    [
        double,
        doubler,
        doubler.method,
        doubler.__call__,
        Ordinary().method,
        types.MethodType(Doubler.method, doubler),
        functools.partial(double, times=2),
        functools.partial(functools.partial(double), times=3),
        eqx.Partial(Doubler.method, doubler),
        jaxtyped(typechecker=beartype)(double),
    ],
)
def test_violations_are_found(f):
    with pytest.raises(TypeCheckError, match=r"return value of .*\n(.*\n)*n=3"):
        enforce_annotations(f)(jnp.ones(3))
    with pytest.raises(TypeCheckError, match=r"parameter 'x'"):
        enforce_annotations(f)(jnp.ones((3, 3)))


def test_what_is_right_passes():
    assert enforce_annotations(double)(jnp.ones(3), times=1).shape == (3,)
    assert enforce_annotations(double)(x=jnp.ones(3), times=1).shape == (3,)


def test_names_bind_across_arguments_and_results():
    def step(
        h: Float[Array, " hidden"], x: Float[Array, " input"]
    ) -> tuple[Float[Array, " hidden"], Float[Array, " input"]]:
        return h, h

    checked = enforce_annotations(step)
    checked(jnp.ones(3), jnp.ones(3))
    with pytest.raises(TypeCheckError, match="hidden=3\ninput=2"):
        checked(jnp.ones(3), jnp.ones(2))


def test_within_trees():
    def f(tree: PyTree[Float[Array, " n"]]) -> None:
        pass

    enforce_annotations(f)({"a": jnp.ones(3), "b": (jnp.ones(3),)})
    with pytest.raises(TypeCheckError):
        enforce_annotations(f)({"a": jnp.ones(3), "b": (jnp.ones(2),)})


def test_only_jaxtyping_types_are_enforced():
    def f(x: Float[Array, " n"], scale: float, name: str = "") -> "list[int]":
        return x

    assert enforce_annotations(f)(jnp.ones(3), jnp.ones(()), 3).shape == (3,)
    with pytest.raises(TypeCheckError):
        enforce_annotations(f)(jnp.ones((3, 2)), jnp.ones(()), 3)


def test_strings_are_annotations_too():
    def f(x: "Float[Array, ' n']", y: "Unknown") -> "Float[Array, ' n']":
        return y

    enforce_annotations(f)(jnp.ones(3), jnp.ones(3))
    with pytest.raises(TypeCheckError):
        enforce_annotations(f)(jnp.ones(3), jnp.ones(2))


def unannotated(x):
    return x


@pytest.mark.parametrize(
    "f",
    [
        unannotated,
        functools.partial(unannotated),
        eqx.Partial(unannotated),
        jnp.sin,
        max,
        eqx.Partial(unannotated, 3).__call__,
        jax.jit(unannotated),
        dict,
    ],
)
def test_what_has_no_annotations_is_left_alone(f):
    assert enforce_annotations(f) is f


def test_exotic_annotations_never_fail():
    def f(x, y: 3, *args: Iterator["int"], key: "not python" = None) -> "...":
        return x

    assert enforce_annotations(f)(1, 2, 3, key=4) == 1


def test_switch():
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        assert enforce_annotations(double)(jnp.ones(3)).shape == (6,)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize("annotation", [Float[Array, " n"], Any])
def test_checks_are_made_once_and_do_not_keep_functions_alive(annotation):
    def f(x: annotation) -> Any:
        return x

    assert enforce_annotations(f) is enforce_annotations(f)
    alive = weakref.ref(f)
    del f
    gc.collect()
    assert alive() is None


def test_explained():
    note = "Scan", "`f()`", {}
    with pytest.raises(KeyError) as info, explained(*note), explained(*note):
        raise KeyError("key")
    assert info.value.__notes__ == ["This was raised while Scan traced `f()`"]


def test_arguments_are_printed_for_an_error_alone_and_as_they_were(monkeypatch):
    printed, pformat = [], eqx.tree_pformat
    told = lambda tree, **how: printed.append(tree) or pformat(tree, **how)
    monkeypatch.setattr(eqx, "tree_pformat", told)

    init = {"h": jnp.zeros(2), "there": None}
    loops = (
        lambda: el.Scan(lambda c, x: (c, x))(init, jnp.ones((2, 2))),
        lambda: el.WhileLoop(lambda c: c < 3, lambda c: c + 1)(0),
        lambda: el.Map(lambda x, y: x)(jnp.ones(2), jnp.ones(2)),
        lambda: el.AssociativeScan(jnp.add)(jnp.ones(2)),
        lambda: el.Cond(jnp.sin, jnp.cos)(jnp.array(True), 1.0),
    )
    for loop in loops:
        loop()
    assert not printed
    with pytest.raises(KeyError) as info:
        el.Scan(lambda c, x: (c, c.clear() or c["h"]))(init, jnp.ones((2, 2)))
    note = "\n".join(info.value.__notes__)
    assert "carry = {'h': f32[2], 'there': None}\n  x = f32[2]" in note
