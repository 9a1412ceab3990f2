"""Bars that draw nothing, and remember what they were told."""

from collections import Counter
from collections.abc import Callable, Iterator

import jax
import pytest
import tqdm.auto

from eqloop.progress import _display


class Recorder:
    """Stands in for `tqdm.auto.tqdm`."""

    bars: list["Recorder"] = []  # noqa: RUF012

    def __init__(self, total: int | None, desc: str | None, leave: bool):
        self.total, self.desc, self.leave = total, desc, leave
        self.n, self.counts, self.labels, self.closed = 0, [], [], False
        Recorder.bars.append(self)

    def update(self, n: int) -> None:
        assert not self.closed
        self.n += n
        self.counts.append(self.n)

    def set_description(self, desc: str, refresh: bool) -> None:
        self.labels.append(desc)

    def close(self) -> None:
        assert not self.closed
        self.closed = True


@pytest.fixture(autouse=True)
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Recorder]]:
    monkeypatch.setattr(tqdm.auto, "tqdm", Recorder)
    Recorder.bars.clear()
    yield Recorder
    assert not _display._runs, "a bar was left open"


@pytest.fixture
def shown(recorder: type[Recorder]) -> Callable[[], Counter]:
    """What bars were shown since the last call: their titles, with their last counts.

    All must have been closed, and have gone up.
    """

    def collect() -> Counter:
        jax.effects_barrier()
        bars = list(recorder.bars)
        recorder.bars.clear()
        assert all(bar.closed for bar in bars)
        assert all(bar.counts == sorted(bar.counts) for bar in bars)
        return Counter((bar.desc, bar.n) for bar in bars)

    return collect
