"""Loops of known length: what all of them share, and the scans.

`AbstractLoop` has their settings, and says how they are run and planned. `Scan` and
`CheckpointedScan` are `jax.lax.scan` as a PyTree around its function.
"""

import abc
import dataclasses
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Self, SupportsIndex, final

import equinox as eqx

from .._arrays import hashable_axes, refuse_symbolic_plan
from .._calls import (
    AbstractTransform,
    Carry,
    Function,
    NewCarry,
    NewY,
    Y,
    as_int_if_index,
    check_bool,
    compiled_once,
    setting,
    typed,
)
from .._device import DeviceLike, planning_for_call
from .._signatures import without_annotations
from .._types import PRNGKey, PyTree, ShapeDtypeStruct
from ..checkpointing import (
    AUTO,
    AbstractSchedule,
    Frontier,
    Placements,
    Plan,
    Recursive,
    StoreAll,
    as_loop_policy,
    as_policy_or_wrong,
    frontier_of,
    left_open,
    plan,
)
from ..progress import ProgressBar, as_progress, check_progress
from ._backward import Backward, Truncate
from ._open_loop import LoopOpener, OpenedLoop, open_abstractly, to_plan


class AbstractLoop(AbstractTransform[Function]):
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

    def _run(self, opened: OpenedLoop) -> tuple[PyTree, PyTree]:
        """Runs the loop: the last carry and the outputs."""
        how = self._how()
        return opened.run(type(self).__name__, progress=self.progress, **how)

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
        return planned_by(type(self).__name__, self._schedule(), self.policy)

    def _schedule(self) -> AbstractSchedule:
        if self.schedule is not None:
            return self.schedule
        return self._default_schedule()

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


# What settings may be, and what follows from them.


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


DEFAULT_BASE = 16


def check_base(owner: str, base: int, schedule: AbstractSchedule | None) -> None:
    """Checks the `base` of a loop whose schedule is `Recursive(base)` by default."""
    Recursive(base)  # raises, should `base` not be valid
    if schedule is not None and base != DEFAULT_BASE:
        raise ValueError(
            f"{owner}: `base={base}` is for the schedule `el.Recursive(base)`, and "
            f"`schedule={schedule!r}` is another one. Give one of the two."
        )


def check_unroll(owner: str, unroll: object) -> None:
    """Checks that `unroll` says how many steps to run at once."""
    if not isinstance(unroll, int):
        raise TypeError(f"{owner}: `unroll` must be an int or a bool, not {unroll!r}.")
    if unroll < 1 and unroll is not False:
        raise ValueError(
            f"{owner}: `unroll` must be at least 1, but it is {unroll}. To unroll the "
            f"whole loop, pass `unroll=True`."
        )


def check_backward(owner: str, backward: object) -> None:
    """Checks that a setting can be a `backward`."""
    # A class is callable: `el.Truncate` without its number, say.
    is_one = isinstance(backward, Truncate | Callable | None)
    if not is_one or isinstance(backward, type):
        raise TypeError(
            f"{owner}: `backward` must be `el.Truncate(every)`, "
            f"`el.ClipCotangent(max_norm)`, or a function from the cotangent of the "
            f"carry to another, not {backward!r}."
        )


# The scans.

# A function, or a method, which `self` is bound to later.
Stepping = (
    Callable[Concatenate[Carry, Any, ...], tuple[Carry, Y]]
    | Callable[Concatenate[Any, Carry, Any, ...], tuple[Carry, Y]]
)


