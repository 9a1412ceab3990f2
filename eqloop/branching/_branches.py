"""The common part of all branching transforms: trace every branch, and run one."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax

from .._arrays import Rest, as_arrays, describe, flatten, partition, types_of
from .._calls import (
    KnownAs,
    OpenedCall,
    call_names,
    call_traced,
    compiled_once,
    explained,
)
from .._programs import run
from .._types import PyTree, Value
from ._agreement import Outcome, agree, arrays_of

Branches = Sequence[tuple[str, Callable[..., Any]]]


@compiled_once
def run_one(
    owner: str,
    branches: Branches,
    index: jax.Array,
    args: tuple[PyTree, ...],
    kwargs: dict[str, Any],
) -> PyTree:
    """Calls one of several branches."""
    # An index that is out of range is clamped.
    args, kwargs = as_arrays((args, kwargs))
    operands, rest = partition((args, kwargs))
    traced = [_trace(owner, name, f, operands, rest) for name, f in branches]
    agreed = agree(owner, [outcome for _, outcome in traced])

    def conforming(jaxpr: jex.ClosedJaxpr) -> Callable[[], list[jax.Array]]:
        return lambda: agreed.conform(run(jaxpr, *operands))

    out = lax.switch(index, [conforming(jaxpr) for jaxpr, _ in traced])
    return agreed.rest.join(out)


def scalar_of(value: Value) -> jax.Array | None:
    """A value as a scalar array; `None` if it is none."""
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError):  # no array at all
        return None
    return None if array.shape else array


def check_branch(owner: str, name: str, branch: object) -> None:
    """Checks that a branch can be called."""
    if not callable(branch):
        raise TypeError(
            f"{owner}: `{name}` must be callable, but it is {describe(branch)}. For a "
            f"branch that returns a constant, write `lambda *_: value`."
        )


def _trace(
    owner: str,
    name: str,
    f: Callable[..., PyTree],
    operands: list[Value],
    rest: Rest,
) -> tuple[jex.ClosedJaxpr, Outcome]:
    def call(args: tuple[PyTree, ...], kwargs: dict[str, Any]) -> PyTree:
        operands = {"operands": (*args, *kwargs.values())}
        with explained(owner, f"`{name}`", operands):
            return call_traced(owner, f, args, kwargs, word=name)

    def take(out: PyTree) -> tuple[list[jax.Array], Outcome]:
        out = as_arrays(out)
        return arrays_of(out), Outcome(name, types_of(out))

    args, kwargs = rest.join(operands)
    taken = [*[False] * len(flatten(f)[0]), *rest.taken]
    kind = "switch" if owner == "Switch" else "cond"
    known_as = KnownAs(kind, f, call_names(f, args, kwargs, taken))
    branch = OpenedCall(rest.join, call, take, known_as)
    return jax.make_jaxpr(branch.on_arrays)(operands), branch.kept
