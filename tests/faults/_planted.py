"""A fixed list of faults that the tests of every day have to find: `planted.toml`."""

import dataclasses
import tomllib
from pathlib import Path

from ._runner import Checkout

_LIST = Path(__file__).with_name("planted.toml")


@dataclasses.dataclass(frozen=True)
class Planted:
    """A fault in one line.

    Attributes:
        file: The path of the file, from the library on.
        before: The line, without its indentation. No other line of the file reads so.
        after: What it becomes.
        tests: The tests of its room, as paths from `tests/` on.
    """

    file: str
    before: str
    after: str
    tests: list[str]

    def __str__(self) -> str:
        return f"{self.path}\n  - {self.before}\n  + {self.after}"

    @property
    def path(self) -> str:
        """The path of the file, from the root of the repository."""
        return f"eqloop/{self.file}"

    def text(self, root: Path) -> str:
        """The whole file with the fault, from a checkout."""
        lines = (root / self.path).read_text().splitlines(keepends=True)
        (place,) = (i for i, line in enumerate(lines) if line.strip() == self.before)
        lines[place] = lines[place].replace(self.before, self.after)
        return "".join(lines)

    def found_by(self, checkout: Checkout) -> str | None:
        """The test of its room that fails, once it is there."""
        with checkout.changed(self.path, self.text(checkout.root)):
            if checkout.run(_paths(self.tests)):
                return None
        lines = checkout.log.read_text().splitlines()
        failed = (x for x in lines if x.startswith(("FAILED", "ERROR")))
        return next(failed, "a run that ended early").partition(" - ")[0]


def planted() -> list[Planted]:
    """All of them."""
    entries = tomllib.loads(_LIST.read_text())["fault"]
    return [Planted(**entry) for entry in entries]


def named_in(faults: list[Planted]) -> list[str]:
    """The tests that they name, as arguments of pytest."""
    return _paths(list(dict.fromkeys(test for f in faults for test in f.tests)))


def _paths(tests: list[str]) -> list[str]:
    return [f"tests/{test}" for test in tests]
