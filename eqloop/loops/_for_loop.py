"""`ForLoop` and `CheckpointedForLoop`: a function of several `xs`, without a carry."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, SupportsIndex, final

import equinox as eqx

from .._arrays import paths
from .._calls import NewY, Y, argument_names, call_traced, compiled_once, typed
from .._device import DeviceLike
from .._types import PRNGKey, PyTree, ShapeDtypeStruct
from ..checkpointing import AbstractSchedule, Plan, Recursive
from ._carry import Shown, Words, shown_call
from ._loop import AbstractLoop
from ._opened_loop import OpenedLoop
from ._scan import DEFAULT_BASE, check_base
from ._step_checks import check_wants_key


class AbstractForLoop(AbstractLoop[Callable[..., Y]], Generic[Y]):
    """A loop over the leading axes of several arrays, that carries nothing along.

    Args:
        f: The function, `f(*x) -> y`, or `f(*x, key=...)` if the call is given a key.
            If it is a module, then its arrays are arrays of this module, and are
            differentiated.
        in_axes: The axis of each leaf of `xs` that is scanned: a prefix tree of `int`,
            `None` and callables from a leaf to either; a tuple has an entry for each of
            `xs`. `None` gives each step the whole leaf. By default axis 0 of every
            array.
    """

    f: Callable[..., Y]

    @compiled_once
    @typed
    def __call__(
        self,
        *xs: PyTree,
        length: SupportsIndex | None = None,
        key: PRNGKey | None = None,
    ) -> Y:
        """Runs the loop.

        Args:
            *xs: What `f` is called with. Each array leaf loses the axis that `in_axes`
                gives it.
            length: How many steps; needed only if there is nothing to scan.
            key: A PRNG key. If it is given, `f` is called as `f(*x, key=...)`.

        Returns:
            The results of the steps, stacked along the axes that `out_axes` gives.

        Raises:
            TypeError: If a jaxtyping annotation of `f` is violated.
            ValueError: If lengths disagree or are unknown, or if an axis is out of
                range.
        """
        return self._run(self._open(*xs, length=length, key=key))[1]

    @typed
    def plan(
        self,
        *xs: PyTree,
        length: SupportsIndex | None = None,
        key: PRNGKey | ShapeDtypeStruct | None = None,
        device: DeviceLike | None = None,
    ) -> Plan:
        """The plan of a gradient of the call, without running the loop.

        The plan is for a gradient with respect to all inputs: `f` and `xs`. Pass the
        arguments of the call; a `jax.ShapeDtypeStruct` can stand for an array.

        Args:
            *xs: What `f` is called with.
            length: How many steps; needed only if there is nothing to scan.
            key: A PRNG key, if the call is given one.
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
            >>> el.CheckpointedForLoop(jnp.sin).plan(jnp.zeros(100)).evaluations
            200
        """
        return self._plan(device, *xs, length=length, key=key)

    def _open(self, *xs: PyTree, **kwargs: PyTree) -> OpenedLoop:
        def f_transform(f: Callable[..., PyTree]) -> Callable[..., PyTree]:
            # The step of a scan whose carry is nothing.
            f = f if self.f_transform is None else self.f_transform(f)
            name = type(self).__name__

            def step(carry: PyTree, xs: PyTree, **keywords: PyTree) -> PyTree:
                check_wants_key(name, f, xs, keywords)
                return carry, call_traced(name, f, xs, keywords)

            return step

        opener = self._opener(f_transform=f_transform, words=_WORDS)
        return opener.open(self.f, None, xs, **kwargs)

    def __check_init__(self) -> None:
        schedule = self.schedule
        if isinstance(schedule, AbstractSchedule) and schedule.undo is not None:
            raise ValueError(
                f"{type(self).__name__}: `schedule={schedule!r}` undoes steps by "
                f"an inverse, but these steps have no carry to undo. Use another "
                f"schedule, such as `el.Recursive(16)`."
            )


def _call_of_f(_: PyTree, xs: tuple[PyTree, ...], keywords: dict[str, Any]) -> Shown:
    names = ["x"] if len(xs) == 1 else [f"x{i}" for i in range(len(xs))]
    return shown_call("f", dict(zip(names, xs, strict=True)), keywords)


def _names_of_f(
    f: Callable[..., PyTree], _: PyTree, xs: tuple[PyTree, ...]
) -> tuple[Any, list[str], list[str]]:
    pairs = zip(argument_names(f, xs), xs, strict=True)
    return f, ["carry"], [path for name, x in pairs for path in paths(x, name)]


_WORDS = Words(call=_call_of_f, several=True, names=_names_of_f)


@final
class ForLoop(AbstractForLoop[Y]):
    """Calls a function on the elements of `xs`, one after the other.

    `f(*x) -> y` is called for every element `x` of each of `xs`; the results are
    stacked. It is like `jax.vmap` with one call at a time, and takes the memory of one
    call. If `f` needs the number of its step, pass `jnp.arange(n)` among the `xs`.

    Raises:
        TypeError: If `f` is not callable, or a setting is not of its type.
        ValueError: If `unroll` is less than 1, or `policy` is not the name of a policy.
            `__call__` lists what the call raises.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import eqloop as el
        >>> el.ForLoop(jnp.dot)(jnp.ones((4, 3)), jnp.arange(12.0).reshape(4, 3))
        Array([ 3., 12., 21., 30.], dtype=float32)

        Without `xs`, and with keys:

        >>> throw = el.ForLoop(lambda key: jax.random.bernoulli(key))
        >>> throw(length=1000, key=jax.random.key(0)).shape
        (1000,)
    """

    if TYPE_CHECKING:

        @staticmethod
        def _of(f: Callable[..., NewY], /) -> "ForLoop[NewY]": ...


@final
class CheckpointedForLoop(AbstractForLoop[Y]):
    """Like [`ForLoop`][eqloop.ForLoop], with little memory in reverse mode.

    Each step is run again when it is reversed, so the residuals of only one step are
    stored. No step depends on another one, so each step is run exactly twice.

    Args:
        base: The size of a block, whose residuals are stored together, if there is a
            `policy`; as in `Recursive(base)`.
        schedule: Replaces `Recursive(base)`, if given; then there is no `base`.

    Raises:
        TypeError: If `f` is not callable, or a setting is not of its type.
        ValueError: If `base` is less than 2, or given beside a `schedule`, `unroll` is
            less than 1, or `policy` is not the name of a policy. `__call__` lists what
            the call raises.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import eqloop as el
        >>> @el.CheckpointedForLoop(in_axes=(0, None))
        ... def distance(x, centre):
        ...     return jnp.linalg.norm(x - centre)
        >>> xs, centre = jnp.eye(2), jnp.zeros(2)
        >>> jax.grad(lambda c: jnp.sum(distance(xs, c)))(centre)
        Array([-1., -1.], dtype=float32)
    """

    base: int = eqx.field(default=DEFAULT_BASE, static=True)

    if TYPE_CHECKING:

        @staticmethod
        def _of(f: Callable[..., NewY], /) -> "CheckpointedForLoop[NewY]": ...

    def _default_schedule(self) -> AbstractSchedule:
        return Recursive(self.base)

    def __check_init__(self) -> None:
        check_base(type(self).__name__, self.base, self.schedule)
