"""Makes and rewrites jaxprs: the one place that knows what JAX makes them of.

A program is a closed jaxpr. In JAX 0.10 an equation may also hold an open one, which
has no constants.

- **Made anew**: `program_from` from equations, `with_parts` from another program.
- **Less of it**: `without_dead_code`, `pruned`, `inputs_read`, and `parted` in two.
- **Rewritten**: `rewrite_everywhere` enters the programs in a program, and `Rewriter`
  writes one level of it, equation by equation.

If nothing changes, the result is the very program that was given. So a fixed point is
told by identity, and other caches hold.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.core
import jax.extend.core as jex
from jax.interpreters import partial_eval

from .._arrays import Flags, is_inexact
from .._compat import (
    CALLS,
    close,
    effect_on,
    form_of,
    form_params,
    is_high,
    is_open,
    with_form_params,
)
from .._types import AnyJaxpr, Value
from ._equations import Rewrite, aval_of, formula_of, with_formula
from ._places import place_of

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


# Made anew.


def jaxpr_of(
    eqns: Sequence[jex.JaxprEqn],
    invars: Iterable[jex.Var],
    outvars: Iterable[jax.core.Atom],
    constvars: Iterable[jex.Var] = (),
) -> jex.Jaxpr:
    """A jaxpr of equations, whose constants have no values yet."""
    effects = frozenset(effect for eqn in eqns for effect in eqn.effects)
    info = jex.DebugInfo("eqns_to_jaxpr", "eqns_to_jaxpr", None, None)
    made = jex.Jaxpr([*constvars], [*invars], [*outvars], [*eqns], effects, info)
    return made.replace(is_high=any(map(is_high, eqns)))


def program_from(
    eqns: Sequence[jex.JaxprEqn],
    invars: Iterable[jex.Var],
    outvars: Iterable[jax.core.Atom],
) -> jex.ClosedJaxpr:
    """A program of equations, which read nothing but these inputs."""
    return jex.ClosedJaxpr(jaxpr_of(eqns, invars, outvars), [])


def variables(types: Iterable[Any]) -> list[Any]:
    """New variables of these types."""
    return [jex.Var(aval) for aval in types]


def alone(eqn: jex.JaxprEqn) -> jex.ClosedJaxpr:
    """A program of one equation, with an input for each of its operands."""
    # New variables, as an operand may be a literal, or be there twice.
    invars, outvars = (variables(map(aval_of, v)) for v in (eqn.invars, eqn.outvars))
    return program_from([eqn.replace(invars=invars, outvars=outvars)], invars, outvars)


def calling(f: Callable[..., Any], operands: Sequence[jax.core.Atom]) -> jex.JaxprEqn:
    """An equation that calls a function with these operands."""
    # With `jax.disable_jit` there would be the equations of the function.
    with jax.disable_jit(False):
        (call,) = jax.make_jaxpr(jax.jit(f))(*map(aval_of, operands)).eqns
    return call.replace(invars=[*operands])


def with_parts(
    program: jex.ClosedJaxpr,
    *,
    invars: Iterable[jex.Var] | None = None,
    eqns: Iterable[jex.JaxprEqn] | None = None,
    outvars: Iterable[jax.core.Atom] | None = None,
    constants: Mapping[jex.Var, Any] | None = None,
) -> jex.ClosedJaxpr:
    """A program some of whose parts are others; it keeps those that are not given.

    `constants` are the variables that are constants, with their values.
    """
    old, consts = program.jaxpr, program.consts
    parts = {"invars": invars, "eqns": eqns, "outvars": outvars, "constvars": constants}
    new: dict[str, Any]
    new = {name: list(part) for name, part in parts.items() if part is not None}
    new["is_high"] = old.is_high or any(map(is_high, new.get("eqns", ())))
    # JAX names inputs and outputs for its errors, and forgets this when they change.
    consts = consts if constants is None else list(constants.values())
    return jex.ClosedJaxpr(old.replace(**new), consts)


def with_equations(
    program: jex.ClosedJaxpr,
    eqns: Sequence[jex.JaxprEqn],
    outvars: Sequence[jax.core.Atom] | None = None,
) -> jex.ClosedJaxpr:
    """A program with other equations; the very same object if none of them changed.

    `outvars` are the new outputs, if they have changed with the equations.
    """
    if len(eqns) == len(program.eqns) and _same(eqns, program.eqns):
        return program
    return with_parts(program, eqns=eqns, outvars=outvars)


def renamed(atom: jax.core.Atom, names: Mapping[Any, Any]) -> Any:
    """The new name of a variable, if it has one; a literal stays the same."""
    return atom if isinstance(atom, jex.Literal) else names.get(atom, atom)


# What JAX knows of the function that a jaxpr was traced from.


def traced_function(program: AnyJaxpr) -> tuple[str, str | None]:
    """The name of the function that was traced, and its file if that is known."""
    info = program.debug_info
    return (info.func_src_info or "").split(" ")[0], info.func_filename


def input_names(program: jex.ClosedJaxpr) -> list[str]:
    """What the function that was traced calls each input, empty if it is not known."""
    names, count = program.debug_info.arg_names or (), len(program.jaxpr.invars)
    return [*names, *[""] * count][:count]


# Less of it.


def without_dead_code(
    program: jex.ClosedJaxpr,
    used: Sequence[bool] | None = None,
    keep: bool | Sequence[bool] = False,
) -> tuple[jex.ClosedJaxpr, list[bool]]:
    """A program without what no output needs, and which of the inputs it still has.

    `used` marks outputs to keep, all by default, and `keep` inputs that stay anyway.
    """
    jaxpr = program.jaxpr
    used = [True] * len(jaxpr.outvars) if used is None else list(used)
    names = jaxpr.debug_info.arg_names
    if names is not None and len(names) != len(jaxpr.invars):
        # JAX insists on a name for each input. A `custom_jvp` some arguments of which
        # are no arrays, `jax.scipy.special.log_ndtr` for one, has names for these, too.
        info = jaxpr.debug_info
        jaxpr = jaxpr.replace(debug_info=info.with_unknown_names())
    instantiate = keep if isinstance(keep, bool) else list(keep)
    live, left = partial_eval.dce_jaxpr(jaxpr, used, instantiate=instantiate)
    return jex.ClosedJaxpr(live, program.consts), list(left)


@functools.lru_cache(maxsize=512)
def pruned(program: jex.ClosedJaxpr, used: Flags | None = None) -> jex.ClosedJaxpr:
    """A program with the same inputs, but without equations that no output needs.

    `used` marks the outputs to keep; all of them by default.
    """
    # A derivative does not need all of its primal. XLA would remove the rest, but
    # later, and running it may even be an error: the tangents of a `jax.custom_vjp` can
    # only be transposed.
    return without_dead_code(program, used, keep=True)[0]


def inputs_read(program: jex.ClosedJaxpr, used: Sequence[bool]) -> list[bool]:
    """Which inputs of a program are needed to compute the outputs that are used."""
    return without_dead_code(program, used)[1]


# Rewritten.


def rewrite_everywhere(
    level: Callable[[jex.ClosedJaxpr, Rewrite], jex.ClosedJaxpr],
    program: jex.ClosedJaxpr,
) -> jex.ClosedJaxpr:
    """Rewrites a program and the programs in its equations.

    `level` rewrites one level; its second argument rewrites a program below it.
    """
    # By identity: a program that is called in several places is rewritten once, and
    # stays shared. Each is kept with its result, so that it is not freed, and no other
    # object gets its id.
    done: dict[int, tuple[jex.ClosedJaxpr, jex.ClosedJaxpr]] = {}

    def rewrite(program: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
        if id(program) not in done:
            done[id(program)] = program, level(program, rewrite)
        return done[id(program)][1]

    return rewrite(program)


def inlined(
    program: jex.ClosedJaxpr,
    is_inlined: Callable[[jex.JaxprEqn], bool] = lambda eqn: (
        eqn.primitive.name == "jit"
    ),
    others: Callable[[jex.JaxprEqn], jex.ClosedJaxpr | None] = lambda eqn: None,
) -> jex.ClosedJaxpr:
    """A program with the equations of what it calls in place of some calls.

    `others` has programs for other equations that are to be replaced, too.
    """

    def level(program: jex.ClosedJaxpr, rewrite: Rewrite) -> jex.ClosedJaxpr:
        rewriter = Rewriter(program)
        for eqn in program.jaxpr.eqns:
            eqn = rewriter.enter(eqn, rewrite)
            if is_inlined(eqn):
                # Of branches for other compilers, the last one is for all others.
                callee = rewritable_programs(eqn)[-1]
            elif (callee := others(eqn)) is not None:
                callee = rewrite(callee)
            else:
                rewriter.eqns.append(eqn)
                continue
            inputs = eqn.invars[len(eqn.invars) - len(callee.in_avals) :]
            count = len(rewriter.eqns)
            rewriter.inline(callee, inputs, eqn.outvars)
            inner = rewriter.eqns[count:]
            rewriter.eqns[count:] = called_at(eqn.source_info.traceback, inner)
        return rewriter.result()

    return rewrite_everywhere(level, program)


def called_at(traceback: Any, eqns: Iterable[jex.JaxprEqn]) -> list[jex.JaxprEqn]:
    """Equations of what is called: those without a user's line have the caller's."""
    at = lambda info: info if place_of(info) else info.replace(traceback=traceback)
    return [eqn.replace(source_info=at(eqn.source_info)) for eqn in eqns]


def without_array_literals(
    program: jex.ClosedJaxpr, numbers: bool = False
) -> jex.ClosedJaxpr:
    """A program whose literals that are arrays, as `inline` makes them, are constants.

    With `numbers`, its floating-point numbers are, too. Those in inner programs stay.
    """
    named: dict[Any, tuple[jex.Var, Any]] = {}
    is_named = lambda aval: aval.shape or (numbers and is_inexact(aval))

    def read(x: jax.core.Atom) -> jax.core.Atom:
        if not isinstance(x, jex.Literal) or not is_named(aval_of(x)):
            return x
        return named.setdefault((id(x.val), x.aval), (jex.Var(x.aval), x.val))[0]

    eqns = [e.replace(invars=list(map(read, e.invars))) for e in program.jaxpr.eqns]
    outvars = list(map(read, program.jaxpr.outvars))
    if not named:
        return program
    constants = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
    constants |= dict(named.values())
    return with_parts(program, eqns=eqns, outvars=outvars, constants=constants)


def map_equations(
    program: jex.ClosedJaxpr, change: Callable[[jex.JaxprEqn], jex.JaxprEqn]
) -> jex.ClosedJaxpr:
    """A program with changed equations, inner ones first; the very same if none was.

    Rules that are Python functions stay, as those of a `jax.custom_vjp`.
    """

    def level(program: jex.ClosedJaxpr, rewrite: Rewrite) -> jex.ClosedJaxpr:
        inner = lambda param: _map_param(param, rewrite)
        eqns = [change(map_params(eqn, inner)) for eqn in program.eqns]
        return with_equations(program, eqns)

    return rewrite_everywhere(level, program)


def map_programs(eqn: jex.JaxprEqn, rewrite: Rewrite) -> jex.JaxprEqn:
    """An equation with its programs rewritten, where any of the same meaning will do.

    It is the very same object if nothing changed.
    """
    if (formula := formula_of(eqn)) is not None:
        new = formula.rewritten(rewrite)
        return eqn if new is formula else with_formula(eqn, new)
    if form_of(eqn) not in _WITH_PROGRAMS:
        return eqn
    return map_params(eqn, lambda param: _map_param(param, rewrite))


def rewritable_programs(eqn: jex.JaxprEqn) -> list[jex.ClosedJaxpr]:
    """The programs in an equation that may be rewritten, closed."""
    found: list[jex.ClosedJaxpr] = []

    def note(program: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
        found.append(program)
        return program

    map_programs(eqn, note)
    return found


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
    return all(map(operator.is_, new, old))


class Rewriter:
    """The new equations of a program, and what stands for its old variables.

    The inputs stay what they are.
    """

    def __init__(self, program: jex.ClosedJaxpr):
        self._program = program
        self._stands_for: dict[jex.Var, jax.core.Atom] = {}
        self.eqns: list[jex.JaxprEqn] = []

    def read(self, atom: jax.core.Atom) -> jax.core.Atom:
        """What stands for an atom of the old program."""
        return renamed(atom, self._stands_for)

    def enter(
        self, eqn: jex.JaxprEqn, rewrite: Rewrite = lambda program: program
    ) -> jex.JaxprEqn:
        """An old equation with its operands replaced and its programs rewritten."""
        eqn = map_programs(eqn, rewrite)
        invars = list(map(self.read, eqn.invars))
        return eqn if _same(invars, eqn.invars) else eqn.replace(invars=invars)

    def replace(self, var: jex.Var, atom: jax.core.Atom) -> bool:
        """From here on `atom` stands for `var`, if it is of just the same type."""
        if var.aval != atom.aval:
            return False
        self._stands_for[var] = atom
        return True

    def emit(self, eqn: jex.JaxprEqn) -> None:
        """Adds an equation, unless others stand for all that it computes."""
        if eqn.effects or not eqn.outvars or any(map(self._is_needed, eqn.outvars)):
            self.eqns.append(eqn)

    def inline(
        self,
        program: jex.ClosedJaxpr,
        operands: Sequence[jax.core.Atom],
        outvars: Iterable[jex.Var],
    ) -> None:
        """Adds the equations of a program in place of the one that called it."""
        jaxpr = program.jaxpr
        inside = dict[jex.Var, jax.core.Atom](zip(jaxpr.invars, operands, strict=True))
        for var, const in zip(jaxpr.constvars, program.consts, strict=True):
            inside[var] = jex.Literal(const, var.aval)
        read = functools.partial(renamed, names=inside)
        for eqn in jaxpr.eqns:
            # The program may be called elsewhere, too: its variables are made anew.
            fresh = [
                var if isinstance(var, jex.DropVar) else jex.Var(var.aval)
                for var in eqn.outvars
            ]
            inside.update(zip(eqn.outvars, fresh, strict=True))
            effects = {effect_on(effect, read) for effect in eqn.effects}
            invars = list(map(read, eqn.invars))
            self.eqns.append(eqn.replace(invars=invars, outvars=fresh, effects=effects))
        self._stands_for.update(zip(outvars, map(read, jaxpr.outvars), strict=True))

    def result(self) -> jex.ClosedJaxpr:
        """The new program."""
        outvars = list(map(self.read, self._program.jaxpr.outvars))
        if _same(outvars, self._program.jaxpr.outvars):
            return with_equations(self._program, self.eqns)
        return with_parts(self._program, eqns=self.eqns, outvars=outvars)

    def _is_needed(self, var: jex.Var) -> bool:
        return not isinstance(var, jex.DropVar) and var not in self._stands_for
