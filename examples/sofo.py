"""A network that remembers, trained without a backward pass.

A small recurrent network sees a light that flashes at random, red or green, and has to
say which colour came last. Training never goes backwards in time. `el.SofoGrad` pushes
random directions forward along with the network, measures the slope and the curvature
of the loss along them, and takes the Gauss-Newton step in their span. So training takes
the memory of a few time steps, for sequences of any length.

It prints the memory of a step and of the gradient, for short and for long sequences,
and the error as networks are trained by each of them.

    python -m pip install -e '.[examples]' && python examples/sofo.py
"""

import time

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

import eqloop as el

HIDDEN, LENGTH, BATCH = 32, 100, 32
STEPS, TANGENTS = 100, 64


class Network(eqx.Module):
    """Rate units with leaky integration, as in models of neural circuits."""

    recurrent: Float[Array, "hidden hidden"]
    inputs: eqx.nn.Linear
    readout: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.recurrent = jax.random.normal(keys[0], (HIDDEN, HIDDEN)) / HIDDEN**0.5
        self.inputs = eqx.nn.Linear(2, HIDDEN, key=keys[1])
        self.readout = eqx.nn.Linear(HIDDEN, 1, key=keys[2])

    def __call__(
        self, h: Float[Array, " hidden"], light: Float[Array, "2"]
    ) -> tuple[Float[Array, " hidden"], Float[Array, "1"]]:
        h = h + 0.2 * (jnp.tanh(self.recurrent @ h + self.inputs(light)) - h)
        return h, self.readout(h)


def flashes(key):
    """Lights of shape `(length, 2)`, and which was on last: 1 or -1, and 0 at first."""
    colours = jax.random.choice(
        key, jnp.array([1, -1, 0]), (LENGTH,), p=jnp.array([0.04, 0.04, 0.92])
    )
    latest = lambda last, now: (jnp.where(now == 0, last, now),) * 2
    _, last = jax.lax.scan(latest, 0, colours)
    lights = 5.0 * jnp.stack([colours == 1, colours == -1], axis=1)
    return lights, last[:, None].astype(float)


def loss(network, lights, targets):
    """The mean squared error, summed up as the network goes along."""

    def step(carry, now):
        h, total = carry
        light, target = now
        h, said = network(h, light)
        return (h, total + el.losses.mean_squared(said, target)), None

    (_, total), _ = el.Scan(step)((jnp.zeros(HIDDEN), 0.0), (lights, targets))
    return total / len(lights)


def batch_loss(network, key):
    lights, targets = jax.vmap(flashes)(jax.random.split(key, BATCH))
    return jnp.mean(jax.vmap(loss, in_axes=(None, 0, 0))(network, lights, targets))


def train(name, derivative, optimiser):
    """Trains a network with a gradient, or with what replaces it."""

    @eqx.filter_jit
    def step(network, state, key):
        value, direction = derivative(network, key)
        updates, state = optimiser.update(direction, state)
        return eqx.apply_updates(network, updates), state, value

    network = Network(jax.random.key(0))
    state = optimiser.init(eqx.filter(network, eqx.is_array))
    start = time.perf_counter()
    for i, key in enumerate(jax.random.split(jax.random.key(1), STEPS)):
        network, state, value = step(network, state, key)
        if i % 25 == 0 or i == STEPS - 1:
            print(f"{name:<6}step {i:>3}: error {value:.4f}")
    print(f"{name:<6}took {time.perf_counter() - start:.1f} s\n")
    return network


def sofo(network, key):
    data_key, key = jax.random.split(key)
    step = el.SofoGrad(batch_loss, tangents=TANGENTS, return_value=True)
    return step(network, data_key, key=key)


def memory(derivative, length):
    """The megabytes that a step allocates beside the network and the data."""
    data = jnp.ones((length, 2)), jnp.ones((length, 1))
    program = el.Jit(derivative).lower(Network(jax.random.key(0)), *data).compile()
    return program.memory_analysis().temp_size_in_bytes / 1e6


def compare_memory():
    key = jax.random.key(0)
    sofo = lambda *args: el.SofoGrad(loss, tangents=TANGENTS)(*args, key=key)
    print("time steps     SofoGrad         Grad")
    for length in (100, 10_000):
        ours, theirs = memory(sofo, length), memory(el.Grad(loss), length)
        print(f"{length:>10}{ours:>10.2f} MB{theirs:>10.2f} MB")
    print()


def main():
    compare_memory()
    train("SOFO", sofo, optax.sgd(0.5))
    train("Adam", el.Grad(batch_loss, return_value=True), optax.adam(3e-3))


if __name__ == "__main__":
    main()
