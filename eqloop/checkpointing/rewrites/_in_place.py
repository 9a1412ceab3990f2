"""Rewrites programs that read and write rows of a buffer, so that XLA does not copy it.

The reversal of `rows.at[i].set(row)` reads row `i` of a cotangent, and writes zeros in
its place:

    ct_row = ct_rows[i];  ct_rows = ct_rows.at[i].set(0)

It does so at every step, so nothing in it may take time in proportion to the whole
buffer. Two things in JAX's own derivatives do:

- The read and the write do not depend on each other. If XLA happens to write first, it
  has to copy the buffer for the read. Here a barrier makes the write wait. Where XLA
  drops barriers, the write gets its index from the branch of a `cond` that reads.
- The cotangent of a row that was read, `rows[i]`, is a buffer of zeros with one row in
  it, and is added to the cotangent of the buffer. Here only the row is added.

It gains: without, steps that write rows take 3 to 8 times as long on a CPU.
"""

import functools
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax

from ..._arrays import pick, split
from ..._compat import drops_barriers
from ..._device import remembered_per_device
from ..._programs import (
    READS,
    WRITES,
    Rewrite,
    aval_of,
    computed_from,
    formula_of,
    makes_zeros,
    map_programs,
    renamed,
    rewrite_everywhere,
    row_write,
    run,
    with_equations,
)
from ..._types import PyTree, Value
from ..steps._buffers import writes_rows

# What a plan says of it.
NOTE = "rows of the cotangent of {} are read and written in place"


def run_in_place(
    program: jex.ClosedJaxpr, f: Callable[..., PyTree], *args: PyTree
) -> PyTree:
    """Calls a function that is a derivative of a program, rewritten by `in_place`.

    The function closes over no tracers, so that it can be traced by itself.
    """
    if not writes_rows(program):
        return f(*args)
    flat, tree = jax.tree.flatten(args)
    on_flat = lambda *flat: f(*tree.unflatten(flat))
    traced, out = jax.make_jaxpr(on_flat, return_shape=True)(*flat)
    return jax.tree.unflatten(jax.tree.structure(out), run(in_place(traced), *flat))


