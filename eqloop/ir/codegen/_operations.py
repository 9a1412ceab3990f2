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
from ._lines import Text, call, list_of, tuple_of
from ._scope import Scope
from ._values import UnprintableError, array, dtype_text, parameter

Expression: TypeAlias = Callable[[Scope, jex.JaxprEqn], Text]

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


def call_by_settings(scope: Scope, eqn: jex.JaxprEqn) -> Text:
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


def _elementwise(scope: Scope, eqn: jex.JaxprEqn) -> Text:
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


def _read_all(scope: Scope, atoms: Sequence[jax.core.Atom]) -> list[Text]:
    """Operands of a function of `jax.numpy`: numbers take the type of the others."""
    literals = all(isinstance(atom, jex.Literal) for atom in atoms)
    return list(map(scope.argument if literals else scope.read, atoms))


def _extremum(function: str) -> Expression:
    return lambda scope, eqn: call(f"jnp.{function}", *_read_all(scope, eqn.invars))


def _where(scope: Scope, eqn: jex.JaxprEqn) -> Text:
    which, *cases = eqn.invars
    if dtype_of(which) != np.bool_ or len(cases) != 2:
        return call("lax.select_n", *scope.arguments(eqn.invars))
    otherwise, then = _read_all(scope, cases)
    return call("jnp.where", scope.argument(which), then, otherwise)


def _broadcast(scope: Scope, eqn: jex.JaxprEqn) -> Text:
    (x,) = eqn.invars[:1]
    number = scope.read(x) if isinstance(x, jex.Literal) and np.ndim(x.val) == 0 else ""
    if not number:
        return call_by_settings(scope, eqn)
    shape, dtype = parameter(eqn.params["shape"]), dtype_text(dtype_of(x))
    return call("jnp.full", shape, number, dtype)


def _iota(scope: Scope, eqn: jex.JaxprEqn) -> Text:
    params = eqn.params
    dtype, shape = dtype_text(params["dtype"]), params["shape"]
    if len(shape) == 1:
        return call("lax.iota", dtype, str(shape[0]))
    return call(
        "lax.broadcasted_iota", dtype, parameter(shape), str(params["dimension"])
    )


def _of_list(function: str, axis: str) -> Expression:
    """A function of a list of arrays, and of an axis."""

    def expression(scope: Scope, eqn: jex.JaxprEqn) -> Text:
        operands = list_of(scope.arguments(eqn.invars))
        return call(function, operands, str(eqn.params[axis]))

    return expression


def _argument_of_extremum(scope: Scope, eqn: jex.JaxprEqn) -> Text:
    (axis,) = eqn.params["axes"]
    dtype = dtype_text(eqn.params["index_dtype"])
    operands = scope.arguments(eqn.invars)
    return call(f"lax.{eqn.primitive.name}", *operands, str(axis), dtype)


def _at_starts(arrays: int) -> Expression:
    """An operation on so many arrays at indices, which are its last operands."""

    def expression(scope: Scope, eqn: jex.JaxprEqn) -> Text:
        given = scope.arguments(eqn.invars)
        operands: list[Text] = [*given[:arrays], tuple_of(given[arrays:])]
        if (sizes := eqn.params.get("slice_sizes")) is not None:
            operands.append(parameter(sizes))
        # Indices from the end have become indices from the start while tracing.
        return call(f"lax.{_function(eqn)}", *operands, allow_negative_indices="False")

    return expression


def _tile(scope: Scope, eqn: jex.JaxprEqn) -> Text:
    reps = parameter(eqn.params["reps"])
    return call("jnp.tile", scope.argument(eqn.invars[0]), reps)


def _empty(scope: Scope, eqn: jex.JaxprEqn) -> Text:
    shape, dtype = parameter(eqn.params["shape"]), dtype_text(eqn.params["dtype"])
    return call("jnp.empty", shape, dtype)


def _array_constant(scope: Scope, eqn: jex.JaxprEqn) -> Text:
    """Integers that this library's loops are planned with."""
    if eqn.params.keys() != {"numbers", "shape"}:
        raise UnprintableError(eqn.primitive)  # somebody else's
    numbers = np.asarray(eqn.params["numbers"], np.int32)
    return array(numbers.reshape(eqn.params["shape"]))


def _known_cast(scope: Scope, eqn: jex.JaxprEqn) -> Text:
    """A cast of this library, which is the same without its second operand."""
    dtype = dtype_text(dtype_of(eqn.outvars[0]))
    return call("lax.convert_element_type", scope.argument(eqn.invars[0]), dtype)


def _of_array(function: str) -> Expression:
    return lambda scope, eqn: call(function, scope.argument(eqn.invars[0]))


def _checkpoint_name(scope: Scope, eqn: jex.JaxprEqn) -> Text:
    name = parameter(form_params(eqn)["name"])
    return call("checkpoint_name", scope.argument(eqn.invars[0]), name)


def _seed(scope: Scope, eqn: jex.JaxprEqn) -> Text:
    (seeds,), (keys,) = scope.arguments(eqn.invars), eqn.outvars
    impl, depth = _impl(eqn), len(shape_of(keys))
    if depth == 0:
        return call("jax.random.key", seeds, impl=impl)
    one = f"lambda seed: jax.random.key(seed, impl={impl})"
    return call(f"{'jax.vmap(' * depth}{one}{')' * depth}", seeds)


def _wrap(scope: Scope, eqn: jex.JaxprEqn) -> Text:
    data = scope.argument(eqn.invars[0])
    return call("jax.random.wrap_key_data", data, impl=_impl(eqn))


def _impl(eqn: jex.JaxprEqn) -> Text:
    return parameter(eqn.params["impl"].name)


OPERATIONS: dict[str, Expression] = {
    **dict.fromkeys(UNARY | BINARY, _elementwise),
    **dict.fromkeys(OF_LAX, call_by_settings),
    "add_any": _elementwise,
    "argmax": _argument_of_extremum,
    "argmin": _argument_of_extremum,
    "broadcast_in_dim": _broadcast,
    "concatenate": _of_list("lax.concatenate", "dimension"),
    "constant": _array_constant,
    **dict.fromkeys(("copy", "copy_p"), _of_array("jnp.copy")),
    "dynamic_slice": _at_starts(1),
    "dynamic_update_slice": _at_starts(2),
    "empty": _empty,
    "iota": _iota,
    "known_cast": _known_cast,
    "max": _extremum("maximum"),
    "min": _extremum("minimum"),
    "name": _checkpoint_name,
    "neg": _negation("-"),
    "not": _negation("~"),
    "random_seed": _seed,
    "random_unwrap": _of_array("jax.random.key_data"),
    "random_wrap": _wrap,
    "select_n": _where,
    "stack": _of_list("jnp.stack", "axis"),
    "tile": _tile,
}
