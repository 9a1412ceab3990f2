"""The ways to run a part of a function, and what each of them takes."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from .._arrays import Flags, is_inexact, nbytes, pick, put
from .._compat import form_of
from .._device import remembered_per_device
from .._programs import (
    aval_of,
    axes_named,
    digest_of,
    equations,
    formula_of,
    has_io,
    moving_variables,
    run,
)
from .._types import Aval, PyTree, Value
from ..checkpointing import LoopOption, LoopSchedule, options_of, work_of
from ._again import Program, Roles, again, twice
from ._by_rows import ByRows
from ._choice import Choice, Option
from ._parts import OpenLoop, Part, Split, with_schedules
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
        inside: How the parts of a part with rows are run, for the rows of a chunk, or
            for all at once; empty if nothing is decided for them.
        split: How that part was found.
    """

    stores: str
    schedules: tuple[LoopSchedule, ...] = ()
    is_again: bool = False
    policy: Callable[..., bool] | None = None
    rows: int | None = None
    is_twice: bool = False
    inside: "tuple[Way, ...]" = ()
    split: Split = "nowhere"

    def fits(self, part: Part) -> bool:
        """Whether it is a way to run such a part."""
        if self.schedules and len(self.schedules) != len(part.loops):
            return False
        by_rows, inside = part.by_rows, self.inside
        if inside and len(inside) != len(part.inner):
            return False
        if not all(map(Way.fits, inside, part.inner)):
            return False
        return self.rows is None or (by_rows is not None and self.rows < by_rows.length)

    def run(self, part: Part, inputs: Sequence[Value], roles: Roles) -> list[Value]:
        """Runs a part."""
        if self.schedules:
            part = with_schedules(part, self.schedules)
        known = dict[Any, Value](zip(part.reads, inputs, strict=True))
        if self.rows is not None and part.by_rows is not None:
            moving = moving_variables(part.program, roles.moving)
            pieces = [
                way.piece_of(part.by_rows, own, moving)
                for own, way in zip(part.inner, self.inside, strict=False)
            ]
            by_rows = dataclasses.replace(part.by_rows, pieces=tuple(pieces))
            found = by_rows.run(self.rows, known)
            return [found[x] for x in part.gives]
        if self.inside:  # all rows at once
            run_parts(part.inner, self.inside, _roles_within(part, roles), known)
            return [known[x] for x in part.gives]
        program = part.program
        if self.is_twice:
            return [*twice(program, roles)(*inputs)]
        of_arrays = functools.partial(run, program)
        if self.is_again:
            of_arrays = again(of_arrays, self.policy, roles)
        return [*of_arrays(*inputs)]

    def piece_of(
        self, by_rows: ByRows, part: Part, moving: set[Any]
    ) -> tuple[ByRows, Callable[[Program], Program]]:
        """A part of a chunk, and how its function is run, see `ByRows.pieces`."""
        piece = by_rows.piece(part.eqns, part.gives)
        if self.schedules:
            eqns = with_schedules(part, self.schedules).eqns
            piece = dataclasses.replace(piece, eqns=eqns)
        if not self.is_again:
            return piece, lambda f: f
        # The numbers of the rows come first. What all rows share is not to be copied.
        are_moving = [False, *(x in moving for x, _ in piece.inputs)]
        shared = [False, *(rows is None for _, rows in piece.inputs)]
        roles = Roles(tuple(are_moving), tuple(shared))
        return piece, lambda f: again(f, self.policy, roles)


def run_parts(
    parts: Sequence[Part],
    ways: Sequence[Way],
    roles: Sequence[Roles],
    known: dict[Any, Value],
) -> None:
    """Runs each part in its way, and adds what they give to what is known."""
    for part, way, role in zip(parts, ways, roles, strict=True):
        outs = way.run(part, [known[x] for x in part.reads], role)
        known |= zip(part.gives, outs, strict=True)


def roles_of(parts: Sequence[Part], moving: set[Any], weights: set[Any]) -> list[Roles]:
    """What parts read, if these variables are differentiated, and these are inputs."""
    among = lambda part, those: tuple(x in those for x in part.reads)
    return [Roles(among(part, moving), among(part, weights)) for part in parts]


def _roles_within(part: Part, roles: Roles) -> list[Roles]:
    """What the parts read that are inside of another."""
    moving = moving_variables(part.program, roles.moving)
    return roles_of(part.inner, moving, set(pick(part.reads, roles.weights)))


EVERYTHING, TWICE = Way("everything"), Way("nothing", is_twice=True)
# A part is run in so many chunks of rows, at the most, and each of them takes so long
# besides its share of the work.
_MOST_CHUNKS, _NANOSECONDS_OF_CHUNK = 256, 20_000
# So many ways to run the parts of a chunk are considered, for each of its sizes.
_WAYS_INSIDE = 8
# What may be kept of what is run again, where there are such operations.
_AGAIN = (
    (_PRODUCTS, Way("products", is_again=True, policy=keeps_products)),
    (("name",), Way("named values", is_again=True, policy=keeps_names)),
    ((), Way("nothing", is_again=True)),
)


