"""A program as a primitive."""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Self

import jax
import jax.extend.core as jex
from jax.extend import source_info_util

from .._arrays import Flags, instantiated, pick, put, split
from .._types import BatchAxis, PyTree, Value
from ._calculus import batched, jvp_of, run, settled, traced
from ._doubled import Doubled
from ._effects import is_ref
from ._equations import Rewrite
from ._formula import Formula, Static
from ._jaxprs import called_at, with_parts
from ._layouts import is_slow_in_loops, laid_out
from ._reaching import reached


class ProgramCall(Formula):
    """`inputs -> outputs`, both lists of arrays, with the derivatives that JAX takes.

    Once nobody takes a derivative of it, or of them, it is laid out for the device.
    """

    program: jex.ClosedJaxpr

    def __init__(self, program: jex.ClosedJaxpr, **params: Any):
        self.in_avals, self.out_aval = tuple(program.in_avals), list(program.out_avals)
        self.params = dict(program=program, **params)
        self.effects = program.effects
        super().__init__()

    def expand(self, *inputs: Value) -> list[Value]:
        return run(self.program, *inputs)

    @property
    def jaxprs(self) -> list[jex.ClosedJaxpr]:
        return [self.program]

    def rewritten(self, rewrite: Rewrite) -> Self:
        return self.with_params(program=rewrite(self.program))

    def with_bars(self, change: Any) -> Self:
        return self.rewritten(change)

    def doubled(self, nonzeros: Flags) -> Doubled:
        gives = tuple(self.nonzeros_out(nonzeros))
        program = jvp_of(self.program, (nonzeros,), (gives,))
        return Doubled.of(ProgramCall(program), (nonzeros,), (gives,))

    def settled(self, nonzeros: Flags, reverse: bool) -> Self:
        return self.rewritten(lambda program: settled(program, nonzeros, reverse))

    def nonzeros_out(self, nonzeros_in: Sequence[bool]) -> list[bool]:
        marks = tuple(map(bool, nonzeros_in))
        return list(reached(self.program, marks, is_derivative=True))

    def reached_out(self, marks: Sequence[bool], axis_name: Hashable) -> list[bool]:
        return list(reached(self.program, tuple(marks), axis_name=axis_name))

    def differentiated(
        self, marks: Flags
    ) -> Callable[[Sequence[Value]], Sequence[Value]]:
        """What JAX differentiates by these inputs, from all of them to the outputs."""
        return lambda inputs: run(self.program, *inputs)

    def called(self, f: Callable[..., list[Value]], *flat: Value) -> list[Value]:
        """What a function of its derivative computes."""
        return laid_out_call(f, *flat)

    def sweep_forward(
        self, perturbed: PyTree, *inputs: Value
    ) -> tuple[PyTree, PyTree, PyTree]:
        marks = self._marks(perturbed)
        nonzeros_out, structures = self.nonzeros_out(marks), list[Any]()
        evaluate = self.differentiated(marks)

        def forward(*inputs: Value) -> list[Value]:
            def moving(*moving: Value) -> tuple[list[Value], Sequence[Value]]:
                outs = evaluate(put(inputs, marks, moving))
                return pick(outs, nonzeros_out), outs

            _, pull, outs = jax.vjp(moving, *pick(inputs, marks), has_aux=True)
            residuals, structure = jax.tree.flatten(pull)
            structures.append(structure)
            return [*outs, *residuals]

        found = self.called(forward, *inputs)
        outs, residuals = split(found, len(nonzeros_out))
        return outs, (Static((marks, structures[-1])), residuals), nonzeros_out

    def sweep_back(self, residuals: PyTree, cts: PyTree) -> PyTree:
        known, residuals = residuals
        marks, structure = known.value
        wanted = instantiated(pick(self.flat_out(cts), self.nonzeros_out(marks)))

        def back(*flat: Value) -> list[Value]:
            residuals, cts = split(flat, structure.num_leaves)
            return list(jax.tree.unflatten(structure, residuals)(cts))

        cts = put(self.zero_cts(), marks, self.called(back, *residuals, *wanted))
        return tuple(cts)

    def pull(self, perturbed: PyTree, inputs: PyTree, cts: PyTree) -> PyTree:
        _, residuals, _ = self.sweep_forward(perturbed, *inputs)
        return self.sweep_back(residuals, cts)

    def batched(
        self, axis_data: BatchAxis, args: PyTree, dims: PyTree
    ) -> tuple[Formula, PyTree, list[int | None]]:
        each = self.reached_out([dim is not None for dim in dims], axis_data.name)
        if axis_data.explicit_mesh_axis is not None:
            each = [True] * len(each)  # JAX takes no row of what devices share
        program = _batched(self.program, axis_data, tuple(dims), tuple(each))
        return ProgramCall(program), args, [0 if e else None for e in each]


def laid_out_call(f: Callable[..., list[Value]], *flat: Value) -> list[Value]:
    """What a function of arrays computes, laid out for the device by a primitive.

    If there is nothing to lay out, there is no primitive.
    """
    types = list(map(jax.typeof, flat))
    if not is_slow_in_loops() or any(map(is_ref, types)):
        return f(*flat)
    closed = jax.make_jaxpr(f)(*types)
    # JAX 0.12 notes down no frames from outside of what it traces.
    here = source_info_util.current().traceback
    closed = with_parts(closed, eqns=called_at(here, closed.eqns))
    if laid_out(closed) is closed:
        return run(closed, *flat)
    invars = [*closed.jaxpr.constvars, *closed.jaxpr.invars]
    program = with_parts(closed, constants={}, invars=invars)
    inputs = [*closed.consts, *flat]
    outs = ProgramCall(program)(*inputs)
    # What it hands on is not copied.
    given = dict(zip(map(id, invars), inputs, strict=True))
    pairs = zip(program.jaxpr.outvars, outs, strict=True)
    return [given.get(id(var), out) for var, out in pairs]


@functools.lru_cache(maxsize=512)
def _batched(
    program: jex.ClosedJaxpr, axis_data: BatchAxis, dims: PyTree, each: Flags
) -> jex.ClosedJaxpr:
    # One value of what is the same for all examples.
    whole = batched(program, axis_data, dims, (0,) * len(each))
    if all(each):
        return whole
    row = lambda x, is_batched: x if is_batched else x[0]
    return traced(lambda *flat: map(row, run(whole, *flat), each), whole.in_avals)
