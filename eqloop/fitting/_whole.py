"""The whole gradient of a function, compiled for some of the ways to run its parts."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from .._arrays import Flags, is_inexact, pick, put, split
from .._calls import format_bytes
from .._compiled import largest_array
from .._programs import temporary_bytes
from .._types import Aval, PyTree, Value
from ..checkpointing import (
    can_be_run,
    key_of,
    recall,
    remember,
    run_times,
    says_what_is_found,
)
from ._choice import Choice, Chosen
from ._cut import Cut
from ._options import EVERYTHING, Way

# Another is not tried if it should save less than this part of the time.
WORTHWHILE = 0.05


@dataclasses.dataclass(frozen=True)
class Decision:
    """What was decided for a function.

    Attributes:
        peak_bytes: The bytes that the gradient takes besides inputs and outputs.
        is_compiled: Whether the compiler says so, or it is estimated.
        seen: How long it was seen to take, relative to storing everything, if it was.
    """

    whole: "Whole"
    ways: tuple[Way, ...]
    peak_bytes: int
    is_compiled: bool
    chosen: Chosen
    seen: float | None = None

    @property
    def relative_time(self) -> float:
        """How long it takes, relative to storing everything."""
        whole = self.whole.time_of_everything
        return self.seen or self.choice.nanoseconds(self.chosen) / whole

    @property
    def cut(self) -> Cut:
        """The program, in its parts."""
        return self.whole.cut

    @property
    def choice(self) -> Choice:
        """The ways to run each part, and what they take."""
        return self.whole.choice

    @property
    def is_fastest(self) -> bool:
        """Whether everything is stored of each part."""
        return not any(self.chosen) and self.whole.plain is None


@dataclasses.dataclass(frozen=True)
class Whole:
    """The whole gradient of a function, in any of the ways to run its parts.

    Attributes:
        most: How many bytes it may take; how many more it takes need not be exact.
        plain: The same in other parts, if by the fastest ways not all is stored here.
    """

    cut: Cut
    marks: Flags
    types: tuple[Aval, ...]
    host: int = 0
    most: float = math.inf
    plain: "Whole | None" = None
    tried: list[Decision] = dataclasses.field(default_factory=list, compare=False)

    @functools.cached_property
    def _found(self) -> tuple[list[list[Way]], Choice]:
        return self.cut.choice(self.marks, self.host)

    @property
    def ways(self) -> list[list[Way]]:
        """The ways to run each part, the fastest first."""
        return self._found[0]

    @property
    def choice(self) -> Choice:
        """What these take."""
        return self._found[1]

    @property
    def time_of_everything(self) -> float:
        """How long it takes if everything is stored, in nanoseconds."""
        choice = (self.plain or self).choice
        return choice.nanoseconds(choice.fastest) or 1.0

    def decision(self, chosen: Chosen, is_exact: bool = True) -> Decision:
        """What it is to choose these ways, of which the whole is compiled.

        If not exact, it may take a little more where nobody wants the value.
        """
        return self._decision(self._ways(chosen), chosen, is_exact)

    def without_any(self) -> Decision:
        """What it is to decide nothing."""
        ways = (EVERYTHING,) * len(self.ways)
        return self._decision(ways, self.choice.fastest)

    def _decision(
        self, ways: tuple[Way, ...], chosen: Chosen, is_exact: bool = True
    ) -> Decision:
        size = self.nbytes(ways, is_exact)
        estimated = self.choice.peak(chosen) if size is None else size
        is_known = size is not None
        self.tried.append(Decision(self, ways, estimated, is_known, chosen))
        return self.tried[-1]

    def nbytes(self, ways: tuple[Way, ...], is_exact: bool = True) -> int | None:
        """The bytes that it takes, as its compiler says, if it does."""
        size = self._told(ways, with_value=True)
        is_by_rows = sum(way.rows is not None for way in ways) > 1
        if size is None or not (is_exact and is_by_rows) or size > self.most:
            return size
        # Where nobody wants the value, XLA leaves out some of the loops over rows, and
        # may find less room for the others.
        return max(size, self._told(ways, with_value=False) or 0)

    def _told(self, ways: tuple[Way, ...], with_value: bool) -> int | None:
        key = self._key(ways) if with_value else key_of((self._key(ways), "alone"))
        if (known := recall(key)) is not None:
            return int(known["bytes"])
        if (size := self._bytes(ways, with_value)) is not None:
            says_what_is_found("Fit", format_bytes(size))
            remember({key: {"bytes": float(size)}})
        return size

    def largest_of(self, decision: Decision) -> str:
        """A sentence on the largest array in the gradient, if its compiler tells."""
        if not decision.is_compiled:
            return ""
        gradient = self._gradient(decision.ways)
        return largest_array(lambda inputs: gradient(*inputs), self._inputs)

    def time_over(self, chosen: Chosen, other: "Decision") -> float | None:
        """How long it takes, over the time of another decision; `None` if unknown."""
        if not can_be_run(self.cut.program):
            return None
        key = key_of((self._key(self._ways(chosen)), other.whole._key(other.ways)))
        if (known := recall(key)) is None:
            gradient = other.whole._gradient(other.ways)
            both = [gradient, self._gradient(self._ways(chosen))]
            if (seen := run_times(both, self._inputs)) is None:
                return None
            (other_time, other_scatter), (time, scatter) = seen
            # Noise does not decide.
            most_likely = time * (1 + scatter + other_scatter)
            remember({key: (known := {"factor": most_likely / other_time})})
        return known["factor"]

    def is_known(self, chosen: Chosen) -> bool:
        """Whether the whole was compiled before."""
        return recall(self._key(self._ways(chosen))) is not None

    def _ways(self, chosen: Chosen) -> tuple[Way, ...]:
        return tuple(of[i] for of, i in zip(self.ways, chosen, strict=True))

    def _key(self, ways: tuple[Way, ...]) -> str:
        sizes = tuple(len(part.eqns) for part in self.cut.parts)
        return key_of((self.cut.program, sizes, self.marks, self.types, ways))

    def _bytes(self, ways: Sequence[Way], with_value: bool) -> int | None:
        gradient = self._gradient(ways)
        run = gradient if with_value else lambda *inputs: gradient(*inputs)[1]
        return temporary_bytes(run, *self._inputs)

    @property
    def _inputs(self) -> list[Aval]:
        """The types of the inputs of the gradient: those of the function, and more."""
        return [*self.types, *(aval.to_tangent_aval() for aval in self._given)]

    @property
    def _given(self) -> list[Aval]:
        """The outputs whose cotangents are given. That of a loss is one."""
        return [x for x in self.cut.program.out_avals if is_inexact(x) and x.shape]

    def _gradient(self, ways: Sequence[Way]) -> Callable[..., PyTree]:
        wanted = list(map(is_inexact, self.cut.program.out_avals))

        def gradient(*inputs: Value) -> PyTree:
            flat, given = split(inputs, len(self.types))

            def moving(*moving: Value) -> PyTree:
                outs = self.cut.run(ways, put(flat, self.marks, moving), self.marks)
                return pick(outs, wanted), outs

            _, pull, outs = jax.vjp(moving, *pick(flat, self.marks), has_aux=True)
            rest = iter(given)
            cts = [
                next(rest) if x.shape else jnp.ones_like(x) for x in pick(outs, wanted)
            ]
            return outs, pull(cts)

        return gradient
