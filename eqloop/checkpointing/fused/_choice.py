"""The kernels among which a budget chooses: how long they take, and what they need."""

import dataclasses
import math
from collections.abc import Iterator

import jax

from ..._arrays import nbytes
from ..._compat import HAS_MOSAIC_GPU
from ..._device import planning_device
from ..._programs import Registers, warn_once
from ..engine._forward import Active
from ..engine._layout import Layout
from ..engine._problem import Counted, Problem
from ..engine._transformed import again, gradient_back, settled_problem
from ..engine.orders._levels import nests
from ..engine.orders._nested import Nested
from ..planning._cost import outputs_wanted, step_cost
from ..planning._gradient_program import Fixed, input_types
from ..planning._memory import peak_bytes, registers_of_kernel
from ..planning._trials import StepsAlone, trials
from ..planning._work import rates
from ..whiles._ending import Ending
from ._backward import Backward
from ._classes import NotInKernelError
from ._forward import Forward
from ._more_rows import backward_kernel, forward_kernel, way_back
from ._nests import nests_to_try, usual_nests
from ._pallas import has_tensor_cores
from ._row_programs import Settings
from ._runner import MOST_OF_A_STEP, FusedRunner

# A kernel is written out, so how long it takes to compile grows with the operations of
# a row, there and back (`Forward.work`, `Backward.work`). Seconds of a processor, for
# an H100 by Triton, JAX 0.12:
#
#     Lorenz by Runge and Kutta     282   0.4
#     pendulum, policy of 16      1,012   1.5
#     300 sums and products       1,799   1.0
#     RNN of 16, in tiles         1,856   3.4
#     GRU of 8, 4 inputs          3,000   5.1
#     pendulum, policy of 64      3,556    11
#     GRU of 8, 32 inputs         5,688    10
#     1,000 sums and products     5,999     7
#     GRU of 192, 32 inputs     545,472   > 20 minutes
#
# So what has more than this mostly takes more than 5 s. A search compiles as much twice
# at the most, and no more than three kernels.
_MOST_OPERATIONS = 2300
_MOST_TRIALS = 3
# A kernel is run for so many steps to see how long it takes.
_STEPS_TO_RUN = 256
# With so many registers, a thread has all that it can have: 255 but for a few.
_ALL_REGISTERS = 248
# What XLA starts besides: sums over blocks, and transposed arrays.
_OTHER_KERNELS = 10


