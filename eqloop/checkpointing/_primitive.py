"""The only file that speaks to JAX's autodiff machinery.

A loop under a schedule is a primitive of its own, `PlannedLoop`, so that it can say
for itself how it is batched and how it is differentiated in each mode. With `F` the
loop as a function of its inputs `p`, and `J(p)` its Jacobian, reverse mode consists of
a forward sweep, which saves slots, and of the primitive `Reverse`, which computes
`(p, ct) -> J(p)^T ct` from them.

All higher derivatives come from one observation. Let `T(p, v) = (F(p), J(p) v)`. It is
a loop again, of the step's jvp, under the same schedule. Its vjp at `(p, v)` takes the
cotangents `(a, b)` to

    (J(p)^T a + d/dp <b, J(p) v>,  J(p)^T b).

So the derivative of `Reverse` in a direction `v` of `p` and `a` of `ct` is the first
part with `b = ct`, since second derivatives are symmetric. Its cotangents, in turn, are
`d/dp <ct, J(p) v>` and `J(p) v`. Thus forward-over-reverse and reverse-over-reverse
keep to the schedule's memory as well.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.experimental.hijax import Zero, instantiate_zeros

from .._compat import HiPrimitive
from . import _engine
from ._engine import Active, Policy, Sweep, pick, put
from ._layout import Layout, Nested, Revolved, Stored
from ._loop import Loop, stack_of, stack_type
from ._step import Arrays, Flags, Step, make_step, reaching, split


class Planner(Protocol):
    """What the primitive needs of a schedule."""

    def layout(self, problem: "Problem", active: Active) -> Layout:
        """How to store and reverse a loop, once it is known what is differentiated."""
        ...


@dataclasses.dataclass(frozen=True)
class Problem:
    """A loop with its step, the policy for its residuals, and who plans it."""

    step: Step
    loop: Loop
    policy: Policy
    planner: Planner


def planned_loop(
    problem: Problem, consts: Arrays, init: Arrays, xs: Arrays
) -> tuple[list[Any], list[Any]]:
    """Runs a loop that is differentiated as its schedule plans. Gives carry and `ys`."""
    inputs = (list(consts), list(init), list(xs))
    carry, ys, _ = PlannedLoop(problem, None, inputs)(*inputs)
    return carry, ys


class PlannedLoop(HiPrimitive):
    """`(consts, init, xs) -> (carry, ys, slots)`; there are no slots without a layout.

    The slots have no tangents: `Reverse`, which alone reads them, knows what they mean.
    """

    problem: Problem
    saves: Nested | Revolved | None

    def __init__(self, problem: Problem, saves: Nested | Revolved | None, inputs: Any):
        step, length = problem.step, problem.loop.length
        carry = step.carry_types
        rows = 0 if saves is None else saves.primal_slots + 1
        self.in_avals = jax.tree.map(jax.typeof, inputs)
        self.out_aval = (
            carry,
            [stack_type(y, length) for y in step.y_types],
            [] if saves is None else [stack_type(c, rows) for c in carry],
        )
        self.params = dict(problem=problem, saves=saves)
        self.effects = step.jaxpr.effects
        super().__init__()

    def expand(self, *inputs: Any) -> Any:
        step, loop = self.problem.step, self.problem.loop
        if self.saves is None:
            return (*_engine.primal(step, loop, *inputs), [])
        return _engine.forward(step, loop, self.saves, *inputs)

    def jvp(self, primals: Any, tangents: Any) -> Any:
        active, y_active = _activity(self.problem.step, _nonzero(tangents))
        problem = _tangent_problem(self.problem, active, y_active)
        inputs = tuple(
            [*primal, *map(instantiate_zeros, pick(tangent, flags))]
            for primal, tangent, flags in zip(primals, tangents, active, strict=True)
        )
        carry, ys, slots = PlannedLoop(problem, self.saves, inputs)(*inputs)
        carry, carry_dot = split(carry, len(active.carry))
        ys, ys_dot = split(ys, len(y_active))
        slots = slots[: len(carry)]
        return (carry, ys, slots), (
            put(_zeros(carry), active.carry, carry_dot),
            put(_zeros(ys), y_active, ys_dot),
            _zeros(slots),
        )

    def lin(self, nzs_in: Any, *primals: Any) -> Any:
        return self(*primals), primals

    def linearized(self, residuals: Any, *tangents: Any) -> Any:
        """Runs the primal anew at each application, so that nothing is stored."""
        return _instantiated(self.jvp(residuals, tangents)[1])

    def vjp_fwd(self, nzs_in: Any, *inputs: Any) -> Any:
        problem = self.problem
        active, y_active = _activity(problem.step, nzs_in)
        layout = self.saves or problem.planner.layout(problem, active)
        if isinstance(layout, Stored):
            out, pull = _vjp_stored(problem, active, y_active, inputs)
            carry, ys, slots, residuals = *out, [], (pull,)
        else:
            carry, ys, slots = PlannedLoop(problem, layout, inputs)(*inputs)
            residuals = (inputs, slots)
        out = (carry, ys, slots if self.saves else [])
        static = _Static((layout, active, y_active))
        return out, (static, residuals)

    def vjp_bwd_retval(self, res: Any, outgrad: Any) -> Any:
        static, residuals = res
        layout, active, y_active = static.value
        ct_carry, ct_ys, _ = outgrad
        ct_carry = [instantiate_zeros(ct) for ct in pick(ct_carry, active.carry)]
        if isinstance(layout, Stored):
            ct_ys = [instantiate_zeros(ct) for ct in pick(ct_ys, y_active)]
            (pull,) = residuals
            cts = pull((ct_carry, ct_ys))
        else:
            wanted = tuple(a and not _is_zero(ct) for a, ct in zip(y_active, ct_ys))
            args = (*residuals, ct_carry, pick(ct_ys, wanted))
            cts = Reverse(self.problem, layout, active, wanted, args)(*args)
        return _spread(cts, active, self.in_avals)

    def batch(self, axis_data: Any, args: Any, dims: Any) -> Any:
        problem, carry, ys = _batched_problem(self.problem, axis_data, dims)
        consts, init, xs = args
        init = [
            _lead(c, dim, axis_data.size) if flag else c
            for c, dim, flag in zip(init, dims[1], carry, strict=True)
        ]
        inputs = (consts, init, xs)
        out = PlannedLoop(problem, self.saves, inputs)(*inputs)
        at = lambda axis, flags: [axis if flag else None for flag in flags]
        slots = at(1, carry) if self.saves else []
        return out, (at(0, carry), at(1, ys), slots)


class Formula(HiPrimitive):
    """A primitive whose derivatives depend on nothing but its inputs.

    A subclass says how it is computed (`expand`), pushed forward (`jvp`) and pulled
    back (`pull`); its inputs and outputs are nested lists and tuples of arrays.
    """

    def pull(self, perturbed: Any, inputs: Any, cts: Any) -> Any:
        """The cotangents of the perturbed inputs, and zeros for the others."""
        raise AssertionError("abstract: every subclass has its own")

    def lin(self, nzs_in: Any, *primals: Any) -> Any:
        return self(*primals), primals

    def linearized(self, residuals: Any, *tangents: Any) -> Any:
        return _instantiated(self.jvp(residuals, tangents)[1])

    def vjp_fwd(self, nzs_in: Any, *inputs: Any) -> Any:
        perturbed = tuple(self.in_tree.flatten_up_to(nzs_in))
        return self(*inputs), (_Static(perturbed), inputs)

    def vjp_bwd_retval(self, res: Any, outgrad: Any) -> Any:
        static, inputs = res
        perturbed = self.in_tree.unflatten(static.value)
        return self.pull(perturbed, inputs, _instantiated(outgrad))

    def batch(self, axis_data: Any, args: Any, dims: Any) -> Any:
        # JAX asks for a batch rule also where nothing is batched.
        if not jax.tree.leaves(dims):
            return self(*args), jax.tree.map(lambda _: None, self.out_aval)
        mapped = Mapped(self, axis_data, dims, args)
        return mapped(*args), jax.tree.map(lambda _: 0, self.out_aval)


class Reverse(Formula):
    """`(inputs, slots, ct_carry, ct_ys) -> cts` of the active inputs, by `Sweep`.

    Attributes:
        wanted: Which of the `ys` have a cotangent; that of the others is zero.
    """

    problem: Problem
    layout: Nested | Revolved
    active: Active
    wanted: Flags

    def __init__(
        self,
        problem: Problem,
        layout: Nested | Revolved,
        active: Active,
        wanted: Flags,
        args: Any,
    ):
        self.in_avals = jax.tree.map(jax.typeof, args)
        self.out_aval = tuple(
            [aval.to_ct_aval() for aval in pick(avals, flags)]
            for avals, flags in zip(self.in_avals[0], active, strict=True)
        )
        self.params = dict(problem=problem, layout=layout, active=active, wanted=wanted)
        self.effects = problem.step.jaxpr.effects
        super().__init__()

    def expand(self, inputs: Any, slots: Any, ct_carry: Any, ct_ys: Any) -> Any:
        consts, _, xs = inputs
        all_ct_ys = put([None] * len(self.wanted), self.wanted, ct_ys)
        problem = self.problem
        sweep = Sweep(
            problem.step, problem.loop, problem.policy, self.active, consts, xs, all_ct_ys
        )
        cts = sweep.run(self.layout, slots, ct_carry)
        return cts.consts, cts.carry, cts.xs

    def jvp(self, primals: Any, tangents: Any) -> Any:
        inputs, _, *cts = primals
        inputs_dot, _, *cts_dot = tangents
        pushed = Active(*map(tuple, _nonzero(inputs_dot)))
        pushing = lambda marked: self._push(
            _merge(inputs, self.active, marked), pushed, _select(inputs_dot, pushed)
        )
        _, pull = jax.vjp(pushing, _select(inputs, self.active))
        (out_dot,) = pull((tuple(_instantiated(cts_dot)), tuple(cts)))
        # The same sweep could give the primal as well, as a cotangent of the
        # direction. But under `vmap` it would then be batched as the direction is.
        return self(*primals), out_dot

    def pull(self, perturbed: Any, inputs: Any, cts: Any) -> Any:
        primals, slots, *ct_outs = inputs
        marks = Active(*map(_inexact_only, perturbed[0], primals))
        pushing = lambda marked: self._push(
            _merge(primals, marks, marked), self.active, cts
        )
        (outs, outs_dot), pull = jax.vjp(pushing, _select(primals, marks))
        (ct_primals,) = pull((jax.tree.map(jnp.zeros_like, outs), tuple(ct_outs)))
        return (_spread(ct_primals, marks, self.in_avals[0]), _zeros(slots), *outs_dot)

    def _push(self, inputs: Any, active: Active, direction: Any) -> Any:
        """`T` of the module's docstring: those outputs that have cotangents here."""

        def run(*marked: Any) -> tuple[list[Any], list[Any]]:
            carry, ys = planned_loop(self.problem, *_merge(inputs, active, marked))
            return pick(carry, self.active.carry), pick(ys, self.wanted)

        return jax.jvp(run, _select(inputs, active), direction)


