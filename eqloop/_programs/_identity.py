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
from collections.abc import Hashable
from typing import Any

import jax
import jax.core
import jax.extend.core as jex

from .._arrays import (
    Flags,
    axes_of,
    bits,
    compared_fields,
    cotangent_types,
    is_compared_by_fields,
    is_dynamic,
    is_inexact,
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
from ._calculus import pushed, run, value_of
from ._equations import aval_of
from ._functions import code_parts, name_of, named_in
from ._jaxprs import alone

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


# The operations that run a user's rule when they are differentiated.
_RULES = ("custom_jvp_call", "custom_vjp_call")


# Programs may hold large constants, and are not kept alive.
_known: weakref.WeakKeyDictionary[AnyJaxpr, dict[bool, bytes]]
_known = weakref.WeakKeyDictionary()


def _of_program(program: AnyJaxpr, has_rules: bool) -> bytes:
    known = _known.setdefault(program, {})
    if has_rules not in known:
        known[has_rules] = _found_of_program(program, has_rules)
    return known[has_rules]


def _found_of_program(program: AnyJaxpr, has_rules: bool) -> bytes:
    closed, digests = close(program), _Digests(has_rules)
    jaxpr, count = closed.jaxpr, itertools.count()
    numbers, rules = dict[Any, bytes](), dict[tuple[int, ...], bytes]()

    def bind(var: Any) -> bytes:
        numbers[var] = _hashed("variable", str(next(count)).encode())
        return _of_type(var.aval)

    def read(atom: Any) -> bytes:
        if not isinstance(atom, jex.Literal):
            return numbers[atom]
        return _joined("literal", _of_type(atom.aval), digests.of(value_of(atom)))

    def rule_of(eqn: jex.JaxprEqn) -> list[bytes]:
        if not has_rules or form_of(eqn) not in _RULES or is_through(eqn):
            return []
        # Where a function is called many times, its rule is the same object.
        key = tuple(map(id, eqn.params.values()))
        if key not in rules:
            rules[key] = _of_rule(eqn)
        return [rules[key]]

    parts = [bind(var) for var in (*jaxpr.constvars, *jaxpr.invars)]
    parts += map(digests.of, closed.consts)
    for eqn in jaxpr.eqns:
        operands = list(map(read, eqn.invars))
        own = [digests.of(_params(eqn)), *rule_of(eqn), _of_context(eqn.ctx)]
        parts.append(_joined(form_of(eqn), *own, *operands, *map(bind, eqn.outvars)))
    return _joined("program", *parts, *map(read, jaxpr.outvars))


def _of_rule(eqn: jex.JaxprEqn) -> bytes:
    """The derivative rule of a function, by the programs that it makes.

    In there, other functions that have rules are known by their names: they are called,
    and not differentiated.
    """
    program, is_backward = alone(eqn), form_of(eqn) == "custom_vjp_call"
    marks = tuple(map(is_inexact, program.in_avals))
    wanted = tuple(map(is_inexact, program.out_avals))
    if not (any(marks) and any(wanted)):
        return _hashed("name", b"no rule")  # none is ever asked for

    def used(marks: Flags) -> bytes | None:
        try:
            if is_backward:
                made = _there_and_back(program, marks, wanted)
            else:  # nobody asks for this program again
                made = [pushed.__wrapped__(program, (marks,), (wanted,))]
            return _joined("rule", *(_of_program(p, False) for p in made))
        except Exception:
            # The rule is a user's code. It may refuse that some inputs are
            # differentiated, with any error.
            return None

    if (found := used(marks)) is not None:
        return found
    each = (tuple(i == at for i in range(len(marks))) for at in range(len(marks)))
    some = [used(one) for one, mark in zip(each, marks, strict=True) if mark]
    if not any(some):
        return _of_nothing_else()
    return _joined("some", *(one or _hashed("name", b"refused") for one in some))


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


def _params(eqn: jex.JaxprEqn) -> dict[str, Any]:
    """The parameters of an equation that say what it computes."""
    params = dict(form_params(eqn))
    if form_of(eqn) in _RULES:
        return {"call_jaxpr": params["call_jaxpr"]}
    if "callback" in params:
        # Which function is called makes no difference to a program, nor does what it
        # has seen since it was last traced.
        params["callback"] = name_of(called_back(eqn) or params["callback"])
    if form_of(eqn) == "custom_vmap_call":
        params["rule"] = batching_rule(eqn)
    return params


@functools.lru_cache(maxsize=1024)
def _of_context(context: Any) -> bytes:
    """Where and how an equation is run, besides its parameters."""
    metadata = dict(context.xla_metadata or {})
    # Our own metadata has functions traced anew, see `engine/_listing.py`.
    others = {k: v for k, v in metadata.items() if not k.startswith("eqloop_")}
    words = context.compute_type, context.threefry_partitionable, others
    return _Digests().of(words)


@functools.lru_cache(maxsize=4096)
def _of_type(aval: Aval) -> bytes:
    words = [type(aval).__name__, str(aval)]
    if is_type(aval):
        placed = str(aval.sharding), str(aval.memory_space), sorted(axes_of(aval))
        words += map(str, (aval.dtype, aval.shape, aval.weak_type, *placed))
    return _hashed("type", "\n".join(words).encode())


class _Digests:
    """Makes digests of things, each by its kind.

    Attributes:
        has_rules: Whether functions with derivative rules are known by these, too.
        within: What a digest is being made of: it may be part of itself.
        functions: The digests of functions, which may read each other in many ways.
    """

    def __init__(self, has_rules: bool = True):
        self.has_rules = has_rules
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
            return _of_program(x, self.has_rules)
        if is_type(x) or isinstance(x, jax.core.AbstractValue):
            return _of_type(x)
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
        if isinstance(x, tuple | list):
            return _joined(name, *map(self.of, x))
        if isinstance(x, set | frozenset):
            return _joined(name, *sorted(map(self.of, x)))
        if isinstance(x, dict):
            pairs = (_joined("pair", *map(self.of, pair)) for pair in x.items())
            return _joined(name, *sorted(pairs))
        if isinstance(x, HiPrimitive):
            return _joined(name, self.of(x.in_avals), self.of(x.params))
        if isinstance(x, jax.stages.Traced):
            return _joined(name, self.of(x.jaxpr))
        if is_compared_by_fields(x):
            return _joined(name, self.of(dict(compared_fields(x))))
        if isinstance(x, types.FunctionType):
            if x not in self.functions:
                code = _hashed("code", "\n".join(code_parts(x.__code__)).encode())
                read = self.of(name_of(x)), self.of(named_in(x))
                self.functions[x] = _joined(name, code, *read)
            return self.functions[x]
        if isinstance(x, types.MethodType):
            return _joined(name, self.of(x.__func__), self.of(x.__self__))
        if isinstance(x, functools.partial):
            return _joined(name, *map(self.of, (x.func, x.args, x.keywords)))
        if isinstance(x, jax.tree_util.PyTreeDef):
            return _joined(name, *map(self.of, (x.node_data(), x.children())))
        if callable(x) and (inner := getattr(x, "__wrapped__", None)) is not None:
            return _joined(name, self.of(inner))
        is_foreign = kind.__module__.partition(".")[0] in _PRINTED
        if not is_foreign and hasattr(x, "__dict__") and not isinstance(x, enum.Enum):
            return _joined(name, self.of(vars(x)))
        # Where it lies in memory is another place in each process.
        text = re.sub(r" at 0x[0-9a-f]+", "", repr(x))
        return _joined(name, _hashed("text", text.encode()))


def _hashed(kind: str, content: bytes) -> bytes:
    tag = kind.encode()[:16]
    return hashlib.blake2b(content, digest_size=16, person=tag).digest()


def _joined(name: str, *digests: bytes) -> bytes:
    # All of them have the same length, so none can be taken for two.
    return _hashed("joined", _hashed("name", name.encode()) + b"".join(digests))
