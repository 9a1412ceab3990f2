"""Every error of the library: where it is raised, what it says, and what it means.

The wording of a message is in the source of the library and nowhere else. What each
means is written in `entries/`, with an example of what stands in its blanks.
`python -m tests.errors` writes the data of the page `docs/errors.md` from the two.
"""
