"""Primitives whose derivatives depend on nothing but their inputs.

JAX lets a primitive decide how it is evaluated, batched and differentiated
(`jax.experimental.hijax`). A subclass of `Formula` defines this by three methods, and
everything that JAX asks for is derived from them here:

- `expand` evaluates it,
- `doubled` is the formula that computes the tangents as well,
- `pull` takes cotangents of its outputs to those of its inputs.

In forward mode a formula makes two equations. One is for the tangents: `Selected`
outputs of the doubled formula. The other is for the primal. They have to be two, since
inside `jax.checkpoint` JAX evaluates the second one and transposes the first.

    y = f(x)    under jvp    dy = Selected(doubled f)(x, dx);  y = settled f(x)

The primal is not always the formula itself. A custom rule (`jax.custom_jvp`,
`jax.custom_vjp`) computes a primal of its own, and a second derivative is a derivative
of that. The formula in which rules have replaced functions is the `settled` one.

`Selected` and a formula under `vmap` (`_vmapped.py`) are formulas again. So derivatives
and batching nest in any order.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Self

import jax
import jax.extend.core as jex

from .._arrays import (
    Flags,
    as_arrays,
    inexact_only,
    instantiated,
    interleave,
    is_zero,
    on_mesh_of,
    pick,
    put,
    zero_cotangent,
    zero_tangent,
)
from .._compat import (
    is_accumulator,
    linear_outputs,
    linearization,
    refuse_scan3,
    with_symbolic_zeros,
)
from .._tracebacks import rule
from .._types import BatchAxis, PyTree, Value
from ._doubled import Doubled, Leftover, TangentSource
from ._effects import refuse_callbacks
from ._equations import HoldsPrograms, formula_params
from ._expandable import PRIMITIVE
from ._layouts import run_laid_out
from ._reaching import moving_inputs, names_axis


def _on_own_mesh(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a formula, run where the mesh of its inputs is set."""
    is_expand = method.__name__ == "expand"

    @functools.wraps(method)
    def run(self: "Formula", *args: Any, **kwargs: Any) -> Any:
        # In forward mode the equation of the tangents may have run it already.
        leftover = self.leftover if is_expand else None
        known = leftover and leftover.take(self, self.flat_in(args))
        if known is not None:
            return known
        with on_mesh_of(self.in_avals_flat):
            if is_expand and self.runs_programs:
                return self._laid_out(method, *args)
            return method(self, *args, **kwargs)

    return run


