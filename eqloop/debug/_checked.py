"""A program that is checked, as a primitive of its own.

Its derivatives are the checked derivatives of the program, and under `vmap` it is the
checked program of the batch: one program, with one report.
"""

import functools
import itertools
from collections.abc import Hashable, Sequence
from typing import Self

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._arrays import (
    Arrays,
    Flags,
    inexact_only,
    instantiated,
    is_inexact,
    is_zero,
    pick,
    put,
    split,
    tangent_types,
    type_of,
    zero_cotangent,
)
from .._programs import (
    Doubled,
    Formula,
    Rewrite,
    constant,
    equations,
    formula_of,
    is_watched,
    reached,
    refuse_callbacks,
    settled,
)
from .._types import BatchAxis, PyTree, Value
from ..progress import BarChange
from ..tracing import NonFiniteError, raise_inside
from ._body import Body
from ._context import Context
from ._finding import Finding, first, nothing, of_all_devices, varying
from ._program import Program
from ._rules import RULES
from ._sites import Argument, Site


class Watch:
    """A program to run, with all places where it may fail."""

    # The places are found while the program is traced, before it can fail.

    def __init__(self, program: Program):
        self.program = program
        self._sites: list[Site | Argument] = []

    def __call__(self, args: Arrays) -> tuple[list[Value], Finding]:
        """Runs the program: its outputs, and what was found."""
        program = self.program
        closed, context = program.jaxpr, Context()
        body = Body(self._sites, RULES)
        outs = body.run(closed.jaxpr, closed.consts, args, context)
        finding = first(body.finding(context), self._given(body, args, outs))
        return outs, finding

    def error(self, finding: PyTree) -> NonFiniteError:
        """The error to raise."""
        site, *found = finding
        return NonFiniteError(self._sites[int(site) - 1].describe(*found))

    def _given(self, body: Body, args: Arrays, outs: Arrays) -> Finding:
        """The argument that has a NaN, if a result has one."""
        # A NaN that reaches no result is meant to be there, as for missing data.
        is_new = lambda out: all(out is not arg for arg in args)
        results = [out for out in outs if is_inexact(out) and is_new(out)]
        named = [
            (name, arg)
            for name, arg in zip(self.program.names, args, strict=True)
            if is_inexact(arg)
        ]
        if not (results and named):
            return nothing()
        numbers: list[int] = []
        for name, arg in named:
            self._sites.append(Argument(name, jax.typeof(arg)))
            numbers.append(len(self._sites))
        given, places = _have_nan(body, [arg for _, arg in named])
        site, where = constant(numbers)[jnp.argmax(given)], places[jnp.argmax(given)]
        is_wrong = given.any() & _have_nan(body, results)[0].any()
        return nothing()._replace(site=jnp.where(is_wrong, site, 0), where=where)


def _have_nan(body: Body, arrays: Sequence[Value]) -> tuple[jax.Array, jax.Array]:
    """Which of some arrays have a NaN, and the number of the first entry."""
    low, _, where = map(jnp.stack, zip(*map(body.extent, arrays), strict=True))
    return jnp.isnan(low), where