class AbstractScan(AbstractLoop[Stepping[Carry, Y]], Generic[Carry, Y]):
    """Any scan: the abstract base class, for annotations.

    A field of this type holds a [`Scan`][eqloop.Scan], a
    [`CheckpointedScan`][eqloop.CheckpointedScan] or a
    [`SlicedScan`][eqloop.SlicedScan]. They are called in the same way.

    Args:
        f: The step, `f(carry, x) -> (carry, y)`, or `f(carry, x, key=...)` if the call
            is given a key.
        backward: Changes the cotangent of the carry on its way back, after each step:
            [`Truncate(every)`][eqloop.Truncate],
            [`ClipCotangent(max_norm)`][eqloop.ClipCotangent], or a function
            `cotangent -> cotangent`. The function gets a tree like the carry, with
            `None` for leaves that are not arrays of floating-point numbers. It may
            return a pair, `(cotangent, log)`; see `log` of the call. As with
            `jax.custom_vjp`, a function (and `ClipCotangent`) rules out forward mode.

    Examples:
        >>> import equinox as eqx, jax.numpy as jnp
        >>> import eqloop as el
        >>> class Model(eqx.Module):
        ...     scan: el.AbstractScan
        ...     def __call__(self, xs):
        ...         return self.scan(jnp.zeros(()), xs)[1]
        >>> def step(total, x):
        ...     return total + x, total
        >>> Model(el.Scan(step))(jnp.arange(4.0))
        Array([0., 0., 1., 3.], dtype=float32)
        >>> Model(el.SlicedScan(step, start=-1))(jnp.arange(4.0))
        Array([3.], dtype=float32)
    """

    f: Stepping[Carry, Y]  # pyright: ignore[reportIncompatibleMethodOverride]
    backward: Backward | None = setting(default=None)

    def _kept(self) -> slice | None:
        """Which of the `ys` are kept; `None` for all of them."""
        return None

    @compiled_once(when=checks_no_values)
    @typed
    def __call__(
        self,
        init: PyTree,
        xs: PyTree = None,
        *,
        length: SupportsIndex | None = None,
        key: PRNGKey | None = None,
        log: PyTree = None,
    ) -> tuple[Carry, Y]:
        """Runs the loop.

        Args:
            init: The carry of the first step. Arrays, and the Python numbers that `f`
                changes, vary; other leaves must come back as they went in.
            xs: What is scanned. Each array leaf loses the axis `in_axes` gives it.
            length: How many steps; needed only if there is nothing to scan.
            key: A PRNG key. If it is given, `f` is called as `f(carry, x, key=...)`.
            log: Takes the log of the backward pass, as its cotangent: what `backward`
                logs at each step, stacked in the order of `xs`. Only its types matter;
                `empty_log` makes one. Without it a log is dropped.

        Returns:
            The last carry, and `ys`: the outputs of the steps, stacked along the axes
            that `out_axes` gives.

        Raises:
            TypeError: If the carry changes its type, if `f` does not return a pair, or
                if a jaxtyping annotation of `f` is violated, or if there is a reference
                (`jax.new_ref`) among the arguments; `f` may close over one.
            ValueError: If lengths disagree or are unknown, if an axis is out of range,
                or if a static leaf of the carry changes. If the loop plans its
                gradient, that is taken, and a step contains an `io_callback`;
                `StoreAll` allows it.
        """
        return self._run(self._open(init, xs, length=length, key=key, log=log))

    @typed
    def empty_log(
        self,
        init: PyTree,
        xs: PyTree = None,
        *,
        length: SupportsIndex | None = None,
        key: PRNGKey | ShapeDtypeStruct | None = None,
    ) -> PyTree:
        """Zeros in whose place the log of the backward pass comes out of a gradient.

        Differentiate the call with respect to its `log`. The loop is not run here. Pass
        the arguments of the call; a `jax.ShapeDtypeStruct` can stand for an array.

        Args:
            init: The carry of the first step.
            xs: What is scanned.
            length: How many steps; needed only if there is nothing to scan.
            key: A PRNG key, if the call is given one.

        Returns:
            A tree like the log that `backward` returns, with a row for each step. In
            place of integers and bools there are floating-point numbers, which are all
            that a cotangent can be.

        Raises:
            TypeError: As the call does, and if the log does not consist of arrays of
                numbers.
            ValueError: As the call does, and if `backward` returns no log.

        Examples:
            >>> import jax, jax.numpy as jnp
            >>> import eqloop as el
            >>> def with_norm(ct):
            ...     return ct, {"norm": jnp.linalg.norm(ct)}
            >>> step = lambda h, x: (3 * h + x, None)
            >>> scan = el.Scan(step, backward=with_norm)
            >>> h0, xs = jnp.ones(4), jnp.ones((5, 4))
            >>> loss = lambda xs, log: scan(h0, xs, log=log)[0].sum()
            >>> of_loss = jax.grad(loss, argnums=(0, 1))
            >>> grads, log = of_loss(xs, scan.empty_log(h0, xs))
            >>> log["norm"]
            Array([486., 162.,  54.,  18.,   6.], dtype=float32)
        """
        return self._opened(init, xs, length=length, key=key)[0].empty_log()

    @typed
    def plan(
        self,
        init: PyTree,
        xs: PyTree = None,
        *,
        length: SupportsIndex | None = None,
        key: PRNGKey | ShapeDtypeStruct | None = None,
        log: PyTree = None,
        device: DeviceLike | None = None,
    ) -> Plan:
        """The plan of a gradient of the call, without running the loop.

        The plan is for a gradient with respect to all inputs: `f`, `init` and `xs`.
        Pass the arguments of the call; a `jax.ShapeDtypeStruct` can stand for an array.

        Args:
            init: The carry of the first step.
            xs: What is scanned.
            length: How many steps; needed only if there is nothing to scan.
            key: A PRNG key, if the call is given one.
            log: What takes the log of the backward pass, if the call is given it.
            device: What the plan is for, as for [`planning_for`][eqloop.planning_for]:
                by default, the device on which the loop would run.

        Returns:
            The plan. Printed, it is a table.

        Raises:
            TypeError: As the call does.
            ValueError: As the call does, and if the schedule cannot be met.

        Examples:
            >>> import jax.numpy as jnp
            >>> import eqloop as el
            >>> scan = el.CheckpointedScan(lambda h, x: (jnp.tanh(h + x), None))
            >>> plan = scan.plan(jnp.zeros(64), jnp.zeros((4096, 64)))
            >>> plan.levels
            ((16, 16, 16),)
        """
        with planning_for_call(device, self, init, xs):
            return plan(**self._problem(init, xs, length=length, key=key, log=log))

    def _open(self, *args: PyTree, **kwargs: PyTree) -> OpenedLoop:
        opener = self._opener(kept=self._kept(), backward=self.backward)
        return opener.open(self.f, *args, **kwargs)

    def __check_init__(self) -> None:
        check_backward(type(self).__name__, self.backward)


