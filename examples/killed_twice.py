# %% [markdown]
"""
# Gradients through a week of simulation, killed twice

A gradient through a long simulation first runs the simulation, and then goes back
through it. If that takes days, something will interrupt it: a machine fails, or a job
reaches its time limit. Then everything has to start again, unless the results so far
are on disk.

[`eqloop.Resumable`](../guides/long_runs.md) writes them there. On this page a program
computes the gradient through a week of a river. We kill it on its way forward, start it
again, kill it on its way back, and start it again. The gradient is the same, to the
last bit, as if nothing had happened.

You can run this page as a script,

```sh
python -m pip install -e '.[examples]' && python examples/killed_twice.py
```

or as a notebook. It prints the memory, how far the program came each time, and that the
gradients are equal, and draws the gradient.
"""

# %%
import importlib
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import eqloop as el

# %% [markdown]
"""
## The program

Three factories release waste into a river that has a tide. Bacteria eat the waste, and
use up the oxygen of the water. Fish spawn in one stretch of the river, and need 6 mg of
oxygen in each litre. Which factory harms them, and when?

The simulation goes through a week in steps of 20 seconds. `harm` adds up the oxygen
that is missing where the fish spawn. Its gradient with respect to the waste released in
each step answers the question, for all factories and all times at once.

Killing the process of this notebook would end the notebook, so the program is a file,
and each run of it is a process of its own.
"""

# %%
PROGRAM = """
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import eqloop as el

CELLS, WIDTH = 256, 100.0  # the number of cells along the river; metres
STEP, HOUR = 20.0, 180  # seconds in a step; steps in an hour
WEEK = 7 * 24 * HOUR
FACTORIES, SPAWNING = np.array([60, 120, 200]), slice(130, 160)  # cells
FRESH, NEEDED = 9.0, 6.0  # mg of oxygen in a litre


class River(eqx.Module):
    mixing: jax.Array  # m²/s

    def __call__(self, river, x):
        waste, oxygen, harm = river
        speed, released = x
        used = 3e-5 * waste * oxygen / (oxygen + 1)
        gained = 5e-6 * (FRESH - oxygen)  # from the air
        waste = self.carry_along(waste, speed, 0.0) - STEP * used
        oxygen = self.carry_along(oxygen, speed, FRESH) + STEP * (gained - used)
        missing = jnp.maximum(NEEDED - oxygen[SPAWNING], 0)
        harm = harm + jnp.mean(missing**2) * STEP / 3600
        return (waste.at[FACTORIES].add(STEP * released), oxygen, harm), None

    def carry_along(self, x, speed, outside):
        x = jnp.pad(x, 1, constant_values=outside)
        flow = jnp.where(speed > 0, x[:-1], x[1:]) * speed
        flow = flow - self.mixing * jnp.diff(x) / WIDTH
        return x[1:-1] - STEP / WIDTH * jnp.diff(flow)


def week():
    "The first carry; the speed of the water and the waste released in each step."
    hours = np.arange(WEEK, dtype=np.float32) / HOUR
    tide = 0.1 + 0.8 * np.cos(2 * np.pi * hours / 12.42)  # m/s
    released = np.full((WEEK, len(FACTORIES)), 5e-3, np.float32)  # mg/l in a second
    clean = jnp.zeros(CELLS), jnp.full(CELLS, FRESH), jnp.zeros(())
    return clean, (tide, released)


def resumable(directory):
    scan = el.Scan(River(jnp.array(50.0)), schedule=el.Recursive(16))
    return el.Resumable(scan, directory, every=6 * HOUR)


def gradient(directory):
    harm = lambda river, _: river[2]
    return resumable(directory).value_and_grad(harm, argnums="xs")(*week())
"""
folder = Path(tempfile.mkdtemp())
(folder / "river.py").write_text(PROGRAM)
sys.path.insert(0, str(folder))
river = importlib.import_module("river")