@remembered_per_device(maxsize=512)
def in_place(program: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """A program of the same meaning that need not copy buffers to write to them."""
    return rewrite_everywhere(_level, program)


def _level(program: jex.ClosedJaxpr, rewrite: Rewrite) -> jex.ClosedJaxpr:
    """Rewrites one level of a program, given how to rewrite the programs in it."""
    jaxpr = program.jaxpr
    # The loops of this library call `run_in_place` in their own sweeps.
    eqns = [
        map_programs(eqn, rewrite) if formula_of(eqn) is None else eqn
        for eqn in jaxpr.eqns
    ]
    outvars = list(jaxpr.outvars)
    # Equations are moved below, which would change the order of effects.
    if any(eqn.primitive.name in WRITES for eqn in eqns) and not jaxpr.effects:
        eqns = _with_rows_added(eqns)
        for write in [eqn for eqn in eqns if eqn.primitive.name in WRITES]:
            eqns, outvars = _with_reads_first(write.outvars[0], eqns, outvars)
    return with_equations(program, eqns, outvars)


def _with_rows_added(eqns: Sequence[jex.JaxprEqn]) -> list[jex.JaxprEqn]:
    """Equations that add rows to a buffer instead of all of a buffer of zeros."""
    made = {var: eqn for eqn in eqns for var in eqn.outvars}
    # The equation that a variable comes from, unless it is an input or a literal.
    source = lambda x: None if isinstance(x, jex.Literal) else made.get(x)

    def changed(eqn: jex.JaxprEqn) -> jex.JaxprEqn:
        both = eqn.invars if eqn.primitive.name == "add_any" else []
        for buffer, rows in zip(both, both[::-1], strict=True):
            scatter = source(rows)
            # XLA does this by itself for a `dynamic_update_slice` into zeros.
            if scatter is None or scatter.primitive.name != "scatter-add":
                continue
            zeros = source(scatter.invars[0])
            if zeros is not None and makes_zeros(zeros):
                invars = [buffer, *scatter.invars[1:]]
                return scatter.replace(invars=invars, outvars=eqn.outvars)
        return eqn

    return list(map(changed, eqns))


def _with_reads_first(
    written: jex.Var, eqns: list[jex.JaxprEqn], outvars: list[jax.core.Atom]
) -> tuple[list[jex.JaxprEqn], list[jax.core.Atom]]:
    """Makes one write to a buffer wait for all reads of it, if that is possible.

    `written` is the variable of the buffer after the write.
    """
    (write,) = (eqn for eqn in eqns if written in eqn.outvars)
    buffer, *others = write.invars
    reads = [eqn for eqn in eqns if eqn is not write and _reads(eqn, buffer)]
    values = [eqn.outvars[0] for eqn in reads]
    # Not if nothing is read; if the whole buffer is used elsewhere too, as then XLA has
    # to copy it anyway; if it is an index of a read; or if a read needs what is
    # written.
    if (
        not reads
        or any(x is buffer for x in (*others, *outvars))
        or not all(eqn.primitive.name in READS for eqn in reads)
        or any(_reads(eqn, buffer, 1) for eqn in reads)
        or written in computed_from(eqns, values)
    ):
        return eqns, outvars
    if drops_barriers() and _can_hand_on_index(eqns, reads, write):
        return _with_index_handed_on(eqns, reads, write), outvars
    # first: everything that the reads need, and the reads
    # barrier: the buffer and the values that were read, under new names
    # rest: everything else, the write among it, by the new names
    barrier = _barrier_for([buffer, *values])
    after = dict(zip((buffer, *values), barrier.outvars, strict=True))
    new = lambda x: renamed(x, after)
    first, rest = _parted(eqns, values)
    rest = [eqn.replace(invars=[*map(new, eqn.invars)]) for eqn in rest]
    return [*first, barrier, *rest], [*map(new, outvars)]


def _reads(eqn: jex.JaxprEqn, var: jax.core.Atom, start: int = 0) -> bool:
    """Whether a variable is an operand of an equation, from the `start`-th one on."""
    return any(x is var for x in eqn.invars[start:])


def _parted(
    eqns: Sequence[jex.JaxprEqn], variables: Sequence[jax.core.Atom]
) -> tuple[list[jex.JaxprEqn], list[jex.JaxprEqn]]:
    """The equations that some variables depend on, and the others."""
    early = computed_from(eqns, variables)
    is_early = [not early.isdisjoint(eqn.outvars) for eqn in eqns]
    return pick(eqns, is_early), pick(eqns, [not mark for mark in is_early])


def _barrier_for(variables: Sequence[jax.core.Atom]) -> jex.JaxprEqn:
    """An `optimization_barrier` that takes these variables."""
    types = [var.aval for var in variables]
    traced = jax.make_jaxpr(lambda *x: lax.optimization_barrier(x))(*types)
    (eqn,) = traced.jaxpr.eqns
    return eqn.replace(invars=list(variables))


def _index_variables(write: jex.JaxprEqn) -> list[jex.Var]:
    """The variables that say where an equation writes."""
    written = row_write(write)
    assert written is not None
    return [x for x in _variables(written.at) if aval_of(x).size]


def _variables(atoms: Iterable[jax.core.Atom]) -> list[jex.Var]:
    return list(dict.fromkeys(x for x in atoms if isinstance(x, jex.Var)))


def _can_hand_on_index(
    eqns: Sequence[jex.JaxprEqn], reads: Sequence[jex.JaxprEqn], write: jex.JaxprEqn
) -> bool:
    """Whether no place of a read or of the write depends on what is read."""
    index = _index_variables(write)
    at = _variables(x for eqn in reads for x in eqn.invars)
    needed = computed_from(eqns, [*at, *index])
    return bool(index) and needed.isdisjoint(eqn.outvars[0] for eqn in reads)


def _with_index_handed_on(
    eqns: Sequence[jex.JaxprEqn], reads: Sequence[jex.JaxprEqn], write: jex.JaxprEqn
) -> list[jex.JaxprEqn]:
    """Makes a write wait for reads without a barrier."""
    # The reads move into a `cond` that also returns the index to write at. XLA does not
    # take a `cond` apart, so it is computed as a whole before the write can start. Both
    # branches do the same, but XLA must not notice: it would move what is equal out of
    # them. So one branch is for an index of zero, and computes that as `x - x`.
    #
    #     at, row = cond(i == 0, (i - i, rows[i]), (i, rows[i]))
    #     rows = rows.at[at].set(...)
    index, values = _index_variables(write), [eqn.outvars[0] for eqn in reads]
    operands = _variables([*index, *(x for eqn in reads for x in eqn.invars)])

    def read(*inputs: Value) -> list[Value]:
        known = dict(zip(operands, inputs, strict=True))
        of = lambda x: x.val if isinstance(x, jex.Literal) else known[x]
        bind = lambda eqn: eqn.primitive.bind(*map(of, eqn.invars), **eqn.params)
        return [*inputs[: len(index)], *map(bind, reads)]

    def at_zero(*inputs: Value) -> list[Value]:
        at, rows = split(read(*inputs), len(index))
        return [*(x - x for x in at), *rows]

    def branched(*inputs: Value) -> list[Value]:
        starts = [jnp.all(x == 0) for x in inputs[: len(index)]]
        is_zero = functools.reduce(jnp.logical_and, starts)
        return lax.cond(is_zero, at_zero, read, *inputs)

    traced = jax.make_jaxpr(branched)(*map(aval_of, operands))
    names = dict(zip(traced.jaxpr.invars, operands, strict=True))
    names.update(zip(traced.jaxpr.outvars[len(index) :], values, strict=True))
    name = lambda x: renamed(x, names)
    branch = [
        eqn.replace(invars=[*map(name, eqn.invars)], outvars=[*map(name, eqn.outvars)])
        for eqn in traced.jaxpr.eqns
    ]
    after = dict(zip(index, traced.jaxpr.outvars, strict=False))
    late = write.replace(invars=[renamed(x, after) for x in write.invars])
    eqns = [late if eqn is write else eqn for eqn in eqns if eqn not in reads]
    first, rest = _parted(eqns, operands)
    return [*first, *branch, *rest]
