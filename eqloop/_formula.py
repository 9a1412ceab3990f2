"""Primitives whose derivatives depend on nothing but their inputs.

JAX lets a primitive say for itself how it is evaluated, batched and differentiated
(`jax.experimental.hijax`). A `Formula` says it in three functions, `expand`, `push`
and `pull`, and all that JAX asks for is derived from them here. `Pushed` is the
derivative of a formula in forward mode and `Mapped` a formula under `vmap`; both are
formulas again, so derivatives and batching nest in any order.
"""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.experimental.hijax import Zero, instantiate_zeros

from ._compat import HiPrimitive
from ._lists import pick, put
from ._recall import remember


class Formula(HiPrimitive):
    """A primitive on nested lists and tuples of arrays.

    In forward mode the primal and the tangents are two equations, not one: inside
    `jax.checkpoint` the first is evaluated, and only the second transposed.
    """

    def push(self, primals: Any, tangents: Any) -> tuple[Any, Any]:
        """Forward mode: the outputs, or `None`, and their tangents.

        Tangents are symbolic zeros where they are known to be zero. The outputs are
        given only if they cost nothing once there are tangents.
        """
        raise AssertionError("abstract: each formula has its own")

    def pull(self, perturbed: Any, inputs: Any, cts: Any) -> Any:
        """Reverse mode: cotangents of the perturbed inputs, zeros for the others."""
        raise AssertionError("abstract: each formula has its own")

    def moves_out(self, moves_in: Sequence[bool]) -> list[bool]:
        """Which outputs have a tangent if these inputs have one, both in flat order."""
        return [any(moves_in) and is_inexact(aval) for aval in self.out_avals_flat]

    def batch_pushed(
        self, pushed: "Pushed", axis_data: Any, args: Any, dims: Any
    ) -> Any | None:
        """A better batch rule for the tangents than `Mapped`, where there is one."""
        return None

    def muted(self, backward: bool) -> Self:
        """The same to be run again: without progress bars for what was shown before.

        Args:
            backward: Whether to leave out those of backward sweeps, too.
        """
        return self

    def guarded(self) -> Self:
        """The same with callbacks that close all progress bars when they raise."""
        return self

    def rewritten(self, rewrite: Callable[[Any], Any]) -> Self:
        """The same running other jaxprs, where it is free to: of the same meaning.

        Args:
            rewrite: From a closed jaxpr to one of the same signature.
        """
        return self

    def with_params(self, **params: Any) -> Self:
        """The same with other parameters, for inputs and outputs of the same types."""
        if all(value is self.params[name] for name, value in params.items()):
            return self
        new = copy.copy(self)
        new.params = {**self.params, **params}
        new.__dict__.update(params)
        return new

    # What JAX asks for.

    def jvp(self, primals: Any, tangents: Any) -> Any:
        # The tangents come first, since they may leave the primal behind for `recall`.
        tangents = self._tangents(primals, tangents)
        return self(*primals), tangents

    def lin(self, nzs_in: Any, *primals: Any) -> Any:
        return self(*primals), primals

    def linearized(self, residuals: Any, *tangents: Any) -> Any:
        return instantiated(self._tangents(residuals, tangents))

    def vjp_fwd(self, nzs_in: Any, *inputs: Any) -> Any:
        return self(*inputs), (Static(tuple(self.flat_in(nzs_in))), inputs)

    def vjp_bwd_retval(self, res: Any, outgrad: Any) -> Any:
        perturbed, inputs = res
        return self.pull(self.in_tree.unflatten(perturbed.value), inputs, outgrad)

    def transpose(self, out_ct: Any, *args: Any) -> None:
        # The inputs that it is linear in come as accumulators of their cotangents.
        flat = self.flat_in(args)
        is_linear = [hasattr(arg, "accum") for arg in flat]
        inputs = [
            _zeros_of(aval) if linear else arg
            for aval, arg, linear in zip(
                self.in_avals_flat, flat, is_linear, strict=True
            )
        ]
        unflatten = self.in_tree.unflatten
        cts = self.pull(unflatten(is_linear), unflatten(inputs), out_ct)
        cts = pick(self.flat_in(cts), is_linear)
        for accumulator, ct in zip(pick(flat, is_linear), cts, strict=True):
            accumulator.accum(ct)

    def batch(self, axis_data: Any, args: Any, dims: Any) -> Any:
        # JAX asks for a batch rule also where nothing is batched.
        if not jax.tree.leaves(dims):
            return self(*args), jax.tree.map(lambda _: None, self.out_aval)
        mapped = Mapped(self, axis_data, dims, args)
        return mapped(*args), jax.tree.map(lambda _: 0, self.out_aval)

    # For those who work with flat inputs and outputs.

    def flat_in(self, tree: Any) -> list[Any]:
        return self.in_tree.flatten_up_to(tree)

    def flat_out(self, tree: Any) -> list[Any]:
        return self.out_tree.flatten_up_to(tree)

    def _tangents(self, primals: Any, tangents: Any) -> Any:
        flat = self.flat_in(tangents)
        moves = tuple(
            not is_zero(tangent) and is_inexact(aval)
            for tangent, aval in zip(flat, self.in_avals_flat, strict=True)
        )
        args = (primals, pick(flat, moves))
        return self.among_zeros(moves, Pushed(self, moves, args)(*args))

    def among_zeros(self, moves_in: Sequence[bool], tangents: Any) -> Any:
        """The tangents of all outputs from those of the outputs that move."""
        zeros = [zero_tangent(aval) for aval in self.out_avals_flat]
        return self.out_tree.unflatten(put(zeros, self.moves_out(moves_in), tangents))


