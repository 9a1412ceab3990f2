"""The algebra of traced programs: tangents, cotangents, batches, and what rules leave.

A program is a closed jaxpr on a flat list of arrays. It closes over no tracers, so what
is derived from it depends on nothing else, and is remembered here: those who derive the
same again get the very same program.

What has tangents or cotangents is marked, and marks come in groups, such as the consts,
the carry and the `xs` of a step. What is added for the marked ones of a group follows
upon the group.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.extend.core as jex
import numpy as np
from jax.interpreters import partial_eval

from .._arrays import (
    Arrays,
    Flags,
    batch_type,
    cotangent_types,
    interleave,
    is_inexact,
    pick,
    put,
    split,
    strongly_typed,
    tangent_types,
    zero_array,
)
from .._compat import is_through
from .._types import AnyJaxpr, Aval, BatchAxis, PyTree, Value
from ._equations import equations, formula_of

Groups: TypeAlias = tuple[Flags, ...]

_Entry = TypeVar("_Entry")


def run(program: jex.ClosedJaxpr, *flat: Value) -> list[Value]:
    """The outputs of a program."""
    return jex.jaxpr_as_fun(program)(*flat)


def traced(f: Callable[..., Iterable[Value]], types: Sequence[Aval]) -> jex.ClosedJaxpr:
    """The program of a function, none of whose outputs is weakly typed."""
    return jax.make_jaxpr(lambda *flat: list(map(strongly_typed, f(*flat))))(*types)


@functools.lru_cache(maxsize=512)
def called(program: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """The same program as a single equation, which calls it."""
    return jax.make_jaxpr(jax.jit(jex.jaxpr_as_fun(program)))(*program.in_avals)


@functools.lru_cache(maxsize=512)
def pushed(program: jex.ClosedJaxpr, moves: Groups, gives: Groups) -> jex.ClosedJaxpr:
    """A program that computes tangents, too.

    Args:
        program: The program.
        moves: Which of its inputs have a tangent.
        gives: Of which outputs it is to give the tangent.

    Returns:
        The program, with tangents behind each group of inputs and of outputs.
    """
    marks, added, types = joined(moves), behind(moves), program.in_avals
    dots = tangent_types(types, marks)

    def push(*inputs: Value) -> list[Value]:
        primals, tangents = apart(added, inputs)
        of_marked = lambda marked: run(program, *put(primals, marks, marked))
        outs, dots = jax.jvp(of_marked, (pick(primals, marks),), (tangents,))
        return interleave(behind(gives), outs, pick(dots, joined(gives)))

    return traced(push, interleave(added, types, dots))


@functools.lru_cache(maxsize=512)
def pulled(program: jex.ClosedJaxpr, marks: Groups, wanted: Groups) -> jex.ClosedJaxpr:
    """A program that takes cotangents of outputs back to inputs.

    Args:
        program: The program.
        marks: Which of its inputs are to get a cotangent.
        wanted: Which of its outputs have one; as many groups as there are of inputs.

    Returns:
        A program whose outputs are the cotangents of the marked inputs. Behind each
        group of inputs it takes the cotangents of the outputs of that group.
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
        _, back = jax.vjp(of_marked, pick(primals, marked))
        return back(cts)[0]

    return traced(pull, interleave(added, program.in_avals, cts))


@functools.lru_cache(maxsize=512)
def batched(
    program: jex.ClosedJaxpr,
    axis_data: BatchAxis,
    in_dims: tuple[int | None, ...],
    out_dims: tuple[int | None, ...],
) -> jex.ClosedJaxpr:
    """The program of a batch, along the axis that a batch rule is called for."""
    types = batched_types(program.in_avals, in_dims, axis_data)
    one = functools.partial(run, program)
    return traced(vmap(one, axis_data, in_dims, list(out_dims)), types)


def along_axis(
    make: Callable[[], jex.ClosedJaxpr], axis_data: BatchAxis
) -> jex.ClosedJaxpr:
    """A program that is made where the axis of a batch has its name."""
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
    # JAX learns how the axis is split from the arrays that are mapped: here from one
    # that is not used, as there may be no other.
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
    """Where rows lie in arrays that are batched at `dims`, and where a row is batched.

    Args:
        axes: Where rows lie in the arrays of one example.
        dims: Where the arrays with rows are batched.
    """
    pairs = list(zip(axes, dims, strict=True))
    axes = tuple(axis + (dim is not None and dim <= axis) for axis, dim in pairs)
    return axes, [
        None if dim is None else dim - (dim > axis)
        for axis, dim in zip(axes, dims, strict=True)
    ]


@functools.lru_cache(maxsize=512)
def pruned(program: jex.ClosedJaxpr, used: Flags | None = None) -> jex.ClosedJaxpr:
    """A program with the same inputs and without what its outputs do not need.

    A derivative does not need all of its primal. XLA would find that out, but later,
    and what nothing needs may even be an error if it were run: the tangents of a
    `jax.custom_vjp` can only be transposed.

    Args:
        program: The program.
        used: Which of its outputs to keep; all of them by default.
    """
    used = used or (True,) * len(program.out_avals)
    live, _ = partial_eval.dce_jaxpr(program.jaxpr, list(used), instantiate=True)
    return jex.ClosedJaxpr(live, program.consts)


