"""The algebra of traced programs: tangents, cotangents, batches, and custom rules.

A program is a closed jaxpr on a flat list of arrays. It closes over no tracers, so a
derived program depends on nothing else, and is remembered here. Whoever derives the
same again gets the very same object. Other caches rely on that, since jaxprs are
compared by identity.

Inputs and outputs with tangents or cotangents are marked. Marks come in groups, such as
the consts, the carry and the `xs` of a step. The tangents of the marked entries follow
their group:

    groups  ([w], [h, k], [x])  with  w, h, x marked
    inputs   w dw  h k dh   x dx
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias, TypeVar

import jax
import jax.core
import jax.extend.core as jex
import numpy as np

from .._arrays import (
    Arrays,
    Flags,
    SumType,
    as_arrays,
    batch_type,
    cotangent_types,
    interleave,
    is_inexact,
    on_mesh_that_is_set,
    pick,
    put,
    split,
    strongly_typed,
    tangent_types,
    zero_array,
)
from .._compat import close, form_of, is_through
from .._types import AnyJaxpr, Aval, BatchAxis, PyTree, Value
from ._equations import aval_of, equations, formula_of, programs_in
from ._jaxprs import program_from, without_dead_code
from ._wide_sums import adding_wide

Groups: TypeAlias = tuple[Flags, ...]

_Entry = TypeVar("_Entry")


def run(program: jex.ClosedJaxpr, *flat: Value) -> list[Value]:
    """The outputs of a program."""
    # JAX keeps constants as arrays of NumPy. A `scan` in the program that is given one
    # of these as its `xs` would store a copy of them for its way back.
    return jax.core.eval_jaxpr(program.jaxpr, as_arrays(program.consts), *flat)


def interpreted(
    program: AnyJaxpr,
    inputs: Sequence[_Entry],
    of_literal: Callable[[jex.Literal], _Entry],
    of_equation: Callable[[jex.JaxprEqn, list[_Entry]], Sequence[_Entry]],
    of_constant: Callable[[Value], _Entry],
) -> list[_Entry]:
    """Goes through a program with anything in place of its values.

    `of_equation` gets an equation and its operands; it may go through its programs.
    """
    closed = close(program)
    jaxpr, constants = closed.jaxpr, map(of_constant, closed.consts)
    found: dict[jex.Var, _Entry] = dict(zip(jaxpr.invars, inputs, strict=True))
    found |= zip(jaxpr.constvars, constants, strict=True)
    of = lambda x: of_literal(x) if isinstance(x, jex.Literal) else found[x]
    for eqn in jaxpr.eqns:
        found |= zip(eqn.outvars, of_equation(eqn, [*map(of, eqn.invars)]), strict=True)
    return [*map(of, jaxpr.outvars)]


def value_of(literal: jex.Literal) -> Value:
    """The value of a literal, as an array of its type."""
    number = literal.val
    if not isinstance(number, bool | int | float | complex):
        return number
    # A Python number has no dtype, and would promote like a weak type.
    return np.asarray(number, aval_of(literal).dtype)


def literal_value(literal: jex.Literal) -> np.ndarray:
    """The value of a literal as an array of NumPy; a key has none."""
    # It may be on a device, and then the user has not asked to have it here.
    with jax.transfer_guard("allow"):
        return np.asarray(literal.val, aval_of(literal).dtype)


def evaluated(eqn: jex.JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    """The results of one equation of a program."""
    # As a program of this one equation: JAX knows how to evaluate any primitive, and
    # keeps the source line of the equation.
    pairs = zip(eqn.invars, inputs, strict=True)
    given = {x: value for x, value in pairs if isinstance(x, jex.Var)}
    return run(program_from([eqn], given, eqn.outvars), *given.values())


def traced(f: Callable[..., Iterable[Value]], types: Sequence[Aval]) -> jex.ClosedJaxpr:
    """The program of a function. No output is weakly typed."""
    return jax.make_jaxpr(lambda *flat: list(map(strongly_typed, f(*flat))))(*types)


@functools.lru_cache(maxsize=512)
def called(program: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """A program with a single equation, which calls this one."""
    return jax.make_jaxpr(jax.jit(jex.jaxpr_as_fun(program)))(*program.in_avals)


@functools.lru_cache(maxsize=512)
def jvp_of(program: jex.ClosedJaxpr, takes: Groups, gives: Groups) -> jex.ClosedJaxpr:
    """The program of the jvp, which also computes the primal.

    Tangents follow each group: of the inputs in `takes`, of the outputs in `gives`.
    """
    marks, added, types = joined(takes), behind(takes), program.in_avals
    dots = tangent_types(types, marks)

    def push(*inputs: Value) -> list[Value]:
        primals, tangents = apart(added, inputs)
        of_marked = lambda marked: run(program, *put(primals, marks, marked))
        outs, dots = jax.jvp(of_marked, (pick(primals, marks),), (tangents,))
        return interleave(behind(gives), outs, pick(dots, joined(gives)))

    return traced(push, interleave(added, types, dots))


@functools.lru_cache(maxsize=512)
def vjp_of(
    program: jex.ClosedJaxpr, marks: Groups, wanted: Groups, sums: SumType = None
) -> jex.ClosedJaxpr:
    """The program of the vjp: it returns the cotangents of the marked inputs.

    Each group of inputs is followed by the cotangents of the same group of outputs.
    """
    marked, of_outs = joined(marks), joined(wanted)
    added = tuple(
        is_ct
        for inputs, outs in zip(marks, wanted, strict=True)
        for is_ct in (*[False] * len(inputs), *[True] * sum(outs))
    )
    cts = cotangent_types(program.out_avals, of_outs)

    def pull(*inputs: Value) -> list[Value]:
        primals, cts = apart(added, inputs)
        of_marked = lambda new: pick(run(program, *put(primals, marked, new)), of_outs)
        ends = pick(primals, marked)
        _, back = jax.vjp(of_marked, ends)
        back = adding_wide(back, program, sums)
        return list(map(on_mesh_that_is_set, back(cts)[0], ends))

    return traced(pull, interleave(added, program.in_avals, cts))


@functools.lru_cache(maxsize=512)
def batched(
    program: jex.ClosedJaxpr,
    axis_data: BatchAxis,
    in_dims: tuple[int | None, ...],
    out_dims: tuple[int | None, ...],
) -> jex.ClosedJaxpr:
    """The program of the vmap, along the axis that a batch rule is called for."""
    types = batched_types(program.in_avals, in_dims, axis_data)
    one = functools.partial(run, program)
    return traced(vmap(one, axis_data, in_dims, list(out_dims)), types)


def along_axis(
    make: Callable[[], jex.ClosedJaxpr], axis_data: BatchAxis
) -> jex.ClosedJaxpr:
    """Makes a program in a context where the axis of a batch has a name."""
    made: list[jex.ClosedJaxpr] = []
    axes = [(axis_data.name, axis_data.size)]
    jax.make_jaxpr(lambda: made.append(make()), axis_env=axes)()
    return made[0]


def vmap(
    f: Callable[..., PyTree], axis_data: BatchAxis, in_axes: PyTree, out_axes: PyTree
) -> Callable[..., PyTree]:
    """`jax.vmap` along the axis that a batch rule is called for."""
    settings = dict(
        out_axes=out_axes,
        axis_name=axis_data.name,
        axis_size=axis_data.size,
        spmd_axis_name=axis_data.spmd_name,
    )
    if axis_data.explicit_mesh_axis is None:
        return jax.vmap(f, in_axes, **settings)
    # JAX sees how the axis is split over devices by the arrays that are mapped. There
    # may be none, so here is one that is not used.
    along = zero_array(batch_type(jax.typeof(np.int8(0)), axis_data))
    mapped = jax.vmap(lambda _, *args: f(*args), (0, *in_axes), **settings)
    return functools.partial(mapped, along)


def batched_types(
    types: Sequence[Aval], dims: Sequence[int | None], axis_data: BatchAxis
) -> list[Aval]:
    """The types of arrays that are batched along these axes."""
    pairs = zip(types, dims, strict=True)
    return [batch_type(aval, axis_data, dim) for aval, dim in pairs]


def batched_axes(
    axes: Sequence[int], dims: Sequence[int | None]
) -> tuple[tuple[int, ...], list[int | None]]:
    """The axis of rows in a batched array, and the batch axis in one row of it.

    `axes` are those of one example, and `dims` those of the batch, if there are any.
    """
    # For example, an array of shape `[batch, features, rows]` has its rows along axis 1
    # without the batch, and along axis 2 with it. A row of it is batched along axis 0.
    pairs = list(zip(axes, dims, strict=True))
    axes = tuple(axis + (dim is not None and dim <= axis) for axis, dim in pairs)
    return axes, [
        None if dim is None else dim - (dim > axis)
        for axis, dim in zip(axes, dims, strict=True)
    ]


@functools.lru_cache(maxsize=512)
def settled(program: jex.ClosedJaxpr, marks: Flags, reverse: bool) -> jex.ClosedJaxpr:
    """A program after it has been differentiated: rules have replaced functions.

    Its signature is as before; if there are no rules, it is the very same object.
    """
    # Where a derivative is taken, JAX runs the rule of a `jax.custom_jvp` or
    # `jax.custom_vjp` in place of the function, for the value, too. So a second
    # derivative is one of the rule: for a straight-through estimator whose rule returns
    # `jnp.round(x)`, it is zero. JAX does not differentiate the steps of this library's
    # loops itself, so the loops have to do the same.
    if not any(marks) or not has_rules(program):
        return program
    types = list(program.in_avals)

    # The primals come out as auxiliary outputs of a derivative, whose tangents are then
    # dead code. What is left are the rules' own primals.
    def primal(*flat: Value) -> list[Value]:
        inputs, tangents = split(flat, len(types))
        marked = pick(inputs, marks)

        def of_marked(marked: Arrays) -> tuple[list[Value], list[Value]]:
            outs = run(program, *put(inputs, marks, marked))
            return list(filter(is_inexact, outs)), outs

        if reverse:
            _, _, outs = jax.vjp(of_marked, marked, has_aux=True)
        else:
            _, _, outs = jax.jvp(of_marked, (marked,), (tangents,), has_aux=True)
        return outs

    dots = tangent_types(types, marks)
    traced = jax.make_jaxpr(primal)(*types, *dots)
    keep = [True] * len(types) + [False] * len(dots)
    live, left = without_dead_code(traced, keep=keep)
    # Else it is a rule whose primal depends on tangents, which JAX leaves open.
    return live if left == keep else program


@functools.lru_cache(maxsize=512)
def has_rules(
    program: AnyJaxpr, names: tuple[str, ...] = ("custom_jvp_call", "custom_vjp_call")
) -> bool:
    """Whether there is a custom derivative in a program, or in one inside it."""
    return any(_is_rule(eqn, names) for eqn in equations(program))


def has_backward_rules(program: AnyJaxpr) -> bool:
    """Whether there is a `jax.custom_vjp` in a program, or in one inside it.

    Its backward rule need not be linear in the cotangent.
    """
    return has_rules(program, ("custom_vjp_call",))


@functools.lru_cache(maxsize=512)
def is_only_transposed(program: AnyJaxpr) -> bool:
    """Whether there are tangents of a function with a backward rule in a program.

    They cannot be evaluated, nor differentiated. JAX only transposes them.
    """
    names = ("custom_lin", "call_hi_primitive_linearized")
    return any(eqn.primitive.name in names for eqn in equations(program))


def rules_in(program: AnyJaxpr) -> Iterator[jex.ClosedJaxpr]:
    """Each call of a function with a custom derivative, as a program by itself."""
    for eqn in program.eqns:
        if _is_rule(eqn, ("custom_jvp_call", "custom_vjp_call")):
            inputs = (x for x in eqn.invars if isinstance(x, jex.Var))
            yield program_from([eqn], dict.fromkeys(inputs), eqn.outvars)
        for inner in programs_in(eqn):
            yield from rules_in(inner)


def uses_of_rule(
    rule: jex.ClosedJaxpr, use: Callable[[Flags, Flags], _Entry]
) -> list[_Entry | None]:
    """What is made of a function with a rule: by all its inputs, or by each alone.

    `use` is given marks of inputs and outputs; what the rule refuses is `None`.
    """
    marks, wanted = (tuple(map(is_inexact, x)) for x in (rule.in_avals, rule.out_avals))

    def used(marks: Flags) -> _Entry | None:
        try:
            return use(marks, wanted)
        except Exception:
            # It is a user's code, and may refuse that some inputs are differentiated,
            # with any error.
            return None

    if not (any(marks) and any(wanted)):
        return []  # none is ever asked for
    if (found := used(marks)) is not None:
        return [found]
    places = range(len(marks))
    return [used(tuple(i == at for i in places)) for at in places if marks[at]]


def _is_rule(eqn: jex.JaxprEqn, names: tuple[str, ...]) -> bool:
    if is_through(eqn):
        return False
    # A `hijax` primitive of another kind has a rule of either kind, or of both.
    is_foreign = form_of(eqn).startswith("call_hi") and formula_of(eqn) is None
    return form_of(eqn).startswith(names) or is_foreign


def joined(groups: Iterable[Flags]) -> Flags:
    """The marks of all groups in one tuple."""
    return tuple(mark for group in groups for mark in group)


def behind(groups: Groups) -> Flags:
    """Which entries are added, if an entry for each marked one follows its group.

    >>> behind(((True, False), (True,)))
    (False, False, True, False, True)
    """
    return joined([(*[False] * len(group), *[True] * sum(group)) for group in groups])


def apart(flags: Flags, entries: Sequence[_Entry]) -> tuple[list[_Entry], list[_Entry]]:
    """Divides a list in two: the entries without a mark, and those with one."""
    return pick(entries, [not flag for flag in flags]), pick(entries, flags)
