"""The page of errors has every error, with its message, and says what it means."""

import re
from pathlib import Path

import pytest

from ..errors._page import DATA, render, sections, sentence
from ..errors._sites import sites, wording

ENTRIES = [entry for section in sections() for entry in section.errors]
EXAMPLES = [(site, values) for e in ENTRIES for site, values in e.at.items()]
# What stands in a blank may be words of ours from elsewhere in the source, such as what
# a count is of. An example must have them as they are there.
PHRASE = re.compile(r"\b(?:[a-z]+ ){4,}[a-z]+(?![\w[])")


def is_made_elsewhere(site: str) -> bool:
    """Whether all of a message is: by jaxtyping, the user or the watch at run time."""
    return sites()[site].template == (*sites()[site].blanks,)


def test_every_error_is_explained():
    explained = {site for site, _ in EXAMPLES}
    assert sites().keys() - explained == set(), "write what it means in an entry"
    assert explained - sites().keys() == set(), "it is raised elsewhere, or no more"


@pytest.mark.parametrize(("site", "values"), EXAMPLES, ids=[e[0] for e in EXAMPLES])
def test_example_fills_the_blanks(site, values):
    assert len(values) == len(sites()[site].blanks), sites()[site].template
    if not is_made_elsewhere(site):
        phrases = [each for value in values for each in PHRASE.findall(value)]
        assert [each for each in phrases if each not in wording()] == []


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.title)
def test_a_title_is_a_sentence(entry):
    title = sentence(entry)
    assert title[-1] in ".…"
    assert not re.search(r"[,:(] ?[.…]$", title)
    assert len(re.findall(r"\w+", title)) > 1


def test_data_is_of_this_source():
    assert DATA.read_text() == render(), "run `python -m tests.errors`"


def test_examples_run():
    """Each is the next part of a program, which begins as the page says."""
    page = Path(__file__).parents[2] / "docs" / "errors.md"
    (beginning,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    names = {"__name__": "errors"}
    for code in (beginning, *(entry.code for entry in ENTRIES)):
        exec(code, names)
