"""Programs in the layouts that XLA's library for CPUs takes.

Where a program begins, XLA brings convolutions into the layout of its library, and
folds transpositions into products. In the body of a loop, and in a branch, it does
neither on a CPU: a convolution then takes ten to sixty times as long, by loops of XLA's
own. So here a program is written as XLA would have written it:

- A convolution is one of `[batch, *space, features]` with a kernel of
  `[*space, features in, features out]`.
- A transposition is no operation, but a note of where the axes of a value lie. What is
  computed of a value lies as it does, for as long as its operations allow.
- What each step would transpose anew is transposed before the loop.

The numbers are the same, but for sums that a product adds up in another order. Other
devices have all of it from their compilers.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.core
import jax.extend.core as jex
from jax import lax
from jax.sharding import AxisType

from .._arrays import is_symbolic, split
from .._compat import form_of, scan_counts
from .._device import planning_device
from .._types import Value
from ._calculus import evaluated, interpreted, run, value_of
from ._effects import is_ref
from ._equations import ELEMENTWISE, Rewrite, as_written, aval_of, equations, formula_of
from ._jaxprs import (
    Rewriter,
    rewritable_programs,
    rewrite_everywhere,
    variables,
    with_equations,
    with_parts,
)

# Where axis `i` of a value lies, for each `i`.
Axes: TypeAlias = tuple[int, ...]

# Operations of one operand, or of several that lie alike, whose parameters have an
# entry for each axis, or are the numbers of axes. Reductions lose these axes.
_REDUCTIONS = {f"reduce_{kind}" for kind in ("sum", "max", "min", "prod", "and", "or")}
_WINDOWS = {f"reduce_window_{kind}" for kind in ("sum", "max", "min")}
_ALONG_AXES = {"concatenate", "pad", "rev", "slice", "split", *_REDUCTIONS, *_WINDOWS}
_ALONG_AXES |= {"select_and_scatter_add"}
_PER_AXIS = {
    *("start_indices", "limit_indices", "strides", "padding_config", "padding"),
    *("window_dimensions", "window_strides", "base_dilation", "window_dilation"),
}
# Where an array is says something of its axes.
_EACH = ELEMENTWISE - {"device_put", "sharding_constraint"}
_OF_AXES = {"dimension", "dimensions", "axis", "axes"}
# What the library takes.
_TAKEN = ("float32", "float16", "bfloat16", "complex64")
_CALLS = {"jit", "custom_jvp_call", "custom_vjp_call"}
_PASSING = {*_CALLS, *_ALONG_AXES, *ELEMENTWISE, "transpose", "broadcast_in_dim"}
_PASSING |= {"dot_general", "conv_general_dilated"}


@dataclasses.dataclass(eq=False)
class _Laid:
    """A value, and how it lies.

    Attributes:
        array: What there is of it.
        axes: Where its axes lie in the array.
        keeps: Whether what is computed of it lies as it does, and not as what it is
            computed with.
    """

    array: Value
    axes: Axes
    keeps: bool = False
    _moved: dict[Axes, Value] = dataclasses.field(default_factory=dict)

    @classmethod
    def plain(cls, array: Value) -> "_Laid":
        return cls(array, tuple(range(len(jax.typeof(array).shape))))

    def lying(self, axes: Axes, eqn: jex.JaxprEqn) -> Value:
        """The array whose axes lie so, for an equation."""
        if axes not in self._moved:
            order = [self.axes[axes.index(i)] for i in range(len(axes))]
            self._moved[axes] = _transposed(self.array, tuple(order), eqn)
        return self._moved[axes]

    def value(self, eqn: jex.JaxprEqn) -> Value:
        return self.lying(tuple(range(len(self.axes))), eqn)


def _transposed(array: Value, order: Axes, eqn: jex.JaxprEqn) -> Value:
    if order == tuple(range(len(order))):
        return array
    (move,) = jax.make_jaxpr(lambda x: lax.transpose(x, order))(jax.typeof(array)).eqns
    # It is at the line that it is for.
    return _bound(move.replace(source_info=eqn.source_info), [array])[0]


def _bound(eqn: jex.JaxprEqn, values: Sequence[Value], **params: Any) -> list[Value]:
    """The results of an equation with other operands, and some other parameters."""
    invars = variables(map(jax.typeof, values))
    params = eqn.params | params
    if "out_sharding" in params:  # it says nothing, see `_is_split`
        params["out_sharding"] = None
    return evaluated(eqn.replace(invars=invars, params=params), values)


def _is_split(eqn: jex.JaxprEqn) -> bool:
    """Whether an equation is told how its result is split over devices."""
    sharding = eqn.params.get("out_sharding")
    return sharding is not None and AxisType.Explicit in sharding.mesh.axis_types


def _places(space: int) -> tuple[Axes, Axes]:
    """Where the library has rows, features and space; and features out, in, and space.

    The same order as that of the numbers of a convolution.
    """
    rows = 0, space + 1, *range(1, space + 1)
    return rows, (space + 1, space, *range(space))


# What the library takes beside its products: for each patch of an image as long as so
# many products by a loop of XLA's own, or with groups and in three dimensions, and for
# each call. So stencils of few features are left to XLA's loops.
_PATCH, _GROUPED_PATCH, _CALL = 12, 36, 8000


def _gains(eqn: jex.JaxprEqn) -> bool:
    """Whether the library takes a convolution, and is faster than a loop."""
    params, (_, kernel) = eqn.params, map(aval_of, eqn.invars)
    numbers, out = params["dimension_numbers"], aval_of(eqn.outvars[0]).shape
    features, within, *window = (kernel.shape[i] for i in numbers.rhs_spec)
    groups = max(params["feature_group_count"], params["batch_group_count"])
    if kernel.dtype not in _TAKEN:
        return False
    if features == params["batch_group_count"] > 1:
        return True  # these are slow by loops
    patch = _PATCH if groups == 1 and len(window) < 3 else _GROUPED_PATCH
    products = features // groups * within
    sizes = [size for i, size in enumerate(out) if i != numbers.out_spec[1]]
    if products <= patch or any(map(is_symbolic, (*sizes, *window))):
        return products > patch
    return math.prod((*sizes, *window)) * groups * (products - patch) > _CALL


def _convolved(eqn: jex.JaxprEqn, values: Sequence[_Laid]) -> list[_Laid]:
    rows, weights = _places(len(eqn.params["window_strides"]))
    specs = eqn.params["dimension_numbers"]
    lies = lambda spec, places: tuple(places[spec.index(i)] for i in range(len(spec)))
    x, w, y = map(lies, specs, (rows, weights, rows))
    operands = [each.lying(at, eqn) for each, at in zip(values, (x, w), strict=True)]
    numbers = lax.ConvDimensionNumbers(rows, weights, rows)
    (out,) = _bound(eqn, operands, dimension_numbers=numbers)
    return [_Laid(out, y, keeps=True)]


def _is_slow(numbers: Any, ranks: Sequence[int]) -> bool:
    """Whether XLA would have to transpose both matrices of a product."""
    contracted, batch = numbers
    return not any(batch) and min(ranks) > 1 and contracted == ((0,), (ranks[1] - 1,))


def _multiplied(
    eqn: jex.JaxprEqn, values: Sequence[_Laid], wanted: Axes | None
) -> list[_Laid]:
    """A product; if one is `wanted`, nothing but this transposition of it is used."""
    (lhs, rhs), numbers = values, eqn.params["dimension_numbers"]
    at = lambda x, axes: tuple(x.axes[i] for i in axes)
    straight = tuple((at(lhs, left), at(rhs, right)) for left, right in numbers)
    swapped = tuple(pair[::-1] for pair in straight)
    # The axes that an operand has alone are in the product as they lie.
    own = [
        [i for i in x.axes if i not in (*contracted, *batch)]
        for x, contracted, batch in zip(values, *straight, strict=True)
    ]
    places = [[sorted(axes).index(i) for i in axes] for axes in own]
    batch = range(len(numbers[1][0]))

    def lie(of_lhs: int, of_rhs: int) -> Axes:
        starts = (len(batch) + of_lhs, len(batch) + of_rhs)
        pairs = zip(starts, places, strict=True)
        return (*batch, *(start + i for start, group in pairs for i in group))

    axes, turned = lie(0, len(own[0])), lie(len(own[1]), 0)
    is_wanted = wanted and [turned[i] for i in wanted] == sorted(turned)
    ranks = len(lhs.axes), len(rhs.axes)
    operands, params = [lhs.array, rhs.array], dict(dimension_numbers=straight)
    if _is_slow(straight, ranks) or (is_wanted and not _is_slow(swapped, ranks[::-1])):
        operands, axes, params = operands[::-1], turned, dict(dimension_numbers=swapped)
        if isinstance(precision := eqn.params["precision"], tuple):
            params["precision"] = precision[::-1]
    return [_Laid(_bound(eqn, operands, **params)[0], axes)]


def _alike(
    eqn: jex.JaxprEqn, values: Sequence[_Laid]
) -> tuple[list[Value], _Laid] | None:
    """Operands that lie alike, and one of them; `None` if they had better not."""
    if eqn.primitive.name in _ALONG_AXES:
        rank = len(values[0].axes)
    else:
        is_each = eqn.primitive.name in _EACH and len(eqn.outvars) == 1
        rank = len(aval_of(eqn.outvars[0]).shape) if is_each else 0
    whole = [x for x in values if len(x.axes) == rank]
    if not rank or not whole or any(len(x.axes) not in (0, rank) for x in values):
        return None
    lead = next((x for x in whole if x.keeps), whole[0])
    if not lead.keeps and any(x.axes != lead.axes for x in whole):
        return None
    return [x.lying(lead.axes, eqn) if x.axes else x.array for x in values], lead


def _moved_params(eqn: jex.JaxprEqn, axes: Axes) -> dict[str, Any]:
    """The parameters of an equation along axes whose operands lie so."""
    moved = dict[str, Any]()
    is_along = eqn.primitive.name in _ALONG_AXES
    given = {name: x for name, x in eqn.params.items() if is_along and x is not None}
    for name, value in given.items():
        if name in _PER_AXIS:
            moved[name] = tuple(value[axes.index(i)] for i in range(len(axes)))
        elif name in _OF_AXES:
            many = isinstance(value, tuple)
            moved[name] = tuple(sorted(axes[i] for i in value)) if many else axes[value]
    return moved


def _computed(
    eqn: jex.JaxprEqn, values: list[_Laid], wanted: Axes | None
) -> Sequence[_Laid]:
    """What an equation computes of values that lie somehow."""
    name, params = eqn.primitive.name, eqn.params
    if (callee := _passing(eqn)) is not None:
        return _through(callee, values[len(values) - len(callee.in_avals) :])
    if not _is_split(eqn):
        if name == "transpose":
            (x,) = values
            axes = tuple(x.axes[i] for i in params["permutation"])
            return [_Laid(x.array, axes, x.keeps)]
        if name == "conv_general_dilated" and _gains(eqn):
            return _convolved(eqn, values)
        if name == "dot_general" and _is_alone():
            return _multiplied(eqn, values, wanted)
        if found := _alike(eqn, values):
            arrays, x = found
            results, axes = _bound(eqn, arrays, **_moved_params(eqn, x.axes)), x.axes
            if name in _REDUCTIONS:
                left = [at for i, at in enumerate(axes) if i not in params["axes"]]
                axes = tuple(map(sorted(left).index, left))
            return [_Laid(y, axes, x.keeps) for y in results]
    return [*map(_Laid.plain, evaluated(eqn, [x.value(eqn) for x in values]))]


def _passing(eqn: jex.JaxprEqn) -> jex.ClosedJaxpr | None:
    """The program of a call, if all in it passes layouts on."""
    if form_of(eqn) not in _CALLS:
        return None
    # The derivatives of a custom rule have been taken.
    callee = rewritable_programs(eqn)[-1]
    return callee if set(map(form_of, equations(callee))) <= _PASSING else None


def _through(program: jex.ClosedJaxpr, inputs: Sequence[_Laid]) -> list[_Laid]:
    """What a program computes of values that lie somehow."""
    jaxpr = program.jaxpr
    uses = collections.Counter(x for eqn in jaxpr.eqns for x in map(id, eqn.invars))
    uses.update(map(id, jaxpr.outvars))
    wanted = {
        id(x): eqn.params["permutation"]
        for eqn in jaxpr.eqns
        for x in eqn.invars
        if eqn.primitive.name == "transpose" and uses[id(x)] == 1
    }

    def computed(eqn: jex.JaxprEqn, values: list[_Laid]) -> Sequence[_Laid]:
        return _computed(eqn, values, wanted.get(id(next(iter(eqn.outvars), None))))

    literal = lambda x: _Laid.plain(value_of(x))
    return interpreted(program, inputs, literal, computed, _Laid.plain)


def laid_out(program: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """A program in these layouts; the very same if it is in them.

    It is not to be differentiated, since custom rules are not in it any more.
    """
    return rewrite_everywhere(_level, program)


def _level(program: jex.ClosedJaxpr, rewrite: Rewrite) -> jex.ClosedJaxpr:
    jaxpr = program.jaxpr
    rewriter = Rewriter(program)
    for eqn in jaxpr.eqns:
        # A formula has its own programs laid out, once it is expanded.
        eqn = rewriter.enter(eqn, *[rewrite] * (formula_of(eqn) is None))
        if (loop := _without_moves(eqn)) is None:
            rewriter.eqns.append(eqn)
        else:
            rewriter.inline(loop, eqn.invars, eqn.outvars)
    program, own = rewriter.result(), rewriter.eqns
    jaxpr = program.jaxpr
    if not _asks(own):
        return program
    made_by = {id(out): eqn for eqn in own for out in eqn.outvars}

    def evaluate(*flat: Value) -> list[Value]:
        outs = _through(program, [*map(_Laid.plain, flat)])
        makers = [made_by.get(id(x)) for x in jaxpr.outvars]
        pairs = zip(outs, makers, strict=True)
        return [x.array if eqn is None else x.value(eqn) for x, eqn in pairs]

    return jax.make_jaxpr(evaluate)(*program.in_avals)


def _without_moves(eqn: jex.JaxprEqn) -> jex.ClosedJaxpr | None:
    """A loop that is given its consts transposed, where each step would transpose them.

    `None` for any other equation.
    """
    params, is_scan = eqn.params, eqn.primitive.name == "scan"
    if not (is_scan or eqn.primitive.name == "while"):
        return None
    counts = scan_counts(params) if is_scan else (params["cond_nconsts"],)
    before, many = (0, counts[0]) if is_scan else (*counts, params["body_nconsts"])
    body = params["jaxpr" if is_scan else "body_jaxpr"]
    place = {id(var): before + i for i, var in enumerate(body.jaxpr.invars[:many])}
    is_move = lambda e: e.primitive.name == "transpose" and id(e.invars[0]) in place
    moves = list(filter(is_move, body.jaxpr.eqns))
    if not moves or any(is_ref(aval_of(x)) for x in eqn.invars):
        return None
    rest = [e for e in body.jaxpr.eqns if not is_move(e)]
    given = [e.outvars[0] for e in moves]
    step = with_parts(body, invars=[*given, *body.jaxpr.invars], eqns=rest)

    def loop(*operands: Value) -> list[Value]:
        moved = [
            _transposed(operands[place[id(e.invars[0])]], e.params["permutation"], e)
            for e in moves
        ]
        if is_scan:
            consts, init, xs = split(operands, *counts)
            once = lambda c, x: split(run(step, *moved, *consts, *c, *x), len(c))
            how = {name: params[name] for name in ("length", "reverse", "unroll")}
            carry, ys = lax.scan(once, init, xs, **how)
            return [*carry, *ys]
        tested, consts, init = split(operands, before, many)
        goes_on = lambda c: run(params["cond_jaxpr"], *tested, *c)[0]
        return lax.while_loop(goes_on, lambda c: run(step, *moved, *consts, *c), init)

    program = jax.make_jaxpr(loop)(*map(aval_of, eqn.invars))
    made = [e.replace(source_info=eqn.source_info) for e in program.jaxpr.eqns]
    return with_equations(program, made)


def _asks(eqns: Sequence[jex.JaxprEqn]) -> bool:
    """Whether one of these equations is to be laid out otherwise."""
    moves = [eqn for eqn in eqns if eqn.primitive.name == "transpose"]
    moved = {id(x) for eqn in moves for x in [*eqn.invars, *eqn.outvars]}
    return any(_is_misplaced(eqn, moved) for eqn in eqns)


def _is_alone() -> bool:
    """Whether there is one device: which operand is first says what others are sent."""
    return planning_device().own.client.device_count() == 1


def _is_misplaced(eqn: jex.JaxprEqn, moved: set[int]) -> bool:
    name, params = eqn.primitive.name, eqn.params
    if name == "conv_general_dilated":
        rows, weights = _places(len(params["window_strides"]))
        is_plain = tuple(params["dimension_numbers"]) == (rows, weights, rows)
        return not is_plain and _gains(eqn)
    if not _is_alone():
        return False
    ranks = [len(aval_of(x).shape) for x in eqn.invars]
    if name == "dot_general" and _is_slow(params["dimension_numbers"], ranks):
        return True
    callee = _passing(eqn)
    multiplies = name == "dot_general" or (callee is not None and _multiplies(callee))
    return multiplies and not moved.isdisjoint(map(id, [*eqn.invars, *eqn.outvars]))


@functools.lru_cache(maxsize=512)
def _multiplies(program: jex.ClosedJaxpr) -> bool:
    names = {eqn.primitive.name for eqn in equations(program)}
    return not names.isdisjoint(("conv_general_dilated", "dot_general"))


def run_laid_out(
    f: Callable[..., list[Value]], flat: Sequence[Value], programs: Sequence[Any]
) -> list[Value]:
    """What a function computes, laid out for the device that it runs on.

    JAX has differentiated and batched `f`, if anybody has; it runs these programs.
    """
    if not is_slow_in_loops() or not any(map(_multiplies, programs)):
        return f(*flat)
    program = jax.make_jaxpr(f)(*map(jax.typeof, flat))
    # Without a trace, a check that fails raises its own error, and no callback does.
    is_traced = any(isinstance(x, jax.core.Tracer) for x in flat)
    calls = (eqn.primitive.name.endswith("callback") for eqn in equations(program))
    return f(*flat) if not is_traced and any(calls) else run(laid_out(program), *flat)


def notes_of_layouts(program: jex.ClosedJaxpr) -> list[str]:
    """What a plan says of a step that is laid out for the device."""
    if not is_slow_in_loops() or laid_out(program) is program:
        return []
    return ["convolutions and products are laid out for the library of a CPU"]


def is_slow_in_loops() -> bool:
    """Whether the compiler of the device does not lay out programs in loops itself."""
    # Without `jit` there are no loops to XLA.
    config: Any = jax.config  # its settings have no types
    is_slow = planning_device().platform == "cpu" and not config.jax_disable_jit
    return is_slow and not as_written.value
