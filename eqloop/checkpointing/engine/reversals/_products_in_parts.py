"""Adds products of matrices to sums part by part, so that they take little memory.

What a batch of steps adds to the cotangent of a weight is a product, as large as the
weight itself. XLA's CPU backend computes the products of all weights before it adds the
first of them, so that all of them are in memory at once, next to the sums. But it runs
loops one after the other. So each product is computed in a loop over parts of its rows:

    for i in range(parts):
        total[rows_i] += left[:, rows_i].T @ right

A part is added to the sum at once, and the next one takes its place in memory.

It gains: without, the gradient of a plain recurrent cell takes 1.2 to 1.6 times the
memory on a CPU.
"""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Sequence

import jax.core
import jax.extend.core as jex
from jax import lax

from ...._arrays import cast_like, explicit_sharding, is_symbolic, nbytes
from ...._programs import aval_of, pruned, run, with_parts
from ...._types import Index, Value
from ...steps._loop import part, put_part

# Smaller products take little memory, and are computed as a whole.
_LEAST_BYTES = 2**16
# The numbers of parts to try, in this order; the number of rows must be a multiple.
# More parts have fewer rows each, and multiplying takes longer.
_PARTS = (4, 3, 5, 2)
# XLA's CPU backend multiplies in tiles of 2**16 entries, each on one core. A part of
# fewer entries than this leaves the other cores idle, and so takes up to twice as long.
_FOR_SEVERAL_CORES = 3 * 2**15


def added_in_parts(
    program: jex.ClosedJaxpr, inputs: Sequence[Value], totals: Sequence[Value]
) -> tuple[list[Value], list[Value]]:
    """Adds the first outputs of a program to `totals`, large products part by part.

    It returns the new sums, and the other outputs.
    """
    terms, factors = _terms_and_factors(program, len(totals))
    given = iter(run(factors, *inputs))
    sums = list[Value]()
    for total, each in zip(totals, terms, strict=True):
        for term in each:
            total = term.added(total, *(next(given) for _ in term.inputs))
        sums.append(total)
    return sums, list(given)


@functools.lru_cache(maxsize=128)
def _terms_and_factors(
    program: jex.ClosedJaxpr, count: int
) -> tuple[list[list["_WholeTerm | _Product"]], jex.ClosedJaxpr]:
    """The terms of which each of the first outputs is a sum, and what they take.

    That is a program to the inputs of all terms, followed by the other outputs.
    """
    jaxpr = program.jaxpr
    terms = _terms_of_outputs(jaxpr, count)
    # The program returns the factors of large products, so pruning removes the products
    # themselves.
    factors = [var for each in terms for term in each for var in term.inputs]
    outvars = [*factors, *jaxpr.outvars[count:]]
    return terms, pruned(with_parts(program, outvars=outvars))


def product_bytes(jaxpr: jex.Jaxpr, count: int) -> int:
    """The bytes of all terms that are in memory at once, before they are added.

    The first `count` outputs of the program are added to sums.
    """
    every = [term for each in _terms_of_outputs(jaxpr, count) for term in each]
    # Whole terms are all there at once; of the parts, one at a time.
    whole = sum(term.nbytes for term in every if term.parts == 1)
    return whole + max((term.nbytes for term in every if term.parts > 1), default=0)


@dataclasses.dataclass(frozen=True)
class _WholeTerm:
    """A term that is added as it is.

    Attributes:
        inputs: The variable of the term.
    """

    inputs: tuple[jax.core.Atom]
    parts = 1

    @property
    def nbytes(self) -> int:
        """The bytes that the term takes before it is added."""
        return nbytes([aval_of(var) for var in self.inputs])

    def added(self, total: Value, term: Value) -> Value:
        return total + cast_like(term, total)


