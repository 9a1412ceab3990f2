"""Sums of cotangents in a wider type, where it is JAX that adds them up.

- **Over the steps of a `lax.scan`, or over devices** (`shared`). JAX adds the
  cotangents of what all steps read in its own type. So the loop is given a wide copy of
  it besides, and each step casts that back:

      w             the array, without its derivative
      wide          w.astype(float32), outside of the loop
      known_cast    wide.astype(w.dtype) in the step, whose value is known: it is `w`

  Nothing reads `wide`, so there never is such a copy. But the cotangents of `wide` are
  added up in float32, and are cast once, outside of the loop. A loop of this library
  that takes the place of such a loop keeps sums of its own, and would hold the copy for
  its way back (`without_casts`).
- **Over an axis** (`adding_wide`). The cotangent of what is repeated along an axis, as
  a bias is in a batch, is a sum over this axis. An H100 adds up bfloat16 in bfloat16,
  256 numbers at a time. What a product of matrices adds up XLA keeps in float32.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.core
import jax.extend.core as jex
from jax import lax
from jax.interpreters import ad, batching, mlir

from .._arrays import Arrays, SumType, is_narrow, pick, put, split, sum_dtype
from .._types import PyTree, Value
from ._equations import Rewrite, aval_of, equations, formula_of
from ._jaxprs import (
    Rewriter,
    calling,
    map_programs,
    rewrite_everywhere,
    with_equations,
    with_parts,
)


def shared(
    arrays: Arrays, sums: SumType
) -> tuple[list[Value], Callable[[Arrays], list[Value]]]:
    """Arrays for a loop of JAX, or for many devices, to read in place of others.

    They come with a function that makes the others of them, within the loop.
    """
    narrow = [is_narrow(x, sums) for x in arrays]
    marked = pick(arrays, narrow)
    own = put(arrays, narrow, list(map(lax.stop_gradient, marked)))
    wide = [lax.convert_element_type(x, sum_dtype(x.dtype, sums)) for x in marked]

    def within(given: Arrays) -> list[Value]:
        known, wide = split(given, len(narrow))
        casts = map(known_cast_p.bind, wide, pick(known, narrow))
        return put(known, narrow, list(casts))

    return [*own, *wide], within


# The places of a wide array among consts, and of that which it is when it is cast.
KnownCast: TypeAlias = tuple[int, int]


@functools.lru_cache(maxsize=128)
def without_casts(
    program: jex.ClosedJaxpr, count: int
) -> tuple[jex.ClosedJaxpr, tuple[KnownCast, ...]]:
    """A program that is given what it casts, among so many inputs; see `with_casts`."""
    jaxpr, rewriter, casts = program.jaxpr, Rewriter(program), list[KnownCast]()
    at = {var: i for i, var in enumerate(jaxpr.invars[:count])}
    atoms = itertools.chain(jaxpr.outvars, *(eqn.invars for eqn in jaxpr.eqns))
    read = Counter(x for x in atoms if isinstance(x, jex.Var))
    for eqn in jaxpr.eqns:
        if eqn.primitive is known_cast_p:
            wide, known = eqn.invars
            alone = all(x in at and read[x] == 1 for x in (wide, known))
            if alone and rewriter.replace(eqn.outvars[0], known):
                casts.append((at[wide], at[known]))
                continue
        rewriter.eqns.append(rewriter.enter(eqn))
    if not casts:
        return program, ()
    wide = {wide for wide, _ in casts}
    left = [var for i, var in enumerate(jaxpr.invars) if i not in wide]
    return with_parts(rewriter.result(), invars=left), tuple(casts)


def with_casts(consts: Arrays, casts: Sequence[KnownCast]) -> list[Value]:
    """The consts of a program `without_casts`, from those of the original."""
    consts, wide = list(consts), {wide for wide, _ in casts}
    for cast, known in casts:
        consts[known] = known_cast_p.bind(consts[cast], consts[known])
    return [x for i, x in enumerate(consts) if i not in wide]


# Of an array and of what it is when it is cast.
known_cast_p = jex.Primitive("known_cast")
known_cast_p.def_impl(lambda wide, known: known)
known_cast_p.def_abstract_eval(lambda wide, known: known)


def _push(primals: Sequence[Value], tangents: Sequence[Value]) -> tuple[Value, Value]:
    out, (dot, _) = known_cast_p.bind(*primals), tangents
    if isinstance(dot, ad.Zero):
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    return out, lax.convert_element_type(dot, out.dtype)


def _batch(args: Sequence[Value], dims: Sequence[Any]) -> tuple[Value, Any]:
    return known_cast_p.bind(*args), dims[1]


ad.primitive_jvps[known_cast_p] = _push
batching.primitive_batchers[known_cast_p] = _batch
mlir.register_lowering(known_cast_p, lambda context, wide, known: [known])


def adding_wide(
    pull: Callable[[PyTree], PyTree], program: jex.ClosedJaxpr, sums: SumType
) -> Callable[[PyTree], PyTree]:
    """A function of cotangents whose sums over axes are kept in a wider type.

    `program` is what it takes the cotangents back through.
    """

    def pull_wide(cts: PyTree) -> PyTree:
        flat, tree = jax.tree.flatten(cts)
        of_flat = lambda *flat: pull(jax.tree.unflatten(tree, flat))
        back, shapes = jax.make_jaxpr(of_flat, return_shape=True)(*flat)
        level = functools.partial(_with_wide_sums, sums)
        back = rewrite_everywhere(level, back)
        outs = jax.core.eval_jaxpr(back.jaxpr, back.consts, *flat)
        return jax.tree.unflatten(jax.tree.structure(shapes), outs)

    return pull_wide if _has_narrow(program, sums) else pull


@functools.lru_cache(maxsize=512)
def _has_narrow(program: jex.ClosedJaxpr, sums: SumType) -> bool:
    atoms = itertools.chain(
        program.jaxpr.invars, *(eqn.outvars for eqn in equations(program))
    )
    return any(is_narrow(aval_of(x), sums) for x in atoms)


def _with_wide_sums(
    sums: SumType, program: jex.ClosedJaxpr, rewrite: Rewrite
) -> jex.ClosedJaxpr:
    # The loops of this library keep sums of their own.
    inner = lambda eqn: eqn if formula_of(eqn) else map_programs(eqn, rewrite)
    eqns = [_in_wide(inner(eqn), sums) for eqn in program.jaxpr.eqns]
    return with_equations(program, eqns)


def _in_wide(eqn: jex.JaxprEqn, sums: SumType) -> jex.JaxprEqn:
    """An equation; if it adds up narrow floats, one that does so in a wider type."""
    if eqn.primitive.name != "reduce_sum":
        return eqn
    aval = aval_of(eqn.invars[0])
    if not is_narrow(aval, sums):
        return eqn

    def add(x: Value) -> Value:
        wide = lax.convert_element_type(x, sum_dtype(x.dtype, sums))
        total = eqn.primitive.bind(wide, **eqn.params)
        return lax.convert_element_type(total, aval.dtype)

    # Traced as a call of the same operands: one equation in place of another.
    return calling(add, eqn.invars).replace(outvars=eqn.outvars)
