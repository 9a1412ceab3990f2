"""The special cases of the package, each of which can be switched off for a while.

Nothing in the package is there for this. A switch replaces one function, and then
empties the caches in which programs and plans are kept.
"""

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import eqloop as el

from ._measure import forget_programs

# The name of a program that has all of them.
AS_IT_IS = "as it is"


@dataclasses.dataclass(frozen=True)
class SpecialCase:
    """A kind of candidate, or a rewriting, and how to do without it.

    Attributes:
        name: What tables call it.
        module: Where the function is.
        function: The function, or a method of a class as `Class.method`.
        instead: From the function to what takes its place.
        chosen_in: For a kind of candidate, whether a schedule chose one in a layout.
            `None` for a rewriting: programs of the same plan differ.
    """

    name: str
    module: str
    function: str
    instead: Callable[[Callable[..., Any]], Any]
    chosen_in: Callable[[Any, Any], bool] | None = None

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """A context in which the package does without it."""
        module = importlib.import_module(f"eqloop.{self.module}")
        *path, name = self.function.split(".")
        owner = getattr(module, path[0]) if path else module
        own = vars(owner)[name]
        setattr(owner, name, self.instead(own))
        try:
            forget_programs()
            yield
        finally:
            setattr(owner, name, own)
            forget_programs()


def _nothing(own: Any) -> Callable[..., None]:
    return lambda *args, **kwargs: None


def _no(own: Any) -> Callable[..., bool]:
    return lambda *args, **kwargs: False


def _none_of(own: Any) -> Callable[..., Iterator[Any]]:
    return lambda *args, **kwargs: iter(())


def _as_it_is(own: Any) -> Callable[..., Any]:
    return lambda first, *args, **kwargs: first


def _blind(own: Any) -> type:
    """The analysis of buffers, which then finds none."""

    class Blind(own):
        def outputs(self, program: Any, inputs: Any) -> list[None]:
            return [None] * len(program.out_avals)

    return Blind


_REVERSALS = "checkpointing.engine.reversals"

SPECIAL_CASES = (
    SpecialCase(
        "everything stored of the last steps",
        "checkpointing.planning._search",
        "_storing_last",
        _none_of,
        lambda schedule, layout: layout.steps_with_residuals > 0,
    ),
    SpecialCase(
        "default batches",
        "checkpointing._schedules",
        "with_batches",
        lambda own: lambda loop, plain: plain,
        lambda schedule, layout: isinstance(schedule, el.Recursive),
    ),
    SpecialCase(
        "products kept per batch",
        f"{_REVERSALS}._together",
        "run_again",
        lambda own: lambda sweep, steps, products=None: own(sweep, steps),
    ),
    SpecialCase(
        "products in parts", f"{_REVERSALS}._products_in_parts", "_in_parts", _nothing
    ),
    SpecialCase("rows once", "checkpointing.steps._rows_once", "_rows_of", _nothing),
    SpecialCase(
        "in-place writes", "checkpointing.rewrites._in_place", "in_place", _as_it_is
    ),
    SpecialCase(
        "masked writes", "checkpointing.rewrites._masked_writes", "Following", _blind
    ),
    SpecialCase(
        "short loops", "checkpointing.rewrites._short_loops", "_is_short_loop", _no
    ),
    SpecialCase(
        "later steps",
        "checkpointing.rewrites._later_steps",
        "numbers_after",
        lambda own: lambda step: (),
    ),
    SpecialCase(
        "short sums", "checkpointing.rewrites._short_sums", "_as_sum", _as_it_is
    ),
    SpecialCase("layouts of a CPU", "_programs._layouts", "_level", _as_it_is),
)
