"""Packs leaves of the carry that a step computes alike: one array in place of many.

A model that keeps each of its numbers in a leaf of its own makes a step of many small
equations. XLA runs each of them by itself, or compiles them for long, and stores each
number of each carry in a buffer of its own, which is aligned to 64 bytes on a CPU and
to 256 on a GPU:

    step      [exp(p * a), exp(p * b), exp(p * c), ...]
    packed    exp(p * packed)                             `packed` has a row for each

Only a gradient runs the packed step, and its plan is that of the packed step. To the
rest of the program the loop has the leaves that the user gave it: each is batched,
differentiated and left out by itself.

It gains: without, the gradient for a carry of 60 scalars that are computed alike takes
1.7 to 2.5 times as long on JAX 0.12, where XLA makes one function of the whole loop,
and 30 to 40 times as long on JAX 0.10. It takes 2.7 times the memory, and 2.4 times as
long to compile (JAX 0.12).
Compiled for an H100, `Recursive(16)` starts 33 kernels a step in place of 10, and takes
16 times the memory; for a voltage and 59 gates 369 in place of 16.
A carry that is packed although every equation still runs by itself gains nothing: XLA
computes each entry of the packed array by a branch of its own, and on JAX 0.12 that
takes up to 1.7 times as long. So it is the equations that decide.
"""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ..._arrays import (
    Arrays,
    Flags,
    instantiated,
    interleave,
    is_inexact,
    is_zero,
    pick,
    put,
    split,
    stack_type,
    type_of,
    zero_cotangent,
)
from ..._device import planning_device, remembered_per_device
from ..._programs import aval_of, inlined, literal_value
from ..._types import Aval, PyTree, Value
from ..steps._step import Step, make_step
from ._alike_equations import LEAST_ROWS, AlikeEquations, Values, has_few, rows_of
from ._forward import Active
from ._layout import Saves, Stored
from ._primal import Outputs
from ._problem import Problem
from ._transformed import with_cotangents
from .reversals._together import can_join

# How many times fewer equations the packed step must have, at least. On a CPU, with 20
# times fewer a gradient was seen to be 1.4 to 2 times as fast or more, and with 4 times
# fewer between 1.05 times as fast and 1.5 times as slow. Elsewhere each equation may be
# a kernel to start: for an H100, with 4 times fewer these were 0.04 to 1.2 times as
# many.
_GAIN_ON_CPU, _GAIN = 8, 2

# What a plan says of it.
_NOTE = "%d alike leaves, {}, run as one array"

