"""Plans: what a schedule decided for one loop, and what it will cost."""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from .._arrays import nbytes, pick
from .._calls import format_bytes
from .._device import planning_device
from .._programs import notes_of_layouts
from ._plot import plot_plan
from ._run import planned
from ._schedules import AbstractSchedule, LoopPolicy, Pinned, Recursive
from .engine._costs import StepCost
from .engine._forward import Active
from .engine._layout import Layout
from .engine._leaves import StoredLeaves
from .engine._problem import Placements, Problem
from .engine._transformed import again, needs_of_gradient, settled_problem
from .engine.orders._all_at_once import AllAtOnce
from .fused._choice import kernel_of, on_a_gpu, why_no_kernel
from .planning._alike import alike
from .planning._cost import as_stored, computed_again, outputs_wanted, step_cost
from .planning._memory import peak_bytes
from .planning._notice import says_if_long
from .planning._paces import Paces, paces, tried
from .rewrites import _in_place, _short_loops
from .rewrites._one_hot_writes import BLENDED, blended_leaves
from .rewrites._short_loops import without_short_loops
from .steps._find_lists import leaves_written, reasons_for_whole
from .steps._loop import MOST_PATHS, Loop, listed
from .steps._step import Step

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Times that differ by more than this say so.
_NOISY = 0.1


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a schedule decided for one loop, and what a gradient will cost.

    The method `plan` of a scan returns the plan that the scan will run. Printed, a plan
    is a table.

    Attributes:
        schedule: The schedule that decided.
        peak_bytes: Bytes that a gradient allocates at once on a device, besides its
            inputs and outputs. It should be no less than the temporary memory that XLA
            reports, and is seldom more than a few per cent above it.
        relative_time: The time of a gradient, relative to storing every residual. It is
            meant for comparing plans for one device; `nan` if nobody knows.
        is_measured: Whether that follows from runs of this step on this device, as for
            the plans of a [`Budget`][eqloop.Budget]. Otherwise it is estimated from the
            work of a step: light steps can take several times as long. So it is for a
            step that compiles slowly, and the printed plan says so.
        bytes_elsewhere: Bytes of the carries that are stored on the host or in files.
            On a CPU, host memory is the memory of the device, so `peak_bytes` includes
            the carries on the host.
        holds: For each leaf of the carry its path, and whether slots hold it. Leaves
            that no reversal of a step reads are not stored or computed again.
        saved_once: The paths of buffers that are read and that slots do not hold. If
            each of their rows is written once, the last carry has all of them, and
            otherwise a list of all rows that are written is saved.
        held_whole: Buffers of which steps write or move rows, and which slots hold: the
            path of each, why, and how many bytes that takes. [Delay lines and
            trees](../guides/delay_lines_and_trees.md) says what to write instead.
        rewritten: What was done to the step for this loop, in sentences, and to buffers
            in its carry that slots do not hold. It is empty for most steps, and under
            `StoreAll`: then JAX runs them as they are.
        scatter: By what part of itself a measured time differed when it was measured
            again, at the most. It is large on a machine with other work.
        computed_again: How many steps are evaluated once more because the policy does
            not keep all of their residuals.
        device: What it was made for, if that is not here: a kind of device, as JAX
            calls it.
        kernel: How the loop is one kernel each way, or why it is not; `None` if it was
            not to be ([`Fused`][eqloop.Fused]).
        backward: What happens to the cotangent of the carry on its way back, if
            anything does. Of a [`Truncate`][eqloop.Truncate], the steps are planned
            that have a derivative.
        may_end: Whether the loop may end before its last step, as a
            [`ScanWhile`][eqloop.ScanWhile] does. The figures are for all steps.
        output_bytes: The bytes of its outputs and of their cotangents, which are beside
            `peak_bytes`, as no schedule changes them.

    Examples:
        >>> import jax.numpy as jnp
        >>> import eqloop as el
        >>> scan = el.CheckpointedScan(lambda h, x: (jnp.sin(h) + x, None), base=10)
        >>> plan = scan.plan(jnp.zeros(100), jnp.zeros((1000, 100)))
        >>> print(plan)
        Recursive(base=10)
          steps              1000
          levels             10 x 10 x 10
          stored carries     30, 400 B each
          evaluations        3800, 3.80 a step
          peak memory        ... KiB
          time               ... x storing everything, estimated

        A row that a step selects by a mask is written, and the buffer is in no slot:

        >>> def delayed(carry, x):
        ...     line, i = carry
        ...     is_new = (jnp.arange(50) == i % 50)[:, None]
        ...     return (jnp.where(is_new, jnp.sin(line[i % 50]) + x, line), i + 1), None
        >>> scan = el.Scan(delayed, schedule=el.Chunked(10))
        >>> plan = scan.plan((jnp.zeros((50, 8)), 0), jnp.zeros((500, 8)))
        >>> for note in plan.rewritten:
        ...     print(note)
        one-hot write of carry[0] becomes a write of one row
        carry[0] is a list of its rows, 17.2 KiB, in place of ... KiB in slots
        rows of the cotangent of carry[0] are read and written in place
    """

    schedule: AbstractSchedule
    peak_bytes: int
    relative_time: float
    # The order, the slots and the reversal, and what a step costs.
    _layout: Layout = dataclasses.field(repr=False)
    _cost: StepCost = dataclasses.field(repr=False)
    is_measured: bool = False
    scatter: float = dataclasses.field(default=0.0, repr=False, compare=False)
    bytes_elsewhere: int = dataclasses.field(default=0, repr=False)
    holds: tuple[tuple[str, bool], ...] = dataclasses.field(default=(), repr=False)
    saved_once: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    held_whole: tuple[tuple[str, str], ...] = dataclasses.field(default=(), repr=False)
    rewritten: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    computed_again: int = dataclasses.field(default=0, repr=False)
    _compiles_slowly: bool = dataclasses.field(default=False, repr=False)
    device: str | None = dataclasses.field(default=None, repr=False)
    kernel: str | None = dataclasses.field(default=None, repr=False)
    backward: str | None = dataclasses.field(default=None, repr=False)
    may_end: bool = dataclasses.field(default=False, repr=False)
    output_bytes: int = dataclasses.field(default=0, repr=False)

    @property
    def pinned(self) -> Pinned:
        """A schedule that always gives this plan, for loops of this length.

        What a [`Budget`][eqloop.Budget] finds depends on the machine. Pinned, a plan
        can be used again, compared, and passed to other processes. And a plan that was
        made for arrays that are split over devices can be run where a trace does not
        know that they are: under `jit`, with automatic axes.
        """
        return Pinned(self._layout, self.schedule.undo)

    @property
    def length(self) -> int:
        """How many steps the loop has."""
        return self._layout.order.length

    @property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """How many segments each nested level has: a tuple for each nest in turn."""
        return self._layout.order.levels

    @property
    def slots(self) -> int:
        """How many carries are stored at once, at the most."""
        return self._layout.order.slots

    @property
    def slot_bytes(self) -> int:
        """The bytes of a stored carry: of those of its leaves that are read again."""
        return self._cost.held

    @property
    def block(self) -> int:
        """How many consecutive steps have their residuals stored together."""
        return self._layout.order.block

    @property
    def kept(self) -> tuple[str, ...] | None:
        """The names of the values that a step keeps, where its residuals are stored.

        It is what `policy="auto"` has chosen: names that were given by
        [`eqloop.name`][], and dots, such as `"dot 2 at model.py:31"`. The rest is
        computed again. `None` if the policy was not chosen, or everything is kept.
        """
        return self._layout.kept

    @property
    def evaluations(self) -> int:
        """How often one gradient evaluates the step, the forward pass included.

        Under a policy, a step counts once more if its reversal computes some of its
        residuals again.
        """
        return self._layout.evaluations + self.computed_again

    @property
    def columns(self) -> tuple[str, str, str, str]:
        """Steps, schedule, what is stored, and evaluations, in a few words each."""
        stored = f"{self.slots} carries"
        if self._layout.stores_residuals:
            stored = "residuals"
        elif self.block > 1:
            stored += f", blocks of {self.block}"
        at_most = self._at_most
        steps, evaluations = f"{at_most}{self.length}", f"{at_most}{self.evaluations}"
        return steps, repr(self.schedule), stored, evaluations

    @property
    def _at_most(self) -> str:
        return "<= " if self.may_end else ""

    def __str__(self) -> str:
        at_most, kept, place = self._at_most, self.kept, self._layout.slots.place
        nests = ", then ".join(" x ".join(map(str, nest)) for nest in self.levels)
        elsewhere = f"{format_bytes(self.bytes_elsewhere)} {place}"
        limit, outputs = self.schedule.budgeted_bytes, self.output_bytes
        per_step = self.evaluations / max(self.length, 1)
        how = "measured" if self.is_measured else "estimated"
        how += ", as the step compiles slowly" if self._compiles_slowly else ""
        if self.scatter > _NOISY:
            how += f", give or take {self.scatter:.0%}"
        time = f"{as_factor(self.relative_time)} x storing everything, {how}"
        if math.isnan(self.relative_time):
            time = "unknown, as no such kernel has been timed yet"
        rows = [
            ("device", self.device),
            ("steps", f"{at_most}{self.length}"),
            ("levels", nests and nests + self._why_fewer_levels),
            ("backward", self.backward),
            *self._layout.order.described(self._cost),
            ("kernel", self.kernel),
            ("elsewhere", elsewhere if self.bytes_elsewhere else None),
            *self._layout.reversal.described(self.block),
            ("each step keeps", None if kept is None else ", ".join(kept) or "nothing"),
            ("rewritten", "; ".join(self.rewritten)),
            *(self._described_slots() if self.slots else ()),
            ("evaluations", f"{at_most}{self.evaluations}, {per_step:.2f} a step"),
            ("peak memory", format_bytes(self.peak_bytes)),
            ("time", time),
            *of_outputs(outputs, outputs if limit is None else limit).items(),
        ]
        return as_table(repr(self.schedule), rows)

    def _described_slots(self) -> Iterator[tuple[str, str]]:
        """What slots hold of the carry, if not all of it."""
        held = [path for path, is_held in self.holds if is_held]
        others = [path for path, is_held in self.holds if not is_held]
        if others:
            nothing = "nothing: the way back reads no carry"
            yield "each holds", listed(held) if held else nothing
        unread = [path for path in others if path not in self.saved_once]
        for name, paths in (("saved once", self.saved_once), ("and not", unread)):
            if others and paths:
                yield name, listed(list(paths))
        for path, reason in self.held_whole[:MOST_PATHS]:
            yield "held whole", f"{path}: {reason}"

    @property
    def _why_fewer_levels(self) -> str:
        """Why there are fewer levels than by the base of the schedule, if so."""
        schedule = self.schedule
        if not isinstance(schedule, Recursive) or self.length < 2:
            return ""
        if schedule.batch is None and self._layout.reversal.described(self.block):
            return ", as many as pay where steps are reversed together"
        if self.levels != ((self.length,),):
            return ""
        if not self.slot_bytes:
            return ", as storing carries takes no memory"
        return ", as so short a loop stores every carry"

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draws the bytes that are live over the sweep, and what is run when.

        Above, the carries and residuals that are stored as the gradient proceeds;
        below, which step is run: by the primal, again, or backwards.

        Args:
            ax: The axes to draw on; new ones by default.

        Returns:
            The axes.

        Raises:
            ImportError: If matplotlib is not installed.
        """
        title = repr(self.schedule)
        return plot_plan(title, self._layout, self._cost, self.peak_bytes, ax)


