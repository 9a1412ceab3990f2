"""How rows are cut into chunks, and a function is run on all of them, chunk by chunk.

The cutting is integer arithmetic. The loops are plain JAX on lists of arrays. JAX does
not differentiate a `ChunkLoop`: the derivatives of such a loop are loops over chunks
again, of the functions in `_chunk_function.py`. Under a policy, which stores residuals
for all rows, it does (`run_stored`).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._arrays import (
    Arrays,
    added,
    along,
    axes_of,
    cast_like,
    explicit_sharding,
    is_symbolic,
    placed_as,
    split,
    sum_type,
    vary,
    zero_array,
)
from .._programs import laid_out_call, mark, shared
from .._types import Aval, Index, PyTree, Value
from ..checkpointing import Saveable
from ..progress import tied
from ._chunk_function import ChunkFunction, MarkPair


@dataclasses.dataclass(frozen=True)
class Chunks:
    """Chunks of equal size that cover all rows.

    If their sizes add up to more than the number of rows, the last chunk overlaps the
    one before it, and ends with the last row. If they add up to less, there is one more
    chunk, which is shorter.

        11 rows, 3 chunks of 4     [0 1 2 3][4 5 6 7]
                                                  [7 8 9 10]
        11 rows, 2 of 4 and a rest [0 1 2 3][4 5 6 7][8 9 10]

    Attributes:
        length: How many rows there are.
        size: How many rows are in each chunk.
        count: How many chunks of this size there are.
        rest: How many rows are in the shorter chunk, 0 if there is none.
    """

    length: int
    size: int
    count: int
    rest: int = 0

    @property
    def overlap(self) -> int:
        """How many rows are both in the last chunk and in the one before it."""
        return self.count * self.size + self.rest - self.length

    @property
    def last(self) -> int:
        """The first row of the last chunk of full size."""
        return self.length - self.rest - self.size

    @property
    def end(self) -> int:
        """The row after the second to last full chunk."""
        return self.last + self.overlap


def equal_chunks(length: int, at_most: int, *, exact: bool = False) -> Chunks:
    """The fewest chunks of at most so many rows, with the smallest size.

    The fewest, since every chunk has some overhead. The smallest size, since it takes
    the least memory and overlaps the least, by fewer rows than there are chunks. So
    with 1000 rows or more, in chunks of 100 or more, at most one row in a hundred is in
    two chunks.

    Args:
        length: How many rows there are.
        at_most: How many may be in a chunk, at least 1.
        exact: Whether no row may be in two chunks, so that the last may be shorter.

    Returns:
        The chunks; none if there are no rows.

    Examples:
        >>> equal_chunks(1000, 300)
        Chunks(length=1000, size=250, count=4, rest=0)
        >>> equal_chunks(1001, 300).overlap
        3
        >>> equal_chunks(1001, 300, exact=True)
        Chunks(length=1001, size=251, count=3, rest=248)
    """
    if at_most == 1:
        return Chunks(
            length, 1, length
        )  # of however many rows, also if that is symbolic
    count = -(-length // at_most)
    size = -(-length // count) if count else 0
    if exact and size:
        return Chunks(length, size, *divmod(length, size))
    return Chunks(length, size, count)


_State = tuple[list[Any], list[Any]]


@dataclasses.dataclass(frozen=True)
class ChunkLoop:
    """A function that is evaluated on all rows with the memory of one chunk.

    Attributes:
        chunks: How the rows are cut into chunks.
        unroll: How many chunks one iteration of the compiled loop runs.
    """

    f: ChunkFunction
    chunks: Chunks
    unroll: int = 1

    def run(self, consts: Arrays, xs: Arrays) -> tuple[list[Value], list[Value]]:
        """Runs the loop. Returns the sums over all rows, and the `ys` of all rows."""
        # A chunk is sliced out of the arrays, and its results are written into them,
        # along whatever axis the rows are. Reshaping arrays into chunks would copy
        # them.
        chunks, number = self.chunks, self.f.meter.here.open([*consts, *xs])
        if chunks.size == chunks.length:
            state = self.f(chunks.size, None, consts, xs)
            return tied(self.report(number, 0, chunks.size, state), state)

        def body(index: Index, both: tuple[PyTree, _State]) -> tuple[PyTree, _State]:
            number, state = both
            first = index * chunks.size
            state = self._visit(first, chunks.size, state, consts, xs)
            return self.report(number, first, chunks.size, state), state

        sum_types, y_types = self.f.out_types
        state = (
            [zero_array(sum_type(aval, self.f.sums)) for aval in sum_types],
            [_buffer(y) for y in y_types],
        )
        number, state = _repeat(chunks.count, body, (number, state), self.unroll)
        if chunks.rest:
            start = chunks.length - chunks.rest
            state = self._visit(start, chunks.rest, state, consts, xs)
            number = self.report(number, start, chunks.rest, state)
        sums, ys = state
        return tied(number, (list(map(cast_like, sums, sum_types)), ys))

    # The bar, if there is one. A chunk is named by its first new row.

    def report(self, number: Index, first: Index, size: int, state: _State) -> PyTree:
        """Reports a chunk to the bar, if there is one."""
        sums, ys = state
        done = jnp.minimum(first + size, self.chunks.length)
        return self.f.meter.here.report_if_due(number, done, size, [*sums, *ys])

    def visits(self, first: Index) -> PyTree:
        """The `visits` of the chunk with this first new row, see `ChunkFunction`."""
        chunks = self.chunks
        if not (chunks.overlap and self.f.uses_visits):
            return None
        # Only the last chunk has rows before its first new one, and only these rows are
        # in two chunks: here as the second visit, in the chunk before as the first.
        offsets = jnp.arange(chunks.size, dtype=jnp.int32)
        row = jnp.minimum(first, chunks.last) + offsets
        is_twice = (chunks.last <= row) & (row < chunks.end)
        visits = jnp.where(is_twice, jnp.where(row < first, 2, 1), 0)
        return visits.astype(jnp.int8)

    def _visit(
        self, first: Index, size: int, state: _State, consts: Arrays, xs: Arrays
    ) -> _State:
        """Runs one chunk, and adds its results to the state."""
        # The last chunk may start before `first`, which no chunk before has had.
        sums, ys = state
        visits = self.visits(first)
        start = jnp.minimum(first, self.chunks.length - size)
        mark(start, size)
        parts = [
            _read(x, start, size, axis)
            for x, axis in zip(xs, self.f.x_axes, strict=True)
        ]
        more, new = self.f(size, visits, consts, parts)
        return added(sums, more), [
            _write(y, part, start, axis, visits if shares else None)
            for y, part, axis, shares in zip(
                ys, new, self.f.y_axes, self.f.shares, strict=True
            )
        ]


def _buffer(aval: Aval) -> jax.Array:
    """An array whose rows will all be written; until then there is anything in it."""
    empty = lax.empty(aval.shape, aval.dtype, out_sharding=explicit_sharding(aval))
    # `lax.empty` gives a type without the mesh when it is traced.
    return vary(placed_as(empty, aval), axes_of(aval))


def _repeat(
    count: int, body: Callable[[PyTree, PyTree], PyTree], state: PyTree, unroll: int
) -> PyTree:
    """A `lax.fori_loop` that JAX does not differentiate."""
    # JAX turns a `fori_loop` with a static trip count into a `scan`, so that it can be
    # differentiated. XLA takes longer to compile that than a `while_loop`.
    if unroll > 1:
        return lax.fori_loop(0, count, body, state, unroll=unroll)
    more = lambda loop: loop[0] < count
    once = lambda loop: (loop[0] + 1, body(*loop))
    _, state = lax.while_loop(more, once, (jnp.int32(0), state))
    return state


def _read(x: Value, start: Index, size: int, axis: int) -> Value:
    return lax.dynamic_slice_in_dim(x, start, size, axis, allow_negative_indices=False)


def _write(y: Value, part: Value, start: Index, axis: int, visits: PyTree) -> Value:
    """Writes rows, or adds them where they have been written before."""
    if visits is not None:
        before = _read(y, start, part.shape[axis], axis)
        part = part + jnp.where(along(visits == 2, (axis,), part), before, 0)
    return lax.dynamic_update_slice_in_dim(
        y, part, start, axis, allow_negative_indices=False
    )


# A map over rows with a policy, which stores some residuals for all rows. It has JAX's
# own derivatives. The rows are cut into chunks beforehand, which copies them. But there
# are arrays with something of all rows anyway, as that is what the policy stores.


def run_stored(
    loop: ChunkLoop, policy: Saveable, consts: Arrays, xs: Arrays, back: PyTree = None
) -> tuple[tuple[list[Value], list[Value]], PyTree, PyTree]:
    """Runs a loop over chunks for JAX to differentiate, under a policy."""
    # `back` is a number that is passed through. On the way back, its cotangent moves
    # the bar of the backward sweep, if there is one.
    f, chunks = loop.f, loop.chunks
    consts, own = shared(consts, f.sums)

    # In the body of a loop, XLA cannot merge the second evaluation with the first.
    @functools.partial(jax.checkpoint, policy=policy, prevent_cse=False)
    def evaluate(visits: PyTree, consts: Arrays, parts: Arrays) -> tuple[list, list]:
        size = parts[0].shape[f.x_axes[0]]
        return f(size, visits, consts, parts)

    def body(state: PyTree, inputs: PyTree) -> tuple[PyTree, Arrays]:
        (number, back, sums), (index, parts) = state, inputs
        first = index * chunks.size
        back = f.meter.back.watch(back, chunks.length - first, chunks.size)
        more, ys = evaluate(loop.visits(first), own(consts), parts)
        sums = list(map(jnp.add, sums, more))
        number = loop.report(number, first, chunks.size, (sums, ys))
        return (number, back, sums), ys

    cut = [
        _cut_into_chunks(x, axis, chunks) for x, axis in zip(xs, f.x_axes, strict=True)
    ]
    sums = list(map(zero_array, f.out_types[0]))
    state = (f.meter.here.open([*consts, *xs]), back, sums)
    indices = jnp.arange(chunks.count, dtype=jnp.int32)
    run = lambda *flat: jax.tree.leaves(lax.scan(body, *jax.tree.unflatten(tree, flat)))
    inputs, tree = jax.tree.flatten((state, (indices, cut)))
    outs, loop_state = laid_out_call(run, *inputs), jax.tree.structure(state)
    state, ys = split(outs, loop_state.num_leaves)
    number, back, sums = jax.tree.unflatten(loop_state, state)
    ys = [_join_chunks(y, axis, chunks) for y, axis in zip(ys, f.y_axes, strict=True)]
    if chunks.rest:
        start = chunks.length - chunks.rest
        parts = list(map(functools.partial(_slice, start, chunks.length), xs, f.x_axes))
        back = f.meter.back.watch(back, chunks.length - start, chunks.rest)
        more, last = evaluate(None, own(consts), parts)
        sums = list(map(jnp.add, sums, more))
        ys = [
            jnp.concatenate(pair, axis)
            for *pair, axis in zip(ys, last, f.y_axes, strict=True)
        ]
        number = loop.report(number, start, chunks.rest, (sums, ys))
    return (list(sums), ys), back, number


def _cut_into_chunks(x: jax.Array, axis: int, chunks: Chunks) -> jax.Array:
    """The chunks of full size of an array, along a new leading axis."""
    if chunks.overlap:
        last = _slice(chunks.last, chunks.length, x, axis)
        x = jnp.concatenate([_slice(0, chunks.end, x, axis), last], axis)
    x = _slice(0, chunks.count * chunks.size, x, axis)
    shape = (*x.shape[:axis], chunks.count, chunks.size, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis, 0)


def _join_chunks(y: jax.Array, axis: int, chunks: Chunks) -> jax.Array:
    """The array of all rows, from chunks along a leading axis."""
    y = jnp.moveaxis(y, 0, axis)
    y = y.reshape(*y.shape[:axis], chunks.count * chunks.size, *y.shape[axis + 2 :])
    if not chunks.overlap:
        return y
    # Rows from `last` to `end` are there twice, the second time up to `again`.
    last, end, again = chunks.last, chunks.end, chunks.end + chunks.overlap
    before, after = _slice(0, last, y, axis), _slice(again, y.shape[axis], y, axis)
    once, twice = _slice(last, end, y, axis), _slice(end, again, y, axis)
    if jnp.issubdtype(y.dtype, jnp.inexact):
        twice = once / 2 + twice / 2  # the same value, and half of the cotangent each
    return jnp.concatenate([before, twice, after], axis)


def _slice(start: int, stop: int, x: jax.Array, axis: int) -> jax.Array:
    return lax.slice_in_dim(x, start, stop, axis=axis)


# How large chunks are: what a map asks of its `chunk_size`.


@dataclasses.dataclass(frozen=True)
class AtMost:
    """At most so many rows at once."""

    size: int
    exact: bool
    unroll: int = 1

    @property
    def takes_any_length(self) -> bool:
        """Whether the number of rows need not be known."""
        return self.size == 1  # a row at a time is the same however many there are

    def in_exact_chunks(self) -> "AtMost":
        """The same with each row in one chunk only."""
        # A row in two chunks has half of its cotangent in each. A custom backward rule
        # that is not linear in the cotangent would not add up. And if a row can see its
        # chunk, it has another value in each.
        return dataclasses.replace(self, exact=True)

    def has_same_chunks(self, length: int) -> bool:
        """Whether each row is in one chunk, and the same for all derivatives."""
        return equal_chunks(length, self.size, exact=self.exact).overlap == 0

    def is_whole(self, length: int) -> bool:
        """Whether so many rows are certainly mapped at once."""
        return not is_symbolic(length) and length <= self.size

    def probe(self, length: int) -> tuple[int, bool]:
        """The `probe` of a `ChunkFunction`."""
        chunks = equal_chunks(length, self.size, exact=self.exact)
        return chunks.size, chunks.overlap > 0

    def sizes(self, length: int) -> list[tuple[int, bool]]:
        """The size of all chunks but the rest, as in `probe`, and that of the rest."""
        rest = equal_chunks(length, self.size, exact=self.exact).rest
        return [self.probe(length), *[(rest, False)] * bool(rest)]

    def count(self, length: int) -> int:
        """How many chunks there are, as far as that is known."""
        return equal_chunks(length, self.size, exact=self.exact).count

    def loop(self, f: ChunkFunction) -> ChunkLoop:
        """How to run a map."""
        chunks = equal_chunks(f.length, self.size, exact=self.exact)
        return ChunkLoop(f, chunks, self.unroll)

    def loop_storing(
        self, f: ChunkFunction, policy: Saveable, marks: MarkPair
    ) -> ChunkLoop:
        """The same for a gradient of the marked inputs, under a policy."""
        return self.loop(f)
