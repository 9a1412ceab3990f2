"""How far a run has come, read from its directory."""

import dataclasses
from pathlib import Path
from typing import Self, final

from ._run_record import RunRecord
from ._state_folder import steps_in

# The folders of a directory.
CARRIES, YS = "carries", "ys"
GRADIENT = "gradient"
COTANGENTS, OF_SCANNED = f"{GRADIENT}/cotangents", f"{GRADIENT}/scanned"


@final
@dataclasses.dataclass(frozen=True)
class RunStatus:
    """How far a [`Resumable`][eqloop.Resumable] run has come.

    Attributes:
        length: How many steps the loop has; `None` if the run has not begun.
        steps: How many of them were run.
        reversed: How many of them the gradient has been taken back through; `None` if
            no gradient was begun.
    """

    length: int | None
    steps: int
    reversed: int | None

    @classmethod
    def read(cls, directory: Path) -> Self:
        """That of the run in a directory."""
        record = RunRecord.of_directory(directory)
        if record is None:
            return cls(None, 0, None)
        steps = steps_in(directory / CARRIES)
        left = steps_in(directory / COTANGENTS)
        begun = (directory / COTANGENTS).is_dir()
        back = record.length - min(left, default=record.length) if begun else None
        return cls(record.length, max(steps, default=0), back)

    def __str__(self) -> str:
        if self.length is None:
            return "not begun"
        text = f"{self.steps} of {self.length} steps were run"
        if self.reversed is None:
            return text
        return f"{text}, {self.reversed} were reversed"
