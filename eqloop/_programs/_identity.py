"""What tells programs apart: their equations, their constants, and digests of both.

A jaxpr is hashed by its identity. A function that is traced again gives another one,
and so do the equal layers of a model. What was found out about the first holds for all
of them, and in other processes, too. So they are known by a digest of all that they
say: operations with their parameters, types, constants to the last bit, and what is
called. Their text would not do. It has nothing of an array but its type, and of a
custom derivative nothing but its name.
"""

import enum
import functools
import hashlib
import itertools
import os
import re
import types
import weakref
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.core
import jax.extend.core as jex
import numpy as np

from .._arrays import (
    Flags,
    axes_of,
    bits,
    compared_fields,
    cotangent_types,
    is_compared_by_fields,
    is_dynamic,
    is_scalar,
    is_type,
    pick,
    put,
)
from .._compat import (
    HiPrimitive,
    batching_rule,
    called_back,
    close,
    form_of,
    form_params,
    is_through,
)
from .._types import AnyJaxpr, Aval, PyTree, Value
from ._calculus import jvp_of, run, uses_of_rule, value_of
from ._equations import aval_of, formula_of
from ._functions import code_parts, is_of_library, name_of
from ._jaxprs import alone
from ._places import Place, loop_name, place_now, place_of

# Objects of these packages are known by what they print.
_PRINTED = ("builtins", "jax", "jaxlib", "numpy")

# What stands for a thing that cannot be told from others: it equals nothing else.
_unknown = itertools.count()


def literal_bits(literal: jex.Literal) -> Hashable:
    """What tells a number in a program from all others: its type and its bits."""
    return aval_of(literal), bits(value_of(literal))


def equation_bits(eqn: jex.JaxprEqn) -> Hashable:
    """What equations have in common that differ in nothing but their operands.

    It may be that it cannot be hashed. Then there is no telling.
    """
    params = tuple((name, bits(eqn.params[name])) for name in sorted(eqn.params))
    return eqn.primitive, params, tuple(map(aval_of, eqn.outvars)), eqn.ctx


def digest_of(*parts: object) -> str:
    """A digest of programs, and of whatever else, the same in every process.

    Functions are known by their code and by what they read.
    """
    return _Digests().of(parts).hex()


class EquationDigest(NamedTuple):
    """What tells an equation from others.

    Attributes:
        depth: In how many other equations it is.
        digest: A digest of it and of the programs in it.
        text: What it computes, and at which line of the user's program.
    """

    depth: int
    digest: str
    text: str


def equation_digests(program: AnyJaxpr, has_rules: bool) -> Iterator[EquationDigest]:
    """What tells which numbers a program computes, whatever else differs.

    With `has_rules`, programs also differ if their derivatives do.
    """
    # It makes no difference on which devices they are, nor in which lines. That
    # callbacks differ does not show, see `called_by`.
    telling = _Telling(has_rules, places=False)
    for found, _ in _listed(program, telling, 0, place_now()):
        yield found
    whole = _of_program(program, telling).digest
    # The last one stands for what the program returns, and has the digest of the whole.
    yield EquationDigest(0, whole.hex(), "what is returned")


def _listed(
    program: AnyJaxpr, telling: "_Telling", depth: int, around: Place | None
) -> Iterator[tuple[EquationDigest, jex.JaxprEqn]]:
    found = _of_program(program, telling)
    for eqn, (digest, inner) in zip(program.eqns, found.eqns, strict=True):
        # Frames of JAX and of this library may have left no room for the user's.
        place = place_of(eqn.source_info) or around
        if digest:
            text = f"{_text(eqn)} at {place}"
            yield EquationDigest(depth, digest.hex(), text), eqn
        for what in inner:
            yield from _listed(*what, depth + 1, place)


def function_digest(function: Any, has_states: bool) -> str:
    """A digest of a function, by its code and by what it reads.

    With `has_states`, functions also differ if lists or objects that they read do.
    """
    telling = _Telling(rules=True, places=False, states=has_states)
    return _Digests(telling).of(function).hex()


def called_by(program: AnyJaxpr, has_rules: bool) -> Iterator[Any]:
    """The functions that a program, or its derivatives, call back for their results."""
    for _, eqn in _listed(program, _Telling(has_rules, places=False), 0, None):
        if eqn.outvars and (function := called_back(eqn)) is not None:
            yield function