def plan(
    step: Step,
    loop: Loop,
    schedule: AbstractSchedule,
    policy: LoopPolicy = None,
    placed: Placements = (),
) -> Plan:
    """The plan of a loop all of whose inputs are differentiated."""
    return estimated_plan(schedule, *planned(step, loop, schedule, policy, placed))


def estimated_plan(
    schedule: AbstractSchedule, problem: Problem, active: Active, layout: Layout
) -> Plan:
    """The plan of a layout, whose time is measured if the schedule decides by that."""
    # A kernel is compared with what a budget would compare it with.
    is_kernel = layout.runner is not None and planning_device().platform == "gpu"
    times = paces(problem, active, schedule.measures_steps or is_kernel)
    what = f"a loop of {layout.order.length} steps"
    with says_if_long(repr(schedule), what, "its gradient"):
        return plan_of(schedule, problem, active, layout, times)


def plan_of(
    schedule: AbstractSchedule,
    problem: Problem,
    active: Active,
    layout: Layout,
    times: Paces,
    size: int | None = None,
) -> Plan:
    """The plan of a layout.

    Its bytes are `size`, if these are known.
    """
    everything = Layout(AllAtOnce(layout.order.length))
    times = times.keeping(problem, active, layout.kept)
    device, runner = planning_device(), layout.runner
    is_kernel = runner is not None and device.platform == "gpu"
    if schedule.budgeted_bytes is not None or is_kernel:
        seen = [everything] if layout.runner else [everything, layout]
        times = tried(problem, active, times, seen)
    how_long, whole = times.of(layout), times.duration(everything)
    stored = as_stored(problem, active, layout)
    cost = how_long.cost if stored is problem else step_cost(stored, active)
    cost = layout.stored_cost(cost)
    problem = problem.under(layout)
    run = problem.as_run
    takes, kernel = layout.duration(how_long), None
    if layout.why_left is not None:
        kernel = f"none: {layout.why_left}"
        if layout.is_for_gpu:
            kernel += f". On a GPU: {on_a_gpu(problem, active)}"
    elif schedule.budgeted_bytes is not None and runner is None:
        kernel = why_no_kernel(problem, active)
    if runner is not None:
        kernel = runner.described(run.row_step, run.loop, layout)
        measure = schedule.measures_steps or schedule.budgeted_bytes is None
        is_none = kernel.startswith("none")
        found = None if is_none else kernel_of(problem, active, layout, measure)
        if found is not None:
            takes, kernel = found.duration, found.described(kernel)
    # Then JAX has the step as it was traced.
    is_by_jax = schedule._by_jax and problem.loop.kept is None and not run.loop.stops
    about = {} if is_by_jax else _leaves(problem, active, layout, is_kernel)
    notes = notes_of_layouts(run.step.jaxpr)
    about["rewritten"] = (*about.get("rewritten", ()), *notes)
    return Plan(
        schedule=schedule,
        _layout=layout,
        _cost=cost,
        peak_bytes=peak_bytes(problem, active, layout) if size is None else size,
        relative_time=takes / whole if whole else 1.0,
        is_measured=how_long.is_measured,
        scatter=how_long.scatter,
        computed_again=computed_again(problem, active, layout),
        # Of a schedule that never measures, it is not the reason.
        _compiles_slowly=schedule.measures_steps and bool(times.compiles_slowly),
        bytes_elsewhere=layout.bytes_elsewhere(cost),
        device=None if device.is_here else device.kind,
        kernel=kernel,
        may_end=run.loop.stops,
        output_bytes=2 * problem.loop.rows * cost.ct_y,
        **about,
    )


