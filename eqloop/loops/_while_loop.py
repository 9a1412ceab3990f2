"""`WhileLoop`, `BoundedWhileLoop` and `CheckpointedWhileLoop`.

`run_call` runs a call of them: it makes a step on arrays of `(cond, body, init)`. The
step of such a loop has one more leaf in its carry, the first: whether `cond` holds for
what follows it.
"""

import abc
import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Generic, Self, TypeVar, final

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from .._arrays import axes_of, describe, is_dynamic, partition, split, vary
from .._calls import (
    KnownAs,
    argument_names,
    array_names,
    as_count,
    call_traced,
    compiled_once,
    explained,
    typed,
)
from .._classes import AbstractBordered
from .._programs import loop_scope, refuse_refs, without_derivatives
from .._types import PyTree, Value
from ..checkpointing import (
    UNLIMITED,
    AbstractSchedule,
    AsScan,
    ForwardOnly,
    Online,
    Recursive,
    Step,
    is_fitting,
    make_step,
    run_while,
    trace_step,
)
from ..progress import Label, ProgressBar, as_progress, check_progress, make_meter
from ._carry import Carry, Words, shown_call, trace_stable
from ._loop import check_schedule
from ._step_checks import is_truth

_Carry = TypeVar("_Carry")
_DEFAULT_CHECKPOINTS = 64
MOST_STEPS = "the most steps that are run, known when tracing"


class AbstractWhileLoop(AbstractBordered, Generic[_Carry]):
    """Calls `body` on a carry for as long as `cond` of the carry holds.

    What all while loops have in common. A final class adds how it is differentiated.

    Args:
        cond: `cond(carry)` returns whether to run another step: a scalar boolean. It is
            not differentiated.
        body: `body(carry)` returns the next carry. It may be any callable; if it is a
            module, then its arrays are arrays of this module, and are differentiated.
        progress: Shows a progress bar: `True`, an int (after how many steps it moves)
            or a [`ProgressBar`][eqloop.ProgressBar].
    """

    _made_otherwise: ClassVar[str] = (
        " For a schedule, or outputs of each step, there is `el.ScanWhile(cond, f, "
        "max_steps=...)`, whose `f` returns `(carry, y)`."
    )

    cond: Callable[[_Carry], PyTree]
    body: Callable[[_Carry], _Carry]
    progress: eqx.AbstractVar[ProgressBar | None]

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            if name not in ("plan", "frontier", "schedule"):
                return object.__getattribute__(self, name)  # raises Python's own error
            raise AttributeError(
                f"{type(self).__name__}: it has no `{name}`. `el.plans(f)(*args)` "
                f"tells what the loops of a function `f` store in its gradient, this "
                f"one too. `el.ScanWhile(cond, f, max_steps=...)` has a `{name}`.",
                name=name,
                obj=self,
            )

    @abc.abstractmethod
    def _planner(self) -> ForwardOnly | Online | AsScan:
        """How many steps there may be, and how they are differentiated."""

    @compiled_once
    @typed
    def __call__(self, init: PyTree) -> _Carry:
        """Runs the loop.

        Args:
            init: The initial carry. Arrays, and the Python numbers that `body` changes,
                vary; other leaves must come back as they went in.

        Returns:
            The first carry for which `cond` does not hold. If there is a bound on the
            number of steps and the loop reaches it, the carry at that point.

        Raises:
            TypeError: If the carry changes its type, if `cond` does not return a scalar
                boolean, if a jaxtyping annotation is violated, or if there is a
                reference (`jax.new_ref`) in the carry.
            ValueError: If a static leaf of the carry changes, or if the loop can be
                seen to run forever. Under the `vmap` of a gradient, if there are
                collectives over the axis of the `vmap` in the loop.
        """
        name, planner = type(self).__name__, self._planner()
        return run_call(name, planner, self.progress, self.cond, self.body, init)

    def __check_init__(self) -> None:
        for name, function in (("cond", self.cond), ("body", self.body)):
            if not callable(function):
                raise TypeError(
                    f"{type(self).__name__}: `{name}` must be callable, but "
                    f"{describe(function)} is not."
                )
        check_progress(type(self).__name__, self.progress)


