"""Values that all examples of the `vmap`s around share, and selections among the rest.

Under `vmap` a loop whose length differs between examples would select between old and
new of all that it carries, buffers among it, at every step. So it runs for as long as
any example does, which is the same for all, and selects what is small by hand.
"""

from collections.abc import Callable

import jax

from .._types import PyTree, Value
from ._array_types import along, where_leading
from ._partition import union

# The rules for `vmap` of the functions that `over_examples` has made.
_REDUCTIONS: set[object] = set()


def over_examples(reduce: Callable[[Value], Value]) -> Callable[[Value], Value]:
    """A reduction of an array over all of its axes, those of `vmap` too."""

    @jax.custom_batching.custom_vmap
    def reduced(x: Value) -> Value:
        return reduce(x)

    @reduced.def_vmap
    def over_one_more(
        axis_size: int, in_batched: PyTree, x: Value
    ) -> tuple[Value, bool]:
        return reduced(x), False

    _REDUCTIONS.add(over_one_more)
    return reduced


def reduces_examples(rule: object) -> bool:
    """Whether a rule for `vmap` is that of a function by `over_examples`."""
    # Its result is then the same for all examples.
    return rule in _REDUCTIONS


@jax.custom_batching.custom_vmap
def where_run(runs: Value, new: list[Value], old: list[Value]) -> list[Value]:
    """What a step that is run gives, and old values for examples that have stopped."""
    # Outside of `vmap` the step is run, or nobody would ask.
    return new


@where_run.def_vmap
def _where_each_runs(
    axis_size: int, in_batched: PyTree, runs: Value, new: list[Value], old: list[Value]
) -> tuple[list[Value], list[bool]]:
    by_example, new_batched, old_batched = in_batched
    # Both have the same batch, or the next `vmap` outside would find them differ. A
    # batch of cotangents, as in a Jacobian, may be one of either.
    batched = union(new_batched, old_batched)
    pairs = zip(new, new_batched, old, old_batched, strict=True)
    alike = [_batched_alike(*pair) for pair in pairs]
    new, old = [pair[0] for pair in alike], [pair[1] for pair in alike]
    if not by_example:
        return where_run(runs, new, old), batched

    def select(new: Value, old: Value, is_batched: bool) -> Value:
        front = lambda x: x if is_batched else x[None]
        return where_leading(runs, front(new), front(old))

    return list(map(select, new, old, batched)), [True] * len(new)


def _batched_alike(
    new: Value, is_new: bool, old: Value, is_old: bool
) -> tuple[Value, Value]:
    """Two arrays, one of which is repeated if only the other is batched."""
    if is_new == is_old:
        return new, old
    if is_new:
        return new, along(old[None], range(new.ndim), new)
    return along(new[None], range(old.ndim), old), old


def sees_examples(rule: object) -> bool:
    """Whether a rule for `vmap` is that of a function here, also of one by itself."""
    return reduces_examples(rule) or rule is _where_each_runs
