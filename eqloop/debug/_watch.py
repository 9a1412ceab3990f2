"""Runs a program, and checks the results of its operations.

Of every number that is checked, and of every operand of what is checked, the least and
the greatest are computed. They tell which equation, if any, was the first to fail: once
for all equations between two that have programs of their own, such as loops. So a
program runs as it is, with a reduction beside each array that matters. What was found
is handed on from one loop, step or branch to the next.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax
from jax.extend import source_info_util
from jax.sharding import PartitionSpec

from .._arrays import Arrays, describe, has_dtype, is_inexact, split, where_leading
from .._compat import CALLS, close, form_of, form_params, scan_counts
from .._programs import (
    Formula,
    Place,
    interpreted,
    is_watched,
    loop_name,
    place_of,
    position_p,
)
from .._types import AnyJaxpr, PyTree, Value
from ._can_fail import SAME_NUMBERS, can_fail, holds_numbers
from ._finding import (
    Extent,
    Finding,
    extent,
    first,
    first_failed,
    nothing,
    of_all_devices,
)
from ._sites import Argument, Frame, Site, SweepKind, is_of_jax, is_ours


@dataclasses.dataclass(frozen=True)
class Context:
    """The surroundings of what is run, other than loops.

    Attributes:
        eqn: The equation that runs it, if it is not the whole program.
        sweep: The sweep that it is part of.
        is_expanded: Whether it is part of what a primitive of this library does.
        label: What the loop that such a primitive runs is called.
        place: Where the function of JAX is called that has it, if there is one.
        here: Its own place, or where the loop or call is that has it.
    """

    eqn: Any = None
    sweep: SweepKind = SweepKind.FORWARD
    is_expanded: bool = False
    label: str | None = None
    place: Place | None = None
    here: Place | None = None

    def of(self, eqn: jex.JaxprEqn) -> "Context":
        """The context inside an equation."""
        stack = str(eqn.source_info.name_stack)
        sweep = SweepKind.DIFFERENTIATED if "jvp(" in stack else SweepKind.FORWARD
        sweep = max(self.sweep, SweepKind.BACKWARD if "transpose(" in stack else sweep)
        here = self.place or place_of(eqn.source_info) or self.here
        return dataclasses.replace(self, eqn=eqn, sweep=sweep, here=here)


class Watch:
    """One run of a program, or of what a loop or a branch runs.

    Attributes:
        sites: All places of the whole program; that of number `i` is `sites[i - 1]`.
        at: The loops around it, the outermost first, each with the index of the step
            that it is at; `None` as long as that is not known.
    """

    def __init__(
        self,
        sites: list[Site | Argument],
        at: tuple[tuple[Frame, Any], ...],
        finding: Finding,
    ):
        self.sites, self.at, self._finding = sites, at, finding
        # By id, with the array itself, so that no other array gets the same id.
        self._extents: dict[int, tuple[Value, Extent]] = {}
        # The extents of a result and its operands, for each of the last sites.
        self._checks: list[list[Extent]] = []

    def run(self, program: AnyJaxpr, inputs: Arrays, context: Context) -> list[Value]:
        """Runs a program, and returns its outputs."""
        evaluate = functools.partial(self._evaluate, context)
        return interpreted(program, inputs, lambda x: x.val, evaluate, lambda x: x)

    def extent(self, x: Value) -> Extent:
        """The extent of an array."""
        if id(x) not in self._extents:
            self._extents[id(x)] = x, extent(x)
        return self._extents[id(x)][1]

    def finding(self) -> Finding:
        """What was found so far."""
        if self._checks:
            site = len(self.sites) - len(self._checks) + 1
            new = first_failed(self._checks, site, [index for _, index in self.at])
            self._finding, self._checks = first(self._finding, new), []
        return self._finding

    # Equations.

    def _evaluate(
        self, context: Context, eqn: jex.JaxprEqn, operands: Arrays
    ) -> Sequence[Value]:
        if eqn.primitive is position_p:
            self.finding()
            *outer, (frame, _) = self.at
            frame = dataclasses.replace(frame, count=eqn.params["count"])
            self.at = (*outer, (frame, operands[0]))
            return []
        rule = _RULES.get(form_of(eqn))
        if rule is not None:
            return rule(self, context.of(eqn), operands)
        return self._opaque(eqn, operands, context)

    def _opaque(
        self, eqn: jex.JaxprEqn, operands: Arrays, context: Context
    ) -> Sequence[Value]:
        """Runs an equation, and checks its results."""
        outs = _bind_again(eqn, operands)
        if eqn.primitive.name in SAME_NUMBERS:
            for out, operand in zip(outs, operands, strict=False):
                if (known := self._extents.get(id(operand))) is not None:
                    self._extents[id(out)] = out, known[1]
        if can_fail(eqn):
            self._check(eqn, operands, outs, context.of(eqn))
        return outs

    def _check(
        self, eqn: jex.JaxprEqn, operands: Arrays, outs: Arrays, context: Context
    ) -> None:
        """Checks whether finite operands gave results that are not finite."""
        given = [
            (x, describe(atom.aval))
            for x, atom in zip(operands, eqn.invars, strict=True)
            if _has_extent(x)
        ]
        ranges = [self.extent(x) for x, _ in given]
        name, types = eqn.primitive.name, tuple(text for _, text in given)
        frames = tuple(frame for frame, _ in self.at)
        for out, var in zip(outs, eqn.outvars, strict=True):
            if _has_extent(out) and is_inexact(out):
                self.sites.append(
                    Site(name, context.here, types, frames, context.sweep, var.aval)
                )
                self._checks.append([self.extent(out), *ranges])

    def _call(self, context: Context, operands: Arrays) -> Sequence[Value]:
        """Runs the program of a call as part of the one that calls it."""
        eqn = context.eqn
        program = close(form_params(eqn)[CALLS.get(form_of(eqn), "call_jaxpr")])
        if is_of_jax(program.jaxpr):
            # JAX remembers what it has traced, with the line that first called it.
            context = dataclasses.replace(context, place=context.here)
        if eqn.params.get("differentiated") and eqn.params.get("prevent_cse"):
            # XLA must not merge a recomputation with the first computation.
            operands = lax.optimization_barrier(list(operands))
        return self.run(program, operands, context)

    def _formula(self, context: Context, operands: Arrays) -> Sequence[Value]:
        """Checks the operations that a primitive of this library expands to."""
        eqn, formula = context.eqn, context.eqn.params["_prim"]
        if not isinstance(formula, Formula):
            return self._opaque(eqn, operands, context)
        # So the operations that it adds are reported where it was called.
        stack = source_info_util.new_name_stack()
        at = source_info_util.user_context(eqn.source_info.traceback, name_stack=stack)
        with is_watched(True), at:
            program = formula.expanded
        label = loop_name(eqn.source_info.name_stack) or context.label
        context = dataclasses.replace(context, is_expanded=True, label=label)
        if formula.unit is None:
            return self.run(program, operands, context)
        frame = Frame(label or "the loop", context.here, formula.unit)
        sweep = SweepKind.BACKWARD if formula.is_backward else context.sweep
        context = dataclasses.replace(context, sweep=sweep, label=None)
        watch = Watch(self.sites, (*self.at, (frame, None)), self.finding())
        outs = watch.run(program, operands, context)
        self._finding = watch.finding()
        return outs

    def _cond(self, context: Context, operands: Arrays) -> Sequence[Value]:
        index, *operands = operands
        programs = context.eqn.params["branches"]

        def branch(program: AnyJaxpr, finding: Finding, *args: Value) -> PyTree:
            watch = Watch(self.sites, self.at, finding)
            return watch.run(program, args, context), watch.finding()

        branches = [functools.partial(branch, program) for program in programs]
        index = index.astype(jnp.int32)
        outs, self._finding = lax.switch(index, branches, self.finding(), *operands)
        return outs

    def _shard_map(self, context: Context, operands: Arrays) -> Sequence[Value]:
        params, before = context.eqn.params, self.finding()

        def run(*args: Value) -> PyTree:
            watch = Watch(self.sites, self.at, nothing())
            outs = watch.run(params["jaxpr"], args, context)
            return tuple(outs), of_all_devices(watch.finding())

        mapped = jax.shard_map(
            run,
            mesh=params["mesh"],
            in_specs=tuple(params["in_specs"]),
            out_specs=(tuple(params["out_specs"]), PartitionSpec()),
            axis_names=set(params["newly_manual_axes"]),
            check_vma=params["check_vma"],
        )
        outs, finding = mapped(*operands)
        self._finding = first(before, finding)
        return outs

    # Loops.

    def _scan(self, context: Context, operands: Arrays) -> Sequence[Value]:
        params = context.eqn.params
        num_consts, num_carry = scan_counts(params)
        consts, init, xs = split(operands, num_consts, num_carry)

        def step(state: PyTree, x: PyTree) -> PyTree:
            (finding, carry), (index, x) = state, x
            watch, inner = self._inside(context, finding, index)
            outs = watch.run(params["jaxpr"], [*consts, *carry, *x], inner)
            carry, ys = split(outs, num_carry)
            return (watch.finding(), carry), ys

        (self._finding, carry), ys = lax.scan(
            step,
            (self.finding(), init),
            (lax.iota(jnp.int32, params["length"]), xs),
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [*carry, *ys]

    def _while(self, context: Context, operands: Arrays) -> Sequence[Value]:
        params = context.eqn.params
        num_consts = params["cond_nconsts"], params["body_nconsts"]
        of_cond, of_body, init = split(operands, *num_consts)

        def begun(watch: Watch, inner: Context, carry: Arrays) -> PyTree:
            (again,) = watch.run(params["cond_jaxpr"], [*of_cond, *carry], inner)
            return again, watch.finding(), carry

        def step(state: PyTree) -> PyTree:
            count, (again, finding, before) = state
            watch, inner = self._inside(context, finding, count)
            carry = watch.run(params["body_jaxpr"], [*of_body, *before], inner)
            if again.shape:
                # Under `vmap`, examples that have stopped keep their carry.
                keep = functools.partial(where_leading, again)
                carry = list(map(keep, carry, before))
            again, finding, carry = begun(watch, inner, carry)
            return count + 1, (again & finding.may_go_on, finding, carry)

        state = jnp.int32(0), begun(*self._inside(context, self.finding()), init)
        _, (_, self._finding, carry) = lax.while_loop(
            lambda state: state[1][0].any(), step, state
        )
        return carry

    def _inside(
        self, context: Context, finding: Finding, index: Any = None
    ) -> tuple["Watch", Context]:
        """What watches a step of a loop of JAX's, and the context of that."""
        eqn, length = context.eqn, context.eqn.params.get("length")
        name, at = loop_name(eqn.source_info.name_stack), self.at
        if name is None and context.is_expanded and is_ours(eqn.source_info):
            # A loop that the user did not write may run over the steps of one block.
            if at and at[-1][1] is not None and length == at[-1][0].count:
                *outer, (frame, start) = at
                frame = dataclasses.replace(frame, count=1)
                at = (*outer, (frame, start + index))
        else:
            name = name or ("lax.while_loop" if length is None else "lax.scan")
            at = (*at, (Frame(name, context.here), index))
            context = dataclasses.replace(context, is_expanded=False, label=None)
        return Watch(self.sites, at, finding), context


def _bind_again(eqn: jex.JaxprEqn, operands: Arrays) -> Sequence[Value]:
    """What an equation gives."""
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    traceback = eqn.source_info.traceback
    params = eqn.primitive.get_bind_params(eqn.params)
    with source_info_util.user_context(traceback, name_stack=stack), eqn.ctx.manager:
        outs = eqn.primitive.bind(*operands, **params)
    return outs if eqn.primitive.multiple_results else [outs]


def _has_extent(x: Value) -> bool:
    return has_dtype(x) and holds_numbers(x)


_Rule: TypeAlias = Callable[[Watch, Context, Arrays], Sequence[Value]]
_CALLS = *CALLS, "custom_jvp_call", "custom_vjp_call"
_RULES: dict[str, _Rule] = {
    **dict.fromkeys(_CALLS, Watch._call),
    "call_hi_primitive": Watch._formula,
    "cond": Watch._cond,
    "scan": Watch._scan,
    "shard_map": Watch._shard_map,
    "while": Watch._while,
}
