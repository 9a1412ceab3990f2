"""A formula under `vmap`, for those that have no better rule.

It applies `jax.vmap` to all that the formula does, whenever it is evaluated or
differentiated. A formula that can compute a batch in a better way does so in `batched`.
"""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Self

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from .._arrays import (
    Flags,
    batch_type,
    instantiated,
    interleave,
    is_zero,
    pick,
    tangent_types,
    type_of,
    zero_cotangent,
)
from .._types import BatchAxis, PyTree, Value
from ._calculus import vmap
from ._doubled import Doubled
from ._equations import as_written
from ._formula import Formula


def vmapped(
    formula: Formula, axis_data: BatchAxis, args: PyTree, dims: PyTree
) -> tuple[Formula, PyTree, list[int | None]]:
    """A formula under `vmap`, as a rule for `Formula.batched`."""
    batched = Vmapped(formula, axis_data, tuple(formula.flat_in(dims)), args)
    return batched, args, [0] * len(formula.out_avals_flat)


class Vmapped(Formula):
    """A formula under `vmap`. All outputs are batched, along their leading axis."""

    formula: Formula
    axis_data: BatchAxis
    dims: tuple[int | None, ...]

    def __init__(
        self, formula: Formula, axis_data: BatchAxis, dims: PyTree, in_avals: PyTree
    ):
        self.in_avals = jax.tree.map(type_of, in_avals)
        self.out_aval = jax.tree.map(
            lambda aval: batch_type(aval, axis_data), formula.out_aval
        )
        self.params = dict(formula=formula, axis_data=axis_data, dims=dims)
        self.effects = formula.effects
        self.unit, self.is_backward = formula.unit, formula.is_backward
        super().__init__()

    def expand(self, *inputs: PyTree) -> PyTree:
        one = lambda flat: self.formula.expand(*self.in_tree.unflatten(flat))
        # The batch is laid out, and not the example.
        with as_written(True):
            return self._vmap(one, self.dims)(self.flat_in(inputs))

    def doubled(self, nonzeros: Flags) -> Doubled:
        doubled = self.formula.doubled(nonzeros)
        avals = self.in_avals_flat
        tangents = tangent_types(avals, doubled.takes)
        both = lambda of_inputs, of_tangents: interleave(
            doubled.ins, pick(of_inputs, doubled.uses), of_tangents
        )
        in_avals = doubled.formula.in_tree.unflatten(both(avals, tangents))
        dims = tuple(both(self.dims, pick(self.dims, doubled.takes)))
        vmapped = Vmapped(doubled.formula, self.axis_data, dims, in_avals)
        return dataclasses.replace(doubled, formula=vmapped)

    def pull(self, perturbed: PyTree, inputs: PyTree, cts: PyTree) -> PyTree:
        def one(inputs: list[Value], cts: list[Value]) -> list[Value]:
            inputs = self.in_tree.unflatten(inputs)
            in_cts = self.formula.pull(perturbed, inputs, self.out_tree.unflatten(cts))
            # `vmap` takes no symbolic zeros, but `None` is a tree without leaves.
            return [None if is_zero(ct) else ct for ct in self.flat_in(in_cts)]

        in_cts = self._vmap(one, self.dims, 0)(
            self.flat_in(inputs), instantiated(self.flat_out(cts))
        )
        # An input that is not batched has a cotangent for each example: their sum.
        back = lambda ct, dim: ct.sum(0) if dim is None else jnp.moveaxis(ct, 0, dim)
        return self.in_tree.unflatten(
            zero_cotangent(aval) if ct is None else back(ct, dim)
            for aval, ct, dim in zip(self.in_avals_flat, in_cts, self.dims, strict=True)
        )

    def settled(self, nonzeros: Flags, reverse: bool) -> Self:
        return self.with_params(formula=self.formula.settled(nonzeros, reverse))

    def nonzeros_out(self, nonzeros_in: Sequence[bool]) -> list[bool]:
        return self.formula.nonzeros_out(nonzeros_in)

    def reached_out(self, marks: Sequence[bool], axis_name: Hashable) -> list[bool]:
        if axis_name is not None:  # a batch has all outputs batched
            return super().reached_out(marks, axis_name)
        return self.formula.reached_out(marks, None)

    def batched(
        self, axis_data: BatchAxis, args: PyTree, dims: PyTree
    ) -> tuple[Formula, PyTree, list[int | None]]:
        return vmapped(self, axis_data, args, dims)

    @property
    def jaxprs(self) -> list[jex.ClosedJaxpr]:
        return self.formula.jaxprs

    def with_bars(self, change: Any) -> Self:
        return self.with_params(formula=self.formula.with_bars(change))

    def _vmap(self, f: Callable[..., PyTree], *dims: PyTree) -> Callable[..., PyTree]:
        in_axes = tuple(list(d) if isinstance(d, tuple) else d for d in dims)
        return vmap(f, self.axis_data, in_axes, 0)
