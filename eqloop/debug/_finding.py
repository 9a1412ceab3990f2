"""What has been found so far, as arrays that a program carries along.

The place of the first operation that failed is a number, that of its `Site`. So a loop
can carry it; and nothing is run again to find the place.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._arrays import axes_of, is_inexact, vary
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
            is not known, or not yet.
        ranges: The least and the greatest number of the result, then of the operands.
        where: The number of the entry of the result that failed first, see `Extent`.
    """

    site: Any
    iterations: Any
    ranges: Any
    where: Any

    def at(self, depth: int, index: Value) -> "Finding":
        """The same with the index of a loop, unless it is known already."""
        is_open = (lax.iota(jnp.int32, DEPTH) == depth) & (self.iterations < 0)
        return self._replace(iterations=jnp.where(is_open, index, self.iterations))


def nothing() -> Finding:
    """No operation has failed."""
    return Finding(
        jnp.zeros((), jnp.int32),
        jnp.full(DEPTH, -1, jnp.int32),
        jnp.zeros((1 + OPERANDS, 2), float),
        jnp.full((), NOWHERE, jnp.int32),
    )


def first(one: Finding, other: Finding) -> Finding:
    """The earlier of two findings; `one` comes first if both failed."""
    return chosen(one.site > 0, one, other)


def chosen(is_one: Value, one: Finding, other: Finding) -> Finding:
    """One of two findings."""
    return jax.tree.map(lambda a, b: jnp.where(is_one, a, b), one, other)


def varying(finding: Finding, arrays: Sequence[Value]) -> Finding:
    """A finding that, in `shard_map`, may differ wherever some of the arrays do."""
    axes = frozenset[str]().union(*map(axes_of, arrays))
    return jax.tree.map(lambda x: vary(x, axes), finding)


def of_all_devices(finding: Finding) -> Finding:
    """The finding of the first device that has one, in `shard_map`."""
    # If only one of them raised, the others would wait for it forever.
    axes = tuple(jax.sharding.get_abstract_mesh().manual_axes)
    if not axes:
        return finding
    finding = jax.tree.map(lambda x: vary(x, frozenset(axes)), finding)
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
