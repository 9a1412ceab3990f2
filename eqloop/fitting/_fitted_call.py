"""A function with one budget, as a primitive: it is planned where it is differentiated.

Its tangents, and the function under `vmap`, are functions with the same budget.
"""

import contextlib
import functools
from collections.abc import Hashable, Iterator, Sequence
from typing import Self

import jax
import jax.extend.core as jex
from jax.sharding import NamedSharding

from .._arrays import (
    Flags,
    automatic_sharding,
    instantiated,
    pick,
    put,
    refuse_symbolic_sizes,
    symbolic_sizes,
)
from .._device import DeviceLike, planning_for_call
from .._programs import (
    FITTED,
    Doubled,
    Formula,
    Rewrite,
    Static,
    aval_of,
    batched,
    meshes_in,
    pushed,
    reached,
    run,
    settled,
    traced,
    warn_once,
)
from .._types import Aval, BatchAxis, PyTree, Value
from ..checkpointing import fitting, says_if_long
from ..progress import Again, BarChange
from ._cut import Cut, takes_gradient
from ._decision import Limit, Recalled, decided, pinned, recalled
from ._options import Way
from ._whole import Decision


class FittedCall(Formula):
    """`inputs -> outputs`, both lists of arrays.

    Attributes:
        types: The types of its inputs, where these say more of how they are split.
        device: What it is planned for, if it was told.
        ways: How its parts run, if it was told.
        split: Whether parts may run some rows at a time.
    """

    program: jex.ClosedJaxpr
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
        self.in_avals, self.out_aval = tuple(program.in_avals), list(program.out_avals)
        self.params = dict(program=program, types=types)
        self.params |= dict(limit=limit, device=device, ways=ways, split=split)
        self.effects = program.effects
        super().__init__()

    def expand(self, *inputs: Value) -> list[Value]:
        if takes_gradient(self.program):
            warn_once(
                "Fit: nothing is decided for a gradient that the function takes "
                "itself, which is taken as before. If that is the one, put `Fit` "
                "inside: `jax.grad(el.Fit(f, …))`."
            )
        return run(self.program, *inputs)

    @property
    def jaxprs(self) -> list[jex.ClosedJaxpr]:
        return [self.program]

    def rewritten(self, rewrite: Rewrite) -> Self:
        return self.with_params(program=rewrite(self.program))

    def with_bars(self, change: BarChange) -> Self:
        return self.rewritten(change)

    def doubled(self, moves: Flags) -> Doubled:
        gives = tuple(self.moves_out(moves))
        program = pushed(self.program, (moves,), (gives,))
        # Tangents are split as their inputs are.
        dots = program.in_avals[len(self.types) :]
        split = map(automatic_sharding, pick(self.types, moves))
        types = (*self.types, *map(type_split_as, dots, split))
        return Doubled.of(self._of(program, types), (moves,), (gives,))

    def settled(self, moves: Flags, reverse: bool) -> Self:
        return self.rewritten(lambda program: settled(program, moves, reverse))

    def moves_out(self, moves_in: Sequence[bool]) -> list[bool]:
        marks = tuple(map(bool, moves_in))
        return list(reached(self.program, marks, is_derivative=True))

    def reached_out(self, marks: Sequence[bool], axis_name: Hashable) -> list[bool]:
        return list(reached(self.program, tuple(marks), axis_name=axis_name))

    def sweep_forward(
        self, perturbed: PyTree, *inputs: Value
    ) -> tuple[PyTree, PyTree, PyTree]:
        marks = self._marks(perturbed)
        moves_out = self.moves_out(marks)
        known = self._decided(marks) or self.decision(marks)
        cut, ways = known.cut, known.ways

        def moving(*moving: Value) -> tuple[list[Value], list[Value]]:
            with jax.named_scope(FITTED):
                outs = cut.run(ways, put(inputs, marks, moving), marks)
            return pick(outs, moves_out), outs

        _, pull, outs = jax.vjp(moving, *pick(inputs, marks), has_aux=True)
        residuals, structure = jax.tree.flatten(pull)
        return outs, (Static((marks, structure)), residuals), moves_out

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
            known = known and pinned(known, marks, self.types, self.limit.host)
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
        cut = Cut.run_by(self.ways, self.program, self.split)
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

    def sweep_back(self, residuals: PyTree, cts: PyTree) -> tuple[PyTree, PyTree]:
        known, residuals = residuals
        marks, structure = known.value
        pull = jax.tree.unflatten(structure, residuals)
        wanted = pick(self.flat_out(cts), self.moves_out(marks))
        cts = put(self.zero_cts(), marks, pull(instantiated(wanted)))
        return tuple(cts), None

    def pull_logs(
        self, perturbed: PyTree, inputs: PyTree, cts: PyTree
    ) -> tuple[PyTree, PyTree]:
        again = self.with_bars(Again())
        _, residuals, _ = again.sweep_forward(perturbed, *inputs)
        return again.sweep_back(residuals, cts)

    def batched(
        self, axis_data: BatchAxis, args: PyTree, dims: PyTree
    ) -> tuple[Formula, PyTree, list[int | None]]:
        marks = [dim is not None for dim in dims]
        each = self.reached_out(marks, axis_data.name)
        if axis_data.explicit_mesh_axis is not None:
            each = [True] * len(each)  # JAX takes no row of what devices share
        program = _batched(self.program, axis_data, tuple(dims), tuple(each))
        pairs = zip(marks, program.in_avals, self.types, strict=True)
        types = [aval if is_batched else known for is_batched, aval, known in pairs]
        # What was decided for an example holds for a batch, if that has the same parts.
        ways = self.ways
        if ways is not None and not symbolic_sizes(_values(program)):
            cut = Cut.run_by(ways, program, self.split)
            ways = ways if cut.takes(ways) else None
        out_dims = [0 if is_batched else None for is_batched in each]
        return self._of(program, tuple(types), ways), args, out_dims

    def _of(
        self,
        program: jex.ClosedJaxpr,
        types: tuple[Aval, ...],
        ways: tuple[Way, ...] | None = None,
    ) -> "FittedCall":
        how = self.limit, self.device, ways, self.split
        return FittedCall(program, types, *how)


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


@functools.lru_cache(maxsize=512)
def _batched(
    program: jex.ClosedJaxpr, axis_data: BatchAxis, dims: PyTree, each: Flags
) -> jex.ClosedJaxpr:
    """The program of the vmap, with one value of what is the same for all examples."""
    whole = batched(program, axis_data, dims, (0,) * len(each))
    if all(each):
        return whole
    row = lambda x, is_batched: x if is_batched else x[0]
    return traced(lambda *flat: map(row, run(whole, *flat), each), whole.in_avals)
