"""The scans: `jax.lax.scan` as a PyTree around its function."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, Generic, SupportsIndex, final

import equinox as eqx

from .._calls import Carry, NewCarry, NewY, Y, compiled_when, setting, typed
from .._device import DeviceLike
from .._types import PRNGKey, PyTree, ShapeDtypeStruct
from ..checkpointing import AbstractSchedule, Plan, Recursive
from ._backward import Backward, Truncate, in_words
from ._loop import AbstractLoop, checks_no_values
from ._opened_loop import OpenedLoop

# What settings may be, and what follows from them.


DEFAULT_BASE = 16


def check_base(owner: str, base: int, schedule: AbstractSchedule | None) -> None:
    """Checks the `base` of a loop whose schedule is `Recursive(base)` by default."""
    if isinstance(base, AbstractSchedule):
        raise TypeError(
            f"{owner}: the second setting is `base`, an int. A schedule is given by "
            f"name: `schedule={base!r}`."
        )
    Recursive(base)  # raises, should `base` not be valid
    if schedule is not None and base != DEFAULT_BASE:
        raise ValueError(
            f"{owner}: `base={base}` is for the schedule `el.Recursive(base)`, and "
            f"`schedule={schedule!r}` is another one. Give one of the two."
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

    @compiled_when(checks_no_values)
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
        found = self._plan(device, init, xs, length=length, key=key, log=log)
        return dataclasses.replace(found, backward=in_words(self.backward))

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
