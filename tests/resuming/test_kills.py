"""Processes that are killed, a hundred times, and memory that does not grow."""

import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import eqloop as el

from .worker import LENGTH, step

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
KILLS = 100


@pytest.fixture(autouse=True)
def compile_once(monkeypatch, tmp_path):
    """Has processes take compiled programs from one another, to start in less time."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "programs"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def start(directory):
    command = [sys.executable, "-m", "tests.resuming.worker", str(directory)]
    return subprocess.Popen(command, cwd=ROOT)


def finish(directory):
    assert start(directory).wait() == 0
    with np.load(f"{directory}.npz") as found:
        return {name: found[name].tobytes() for name in found.files}


def position(directory):
    """How many steps were run, and reversed."""
    status = el.Resumable(el.CheckpointedScan(step), directory, every=1).status()
    return status.steps, status.reversed or 0


@pytest.mark.parametrize("sweep", [0, 1], ids=["forward", "reverse"])
def test_killed_a_hundred_times(sweep, tmp_path):
    """Each time a little further on, or at once, as chance has it."""
    choose = random.Random(sweep)
    expected = finish(tmp_path / "whole")
    directory, kills = tmp_path / "killed", 0
    while kills < KILLS:
        process = start(directory)
        before = position(directory)
        # Somewhere in the segments that come next.
        while process.poll() is None and position(directory)[sweep] == before[sweep]:
            time.sleep(0.001)
        time.sleep(choose.uniform(0, 0.03))
        assert process.poll() is None, "it came to its end too early"
        process.kill()
        process.wait()
        kills += 1
        if position(directory)[sweep] > 0.9 * LENGTH:
            assert finish(directory) == expected
            directory = tmp_path / f"killed after {kills}"
    assert finish(directory) == expected


MEMORY = """
import sys, resource, tempfile
import jax.numpy as jnp, numpy as np, eqloop as el

length, folder = int(sys.argv[1]), sys.argv[2]
rows = np.lib.format.open_memmap(f"{folder}/xs.npy", "w+", np.float32, (length, 8))
for i in range(0, length, 100_000):
    rows[i : i + 100_000] = np.sin(np.arange(i, min(i + 100_000, length)))[:, None]
del rows
xs = np.load(f"{folder}/xs.npy", mmap_mode="r")
scan = el.Scan(lambda h, x: (0.9 * h + x, h))
run = el.Resumable(scan, f"{folder}/run", every=10_000, ys="directory")

def used():
    pages = int(open("/proc/self/statm").read().split()[1])
    return pages * resource.getpagesize()

most = 0
def loud(i, h, y):
    global most
    most = max(most, used())
    return ""

run = el.Resumable(scan, f"{folder}/run", every=10_000, ys="directory",
                   progress=el.ProgressBar(desc=loud))
h, ys = run(jnp.zeros(8), xs)
assert ys.shape == (length, 8)
if len(sys.argv) > 3:
    loss = lambda h, ys: jnp.sum(h**2)
    run.value_and_grad(loss, argnums=("init", "xs"))(jnp.zeros(8), xs)
    most = max(most, used())
print(most)
"""


@pytest.mark.parametrize("longest", [10_000_000])
def test_memory_does_not_grow(longest, tmp_path):
    def used(length):
        folder = tmp_path / str(length)
        folder.mkdir()
        command = [sys.executable, "-c", MEMORY, str(length), str(folder)]
        out = subprocess.run(command, check=True, stdout=subprocess.PIPE)
        return int(out.stdout)

    assert used(longest) <= 1.05 * used(100_000)
