"""Which axes of the arrays in a program are independent rows.

Every axis of every array in a program has a class. Two axes are of one class if an
entry along the one is only ever computed from the same entry along the other: those of
the operands and the result of an addition, for example. An operation that mixes entries
along an axis (a slice, a reduction, a product of matrices) spoils its class. What is
left are axes along which the whole program is a map: its rows. It makes no difference
whether `vmap` has made them, or the user did.

One way of mixing is allowed: adding up over rows, as a gradient does for what all rows
share. Such a sum is *pending*. It may be scaled, moved and added to others, and leave
the program, and is computed once, at the end. Any other use of it is a collective.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from ..._programs import aval_of, formula_of, place_of
from ..._types import Aval, Value
from ._windows import Windows

Rows = frozenset[int]
NO_ROWS: Rows = frozenset()

# Primitives that do the same to their axes.
_KINDS = "sum", "prod", "max", "min", "and", "or", "xor"
REDUCTIONS = tuple(f"reduce_{kind}" for kind in _KINDS)
# Some have a hyphen in their names, and in other versions of JAX an underscore.
SCATTERS = "scatter", "scatter-add", "scatter_add", "scatter-mul", "scatter_mul"


@dataclasses.dataclass(eq=False)
class Val:
    """An array in a program.

    Attributes:
        aval: Its type.
        dims: A node for each of its axes; see `Classes`.
        literal: Its value, if that is a number in the program.
        pending: The classes over which it is yet to be added up.
    """

    aval: Aval
    dims: list[int]
    literal: Any = None
    pending: Rows = NO_ROWS

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.aval.shape)


@dataclasses.dataclass(eq=False)
class Op:
    """An operation, with the programs in it."""

    eqn: jex.JaxprEqn
    ins: list[Val]
    outs: list[Val]
    inner: "list[AxisProgram]" = dataclasses.field(default_factory=list)

    @property
    def name(self) -> str:
        return self.eqn.primitive.name

    @property
    def params(self) -> dict[str, Any]:
        return self.eqn.params


@dataclasses.dataclass(eq=False)
class AxisProgram:
    """Operations one after the other."""

    ins: list[Val]
    outs: list[Val]
    ops: list[Op]

    def vals(self) -> Iterator[Val]:
        """All arrays in it."""
        yield from self.ins
        for op in self.ops:
            yield from op.outs
            for inner in op.inner:
                yield from inner.vals()


class Classes:
    """Classes of axes: a union-find over nodes, one for each axis of each array.

    Attributes:
        lifted: Constant arrays in the programs, which become further inputs.
        rows: Those that are taken to be rows.
        around: The call that is being opened, whose line is known if others are not.
    """

    def __init__(self) -> None:
        self._parent = list[int]()
        self._why = dict[int, Callable[[], str]]()
        self.lifted = list[tuple[Val, Value]]()
        self.rows: Rows = NO_ROWS
        self.around: jex.JaxprEqn | None = None

    def array(self, aval: Aval, literal: Any = None) -> Val:
        first = len(self._parent)
        self._parent += range(first, first + len(aval.shape))
        return Val(aval, list(range(first, len(self._parent))), literal)

    def find(self, node: int) -> int:
        while self._parent[node] != node:
            self._parent[node] = self._parent[self._parent[node]]
            node = self._parent[node]
        return node

    def of(self, val: Val) -> list[int]:
        return [self.find(node) for node in val.dims]

    def same(self, a: Val, i: int, b: Val, j: int) -> None:
        """Two axes are of one class, unless one of them has a single entry."""
        if a.shape[i] != b.shape[j] or a.shape[i] == 1:
            return
        one, other = self.find(a.dims[i]), self.find(b.dims[j])
        if one == other:
            return
        self._parent[other] = one
        if (why := self._why.pop(other, None)) is not None:
            self._why.setdefault(one, why)

    def tie(self, a: Val, b: Val) -> None:
        """All axes of two arrays of one shape."""
        for i in range(len(a.shape)):
            self.same(a, i, b, i)

    def spoil(self, root: int, why: Callable[[], str]) -> None:
        """There is something in the way of rows along the axes of a class."""
        self._why.setdefault(self.find(root), why)

    def why_not(self, root: int) -> str | None:
        """What mixes entries along the axes of a class, if anything does."""
        why = self._why.get(self.find(root))
        return why and why()

    def is_spoiled(self, root: int) -> bool:
        """Whether anything mixes entries along the axes of a class."""
        return self.find(root) in self._why


class NotInKernelError(TypeError):
    """A step that cannot be in a kernel, because of one of its operations."""


_INSTEAD = (
    "Compute it outside of the loop, or use another schedule, such as `el.Chunked(32)`."
)


def refuse(
    eqn: jex.JaxprEqn,
    instead: str = _INSTEAD,
    why: str = "cannot be in a kernel",
    around: jex.JaxprEqn | None = None,
) -> NoReturn:
    """Raises an error that names an operation and its line."""
    raise NotInKernelError(f"Fused: {said(eqn, around)} {why}. {instead}")


def said(eqn: jex.JaxprEqn, around: jex.JaxprEqn | None = None) -> str:
    """An operation and where it is, in words."""
    place = place_of(eqn.source_info)
    if place is None and around is not None:
        place = place_of(around.source_info)
    return f"`{eqn.primitive.name}`{f' at {place}' if place else ''}"


def program_of_jaxpr(classes: Classes, closed: jex.ClosedJaxpr) -> AxisProgram:
    """A program whose axes are in classes: calls in it are opened."""
    ins = [classes.array(aval) for aval in closed.in_avals]
    return _program(classes, closed, ins)


def _program(classes: Classes, closed: Any, ins: Sequence[Val]) -> AxisProgram:
    if not isinstance(closed, jex.ClosedJaxpr):
        closed = jex.ClosedJaxpr(closed, ())
    ops = list[Op]()
    return AxisProgram(list(ins), _opened(classes, closed, ins, ops), ops)


def open_call(
    classes: Classes, closed: jex.ClosedJaxpr, ins: Sequence[Val]
) -> tuple[list[Val], list[Op]]:
    """The outputs of a program that is called, and its operations."""
    program = _program(classes, closed, ins)
    return program.outs, program.ops


# Calls that are the program that they call. Nothing differentiates it any more.
_CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")
_CALL_NAMES = {
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
    "remat",
    "remat2",
    "checkpoint",
    "custom_lin",
}


def _opened(
    classes: Classes, closed: jex.ClosedJaxpr, ins: Sequence[Val], ops: list[Op]
) -> list[Val]:
    """The operations of a program, added to `ops`. Returns its outputs."""
    jaxpr = closed.jaxpr
    env = dict(zip(jaxpr.invars, ins, strict=True))

    def constant(value: Any) -> Val:
        aval = jax.core.ShapedArray(np.shape(value), jax.typeof(value).dtype)
        val = classes.array(aval)
        if not val.shape and not jnp.issubdtype(val.aval.dtype, jax.dtypes.extended):
            val.literal = np.asarray(value)[()]
        else:
            classes.lifted.append((val, value))
        return val

    for var, value in zip(jaxpr.constvars, closed.consts, strict=True):
        env[var] = constant(value)
    read = lambda x: constant(x.val) if isinstance(x, jex.Literal) else env[x]
    for eqn in jaxpr.eqns:
        given, outs = list(map(read, eqn.invars)), None
        if (formula := formula_of(eqn)) is not None:
            outs = _opened(classes, formula.expanded, given, ops)
        elif eqn.primitive.name == "constant":
            array = np.asarray(eqn.params["numbers"], np.int32)
            outs = [constant(array.reshape(eqn.params["shape"]))]
        elif eqn.primitive.name in _CALL_NAMES:
            inner = next(eqn.params[n] for n in _CALLS if n in eqn.params)
            if not isinstance(inner, jex.ClosedJaxpr):
                inner = jex.ClosedJaxpr(inner, ())
            around = classes.around
            classes.around = eqn if place_of(eqn.source_info) else around
            outs = _opened(classes, inner, given, ops)
            classes.around = around
        if outs is None:
            outs = [classes.array(aval_of(var)) for var in eqn.outvars]
            op = Op(eqn, given, outs)
            put_into_classes(classes, op)
            ops.append(op)
        env.update(zip(eqn.outvars, outs, strict=True))
    return list(map(read, jaxpr.outvars))


def put_into_classes(classes: Classes, op: Op) -> None:
    """Puts the axes of one operation into classes."""
    rule = _RULES.get(op.name)
    if rule is None and op.name not in ELEMENTWISE:
        refuse(op.eqn, around=classes.around)
    (rule or _elementwise)(classes, op)


# Operations on each entry by itself.
ELEMENTWISE = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e
    bessel_i1e bitcast_convert_type cbrt ceil clamp clz complex conj
    convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp
    exp2 expm1 floor ge gt imag integer_pow is_finite le lgamma log log1p logistic
    lt max min mul ne neg nextafter not one_minus_square optimization_barrier or
    polynomial population_count pow pvary pcast random_fold_in real
    reduce_precision rem round rsqrt select_n sharding_constraint shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square
    stop_gradient sub tan tanh threefry2x32 xor eq_to le_to lt_to device_put""".split()  # noqa: SIM905
)


