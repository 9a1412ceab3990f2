"""`ScanWhile`: a scan that ends when its carry says so."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, final

import equinox as eqx
import jax
import jax.numpy as jnp

from .._arrays import axes_of, describe, put_on_mesh, split, vary
from .._calls import Carry, NewCarry, NewY, Y, as_count, compiled_when, setting, typed
from .._device import DeviceLike
from .._types import PRNGKey, PyTree, ShapeDtypeStruct, Value
from ..checkpointing import AbstractSchedule, Plan, Recursive, left_open, make_step
from ..progress import Label
from ._backward import Backward, in_words
from ._carry import OF_A_SCAN
from ._loop import AbstractLoop, check_unroll, checks_no_values
from ._opened_loop import OpenedLoop
from ._scan import Stepping, check_backward
from ._while_loop import MOST_STEPS, Condition, varied_with, varies_with


class AbstractConditional(eqx.Module):
    """What has a condition. Its field comes before those of a loop."""

    cond: Callable[..., PyTree]


@final
class ScanWhile(  # pyright: ignore[reportGeneralTypeIssues]
    AbstractLoop, AbstractConditional, Generic[Carry, Y]
):
    """A [`Scan`][eqloop.Scan] that stops early, when a condition no longer holds.

    While `cond(carry)` holds, and for `max_steps` steps at the most, `f(carry, x)` is
    called for the next element of `xs`. It is differentiable in every mode. Under
    `vmap` each example ends at its own step. Steps that are not run are not reversed
    either, and their rows of the outputs are zeros.

    In reverse mode carries are stored as the schedule says for `max_steps` steps.
    [`StoreAll`][eqloop.StoreAll] stores the carry of each step, and no residuals.

    Args:
        cond: `cond(carry)` returns whether to run another step: a scalar boolean. It is
            not differentiated.
        f: The step, `f(carry, x) -> (carry, y)`, or `f(carry, x, key=...)` if the call
            is given a key.
        max_steps: The most steps that are run. `xs` must have as many elements: if they
            have more, pass `xs[:max_steps]`. A loop that has run them all, and for
            whose last carry `cond` still holds, is no error: for one, write
            `el.error_if(carry, cond(carry), "...")`.
        schedule: How to trade memory for recomputation when the loop is differentiated
            in reverse mode. By default [`Recursive()`][eqloop.Recursive].
        backward: Changes the cotangent of the carry on its way back, after each step,
            as in [`Scan`][eqloop.Scan]. All steps that were run are reversed.
        progress: Shows a progress bar, as in [`Scan`][eqloop.Scan]; a `desc` that is a
            function gets `None` for the outputs.
        unroll: It must be 1, because the condition is tested after each step.

    Raises:
        TypeError: If `cond` or `f` is not callable, or a setting is not of its type.
        ValueError: If `max_steps` is negative, `unroll` is not 1, or `policy` is not
            the name of a policy. `__call__` lists what the call raises.

    Examples:
        >>> import eqloop as el, jax, jax.numpy as jnp
        >>> def newton(x, _):
        ...     return (x + 2 / x) / 2, x
        >>> far = lambda x: jnp.abs(x * x - 2) > 1e-3
        >>> root, path, steps = el.ScanWhile(far, newton, max_steps=5)(jnp.float32(1))
        >>> print(f"{root:.4f}", path.round(2), steps)
        1.4142 [1.   1.5  1.42 0.   0.  ] 3

        The sum of the first numbers whose sum is at least 10, and its gradient:

        >>> add = lambda total, x: (total + x, None)
        >>> add = el.ScanWhile(lambda total: total < 10, add, max_steps=6)
        >>> jax.grad(lambda xs: add(0.0, xs)[0])(jnp.arange(6.0))
        Array([1., 1., 1., 1., 1., 0.], dtype=float32)
    """

    f: Stepping[Carry, Y]  # pyright: ignore[reportIncompatibleMethodOverride]
    max_steps: int = setting()
    backward: Backward | None = setting(default=None)

    if TYPE_CHECKING:

        @staticmethod
        def _of(f: Stepping[NewCarry, NewY], /) -> "ScanWhile[NewCarry, NewY]": ...

    @compiled_when(checks_no_values)
    @typed
    def __call__(
        self,
        init: PyTree,
        xs: PyTree = None,
        *,
        key: PRNGKey | None = None,
        log: PyTree = None,
    ) -> tuple[Carry, Y, jax.Array]:
        """Runs the loop.

        Args:
            init: The carry of the first step. Arrays, and the Python numbers that `f`
                changes, vary; other leaves must come back as they went in.
            xs: What is scanned: `max_steps` elements. Each array leaf loses the axis
                `in_axes` gives it.
            key: A PRNG key. If it is given, `f` is called as `f(carry, x, key=...)`.
            log: Takes the log of the backward pass, as in [`Scan`][eqloop.Scan]. The
                rows of steps that were not run are zeros.

        Returns:
            The last carry; `ys`, the outputs of the steps, stacked
            along the axes that `out_axes` gives, with zeros for steps that were not
            run; and how many steps were run.

        Raises:
            TypeError: If the carry changes its type, if `f` does not return a pair, if
                `cond` does not return a scalar boolean, if a jaxtyping annotation is
                violated, or if there is a reference (`jax.new_ref`) among the
                arguments; `f` may close over one.
            ValueError: If lengths disagree, if an axis is out of range, or if a static
                leaf of the carry changes. If a gradient is taken, and there is an
                `io_callback` in a step.
        """
        (carry, steps), ys = self._run(self._open(init, xs, key=key, log=log))
        return carry, ys, steps

    @typed
    def empty_log(
        self,
        init: PyTree,
        xs: PyTree = None,
        *,
        key: PRNGKey | ShapeDtypeStruct | None = None,
    ) -> PyTree:
        """Zeros in whose place the log of the backward pass comes out of a gradient.

        As for a [`Scan`][eqloop.Scan.empty_log]. The loop is not run.

        Args:
            init: The carry of the first step.
            xs: What is scanned.
            key: A PRNG key, if the call is given one.

        Returns:
            A tree like the log that `backward` returns, with `max_steps` rows.

        Raises:
            TypeError: As the call does, and if the log does not consist of arrays of
                numbers.
            ValueError: As the call does, and if `backward` returns no log.

        Examples:
            >>> import jax, jax.numpy as jnp
            >>> import eqloop as el
            >>> loop = el.ScanWhile(
            ...     lambda h: h < 30,
            ...     lambda h, _: (3 * h, None),
            ...     max_steps=6,
            ...     backward=el.ClipCotangent(10.0, log=True),
            ... )
            >>> loss = lambda h, log: loop(h, log=log)[0]
            >>> jax.grad(loss, argnums=1)(1.0, loop.empty_log(1.0))
            Array([30., 27.,  9.,  3.,  0.,  0.], dtype=float32)
        """
        return self._opened(init, xs, key=key)[0].empty_log()

    @typed
    def plan(
        self,
        init: PyTree,
        xs: PyTree = None,
        *,
        key: PRNGKey | ShapeDtypeStruct | None = None,
        log: PyTree = None,
        device: DeviceLike | None = None,
    ) -> Plan:
        """The plan of a gradient of the call, without running the loop.

        The plan is for a gradient with respect to all inputs, if all `max_steps` steps
        are run. Pass the arguments of the call; a `jax.ShapeDtypeStruct` can stand for
        an array.

        Args:
            init: The carry of the first step.
            xs: What is scanned.
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
            >>> shrink = lambda h, _: (jnp.sin(h) / 2, None)
            >>> loop = el.ScanWhile(lambda h: h.sum() > 1, shrink, max_steps=4096)
            >>> loop.plan(jnp.zeros(64)).levels
            ((16, 16, 16),)
        """
        found = self._plan(device, init, xs, key=key, log=log)
        return dataclasses.replace(found, backward=in_words(self.backward))

    def _open(
        self, init: PyTree, xs: PyTree = None, log: PyTree = None, **kwargs: PyTree
    ) -> OpenedLoop:
        opener = self._opener(words=_WORDS, backward=self.backward)
        kwargs |= dict(length=self.max_steps)
        opened = opener.open(self.f, init, xs, log=log, **kwargs)
        name = type(self).__name__
        condition = Condition.of(name, self.cond, opened.carry, is_bounded=True)
        holds = condition(condition.consts, opened.init[: len(opened.carry.paths)])
        parts = (self, init, xs, log)
        if not varies_with(parts, holds):
            # Devices stop at different times, so whatever the steps compute differs.
            loop, *parts = varied_with(parts, holds)
            return loop._open(*parts, **kwargs)
        # Where it ends is not known, and so neither is the last cut.
        opened = dataclasses.replace(opened, head=0)
        return _stopping(opened, condition, holds)

    def _default_schedule(self) -> AbstractSchedule:
        return left_open(Recursive())

    def __check_init__(self) -> None:
        if not callable(self.cond):
            raise TypeError(
                f"ScanWhile: `cond` must be callable, but {describe(self.cond)} is not."
            )
        check_backward("ScanWhile", self.backward)
        as_count("ScanWhile", "max_steps", MOST_STEPS, self.max_steps, least=0)
        check_unroll("ScanWhile", self.unroll)
        if self.unroll != 1 or self.unroll is True:
            raise ValueError(
                f"ScanWhile: `unroll` must be 1, not {self.unroll!r}: `cond` is "
                f"called after each step."
            )


_WORDS = dataclasses.replace(OF_A_SCAN, length="max_steps")


def _stopping(opened: OpenedLoop, condition: Condition, holds: Value) -> OpenedLoop:
    """The loop whose carry starts with whether it goes on, and a count of its steps."""
    step, own = opened.step, len(opened.carry.paths)

    def run(
        consts: list[Value], carry: list[Value], x: list[Value]
    ) -> tuple[list[Value], list[Value]]:
        of_step, of_condition = split(consts, len(opened.consts))
        _, count, *carry = carry
        carry, y = step(of_step, carry, x)
        # Beyond the steps that a device runs, its rows are zeros.
        y = [vary(leaf, axes_of(holds)) for leaf in y]
        return [condition(of_condition, carry[:own]), count + 1, *carry], y

    def run_back(
        consts: list[Value], carry: list[Value], x: list[Value]
    ) -> tuple[list[Value], list[Value]]:
        holds, count, *carry = carry
        before = step.before(consts[: len(opened.consts)], carry, x)
        return [holds, count - 1, *before], []

    def close(carry: list[Value], ys: list[Value]) -> tuple[PyTree, PyTree]:
        _, count, *carry = carry
        carry, ys = opened.close(carry, ys)
        return (carry, count), ys

    def label(desc: Callable[[int, PyTree, PyTree], str]) -> Label:
        # A step reports by its carry, as in a while loop.
        join = lambda carry: opened.carry.join(carry[:own])
        return Label.of(desc, step.carry_types, [], join, lambda y: None)

    consts = [*opened.consts, *condition.consts]
    count = vary(put_on_mesh(jnp.zeros((), jnp.int32)), axes_of(holds))
    init = [holds, count, *opened.init]
    paths = ("whether to go on", "the number of steps", *opened.loop.carry_paths)
    starts = None, None, *opened.loop.starts
    loop = dataclasses.replace(
        opened.loop, stops=True, starts=starts, carry_paths=paths
    )
    const_types, carry_types = (list(map(jax.typeof, x)) for x in (consts, init))
    types = const_types, carry_types, step.x_types
    inverse = step.inverse and make_step(run_back, *types).jaxpr
    saved = step.saved and (False, False, *step.saved)
    stopping = make_step(run, *types)
    return dataclasses.replace(
        opened,
        step=dataclasses.replace(stopping, inverse=inverse, saved=saved),
        consts=consts,
        init=init,
        loop=loop,
        close=close,
        label=label,
    )
