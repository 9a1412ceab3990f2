"""A policy that is trained through 4,096 environments: one kernel each way on a GPU.

A pendulum is to be held upright. The policy is a small network, and the
environment is differentiable, so its gradient is taken through all steps of all
pendulums. Each of them is a few numbers, so on a GPU nearly all of the time would be
spent on starting kernels. `Fused` starts one for all steps, and one for the way back.

It prints the plan, and the cost as the policy learns.

    python -m pip install -e '.[examples]' && python examples/thousands_of_pendulums.py
"""

import time

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

import eqloop as el

PENDULUMS, STEPS, DT = 4096, 60, 0.05
UNITS, PUSH = 16, 4.0
UPDATES, RATE = 81, 0.05

State = tuple[Float[Array, ""], Float[Array, ""]]


class Policy(eqx.Module):
    """How hard to push, from what is seen of a pendulum."""

    within: Float[Array, "units 3"]
    bias: Float[Array, " units"]
    out: Float[Array, " units"]

    def __init__(self, *, key):
        self.within = jax.random.normal(key, (UNITS, 3))
        self.bias = jnp.zeros(UNITS)
        self.out = jnp.zeros(UNITS)

    def __call__(self, angle, speed):
        seen = jnp.stack([jnp.cos(angle), jnp.sin(angle), speed / 4])
        return PUSH * jnp.tanh(self.out @ jnp.tanh(self.within @ seen + self.bias))


class Environment(eqx.Module):
    """One step of a pendulum under a policy; the angle is 0 at the top."""

    policy: Policy

    def __call__(self, state: State, _: None) -> tuple[State, Float[Array, ""]]:
        angle, speed = state
        push = self.policy(angle, speed)
        speed = speed + DT * (5 * jnp.sin(angle) + 3 * push)
        angle = angle + DT * speed
        cost = 1 - jnp.cos(angle) + 0.01 * speed**2 + 0.001 * push**2
        return (angle, speed), cost


def loss(policy, angles, speeds):
    loop = el.Scan(Environment(policy), schedule=el.Fused())
    _, costs = jax.vmap(lambda *state: loop(state, length=STEPS))(angles, speeds)
    return jnp.mean(costs)


def main():
    policy = Policy(key=jax.random.key(0))
    keys = jax.random.split(jax.random.key(1))
    angles = jax.random.uniform(keys[0], (PENDULUMS,), minval=-0.5, maxval=0.5)
    speeds = 0.5 * jax.random.normal(keys[1], (PENDULUMS,))

    print("The loop, with its batch")
    print(el.plans(eqx.filter_grad(loss))(policy, angles, speeds))

    optimiser = optax.adam(RATE)

    @eqx.filter_jit
    def update(policy, state):
        value, gradient = eqx.filter_value_and_grad(loss)(policy, angles, speeds)
        updates, state = optimiser.update(gradient, state)
        return value, eqx.apply_updates(policy, updates), state

    state = optimiser.init(policy)
    print(f"\nTraining through {PENDULUMS} pendulums, {STEPS} steps each")
    for i in range(UPDATES):
        begin = time.perf_counter()
        value, policy, state = jax.block_until_ready(update(policy, state))
        if i % 20 == 0:
            seconds = time.perf_counter() - begin
            print(f"  update {i:>2}: cost {value:.3f}, {seconds:.2f} s")


if __name__ == "__main__":
    main()