@dataclasses.dataclass(frozen=True)
class _Product:
    """A term that is a product of matrices, added part by part.

    Attributes:
        eqn: The equation that multiplies.
        order: The transposition of the product's axes that follows.
        dim: The axis of the first factor that is cut into parts.
        axis: The axis of the sum that this one becomes.
        parts: How many parts there are.
    """

    eqn: jex.JaxprEqn
    order: tuple[int, ...]
    dim: int
    axis: int
    parts: int

    @property
    def inputs(self) -> tuple[jax.core.Atom, ...]:
        return tuple(self.eqn.invars)

    @property
    def nbytes(self) -> int:
        """The bytes that one part takes before it is added."""
        return nbytes([aval_of(self.eqn.outvars[0])]) // self.parts

    def added(self, total: Value, left: Value, right: Value) -> Value:
        # A part adds to rows that no other part adds to. So each entry of the sum is
        # read and written once, as without parts.
        size = left.shape[self.dim] // self.parts

        def body(i: Index, total: Value) -> Value:
            rows = part(left, i * size, size, self.dim)
            product = self.eqn.primitive.bind(rows, right, **self.eqn.params)
            product = cast_like(lax.transpose(product, self.order), total)
            before = part(total, i * size, size, self.axis)
            return put_part(total, before + product, i * size, self.axis)

        return lax.fori_loop(0, self.parts, body, total)


def _terms_of_outputs(
    jaxpr: jex.Jaxpr, count: int
) -> list[list[_WholeTerm | _Product]]:
    """The terms that each of the first outputs of a program is a sum of."""
    read = [var for eqn in jaxpr.eqns for var in eqn.invars] + jaxpr.outvars
    times = Counter(var for var in read if isinstance(var, jex.Var))
    # A variable that is read twice has to exist as a whole, and is not taken apart.
    makers: dict[jax.core.Atom, jex.JaxprEqn]
    makers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars if times[var] == 1}
    return [_terms(var, makers) for var in jaxpr.outvars[:count]]


def _terms(
    var: jax.core.Atom, makers: dict[jax.core.Atom, jex.JaxprEqn]
) -> list[_WholeTerm | _Product]:
    """The terms that a variable is a sum of; itself, if none of them is in parts."""
    eqn = makers.get(var) if isinstance(var, jex.Var) else None
    if eqn is None:
        return [_WholeTerm((var,))]
    if eqn.primitive.name == "add_any":
        # JAX adds up the cotangents of a variable that is read several times in this
        # way. Without a large product among them, nothing is gained by taking the sum
        # apart.
        terms = [term for part in eqn.invars for term in _terms(part, makers)]
        return terms if any(term.parts > 1 for term in terms) else [_WholeTerm((var,))]
    order = None
    if eqn.primitive.name == "transpose":
        # JAX's rule for the cotangent of a factor multiplies, and then transposes.
        order, eqn = eqn.params["permutation"], makers.get(eqn.invars[0])
    if eqn is None or eqn.primitive.name != "dot_general":
        return [_WholeTerm((var,))]
    return [_in_parts(eqn, order) or _WholeTerm((var,))]


def _in_parts(eqn: jex.JaxprEqn, order: Sequence[int] | None) -> _Product | None:
    """A product cut along an axis of its first factor; `None` if it cannot be cut."""
    (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
    left, out = aval_of(eqn.invars[0]), aval_of(eqn.outvars[0])
    # An axis of the result is cut. Along a contracted axis, each part would be a term
    # as large as the whole product.
    own = [i for i in range(left.ndim) if i not in (*contracted, *batch)]
    # An axis that is split over devices cannot be cut.
    is_sharded = eqn.params.get("out_sharding") is not None or any(
        explicit_sharding(aval_of(var)) is not None
        for var in (*eqn.invars, *eqn.outvars)
    )
    if not own or is_sharded or any(map(is_symbolic, out.shape)):
        return None
    if nbytes([out]) < _LEAST_BYTES:
        return None
    parts = _parts(left.shape[own[0]], math.prod(out.shape))
    if parts == 1:
        return None
    # The axes of a `dot_general` are those of the batch, those of the first factor, and
    # those of the second. So the cut axis of the first one is at `len(batch)`.
    order = tuple(range(out.ndim) if order is None else order)
    return _Product(eqn, order, own[0], order.index(len(batch)), parts)


def _parts(rows: int, entries: int) -> int:
    """Into how many parts a product of so many rows and entries is cut."""
    least = _FOR_SEVERAL_CORES if entries >= _FOR_SEVERAL_CORES else 0
    fits = (n for n in _PARTS if rows % n == 0 and entries >= n * least)
    return next(fits, 1)
