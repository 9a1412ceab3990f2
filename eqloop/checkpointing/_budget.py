"""`Budget`: the schedule that finds the fastest plan within so much memory."""

import dataclasses
import functools
import os
from typing import NoReturn, TypeGuard, final

import jax.extend.core as jex

from .._arrays import refuse_symbolic, refuse_symbolic_sizes
from .._calls import exact_bytes, format_bytes, format_limit, parse_bytes
from .._programs import formula_of, map_equations, with_formula
from ._plan import plan_of
from ._schedules import AbstractSchedule, StoreAll
from ._slot_schedules import writable_directory
from .engine._forward import Active
from .engine._layout import Layout
from .engine._loop_spec import LoopSpec
from .engine._planned_loop import PlannedLoop
from .engine._problem import Problem
from .engine._transformed import all_active
from .engine.slots._file_slots import FileSlots
from .engine.slots._host_slots import HostSlots
from .engine.slots._spill_files import SpillFiles
from .fused._choice import kernels
from .planning._alike import alike
from .planning._choice import best, smallest
from .planning._cost import list_bytes, step_cost
from .planning._memory import device_bytes, largest_in_gradient, peak_bytes
from .planning._memory_guess import counted_bytes, working_set
from .planning._notice import says_if_long
from .planning._paces import Paces, SecondPlace, paces
from .steps._step import Step


