"""Programs that read rows of a buffer and write others, so that XLA does it in place.

The way back past `rows.at[i].set(row)` reads the cotangent of row `i` and writes zeros
in its place. It does so at every step, so nothing in it may take as long as all of the
buffer does. Two things of JAX's own derivatives stand in the way:

- The read and the write do not depend on each other. XLA does not know that it could
  read first, and copies the whole buffer. Here a barrier says so. On the CPU, JAX 0.10
  copies it nevertheless.
- The cotangent of a row that was read is a buffer of zeros with that row in it, which
  is added to the others. Here the row alone is added.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.core
import jax.extend.core as jex
from jax import lax

from ..._equations import (
    Rewrite,
    computed_from,
    equations,
    formula_of,
    map_programs,
    renamed,
    rewrite_everywhere,
    with_equations,
)
from ..._partition import pick
from ..._programs import run
from ..._typecheck import PyTree

# Equations that read some rows of their first operand.
READS = frozenset({"dynamic_slice", "gather", "slice"})
# Equations whose result is their first operand but for some rows.
WRITES = frozenset({"dynamic_update_slice", "scatter", "scatter-add"})


def run_in_place(
    program: jex.ClosedJaxpr, f: Callable[..., PyTree], *args: PyTree
) -> PyTree:
    """Calls a function that is derived from a program, and need not copy its buffers.

    Args:
        program: The program. If it writes to no buffer, the function is just called.
        f: The function. It closes over no tracers.
        args: Its arguments.
    """
    if not writes_rows(program):
        return f(*args)
    flat, tree = jax.tree.flatten(args)
    on_flat = lambda *flat: f(*tree.unflatten(flat))
    traced, out = jax.make_jaxpr(on_flat, return_shape=True)(*flat)
    return jax.tree.unflatten(jax.tree.structure(out), run(in_place(traced), *flat))


@functools.lru_cache(maxsize=512)
def writes_rows(program: jex.ClosedJaxpr) -> bool:
    """Whether a program writes rows of a buffer, at any depth."""
    return any(eqn.primitive.name in WRITES for eqn in equations(program))


@functools.lru_cache(maxsize=512)
def in_place(program: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """A program of the same meaning that need not copy buffers to write to them."""
    return rewrite_everywhere(_level, program)


def _level(program: jex.ClosedJaxpr, rewrite: Rewrite) -> jex.ClosedJaxpr:
    jaxpr = program.jaxpr
    # A loop of this library does so itself, on its own way back.
    eqns = [
        map_programs(eqn, rewrite) if formula_of(eqn) is None else eqn
        for eqn in jaxpr.eqns
    ]
    outvars = list(jaxpr.outvars)
    if any(eqn.primitive.name in WRITES for eqn in eqns) and not jaxpr.effects:
        eqns = _with_rows_added(eqns)
        for write in [eqn for eqn in eqns if eqn.primitive.name in WRITES]:
            eqns, outvars = _with_reads_first(write.outvars[0], eqns, outvars)
    return with_equations(program, eqns, outvars)


def _with_rows_added(eqns: Sequence[jex.JaxprEqn]) -> list[jex.JaxprEqn]:
    """Equations that add rows to a buffer instead of all of a buffer of zeros."""
    made = {var: eqn for eqn in eqns for var in eqn.outvars}
    return [_with_row_added(eqn, made) for eqn in eqns]


def _with_row_added(
    eqn: jex.JaxprEqn, made: dict[jex.Var, jex.JaxprEqn]
) -> jex.JaxprEqn:
    if eqn.primitive.name != "add_any":
        return eqn
    for buffer, rows in (eqn.invars, eqn.invars[::-1]):
        scatter = _source(rows, made)
        # Of a `dynamic_update_slice` into zeros XLA makes this by itself.
        if scatter is None or scatter.primitive.name != "scatter-add":
            continue
        zeros = _source(scatter.invars[0], made)
        if zeros is not None and _is_zero(zeros):
            invars = [buffer, *scatter.invars[1:]]
            return scatter.replace(invars=invars, outvars=eqn.outvars)
    return eqn


def _source(
    atom: jax.core.Atom, made: dict[jex.Var, jex.JaxprEqn]
) -> jex.JaxprEqn | None:
    """The equation that computes something, if there is one."""
    return None if isinstance(atom, jex.Literal) else made.get(atom)


def _is_zero(eqn: jex.JaxprEqn) -> bool:
    number = eqn.invars[0] if eqn.invars else None
    is_number = isinstance(number, jex.Literal)
    is_repeated = eqn.primitive.name == "broadcast_in_dim"
    return is_repeated and is_number and not number.val


def _with_reads_first(
    written: jex.Var, eqns: list[jex.JaxprEqn], outvars: list[jax.core.Atom]
) -> tuple[list[jex.JaxprEqn], list[jax.core.Atom]]:
    """Equations in which a buffer is read before it is written to, if that can be.

    Args:
        written: The buffer after it has been written to.
        eqns: The equations.
        outvars: What is computed.

    Returns:
        The equations, and what is computed.
    """
    (write,) = (eqn for eqn in eqns if written in eqn.outvars)
    buffer, *others = write.invars
    reads = [eqn for eqn in eqns if eqn is not write and _reads(eqn, buffer)]
    values = [eqn.outvars[0] for eqn in reads]
    if (
        not reads
        or any(x is buffer for x in (*others, *outvars))
        or not all(eqn.primitive.name in READS for eqn in reads)
        or any(_reads(eqn, buffer, 1) for eqn in reads)
        or written in computed_from(eqns, values)
    ):
        return eqns, outvars
    barrier = _read_before([buffer, *values])
    after = dict(zip((buffer, *values), barrier.outvars, strict=True))
    early = computed_from(eqns, values)
    new = lambda x: renamed(x, after)
    is_early = [not early.isdisjoint(eqn.outvars) for eqn in eqns]
    first, rest = pick(eqns, is_early), pick(eqns, [not mark for mark in is_early])
    rest = [eqn.replace(invars=[*map(new, eqn.invars)]) for eqn in rest]
    return [*first, barrier, *rest], [*map(new, outvars)]


def _reads(eqn: jex.JaxprEqn, var: jax.core.Atom, start: int = 0) -> bool:
    return any(x is var for x in eqn.invars[start:])


def _read_before(variables: Sequence[jax.core.Atom]) -> jex.JaxprEqn:
    """An equation behind which all of these have been computed."""
    types = [var.aval for var in variables]
    traced = jax.make_jaxpr(lambda *x: lax.optimization_barrier(x))(*types)
    (eqn,) = traced.jaxpr.eqns
    return eqn.replace(invars=list(variables))
