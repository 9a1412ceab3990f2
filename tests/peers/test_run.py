"""A suite passes only if its failures are those that are listed, all of them."""

from pathlib import Path

import pytest

from ..marks import slow
from ._run import run
from ._suites import SUITES, Suite
from .stand_ins._expected import SUITES as LISTED
from .stand_ins._expected import Expected, load, name_of
from .stand_ins._patch import STAND_INS

_TESTS = """
from jax import lax


def test_loops_are_ours():
    assert lax.scan.__wrapped__ is not None
    assert lax.scan(lambda c, _: (c + 1, None), 0, length=3)[0] == 3


def test_buffer_at_set():  # is expected to fail
    assert lax.map is {value}
"""


@pytest.mark.parametrize(
    ("value", "options", "failed"),
    [
        slow("None", (), []),
        slow("lax.map", (), ["test_while_loop.py, plain"]),
        slow("None", ("--runxfail",), ["test_while_loop.py, plain"]),
    ],
    ids=["as-listed", "it-passes", "it-is-not-listed"],
)
def test_what_fails_a_run(
    tmp_path: Path, value: str, options: tuple[str, ...], failed: list[str]
) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test_while_loop.py").write_text(_TESTS.format(value=value))
    suite = Suite("jax", "", "v{}", "tests", ("test_while_loop.py",), ("plain",))
    assert run("equinox", suite, tmp_path, list(options)) == failed


def test_every_suite_has_its_list() -> None:
    assert set(SUITES) == set(LISTED)


@pytest.mark.parametrize("name", SUITES)
def test_lists_speak_of_what_is_run(name: str) -> None:
    suite = SUITES[name]
    assert set(suite.variants) <= set(STAND_INS)
    for variant in suite.variants:
        for entry in load(name, variant):
            assert set(entry.variants) <= set(suite.variants)
            files = {test.partition("::")[0] for test in entry.tests}
            assert files <= set(suite.files + suite.mixed)


def test_which_tests_an_entry_lists() -> None:
    entry = Expected(("a_test.py::A::one", "a_test.py::two[*"), "order", "why not")
    names = ["one", "one_more", "other"]
    assert [entry.matches(f"a_test.py::A::{name}") for name in names] == [1, 0, 0]
    assert entry.matches(name_of("tests/a_test.py::two[3]"))
    assert not entry.matches(name_of("tests/a_test.py::two"))


def test_when_an_entry_holds() -> None:
    entry = Expected((), "order", "why not", variants=("plain",), jax="<0.11")
    assert entry.holds("plain", "0.10.2")
    assert not entry.holds("plain", "0.12.0.1")
    assert not entry.holds("binomial", "0.10.2")


def test_on_their_own_loops_only_that_fails_which_is_theirs() -> None:
    kinds = ("order", "contract", "theirs")
    entries = [Expected((), kind, "why not") for kind in kinds]
    assert [e.holds("theirs", "0.10.2") for e in entries] == [False, False, True]
    assert all(e.holds("adjoint", "0.10.2") for e in entries)


def test_a_reason_is_of_a_kind() -> None:
    with pytest.raises(ValueError, match="'luck' is none of"):
        Expected((), "luck", "why not")  # pyright: ignore[reportArgumentType]