def _text(eqn: jex.JaxprEqn) -> str:
    """What an equation computes, with the numbers of the program."""
    name = form_of(eqn)
    if formula_of(eqn) is not None:
        name = loop_name(eqn.source_info.name_stack) or type(formula_of(eqn)).__name__
    is_number = lambda x: isinstance(x, jex.Literal) and not np.shape(value_of(x))
    of = lambda x: str(value_of(x) if is_number(x) else aval_of(x))
    shown = [of(x) for x in eqn.invars[:_SHOWN]] + ["..."] * (len(eqn.invars) > _SHOWN)
    return f"{name}({', '.join(shown)})"


# How many operands the text of an equation has.
_SHOWN = 4

# The operations that run a user's rule when they are differentiated.
_RULES = ("custom_jvp_call", "custom_vjp_call")
# Those that only say where something is.
_MOVING = ("sharding_constraint", "reshard", "device_put", "mesh_cast")


# Programs may hold large constants, and are not kept alive.
_known: weakref.WeakKeyDictionary[AnyJaxpr, dict["_Telling", "_ProgramDigest"]]
_known = weakref.WeakKeyDictionary()


class _ProgramDigest(NamedTuple):
    """A program by its digest.

    Attributes:
        eqns: The digest of each equation, and the programs that it depends on. It is
            empty for one that makes no difference.
    """

    digest: bytes
    eqns: "list[tuple[bytes, list[_Inner]]]"


def _of_program(program: AnyJaxpr, telling: "_Telling") -> _ProgramDigest:
    known = _known.setdefault(program, {})
    if telling not in known:
        known[telling] = _found_of_program(program, telling)
    return known[telling]


def _found_of_program(program: AnyJaxpr, telling: "_Telling") -> _ProgramDigest:
    closed, digests = close(program), _Digests(telling)
    jaxpr, count = closed.jaxpr, itertools.count()
    numbers, rules = dict[Any, bytes](), dict[tuple[int, ...], _Rule]()

    def bind(var: Any) -> bytes:
        numbers[var] = _hashed("variable", str(next(count)).encode())
        return digests.of(var.aval)

    def read(atom: Any) -> bytes:
        if not isinstance(atom, jex.Literal):
            return numbers[atom]
        return _joined("literal", digests.of(atom.aval), digests.of(value_of(atom)))

    def rule_of(eqn: jex.JaxprEqn) -> _Rule:
        if not telling.rules or form_of(eqn) not in _RULES or is_through(eqn):
            return b"", []
        # Where a function is called many times, its rule is the same object.
        key = tuple(map(id, eqn.params.values()))
        if key not in rules:
            rules[key] = _of_rule(eqn, telling)
        return rules[key]

    for var, const in zip(jaxpr.constvars, closed.consts, strict=True):
        numbers[var] = _joined("constant", digests.of(var.aval), digests.of(const))
    types, eqns = list(map(bind, jaxpr.invars)), list[tuple[bytes, list[_Inner]]]()
    for eqn in jaxpr.eqns:
        if not telling.places and form_of(eqn) in _MOVING:
            numbers.update(zip(eqn.outvars, map(read, eqn.invars), strict=True))
            eqns.append((b"", []))
            continue
        digests.programs, operands = [], list(map(read, eqn.invars))
        params, (rule, made) = digests.of(_params(eqn, telling)), rule_of(eqn)
        own = params, _hashed("rule", rule), _of_context(eqn.ctx)
        digest = _joined(form_of(eqn), *own, *operands, *map(bind, eqn.outvars))
        eqns.append((digest, [*digests.programs, *made]))
    outs = list(map(read, jaxpr.outvars))
    whole = _joined("program", *types, *(digest for digest, _ in eqns), *outs)
    return _ProgramDigest(whole, eqns)


# A program in an equation, and what of it counts.
_Inner: TypeAlias = "tuple[AnyJaxpr, _Telling]"
# The digest of a rule, and the programs that it makes, as far as it makes any.
_Rule: TypeAlias = tuple[bytes, list[_Inner]]


