"""A loss of what a loop returns: its value, and the cotangents of its arguments."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from .._arrays import as_arrays, describe, partition, pick, put
from .._types import PyTree, Value
from ._tree_form import TreeForm


@dataclasses.dataclass(frozen=True, eq=False)
class Loss:
    """A function `(carry, ys) -> value`, of which the arrays are known.

    Attributes:
        f: The function.
        has_aux: Whether it returns a pair of the value and anything else.
        carry: The form of the carry.
        ys: That of the `ys`.
    """

    f: Callable[[PyTree, PyTree], PyTree]
    has_aux: bool
    carry: TreeForm
    ys: TreeForm

    def differentiate(
        self, carry: Sequence[Value], ys: Callable[[int], PyTree]
    ) -> tuple[PyTree, list[Value], list[Value]]:
        """Calls the function and differentiates it.

        Args:
            carry: The arrays of the carry.
            ys: Gives an array of the `ys` by its number. Those that the function does
                not use are not asked for.

        Returns:
            What the function returned; and for each inexact array of the carry, and of
            the `ys`, its cotangent, or `None` for one that is not used.
        """
        kept: list[Value] = []

        def call(
            carry: Sequence[Value], ys: Sequence[Value]
        ) -> tuple[PyTree, list[Value]]:
            out = self.f(self.carry.join(carry), self.ys.join(ys))
            value, aux = self._pair(out)
            arrays, rest = partition(as_arrays(aux))
            kept.append(rest)
            return value, arrays

        used = self._used(call)
        given = [ys(i) if flag else None for i, flag in enumerate(used)]
        moves = [a and b for a, b in zip(used, self.ys.inexact, strict=True)]

        @jax.jit
        def gradient(carry: Sequence[Value], given: Sequence[Value]) -> PyTree:
            # What is not used is not computed either.
            blanks = [jnp.zeros(aval.shape, aval.dtype) for aval in self.ys.types]
            whole = put(blanks, used, given)
            parts = pick(carry, self.carry.inexact), pick(whole, moves)

            def run(parts: PyTree) -> PyTree:
                full = put(carry, self.carry.inexact, parts[0])
                return call(full, put(whole, moves, parts[1]))

            value, pull, aux = jax.vjp(run, parts, has_aux=True)
            return value, aux, pull(jnp.ones_like(value))[0]

        value, arrays, (ct_carry, moved) = gradient(carry, pick(given, used))
        ct_ys = put([None] * len(moves), moves, moved)
        aux = kept[-1].join(arrays)
        out = (value, aux) if self.has_aux else value
        return out, ct_carry, pick(ct_ys, self.ys.inexact)

    def _used(self, call: Callable[..., PyTree]) -> list[bool]:
        """Which of the `ys` the function uses."""
        jaxpr = jax.make_jaxpr(call)(list(self.carry.types), list(self.ys.types)).jaxpr
        read = {id(var) for eqn in jaxpr.eqns for var in eqn.invars}
        read |= set(map(id, jaxpr.outvars))
        return [id(var) in read for var in jaxpr.invars[len(self.carry.types) :]]

    def _pair(self, out: PyTree) -> tuple[PyTree, PyTree]:
        if self.has_aux and (not isinstance(out, tuple | list) or len(out) != 2):
            raise TypeError(
                f"Resumable: with `has_aux=True` the loss must return a pair "
                f"`(value, aux)`, but it returned {jax.tree.map(describe, out)}."
            )
        value, aux = out if self.has_aux else (out, None)
        value = as_arrays(value, scalars=True)
        is_real = hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.floating)
        if not is_real or value.shape != ():
            raise TypeError(
                f"Resumable: the loss must return a real floating-point scalar, but it "
                f"returned {jax.tree.map(describe, value)}. With `has_aux=True` it may "
                f"return a pair of a scalar and anything else."
            )
        return value, aux
