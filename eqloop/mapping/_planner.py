"""How the rows of a map are cut: as it was asked for, or so that they fit."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.extend.core as jex

from .._axes import is_symbolic
from .._bytes import format_bytes
from .._equations import equations
from .._partition import pick, put
from .._tangents import is_inexact
from ..checkpointing.engine._forward import Saveable
from ..checkpointing.planning._compiled import temporary_bytes
from ._chunks import equal_chunks
from ._derivatives import Marks
from ._fitting import largest_that_fits
from ._rows import Rows
from ._stored import run_stored
from ._sweep import Sweep


class Planner(Protocol):
    """What a map needs to know in order to be run."""

    @property
    def takes_any_length(self) -> bool:
        """Whether the number of rows need not be known."""
        ...

    def in_exact_chunks(self) -> "Planner":
        """The same with each row in one chunk only.

        A row that is in two has half of its cotangent in each, which is for what is
        linear in it.
        """
        ...

    def is_whole(self, length: int) -> bool:
        """Whether it is certain that so many rows are mapped at once."""
        ...

    def probe(self, length: int) -> tuple[int, bool]:
        """A size of chunk of so many rows, and whether it has `visits`, see `Rows`."""
        ...

    def sweep(self, rows: Rows) -> Sweep:
        """How to run a map."""
        ...

    def sweep_storing(self, rows: Rows, policy: Saveable, marks: Marks) -> Sweep:
        """The same, for the gradient of the marked inputs, where a policy stores."""
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

    def sweep(self, rows: Rows) -> Sweep:
        chunks = equal_chunks(rows.length, self.size, exact=self.exact)
        return Sweep(rows, chunks, self.unroll)

    def sweep_storing(self, rows: Rows, policy: Saveable, marks: Marks) -> Sweep:
        return self.sweep(rows)


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

    def sweep(self, rows: Rows) -> Sweep:
        return self._largest(rows, lambda sweep: (sweep.run, rows.in_types), "run")

    def sweep_storing(self, rows: Rows, policy: Saveable, marks: Marks) -> Sweep:
        def program(sweep: Sweep) -> _Program:
            cts = [list(filter(is_inexact, group)) for group in rows.out_types]

            def gradient(consts: Any, xs: Any, cts: Any) -> Any:
                def run(*marked: Any) -> Any:
                    merged = map(put, (consts, xs), marks, marked)
                    out, *_ = run_stored(sweep, policy, *merged)
                    return [list(filter(is_inexact, group)) for group in out]

                return jax.vjp(run, *map(pick, (consts, xs), marks))[1](cts)

            return gradient, (*rows.in_types, cts)

        return self._largest(rows, program, (policy, marks))

    def _largest(
        self, rows: Rows, program: Callable[[Sweep], "_Program"], kind: Any
    ) -> Sweep:
        search = _Search(
            str(rows.program(*rows.probe)),
            (rows.length, rows.x_axes, rows.y_axes, rows.shares, kind),
            jax.default_backend(),
            self,
            rows,
            program,
        )
        size, least = _found(search)
        if size == 0:
            raise ValueError(
                f"Budget: to map a single row takes {format_bytes(least)}, which is "
                f"{least} bytes and the least that would do, but the budget is "
                f"{format_bytes(self.nbytes)}."
            )
        return self.in_chunks_of(size, rows)

    def in_chunks_of(self, size: int, rows: Rows) -> Sweep:
        """The map in chunks of at most so many rows."""
        return AtMost(size, self.exact).sweep(rows)


_Program = tuple[Callable[..., Any], tuple[Any, ...]]


@dataclasses.dataclass(frozen=True)
class _Search:
    """Functions of rows that print alike are alike, as far as memory goes."""

    text: str
    layout: tuple[Any, ...]
    backend: str
    within: Within
    rows: Rows = dataclasses.field(compare=False)
    program: Callable[[Sweep], _Program] = dataclasses.field(compare=False)


@functools.lru_cache(maxsize=512)
def _found(search: _Search) -> tuple[int, int]:
    """The largest size that fits, or 0, and the bytes that it or the least takes."""

    def bytes_of(size: int) -> int:
        sweep = search.within.in_chunks_of(size, search.rows)
        run, types = search.program(sweep)
        measured = temporary_bytes(run, *types)
        if measured is None:
            return _intermediate_bytes(jax.make_jaxpr(run)(*types).jaxpr)
        return measured

    return largest_that_fits(search.rows.length, search.within.nbytes, bytes_of)


def _intermediate_bytes(jaxpr: Any) -> int:
    """The bytes of all that a program computes, as if nothing were ever freed."""
    inside = lambda eqn: list(jex.jaxprs_in_params(eqn.params))
    return sum(
        math.prod(var.aval.shape) * var.aval.dtype.itemsize
        for eqn in equations(jaxpr, inside)
        if not inside(eqn)
        for var in eqn.outvars
    )
