"""In which type the cotangents of what steps and rows share are added up.

A bfloat16 has 8 bits. A sum of many equal terms in it stops growing at the 256th: one
more is no more than half of the distance to the next number. So such sums are kept in
float32, and are cast once, when all terms are there.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from .._types import Aval, Value
from ._array_types import is_type, type_of

# Sums of narrower floats are kept in this type; `None` for none.
SumType: TypeAlias = np.dtype | None

# The key of JAX's caches contains it: what was traced elsewhere is traced again.
_chosen: Any = jax.make_user_context(jnp.dtype("float32"))


@contextlib.contextmanager
def accumulating_in(dtype: DTypeLike | None) -> Iterator[None]:
    """A context that says in which type loops and maps add up cotangents.

    What all steps of a loop share, or all rows of a map, such as a weight, has a
    cotangent that is a sum. By default, that of an array of narrower floats than
    float32 is kept in float32, and is cast to the type of the array when all terms were
    added. It takes 4 bytes for each entry of the array while the loop goes back.
    Without, bfloat16 loses all terms that are less than 1/256 of the sum.

    The type holds for what is traced in this context, also if it is compiled or
    differentiated later. JAX's caches know the context: a function that was traced
    outside of it is traced again.

    Args:
        dtype: The type of sums of narrower floats, such as `"float32"`, or `"float64"`
            if 64 bits are enabled. `None` to keep each sum in the type of its array, as
            `jax.lax.scan` does.

    Returns:
        A context manager, which can also decorate a function.

    Raises:
        TypeError: If it is not a dtype.
        ValueError: If it is not one of real floating-point numbers.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import eqloop as el
        >>> def loss(w, xs):
        ...     step = lambda h, x: (h + (w * x).astype(jnp.float32), None)
        ...     return el.CheckpointedScan(step)(0.0, xs)[0]
        >>> w, xs = jnp.ones((), jnp.bfloat16), jnp.full(4096, 0.01, jnp.bfloat16)
        >>> print(jax.grad(loss)(w, xs))
        41
        >>> with el.accumulating_in(None):
        ...     print(jax.grad(loss)(w, xs))
        4
    """
    if dtype is not None:
        which = "a floating-point dtype, such as 'float32', or None"
        others = "Sums of other numbers are kept in the type of their array."
        dtype = as_float_dtype("accumulating_in", dtype, which, others)
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    with _chosen(dtype):
        yield


def chosen_sum_type() -> SumType:
    """The type of sums in what is traced now."""
    return _chosen.value


def as_float_dtype(owner: str, dtype: object, which: str, others: str) -> np.dtype:
    """A dtype of real floating-point numbers, from what a user gave as `dtype`."""
    # An error says which dtypes it may be, and what is done with numbers of others.
    given: Any = dtype
    try:
        found = None if given is None else jnp.dtype(given)
    except TypeError:
        found = None
    if found is None:
        raise TypeError(f"{owner}: `dtype` must be {which}, not {dtype!r}.")
    if not jnp.issubdtype(found, jnp.floating):
        raise ValueError(
            f"{owner}: `dtype` must be {which}, not {found.name}. {others}"
        )
    return found


def sum_dtype(dtype: np.dtype, sums: SumType) -> np.dtype:
    """The dtype in which numbers of a dtype are added up."""
    if sums is None or not jnp.issubdtype(dtype, jnp.floating):
        return dtype
    return sums if jnp.finfo(dtype).bits < jnp.finfo(sums).bits else dtype


def sum_type(aval: Aval, sums: SumType) -> Aval:
    """The type of the sum of the cotangents of a value of this type."""
    if not is_narrow(aval, sums):
        return aval
    return aval.update(dtype=sum_dtype(aval.dtype, sums))


def is_narrow(x: Value, sums: SumType) -> bool:
    """Whether the cotangents of a value are added up in a wider type."""
    aval = type_of(x)
    return is_type(aval) and sum_dtype(aval.dtype, sums) != aval.dtype


def added(totals: Sequence[Value], terms: Sequence[Value]) -> list[Value]:
    """Sums with more terms, which may be of narrower types."""
    return [total + cast_like(x, total) for total, x in zip(totals, terms, strict=True)]


def cast_like(x: Value, other: Value) -> Value:
    """An array in the dtype of another one, or of its type."""
    # A value of a `hijax` type has no dtype, and its sums are of its own.
    aval = type_of(other)
    return x if not is_type(aval) or x.dtype == aval.dtype else x.astype(aval.dtype)