@functools.lru_cache(maxsize=512)
def parted(
    program: jex.ClosedJaxpr, known: Flags
) -> tuple[jex.ClosedJaxpr, jex.ClosedJaxpr]:
    """A program in two: what some inputs alone decide, and the rest.

    What is computed from no input at all, such as zeros of some shape, is cheaper to
    make again than to hand on, and belongs to both.

    Args:
        program: The program, with nothing in it that its outputs do not need.
        known: Which of its inputs are known beforehand.

    Returns:
        A program from the known inputs to what the other one needs of them; and one
        from that, followed by the other inputs, to the outputs.
    """
    jaxpr = program.jaxpr
    first, rest, free = list[Any](), list[Any](), set(jaxpr.constvars)
    decided = {*pick(jaxpr.invars, known)}
    for eqn in jaxpr.eqns:
        inputs = {var for var in eqn.invars if isinstance(var, jex.Var)}
        if inputs <= free:
            free.update(eqn.outvars)
        elif inputs <= free | decided:
            decided.update(eqn.outvars)
            first.append(eqn)
            continue
        rest.append(eqn)
    ahead = [eqn for eqn in rest if {*eqn.outvars} <= free]
    read = [var for eqn in rest for var in eqn.invars] + list(jaxpr.outvars)
    needed = [var for var in read if isinstance(var, jex.Var) and var in decided]
    handed = list(dict.fromkeys(needed))
    others = pick(jaxpr.invars, [not flag for flag in known])
    parts = (
        (pick(jaxpr.invars, known), [*ahead, *first], handed),
        ([*handed, *others], rest, jaxpr.outvars),
    )
    unnamed = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    one, two = (
        jaxpr.replace(invars=invars, eqns=eqns, outvars=outvars, debug_info=unnamed)
        for invars, eqns, outvars in parts
    )
    close = lambda part: pruned(jex.ClosedJaxpr(part, program.consts))
    return close(one), close(two)


def inputs_read(program: jex.ClosedJaxpr, used: Sequence[bool]) -> list[bool]:
    """Which inputs some outputs of a program are computed from."""
    _, read = partial_eval.dce_jaxpr(program.jaxpr, list(used), instantiate=False)
    return read


@functools.lru_cache(maxsize=512)
def settled(program: jex.ClosedJaxpr, marks: Flags, reverse: bool) -> jex.ClosedJaxpr:
    """A program after it has been differentiated: without custom rules.

    `jax.custom_jvp` and `jax.custom_vjp` let a user say what the derivative of a
    function is. Such a rule also says what the value is, and where a derivative is
    taken, JAX runs the rule instead of the function. So a second derivative is one of
    the rule, and not of the function again: that of a straight-through estimator whose
    rule returns `jnp.round(x)` is zero. A loop that JAX does not differentiate step by
    step has to keep to this by itself.

    Args:
        program: The program.
        marks: For which of its inputs it was differentiated.
        reverse: Whether in reverse mode: `jax.custom_vjp` has no other.

    Returns:
        A program of the same signature, with the primals that custom rules give; the
        same object, if there are no rules.
    """
    if not any(marks) or not has_rules(program):
        return program
    types = list(program.in_avals)

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
    used_outs = [True] * len(traced.out_avals)
    live, used = partial_eval.dce_jaxpr(traced.jaxpr, used_outs, keep)
    if list(used) != keep:
        return program  # a rule whose primal depends on tangents, which JAX leaves open
    return jex.ClosedJaxpr(live, traced.consts)


@functools.lru_cache(maxsize=512)
def has_rules(
    program: AnyJaxpr, names: tuple[str, ...] = ("custom_jvp_call", "custom_vjp_call")
) -> bool:
    """Whether there is a custom derivative in a program, or in one inside it."""
    return any(_is_rule(eqn, names) for eqn in equations(program))


def has_backward_rules(program: AnyJaxpr) -> bool:
    """Whether there is a `jax.custom_vjp` in a program, or in one inside it.

    Its backward rule need not be linear in the cotangent that it is given.
    """
    return has_rules(program, ("custom_vjp_call",))


def _is_rule(eqn: jex.JaxprEqn, names: tuple[str, ...]) -> bool:
    if is_through(eqn):
        return False
    # JAX 0.12 makes its own kind of `hijax` primitive of a custom derivative.
    is_foreign = "_prim" in eqn.params and formula_of(eqn) is None
    return eqn.primitive.name.startswith(names) or is_foreign


def joined(groups: Iterable[Flags]) -> Flags:
    """The marks of all groups."""
    return tuple(mark for group in groups for mark in group)


def behind(groups: Groups) -> Flags:
    """Which entries are added ones, if each group has those of its marked ones behind.

    >>> behind(((True, False), (True,)))
    (False, False, True, False, True)
    """
    return joined([(*[False] * len(group), *[True] * sum(group)) for group in groups])


def apart(flags: Flags, entries: Sequence[_Entry]) -> tuple[list[_Entry], list[_Entry]]:
    """Two lists of one: the entries without a mark, and those with one."""
    return pick(entries, [not flag for flag in flags]), pick(entries, flags)
