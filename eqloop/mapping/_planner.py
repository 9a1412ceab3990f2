"""How the rows of a map are cut into chunks: of a given size, or by a budget."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Protocol

import jax

from .._arrays import is_inexact, is_symbolic, pick, put
from .._calls import as_count, format_bytes
from .._compat import programs_held
from .._programs import aval_of, equations, temporary_bytes
from .._types import AnyJaxpr, Aval, PyTree
from ..checkpointing import (
    Budget,
    Saveable,
    is_budget,
    refuse_second_place,
    unlisted,
)
from ._chunk_derivatives import MarkPair
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
        that is not linear in the cotangent would not add up.
        """
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

    def is_whole(self, length: int) -> bool:
        return length == 0

    def probe(self, length: int) -> tuple[int, bool]:
        return length, False

    def loop(self, f: ChunkFunction) -> ChunkLoop:
        return self._largest(f, lambda loop: (loop.run, f.in_types), "run")

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

        return self._largest(f, program, (policy, marks))

    def _largest(
        self,
        f: ChunkFunction,
        program: Callable[[ChunkLoop], "_Measured"],
        kind: PyTree,
    ) -> ChunkLoop:
        search = _Search(
            str(f.program(*f.probe)),
            (f.length, f.x_axes, f.y_axes, f.shares, kind),
            jax.default_backend(),
            self,
            f,
            program,
        )
        size, least = _found(search)
        if size == 0:
            raise ValueError(
                f"Budget: a single row takes {format_bytes(least)}, which is {least} "
                f"bytes, but the budget is {format_bytes(self.nbytes)}."
            )
        return self.in_chunks_of(size, f)

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


@functools.lru_cache(maxsize=512)
def _found(search: _Search) -> tuple[int, int]:
    """The largest size that fits, or 0, and the bytes of that or of the least size."""

    def bytes_of(size: int) -> int:
        loop = search.within.in_chunks_of(size, search.f)
        run, types = search.program(loop)
        with unlisted():
            measured = temporary_bytes(run, *types)
        if measured is None:
            return _intermediate_bytes(jax.make_jaxpr(run)(*types).jaxpr)
        return measured

    return largest_that_fits(search.f.length, search.within.nbytes, bytes_of)


def _intermediate_bytes(jaxpr: AnyJaxpr) -> int:
    """The bytes of all values in a program, as if nothing were ever freed.

    It is for programs that cannot be compiled by themselves.
    """
    inside = programs_held
    return sum(
        math.prod(aval_of(var).shape) * aval_of(var).dtype.itemsize
        for eqn in equations(jaxpr, inside)
        if not inside(eqn)
        for var in eqn.outvars
    )
