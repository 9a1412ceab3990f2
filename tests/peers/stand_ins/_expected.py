"""Which of their tests are expected to fail on our loops, and why.

The lists are in `expected/`, one a suite. A test that is listed must fail: if it
passes, the entry goes.
"""

import dataclasses
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, get_args

from packaging.specifiers import SpecifierSet

FOLDER = Path(__file__).parent / "expected"
SUITES = tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))

# What a test may fail for. `theirs` is for what fails on their own loops as well, and
# `fault` for what is to be mended, and for nothing else.
Kind = Literal["wording", "order", "internals", "contract", "theirs", "fault"]


@dataclasses.dataclass(frozen=True)
class Expected:
    """Tests that fail for one reason.

    Attributes:
        tests: Their names, `file.py::Class::test`. A `*` at the end is for any ending.
        kind: What sort of reason it is.
        reason: The reason.
        variants: The variants they fail for, if they do not fail for all.
        jax: The versions of JAX they fail for, as a specifier.
        run: Whether they are run all the same. They are not if that would take all
            memory, for example.
    """

    tests: tuple[str, ...]
    kind: Kind
    reason: str
    variants: tuple[str, ...] = ()
    jax: str = ""
    run: bool = True

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"{self.kind!r} is none of {get_args(Kind)}")

    def __str__(self) -> str:
        return f"{self.kind}: {self.reason}"

    def holds(self, variant: str, jax: str) -> bool:
        """Whether it is expected of this variant and this version of JAX."""
        # On what is theirs all passes that fails only on ours.
        of_variant = self.kind == "theirs" or variant != "theirs"
        of_variant &= not self.variants or variant in self.variants
        return of_variant and SpecifierSet(self.jax).contains(jax, prereleases=True)

    def matches(self, name: str) -> bool:
        """Whether it lists this test."""
        return any(
            name.startswith(test[:-1]) if test.endswith("*") else name == test
            for test in self.tests
        )


def load(suite: str, variant: str) -> list[Expected]:
    """What is expected to fail with this variant, and the JAX that is installed."""
    entries = [_entry(table) for table in _tables(suite)]
    return [entry for entry in entries if entry.holds(variant, version("jax"))]


def name_of(nodeid: str) -> str:
    """The name of a test as the lists have it, without the folder it is in."""
    path, _, test = nodeid.partition("::")
    return f"{Path(path).name}::{test}"


def _tables(suite: str) -> list[dict[str, Any]]:
    return tomllib.loads((FOLDER / f"{suite}.toml").read_text())["expected"]


def _entry(table: dict[str, Any]) -> Expected:
    lists = {
        key: tuple(value) for key, value in table.items() if isinstance(value, list)
    }
    return Expected(**{**table, **lists})
