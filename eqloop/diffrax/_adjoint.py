"""`CheckpointedAdjoint`: Diffrax's main loop, as a loop of this library.

What is used of Diffrax beyond what its documentation names:

- `AbstractAdjoint.loop` takes settings by keyword that are not documented. All of them
  are handed on as they come.
- `AbstractAdjoint._loop` runs a solve, given the functions that run its two loops; all
  adjoints of Diffrax call it. These functions have the signature of
  `equinox.internal.while_loop`.
- `scan_kind` of a Runge-Kutta solver says how the loop over its stages is run.

`tests/diffrax/` sees to it that they are there.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast, final

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp

from .._arrays import describe
from .._calls import as_count
from .._types import PyTree
from ..checkpointing import AbstractSchedule, trusting
from ..loops import CheckpointedWhileLoop, ScanWhile
from ._on_devices import on_each_device

# By these a step of Diffrax sees whether any example needs something: only to leave it
# out if none does.
SAVES_WORK = frozenset({"nonbatchable", "select_if_vmap", "unvmap_any"})
# How many carries are stored of the loop over the times within one step.
_INNER = 8


_F = TypeVar("_F", bound=Callable[..., Any])


def of_instance(loop: _F) -> _F:
    """The `loop` of an adjoint, which says so if it is called on the class."""
    # Diffrax takes any adjoint, and a class as well.

    @functools.wraps(loop)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not args:
            owner = loop.__qualname__.partition(".")[0]
            raise TypeError(
                f"{owner}: `adjoint` must be made from this class, by "
                f"`adjoint={owner}()`, and not be the class."
            )
        return loop(*args, **kwargs)

    return cast(_F, call)


def refuse_schedule(owner: str, checkpoints: object) -> None:
    """Checks that it is no schedule that was given for a number of checkpoints."""
    if isinstance(checkpoints, AbstractSchedule):
        raise TypeError(
            f"{owner}: `checkpoints` must be an int, the number of carries that are "
            f"stored. A schedule is given by name: "
            f"`CheckpointedAdjoint(schedule={checkpoints!r})`."
        )


@final
class CheckpointedAdjoint(diffrax.AbstractAdjoint):
    """Differentiates the steps of a solver, in every mode and in little memory.

    It replaces `diffrax.RecursiveCheckpointAdjoint`, `DirectAdjoint` and `ForwardMode`:
    gradients, tangents, Hessians and every other mix of modes are those of the steps
    that were run. Under `vmap` each example stops at its own time.

    Carries are stored in one of two ways. With `checkpoints`, their number is fixed,
    for any number of steps, as in
    [`CheckpointedWhileLoop`][eqloop.CheckpointedWhileLoop]. With a `schedule` they are
    those of a [`ScanWhile`][eqloop.ScanWhile] of `max_steps` steps; with a
    [`Budget`][eqloop.Budget] as many as fit.

    Args:
        checkpoints: How many carries are stored, the initial one included. By default
            those with which `max_steps` steps are evaluated at most 3 times each, or 64
            if there is no `max_steps`. The initial carry is stored in addition if the
            first step of the solver differs from the later ones.
        schedule: How to store carries instead. It needs `max_steps`.

    Raises:
        TypeError: If `checkpoints` is not an int, or `schedule` is not a schedule.
        ValueError: If both are given, or `checkpoints` is less than 1. When called, if
            there is a `schedule` and no `max_steps`, or if there is an
            `UnsafeBrownianPath`.

    Examples:
        >>> import diffrax, jax
        >>> import jax.numpy as jnp
        >>> from eqloop.diffrax import CheckpointedAdjoint
        >>> def end(rate):
        ...     term = diffrax.ODETerm(lambda t, y, args: -rate * y)
        ...     adjoint = CheckpointedAdjoint(checkpoints=8)
        ...     how = term, diffrax.Tsit5(), 0.0, 1.0, 0.1, jnp.array(1.0)
        ...     return diffrax.diffeqsolve(*how, adjoint=adjoint).ys[0]
        >>> derivatives = jax.grad(end), jax.jacfwd(end), jax.hessian(end)
        >>> print([f"{jax.jit(derivative)(1.0):.3f}" for derivative in derivatives])
        ['-0.368', '-0.368', '0.368']

    References:
        [Adjoints in Diffrax](https://docs.kidger.site/diffrax/api/adjoints/).
    """

    checkpoints: int | None = None
    schedule: AbstractSchedule | None = eqx.field(default=None, static=True)

    def __check_init__(self) -> None:
        if not isinstance(self.schedule, AbstractSchedule | None):
            raise TypeError(
                f"CheckpointedAdjoint: `schedule` must be a schedule, such as "
                f"`el.Binomial(30)`, not {describe(self.schedule)}."
            )
        if self.checkpoints is None:
            return
        refuse_schedule("CheckpointedAdjoint", self.checkpoints)
        what = "the number of carries that are stored"
        as_count("CheckpointedAdjoint", "checkpoints", what, self.checkpoints)
        if self.schedule is not None:
            raise ValueError(
                "CheckpointedAdjoint: give either `checkpoints` or a `schedule`, which "
                "says how many carries are stored."
            )

    @of_instance
    def loop(
        self,
        *,
        terms: PyTree,
        solver: PyTree,
        max_steps: int | None,
        throw: PyTree,
        passed_solver_state: PyTree,
        passed_controller_state: PyTree,
        **settings: Any,
    ) -> PyTree:
        """Runs the steps; it is called by Diffrax.

        Args:
            terms: The terms of the equation.
            solver: The solver.
            max_steps: The most steps that are run.
            throw: Not used, as by other adjoints that differentiate the steps.
            passed_solver_state: The same.
            passed_controller_state: The same.
            **settings: The other settings of the solve.

        Returns:
            The result of the solve, as Diffrax returns it.
        """
        del throw, passed_solver_state, passed_controller_state
        if self.schedule is not None and max_steps is None:
            raise ValueError(
                "CheckpointedAdjoint: a `schedule` is planned for a number of steps. "
                "Give `diffeqsolve` a `max_steps`, or the adjoint `checkpoints=` in "
                "place of the schedule."
            )
        if has_unsafe_path(terms):
            raise ValueError(
                "CheckpointedAdjoint: `UnsafeBrownianPath` gives other numbers when a "
                "step is run again. Use `diffrax.VirtualBrownianTree`, or "
                "`adjoint=diffrax.ForwardMode()`."
            )
        run = functools.partial(
            self._loop,
            max_steps=max_steps,
            inner_while_loop=inner_loop,
            outer_while_loop=self._outer_loop,
        )
        settings |= dict(terms=terms, solver=differentiable(solver))
        return on_each_device(lambda settings: run(**settings), settings)

    def _outer_loop(
        self,
        cond: Callable[..., PyTree],
        body: Callable[..., PyTree],
        init: PyTree,
        *,
        max_steps: int | None,
        buffers: PyTree,
    ) -> PyTree:
        """Runs the steps of a solve."""
        init = jax.tree.map(jnp.asarray, init)
        with trusting(SAVES_WORK):
            if self.schedule is None or max_steps is None:
                settings = dict(checkpoints=self.checkpoints, max_steps=max_steps)
                return CheckpointedWhileLoop(cond, body, **settings)(init)
            step = lambda carry, _: (body(carry), None)
            loop = ScanWhile(cond, step, max_steps=max_steps, schedule=self.schedule)
            return loop(init)[0]


def inner_loop(
    cond: Callable[..., PyTree],
    body: Callable[..., PyTree],
    init: PyTree,
    *,
    max_steps: int | None,
    buffers: PyTree,
    checkpoints: int,
) -> PyTree:
    """Runs the loop over the times at which a solution is saved within one step."""
    init = jax.tree.map(jnp.asarray, init)
    checkpoints = min(checkpoints, _INNER)
    loop = CheckpointedWhileLoop(
        cond, body, checkpoints=checkpoints, max_steps=max_steps
    )
    with trusting(SAVES_WORK):
        return loop(init)


def differentiable(solver: PyTree) -> PyTree:
    """The solver whose stages are in a loop that is differentiable in every mode."""
    if isinstance(solver, diffrax.AbstractWrappedSolver):
        # It passes for the solver that it wraps, and has none of its settings.
        if not any(field.name == "solver" for field in dataclasses.fields(solver)):
            return solver
        return _with_field(solver, "solver", differentiable(solver.solver))
    # By default it is one of Equinox's that has reverse mode alone. "bounded" is known
    # to Runge-Kutta solvers, and "lax" to those of stochastic equations.
    kinds = {diffrax.AbstractRungeKutta: "bounded", diffrax.AbstractSRK: "lax"}
    for kind, loop in kinds.items():
        if isinstance(solver, kind) and solver.scan_kind is None:
            return _with_field(solver, "scan_kind", loop)
    return solver


def _with_field(solver: PyTree, field: str, value: PyTree) -> PyTree:
    """The solver with another value of a field."""
    # A solver may have an `__init__` of its own, which does not take its fields. So it
    # is not called again.
    changed = copy.copy(solver)
    object.__setattr__(changed, field, value)
    return changed


def has_unsafe_path(terms: PyTree) -> bool:
    """Whether there is a Brownian path that gives other numbers when asked again."""
    is_path = lambda x: isinstance(x, diffrax.UnsafeBrownianPath)
    return any(map(is_path, jax.tree.leaves(terms, is_leaf=is_path)))