@final
@dataclasses.dataclass(frozen=True)
class Budget(AbstractSchedule):
    """The fastest plan that fits into this much memory.

    The search includes storing everything, storing every carry, nested levels of any
    lengths, and the least recomputation with any number of slots, each with the
    residuals of single steps or of blocks. The budget covers the memory that the
    gradient of the loop allocates besides its inputs and outputs, on one device, the
    one that it is for; under `vmap` it covers the whole batch. If arrays are split over
    the automatic axes of a mesh, a plan that is made under `jit` does not know that,
    and takes all devices for one: see `Plan.pinned`. To find out how much memory a plan
    takes, a few are compiled, once, and never run.

    Plans that run each step more than a hundred times are left out. Use
    [`Binomial`][eqloop.Binomial] for these.

    Time is measured: short loops of this step, each of one kind of piece, are compiled
    and run for a moment on this device, once, with made-up inputs. They only run steps,
    or reverse them one by one, in blocks, or together. This happens when the plan is
    made, which is when a gradient is taken. So the plan is for the batch in the
    gradient of a `vmap`, and for one example in the `vmap` of a gradient. A plan that
    takes more than two seconds says so, in a line of the logger `eqloop`. What is found
    is remembered, also beside JAX's compilation cache if that is on, see
    [`measurements`][eqloop.measurements].

    Time is told from the compiled loops, of which none is run, for a step that cannot
    be run by itself, because it has effects or callbacks, is split over several
    devices, or has a `while` loop, which might not end with made-up inputs; where there
    is no room for it; and for a device that is not here, see
    [`planning_for`][eqloop.planning_for]. For loops of a millisecond, or somewhat
    longer ones if the step has hundreds of operations, it is estimated from these; so
    it is for a step that takes long to compile, of which mostly one program is compiled
    to plan it.

    On a GPU, the search includes what [`Fused`][eqloop.Fused] does: the loop as one
    kernel each way, if its step can be in one, and its numbers are all in registers.
    It is taken where it is faster. How fast it is, is measured as well, or told from
    how many operations a row has, from its registers, and from the bytes that are read
    and written.

    There can be a second place for carries: the memory of the host, or files. Then the
    search includes plans whose forward pass stores its carries there. Those that are
    stored while steps are run again stay on the device, or go there as well, as under
    [`Binomial`][eqloop.Binomial]. How long it takes to move a carry is measured, and
    decides; as with [`Offload`][eqloop.Offload], the time of a plan does not include
    it. On a CPU, device and host share one memory: each limit holds for its own place,
    and the plan's `peak_bytes` counts both. Files are written as with
    [`Spill`][eqloop.Spill]: in the backward pass, which runs the loop once more to
    write them. They have no names.

    With `policy="auto"` on the loop, the budget also chooses which values are kept of a
    step whose residuals are stored, among the values that have a
    [`name`][eqloop.name] and the results of dots.

    A budget can also be the `chunk_size` of [`ChunkedVmap`][eqloop.ChunkedVmap].

    Args:
        nbytes: How many bytes, as an int or a string such as `"512MiB"` or `"64 kB"`.
        host: How many bytes of carries may be stored in the memory of the host.
        disk: How many bytes of carries may be stored in files, instead.
        directory: Where the files go: an existing directory that can be written to.
        measure: Whether short loops are run. Without, plans are the same on every
            machine.

    Raises:
        TypeError: If an amount of memory is neither an int nor a string, `measure` is
            not a bool, or `directory` no path.
        ValueError: If it is not an amount of memory; if there are both `host` and
            `disk`, or only one of `disk` and `directory`. When the loop is
            differentiated, if no plan fits; the error says how much memory would be
            enough, and for which plan.
        OSError: If `directory` is no directory, or cannot be written to.

    Examples:
        >>> import jax.numpy as jnp
        >>> import eqloop as el
        >>> scan = el.Scan(
        ...     lambda h, x: (jnp.sin(h) + x, None), schedule=el.Budget("64KiB")
        ... )
        >>> plan = scan.plan(jnp.zeros(100), jnp.zeros((1000, 100)))
        >>> plan.peak_bytes <= 64 * 1024
        True

        Gigabytes on the device, and much more on its host:

        >>> el.Budget("4GiB", host="256GiB")
        Budget(nbytes='4GiB', host='256GiB')

    References:
        Equal parts of a loop, each reached from a carry in the second place, follow G.
        Aupy and J. Herrmann, *Periodicity in optimal hierarchical checkpointing schemes
        for adjoint computations*,
        [OMS 32(3), 2017](https://doi.org/10.1080/10556788.2016.1230612).
    """

    nbytes: int
    host: int | None = dataclasses.field(default=None, kw_only=True)
    disk: int | None = dataclasses.field(default=None, kw_only=True)
    directory: str | os.PathLike[str] | None = dataclasses.field(
        default=None, kw_only=True
    )
    measure: bool = dataclasses.field(default=True, kw_only=True)
    _second: SecondPlace | None = dataclasses.field(
        init=False, repr=False, compare=False
    )

    def __init__(
        self,
        nbytes: int | str,
        *,
        host: int | str | None = None,
        disk: int | str | None = None,
        directory: str | os.PathLike[str] | None = None,
        measure: bool = True,
    ) -> None:
        put = functools.partial(object.__setattr__, self)
        put("nbytes", parse_bytes("Budget", "nbytes", nbytes))
        put("host", None if host is None else parse_bytes("Budget", "host", host))
        put("disk", None if disk is None else parse_bytes("Budget", "disk", disk))
        put("directory", _directory_for(self.disk, directory))
        if not isinstance(measure, bool):
            raise TypeError(
                f"Budget: `measure` must be True or False, not {measure!r} of type "
                f"{type(measure).__name__}."
            )
        put("measure", measure)
        put("_second", _second_place(self))

    @property
    def budgeted_bytes(self) -> int:
        """The budget: `nbytes`."""
        return self.nbytes

    @property
    def measures_steps(self) -> bool:
        """Whether it measures: its setting."""
        return self.measure

    @property
    def can_choose_policy(self) -> bool:
        """Whether it can choose the policy of a loop, which a budget always can."""
        return True

    def __repr__(self) -> str:
        sizes = dict(nbytes=self.nbytes, host=self.host, disk=self.disk)
        settings = {k: None if v is None else exact_bytes(v) for k, v in sizes.items()}
        settings |= dict(directory=self.directory)
        settings |= {} if self.measure else dict(measure=False)
        given = (f"{k}={v!r}" for k, v in settings.items() if v is not None)
        return f"Budget({', '.join(given)})"

    def layout(self, loop: LoopSpec) -> Layout:
        """The fastest layout that fits."""
        return self._layout(loop, refuses=True)

    def _layout(self, loop: LoopSpec, refuses: bool) -> Layout:
        """The fastest layout that fits; if none does, an error, or the smallest."""
        problem, active = loop._problem, loop._active
        _refuse_symbolic_sizes(loop)
        # Steps that say the same share what was measured, except if the policy is to be
        # chosen: the names of dots have lines of this very step in them.
        problem = problem if problem.chooses_policy else alike(problem)
        if list_bytes(problem, active) > self.nbytes:
            # There is no room for a list of rows, so slots hold the buffers.
            problem = dataclasses.replace(problem, carries=0)
        how = "short loops of the step and the programs of a few plans"
        with says_if_long(repr(self), f"a loop of {problem.loop.length} steps", how):
            every = kernels(problem, active, self.measure, self.nbytes)
            kernel = next((one for one, _ in every), None) if refuses else None
            if kernel and kernel.beats_all:
                return kernel.layout
            times = paces(problem, active, self.measure)
            found, times = best(problem, active, self.nbytes, times, self._second)
            if kernel and not (found and times.duration(found) <= kernel.duration):
                return kernel.layout
            found = found or self._layout_for_all(problem, active)
            if found is None and refuses:
                self._refuse(problem, active, times, loop._problem.step)
            return found or smallest(problem, active, times)

    def _layout_for_all(self, problem: Problem, active: Active) -> Layout | None:
        """The layout for a gradient with respect to all inputs, if that fits as well.

        A search compiles only some of the layouts, and others if other inputs are
        differentiated. What `plan` shows for all of them should do for a few.
        """
        known = dataclasses.replace(problem, undifferentiated=())
        of_all = known, all_active(problem.step)
        times = paces(*of_all, self.measure)
        # Before anything is tried, a layout may seem to be the smallest that is not, by
        # up to a fifth of a few kilobytes.
        if device_bytes(*of_all, smallest(*of_all, times)) > 1.5 * self.nbytes:
            return None
        found, _ = best(*of_all, self.nbytes, times)
        fits = found and peak_bytes(problem, active, found) <= self.nbytes
        return found if fits else None

    def _refuse(
        self, problem: Problem, active: Active, times: Paces, step: Step
    ) -> NoReturn:
        """Raises an error that says which budget would be enough, for which plan.

        The step is that of the loop itself, with its own lines.
        """
        needed = self
        while True:
            smaller = smallest(problem, active, times)
            size = device_bytes(problem, active, smaller)
            if size <= needed.nbytes:
                break
            needed = dataclasses.replace(self, nbytes=size)
            # The loops in the step have a share of what this one has, and may use it.
            if (shared := _shared(problem, needed)) is problem:
                break
            far, problem = times.far, shared
            times = dataclasses.replace(paces(problem, active, self.measure), far=far)
        size = needed.nbytes
        least = plan_of(needed, problem, active, smaller, times)
        own = dataclasses.replace(problem, step=step)
        said = largest_in_gradient(own, active, smaller)
        largest = f"\n\n{said}" if said else ""
        raise ValueError(
            f"Budget: the gradient of this loop does not fit into "
            f"{format_limit(self.nbytes)}. It needs at least "
            f"{format_bytes(size)}, which is {size} bytes, with this plan:\n\n{least}"
            f"{largest}"
        )


