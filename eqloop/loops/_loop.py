"""What all loops of known length share: their settings, and how they are planned."""

import abc
from collections.abc import Callable
from typing import Any, Self

import equinox as eqx

from .._axes import hashable_axes
from .._positions import loop_scope
from .._transform import AbstractTransform, setting
from .._typecheck import PyTree
from ..checkpointing import AbstractSchedule, Plan, as_policy, run
from ..checkpointing.engine._normal_form import normal_form
from ..progress import ProgressBar, as_progress, check_progress, make_meter
from ._frame import Frame, Opened
from ._settings import check_bool, check_schedule, check_unroll


class AbstractLoop(AbstractTransform):
    """A loop whose number of steps is known beforehand.

    Subclasses differ in how they are called: `plan` and `_open` take what the call
    takes. Final classes say which schedule they run when `schedule` is not given.
    """

    f: Callable[..., Any]
    schedule: AbstractSchedule | None = setting(default=None)
    # Not static, so that `eqx.tree_at` reaches it.
    policy: Any = setting(default=None, converter=as_policy, static=False)
    in_axes: PyTree = setting(default=eqx.if_array(0), converter=hashable_axes)
    out_axes: PyTree = setting(default=eqx.if_array(0), converter=hashable_axes)
    f_axes: PyTree = setting(default=None, converter=hashable_axes)
    f_transform: Callable[[Any], Any] | None = setting(default=None)
    reverse: bool = setting(default=False)
    unroll: int | bool = setting(default=1)
    split_keys: bool = setting(default=True)
    progress: ProgressBar | None = setting(default=None, converter=as_progress)

    @abc.abstractmethod
    def _default_schedule(self) -> AbstractSchedule:
        """The schedule to run if none is given."""

    @abc.abstractmethod
    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan that a gradient of the call would run by."""

    @abc.abstractmethod
    def _open(self, *args: Any, **kwargs: Any) -> Opened:
        """Takes a call apart, of which these are the arguments."""

    def _run(self, opened: Opened) -> tuple[Any, Any]:
        """Runs the loop: the last carry and the outputs."""
        name, length = type(self).__name__, opened.loop.length
        meter = make_meter(name, self.progress, length, opened.label)
        with loop_scope(name):
            carry, ys = run(
                opened.step,
                opened.consts,
                opened.init,
                opened.xs,
                loop=opened.loop,
                schedule=self._schedule(),
                policy=as_policy(self.policy),
                meter=meter,
            )
        return opened.close(carry, ys)

    def _problem(self, *args: Any, length: Any = None, **kwargs: Any) -> dict[str, Any]:
        """What a call would run, from the types of its arguments."""
        opened: list[Opened] = []

        def open_abstractly(loop: Self, args: Any, kwargs: Any) -> None:
            opened.append(loop._open(*args, length=length, **kwargs))

        eqx.filter_eval_shape(open_abstractly, self, args, kwargs)
        return dict(
            step=normal_form(opened[0].step).step,
            loop=opened[0].loop,
            schedule=self._schedule(),
            policy=as_policy(self.policy),
        )

    def _schedule(self) -> AbstractSchedule:
        return self._default_schedule() if self.schedule is None else self.schedule

    def _frame(self) -> Frame:
        """How a call is read, as far as these settings say it."""
        return Frame(
            name=type(self).__name__,
            in_axes=self.in_axes,
            out_axes=self.out_axes,
            f_axes=self.f_axes,
            f_transform=self.f_transform,
            split_keys=self.split_keys,
            reverse=self.reverse,
            unroll=self.unroll,
        )

    def __check_init__(self) -> None:
        name = type(self).__name__
        check_schedule(name, self.schedule)
        check_unroll(name, self.unroll)
        check_progress(name, self.progress)
        for flag in ("reverse", "split_keys"):
            check_bool(name, flag, getattr(self, flag))
        if self.f_transform is not None and not callable(self.f_transform):
            raise TypeError(
                f"{name}: `f_transform` must be a function from f to f, or None, not "
                f"{self.f_transform!r}."
            )
