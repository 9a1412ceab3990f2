"""Operations on PRNG keys, as functions of `jax.random`."""

import jax.extend.core as jex

from .._atoms import shape_of
from ._layout import Node, call
from ._operations import Expression
from ._scope import Scope
from ._values import parameter


def _seed(scope: Scope, eqn: jex.JaxprEqn) -> Node:
    (seeds,), (keys,) = scope.arguments(eqn.invars), eqn.outvars
    impl, depth = _impl(eqn), len(shape_of(keys))
    if depth == 0:
        return call("jax.random.key", seeds, impl=impl)
    one = f"lambda seed: jax.random.key(seed, impl={impl})"
    return call(f"{'jax.vmap(' * depth}{one}{')' * depth}", seeds)


def _wrap(scope: Scope, eqn: jex.JaxprEqn) -> Node:
    data = scope.argument(eqn.invars[0])
    return call("jax.random.wrap_key_data", data, impl=_impl(eqn))


def _unwrap(scope: Scope, eqn: jex.JaxprEqn) -> Node:
    return call("jax.random.key_data", scope.argument(eqn.invars[0]))


def _impl(eqn: jex.JaxprEqn) -> Node:
    return parameter(eqn.params["impl"].name)


EXPRESSIONS: dict[str, Expression] = {
    "random_seed": _seed,
    "random_unwrap": _unwrap,
    "random_wrap": _wrap,
}