def _elementwise(classes: Classes, op: Op) -> None:
    # Each of several results has the shape of its own operand, or of all.
    many = op.name in ("optimization_barrier", "device_put")
    for n, out in enumerate(op.outs):
        for a in [op.ins[n]] if many else op.ins:
            if len(a.shape) == len(out.shape):
                classes.tie(a, out)
            elif a.shape:
                # Of other bits per entry: the last axis is another one.
                _unwrap(classes, dataclasses.replace(op, ins=[a], outs=[out]))
                _wrap(classes, dataclasses.replace(op, ins=[a], outs=[out]))


def _mixed(classes: Classes, op: Op, val: Val, axes: Sequence[int]) -> None:
    for i in axes:
        classes.spoil(val.dims[i], lambda: f"{said(op.eqn)} mixes them")


def _others(classes: Classes, op: Op, a: Val, b: Val, mixed: Sequence[int]) -> None:
    """Two arrays of as many axes: all but the mixed ones are of one class."""
    for i in range(len(a.shape)):
        if i not in mixed:
            classes.same(a, i, b, i)
    _mixed(classes, op, a, mixed)
    _mixed(classes, op, b, mixed)


def _broadcast(classes: Classes, op: Op) -> None:
    for i, j in enumerate(op.params["broadcast_dimensions"]):
        classes.same(op.ins[0], i, op.outs[0], j)


