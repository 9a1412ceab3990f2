"""How the rows of a map are cut into chunks: of a given size, or by a budget."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Protocol

import jax

from .._arrays import is_inexact, is_symbolic, pick, put
from .._calls import as_count, format_bytes
from .._programs import aval_of, equations, foreign_programs, temporary_bytes
from .._types import AnyJaxpr, Aval, PyTree
from ..checkpointing import (
    Budget,
    Saveable,
    is_budget,
    refuse_second_place,
    unlisted,
)
from ._chunk_derivatives import MarkPair, pulled_function
from ._chunk_function import ChunkFunction
from ._chunk_loop import ChunkLoop
from ._chunks import equal_chunks
from ._fitting import largest_that_fits
from ._stored import run_stored


class ChunkPlanner(Protocol):
    """What a map asks of its `chunk_size`."""

    @property
    def takes_any_length(self) -> bool:
        """Whether the number of rows need not be known."""
        ...

    def in_exact_chunks(self) -> "ChunkPlanner":
        """The same with each row in one chunk only.

        A row in two chunks has half of its cotangent in each. A custom backward rule
        that is not linear in the cotangent would not add up. And if a row can see its
        chunk, it has another value in each.
        """
        ...

    def has_same_chunks(self, length: int) -> bool:
        """Whether each row is in one chunk, and the same for all derivatives."""
        ...

    def is_whole(self, length: int) -> bool:
        """Whether so many rows are certainly mapped at once."""
        ...

    def probe(self, length: int) -> tuple[int, bool]:
        """The `probe` of a `ChunkFunction`."""
        ...

    def loop(self, f: ChunkFunction) -> ChunkLoop:
        """How to run a map."""
        ...

    def loop_storing(
        self, f: ChunkFunction, policy: Saveable, marks: MarkPair
    ) -> ChunkLoop:
        """The same for a gradient of the marked inputs, under a policy."""
        ...


@dataclasses.dataclass(frozen=True)
class AtMost:
    """At most so many rows at once."""

    size: int
    exact: bool
    unroll: int = 1

    @property
    def takes_any_length(self) -> bool:
        return self.size == 1  # a row at a time is the same however many there are

    def in_exact_chunks(self) -> "AtMost":
        return dataclasses.replace(self, exact=True)

    def has_same_chunks(self, length: int) -> bool:
        return equal_chunks(length, self.size, exact=self.exact).overlap == 0

    def is_whole(self, length: int) -> bool:
        return not is_symbolic(length) and length <= self.size

    def probe(self, length: int) -> tuple[int, bool]:
        chunks = equal_chunks(length, self.size, exact=self.exact)
        return chunks.size, chunks.overlap > 0

    def loop(self, f: ChunkFunction) -> ChunkLoop:
        chunks = equal_chunks(f.length, self.size, exact=self.exact)
        return ChunkLoop(f, chunks, self.unroll)

    def loop_storing(
        self, f: ChunkFunction, policy: Saveable, marks: MarkPair
    ) -> ChunkLoop:
        return self.loop(f)


@dataclasses.dataclass(frozen=True)
class Within:
    """As many rows at once as fit into so many bytes.

    To find out, maps in chunks of a few sizes are compiled, and never run.
    """

    nbytes: int
    exact: bool

    @property
    def takes_any_length(self) -> bool:
        return False

    def in_exact_chunks(self) -> "Within":
        return dataclasses.replace(self, exact=True)

    def has_same_chunks(self, length: int) -> bool:
        return False

    def is_whole(self, length: int) -> bool:
        return length == 0

    def probe(self, length: int) -> tuple[int, bool]:
        return length, False

    def loop(self, f: ChunkFunction) -> ChunkLoop:
        search = self._search(f, _whole_map, "run")
        if f.origin is None:
            return self.in_chunks_of(self._fitting(*_found(search)), f)
        size = self._fitting(*self._size_for_all(f.origin))
        taken = _bytes_of(search, size)
        if taken > self.nbytes:
            raise ValueError(
                f"Budget: f can see which rows it is mapped with (by `unvmap`, a "
                f"`custom_vmap`, or a key of `rbg`), so its value and its derivatives "
                f"have the same chunks, of {size} rows. This derivative takes "
                f"{format_bytes(taken)} in them, which is {taken} bytes, but the "
                f"budget is {format_bytes(self.nbytes)}. Give a number of rows as "
                f"`chunk_size`."
            )
        return self.in_chunks_of(size, f)

    def loop_storing(
        self, f: ChunkFunction, policy: Saveable, marks: MarkPair
    ) -> ChunkLoop:
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
        search = self._search(f, program, (policy, marks))
        return self.in_chunks_of(self._fitting(*_found(search)), f)

    def _size_for_all(self, f: ChunkFunction) -> tuple[int, int]:
        """The size of chunks in which both the value and the gradient fit.

        It is that of the value alone if there is no gradient, or none that fits. As in
        `_found`, it comes with its bytes.
        """
        value = _found(self._search(f, _whole_map, "run"))
        marks, wanted = (
            tuple(tuple(map(is_inexact, group)) for group in groups)
            for groups in ((f.const_types, f.x_types), f.out_types)
        )
        if not any(map(any, marks)) or not any(map(any, wanted)):
            return value
        try:
            gradient = pulled_function(f, marks, wanted)
            found = _found(self._search(gradient, _whole_map, "run"))
        except Exception:
            return value  # whoever asks for this gradient gets the error
        return min(value, found) if found[0] else value

    def _fitting(self, size: int, least: int) -> int:
        """A size that was found, if there is one."""
        if size == 0:
            raise ValueError(
                f"Budget: a single row takes {format_bytes(least)}, which is {least} "
                f"bytes, but the budget is {format_bytes(self.nbytes)}."
            )
        return size

    def _search(
        self,
        f: ChunkFunction,
        program: Callable[[ChunkLoop], "_Measured"],
        kind: PyTree,
    ) -> "_Search":
        return _Search(
            str(f.program(*f.probe)),
            (f.length, f.x_axes, f.y_axes, f.shares, kind),
            jax.default_backend(),
            self,
            f,
            program,
        )

    def in_chunks_of(self, size: int, f: ChunkFunction) -> ChunkLoop:
        """The map in chunks of at most so many rows."""
        return AtMost(size, self.exact).loop(f)


def as_chunk_size(owner: str, what: str, size: object) -> int | Budget:
    """Makes an `int` of a number of rows, and takes a `Budget` as it is."""
    if not is_budget(size):
        return as_count(owner, "chunk_size", what, size)
    refuse_second_place(owner, size)
    return size


def planner_for(size: int | Budget, exact: bool) -> ChunkPlanner:
    """The planner for a `chunk_size` as the user gives it."""
    return AtMost(size, exact) if isinstance(size, int) else Within(size.nbytes, exact)


_Measured = tuple[Callable[..., Any], tuple[Any, ...]]


@dataclasses.dataclass(frozen=True)
class _Search:
    """A search for the largest size of chunk, as a key of a cache.

    Functions that print alike take the same memory, so they share the result, and `f`
    and `program` are not compared.
    """

    text: str
    layout: tuple[Aval, ...]
    backend: str
    within: Within
    f: ChunkFunction = dataclasses.field(compare=False)
    program: Callable[[ChunkLoop], _Measured] = dataclasses.field(compare=False)


def _whole_map(loop: ChunkLoop) -> _Measured:
    """The map itself."""
    return loop.run, loop.f.in_types


@functools.lru_cache(maxsize=512)
def _found(search: _Search) -> tuple[int, int]:
    """The largest size that fits, or 0, and the bytes of that or of the least size."""
    return largest_that_fits(
        search.f.length,
        search.within.nbytes,
        functools.partial(_bytes_of, search),
    )


@functools.lru_cache(maxsize=512)
def _bytes_of(search: _Search, size: int) -> int:
    """The bytes that the program takes with chunks of a size."""
    loop = search.within.in_chunks_of(size, search.f)
    run, types = search.program(loop)
    with unlisted():
        measured = temporary_bytes(run, *types)
    if measured is None:
        return _intermediate_bytes(jax.make_jaxpr(run)(*types).jaxpr)
    return measured


def _intermediate_bytes(jaxpr: AnyJaxpr) -> int:
    """The bytes of all values in a program, as if nothing were ever freed.

    It is for programs that cannot be compiled by themselves.
    """
    return sum(
        math.prod(aval_of(var).shape) * aval_of(var).dtype.itemsize
        for eqn in equations(jaxpr, foreign_programs)
        if not foreign_programs(eqn)
        for var in eqn.outvars
    )
