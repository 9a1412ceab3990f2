"""What a schedule is, and the view of a loop that it gets and cuts into segments.

Schedules are written with this, including those of other projects. A `LoopSpec` shows a
part of a `Problem`, which has everything that the engine knows about the loop.
"""

import abc
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ..._arrays import Arrays, Flags, describe, nbytes, pick, refuse_symbolic
from ..._calls import int_of
from ..._classes import SettingMeta
from ..._tracebacks import border
from ..._types import PyTree, Value
from ..steps._step import Step
from ._forward import Active
from ._layout import AbstractRunner, Layout
from ._problem import Problem
from ._transformed import activity, needs_of_gradient
from .orders._levels import Nest
from .orders._nested import Nested
from .orders._segmented import Segmented
from .reversals._block_reversals import ByResiduals

# A kernel has a copy of the step for each nest.
_MOST_NESTS = 8


class Undo(NamedTuple):
    """How the steps of a loop are undone.

    Attributes:
        inverse: `(carry, x) -> carry`, or `(carry, x, saved) -> carry`.
        save: `(carry, x) -> saved`; `None` if nothing is saved.
    """

    inverse: Callable[..., PyTree]
    save: Callable[..., PyTree] | None


if TYPE_CHECKING:
    # A call is what the class's own `__init__` says.
    from abc import ABCMeta as _ScheduleMeta
else:

    class _ScheduleMeta(SettingMeta):
        @border
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            made = super().__call__(*args, **kwargs)
            try:
                hash(made)
            except TypeError as error:
                raise TypeError(
                    f"{cls.__name__}: a schedule must be hashable, as programs are "
                    f"told from each other by it, and this one is not: {error}. Make "
                    f"it a frozen dataclass, `@dataclasses.dataclass(frozen=True)`, "
                    f"with fields that are hashable, such as tuples in place of lists."
                ) from None
            return made


class AbstractSchedule(metaclass=_ScheduleMeta):
    """How to trade memory for recomputation: the base class of all schedules.

    For a schedule of your own, write a frozen dataclass that subclasses this one, and
    say in `layout` how a loop is cut into segments and by which schedule each segment
    is reversed. It then works in every mode of differentiation, and has a plan.

    Examples:
        Two carries are stored, at the start and in the middle; the steps of each half
        are then reversed from all of their carries.

        >>> import dataclasses
        >>> import jax.numpy as jnp
        >>> import eqloop as el
        >>> @dataclasses.dataclass(frozen=True)
        ... class Halves(el.AbstractSchedule):
        ...     def layout(self, loop):
        ...         half = loop.length // 2
        ...         every = el.Chunked(1)
        ...         return loop.cut([(half, every), (loop.length - half, every)])
        >>> scan = el.Scan(lambda h, x: (jnp.sin(h + x), None), schedule=Halves())
        >>> plan = scan.plan(0.0, jnp.ones(1000))
        >>> plan.slots, plan.evaluations
        (503, 2998)
    """

    # Whether a plain `lax.scan`, differentiated by JAX, does what the schedule asks.
    _by_jax: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "layout" in vars(cls):
            setattr(cls, "layout", _with_check(cls.layout))  # noqa: B010

    # A frozen dataclass has its own of these. By those of `object`, each instance of
    # another class would be a schedule of its own, for which loops are compiled again.
    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), *vars(self).items()))

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({fields})"

    def _decide(self, problem: Problem[Any], active: Active) -> Layout:
        """As the engine asks it, see `Planner`."""
        return self.layout(LoopSpec(problem, active))

    @property
    def runner(self) -> AbstractRunner | None:
        """What runs a loop that is not differentiated, if not the engine."""
        return None

    def prepared(self, step: Step, consts: Arrays) -> tuple[Step, list[Value]]:
        """The step that runs in place of another one, before a loop is made of it.

        Args:
            step: The step.
            consts: Its consts.

        Returns:
            The step that runs, and its consts.
        """
        return step, list(consts)

    # What else the library asks of a schedule. One around another schedule forwards it.
    @property
    def undo(self) -> Undo | None:
        """How a step is undone, if it is."""
        return None

    @property
    def budgeted_bytes(self) -> int | None:
        """The `peak_bytes` within which its plans are to be, if it has a budget."""
        return None

    @property
    def measures_steps(self) -> bool:
        """Whether it decides by measured times: then those of its plans are, too."""
        return False

    @property
    def can_choose_policy(self) -> bool:
        """Whether a loop with this schedule may have `policy="auto"`."""
        return False

    @abc.abstractmethod
    def layout(self, loop: "LoopSpec") -> Layout:
        """Decides how one loop is stored and reversed.

        It is called when a gradient is taken, or a plan asked for, and must give the
        same answer for the same loop.

        Args:
            loop: The loop: how long it is, and how to cut it.

        Returns:
            What `loop.cut` makes of segments, or what another schedule decides.

        Raises:
            ValueError: If the schedule has no answer for this loop.
        """


