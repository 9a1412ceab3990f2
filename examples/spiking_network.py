"""Ten seconds of a spiking network: 100,000 steps, of which every 100th is kept.

Neurons charge up, fire, and signal to the others. A step has to be short, a tenth of a
millisecond, but we only look at slow changes. `SlicedScan` does not store the states
that nobody looks at, for the simulation or for its gradient, which goes back through
all of the steps within a memory budget.

It prints the plan of the gradient, its memory compared with a loop that stores all
outputs, and the error as the network learns to delay a wave.

    python -m pip install -e '.[examples]' && python examples/spiking_network.py
"""

import time

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

import eqloop as el

NEURONS, STEPS, EVERY = 64, 100_000, 100
DT = 1e-4  # seconds a step
MEMBRANE, TRACE = 0.02, 0.1  # seconds in which a charge, and a trace, decay
RATE_UNIT = 20  # spikes a second that make a trace of 1
BUDGET = "512KiB"
UPDATES, RATE = 21, 0.003

Neurons = Float[Array, " neurons"]
State = tuple[Neurons, Neurons, Neurons]


@jax.custom_jvp
def fires(charge: Neurons) -> Neurons:
    """Whether a neuron fires: 1.0 if its charge is above 1."""
    return (charge > 1).astype(charge.dtype)


@fires.defjvp
def _fires_jvp(primals, tangents):
    # A step function has no slope, so this takes the slope of a smooth one. It is large
    # for neurons that nearly fired or just fired, which the gradient can change.
    (charge,), (change,) = primals, tangents
    return fires(charge), change / (1 + 5 * jnp.abs(charge - 1)) ** 2


class Network(eqx.Module):
    """One step of the network."""

    drive: Neurons
    weight: Float[Array, "neurons neurons"]
    readout: Neurons

    def __init__(self, *, key):
        drive_key, weight_key = jax.random.split(key)
        self.drive = jax.random.uniform(drive_key, (NEURONS,), minval=0.5, maxval=2)
        self.weight = 0.05 * jax.random.normal(weight_key, (NEURONS, NEURONS))
        self.readout = jnp.zeros(NEURONS)

    def __call__(self, state: State, signal: Float[Array, ""]) -> tuple[State, Array]:
        charge, spikes, trace = state
        push = DT / MEMBRANE * (self.drive * (1 + signal) - charge)
        charge = (charge + push + self.weight @ spikes / 10) * (1 - spikes)
        spikes = fires(charge)
        trace = trace + DT / TRACE * (spikes / (RATE_UNIT * DT) - trace)
        return (charge, spikes, trace), self.readout @ trace


def start(key) -> State:
    charge = jax.random.uniform(key, (NEURONS,))
    return charge, jnp.zeros(NEURONS), jnp.zeros(NEURONS)


# The input, and the target: the same wave, a moment later.

TIME = DT * jnp.arange(STEPS)
SIGNAL = jnp.sin(2 * jnp.pi * TIME / 2) * jnp.sin(2 * jnp.pi * TIME / 5)
TARGET = jnp.roll(SIGNAL, 1_000)[::EVERY]
STATE = start(jax.random.key(1))


def error(out):
    return jnp.sqrt(jnp.mean((out - TARGET) ** 2))


def loss(loop):
    _, out = loop(STATE, SIGNAL)
    return error(out)


def loss_of_a_slice(loop):
    _, out = loop(STATE, SIGNAL)
    return error(out[::EVERY])


def megabytes(gradient, *args):
    """What a gradient allocates besides its arguments and results."""
    program = jax.jit(gradient).lower(*args).compile()
    return program.memory_analysis().temp_size_in_bytes / 1e6


def main():
    network = Network(key=jax.random.key(0))
    loop = el.SlicedScan(network, step=EVERY, schedule=el.Budget(BUDGET))

    print(f"The gradient's plan\n\n{loop.plan(STATE, SIGNAL)}\n")
    print("Memory of the gradient")
    everything = megabytes(jax.grad(loss_of_a_slice), el.Scan(network))
    print(f"  Scan, then a slice    {everything:8.2f} MB")
    print(f"  SlicedScan            {megabytes(jax.grad(loss), loop):8.2f} MB")

    optimiser = optax.adam(RATE)

    @eqx.filter_jit
    def update(loop, state):
        value, gradient = eqx.filter_value_and_grad(loss)(loop)
        updates, state = optimiser.update(gradient, state)
        return value, eqx.apply_updates(loop, updates), state

    print(f"\nTraining through {STEPS:,} steps")
    state = optimiser.init(eqx.filter(loop, eqx.is_array))
    for i in range(UPDATES):
        begin = time.perf_counter()
        value, loop, state = jax.block_until_ready(update(loop, state))
        seconds = time.perf_counter() - begin
        if i % 5 == 0:
            print(f"  update {i:>2}: error {value:.3f}, {seconds:.1f} s")


if __name__ == "__main__":
    main()
