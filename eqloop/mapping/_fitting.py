"""The largest chunks that fit into a budget.

Programs of a few sizes are compiled, and never run. Which sizes is decided by
`largest_that_fits`, in plain Python.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import jax

from .._arrays import Flags, is_inexact, nbytes, pick, put, refuse_symbolic_sizes
from .._calls import exact_bytes, format_bytes, format_limit
from .._programs import aval_of, digest_of, equations, foreign_programs, temporary_bytes
from .._types import AnyJaxpr, PyTree
from ..checkpointing import (
    Saveable,
    key_of,
    recall,
    remember,
    says_if_long,
    unlisted,
)
from ._chunk_derivatives import vjp_function
from ._chunk_function import ChunkFunction, MarkPair
from ._chunk_loop import AtMost, ChunkLoop, Chunks, equal_chunks, run_stored


@dataclasses.dataclass(frozen=True)
class Within:
    """As many rows at once as fit into so many bytes."""

    # To find out, maps in chunks of a few sizes are compiled, and never run.

    nbytes: int
    has_same_chunks = takes_any_length = False

    def is_whole(self, length: int) -> bool:
        return length == 0

    def chunks(self, length: int) -> Chunks:
        return Chunks(length, length, 1)

    def in_parts(self, count: int) -> "Within":
        return self

    def sizes(self, length: int) -> list[int]:
        return []

    def loop(self, f: ChunkFunction) -> ChunkLoop:
        _refuse_symbolic(f)
        bytes_of = _bytes_by_size(f, _whole_map, "run")
        if f.origin is None:
            return AtMost(self._fitting(*self._found(f, bytes_of))).loop(f)
        size = self._fitting(*self._size_for_all(f.origin))
        taken = bytes_of(size)
        if taken > self.nbytes:
            raise ValueError(
                f"Budget: f can see which rows it is mapped with (by `unvmap`, a "
                f"`custom_vmap`, or a key of `rbg`), so its value and its derivatives "
                f"have the same chunks, of {size} rows. This derivative takes "
                f"{format_bytes(taken)} in them, which is {taken} bytes, but the "
                f"budget is {format_limit(self.nbytes)}. Give a number of rows as "
                f"`chunk_size`."
            )
        return AtMost(size).loop(f)

    def loop_storing(
        self, f: ChunkFunction, policy: Saveable, marks: MarkPair
    ) -> ChunkLoop:
        _refuse_symbolic(f)

        def program(loop: ChunkLoop) -> _Measured:
            cts = [list(filter(is_inexact, group)) for group in f.out_types]

            def gradient(consts: PyTree, xs: PyTree, cts: PyTree) -> PyTree:
                def run(*marked: PyTree) -> PyTree:
                    merged = map(put, (consts, xs), marks, marked)
                    out, *_ = run_stored(loop, policy, *merged)
                    return [list(filter(is_inexact, group)) for group in out]

                return jax.vjp(run, *map(pick, (consts, xs), marks))[1](cts)

            return gradient, (*f.in_types, cts)

        # Value and derivative are in one program here, so they have the same chunks.
        bytes_of = _bytes_by_size(f, program, (policy, marks))
        return AtMost(self._fitting(*self._found(f, bytes_of))).loop(f)

    def _size_for_all(self, f: ChunkFunction) -> tuple[int, int]:
        """The size of chunks in which both the value and the gradient fit."""
        # It is that of the value alone if there is no gradient, or none that fits. As
        # in `_found`, it comes with its bytes.
        value = self._found(f, _bytes_by_size(f, _whole_map, "run"))
        # Nobody knows yet by which inputs the gradient will be taken. If that by all of
        # them does not fit, it may be one without the large consts. A loop over chunks
        # holds each of their cotangents twice: the sum, and the part of one chunk.
        every = (True,) * len(f.const_types)
        small = tuple(2 * nbytes([aval]) <= self.nbytes for aval in f.const_types)
        for consts in dict.fromkeys((every, small)):
            found = self._gradient_found(f, consts)
            if found is not None and found[0]:
                return min(value, found)
        return value

    def _gradient_found(
        self, f: ChunkFunction, consts: Flags
    ) -> tuple[int, int] | None:
        """The size for the gradient by all `xs` and some consts, if there is any."""
        of_consts = map(is_inexact, f.const_types)
        marks = (
            tuple(a and b for a, b in zip(consts, of_consts, strict=True)),
            tuple(map(is_inexact, f.x_types)),
        )
        wanted = tuple(tuple(map(is_inexact, group)) for group in f.out_types)
        if not any(map(any, marks)) or not any(map(any, wanted)):
            return None
        gradient = vjp_function(f, marks, wanted)
        try:
            gradient.program(gradient.probe)
        except Exception:
            return None  # whoever asks for this gradient gets the error
        # Under `vmap`, this is the gradient of the batch. A batch of gradients was seen
        # to take a third more.
        within = dataclasses.replace(self, nbytes=2 * self.nbytes // 3)
        return within._found(gradient, _bytes_by_size(gradient, _whole_map, "run"))

    def _fitting(self, size: int, least: int) -> int:
        """A size that was found, if there is one."""
        if size == 0:
            raise ValueError(
                f"Budget: a single row takes {format_bytes(least)}, which is {least} "
                f"bytes, but the budget is {format_limit(self.nbytes)}."
            )
        return size

    def _found(
        self, f: ChunkFunction, bytes_of: Callable[[int], int]
    ) -> tuple[int, int]:
        """A size that fits, or 0, and the bytes of that or of the least size."""
        owner = f"Budget({exact_bytes(self.nbytes)!r})"
        what = f"a map over {f.length} rows"
        with says_if_long(owner, what, "the map in chunks of a few sizes"):
            return largest_that_fits(f.length, self.nbytes, bytes_of)


# What a map asks of its `chunk_size`: the methods that both of these have.
ChunkPlanner: TypeAlias = AtMost | Within


def _refuse_symbolic(f: ChunkFunction) -> None:
    """Checks that all sizes are known, so that bytes are."""
    instead = "Give a number of rows as `chunk_size`"
    types = [aval for group in (*f.in_types, *f.out_types) for aval in group]
    refuse_symbolic_sizes("Budget", types, "the size of an array in a row", instead)


_Measured = tuple[Callable[..., Any], tuple[Any, ...]]


def _whole_map(loop: ChunkLoop) -> _Measured:
    return loop.run, loop.f.in_types


def _bytes_by_size(
    f: ChunkFunction, program: Callable[[ChunkLoop], _Measured], kind: PyTree
) -> Callable[[int], int]:
    """What the program of a map takes with chunks of a size."""
    # Functions that say the same take the same memory, in other processes as well.
    about = digest_of(f.program(f.probe)), f.length, f.x_axes, f.y_axes, f.sums, kind

    def bytes_of(size: int) -> int:
        key = key_of([*about, size])
        if (fact := recall(key)) is not None:
            return round(fact["bytes"])
        run, types = program(AtMost(size).loop(f))
        with unlisted():
            measured = temporary_bytes(run, *types)
        if measured is None:
            return _intermediate_bytes(jax.make_jaxpr(run)(*types).jaxpr)
        remember({key: {"bytes": measured}})
        return measured

    return bytes_of


def _intermediate_bytes(jaxpr: AnyJaxpr) -> int:
    """The bytes of all values in a program, as if nothing were ever freed."""
    # It is for programs that cannot be compiled by themselves.
    return sum(
        nbytes(map(aval_of, eqn.outvars))
        for eqn in equations(jaxpr, foreign_programs)
        if not foreign_programs(eqn)
    )


# Once this full, it is not worth compiling another program: rows take as long in chunks
# of half the size. A guess is somewhat smaller than what a line says, to fit at once.
_FULL, _AIM = 0.5, 0.9


def largest_that_fits(
    length: int, limit: int, bytes_of: Callable[[int], int]
) -> tuple[int, int]:
    """A large size of equal chunks that take no more bytes than a limit.

    >>> largest_that_fits(1000, 5000, lambda size: 100 + 20 * size)
    (200, 4100)
    >>> largest_that_fits(1000, 50, lambda size: 100 + 20 * size)
    (0, 120)
    """
    # Each size that is tried is a program to compile. The next size is where a straight
    # line through two known ones meets the limit; if this is slow, it is halfway
    # between one that fits and one that does not. The search ends with a size that
    # takes half of the limit, or whose next larger one is too large.
    known = {0: 0}
    low, high, size = 0, length + 1, length
    while low < size < high:
        # `low` fits, `high` does not. From the fourth try on, every second one bisects:
        # memory may jump, and then a line is a bad guess again and again.
        is_slow = len(known) > 3 and len(known) % 2 == 0
        known[size] = bytes_of(size)
        if known[size] <= limit:
            low = size
        else:
            high = size
        if low == length or known[low] >= _FULL * limit:
            break
        guess = (
            (low + high) // 2 if is_slow else _crossing(_AIM * limit, low, high, known)
        )
        size = equal_chunks(length, max(guess, 1)).size
        if not low < size < high:
            size = _above(length, low)
    return (low, known[low]) if low else (0, known[1])


def _crossing(limit: float, low: int, high: int, known: dict[int, int]) -> int:
    """The size at which a line through two known sizes meets the limit."""
    # One of them is below the limit and one above, if both are known.
    larger = sorted(size for size in known if size >= high)
    first, second = (low, high) if low or len(larger) < 2 else larger[:2]
    rise = (known[second] - known[first]) / (second - first)
    guess = first + int((limit - known[first]) / rise) if rise > 0 else low
    # Two sizes that are both too large give a poor line.
    return guess if low else min(guess, high // 2)


def _above(length: int, size: int) -> int:
    """The next larger size of equal chunks."""
    count = -(-length // size) if size else length + 1
    larger = (
        equal_chunks(length, -(-length // n)).size for n in range(count - 1, 0, -1)
    )
    return next((one for one in larger if one > size), length + 1)
