"""Where will the North Pole be in half a year? A loop of 18,000 days in a model.

The axis of the Earth wobbles. Its pole moves by some ten metres, with a period of a
year and another of 433 days, which beat against each other every six years. It has been
measured every day since 1962. The model reads the days one after the other, and each
day predicts where the pole will be 182 days later. The prediction needs years of
memory, so the gradient goes back through all of the days.

It prints the memory and the time of that gradient, with all residuals stored and within
two budgets, the error as the model learns, and the error on days that it has not seen.
It draws the predictions to `examples/quickstart.png`.

    python -m pip install -e '.[examples]' && python examples/quickstart.py
"""

import timeit
from pathlib import Path

import astropy_iers_data
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float
from matplotlib.figure import Figure

import eqloop as el

AHEAD = 182  # days
TRAIN, TEST = 18_000, 4_800  # days: 1962 to 2011, and on to 2024
BEAT = 2_340  # days until the two swings stand as they stood
SHOWN = 6 * 365  # days in the picture, which the model has not seen
HIDDEN, STEPS, RATE = 32, 120, 1e-2
BUDGET = "300kB"

WHY = """\
Why do more steps take less time? A residual that is stored has to be written and read.
If the step is as small as here, that takes longer than to compute it again. And many
steps that are run again are known at once, so they are reversed as one batch."""

Point = Float[Array, "2"]
Carry = tuple[Float[Array, " hidden"], Point]


# The model: a cell, and a loop over the cell that is a layer like any other.


class Day(eqx.Module):
    """One step of the loop: reads today's data, and predicts the pole."""

    gru: eqx.nn.GRUCell
    readout: eqx.nn.Linear
    log_memory: Float[Array, ""]  # of the running mean, in days

    def __init__(self, *, key):
        gru_key, readout_key = jax.random.split(key)
        self.gru = eqx.nn.GRUCell(4, HIDDEN, key=gru_key)
        self.readout = eqx.nn.Linear(HIDDEN, 2, key=readout_key)
        self.log_memory = jnp.log(BEAT)

    def __call__(self, carry: Carry, today: tuple[Point, Point]) -> tuple[Carry, Point]:
        hidden, mean = carry
        pole, season = today
        mean = mean + (pole - mean) * jnp.exp(-self.log_memory)
        hidden = self.gru(jnp.concatenate([pole - mean, season]), hidden)
        return (hidden, mean), mean + 5 * self.readout(hidden)


class Forecaster(eqx.Module):
    """Reads all the days. The loop holds the cell, so its arrays are the parameters."""

    loop: el.Scan

    def __call__(self, poles, seasons):
        _, forecasts = self.loop(start(poles), (poles, seasons))
        return forecasts


def start(poles) -> Carry:
    return jnp.zeros(HIDDEN), jnp.mean(poles[:BEAT], axis=0)


# The data: where the pole was, in metres, and the time of year as a point of a circle.


def read_days(count):
    file = astropy_iers_data.IERS_B_FILE
    day, x, y = np.loadtxt(file, usecols=(4, 5, 6))[:count].T
    year = 2 * np.pi * day / 365.2422
    poles = 30.9 * np.stack([x, y], axis=1)  # a second of arc is 30.9 m at the pole
    seasons = np.stack([np.cos(year), np.sin(year)], axis=1)
    return jnp.asarray(poles, jnp.float32), jnp.asarray(seasons, jnp.float32)


def error(forecasts, poles):
    """The root mean square error of the forecasts, in metres."""
    missed = forecasts[:-AHEAD] - poles[AHEAD:]
    return jnp.sqrt(jnp.mean(jnp.sum(missed**2, axis=1)))


def loss(model, poles, seasons):
    return error(model(poles, seasons), poles)


# The same gradient, in less and less memory.


