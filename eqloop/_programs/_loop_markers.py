"""Tells a debugger, if one is watching, which loop runs and which of its steps.

The loops of this library run the user's steps in loops of their own. So before each
step, or each block of steps, they mark which of the user's steps it is. A mark is an
equation, but only in programs that are traced to be watched (`DebugNonFinite`).
"""

import contextlib
import contextvars
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.interpreters import batching, mlir

from .._types import PyTree, Value

_is_watched: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "_is_watched", default=False
)


def mark(index: object, count: int = 1) -> None:
    """Marks which steps are run next.

    Args:
        index: The smallest index among them: their place in the inputs of the loop.
        count: How many there are.
    """
    if _is_watched.get():
        position_p.bind(jnp.asarray(index, jnp.int32), count=count)


def loop_scope(name: str) -> Any:
    """The scope for the loop of a transform; it also shows in profiles."""
    return jax.named_scope(f"eqloop.{name}")


def loop_name(name_stack: Any) -> str | None:
    """The transform whose loop an equation is, from its scope; `None` if it is none.

    >>> loop_name("train/transpose(jvp(eqloop.Scan))/jvp()")
    'Scan'
    """
    scopes = re.findall(r"[^()/]+(?=[)/]|$)", str(name_stack))
    is_loop = scopes and scopes[-1].startswith("eqloop.")
    return scopes[-1].removeprefix("eqloop.") if is_loop else None


def is_watched() -> bool:
    """Whether the current trace is being watched."""
    return _is_watched.get()


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Has loops that are traced in this context mark their steps."""
    with _watching(True):
        yield


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Has them mark nothing: it was said already which steps are run."""
    with _watching(False):
        yield


@contextlib.contextmanager
def _watching(flag: bool) -> Iterator[None]:
    token = _is_watched.set(flag)
    try:
        yield
    finally:
        _is_watched.reset(token)


# For those who read the jaxpr; it compiles to nothing.
position_p = jex.Primitive("position")
position_p.multiple_results = True
position_p.def_abstract_eval(lambda index, count: [])


def _batch(args: PyTree, dims: PyTree, count: int) -> tuple[list[Value], list[Value]]:
    # If examples are at different steps, the furthest stands for all.
    position_p.bind(jnp.max(args[0]), count=count)
    return [], []


def _lower(ctx: Any, index: Value, count: int) -> list[Value]:
    return []


batching.primitive_batchers[position_p] = _batch
mlir.register_lowering(position_p, _lower)
