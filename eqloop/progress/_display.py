"""The bars that are on display, on the host. Callbacks call it, so it does not use JAX.

A loop reports how far it has come, each time under the number that the bar got when it
was opened. So a compiled function that is called twice, from two threads even, has two
bars.
"""

import dataclasses
import itertools
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """What the bars of one loop have in common.

    Attributes:
        title: What is written before the bar.
        total: How many steps there will be, or how many are expected.
        label: What is written instead, from the number of steps that were run and the
            arrays that are reported with it.
    """

    title: str = ""
    total: int | None = None
    label: Any = None


@dataclasses.dataclass
class _Run:
    """A bar on display: of which loop, of which of its sweeps, for whom."""

    source: Source
    phase: str
    thread: int
    bar: Any


# Numbers must survive in a float32, in which a backward sweep hands them on.
_numbers = itertools.cycle(range(1, 2**20))
_runs: dict[int, _Run] = {}
_lock = threading.RLock()


def require_tqdm(owner: str) -> None:
    """Makes sure that there is something to draw bars with."""
    try:
        import tqdm.auto  # noqa: F401
    except ImportError:
        raise ImportError(
            f"{owner}: a progress bar is drawn with tqdm, which is not installed. To "
            f"install it: `python -m pip install tqdm`. To do without a bar, leave out "
            f"`progress`."
        ) from None


def report(
    source: Source,
    phase: str,
    number: int,
    done: int,
    total: int,
    values: Sequence[np.ndarray] = (),
) -> int:
    """Moves a bar to where its loop is."""
    # A number that is not on display opens a bar. A negative total is one that is not
    # known; after the last step the bar is closed.
    with _lock:
        try:
            if number not in _runs:
                number = _open(source, phase, source.total if total < 0 else total)
            bar = _runs[number].bar
            if source.label is not None and values:
                bar.set_description(source.label(done, values), refresh=False)
            bar.update(done - bar.n)
            if done == total:
                _close(number)
        except BaseException:  # also if the user has interrupted the program
            close_all()
            raise
    return number


def close_all() -> None:
    """Closes all bars: something went wrong, and nothing is known but that."""
    with _lock:
        for number in sorted(_runs, reverse=True):
            _close(number)


def _open(source: Source, phase: str, total: int | None) -> int:
    import tqdm.auto

    thread = threading.get_ident()
    for number, run in list(_runs.items()):
        # No loop is run within itself: one that has moved did not come to its end.
        # (Of two sweeps, both may be opened before either moves.)
        if (run.source, run.phase, run.thread) == (source, phase, thread) and run.bar.n:
            _close(number)
    number = next(_numbers)
    title = f"{source.title} ({phase})".lstrip() if phase else source.title
    # A bar within another one leaves nothing behind: there would be a line for each
    # step of the outer loop.
    bar = tqdm.auto.tqdm(total=total, desc=title or None, leave=not _runs)
    _runs[number] = _Run(source, phase, thread, bar)
    return number


def _close(number: int) -> None:
    _runs.pop(number).bar.close()
