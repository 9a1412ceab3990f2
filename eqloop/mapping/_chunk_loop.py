"""How rows are cut into chunks, and a function is run on all of them, chunk by chunk.

The cutting is integer arithmetic. The loops are plain JAX on lists of arrays. JAX does
not differentiate a `ChunkLoop`: the derivatives of such a loop are loops over chunks
again, of the functions in `_chunk_function.py`. Under a policy, which stores residuals
for all rows, it does (`run_stored`).
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from .._arrays import (
    Arrays,
    added,
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
    """Chunks of equal size, after a shorter one if they do not have all rows.

        11 rows, a rest and 2 chunks of 4    [0 1 2][3 4 5 6][7 8 9 10]

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


def equal_chunks(length: int, at_most: int) -> Chunks:
    """The fewest chunks of at most so many rows; up to twice as many if without a rest.

    >>> equal_chunks(1000, 300)
    Chunks(length=1000, size=250, count=4, rest=0)
    >>> equal_chunks(1001, 300)
    Chunks(length=1001, size=143, count=7, rest=0)
    >>> equal_chunks(1003, 300)
    Chunks(length=1003, size=251, count=3, rest=250)
    """
    if at_most == 1:
        # Of however many rows, also if that is symbolic.
        return Chunks(length, 1, length)
    if length == 0:
        return Chunks(0, 0, 0)
    # The fewest, since every chunk has some overhead. The smallest size with these,
    # since it takes the least memory. A rest is a program of its own.
    count = -(-length // at_most)
    size = -(-length // count)
    # Of sizes and of their counts, those are gone through of which there are fewer.
    sizes = range(size, size // 2, -1)
    if count < size:
        sizes = (-(-length // n) for n in range(count, 2 * count))
    size = next((n for n in sizes if n > size // 2 and length % n == 0), size)
    return Chunks(length, size, *divmod(length, size))


# Starts are never negative. Without this, JAX compares each with zero.
_IN_RANGE = {"allow_negative_indices": False}
_read = functools.partial(lax.dynamic_slice_in_dim, **_IN_RANGE)
_write = functools.partial(lax.dynamic_update_slice_in_dim, **_IN_RANGE)


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
        f, chunks, bar = self.f, self.chunks, self.f.meter.here
        number = bar.open([*consts, *xs])
        if chunks.size == chunks.length:
            sums, ys = f(chunks.size, consts, xs)
            number = bar.report_if_due(number, chunks.size, chunks.size, [*sums, *ys])
            return tied(number, (sums, ys))

        def visit(start: Index, size: int, state: PyTree) -> PyTree:
            number, (sums, ys) = state
            mark(start, size)
            pairs = zip(xs, f.x_axes, strict=True)
            more, new = f(size, consts, [_read(x, start, size, at) for x, at in pairs])
            written = zip(ys, new, f.y_axes, strict=True)
            ys = [_write(y, part, start, at) for y, part, at in written]
            sums = added(sums, more)
            number = bar.report_if_due(number, start + size, size, [*sums, *ys])
            return number, (sums, ys)

        body = lambda i, state: visit(chunks.rest + i * chunks.size, chunks.size, state)
        sum_types, y_types = f.out_types
        sums = [zero_array(sum_type(aval, f.sums)) for aval in sum_types]
        state = number, (sums, list(map(_buffer, y_types)))
        if chunks.rest:
            # Before the loop, as XLA on a CPU then knows that what this chunk takes is
            # free in the loop. After it, it was seen to take the memory of two chunks.
            state = visit(0, chunks.rest, state)
        number, (sums, ys) = _repeat(chunks.count, body, state, self.unroll)
        return tied(number, (list(map(cast_like, sums, sum_types)), ys))


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


# A map over rows with a policy, which stores some residuals for all rows. It has JAX's
# own derivatives. The rows are cut into chunks beforehand, which copies them. But there
# are arrays with something of all rows anyway, as that is what the policy stores.


def run_stored(
    loop: ChunkLoop, policy: Saveable, consts: Arrays, xs: Arrays, back: PyTree = None
) -> tuple[tuple[list[Value], list[Value]], PyTree, PyTree]:
    """Runs a loop over chunks for JAX to differentiate, under a policy."""
    # `back` is a number that is passed through. On the way back, its cotangent moves
    # the bar of the backward sweep, if there is one.
    f, chunks, bar = loop.f, loop.chunks, loop.f.meter.here
    consts, own = shared(consts, f.sums)

    # In the body of a loop, XLA cannot merge the second evaluation with the first.
    @functools.partial(jax.checkpoint, policy=policy, prevent_cse=False)
    def evaluate(consts: Arrays, parts: Arrays) -> tuple[list, list]:
        return f(parts[0].shape[f.x_axes[0]], consts, parts)

    def body(state: PyTree, inputs: PyTree) -> tuple[PyTree, Arrays]:
        (number, back, sums), (start, parts) = state, inputs
        size = parts[0].shape[f.x_axes[0]]
        back = f.meter.back.watch(back, chunks.length - start, size)
        more, ys = evaluate(own(consts), parts)
        sums = list(map(jnp.add, sums, more))
        number = bar.report_if_due(number, start + size, size, [*sums, *ys])
        return (number, back, sums), ys

    sums = list(map(zero_array, f.out_types[0]))
    state, before = (bar.open([*consts, *xs]), back, sums), None
    if chunks.rest:
        rest = list(map(functools.partial(_slice, 0, chunks.rest), xs, f.x_axes))
        state, before = body(state, (jnp.int32(0), rest))
    cut = [
        _cut_into_chunks(x, axis, chunks) for x, axis in zip(xs, f.x_axes, strict=True)
    ]
    starts = chunks.rest + chunks.size * jnp.arange(chunks.count, dtype=jnp.int32)
    run = lambda *flat: jax.tree.leaves(lax.scan(body, *jax.tree.unflatten(tree, flat)))
    inputs, tree = jax.tree.flatten((state, (starts, cut)))
    outs, loop_state = laid_out_call(run, *inputs), jax.tree.structure(state)
    state, ys = split(outs, loop_state.num_leaves)
    number, back, sums = jax.tree.unflatten(loop_state, state)
    ys = [_join_chunks(y, axis, chunks) for y, axis in zip(ys, f.y_axes, strict=True)]
    if before is not None:
        ys = list(map(_concatenate, before, ys, f.y_axes))
    return (list(sums), ys), back, number


def _cut_into_chunks(x: jax.Array, axis: int, chunks: Chunks) -> jax.Array:
    """The chunks of full size of an array, along a new leading axis."""
    x = _slice(chunks.rest, chunks.length, x, axis)
    shape = (*x.shape[:axis], chunks.count, chunks.size, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis, 0)


def _join_chunks(y: jax.Array, axis: int, chunks: Chunks) -> jax.Array:
    """The array of all rows, from chunks along a leading axis."""
    y = jnp.moveaxis(y, 0, axis)
    return y.reshape(*y.shape[:axis], chunks.count * chunks.size, *y.shape[axis + 2 :])


def _concatenate(first: jax.Array, second: jax.Array, axis: int) -> jax.Array:
    return jnp.concatenate([first, second], axis)


def _slice(start: int, stop: int, x: jax.Array, axis: int) -> jax.Array:
    return lax.slice_in_dim(x, start, stop, axis=axis)


# How large chunks are: what a map asks of its `chunk_size`.


@dataclasses.dataclass(frozen=True)
class AtMost:
    """At most so many rows at once; if it can be, a multiple of the number of parts."""

    size: int
    unroll: int = 1
    parts: int = 1
    # The value and all derivatives have the same chunks.
    has_same_chunks = True

    @property
    def takes_any_length(self) -> bool:
        """Whether the number of rows need not be known."""
        return self.size == 1  # a row at a time is the same however many there are

    def is_whole(self, length: int) -> bool:
        """Whether so many rows are certainly mapped at once."""
        return not is_symbolic(length) and length <= self.size

    def chunks(self, length: int) -> Chunks:
        """The chunks of so many rows, as far as that is known."""
        parts = self.parts if self.parts <= self.size else 1
        found = equal_chunks(length // parts, self.size // parts)
        return Chunks(length, found.size * parts, found.count, found.rest * parts)

    def in_parts(self, count: int) -> "AtMost":
        """The plan for rows that are in so many parts, each on a device."""
        return dataclasses.replace(self, parts=count)

    def sizes(self, length: int) -> list[int]:
        """All sizes that chunks can have, if these are known."""
        chunks = self.chunks(length)
        return [chunks.size, *[chunks.rest] * bool(chunks.rest)]

    def loop(self, f: ChunkFunction) -> ChunkLoop:
        """How to run a map."""
        return ChunkLoop(f, self.chunks(f.length), self.unroll)

    def loop_storing(
        self, f: ChunkFunction, policy: Saveable, marks: MarkPair
    ) -> ChunkLoop:
        """How to run one whose marked inputs are differentiated, under a policy."""
        return self.loop(f)
