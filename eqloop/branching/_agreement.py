"""The results of branches, and whether they agree.

Every array must have one shape and one dtype; only a weak type gives way to another.
Leaves that are not arrays must be the same, except for Python numbers: those that
differ become arrays, as they do in the carry of a loop.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._arrays import (
    Difference,
    Rest,
    as_array,
    axes_of,
    describe,
    flatten,
    is_dynamic,
    is_scalar,
    is_type,
    partition,
    paths,
    pick,
    same_static,
    structure_bits,
    structure_differences,
    vary,
)
from .._types import PyTree, Value

# The leaves that the branches return at one place.
Column = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of one branch.

    Attributes:
        tree: What it returned, its arrays reduced to their types.
    """

    branch: str
    tree: PyTree


@dataclasses.dataclass(frozen=True)
class Agreement:
    """The common type of what all branches return.

    Attributes:
        varies: Which of the leaves that are arrays or numbers are arrays.
    """

    types: list["_Type"]
    varies: list[bool]
    rest: Rest

    def conform(self, arrays: Sequence[Value]) -> list[jax.Array]:
        """The arrays that a branch returned, with the common types."""
        arrays = pick(arrays, self.varies)
        return [t.convert(x) for t, x in zip(self.types, arrays, strict=True)]


def arrays_of(out: PyTree) -> list[jax.Array]:
    """All leaves that can be arrays."""
    leaves, _ = flatten(out)
    return [as_array(x) for x in leaves if is_dynamic(x) or is_scalar(x)]


def agree(owner: str, outcomes: Sequence[Outcome]) -> Agreement:
    """What the branches return, if they agree."""
    if lines := _structures_by_branch(outcomes):
        raise TypeError(_disagreement(owner, "the same structure", lines))
    leaves = [flatten(outcome.tree)[0] for outcome in outcomes]
    columns: list[Column] = list(zip(*leaves, strict=True))
    if lines := _leaves_by_branch(outcomes, columns, _type_differs):
        raise TypeError(_disagreement(owner, "the same shapes and dtypes", lines))
    if lines := _leaves_by_branch(outcomes, columns, _static_differs):
        raise ValueError(
            _disagreement(owner, "equal leaves where they are not arrays", lines)
        )
    varies = list(map(_varies, columns))
    _, rest = partition(outcomes[0].tree, varies)
    types = [_Type.of(column) for column in pick(columns, varies)]
    return Agreement(types, pick(varies, [_can_vary(c[0]) for c in columns]), rest)


# Where they disagree.


def _structures_by_branch(outcomes: Sequence[Outcome]) -> list[str]:
    first = outcomes[0]
    structure = lambda outcome: structure_bits(flatten(outcome.tree)[1])
    return [
        _structure_by_branch(difference, first.branch, other.branch)
        for other in outcomes[1:]
        if structure(first) != structure(other)
        for difference in structure_differences(first.tree, other.tree, "out")
    ]


def _structure_by_branch(difference: Difference, first: str, other: str) -> str:
    path, one, two = difference.path, difference.one, difference.other
    if one == two:
        return (
            f"  {path}: {one} with other static fields from {first} than from {other}"
        )
    return f"  {path}: {one or 'nothing'} from {first}, {two or 'nothing'} from {other}"


def _leaves_by_branch(
    outcomes: Sequence[Outcome],
    columns: Sequence[Column],
    differs: Callable[[PyTree, PyTree], bool],
) -> list[str]:
    lines: list[str] = []
    names = paths(outcomes[0].tree, "out")
    for name, column in zip(names, columns, strict=True):
        standard = _standard(column)
        one = f"{describe(column[standard])} from {outcomes[standard].branch}"
        lines += [
            f"  {name}: {one}, {describe(leaf)} from {outcome.branch}"
            for outcome, leaf in zip(outcomes, column, strict=True)
            if differs(column[standard], leaf)
        ]
    return lines


def _standard(column: Column) -> int:
    """The leaf that the others must agree with: the first whose type is not weak."""
    firm = [i for i, leaf in enumerate(column) if _is_firm(leaf)]
    return firm[0] if firm else 0


def _type_differs(standard: Value, leaf: Value) -> bool:
    if not (is_type(standard) or is_type(leaf)):
        return False
    if not (_can_vary(standard) and _can_vary(leaf)):
        return True
    return (
        jnp.shape(standard) != jnp.shape(leaf)
        or _common_dtype([standard, leaf]) is None
    )


def _static_differs(standard: object, leaf: object) -> bool:
    can_vary = _can_vary(standard) and _can_vary(leaf)
    return not can_vary and not same_static(standard, leaf)


def _disagreement(owner: str, wanted: str, lines: list[str]) -> str:
    listing = "\n".join(lines)
    return f"{owner}: all branches must return {wanted}, but they do not:\n{listing}"


# What they agree on.


@dataclasses.dataclass(frozen=True)
class _Type:
    """The type of an array that all branches return."""

    dtype: np.dtype
    is_firm: bool
    varying: frozenset[Any]

    @classmethod
    def of(cls, column: Column) -> "_Type":
        dtype = _common_dtype(column)
        # A leaf that one branch has to convert is not weakly typed in any.
        is_firm = any(
            _is_firm(x) or jnp.result_type(_number(x)) != dtype for x in column
        )
        return cls(dtype, is_firm, frozenset().union(*map(axes_of, column)))

    def convert(self, x: jax.Array) -> jax.Array:
        aval = jax.typeof(x)
        if aval.dtype != self.dtype or (self.is_firm and aval.weak_type):
            x = lax.convert_element_type(x, self.dtype)
        # Inside `jax.shard_map`, one branch may give what is the same on all devices.
        return vary(x, self.varying)


def _common_dtype(leaves: Sequence[Value]) -> Any:
    """The common dtype of arrays and numbers, if the weakly typed ones can have it."""
    firm = {leaf.dtype for leaf in leaves if _is_firm(leaf)}
    gives = [_number(leaf) for leaf in leaves if not _is_firm(leaf)]
    is_extended = lambda dtype: jnp.issubdtype(dtype, jax.dtypes.extended)
    if not gives or any(map(is_extended, firm)):  # such as keys: JAX promotes none
        return None if gives or len(firm) > 1 else firm.pop()
    try:
        common = jnp.result_type(*firm, *gives)
    except jax.dtypes.TypePromotionError:
        return None  # so strict is the promotion that the user asked for
    return common if firm <= {common} else None


def _number(leaf: Value) -> Value:
    """A Python number, which is promoted like a weakly typed array."""
    return np.zeros((), leaf.dtype).item() if is_type(leaf) else leaf


def _varies(column: Column) -> bool:
    """Whether there is an array at this place."""
    first = column[0]
    if not is_scalar(first):
        return is_type(first)
    return not all(same_static(first, leaf) for leaf in column)


def _can_vary(leaf: Value) -> bool:
    return is_type(leaf) or is_scalar(leaf)


def _is_firm(leaf: Value) -> bool:
    """Whether a leaf is an array whose dtype is not weak."""
    return is_type(leaf) and not leaf.weak_type
