"""The entries of arrays of one row that are no numbers yet, or several."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._types import Value


@dataclasses.dataclass(frozen=True, eq=False)
class InMemory:
    """A number in memory, which all rows share or which each has its own of.

    Attributes:
        read: Reads the number at an offset along its array, flat for one row.
        at: Where it is.
        is_table: Whether all rows share it, and it can be read at many offsets at once.
    """

    read: Callable[[Any], Value]
    at: int
    is_table: bool = False


def places_of(a: np.ndarray) -> tuple[Callable[[Any], Value], np.ndarray] | None:
    """What reads an array of numbers that lie in memory, and where each of them is."""
    flat = list(a.reshape(-1))
    if not all(isinstance(x, InMemory) and x.read is flat[0].read for x in flat):
        return None
    return (flat[0].read, np.reshape([x.at for x in flat], a.shape)) if flat else None


@dataclasses.dataclass(frozen=True, eq=False)
class Parts:
    """A number that consists of several."""

    values: tuple[Any, ...]


def each_part(f: Callable[[Any], Any], x: Any) -> Any:
    """A number, or each of those of which it consists, after `f`."""
    return Parts(tuple(map(f, x.values))) if isinstance(x, Parts) else f(x)


@dataclasses.dataclass(frozen=True, eq=False)
class ProductSum:
    """A sum of products, one of many that a product of two vectors consists of.

    It is computed where it is used. If it is only added up, over steps and rows, all of
    them are one product of matrices (`_tiles.py`).

    Attributes:
        pairs: The factors of each product.
        multiply: Computes one of them.
        add: Adds two of them.
    """

    pairs: tuple[tuple[Any, Any], ...]
    multiply: Callable[[Any, Any], Any]
    add: Callable[[Any, Any], Any]

    def value(self, read: Callable[[Any], Any]) -> Any:
        """The sum, of factors that are read first."""
        terms = [self.multiply(*map(read, pair)) for pair in self.pairs]
        return functools.reduce(self.add, terms)


def parts_of(dtype: Any) -> tuple[int, Any]:
    """Of how many numbers an entry consists, and of which dtype these are."""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return dtype.itemsize // 4, np.dtype("uint32")
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return 2, np.dtype("float32" if dtype == np.complex64 else "float64")
    return 1, dtype


def is_known(x: Any) -> bool:
    return isinstance(x, np.generic | bool | int | float)


def values_of(x: Any, dtype: Any) -> tuple[Any, ...]:
    """The numbers that an entry consists of."""
    if isinstance(x, Parts):
        return x.values
    count, part = parts_of(dtype)
    if count == 1:
        return (x,)
    return tuple(np.asarray(v, part)[()] for v in (np.real(x), np.imag(x)))