_Packs = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Packing:
    """A step whose carry is packed.

    It has maps for the way back of the original as well:

        cotangents of inputs  <--cotangents--  way back  <--ends--  those of outputs

    Attributes:
        step: The step. Its carry has the packs, and then the leaves that are in none.
            Behind its consts there are packs of consts, and then tables of numbers.
        original: The step whose carry is not packed.
        leaves: For each pack of the carry, the leaves that are its rows.
        consts: For each pack of consts, the consts that are its rows.
        tables: The tables.
    """

    step: Step
    original: Step
    leaves: _Packs
    consts: _Packs
    tables: tuple[np.ndarray, ...]

    def of(self, problem: Problem[Any]) -> Problem[Any]:
        """The loop in place of one whose carry is not packed."""
        loop, count = problem.loop, self.original.num_carry
        starts, paths = loop.padded_starts(count), loop.carry_paths
        starts = self.packed(starts, lambda own: None)
        # It may be that the leaves have no paths, or are not those of the user.
        if len(paths) == count:
            paths = self.packed(paths, lambda own: f"{own[0]} to {own[-1]}")
        loop = dataclasses.replace(loop, starts=tuple(starts), carry_paths=tuple(paths))
        for pack, own in enumerate(self.leaves):
            marks = [i == pack for i in range(self.step.num_carry)]
            loop = loop.noting(_NOTE % len(own), marks)
        placed = problem.placed
        if placed:
            consts, init, xs = placed
            packs = _joined(consts, self.consts, _stack_placement)
            consts = (*consts, *packs, *[None] * len(self.tables))
            placed = consts, tuple(self.packed(init, _stack_placement)), xs
        return dataclasses.replace(problem, step=self.step, loop=loop, placed=placed)

    def is_even(self, flags: Sequence[bool]) -> bool:
        """Whether of each pack either all leaves are marked or none."""
        return all(len({flags[leaf] for leaf in own}) == 1 for own in self.leaves)

    # From an entry for each leaf to an entry for each pack and each other leaf, and
    # back.

    def packed(
        self, carry: Sequence[Any], join: Callable[[list[Any]], Any] = jnp.stack
    ) -> list[Any]:
        """A packed carry, or by `join` what stands for it."""
        others = pick(carry, _outside(self.leaves, self.original.num_carry))
        return [*_joined(carry, self.leaves, join), *others]

    def unpacked(self, carry: Sequence[Value]) -> list[Value]:
        """The leaves of a packed carry, or of its cotangents."""
        packs, others = split(carry, len(self.leaves))
        outside = _outside(self.leaves, self.original.num_carry)
        leaves: list[Value] = put([None] * len(outside), outside, others)
        for own, pack in zip(self.leaves, packs, strict=True):
            types = [self.original.carry_types[leaf] for leaf in own]
            for leaf, row in zip(own, _rows(pack, types), strict=True):
                leaves[leaf] = row
        return leaves

    def inputs(self, inputs: PyTree) -> PyTree:
        """Its consts, initial carry and `xs`, from those of the original."""
        consts, init, xs = inputs
        packs = _joined(consts, self.consts, jnp.stack)
        tables = map(jnp.asarray, self.tables)
        return [*consts, *packs, *tables], self.packed(init), list(xs)

    def marks(self, marks: PyTree) -> PyTree:
        """Which of its inputs are marked if these of the original are."""
        # A pack is marked if any of its rows is.
        consts, init, xs = marks
        packs = _joined(consts, self.consts, any)
        marks = [*consts, *packs, *[False] * len(self.tables)]
        return marks, self.packed(init, any), list(xs)

    def outputs(self, carry: Arrays, ys: Arrays, stored: Stored) -> Outputs:
        return self.unpacked(carry), list(ys), stored

    def ends(self, cts: PyTree) -> PyTree:
        """The cotangents of its outputs, from those of the original's."""
        carry, ys, stored = cts
        return self.packed(carry, _joined_cotangents), ys, stored

    def for_ends(
        self, problem: Problem[Any], active: Active, cts: PyTree
    ) -> Problem[Any]:
        """The loop whose way back takes these cotangents of the original's outputs.

        `active` says which inputs of the original are differentiated.
        """
        has_ct = [[not is_zero(ct) for ct in group] for group in cts[:2]]
        needed = with_cotangents(self.original, active, *has_ct).carry
        if self.is_even(needed):
            return problem
        return dataclasses.replace(problem, step=self.of_some(needed))

    def cotangents(self, cts: PyTree) -> PyTree:
        """The cotangents of the original's inputs."""
        consts, init, xs = cts
        consts, packs, _ = split(consts, self.original.num_consts, len(self.consts))
        for own, pack in zip(self.consts, packs, strict=True):
            # A const may be in several packs, and may be read by itself as well.
            types = [self.original.const_types[const] for const in own]
            for const, ct in zip(own, _rows(pack, types), strict=True):
                consts[const] = _sum(consts[const], ct)
        return consts, self.unpacked(init), xs

    def of_some(self, needed: Flags) -> Step:
        """A step that can stand for the packed one on the way back of some leaves."""
        # The other leaves have no cotangents. A pack has one row for all of its leaves,
        # and zeros in it would be multiplied by derivatives that may be infinite. So
        # here the leaves are taken out of the packs for the original step, and those
        # without cotangents are not differentiated.
        stop = lambda leaves: [
            leaf if flag else lax.stop_gradient(leaf)
            for leaf, flag in zip(leaves, needed, strict=True)
        ]

        def step(consts: Arrays, carry: Arrays, x: Arrays) -> PyTree:
            consts = consts[: self.original.num_consts]
            carry, y = self.original(consts, stop(self.unpacked(carry)), x)
            return self.packed(stop(carry)), y

        types = self.step.const_types, self.step.carry_types, self.step.x_types
        return make_step(step, *types)


def packing_of(
    problem: Problem, active: Active, saves: Saves[Any] | None = None
) -> Packing | None:
    """How the carry of a loop is packed; `None` if it is better left as it is.

    `saves` is what it stores for the way back of another gradient.
    """
    # What is a forward sweep itself has been packed already, if at all.
    if saves is not None:
        return None
    # A bar finds the leaves that it shows by their places, and a loop that stops its
    # condition.
    is_shown = problem.loop.meter.is_shown
    if problem.lead or is_shown or problem.step.num_carry < LEAST_ROWS:
        return None
    packing = _packing_of_step(problem.step)
    return packing if packing and packing.is_even(active.carry) else None


@remembered_per_device(maxsize=256)
def _packing_of_step(step: Step) -> Packing | None:
    types = step.carry_types
    small = [leaf for leaf, aval in enumerate(types) if _is_small(aval)]
    # An inverse is for the leaves as they are. Equations that are alike become one of a
    # batch, as steps do that are reversed together.
    if len(small) < LEAST_ROWS or step.inverse is not None or not can_join(step):
        return None
    program = inlined(step.jaxpr)
    uses, carry = _uses(program), program.jaxpr.invars[step.num_consts :]
    # Leaves of one type that are read by the same operations. So slots need all of a
    # pack or nothing, as far as that can be told here.
    packs = _grouped(small, lambda leaf: (types[leaf], uses.get(carry[leaf])))
    packs, found = _found(step, program, packs)
    if not packs:
        return None
    packing = _packing(step, program, packs, found)
    gain = _GAIN_ON_CPU if planning_device().platform == "cpu" else _GAIN
    is_worth_it = gain * len(packing.step.jaxpr.eqns) <= len(program.eqns)
    return packing if is_worth_it else None