class Mapped(Formula):
    """A formula under `vmap`. All outputs are batched, along their leading axis."""

    formula: Formula
    axis_data: Any
    dims: tuple[int | None, ...]

    def __init__(self, formula: Formula, axis_data: Any, dims: Any, args: Any):
        self.in_avals = jax.tree.map(jax.typeof, args)
        self.out_aval = jax.tree.map(
            lambda aval: stack_type(aval, axis_data.size), formula.out_aval
        )
        flat = tuple(formula.in_tree.flatten_up_to(dims))
        self.params = dict(formula=formula, axis_data=axis_data, dims=flat)
        self.effects = formula.effects
        super().__init__()

    def expand(self, *inputs: Any) -> Any:
        one = lambda leaves: self.formula.expand(*self.formula.in_tree.unflatten(leaves))
        return self._vmap(one, [self.dims])(self.in_tree.flatten_up_to(inputs))

    def jvp(self, primals: Any, tangents: Any) -> Any:
        tree = self.in_tree
        primals, tangents = tree.flatten_up_to(primals), tree.flatten_up_to(tangents)
        perturbed = [not _is_zero(tangent) for tangent in tangents]

        def one(primals: Any, nonzero: Any) -> Any:
            tangents = put(_zeros(primals), perturbed, nonzero)
            out, out_dot = self.formula.jvp(
                tree.unflatten(primals), tree.unflatten(tangents)
            )
            return out, _instantiated(out_dot)

        dims = [self.dims, pick(self.dims, perturbed)]
        return self._vmap(one, dims)(primals, pick(tangents, perturbed))

    def pull(self, perturbed: Any, inputs: Any, cts: Any) -> Any:
        tree = self.in_tree
        inputs = tree.flatten_up_to(inputs)

        def one(inputs: Any, cts: Any) -> Any:
            pulled = self.formula.pull(perturbed, tree.unflatten(inputs), cts)
            return [None if _is_zero(ct) else ct for ct in tree.flatten_up_to(pulled)]

        pulled = self._vmap(one, [self.dims, 0])(inputs, cts)
        back = lambda ct, dim: ct.sum(0) if dim is None else jnp.moveaxis(ct, 0, dim)
        return tree.unflatten(
            zero if ct is None else back(ct, dim)
            for zero, ct, dim in zip(_zeros(inputs), pulled, self.dims, strict=True)
        )

    def _vmap(self, f: Callable[..., Any], dims: Sequence[Any]) -> Callable[..., Any]:
        in_axes = tuple(list(d) if isinstance(d, tuple | list) else d for d in dims)
        return _vmap(f, self.axis_data, in_axes, 0)