def compare_schedules(cell, days):
    """The plan of each schedule, and the memory, the time and the gradient itself."""
    print("schedule                 carries kept  steps run     memory     time off by")
    reference, times = None, []
    for schedule in (el.StoreAll(), el.Budget("4MB"), el.Budget(BUDGET)):
        model = Forecaster(el.Scan(cell, schedule=schedule))
        plan = model.loop.plan(start(days[0]), days)
        gradient = jax.jit(jax.grad(loss)).lower(model, *days).compile()
        megabytes = gradient.memory_analysis().temp_size_in_bytes / 1e6
        times.append(milliseconds := 1e3 * seconds(gradient, model, *days))
        leaves = jax.tree.leaves(gradient(model, *days))
        reference = reference or leaves
        difference = max(map(relative_difference, leaves, reference))
        print(
            f"{schedule!r:<25}{plan.slots:>12}{plan.evaluations:>11,}"
            f"{megabytes:>8.2f} MB{milliseconds:>6.0f} ms{difference:>7.0e}"
        )
    if min(times[1:]) < times[0]:
        print(WHY)


def seconds(f, *args):
    """The time that a call takes: the best of five."""
    call = lambda: jax.block_until_ready(f(*args))
    return min(timeit.repeat(call, number=1, repeat=5))


def relative_difference(a, b):
    return float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b)))


# Training, as for any Equinox model.


def train(model, days):
    optimiser = optax.adam(optax.cosine_decay_schedule(RATE, STEPS))

    @eqx.filter_jit
    def step(model, state):
        value, gradient = eqx.filter_value_and_grad(loss)(model, *days)
        updates, state = optimiser.update(gradient, state)
        return value, eqx.apply_updates(model, updates), state

    state = optimiser.init(eqx.filter(model, eqx.is_array))
    for i in range(STEPS):
        value, model, state = step(model, state)
        if i % 20 == 0 or i == STEPS - 1:
            print(f"step {i:>3}: error {value:5.2f} m")
    return model


def draw(measured, forecast, file):
    """Draws the pole's path, and its x against time."""
    # Narrow, so that it can be read on a phone.
    figure = Figure(figsize=(5, 6.4), layout="constrained")
    path, line = figure.subplots(2, 1, height_ratios=(1.6, 1))
    years = 1962 + np.arange(TRAIN + TEST)[-len(measured) :] / 365.2422
    for pole, style in (
        (measured, {"color": "0.75", "lw": 4, "label": "measured"}),
        (forecast, {"color": "C3", "lw": 1.2, "label": "said half a year before"}),
    ):
        path.plot(pole[:, 0], pole[:, 1], **style)
        line.plot(years, pole[:, 0], **style)
    path.set(xlabel="x (m)", ylabel="y (m)", aspect="equal", title="the pole's path")
    line.set(xlabel="year", ylabel="x (m)", title="days that the model had not seen")
    figure.legend(*line.get_legend_handles_labels(), loc="outside lower right", ncols=2)
    figure.savefig(file, dpi=160)


def main():
    poles, seasons = read_days(TRAIN + TEST)
    days = poles[:TRAIN], seasons[:TRAIN]
    cell = Day(key=jax.random.key(0))

    print(f"The gradient through a loop of {TRAIN:,} days")
    compare_schedules(cell, days)

    print("\nTraining")
    model = train(Forecaster(el.Scan(cell, schedule=el.Budget(BUDGET))), days)

    forecasts = eqx.filter_jit(model)(poles, seasons)
    unseen = slice(TRAIN - AHEAD, None)
    print(f"\nHalf a year ahead, on the {TEST:,} days after those")
    print(f"the model errs by        {error(forecasts[unseen], poles[unseen]):5.2f} m")
    print(f"'it stays where it is'   {error(poles[unseen], poles[unseen]):5.2f} m")

    file = Path(__file__).with_suffix(".png")
    draw(poles[AHEAD:][-SHOWN:], forecasts[:-AHEAD][-SHOWN:], file)
    print(f"\nThe last six years of them are drawn in {file}")


if __name__ == "__main__":
    main()
