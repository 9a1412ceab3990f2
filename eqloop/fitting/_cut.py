"""A program in parts, each of which can be run in several ways."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex

from .._arrays import Flags, as_arrays
from .._programs import (
    moving_variables,
    pruned,
    said,
    value_of,
    without_array_literals,
)
from .._types import Value
from ..rescheduling import with_open_loops
from ._by_rows import without_hints
from ._choice import Choice
from ._maxima import with_maxima_by_axis
from ._options import (
    TWICE,
    Way,
    choice_among,
    options_at_once,
    options_of_parts,
    roles_of,
    run_parts,
)
from ._parts import Part, Split, part_at_once, parts_of
from ._written import flattened


@dataclasses.dataclass(frozen=True)
class Cut:
    """A program, cut into parts.

    Attributes:
        program: The program, in which nothing is called.
        split: Which of its parts can be run by rows.
        is_at_once: Whether all of it is one part, whatever is in it.
    """

    program: jex.ClosedJaxpr
    parts: tuple[Part, ...]
    split: Split = "nowhere"
    is_at_once: bool = False

    @classmethod
    def of(cls, program: jex.ClosedJaxpr, split: Split = "nowhere") -> "Cut":
        """Cuts a program, so that some parts can be run by rows if they are split."""
        flat = _flat(program)
        if split != "nowhere":
            flat = pruned(with_maxima_by_axis(without_hints(flat)))
        return cls(flat, tuple(parts_of(flat, split)), split)

    @classmethod
    def at_once(cls, program: jex.ClosedJaxpr) -> "Cut":
        """A program as a single part."""
        flat = _flat(program)
        return cls(flat, (part_at_once(flat),), is_at_once=True)

    @classmethod
    def run_by(cls, ways: Sequence[Way], program: jex.ClosedJaxpr) -> "Cut":
        """The program in the parts that are run in these ways."""
        if ways == (TWICE,):
            return cls.at_once(program)
        found: list[Split] = [way.split for way in ways if way.rows or way.inside]
        return cls.of(program, found[0]) if found else cls.of(program)

    @property
    def has_rows(self) -> bool:
        """Whether a part can be run some rows at a time."""
        return any(part.by_rows is not None for part in self.parts)

    def run(
        self, ways: Sequence[Way], inputs: Sequence[Value], marks: Flags
    ) -> list[Value]:
        """Runs the program, each part in its way."""
        jaxpr = self.program.jaxpr
        known = dict(zip(jaxpr.invars, inputs, strict=True))
        known |= zip(jaxpr.constvars, as_arrays(self.program.consts), strict=True)
        run_parts(self.parts, ways, roles_of(self.parts, *self._moving(marks)), known)
        is_literal = lambda x: isinstance(x, jex.Literal)
        return [value_of(x) if is_literal(x) else known[x] for x in jaxpr.outvars]

    def takes(self, ways: Sequence[Way]) -> bool:
        """Whether these are ways to run such parts."""
        return len(ways) == len(self.parts) and all(map(Way.fits, ways, self.parts))

    def choice(self, marks: Flags, host: int = 0) -> tuple[list[list[Way]], Choice]:
        """The ways to run each part, the fastest first, and what they take.

        `marks` has the inputs to differentiate; `host` bytes may be stored on the host.
        """
        roles = roles_of(self.parts, *self._moving(marks))
        if self.is_at_once:
            found = list(map(options_at_once, self.parts, roles))
        else:
            found = options_of_parts(self.parts, roles, host)
        jaxpr = self.program.jaxpr
        return choice_among(found, self.parts, (*jaxpr.invars, *jaxpr.constvars), host)

    def _moving(self, marks: Flags) -> tuple[set[Any], set[Any]]:
        """The variables that are differentiated, and the inputs among them."""
        moving = moving_variables(self.program, marks)
        return moving, moving.intersection(self.program.jaxpr.invars)


def _flat(program: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """A program with the equations of what it calls in place of the calls."""
    return without_array_literals(flattened(program, checkpoints=True))


def advice(cut: Cut) -> str:
    """What to do about a function whose gradient takes too much."""
    smaller = "make that smaller, by smaller batches for example"
    if takes_gradient(cut.program):
        return (
            "it takes a gradient itself, of which nothing is decided. If that is the "
            f"one, put `Fit` inside, `jax.grad(el.Fit(f, …))`; or {smaller}"
        )
    # Also of loops that are in the rows of a part.
    loops = lambda program: [part for part in Cut.of(program).parts if part.is_loop]
    with_foreign = loops(with_open_loops(cut.program))
    is_same = len(with_foreign) == len(loops(cut.program))
    foreign = (part for part in with_foreign if str(part.loop_name).startswith("lax."))
    if is_same or (loop := next(foreign, None)) is None:
        return smaller
    return (
        f"pass `foreign=True`, so that `Fit` decides for loops of JAX as well, such as "
        f"the {loop.loop_name} at {loop.place or 'an unknown line'}; or {smaller}"
    )


def where_rows_meet(cut: Cut) -> str:
    """A sentence on the operation after which rows are not by themselves any more."""
    if sum(part.by_rows is not None for part in cut.parts) < 2:
        return ""
    k = next(i for i, part in enumerate(cut.parts) if part.by_rows)
    first, later = cut.parts[k], cut.parts[k + 1 :]
    assert first.by_rows is not None
    sums = {x for x, rows in first.by_rows.outs if rows is None}
    meet = [eqn for eqn in first.eqns if not sums.isdisjoint(eqn.outvars)]
    given, read = set(map(id, first.gives)), lambda eqn: set(map(id, eqn.invars))
    meet += [eqn for part in later for eqn in part.eqns if given & read(eqn)]
    return f" Its {first.by_rows.length} rows see each other in {said(meet[0])}."


def takes_gradient(program: jex.ClosedJaxpr) -> bool:
    """Whether a function takes a gradient itself."""
    scopes = (str(e.source_info.name_stack) for e in program.jaxpr.eqns)
    return any("transpose(" in scope for scope in scopes)
