"""`python -m tests.errors`: writes the page of errors anew."""

from ._page import PAGE, render

PAGE.write_text(render())
