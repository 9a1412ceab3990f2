"""Whether a step compiles slowly: to compile many programs of it would take minutes.

The first programs of its plan tell, which are needed in any case. It is remembered with
all else that is found out, so that who has these facts makes the same plan.
"""

import functools

import jax

from ..._programs import equations
from ..steps._step import Step
from ._facts import key_of, recall, remember

# A step compiles slowly if its first programs took more than so many seconds of
# processor time: a plan with trials compiles 3 to 15 times as much, and then may well
# take more than a minute.
_LONG = 6.0
# Of a step with more equations than this, programs take longer to compile: it grows by
# about the square of their number.
_QUICKLY_COMPILED = 64
# A step that is at most so many times as large is tried without looking first. And
# where no seconds may decide, one that is more times as large compiles slowly.
_UNLIKELY_LONG, _LIKELY_LONG = 4, 16


@functools.lru_cache(maxsize=512)
def largeness(step: Step) -> float:
    """How many times as large a step is as one that is quickly compiled."""
    return sum(1 for _ in equations(step.jaxpr)) / _QUICKLY_COMPILED


def compiles_slowly(step: Step, measure: bool) -> bool | None:
    """Whether programs of a step take long to compile; `None` if the first one tells.

    `measure` says whether the time that they took may decide.
    """
    if measure and (found := recall(_key(step))) is not None:
        return found["seconds"] > _LONG
    if largeness(step) <= _UNLIKELY_LONG:
        return False
    # Each of several processes would see something else, and make another program.
    is_open = measure and jax.process_count() == 1
    return None if is_open else largeness(step) > _LIKELY_LONG


def note_seconds(step: Step, seconds: float) -> None:
    """Takes note of how long programs of a step took to compile, in processor time.

    Other work on the machine changes that little.
    """
    if jax.process_count() == 1:
        remember({_key(step): {"seconds": seconds}})


def is_noted(step: Step) -> bool:
    """Whether it was seen how long programs of a step take to compile."""
    return recall(_key(step)) is not None


def _key(step: Step) -> str:
    return key_of(["compiling", step])