def _vmap(f: Callable[..., Any], axis_data: Any, in_axes: Any, out_axes: Any) -> Any:
    return jax.vmap(
        f,
        in_axes=in_axes,
        out_axes=out_axes,
        axis_name=axis_data.name,
        axis_size=axis_data.size,
        spmd_axis_name=axis_data.spmd_name or axis_data.explicit_mesh_axis,
    )


# From a problem to the problems of its derivatives.


def _activity(step: Step, perturbed: Any) -> tuple[Active, Flags]:
    """Which leaves vary with the perturbed inputs: those of all inputs, and of `y`."""
    types = (step.const_types, step.carry_types, step.x_types)
    consts, carry, xs = map(_inexact_only, perturbed, types)
    carry, ys = reaching(step, consts, carry, xs, through=_is_inexact)
    return Active(consts, carry, xs), ys


def _tangent_problem(problem: Problem, active: Active, y_active: Flags) -> Problem:
    """The loop of the step's jvp; leaves are followed by the tangents of active ones."""
    step, loop = problem.step, problem.loop
    types = (step.const_types, step.carry_types, step.x_types)

    def tangent_step(*inputs: list[Any]) -> tuple[list[Any], list[Any]]:
        pairs = [split(leaves, len(flags)) for leaves, flags in zip(inputs, active)]
        primals, tangents = zip(*pairs, strict=True)
        run = lambda *marked: step(*_merge(primals, active, marked))
        (carry, y), (carry_dot, y_dot) = jax.jvp(
            run, _select(primals, active), tuple(tangents)
        )
        carry_dot, y_dot = pick(carry_dot, active.carry), pick(y_dot, y_active)
        return [*carry, *carry_dot], [*y, *y_dot]

    doubled = [
        [*avals, *(aval.to_tangent_aval() for aval in pick(avals, flags))]
        for avals, flags in zip(types, active, strict=True)
    ]
    axes = (*loop.x_axes, *pick(loop.x_axes, active.xs))
    return dataclasses.replace(
        problem,
        step=make_step(tangent_step, *doubled),
        loop=dataclasses.replace(loop, x_axes=axes),
    )


