"""A program that is checked, as a primitive of its own.

Its derivatives are the checked derivatives of the program, and under `vmap` it is the
checked program of the batch: one program, with one report.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any, Self, TypeAlias

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._arrays import Arrays, Flags, instantiated, is_inexact, is_zero, pick, put
from .._programs import (
    Doubled,
    Formula,
    ProgramCall,
    equations,
    formula_of,
    is_watched,
    refuse_callbacks,
    run,
    traced,
    vjp_of,
)
from .._types import Aval, BatchAxis, PyTree, Value
from ..tracing import NonFiniteError, raise_inside
from ._finding import Finding, first, nothing, of_all_devices
from ._sites import Argument, Site
from ._watch import Context, Watch

# All places where a program may fail, found while it is traced.
Sites: TypeAlias = list[Site | Argument]
Names: TypeAlias = tuple[str, ...]


class Checked(ProgramCall):
    """`(*when, *inputs) -> outputs`; without `when` it is always checked.

    Attributes:
        names: What its inputs are called.
        outputs: What its outputs are called.
        has_when: Whether its first input says whether it is checked.
    """

    names: Names
    outputs: Names
    has_when: bool
    # One program takes the whole derivative, so that there is one report.
    sweep_forward, sweep_back = Formula.sweep_forward, Formula.sweep_back

    def expand(self, *inputs: Value) -> list[Value]:
        if is_watched.value:  # by another one around this
            return run(self.program, *inputs)
        if _is_traced(inputs):
            sites: Sites = []
            outs, finding = _run(self, sites, *inputs)
            return _raising(sites, finding, outs)
        # No callback is needed here: the finding can be read.
        evaluate, sites = _compiled(self)
        outs, finding = evaluate(*inputs)
        if finding.site > 0:
            raise NonFiniteError(_message(sites, jax.device_get(finding)))
        return outs

    def doubled(self, nonzeros: Flags) -> Doubled:
        formulas = filter(None, map(formula_of, equations(self.program)))
        refuse_callbacks(
            itertools.chain(*(formula.effects for formula in formulas)),
            "DebugNonFinite runs a loop for its value, and again for its tangents",
            "Leave it out",
        )
        doubled = super().doubled(nonzeros)
        names = *self.names, *_each("tangent", pick(self.names, nonzeros))
        outputs = *self.outputs, *_each("tangent", pick(self.outputs, doubled.gives))
        formula = self._of(doubled.formula.program, names, outputs)
        return dataclasses.replace(doubled, formula=formula)

    def pull(self, perturbed: PyTree, inputs: PyTree, cts: PyTree) -> PyTree:
        marks, zeros = self._marks(perturbed), self.zero_cts()
        wanted = tuple(not is_zero(ct) and is_inexact(ct) for ct in cts)
        if not (any(marks) and any(wanted)):
            return zeros
        program = vjp_of(self.program, (marks,), (wanted,))
        names = *self.names, *_each("cotangent", pick(self.outputs, wanted))
        outputs = _each("cotangent", pick(self.names, marks))
        back = self._of(program, names, outputs)
        return tuple(put(zeros, marks, back(*inputs, *instantiated(pick(cts, wanted)))))

    def batched(
        self, axis_data: BatchAxis, args: PyTree, dims: PyTree
    ) -> tuple[Formula, PyTree, list[int | None]]:
        args, dims = list(args), list(dims)
        if self.has_when and dims[0] is not None:
            args[0], dims[0] = jnp.any(args[0]), None
        formula, args, out_dims = super().batched(axis_data, args, dims)
        return self._of(formula.program, self.names, self.outputs), args, out_dims

    def _of(self, program: jex.ClosedJaxpr, names: Names, outputs: Names) -> Self:
        settings = dict(names=names, outputs=outputs, has_when=self.has_when)
        return type(self)(program, **settings)


@functools.lru_cache(maxsize=256)
def with_inputs(jaxpr: jex.Jaxpr, types: tuple[Aval, ...]) -> jex.ClosedJaxpr:
    """A program that takes its constants as inputs, perhaps behind one for `when`."""
    num_consts = len(jaxpr.constvars)

    def run(*flat: Value) -> list[Value]:
        flat = flat[len(types) - num_consts - len(jaxpr.invars) :]
        return jax.core.eval_jaxpr(jaxpr, flat[:num_consts], *flat[num_consts:])

    return traced(run, types)


def _each(what: str, names: Sequence[str]) -> Names:
    return tuple(f"the {what} of {name}" for name in names)


def _is_traced(inputs: Arrays) -> bool:
    """Whether these inputs belong to a program that is being traced."""
    # While a program is being traced, even an array made from nothing is a tracer.
    made = lax.iota(jnp.int32, 1)
    return any(isinstance(x, jax.core.Tracer) for x in (*inputs, made))


@functools.lru_cache(maxsize=256)
def _compiled(call: Checked) -> tuple[Any, Sites]:
    sites: Sites = []
    return jax.jit(functools.partial(_run, call, sites)), sites


def _run(call: Checked, sites: Sites, *inputs: Value) -> tuple[list[Value], Finding]:
    """Runs a program, checked if it is to be: its outputs, and what was found."""

    def watched(*inputs: Value) -> tuple[list[Value], Finding]:
        watch = Watch(sites, (), nothing())
        outs = watch.run(call.program, inputs, Context())
        finding = watch.finding()
        return outs, first(finding, _given(call.names, watch, inputs, outs))

    if not call.has_when:
        return watched(*inputs)
    unwatched = lambda *inputs: (run(call.program, *inputs), nothing())
    return lax.cond(inputs[0], watched, unwatched, *inputs)


def _given(names: Sequence[str], watch: Watch, inputs: Arrays, outs: Arrays) -> Finding:
    """The argument that has a NaN, if a result has one."""
    # A NaN that reaches no result is meant to be there, as for missing data.
    is_new = lambda out: all(out is not x for x in inputs)
    results = [out for out in outs if is_inexact(out) and is_new(out)]
    named = [x for x in zip(names, inputs, strict=True) if is_inexact(x[1])]
    if not (results and named):
        return nothing()
    number = len(watch.sites) + 1
    watch.sites.extend(Argument(name, jax.typeof(x)) for name, x in named)
    given, places = _have_nan(watch, [x for _, x in named])
    is_wrong = given.any() & _have_nan(watch, results)[0].any()
    which = lax.argmax(given, 0, jnp.int32)
    site = jnp.where(is_wrong, number + which, 0)
    return nothing()._replace(site=site, where=places[which])


def _have_nan(watch: Watch, arrays: Arrays) -> tuple[Value, Value]:
    """Which of some arrays have a NaN, and the number of the first entry."""
    low, _, where = map(jnp.stack, zip(*map(watch.extent, arrays), strict=True))
    return jnp.isnan(low), where


def _message(sites: Sites, finding: PyTree) -> str:
    """What the error says."""
    site, *found = finding
    return sites[int(site) - 1].describe(*found)


def _raising(sites: Sites, finding: Finding, outs: list[Value]) -> list[Value]:
    """The outputs of a program, which fails if there is a finding."""
    # Each of them depends on the callback, so that it is called if one is used.

    def fail(*finding: PyTree) -> Value:
        raise_inside(NonFiniteError(_message(sites, finding)))

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
