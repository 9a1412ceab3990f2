"""Loops of known length: what all of them share.

`AbstractLoop` has their settings, and says how they are run and planned.
"""

import abc
import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, Self, SupportsIndex

import equinox as eqx

from .._arrays import hashable_axes, refuse_symbolic_plan
from .._calls import AbstractTransform, Function, as_int_if_index, check_bool, setting
from .._classes import AbstractBordered
from .._device import DeviceLike, planning_for_call
from .._signatures import without_annotations
from .._types import PyTree
from ..checkpointing import (
    AUTO,
    AbstractSchedule,
    Frontier,
    Placements,
    Plan,
    StoreAll,
    as_loop_policy,
    as_policy_or_wrong,
    frontier_of,
    left_open,
    plan,
)
from ..progress import ProgressBar, as_progress, check_progress
from ._open_loop import LoopOpener
from ._opened_loop import OpenedLoop, open_abstractly, to_plan


class AbstractPlanned(AbstractBordered):
    """What runs as one loop: how that is planned."""

    schedule: eqx.AbstractVar[AbstractSchedule | None]
    policy: eqx.AbstractVar[Any]

    def _default_schedule(self) -> AbstractSchedule:
        """The schedule to run if none is given."""
        return left_open(StoreAll())

    @abc.abstractmethod
    def plan(self, *args: PyTree, **kwargs: PyTree) -> Plan:
        """The plan that a gradient of the call would run by."""

    def frontier(
        self, *args: PyTree, device: DeviceLike | None = None, **kwargs: PyTree
    ) -> Frontier:
        """The trade-off between memory and time for a gradient of the call.

        The loop is not run. As for a [`Budget`][eqloop.Budget], the programs of a few
        plans are compiled, and short loops of the step are timed.

        Args:
            *args: The arguments of the call; a `jax.ShapeDtypeStruct` can stand for an
                array.
            device: What the plans are for, as for
                [`planning_for`][eqloop.planning_for]: by default, the device on which
                the loop would run.
            **kwargs: The keyword arguments of the call.

        Returns:
            A [`Frontier`][eqloop.checkpointing.Frontier]: the plans that no other plan
            beats in both memory and time, of those that a [`Budget`][eqloop.Budget]
            searches. They go from the least memory to the least time. Printed, it is a
            table; its `.plot()` draws it, and marks the plan of the loop's own
            schedule.

        Raises:
            TypeError: As the call does.
            ValueError: As the call does, and if the schedule cannot be met.

        Examples:
            >>> import jax.numpy as jnp
            >>> import eqloop as el
            >>> scan = el.Scan(lambda h, x: (jnp.sin(h) + x, None))
            >>> plans = scan.frontier(jnp.zeros(100), jnp.zeros((64, 100)))
            >>> plans[-1].relative_time <= plans[0].relative_time
            True
            >>> plans[0].peak_bytes < plans.chosen.peak_bytes
            True
        """
        bind_to_plan(self, args, kwargs)
        with planning_for_call(device, self, args, kwargs):
            return frontier_of(**self._problem(*args, **kwargs))

    @abc.abstractmethod
    def _open(self, *args: PyTree, **kwargs: PyTree) -> OpenedLoop:
        """Takes a call apart, of which these are the arguments."""

    def _plan(self, device: DeviceLike | None, *args: PyTree, **kwargs: PyTree) -> Plan:
        """The plan of a gradient of a call with these arguments."""
        with planning_for_call(device, self, args, kwargs):
            return plan(**self._problem(*args, **kwargs))

    def _problem(self, *args: PyTree, **kwargs: PyTree) -> dict[str, Any]:
        """What a call would run, from the types of its arguments."""
        refuse_symbolic_plan(type(self).__name__, (self, args, kwargs))
        return to_plan(*self._opened(*args, **kwargs)) | self._how()

    def _opened(
        self, *args: PyTree, length: SupportsIndex | None = None, **kwargs: PyTree
    ) -> tuple[OpenedLoop, Placements]:
        """A call, opened by the types of its arguments alone."""

        def open_call(loop: Self, args: PyTree, kwargs: PyTree) -> OpenedLoop:
            return loop._open(*args, length=length, **kwargs)

        return open_abstractly(open_call, self, args, kwargs)

    def _how(self) -> dict[str, Any]:
        """By which schedule and policy it runs."""
        return planned_by(type(self).__name__, self._schedule(), self.policy)

    def _schedule(self) -> AbstractSchedule:
        if self.schedule is not None:
            return self.schedule
        return self._default_schedule()


