"""The equations of programs: finding them, however deep they are.

A program is a closed jaxpr. In JAX 0.10 an equation may also hold an open one, which
has no constants. How programs are made and rewritten is in `_jaxprs.py`.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Self, TypeAlias

import jax
import jax.core
import jax.extend.core as jex

from .._arrays import Flags, is_inexact
from .._compat import HiPrimitive, programs_held
from .._types import AnyJaxpr, Aval, PyTree, Value

Rewrite: TypeAlias = Callable[[jex.ClosedJaxpr], jex.ClosedJaxpr]
# From an equation to the programs in it that a walk enters.
Inside: TypeAlias = Callable[[Any], Sequence[Any]]

# Whether formulas are expanded for somebody who reads the programs: as they are
# written, and not as this device is fastest.
as_written: Any = jax.make_user_context(False)


# Operations that do nothing to an entry.
NOTHING = frozenset(
    """copy copy_p device_put name nonbatchable optimization_barrier pcast pvary
    random_clone sharding_constraint stop_gradient""".split()  # noqa: SIM905
)


# Operations on each entry by itself.
ELEMENTWISE = NOTHING | frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e
    bessel_i1e bitcast_convert_type cbrt ceil clamp clz complex conj
    convert_element_type cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1
    floor ge gt imag integer_pow is_finite le le_to lgamma log log1p log2 logistic lt
    lt_to max min mul ne neg nextafter not one_minus_square or polynomial
    population_count pow random_fold_in real reduce_precision rem round rsqrt select_n
    shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub
    tan tanh threefry2x32 xor""".split()  # noqa: SIM905
)


class HoldsPrograms(HiPrimitive):
    """A primitive of this library, as those see it who look into programs.

    How it is differentiated and batched, `Formula` says.
    """

    def __init__(self) -> None:
        # JAX hashes a primitive, and the effects of a program may be a set.
        self.effects = frozenset(self.effects)
        super().__init__()

    @property
    def jaxprs(self) -> list[jex.ClosedJaxpr]:
        """The programs that it runs, for code that looks for something in them."""
        return []

    def rewritten(self, rewrite: Rewrite) -> Self:
        """A primitive with programs rewritten where any of the same meaning will do."""
        return self

    def nonzeros_out(self, nonzeros_in: Sequence[bool]) -> list[bool]:
        """Which outputs have a tangent if these inputs have one, both in flat order."""
        return [any(nonzeros_in) and is_inexact(aval) for aval in self.out_avals_flat]

    def reached_out(self, marks: Sequence[bool], axis_name: Hashable) -> list[bool]:
        """Which outputs depend on marked inputs, both in flat order; see `reached`."""
        return [any(marks) or axis_name is not None] * len(self.out_avals_flat)

    @property
    def steps(self) -> tuple[jex.ClosedJaxpr, tuple[int, ...]] | None:
        """The step of a loop, and how many of its inputs are constants and carried."""
        return None

    @property
    def times(self) -> int:
        """How often it runs these programs, for all that is known."""
        return 1

    @property
    def reads(self) -> Flags:
        """Which inputs, in flat order, it reads if it is not differentiated."""
        return (True,) * len(self.in_avals_flat)

    def keep_outputs(self, used: Flags) -> "tuple[HoldsPrograms, Flags, Flags] | None":
        """A smaller primitive, if any, for the used outputs: it is not differentiated.

        Also which inputs it takes and which outputs it gives, all in flat order.
        """
        return None

    def with_params(self, **params: Any) -> Self:
        """This formula with other parameters; inputs and outputs keep their types."""
        if all(value is self.params[name] for name, value in params.items()):
            return self
        # The base class of JAX sets up everything else in `__init__`, from the types.
        new = copy.copy(self)
        new.params = {**self.params, **params}
        new.__dict__.update(params)
        return new

    # Conversions between nested and flat inputs and outputs.

    def flat_in(self, tree: PyTree) -> list[Value]:
        return self.in_tree.flatten_up_to(tree)

    def flat_out(self, tree: PyTree) -> list[Value]:
        return self.out_tree.flatten_up_to(tree)

    @property
    def expanded(self) -> jex.ClosedJaxpr:
        """The program of `expand`, on flat inputs and outputs."""

        def run(*flat: Value) -> list[Value]:
            return self.flat_out(self.expand(*self.in_tree.unflatten(flat)))

        with as_written(True):
            return jax.make_jaxpr(run)(*self.in_avals_flat)