@final
class WhileLoop(AbstractWhileLoop[_Carry]):
    """Like `jax.lax.while_loop`: differentiable only in forward mode.

    Raises:
        TypeError: If `cond` or `body` is not callable. `__call__` lists what the call
            raises.
        ValueError: If the loop is differentiated in reverse mode.

    Examples:
        >>> import eqloop as el, jax, jax.numpy as jnp
        >>> halve = el.WhileLoop(lambda x: x > 1, lambda x: x / 2)
        >>> halve(jnp.float32(100.0))
        Array(0.78125, dtype=float32)

        Under `vmap` each example stops at its own time:

        >>> jax.vmap(halve)(jnp.array([100.0, 3.0, 0.5]))
        Array([0.78125, 0.75   , 0.5    ], dtype=float32)

    References:
        [`jax.lax.while_loop`](https://docs.jax.dev/en/latest/_autosummary/jax.lax.while_loop.html).
    """

    progress: ProgressBar | None = eqx.field(
        default=None, static=True, converter=as_progress, kw_only=True
    )

    def _planner(self) -> ForwardOnly:
        return ForwardOnly()


@final
class BoundedWhileLoop(AbstractWhileLoop[_Carry]):
    """Like [`WhileLoop`][eqloop.WhileLoop] with a bound, differentiable in every mode.

    In reverse mode, about `base * log(max_steps, base)` carries are stored, at the
    starts of nested segments. The steps in between are run again from there. Steps that
    are not run cost nothing.

    Args:
        max_steps: The most steps that are run. A loop that reaches it stops, and
            returns its carry, without an error: test `cond` on that carry, see below.
        base: How many segments a level of nesting has.
        schedule: How to store carries instead: the loop then runs as a
            [`ScanWhile`][eqloop.ScanWhile] with this schedule, on a GPU as one kernel
            each way by [`Fused`][eqloop.Fused].

    Raises:
        TypeError: If `cond` or `body` is not callable, or a setting is not of its type.
        ValueError: If `max_steps` is negative, or `base` less than 2. `__call__` lists
            what the call raises.

    Examples:
        >>> import eqloop as el, jax, jax.numpy as jnp
        >>> def root(a):
        ...     newton = lambda x: (x + a / x) / 2
        ...     far = lambda x: jnp.abs(x * x - a) > 1e-6
        ...     return el.BoundedWhileLoop(far, newton, max_steps=50)(jnp.ones(()))
        >>> print(f"{root(2.0):.4f} {jax.grad(root)(4.0):.4f}")
        1.4142 0.2500

        A search that has not come to its end returns what it has. For an error:

        >>> def found(loop, start):
        ...     end = loop(start)
        ...     return el.error_if(end, loop.cond(end), "the search has not converged")
        >>> loop = el.BoundedWhileLoop(lambda x: x > 1, lambda x: x / 2, max_steps=3)
        >>> found(loop, jnp.float32(8.0))
        Array(1., dtype=float32)
        >>> found(loop, jnp.float32(9.0))
        Traceback (most recent call last):
        EquinoxRuntimeError: ...the search has not converged...

    References:
        It stands in for `equinox.internal.while_loop(..., kind="bounded")`.
    """

    max_steps: int = eqx.field(static=True, kw_only=True)
    base: int = eqx.field(default=16, static=True, kw_only=True)
    schedule: AbstractSchedule | None = eqx.field(
        default=None, static=True, kw_only=True
    )
    progress: ProgressBar | None = eqx.field(
        default=None, static=True, converter=as_progress, kw_only=True
    )

    def _planner(self) -> AsScan:
        return AsScan(self.max_steps, self.schedule or Recursive(self.base))

    def __check_init__(self) -> None:
        as_count("BoundedWhileLoop", "max_steps", MOST_STEPS, self.max_steps, least=0)
        Recursive(self.base)  # raises, should `base` not be valid
        check_schedule("BoundedWhileLoop", self.schedule)


