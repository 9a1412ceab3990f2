"""A function with one budget, as a primitive: it is planned where it is differentiated.

Its tangents, and the function under `vmap`, are functions with the same budget.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax.sharding import NamedSharding

from .._arrays import (
    Flags,
    automatic_sharding,
    is_inexact,
    pick,
    refuse_symbolic_sizes,
    symbolic_sizes,
)
from .._device import DeviceLike, planning_for_call
from .._programs import (
    FITTED,
    Doubled,
    Formula,
    ProgramCall,
    aval_of,
    digest_of,
    meshes_in,
    run,
    warn_once,
)
from .._types import Aval, BatchAxis, PyTree, Value
from ..checkpointing import fitting, says_if_long
from ..progress import Again
from ._cut import Cut, takes_gradient
from ._decision import Limit, Recalled, decided, pinned, recalled
from ._options import Way
from ._whole import Decision

# By which inputs programs were differentiated last, by their digests.
_last_marks = dict[str, Flags]()


class FittedCall(ProgramCall):
    """A call of a program whose gradient is planned.

    Attributes:
        types: The types of its inputs, where these say more of how they are split.
        device: What it is planned for, if it was told.
        ways: How its parts run, if it was told.
        split: Whether parts may run some rows at a time.
    """

    types: tuple[Aval, ...]
    limit: Limit
    device: DeviceLike | None
    ways: tuple[Way, ...] | None
    split: bool
    # What is stored of the loops in it is decided by itself.
    is_decided = True

    def __init__(
        self,
        program: jex.ClosedJaxpr,
        types: tuple[Aval, ...],
        limit: Limit,
        device: DeviceLike | None,
        ways: tuple[Way, ...] | None = None,
        split: bool = True,
    ):
        how = dict(limit=limit, device=device, ways=ways, split=split)
        super().__init__(program, types=types, **how)

    def expand(self, *inputs: Value) -> list[Value]:
        if takes_gradient(self.program):
            warn_once(
                "Fit: nothing is decided for a gradient that the function takes "
                "itself, which is taken as before. If that is the one, put `Fit` "
                "inside: `jax.grad(el.Fit(f, …))`."
            )
        return run(self.program, *inputs)

    def doubled(self, nonzeros: Flags) -> Doubled:
        doubled = super().doubled(nonzeros)
        program = doubled.formula.program
        # Tangents are split as their inputs are.
        dots = program.in_avals[len(self.types) :]
        split = map(automatic_sharding, pick(self.types, nonzeros))
        types = (*self.types, *map(type_split_as, dots, split))
        given = dict(program=program, types=types, ways=None)
        return dataclasses.replace(doubled, formula=self._with(given))

    def differentiated(
        self, marks: Flags
    ) -> Callable[[Sequence[Value]], Sequence[Value]]:
        known = self._decided(marks) or self.decision(marks)
        cut, ways = known.cut, known.ways
        _last_marks[digest_of(self.program)] = marks

        def run_parts(inputs: Sequence[Value]) -> Sequence[Value]:
            with jax.named_scope(FITTED):
                return cut.run(ways, inputs, marks)

        return run_parts

    @property
    def last_marks(self) -> Flags:
        """The inputs by which it was differentiated last, or all that can be."""
        every = tuple(map(is_inexact, self.in_avals))
        return _last_marks.get(digest_of(self.program), every)

    def called(self, f: Callable[..., list[Value]], *flat: Value) -> list[Value]:
        return f(*flat)  # it is not in a loop

    @contextlib.contextmanager
    def planning(self) -> Iterator[None]:
        """A context in which plans are for the device that it will run on."""
        on_device = planning_for_call(self.device, self.types, meshes_in(self.program))
        # JAX traces the rule of a function once, and that is where a program is first
        # looked at: loops in it are left open, too.
        with on_device, fitting():
            yield

    def decision(self, marks: Flags) -> Decision:
        """What each of its parts stores in a gradient by the marked inputs."""
        self.refuse_symbolic()
        with self.planning(), says_if_planning_is_long():
            known = self._decided(marks)
            about = marks, self.types, self.limit.host
            known = known and pinned(known, self.program, about)
            return known or decided(self.program, marks, *self._limits)

    @property
    def _limits(self) -> tuple[Limit, tuple[Aval, ...], bool]:
        return self.limit, self.types, self.split

    def _decided(self, marks: Flags) -> Recalled | None:
        """What it was told, or was decided in an earlier process."""
        self.refuse_symbolic()
        if self.ways is None:
            with self.planning():
                return recalled(self.program, marks, *self._limits)
        cut = Cut.run_by(self.ways, self.program)
        if not cut.takes(self.ways):
            raise ValueError(
                f"Fit: this plan is for another function, or for inputs of other "
                f"sizes: it has {len(self.ways)} parts, and this function "
                f"{len(cut.parts)}. Make a plan for these inputs, by `plan`."
            )
        return Recalled(cut, self.ways, None)

    def refuse_symbolic(self) -> None:
        instead = (
            "Export the gradient for each size by itself, or without `Fit`, with "
            "schedules that do not ask for bytes, such as `el.Recursive()`"
        )
        need = "to decide what its gradient stores"
        refuse_symbolic_sizes("Fit", _values(self.program), need, instead)

    def pull(self, perturbed: PyTree, inputs: PyTree, cts: PyTree) -> PyTree:
        again = self.with_bars(Again())
        return super(FittedCall, again).pull(perturbed, inputs, cts)

    def batched(
        self, axis_data: BatchAxis, args: PyTree, dims: PyTree
    ) -> tuple[Formula, PyTree, list[int | None]]:
        batched, args, out_dims = super().batched(axis_data, args, dims)
        program = batched.jaxprs[0]
        pairs = zip(dims, program.in_avals, self.types, strict=True)
        types = [known if dim is None else aval for dim, aval, known in pairs]
        # What was decided for an example holds for a batch, if that has the same parts.
        ways = self.ways
        if ways is not None and not symbolic_sizes(_values(program)):
            cut = Cut.run_by(ways, program)
            ways = ways if cut.takes(ways) else None
        given = dict(program=program, types=tuple(types), ways=ways)
        return self._with(given), args, out_dims

    def _with(self, given: dict[str, Any]) -> "FittedCall":
        return FittedCall(**dict[str, Any](self.params | given))


def says_if_planning_is_long() -> contextlib.AbstractContextManager[None]:
    """A context for decisions, which are said to be made if they take long."""
    how = "short loops and, a few times, all of it"
    return says_if_long("Fit", "the gradient of a function", how)


def _values(program: jex.ClosedJaxpr) -> list[Aval]:
    """The types of all values of a program, but for those within its equations."""
    computed = (var for eqn in program.jaxpr.eqns for var in eqn.outvars)
    return [*program.in_avals, *map(aval_of, computed)]


def type_split_as(aval: Aval, sharding: NamedSharding | None) -> Aval:
    """A type that says how its arrays are split over devices, if that is known."""
    if sharding is None:
        return aval
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
