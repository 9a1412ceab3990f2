"""An ensemble of differential equations, fitted to data: one kernel each way on a GPU.

A thousand drops of dye are carried by the same stirred flow, Lorenz's equations. We see
where each of them is for a while, with some noise, and want to know the three numbers
of the flow. The gradient by these goes through all trajectories at once. `Fused` makes
one kernel of all steps of all of them, on a GPU, and another one of the way back; on a
CPU the loops run as `Chunked` ones.

It prints the plans, and the error of the three numbers before and after the fit.

    python -m pip install -e '.[examples]' && python examples/fitted_ensemble.py
"""

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

import eqloop as el

DROPS, STEPS, DT = 1024, 100, 0.01
TRUE = jnp.array([10.0, 28.0, 8 / 3])
GUESS = jnp.array([8.0, 24.0, 2.0])
NOISE, UPDATES, RATE = 0.1, 101, 0.1

Place = Float[Array, "3"]


def flow(numbers: Float[Array, "3"], place: Place) -> Place:
    x, y, z = place
    a, b, c = numbers
    return jnp.stack([a * (y - x), x * (b - z) - y, x * y - c * z])


def trajectory(numbers: Float[Array, "3"], start: Place) -> Float[Array, "steps 3"]:
    """Where one drop is after each step, by the method of Runge and Kutta."""

    def step(s, _):
        k1 = flow(numbers, s)
        k2 = flow(numbers, s + DT / 2 * k1)
        k3 = flow(numbers, s + DT / 2 * k2)
        k4 = flow(numbers, s + DT * k3)
        s = s + DT / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        return s, s

    # The schedule is that of one loop; `vmap` makes rows of the drops.
    return el.Scan(step, schedule=el.Fused())(start, length=STEPS)[1]


trajectories = jax.vmap(trajectory, in_axes=(None, 0))


def loss(numbers, starts, seen):
    return jnp.mean((trajectories(numbers, starts) - seen) ** 2)


def main():
    key, noise_key = jax.random.split(jax.random.key(0))
    starts = jax.random.normal(key, (DROPS, 3)) + jnp.array([0.0, 0.0, 20.0])
    exact = trajectories(TRUE, starts)
    seen = exact + NOISE * jax.random.normal(noise_key, exact.shape)

    print("The loop, with its batch")
    print(el.plans(jax.grad(loss))(GUESS, starts, seen))

    optimiser = optax.adam(RATE)

    @jax.jit
    def update(numbers, state):
        value, gradient = jax.value_and_grad(loss)(numbers, starts, seen)
        updates, state = optimiser.update(gradient, state)
        return value, optax.apply_updates(numbers, updates), state

    numbers, state = GUESS, optimiser.init(GUESS)
    print(f"\nFitting three numbers to {DROPS} trajectories of {STEPS} steps")
    for i in range(UPDATES):
        value, numbers, state = update(numbers, state)
        if i % 20 == 0:
            print(f"  update {i:>3}: loss {value:.4f}, the numbers are {numbers}")
    off = jnp.max(jnp.abs(numbers / TRUE - 1))
    print(f"\nThe numbers were off by {jnp.max(jnp.abs(GUESS / TRUE - 1)):.2f},")
    print(f"in the end by {off:.4f}")


if __name__ == "__main__":
    main()
