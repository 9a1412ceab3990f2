"""The way of a gradient leads through few files: whoever reads it opens all of them."""

import os
import sys
from types import FrameType

import jax
import jax.numpy as jnp

import eqloop as el
from eqloop import checkpointing

ROOM = os.path.dirname(checkpointing.__file__) + os.sep

# From the call of a scan to the primitive, by the forward sweep, and back.
MOST_FILES = 37


def test_a_gradient_leads_through_few_files():
    found = dict[str, None]()

    def note(frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(ROOM):
            found[file] = None

    # A step of its own, of which nothing is remembered.
    scan = el.Scan(lambda h, x: (jnp.tanh(h + x), None), schedule=el.Recursive(16))
    xs, before = jnp.zeros((36, 8)), sys.getprofile()
    sys.setprofile(note)
    try:
        jax.grad(lambda h: jnp.sum(scan(h, xs)[0]))(jnp.zeros(8))
    finally:
        sys.setprofile(before)
    assert len(found) <= MOST_FILES, "\n".join(found)