class Checked(Formula):
    """`(when, inputs) -> outputs`; `when` is a list, empty for always."""

    program: Program

    def __init__(self, program: Program, inputs: PyTree):
        self.in_avals = jax.tree.map(type_of, inputs)
        self.out_aval = program.out_types
        self.params = dict(program=program)
        self.effects = program.jaxpr.effects
        super().__init__()

    def expand(self, when: Arrays, inputs: Arrays) -> PyTree:
        if is_watched():  # by another one around this
            return self.program(*inputs)
        if _is_traced([*when, *inputs]):
            watch = Watch(self.program)
            outs, finding = _run_when(watch, when, inputs)
            return _raising(watch, finding, outs)
        # No callback is needed here: the finding can be read.
        watch, run = _compiled(self.program)
        outs, finding = run(list(when), list(inputs))
        if finding.site > 0:
            raise watch.error(jax.device_get(finding))
        return outs

    def doubled(self, moves: Flags) -> Doubled:
        formulas = filter(None, map(formula_of, equations(self.program.jaxpr)))
        refuse_callbacks(
            itertools.chain(*(formula.effects for formula in formulas)),
            "DebugNonFinite runs a loop for its value, and again for its tangents",
            "Leave it out",
        )
        when, inputs = self.in_avals
        of_when, moving = moves[: len(when)], moves[len(when) :]
        in_avals = (when, [*inputs, *tangent_types(inputs, moving)])
        formula = Checked(self.program.pushed(moving), in_avals)
        return Doubled.of(formula, (of_when, moving), (tuple(self.moves_out(moves)),))

    def settled(self, moves: Flags, reverse: bool) -> Self:
        moving = moves[len(self.in_avals[0]) :]
        rewrite = lambda jaxpr: settled(jaxpr, moving, reverse)
        return self.with_params(program=self.program.rewritten(rewrite))

    @property
    def jaxprs(self) -> list[jex.ClosedJaxpr]:
        return [self.program.jaxpr]

    def pull(self, perturbed: PyTree, inputs: PyTree, cts: PyTree) -> PyTree:
        when, inputs = inputs
        marks = inexact_only(perturbed[1], inputs)
        wanted = tuple(not is_zero(ct) and is_inexact(ct) for ct in cts)
        zeros = [zero_cotangent(aval) for aval in self.in_avals_flat]
        zeros_when, zeros = split(zeros, len(when))
        if not (any(marks) and any(wanted)):
            return zeros_when, zeros
        program = self.program.pulled(marks, wanted)
        args = (when, [*inputs, *instantiated(pick(cts, wanted))])
        return zeros_when, put(zeros, marks, Checked(program, args)(*args))

    def reached_out(self, marks: Sequence[bool], axis_name: Hashable) -> list[bool]:
        if axis_name is not None:  # a batch has all outputs batched
            return super().reached_out(marks, axis_name)
        _, inputs = self.in_tree.unflatten(marks)
        return list(reached(self.program.jaxpr, tuple(inputs)))

    def batched(
        self, axis_data: BatchAxis, args: PyTree, dims: PyTree
    ) -> tuple[Formula, PyTree, list[int | None]]:
        (when, inputs), (when_dims, input_dims) = args, dims
        if not jax.tree.leaves(input_dims):
            program, dim = self.program, None
        else:
            program, dim = self.program.batched(axis_data, tuple(input_dims)), 0
        if any(dim is not None for dim in when_dims):
            when = [jnp.any(flag) for flag in when]
        args = (when, list(inputs))
        return Checked(program, args), args, [dim] * len(self.out_avals_flat)

    def with_bars(self, change: BarChange) -> Self:
        return self.rewritten(change)

    def rewritten(self, rewrite: Rewrite) -> Self:
        return self.with_params(program=self.program.rewritten(rewrite))


def _is_traced(inputs: Arrays) -> bool:
    """Whether these inputs belong to a program that is being traced."""
    # While a program is being traced, even an array made from nothing is a tracer.
    made = lax.iota(jnp.int32, 1)
    return any(isinstance(x, jax.core.Tracer) for x in (*inputs, made))


def _run_when(watch: Watch, when: Arrays, inputs: Arrays) -> PyTree:
    """Runs a program, and checks it if `when` says so."""
    if not when:
        return watch(inputs)

    def unwatched(inputs: Arrays) -> tuple[list[Value], Finding]:
        return watch.program(*inputs), varying(nothing(), inputs)

    def watched(inputs: Arrays) -> tuple[list[Value], Finding]:
        outs, finding = watch(inputs)
        return outs, varying(finding, inputs)

    return lax.cond(when[0], watched, unwatched, list(inputs))


@functools.lru_cache(maxsize=256)
def _compiled(program: Program) -> tuple[Watch, Value]:
    watch = Watch(program)
    run = lambda when, inputs: _run_when(watch, when, inputs)
    return watch, jax.jit(run)


def _raising(watch: Watch, finding: Finding, outs: list[Value]) -> list[Value]:
    """The outputs of a program, which fails if there is a finding."""
    # Each of them depends on the callback, so that it is called if one is used.

    def fail(*finding: PyTree) -> Value:
        raise_inside(watch.error(finding))

    def call(finding: Finding) -> PyTree:
        flag = jax.ShapeDtypeStruct((), np.bool_)
        return jax.pure_callback(fail, flag, *finding)

    finding = of_all_devices(finding)
    has_failed = lax.cond(
        finding.site > 0, call, lambda finding: finding.site > 0, finding
    )
    return [_tied(has_failed, out) for out in outs]


def _tied(has_failed: Value, out: PyTree) -> PyTree:
    if jnp.issubdtype(out.dtype, jax.dtypes.extended):
        return out
    return jnp.where(has_failed, jnp.zeros_like(out), out)
