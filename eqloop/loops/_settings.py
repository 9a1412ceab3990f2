"""Checks of the settings that loops have in common."""

from typing import Any

from ..checkpointing import AbstractSchedule


def check_schedule(owner: str, schedule: Any) -> None:
    """Sees to it that `schedule` is one, or `None`."""
    if not isinstance(schedule, AbstractSchedule | None):
        raise TypeError(
            f"{owner}: `schedule` must be a schedule, such as `el.Recursive(16)`, not "
            f"{schedule!r}."
        )


def check_unroll(owner: str, unroll: Any) -> None:
    """Sees to it that `unroll` says how many steps to run at once."""
    if not isinstance(unroll, int):
        raise TypeError(f"{owner}: `unroll` must be an int or a bool, not {unroll!r}.")
    if unroll < 1 and unroll is not False:
        raise ValueError(
            f"{owner}: `unroll` must be at least 1, but it is {unroll}. To unroll the "
            f"whole loop, pass `unroll=True`."
        )
