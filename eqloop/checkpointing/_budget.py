"""`Budget`: the schedule that finds the fastest plan within so much memory."""

import copy
import dataclasses
import itertools
from typing import Any, Self, TypeGuard, final

from .._axes import refuse_symbolic
from .._bytes import format_bytes, parse_bytes
from ._plan import plan_of
from ._schedule import AbstractSchedule
from .engine._layout import Layout
from .engine._problem import LoopSpec
from .planning._choice import best, smallest
from .planning._paces import paces


@final
@dataclasses.dataclass(frozen=True)
class Budget(AbstractSchedule):
    """The fastest plan that fits into this much memory.

    The search includes storing everything, storing every carry, nested levels of any
    lengths, and the least recomputation with any number of slots, each with the
    residuals of single steps or of blocks. The budget covers what the gradient of the
    loop allocates beside its inputs and outputs, on the backend in use; under `vmap` it
    covers the whole batch. To know what that is, a few plans are compiled, once, and
    never run.

    Plans that run each step more than a hundred times are left out. Use
    [`Binomial`][eqloop.Binomial] for these.

    Time is measured: short loops of this step are compiled and run for a moment on this
    device, once, on made-up numbers. Their steps are only run, reversed one by one, in
    blocks, or together. This happens when the plan is made, which is when a gradient is
    taken. So the plan is for the batch in the gradient of a `vmap`, and for one example
    in the `vmap` of a gradient.

    Where measuring would not pay, as for loops of a few milliseconds, time is estimated
    from the work of a step. So it is if a step cannot be run by itself: if it has
    effects or callbacks, communicates with other devices, or has a `while` loop, which
    might not end on other numbers. [`measurements`][eqloop.measurements] keeps what was
    measured in a file.

    With `policy="auto"`, a loop also lets its budget choose what is kept of each step
    whose residuals are stored: which values that have a [`name`][eqloop.name], and
    which results of dots.

    A budget can also be the `chunk_size` of [`ChunkedVmap`][eqloop.ChunkedVmap].

    Args:
        nbytes: How many bytes, as an int or a string such as `"512MiB"` or `"64 kB"`.
        measure: Whether to measure. Without, plans are the same on every machine.

    Raises:
        TypeError: If `nbytes` is neither an int nor a string, or `measure` is not a
            bool.
        ValueError: If it is not an amount of memory. When the loop is differentiated,
            if no plan fits; the error says how much memory would be enough, and for
            which plan.

    Examples:
        >>> import jax.numpy as jnp
        >>> import eqloop as el
        >>> scan = el.Scan(
        ...     lambda h, x: (jnp.sin(h) + x, None), schedule=el.Budget("64KiB")
        ... )
        >>> plan = scan.plan(jnp.zeros(100), jnp.zeros((1000, 100)))
        >>> plan.peak_bytes <= 64 * 1024
        True

    References:
        What is stored beside carries follows J. R. Maddison, *Step-based checkpointing
        with high-level algorithmic differentiation*,
        [arXiv:2305.09568](https://arxiv.org/abs/2305.09568).
    """

    nbytes: int
    measure: bool = dataclasses.field(default=True, kw_only=True)
    # Set by a loop with `policy="auto"`.
    _chooses_policy: bool = dataclasses.field(default=False, init=False, repr=False)

    def __init__(self, nbytes: int | str, *, measure: bool = True) -> None:
        object.__setattr__(self, "nbytes", parse_bytes("Budget", nbytes))
        if not isinstance(measure, bool):
            raise TypeError(
                f"Budget: `measure` must be True or False, not {measure!r} of type "
                f"{type(measure).__name__}."
            )
        object.__setattr__(self, "measure", measure)

    @property
    def with_policy(self) -> Self:
        """The same budget, which chooses the policy of the loop as well."""
        chooses = copy.copy(self)
        object.__setattr__(chooses, "_chooses_policy", True)
        return chooses

    def __repr__(self) -> str:
        measure = "" if self.measure else ", measure=False"
        return f"Budget(nbytes={self.nbytes}{measure})"

    def layout(self, loop: LoopSpec) -> Layout:
        """The fastest layout that fits."""
        problem, active = loop.problem, loop.active
        _refuse_symbolic_sizes(loop)
        times = paces(problem, active, self.measure, self._chooses_policy)
        layout = best(problem, active, self.nbytes, times)
        if layout is not None:
            return layout
        smaller = smallest(problem, active, times)
        least = plan_of(problem, active, smaller, times.of(smaller))
        needed = Budget(least.peak_bytes, measure=self.measure)
        least = dataclasses.replace(least, schedule=needed)
        raise ValueError(
            f"Budget: the gradient of this loop does not fit into "
            f"{format_bytes(self.nbytes)}. The least that would do is "
            f"{format_bytes(least.peak_bytes)}, which is {least.peak_bytes} bytes, "
            f"with this plan:\n\n{least}"
        )


def is_budget(setting: Any) -> TypeGuard[Budget]:
    """Whether a setting that may be a number of something is a budget instead."""
    return isinstance(setting, Budget)


def _refuse_symbolic_sizes(loop: LoopSpec) -> None:
    """Checks that the bytes of a loop are known."""
    jaxpr = loop.problem.step.jaxpr
    shapes = [aval.shape for aval in (*jaxpr.in_avals, *jaxpr.out_avals)]
    instead = "Use a schedule that does not ask for bytes, such as Recursive"
    for size in (loop.length, *itertools.chain(*shapes)):
        refuse_symbolic("Budget", size, "the size of an array in the step", instead)