def _with_check(
    layout: Callable[[Any, "LoopSpec"], Layout],
) -> Callable[[Any, "LoopSpec"], Layout]:
    """A `layout` that may be a user's, and has to return one."""

    @functools.wraps(layout)
    def checked(self: AbstractSchedule, loop: LoopSpec) -> Layout:
        made: Any = layout(self, loop)
        if not isinstance(made, Layout):
            raise TypeError(
                f"{type(self).__name__}: `layout` must return what `loop.cut` makes of "
                f"segments, or the `layout(loop)` of another schedule, but it returned "
                f"{describe(made)}, of type {type(made).__name__}."
            )
        return made

    return checked


@dataclasses.dataclass(frozen=True)
class LoopSpec:
    """A loop to plan, as a schedule sees it.

    The library makes it, and passes it to the `layout` of a schedule.

    Examples:
        >>> import dataclasses
        >>> import jax.numpy as jnp
        >>> import eqloop as el
        >>> @dataclasses.dataclass(frozen=True)
        ... class AtMost(el.AbstractSchedule):
        ...     nbytes: int
        ...     def layout(self, loop: el.LoopSpec) -> el.Layout:
        ...         slots = self.nbytes // loop.slot_bytes
        ...         return el.Binomial(slots).layout(loop)
        >>> step = lambda h, x: (jnp.sin(h + x), None)
        >>> scan = el.Scan(step, schedule=AtMost(10_000))
        >>> scan.plan(jnp.zeros(100), jnp.zeros((1000, 100))).slots
        25
    """

    # The loop, and which of its inputs are differentiated: for the library's own
    # schedules.
    _problem: Problem[Any] = dataclasses.field(repr=False)
    _active: Active = dataclasses.field(repr=False)

    @property
    def length(self) -> int:
        """How many steps the loop has."""
        refuse_symbolic(
            type(self._problem.planner).__name__,
            self._problem.loop.length,
            "planning the gradient of a loop",
            "Use `schedule=el.StoreAll()`, or export for each length by itself",
        )
        return self._problem.loop.length

    @property
    def carry_bytes(self) -> int:
        """The bytes of a carry."""
        return nbytes(self._problem.step.carry_types)

    @property
    def slot_bytes(self) -> int:
        """The bytes that a slot takes: those of the leaves that are read again."""
        return nbytes(pick(self._problem.step.carry_types, self._held))

    def cut(self, segments: Iterable[tuple[int, AbstractSchedule]]) -> Layout:
        """The loop as segments, one after the other.

        The primal stores the carry at the start of each segment. On the way back, last
        segment first, each segment is run again from there, and reversed as its own
        schedule plans; a segment of one step is reversed at once. Equal segments that
        follow one another share one loop in the program. Steps are reversed together if
        all schedules have the same `batch`. If all of them are the same
        [`Fused`][eqloop.Fused], the whole loop is one kernel each way.

        Args:
            segments: How many steps each segment has, and the schedule for it. One of 0
                steps is left out. With
                [`StoreAll`][eqloop.StoreAll] the residuals of the segment are stored
                together; with `Chunked(1)` each of its carries.

        Returns:
            What a schedule returns from `layout`.

        Raises:
            TypeError: If a number of steps is not an int, or a schedule is none.
            ValueError: If the segments do not add up to the loop, one has fewer than 0
                steps, or an [`Offload`][eqloop.Offload], which is for the whole
                schedule.

        Examples:
            See [`AbstractSchedule`][eqloop.AbstractSchedule].
        """
        owner = type(self._problem.planner).__name__
        pairs = _pairs(owner, segments)
        layouts = [self._layout_of(*pair) for pair in pairs if pair[0]]
        orders = [layout.order.as_part() for layout in layouts]
        if sum(order.length for order in orders) != self.length:
            lengths = ", ".join(str(order.length) for order in orders)
            raise ValueError(
                f"{owner}: the segments that are passed to `loop.cut` must add up to "
                f"the length of the loop, {self.length}, and they are: "
                f"{lengths or 'none'}."
            )
        # Equal orders that follow one another share one loop.
        parts = [(len(list(same)), order) for order, same in itertools.groupby(orders)]
        # A sweep has one reversal for all of its blocks.
        reversals = {layout.reversal for layout in layouts}
        reversal = reversals.pop() if len(reversals) == 1 else ByResiduals()
        whole = Layout(Segmented(tuple(parts)), reversal=reversal)
        return _by_one_runner(whole, parts, layouts)

    def _layout_of(self, count: int, schedule: object) -> Layout:
        """The layout that a segment's schedule decides on."""
        owner = type(self._problem.planner).__name__
        if not isinstance(schedule, AbstractSchedule):
            raise TypeError(
                f"{owner}: a segment that is passed to `loop.cut` must be a number of "
                f"steps and a schedule, such as `el.Chunked(1)`. Its schedule is "
                f"{schedule!r}."
            )
        loop = self._problem.loop.part(count)
        problem = dataclasses.replace(self._problem, loop=loop, planner=schedule)
        layout = schedule._decide(problem, self._active)
        if layout.slots != Layout(layout.order).slots:
            raise ValueError(
                f"{owner}: the slots of a segment are on the device, and cannot be "
                f"those of {schedule!r}. Pass the schedule within to `loop.cut`, and "
                f"wrap the whole one: `el.{type(schedule).__name__}({owner}(...))`."
            )
        return layout

    @property
    def has_policy(self) -> bool:
        """Whether residuals of the steps may be stored."""
        return self._problem.policy is not None

    @property
    def has_inverse(self) -> bool:
        """Whether there is an inverse of the step."""
        return self._problem.step.inverse is not None

    @property
    def has_slots(self) -> bool:
        """Whether slots hold anything: whether a leaf of the carry is read again."""
        return any(self._held)

    @property
    def _held(self) -> Flags:
        """Which leaves of the carry slots hold, if steps are reversed one by one."""
        step = self._problem.step
        # `active` is closed already; this only finds the outputs that have a tangent.
        _, y_active = activity(step, self._active)
        return needs_of_gradient(self._problem, self._active, y_active).held


