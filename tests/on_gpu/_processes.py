"""Units as processes: several prepare side by side, and one at a time measures.

Nothing here knows of JAX, which the process that all others are started from does not
use: it cannot be lost to a program that crashes, and takes nothing of the device.
"""

import collections
import contextlib
import dataclasses
import multiprocessing
import multiprocessing.connection
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

# What a process says when it is ready to measure, and what it is told then.
READY, GO = "ready", "go"

# Beside as many as prepare, so many may wait for their turn. Each takes half a
# gigabyte of the device to be there at all.
_MOST_ALIVE = 16


@dataclasses.dataclass(frozen=True)
class Task:
    """A unit.

    Attributes:
        group: Its group.
        step: Its name there.
        seconds: How long all units of its group may measure before others have.
    """

    group: str
    step: str
    seconds: float


@dataclasses.dataclass(frozen=True)
class NotDone:
    """What there is in place of what a process would have said."""

    why: str


@dataclasses.dataclass
class _Child:
    task: Task
    order: int
    process: Any
    pipe: Any
    is_ready: bool = False
    began: float = 0.0

    def tell(self, number: int) -> None:
        if self.process.pid and self.process.is_alive():
            os.kill(self.process.pid, number)


class Processes:
    """Runs tasks until all are done, or time is over.

    Args:
        work: What a process does: it is given a task and a pipe. It sends what it has
            found, and `READY` when it needs the machine for itself; then it waits for
            `GO`.
        workers: How many prepare side by side.
        end: When all must be over, by `time.monotonic`.
        limit: How many seconds one task may measure.
    """

    def __init__(
        self,
        work: Callable[[Task, Any], None],
        *,
        workers: int,
        end: float,
        limit: float,
    ):
        self._work, self._workers = work, workers
        self._end, self._limit = end, limit
        self._children = list[_Child]()
        self._measuring: _Child | None = None
        self._measured = collections.Counter[str]()

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[Task, Any]]:
        """Runs tasks: the first ones first, but for those of groups whose time is over.

        Yields:
            What the processes send, as soon as it comes; a `NotDone` for what was not
            done to its end.
        """
        waiting = collections.deque(enumerate(tasks))
        try:
            while (waiting or self._children) and time.monotonic() < self._end:
                if self._measuring is None:
                    while waiting and self._has_room():
                        self._start(*waiting.popleft())
                    self._let_measure()
                yield from self._said()
            left = [child.task for child in self._children]
            for task in (*left, *(task for _, task in waiting)):
                yield task, NotDone("time was over")
        finally:
            for child in self._children:
                self._end_of(child)

    def _has_room(self) -> bool:
        preparing = sum(not child.is_ready for child in self._children)
        return preparing < self._workers and len(self._children) < _MOST_ALIVE

    def _start(self, order: int, task: Task) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=self._work, args=(task, theirs), daemon=True)
        process.start()
        theirs.close()
        self._children.append(_Child(task, order, process, ours))

    def _let_measure(self) -> None:
        """Has the first that is ready measure, while the others stand still."""
        is_over = lambda child: self._measured[child.task.group] > child.task.seconds
        ready = [child for child in self._children if child.is_ready]
        if not ready:
            return
        next_one = min(ready, key=lambda child: (is_over(child), child.order))
        # What may still come goes before a group that had its time.
        if is_over(next_one) and len(ready) < len(self._children):
            return
        for child in self._children:
            if child is not next_one:
                child.tell(signal.SIGSTOP)
        self._measuring, next_one.began = next_one, time.monotonic()
        # If it has died, its pipe will tell.
        with contextlib.suppress(ConnectionError):
            next_one.pipe.send(GO)

    def _said(self) -> Iterator[tuple[Task, Any]]:
        """What comes within a moment, from any of them."""
        pipes = [child.pipe for child in self._children]
        for pipe in multiprocessing.connection.wait(pipes, 0.1):
            child = next(c for c in self._children if c.pipe is pipe)
            try:
                said = child.pipe.recv()
            except (EOFError, ConnectionError):
                yield from self._is_gone(child)
                continue
            if said == READY:
                child.is_ready = True
            else:
                yield child.task, said
        late = self._measuring
        if late and time.monotonic() - late.began > self._limit:
            self._end_of(late)
            yield late.task, NotDone(f"it took more than {self._limit:.0f} seconds")
            self._forget(late)

    def _is_gone(self, child: _Child) -> Iterator[tuple[Task, Any]]:
        child.process.join(10)
        if code := child.process.exitcode:
            yield child.task, NotDone(f"its process ended with {code}")
        self._forget(child)

    def _forget(self, child: _Child) -> None:
        self._children.remove(child)
        if child is self._measuring:
            self._measuring = None
            self._measured[child.task.group] += time.monotonic() - child.began
            for other in self._children:
                other.tell(signal.SIGCONT)

    def _end_of(self, child: _Child) -> None:
        # One that stands still ends by this signal as well.
        child.tell(signal.SIGKILL)
        child.process.join(10)