@final
class Scan(AbstractScan[Carry, Y]):
    """Like `jax.lax.scan`: a loop that carries a state along.

    `f(carry, x) -> (carry, y)` is called for every element `x` of `xs` in turn. It may
    be any callable; if it is a module, then its arrays are arrays of this module, and
    are differentiated. `init` and `xs` may have leaves of any kind.

    Outside of `jit`, the first call compiles the loop, and later calls of the same
    types run that program; see [what is
    remembered](../how_derivatives_are_taken.md#calls-outside-of-jit).

    Raises:
        TypeError: If `f` is not callable, or a setting is not of its type.
        ValueError: If `unroll` is less than 1, or `policy` is not the name of a policy.
            `__call__` lists what the call raises.

    Examples:
        >>> import equinox as eqx, jax, jax.numpy as jnp
        >>> import eqloop as el
        >>> def step(total, x):
        ...     return total + x, total
        >>> el.Scan(step)(jnp.zeros(()), jnp.arange(4.0))
        (Array(6., dtype=float32), Array([0., 0., 1., 3.], dtype=float32))

        A cell with parameters, as a layer; these are its gradients:

        >>> class Decay(eqx.Module):
        ...     rate: jax.Array
        ...     def __call__(self, h, x):
        ...         return self.rate * h + x, None
        >>> layer = el.Scan(Decay(jnp.array(0.5)))
        >>> eqx.filter_grad(lambda scan: scan(0.0, jnp.ones(3))[0])(layer).f.rate
        Array(2., dtype=float32, weak_type=True)

    References:
        [`jax.lax.scan`](https://docs.jax.dev/en/latest/_autosummary/jax.lax.scan.html);
        the settings that it lacks are those of
        [`flax.linen.scan`](https://flax-linen.readthedocs.io/en/latest/api_reference/flax.linen/transformations.html).
    """

    if TYPE_CHECKING:

        @staticmethod
        def _of(f: Stepping[NewCarry, NewY], /) -> "Scan[NewCarry, NewY]": ...


@final
class CheckpointedScan(AbstractScan[Carry, Y]):
    """Like [`Scan`][eqloop.Scan], with little memory in reverse mode.

    It stores carries at the starts of nested segments, instead of the residuals of
    every step. The steps in between are run again from there.

    Args:
        base: The number of segments at each level. The loop stores about
            `base * log(length, base)` carries and runs each step about
            `log(length, base)` times more.
        schedule: Replaces `Recursive(base)`, if given; then there is no `base`.

    Raises:
        TypeError: If `f` is not callable, or a setting is not of its type.
        ValueError: If `base` is less than 2, or given beside a `schedule`, `unroll` is
            less than 1, or `policy` is not the name of a policy. `__call__` lists what
            the call raises.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import eqloop as el
        >>> @el.CheckpointedScan(base=4)
        ... def orbit(x, r):
        ...     return r * x * (1 - x), x
        >>> last, path = orbit(0.5, jnp.full(100, 3.7))
        >>> path.shape
        (100,)

    References:
        See [`Recursive`][eqloop.Recursive], the schedule that `base` stands for.
    """

    base: int = eqx.field(default=DEFAULT_BASE, static=True)

    if TYPE_CHECKING:

        @staticmethod
        def _of(
            f: Stepping[NewCarry, NewY], /
        ) -> "CheckpointedScan[NewCarry, NewY]": ...

    def _default_schedule(self) -> AbstractSchedule:
        return Recursive(self.base)

    def __check_init__(self) -> None:
        check_base(type(self).__name__, self.base, self.schedule)