def formula_of(eqn: jex.JaxprEqn) -> HoldsPrograms | None:
    """The primitive of this library that an equation is, if it is one."""
    primitive = eqn.params.get("_prim")
    return primitive if isinstance(primitive, HoldsPrograms) else None


@dataclasses.dataclass(frozen=True)
class _Expansion:
    """The program that a formula expands to, traced when it is read."""

    formula: HoldsPrograms

    def __repr__(self) -> str:
        return "..."

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # what copies an object looks for such names
            return object.__getattribute__(self, name)
        return getattr(self._program, name)

    @functools.cached_property
    def _program(self) -> Any:
        # A call, since a program that is read here may have no constants of its own.
        expanded = self.formula.expanded
        call = jax.jit(jex.jaxpr_as_fun(expanded))
        return jax.make_jaxpr(call)(*expanded.in_avals).jaxpr


def formula_params(formula: HoldsPrograms) -> dict[str, Any]:
    """The parameters of the equation of a formula, see `_expandable.py`."""
    return dict(_prim=formula, call_jaxpr=_Expansion(formula))


def with_formula(eqn: jex.JaxprEqn, formula: HoldsPrograms) -> jex.JaxprEqn:
    """The equation of a formula, with another formula in its place."""
    new = formula_params(formula)
    return eqn.replace(params={name: new[name] for name in eqn.params})


def foreign_programs(eqn: jex.JaxprEqn) -> list[AnyJaxpr]:
    """The programs that an equation runs, unless it is one of this library."""
    return programs_held(eqn) if formula_of(eqn) is None else []


def programs_in(eqn: jex.JaxprEqn) -> list[AnyJaxpr]:
    """All programs that an equation runs."""
    formula = formula_of(eqn)
    return programs_held(eqn) if formula is None else [*formula.jaxprs]


def equations(
    program: AnyJaxpr, inside: Inside = programs_in
) -> Iterator[jex.JaxprEqn]:
    """All equations of a program, each followed by those of the programs in it."""
    for eqn in program.eqns:
        yield from equations_of(eqn, inside)


def equations_of(
    eqn: jex.JaxprEqn, inside: Inside = programs_in
) -> Iterator[jex.JaxprEqn]:
    """An equation, followed by those of the programs in it."""
    yield eqn
    for program in inside(eqn):
        yield from equations(program, inside)


def aval_of(atom: jax.core.Atom) -> Aval:
    """The type of a variable or a literal."""
    return atom.aval  # annotated by JAX as a type without shape and dtype


def computed_from(
    eqns: Sequence[jex.JaxprEqn], variables: Iterable[jax.core.Atom]
) -> set[jax.core.Atom]:
    """Some variables, and all variables that they are computed from by equations."""
    needed = set(variables)
    for eqn in reversed(eqns):
        if not needed.isdisjoint(eqn.outvars):
            needed.update(x for x in eqn.invars if isinstance(x, jex.Var))
    return needed


def resized(
    eqn: jex.JaxprEqn, given: Sequence[Value], out: Sequence[int]
) -> jex.JaxprEqn:
    """An operation on operands of other sizes along the axes along which it is a map.

    `given` are the operands, and `out` is the shape of the first result now.
    """
    p = eqn.params

    def of(sizes: Sequence[int]) -> tuple[int, ...]:
        old, new = aval_of(eqn.invars[0]).shape, given[0].shape
        triples = zip(sizes, old, new, strict=True)
        return tuple(b if n == a else n for n, a, b in triples)

    match eqn.primitive.name:
        case "broadcast_in_dim" | "iota":
            changed = {"shape": tuple(out)}
        case "reshape":
            changed = {"new_sizes": tuple(out)}
        case "slice":
            changed = {"limit_indices": of(p["limit_indices"])}
        case "dynamic_slice" | "gather":
            changed = {"slice_sizes": of(p["slice_sizes"])}
        # A primitive of Equinox under `vmap`, whose results have that axis first.
        case "vprim":
            changed = {"__axis_size": out[0]}
        case _:
            return eqn
    return eqn.replace(params={**p, **changed})