@final
@dataclasses.dataclass(frozen=True)
class InnerBudget(AbstractSchedule):
    """The budget of a loop within the step of another one, which has a budget itself.

    Everything is stored if that takes no more, and nothing is tried to find that out:
    it is there for one step of the loop around it at a time, and is computed again with
    that step. Nothing is refused here, as the loop around it is planned with it.

    Attributes:
        whole: The budget of the outermost loop.
        depth: How many loops are around this one, each of which halves its share.
    """

    whole: Budget
    depth: int = 1

    @property
    def budgeted_bytes(self) -> int:
        """Its share."""
        return max(self.whole.nbytes >> self.depth, 1)

    def layout(self, loop: LoopSpec) -> Layout:
        """Everything is stored if it fits; otherwise what the budget finds."""
        everything = StoreAll().layout(loop)
        cost = step_cost(loop._problem, loop._active)
        takes = counted_bytes(everything, cost) + working_set(cost)
        if takes <= self.budgeted_bytes:
            return everything
        share = dataclasses.replace(self.whole, nbytes=self.budgeted_bytes)
        return share._layout(loop, refuses=False)


def _shared(problem: Problem, whole: Budget) -> Problem:
    """A loop with another budget for the loops in its step to share."""

    def change(eqn: jex.JaxprEqn) -> jex.JaxprEqn:
        formula = formula_of(eqn)
        if not isinstance(formula, PlannedLoop):
            return eqn
        inner = formula.problem.planner
        if not isinstance(inner, InnerBudget):
            return eqn
        planner = dataclasses.replace(inner, whole=whole)
        changed = dataclasses.replace(formula.problem, planner=planner)
        return with_formula(eqn, formula.with_params(problem=changed))

    step = problem.step.rewritten(lambda program: map_equations(program, change))
    return problem if step is problem.step else dataclasses.replace(problem, step=step)


def refuse_second_place(owner: str, budget: Budget) -> None:
    """Checks that a budget has no second place, which is for carries alone."""
    if budget._second is not None:
        raise ValueError(
            f"{owner}: the budget of a map is for memory in one place, and {budget!r} "
            f"has a second one, for the carries of a loop. Leave `host`, `disk` and "
            f"`directory` out here, and pass them to the schedule of a loop within."
        )


def is_budget(setting: object) -> TypeGuard[Budget]:
    """Whether a setting, such as a `chunk_size`, is a budget and not a number."""
    return isinstance(setting, Budget)


def _directory_for(disk: int | None, directory: object) -> str | None:
    """The directory for the files of a budget, if it has any."""
    if (disk is None) != (directory is None):
        raise ValueError(
            "Budget: `disk` and `directory` belong together: how much may be stored in "
            "files, and where they are. Pass both, such as `disk='200GiB', "
            "directory='/scratch'`, or neither."
        )
    return None if directory is None else writable_directory("Budget", directory)


def _second_place(budget: Budget) -> SecondPlace | None:
    """The second place where carries may be stored, if there is one."""
    if budget.host is not None and budget.disk is not None:
        raise ValueError(
            "Budget: carries are stored on the device and in one other place. Pass "
            "`host` or `disk`, and not both."
        )
    if budget.host is not None:
        return SecondPlace(HostSlots(), budget.host)
    if budget.disk is None:
        return None
    directory = str(budget.directory)
    slots = FileSlots(directory, SpillFiles(directory, "Budget"))
    return SecondPlace(slots, budget.disk)


def _refuse_symbolic_sizes(loop: LoopSpec) -> None:
    """Checks that no size in a loop is symbolic, so that its bytes are known."""
    jaxpr = loop._problem.step.jaxpr
    types = [*jaxpr.in_avals, *jaxpr.out_avals]
    instead = "Use a schedule that does not ask for bytes, such as Recursive"
    about = "the size of an array in the step", instead
    refuse_symbolic("Budget", loop.length, *about)
    refuse_symbolic_sizes("Budget", types, *about)