def _found(
    step: Step, program: jex.ClosedJaxpr, packs: _Packs
) -> tuple[_Packs, AlikeEquations]:
    """What is alike in the program of a step, and the packs that this leaves."""
    consts, carry, _ = split(program.jaxpr.invars, step.num_consts, step.num_carry)
    consts = [const for const in consts if _is_small(aval_of(const))]
    found = AlikeEquations(program, _joined(carry, packs, list), consts)
    # The next values of a pack must be rows of one array, too. If those of some leaves
    # are not, fewer equations are alike without them.
    next_array = lambda leaf: found.array_of(program.jaxpr.outvars[leaf])
    finer = tuple(itertools.chain(*(_grouped(own, next_array) for own in packs)))
    return (packs, found) if finer == packs else _found(step, program, finer)


def _packing(
    step: Step, program: jex.ClosedJaxpr, packs: _Packs, found: AlikeEquations
) -> Packing:
    """The packing of a step, given the leaves of each pack.

    `found` is what is alike in the program, with the packs as its first arrays.
    """
    jaxpr, stacked = program.jaxpr, list(found.stacked.values())
    number = {var: i for i, var in enumerate(jaxpr.invars)}
    is_table = [isinstance(atoms[0], jex.Literal) for atoms in stacked]
    is_pack = [not flag for flag in is_table]
    const_packs = tuple(
        tuple(number[var] for var in atoms) for atoms in pick(stacked, is_pack)
    )
    tables = tuple(
        np.stack(list(map(literal_value, atoms))) for atoms in pick(stacked, is_table)
    )
    outside = _outside(packs, step.num_carry)

    def run_packed(consts: Arrays, carry: Arrays, x: Arrays) -> PyTree:
        consts, *more = split(consts, step.num_consts, len(const_packs))
        arrays, others = split(carry, len(packs))
        carry = interleave(outside, [None] * (step.num_carry - len(others)), others)
        inputs = dict(zip(jaxpr.invars, [*consts, *carry, *x], strict=True))
        values = Values(found, inputs, arrays, interleave(is_table, *more))
        after, y = split(jaxpr.outvars, step.num_carry)
        arrays = _joined(after, packs, values.together)
        carry = [*arrays, *map(values.of, pick(after, outside))]
        return carry, list(map(values.of, y))

    stack = lambda own: stack_type(own[0], len(own))
    packing = Packing(step, step, packs, const_packs, tables)
    types = [*_joined(step.const_types, const_packs, stack), *map(type_of, tables)]
    packed = make_step(
        run_packed,
        [*step.const_types, *types],
        packing.packed(step.carry_types, stack),
        step.x_types,
    )
    return dataclasses.replace(packing, step=packed)


def _is_small(aval: Aval) -> bool:
    """Whether leaves of a type may be rows: a few floats."""
    return is_inexact(aval) and has_few(aval)


def _uses(program: jex.ClosedJaxpr) -> dict[Any, Hashable]:
    """By which operations each variable is read, and as which operand."""
    uses = collections.defaultdict[Any, list[tuple[str, int]]](list)
    for eqn in program.jaxpr.eqns:
        for place, atom in enumerate(eqn.invars):
            if isinstance(atom, jex.Var):
                uses[atom].append((eqn.primitive.name, place))
    return {var: tuple(sorted(own)) for var, own in uses.items()}


def _grouped(leaves: Iterable[int], kind: Callable[[int], Hashable]) -> _Packs:
    """Groups of leaves of the same kind; those whose kind is `None` are in none."""
    groups = collections.defaultdict[Hashable, list[int]](list)
    for leaf in leaves:
        groups[kind(leaf)].append(leaf)
    return tuple(
        tuple(own)
        for kind, own in groups.items()
        if kind is not None and len(own) >= LEAST_ROWS
    )


def _joined(
    values: Sequence[Any], packs: _Packs, join: Callable[[list[Any]], Any]
) -> list[Any]:
    """What becomes of the values in each pack."""
    return [join([values[i] for i in own]) for own in packs]


def _outside(packs: _Packs, count: int) -> Flags:
    """Which of so many values are in no pack."""
    within = {*itertools.chain(*packs)}
    return tuple(i not in within for i in range(count))


def _joined_cotangents(cts: list[Value]) -> Value:
    if not all(map(is_zero, cts)):
        return jnp.stack(instantiated(cts))
    return zero_cotangent(stack_type(cts[0].aval, len(cts)))


def _rows(pack: Value, types: Sequence[Aval]) -> list[Value]:
    """The rows of an array, or those of its cotangent."""
    return list(map(zero_cotangent, types)) if is_zero(pack) else rows_of(pack)


def _stack_placement(own: Sequence[NamedSharding | None]) -> NamedSharding | None:
    """How the stack of some arrays is split over devices, from how each of them is."""
    first, *others = own
    if first is None or any(other != first for other in others):
        return None  # the compiler decides
    spec = PartitionSpec(None, *first.spec)
    return NamedSharding(first.mesh, spec, memory_kind=first.memory_kind)


def _sum(ct: Value, other: Value) -> Value:
    if is_zero(ct) or is_zero(other):
        return other if is_zero(ct) else ct
    return ct + other
