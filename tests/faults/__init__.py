"""Faults planted in the library, to see whether the tests find them.

`python -m tests.faults` takes a sample of small changes to the code that differentiates
loops and maps: a sign, a flag, an axis, a branch. For each it runs the tests that reach
the changed line, and reports the changes that no test notices. Each of these is either
a gap between the tests or explained in `explained.toml`.

With `--planted` it takes a fixed list of faults from all of the library, each of
which the tests of its room have to find (`planted.toml`). `--shard 1/4` is a quarter.

The sample needs Python 3.12, whose `sys.monitoring` tells at little cost what a test
reaches.
"""