def kept_by_reshape(old: Sequence[int], new: Sequence[int]) -> list[tuple[int, int]]:
    """The axes that a reshape leaves as they are, in pairs."""
    pairs, i, j = list[tuple[int, int]](), 0, 0
    while i < len(old) and j < len(new):
        if old[i] == new[j]:
            pairs.append((i, j))
            i, j = i + 1, j + 1
        elif old[i] == 1:
            i += 1
        elif new[j] == 1:
            j += 1
        else:
            # The shortest runs of axes with as many entries.
            a, b, i, j = old[i], new[j], i + 1, j + 1
            while a != b:
                if a < b:
                    a, i = a * old[i], i + 1
                else:
                    b, j = b * new[j], j + 1
    return pairs


def _reshape(classes: Classes, op: Op) -> None:
    (a, *_), (out,) = op.ins, op.outs
    pairs = kept_by_reshape(a.shape, out.shape)
    for i, j in pairs:
        classes.same(a, i, out, j)
    big = lambda val, kept: [
        i for i, n in enumerate(val.shape) if n > 1 and i not in kept
    ]
    _mixed(classes, op, a, big(a, [i for i, _ in pairs]))
    _mixed(classes, op, out, big(out, [j for _, j in pairs]))


def _squeeze(classes: Classes, op: Op) -> None:
    (a,), (out,), gone = op.ins, op.outs, op.params["dimensions"]
    for j, i in enumerate(i for i in range(len(a.shape)) if i not in gone):
        classes.same(a, i, out, j)


