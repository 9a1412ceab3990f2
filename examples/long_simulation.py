# %% [markdown]
"""
# Fit a long simulation in 64 MB

A nerve fibre carries spikes only where its membrane has enough sodium channels. An
injury destroys some of them. Can we tell where, and how many, from voltages recorded
along the fibre?

We can, if we have a gradient. A simulation predicts the recording, and its derivatives
with respect to the densities of channels say how to correct them. But the simulation
takes 130,000 steps, and a gradient needs the intermediate results of each of them.
Storing these would take 2 GiB. Here the gradient gets 64 MiB.

You can run this page as a script,

```sh
python -m pip install -e '.[examples]' && python examples/long_simulation.py
```

or as a notebook. It prints plans, memory, and the error of the fit, and draws the
frontier and the densities that it finds.
"""

# %%
import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import scipy.optimize
from jax.nn import sigmoid
from jaxtyping import Array, Float

import eqloop as el

# %% [markdown]
"""
## The fibre

This is the giant axon of a squid, as Hodgkin and Huxley described it in 1952: 128 mm of
it, divided into compartments of a millimetre. Each compartment has a voltage and three
gates, which let sodium and potassium through. Current flows between neighbours, and so
a spike travels.

The unknowns are the densities of sodium channels in stretches of 8 mm. The model holds
their logarithms, so no density is ever negative. Everything else is in the books. Units
are mV, ms, µA/cm² and mS/cm².
"""

# %%
PLACES, STRETCHES, DT = 128, 16, 0.01  # ms: with longer steps the axon is unstable
AXIAL = 33.6  # between places: radius 0.238 mm, resistivity 35.4 Ω cm

Places = Float[Array, "places"]


class State(eqx.Module):
    """The carry of the loop: the voltage, and how far the gates are open."""

    voltage: Places
    m: Places
    h: Places
    n: Places