def _batched_problem(
    problem: Problem, axis_data: Any, dims: Any
) -> tuple[Problem, Flags, Flags]:
    """The loop of the step's vmap, with which leaves of carry and `y` it batches.

    To batch the step, and not the loops that run it, leaves one accumulator to the
    cotangents of an unbatched const. Inputs stay as they lie; the carry, and what is
    stacked of it, is batched along its leading axis.
    """
    step, loop = problem.step, problem.loop
    is_batched = [[dim is not None for dim in group] for group in dims]
    carry, ys = reaching(step, *is_batched, axis_name=axis_data.name)
    const_dims, _, xs_dims = dims
    axes = tuple(
        axis + (dim is not None and dim <= axis)
        for axis, dim in zip(loop.x_axes, xs_dims, strict=True)
    )
    x_dims = [
        None if dim is None else dim - (dim > axis)
        for axis, dim in zip(axes, xs_dims, strict=True)
    ]
    front = lambda flags: [0 if flag else None for flag in flags]
    in_dims = (list(const_dims), front(carry), x_dims)
    batched = _vmap(step, axis_data, in_dims, (front(carry), front(ys)))
    types = (
        [
            aval if dim is None else jex.unmapped_aval(axis_data.size, dim, aval)
            for aval, dim in zip(avals, group, strict=True)
        ]
        for avals, group in zip(
            (step.const_types, step.carry_types, step.x_types), in_dims, strict=True
        )
    )
    batched = dataclasses.replace(
        problem,
        step=make_step(batched, *types),
        loop=dataclasses.replace(loop, x_axes=axes),
    )
    return batched, carry, ys


