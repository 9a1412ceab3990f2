"""Which outputs of a program depend on which of its inputs, and on an axis of `vmap`.

If an output is said to depend on an input though it does not, this costs time and
memory. It is wrong only if a rule refuses tangents, as that of
`equinox.internal.nondifferentiable` does. So for an equation that is not known, each
output depends on all inputs.
"""

import dataclasses
import functools
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
import jax.ref

from .._arrays import Flags, reduces_examples, split, union
from .._compat import CALLS, batching_rule, close, is_through, scan_counts
from .._types import AnyJaxpr, Aval
from ._equations import equations, equations_of

Marks = Sequence[bool]

# From floats to floats, and their derivative is zero: in JAX they have no tangent.
_WITHOUT_TANGENT = frozenset(["ceil", "floor", "round", "stop_gradient"])


@functools.lru_cache(maxsize=512)
def reached(
    program: AnyJaxpr,
    inputs: Flags,
    *,
    is_derivative: bool = False,
    axis_name: Hashable = None,
) -> Flags:
    """Which outputs of a program depend on the marked inputs.

    Args:
        program: A jaxpr.
        inputs: A mark for every input.
        is_derivative: Whether to follow tangents only. Integers have none, nor has the
            result of `jax.lax.stop_gradient`.
        axis_name: Also mark values that depend on the place along this axis, such as
            `jax.lax.axis_index`.
    """
    return tuple(_Reach(is_derivative, axis_name).outputs(program, inputs))


def names_axis(program: AnyJaxpr, axis_name: Hashable) -> bool:
    """Whether there is a collective over an axis in a program, or inside it."""
    return any(_names(eqn, axis_name) for eqn in equations(program))


@dataclasses.dataclass(frozen=True)
class _Reach:
    """How dependences are followed, see `reached`."""

    is_derivative: bool
    axis_name: Hashable

    def outputs(self, program: AnyJaxpr, inputs: Marks) -> list[bool]:
        """Which outputs of a program are reached."""
        jaxpr = close(program).jaxpr
        marked = {var for var, mark in zip(jaxpr.invars, inputs, strict=True) if mark}
        while True:
            before = len(marked)
            for eqn in jaxpr.eqns:
                self._pass(eqn, marked)
            # A reference may be read before it is written, in the body of a loop. What
            # is written then reaches what was read, one iteration later.
            if len(marked) == before or not any(map(_is_ref, jaxpr.invars)):
                return [_is_marked(atom, marked) for atom in jaxpr.outvars]

    def _pass(self, eqn: jex.JaxprEqn, marked: set[Any]) -> None:
        """Follows the marks through one equation."""
        inputs = [_is_marked(atom, marked) for atom in eqn.invars]
        outs = self._equation(eqn, inputs)
        pairs = list(zip(eqn.outvars, outs, strict=True))
        # An equation may write to its references.
        if any(inputs):
            pairs += [(var, True) for var in eqn.invars if _is_ref(var)]
        marked.update(var for var, mark in pairs if mark and self._passes(var.aval))

    def _passes(self, aval: Aval) -> bool:
        return not self.is_derivative or jnp.issubdtype(aval.dtype, jnp.inexact)

    def _equation(self, eqn: jex.JaxprEqn, inputs: Marks) -> list[bool]:
        name, params = eqn.primitive.name, eqn.params
        if self.axis_name is not None and (
            _is_reduction(eqn, self.axis_name) or _is_over_examples(eqn)
        ):
            return [False] * len(eqn.outvars)  # the same all along the axis
        if not any(inputs) and not self._names(eqn):
            return [False] * len(eqn.outvars)
        if self.is_derivative and name in _WITHOUT_TANGENT:
            return [False] * len(eqn.outvars)
        # What is read from a reference may depend on anything that was written to it.
        if any(map(_is_ref, eqn.invars)):
            return [True] * len(eqn.outvars)
        if name in CALLS:
            return self.outputs(params[CALLS[name]], inputs)
        if name in ("custom_jvp_call", "custom_vjp_call"):
            return self._custom(eqn, inputs)
        if name == "scan":
            return self._scan(params, inputs)
        if name == "while":
            return self._while(params, inputs)
        if name == "cond" and not inputs[0]:
            branches = [self.outputs(b, inputs[1:]) for b in params["branches"]]
            return [any(marks) for marks in zip(*branches, strict=True)]
        primitive: Any = params.get("_prim")
        if self.is_derivative and hasattr(primitive, "moves_out"):
            return primitive.moves_out(inputs)
        if hasattr(primitive, "reached_out"):
            return primitive.reached_out(inputs, self.axis_name)
        return [True] * len(eqn.outvars)

    def _names(self, eqn: jex.JaxprEqn) -> bool:
        return self.axis_name is not None and any(
            _names(inner, self.axis_name) for inner in equations_of(eqn)
        )

    def _custom(self, eqn: jex.JaxprEqn, inputs: Marks) -> list[bool]:
        if is_through(eqn):
            return list(inputs[len(inputs) - len(eqn.outvars) :])
        # A derivative rule may depend on more than the function does. But how a batch
        # is laid out follows from the function.
        if self.axis_name is None:
            return [True] * len(eqn.outvars)
        return self.outputs(eqn.params["call_jaxpr"], inputs)

    def _scan(self, params: dict[str, Any], inputs: Marks) -> list[bool]:
        consts, carry, xs = split(inputs, *scan_counts(params))
        while True:
            outs = self.outputs(params["jaxpr"], [*consts, *carry, *xs])
            after, ys = split(outs, len(carry))
            # The least fixed point: marks that a step adds hold for the next one.
            if (more := union(carry, after)) == carry:
                return [*carry, *ys]
            carry = more

    def _while(self, params: dict[str, Any], inputs: Marks) -> list[bool]:
        counts = params["cond_nconsts"], params["body_nconsts"]
        of_cond, of_body, carry = split(inputs, *counts)
        while True:
            goes_on = self.outputs(params["cond_jaxpr"], [*of_cond, *carry])
            after = self.outputs(params["body_jaxpr"], [*of_body, *carry])
            # If examples run differently long, all leaves of the carry differ.
            more = [True] * len(carry) if any(goes_on) else union(carry, after)
            if more == carry:
                return carry
            carry = more


def _is_marked(atom: jax.core.Atom, marked: set[Any]) -> bool:
    return not isinstance(atom, jex.Literal) and atom in marked


def _is_ref(var: jax.core.Atom) -> bool:
    return isinstance(getattr(var, "aval", None), jax.ref.AbstractRef)


def _is_reduction(eqn: jex.JaxprEqn, axis_name: Hashable) -> bool:
    is_reduction = eqn.primitive.name in ("psum", "pmax", "pmin")
    return is_reduction and axis_name in eqn.params["axes"]


def _is_over_examples(eqn: jex.JaxprEqn) -> bool:
    """Whether an equation reduces over every `vmap` around it, as `unvmap` does."""
    is_custom = eqn.primitive.name == "custom_vmap_call"
    return is_custom and reduces_examples(batching_rule(eqn))


def _names(eqn: jex.JaxprEqn, axis_name: Hashable) -> bool:
    """Whether an equation is a collective over that axis."""
    for value in eqn.params.values():
        names = value if isinstance(value, tuple) else (value,)
        if any(type(name) is type(axis_name) and name == axis_name for name in names):
            return True
    return False