def _transpose(classes: Classes, op: Op) -> None:
    for j, i in enumerate(op.params["permutation"]):
        classes.same(op.ins[0], i, op.outs[0], j)


def _along(name: str) -> Callable[[Classes, Op], None]:
    """Operations that mix along one axis, which this parameter names."""

    def rule(classes: Classes, op: Op) -> None:
        axis = op.params[name]
        for a in op.ins:
            for out in op.outs:
                if len(a.shape) == len(out.shape):
                    _others(classes, op, a, out, [axis])

    return rule


def _changed(classes: Classes, op: Op) -> None:
    """Slices and the like: an axis whose size they keep is kept."""
    a, out = op.ins[0], op.outs[0]
    cut = [i for i in range(len(a.shape)) if a.shape[i] != out.shape[i]]
    if op.name == "slice" and op.params["strides"] is not None:
        cut += [i for i, s in enumerate(op.params["strides"]) if s != 1]
    if op.name == "rev":
        cut = list(op.params["dimensions"])
    if op.name == "pad":
        cut = [i for i, c in enumerate(op.params["padding_config"]) if any(c)]
    _others(classes, op, a, out, sorted(set(cut)))


def _update_slice(classes: Classes, op: Op) -> None:
    (a, update), (out,) = op.ins[:2], op.outs
    cut = [i for i in range(len(a.shape)) if a.shape[i] != update.shape[i]]
    _others(classes, op, a, out, cut)
    _others(classes, op, update, out, cut)


def _stack(classes: Classes, op: Op) -> None:
    axis, out = op.params["axis"], op.outs[0]
    for a in op.ins:
        for i in range(len(a.shape)):
            classes.same(a, i, out, i + (i >= axis))
    _mixed(classes, op, out, [axis])


def _unstack(classes: Classes, op: Op) -> None:
    axis, (a,) = op.params["axis"], op.ins
    for out in op.outs:
        for i in range(len(out.shape)):
            classes.same(out, i, a, i + (i >= axis))
    _mixed(classes, op, a, [axis])


def _reduce(classes: Classes, op: Op) -> None:
    axes, (out,) = op.params["axes"], op.outs
    for a in op.ins:
        left = [i for i in range(len(a.shape)) if i not in axes]
        for j, i in enumerate(left):
            classes.same(a, i, out, j)
        # A sum over rows is allowed if it stays pending.
        if op.name != "reduce_sum":
            _mixed(classes, op, a, axes)


def dot_axes(op: Op) -> tuple[Any, ...]:
    """The batch axes, the axes that are left and the contracted ones of a product.

    Returns:
        For the left and the right operand: batch axes, other axes, contracted axes.
    """
    (lc, rc), (lb, rb) = op.params["dimension_numbers"]
    free = lambda val, *gone: [
        i for i in range(len(val.shape)) if not any(i in g for g in gone)
    ]
    left, right = op.ins
    return (lb, free(left, lb, lc), lc), (rb, free(right, rb, rc), rc)


def _dot(classes: Classes, op: Op) -> None:
    (left, right), (out,) = op.ins, op.outs
    (lb, lf, lc), (rb, rf, rc) = dot_axes(op)
    for n, (i, j) in enumerate(zip(lb, rb, strict=True)):
        classes.same(left, i, out, n)
        classes.same(right, j, out, n)
    for n, i in enumerate(lf):
        classes.same(left, i, out, len(lb) + n)
    for n, i in enumerate(rf):
        classes.same(right, i, out, len(lb) + len(lf) + n)
    for i, j in zip(lc, rc, strict=True):
        classes.same(left, i, right, j)


