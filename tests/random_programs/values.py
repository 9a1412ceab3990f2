"""Types of the values in a random program, and random values of them.

A type is a kind and a shape. What dtype a kind has is up to the program's precision.
"""

import dataclasses
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = Any

# f: the program's floating-point numbers, h: those of 16 bits, c: complex numbers,
# i: integers, b: booleans, k: PRNG keys.
DIFFERENTIABLE = "fch"


@dataclasses.dataclass(frozen=True)
class Type:
    kind: str
    shape: tuple[int, ...] = ()

    def __str__(self) -> str:
        return self.kind + "x".join(map(str, self.shape))


@dataclasses.dataclass(frozen=True)
class Precision:
    """The dtypes of a program, and how near its results must be to the reference's.

    Operations on numbers of 16 bits are exact, those of `operations.py`, so that their
    cotangents alone are rounded.
    """

    x64: bool = True
    real: str = "float64"
    half: str | None = None

    def dtype(self, kind: str) -> Any:
        complex_ = "complex128" if self.real == "float64" else "complex64"
        names = {"f": self.real, "h": self.half, "c": complex_, "i": "int32"}
        return jnp.dtype(names.get(kind, "bool"))

    @property
    def tolerance(self) -> float:
        if self.half is not None:
            return 5e-2
        return 1e-8 if self.real == "float64" else 1e-3

    @property
    def nudge(self) -> float:
        """A relative change of the inputs that rounding could have made as well."""
        return 1e-13 if self.real == "float64" else 1e-6


def random_value(rng: random.Random, type: Type, precision: Precision) -> Array:
    """An array whose numbers are about one."""
    draws = np.random.default_rng(rng.getrandbits(32))
    if type.kind == "k":
        keys = jax.random.split(jax.random.key(rng.getrandbits(31)), type.shape or 1)
        return keys if type.shape else keys[0]
    if type.kind == "b":
        return jnp.asarray(draws.random(type.shape) < 0.5)
    if type.kind == "i":
        return jnp.asarray(draws.integers(0, 7, type.shape), jnp.int32)
    value = draws.normal(size=type.shape)
    if type.kind == "c":
        value = value + 1j * draws.normal(size=type.shape)
    return jnp.asarray(value, precision.dtype(type.kind))


def raw(x: Array) -> Array:
    """The data of keys; other arrays as they are."""
    x = jnp.asarray(x)
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def is_inexact(x: Array) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


# Trees


def random_tree(rng: random.Random, leaves: int) -> Any:
    """A tree that has the numbers below `leaves` for leaves, and some that are static.

    Of what becomes static, `None` is no leaf, a string and a function are.
    """
    parts: list[Any] = list(range(leaves))
    for _ in range(rng.randrange(3)):
        parts.insert(rng.randint(0, len(parts)), rng.choice([None, "relu", jnp.tanh]))
    while len(parts) > 1 and rng.random() < 0.5:
        start = rng.randrange(len(parts))
        stop = rng.randint(start + 1, len(parts))
        inner = parts[start:stop]
        kind = rng.choice([list, tuple, dict])
        if kind is dict:
            inner = {"abcdefghijkl"[i]: part for i, part in enumerate(inner)}
        parts[start:stop] = [inner if kind is dict else kind(inner)]
    return tuple(parts)


def plant(tree: Any, leaves: Any) -> Any:
    """The tree with these leaves in place of their numbers."""
    leaves = list(leaves)
    is_number = lambda leaf: isinstance(leaf, int)
    return jax.tree.map(lambda i: leaves[i] if is_number(i) else i, tree)


def pick(tree: Any, planted: Any) -> list[Any]:
    """The leaves that were planted, in their order."""
    numbers = jax.tree.leaves(tree)
    found = zip(numbers, jax.tree.leaves(planted), strict=True)
    at = {i: leaf for i, leaf in found if isinstance(i, int)}
    return [at[i] for i in range(len(at))]