# %% [markdown]
"""
`Resumable` runs the loop in segments of six hours. After each segment it writes the
state of the river to the directory, and on the way back the cotangents, so that it can
continue from there. Within a segment the schedule decides what is stored. So the
gradient takes the memory of one segment:
"""

# %%
clean, xs = river.week()
segment = tuple(x[: 6 * river.HOUR] for x in xs)
scan = river.resumable(folder / "killed").f
stored = el.Scan(scan.f, schedule=el.StoreAll())
plans = {
    "of the week, by jax.lax.scan": stored.plan(clean, xs),
    "of a segment": scan.plan(clean, segment),
}
for name, plan in plans.items():
    print(f"the gradient {name:28} {plan.peak_bytes / 2**20:6.1f} MiB")

# %% [markdown]
"""
## Killed on the way forward

We start the program, wait until half of the week is simulated, and kill it. `SIGKILL`
gives it no chance to clean up. `status` reads from the directory how far the run has
come.
"""


# %%
def kill_when(is_time) -> None:
    """Runs the program, and kills it when its status says that it is time."""
    command = "import river, sys; river.gradient(sys.argv[1])"
    arguments = [sys.executable, "-c", command, str(folder / "killed")]
    with subprocess.Popen(arguments, cwd=folder) as process:
        while process.poll() is None and not is_time(status()):
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)


def status() -> el.resuming.RunStatus:
    return river.resumable(folder / "killed").status()


kill_when(lambda status: status.steps > river.WEEK / 2)
print("killed:", status())
assert river.WEEK / 2 < status().steps < river.WEEK

# %% [markdown]
"""
## Killed on the way back

Started again with the same arguments, the program continues after the last finished
segment. It reaches the end of the week, and turns around. We kill it again when it has
gone back through half of the week.
"""

# %%
kill_when(lambda status: (status.reversed or 0) > river.WEEK / 2)
print("killed:", status())
assert river.WEEK / 2 < (status().reversed or 0) < river.WEEK

# %% [markdown]
"""
## The third time

Nobody kills it now. To compare, we also compute the gradient from the start, in another
directory, without any interruption.
"""

# %%
harm, (_, resumed) = river.gradient(folder / "killed")
print("after the third start:", status())
expected_harm, (_, unbroken) = river.gradient(folder / "unbroken")
is_same = np.array_equal(resumed, unbroken) and harm == expected_harm
print(f"harm {harm:.1f}; the same gradient to the last bit: {is_same}")
assert is_same

# %% [markdown]
"""
The gradient with respect to `xs` is a memory map, and has a row for each step. It says
how much harm the waste of each factory does, if it is released in that step.
"""

# %%
days = np.arange(river.WEEK) / river.HOUR / 24
figure, ax = plt.subplots(figsize=(7, 3.2), layout="constrained")
for factory, cell in enumerate(river.FACTORIES):
    label = f"{cell * river.WIDTH / 1000:.0f} km from the spring"
    ax.plot(days[::30], resumed[::30, factory], lw=1, label=label)
ax.set(xlabel="released on day", ylabel="harm per release", ylim=(0, 7))
ax.legend(loc="upper center", ncols=3, frameon=False)
plt.show()

# %% [markdown]
"""
Waste harms the fish if the tide takes it to where they spawn. The waste that the third
factory releases while the water flows out to sea does almost no harm.

## Does it help?

Let each factory hold back a tenth of its waste: either all the time, or only while a
release does the most harm.
"""


# %%
def harm_of(released: np.ndarray) -> float:
    (_, _, harm), _ = el.Jit(scan)(clean, (xs[0], released))
    return float(harm)


released = xs[1]
worst = resumed > np.quantile(resumed, 0.9, axis=0)
plain, less, timed = map(harm_of, (released, 0.9 * released, released * ~worst))
print(f"harm as it is                       {plain:6.1f}")
print(f"a tenth less, all the time          {less:6.1f}")
print(f"nothing while it does the most harm {timed:6.1f}")
assert timed < less < plain
