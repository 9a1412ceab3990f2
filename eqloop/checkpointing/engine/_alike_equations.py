"""Finds what a program computes alike, so that it can be computed at once.

Equations are alike if they are the same operation, equally far from the inputs, on
operands that are rows of the same arrays. The first arrays are given: their rows are
inputs of the program. The results of equations that are alike are the rows of another
array, and so on:

    inputs       a, b, c                      rows of one array
    equations    exp a, exp b, exp c          rows of a second one
                 p * exp a, p * exp b, ...    rows of a third: `p` is the same for all

Operands may also be small numbers in the program, or consts, which differ from row to
row. Numbers are told apart by their bits.
"""

import collections
import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax

from ..._arrays import is_symbolic, is_type
from ..._programs import alone, aval_of, equation_bits, literal_bits, run, value_of
from ..._types import Aval, Value

# With fewer rows than this, too little is gained by computing them at once.
LEAST_ROWS = 8
# What has more entries than this is an array that is worth operations of its own.
_MOST = 256


class Row(NamedTuple):
    """The place of a variable that is a row of an array.

    Attributes:
        array: The number of the array.
        row: The row.
    """

    array: int
    row: int


class AlikeEquations:
    """What a program computes alike.

    Attributes:
        groups: All equations, in an order in which they can be run. Those in a group
            are alike, and their results are the rows of one array.
        rows: The places of the variables that are rows.
    """

    def __init__(
        self,
        program: jex.ClosedJaxpr,
        arrays: Sequence[Sequence[jex.Var]],
        consts: Iterable[jex.Var],
    ):
        """Finds them; the rows of the first `arrays` are inputs of the program.

        `consts` are inputs that may be different rows of an operand.
        """
        self.groups: list[list[jex.JaxprEqn]] = []
        self.rows: dict[Any, Row] = {}
        # Variables that are equal to others, and the consts.
        self._same, self._consts = dict[Any, Any](), set(consts)
        # The bits of literals, by what they hold: the program keeps that alive.
        self._bits = dict[tuple[int, Aval], Hashable]()
        self._count = itertools.count()
        for own in arrays:
            self._add_array(own)
        for level in _levels(program):
            alike = collections.defaultdict[Hashable, list[jex.JaxprEqn]](list)
            for eqn in level:
                alike[self._key(eqn)].append(eqn)
            for group in alike.values():
                self._add(group)

    def read(self, atom: Any) -> Any:
        """An atom of the program, or the variable that it is equal to."""
        return atom if isinstance(atom, jex.Literal) else self._same.get(atom, atom)

    def operands(self, group: Sequence[jex.JaxprEqn]) -> list[tuple[Any, ...]]:
        """The operands of equations that are alike: what each is in every equation."""
        return list(zip(*(map(self.read, eqn.invars) for eqn in group), strict=True))

    @property
    def stacked(self) -> dict[tuple[Hashable, ...], tuple[Any, ...]]:
        """The operands that are neither shared nor rows: consts, or numbers."""
        operands = (
            atoms
            for group in self.groups
            if len(group) > 1
            for atoms in self.operands(group)
        )
        return {
            self.told(atoms): atoms
            for atoms in operands
            if not self.is_shared(atoms) and self.array_of(atoms[0]) is None
        }

    def array_of(self, atom: Any) -> int | None:
        """The number of the array that an atom is a row of, if it is one."""
        atom = self.read(atom)
        is_row = not isinstance(atom, jex.Literal) and atom in self.rows
        return self.rows[atom].array if is_row else None

    def is_shared(self, atoms: Sequence[Any]) -> bool:
        """Whether an operand is the same in all equations that are alike."""
        return len(set(self.told(atoms))) == 1

    def told(self, atoms: Sequence[Any]) -> tuple[Hashable, ...]:
        """What tells operands apart: variables by identity, numbers by their bits."""
        return tuple(map(self._told, atoms))

    def _told(self, atom: Any) -> Hashable:
        if not isinstance(atom, jex.Literal):
            return atom
        # An array in a function that is called many times is in as many literals.
        if (key := (id(atom.val), aval_of(atom))) not in self._bits:
            self._bits[key] = literal_bits(atom)
        return self._bits[key]

    def _key(self, eqn: jex.JaxprEqn) -> Hashable:
        """What equations have in common that are alike."""

        def of_operand(atom: Any) -> Hashable:
            if isinstance(atom, jex.Literal):
                aval = aval_of(atom)
                return ("a number", aval) if has_few(aval) else self._told(atom)
            if atom in self.rows:
                return "a row", self.rows[atom].array
            return ("a const", aval_of(atom)) if atom in self._consts else atom

        key = equation_bits(eqn), *map(of_operand, map(self.read, eqn.invars))
        try:
            hash(key)
        except TypeError:  # a parameter cannot be told from others
            return id(eqn)
        return id(eqn) if eqn.effects else key

    def _add(self, group: list[jex.JaxprEqn]) -> None:
        first, *others = group
        if others and all(map(self.is_shared, self.operands(group))):
            # Not alike but equal, as `p * dt` that is written once for each leaf.
            for eqn in others:
                self._same.update(zip(eqn.outvars, first.outvars, strict=True))
            self.groups.append([first])
        elif len(group) < LEAST_ROWS:
            self.groups.extend([eqn] for eqn in group)
        else:
            for outvars in zip(*(eqn.outvars for eqn in group), strict=True):
                self._add_array(outvars)
            self.groups.append(group)

    def _add_array(self, own: Sequence[Any]) -> None:
        array = next(self._count)
        self.rows.update({var: Row(array, row) for row, var in enumerate(own)})


