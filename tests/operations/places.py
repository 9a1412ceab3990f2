"""Those who interpret programs, each of which is to do what JAX does.

A place takes several cases at once, so that they are compiled together, and gives for
each what is to be compared: pairs of what it computes and of what JAX does.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

import eqloop as el
from eqloop import ir
from eqloop._programs import alone, run, sees_batch, simpler, value_of, with_parts
from eqloop.checkpointing.fused._lowered import lowered, why_not
from eqloop.fitting._by_rows import ByRows
from eqloop.fitting._row_axes import Layouts, RowAxis
from eqloop.fitting._written import flattened

from .case import Case, apart, merged, name_of, weighted
from .values import STEPS, in_steps

# What is computed, what JAX computes, and whether it is a gradient.
Pair = tuple[Sequence[Any], Sequence[Any], bool]


class RefusedError(Exception):
    """Raised where a place does not take an operation, and says so as it should."""


def _of_all(cases: Sequence[Case], f_of: Callable[[Case], Any]) -> Any:
    """A function of the arrays of all cases, with a list of results for each."""
    fs = [f_of(case) for case in cases]
    return lambda *args: [f(*own) for f, own in zip(fs, args, strict=True)]


def computed(cases: Sequence[Case], function: Any, args: Any) -> tuple[Any, Any]:
    """What a function of the arrays of all cases gives, and gradients of it."""
    pairs = [apart(own, c.moves) for c, own in zip(cases, args, strict=True)]
    own, rest = [p[0] for p in pairs], [p[1] for p in pairs]

    def total(own: Any, rest: Any) -> Any:
        groups = zip(own, rest, cases, strict=True)
        every = function(*[merged(a, b, c.moves) for a, b, c in groups])
        return sum(map(weighted, every)), every

    if not any(any(c.moves) for c in cases):
        return jax.jit(total)(own, rest)[1], own
    (_, outs), moved = jax.jit(jax.value_and_grad(total, has_aux=True))(own, rest)
    return outs, moved


# Kernels, and loops.


def _looped(cases: Sequence[Case], schedule: Any, rows: str) -> Any:
    """A loop whose steps have all operations in them, with rows in one way."""
    # By `vmap`, or in the arrays of the step, first or last.
    axis = {"vmap": None, "first": 0, "last": -1}[rows]
    fs = [c.of_row if axis is None else jax.vmap(c.of_row, axis, axis) for c in cases]

    def step(h: Any, x: Any) -> Any:
        return h * 0.5 + 1, [f(*own) for f, own in zip(fs, x, strict=True)]

    def loop(*args: Any) -> Any:
        scan = el.Scan(step, schedule=schedule)
        if axis is not None:
            h = jnp.zeros(len(args[0][0][0]), "float32")
            move = lambda x, i, j: jnp.moveaxis(x, i, j) if x.ndim > 1 else x
            out = lambda x: move(x, -1, 1) if axis else x
            into = lambda x: move(x, 1, -1) if axis else x
            return jax.tree.map(out, scan(h, jax.tree.map(into, list(args)))[1])
        one = lambda h, xs: scan(h, xs)[1]
        h = jnp.zeros(len(args[0][0][0]), "float32")
        return jax.vmap(one, (0, 1), 1)(h, list(args))

    return loop


def in_kernel(rows: str, expected: "Expected", cases: Sequence[Case]) -> Any:
    """A loop as a kernel, interpreted."""
    function = _looped(cases, el.Fused(interpret=True), rows)
    args = [expected.args(case) for case in cases]
    try:
        outs, moved = computed(cases, function, args)
    except el.NotInKernelError as e:
        raise RefusedError(str(e)) from None
    return _beside(expected, cases, outs, moved)


def in_lowered(expected: "Expected", cases: Sequence[Case]) -> list[list[Pair]]:
    """By the few operations that a kernel evaluates, without a kernel."""
    for eqn in (eqn for case in cases for eqn in case.found):
        if simpler(eqn) is None and (why := why_not(eqn)) is not None:
            raise RefusedError(f"{name_of(eqn)} {why}")
    args = [expected.args(case) for case in cases]
    twice = lambda c: jax.vmap(jax.vmap(c.of_row))
    program = lowered(flattened(jax.make_jaxpr(_of_all(cases, twice))(*args)))
    outs = jax.jit(lambda *xs: run(program, *xs))(*jax.tree.leaves(args))
    tree = jax.tree.structure([expected.values(case) for case in cases])
    return _beside(expected, cases, jax.tree.unflatten(tree, outs), None)


def _beside(
    expected: "Expected", cases: Sequence[Case], outs: Any, moved: Any
) -> list[list[Pair]]:
    found = list[list[Pair]]()
    for n, case in enumerate(cases):
        pairs: list[Pair] = [(outs[n], expected.values(case), False)]
        if moved is not None and any(case.moves):
            pairs.append((moved[n], expected.slopes(case), True))
        found.append(pairs)
    return found


class Expected:
    """What JAX computes of each case."""

    def __init__(self, cases: Sequence[Case]):
        self._known = dict[int, tuple[Any, Any]]()
        self._learn(cases)
        self.cases = [case for case in cases if id(case) in self._known]

    def args(self, case: Case) -> list[Any]:
        """The arrays, for each step of a loop."""
        return [in_steps(x) for x in case.args]

    def values(self, case: Case) -> Any:
        """The results for each step and row."""
        return self._known[id(case)][0]

    def slopes(self, case: Case) -> Any:
        """The gradient."""
        return self._known[id(case)][1]

    def _learn(self, cases: Sequence[Case]) -> None:
        args = [self.args(c) for c in cases]
        twice = lambda c: lambda *xs: jax.vmap(jax.vmap(c.of_row))(*xs)
        try:
            found = computed(cases, _of_all(cases, twice), args)
        except Exception:  # XLA has not one of them
            half = len(cases) // 2
            if len(cases) > 1:
                self._learn(cases[:half])
                self._learn(cases[half:])
            return
        self._known |= zip(map(id, cases), zip(*found, strict=True), strict=True)


# Rows of a part of a whole gradient.


def in_fit(expected: "Expected", cases: Sequence[Case]) -> list[list[Pair]]:
    """Each equation by itself along each of its axes, some rows at a time."""
    parts = list[tuple[int, ByRows, list[Any]]]()
    every = list[Any]()
    for n, case in enumerate(cases):
        whole = jax.make_jaxpr(jax.vmap(case.of_row))(*case.args)
        first = [x[0] for x in case.args]
        for program, args in ((case.program, first), (whole, case.args)):
            for eqn, ins, outs in _met(program, args, case.operation):
                for part in _parts(eqn, ins):
                    parts.append((n, part, outs))
                    every.append(ins)

    def run_all(every: Sequence[Sequence[Any]]) -> list[list[Any]]:
        found = list[list[Any]]()
        for (_, part, _), ins in zip(parts, every, strict=True):
            (eqn,), size = part.eqns, -(-part.length // 2)
            results = part.run(size, dict(zip(eqn.invars, ins, strict=True)))
            found.append([results[x] for x in eqn.outvars])
        return found

    found: list[list[Pair]] = [[] for _ in cases]
    for (n, _, outs), own in zip(parts, jax.jit(run_all)(every), strict=True):
        found[n].append((own, outs, False))
    return found


def _met(
    program: jex.ClosedJaxpr, args: Sequence[Any], operation: str
) -> list[tuple[jex.JaxprEqn, list[Any], list[Any]]]:
    """The equations of an operation that a program meets, with their numbers."""
    program = flattened(program)
    eqns = [eqn for eqn in program.jaxpr.eqns if name_of(eqn) == operation]
    every = (x for eqn in eqns for x in (*eqn.invars, *eqn.outvars))
    named = list(dict.fromkeys(x for x in every if isinstance(x, jex.Var)))
    if not named:
        return []
    whole = with_parts(program, outvars=named)
    found = jax.jit(lambda *xs: run(whole, *xs))(*args)
    known = dict(zip(named, found, strict=True))
    read = lambda x: value_of(x) if isinstance(x, jex.Literal) else known[x]
    return [
        (eqn, list(map(read, eqn.invars)), list(map(read, eqn.outvars))) for eqn in eqns
    ]


def _parts(eqn: jex.JaxprEqn, ins: Sequence[Any]) -> Iterator[ByRows]:
    """An equation as a part by rows, for each way in which these may lie."""
    (eqn,) = alone(eqn).jaxpr.eqns  # each operand is there once
    numbers = dict(zip(eqn.invars, ins, strict=True))
    column = lambda x, i: np.asarray(numbers[x])[:, i]
    seen = set[Any]()
    for side, values in enumerate((eqn.invars, eqn.outvars)):
        for n, x in enumerate(values):
            for axis, length in enumerate(x.aval.shape):
                if length < 2:
                    continue
                layouts = Layouts(length, {}, column)
                laid = layouts.of(eqn, (side, n), RowAxis(axis))
                if laid is None or (laid, length) in seen:
                    continue
                seen.add((laid, length))
                inputs = tuple(zip(eqn.invars, laid.ins, strict=True))
                outs = sorted(zip(eqn.outvars, laid.outs, strict=True), key=_is_no_sum)
                part = ByRows((eqn,), (laid,), length, inputs, tuple(outs))
                if part.can_be:
                    yield part


def _is_no_sum(out: tuple[Any, Any]) -> bool:
    return out[1] is not None


# Chunks, and steps of loops.


def _refuse_seen_batches(cases: Sequence[Case]) -> None:
    """Leaves out what JAX, too, computes otherwise if not all rows are one batch."""
    if any(sees_batch(case.program) for case in cases):
        raise RefusedError("the result for a row depends on its batch")


def in_chunks(expected: "Expected", cases: Sequence[Case]) -> list[list[Pair]]:
    """Rows in chunks, the last of which is no whole one."""
    _refuse_seen_batches(cases)
    flat = lambda x: jnp.reshape(x, (x.shape[0] * x.shape[1], *x.shape[2:]))
    # All cases have a map of their own: some have other numbers of rows.
    of = lambda c: lambda *xs: el.ChunkedVmap(c.of_row, 4)(*map(flat, xs))
    back = lambda c: (
        lambda *xs: [
            x.reshape(STEPS, x.shape[0] // STEPS, *x.shape[1:]) for x in of(c)(*xs)
        ]
    )
    return _computed(expected, cases, back)


def _computed(
    expected: "Expected", cases: Sequence[Case], f_of: Callable[[Case], Any]
) -> list[list[Pair]]:
    args = [expected.args(case) for case in cases]
    function = _of_all(cases, f_of)
    return _beside(expected, cases, *computed(cases, function, args))


def in_steps_of(
    schedule: Any, expected: "Expected", cases: Sequence[Case]
) -> list[list[Pair]]:
    """A step that writes what it carries by the operation, if the types are the same.

    What is carried is the first of the arrays, or another one that is of the type of
    the result: what rewrites buffers, lists and rows of a step looks at it.
    """
    found = list[list[Pair]]()
    args = [expected.args(case) for case in cases]
    fs = [(_carried(c, None), _carried(c, schedule)) for c in cases]
    plain, ours = (
        lambda *own, k=k: [f[k](*x) for f, x in zip(fs, own, strict=True)]
        for k in (0, 1)
    )
    (outs, moved), (own, own_moved) = (computed(cases, f, args) for f in (plain, ours))
    for n in range(len(cases)):
        pairs: list[Pair] = [(own[n], outs[n], False)]
        if any(cases[n].moves):
            pairs.append((own_moved[n], moved[n], True))
        found.append(pairs)
    return found


def _carried(case: Case, schedule: Any) -> Callable[..., Any]:
    """A loop whose steps have the operation in them, by `lax.scan` for `None`."""
    results = [x.aval for x in case.program.jaxpr.outvars]
    same = lambda x, y: (x.shape, x.dtype) == (y.shape, y.dtype)
    at = next((i for i, x in enumerate(case.types) if same(x, results[0])), None)

    def one(*args: Any) -> Any:
        def step(carry: Any, xs: Any) -> Any:
            given = list(xs)
            i, h = carry
            if at is not None:
                given[at] = h
            outs = case.of_row(*given)
            return (i + 1, outs[0] if at is not None else h), (outs, i)

        init = (jnp.zeros((), "int32"), args[at][0] if at is not None else ())
        # Four steps: this often, rewritten ones are others than the first.
        xs = [jnp.concatenate([x, x]) for x in args]
        if schedule is None:
            (_, h), (ys, _) = lax.scan(step, init, xs)
        else:
            (_, h), (ys, _) = el.Scan(step, schedule=schedule)(init, xs)
        return [*ys, *([h] if at is not None else [])]

    return jax.vmap(one, 1)


def in_rescheduled(expected: "Expected", cases: Sequence[Case]) -> list[list[Pair]]:
    """A loop of JAX in a function that is rewritten."""
    _refuse_seen_batches(cases)
    twice = lambda c: (
        lambda *xs: lax.scan(lambda i, x: (i + 1, jax.vmap(c.of_row)(*x)), 0, xs)[1]
    )

    def of(c: Case) -> Any:
        return lambda *xs: el.Reschedule(twice(c), el.Recursive(2))(*xs)

    return _computed(expected, cases, of)


def in_debugged(expected: "Expected", cases: Sequence[Case]) -> list[list[Pair]]:
    """A function that is looked through for what is not finite: here nothing is."""
    found = list[list[Pair]]()
    for case in cases:
        f = jax.vmap(jax.vmap(case.of_row))
        args = expected.args(case)
        outs = expected.values(case)
        try:
            own = el.DebugNonFinite(f)(*args)
        except el.NonFiniteError:
            own = outs  # it has found something
        found.append([(own, outs, False)])
    return found


# Programs that a person can read.


def in_ir(how: str, expected: "Expected", cases: Sequence[Case]) -> list[list[Pair]]:
    """The program after a pass, or from the text of it."""
    args = [expected.args(case) for case in cases]
    twice = lambda c: lambda *xs: jax.vmap(jax.vmap(c.of_row))(*xs)
    function = _of_all(cases, twice)
    whole = jax.make_jaxpr(function)(*args)
    flat = jax.tree.leaves(args)
    if how == "python":
        name = "all_cases"
        try:
            text = ir.jaxpr_to_python(whole, name=name)
        except ValueError as e:
            if "register_handler" in str(e):
                raise RefusedError(str(e)) from None
            raise
        space: dict[str, Any] = {}
        exec(text, space)
        outs = space[name](*flat)
        outs = outs if isinstance(outs, (tuple, list)) else [outs]
    else:
        passed = ir.optimize(whole)
        outs = jax.jit(lambda *xs: run(passed, *xs))(*flat)
    tree = jax.tree.structure([expected.values(case) for case in cases])
    return _beside(expected, cases, jax.tree.unflatten(tree, outs), None)


PLACES: dict[str, Callable[..., Any]] = {
    "lowered": in_lowered,
    "fused": functools.partial(in_kernel, "vmap"),
    "fused_first": functools.partial(in_kernel, "first"),
    "fused_last": functools.partial(in_kernel, "last"),
    "fit": in_fit,
    "chunks": in_chunks,
    "steps": functools.partial(in_steps_of, el.Chunked(2)),
    "recursive": functools.partial(in_steps_of, el.Recursive(2)),
    "rescheduled": in_rescheduled,
    "debug": in_debugged,
    "ir": functools.partial(in_ir, "passes"),
    "python": functools.partial(in_ir, "python"),
}
