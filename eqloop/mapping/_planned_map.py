"""A map over rows as a primitive of its own, whose derivatives are maps over rows.

A map has `consts`, which are the same for every row, and `xs`, which have rows. It
returns `sums` over the rows, and `ys`, which have rows. Its derivatives are such maps:

    map     (consts, xs)            -> (sums, ys)
    jvp     (consts, dc, xs, dx)    -> (sums, ds, ys, dy)
    vjp     (consts, cs, xs, cy)    -> (cotangents of consts, cotangents of xs)

The cotangents of consts are sums over the rows, and those of `xs` have rows. So
derivatives of any order take the memory of one chunk, with one accumulator for each
const, and nothing is stored for the backward pass but the inputs.

How the rows are cut into chunks is planned where the map is run, after it has been
differentiated and batched.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Self

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from .._arrays import (
    Arrays,
    Flags,
    inexact_only,
    instantiated,
    is_inexact,
    nonzero,
    pick,
    put,
    with_tangent_types,
)
from .._programs import Doubled, Formula, Rewrite, Static, refuse_callbacks
from .._types import BatchAxis, PyTree, Value
from ..checkpointing import Saveable
from ..progress import BarChange, tied
from ._chunk_derivatives import (
    batched_function,
    in_front,
    jvp_function,
    settled_function,
    vjp_function,
)
from ._chunk_function import ChunkFunction, MarkPair
from ._chunk_loop import AtMost, run_stored
from ._fitting import ChunkPlanner


class PlannedMap(Formula):
    """`(consts, xs) -> (sums, ys)`, by a loop over chunks.

    Attributes:
        policy: Which values of all rows to store for the backward pass; `None` for
            nothing but the inputs.
    """

    f: ChunkFunction
    planner: ChunkPlanner
    policy: Saveable
    unit = "row"

    def __init__(
        self,
        f: ChunkFunction,
        planner: ChunkPlanner,
        policy: Saveable,
        in_avals: PyTree,
    ):
        self.in_avals = in_avals
        self.out_aval = f.out_types
        self.params = {"f": f, "planner": planner, "policy": policy}
        self.effects = f.program(f.probe).effects
        super().__init__()

    def expand(self, *inputs: PyTree) -> PyTree:
        return self.planner.loop(self.f).run(*inputs)

    def doubled(self, nonzeros: Flags) -> Doubled:
        nonzeros_in = _flags(self.in_tree.unflatten(nonzeros))
        gives = _flags(self.out_tree.unflatten(self.nonzeros_out(nonzeros)))
        in_avals = with_tangent_types(self.in_avals, nonzeros_in)
        f = jvp_function(self.f, nonzeros_in, gives)
        formula = PlannedMap(f, self.planner, self.policy, in_avals)
        return Doubled.of(formula, nonzeros_in, gives)

    def sweep_forward(
        self, perturbed: PyTree, *inputs: PyTree
    ) -> tuple[PyTree, PyTree, PyTree]:
        refuse_callbacks(
            self.effects,
            "The gradient of this map runs its function again",
            "Use `el.Vmap`",
        )
        if self.policy is None:
            return super().sweep_forward(perturbed, *inputs)
        marks = _flags(map(inexact_only, perturbed, self.in_avals))
        moving = tuple([is_inexact(aval) for aval in group] for group in self.out_aval)
        # With a policy, JAX differentiates the loop here, and its residuals, which are
        # for all rows, go to the backward rule inside of `pull`.
        loop = self.planner.loop_storing(self.f, self.policy, marks)

        def run(back: PyTree, *marked: Arrays) -> tuple[PyTree, PyTree]:
            merged = map(put, inputs, marks, marked)
            out, back, here = run_stored(loop, self.policy, *merged, back=back)
            return (back, *map(pick, out, moving)), (out, here)

        back = self.f.meter.back.to_watch
        primals = map(pick, inputs, marks)
        _, pull, (out, here) = jax.vjp(run, back, *primals, has_aux=True)
        nonzeros_out = self.nonzeros_out([*marks[0], *marks[1]])
        residuals = (Static((marks, moving)), (pull, here))
        return tied(here, out), residuals, self.out_tree.unflatten(nonzeros_out)

    def sweep_back(self, residuals: PyTree, cts: PyTree) -> PyTree:
        if self.policy is None:
            return super().sweep_back(residuals, cts)
        static, (pull, here) = residuals
        marks, moving = static.value
        cts = instantiated(list(map(pick, cts, moving)))
        after = jax.tree.leaves((here, cts))
        number = self.f.meter.back.open(after, jnp.float32)
        number, *cts = pull((number, *cts))
        return tuple(map(put, self.zero_cts(), marks, tied(number, cts)))

    def pull(self, perturbed: PyTree, inputs: PyTree, cts: PyTree) -> PyTree:
        marks = _flags(map(inexact_only, perturbed, self.in_avals))
        wanted = _flags(map(inexact_only, nonzero(cts), self.out_aval))
        zeros = self.zero_cts()
        # A loop whose results are all zeros is not run.
        if not any(map(any, marks)) or not any(map(any, wanted)):
            return zeros
        f = vjp_function(self.f, marks, wanted)
        with_cts = lambda xs, cts, flags: [*xs, *instantiated(pick(cts, flags))]
        inputs = tuple(map(with_cts, inputs, cts, wanted))
        in_avals = jax.tree.map(jax.typeof, inputs)
        out = PlannedMap(f, self.planner, None, in_avals)(*inputs)
        return tuple(map(put, zeros, marks, out))

    def settled(self, nonzeros: Flags, reverse: bool) -> Self:
        marks = _flags(self.in_tree.unflatten(nonzeros))
        return self.with_params(f=settled_function(self.f, marks, reverse))

    def nonzeros_out(self, nonzeros_in: Sequence[bool]) -> list[bool]:
        consts, xs = self.in_tree.unflatten(nonzeros_in)
        sums, ys = self.f.reached(consts, xs, is_derivative=True)
        return [*sums, *ys]

    def reached_out(self, marks: Sequence[bool], axis_name: Hashable) -> list[bool]:
        sums, ys = self.f.reached(*self.in_tree.unflatten(marks), axis_name=axis_name)
        return [*sums, *ys]

    def batched(
        self, axis_data: BatchAxis, args: PyTree, dims: PyTree
    ) -> tuple[Formula, PyTree, list[int | None]]:
        f, marks = batched_function(self.f, axis_data, tuple(map(tuple, dims)))
        in_avals = jax.tree.map(jax.typeof, args)
        formula = PlannedMap(f, self.planner, self.policy, in_avals)
        return formula, args, in_front((*marks[0], *marks[1]))

    @property
    def jaxprs(self) -> list[jex.ClosedJaxpr]:
        # The program for one size of chunk. Others are traced later, and if there is a
        # collective in `f`, then under the `vmap` that it is for.
        return [self.f.program(self.f.probe)]

    @property
    def times(self) -> int:
        return self.planner.chunks(self.f.length).count

    def with_bars(self, change: BarChange) -> Self:
        return self.with_params(f=self.f.with_bars(change))

    def rewritten(self, rewrite: Rewrite) -> Self:
        # A budget asks for programs of any size.
        sizes = self.planner.sizes(self.f.length)
        return self.with_params(f=self.f.rewritten(rewrite, sizes)) if sizes else self


def mapped_in_chunks(
    trace: Callable[[ChunkFunction, int], jex.ClosedJaxpr],
    size: int,
    length: int,
    consts: Arrays,
    xs: Arrays,
    x_axes: tuple[int, ...],
    y_axes: tuple[int, ...],
    num_sums: int,
) -> tuple[list[Value], list[Value]]:
    """The sums and the `ys` of a traced function, a chunk of rows at a time.

    The sums come first. `trace` is remembered by its identity.
    """
    others = dict(y_axes=y_axes, num_sums=num_sums, probe=size)
    f = ChunkFunction.of(trace, length, consts, xs, x_axes, **others)
    in_avals = jax.tree.map(jax.typeof, (consts, xs))
    return PlannedMap(f, AtMost(size), None, in_avals)(consts, xs)


# Pairs of lists: consts and xs, or sums and ys.


def _flags(groups: PyTree) -> MarkPair:
    first, second = (tuple(map(bool, group)) for group in groups)
    return first, second
