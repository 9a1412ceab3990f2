"""`ReversibleAdjoint`: the way back through a solve computes each state from the next.

The loop over the steps is a `ScanWhile` whose steps are undone, as under `Reversible`,
by the inverse that is made here. It finds the value before a step (`_undone.py`). The
times between which the step was are either computed, if all steps are of one size, or
were saved by the step.

What is used of Diffrax beyond what `_adjoint.py` names: the fields of the state that
its loop carries, the state of `ConstantStepSize`, which counts steps, and that of
Runge-Kutta solvers, which may keep the rates of change at the end of a step.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NoReturn, final

import diffrax
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
from jax import lax

from .._calls import as_count, check_bool
from .._types import PyTree, Value
from ..checkpointing import (
    AbstractSchedule,
    Layout,
    LoopSpec,
    Undo,
    layout_by_inverse,
    trusting,
)
from ..loops import ScanWhile
from ._adjoint import (
    SAVES_WORK,
    differentiable,
    has_unsafe_path,
    inner_loop,
    of_instance,
    refuse_schedule,
)
from ._on_devices import on_each_device
from ._undone import value_before

# More steps than any solve has, for those whose number has no bound.
_UNBOUNDED = 2**31 - 1


@final
class ReversibleAdjoint(diffrax.AbstractAdjoint):
    """Differentiates the steps of a solver that are computed again from their end.

    The solution is that of the solver. The backward pass finds the value before each
    step from the one after it, but for rounding. So no steps are stored, however many
    there are: with a constant step size the memory of a gradient does not grow with the
    solve. With an adaptive one, the times of the steps are saved, two numbers for each
    of `max_steps`. Gradients are those of the steps that were run, in every mode and
    under `vmap`.

    `diffrax.ReversibleHeun` is undone by arithmetic. Other explicit solvers are run
    back in time, which misses where a step came from by about its error, and what is
    missed is made up for in two or three rounds, of two steps each.

    Use it for long solves of equations that do not contract much. Rounding errors grow
    on the way back by as much as solutions have come together. Where rates of change
    jump, the way back may miss the step over the jump. An error says so in either case.
    Store `checkpoints` in between, or use
    [`CheckpointedAdjoint`][eqloop.diffrax.CheckpointedAdjoint].

    Args:
        checkpoints: How many states are stored, at the starts of equal parts of
            `max_steps` steps. Each part is taken back from the state at its end, so a
            `max_steps` near the number of steps makes the most of them.
        check: Whether to compare what the way back comes to with the state from which
            the solve, or a part of it, has started.

    Raises:
        TypeError: If `checkpoints` is not an int, or `check` is not a bool.
        ValueError: If `checkpoints` is less than 1. When called, if the solver cannot
            be undone, as implicit ones cannot; if there are events, or a dense solution
            is asked for; if steps adapt, or there are several checkpoints, and there is
            no `max_steps`; if there is an `UnsafeBrownianPath`. While a gradient is
            computed, if the way back does not come to where the solve has started. A
            program that is compiled raises JAX's own error, with the same message.

    Examples:
        >>> import diffrax, jax
        >>> import jax.numpy as jnp
        >>> from eqloop.diffrax import ReversibleAdjoint
        >>> def end(rate):
        ...     term = diffrax.ODETerm(lambda t, y, args: -rate * y)
        ...     how = term, diffrax.Tsit5(), 0.0, 1.0, 0.01, jnp.array(1.0)
        ...     adjoint = ReversibleAdjoint()
        ...     return diffrax.diffeqsolve(*how, adjoint=adjoint).ys[0]
        >>> print(f"{jax.jit(jax.grad(end))(1.0):.3f}")
        -0.368

    References:
        P. Kidger, J. Foster, X. Li and T. Lyons, *Efficient and accurate gradients for
        neural SDEs*, [arXiv:2105.13493](https://arxiv.org/abs/2105.13493), for
        reversible Heun; J. Behrmann, W. Grathwohl, R. T. Q. Chen, D. Duvenaud and
        J.-H. Jacobsen, *Invertible residual networks*,
        [arXiv:1811.00995](https://arxiv.org/abs/1811.00995), for steps that are
        inverted by iteration.
    """

    checkpoints: int = 1
    check: bool = True

    def __check_init__(self) -> None:
        refuse_schedule("ReversibleAdjoint", self.checkpoints)
        what = "the number of states that are stored"
        as_count("ReversibleAdjoint", "checkpoints", what, self.checkpoints)
        check_bool("ReversibleAdjoint", "check", self.check)

    @of_instance
    def loop(
        self,
        *,
        terms: PyTree,
        solver: PyTree,
        stepsize_controller: PyTree,
        event: PyTree,
        saveat: PyTree,
        max_steps: int | None,
        throw: PyTree,
        init_state: PyTree,
        passed_solver_state: PyTree,
        passed_controller_state: PyTree,
        **settings: Any,
    ) -> PyTree:
        """Runs the steps; it is called by Diffrax.

        Args:
            terms: The terms of the equation.
            solver: The solver.
            stepsize_controller: What decides on the size of steps.
            event: What ends the solve early, which has to be nothing.
            saveat: What is saved.
            max_steps: The most steps that are run.
            throw: Not used, as by other adjoints that differentiate the steps.
            init_state: The state before the first step.
            passed_solver_state: The same.
            passed_controller_state: The same.
            **settings: The other settings of the solve.

        Returns:
            The result of the solve, as Diffrax returns it.
        """
        del throw, passed_solver_state, passed_controller_state
        state = init_state.solver_state
        _refuse_irreversible(terms, solver, state, stepsize_controller, event, saveat)
        is_constant = _counts_steps(stepsize_controller, init_state)
        if max_steps is None and not (is_constant and self.checkpoints == 1):
            raise ValueError(
                "ReversibleAdjoint: without `max_steps` it is not known how many times "
                "of steps, or at which of them states are to be stored. Give "
                "`diffeqsolve` a `max_steps`."
            )
        settings |= dict(
            terms=terms,
            solver=differentiable(solver),
            stepsize_controller=stepsize_controller,
            event=event,
            saveat=saveat,
            init_state=init_state,
        )
        run = functools.partial(self._run, is_constant, max_steps)
        return on_each_device(run, settings)

    def _run(
        self, is_constant: bool, max_steps: int | None, settings: dict[str, Any]
    ) -> PyTree:
        terms, args, saveat = (settings[name] for name in ("terms", "args", "saveat"))
        solver, start = settings["solver"], settings["init_state"]
        controller = settings["stepsize_controller"] if is_constant else None
        undo = _Undo(terms, args, solver, saveat, controller, start)
        save = None if is_constant else _saved
        schedule = _Undone(Undo(undo, save), self.checkpoints, self.check)

        def outer_loop(
            cond: Callable[..., PyTree],
            body: Callable[..., PyTree],
            init: PyTree,
            *,
            max_steps: int | None,
            buffers: PyTree,
        ) -> PyTree:
            init = jax.tree.map(jnp.asarray, init)
            most = _UNBOUNDED if max_steps is None else max_steps
            step = lambda carry, _: (body(carry), None)
            loop = ScanWhile(cond, step, max_steps=most, schedule=schedule)
            with trusting(SAVES_WORK):
                return loop(init)[0]

        return self._loop(
            **settings,
            max_steps=max_steps,
            inner_while_loop=inner_loop,
            outer_while_loop=outer_loop,
        )


@dataclasses.dataclass(frozen=True)
class _Undone(AbstractSchedule):
    """As `Reversible`, with words of its own."""

    # The inverse is known to undo a step, so that the first one is not checked.

    by: Undo
    checkpoints: int
    check: bool

    @property
    def undo(self) -> Undo:
        """How a step is undone."""
        return self.by

    def layout(self, loop: LoopSpec) -> Layout:
        """Parts that are reversed by the inverse, if there is one."""
        missed = _missed if self.check else None
        return layout_by_inverse(loop, self.checkpoints, False, missed)


def _missed(name: str, size: Value, off: Value) -> NoReturn:
    raise ValueError(
        f"ReversibleAdjoint: the way back does not come to the state from which the "
        f"solve has started. At {name}, whose largest entry is {size:.3g}, it is off "
        f"by {off:.3g}, so the gradient is wrong. Where an equation contracts, errors "
        f"of rounding grow on the way back. Store states in between by `checkpoints=`, "
        f"which are at equal parts of `max_steps`, so give one near the number of "
        f"steps; or use `eqloop.diffrax.CheckpointedAdjoint`. `check=False` checks "
        f"nothing."
    )


def _saved(state: PyTree, _: object) -> PyTree:
    """What a step of adaptive size saves: all of its state that is not undone."""
    return (
        state.tprev,
        state.tnext,
        state.made_jump,
        state.controller_state,
        state.result,
        state.progress_meter_state,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Undo:
    """The inverse of a step of Diffrax's loop.

    Attributes:
        args: The arguments of the vector field.
        constant: What decides on the size of steps if that is constant; else `None`.
        start: The state before the first step.
    """

    terms: PyTree
    args: PyTree
    solver: PyTree
    saveat: PyTree
    constant: PyTree
    start: PyTree

    def __call__(self, after: PyTree, _: object, saved: PyTree = None) -> PyTree:
        """The state before a step, from the one after it and what the step saved."""
        if self.constant is not None:
            saved = self._counted_back(after)
        tprev, tnext, made_jump, controller_state, result, meter = saved
        # The time goes on by a step that is kept, and by no other.
        keep = after.tprev != tprev
        step = self.terms, tprev, tnext, after.y, self.args
        if is_heun(self.solver):
            found = _undo_heun(*step, after.solver_state)
            given = after.y, after.solver_state
            y, solver_state = jax.tree.map(
                functools.partial(jnp.where, keep), found, given
            )
        else:
            y = value_before(self.solver, *step, keep)
            solver_state = self._state_at(tprev, y, made_jump)
        one = keep.astype(after.num_steps.dtype)
        before = dataclasses.replace(
            after,
            y=y,
            solver_state=solver_state,
            tprev=tprev,
            tnext=tnext,
            made_jump=made_jump,
            controller_state=controller_state,
            result=result,
            progress_meter_state=meter,
            num_steps=after.num_steps - 1,
            num_accepted_steps=after.num_accepted_steps - one,
            num_rejected_steps=after.num_rejected_steps - (1 - one),
        )
        is_sub = lambda x: isinstance(x, diffrax.SubSaveAt)
        save_state = jax.tree.map(
            functools.partial(_before_saving, before, after, keep),
            self.saveat.subs,
            after.save_state,
            is_leaf=is_sub,
        )
        return dataclasses.replace(before, save_state=save_state)

    def _state_at(self, t: Value, y: PyTree, made_jump: Value) -> PyTree:
        """The state of the solver: none, or the rates of change, if it keeps them."""
        first = self.start.solver_state
        if first is None:
            return None
        # Behind a jump they are those before it, which are not used.
        behind = eqxi.prevbefore(eqxi.prevbefore(t))
        rates = self.solver.func(
            self.terms, jnp.where(made_jump, behind, t), y, self.args
        )
        at_first = functools.partial(jnp.where, t == self.start.tprev)
        return jax.tree.map(at_first, first, (False, rates))

    def _counted_back(self, after: PyTree) -> PyTree:
        """What a step of constant size started from, by the number of the step."""
        start, number = self.start, after.num_steps - 1
        count, *others = after.controller_state
        # The count at a step is one more than its number. The end of the step before
        # was asked for one step earlier.
        asked = (count - 3, *others)
        nothing = (None,) * 5
        _, _, tprev, _, _, _ = self.constant.adapt_step_size(
            after.tprev, after.tprev, *nothing, asked
        )
        early = jnp.where(number == 0, start.tprev, start.tnext)
        tprev = jnp.where(number < 2, early, tprev)
        before = (count - 1, *others)
        # As it goes forward, the end of a step is where the next one starts.
        unchanged = after.made_jump, before, after.result, after.progress_meter_state
        return tprev, after.tprev, *unchanged


def _before_saving(
    before: PyTree, after: PyTree, keep: Value, sub: PyTree, saved: PyTree
) -> PyTree:
    """What was saved before a step: the rows are the same, and fewer of them count."""
    index, of_times = saved.save_index, saved.saveat_ts_index
    if sub.steps:
        writes = keep & (after.num_accepted_steps % sub.steps == 0)
        index = index - writes.astype(index.dtype)
    if sub.ts is not None:
        # All times up to that of a state have been saved by then, but for those at the
        # very start, which are saved by the first step.
        is_first = before.num_accepted_steps == 0
        is_later = lambda i: (i > 0) & (is_first | (sub.ts[i - 1] > before.tprev))
        earlier = lax.while_loop(is_later, lambda i: i - 1, of_times)
        index, of_times = index - (of_times - earlier), earlier
    return dataclasses.replace(saved, save_index=index, saveat_ts_index=of_times)


def _undo_heun(
    terms: PyTree, t0: Value, t1: Value, y1: PyTree, args: PyTree, state: PyTree
) -> tuple[PyTree, PyTree]:
    """The value and the state before a step of reversible Heun."""
    z1, rate1 = state
    control = terms.contr(t0, t1)
    moved = terms.prod(rate1, control)
    z0 = jax.tree.map(lambda y, z, by: 2 * y - z - by, y1, z1, moved)
    rate0 = terms.vf(t0, z0, args)
    rates = jax.tree.map(jnp.add, rate0, rate1)
    moved = terms.prod(rates, control)
    y0 = jax.tree.map(lambda y, by: y - 0.5 * by, y1, moved)
    return y0, (z0, rate0)


def _counts_steps(controller: PyTree, state: PyTree) -> bool:
    """Whether the times of steps follow from their number."""
    is_constant = type(controller) is diffrax.ConstantStepSize
    # Its state, which is not documented, starts with the number of the next step.
    known = state.controller_state
    return is_constant and isinstance(known, tuple) and len(known) == 4


def is_heun(solver: PyTree) -> bool:
    """Whether a solver is reversible Heun, and none that passes for the one in it."""
    is_wrapped = isinstance(solver, diffrax.AbstractWrappedSolver)
    return isinstance(solver, diffrax.ReversibleHeun) and not is_wrapped


def _refuse_irreversible(
    terms: PyTree,
    solver: PyTree,
    state: PyTree,
    controller: PyTree,
    event: PyTree,
    saveat: PyTree,
) -> None:
    """Checks that a solve can be reversed."""
    if event is not None:
        raise ValueError(
            "ReversibleAdjoint: the time of an event is found within a step, which "
            "cannot be undone. Use `eqloop.diffrax.CheckpointedAdjoint`."
        )
    if saveat.dense:
        raise ValueError(
            "ReversibleAdjoint: `SaveAt(dense=True)` stores all steps, which this "
            "adjoint is there to avoid. Save at times, `SaveAt(ts=...)`, or use "
            "`eqloop.diffrax.CheckpointedAdjoint`."
        )
    if has_unsafe_path(terms):
        raise ValueError(
            "ReversibleAdjoint: `UnsafeBrownianPath` gives other numbers when a step "
            "is run again. Use `diffrax.VirtualBrownianTree`."
        )
    if is_heun(solver):
        if _jumps(controller):
            raise ValueError(
                "ReversibleAdjoint: `ReversibleHeun` starts anew at a jump, which "
                "cannot be undone. Use another solver, such as `diffrax.Tsit5()`."
            )
    elif (why := _why_not(solver, state)) is not None:
        raise ValueError(
            f"ReversibleAdjoint: {type(solver).__name__} {why}. Use an explicit solver "
            f"of one step, such as `diffrax.Tsit5()`, or "
            f"`eqloop.diffrax.CheckpointedAdjoint`."
        )


def _why_not(solver: PyTree, state: PyTree) -> str | None:
    """Why the steps of a solver cannot be undone; `None` if they can."""
    if isinstance(solver, diffrax.AbstractImplicitSolver):
        return (
            "solves an equation at each step: it is for equations that cannot be run "
            "backwards"
        )
    # A Runge-Kutta solver may keep the rates of change, which are computed again.
    knows_rates = isinstance(solver, diffrax.AbstractRungeKutta)
    if state is not None and not (knows_rates and type(state) is tuple):
        return "computes a step from more than the last value"
    return None


def _jumps(controller: PyTree) -> bool:
    """Whether a controller, or one within it, has times at which the rates jump."""
    clips = lambda x: isinstance(x, diffrax.ClipStepSizeController)
    found = jax.tree.leaves(controller, is_leaf=clips)
    clipping = list(filter(clips, found))
    return any(c.jump_ts is not None or _jumps(c.controller) for c in clipping)