class Pushed(Formula):
    """The tangents of a formula: `(primals, tangents) -> tangents`.

    Attributes:
        moves: Which inputs of the formula have a tangent; the others have none here.
    """

    formula: Formula
    moves: tuple[bool, ...]

    def __init__(self, formula: Formula, moves: tuple[bool, ...], args: Any):
        moves_out = formula.moves_out(moves)
        self.in_avals = jax.tree.map(jax.typeof, args)
        self.out_aval = [
            aval.to_tangent_aval() for aval in pick(formula.out_avals_flat, moves_out)
        ]
        self.params = dict(formula=formula, moves=moves)
        self.effects = formula.effects
        super().__init__()

    def expand(self, primals: Any, tangents: Any) -> Any:
        primals_out, tangents_out = self._push(primals, tangents)
        if primals_out is not None:
            remember(self.formula, self.formula.flat_in(primals), primals_out)
        return tangents_out

    def push(self, primals: Any, tangents: Any) -> tuple[Any, Any]:
        tangents = self.flat_in(tangents)
        moves = [not is_zero(tangent) for tangent in tangents]
        flat, push = self.flat_in(primals), self.muted(backward=True)._flat_push
        return None, _jvp_at(push, flat, moves, pick(tangents, moves))

    def pull(self, perturbed: Any, inputs: Any, cts: Any) -> Any:
        formula, (primals, _) = self.formula, inputs
        flat = self.flat_in(inputs)
        result = [Zero(aval.to_ct_aval()) for aval in self.in_avals_flat]
        of_primals, of_tangents = perturbed

        marks = [
            bool(mark) and is_inexact(aval)
            for mark, aval in zip(
                formula.flat_in(of_primals), formula.in_avals_flat, strict=True
            )
        ]
        count = len(marks)
        if any(marks):
            marks += [False] * (len(flat) - count)
            push = self.muted(backward=False)._flat_push
            pulled = _vjp_at(push, flat, marks, instantiated(cts))
            result = put(result, marks, pulled)
            formula = formula.muted(backward=True)  # one bar will do
        if any(jax.tree.leaves(of_tangents)):
            moves = formula.in_tree.unflatten(self.moves)
            moves_out = formula.moves_out(self.moves)
            all_cts = [Zero(aval.to_ct_aval()) for aval in formula.out_avals_flat]
            all_cts = formula.out_tree.unflatten(put(all_cts, moves_out, cts))
            pulled = formula.flat_in(formula.pull(moves, primals, all_cts))
            result[count:] = pick(pulled, self.moves)
        return self.in_tree.unflatten(result)

    def batch(self, axis_data: Any, args: Any, dims: Any) -> Any:
        better = self.formula.batch_pushed(self, axis_data, args, dims)
        return super().batch(axis_data, args, dims) if better is None else better

    def muted(self, backward: bool) -> Self:
        return self.with_params(formula=self.formula.muted(backward))

    def guarded(self) -> Self:
        return self.with_params(formula=self.formula.guarded())

    def _push(self, primals: Any, tangents: Any) -> tuple[Any, list[Any]]:
        formula = self.formula
        among_zeros = put(
            _zero_tangents(formula.flat_in(primals)), self.moves, tangents
        )
        out, tangents_out = formula.push(
            primals, formula.in_tree.unflatten(among_zeros)
        )
        moves_out = formula.moves_out(self.moves)
        return out, instantiated(pick(formula.flat_out(tangents_out), moves_out))

    def _flat_push(self, flat: Sequence[Any]) -> list[Any]:
        return self._push(*self.in_tree.unflatten(flat))[1]


