"""Trains a recurrent model on several processes, each with its share of the examples.

The task is the adding problem: two of a hundred random numbers are marked, and at the
end of the sequence the model returns their sum. Its layer is a `CheckpointedScan`. The
examples are split over all devices of all processes, and each device has all
parameters. With `--checkpoints`, a run that was interrupted resumes from its last
checkpoint.

It prints the loss of each step, which is the same on any number of processes. Run it on
one,

    python -m pip install -e '.[distributed]' && python examples/multiprocess/train.py

on several of this machine,

    python examples/multiprocess/launch.py 4 examples/multiprocess/train.py

and on a cluster, where JAX finds the other processes with `--cluster`. The
documentation says more.
"""

import argparse
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

import eqloop as el

LENGTH, HIDDEN, RATE = 100, 32, 3e-3

Number = Float[Array, ""]
Sequence = Float[Array, "length 2"]


# The model, and its loss.


class Adder(eqx.Module):
    """Reads a sequence through a loop that is a layer, and returns a number."""

    loop: el.CheckpointedScan
    readout: eqx.nn.Linear

    def __init__(self, *, key):
        cell_key, readout_key = jax.random.split(key)
        cell = eqx.nn.GRUCell(2, HIDDEN, key=cell_key)
        self.loop = el.CheckpointedScan(Step(cell), base=8)
        self.readout = eqx.nn.Linear(HIDDEN, "scalar", key=readout_key)

    def __call__(self, xs: Sequence) -> Number:
        hidden, _ = self.loop(jnp.zeros(HIDDEN), xs)
        return self.readout(hidden)


class Step(eqx.Module):
    """A cell as the step of a loop."""

    cell: eqx.nn.GRUCell

    def __call__(self, hidden, x):
        return self.cell(x, hidden), None


def squared_error(model: Adder, xs: Sequence, y: Number) -> Number:
    return (model(xs) - y) ** 2


def loss(model, batch, mesh):
    """The mean over all examples, each computed on the device where it is."""
    errors = el.ParallelMap(squared_error, mesh=mesh, in_axes={"model": None})
    return jnp.mean(errors(model, *batch))


# The data: an example depends only on its number, and not on its process.


def example(number):
    rng = np.random.default_rng(number)
    values = rng.uniform(size=LENGTH)
    marks = np.zeros(LENGTH)
    marks[rng.choice(LENGTH, 2, replace=False)] = 1
    return np.stack([values, marks], axis=1), values @ marks


def load_batch(step, size, mesh):
    """The examples of a step. Each process makes only those of its own devices."""
    share = size // jax.process_count()
    first = step * size + jax.process_index() * share
    xs, ys = zip(*map(example, range(first, first + share)), strict=True)
    place = lambda x: jax.make_array_from_process_local_data(
        NamedSharding(mesh, P("batch")), np.asarray(x, np.float32)
    )
    return place(xs), place(ys)


# Training.


optimiser = optax.adam(RATE)


def new_state(mesh):
    """The model and the state of its optimiser, whole on every device."""
    model = Adder(key=jax.random.key(0))
    state = model, optimiser.init(eqx.filter(model, eqx.is_array))
    return eqx.filter_shard(state, NamedSharding(mesh, P()))


@eqx.filter_jit
def update(state, batch, mesh):
    model, moments = state
    value, gradient = eqx.filter_value_and_grad(loss)(model, batch, mesh)
    updates, moments = optimiser.update(gradient, moments)
    return value, (eqx.apply_updates(model, updates), moments)


def train(steps, size, checkpoints: "Checkpoints"):
    """Goes on from the last checkpoint, if there is one, to the end."""
    mesh = Mesh(jax.devices(), ("batch",))
    state, start = checkpoints.restore(new_state(mesh))
    for step in range(start, steps):
        value, state = update(state, load_batch(step, size, mesh), mesh)
        report(f"step {step}: loss {value:.7f}")
        checkpoints.save(step + 1, state, last=step + 1 == steps)
    checkpoints.close()
    return state


def report(line):
    """Prints a line, once for all processes."""
    if jax.process_index() == 0:
        print(line, flush=True)


class Checkpoints:
    """The state of the training in a directory that all processes see.

    Orbax has the processes wait for each other. A checkpoint counts when it is
    complete, so to be killed while one is written loses no more than that one.
    """

    def __init__(self, directory: Path | None, every: int):
        options = ocp.CheckpointManagerOptions(max_to_keep=2)
        self.manager = directory and ocp.CheckpointManager(
            directory.absolute(), options=options
        )
        self.every = every

    def save(self, step: int, state: Any, *, last: bool) -> None:
        if self.manager and (last or step % self.every == 0):
            leaves = jax.tree.leaves(eqx.filter(state, eqx.is_array))
            self.manager.save(step, args=ocp.args.StandardSave(leaves))

    def restore(self, state: Any) -> tuple[Any, int]:
        """The state that was saved last and its step, or else `state` and 0."""
        step = self.manager and self.manager.latest_step()
        if not step:
            return state, 0
        arrays, rest = eqx.partition(state, eqx.is_array)
        leaves, treedef = jax.tree.flatten(arrays)
        leaves = self.manager.restore(step, args=ocp.args.StandardRestore(leaves))
        report(f"restored step {step}")
        return eqx.combine(jax.tree.unflatten(treedef, leaves), rest), step

    def close(self) -> None:
        if self.manager:
            self.manager.close()  # waits for what is still being written


# The processes.


def join(arguments):
    """Makes one machine of many processes. If one dies, the others are told.

    A process that has not been heard of for so many seconds is dead. Then the others
    end with an error, instead of waiting for it.
    """
    seconds = arguments.timeout
    timeouts = dict(heartbeat_timeout_seconds=seconds, shutdown_timeout_seconds=seconds)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # on CPUs
    if arguments.cluster:
        jax.distributed.initialize(**timeouts)
    elif arguments.coordinator:
        jax.distributed.initialize(
            arguments.coordinator, arguments.processes, arguments.process, **timeouts
        )


def parse():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=64, help="of all processes")
    parser.add_argument("--checkpoints", type=Path, help="a directory all can see")
    parser.add_argument("--every", type=int, default=20, help="steps to a checkpoint")
    parser.add_argument("--timeout", type=int, default=30, help="seconds, see join()")
    parser.add_argument("--cluster", action="store_true", help="SLURM, TPU pods, MPI")
    parser.add_argument("--coordinator", help="host:port of process 0")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process", type=int)
    return parser.parse_args()


def main():
    arguments = parse()
    join(arguments)
    checkpoints = Checkpoints(arguments.checkpoints, arguments.every)
    train(arguments.steps, arguments.batch, checkpoints)


if __name__ == "__main__":
    main()
