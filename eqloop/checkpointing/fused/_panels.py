"""Programs of one row as operations on panels: some units of all rows of a block.

A row of a recurrent cell has vectors of units, and its step multiplies them by matrices
that all rows share. Here such a vector is a list of panels, each of some of its units,
so that to slice and to join vectors takes nothing:

    the gates of a GRU   | reset | update | new |

What has no part in a row is computed before the kernel, such as a matrix with a mask.
The cotangent of a matrix is two vectors of each row, whose product is added up over
rows and steps after the kernel.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._programs import ELEMENTWISE, aval_of, said
from ..._types import Value

NARROW = jnp.dtype("bfloat16")
_FLOAT = np.dtype("float32")
# What is made of the units of a row, besides a sum.
EXTREMES = "reduce_max", "reduce_min"


class NotPanelsError(Exception):
    """A program is none of panels; the message says why."""


@dataclasses.dataclass(frozen=True, eq=False)
class Same:
    """What all rows share.

    Attributes:
        var: What is computed before the kernel: it, or the number that all of it is.
        shape: Its shape.
        dtype: Its dtype.
        value: The number in the program that all of it is, if it is one.
        is_narrow: Whether its numbers are those of bfloat16.
    """

    var: Any
    shape: tuple[int, ...]
    dtype: Any
    value: Any = None
    is_narrow: bool = False

    @property
    def is_number(self) -> bool:
        return self.value is not None or self.var.aval.size == 1


@dataclasses.dataclass(frozen=True)
class Factor:
    """A part of a matrix by which a panel is multiplied.

    Attributes:
        matrix: The matrix.
        starts: Its first row and column there.
        sizes: How many of them it has.
        axis: Along which of its axes it is multiplied.
        is_exact: Whether the product is to be as precise as can be.
    """

    matrix: Same
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    axis: int
    is_exact: bool

    @property
    def key(self) -> Any:
        """Which part of which matrix it is."""
        return self.matrix, self.starts, self.sizes

    def part(self, start: int, width: int) -> "Factor":
        """That for some of the units of the product."""
        starts, sizes = list(self.starts), list(self.sizes)
        starts[1 - self.axis] += start
        sizes[1 - self.axis] = width
        return dataclasses.replace(self, starts=tuple(starts), sizes=tuple(sizes))


@dataclasses.dataclass(frozen=True, eq=False)
class Panel:
    """Some units of each row of a block, or a number of each.

    Attributes:
        kind: `given`, `same`, `mapped`, `spread`, `product` or `summed`.
        width: How many units it has; 1 if it is a number.
        dtype: Its dtype.
        of: What is given, what rows share, the operation, or the name of a reduction.
        start: Its first unit in what is given or the same.
        ins: The panels that it is made of, and numbers that rows share.
        factors: Of a product, what each of them is multiplied by.
        level: How many products, or sums of units, come one after the other in it.
    """

    kind: str
    width: int
    dtype: Any
    of: Any = None
    start: int = 0
    ins: "tuple[Panel | Same, ...]" = ()
    factors: tuple[Factor, ...] = ()
    level: int = 0

    @property
    def panels(self) -> "list[Panel]":
        """The panels that it is made of."""
        return [x for x in self.ins if isinstance(x, Panel)]

    @property
    def narrow(self) -> "Panel":
        """The numbers of bfloat16 that it has in another type, if it has."""
        is_cast = self.kind == "mapped" and _is_cast(self.of)
        return self.panels[0] if is_cast and self.ins[0].dtype == NARROW else self


# What rows have: a number or a vector each.
Wide: TypeAlias = tuple[Panel, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Outer:
    """A matrix that is added up over rows: products of two vectors of each row."""

    pairs: tuple[tuple[Wide, Wide], ...]


class Panels:
    """A program of one row, by panels.

    Attributes:
        outs: Its outputs.
    """

    def __init__(
        self, program: jex.ClosedJaxpr, own: Sequence[int], carried: Sequence[int]
    ):
        """Each row has inputs of its `own`, some of which are `carried`."""
        self._program, self._carried = program, carried
        self._made, self._before = dict[Any, Panel](), list[jex.JaxprEqn]()
        self.outs = self._run(own)

    def before(self, inputs: Sequence[Value], wanted: Sequence[Any]) -> list[Value]:
        """What all rows share, computed of the inputs that they share."""
        jaxpr = self._program.jaxpr
        env = dict(zip(jaxpr.constvars, self._program.consts, strict=True))
        env.update(zip(jaxpr.invars, inputs, strict=True))
        read = lambda v: v.val if isinstance(v, jex.Literal) else env[v]
        for eqn in self._before:
            made = eqn.primitive.bind(*map(read, eqn.invars), **eqn.params)
            made = made if eqn.primitive.multiple_results else [made]
            env.update(zip(eqn.outvars, made, strict=True))
        return [env[var] for var in wanted]

    def _run(self, own: Sequence[int]) -> list[Wide | Outer]:
        jaxpr = self._program.jaxpr
        env: dict[Any, Any] = {v: _same(v) for v in (*jaxpr.constvars, *jaxpr.invars)}
        for i in own:
            aval = jaxpr.invars[i].aval
            given = Panel("given", _units(aval.shape), aval.dtype, i)
            env[jaxpr.invars[i]] = (given,)

        def read(v: Any) -> Any:
            if isinstance(v, jex.Literal):
                return Same(None, aval_of(v).shape, aval_of(v).dtype, v.val)
            return env[v]

        seen = dict[Any, list[Same]]()
        for eqn in jaxpr.eqns:
            ins, (out, *_) = list(map(read, eqn.invars)), eqn.outvars
            if all(isinstance(x, Same) for x in ins):
                # A matrix is cast for each of its products, and is in memory once.
                key = eqn.primitive, str(eqn.params), tuple(map(id, eqn.invars))
                self._before.append(eqn)
                made = seen.setdefault(key, [_same(v, eqn, ins) for v in eqn.outvars])
                env.update(zip(eqn.outvars, made, strict=True))
            elif eqn.primitive.name in ELEMENTWISE:
                env[out] = self.mapped(eqn, ins)
            elif (rule := _RULES.get(eqn.primitive.name)) is not None:
                env[out] = rule(self, eqn, *ins)
            else:
                raise NotPanelsError(f"{said(eqn)} is not for units")
        outs = map(read, jaxpr.outvars)
        return [x if isinstance(x, Outer) else self.wide(x) for x in outs]

    def one(self, out: int) -> Panel:
        """The only panel of an output."""
        if len(wide := self.wide(self.outs[out])) != 1:
            raise NotPanelsError("what is carried is joined of several vectors")
        return wide[0]

    def wide(self, x: Any) -> Wide:
        if isinstance(x, Outer):
            raise NotPanelsError("a matrix of each row is more than added up")
        if isinstance(x, Same):
            return (Panel("same", _units(x.shape), x.dtype, x),)
        return x

    def mapped(self, eqn: jex.JaxprEqn, ins: Sequence[Any]) -> Wide | Outer:
        if any(isinstance(x, Outer) for x in ins):
            if _is_cast(eqn):
                return ins[0]
            if _is_sum(eqn) and all(isinstance(x, Outer) for x in ins):
                return Outer(tuple(pair for x in ins for pair in x.pairs))
        n = _units(aval_of(eqn.outvars[0]).shape)
        of = [x if _is_number(x) else spread(self.wide(x), n) for x in ins]
        edges = sorted({b for x in of if not isinstance(x, Same) for b in ends(x)})
        parts = (
            [x if isinstance(x, Same) else self._part(x, a, b) for x in of]
            for a, b in itertools.pairwise(edges)
        )
        return tuple(self._map(eqn, *part) for part in parts)

    def _map(self, eqn: jex.JaxprEqn, *ins: Any) -> Panel:
        dtype = aval_of(eqn.outvars[0]).dtype
        if _is_cast(eqn) and dtype == ins[0].narrow.dtype:
            return ins[0].narrow
        if _is_sum(eqn) and (joined := self._joined(*ins)) is not None:
            return joined
        # Cotangents are often computed twice, once for each of two products.
        key = eqn.primitive, str(eqn.params), ins
        if key not in self._made:
            panels = [x for x in ins if isinstance(x, Panel)]
            level = max(x.level for x in panels)
            width = panels[0].width
            self._made[key] = Panel("mapped", width, dtype, eqn, 0, ins, level=level)
        return self._made[key]

    def _joined(self, a: Any, b: Any) -> Panel | None:
        """A sum of which two terms are products, with these as one."""
        for x, y in ((a, b), (b, a)):
            if isinstance(x, Same) or isinstance(y, Same) or x.kind != "product":
                continue
            if y.kind == "product":
                more = {"ins": x.ins + y.ins, "factors": x.factors + y.factors}
                return dataclasses.replace(x, **more, level=max(x.level, y.level))
            if y.kind == "mapped" and _is_sum(y.of):
                for term, other in (y.ins, y.ins[::-1]):
                    if (inner := self._joined(x, term)) is not None:
                        return self._map(y.of, inner, other)
        return None

    def _part(self, wide: Wide, start: int, stop: int) -> Panel:
        """The units of a value from one to another, which are in one panel."""
        at, panel = next(
            (a, p)
            for a, p in zip(ends(wide), wide, strict=False)
            if stop <= a + p.width
        )
        return self._sub(panel, start - at, stop - start)

    def _sub(self, x: Any, start: int, width: int) -> Any:
        if isinstance(x, Same) or (start, width) == (0, x.width):
            return x
        if (key := (x, start, width)) not in self._made:
            if x.kind == "given" and x.of in self._carried:
                raise NotPanelsError("some units of what is carried are taken")
            ins = x.ins
            if x.kind == "mapped":
                ins = tuple(self._sub(y, start, width) for y in ins)
            factors = tuple(f.part(start, width) for f in x.factors)
            more = {"width": width, "start": x.start + start}
            self._made[key] = dataclasses.replace(x, **more, ins=ins, factors=factors)
        return self._made[key]

    def sliced(self, wide: Wide, start: int, stop: int) -> Wide:
        edges = [start, *(b for b in ends(wide) if start < b < stop), stop]
        return tuple(self._part(wide, *at) for at in itertools.pairwise(edges))


def _same(var: Any, eqn: Any = None, ins: Sequence[Any] = ()) -> Same:
    """What is computed before the kernel, by an operation of others."""
    aval, name = var.aval, eqn and eqn.primitive.name
    is_narrow = aval.dtype == NARROW
    if name == "broadcast_in_dim" and ins[0].is_number:
        return dataclasses.replace(ins[0], shape=aval.shape)
    if name in (*_MOVES, "convert_element_type"):
        is_narrow = is_narrow or ins[0].is_narrow
    return Same(var, aval.shape, aval.dtype, None, is_narrow)


def _is_number(x: Any) -> bool:
    return isinstance(x, Same) and x.is_number


def _is_cast(eqn: jex.JaxprEqn) -> bool:
    return eqn.primitive.name == "convert_element_type"


def _is_sum(eqn: jex.JaxprEqn) -> bool:
    is_float = aval_of(eqn.outvars[0]).dtype == _FLOAT
    return eqn.primitive.name in ("add", "add_any") and is_float


def _units(shape: Sequence[int]) -> int:
    if sum(n != 1 for n in shape) > 1:
        raise NotPanelsError(f"a row has an array of shape {tuple(shape)}")
    return math.prod(shape)


def ends(wide: Wide) -> list[int]:
    """The first unit of each of its panels, and how many it has in all."""
    return list(itertools.accumulate((p.width for p in wide), initial=0))


def _level(wide: Wide) -> int:
    return max(p.level for p in wide)


def spread(x: Wide, n: int) -> Wide:
    """A number of each row as so many units, if it is one."""
    if n == sum(panel.width for panel in x):
        return x
    return (_spread_panel(x[0], n),)


def _spread_panel(x: Panel, n: int) -> Panel:
    # Flags are not spread: they are computed for each unit.
    if x.kind == "mapped" and x.dtype == np.dtype(bool):
        ins = (_spread_panel(y, n) if isinstance(y, Panel) else y for y in x.ins)
        return dataclasses.replace(x, width=n, ins=tuple(ins))
    return Panel("spread", n, x.dtype, ins=(x,), level=x.level)


# Operations in which a row has a part.


def _moved(of: Panels, eqn: jex.JaxprEqn, x: Any) -> Wide | Outer:
    """What moves no unit, repeats a number, or turns a matrix."""
    before, after = (aval_of(v).shape for v in (eqn.invars[0], eqn.outvars[0]))
    if not isinstance(x, Outer):
        return spread(x, _units(after))
    order = eqn.params.get("permutation") or range(len(before))
    order = [i for i in order if before[i] != 1]
    if [n for n in after if n != 1] != [before[i] for i in order]:
        raise NotPanelsError(f"{said(eqn)} is of a matrix of each row")
    if order == sorted(order):
        return x
    return Outer(tuple((right, left) for left, right in x.pairs))


def _sliced(of: Panels, eqn: jex.JaxprEqn, x: Any) -> Wide:
    p, shape = eqn.params, aval_of(eqn.invars[0]).shape
    bounds = zip(p["start_indices"], p["limit_indices"], shape, strict=True)
    start, stop = next(((a, b) for a, b, n in bounds if n != 1), (0, 1))
    made = of.sliced(of.wide(x), start, stop)
    if set(p["strides"] or ()) - {1} or (
        min(q.width for q in made) == 1 and len(x) == 1
    ):
        raise NotPanelsError(f"{said(eqn)} takes single units")
    return made


def _joined(of: Panels, eqn: jex.JaxprEqn, *xs: Any) -> Wide:
    _units(aval_of(eqn.outvars[0]).shape)
    return tuple(panel for x in xs for panel in of.wide(x))


def _summed(of: Panels, eqn: jex.JaxprEqn, x: Any) -> Wide | Outer:
    shape = aval_of(eqn.invars[0]).shape
    if all(shape[i] == 1 for i in eqn.params["axes"]):
        return x
    return _reduced(of.wide(x), eqn.primitive.name)


def _reduced(x: Wide, by: str = "reduce_sum") -> Wide:
    if x[0].dtype != _FLOAT:
        raise NotPanelsError(f"it has a sum, or the like, of numbers of {x[0].dtype}")
    return (Panel("summed", 1, x[0].dtype, by, ins=x, level=1 + _level(x)),)


def _product(of: Panels, eqn: jex.JaxprEqn, *ins: Any) -> Wide | Outer:
    (axes, _), precision = eqn.params["dimension_numbers"], eqn.params["precision"]
    shapes = [aval_of(v).shape for v in eqn.invars]
    count, out = math.prod(shapes[0][i] for i in axes[0]), aval_of(eqn.outvars[0])
    if out.size == 1 or (count == 1 and 1 in map(math.prod, shapes)):
        # Of two vectors, or of a number and a vector.
        type_ = jax.ShapeDtypeStruct((max(count, out.size),), out.dtype)
        (each,) = jax.make_jaxpr(lax.mul)(type_, type_).eqns
        made = of.wide(of.mapped(each, ins))
        return made if count == 1 else _reduced(made)
    if not any(isinstance(x, Same) for x in ins):
        if count > 1:
            raise NotPanelsError(f"{said(eqn)} multiplies a matrix of each row")
        left, right = (tuple(p.narrow for p in of.wide(x)) for x in ins)
        return Outer(((left, right),))
    side = int(isinstance(ins[1], Same))
    matrix, x, shape = ins[side], of.wide(ins[1 - side]), shapes[side]
    long = [i for i, n in enumerate(shape) if n != 1]
    along = [i for i in axes[side] if shape[i] != 1]
    is_one = matrix.is_number or min(p.width for p in x) == 1
    if is_one or len(long) != 2 or len(along) != 1:
        raise NotPanelsError(f"{said(eqn)} is not by a matrix")
    axis, n = long.index(along[0]), shape[sum(long) - along[0]]
    exact = lax.Precision.HIGHEST in (precision or ())
    factors = list[Factor]()
    for at, panel in zip(ends(x), x, strict=False):
        starts, sizes = (at, 0), (panel.width, n)
        turn = slice(None, None, 1 - 2 * axis)
        factors.append(Factor(matrix, starts[turn], sizes[turn], axis, exact))
    of_x = tuple(p.narrow for p in x)
    return (Panel("product", n, _FLOAT, None, 0, of_x, tuple(factors), 1 + _level(x)),)


_MOVES = frozenset({"broadcast_in_dim", "reshape", "squeeze", "transpose"})
_RULES = {
    **dict.fromkeys(_MOVES, _moved),
    "slice": _sliced,
    "concatenate": _joined,
    **dict.fromkeys(("reduce_sum", *EXTREMES), _summed),
    "dot_general": _product,
}