def _leaves(
    problem: Problem, active: Active, layout: Layout, is_kernel: bool
) -> dict[str, Any]:
    """The entries of a plan about the leaves of the carry, and what was rewritten."""
    loop, paths = problem.loop, problem.loop.carry_paths
    if layout.stores_residuals:
        return dict(rewritten=loop.rewritten)
    known = alike(problem)
    needs = needs_of_gradient(known, active, outputs_wanted(problem), layout)
    step = again(settled_problem(known, active, reverse=True))

    def in_slots(leaf: int) -> str:
        size = nbytes(layout.slots.packed_types([step.carry_types[leaf]]))
        return f"{format_bytes(layout.order.slots * size)} in slots"

    if not is_kernel:
        known_rows = StoredLeaves.of(needs, step, problem.loop_back).rows
        for leaf, row in enumerate(known_rows):
            if row is not None:
                is_it = [i == leaf for i in range(step.num_carry)]
                loop = loop.noting(f"{row.note}, in place of {in_slots(leaf)}", is_it)
        written = zip(leaves_written(step), active.carry, strict=True)
        loop = loop.noting(_in_place.NOTE, list(map(all, written)))
        stops, without = problem.as_run.loop.stops, without_short_loops(known.step)
        if stops and without is not known.step:
            loop = loop.noting(_short_loops.NOTE)
    if len(paths) != step.num_carry:
        return dict(rewritten=loop.rewritten)
    reasons = reasons_for_whole(step, problem.loop_back, layout.carries, paths)
    each = zip(needs.held, reasons, blended_leaves(known.step), strict=True)
    found = [h and (why or (BLENDED if blends else None)) for h, why, blends in each]
    whole = (
        (path, f"{why}; it takes {in_slots(leaf)}")
        for leaf, (path, why) in enumerate(zip(paths, found, strict=True))
        if why
    )
    once = [f and not h for h, f in zip(*needs, strict=True)]
    return dict(
        holds=tuple(zip(paths, needs.held, strict=True)),
        saved_once=tuple(pick(paths, once)),
        held_whole=tuple(whole),
        rewritten=loop.rewritten,
    )


def of_outputs(nbytes: int, most: float) -> dict[str, str]:
    """What outputs take, which is in no plan, as a note if it is more than `most`."""
    size = format_bytes(nbytes)
    return {"outputs": f"{size} more, with their cotangents"} if nbytes > most else {}


def as_factor(time: float) -> str:
    """A relative time, with two digits at least."""
    return f"{time:.2f}" if time >= 0.1 else f"{time:.2g}"


def as_table(title: str, rows: Iterable[tuple[str, str | None]]) -> str:
    """Rows of names and values, under a title; those without a value are left out."""
    shown = [(name, text) for name, text in rows if text]
    width = max(19, *(len(name) + 2 for name, _ in shown))
    return "\n".join([title, *(f"  {name:<{width}}{text}" for name, text in shown)])
