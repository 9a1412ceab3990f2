"""Every error of the library: where it is raised, as a test saw it, and what it means.

`python -m tests.errors` runs the tests of wrong calls, notes their messages in
`messages.json`, and writes `docs/errors.md` from these and from `entries/`, where it is
written by hand what each means.
"""
