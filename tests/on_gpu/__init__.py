"""What a GPU that is lent for minutes is to tell: one command, prepared without one.

    python -m tests.on_gpu --minutes 9      # on a machine with a GPU
    python -m tests.on_gpu --only times,fit --out FOLDER
    python -m tests.on_gpu --dry            # without: compiles all of it for an H100
    python -m tests.on_gpu --here           # without: runs all of it, tiny, on the CPU
    python -m tests.on_gpu --prepare        # packages to take along
    python -m tests.on_gpu --write [FILE]   # the page, from what was measured

`_groups.py` says what is measured, the most important first: another group is one line
in its table. Programs that are run in turn are a unit, and each unit is a process
(`_unit.py`): it compiles its programs, says that it is ready, and waits. Several of
these prepare side by side (`_processes.py`). While one measures (`_turns.py`), the
others are stopped, so that it has the machine for itself; then it ends, and its memory
is free. What is found is written after each round of runs (`_found.py`, `_rows.py`), so
that nothing is lost when time is over. A program that fails is told of in its row. The
page (`_page.py`) has the times, and rates of the roofline that are fitted to them.

XLA does not try kernels (`_FLAGS` in `__main__.py`): of each large product, it would do
that for minutes. JAX's cache of compiled programs is on: it has the programs that are
planned again once there is quiet, and all of them in a second run on the machine.

`--dry` needs `pip install 'eqloop[targets]'`. It compiles the very programs in the very
order, says how long that takes, and foresees how long they run. So one can tell whether
all of it fits into the minutes.

A machine that reaches no index of packages may lack what eqloop needs besides JAX.
`--prepare` puts that into `build/on_gpu`, which git ignores. Take it along with the
checkout, and it is found there. JAX is that of the machine.
"""
