"""The equations of programs: finding them, and rewriting them, however deep they are.

A program is a closed jaxpr. In JAX 0.10 an equation may also hold an open one, which
has no constants.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import jax.core
import jax.extend.core as jex

from .._compat import (
    CALLS,
    close,
    form_of,
    form_params,
    is_open,
    programs_held,
    with_form_params,
)
from .._types import AnyJaxpr, Aval, Value

if TYPE_CHECKING:
    from ._formula import Formula

Rewrite: TypeAlias = Callable[[jex.ClosedJaxpr], jex.ClosedJaxpr]
# From an equation to the programs in it that a walk enters.
Inside: TypeAlias = Callable[[Any], Sequence[Any]]

# The primitives whose jaxprs are programs like the one around them, so that another
# program of the same meaning may take their place. The jaxpr of a `reduce` or of a
# Pallas kernel, for example, is not such a program.
_WITH_PROGRAMS = frozenset(
    {
        *CALLS,
        "cond",
        "custom_jvp_call",
        "custom_vjp_call",
        "scan",
        "shard_map",
        "while",
    }
)


def programs_in(eqn: jex.JaxprEqn) -> list[AnyJaxpr]:
    """All programs that an equation runs."""
    formula = formula_of(eqn)
    return programs_held(eqn) if formula is None else [*formula.jaxprs]


def rewritable_programs(eqn: jex.JaxprEqn) -> list[jex.ClosedJaxpr]:
    """The programs in an equation that may be rewritten, closed."""
    found: list[jex.ClosedJaxpr] = []

    def note(program: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
        found.append(program)
        return program

    map_programs(eqn, note)
    return found


def equations(
    program: AnyJaxpr, inside: Inside = programs_in
) -> Iterator[jex.JaxprEqn]:
    """All equations of a program, each followed by those of the programs in it.

    Args:
        program: The program.
        inside: Which programs in an equation to look into.
    """
    for eqn in program.eqns:
        yield from equations_of(eqn, inside)


def equations_of(
    eqn: jex.JaxprEqn, inside: Inside = programs_in
) -> Iterator[jex.JaxprEqn]:
    """An equation, followed by those of the programs in it."""
    yield eqn
    for program in inside(eqn):
        yield from equations(program, inside)


def formula_of(eqn: jex.JaxprEqn) -> "Formula | None":
    """The primitive of this library that an equation is, if it is one."""
    # Recognised by a method, since the file of the class imports this one.
    primitive = eqn.params.get("_prim")
    return primitive if hasattr(primitive, "rewritten") else None


def aval_of(atom: jax.core.Atom) -> Aval:
    """The type of a variable or a literal."""
    return atom.aval  # annotated by JAX as a type without shape and dtype


def map_equations(
    program: jex.ClosedJaxpr, change: Callable[[jex.JaxprEqn], jex.JaxprEqn]
) -> jex.ClosedJaxpr:
    """A program with its equations changed, those of inner programs first.

    Custom rules that are Python functions, as those of a `jax.custom_vjp`, stay as they
    are.

    Args:
        program: The program.
        change: From an equation to the one that replaces it.

    Returns:
        The program with the new equations; the very same object if none changed.
    """

    def level(program: jex.ClosedJaxpr, rewrite: Rewrite) -> jex.ClosedJaxpr:
        inner = lambda param: _map_param(param, rewrite)
        eqns = [change(map_params(eqn, inner)) for eqn in program.eqns]
        return with_equations(program, eqns)

    return rewrite_everywhere(level, program)


def with_equations(
    program: jex.ClosedJaxpr,
    eqns: Sequence[jex.JaxprEqn],
    outvars: Sequence[jax.core.Atom] | None = None,
) -> jex.ClosedJaxpr:
    """A program with other equations; the very same object if none of them changed.

    Args:
        program: The program.
        eqns: The new equations.
        outvars: The new outputs, if they have changed with the equations.
    """
    jaxpr = program.jaxpr
    if len(eqns) == len(jaxpr.eqns) and _same(eqns, jaxpr.eqns):
        return program
    new = list(jaxpr.outvars) if outvars is None else list(outvars)
    jaxpr = jaxpr.replace(eqns=list(eqns), outvars=new)
    return jex.ClosedJaxpr(jaxpr, program.consts)


def renamed(atom: jax.core.Atom, names: Mapping[Any, Any]) -> Any:
    """The new name of a variable, if it has one; a literal stays the same."""
    return atom if isinstance(atom, jex.Literal) else names.get(atom, atom)


def computed_from(
    eqns: Sequence[jex.JaxprEqn], variables: Iterable[jax.core.Atom]
) -> set[jax.core.Atom]:
    """Some variables, and all variables that they are computed from by equations."""
    needed = set(variables)
    for eqn in reversed(eqns):
        if not needed.isdisjoint(eqn.outvars):
            needed.update(x for x in eqn.invars if isinstance(x, jex.Var))
    return needed


def rewrite_everywhere(
    level: Callable[[jex.ClosedJaxpr, Rewrite], jex.ClosedJaxpr],
    program: jex.ClosedJaxpr,
) -> jex.ClosedJaxpr:
    """Rewrites a program and the programs in its equations.

    A program that is called in several places is rewritten once, and stays shared.

    Args:
        level: Rewrites one level of a program. Its second argument rewrites the
            programs below, and is called by `level` for those that it wants rewritten.
        program: The program.
    """
    # By identity. Each program is kept with its result, so that it is not freed, and no
    # other object gets its id.
    done: dict[int, tuple[jex.ClosedJaxpr, jex.ClosedJaxpr]] = {}

    def rewrite(program: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
        if id(program) not in done:
            done[id(program)] = program, level(program, rewrite)
        return done[id(program)][1]

    return rewrite(program)


def map_programs(eqn: jex.JaxprEqn, rewrite: Rewrite) -> jex.JaxprEqn:
    """An equation with its programs rewritten, where any of the same meaning will do.

    Args:
        eqn: The equation.
        rewrite: From a program to one of the same meaning and signature.

    Returns:
        The new equation; the very same object if nothing changed.
    """
    if (formula := formula_of(eqn)) is not None:
        new = formula.rewritten(rewrite)
        return eqn if new is formula else eqn.replace(params={"_prim": new})
    if form_of(eqn) not in _WITH_PROGRAMS:
        return eqn
    return map_params(eqn, lambda param: _map_param(param, rewrite))


def map_params(eqn: jex.JaxprEqn, change: Callable[[object], object]) -> jex.JaxprEqn:
    """An equation with its parameters changed; the very same object if none is."""
    old = form_params(eqn)
    params = {name: change(value) for name, value in old.items()}
    if all(params[name] is value for name, value in old.items()):
        return eqn
    return with_form_params(eqn, params)


def _map_param(param: Value, rewrite: Rewrite) -> Value:
    if isinstance(param, jex.ClosedJaxpr):
        return rewrite(param)
    # An open jaxpr with constants is not a program of ours to rewrite, but part of
    # another library's primitive, such as the operator in an equation of lineax (JAX
    # 0.10). That library keeps the values of its constants.
    if is_open(param) and param.constvars:
        return param
    if is_open(param):
        closed = close(param)
        new = rewrite(closed)
        return param if new is closed else new.jaxpr
    # Branches. A named tuple is left alone: it would have to be rebuilt by its class.
    if type(param) in (tuple, list):
        new = type(param)(_map_param(entry, rewrite) for entry in param)
        return param if _same(new, param) else new
    return param


def _same(new: Sequence[object], old: Sequence[object]) -> bool:
    return all(a is b for a, b in zip(new, old, strict=True))
