"""The value before a step of any explicit solver, from the one after it.

A solver goes from `y0` to `F(y0) = y1`. In reversed time it goes from there to `B(y1)`,
which misses `y0` by about the errors of two steps. `B(F(y))` misses every `y` nearby by
almost as much. So

    y  <-  y + B(y1) - B(F(y))

comes closer by a factor of about that size each time. It ends where `F(y)` is `y1` but
for rounding, mostly after two rounds. Tangents are found in the same way, by the slopes
of `F` and `B`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

from .._arrays import Arrays, Rest, partition
from .._types import PyTree, Value

# How many rounds there are at the most. A step that takes as many keeps so little of
# what it starts from that rounding errors are larger.
_MOST = 100


def value_before(
    solver: PyTree,
    terms: PyTree,
    t0: Value,
    t1: Value,
    y1: PyTree,
    args: PyTree,
    is_kept: Value,
) -> PyTree:
    """The value from which a step has come."""
    # It is NaN if none is found, and unchanged if there was no such step.
    if not jax.tree.leaves(y1):
        return y1
    there = functools.partial(_step, solver, terms, t0, t1, args)
    back = functools.partial(_step, solver, _backwards(terms), -t1, -t0, args)
    steps = [eqx.filter_closure_convert(f, y1) for f in (there, back)]
    arrays, rest = partition(steps)
    y0 = _undone(rest, arrays, y1, is_kept)
    return jax.tree.map(functools.partial(jnp.where, is_kept), y0, y1)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _undone(rest: Rest, arrays: Arrays, y1: PyTree, is_kept: Value) -> PyTree:
    there, back = rest.join(arrays)
    return _found(there, back, y1, is_kept)


@_undone.defjvp
def _tangents(rest: Rest, primals: PyTree, tangents: PyTree) -> tuple[PyTree, PyTree]:
    # Those of the rounds would not do. There are as many as the value takes, and one is
    # enough for a value that does not move.
    (arrays, y1, is_kept), (of_arrays, of_y1, _) = primals, tangents
    y0 = _undone(rest, *primals)
    there, back = rest.join(arrays)
    _, moved = jax.jvp(lambda arrays: rest.join(arrays)[0](y0), (arrays,), (of_arrays,))
    slope = lambda f, at: lambda by: jax.jvp(f, (at,), (by,))[1]
    of_step = jax.tree.map(jnp.subtract, of_y1, moved)
    return y0, _found(slope(there, y0), slope(back, y1), of_step, is_kept)


def _found(
    there: Callable[[PyTree], PyTree],
    back: Callable[[PyTree], PyTree],
    y1: PyTree,
    is_kept: Value,
) -> PyTree:
    """What `there` takes to `y1`, given that `back` nearly undoes it."""
    first = back(y1)
    eps = [float(jnp.finfo(leaf.dtype).eps) for leaf in jax.tree.leaves(y1)]

    def is_far(search: _Rounds) -> Value:
        return (search.left > min(eps)) & (search.rounds < _MOST)

    def closer(search: _Rounds) -> _Rounds:
        shift = jax.tree.map(jnp.subtract, first, back(there(search.value)))
        by = _greatest_part(shift, y1, search.value)
        # The first shift is about what is missed, and each of the others is smaller by
        # the same factor. What gets no smaller is rounding, or does not end.
        is_first = search.rounds == 0
        factor = jnp.where(is_first, 1.0, by / search.by)
        left = jnp.where(is_first | (factor < 1), by * factor, 0.0)
        value = jax.tree.map(jnp.add, search.value, shift)
        return _Rounds(value, by, left, search.rounds + 1)

    far = jnp.where(is_kept, jnp.inf, 0.0).astype(jnp.float32)
    search = lax.while_loop(is_far, closer, _Rounds(first, far, far, jnp.int32(0)))
    is_found = search.by <= max(eps) ** 0.5
    return jax.tree.map(lambda y: jnp.where(is_found, y, jnp.nan), search.value)


class _Rounds(NamedTuple):
    """The search for a value: how far it moved last, and about how far off it is."""

    value: PyTree
    by: Value
    left: Value
    rounds: Value


def _greatest_part(shift: PyTree, y1: PyTree, y: PyTree) -> Value:
    """The greatest change of a number, relative to it and a little to the greatest."""
    types = [jnp.finfo(leaf.dtype) for leaf in jax.tree.leaves(shift)]
    wide = max((one.dtype for one in types), key=lambda dtype: dtype.itemsize)
    size_of = lambda leaf: jnp.abs(leaf).astype(wide)
    sizes = jax.tree.map(lambda *both: jnp.maximum(*map(size_of, both)), y1, y)
    # Next to large numbers, small ones are not known to all of their digits.
    least = float(jnp.finfo(wide).eps) ** 0.25 * _greatest(sizes)
    part = lambda by, size: jnp.where(by == 0, 0.0, size_of(by) / (size + least))
    return _greatest(jax.tree.map(part, shift, sizes)).astype(jnp.float32)


def _greatest(tree: PyTree) -> Value:
    of_leaves = (jnp.max(leaf, initial=0.0) for leaf in jax.tree.leaves(tree))
    return functools.reduce(jnp.maximum, of_leaves)


def _step(
    solver: PyTree, terms: PyTree, t0: Value, t1: Value, args: PyTree, y0: PyTree
) -> PyTree:
    """A step from a value alone."""
    state = solver.init(terms, t0, t1, y0, args)
    return solver.step(terms, t0, t1, y0, args, state, made_jump=False)[0]


def _backwards(terms: PyTree) -> PyTree:
    """Terms in reversed time, in which `-t` goes from `-t1` to `-t0`."""
    # `diffeqsolve` puts each term into one that has it, for either direction of time.
    is_one = lambda x: (
        isinstance(x, diffrax.AbstractTerm) and not isinstance(x, diffrax.MultiTerm)
    )
    turned = lambda term: dataclasses.replace(term, direction=-term.direction)
    return jax.tree.map(turned, terms, is_leaf=is_one)
