"""Several processes that run one loop, each with a part of the arrays.

They wait for each other by a collective. If one of them dies, the others do not wait
for ever: the service that `jax.distributed.initialize` started ends them when it has
not heard of one for as long as `heartbeat_timeout_seconds` says.
"""

import hashlib
from collections.abc import Sequence

import jax
import numpy as np


def is_leader() -> bool:
    """Whether this is the process that renames, and writes what is the same for all."""
    return jax.process_index() == 0


def wait_for_all(what: str) -> None:
    """Waits until all processes have come to this place."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(what)


def as_the_leader(numbers: Sequence[int]) -> list[int]:
    """What the first process has, of which all have as many."""
    if jax.process_count() == 1:
        return list(numbers)
    from jax.experimental import multihost_utils

    return list(map(int, multihost_utils.broadcast_one_to_all(np.array(numbers))))


def digest_of_all(digest: bytes) -> bytes:
    """One digest of those that the processes have: that of all, if they agree."""
    if jax.process_count() == 1:
        return digest
    from jax.experimental import multihost_utils

    mine = np.frombuffer(digest, np.uint8)
    parts = np.asarray(multihost_utils.process_allgather(mine))
    if (parts == mine).all():
        return digest
    return hashlib.blake2b(parts.tobytes(), digest_size=len(digest)).digest()
