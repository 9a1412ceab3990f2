"""A closed orbit between Earth and Moon, found through an adaptive solver.

The course of a satellite between the two is erratic, but from some starts it comes back
after a few loops, again and again. Arenstorf found such starts in 1963. The course is
sharply bent close to the Moon, and nearly straight far away, so the solver chooses its
own steps, and their number is not known beforehand: it is a while loop. Newton's method
needs the derivatives of the satellite's position after half of the orbit. They go back
through all of the steps.

It prints the iterations of Newton's method, with the error and the number of solver
steps of each, and how far the satellite is from its start after the whole period.

    python -m pip install -e . && python examples/adaptive_solver.py
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

import eqloop as el

jax.config.update("jax_enable_x64", True)

Scalar = Float[Array, ""]
# Position and velocity, in the plane that turns with the Moon.
Vector = Float[Array, "4"]

# The method of Dormand and Prince: of order 5, and of order 4 to estimate its error.
NODES = [
    [],
    [1 / 5],
    [3 / 40, 9 / 40],
    [44 / 45, -56 / 15, 32 / 9],
    [19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729],
    [9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656],
    [35 / 384, 0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84],
]
FIFTH = np.array([*NODES[-1], 0])
FOURTH = np.array(
    [5179 / 57600, 0, 7571 / 16695, 393 / 640, -92097 / 339200, 187 / 2100, 1 / 40]
)


class State(eqx.Module):
    """The carry of the loop."""

    time: Scalar
    y: Vector
    size: Scalar  # of the next step
    error: Scalar  # of the last step that was accepted, 1 being what is tolerated
    accepted: Int[Array, ""]
    rejected: Int[Array, ""]


class Satellite(eqx.Module):
    """The restricted problem of three bodies. Distances are in those of the Moon."""

    moon: Scalar  # its part of the mass

    def __call__(self, y: Vector) -> Vector:
        position, velocity = y[:2], y[2:]
        to_earth = position + jnp.array([1, 0]) * self.moon
        to_moon = position - jnp.array([1, 0]) * (1 - self.moon)
        pull = lambda to: to / jnp.sum(to**2) ** 1.5
        turning = position + 2 * jnp.stack([velocity[1], -velocity[0]])
        gravity = (1 - self.moon) * pull(to_earth) + self.moon * pull(to_moon)
        return jnp.concatenate([velocity, turning - gravity])


class Step(eqx.Module):
    """Tries a step, and chooses the size of the next one."""

    field: Callable[[Vector], Vector]
    tolerance: float
    end: Scalar

    def __call__(self, state: State) -> State:
        is_last = state.time + state.size >= self.end
        size = jnp.where(is_last, self.end - state.time, state.size)
        y, defect = self.attempt(state.y, size)
        scale = self.tolerance * (1 + jnp.maximum(jnp.abs(state.y), jnp.abs(y)))
        # Where the steps end is no property of the orbit: its derivative is that of the
        # steps as they were taken.
        error = jax.lax.stop_gradient(jnp.sqrt(jnp.mean((defect / scale) ** 2)))
        error = jnp.maximum(error, 1e-10)
        is_good = error <= 1
        growth = 0.9 * error**-0.14 * jnp.where(is_good, state.error**0.08, 1)
        choose = lambda new, old: jnp.where(is_good, new, old)
        return State(
            time=choose(jnp.where(is_last, self.end, state.time + size), state.time),
            y=choose(y, state.y),
            size=jax.lax.stop_gradient(size * jnp.clip(growth, 0.2, 5)),
            error=choose(error, state.error),
            accepted=state.accepted + is_good,
            rejected=state.rejected + ~is_good,
        )

    def attempt(self, y: Vector, size: Scalar) -> tuple[Vector, Vector]:
        """The solution of order 5 after a step, and its difference from order 4."""
        slopes: list[Vector] = []
        for weights in NODES:
            shift = sum(w * k for w, k in zip(weights, slopes, strict=True))
            slopes.append(self.field(y + size * shift))
        k = jnp.stack(slopes)
        return y + size * FIFTH @ k, size * (FIFTH - FOURTH) @ k


class Solver(eqx.Module):
    """Solves an equation up to a time."""

    field: Callable[[Vector], Vector]
    tolerance: float = 1e-12

    def __call__(self, y: Vector, end: Scalar) -> State:
        def is_on_its_way(state: State) -> Bool[Array, ""]:
            return state.time < end

        step = Step(self.field, self.tolerance, end)
        zero, none = jnp.zeros(()), jnp.zeros((), int)
        start = State(zero, y, zero + 1e-4, zero + 1, none, none)
        return el.CheckpointedWhileLoop(is_on_its_way, step, checkpoints=40)(start)


def start(speed: Scalar) -> Vector:
    """Behind the Moon, upright to the line from the Earth."""
    return jnp.stack([0.994, 0.0, 0.0, speed])


@eqx.filter_jit
def crossing(solver: Solver, guess: Float[Array, "2"]):
    """Where the line is crossed after half of the time, and the derivatives of that.

    The orbit is symmetric, and so it is closed if it crosses the line upright: if there
    `y` and the velocity along `x` are both zero.
    """

    def miss(guess: Float[Array, "2"]) -> tuple[Float[Array, "2"], State]:
        speed, period = guess
        state = solver(start(speed), period / 2)
        return state.y[1:3], state

    jacobian, state = jax.jacrev(miss, has_aux=True)(guess)
    return state.y[1:3], jacobian, state


def main() -> None:
    solver = Solver(Satellite(jnp.array(0.012277471)))
    guess = jnp.array([-2.0015, 17.06])
    print("    speed               period              miss      steps  rejected")
    for _ in range(4):
        miss, jacobian, state = crossing(solver, guess)
        speed, period = guess
        print(
            f"  {speed:.14f}  {period:.14f}  {jnp.linalg.norm(miss):.1e}  "
            f"{state.accepted:6d}  {state.rejected:8d}"
        )
        guess = guess - jnp.linalg.solve(jacobian, miss)

    speed, period = guess
    whole = eqx.filter_jit(solver)(start(speed), period)
    gap = jnp.linalg.norm(whole.y - start(speed))
    print(
        f"after the whole period: {gap:.1e} from the start, in {whole.accepted} steps"
    )


if __name__ == "__main__":
    main()