class AbstractLoop(  # pyright: ignore[reportGeneralTypeIssues]
    AbstractTransform[Function], AbstractPlanned
):
    """A loop whose number of steps is known beforehand.

    Subclasses differ in how they are called: `plan` and `_open` take what the call
    takes. Final classes say which schedule they run when `schedule` is not given.

    Args:
        schedule: How to trade memory for recomputation when the loop is differentiated
            in reverse mode. By default every residual is stored, as in `jax.lax.scan`.
        policy: Which residuals of a step are stored when it is recomputed; `"auto"` to
            have a [`Budget`][eqloop.Budget] choose that as well.
        in_axes: The axis of each leaf of `xs` that is scanned: a prefix tree of `int`,
            `None` and callables from a leaf to either. `None` gives each step the whole
            leaf. By default axis 0 of every array.
        out_axes: The axis of each leaf of the outputs along which the steps are
            stacked. A leaf with `None` must be the same for all steps, and is not
            stacked.
        f_axes: The axis of each leaf of `f` that is scanned, as for stacked layers.
            `None`, the default, gives each step the whole leaf.
        f_transform: Called on `f` in the body, just before `f` is called; it returns
            what is called instead, for example with parameters that were cast.
        reverse: Whether to go from the last element of `xs` to the first. Outputs stay
            in the order of `xs`.
        unroll: How many steps one iteration of the compiled loop runs; `True` for all.
        split_keys: Whether to split the `key` of the call, so that each step gets its
            own key. Otherwise all steps get the same key.
        progress: Shows a progress bar: `True`, an int (after how many steps it moves)
            or a [`ProgressBar`][eqloop.ProgressBar].
    """

    f: Callable[..., PyTree]
    schedule: AbstractSchedule | None = setting(default=None)
    # Not static, so that `eqx.tree_at` reaches it.
    policy: Any = setting(default=None, converter=as_policy_or_wrong, static=False)
    in_axes: PyTree = setting(default=eqx.if_array(0), converter=hashable_axes)
    out_axes: PyTree = setting(default=eqx.if_array(0), converter=hashable_axes)
    f_axes: PyTree = setting(default=None, converter=hashable_axes)
    f_transform: Callable[[PyTree], PyTree] | None = setting(default=None)
    reverse: bool = setting(default=False)
    unroll: int | bool = setting(default=1, converter=as_int_if_index)
    split_keys: bool = setting(default=True)
    progress: ProgressBar | None = setting(default=None, converter=as_progress)

    def _run(self, opened: OpenedLoop) -> tuple[PyTree, PyTree]:
        """Runs the loop: the last carry and the outputs."""
        how = self._how()
        return opened.run(type(self).__name__, progress=self.progress, **how)

    def _opener(self, **others: Any) -> LoopOpener:
        """How a call is read: as these settings say it, and others."""
        opener = LoopOpener(
            name=type(self).__name__,
            in_axes=self.in_axes,
            out_axes=self.out_axes,
            f_axes=self.f_axes,
            f_transform=self.f_transform,
            split_keys=self.split_keys,
            reverse=self.reverse,
            unroll=self.unroll,
            undo=self._schedule().undo,
        )
        return dataclasses.replace(opener, **others)

    def __check_init__(self) -> None:
        name = type(self).__name__
        check_schedule(name, self.schedule)
        self._how()
        check_unroll(name, self.unroll)
        check_progress(name, self.progress)
        check_bool(name, "reverse", self.reverse)
        check_bool(name, "split_keys", self.split_keys)
        if self.f_transform is not None and not callable(self.f_transform):
            raise TypeError(
                f"{name}: `f_transform` must be a function from f to f, or None, not "
                f"{self.f_transform!r}."
            )


def bind_to_plan(loop: Any, args: tuple[PyTree, ...], kwargs: dict[str, Any]) -> None:
    """Checks that a frontier is asked for with the arguments of the loop."""
    signature = inspect.signature(loop.plan)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"{type(loop).__name__}.frontier: {error}. Pass what the "
            f"{type(loop).__name__} is called with: {without_annotations(signature)}."
        ) from None


def checks_no_values(loop: Any, *_: object, **__: object) -> bool:
    """Whether a call may be compiled: an inverse may be compared with the step."""
    return loop.schedule is None or loop.schedule.undo is None


def check_schedule(owner: str, schedule: object) -> None:
    """Checks that `schedule` is one, or `None`."""
    if not isinstance(schedule, AbstractSchedule | None):
        budget = f"el.Budget({schedule!r})" if isinstance(schedule, str) else ""
        raise TypeError(
            f"{owner}: `schedule` must be a schedule, such as "
            f"`{budget or 'el.Recursive(16)'}`, not {schedule!r}."
        )


def planned_by(owner: str, schedule: AbstractSchedule, policy: Any) -> dict[str, Any]:
    """By which schedule and policy a loop runs, if `policy` may be `"auto"`."""
    policy = as_loop_policy(owner, policy)  # `eqx.tree_at` may have put in a name
    if policy == AUTO and not schedule.can_choose_policy:
        raise ValueError(
            f"{owner}: with `policy='auto'` a budget chooses what each step "
            f"keeps, but the schedule is {schedule!r}. Give it a budget, such as "
            f"`schedule=el.Budget('1GiB')`, or a policy of `eqloop.policies`."
        )
    return dict(schedule=schedule, policy=policy)


def check_unroll(owner: str, unroll: object) -> None:
    """Checks that `unroll` says how many steps to run at once."""
    if not isinstance(unroll, int):
        raise TypeError(f"{owner}: `unroll` must be an int or a bool, not {unroll!r}.")
    if unroll < 1 and unroll is not False:
        raise ValueError(
            f"{owner}: `unroll` must be at least 1, but it is {unroll}. To unroll the "
            f"whole loop, pass `unroll=True`."
        )
