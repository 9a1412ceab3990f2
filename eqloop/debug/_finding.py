"""What has been found so far, as arrays that a program carries along.

The place of the first operation that failed is a number, that of its `Site`. So a loop
can carry it; and nothing is run again to find the place.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._arrays import is_inexact, vary
from .._programs import constant
from .._types import Value

# How many loops around each other are told apart, and how many operands are shown.
DEPTH = 8
OPERANDS = 3
# More devices than there are, and more entries than are numbered.
DEVICES = NOWHERE = 2**31 - 1


class Extent(NamedTuple):
    """The least and the greatest number of an array; both are NaN if one is.

    Attributes:
        where: The number of the first entry that is NaN; if none is, that of the first
            infinity plus the number of all entries.
    """

    low: Any
    high: Any
    where: Any


class Finding(NamedTuple):
    """The first operation that failed, if any.

    Attributes:
        site: The number of its site; 0 if none has failed.
        iterations: The index of each loop around it, the outermost first; -1 where it
            is not known.
        ranges: The least and the greatest number of the result, then of the operands.
        where: The number of the entry of the result that failed first, see `Extent`.
    """

    site: Any
    iterations: Any
    ranges: Any
    where: Any

    @property
    def may_go_on(self) -> Value:
        """Whether a loop may: with infinities in its carry it might never end."""
        # Inside `shard_map` it must: other devices may wait for this one.
        return True if _manual_axes() else self.site == 0


def nothing() -> Finding:
    """No operation has failed. In `shard_map`, another one may on each device."""
    finding = Finding(
        jnp.zeros((), jnp.int32),
        jnp.full(DEPTH, -1, jnp.int32),
        jnp.zeros((1 + OPERANDS, 2), float),
        jnp.full((), NOWHERE, jnp.int32),
    )
    return jax.tree.map(lambda x: vary(x, frozenset(_manual_axes())), finding)


def _manual_axes() -> tuple[str, ...]:
    """The axes of `shard_map` that this is inside of."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def first(one: Finding, other: Finding) -> Finding:
    """The earlier of two findings; `one` comes first if both failed."""
    return jax.tree.map(lambda a, b: jnp.where(one.site > 0, a, b), one, other)


def of_all_devices(finding: Finding) -> Finding:
    """The finding of the first device that has one, in `shard_map`."""
    # If only one of them raised, the others would wait for it forever.
    if not (axes := _manual_axes()):
        return finding
    rank = lax.axis_index(axes)
    first_rank = lax.pmin(jnp.where(finding.site > 0, rank, DEVICES), axes)
    only = lambda x: lax.psum(jnp.where(rank == first_rank, x, 0), axes)
    return jax.tree.map(only, finding)


def extent(x: Value) -> Extent:
    """The extent of an array."""
    x = jnp.asarray(x)
    nowhere = jnp.full((), NOWHERE, jnp.int32)
    if x.size == 0:
        return Extent(jnp.zeros((), float), jnp.zeros((), float), nowhere)
    if jnp.iscomplexobj(x):
        parts = [extent(jnp.real(x)), extent(jnp.imag(x))]
        low, high, where = zip(*parts, strict=True)
        return Extent(jnp.minimum(*low), jnp.maximum(*high), jnp.minimum(*where))
    if not is_inexact(x) or x.dtype.itemsize == 1:  # which need not have an infinity
        x = x.astype(float)
    at = jnp.broadcast_to(nowhere, x.shape)
    if 2 * x.size < NOWHERE:
        number = lax.iota(jnp.int32, x.size).reshape(x.shape)
        later = jnp.where(jnp.isnan(x), number, number + x.size)
        at = jnp.where(jnp.isfinite(x), at, later)
    # One reduction: on a CPU, XLA takes several times longer for two of a small array.
    ends = lambda a, b: (lax.min(a[0], b[0]), lax.max(a[1], b[1]), lax.min(a[2], b[2]))
    infinity = jnp.asarray(jnp.inf, x.dtype)
    start = infinity, -infinity, nowhere
    low, high, where = lax.reduce((x, x, at), start, ends, range(x.ndim))
    return Extent(low.astype(float), high.astype(float), where)


def first_failed(
    checks: list[list[Extent]], site: int, indices: list[Value | None]
) -> Finding:
    """The first check that failed: of a result, whose operands follow, in each row.

    The first is of the site of this number, and the others of the ones behind.
    """
    extents = {id(x): x for check in checks for x in check}
    numbers = {key: i for i, key in enumerate(extents, 1)}
    none = Extent(jnp.zeros((), float), jnp.zeros((), float), jnp.int32(NOWHERE))
    low, high, where = map(jnp.stack, zip(none, *extents.values(), strict=True))
    width = 1 + max(OPERANDS, *map(len, checks))
    rows = [[numbers[id(x)] for x in check] for check in checks]
    rows = constant([row + [0] * (width - len(row)) for row in rows])
    table = jnp.stack([low, high], axis=1)[rows]

    is_nan, is_finite = jnp.isnan(table).any(-1), jnp.isfinite(table).all(-1)
    made_nan = is_nan[:, 0] & ~is_nan[:, 1:].any(1)
    made_infinite = ~is_nan[:, 0] & ~is_finite[:, 0] & is_finite[:, 1:].all(1)
    failed = made_nan | made_infinite
    which = lax.argmax(failed, 0, jnp.int32)
    known = [-1 if index is None else index for index in indices]
    return Finding(
        jnp.where(failed.any(), site + which, 0),
        jnp.stack([jnp.int32(i) for i in [*known, *[-1] * DEPTH][:DEPTH]]),
        table[which, : 1 + OPERANDS],
        where[rows[which, 0]],
    )