def _of_rule(eqn: jex.JaxprEqn, telling: "_Telling") -> _Rule:
    """The derivative rule of a function, by the programs that it makes."""
    program = alone(eqn)

    def use(marks: Flags, wanted: Flags) -> list[jex.ClosedJaxpr]:
        if form_of(eqn) == "custom_vjp_call":
            return _there_and_back(program, marks, wanted)
        # Nobody asks for this program again.
        return [jvp_of.__wrapped__(program, (marks,), (wanted,))]

    if not (uses := uses_of_rule(program, use)):
        return b"no rule", []
    if not any(uses):
        return _of_nothing_else(), []
    # In there, other functions that have rules are known by their names: they are
    # called, and not differentiated.
    made = [[(p, telling._replace(rules=False)) for p in one or ()] for one in uses]
    digests = [[_of_program(*inner).digest for inner in one] for one in made]
    whole = _joined("rules", *(_joined("rule", *one) for one in digests))
    return whole, list(itertools.chain(*made))


def _there_and_back(
    program: jex.ClosedJaxpr, marks: Flags, wanted: Flags
) -> list[jex.ClosedJaxpr]:
    """The two programs of a gradient: which of the two computes what is the rule's."""
    pulls = list[Any]()

    def there(*inputs: Value) -> tuple[list[Value], list[Value]]:
        of_marked = lambda *new: pick(run(program, *put(inputs, marks, new)), wanted)
        outs, pull = jax.vjp(of_marked, *pick(inputs, marks))
        saved, structure = jax.tree.flatten(pull)
        pulls.append(structure)
        return outs, saved

    def back(saved: list[Value], cts: list[Value]) -> PyTree:
        return jax.tree.unflatten(pulls[-1], saved)(cts)

    first = jax.make_jaxpr(there)(*program.in_avals)
    cts = cotangent_types(program.out_avals, wanted)
    return [first, jax.make_jaxpr(back)(first.out_avals[sum(wanted) :], cts)]


def _of_nothing_else() -> bytes:
    """A digest that no other thing has, of what cannot be told from others."""
    return _hashed("unknown", f"{os.getpid()} {next(_unknown)}".encode())


def _params(eqn: jex.JaxprEqn, telling: "_Telling") -> dict[str, Any]:
    """The parameters of an equation that say what it computes."""
    params, form = dict(form_params(eqn)), form_of(eqn)
    if form in _RULES:
        return {"call_jaxpr": params["call_jaxpr"]}
    if (formula := formula_of(eqn)) is not None:
        return {"_prim": formula}
    if not telling.places and form in ("jit", "pjit"):
        return {"jaxpr": params["jaxpr"]}
    if "callback" in params:
        # Which function is called makes no difference to a program, nor does what it
        # has seen since it was last traced.
        callback = called_back(eqn) or params["callback"]
        params["callback"] = name_of(callback) if telling.places else None
    if form == "custom_vmap_call":
        params["rule"] = batching_rule(eqn) if telling.rules else None
    return params


@functools.lru_cache(maxsize=1024)
def _of_context(context: Any) -> bytes:
    """Where and how an equation is run, besides its parameters."""
    metadata = dict(context.xla_metadata or {})
    words = context.compute_type, context.threefry_partitionable, metadata
    return _Digests().of(words)


@functools.lru_cache(maxsize=4096)
def _of_type(aval: Aval, has_place: bool) -> bytes:
    words = [type(aval).__name__]
    if is_type(aval):
        words += map(str, (aval.dtype, aval.shape, aval.weak_type))
    if is_type(aval) and has_place:
        words += map(str, (aval.sharding, aval.memory_space, sorted(axes_of(aval))))
    if not is_type(aval) or has_place:
        words.append(str(aval))
    return _hashed("type", "\n".join(words).encode())


class _Telling(NamedTuple):
    """What makes programs others.

    Attributes:
        rules: Whether other derivative rules of functions do.
        places: Whether other devices do, on which something is.
        states: Whether it does what is in lists and objects that a function reads.
    """

    rules: bool
    places: bool
    states: bool = True


