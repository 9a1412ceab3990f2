"""One of several processes that run one loop.

`python joint_worker.py COORDINATOR PROCESSES PROCESS DIRECTORY`. With `DIES="back 20"`
in its environment the process kills itself when that sweep has come to that step.
"""

import os
import signal
import sys

import jax
import numpy as np

import eqloop as el

LENGTH, EVERY, WIDTH, HEARTBEAT = 60, 10, 16, 10


def step(h, x):
    h = jax.numpy.tanh(0.9 * h + 0.1 * h.sum() / WIDTH + x)
    return h, h * 2


def main(coordinator, processes, process, directory):
    jax.config.update("jax_num_cpu_devices", 8 // int(processes))
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        coordinator,
        int(processes),
        int(process),
        heartbeat_timeout_seconds=HEARTBEAT,
        shutdown_timeout_seconds=HEARTBEAT,
    )
    mesh = jax.sharding.Mesh(jax.devices(), ("width",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("width"))
    init = jax.make_array_from_callback(
        (WIDTH,), sharding, lambda index: np.arange(WIDTH, dtype=np.float32)[index]
    )

    def xs(start, stop):
        sweep = "back" if run.status().steps == LENGTH else "forward"
        if os.environ.get("DIES") == f"{sweep} {start}":
            os.kill(os.getpid(), signal.SIGKILL)
        return np.sin(np.arange(start, stop, dtype=np.float32))

    scan = el.CheckpointedScan(step)
    run = el.Resumable(scan, directory, every=EVERY, ys="directory")
    status = run.status()
    print("begins", status.steps, status.reversed, flush=True)
    take = run.value_and_grad(
        lambda h, ys: (h**2).sum() + ys[3].sum(), argnums=("init", "xs")
    )
    value, (of_init, of_xs) = take(init, xs, length=LENGTH)
    assert len(of_init.sharding.device_set) == 8
    parts = [np.asarray(shard.data) for shard in of_init.addressable_shards]
    print("value", float(value).hex(), flush=True)
    print("init", np.concatenate(parts).tobytes().hex(), flush=True)
    print("xs", np.asarray(of_xs).tobytes().hex(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