class Axon(eqx.Module):
    """A step of 10 µs, of forward Euler."""

    log_sodium: Float[Array, "stretches"]

    def __call__(
        self, state: State, current: Float[Array, ""]
    ) -> tuple[State, Float[Array, "electrodes"]]:
        v, m, h, n = state.voltage, state.m, state.h, state.n
        u = v + 65  # mV above rest
        density = jnp.repeat(jnp.exp(self.log_sodium), PLACES // STRETCHES)
        sodium = density * m**3 * h * (v - 50)
        others = 36 * n**4 * (v + 77) + 0.3 * (v + 54.4)
        along = AXIAL * jnp.diff(jnp.diff(v, prepend=v[:1], append=v[-1:]))
        slopes = State(
            voltage=(along - sodium - others).at[0].add(current),
            m=ramp((u - 25) / 10) * (1 - m) - 4 * jnp.exp(-u / 18) * m,
            h=0.07 * jnp.exp(-u / 20) * (1 - h) - sigmoid((u - 30) / 10) * h,
            n=0.1 * ramp((u - 10) / 10) * (1 - n) - 0.125 * jnp.exp(-u / 80) * n,
        )
        return jax.tree.map(lambda x, slope: x + DT * slope, state, slopes), v[4::8]


def ramp(x: Places) -> Places:
    """`x / (1 - exp(-x))`, which is smooth at 0, and so are its derivatives here."""
    is_small = jnp.abs(x) < 1e-3
    safe = jnp.where(is_small, 1, x)
    return jnp.where(is_small, 1 + x / 2, -safe / jnp.expm1(-safe))


# %% [markdown]
"""
The axon rests until its beginning gets a shock, at random times. We simulate 1.3
seconds, which are 130,000 steps.
"""

# %%
STEPS = 130_000
rest = State(*(jnp.full(PLACES, x) for x in (-65.0, 0.053, 0.596, 0.318)))
waits = np.random.default_rng(0).integers(900, 2500, size=STEPS // 900)
shocks = np.cumsum(waits)
current = np.zeros(STEPS, np.float32)
for shock in shocks[shocks < STEPS - 2000]:
    current[shock : shock + 100] = 1500

# %% [markdown]
"""
## The recording

The true axon has lost half of its channels between 40 and 64 mm. We simulate it, with a
progress bar, and each of the 16 electrodes adds noise of 2 mV.
"""

# %%
more = [0, 0.1, 0, -0.1, 0, -0.7, -0.8, -0.6, -0.1, 0.1, 0.2, 0, -0.1, 0, 0.1, 0]
truth = Axon(jnp.log(120) + jnp.array(more))  # and less, where it is negative
_, clean = el.Jit(el.Scan(truth, progress=True))(rest, current)
NOISE = 2.0
recorded = clean + NOISE * jax.random.normal(jax.random.key(0), clean.shape)

# %%
time = DT * np.arange(STEPS)
shown = slice(2000, 5000)
figure, ax = plt.subplots(figsize=(7, 3.2), layout="constrained")
for electrode in (0, 6, 15):
    label = f"{8 * electrode + 4} mm"
    ax.plot(time[shown], recorded[shown, electrode], lw=0.8, label=label)
ax.set(xlabel="time (ms)", ylabel="voltage (mV)")
ax.legend(loc="upper right", frameon=False)
plt.show()

# %% [markdown]
"""
## How much the gradient would take

The first guess is a healthy axon. We begin with plans, which need only the types of the
arguments. `StoreAll` does the same as `jax.lax.scan`.

A budget is for the loop alone. The loss also keeps the outputs of the loop and their
cotangents: 130,000 steps, 16 electrodes, 4 bytes, twice. That is 16 MiB, so 48 MiB are
left for the loop.
"""

# %%
guess = Axon(jnp.full(STRETCHES, jnp.log(120.0)))
stored = el.Scan(guess, schedule=el.StoreAll())
budgeted = el.Scan(guess, schedule=el.Budget("48MiB"))
print(stored.plan(rest, current))
print()
print(budgeted.plan(rest, current))

# %% [markdown]
"""
A budget takes the fastest plan that fits. The line in the picture shows all plans to
choose from, and the star is the chosen one.
"""

# %%
figure, ax = plt.subplots(figsize=(7, 3.2), layout="constrained")
budgeted.frontier(rest, current).plot(ax)
plt.show()

# %% [markdown]
"""
XLA reports how much memory the compiled gradient takes, with the outputs and their
cotangents:
"""


# %%
def loss(loop: el.Scan) -> Float[Array, ""]:
    """The mean squared difference from the recording, in mV²."""
    _, voltages = loop(rest, current)
    return jnp.mean((voltages - recorded) ** 2)


def compile_gradient(loop: el.Scan):
    return el.Jit(el.Grad(loss, return_value=True)).lower(loop).compile()


def mebibytes(program) -> float:
    """What the program allocates in addition to its arguments and its results."""
    return program.memory_analysis().temp_size_in_bytes / 2**20


gradient = compile_gradient(budgeted)
print(f"StoreAll        {mebibytes(compile_gradient(stored)):8.1f} MiB")
print(f"Budget('48MiB') {mebibytes(gradient):8.1f} MiB")
assert mebibytes(gradient) <= 64

# %% [markdown]
"""
## The fit

SciPy's L-BFGS does the rest. It asks for the loss and its gradient about a dozen times.
"""


# %%
def loss_and_gradient(log_sodium):
    axon = Axon(jnp.asarray(log_sodium, jnp.float32))
    loop = eqx.tree_at(lambda loop: loop.f, budgeted, axon)
    value, slope = gradient(loop)
    errors.append(float(value) ** 0.5)
    print(f"gradient {len(errors):>2}: error {errors[-1]:6.3f} mV")
    return float(value), np.asarray(slope.f.log_sodium, float)


errors: list[float] = []
found = scipy.optimize.minimize(
    loss_and_gradient,
    guess.log_sodium,
    jac=True,
    method="L-BFGS-B",
    options=dict(maxiter=11),
)

# %% [markdown]
"""
The error falls to the level of the noise, 2 mV, so nothing is left to explain. The fit
finds the injury, stretch by stretch:
"""

# %%
densities = {
    "true": truth.log_sodium,
    "first guess": guess.log_sodium,
    "found": found.x,
}
figure, (left, right) = plt.subplots(
    1, 2, figsize=(7, 3.2), width_ratios=(1, 2), layout="constrained"
)
left.plot(range(1, len(errors) + 1), errors, ".-")
left.axhline(NOISE, color="0.6", lw=1)
left.set(xlabel="gradients", ylabel="error (mV)", ylim=(0, None))
for (label, density), style in zip(densities.items(), ("k-", "k:", "C1o"), strict=True):
    at = 8 * np.arange(STRETCHES) + 4
    right.plot(at, np.exp(density), style, label=label)
right.set(xlabel="place (mm)", ylabel="sodium channels (mS/cm²)", ylim=(0, 170))
right.legend(loc="lower right", frameon=False)
plt.show()

# %%
off = np.abs(np.expm1(found.x - truth.log_sodium))
print(f"error {errors[0]:.2f} mV, then {errors[-1]:.2f} mV of which {NOISE} are noise")
print(f"densities off by {off.mean():.1%} on average, {off.max():.1%} at most")
assert errors[-1] < 1.05 * NOISE
assert off.max() < 0.05