class Mapped(Formula):
    """A formula under `vmap`. All outputs are batched, along their leading axis."""

    formula: Formula
    axis_data: Any
    dims: tuple[int | None, ...]

    def __init__(self, formula: Formula, axis_data: Any, dims: Any, args: Any):
        self.in_avals = jax.tree.map(jax.typeof, args)
        self.out_aval = jax.tree.map(
            lambda aval: jex.unmapped_aval(axis_data.size, 0, aval), formula.out_aval
        )
        flat_dims = tuple(formula.flat_in(dims))
        self.params = dict(formula=formula, axis_data=axis_data, dims=flat_dims)
        self.effects = formula.effects
        super().__init__()

    def expand(self, *inputs: Any) -> Any:
        one = lambda flat: self.formula.expand(*self.in_tree.unflatten(flat))
        return self._vmap(one, self.dims)(self.flat_in(inputs))

    def push(self, primals: Any, tangents: Any) -> tuple[Any, Any]:
        tangents = self.flat_in(tangents)
        moves = [not is_zero(tangent) for tangent in tangents]
        moves_out = self.formula.moves_out(moves)
        unflatten = self.in_tree.unflatten

        def one(primals: list[Any], moving: list[Any]) -> list[Any]:
            tangents = put(_zero_tangents(primals), moves, moving)
            _, out = self.formula.push(unflatten(primals), unflatten(tangents))
            return instantiated(pick(self.flat_out(out), moves_out))

        mapped = self._vmap(one, self.dims, pick(self.dims, moves))
        out = mapped(self.flat_in(primals), pick(tangents, moves))
        return None, self.among_zeros(moves, out)

    def pull(self, perturbed: Any, inputs: Any, cts: Any) -> Any:
        def one(inputs: list[Any], cts: list[Any]) -> list[Any]:
            inputs = self.in_tree.unflatten(inputs)
            pulled = self.formula.pull(perturbed, inputs, self.out_tree.unflatten(cts))
            return [None if is_zero(ct) else ct for ct in self.flat_in(pulled)]

        pulled = self._vmap(one, self.dims, 0)(
            self.flat_in(inputs), instantiated(self.flat_out(cts))
        )
        back = lambda ct, dim: ct.sum(0) if dim is None else jnp.moveaxis(ct, 0, dim)
        return self.in_tree.unflatten(
            Zero(aval.to_ct_aval()) if ct is None else back(ct, dim)
            for aval, ct, dim in zip(self.in_avals_flat, pulled, self.dims, strict=True)
        )

    def moves_out(self, moves_in: Sequence[bool]) -> list[bool]:
        return self.formula.moves_out(moves_in)

    def muted(self, backward: bool) -> Self:
        return self.with_params(formula=self.formula.muted(backward))

    def guarded(self) -> Self:
        return self.with_params(formula=self.formula.guarded())

    def _vmap(self, f: Callable[..., Any], *dims: Any) -> Callable[..., Any]:
        in_axes = tuple(list(d) if isinstance(d, tuple) else d for d in dims)
        return vmap(f, self.axis_data, in_axes, 0)


def vmap(f: Callable[..., Any], axis_data: Any, in_axes: Any, out_axes: Any) -> Any:
    """`jax.vmap` along the axis that a batch rule is called for."""
    return jax.vmap(
        f,
        in_axes=in_axes,
        out_axes=out_axes,
        axis_name=axis_data.name,
        axis_size=axis_data.size,
        spmd_axis_name=axis_data.spmd_name or axis_data.explicit_mesh_axis,
    )


def _jvp_at(
    f: Callable[[list[Any]], Any], flat: Any, marks: Any, tangents: Sequence[Any]
) -> Any:
    """The tangents of `f` for tangents of the marked inputs."""
    run = lambda marked: f(put(flat, marks, marked))
    return jax.jvp(run, (pick(flat, marks),), (list(tangents),))[1]


def _vjp_at(
    f: Callable[[list[Any]], Any], flat: Any, marks: Any, cts: Any
) -> list[Any]:
    """The cotangents of the marked inputs of `f`."""
    _, pull = jax.vjp(lambda marked: f(put(flat, marks, marked)), pick(flat, marks))
    return pull(cts)[0]


# Symbolic zeros.


def is_zero(x: Any) -> bool:
    """Whether a tangent or cotangent is a symbolic zero."""
    return isinstance(x, Zero)


def is_inexact(x: Any) -> bool:
    """Whether a value, or one of this type, can have a tangent."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def nonzero(tree: Any) -> Any:
    """A mark for each leaf of a tree of tangents."""
    return jax.tree.map(lambda x: not is_zero(x), tree, is_leaf=is_zero)


def instantiated(tree: Any) -> Any:
    """A tree of tangents or cotangents with arrays for symbolic zeros."""
    return jax.tree.map(instantiate_zeros, tree, is_leaf=is_zero)


def zero_tangent(aval: Any) -> Any:
    """The symbolic zero among the tangents of a type."""
    return Zero(aval.to_tangent_aval())


def _zero_tangents(leaves: Sequence[Any]) -> list[Any]:
    return [zero_tangent(jax.typeof(leaf)) for leaf in leaves]


def _zeros_of(aval: Any) -> Any:
    return instantiate_zeros(zero_tangent(aval))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Static:
    """Hands what is no array from a forward to a backward rule."""

    value: Any
