"""The numbers of a block of rows while the program of one row is evaluated.

An array of one row is an array of objects here, one for each of its entries:

- a vector with a number for each row of the block, which lives in registers;
- a scalar, where all rows have the same number; a NumPy scalar, if it is known;
- `InMemory`, a number in memory that is read where it is used;
- `Parts`, for a number that is several: a key, or a complex number.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._compat import close
from ..._types import Value
from ._entries import InMemory, Parts, ProductSum, is_known, parts_of, values_of
from ._pallas import in_registers, of_all_rows, places
from ._tiles import Tiles
from ._tpu import carried, is_flag, shape_of


def objects(values: Sequence[Any], shape: Sequence[int]) -> np.ndarray:
    """An array of objects."""
    array = np.empty(len(values), object)
    for i, value in enumerate(values):
        array[i] = value
    return array.reshape(tuple(shape))


def of_array(value: Any) -> np.ndarray:
    """An array of numbers that are known."""
    value = np.asarray(value)
    return objects(list(value.reshape(-1)), value.shape)


class BlockScope:
    """One level of a program: what was read from memory is there within it.

    Attributes:
        block: How many rows there are.
        tiles: Multiplies by larger matrices; `None` to write out all products.
    """

    def __init__(
        self,
        block: int,
        tiles: Tiles | None = None,
        run: Callable[[jex.ClosedJaxpr, Sequence[np.ndarray]], list[Any]] | None = None,
    ):
        self.block, self.tiles, self._run = block, tiles, run
        self._read = dict[int, Any]()

    def run(self, program: Any, ins: Sequence[np.ndarray]) -> list[Any]:
        """The outputs of a program within this one."""
        assert self._run is not None
        return self._run(close(program), ins)

    def value(self, x: Any) -> Any:
        """An entry that is a number now, and not to be read or to be computed."""
        if not isinstance(x, InMemory | ProductSum):
            return x
        if id(x) not in self._read:
            found = x.value(self.value) if isinstance(x, ProductSum) else x.read(x.at)
            self._read[id(x)] = (x, found)
        return self._read[id(x)][1]

    def vector(self, x: Any, dtype: Any) -> Value:
        """An entry as a vector of the block."""
        found = jnp.broadcast_to(number(self.value(x), dtype), shape_of(self.block))
        return in_registers(found)


def from_vectors(values: Sequence[Value], shape: Sequence[int], dtype: Any) -> Any:
    """An array, from all of its numbers."""
    count, _ = parts_of(dtype)
    if count > 1:
        n = range(0, len(values), count)
        values = [Parts(tuple(values[i : i + count])) for i in n]
    elif is_flag(dtype):
        values = [x if is_flag(x.dtype) else x != 0 for x in values]
    return objects(values, shape)


def mapped(f: Callable[..., Any], *arrays: np.ndarray) -> np.ndarray:
    shape = np.broadcast_shapes(*(a.shape for a in arrays))
    flat = [np.broadcast_to(a, shape).reshape(-1) for a in arrays]
    return objects([f(*xs) for xs in zip(*flat, strict=True)], shape)


def valued(scope: BlockScope, a: np.ndarray) -> np.ndarray:
    return mapped(scope.value, a)


def number(x: Any, dtype: Any) -> Value:
    """A number for an operation; one that is no `int64` for MLIR is made of halves."""
    if is_known(x) and dtype == np.uint64 and x >= 2**63:
        half, rest = np.uint64(int(x) // 2), np.uint64(int(x) % 2)
        return lax.add(lax.add(half, half), rest)
    return jnp.asarray(x, dtype)


def alike(dtypes: Sequence[Any], xs: Sequence[Any]) -> list[Value]:
    """Operands of one shape: scalars are as long as the others."""
    shape = np.broadcast_shapes(*(np.shape(x) for x in xs))
    made = list(map(number, xs, dtypes))
    return [x if x.shape == shape else jnp.broadcast_to(x, shape) for x in made]


def numbers_of(
    scope: BlockScope, arrays: Sequence[np.ndarray], dtypes: Any, differ: Any
) -> list[Value]:
    """All numbers of arrays: vectors where rows differ, and else scalars."""
    values = list[Value]()
    for array, dtype, differs in zip(arrays, dtypes, differ, strict=True):
        _, part = parts_of(dtype)
        for x in map(scope.value, array.reshape(-1)):
            made = [carried(number(v, part)) for v in values_of(x, dtype)]
            one = lambda v: one_of(v) if v.ndim else v
            all_rows = lambda v: of_all_rows(v, scope.block)
            values += map(all_rows if differs else one, made)
    return values


def one_of(x: Value) -> Value:
    """The number of a vector of equal ones."""
    wide = x.astype(jnp.int32) if x.dtype == bool else x
    is_first = places(x.size) == 0
    return jnp.sum(jnp.where(is_first, wide, jnp.zeros_like(wide))).astype(x.dtype)


def arrays_of(values: Sequence[Value], avals: Any) -> list[np.ndarray]:
    arrays, at = list[np.ndarray](), 0
    for aval in avals:
        n = math.prod(aval.shape) * parts_of(aval.dtype)[0]
        arrays.append(from_vectors(values[at : at + n], aval.shape, aval.dtype))
        at += n
    return arrays


def any_row(flag: Value) -> Value:
    """Whether a flag holds of any row of a block."""
    if not jnp.ndim(flag):
        return flag
    return jnp.max(in_registers(flag.astype(jnp.int32))) > 0


def any_of_block(
    scope: BlockScope, eqn: Any, ins: list[np.ndarray]
) -> list[np.ndarray]:
    """Whether a flag holds of any row: `unvmap`."""
    flags = map(scope.value, ins[0].reshape(-1))
    return [objects([any_row(functools.reduce(lambda a, b: a | b, flags))], ())]
