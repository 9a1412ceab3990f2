"""`Coupled`: any one-step solver, coupled with itself to one that can be run backwards.

McCallum and Foster (2024) carry a second copy `z` of the solution beside `y`. With the
increment `P_h(y)` of a step of the solver, and `l` a little below 1 (`coupling`),

    y1 = l y0 + (1 - l) z0 + P_h(z0)           z0 = z1 + P_-h(y1)
    z1 = z0 - P_-h(y1)                         y0 = z0 + (y1 - z0 - P_h(z0)) / l

so each of the two is computed from the other and from what is known by then, in either
direction. `l` draws the copies together, which makes the method stable.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, final

import diffrax
import jax
import jax.numpy as jnp

from .._arrays import describe
from .._types import PyTree, Value


@final
class Coupled(diffrax.AbstractWrappedSolver[Any]):
    """A solver of Diffrax, made reversible by coupling two copies of the solution.

    A step is undone by arithmetic, so
    [`ReversibleAdjoint`][eqloop.diffrax.ReversibleAdjoint] needs to store none. It puts
    a solver into this class by itself. Use the class to solve in the same way with
    another adjoint, or to pass on the state of a solve.

    Order, error estimates and interpolation are those of the solver. Each step takes
    two of its steps. Stochastic equations need a solver for Stratonovich's integral,
    which is the same in both directions of time.

    Args:
        solver: A solver that computes a step from the last value alone, such as
            `diffrax.Tsit5()` or `diffrax.Midpoint()`.
        coupling: By which factor the distance of the two copies shrinks at each step,
            between 0 and 1. Rounding errors of the way back grow by its inverse.

    Raises:
        TypeError: If `solver` is not a solver of Diffrax.
        ValueError: If `coupling` is not between 0 and 1; if the solver is implicit,
            remembers earlier steps, or needs more of a Brownian motion than increments.

    Examples:
        >>> import diffrax
        >>> import jax.numpy as jnp
        >>> from eqloop.diffrax import Coupled
        >>> term = diffrax.ODETerm(lambda t, y, args: -y)
        >>> how = 0.0, 1.0, 0.1, jnp.array(1.0)
        >>> found = diffrax.diffeqsolve(term, Coupled(diffrax.Tsit5()), *how)
        >>> print(f"{found.ys[0]:.4f}")
        0.3679

    References:
        S. McCallum and J. Foster, *Efficient, accurate and stable gradients for neural
        ODEs*, [arXiv:2410.11648](https://arxiv.org/abs/2410.11648).
    """

    solver: diffrax.AbstractSolver[Any]  # pyright: ignore[reportIncompatibleVariableOverride]
    coupling: float = 0.999

    def __check_init__(self) -> None:
        solver = self.solver
        if not isinstance(solver, diffrax.AbstractSolver):
            raise TypeError(
                f"Coupled: `solver` must be a solver of Diffrax, such as "
                f"`diffrax.Tsit5()`, not {describe(solver)}."
            )
        check_coupling("Coupled", self.coupling)
        if (why := why_not(solver)) is not None:
            raise ValueError(
                f"Coupled: {type(solver).__name__} {why}. Use an explicit solver of "
                f"one step, such as `diffrax.Tsit5()`, or `diffrax.Midpoint()` for "
                f"stochastic equations."
            )

    @property
    def term_structure(self) -> PyTree:  # pyright: ignore[reportIncompatibleVariableOverride]
        """As of the solver."""
        return self.solver.term_structure

    @property
    def term_compatible_contr_kwargs(self) -> PyTree:  # pyright: ignore[reportIncompatibleVariableOverride]
        """As of the solver."""
        return self.solver.term_compatible_contr_kwargs

    @property
    def interpolation_cls(self) -> Callable[..., Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """That of the solver, moved to where the coupled steps begin and end."""
        of_solver = self.solver.interpolation_cls

        def interpolation(*, t0: Value, t1: Value, between: PyTree, moved: PyTree):
            return _Moved(t0, t1, of_solver(t0=t0, t1=t1, **between), *moved)

        return interpolation

    @property
    def scan_kind(self) -> str:
        """How the loop over the stages is run."""
        # Adjoints of Diffrax change it where it is `None`, in a solver that passes for
        # a Runge-Kutta method as this one may. It is that of another object here.
        solver, kinds = self.solver, (diffrax.AbstractRungeKutta, diffrax.AbstractSRK)
        is_bare = not isinstance(solver, diffrax.AbstractWrappedSolver)
        kind = solver.scan_kind if is_bare and isinstance(solver, kinds) else None
        return kind or "lax"

    def order(self, terms: PyTree) -> int | None:
        """As of the solver."""
        return self.solver.order(terms)

    def strong_order(self, terms: PyTree) -> Any:
        """As of the solver."""
        return self.solver.strong_order(terms)

    def error_order(self, terms: PyTree) -> Any:
        """As of the solver."""
        return self.solver.error_order(terms)

    def init(
        self, terms: PyTree, t0: Value, t1: Value, y0: PyTree, args: PyTree
    ) -> PyTree:
        """The second copy, which starts where the first one does."""
        return y0

    def step(
        self,
        terms: PyTree,
        t0: Value,
        t1: Value,
        y0: PyTree,
        args: PyTree,
        solver_state: PyTree,
        made_jump: Value,
    ) -> tuple[PyTree, PyTree, PyTree, PyTree, Any]:
        """A step of both copies; it is called by Diffrax."""
        z0 = solver_state
        there = self._increment(terms, t0, t1, z0, args)
        pull = lambda y, z, by: z + self.coupling * (y - z) + by
        y1 = jax.tree.map(pull, y0, z0, there.by)
        back = self._back(terms, t0, t1, y1, args)
        z1 = jax.tree.map(jnp.subtract, z0, back.by)
        # Where the solver's own step begins and ends, and where this one does.
        ends = (
            jax.tree.map(jnp.subtract, y0, z0),
            jax.tree.map(lambda y, z, by: y - z - by, y1, z0, there.by),
        )
        info = dict(between=there.between, moved=ends)
        return y1, there.error, info, z1, there.result

    def undo(
        self,
        terms: PyTree,
        t0: Value,
        t1: Value,
        y1: PyTree,
        args: PyTree,
        solver_state: PyTree,
    ) -> tuple[PyTree, PyTree]:
        """The value and the state before a step.

        Args:
            terms: The terms of the equation.
            t0: The time before the step.
            t1: The time after it.
            y1: The value after it.
            args: The arguments of the vector field.
            solver_state: The state after it.
        """
        back = self._back(terms, t0, t1, y1, args)
        z0 = jax.tree.map(jnp.add, solver_state, back.by)
        there = self._increment(terms, t0, t1, z0, args)
        push = lambda y, z, by: z + (y - z - by) / self.coupling
        return jax.tree.map(push, y1, z0, there.by), z0

    def func(self, terms: PyTree, t0: Value, y0: PyTree, args: PyTree) -> PyTree:
        """As of the solver."""
        return self.solver.func(terms, t0, y0, args)

    def _back(
        self, terms: PyTree, t0: Value, t1: Value, y: PyTree, args: PyTree
    ) -> "_Increment":
        is_leaf = lambda x: (
            isinstance(x, diffrax.AbstractTerm) and not isinstance(x, diffrax.MultiTerm)
        )
        backwards = jax.tree.map(_backwards, terms, is_leaf=is_leaf)
        return self._increment(backwards, -t1, -t0, y, args)

    def _increment(
        self, terms: PyTree, t0: Value, t1: Value, y: PyTree, args: PyTree
    ) -> "_Increment":
        """What a step of the solver adds to a value, from which it starts anew."""
        state = self.solver.init(terms, t0, t1, y, args)
        settings = terms, t0, t1, y, args, state, False
        after, error, between, _, result = self.solver.step(*settings)
        by = jax.tree.map(jnp.subtract, after, y)
        return _Increment(by, error, between, result)


class _Increment(NamedTuple):
    """What a step of a solver adds, its error, and what there is between its ends."""

    by: PyTree
    error: PyTree
    between: PyTree
    result: Any


def _backwards(term: diffrax.AbstractTerm[Any, Any]) -> Any:
    """A term in reversed time, in which `-t` goes from `-t1` to `-t0`."""
    # `diffeqsolve` puts terms into such ones, for either direction of time. Runge-Kutta
    # solvers know them, and evaluate less.
    if {field.name for field in dataclasses.fields(term)} == {"term", "direction"}:
        wrapped: Any = term
        return dataclasses.replace(wrapped, direction=-wrapped.direction)
    return _Backwards(term)


class _Backwards(diffrax.AbstractTerm[Any, Any]):
    """A term in reversed time."""

    term: diffrax.AbstractTerm[Any, Any]

    def vf(self, t: Value, y: PyTree, args: PyTree) -> PyTree:
        return self.term.vf(-t, y, args)

    def contr(self, t0: Value, t1: Value, **settings: Any) -> PyTree:
        there = self.term.contr(-t1, -t0, **settings)
        return jax.tree.map(jnp.negative, there)

    def prod(self, vf: PyTree, control: PyTree) -> PyTree:
        return self.term.prod(vf, control)

    def vf_prod(self, t: Value, y: PyTree, args: PyTree, control: PyTree) -> PyTree:
        return self.term.vf_prod(-t, y, args, control)

    def is_vf_expensive(self, t0: Value, t1: Value, y: PyTree, args: PyTree) -> bool:
        return self.term.is_vf_expensive(-t1, -t0, y, args)


class _Moved(diffrax.AbstractLocalInterpolation):
    """An interpolation whose ends are moved, and what is between them with these."""

    t0: Value
    t1: Value
    inner: diffrax.AbstractLocalInterpolation
    start: PyTree
    end: PyTree

    def evaluate(self, t0: Value, t1: Value | None = None, left: bool = True) -> PyTree:
        if t1 is not None:
            ends = self.evaluate(t1, left=left), self.evaluate(t0, left=left)
            return jax.tree.map(jnp.subtract, *ends)
        span = self.t1 - self.t0
        part = jnp.where(span == 0, 0, (t0 - self.t0) / jnp.where(span == 0, 1, span))
        move = lambda y, start, end: y + start + part * (end - start)
        return jax.tree.map(move, self.inner.evaluate(t0), self.start, self.end)


def check_coupling(owner: str, coupling: object) -> None:
    """Checks that a factor is a number between 0 and 1."""
    # An int between 0 and 1 there is none.
    if not (isinstance(coupling, float) and 0 < coupling < 1):
        raise ValueError(
            f"{owner}: `coupling`, the factor by which the distance of two copies "
            f"shrinks at each step, must be a number between 0 and 1, such as 0.999, "
            f"not {coupling!r}."
        )


def why_not(solver: diffrax.AbstractSolver[Any]) -> str | None:
    """Why a solver cannot be coupled; `None` if it can be."""
    if isinstance(solver, diffrax.AbstractImplicitSolver):
        return (
            "solves an equation at each step: it is for equations that cannot be run "
            "backwards"
        )
    if isinstance(solver, diffrax.LeapfrogMidpoint):
        return "computes a step from two values"
    kinds = diffrax.AbstractSRK, diffrax.AbstractFosterLangevinSRK
    if isinstance(solver, kinds):
        return "needs more of a Brownian motion than its increments"
    return None
