"""The ways to run a part of a function, and what each of them takes."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from .._arrays import Flags, is_inexact, nbytes, pick, put
from .._device import remembered_per_device
from .._programs import aval_of, axes_named, digest_of, formula_of, has_io, run
from .._types import Aval, PyTree, Value
from ..checkpointing import (
    LoopOption,
    LoopSchedule,
    options_of,
    work_of,
)
from ._again import Roles, again, twice
from ._choice import Option
from ._parts import OpenLoop, Part, with_schedules
from ._written import flattened, most_written, written

# The operations whose results are worth keeping before all others.
_PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")


def keeps_products(prim: Any, *avals: Aval, **params: object) -> bool:
    """A policy that keeps named values, and the results of products."""
    return prim.name in (*_PRODUCTS, "name") and not _are_complex(avals)


def keeps_names(prim: Any, *avals: Aval, **params: object) -> bool:
    """A policy that keeps named values alone."""
    return prim.name == "name" and not _are_complex(avals)


def _are_complex(avals: Sequence[Aval]) -> bool:
    """Whether some values are complex numbers, which no policy can keep (JAX 0.10)."""
    return any(jnp.issubdtype(aval.dtype, jnp.complexfloating) for aval in avals)


@dataclasses.dataclass(frozen=True)
class Way:
    """One of the ways to run a part.

    Attributes:
        stores: What it stores, in a few words.
        schedules: The schedules of the loops in it that are left open.
        is_again: Whether all of it is run again on the way back, but for what the
            policy keeps.
        rows: How many of its rows are run at a time, there and back.
        is_twice: Whether it is run once for its value, and again for its gradient.
    """

    stores: str
    schedules: tuple[LoopSchedule, ...] = ()
    is_again: bool = False
    policy: Callable[..., bool] | None = None
    rows: int | None = None
    is_twice: bool = False

    def fits(self, part: Part) -> bool:
        """Whether it is a way to run such a part."""
        if self.schedules and len(self.schedules) != len(part.loops):
            return False
        by_rows = part.by_rows
        return self.rows is None or (by_rows is not None and self.rows < by_rows.length)

    def run(self, part: Part, inputs: Sequence[Value], roles: Roles) -> list[Value]:
        """Runs a part."""
        if self.schedules:
            part = with_schedules(part, self.schedules)
        if self.rows is not None and part.by_rows is not None:
            known = dict(zip(part.reads, inputs, strict=True))
            found = part.by_rows.run(self.rows, known)
            return [found[x] for x in part.gives]
        program = part.program
        if self.is_twice:
            return [*twice(program, roles)(*inputs)]
        of_arrays = functools.partial(run, program)
        if self.is_again:
            of_arrays = again(of_arrays, self.policy, roles)
        return [*of_arrays(*inputs)]


EVERYTHING, TWICE = Way("everything"), Way("nothing", is_twice=True)
# A part is run in so many chunks of rows, at the most, and each of them takes so long
# besides its share of the work.
_MOST_CHUNKS, _NANOSECONDS_OF_CHUNK = 256, 20_000
_STRAIGHT = (
    EVERYTHING,
    Way("products", is_again=True, policy=keeps_products),
    Way("named values", is_again=True, policy=keeps_names),
    Way("nothing", is_again=True),
)


def options_of_parts(
    parts: Sequence[Part], roles: Sequence[Roles], host: int = 0
) -> list[list[tuple[Way, Option]]]:
    """The ways to run each part, the fastest first, and what each of them takes.

    Args:
        parts: The parts.
        roles: What the inputs of each are.
        host: How many bytes a loop may store in the memory of the host.
    """
    pairs = list(zip(parts, roles, strict=True))
    loops = {
        id(part): options
        for part, role in pairs
        if part.loops and (options := _options_of_loops(part, role.moving, host))
    }
    # The times of loops are seen, and those of other parts estimated. So these are
    # taken to be off by as much as estimates of the loops were.
    time = lambda options: sum(option.nanoseconds for option in options)
    fastest = [one for options in loops.values() for one in min(options, key=time)]
    estimated = sum(option.estimated for option in fastest)
    seen = sum(option.nanoseconds for option in fastest)
    factor = seen / estimated if estimated else 1.0
    found = list[list[tuple[Way, Option]]]()
    for part, role in pairs:
        if not any(role.moving) or not any(is_inexact(aval_of(x)) for x in part.gives):
            found.append(_without_slope(part, role))
        elif part.is_loop and id(part) in loops:
            options = loops[id(part)]
            found.append([pair for o in options for pair in _of_loops(part, o)])
        else:
            ways = _STRAIGHT[:1] if part.has_effects else _STRAIGHT
            straight = ((way, _of_straight(part, role, way)) for way in ways)
            options = [(way, option.slower(factor)) for way, option in straight]
            of_loops = [*_ways_of_loops(loops.get(id(part), []))]
            (_, everything), (_, again) = options[0], options[-1]
            options += _of_schedules(part, everything, of_loops)
            options += _of_rows(part, role, again, of_loops)
            found.append(options)
    for options in found:
        options.sort(key=lambda pair: pair[1].nanoseconds)
    return list(map(_without_the_beaten, found))


def _without_slope(part: Part, roles: Roles) -> list[tuple[Way, Option]]:
    """The ways to run a part without a derivative, such as a count of hits."""
    if part.by_rows is None:
        return [(EVERYTHING, Option(0.0, 0, frozenset(), 0))]
    program = part.program
    option = Option(work_of(program), 0, frozenset(), most_written(program))
    return [(EVERYTHING, option), *_of_rows(part, roles, option, [])]


def options_at_once(part: Part, roles: Roles) -> list[tuple[Way, Option]]:
    """The ways to run a whole function as a single part, the fastest first."""
    return [(way, _of_straight(part, roles, way)) for way in (EVERYTHING, TWICE)]


def _without_the_beaten(
    found: list[tuple[Way, Option]],
) -> list[tuple[Way, Option]]:
    """Those that none before them, which is as fast, beats in memory."""
    kept = list[tuple[Way, Option]]()
    for way, option in found:
        is_beaten = any(
            other.stored <= option.stored
            and other.working <= option.working
            and other.shared <= option.shared
            and other.on_host <= option.on_host
            for _, other in kept
        )
        if not is_beaten:
            kept.append((way, option))
    return kept


def _options_of_loops(
    part: Part, marks: Flags, host: int = 0
) -> list[tuple[LoopOption, ...]] | None:
    """The ways to run its loops, the smallest first; `None` if there is no choice."""
    if any(has_io(eqn.effects) for eqn in part.eqns):  # steps cannot be run again
        return None
    marked = {id(x) for x, mark in zip(part.reads, marks, strict=True) if mark}
    is_itself = part.is_loop and part.loops[0].eqn is part.eqns[0]
    each = list[list[LoopOption]]()
    for loop in part.loops:
        formula: Any = formula_of(loop.eqn)
        # Of a loop within a program all may be differentiated.
        moves = loop.marks or [
            id(x) in marked if is_itself else is_inexact(aval_of(x))
            for x in loop.eqn.invars
        ]
        marks = formula.in_tree.unflatten(moves)
        # What a loop within a program stores may not be there until its way back.
        own = host if is_itself else 0
        ask = functools.partial(_options_here, formula, marks, is_itself, own)
        if not (options := loop.on_device(ask)):
            return None
        each.append([_repeated(option, loop) for option in options])
    # Loops that are in one equation are decided alike.
    most = max(map(len, each))
    at = lambda options, i: options[round(i * (len(options) - 1) / max(most - 1, 1))]
    return [tuple(at(options, i) for options in each) for i in range(most)]


def _options_here(
    formula: Any, marks: PyTree, is_itself: bool, host: int
) -> list[LoopOption] | None:
    # An axis of a map around it has its name in that map alone.
    names = axes_named(formula.effects)
    names -= {*jax.sharding.get_abstract_mesh().axis_names}
    if names and not is_itself:
        return None
    return options_of(formula, marks, host, as_kernel=is_itself)


def _repeated(option: LoopOption, loop: OpenLoop) -> LoopOption:
    """The same of a loop that is run more than once."""
    again = 0.0 if loop.is_kept else option.forward
    seen = option.nanoseconds + again, option.forward, option.estimated + again
    nanoseconds, forward, estimated = (loop.times * x for x in seen)
    stored = loop.abreast * option.stored
    return dataclasses.replace(
        option,
        stored=stored if loop.is_kept else 0,
        peak=stored + option.peak - option.stored,
        whole=loop.abreast * option.whole,
        nanoseconds=nanoseconds,
        forward=forward,
        estimated=estimated,
    )


def _of_loops(part: Part, options: Sequence[LoopOption]) -> list[tuple[Way, Option]]:
    """Loops by schedules, and the same where the forward pass stores nothing."""
    schedules = tuple(option.schedule for option in options)
    stores = "; ".join(dict.fromkeys(option.stores for option in options))
    total = lambda field: sum(getattr(option, field) for option in options)
    stored, time = total("stored"), total("nanoseconds")
    working = max(max(option.peak - option.stored, 0) for option in options)
    shared, on_host = frozenset(map(id, part.reads)), total("on_host")
    option = Option(time, stored, shared, working, on_host)
    found = [(Way(stores, schedules), option)]
    # Where steps are run once, a plain loop stores all of them, and XLA may merge two
    # plain loops that are the same.
    runs_again = all(option.runs_again for option in options)
    if runs_again and not on_host and not part.has_effects:
        way = Way(f"nothing, then {stores}", schedules, is_again=True)
        again = Option(time + total("forward"), 0, shared, stored + working)
        found.append((way, again))
    return found


# What lies between loops.


def _of_straight(part: Part, roles: Roles, way: Way) -> Option:
    # The program of a part is made anew each time that it is asked for, and that of a
    # layer is the same for each layer.
    alike = _Alike(part, roles)
    numbered, shared_in, shared_out = _taken(alike, way)
    shared = {id(part.reads[i]) for i in shared_in}
    shared |= {id(part.gives[i]) for i in shared_out}
    # What is computed again is there as long as what is stored would be.
    everything, *_ = _taken(alike, EVERYTHING)
    least = everything.stored + everything.working - numbered.stored
    working = max(numbered.working, least)
    return dataclasses.replace(numbered, shared=frozenset(shared), working=working)


class _Loops(NamedTuple):
    """How the loops of a part are run: without schedules, they store everything.

    Attributes:
        longer: How much longer that takes than the fastest way.
        stored: The bytes that they store, for all rows.
        peak: The bytes that they take at once.
        fewer: By how many bytes that is less than storing everything.
    """

    schedules: tuple[LoopSchedule, ...] = ()
    stores: str = ""
    longer: float = 0.0
    stored: int = 0
    peak: int = 0
    fewer: int = 0


def _ways_of_loops(options: Sequence[Sequence[LoopOption]]) -> Iterator[_Loops]:
    """The ways to run the loops of a part that has others in it."""
    total = lambda field, each: sum(getattr(option, field) for option in each)
    least = min((total("nanoseconds", each) for each in options), default=0.0)
    for each in options:
        peak = total("peak", each)
        yield _Loops(
            tuple(option.schedule for option in each),
            "; ".join(dict.fromkeys(option.stores for option in each)),
            total("nanoseconds", each) - least,
            total("stored", each),
            peak,
            max(total("whole", each) - peak, 0),
        )


def _of_schedules(
    part: Part, everything: Option, of_loops: Sequence[_Loops]
) -> Iterator[tuple[Way, Option]]:
    """The ways to run a part all at once, with schedules for its loops."""
    for inner in of_loops:
        option = dataclasses.replace(
            everything,
            nanoseconds=everything.nanoseconds + inner.longer,
            stored=max(everything.stored - inner.fewer, inner.stored),
            shared=frozenset(map(id, part.reads)),
            working=max(everything.working, inner.peak - inner.stored),
        )
        yield Way(inner.stores, inner.schedules), option


def _of_rows(
    part: Part, roles: Roles, again: Option, of_loops: Sequence[_Loops]
) -> Iterator[tuple[Way, Option]]:
    """The ways to run a part some rows at a time; all at once, it takes `again`."""
    if (by_rows := part.by_rows) is None:
        return
    marked = {id(x) for x in pick(part.reads, roles.moving)}
    weights = {id(x) for x in pick(part.reads, roles.weights)}
    size = lambda xs: nbytes([aval_of(x) for x in xs])
    moving = [(x, rows) for x, rows in by_rows.inputs if id(x) in marked]
    # There are cotangents of all rows, except that those of weights are outputs; and
    # sums over rows are there twice, as what is added is there by itself.
    cts = size(x for x, _ in moving if id(x) not in weights) + size(part.gives)
    cts += size(x for x, rows in moving if rows is None)
    sizes, count = list[int](), 2
    while count < 2 * min(by_rows.length, _MOST_CHUNKS):
        sizes.append(by_rows.size_of_chunks(min(count, by_rows.length)))
        count *= 2
    for rows, inner in itertools.product(dict.fromkeys(sizes), (_Loops(), *of_loops)):
        chunks = -(-by_rows.length // rows)
        at_once = max(again.working - cts - inner.fewer, inner.peak, 0)
        time = again.nanoseconds + inner.longer + chunks * _NANOSECONDS_OF_CHUNK
        each = f"{rows} rows" if rows > 1 else "a row"
        stores = ", ".join(filter(None, [f"in {chunks} parts of {each}", inner.stores]))
        way = Way(stores, inner.schedules, rows=rows)
        shared = frozenset(id(x) for x, _ in by_rows.inputs)
        yield way, Option(time, 0, shared, cts + at_once * rows // by_rows.length)


class _Alike:
    """A part with its roles, equal to those that say the same."""

    def __init__(self, part: Part, roles: Roles):
        self.part, self.roles = part, roles
        self._key = digest_of(part.program), roles

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Alike) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


@remembered_per_device(maxsize=1024)
def _taken(alike: _Alike, way: Way) -> tuple[Option, tuple[int, ...], tuple[int, ...]]:
    """What a part takes, and which of what it reads and gives it needs again."""
    part, marks = alike.part, alike.roles.moving
    program = part.program
    wanted = [is_inexact(aval) for aval in program.out_avals]
    structure: list[Any] = []

    def forward(*flat: Value) -> tuple[list[Value], list[Value]]:
        def moving(*moving: Value) -> PyTree:
            outs = way.run(part, put(flat, marks, moving), alike.roles)
            return pick(outs, wanted), outs

        _, pull, outs = jax.vjp(moving, *pick(flat, marks), has_aux=True)
        residuals, tree = jax.tree.flatten(pull)
        structure.append(tree)
        return outs, residuals

    def backward(residuals: list[Value], cts: list[Value]) -> PyTree:
        return jax.tree.unflatten(structure[0], residuals)(cts)

    there = flattened(jax.make_jaxpr(forward)(*program.in_avals))
    residuals = there.jaxpr.outvars[len(wanted) :]
    cts = [aval.to_tangent_aval() for aval in pick(program.out_avals, wanted)]
    types = [aval_of(x) for x in residuals]
    back = flattened(jax.make_jaxpr(backward)(types, cts))
    reads = {x: i for i, x in enumerate(there.jaxpr.invars)}
    outs = enumerate(there.jaxpr.outvars[: len(wanted)])
    gives = {x: i for i, x in outs if isinstance(x, jex.Var)}
    # The cotangent of a weight is an output of the whole.
    of_weights = pick(back.jaxpr.outvars, pick(alike.roles.weights, marks))
    found = written(there.jaxpr, back.jaxpr, residuals, gives, of_weights)
    own = [x for x in found.stored if x not in reads and x not in gives]
    option = Option(
        nanoseconds=work_of(there) + work_of(back),
        stored=nbytes([aval_of(x) for x in own]),
        shared=frozenset(),
        working=found.working,
    )
    needed = lambda places: tuple(i for x, i in places.items() if x in found.stored)
    return option, needed(reads), needed(gives)
