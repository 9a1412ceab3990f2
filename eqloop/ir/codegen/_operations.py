"""Operations on arrays as calls of functions of `jax.lax`, or as Python's operators."""

import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._compat import form_params
from .._atoms import dtype_of, is_extended, shape_of
from .._primitives import BINARY, OF_LAX, UNARY
from ._lines import call, list_of, tuple_of
from ._scope import Scope
from ._values import UnprintableError, array, dtype_text, parameter

Expression: TypeAlias = Callable[[Scope, jex.JaxprEqn], str]

_OPERATORS = {
    "add": "+",
    "add_any": "+",
    "and": "&",
    "div": "/",
    "eq": "==",
    "ge": ">=",
    "gt": ">",
    "le": "<=",
    "lt": "<",
    "mul": "*",
    "ne": "!=",
    "or": "|",
    "sub": "-",
    "xor": "^",
}

_COMPARISONS = {"==", ">=", ">", "<=", "<", "!="}

# Where the function of `jax.lax` is called something else.
_FUNCTIONS = {
    "add_any": "add",
    "and": "bitwise_and",
    "lu_pivots_to_permutation": "linalg.lu_pivots_to_permutation",
    "not": "bitwise_not",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
}


def call_by_settings(scope: Scope, eqn: jex.JaxprEqn) -> str:
    """A call of a function of `jax.lax`, which takes parameters by their names."""
    name, params, positional, given = _function(eqn), eqn.params, [], {}
    for key, default in _settings(name):
        # Only mesh axes are not written. For NumPy, `None` is float64.
        if key not in params or key == "out_sharding":
            continue
        if default is inspect.Parameter.empty:
            positional.append(parameter(params[key]))
        elif type(params[key]) is not type(default) or params[key] != default:
            given[key] = parameter(params[key])
    return call(f"lax.{name}", *scope.arguments(eqn.invars), *positional, **given)


@functools.cache
def _settings(name: str) -> list[tuple[str, Any]]:
    """The parameters of a function of `jax.lax`, with their defaults."""
    signature = inspect.signature(operator.attrgetter(name)(lax))
    return [(p.name, p.default) for p in signature.parameters.values()]


def _function(eqn: jex.JaxprEqn) -> str:
    name = eqn.primitive.name
    return _FUNCTIONS.get(name, name.replace("-", "_"))


def _elementwise(scope: Scope, eqn: jex.JaxprEqn) -> str:
    symbol = _operator(eqn)
    how = [eqn.params.get(name) for name in ("accuracy", "out_dtype")]
    if symbol is None or how != [None, None]:
        return call_by_settings(scope, eqn)
    x, y = map(scope.read, eqn.invars)
    return f"{x} {symbol} {y}"


def _operator(eqn: jex.JaxprEqn) -> str | None:
    """Python's operator for an operation, if it does the same."""
    symbol = _OPERATORS.get(eqn.primitive.name)
    if symbol is None or all(isinstance(atom, jex.Literal) for atom in eqn.invars):
        return None  # of numbers alone, Python would compute it
    x, y = eqn.invars
    if is_extended(x):
        return None
    if symbol == "/" and not jnp.issubdtype(dtype_of(x), jnp.inexact):
        return None
    if symbol in _COMPARISONS and (x is y or dtype_of(x) == np.bool_):
        return None  # `x != x` and `x == True` mean something, but look like mistakes
    return symbol


def _negation(symbol: str) -> Expression:
    return lambda scope, eqn: (
        call_by_settings(scope, eqn)
        if isinstance(eqn.invars[0], jex.Literal)
        else f"{symbol}{scope.read(eqn.invars[0])}"
    )


def _read_all(scope: Scope, atoms: Sequence[jax.core.Atom]) -> list[str]:
    """Operands of a function of `jax.numpy`: numbers take the type of the others."""
    literals = all(isinstance(atom, jex.Literal) for atom in atoms)
    return list(map(scope.argument if literals else scope.read, atoms))


def _extremum(function: str) -> Expression:
    return lambda scope, eqn: call(f"jnp.{function}", *_read_all(scope, eqn.invars))


def _where(scope: Scope, eqn: jex.JaxprEqn) -> str:
    which, *cases = eqn.invars
    if dtype_of(which) != np.bool_ or len(cases) != 2:
        return call("lax.select_n", *scope.arguments(eqn.invars))
    otherwise, then = _read_all(scope, cases)
    return call("jnp.where", scope.argument(which), then, otherwise)


def _broadcast(scope: Scope, eqn: jex.JaxprEqn) -> str:
    (x,) = eqn.invars[:1]
    number = scope.read(x) if isinstance(x, jex.Literal) and np.ndim(x.val) == 0 else ""
    if not number:
        return call_by_settings(scope, eqn)
    shape, dtype = parameter(eqn.params["shape"]), dtype_text(dtype_of(x))
    return call("jnp.full", shape, number, dtype)