class Formula(HoldsPrograms):
    """A primitive on nested lists and tuples of arrays.

    Attributes:
        leftover: Where the equation of the tangents may have left its outputs. It is
            not a parameter, since it makes no difference to what the formula means.
        unit: The name, for errors, of what it repeats ("iteration", "row"); `None` if
            it is not a loop.
        is_backward: Whether it is a loop that takes cotangents back.
    """

    leftover: Leftover | None = None
    unit: str | None = None
    is_backward: bool = False
    # Whether it runs its programs itself, and not another formula.
    runs_programs: bool = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # JAX calls these long after the user's call, when the mesh may not be set.
        for name in ("expand", "doubled", "pull", "sweep_forward"):
            if name in vars(cls):
                setattr(cls, name, _on_own_mesh(vars(cls)[name]))

    def doubled(self, nonzeros: Flags) -> "Doubled":
        """The formula that computes tangents as well, if these inputs have tangents."""
        raise AssertionError("abstract: each formula has its own")

    def pull(self, perturbed: PyTree, inputs: PyTree, cts: PyTree) -> PyTree:
        """Reverse mode: cotangents of the perturbed inputs, and zeros for the others.

        It is given no more than the inputs. `sweep_forward` may store more.
        """
        raise AssertionError("abstract: each formula has its own")

    def settled(self, nonzeros: Flags, reverse: bool) -> Self:
        """The formula after it was differentiated: custom rules compute its primals.

        `nonzeros` are the inputs, in flat order, with respect to which it was.
        """
        return self

    def sweep_forward(
        self, perturbed: PyTree, *inputs: PyTree
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Reverse mode, the forward sweep.

        It gives outputs, residuals for `sweep_back`, and which outputs have a tangent.
        """
        marks = self._marks(perturbed)
        primal = self.settled(marks, reverse=True)
        nonzeros_out = self.out_tree.unflatten(self.nonzeros_out(marks))
        return primal(*inputs), (Static(marks), inputs), nonzeros_out

    def sweep_back(self, residuals: PyTree, cts: PyTree) -> PyTree:
        """Reverse mode, the way back: cotangents of all inputs, or symbolic zeros."""
        marks, inputs = residuals
        return self.pull(self.in_tree.unflatten(marks.value), inputs, cts)

    def check(self, *in_avals: PyTree) -> None:
        """Called by JAX for each formula that is made: as part of the user's call."""
        refuse_scan3()

    def batched(
        self, axis_data: BatchAxis, args: PyTree, dims: PyTree
    ) -> tuple["Formula", PyTree, list[int | None]]:
        """The formula under `vmap`, its inputs, and where its outputs are batched.

        It has as many outputs, in the same order. They may be nested in another way.
        """
        raise AssertionError("abstract: each formula has its own")

    def with_bars(self, change: Any) -> Self:
        """This formula with other progress bars, see `progress.BarChange`."""
        return self

    def apply(self, *inputs: PyTree) -> PyTree:
        """Calls the formula, so that JAX knows which outputs have no tangent.

        On JAX 0.10 it would not, see `with_symbolic_zeros`.
        """
        outs, flat = self.flat_out(self(*inputs)), self.flat_in(inputs)
        outs = with_symbolic_zeros(lambda: moving_inputs(self), flat, outs)
        return self.out_tree.unflatten(outs)

    # What JAX asks for.

    def staging(self, trace: Any, source_info: Any, *inputs: PyTree) -> PyTree:
        flat = self.flat_in(inputs)
        outs = trace.default_process_primitive(
            PRIMITIVE, flat, formula_params(self), source_info
        )
        return self.out_tree.unflatten(outs)

    @rule
    def jvp(self, primals: PyTree, tangents: PyTree) -> PyTree:
        # The tangents come first, since they may leave the primal behind for `expand`.
        nonzeros, leftover = self._nonzeros(tangents), Leftover()
        tangents = self._tangents(nonzeros, primals, tangents, leftover)
        primal = self.settled(nonzeros, reverse=False)._given(leftover)
        outs = primal(*primals)
        leftover.close()
        return outs, tangents

    @rule
    def lin(self, nzs_in: PyTree, *primals: PyTree) -> PyTree:
        nonzeros = self._marks(nzs_in)
        primal = self.settled(nonzeros, reverse=False)
        nonzeros_out = self.nonzeros_out(nonzeros)
        if any(nonzeros_out):
            again = "`jax.linearize` runs this for its value, and again for tangents"
            refuse_callbacks(self.effects, again, "Use `jax.jvp`")
        nonzeros_out = self.out_tree.unflatten(nonzeros_out)
        residuals = Static(nonzeros), primals
        return linearization(primal(*primals), residuals, nonzeros_out)

    @rule
    def linearized(self, residuals: PyTree, *tangents: PyTree) -> PyTree:
        nonzeros, primals = residuals
        return linear_outputs(self._tangents(nonzeros.value, primals, tangents))

    @rule
    def vjp_fwd(self, nzs_in: PyTree, *inputs: PyTree) -> PyTree:
        # Who evaluates a traced program hands on its constants as they are, and a plain
        # loop of JAX, which may follow, stacks copies of those of NumPy as residuals.
        inputs, marks = as_arrays(inputs), self._marks(nzs_in)
        if any(nonzeros_out := self.nonzeros_out(marks)):
            return linearization(*self.sweep_forward(nzs_in, *inputs))
        # No gradient goes through: JAX 0.12 asks all the same, of formulas without any
        # perturbed input as well. Nothing is stored, and nothing is planned.
        primal = self.settled(marks, reverse=True)
        nonzeros_out = self.out_tree.unflatten(nonzeros_out)
        return linearization(primal(*inputs), None, nonzeros_out)

    @rule
    def vjp_bwd_retval(self, res: PyTree, outgrad: PyTree) -> PyTree:
        return self.zero_cts() if res is None else self.sweep_back(res, outgrad)

    @rule
    def transpose(self, out_ct: PyTree, *args: PyTree) -> None:
        # In place of linear inputs JAX passes accumulators of their cotangents.
        flat = self.flat_in(args)
        is_linear = list(map(is_accumulator, flat))
        cts = self.transposed(is_linear, flat, self.flat_out(out_ct))
        for accumulator, ct in zip(pick(flat, is_linear), cts, strict=True):
            accumulator.accum(ct)

    def transposed(
        self, is_linear: Sequence[bool], flat: Sequence[Value], cts: Sequence[Value]
    ) -> list[Value]:
        """The cotangents of linear inputs, such as the tangents of another formula.

        Their values do not matter, so `flat` may have anything in their place.
        """
        zeros = map(instantiated, map(zero_tangent, self.in_avals_flat))
        inputs = [
            zero if linear else as_arrays(x)
            for zero, x, linear in zip(zeros, flat, is_linear, strict=True)
        ]
        unflatten, cts = self.in_tree.unflatten, self.out_tree.unflatten(cts)
        cts = self.pull(unflatten(is_linear), unflatten(inputs), cts)
        return pick(self.flat_in(cts), is_linear)

    @rule
    def batch(self, axis_data: BatchAxis, args: PyTree, dims: PyTree) -> PyTree:
        # JAX also asks for a batch rule if no input is batched. Then the formula stays
        # as it is, unless there is a collective over the axis in it.
        names = any(names_axis(jaxpr, axis_data.name) for jaxpr in self.jaxprs)
        if not (jax.tree.leaves(dims) or names):
            return self(*args), jax.tree.map(lambda _: None, self.out_aval)
        with on_mesh_of(self.flat_in(args)):
            formula, args, out_dims = self.batched(axis_data, args, dims)
            formula, unflatten = formula._given(self.leftover), self.out_tree.unflatten
            return unflatten(formula.flat_out(formula(*args))), unflatten(out_dims)

    def zero_cts(self) -> PyTree:
        """Symbolic zeros as the cotangents of all inputs."""
        return jax.tree.map(zero_cotangent, self.in_avals)

    def _marks(self, perturbed: PyTree) -> Flags:
        """Which inputs are marked and can have a tangent, in flat order."""
        return inexact_only(self.flat_in(perturbed), self.in_avals_flat)

    def _nonzeros(self, tangents: PyTree) -> Flags:
        marks = [not is_zero(tangent) for tangent in self.flat_in(tangents)]
        return inexact_only(marks, self.in_avals_flat)

    def _given(self, leftover: Leftover | None) -> Self:
        """This formula, with a place where its outputs may have been left."""
        new = copy.copy(self)
        new.leftover = leftover
        return new

    def _laid_out(self, expand: Callable[..., PyTree], *inputs: PyTree) -> PyTree:
        """What it evaluates to, laid out for the device."""

        def flat(*flat: Value) -> list[Value]:
            return self.flat_out(expand(self, *self.in_tree.unflatten(flat)))

        outs = run_laid_out(flat, self.flat_in(inputs), self.jaxprs)
        return self.out_tree.unflatten(outs)

    def _tangents(
        self,
        nonzeros: Flags,
        primals: PyTree,
        tangents: PyTree,
        leftover: Leftover | None = None,
    ) -> PyTree:
        """The tangents of all outputs, symbolic zeros among them.

        `leftover` is where to leave the primal outputs, if they will be needed.
        """
        zeros = [zero_tangent(aval) for aval in self.out_avals_flat]
        if any(self.nonzeros_out(nonzeros)):
            doubled = self.doubled(nonzeros)
            args = doubled.arrange(self.flat_in(primals), self.flat_in(tangents))
            primal = self.settled(nonzeros, reverse=False)
            source = TangentSource(self, primal, doubled, leftover)
            formula = Selected.of(doubled.formula, doubled.outs, source)
            zeros = put(zeros, doubled.gives, formula(*args))
        return self.out_tree.unflatten(zeros)


class Selected(Formula):
    """Some of the outputs of a formula, in a list.

    Attributes:
        formula: The formula.
        shown: Which of its outputs.
        source: If they are tangents, the formula that they are tangents of, as long as
            it is known. Then they can be transposed by its `pull`.
    """

    formula: Formula
    shown: Flags
    source: "TangentSource | None"
    runs_programs = False

    def __init__(self, formula: Formula, shown: Flags, source: "TangentSource | None"):
        self.in_avals = formula.in_avals
        self.out_aval = pick(formula.out_avals_flat, shown)
        self.params = dict(formula=formula, shown=shown, source=source)
        self.effects = formula.effects
        self.unit, self.is_backward = formula.unit, formula.is_backward
        super().__init__()

    @classmethod
    def of(
        cls, formula: Formula, shown: Flags, source: "TangentSource | None" = None
    ) -> Self:
        """Some of the outputs of a formula, which may be a selection itself."""
        if isinstance(formula, Selected):
            none = [False] * len(formula.shown)
            shown = tuple(put(none, formula.shown, shown))
            formula = formula.formula
        return cls(formula, shown, source)

    def may_pull(self, perturbed: PyTree) -> bool:
        """Whether its outputs are tangents, and nothing but tangents is perturbed."""
        return self.source is not None and self.source.may_pull(self._marks(perturbed))

    def with_formulas(self, change: Callable[[Any], Any]) -> Self:
        """This selection from another formula of the same meaning, everywhere in it."""
        source = self.source and self.source.with_formulas(change)
        return self.with_params(formula=change(self.formula), source=source)

    def expand(self, *inputs: PyTree) -> PyTree:
        outs = self.formula.flat_out(self.formula.expand(*inputs))
        if self.source is not None and len(outs) == len(self.source.doubled.outs):
            self.source.leave(self.flat_in(inputs), outs)
        return pick(outs, self.shown)

    def doubled(self, nonzeros: Flags) -> "Doubled":
        doubled = self.formula.doubled(nonzeros)
        gives = tuple(pick(doubled.gives, self.shown))
        # Of the doubled outputs: the shown primals, and the tangents of shown ones.
        of_tangents = pick(self.shown, doubled.gives)
        shown = tuple(interleave(doubled.outs, self.shown, of_tangents))
        return dataclasses.replace(
            doubled,
            formula=Selected.of(doubled.formula, shown),
            gives=gives,
            outs=tuple(pick(doubled.outs, shown)),
        )

    def pull(self, perturbed: PyTree, inputs: PyTree, cts: PyTree) -> PyTree:
        if (source := self.source) is not None and self.may_pull(perturbed):
            in_cts = source.pull(self.flat_in(inputs), cts)
            zeros = self.flat_in(self.zero_cts())
            return self.in_tree.unflatten(put(zeros, source.doubled.ins, in_cts))
        return self.formula.pull(perturbed, inputs, self._among_zeros(cts))

    def sweep_forward(
        self, perturbed: PyTree, *inputs: PyTree
    ) -> tuple[PyTree, PyTree, PyTree]:
        if self.may_pull(perturbed):
            out, residuals, nonzeros = super().sweep_forward(perturbed, *inputs)
            return out, (Static(True), residuals), nonzeros
        out, residuals, nonzeros = self.formula.sweep_forward(perturbed, *inputs)
        out, nonzeros = (
            pick(self.formula.flat_out(tree), self.shown) for tree in (out, nonzeros)
        )
        return out, (Static(False), residuals), nonzeros

    def sweep_back(self, residuals: PyTree, cts: PyTree) -> PyTree:
        is_linear, residuals = residuals
        if is_linear.value:
            return super().sweep_back(residuals, cts)
        return self.formula.sweep_back(residuals, self._among_zeros(cts))

    def settled(self, nonzeros: Flags, reverse: bool) -> Self:
        formula = self.formula.settled(nonzeros, reverse)
        if formula is self.formula:
            return self
        return self.with_params(formula=formula, source=None)

    def nonzeros_out(self, nonzeros_in: Sequence[bool]) -> list[bool]:
        return pick(self.formula.nonzeros_out(nonzeros_in), self.shown)

    def reached_out(self, marks: Sequence[bool], axis_name: Hashable) -> list[bool]:
        return pick(self.formula.reached_out(marks, axis_name), self.shown)

    def batched(
        self, axis_data: BatchAxis, args: PyTree, dims: PyTree
    ) -> tuple["Formula", PyTree, list[int | None]]:
        flat = self.flat_in(args), self.flat_in(dims)
        formula, args, out_dims = self.formula.batched(axis_data, args, dims)
        source = self.source and self.source.batched(axis_data, *flat)
        if len(formula.in_avals_flat) != len(self.in_avals_flat):
            source = None  # the inputs are not those of the source, as in a joint loop
        out_dims = pick(out_dims, self.shown)
        return Selected.of(formula, self.shown, source), args, out_dims

    @property
    def jaxprs(self) -> list[jex.ClosedJaxpr]:
        return self.formula.jaxprs

    @property
    def times(self) -> int:
        return self.formula.times

    def with_bars(self, change: Any) -> Self:
        return self.with_params(formula=self.formula.with_bars(change))

    def _among_zeros(self, cts: Sequence[Value]) -> PyTree:
        """Cotangents of all outputs of the formula: zeros for those not shown."""
        formula = self.formula
        zeros = [zero_cotangent(aval) for aval in formula.out_avals_flat]
        return formula.out_tree.unflatten(put(zeros, self.shown, cts))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Static:
    """Passes a value that is not an array from a forward to a backward rule."""

    value: object
