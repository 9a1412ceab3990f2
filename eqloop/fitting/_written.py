"""Which values of a part and of its way back XLA writes to memory.

It fuses operations whose entries are independent of each other into what reads them, so
most values of a chain are never written. Those that are cheap are computed again in
each operation that reads them, also on the way back:

    x --dot--> y --add--> z --tanh--> t --mul--> u --dot-->     written: y, t, u
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.extend.core as jex

from .._arrays import nbytes
from .._compat import CALLS, form_of, is_for_kernels
from .._programs import as_simpler, aval_of, foreign_programs, inlined, jaxpr_of
from .._types import AnyJaxpr

# fmt: off
# What only names the same values in another way, also for a product.
_NAMES = frozenset({
    "reshape", "squeeze", "expand_dims", "transpose", "copy", "stop_gradient",
    "optimization_barrier", "name", "copy_p", "known_cast",
})
# What is written, though its operands may be fused into it.
_SUMS = frozenset({
    "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and",
    "reduce_or", "reduce_xor", "argmax", "argmin",
})
# What is written, and reads what is written.
_WHOLE = frozenset({
    "dot_general", "conv_general_dilated", "ragged_dot_general", "sort", "top_k",
    "gather", "scatter", "scatter-add", "scatter_add", "cumsum", "cumprod",
    "cummax", "cummin", "cumlogsumexp", "fft", "cholesky", "triangular_solve",
    "lu", "qr", "eigh", "svd", "random_bits", "threefry2x32",
    "reduce_window_sum", "reduce_window_max", "select_and_scatter_add",
    "select_and_gather_add", "call_hi_primitive",
})
# What is not computed twice.
_COSTLY = frozenset({
    "exp", "exp2", "log", "log1p", "expm1", "tanh", "logistic", "sin", "cos", "tan",
    "erf", "erfc", "erf_inv", "pow", "sqrt", "rsqrt", "cbrt", "div",
})
# fmt: on


@dataclasses.dataclass(frozen=True)
class Written:
    """What a part writes.

    Attributes:
        stored: The variables of its forward pass that its way back reads.
        working: The most bytes that are written at once on the way back.
    """

    stored: frozenset[Any]
    working: int


def flattened(program: jex.ClosedJaxpr, checkpoints: bool = False) -> jex.ClosedJaxpr:
    """A program without calls, but for `checkpoints`, if they are to stay."""
    calls = CALLS.keys() - ({"remat2"} if checkpoints else {})
    is_call = lambda eqn: form_of(eqn) in calls or is_for_kernels(eqn)
    return inlined(program, is_call, as_simpler)


def written(
    there: AnyJaxpr,
    back: AnyJaxpr,
    residuals: Sequence[Any],
    outs: Iterable[Any],
    kept: Iterable[Any],
) -> Written:
    """What is written by a forward pass and by its way back, two flat programs."""
    # `residuals` are the outputs of the forward pass that are the first inputs of the
    # way back, `outs` are read by others, and `kept` is handed on in the memory of
    # others.
    names = dict(zip(back.invars, residuals, strict=False))
    fusing = _Fusing([*there.eqns, *back.eqns], names, [*outs, *back.outvars])
    last: dict[Any, int] = {}
    for i, eqn in enumerate(back.eqns):
        if not fusing.is_fused(eqn):
            for x in eqn.invars:
                last.update(dict.fromkeys(fusing.roots(x), i))
    defined = {x for eqn in there.eqns for x in eqn.outvars} | {*there.invars}
    cts = [x for x in back.invars if x not in names]
    held = [*back.outvars]
    last.update((x, len(back.eqns)) for x in held if isinstance(x, jex.Var))
    free = {x for x in kept if isinstance(x, jex.Var)}
    size = lambda x: 0 if x in free else nbytes([aval_of(x)])
    alive = most = sum(map(size, cts))
    ends: dict[int, list[Any]] = {}
    for x in cts:
        ends.setdefault(last.get(x, 0), []).append(x)
    for i, eqn in enumerate(back.eqns):
        new = [] if fusing.is_fused(eqn) else [*eqn.outvars]
        made = sum(map(size, new))
        inner = max((most_written(p) for p in foreign_programs(eqn)), default=0)
        dies = sum(map(size, ends.pop(i, [])))
        # What is fused may be written in place of what it reads.
        in_place = 0 if form_of(eqn) in _WHOLE | _SUMS else dies
        most = max(most, alive - min(in_place, made) + max(made, inner))
        alive += made - dies
        for x in new:
            if (end := last.get(x, i)) > i:
                ends.setdefault(end, []).append(x)
            else:
                alive -= size(x)
    return Written(frozenset(x for x in last if x in defined), most)


def most_written(program: AnyJaxpr) -> int:
    """The most bytes that an inner program writes at once."""
    flat = program if isinstance(program, jex.ClosedJaxpr) else None
    jaxpr = program if flat is None else flattened(flat).jaxpr
    nothing = jaxpr_of([], jaxpr.invars, [])
    return written(nothing, jaxpr, [], [], []).working


class _Fusing:
    """Which equations are fused into what reads them."""

    def __init__(
        self,
        eqns: Sequence[jex.JaxprEqn],
        names: Mapping[Any, Any],
        outs: Iterable[Any],
    ):
        self._names = names
        self._made_by: dict[Any, jex.JaxprEqn] = {}
        named = map(self._named, outs)
        self._outs = {x for x in named if isinstance(x, jex.Var)}
        self._readers: dict[Any, list[jex.JaxprEqn]] = {}
        self._is_fused: dict[int, bool] = {}
        self._roots: dict[Any, frozenset[Any]] = {}
        for eqn in eqns:
            self._made_by.update(dict.fromkeys(eqn.outvars, eqn))
            for x in map(self._named, eqn.invars):
                if isinstance(x, jex.Var):
                    self._readers.setdefault(x, []).append(eqn)
        for eqn in eqns:
            self._is_fused[id(eqn)] = self._found(eqn)

    def is_fused(self, eqn: jex.JaxprEqn) -> bool:
        """Whether nothing that it computes is written."""
        return self._is_fused[id(eqn)]

    def roots(self, x: Any) -> frozenset[Any]:
        """What is written that a value is computed from."""
        x = self._named(x)
        if not isinstance(x, jex.Var):
            return frozenset()
        if x not in self._roots:
            eqn, own = self._made_by.get(x), frozenset[Any]([x])
            if eqn is not None and self.is_fused(eqn):
                own = frozenset[Any]().union(*map(self.roots, eqn.invars))
            self._roots[x] = own
        return self._roots[x]

    def _named(self, x: Any) -> Any:
        """A value as it is in the forward pass, where it may be a number."""
        return self._names.get(x, x) if isinstance(x, jex.Var) else x

    def _found(self, eqn: jex.JaxprEqn) -> bool:
        form = form_of(eqn)
        if form in _WHOLE or form in _SUMS or foreign_programs(eqn) or eqn.effects:
            return False
        if form in _NAMES and len(eqn.outvars) == 1:
            return not self._outs.intersection(eqn.outvars)
        readers = [about for x in eqn.outvars for about in self._readers.get(x, [])]
        if self._outs.intersection(eqn.outvars):
            return False
        if not all(map(self._may_fuse_into, readers)):
            return False
        return form not in _COSTLY or len(readers) <= 1

    def _may_fuse_into(self, reader: jex.JaxprEqn) -> bool:
        form = form_of(reader)
        if form in _NAMES:
            # A product may read it under its other name.
            others = [e for x in reader.outvars for e in self._readers.get(x, [])]
            return all(map(self._may_fuse_into, others))
        return form not in _WHOLE and not foreign_programs(reader)