class _Digests:
    """Makes digests of things, each by its kind.

    Attributes:
        telling: What of programs counts.
        programs: Those that it has seen.
        within: What a digest is being made of: it may be part of itself.
        functions: The digests of functions, which may read each other in many ways.
    """

    def __init__(self, telling: _Telling | None = None):
        self.telling = telling or _Telling(rules=True, places=True)
        self.programs: list[_Inner] = []
        self.within: set[int] = set()
        self.functions: dict[types.FunctionType, bytes] = {}

    def of(self, x: Any) -> bytes:
        """The digest of a thing."""
        kind = type(x)
        if kind is str or kind is bytes:
            return _hashed(kind.__name__, x.encode() if kind is str else x)
        if is_scalar(x) or is_dynamic(x):
            return _hashed("bits", repr(bits(x)).encode())
        if isinstance(x, jex.ClosedJaxpr | jex.Jaxpr):
            self.programs.append((x, self.telling))
            return _of_program(x, self.telling).digest
        if is_type(x) or isinstance(x, jax.core.AbstractValue):
            return _of_type(x, self.telling.places)
        if isinstance(x, jax.sharding.Sharding) and not self.telling.places:
            return self.of(None)
        if isinstance(x, type | types.ModuleType | types.BuiltinFunctionType):
            return _hashed("name", name_of(x).encode())
        if id(x) in self.within:
            return _hashed("name", b"itself")
        self.within.add(id(x))
        try:
            return self._of_parts(x, kind)
        finally:
            self.within.remove(id(x))

    def _of_parts(self, x: Any, kind: type) -> bytes:
        name = name_of(kind)
        if not (self.telling.states or isinstance(x, _WITHOUT_STATE)):
            return _joined(name, self._methods(kind))
        if isinstance(x, tuple | list):
            return _joined(name, *map(self.of, x))
        if isinstance(x, set | frozenset):
            return _joined(name, *sorted(map(self.of, x)))
        if isinstance(x, dict):
            pairs = (_joined("pair", *map(self.of, pair)) for pair in x.items())
            return _joined(name, *sorted(pairs))
        if isinstance(x, HiPrimitive):
            primitive: Any = x
            return _joined(name, self.of(primitive.in_avals), self.of(primitive.params))
        if isinstance(x, jax.stages.Traced):
            return _joined(name, self.of(x.jaxpr))
        if is_compared_by_fields(x):
            fields = dict(compared_fields(x))
            return _joined(name, self.of(fields), self._methods(kind))
        if isinstance(x, types.FunctionType):
            if x not in self.functions:
                self.functions[x] = _joined(name, *map(self.of, code_parts(x)))
            return self.functions[x]
        if isinstance(x, types.MethodType):
            own = self.of(x.__self__), self._methods(type(x.__self__))
            return _joined(name, self.of(x.__func__), *own)
        if isinstance(x, functools.partial):
            return _joined(name, *map(self.of, (x.func, x.args, x.keywords)))
        if isinstance(x, jax.tree_util.PyTreeDef):
            tree: Any = x
            return _joined(name, *map(self.of, (tree.node_data(), tree.children())))
        if callable(x) and (inner := getattr(x, "__wrapped__", None)) is not None:
            return _joined(name, self.of(inner))
        is_foreign = kind.__module__.partition(".")[0] in _PRINTED
        if not is_foreign and hasattr(x, "__dict__") and not isinstance(x, enum.Enum):
            return _joined(name, self.of(vars(x)), self._methods(kind))
        # Where it lies in memory is another place in each process.
        text = re.sub(r" at 0x[0-9a-fA-F]+", "", repr(x))
        return _joined(name, _hashed("text", text.encode()))

    def _methods(self, kind: type) -> bytes:
        """The digest of what objects of a user's class may do if they are called."""
        own = [c for c in kind.__mro__ if not is_of_library(c)]
        names = {n for c in own for n in vars(c) if n == "__call__" or n[:2] != "__"}
        found = {name: getattr(kind, name, None) for name in names}
        functions = (f for f in found.items() if isinstance(f[1], types.FunctionType))
        return _joined("methods", *map(self.of, sorted(functions)))


def _hashed(kind: str, content: bytes) -> bytes:
    tag = kind.encode()[:16]
    return hashlib.blake2b(content, digest_size=16, person=tag).digest()


def _joined(name: str, *digests: bytes) -> bytes:
    # All of them have the same length, so none can be taken for two.
    return _hashed("joined", _hashed("name", name.encode()) + b"".join(digests))


_WITHOUT_STATE = (
    types.FunctionType
    | types.MethodType
    | functools.partial
    | tuple
    | frozenset
    | enum.Enum
)
