"""Writes planned loops in the places of JAX's own, at any depth of a program."""

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Self, TypeAlias

import jax
import jax.core
import jax.extend.core as jex

from .._arrays import is_inexact, is_symbolic, lowered_types, own_shape, split
from .._calls import format_bytes
from .._compat import close, form_of, scan_counts
from .._programs import (
    Formula,
    Place,
    Rewriter,
    alone,
    aval_of,
    batched,
    equations,
    foreign_programs,
    formula_of,
    has_io,
    is_ordered,
    map_programs,
    place_of,
    rewritable_programs,
    run,
)
from .._types import AnyJaxpr, Aval, BatchAxis, PyTree, Value
from ..checkpointing import (
    UNLIMITED,
    AbstractSchedule,
    AsScan,
    Fitted,
    ForwardOnly,
    InnerBudget,
    JaxLoop,
    LoopPolicy,
    Online,
    RuleLoop,
    StoreAll,
    gradient_loops,
    is_budget,
    usually_stored,
)
from ..progress import Again, BarChange, ProgressBar
from ._foreign_loop import ForeignLoop, foreign_loop
from ._in_place import in_place_of, scan_in_place, while_in_place

# How much more memory may a loop take if the loops in it are left to JAX, which spares
# their steps an evaluation?
_MORE_MEMORY = 2

_LOOPS = ("scan", "while")


@dataclasses.dataclass(frozen=True)
class Note:
    """What has become of a loop.

    Attributes:
        why: Why it is left to JAX; empty if it is not.
        has_bar: Whether it has a progress bar all the same.
        is_back: Whether it is the way back of a gradient that the function takes.
        rule: Where the function is called that it is in and that has derivative rules.
    """

    loop: ForeignLoop
    why: str = ""
    has_bar: bool = False
    is_back: bool = False
    rule: Place | None = None


@dataclasses.dataclass(frozen=True)
class Around:
    """Where in the whole a program is.

    Attributes:
        depth: How many loops it is inside of.
        place: The line of the innermost call around it.
        schedule: The schedule of the scans in it.
        why: Why these are left to JAX; empty if they are not.
        is_taken: Whether a loop around it is one of this library by now.
    """

    depth: int
    place: Place | None
    schedule: AbstractSchedule | None
    why: str = ""
    is_taken: bool = False


Rewritten: TypeAlias = tuple[jex.ClosedJaxpr, list[Note]]