def _vjp_stored(
    problem: Problem, active: Active, y_active: Flags, inputs: Any
) -> tuple[Any, Any]:
    """JAX's own derivative of the loop, which stores every residual."""

    def run(*marked: Any) -> tuple[Any, Any]:
        carry, ys = _engine.stored(
            problem.step, problem.loop, problem.policy, *_merge(inputs, active, marked)
        )
        return (pick(carry, active.carry), pick(ys, y_active)), (carry, ys)

    _, pull, out = jax.vjp(run, *_select(inputs, active), has_aux=True)
    return out, pull


# Lists of arrays in threes: consts, carry and xs, as `Active` marks them.


def _select(groups: Any, active: Active) -> tuple[list[Any], ...]:
    return tuple(pick(g, flags) for g, flags in zip(groups, active, strict=True))


def _merge(groups: Any, active: Active, marked: Any) -> tuple[list[Any], ...]:
    return tuple(
        put(g, flags, new) for g, flags, new in zip(groups, active, marked, strict=True)
    )


def _spread(cts: Any, active: Active, avals: Any) -> tuple[list[Any], ...]:
    """Cotangents of the active inputs among zeros for the others."""
    zeros = [[Zero(aval.to_ct_aval()) for aval in group] for group in avals]
    return _merge(zeros, active, cts)


def _inexact_only(flags: Sequence[bool], leaves: Sequence[Any]) -> Flags:
    return tuple(
        flag and _is_inexact(leaf) for flag, leaf in zip(flags, leaves, strict=True)
    )


def _is_inexact(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def _lead(x: Any, dim: int | None, size: int) -> Any:
    """`x` with its batch axis in front, or with one if it has none."""
    return stack_of(x, size) if dim is None else jnp.moveaxis(x, dim, 0)


# Symbolic zeros.


def _is_zero(x: Any) -> bool:
    return isinstance(x, Zero)


def _nonzero(tree: Any) -> Any:
    return jax.tree.map(lambda x: not _is_zero(x), tree, is_leaf=_is_zero)


def _instantiated(tree: Any) -> Any:
    return jax.tree.map(instantiate_zeros, tree, is_leaf=_is_zero)


def _zeros(leaves: Sequence[Any]) -> list[Any]:
    return [Zero(jax.typeof(leaf).to_tangent_aval()) for leaf in leaves]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Static:
    """Hands what is no array from a forward to a backward rule."""

    value: Any