def _of_numbers() -> Settings:
    """A search is among kernels of numbers: none by panels has run on a GPU yet."""
    return Settings(panels=False)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A loop as one kernel each way.

    Attributes:
        layout: Its layout.
        duration: How long a gradient takes, in nanoseconds; `nan` if nobody knows.
        registers: What a thread takes, if that is known.
        why_loop_back: Why the way back is a loop, if it is.
    """

    layout: Layout
    duration: float
    registers: Registers | None = None
    why_loop_back: str = ""

    @property
    def beats_all(self) -> bool:
        """Whether a loop of JAX takes longer to start two kernels for each step."""
        return self.duration < 2 * self.layout.order.length * rates().equation

    @property
    def spilled(self) -> int:
        """The bytes of numbers of a thread that are not in registers."""
        if self.registers is None or self.registers.number < _ALL_REGISTERS:
            return 0
        return self.registers.stack

    def described(self, kernel: str) -> str:
        """A line of a plan, with a warning if registers do not hold all numbers."""
        if self.why_loop_back:
            return f"{kernel}; its way back is a loop, as {self.why_loop_back}"
        if self.registers is None:
            return kernel
        said = f"{self.registers.number} registers a thread"
        if self.spilled:
            said += f", and {self.spilled} B that do not fit into them"
            warn_once(
                f"Fused: a kernel has too many numbers: {kernel}; {said}. They are in "
                f"memory, which makes it slow. On the way back a thread holds the "
                f"carry of its row and the cotangent of that, sums for the cotangents "
                f"of what rows share, and what a step computes from these. Carry fewer "
                f"numbers, or use another schedule, such as `el.Budget`, which takes "
                f"a kernel only if they fit."
            )
        return f"{kernel}; {said}"


def why_no_kernel(problem: Problem, active: Active) -> str | None:
    """Why a search has not looked at kernels, if it could have made one."""
    if (work := _work(problem, active)) <= _MOST_OPERATIONS:
        return None
    said = f"none: a row has {work:.0f} operations or more, there and back"
    if work > 3 * MOST_OF_A_STEP:
        may_be = "; by `Fused()` it may be in several threads, which nobody has timed"
        return f"{said}, too many to compile{may_be * has_tensor_cores()}"
    by_fused = f"by `Fused()` it takes {work / 1000:.0f} s at the least to compile"
    return f"{said}, and is left to XLA; {by_fused}"


def kernels(
    problem: Problem, active: Active, measure: bool, limit: int = 2**63
) -> Iterator[tuple[Kernel, int]]:
    """Kernels that fit into `limit` bytes, each with those it takes, the fastest first.

    The program of one is compiled, and the bytes of the others are told from it.
    """
    if not 0 < (work := _work(problem, active)) <= _MOST_OPERATIONS:
        return
    tries = min(_MOST_TRIALS, int(2 * _MOST_OPERATIONS / work))
    like, more = None, 0
    for layout in _layouts(problem):
        size = _counted(problem, layout) + more
        if size > limit:
            continue
        if like is None:
            if not tries:
                return
            tries, taken = tries - 1, peak_bytes(problem, active, layout)
            more, size = more + taken - size, taken
            if size > limit:
                continue
        found = _kernel(problem, active, layout, measure, like)
        if found.spilled:
            return
        like = like or found
        yield found, size


def kernel_of(
    problem: Problem, active: Active, layout: Layout, measure: bool
) -> Kernel | None:
    """What a loop takes that is one kernel each way, if it is one here."""
    assert isinstance(layout.runner, FusedRunner)
    if planning_device().platform == "gpu":
        there, back = _kernels(problem, active, layout.runner.settings)
        if not isinstance(there.panels, str):
            why = back.panels if isinstance(back.panels, str) else ""
            seen = _seen(problem, active, layout, measure)
            return Kernel(layout, seen or math.nan, why_loop_back=why)
    is_one = _work(problem, active) > 0
    return _kernel(problem, active, layout, measure) if is_one else None


def _kernel(
    problem: Problem,
    active: Active,
    layout: Layout,
    measure: bool,
    like: Kernel | None = None,
) -> Kernel:
    """A kernel, whose registers are those of one that is `like` it, if that is known.

    Its time is measured, where that can be; otherwise it is told by a roofline.
    """
    known = like.registers if like else registers_of_kernel(problem, active, layout)
    seen = _seen(problem, active, layout, measure)
    return Kernel(layout, seen or _told(problem, active, layout, known), known)


def on_a_gpu(problem: Problem, active: Active) -> str:
    """What becomes of a loop on a GPU, if it is to be a kernel there."""
    nests = usual_nests(problem.loop.length)
    every = [Settings(interpret=True, panels=p) for p in (HAS_MOSAIC_GPU, False)]
    on_hopper, runner = (FusedRunner(settings).storing(nests) for settings in every)
    layout = Layout(Nested(nests), runner=runner)
    run = dataclasses.replace(problem.as_run, planner=Fixed(layout))
    try:
        if on_hopper.by_panels(run.row_step, run.loop):
            said = on_hopper.described(run.row_step, run.loop, layout)
            return f"{said}; that is on Hopper"
        # Those of all GPUs have the same operations, which are found by tracing one.
        if runner.why_not(run.row_step, run.loop) is None:
            _kernels(problem, active)
            types = input_types(problem)
            jax.eval_shape(lambda *inputs: run.by_runner(None, inputs), *types)
        return runner.described(run.row_step, run.loop, layout)
    except (TypeError, ValueError) as error:
        return f"an error. {error}"


def _layouts(problem: Problem) -> list[Layout]:
    """From the most memory to the least, which is from the fastest to the slowest."""
    every = dict.fromkeys(map(tuple, nests_to_try(problem.loop.length)))
    runners = (FusedRunner(_of_numbers(), one) for one in every)
    return [Layout(Nested(one.nests), runner=one) for one in runners]


def _counted(problem: Problem, layout: Layout) -> int:
    """The bytes of the carries that are stored."""
    return layout.order.slots * nbytes(problem.step.carry_types)


def _work(problem: Problem, active: Active) -> float:
    """How many operations a row has, there and back; 0 if it cannot be in a kernel.

    Of a step that has too many itself, the way back is not looked at.
    """
    is_gpu = planning_device().platform == "gpu"
    is_counted = isinstance(problem, Counted) and problem.loop.length > 0
    # A kernel calls nobody, and talks to no other device.
    if not is_gpu or not is_counted or problem.step.jaxpr.effects:
        return 0.0
    try:
        runner, run = FusedRunner(_of_numbers()), problem.as_run
        if runner.why_not(run.row_step, run.loop) is not None:
            return 0.0
        there = _there(problem, active)
        if there.work > _MOST_OPERATIONS:
            return there.work
        # A step that only moves numbers has a size as well.
        return max(there.work + _kernels(problem, active)[1].work, 1.0)
    except NotInKernelError:
        return 0.0


def _seen(
    problem: Problem, active: Active, layout: Layout, measure: bool
) -> float | None:
    """The time of a loop, from that of a few of its steps."""
    # On made-up numbers, who knows when a loop stops?
    if not (measure and planning_device().is_here) or problem.as_run.loop.stops:
        return None
    length = problem.loop.length
    count = min(length, _STEPS_TO_RUN)
    levels = nests(count, max(math.isqrt(count), 2))
    assert layout.runner is not None
    short = Layout(Nested(levels), runner=layout.runner.storing(levels))
    found = trials(problem, active, [StepsAlone(count), short], measure)
    if found is None or not found[1].was_run:
        return None
    return found[1].nanoseconds * length / count


def _told(
    problem: Problem, active: Active, layout: Layout, registers: Registers | None
) -> float:
    there, back = _kernels(problem, active)
    length, order, rate = problem.loop.length, layout.slot_order, rates()
    work = (length + order.advances) * there.work + length * back.work
    count = () if registers is None else (registers.number,)
    computes = there.programs.nanoseconds(work, *count)
    cost = step_cost(problem, active)
    moved = length * (2 * cost.x + cost.ct_x + 2 * cost.ct_y)
    moved += order.advances * cost.x + 2 * order.primal_slots * cost.carry
    # Each carry of a segment is left in a scratch, and is read from there.
    within = order.slots - order.primal_slots
    near = rate.cached_byte if within * cost.carry <= rate.cache else rate.byte
    again = 2 * bool(within) * length * cost.carry * near
    return max(computes, moved * rate.byte + again) + _OTHER_KERNELS * rate.equation


def _there(problem: Problem, active: Active) -> Forward:
    """The kernel that runs steps."""
    run = settled_problem(problem.as_run, active, reverse=True)
    return forward_kernel(run.row_step, run.loop, _of_numbers())


def _kernels(
    problem: Problem, active: Active, settings: Settings | None = None
) -> tuple[Forward, Backward]:
    """The kernels, which run steps, and take them back."""
    run = settled_problem(problem.as_run, active, reverse=True)
    own = run.step.carry_types[run.count_at] if isinstance(run, Ending) else None
    back = gradient_back(problem.as_run, active, outputs_wanted(problem))
    way = way_back(again(run), back, own)
    settings = settings or _of_numbers()
    there = forward_kernel(run.row_step, run.loop, settings)
    return there, backward_kernel(way, run.loop_back, settings)
