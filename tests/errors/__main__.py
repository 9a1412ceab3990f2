"""`python -m tests.errors`: writes the data of the page of errors anew."""

from ._page import DATA, render

DATA.write_text(render())
