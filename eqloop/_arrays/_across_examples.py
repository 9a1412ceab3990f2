"""Values that all examples of the `vmap`s around share, and selections among the rest.

Under `vmap` a loop whose length differs between examples would select between old and
new of all that it carries, buffers among it, at every step. So it runs for as long as
any example does, which is the same for all, and selects what is small by hand.
"""

from collections.abc import Callable

import jax

from .._types import PyTree, Value
from ._array_types import where_leading

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
    """Whether a rule for `vmap` is that of a function by `over_examples`.

    Its result is then the same for all examples.
    """
    return rule in _REDUCTIONS


@jax.custom_batching.custom_vmap
def where_run(runs: Value, new: list[Value], old: list[Value]) -> list[Value]:
    """What a step that is run gives, and the old values for examples that have stopped.

    Outside of `vmap` the step is run, or nobody would ask.
    """
    return new


@where_run.def_vmap
def _where_each_runs(
    axis_size: int, in_batched: PyTree, runs: Value, new: list[Value], old: list[Value]
) -> tuple[list[Value], list[bool]]:
    by_example, new_batched, old_batched = in_batched
    if not by_example:
        return where_run(runs, new, old), new_batched

    def select(new: Value, is_new: bool, old: Value, is_old: bool) -> Value:
        front = lambda x, is_batched: x if is_batched else x[None]
        return where_leading(runs, front(new, is_new), front(old, is_old))

    leaves = zip(new, new_batched, old, old_batched, strict=True)
    return [select(*leaf) for leaf in leaves], [True] * len(new)
