"""The list of all canaries, which each file adds its own to."""

import dataclasses
from collections.abc import Callable, Iterator

Look = Callable[[], Iterator[str]]


@dataclasses.dataclass(frozen=True)
class Canary:
    """One thing that XLA has broken before.

    Attributes:
        name: What should be so.
        report: Where it was reported that it was not.
        is_timed: Whether nothing but time shows it. No test asserts that: such a canary
            is in the table only.
        is_known: Whether every version so far fails it, in plain JAX as well.
        look: Says what is wrong, if anything is.
    """

    name: str
    report: str
    is_timed: bool
    is_known: bool
    look: Look


CANARIES: list[Canary] = []


def canary(
    report: str, *, is_timed: bool = False, is_known: bool = False
) -> Callable[[Look], Look]:
    """Adds a function to the list, by its name."""

    def add(look: Look) -> Look:
        name = look.__name__.replace("_", " ")
        CANARIES.append(Canary(name, report, is_timed, is_known, look))
        return look

    return add
