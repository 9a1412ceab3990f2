"""Interval arithmetic: between which integers the values in a program lie.

A range holds for all entries of an array of integers or booleans (0 and 1), whatever
the inputs of the program are. `None` means that nothing is known.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from .._arrays import has_dtype, is_symbolic
from .._types import Aval
from ._equations import aval_of

Range: TypeAlias = tuple[int, int]

_EITHER = (0, 1)
# Every entry of the result is an entry of the operand. The last three are primitives of
# Equinox, which reduce over the axis of a `vmap`, or assert that there is none.
_OF_THE_SAME_RANGE = frozenset(
    {
        "broadcast_in_dim",
        "copy",
        "reduce_max",
        "reduce_min",
        "reshape",
        "squeeze",
        "transpose",
        "nonbatchable",
        "unvmap_all",
        "unvmap_any",
    }
)


def range_of_literal(value: object) -> Range | None:
    """The range of a number that is known while tracing."""
    number = np.asarray(value)
    is_counted = number.ndim == 0 and number.dtype.kind in "biu"
    return (int(number), int(number)) if is_counted else None


def range_of_result(eqn: jex.JaxprEqn, ranges: Sequence[Range | None]) -> Range | None:
    """The range of the result of an equation, given the ranges of its operands."""
    if len(eqn.outvars) != 1:
        return None
    aval = aval_of(eqn.outvars[0])
    if _has(aval, jnp.bool_):
        return _found_for(eqn, ranges) or _EITHER
    found = _found_for(eqn, ranges) if _has(aval, jnp.integer) else None
    if found is None:
        return None
    limits = jnp.iinfo(aval.dtype)  # beyond them a number wraps around
    return found if limits.min <= found[0] and found[1] <= limits.max else None


def _has(aval: Aval, kind: Any) -> bool:
    """Whether an array has this kind of dtype, and is not empty."""
    if not has_dtype(aval) or not jnp.issubdtype(aval.dtype, kind):
        return False
    return not is_symbolic(aval.size) and aval.size > 0


def _found_for(eqn: jex.JaxprEqn, ranges: Sequence[Range | None]) -> Range | None:
    name, operands = eqn.primitive.name, [aval_of(atom) for atom in eqn.invars]
    if name == "select_n":
        return _among_cases(*ranges)
    known = [pair for pair in ranges if pair is not None]
    is_counted = all(_has(x, jnp.integer) or _has(x, jnp.bool_) for x in operands)
    if not known or len(known) < len(ranges) or not is_counted:
        return None
    if name in _OF_THE_SAME_RANGE:
        return known[0]
    if name == "convert_element_type":
        return _converted(known[0], aval_of(eqn.outvars[0]))
    if name == "eq":
        return _are_equal(*known)
    if name == "ne":
        return _opposite(_are_equal(*known))
    if name in _MONOTONIC:
        return _over_ends(_MONOTONIC[name], *known)
    if not _has(operands[0], jnp.bool_):
        return None
    if name == "not":
        return _opposite(known[0])
    if name in ("reduce_and", "reduce_or"):
        return known[0]
    return _over_ends(_OF_BOOLEANS[name], *known) if name in _OF_BOOLEANS else None


def _among_cases(which: Range | None, *cases: Range | None) -> Range | None:
    first, last = which or (0, len(cases) - 1)
    known = [case for case in cases[first : last + 1] if case is not None]
    if not known or len(known) < last + 1 - first:
        return None
    return min(low for low, _ in known), max(high for _, high in known)


def _converted(known: Range, aval: Aval) -> Range:
    low, high = known
    if not _has(aval, jnp.bool_):
        return known
    return (int(not low <= 0 <= high), int(known != (0, 0)))


def _over_ends(f: Callable[[int, int], int], one: Range, other: Range) -> Range:
    ends = [int(f(a, b)) for a in one for b in other]
    return min(ends), max(ends)


def _are_equal(one: Range, other: Range) -> Range:
    is_one_number = one == other and one[0] == one[1]
    return int(is_one_number), int(one[0] <= other[1] and other[0] <= one[1])


def _opposite(known: Range) -> Range:
    return 1 - known[1], 1 - known[0]


# Functions of two numbers that are greatest and least at ends of the ranges of these.
_COMPARED = {name: getattr(operator, name) for name in ("lt", "gt", "le", "ge")}
_COMPUTED = {name: getattr(operator, name) for name in ("add", "sub", "mul")}
_MONOTONIC = {**_COMPARED, **_COMPUTED, "max": max, "min": min}
_OF_BOOLEANS = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}
