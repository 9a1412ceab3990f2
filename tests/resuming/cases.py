"""Scans of all kinds, with what they are called with, and what is compared of them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax import lax

import eqloop as el

from .. import asserts
from ..weights import normal

LENGTH, EVERY = 11, 4


class Cell(eqx.Module):
    """A small recurrent cell, with leaves of several kinds."""

    weight: jax.Array
    shift: jax.Array
    name: str = "cell"

    def __call__(self, h, x, *, key=None):
        noise = 0.0 if key is None else 0.1 * jr.normal(key, h.shape)
        new = jnp.tanh(self.weight @ h + x + self.shift + noise)
        return new, {"h": new * 2, "name": self.name, "mean": jnp.mean(new)}


def cell() -> Cell:
    return Cell(normal(0, (3, 3), scale=0.5), jnp.full(3, 0.1))


def data(length: int = LENGTH) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(length, 3)).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Example:
    """A scan and the arguments of its call."""

    scan: Any
    init: Any
    xs: Any = None
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)

    def run(self, directory: Any, **settings: Any) -> Any:
        run = el.Resumable(self.scan, directory, **{"every": EVERY} | settings)
        return run(self.init, self.xs, **self.kwargs)

    def gradient(
        self, directory: Any, argnums: Any = ("f", "init", "xs"), **settings: Any
    ) -> Any:
        run = el.Resumable(self.scan, directory, **{"every": EVERY} | settings)
        take = run.value_and_grad(loss, argnums=argnums)
        return take(self.init, self.xs, **self.kwargs)

    @property
    def has_numbers(self) -> bool:
        """Whether there is a Python number in the carry."""
        return any(isinstance(x, float) for x in jax.tree.leaves(self.init))

    def expected(self) -> Any:
        return eqx.filter_jit(self.scan)(self.init, self.xs, **self.kwargs)

    def expected_gradient(self) -> Any:
        @eqx.filter_value_and_grad
        def value(args: Any) -> Any:
            scan, init, xs = args
            return loss(*scan(init, xs, **self.kwargs))

        return eqx.filter_jit(value)((self.scan, self.init, self.xs))


def loss(carry: Any, ys: Any) -> jax.Array:
    """A number that depends on all that a loop returns."""
    leaves = jax.tree.leaves(eqx.filter((carry, ys), eqx.is_inexact_array))
    weigh = lambda x: jnp.cos(jnp.arange(x.size, dtype=jnp.float32).reshape(x.shape))
    return sum(
        (jnp.sum(jnp.abs(x).astype(jnp.float32) * weigh(x)) for x in leaves),
        jnp.zeros(()),
    )


def assert_close(found: Any, expected: Any) -> None:
    """The same, weak types too, and numbers up to rounding."""
    asserts.assert_same_types(found, expected)
    asserts.assert_close(found, expected, rtol=2e-5, atol=2e-5)


def numbers(tree: Any) -> list[tuple[Any, ...]]:
    """What there is to compare of a tree: types and bits of arrays, and the rest."""
    return list(map(_of_leaf, jax.tree.leaves(tree)))


def _of_leaf(leaf: Any) -> tuple[Any, ...]:
    if not isinstance(leaf, jax.Array | np.ndarray):
        return type(leaf), repr(leaf)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jr.key_data(leaf)
    return leaf.shape, str(leaf.dtype), np.asarray(leaf).tobytes()


def _layers(h, w):
    return jnp.tanh(w @ h), h[0]


class _Layer(eqx.Module):
    """A layer with weights of its own at each step."""

    weights: jax.Array
    common: jax.Array

    def __call__(self, h, x):
        return jnp.tanh(self.weights @ h + self.common * x), None


def _many_kinds(carry, x):
    carry = carry | {
        "count": carry["count"] + 1,
        "total": carry["total"] + x["v"].sum(),
        "key": jr.fold_in(carry["key"], 1),
    }
    noise = jr.normal(carry["key"])
    y = {"noise": noise, "half": x["v"].astype(jnp.bfloat16), "flag": x["v"][0] > 0}
    return carry, (y, jr.split(carry["key"], 2), "static", 3)


def _mixed() -> Example:
    init = {
        "count": 0,
        "total": 0.0,
        "key": jr.key(3),
        "fixed": 7,
        "name": "n",
        "none": None,
    }
    return Example(el.Scan(_many_kinds), init, {"v": data(), "unused": None})


def examples() -> dict[str, Callable[[], Example]]:
    """All of them, by what is special about each."""
    zero = jnp.zeros(3)
    keyed = {"key": jr.key(5)}
    wave = lambda x, t: (x * jnp.exp(lax.complex(t, t)), jnp.abs(x))
    narrow = lambda h, x: (h * jnp.bfloat16(0.9) + x, h)
    across = dict(in_axes={"a": 1, "b": None}, out_axes=({"c": -1}, None))

    class Axes(eqx.Module):
        rate: jax.Array

        def __call__(self, carry, x):
            carry = jnp.tanh(carry + self.rate * x["a"] * x["b"])
            return carry, ({"c": jnp.stack([carry, -carry], 1)}, jnp.sin(self.rate))

    def cast(f):
        return jax.tree.map(lambda x: x * 2 if eqx.is_array(x) else x, f)

    layers = _Layer(jnp.stack([cell().weight] * LENGTH, 1), jnp.ones(3))
    f_axes = _Layer(1, None)  # pyright: ignore
    return {
        "plain": lambda: Example(el.Scan(cell()), zero, data()),
        "arrays of jax": lambda: Example(el.Scan(cell()), zero, jnp.asarray(data())),
        "checkpointed": lambda: Example(
            el.CheckpointedScan(cell(), base=2), zero, data()
        ),
        "keys": lambda: Example(el.Scan(cell()), zero, data(), keyed),
        "raw keys": lambda: Example(
            el.Scan(cell()), zero, data(), {"key": jr.PRNGKey(5)}
        ),
        "other keys": lambda: Example(
            el.Scan(cell()), zero, data(), {"key": jr.key(5, impl="unsafe_rbg")}
        ),
        "one key": lambda: Example(
            el.Scan(cell(), split_keys=False), zero, data(), keyed
        ),
        "reversed": lambda: Example(el.Scan(cell(), reverse=True), zero, data()),
        "truncated": lambda: Example(
            el.Scan(cell(), backward=el.Truncate(3), reverse=True), zero, data(), keyed
        ),
        "truncated, one key": lambda: Example(
            el.CheckpointedScan(cell(), backward=el.Truncate(5), split_keys=False),
            zero,
            data(),
            keyed,
        ),
        "truncated at segments": lambda: Example(
            el.Scan(cell(), backward=el.Truncate(EVERY)), zero, data()
        ),
        "length": lambda: Example(
            el.Scan(lambda h, x: (h * 1.5, h)), jnp.ones(2), None, {"length": LENGTH}
        ),
        "axes": lambda: Example(
            el.Scan(Axes(jnp.array([0.5, 1.0, 1.5])), **across),
            zero,
            {"a": data().T.copy(), "b": np.float32(0.3)},
        ),
        "axes of f": lambda: Example(
            el.Scan(layers, f_axes=f_axes), jnp.ones(3), data()
        ),
        "unrolled": lambda: Example(
            el.Scan(cell(), reverse=True, unroll=3), zero, data(), keyed
        ),
        "transformed": lambda: Example(
            el.Scan(cell(), f_transform=cast), zero, data(), keyed
        ),
        "numbers": lambda: Example(el.Scan(lambda h, x: (h + x.sum(), h)), 0.0, data()),
        "many kinds": _mixed,
        "complex": lambda: Example(
            el.Scan(wave), jnp.ones(2, jnp.complex64), data()[:, :2]
        ),
        "narrow": lambda: Example(
            el.Scan(narrow), jnp.ones(3, jnp.bfloat16), data().astype(jnp.bfloat16)
        ),
        "no steps": lambda: Example(el.Scan(cell()), zero, data(0)),
        "one step": lambda: Example(el.Scan(cell()), zero, data(1)),
        "whole segments": lambda: Example(el.Scan(cell()), zero, data(2 * EVERY)),
    }
