"""Whatever is being done when the process dies, the result is that of a whole run."""

import dataclasses
import errno
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import eqloop as el
from eqloop.resuming._gradient_call import GradientCall

from .cases import EVERY, cell, data, numbers
from .dying import Disk, Full, Killed, on


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """A run, traced and compiled once, that can be had in any directory."""
    scan = el.CheckpointedScan(cell(), base=2)
    run = el.Resumable(scan, tmp_path_factory.mktemp("first"), every=EVERY)
    return run._open(jnp.zeros(3), data(), None, jax.random.key(1))


class Both:
    """The loop and its gradient, in a directory."""

    def __init__(self, opened, directory: Path) -> None:
        self.run = dataclasses.replace(opened, directory=directory)

    def forward(self, keep=2):
        with self.run.held():
            return self.run.run_forward(keep, None, in_memory=True)

    def backward(self):
        self.forward(keep=None)
        gradient = GradientCall(self.run, ("f", "init", "xs"))
        ys = {"h": jnp.ones((len(data()), 3)), "mean": None, "name": None}
        cotangents = gradient.take((jnp.arange(3.0), ys))
        with self.run.held():
            return gradient.back(cotangents, None)


def died_and_went_on(opened, begun, folder, sweep, monkeypatch):
    """Whether a run is the same that died at each operation after it was begun."""
    disk = Disk()
    with monkeypatch.context() as patch:
        on(disk, patch)
        expected = numbers(sweep(Both(opened, begun(folder / "whole"))))
    assert disk.count > 30
    for n in range(1, disk.count + 1):
        both = Both(opened, begun(folder / str(n)))
        with monkeypatch.context() as patch:
            on(Disk(dies_at=n), patch)
            with pytest.raises(Killed):
                sweep(both)
            on(Disk(), patch)
            yield n, numbers(sweep(both)) == expected


@pytest.mark.slow
def test_at_any_operation_of_the_loop(opened, tmp_path, monkeypatch):
    empty = lambda folder: folder
    for n, is_same in died_and_went_on(
        opened, empty, tmp_path, Both.forward, monkeypatch
    ):
        assert is_same, f"it died at operation {n}"


def test_at_any_operation_of_the_way_back(opened, tmp_path, monkeypatch):
    Both(opened, tmp_path / "forward").forward(keep=None)
    copied = lambda folder: shutil.copytree(tmp_path / "forward", folder)
    for n, is_same in died_and_went_on(
        opened, copied, tmp_path, Both.backward, monkeypatch
    ):
        assert is_same, f"it died at operation {n}"


def test_again_and_again(opened, tmp_path, monkeypatch):
    expected = numbers(Both(opened, tmp_path / "whole").backward())
    both = Both(opened, tmp_path / "dies")
    for n in (40, 3, 25, 1, 60, 30, 30, 9, 45, 45, 70):
        with monkeypatch.context() as patch:
            on(Disk(dies_at=n), patch)
            try:
                both.backward()
            except Killed:
                continue
    assert numbers(both.backward()) == expected


def test_full_disk(opened, tmp_path, monkeypatch):
    expected = numbers(Both(opened, tmp_path / "whole").backward())
    for room in (0, 9, 25, 37, 60, 90):
        both = Both(opened, tmp_path / str(room))
        with monkeypatch.context() as patch:
            on(Full(room), patch)
            with pytest.raises(
                OSError, match=r"could not be \w+: No space left"
            ) as found:
                both.backward()
        assert found.value.errno == errno.ENOSPC
        assert str(found.value).count("Resumable: ") == 1
        assert numbers(both.backward()) == expected
