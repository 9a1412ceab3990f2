"""Outputs of a step that are its `x`, or a part of it in another shape.

A loop would copy them, row by row, into an array beside `xs`, and a gradient would hold
both. `jax.lax.scan` hands on `xs` itself, where a step returns an `x` as it came. So
these outputs are taken from `xs` as a whole, outside of the loop, and the step does not
return them. JAX then adds their cotangents to those that the loop gives `xs`.

What is computed from `x` stays in the loop, even if it could be computed outside of it:
there it would take the memory of all steps.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Self

import jax
import jax.extend.core as jex
from jax.extend.core import primitives

from ..._arrays import Arrays, put
from ..._programs import aval_of
from ..._types import Value
from ..steps._step import Step, without_outputs

_VIEWS = {
    primitives.copy_p,
    primitives.reshape_p,
    primitives.rev_p,
    primitives.slice_p,
    primitives.squeeze_p,
    primitives.transpose_p,
}


@dataclasses.dataclass(frozen=True)
class View:
    """A leaf of `y` that a step takes from a leaf of `x`.

    Attributes:
        source: Which leaf of `x`.
        eqns: The operations, in their order; none if it is that leaf itself.
    """

    source: int
    eqns: tuple[jex.JaxprEqn, ...]

    def of(self, xs: Value, x_axis: int, y_axis: int) -> Value:
        """The view at all steps.

        These lie along `x_axis` of `xs`, and are to lie along `y_axis` of the view.
        """
        return jax.vmap(self._of_step, in_axes=x_axis, out_axes=y_axis)(xs)

    def _of_step(self, x: Value) -> Value:
        for eqn in self.eqns:
            x = eqn.primitive.bind(x, **eqn.params)
        return x


@dataclasses.dataclass(frozen=True)
class Viewing:
    """A step without those outputs that are views.

    Attributes:
        step: The step that is left.
        views: For each leaf of the original's `y`, the view that it is, if it is one.
    """

    step: Step
    views: tuple[View | None, ...]

    @property
    def note(self) -> str:
        """What a plan says of it."""
        count = sum(view is not None for view in self.views)
        return f"{count} of {len(self.views)} outputs are views of xs, outside the loop"

    @classmethod
    def of(cls, step: Step, candidates: Sequence[bool] | None = None) -> Self:
        """Takes the views out of a step.

        `candidates` marks the leaves of `y` that may be taken out; all by default.
        """
        found = _views(step)
        if candidates is not None:
            pairs = zip(found, candidates, strict=True)
            found = tuple(view if flag else None for view, flag in pairs)
        if not any(found):
            return cls(step, found)
        return cls(_without(step, tuple(view is not None for view in found)), found)

    def join(
        self, ys: Arrays, xs: Arrays, x_axes: Sequence[int], y_axes: Sequence[int]
    ) -> list[Value]:
        """All outputs, from those of the step that is left, and from `xs`.

        `xs` has the steps with outputs: along `x_axes`, and in outputs along `y_axes`.
        """
        taken = [
            None
            if view is None
            else view.of(xs[view.source], x_axes[view.source], axis)
            for view, axis in zip(self.views, y_axes, strict=True)
        ]
        return put(taken, [view is None for view in self.views], ys)


@functools.lru_cache(maxsize=128)
def _views(step: Step) -> tuple[View | None, ...]:
    jaxpr = step.jaxpr.jaxpr
    sources = jaxpr.invars[step.num_consts + step.num_carry :]
    of = {var: View(i, ()) for i, var in enumerate(sources)}
    for eqn in jaxpr.eqns:
        if len(eqn.invars) != 1 or not _is_view(eqn):
            continue
        (atom,), (out,) = eqn.invars, eqn.outvars
        if not isinstance(atom, jex.Literal) and (before := of.get(atom)):
            of[out] = View(before.source, (*before.eqns, eqn))
    outs = jaxpr.outvars[step.num_carry :]
    return tuple(None if isinstance(out, jex.Literal) else of.get(out) for out in outs)


def _is_view(eqn: jex.JaxprEqn) -> bool:
    if eqn.primitive is primitives.convert_element_type_p:
        # Which takes away a weak type.
        return aval_of(eqn.invars[0]).dtype == aval_of(eqn.outvars[0]).dtype
    return eqn.primitive in _VIEWS


@functools.lru_cache(maxsize=128)
def _without(step: Step, dropped: tuple[bool, ...]) -> Step:
    # The same object for the same step: it is a key of many caches.
    return without_outputs(step, dropped)
