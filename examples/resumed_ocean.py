"""The gradient through a year of an ocean, by a process that is killed twice.

An ocean basin is driven by the wind, whose strength changes from hour to hour. Which
winds made the currents at the end of the year? The gradient of their energy with
respect to the wind of each hour answers this. It goes back through the whole year, in
segments of ten days. The process that computes it is killed in summer, started again,
killed on its way back through the year, and started again.

It prints when the process was killed, that the gradient is equal, to the last bit, to
that of a process that was not killed, and how long the ocean remembers a wind.

    python -m pip install -e . && python examples/resumed_ocean.py
"""

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

import eqloop as el

HOURS, SEGMENT = 8760, 240
ROWS, COLUMNS, CELL = 48, 64, 40_000.0  # metres
STEP = 3600.0  # seconds
WAVE_SPEED, DRAG, FRICTION = 2.0, 2e-5, 1e-7
CORIOLIS, BETA = 5e-5, 2e-11  # at the southern coast, and how it grows to the north

Field = Float[Array, "_ _"]


class Ocean(eqx.Module):
    """One moving layer of water: its velocity to the east and north, and its height.

    On the grid, velocities are between heights. There are coasts all around, through
    which nothing flows.
    """

    wind: Float[Array, "rows 1"]

    def __call__(self, water: tuple[Field, Field, Field], strength: Float[Array, ""]):
        east, north, height = water
        flow = (east[:, 1:] - east[:, :-1], north[1:] - north[:-1])
        height = height - STEP / CELL * (flow[0] + flow[1])
        coriolis = CORIOLIS + BETA * CELL * jnp.arange(ROWS)[:, None]
        # The Earth's rotation turns flow to the north into flow to the east, and back.
        turned = coriolis * (north[1:] + north[:-1]) / 2
        slope = WAVE_SPEED**2 / CELL * (height[:, 1:] - height[:, :-1])
        push = between(turned, 1) - slope + strength * self.wind
        inner = slow_down(east[:, 1:-1] + STEP * push)
        east = jnp.pad(inner, ((0, 0), (1, 1)))
        turned = coriolis * (east[:, 1:] + east[:, :-1]) / 2
        slope = WAVE_SPEED**2 / CELL * (height[1:] - height[:-1])
        inner = slow_down(north[1:-1] - STEP * (between(turned, 0) + slope))
        north = jnp.pad(inner, ((1, 1), (0, 0)))
        return (east, north, height), None


def between(x: Field, axis: int) -> Field:
    """The means of neighbours."""
    x = jnp.moveaxis(x, axis, 0)
    return jnp.moveaxis((x[1:] + x[:-1]) / 2, 0, axis)


def slow_down(velocity: Field) -> Field:
    """Drag at the bottom, stronger for faster water."""
    return velocity / (1 + STEP * (FRICTION + DRAG * jnp.abs(velocity)))


def energy(water: tuple[Field, Field, Field], _: None) -> Float[Array, ""]:
    """The kinetic energy of the currents."""
    east, north, _ = water
    return 1e3 * (jnp.mean(east**2) + jnp.mean(north**2))


def winds() -> Float[np.ndarray, " hours"]:
    """Strong in winter and weak in summer, with storms."""
    hours = np.arange(HOURS)
    storms = np.random.default_rng(0).normal(size=HOURS // 24).repeat(24)
    return (1 + 0.5 * np.cos(2 * np.pi * hours / HOURS) + storms).astype(np.float32)


def year(directory: str | Path) -> el.Resumable:
    """The loop. A segment is recomputed in parts for its gradient."""
    across = jnp.cos(jnp.pi * (jnp.arange(ROWS) + 0.5) / ROWS)
    scan = el.CheckpointedScan(Ocean(-1e-6 * across[:, None]))
    return el.Resumable(scan, directory, every=SEGMENT)


def gradient(directory: str | Path) -> tuple[Float[Array, ""], np.ndarray]:
    """The energy at the end, and its gradient by the wind of each hour."""
    shapes = (ROWS, COLUMNS + 1), (ROWS + 1, COLUMNS), (ROWS, COLUMNS)
    undifferentiated = tuple(map(jnp.zeros, shapes))
    return year(directory).value_and_grad(energy, argnums="xs")(
        undifferentiated, winds()
    )


def kill_when(is_time: Callable[[el.resuming.RunStatus], bool], directory: str) -> None:
    """Starts a process that computes the gradient, and kills it some time later."""
    command = [sys.executable, __file__, directory]
    with subprocess.Popen(command) as process:
        while process.poll() is None and not is_time(year(directory).status()):
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    print("killed:", year(directory).status())


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as killed,
        tempfile.TemporaryDirectory() as other,
    ):
        kill_when(lambda status: status.steps > HOURS / 2, killed)
        kill_when(lambda status: (status.reversed or 0) > HOURS / 2, killed)
        value, found = gradient(killed)
        _, expected = gradient(other)
        is_same = np.array_equal(found, expected)
        print(
            f"energy {value:.2f}; the gradient is the same to the last bit: {is_same}"
        )
        effect = np.abs(found).reshape(-1, 24).sum(axis=1)
        half = np.flatnonzero(np.cumsum(effect[::-1]) > effect.sum() / 2)[0]
        print(f"half of it is due to the winds of the last {half + 1} days")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        gradient(sys.argv[1])
    else:
        main()