@final
class CheckpointedWhileLoop(AbstractWhileLoop[_Carry]):
    """Like [`WhileLoop`][eqloop.WhileLoop], but differentiable in every mode.

    In reverse mode a fixed number of carries is stored, for any number of steps. As the
    loop goes on, they are spread over all steps so far. The steps in between are run
    again, in the order that needs the fewest evaluations from there. Up to
    `s (s + 3) / 2` steps, `s` carries are enough to evaluate each step at most 3 times:
    by the primal, once again, and for its reversal.

    Args:
        checkpoints: How many carries are stored, the initial one included. By default
            the fewest with which `max_steps` steps are evaluated at most 3 times each.
            Without `max_steps` it is 64, enough for 2144 steps; 47,904 steps would be
            evaluated about 4 times each. If a flag in the carry tells the first step
            from the later ones, the initial carry is stored in addition. If a gradient
            reads nothing but counters of the carry, only the initial carry is stored.
        max_steps: The most steps that are run. A loop that reaches it stops, and
            returns its carry, without an error: test `cond` on that carry, as in the
            example of [`BoundedWhileLoop`][eqloop.BoundedWhileLoop]. By default there
            is no bound.

    Raises:
        TypeError: If `cond` or `body` is not callable, or a setting is not an `int`.
        ValueError: If `checkpoints` is less than 1, or `max_steps` negative. `__call__`
            lists what the call raises.

    Examples:
        >>> import eqloop as el, jax, jax.numpy as jnp
        >>> def collatz(carry):
        ...     n, x = carry
        ...     return jnp.where(n % 2, 3 * n + 1, n // 2), jnp.sin(x)
        >>> loop = el.CheckpointedWhileLoop(lambda c: c[0] != 1, collatz, checkpoints=8)
        >>> slope = jax.grad(lambda x: loop((27, x))[1])(0.5)  # of 111 steps
        >>> print(f"{slope:.4f}")
        0.0285

    References:
        P. Stumm and A. Walther, *New algorithms for optimal online checkpointing*, SIAM
        J. Sci. Comput. 32(2), 2010. It stands in for
        `equinox.internal.while_loop(..., kind="checkpointed")`, and never evaluates
        `body` more often than that does with as many checkpoints.
    """

    checkpoints: int | None = eqx.field(default=None, static=True, kw_only=True)
    max_steps: int | None = eqx.field(default=None, static=True, kw_only=True)
    progress: ProgressBar | None = eqx.field(
        default=None, static=True, converter=as_progress, kw_only=True
    )

    def _planner(self) -> Online:
        max_steps = UNLIMITED if self.max_steps is None else self.max_steps
        checkpoints = self.checkpoints
        if checkpoints is None:
            checkpoints = _DEFAULT_CHECKPOINTS
            if self.max_steps is not None:
                checkpoints = _slots_for(self.max_steps)
        is_open = self.checkpoints is None and is_fitting()
        return Online(max_steps, max(min(checkpoints, max_steps), 1), is_open=is_open)

    def __check_init__(self) -> None:
        owner = "CheckpointedWhileLoop"
        if self.checkpoints is not None:
            what = "the number of carries that are stored"
            as_count(owner, "checkpoints", what, self.checkpoints)
        if self.max_steps is not None:
            as_count(owner, "max_steps", MOST_STEPS, self.max_steps, least=0)


def _slots_for(steps: int) -> int:
    """The least `s` with `s (s + 3) / 2 >= steps`."""
    return (math.isqrt(8 * steps + 8) - 1) // 2


# Opens a call.


_WORDS = Words(f="body")


def run_call(
    owner: str,
    planner: ForwardOnly | Online | AsScan,
    progress: ProgressBar | None,
    cond: Callable[..., PyTree],
    body: Callable[..., PyTree],
    init: PyTree,
) -> PyTree:
    """Opens a call, and runs it."""
    refuse_refs(owner, init, _WORDS.path)
    start = Carry.of(owner, init, _WORDS)
    settled = trace_stable(
        lambda carry, _: _explained(owner, "body", body, carry),
        lambda out: (_checked_body(owner, out, start), [], None),
        start,
        x_types=[],
        known_as=lambda carry: _known_as("while_body", body, carry),
    )
    step, carry = settled.step, settled.carry
    condition = Condition.of(owner, cond, carry, planner.max_steps < UNLIMITED)
    holds = condition(condition.consts, carry.arrays)
    parts = (cond, body, carry.tree)
    if not varies_with(parts, holds):
        # Devices stop at different times, so whatever the steps compute differs.
        return run_call(owner, planner, progress, *varied_with(parts, holds))

    def joint(
        consts: list[Value], carry: list[Value], x: list[Value]
    ) -> tuple[list[Value], list[Value]]:
        of_body, of_cond = split(consts, len(settled.consts))
        carry, _ = step(of_body, carry[1:], x)
        return [condition(of_cond, carry), *carry], []

    starts = None, *carry.starts(init)
    consts, init = [*settled.consts, *condition.consts], [holds, *carry.arrays]
    const_types, carry_types = (list(map(jax.typeof, x)) for x in (consts, init))
    opened = make_step(joint, const_types, carry_types, [])
    label = lambda desc: Label.of(
        desc, step.carry_types, [], carry.join, lambda y: None
    )
    meter = make_meter(owner, progress, None, label)
    with loop_scope(owner):
        final = run_while(opened, consts, init, starts, planner, meter)
    return settled.final(final[1:])