def options_of_parts(
    parts: Sequence[Part], roles: Sequence[Roles], host: int = 0
) -> list[list[tuple[Way, Option]]]:
    """The ways to run each part, the fastest first, and what each of them takes.

    A loop may store `host` bytes in the memory of the host.
    """
    pairs = list(zip(parts, roles, strict=True))
    loops = {
        id(part): options
        for part, role in pairs
        if part.is_loop and (options := _options_of_loops(part, role.moving, host))
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
        if part.by_rows is not None:
            is_only = sum(other.by_rows is not None for other in parts) == 1
            is_whole = is_only and part.split == "dimension"
            found.append([*_of_rows(part, part.by_rows, role, host, is_whole)])
        elif not any(role.moving) or not any(map(is_inexact, part.program.out_avals)):
            program = part.program
            option = Option(work_of(program), 0, frozenset(), most_written(program))
            found.append([(EVERYTHING, option)])
        elif id(part) in loops:
            options = loops[id(part)]
            found.append([pair for o in options for pair in _of_loops(part, o)])
        else:
            forms = {form_of(eqn) for eqn in equations(part.program)}
            others = [way for of, way in _AGAIN if not of or not forms.isdisjoint(of)]
            ways = [EVERYTHING, *([] if part.has_effects else others)]
            straight = ((way, _of_straight(part, role, way)) for way in ways)
            found.append([(way, option.slower(factor)) for way, option in straight])
    for options in found:
        options.sort(key=lambda pair: pair[1].nanoseconds)
    return list(map(_without_the_beaten, found))


def choice_among(
    found: Sequence[Sequence[tuple[Way, Option]]],
    parts: Sequence[Part],
    inputs: Sequence[Any],
    host: int,
) -> tuple[list[list[Way]], Choice]:
    """The ways to run each part, and what they take besides the inputs."""
    values = [x for part in parts for x in (*part.reads, *part.gives)]
    sizes = {id(x): nbytes([aval_of(x)]) for x in values}
    there = set(map(id, inputs))
    options = [[option.without(there) for _, option in part] for part in found]
    return [[way for way, _ in part] for part in found], Choice(options, sizes, host)


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
        nonzeros = loop.marks or [
            id(x) in marked if is_itself else is_inexact(aval_of(x))
            for x in loop.eqn.invars
        ]
        marks = formula.in_tree.unflatten(nonzeros)
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
    """What an option takes for a loop that is run more than once."""
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
    alike = _Alike(digest_of(part.program), roles, part)
    numbered, shared_in, shared_out = _taken(alike, way)
    shared = {id(part.reads[i]) for i in shared_in}
    shared |= {id(part.gives[i]) for i in shared_out}
    # What is computed again is there as long as what is stored would be.
    everything, *_ = _taken(alike, EVERYTHING)
    least = everything.stored + everything.working - numbered.stored
    working = max(numbered.working, least)
    return dataclasses.replace(numbered, shared=frozenset(shared), working=working)


def _of_rows(
    part: Part, by_rows: ByRows, roles: Roles, host: int, is_whole: bool
) -> Iterator[tuple[Way, Option]]:
    """The ways to run a part that has rows: some at a time, or all, if others do not.

    If it is the whole function, all at once is what another cut has, in finer parts.
    """
    found = options_of_parts(part.inner, _roles_within(part, roles), host)
    ways, choice = choice_among(found, part.inner, part.reads, host)
    shared, cts = frozenset(map(id, part.reads)), _cotangents(part, by_rows, roles)
    # By rows, all is run for its value as well. A way back takes twice as long as that.
    forward = choice.nanoseconds(choice.fastest) / 3
    for chosen in choice.spread(_WAYS_INSIDE):
        inside = tuple(of[i] for of, i in zip(ways, chosen, strict=True))
        stores = ", ".join(dict.fromkeys(way.stores for way in inside))
        time, peak = choice.nanoseconds(chosen), choice.peak(chosen)
        if not is_whole:
            stored = sum(choice.stored(chosen))
            at_once = Option(time, stored, shared, max(peak - stored, 0))
            yield Way(stores, inside=inside, split=part.split), at_once
        for rows in _sizes(by_rows):
            chunks = -(-by_rows.length // rows)
            longer = forward + chunks * _NANOSECONDS_OF_CHUNK
            each = f"{rows} rows" if rows > 1 else "a row"
            how = dict[str, Any](rows=rows, inside=inside, split=part.split)
            way = Way(f"in {chunks} parts of {each}: {stores}", **how)
            working = cts + peak * rows // by_rows.length
            yield way, Option(time + longer, 0, shared, working)


def _sizes(by_rows: ByRows) -> Sequence[int]:
    """How many rows may be run at a time."""
    sizes, count = dict[int, None](), 2
    while count < 2 * min(by_rows.length, _MOST_CHUNKS):
        sizes[by_rows.size_of_chunks(min(count, by_rows.length))] = None
        count *= 2
    return [*sizes]


def _cotangents(part: Part, by_rows: ByRows, roles: Roles) -> int:
    """The bytes of cotangents that are there while a part is taken back by rows."""
    marked = {id(x) for x in pick(part.reads, roles.moving)}
    weights = {id(x) for x in pick(part.reads, roles.weights)}
    size = lambda xs: nbytes([aval_of(x) for x in xs])
    pairs = [(x, rows) for x, rows in by_rows.inputs if id(x) in marked]
    # There are cotangents of all rows, except that those of weights are outputs; and
    # sums over rows are there twice, as what is added is there by itself.
    cts = size(x for x, _ in pairs if id(x) not in weights) + size(part.gives)
    return cts + size(x for x, rows in pairs if rows is None)


@dataclasses.dataclass(frozen=True)
class _Alike:
    """A part with its roles, equal to those that say the same."""

    digest: str
    roles: Roles
    part: Part = dataclasses.field(compare=False)


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
