"""A map over rows as a primitive of its own, whose derivatives are maps over rows.

A map takes `consts`, which are the same for every row, and `xs`, which have rows, to
`sums` over the rows and to `ys`, which have rows. Its derivative in forward mode is one
of these: with a tangent for each input and output. So is its derivative in reverse
mode: the cotangents of `consts` are sums over the rows, and those of `xs` have rows.
So derivatives of any order take the memory of one chunk, with one accumulator for each
const, and nothing is stored from the one sweep for the other but the inputs.

How the rows are cut is planned where the map is run, after it has been differentiated
and batched.
"""

from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp

from .._array_types import strongly_typed
from .._doubled import Doubled, recall
from .._effects import refuse_callbacks, refuse_checks
from .._formula import Formula, Static
from .._partition import Arrays, Flags, pick, put
from .._tangents import instantiated, is_inexact, nonzero, tangent_types
from ..checkpointing._policies import save_nothing
from ..checkpointing.engine._forward import Saveable
from ..progress import BarChange, tied
from ._derivatives import (
    Marks,
    batched_rows,
    in_front,
    pulled_rows,
    pushed_rows,
    settled_rows,
)
from ._planner import Planner
from ._rows import Rows
from ._stored import run_stored


def map_rows(
    rows: Rows, consts: Arrays, xs: Arrays, *, planner: Planner, policy: Saveable
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Maps a function over rows, chunk by chunk.

    Args:
        rows: The function.
        consts: What is the same for every row.
        xs: What has rows.
        planner: How the rows are cut.
        policy: What is stored of all rows for the backward pass, as `jax.checkpoint`
            has it; `None` for nothing but the inputs.

    Returns:
        The sums over all rows, and the `ys` of all rows.
    """
    inputs = (list(map(strongly_typed, consts)), list(map(strongly_typed, xs)))
    policy = None if policy == save_nothing else policy
    row_map = RowMap(rows, planner, policy, jax.tree.map(jax.typeof, inputs))
    refuse_checks(row_map.effects)
    return row_map.apply(*inputs)


class RowMap(Formula):
    """`(consts, xs) -> (sums, ys)`, by a sweep.

    Attributes:
        policy: What to store of all rows for the backward pass; `None` where nothing
            is to be stored but the inputs.
    """

    rows: Rows
    planner: Planner
    policy: Saveable

    def __init__(self, rows: Rows, planner: Planner, policy: Saveable, in_avals: Any):
        self.in_avals = in_avals
        self.out_aval = rows.out_types
        self.params = {"rows": rows, "planner": planner, "policy": policy}
        self.effects = rows.program(*rows.probe).effects
        super().__init__()

    def expand(self, *inputs: Any) -> Any:
        known = recall(self, self.flat_in(inputs))
        return self.planner.sweep(self.rows).run(*inputs) if known is None else known

    def doubled(self, moves: Flags) -> Doubled:
        moves_in = _flags(self.in_tree.unflatten(moves))
        gives = self._out_marks(self.moves_out(moves))
        in_avals = tuple(
            [*avals, *tangent_types(avals, flags)]
            for avals, flags in zip(self.in_avals, moves_in, strict=True)
        )
        rows = pushed_rows(self.rows, moves_in, gives)
        formula = RowMap(rows, self.planner, self.policy, in_avals)
        return Doubled.of(formula, moves_in, gives)

    def sweep_forward(self, perturbed: Any, *inputs: Any) -> tuple[Any, Any, Any]:
        refuse_callbacks(
            self.effects,
            "The gradient of this map runs its function again",
            "Use `el.Vmap`",
        )
        if self.policy is None:
            return super().sweep_forward(perturbed, *inputs)
        marks = _flags(map(_may_move, perturbed, self.in_avals))
        moving = tuple([is_inexact(aval) for aval in group] for group in self.out_aval)
        sweep = self.planner.sweep_storing(self.rows, self.policy, marks)

        def run(back: Any, *marked: Arrays) -> tuple[Any, Any]:
            merged = map(put, inputs, marks, marked)
            out, back, here = run_stored(sweep, self.policy, *merged, back=back)
            return (back, *map(pick, out, moving)), (out, here)

        back = self.rows.meter.back.to_watch
        primals = map(pick, inputs, marks)
        _, pull, (out, here) = jax.vjp(run, back, *primals, has_aux=True)
        moves_out = self.moves_out([*marks[0], *marks[1]])
        residuals = (Static((marks, moving)), (pull, here))
        return tied(here, out), residuals, self.out_tree.unflatten(moves_out)

    def vjp_bwd_retval(self, res: Any, outgrad: Any) -> Any:
        if self.policy is None:
            return super().vjp_bwd_retval(res, outgrad)
        static, (pull, here) = res
        marks, moving = static.value
        cts = instantiated(list(map(pick, outgrad, moving)))
        after = jax.tree.leaves((here, cts))
        number = self.rows.meter.back.open(after, jnp.float32)
        number, *cts = pull((number, *cts))
        return tuple(map(put, self.zero_cts(), marks, tied(number, cts)))

    def pull(self, perturbed: Any, inputs: Any, cts: Any) -> Any:
        marks = _flags(map(_may_move, perturbed, self.in_avals))
        wanted = _flags(map(_may_move, nonzero(cts), self.out_aval))
        zeros = self.zero_cts()
        if not any(map(any, marks)) or not any(map(any, wanted)):
            return zeros
        rows = pulled_rows(self.rows, marks, wanted)
        inputs = tuple(map(_with, inputs, cts, wanted))
        in_avals = jax.tree.map(jax.typeof, inputs)
        out = RowMap(rows, self.planner, None, in_avals)(*inputs)
        return tuple(map(put, zeros, marks, out))

    def settled(self, moves: Flags, reverse: bool) -> Self:
        marks = _flags(self.in_tree.unflatten(moves))
        return self.with_params(rows=settled_rows(self.rows, marks, reverse))

    def moves_out(self, moves_in: Sequence[bool]) -> list[bool]:
        consts, xs = self.in_tree.unflatten(moves_in)
        sums, ys = self.rows.reached(consts, xs, is_derivative=True)
        return [*sums, *ys]

    def batched(
        self, axis_data: Any, args: Any, dims: Any
    ) -> tuple[Formula, Any, list[int | None]]:
        rows, marks = batched_rows(self.rows, axis_data, tuple(map(tuple, dims)))
        in_avals = jax.tree.map(jax.typeof, args)
        formula = RowMap(rows, self.planner, self.policy, in_avals)
        return formula, args, in_front((*marks[0], *marks[1]))

    @property
    def jaxprs(self) -> list[Any]:
        # Chunks of another size are traced later, whatever comes of it: if there is a
        # collective, that must be under the `vmap` that it is for.
        return [self.rows.program(*self.rows.probe)]

    def with_bars(self, change: BarChange) -> Self:
        return self.with_params(rows=self.rows.with_bars(change))

    def _out_marks(self, flat: Sequence[bool]) -> Marks:
        return _flags(self.out_tree.unflatten(flat))


# Pairs of lists: of consts and xs, or of sums and ys.


def _with(values: Sequence[Any], more: Sequence[Any], flags: Sequence[bool]) -> list:
    """Values, followed by those of some more that are marked."""
    return [*values, *instantiated(pick(more, flags))]


def _flags(groups: Any) -> Marks:
    first, second = (tuple(map(bool, group)) for group in groups)
    return first, second


def _may_move(flags: Sequence[Any], avals: Sequence[Any]) -> list[bool]:
    return [bool(f) and is_inexact(a) for f, a in zip(flags, avals, strict=True)]