def varies_with(tree: PyTree, like: PyTree) -> bool:
    """Whether all arrays of a tree may differ between devices where another does."""
    return all(axes_of(like) <= axes_of(leaf) for leaf in partition(tree)[0])


def varied_with(tree: PyTree, like: PyTree) -> PyTree:
    """A tree whose arrays may differ between devices where another array does."""
    move = lambda x: vary(jnp.asarray(x), axes_of(like)) if is_dynamic(x) else x
    return jax.tree.map(move, tree)


@dataclasses.dataclass(frozen=True)
class Condition:
    """`cond` as a function of arrays.

    Attributes:
        step: It as a step that has no carry: its `x` is that of the loop.
    """

    step: Step
    consts: list[Value]

    @classmethod
    def of(
        cls, owner: str, cond: Callable[..., PyTree], carry: Carry, is_bounded: bool
    ) -> Self:
        """Traces it for a carry."""

        def on_arrays(
            _: list[Value], arrays: list[Value]
        ) -> tuple[list[Value], list[Value]]:
            out = _explained(owner, "cond", cond, carry.join(arrays))
            return [], [_as_condition(owner, out, is_bounded)]

        known = _known_as("while_cond", cond, carry.tree).name(on_arrays)
        return cls(*trace_step(known, [], [jax.typeof(x) for x in carry.arrays]))

    def __call__(self, consts: list[Value], carry: list[Value]) -> PyTree:
        """Whether it holds."""
        # What is not differentiated need not be differentiable.
        consts, carry = without_derivatives((consts, carry))
        _, (holds,) = self.step(consts, [], carry)
        return holds


def _known_as(kind: str, f: Callable[..., PyTree], carry: PyTree) -> KnownAs:
    (name,) = argument_names(f, (carry,))
    return KnownAs(kind, f, array_names(carry, name))


def _checked_body(owner: str, out: PyTree, start: Carry) -> PyTree:
    """What `body` returned, if it is not what another function returns."""
    if is_truth(out) and not is_truth(start.tree):
        raise TypeError(
            f"{owner}: `body` returned {describe(out)}, as `cond` does, and the carry "
            f"is none. The condition comes first: `el.{owner}(cond, body)`."
        )
    structure = jax.tree.structure
    is_pair = isinstance(out, tuple) and len(out) == 2
    if is_pair and structure(out) != structure(start.tree) == structure(out[0]):
        raise TypeError(
            f"{owner}: `body` must return the next carry alone, and not a pair of it "
            f"and an output. For outputs of each step there is `el.ScanWhile`."
        )
    if out is None and start.tree is not None:
        raise TypeError(
            f"{owner}: `body` must return the next carry, but it returned None. Does "
            f"it end with a `return`?"
        )
    return out


def _as_condition(owner: str, out: PyTree, is_bounded: bool) -> PyTree:
    if isinstance(out, bool | np.bool_):
        if out and not is_bounded:
            raise ValueError(
                f"{owner}: `cond` returned the constant True, so the loop would never "
                f"stop. Return an array that depends on the carry, as in `x > 0`, or "
                f"bound the number of steps, as `el.BoundedWhileLoop` does."
            )
        return jnp.asarray(out)
    if not is_truth(out):
        raise TypeError(
            f"{owner}: `cond` must return a scalar boolean, but it returned "
            f"{describe(out)}. Compare it (`x > 0`), reduce it (`jnp.any`), or map "
            f"over the loop (`jax.vmap`)."
        )
    return jnp.asarray(out)


def _explained(
    owner: str, name: str, f: Callable[..., PyTree], carry: PyTree
) -> PyTree:
    with explained(owner, *shown_call(name, {"carry": carry})):
        how = dataclasses.replace(_WORDS, f=name).how(carry)
        return call_traced(owner, f, (carry,), {}, ["carry"], **how)
