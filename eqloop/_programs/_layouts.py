"""Programs in the layouts that XLA's library for CPUs takes.

Where a program begins, XLA brings convolutions into the layout of its library, and
folds transpositions into products. In the body of a loop, and in a branch, it does
neither on a CPU: a convolution then takes ten to sixty times as long, by loops of XLA's
own. So here a program is written as XLA would have written it:

- A convolution is one of `[batch, *space, features]` with a kernel of
  `[*space, features in, features out]`.
- A transposition is no operation, but a note of where the axes of a value lie. What is
  computed of a value lies as it does, for as long as its operations allow.
- What each step of a loop would bring into a layout anew is laid out before the loop.

The numbers are the same, but for sums that a product adds up in another order. Other
devices have all of it from their compilers.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.extend.core as jex
from jax import lax

from .._device import planning_device
from .._types import Value
from ._calculus import evaluated, interpreted, run, value_of
from ._equations import (
    ELEMENTWISE,
    Rewrite,
    as_written,
    aval_of,
    equations,
    formula_of,
)
from ._jaxprs import (
    map_programs,
    rewritable_programs,
    rewrite_everywhere,
    with_equations,
)

# Where axis `i` of a value lies, for each `i`.
Axes: TypeAlias = tuple[int, ...]

# What a plan says of it.
NOTE = "convolutions and products are laid out for the library of a CPU"

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
_OF_AXES = {"dimension", "dimensions", "axis", "axes"}
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
    move = lambda x: lax.transpose(x, order)
    (move,) = jax.make_jaxpr(move)(jax.typeof(array)).eqns
    # It is at the line that it is for.
    return _bound(move.replace(source_info=eqn.source_info), [array])[0]


def _bound(eqn: jex.JaxprEqn, values: Sequence[Value], **params: Any) -> list[Value]:
    """The results of an equation with other operands, and some other parameters."""
    invars = [jex.Var(jax.typeof(value)) for value in values]
    return evaluated(eqn.replace(invars=invars, params=eqn.params | params), values)


def _places(space: int) -> tuple[Axes, Axes]:
    """Where the library has rows, features and space; and features out, in, and space.

    The same order as that of the numbers of a convolution.
    """
    rows = 0, space + 1, *range(1, space + 1)
    return rows, (space + 1, space, *range(space))


def _convolved(eqn: jex.JaxprEqn, values: Sequence[_Laid]) -> list[_Laid]:
    rows, weights = _places(len(eqn.params["window_strides"]))
    specs = eqn.params["dimension_numbers"]
    lies = lambda spec, places: tuple(places[spec.index(i)] for i in range(len(spec)))
    x, w, y = map(lies, specs, (rows, weights, rows))
    operands = [x_.lying(at, eqn) for x_, at in zip(values, (x, w), strict=True)]
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
    """A product, of which this transposition may be wanted, and nothing else."""
    tied = [
        tuple(
            tuple(x.axes[i] for i in axes) for x, axes in zip(values, pair, strict=True)
        )
        for pair in eqn.params["dimension_numbers"]
    ]
    ranks = [len(x.axes) for x in values]
    # The axes that an operand has alone: where they lie, and in which order.
    own = [
        [at for at in x.axes if at not in (*c, *b)]
        for x, c, b in zip(values, *tied, strict=True)
    ]
    batch = len(tied[1][0])
    places = list[Axes]()  # of the axes of the product, and of that of the other two
    for starts in ((0, len(own[0])), (len(own[1]), 0)):
        places.append(
            (
                *range(batch),
                *(
                    batch + start + sorted(axes).index(at)
                    for start, axes in zip(starts, own, strict=True)
                    for at in axes
                ),
            )
        )
    others = tuple(pair[::-1] for pair in tied)
    is_wanted = wanted and [places[1][i] for i in wanted] == sorted(places[1])
    swaps = _is_slow(tied, ranks) or (is_wanted and not _is_slow(others, ranks[::-1]))
    operands, params = [x.array for x in values], dict(dimension_numbers=tuple(tied))
    if swaps:
        operands, params["dimension_numbers"] = operands[::-1], others
        if isinstance(precision := eqn.params["precision"], tuple):
            params["precision"] = precision[::-1]
    return [_Laid(_bound(eqn, operands, **params)[0], places[bool(swaps)])]


def _alike(
    eqn: jex.JaxprEqn, values: Sequence[_Laid], rank: int
) -> tuple[list[Value], _Laid] | None:
    """Operands that lie alike, and one of them; `None` if they had better not."""
    whole = [x for x in values if len(x.axes) == rank]
    if not rank or not whole or any(len(x.axes) not in (0, rank) for x in values):
        return None
    lead = next((x for x in whole if x.keeps), whole[0])
    if not lead.keeps and any(x.axes != lead.axes for x in whole):
        return None
    return [x.lying(lead.axes, eqn) if x.axes else x.array for x in values], lead


def _moved_params(params: dict[str, Any], axes: Axes) -> dict[str, Any]:
    """The parameters of an equation whose operands lie so."""
    moved = dict[str, Any]()
    for name, value in params.items():
        if name in _PER_AXIS and value is not None:
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
    outs = [aval_of(out) for out in eqn.outvars]
    if name in _CALLS and (callee := _passing(eqn)) is not None:
        return _through(callee, values[len(values) - len(callee.in_avals) :])
    if params.get("out_sharding") is None:
        if name == "transpose":
            (x,) = values
            axes = tuple(x.axes[i] for i in params["permutation"])
            return [_Laid(x.array, axes, x.keeps)]
        if name == "conv_general_dilated":
            return _convolved(eqn, values)
        if name == "dot_general":
            return _multiplied(eqn, values, wanted)
        if name in _ALONG_AXES and (found := _alike(eqn, values, len(values[0].axes))):
            arrays, x = found
            results = _bound(eqn, arrays, **_moved_params(params, x.axes))
            left, axes = x.axes, x.axes
            if name in _REDUCTIONS:
                left = [at for i, at in enumerate(axes) if i not in params["axes"]]
                axes = tuple(map(sorted(left).index, left))
            return [_Laid(y, axes, x.keeps) for y in results]
        rank = len(outs[0].shape) if name in ELEMENTWISE and len(outs) == 1 else 0
        if found := _alike(eqn, values, rank):
            arrays, x = found
            return [_Laid(_bound(eqn, arrays)[0], x.axes, x.keeps)]
    return [*map(_Laid.plain, evaluated(eqn, [x.value(eqn) for x in values]))]


def _passing(eqn: jex.JaxprEqn) -> jex.ClosedJaxpr | None:
    """The program of a call, if all in it passes layouts on."""
    # The derivatives of a custom rule have been taken.
    callee = rewritable_programs(eqn)[-1]
    names = {inner.primitive.name for inner in equations(callee)}
    return callee if names <= _PASSING else None


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
        return _computed(
            eqn, values, wanted.get(id(eqn.outvars[0])) if eqn.outvars else None
        )

    literal = lambda x: _Laid.plain(value_of(x))
    return interpreted(program, inputs, literal, computed, _Laid.plain)


def laid_out(program: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """A program in these layouts; the very same if it is in them.

    It is not to be differentiated, since custom rules are not in it any more.
    """
    return rewrite_everywhere(_level, program)


def _level(program: jex.ClosedJaxpr, rewrite: Rewrite) -> jex.ClosedJaxpr:
    jaxpr = program.jaxpr
    # A formula has its own programs laid out, once it is expanded.
    own = [e if formula_of(e) else map_programs(e, rewrite) for e in jaxpr.eqns]
    program = with_equations(program, own)
    if not _asks(own):
        return program
    made_by = {out: eqn for eqn in own for out in eqn.outvars}

    def run_laid_out(*flat: Value) -> list[Value]:
        outs = _through(program, [*map(_Laid.plain, flat)])
        pairs = zip(outs, jaxpr.outvars, strict=True)
        return [
            x.value(made_by[var]) if var in made_by else x.array for x, var in pairs
        ]

    return jax.make_jaxpr(run_laid_out)(*program.in_avals)


def _asks(eqns: Sequence[jex.JaxprEqn]) -> bool:
    """Whether one of these equations is to be laid out otherwise."""
    moves = [eqn for eqn in eqns if eqn.primitive.name == "transpose"]
    moved = {id(x) for eqn in moves for x in [*eqn.invars, *eqn.outvars]}
    return any(_is_misplaced(eqn, moved) for eqn in eqns)


def _is_misplaced(eqn: jex.JaxprEqn, moved: set[int]) -> bool:
    name, params = eqn.primitive.name, eqn.params
    if name == "conv_general_dilated":
        rows, weights = _places(len(params["window_strides"]))
        return tuple(params["dimension_numbers"]) != (rows, weights, rows)
    is_call = name in _CALLS and (callee := _passing(eqn)) is not None
    multiplies = name == "dot_general" or (is_call and _multiplies(callee))
    touched = not moved.isdisjoint(map(id, [*eqn.invars, *eqn.outvars]))
    if name == "dot_general" and not touched:
        ranks = [len(aval_of(x).shape) for x in eqn.invars]
        return _is_slow(params["dimension_numbers"], ranks)
    return multiplies and touched


@functools.lru_cache(maxsize=512)
def _multiplies(program: jex.ClosedJaxpr) -> bool:
    names = {eqn.primitive.name for eqn in equations(program)}
    return not names.isdisjoint(("conv_general_dilated", "dot_general"))


def run_laid_out(
    f: Callable[..., list[Value]], flat: Sequence[Value], programs: Sequence[Any]
) -> list[Value]:
    """What a function computes, laid out for the device that it runs on.

    Args:
        f: A function that JAX has differentiated and batched, if anybody has.
        flat: Its inputs.
        programs: What it runs.
    """
    if not is_slow_in_loops() or not any(map(_multiplies, programs)):
        return f(*flat)
    return run(laid_out(jax.make_jaxpr(f)(*map(jax.typeof, flat))), *flat)


def is_slow_in_loops() -> bool:
    """Whether the compiler of the device does not lay out programs in loops itself."""
    # Without `jit` there are no loops to XLA.
    config: Any = jax.config  # its settings have no types
    is_slow = planning_device().platform == "cpu" and not config.jax_disable_jit
    return is_slow and not as_written.value