@dataclasses.dataclass(frozen=True)
class Rewriting:
    """Rewrites the programs of one function.

    Attributes:
        schedule: How scans are run; `None` to leave them to JAX.
        policy: Which residuals of their steps may be stored.
        whiles: How while loops are run; `None` to leave them without reverse mode.
        progress: The bar of the outermost loops, or of those that are picked.
        only: Picks loops; `None` for all.
        leaves_gradients: Whether to leave those to JAX that are part of a gradient.
        outer_whiles: How while loops are run that are in no other loop, if `whiles`
            does not say it.
    """

    schedule: AbstractSchedule | None
    policy: LoopPolicy
    whiles: Online | AsScan | None
    progress: ProgressBar | None
    only: Callable[[ForeignLoop], bool] | None
    leaves_gradients: bool = False
    outer_whiles: Online | AsScan | None = None
    # Those that are part of a gradient, by the identity of their equations.
    _of_gradients: dict[int, JaxLoop | RuleLoop] = dataclasses.field(
        default_factory=dict, init=False
    )
    # What a transposition has moved to the front, by the identity of its result: of
    # what, and from which axis. On a CPU it is a copy, which no loop needs.
    _moved: dict[int, tuple[jax.core.Atom, int]] = dataclasses.field(
        default_factory=dict, init=False
    )
    # By identity. Each program is kept, so that no other object gets its id.
    _done: dict[tuple[int, Around], tuple[jex.ClosedJaxpr, Rewritten]] = (
        dataclasses.field(default_factory=dict, init=False)
    )

    def __call__(self, program: jex.ClosedJaxpr) -> Rewritten:
        """The program with other loops, and what has become of each of them."""
        self._of_gradients.update(gradient_loops(program))
        return self._of(program, Around(0, None, self.schedule))

    def _of(self, program: jex.ClosedJaxpr, around: Around) -> Rewritten:
        if (key := (id(program), around)) not in self._done:
            self._done[key] = program, self._level(program, around)
        return self._done[key][1]

    def _level(self, program: jex.ClosedJaxpr, around: Around) -> Rewritten:
        rewriter, notes = Rewriter(program), list[Note]()
        for eqn in program.jaxpr.eqns:
            axis, *others = eqn.params.get("permutation", [0])
            if others and others == sorted(others):
                self._moved[id(eqn.outvars[0])] = eqn.invars[0], axis
            new, found = self._replaced(eqn, around)
            if isinstance(new, jex.JaxprEqn):
                rewriter.eqns.append(rewriter.enter(new))
            else:
                operands = [rewriter.read(x) for x, _ in self._read(eqn)]
                rewriter.inline(new, operands, eqn.outvars)
            notes += found
        return rewriter.result(), notes

    def _read(self, eqn: jex.JaxprEqn) -> list[tuple[jax.core.Atom, int]]:
        """What is read in the place of an equation, and along which axes."""
        # A scan reads `xs` as they were before they were transposed.
        at = sum(scan_counts(eqn.params)) if form_of(eqn) == "scan" else len(eqn.invars)
        xs = [self._moved.get(id(x), (x, 0)) for x in eqn.invars[at:]]
        return [*((x, 0) for x in eqn.invars[:at]), *xs]

    def _replaced(
        self, eqn: jex.JaxprEqn, around: Around
    ) -> tuple[jex.ClosedJaxpr | jex.JaxprEqn, list[Note]]:
        """What is run in the place of an equation: another one, or a program."""
        here = place_of(eqn.source_info) or around.place
        there = dataclasses.replace(around, place=here)
        match form_of(eqn):
            case "scan":
                return self._scan(eqn, around)
            case "while":
                return self._while(eqn, around)
            case "debug_callback" | "debug_print" if around.is_taken:
                told = ToldOnce(alone(eqn))
                return jax.make_jaxpr(told)(*told.in_avals), []
            case "closed_call":
                # JAX 0.10 does not compile our primitives in them.
                program = close(eqn.params["call_jaxpr"])
                return self._of(program, there)
            case "shard_map" if any(_loops_in(eqn)):
                return self._shard_map(eqn, there)
            case "custom_jvp_call":
                new, notes = self._with_inner(eqn, there)
                return new, [Note(n.loop, n.why or _RULE, rule=here) for n in notes]
            case form if form.startswith("custom_vjp") or not rewritable_programs(eqn):
                why = f"it belongs to a `{form}`, which JAX differentiates as a whole"
                loops = (foreign_loop(e, around.depth, here) for e in _loops_in(eqn))
                return eqn, [Note(loop, why, rule=here) for loop in loops]
        # The programs of an equation of ours are those that a loop or a map repeats.
        depth = around.depth + (formula_of(eqn) is not None)
        return self._with_inner(eqn, dataclasses.replace(there, depth=depth))

    def _with_inner(
        self, eqn: jex.JaxprEqn, around: Around
    ) -> tuple[jex.JaxprEqn, list[Note]]:
        """An equation with its programs rewritten."""
        notes = list[Note]()

        def inner(program: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
            new, found = self._of(program, around)
            notes.extend(found)
            return new

        return map_programs(eqn, inner), notes

    def _scan(
        self, eqn: jex.JaxprEqn, around: Around
    ) -> tuple[jex.ClosedJaxpr | jex.JaxprEqn, list[Note]]:
        loop = foreign_loop(eqn, around.depth, around.place)
        inside = dataclasses.replace(around, depth=around.depth + 1, place=loop.place)
        gradient = self._of_gradients.get(id(eqn))
        is_back = gradient is not None and gradient.eqn is not eqn
        is_back = is_back or loop.is_of_gradient
        why = self._why_left(eqn, loop) or around.why
        if self.leaves_gradients and (gradient is not None or is_back):
            why = why or _as_before(gradient, is_back)
        bar = self._bar_of(loop)
        if not why and around.schedule is None and self.policy is None and bar is None:
            why = "there is no `schedule` for it"
        if why:
            new, notes = self._with_inner(eqn, inside)
            return new, [Note(loop, why), *notes]
        schedule = around.schedule or StoreAll()
        inside = dataclasses.replace(inside, is_taken=True)
        program, notes = self._best_inside(eqn, schedule, inside)
        atoms = (x for x, _ in self._read(eqn))
        read, axes = eqn.replace(invars=[*atoms]), [axis for _, axis in self._read(eqn)]
        new = scan_in_place(read, axes, loop, program, schedule, self.policy, bar)
        return new, [Note(loop, is_back=is_back), *notes]

    def _best_inside(
        self, eqn: jex.JaxprEqn, schedule: AbstractSchedule, inside: Around
    ) -> Rewritten:
        """The step of a scan that is taken, and what becomes of the loops in it."""
        # They are run by the same schedule, if that saves half of the memory that the
        # scan takes, as it is estimated; a budget is shared with them. Otherwise they
        # are left to JAX: what they store is there for one step of the scan at a time,
        # and is computed again with it.
        program = eqn.params["jaxpr"]
        inner: InnerBudget | None = None
        if isinstance(schedule, InnerBudget):
            inner = dataclasses.replace(schedule, depth=schedule.depth + 1)
        elif is_budget(schedule):
            inner = InnerBudget(schedule)
        inside = dataclasses.replace(inside, schedule=inner or inside.schedule)
        new, notes = self._of(program, inside)
        may_leave = self.only is None and inner is None
        some_taken = inside.schedule is not None and not all(n.why for n in notes)
        if may_leave and some_taken and _is_best_left(eqn, schedule):
            left = dataclasses.replace(inside, why=_COMPUTED_AGAIN)
            new, notes = self._of(program, left)
        return new, notes

    def _while(
        self, eqn: jex.JaxprEqn, around: Around
    ) -> tuple[jex.ClosedJaxpr | jex.JaxprEqn, list[Note]]:
        loop = foreign_loop(eqn, around.depth, around.place)
        inside = dataclasses.replace(around, depth=around.depth + 1, place=loop.place)
        if why := self._why_left(eqn, loop):
            new, notes = self._with_inner(eqn, inside)
            return new, [Note(loop, why), *notes]
        whiles = self.whiles or (None if loop.depth else self.outer_whiles)
        if whiles is None:
            planner, why = ForwardOnly(name=f"The {loop}", advice=_ADVICE), _NO_WHILES
        else:
            planner, why = whiles, ""
        inside = dataclasses.replace(inside, is_taken=True)
        (cond, _), (body, notes) = (
            self._of(eqn.params[name], inside) for name in ("cond_jaxpr", "body_jaxpr")
        )
        bar = self._bar_of(loop)
        new = while_in_place(eqn, loop, cond, body, planner, bar)
        return new, [Note(loop, why, bar is not None), *notes]

    def _shard_map(
        self, eqn: jex.JaxprEqn, around: Around
    ) -> tuple[jex.ClosedJaxpr, list[Note]]:
        """Traces a `jax.shard_map` anew: its axes have their names in it alone."""
        params, notes = eqn.params, list[Note]()

        def mapped(*args: Value) -> tuple[Value, ...]:
            new, found = self._of(close(params["jaxpr"]), around)
            notes.extend(found)
            return tuple(run(new, *args))

        again = jax.shard_map(
            mapped,
            mesh=params["mesh"],
            in_specs=tuple(params["in_specs"]),
            out_specs=tuple(params["out_specs"]),
            axis_names=set(params["newly_manual_axes"]),
            check_vma=params["check_vma"],
        )
        return in_place_of(eqn, again), notes

    def _bar_of(self, loop: ForeignLoop) -> ProgressBar | None:
        """The bar of a loop that is taken, if it has one."""
        return self.progress if self.only is not None or loop.depth == 0 else None

    def _why_left(self, eqn: jex.JaxprEqn, loop: ForeignLoop) -> str:
        """Why a loop cannot be taken, or is not to be; empty if it is."""
        if has_io(eqn.effects) or is_ordered(eqn.effects):
            return "it has effects that must not be repeated, or not in another order"
        if self.only is None:
            return ""
        is_picked = self.only(loop)
        if not isinstance(is_picked, bool):
            raise TypeError(
                f"Reschedule: `only` must return True or False, but of {loop} it "
                f"returned {is_picked!r}."
            )
        return "" if is_picked else "`only` does not pick it"


def with_open_loops(program: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """A program each of whose loops is one that a `Fit` decides for."""
    whiles = Online(UNLIMITED, 64, is_open=True)
    new, _ = Rewriting(Fitted(), None, whiles, None, None)(program)
    return new


def _as_before(gradient: JaxLoop | RuleLoop | None, is_back: bool) -> str:
    """Why a loop is left to JAX that is part of a gradient."""
    if gradient is None or is_back:
        return "it is the way back of a gradient that the function takes itself"
    return (
        f"it stores {format_bytes(gradient.stored_bytes)} for a gradient that the "
        f"function takes itself, as before, unless that is differentiated again: "
        f"reschedule the function inside, `jax.grad(el.Reschedule(f, …))`"
    )


_RULE = "in a gradient, the rule of the `custom_jvp` around it runs in its place"


def _is_best_left(eqn: jex.JaxprEqn, schedule: AbstractSchedule) -> bool:
    """Whether a scan takes little more memory if those in its step are left to JAX."""
    try:
        left, taken = (bytes_stored(eqn, schedule, x) for x in (StoreAll(), schedule))
    except Exception:
        # The schedule is not for any loop of any length, and so not for those.
        return True
    return left <= _MORE_MEMORY * taken


_COMPUTED_AGAIN = "what it stores is computed again with the step of the loop around it"
_NO_WHILES = "it is a while loop, and there are no `whiles`"
_ADVICE = (
    "Tell `Reschedule` how many carries to store of loops of this kind, as in "
    "`whiles=64`"
)


def _loops_in(eqn: jex.JaxprEqn) -> Iterator[jex.JaxprEqn]:
    """The loops of JAX in the programs of an equation of JAX's, however deep."""
    for program in foreign_programs(eqn):
        yield from (e for e in equations(program) if form_of(e) in _LOOPS)


# What a step tells the host (`jax.debug`), once for each of the user's steps: a planned
# loop runs steps again.


class ToldOnce(Formula):
    """A callback without results, which is left out where its step is run again."""

    program: jex.ClosedJaxpr
    is_again: bool

    def __init__(self, program: jex.ClosedJaxpr, is_again: bool = False):
        self.in_avals, self.out_aval = tuple(program.in_avals), ()
        self.params = dict(program=program, is_again=is_again)
        self.effects = frozenset([] if is_again else program.effects)
        super().__init__()

    def expand(self, *inputs: Value) -> tuple[()]:
        if not self.is_again:
            run(self.program, *inputs)
        return ()

    def pull(self, perturbed: PyTree, inputs: PyTree, cts: PyTree) -> PyTree:
        return self.zero_cts()

    def reached_out(self, marks: Sequence[bool], axis_name: Hashable) -> list[bool]:
        return []

    def batched(
        self, axis_data: BatchAxis, args: PyTree, dims: PyTree
    ) -> tuple[Formula, PyTree, list[int | None]]:
        program = batched(self.program, axis_data, tuple(dims), ())
        return ToldOnce(program, self.is_again), args, []

    def with_bars(self, change: BarChange) -> Self:
        again = isinstance(change, Again)
        return self.with_params(is_again=True) if again else self


# What a scan stores, with loops in its step or without, from its program alone. A plan
# is exact, and takes a gradient of the step. To make two of them for each loop that has
# others in it would take longer than to trace all that JAX does.

# About so much of what a step computes is stored for its derivative.
_RESIDUALS = 0.5


def bytes_stored(
    eqn: jex.JaxprEqn, schedule: AbstractSchedule, inner: AbstractSchedule
) -> float:
    """The bytes that a gradient of a scan stores at once, about."""
    _, carry, _ = split(eqn.invars, *scan_counts(eqn.params))
    slots, block = usually_stored(schedule, eqn.params["length"])
    step = _residuals(eqn.params["jaxpr"], inner)
    return slots * _nbytes(map(aval_of, carry)) + block * step


def _residuals(program: AnyJaxpr, schedule: AbstractSchedule) -> float:
    """The bytes that one run of a program stores for its derivative."""
    total = 0.0
    for eqn in program.eqns:
        if eqn.primitive.name == "scan":
            total += bytes_stored(eqn, schedule, schedule)
        elif programs := foreign_programs(eqn):
            total += sum(_residuals(program, schedule) for program in programs)
        else:
            total += _RESIDUALS * _nbytes(filter(is_inexact, map(aval_of, eqn.outvars)))
    return total


def _nbytes(types: Iterable[Aval]) -> int:
    """The bytes of arrays of these types; for each place along symbolic axes."""
    arrays = [lo for aval in types for lo in lowered_types(aval)]
    known = lambda x: (size for size in own_shape(x) if not is_symbolic(size))
    return sum(math.prod(known(x)) * x.dtype.itemsize for x in arrays)
