"""Schedules for loops of a few steps, one of each kind.

A new kind of schedule belongs here: the tests of all modes and contexts, of custom
rules and of precisions take them from here.
"""

import eqloop as el

EVERY_KIND = STORING, NESTED, CHUNKS, SLOTS, BLOCKS, LAST = (
    el.StoreAll(),
    el.Recursive(2),
    el.Chunked(3, batch=3),
    el.Binomial(3),
    el.Binomial(2, block=2),
    el.StoreLast(el.Recursive(2), 2),
)
