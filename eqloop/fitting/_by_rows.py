"""A part of a program that is run some rows at a time, there and back.

Each of its operations is a map along one axis of its operands and results, or adds up
along it (`AxisMap`). So it does the same to fewer rows: but for the sizes in its
parameters, it stays as it is.

    rows of h --dot--> rows of logits --sub, exp--> ... --reduce_sum--> a sum
    W ---------^
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._arrays import is_inexact, is_key, pick, split
from .._compat import close, form_of, form_params, is_through, scan_counts
from .._programs import (
    Rewriter,
    alone,
    aval_of,
    evaluated,
    jvp_of,
    resized,
    traced,
    value_of,
)
from .._types import Aval, Value
from ..checkpointing import OpenStep, has_steps
from ..mapping import equal_chunks, mapped_in_chunks
from ._row_axes import Laid, Layouts, NotByRowsError, RowAxis
from ._rules import Program, with_rule
from ._written import flattened


@dataclasses.dataclass(frozen=True, eq=False)
class ByRows:
    """Operations, in the order in which they are run, whose rows lie like this.

    Attributes:
        laid: How the rows of each lie; `None` for those that have none.
        length: How many rows there are.
        inputs: The variables that are given, with the axis of their rows. One that is
            read in several ways is there several times.
        outs: The results, with the axis of their rows; sums come first.
        pieces: If something is decided within a chunk, the parts that it runs one after
            the other, and what becomes of the function of the numbers of the rows, and
            of its inputs, that runs each of them.
    """

    eqns: tuple[jex.JaxprEqn, ...]
    laid: tuple[Laid | None, ...]
    length: int
    inputs: tuple[tuple[Any, RowAxis | None], ...]
    outs: tuple[tuple[Any, RowAxis | None], ...]
    pieces: "tuple[tuple[ByRows, Callable[[Program], Program]], ...]" = ()

    @classmethod
    def of(
        cls,
        eqns: Sequence[jex.JaxprEqn],
        laid: Sequence[Laid | None],
        length: int,
        is_out: Callable[[Any], bool],
    ) -> "ByRows":
        """Operations with what they read, and those of their results that are outs."""
        inputs, lies = dict[tuple[Any, RowAxis | None], None](), dict[Any, Any]()
        for eqn, each in zip(eqns, laid, strict=True):
            ins = each.ins if each else (None,) * len(eqn.invars)
            for x, rows in zip(eqn.invars, ins, strict=True):
                if isinstance(x, jex.Var) and x not in lies:
                    inputs[x, rows] = None
            outs = each.outs if each else (None,) * len(eqn.outvars)
            lies |= zip(eqn.outvars, outs, strict=True)
        given = [(x, rows) for x, rows in lies.items() if is_out(x)]
        given.sort(key=lambda out: out[1] is not None)
        return cls(tuple(eqns), tuple(laid), length, tuple(inputs), tuple(given))

    def piece(self, eqns: Sequence[jex.JaxprEqn], gives: Sequence[Any]) -> "ByRows":
        """Some of these operations, and which of their results the others read."""
        laid = dict(zip(map(id, self.eqns), self.laid, strict=True))
        own = [laid[id(eqn)] for eqn in eqns]
        return ByRows.of(eqns, own, self.length, set(gives).__contains__)

    @property
    def can_be(self) -> bool:
        """Whether all operations do the same to fewer rows."""
        if any(is_key(aval_of(x)) for x in self._sums):
            return False  # one that all rows share is not added up
        size = -(-self.length // 2)
        shape = lambda x, rows: _shape_of_chunk(aval_of(x), rows, size)
        types = [x.aval.update(shape=shape(x, rows)) for x, rows in self.inputs]

        def chunk(numbers: Value, values: list[Value]) -> None:
            given = dict(zip(self.inputs, values, strict=True))
            self.on_chunk(size, numbers, given)

        numbers = jax.ShapeDtypeStruct((size,), np.int32)
        # JAX raises the other errors where sizes are in parameters unknown here.
        try:
            jax.eval_shape(chunk, numbers, types)
        except (NotByRowsError, TypeError, ValueError):
            return False
        return True

    def size_of_chunks(self, count: int) -> int:
        """How many rows each of about so many chunks has; equally many, if possible."""
        return equal_chunks(self.length, -(-self.length // count)).size

    def run(self, size: int, known: Mapping[Any, Value]) -> dict[Any, Value]:
        """The results, from what is given, so many rows at a time."""
        pairs = [(known[x], rows) for x, rows in self.inputs]
        consts = [value for value, rows in pairs if rows is None]
        xs = [_apart(value, rows) for value, rows in pairs if rows is not None]
        xs.append(jnp.arange(self.length, dtype=jnp.int32))
        sums, ys = mapped_in_chunks(
            self._traced,
            size,
            self.length,
            consts,
            xs,
            (*(_axis_apart(rows) for _, rows in self.inputs if rows), 0),
            tuple(_axis_apart(rows) for _, rows in self.outs if rows),
            len(self._sums),
        )
        found = dict(zip(self._sums, sums, strict=True))
        stacked = [(x, rows) for x, rows in self.outs if rows is not None]
        of_y = lambda y, pair: y.reshape(aval_of(pair[0]).shape)
        return found | dict(
            zip((x for x, _ in stacked), map(of_y, ys, stacked), strict=True)
        )

    @property
    def _sums(self) -> list[Any]:
        return [x for x, rows in self.outs if rows is None]

    def _traced(self, function: Any, size: int) -> jex.ClosedJaxpr:
        """The program of a chunk, see `ChunkFunction.trace`."""
        consts = [x for x, rows in self.inputs if rows is None]
        xs = [(x, rows) for x, rows in self.inputs if rows is not None]
        same = {x for eqn in filter(has_steps, self.eqns) for x in eqn.outvars}

        def chunk(*flat: Value) -> list[Value]:
            pairs = zip(((x, None) for x in consts), flat, strict=False)
            given = dict[Any, Value](pairs)
            *parts, numbers = flat[len(consts) :]
            for (x, rows), part in zip(xs, parts, strict=True):
                shape = _shape_of_chunk(aval_of(x), rows, size)
                given[x, rows] = part.reshape(shape)
            found = self.on_chunk(size, numbers, given)
            # What is the same for all rows is added once.
            once = lambda x: _if_first(numbers, found[x]) if x in same else found[x]
            ys = [_apart(found[x], rows) for x, rows in self.outs if rows is not None]
            return [*map(once, self._sums), *ys]

        types = function.stacked(function.x_types, size, function.x_axes)
        return traced(chunk, [*function.const_types, *types])

    def on_chunk(
        self, size: int, numbers: Value, given: Mapping[Any, Value]
    ) -> dict[Any, Value]:
        """All values for some rows, which have these numbers."""
        found, some = dict[Any, Value](), _Some(self.length, size, numbers)

        def read(x: Any, rows: RowAxis | None) -> Value:
            if isinstance(x, jex.Literal):
                return value_of(x)
            return found[x] if x in found else given[x, rows]

        for piece, wrapped in self.pieces:
            values = [read(x, rows) for x, rows in piece.inputs]
            outs = wrapped(functools.partial(piece.results, size))(numbers, *values)
            found |= zip((x for x, _ in piece.outs), outs, strict=True)
        each = () if self.pieces else zip(self.eqns, self.laid, strict=True)
        for eqn, laid in each:
            ins = laid.ins if laid else (None,) * len(eqn.invars)
            values = list(map(read, eqn.invars, ins))
            outs = _evaluated(eqn, laid, some, values)
            found |= zip(eqn.outvars, outs, strict=True)
        return found

    def results(self, size: int, numbers: Value, *values: Value) -> list[Value]:
        """What it gives for some rows, from its inputs."""
        given = dict(zip(self.inputs, values, strict=True))
        found = self.on_chunk(size, numbers, given)
        return [found[x] for x, _ in self.outs]


def without_hints(program: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """A program that does not say which outputs of a loop have no tangent (JAX 0.10).

    What says so reads all inputs of the loop, and no rows of these.
    """
    rewriter = Rewriter(program)
    for eqn in map(rewriter.enter, program.jaxpr.eqns):
        is_hint = is_through(eqn)
        if not (is_hint and rewriter.replace(eqn.outvars[0], eqn.invars[-1])):
            rewriter.eqns.append(eqn)
    return rewriter.result()


def _apart(value: Value, rows: RowAxis) -> Value:
    """The array with an axis that has one entry for each row."""
    shape, axis = value.shape, rows.axis
    around = rows.repeats, shape[axis] // rows.size(1), rows.entries
    sizes = (n for i, n in enumerate(around) if n > 1 or i == 1)
    return value.reshape(*shape[:axis], *sizes, *shape[axis + 1 :])


def _axis_apart(rows: RowAxis) -> int:
    """That axis of it."""
    return rows.axis + (rows.repeats > 1)


def _shape_of_chunk(aval: Aval, rows: RowAxis | None, size: int) -> tuple[int, ...]:
    shape = list(aval.shape)
    if rows is not None:
        shape[rows.axis] = rows.size(size)
    return tuple(shape)


class _Some(NamedTuple):
    """Some rows: of how many, how many these are, and their numbers."""

    length: int
    size: int
    numbers: Value


def _evaluated(
    eqn: jex.JaxprEqn, laid: Laid | None, some: _Some, values: list[Value]
) -> Sequence[Value]:
    """The results of an operation for some rows."""
    if laid is None:
        return evaluated(eqn, values)
    (length, size, numbers), form, rows = some, form_of(eqn), laid.outs[0]
    if form == "custom_jvp_call":
        outs = _with_rule(eqn, laid, some, values)
    elif form == "cond":
        outs = _branch(eqn, laid, some, values)
    elif form == "remat2":
        outs = _checkpointed(eqn, laid, some, values)
    elif has_steps(eqn):
        outs = _loop(eqn, laid, some, values)
    elif form == "iota" and rows and eqn.params["dimension"] == rows.axis:
        # Where all rows begin each time, and the entries of a row.
        first = np.arange(0, rows.size(length), length * rows.entries, dtype=np.int32)
        within = first[:, None, None] + np.arange(rows.entries, dtype=np.int32)
        every = numbers[None, :, None] * rows.entries + within
        shape = _shape_of_chunk(aval_of(eqn.outvars[0]), rows, size)
        every = every.reshape(-1).astype(eqn.params["dtype"])
        outs = [lax.broadcast_in_dim(every, shape, (rows.axis,))]
    else:
        if laid.column is not None:
            # The first of these rows has the index 0 among them.
            is_it = np.arange(values[1].shape[1])[None] == laid.column
            entries = laid.ins[0].entries if laid.ins[0] else 1
            first = (numbers[:1, None] * entries).astype(values[1].dtype)
            values[1] = values[1] - jnp.where(is_it, first, jnp.zeros_like(first))
        if rows is None and form.startswith("scatter"):
            values[0] = _if_first(numbers, values[0])  # what is added to
        shape = _shape_of_chunk(aval_of(eqn.outvars[0]), rows, size)
        outs = evaluated(resized(eqn, values, shape), values)
    for x, out, rows in zip(eqn.outvars, outs, laid.outs, strict=True):
        if out.shape != _shape_of_chunk(aval_of(x), rows, size):
            raise NotByRowsError
    return outs


def _if_first(numbers: Value, value: Value) -> Value:
    """A value where the first row of all is among these, and zeros for others."""
    return jnp.where(numbers[0] == 0, value, jnp.zeros_like(value))


def _branch(
    eqn: jex.JaxprEqn, laid: Laid, some: _Some, values: list[Value]
) -> Sequence[Value]:
    """A branch that all rows take."""
    (length, size, numbers), (index, *operands) = some, values
    lies = laid.ins[1:], laid.outs, length
    ways = [functools.partial(by_rows(b, *lies), size) for b in eqn.params["branches"]]
    return lax.switch(index, ways, numbers, *operands)


def _checkpointed(
    eqn: jex.JaxprEqn, laid: Laid, some: _Some, values: list[Value]
) -> Sequence[Value]:
    """What is run again on the way back."""
    (length, size, numbers), params = some, form_params(eqn)
    inner = by_rows(close(params["jaxpr"]), laid.ins, laid.outs, length)
    how = {name: params[name] for name in ("policy", "prevent_cse")}
    return jax.checkpoint(functools.partial(inner, size), **how)(numbers, *values)


def _with_rule(
    eqn: jex.JaxprEqn, laid: Laid, some: _Some, values: list[Value]
) -> Sequence[Value]:
    """A function with a derivative of its own, by the very rule that it has."""
    (length, size, numbers), whole = some, alone(eqn)
    nonzeros, gives = (
        tuple(map(is_inexact, avals)) for avals in (whole.in_avals, whole.out_avals)
    )
    both = jvp_of(whole, (nonzeros,), (gives,))
    inner = by_rows(form_params(eqn)["call_jaxpr"], laid.ins, laid.outs, length)
    rows_in = (*laid.ins, *pick(laid.ins, nonzeros))
    rule = by_rows(both, rows_in, (*laid.outs, *pick(laid.outs, gives)), length)

    of_rows, with_tangents = (functools.partial(each, size) for each in (inner, rule))
    function = with_rule(of_rows, with_tangents, (False, *nonzeros), gives)
    return function(numbers, *values)


def _loop(
    eqn: jex.JaxprEqn, laid: Laid, some: _Some, values: list[Value]
) -> Sequence[Value]:
    """A loop, each step of which is run for some rows."""
    (length, size, numbers), found = some, OpenStep.of(eqn)
    if found is None:
        program = close(eqn.params["jaxpr"])
        consts, num_carry = scan_counts(eqn.params)
        x_axes = (0,) * (len(values) - consts - num_carry)
    else:
        program, num_carry, x_axes = found.program, found.num_carry, found.x_axes
    count = len(values) - len(x_axes)
    ins = [*laid.ins[:count], *map(_of_step, laid.ins[count:], x_axes)]
    outs = [*laid.outs[:num_carry], *(_of_step(y, 0) for y in laid.outs[num_carry:])]
    step = by_rows(program, tuple(ins), tuple(outs), length)
    if found is None:
        return _scan(eqn, functools.partial(step, size, numbers), values)
    pairs = zip(program.in_avals, ins, strict=True)
    types = [x.update(shape=_shape_of_chunk(x, rows, size)) for x, rows in pairs]
    program = traced(functools.partial(step, size), [jax.typeof(numbers), *types])
    return found.run(program, numbers, values)


def _of_step(rows: RowAxis | None, looped: int) -> RowAxis | None:
    """The rows of what one step has of an array that is looped over."""
    if rows is None:
        return None
    return dataclasses.replace(rows, axis=rows.axis - (looped < rows.axis))


def _scan(
    eqn: jex.JaxprEqn, step: Callable[..., list[Value]], values: Sequence[Value]
) -> Sequence[Value]:
    num_consts, num_carry = scan_counts(eqn.params)
    consts, init, xs = split(values, num_consts, num_carry)
    body = lambda carry, x: split(step(*consts, *carry, *x), num_carry)
    how = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    carry, ys = lax.scan(body, init, xs, **how)
    return [*carry, *ys]


@functools.lru_cache(maxsize=512)
def by_rows(
    program: jex.ClosedJaxpr,
    ins: tuple[RowAxis | None, ...],
    outs: tuple[RowAxis | None, ...],
    length: int,
) -> Callable[..., list[Value]]:
    """A program for some rows, the inputs and outputs of which have rows like this."""
    program = without_hints(flattened(program, checkpoints=True))
    jaxpr, layouts = program.jaxpr, Layouts(length, {}, lambda *_: None)
    lies = dict[Any, RowAxis | None](zip(jaxpr.invars, ins, strict=True))
    lies |= dict.fromkeys(jaxpr.constvars)
    made_by = {
        x: (i, n) for i, e in enumerate(jaxpr.eqns) for n, x in enumerate(e.outvars)
    }
    laid = dict[int, Laid]()

    def lay(i: int, found: Laid | None) -> None:
        if found is None or (None in found.outs and not has_steps(jaxpr.eqns[i])):
            raise NotByRowsError
        laid[i] = found
        lies.update(zip(jaxpr.eqns[i].outvars, found.outs, strict=True))
        for x, rows in zip(jaxpr.eqns[i].invars, found.ins, strict=True):
            want(x, rows)

    def want(x: Any, rows: RowAxis | None) -> None:
        """Has a value that was the same for all rows have rows."""
        if isinstance(x, jex.Literal) or lies[x] == rows:
            return
        if rows is None or lies[x] is not None or x not in made_by:
            raise NotByRowsError
        i, n = made_by[x]
        lay(i, layouts.of(jaxpr.eqns[i], (1, n), rows))

    for i, eqn in enumerate(jaxpr.eqns):
        lies.update(dict.fromkeys(eqn.outvars))
        each = [None if isinstance(x, jex.Literal) else lies[x] for x in eqn.invars]
        for n, rows in enumerate(each):
            if rows is not None:
                lay(i, layouts.of(eqn, (0, n), rows))
                break
    for x, rows in zip(jaxpr.outvars, outs, strict=True):
        want(x, rows)
    for i, eqn in enumerate(jaxpr.eqns):  # some may have rows only since they were read
        ins = laid[i].ins if i in laid else (None,) * len(eqn.invars)
        for x, rows in zip(eqn.invars, ins, strict=True):
            if not isinstance(x, jex.Literal) and lies[x] != rows:
                raise NotByRowsError
    order = tuple(laid.get(i) for i in range(len(jaxpr.eqns)))
    inputs = tuple((x, lies[x]) for x in (*jaxpr.constvars, *jaxpr.invars))
    every = ByRows(tuple(jaxpr.eqns), order, length, inputs, ())

    def on_chunk(size: int, numbers: Value, *values: Value) -> list[Value]:
        given = dict(zip(inputs, [*program.consts, *values], strict=True))
        found = every.on_chunk(size, numbers, given)
        found |= {x: given[x, rows] for x, rows in inputs}
        is_literal = lambda x: isinstance(x, jex.Literal)
        return [value_of(x) if is_literal(x) else found[x] for x in jaxpr.outvars]

    return on_chunk