def _by_one_runner(
    whole: Layout, parts: Sequence[tuple[int, Any]], layouts: Sequence[Layout]
) -> Layout:
    """A loop in segments, run by what runs each of them, if that can run all of it."""
    runners = {layout.runner and layout.runner.storing(()) for layout in layouts}
    if not any(runners):
        left = next((layout for layout in layouts if layout.why_left), whole)
        about = dict[str, Any](why_left=left.why_left, is_for_gpu=left.is_for_gpu)
        return dataclasses.replace(whole, **about)
    (runner, *others), nests = runners, list[Nest]()
    if runner is None or others:
        why = "the segments of `loop.cut` have other schedules, or other settings, too"
        return dataclasses.replace(whole, why_left=why)
    for count, order in parts:
        within = [n.levels if n.levels != (1,) else () for n in order.nests]
        if len(within) == 1:
            nests.append(Nest((count, *within[0])))
        else:
            nests += [Nest((1, *levels)) for levels in within] * count
    if len(nests) > _MOST_NESTS:
        why = (
            f"it would have the step {len(nests)} times: for each segment of "
            f"`loop.cut`, and for what is left over in each. Let segments be equal, "
            f"and `every` divide them"
        )
        return dataclasses.replace(whole, why_left=why)
    return Layout(Nested(tuple(nests)), runner=runner.storing(nests))


def _pairs(owner: str, segments: object) -> Iterator[tuple[int, Any]]:
    for segment in segments if isinstance(segments, Iterable) else [segments]:
        if not isinstance(segment, tuple | list) or len(segment) != 2:
            raise TypeError(
                f"{owner}: `loop.cut` takes a list of segments, each a pair of its "
                f"number of steps and its schedule, such as `(10, el.Chunked(1))`, and "
                f"not {describe(segment)}."
            )
        count, schedule = segment
        if (steps := int_of(count)) is None or steps < 0:
            raise (TypeError if steps is None else ValueError)(
                f"{owner}: a segment that is passed to `loop.cut` must be a number of "
                f"steps, an int of at least 0, and a schedule. Its number of steps is "
                f"{count!r}."
            )
        yield steps, schedule