class Values:
    """The values of a program whose equations that are alike are run at once.

    Args:
        found: What is alike in the program.
        values: The values of its inputs that are no rows.
        arrays: The first arrays.
        stacked: The values of the operands that are `found.stacked`.
    """

    def __init__(
        self,
        found: AlikeEquations,
        values: dict[Any, Value],
        arrays: Sequence[Value],
        stacked: Sequence[Value],
    ):
        self._found, self._values, self._arrays = found, values, list(arrays)
        self._stacked = dict(zip(found.stacked, stacked, strict=True))
        self._rows = dict[int, list[Value]]()
        for group in found.groups:
            outs = self._run(group)
            if len(group) > 1:
                self._arrays.extend(outs)
            else:
                values.update(zip(group[0].outvars, outs, strict=True))

    def of(self, atom: Any) -> Value:
        """The value of an atom."""
        atom = self._found.read(atom)
        if isinstance(atom, jex.Literal):
            return value_of(atom)
        if atom not in self._found.rows:
            return self._values[atom]
        array, row = self._found.rows[atom]
        if array not in self._rows:
            self._rows[array] = rows_of(self._arrays[array])
        return self._rows[array][row]

    def together(self, atoms: Sequence[Any]) -> Value:
        """The values of variables that are rows of one array, as an array."""
        places = [self._found.rows[self._found.read(atom)] for atom in atoms]
        whole, rows = self._arrays[places[0].array], [place.row for place in places]
        # Rows that follow one another are one slice.
        starts = [i for i, row in enumerate(rows) if not i or row != rows[i - 1] + 1]
        ends = [*starts[1:], len(rows)]
        parts = [
            lax.slice_in_dim(whole, rows[start], rows[end - 1] + 1)
            for start, end in zip(starts, ends, strict=True)
        ]
        return parts[0] if len(parts) == 1 else lax.concatenate(parts, 0)

    def _run(self, group: Sequence[jex.JaxprEqn]) -> list[Value]:
        # One equation stands for all: which operands have rows, `vmap` is told.
        program = alone(group[0])
        if len(group) == 1:
            return run(program, *map(self.of, group[0].invars))
        operands, axes = list[Value](), list[int | None]()
        for atoms in self._found.operands(group):
            is_same = self._found.is_shared(atoms)
            axes.append(None if is_same else 0)
            if is_same:
                operands.append(self.of(atoms[0]))
            elif (key := self._found.told(atoms)) in self._stacked:
                operands.append(self._stacked[key])
            else:
                operands.append(self.together(atoms))
        return jax.vmap(lambda *args: run(program, *args), axes)(*operands)


def rows_of(array: Value) -> list[Value]:
    """All rows of an array."""
    # The transpose of a `split` is one concatenation. That of so many slices would add
    # up as many arrays of zeros.
    rows = lax.split(array, [1] * array.shape[0])
    return [lax.squeeze(row, [0]) for row in rows]


def has_few(aval: Aval) -> bool:
    """Whether values of a type may be rows: a few numbers."""
    if not is_type(aval) or jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return False
    # Where a type says how its values are split over devices, that is by their axes,
    # and a pack has one more.
    mesh = aval.sharding.mesh
    if not (mesh.empty or mesh.are_all_axes_auto):
        return False
    return not any(map(is_symbolic, aval.shape)) and math.prod(aval.shape) <= _MOST


def _levels(program: jex.ClosedJaxpr) -> Iterator[list[jex.JaxprEqn]]:
    """The equations, by how many others lie between them and the inputs."""
    depth = dict[Any, int]()
    levels = collections.defaultdict[int, list[jex.JaxprEqn]](list)
    for eqn in program.jaxpr.eqns:
        inputs = (var for var in eqn.invars if isinstance(var, jex.Var))
        at = 1 + max((depth.get(var, 0) for var in inputs), default=0)
        depth.update(dict.fromkeys(eqn.outvars, at))
        levels[at].append(eqn)
    return (levels[at] for at in sorted(levels))
