"""The common part of all branching transforms: trace every branch, and run one."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.extend.core as jex
from jax import lax

from .._arrays import as_arrays, describe, types_of
from .._calls import OpenedCall, compiled_once, enforce_annotations, explained
from .._programs import run
from .._types import PyTree
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
    """Calls one of several branches.

    Args:
        owner: The name of the transform, for error messages.
        branches: The branches, each with the name by which the user knows it.
        index: Which of them to run: a scalar integer. One that is out of range is
            clamped.
        args: What the branch is called with.
        kwargs: The same by keyword.

    Returns:
        What that branch returns.

    Raises:
        TypeError: If the branches do not return the same types.
        ValueError: If they return leaves that are not arrays, and these differ.
    """
    args, kwargs = as_arrays((args, kwargs))
    traced = [_trace(owner, name, f, args, kwargs) for name, f in branches]
    agreed = agree(owner, [outcome for _, outcome in traced])

    def conforming(jaxpr: jex.ClosedJaxpr) -> Callable[[], list[jax.Array]]:
        return lambda: agreed.conform(run(jaxpr))

    out = lax.switch(index, [conforming(jaxpr) for jaxpr, _ in traced])
    return agreed.rest.join(out)


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
    args: tuple[PyTree, ...],
    kwargs: dict[str, Any],
) -> tuple[jex.ClosedJaxpr, Outcome]:
    operands = eqx.tree_pformat((*args, *kwargs.values()))

    def call() -> PyTree:
        with explained(owner, f"`{name}` with\n  operands = {operands}"):
            return enforce_annotations(f)(*args, **kwargs)

    def take(out: PyTree) -> tuple[list[jax.Array], Outcome]:
        out = as_arrays(out)
        return arrays_of(out), Outcome(name, types_of(out))

    # It closes over the operands, and over whatever the branch does.
    branch = OpenedCall(tuple, call, take)
    return jax.make_jaxpr(branch.on_arrays)(), branch.kept