def _iota(scope: Scope, eqn: jex.JaxprEqn) -> str:
    shape = eqn.params["shape"]
    if len(shape) == 1:
        return call("lax.iota", dtype_text(eqn.params["dtype"]), str(shape[0]))
    settings = "dtype", "shape", "dimension"
    return _calling("lax.broadcasted_iota", *settings)(scope, eqn)


def _calling(function: str, *settings: str, of_list: bool = False) -> Expression:
    """A call of a function with operands, or a list of them, and these parameters."""

    def expression(scope: Scope, eqn: jex.JaxprEqn) -> str:
        operands = scope.arguments(eqn.invars)
        operands = [list_of(operands)] if of_list else operands
        return call(function, *operands, *(parameter(eqn.params[s]) for s in settings))

    return expression


def _argument_of_extremum(scope: Scope, eqn: jex.JaxprEqn) -> str:
    (axis,) = eqn.params["axes"]
    dtype = dtype_text(eqn.params["index_dtype"])
    operands = scope.arguments(eqn.invars)
    return call(f"lax.{eqn.primitive.name}", *operands, str(axis), dtype)


def _at_starts(arrays: int) -> Expression:
    """An operation on so many arrays at indices, which are its last operands."""

    def expression(scope: Scope, eqn: jex.JaxprEqn) -> str:
        given = scope.arguments(eqn.invars)
        operands: list[str] = [*given[:arrays], tuple_of(given[arrays:])]
        if (sizes := eqn.params.get("slice_sizes")) is not None:
            operands.append(parameter(sizes))
        # Indices from the end have become indices from the start while tracing.
        return call(f"lax.{_function(eqn)}", *operands, allow_negative_indices="False")

    return expression


def _array_constant(scope: Scope, eqn: jex.JaxprEqn) -> str:
    """Integers that this library's loops are planned with."""
    if eqn.params.keys() != {"numbers", "shape"}:
        raise UnprintableError(eqn.primitive)  # somebody else's
    numbers = np.asarray(eqn.params["numbers"], np.int32)
    return array(numbers.reshape(eqn.params["shape"]))


def _known_cast(scope: Scope, eqn: jex.JaxprEqn) -> str:
    """A cast of this library, which is the same without its second operand."""
    dtype = dtype_text(dtype_of(eqn.outvars[0]))
    return call("lax.convert_element_type", scope.argument(eqn.invars[0]), dtype)


def _checkpoint_name(scope: Scope, eqn: jex.JaxprEqn) -> str:
    name = parameter(form_params(eqn)["name"])
    return call("checkpoint_name", scope.argument(eqn.invars[0]), name)


def _seed(scope: Scope, eqn: jex.JaxprEqn) -> str:
    (seeds,), (keys,) = scope.arguments(eqn.invars), eqn.outvars
    impl, depth = _impl(eqn), len(shape_of(keys))
    if depth == 0:
        return call("jax.random.key", seeds, impl=impl)
    one = f"lambda seed: jax.random.key(seed, impl={impl})"
    return call(f"{'jax.vmap(' * depth}{one}{')' * depth}", seeds)


def _wrap(scope: Scope, eqn: jex.JaxprEqn) -> str:
    data = scope.argument(eqn.invars[0])
    return call("jax.random.wrap_key_data", data, impl=_impl(eqn))


def _impl(eqn: jex.JaxprEqn) -> str:
    return parameter(eqn.params["impl"].name)


OPERATIONS: dict[str, Expression] = {
    **dict.fromkeys(UNARY | BINARY, _elementwise),
    **dict.fromkeys(OF_LAX, call_by_settings),
    "add_any": _elementwise,
    "argmax": _argument_of_extremum,
    "argmin": _argument_of_extremum,
    "broadcast_in_dim": _broadcast,
    "concatenate": _calling("lax.concatenate", "dimension", of_list=True),
    "constant": _array_constant,
    **dict.fromkeys(("copy", "copy_p"), _calling("jnp.copy")),
    "dynamic_slice": _at_starts(1),
    "dynamic_update_slice": _at_starts(2),
    "empty": _calling("jnp.empty", "shape", "dtype"),
    "iota": _iota,
    "known_cast": _known_cast,
    "max": _extremum("maximum"),
    "min": _extremum("minimum"),
    "name": _checkpoint_name,
    "neg": _negation("-"),
    "not": _negation("~"),
    "random_seed": _seed,
    "random_unwrap": _calling("jax.random.key_data"),
    "random_wrap": _wrap,
    "select_n": _where,
    "stack": _calling("jnp.stack", "axis", of_list=True),
    "tile": _calling("jnp.tile", "reps"),
}
