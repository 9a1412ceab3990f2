"""What processes do in tests in place of units, without JAX, by the name of a task."""

import os
import time
from typing import Any

from ._processes import GO, READY, Task

# How long one of them measures, and how long one takes that never ends in a test.
MEASURES, FOR_EVER = 0.3, 600.0


def work(task: Task, pipe: Any) -> None:
    """Sends when it begins and when it ends to do things, by the clock of all."""
    if task.step == "crashes":
        os._exit(3)
    if task.step == "hangs":
        time.sleep(FOR_EVER)
    if task.step == "prepares":
        for _ in range(20):
            start = time.monotonic()
            time.sleep(0.05)
            pipe.send(("prepared", start, time.monotonic()))
        return
    pipe.send(READY)
    assert pipe.recv() == GO
    start = time.monotonic()
    time.sleep(FOR_EVER if task.step == "measures for ever" else MEASURES)
    pipe.send(("measured", start, time.monotonic()))
