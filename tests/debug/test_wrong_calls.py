"""What is raised where a debugging function is called wrongly, and what it says."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

import eqloop as el

from ..asserts import assert_raises

X = jnp.ones(2)

WRONG_CALLS: list[tuple[Callable[[], Any], str]] = [
    (lambda: el.DebugNonFinite(jnp.log, when=1), "TypeError: … boolean scalar, not 1"),
    (lambda: el.DebugNonFinite(jnp.log, when=X > 0), "TypeError: … not bool[2]"),
    (
        lambda: el.DebugNonFinite(jnp.log, when=X[0]),
        "TypeError: … boolean scalar, not float32[]",
    ),
    (lambda: el.DebugNonFinite(where=True), "TypeError: … no setting 'where'"),
    (
        lambda: el.DebugNonFinite(lambda x, y: x)(X, bytearray(b"a")),
        "TypeError: DebugNonFinite: leaves that are not arrays … must be hashable",
    ),
    (lambda: el.error_if(X, 1.0, "no"), "TypeError: … `pred` must be a boolean"),
    (lambda: el.error_if(X, X, "no"), "TypeError: … not float32[2]"),
    (lambda: el.error_if("x", X > 0, "no"), "TypeError: … `x` has no array"),
    (
        lambda: el.error_if(X, X > 0, "x must not be positive"),
        "RuntimeError: … x must not be positive",
    ),
    (lambda: el.breakpoint_if(X), "TypeError: … not float32[2]"),
]


@pytest.mark.parametrize(("call", "said"), WRONG_CALLS)
def test_wrong_call(call: Callable[[], Any], said: str) -> None:
    assert_raises(call, said)
