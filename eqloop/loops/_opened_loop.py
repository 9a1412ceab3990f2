"""A call of a loop as a step on arrays, which runs it or plans it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import NamedSharding

from .._arrays import automatic_sharding, is_typed, partition
from .._programs import loop_scope, without_derivatives
from .._types import PyTree, Value
from ..checkpointing import (
    AbstractSchedule,
    Loop,
    Placements,
    Recursive,
    Step,
    form_to_plan,
    run_loop,
)
from ..progress import NO_BARS, Label, Meter, ProgressBar, make_meter
from ._carry import Carry


@dataclasses.dataclass(frozen=True)
class OpenedLoop:
    """A call of a loop as a step on arrays.

    Attributes:
        step: The traced `f`.
        consts: The arrays that are the same for every step.
        init: The dynamic leaves of the initial carry.
        xs: The arrays that are scanned: leaves of `f` and of `xs`, and keys.
        loop: How `step` is repeated.
        close: Turns `(carry, ys)`, each a list of arrays, into the user's result.
        carry: The initial carry, as a tree.
        label: Makes the text before a progress bar from the user's function.
        empty_log: Makes the zeros that the log of the steps is the cotangent of.
        head: How many steps at the start have no derivative at all, because of a cut.
    """

    step: Step
    consts: list[Value]
    init: list[Value]
    xs: list[Value]
    loop: Loop
    close: Callable[[list[Value], list[Value]], tuple[PyTree, PyTree]]
    carry: Carry
    label: Callable[[Callable[[int, PyTree, PyTree], str]], Label]
    empty_log: Callable[[], PyTree]
    head: int = 0

    def run(
        self,
        name: str,
        *,
        schedule: AbstractSchedule,
        policy: PyTree,
        progress: ProgressBar | None = None,
    ) -> tuple[PyTree, PyTree]:
        """Runs the loop. Returns the final carry and the outputs, as trees."""
        length = None if self.loop.stops else self.loop.length
        meter = make_meter(name, progress, length, self.label)
        with loop_scope(name):
            opened = self.at_reversal(meter)
            carry, ys = run_loop(
                self.step,
                self.consts,
                opened.init,
                opened.xs,
                loop=dataclasses.replace(opened.loop, meter=meter),
                schedule=schedule,
                policy=policy,
            )
        return self.close(carry, ys)

    def at_reversal(self, meter: Meter = NO_BARS) -> "OpenedLoop":
        """Runs the steps of the `head`. Returns the rest of the loop."""
        # With `Truncate`, nothing before the last cut that matters has a derivative. So
        # these steps are a loop of their own, whose carries no gradient stores.
        if not self.head:
            return self
        loop, rest = self.loop.cut_at(self.head)
        arrays = without_derivatives((self.consts, self.init, self.xs))
        # Any schedule but `StoreAll` will do, under which a scan would cut up `xs`:
        # a planned loop indexes into them where they are, by the `base` of the loop.
        init, _ = run_loop(
            self.step,
            *arrays,
            loop=dataclasses.replace(loop, meter=meter),
            schedule=Recursive(),
        )
        # The rest may be differentiated, so it gets `xs` of its own, and has no `base`.
        first = rest.base
        xs = [
            lax.slice_in_dim(x, first, first + rest.length, axis=axis)
            for x, axis in zip(self.xs, rest.x_axes, strict=True)
        ]
        rest = dataclasses.replace(rest, base=0)
        return dataclasses.replace(self, init=init, xs=xs, loop=rest, head=0)


def open_abstractly(
    open_call: Callable[..., OpenedLoop], *args: PyTree
) -> tuple[OpenedLoop, Placements]:
    """Opens a call when only the types of the arrays are known."""
    # An `OpenedLoop` cannot be the result of an abstract evaluation, so it is kept on
    # the side. Its arrays are tracers that are good for nothing but their types.
    # Returned are the call, and how its consts, its carry and its `xs` are split over
    # automatic axes. Of what is computed from these it is not known.
    opened: list[OpenedLoop] = []
    found: list[tuple[NamedSharding | None, ...]] = []
    types, rest = partition(args, is_typed)
    shardings = list(map(automatic_sharding, types))

    def open_traced(*traced: Value) -> None:
        loop = open_call(*rest.join(traced)).at_reversal()
        known = dict(zip(map(id, traced), shardings, strict=True))
        # What the step closes over is an array, and not traced.
        of = lambda x: known.get(id(x)) or automatic_sharding(x)
        opened.append(loop)
        found.extend(tuple(map(of, g)) for g in (loop.consts, loop.init, loop.xs))

    jax.eval_shape(open_traced, *types)
    return opened[0], tuple(found) if any(map(any, found)) else ()


def to_plan(opened: OpenedLoop, placed: Placements) -> dict[str, Any]:
    """What is planned of a loop that was opened abstractly."""
    step, loop, placed = form_to_plan(opened.step, opened.loop, placed)
    return dict(step=step, loop=loop, placed=placed)
