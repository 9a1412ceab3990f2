"""The page of errors has every error, with its message, and says what it means."""

import subprocess
import sys

import pytest

from ..errors._messages import load
from ..errors._page import PAGE, entry_of, render, sections
from ..errors._sites import sites

HOW = "run `python -m tests.errors`"


def test_every_error_has_been_seen_by_a_test():
    assert {str(site) for site in sites()} == load().keys(), HOW


@pytest.mark.parametrize("site", sites(), ids=str)
def test_message_is_what_the_code_says(site):
    assert site.may_say(load()[str(site)].text), HOW


def test_every_message_is_explained():
    explained = {entry_of(message.text) for message in load().values()}
    assert None not in explained
    assert explained == {each for section in sections() for each in section.errors}


def test_page_is_of_these_messages():
    assert PAGE.read_text() == render(load()), HOW


@pytest.mark.slow
def test_tests_still_see_these_messages():
    subprocess.run([sys.executable, "-m", "tests.errors", "--check"], check=True)