def _window_axes(
    op: Op, parts: Val
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The axes of the parts that a gather reads or a scatter writes.

    Returns:
        Pairs of an axis of the operand, or of the indices, and one of the parts. Axes
        along which they do not have all of the operand are missing.
    """
    windows, (a, at) = Windows.of(op.params), op.ins[:2]
    whole = [
        (i, j)
        for i, j in zip(windows.kept(len(a.shape)), windows.own, strict=True)
        if a.shape[i] == parts.shape[j] and i not in windows.starts
    ]
    batch = windows.of_indices(len(parts.shape))
    taken = list(zip(range(len(at.shape) - 1), batch, strict=True))
    whole += [(i, dict(taken)[k]) for i, k in windows.batch]
    return whole, taken


def _gather(classes: Classes, op: Op) -> None:
    (a, at), (out,) = op.ins[:2], op.outs
    whole, taken = _window_axes(op, out)
    for i, j in whole:
        classes.same(a, i, out, j)
    for k, j in taken:
        classes.same(at, k, out, j)
    ours = [i for i, _ in whole]
    _mixed(classes, op, a, [i for i in range(len(a.shape)) if i not in ours])
    theirs = {j for _, j in (*whole, *taken)}
    _mixed(classes, op, out, [j for j in range(len(out.shape)) if j not in theirs])
    _mixed(classes, op, at, [len(at.shape) - 1])


def _scatter(classes: Classes, op: Op) -> None:
    (a, at, up), (out,) = op.ins, op.outs
    classes.tie(a, out)
    whole, taken = _window_axes(op, up)
    for i, j in whole:
        classes.same(a, i, up, j)
    for k, j in taken:
        classes.same(at, k, up, j)
    ours = [i for i, _ in whole]
    _mixed(classes, op, a, [i for i in range(len(a.shape)) if i not in ours])
    batched = [j for _, j in whole]
    # Rows of indices that are no rows of the operand would all write to the same.
    _mixed(classes, op, up, [j for j in range(len(up.shape)) if j not in batched])
    _mixed(classes, op, at, [len(at.shape) - 1])


def _sort(classes: Classes, op: Op) -> None:
    axis = op.params["dimension"]
    for a, out in zip(op.ins, op.outs, strict=True):
        _others(classes, op, a, out, [axis])
        classes.tie(op.ins[0], a)


def _top_k(classes: Classes, op: Op) -> None:
    (a,), last = op.ins, len(op.ins[0].shape) - 1
    for out in op.outs:
        _others(classes, op, a, out, [last])


def _arg(classes: Classes, op: Op) -> None:
    axes, (a,), (out,) = op.params["axes"], op.ins, op.outs
    for j, i in enumerate(i for i in range(len(a.shape)) if i not in axes):
        classes.same(a, i, out, j)
    _mixed(classes, op, a, axes)


def _leading(classes: Classes, op: Op) -> None:
    """Keys: the axes that both have are the first ones."""
    for a in op.ins:
        for i in range(min(len(a.shape), len(op.outs[0].shape))):
            classes.same(a, i, op.outs[0], i)
    n = min(len(a.shape) for a in op.ins)
    _mixed(classes, op, op.outs[0], range(n, len(op.outs[0].shape)))


def _unwrap(classes: Classes, op: Op) -> None:
    (a,), (out,) = op.ins, op.outs
    n = min(len(a.shape), len(out.shape))
    for i in range(n):
        classes.same(a, i, out, i)
    _mixed(classes, op, out, range(n, len(out.shape)))


def _wrap(classes: Classes, op: Op) -> None:
    (a,), (out,) = op.ins, op.outs
    n = min(len(a.shape), len(out.shape))
    for i in range(n):
        classes.same(a, i, out, i)
    _mixed(classes, op, a, range(n, len(a.shape)))


def _while(classes: Classes, op: Op) -> None:
    n, m = op.params["cond_nconsts"], op.params["body_nconsts"]
    carry = op.ins[n + m :]
    # Each program has arrays of its own, tied to those outside.
    cond = _inner(classes, op.params["cond_jaxpr"], [*op.ins[:n], *carry])
    body = _inner(classes, op.params["body_jaxpr"], [*op.ins[n : n + m], *carry])
    for before, after, out in zip(body.ins[m:], body.outs, op.outs, strict=True):
        classes.tie(before, after)
        classes.tie(before, out)
    op.inner = [cond, body]


def _inner(classes: Classes, closed: Any, given: Sequence[Val]) -> AxisProgram:
    ins = [classes.array(val.aval) for val in given]
    for a, b in zip(given, ins, strict=True):
        classes.tie(a, b)
    return _program(classes, closed, ins)


def _cond(classes: Classes, op: Op) -> None:
    for closed in op.params["branches"]:
        branch = _inner(classes, closed, op.ins[1:])
        for a, b in zip(branch.outs, op.outs, strict=True):
            classes.tie(a, b)
        op.inner.append(branch)


def scan_counts(op: Op) -> tuple[int, int]:
    """How many consts and how many leaves of a carry a `scan` has."""
    params = op.params
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = (len(group) for group in params["ft_in"].unpack())
    return consts, carry


def _scan(classes: Classes, op: Op) -> None:
    n, m = scan_counts(op)
    closed = op.params["jaxpr"]
    if not isinstance(closed, jex.ClosedJaxpr):
        closed = jex.ClosedJaxpr(closed, ())
    ins = [classes.array(aval) for aval in closed.in_avals]
    for a, b in zip(op.ins[: n + m], ins, strict=False):
        classes.tie(a, b)
    for a, b in zip(op.ins[n + m :], ins[n + m :], strict=True):
        for i in range(len(b.shape)):
            classes.same(a, i + 1, b, i)
        _mixed(classes, op, a, [0])
    body = _program(classes, closed, ins)
    for before, after, out in zip(ins[n : n + m], body.outs, op.outs, strict=False):
        classes.tie(before, after)
        classes.tie(before, out)
    for y, out in zip(body.outs[m:], op.outs[m:], strict=True):
        for i in range(len(y.shape)):
            classes.same(y, i, out, i + 1)
        _mixed(classes, op, out, [0])
    op.inner = [body]


def _iota(classes: Classes, op: Op) -> None:
    """Every axis of it may be rows: then it is the number of the row."""


_RULES: dict[str, Callable[[Classes, Op], None]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "transpose": _transpose,
    "concatenate": _along("dimension"),
    "split": _along("axis"),
    "cumsum": _along("axis"),
    "cumprod": _along("axis"),
    "cummax": _along("axis"),
    "cummin": _along("axis"),
    "cumlogsumexp": _along("axis"),
    "slice": _changed,
    "rev": _changed,
    "pad": _changed,
    "dynamic_slice": _changed,
    "dynamic_update_slice": _update_slice,
    "stack": _stack,
    "unstack": _unstack,
    **dict.fromkeys(REDUCTIONS, _reduce),
    "argmax": _arg,
    "argmin": _arg,
    "dot_general": _dot,
    "gather": _gather,
    **dict.fromkeys(SCATTERS, _scatter),
    "sort": _sort,
    "top_k": _top_k,
    "iota": _iota,
    "random_seed": _leading,
    "random_split": _leading,
    "random_bits": _leading,
    "random_unwrap": _unwrap,
    "random_wrap": _wrap,
    "while": _while,
    "cond": _cond,
    "scan": _scan,
}


@dataclasses.dataclass(frozen=True)
class FoundRows:
    """The rows of a program.

    Attributes:
        roots: The classes that are rows, in the order of the rows.
        sizes: How many there are of each.
        reason: What is in the way of more rows, if anything is.
    """

    roots: tuple[int, ...]
    sizes: tuple[int, ...]
    reason: str | None = None

    @property
    def count(self) -> int:
        return math.prod(self.sizes)
