"""The project beside its peers: time, memory and compilation, as Markdown tables.

`python -m tests.benchmarks` runs them; `pip install -e '.[bench]'` brings the
peers. What can be pinned exactly (counts, gradients) is not here but in the tests of
each room: a benchmark measures, and says whether what it measured holds its bound.
"""
