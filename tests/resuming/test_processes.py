"""One loop on two processes with four devices each, one of which is killed."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from .joint_worker import HEARTBEAT

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PATIENCE = 300  # seconds, on a machine that has much else to do


def run(processes, directory, dies="", victim=None):
    """The exit codes of processes that run the loop together, and what they printed."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    started = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.resuming.joint_worker"),
                *(coordinator, str(processes), str(i), str(directory)),
            ],
            env=env | {"DIES": dies if i == victim else ""},
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for i in range(processes)
    ]
    if victim is not None:
        started[victim].wait(PATIENCE)
        died = time.monotonic()
    output = [process.communicate(timeout=PATIENCE)[0] for process in started]
    if victim is not None:
        assert time.monotonic() - died < 6 * HEARTBEAT
    return [process.returncode for process in started], output


def results(output):
    """What was computed, as bytes: of `init` the parts of all processes."""
    found = [dict(re.findall(r"^(\w+) ([\w.+-]+)$", text, re.M)) for text in output]
    for name in ("value", "xs"):
        assert len({each[name] for each in found}) == 1
    return found[0]["value"], found[0]["xs"], "".join(each["init"] for each in found)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_is_killed_in_each_sweep(victim, tmp_path):
    codes, output = run(2, tmp_path / "whole")
    assert codes == [0, 0]
    expected = results(output)

    for dies in ("forward 40", "back 20"):
        codes, _ = run(2, tmp_path / "dies", dies, victim)
        assert codes.pop(victim) == -signal.SIGKILL
        assert codes.pop() != 0

    codes, output = run(2, tmp_path / "dies")
    assert codes == [0, 0]
    ((steps, back),) = re.findall(r"^begins (\d+) (\d+)$", output[0], re.M)
    assert int(steps) == 60
    assert int(back) >= 10
    assert results(output) == expected

    # The numbers are those of one process, but for the order in which they are added.
    _, output = run(1, tmp_path / "one")
    as_numbers = lambda text: np.frombuffer(bytes.fromhex(text), np.float32)
    for a, b in zip(results(output)[1:], expected[1:], strict=True):
        np.testing.assert_allclose(as_numbers(a), as_numbers(b), rtol=1e-4, atol=1e-30)
