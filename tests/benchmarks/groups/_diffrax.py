"""Gradients of differential equations that Diffrax solves, by its adjoint and ours."""

import importlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from .._claims import NO_SLOWER, Claim, memory_ratio, time_ratio
from .._comparison import Comparison
from .._measure import Case

STEPS, END, WIDTH, EXAMPLES, ROWS = 2000, 20.0, 64, 32, 1000
SAVED = {
    "the end": dict(t1=True),
    f"{ROWS} times": dict(ts=np.linspace(0.0, END, ROWS)),
    "every step": dict(steps=True),
}
THEIRS, OURS = "Diffrax, RecursiveCheckpointAdjoint", "eqloop, CheckpointedAdjoint"


def diffrax() -> Sequence[Comparison]:
    """Two equations, three ways to save, single and in batches."""
    return [_comparison(*kind) for kind in kinds()]


def kinds() -> Iterator[tuple[str, Any, str, bool, tuple[Any, ...]]]:
    """A title, the field, what is saved, whether steps adapt, and the arguments."""
    lorenz, neural = (_lorenz, _lorenz_inputs), (_neural, _neural_inputs)
    batch, ode = f"{EXAMPLES} of them", f"A neural ODE of width {WIDTH}"
    every = [
        ("Lorenz", lorenz, 0, False),
        (f"Lorenz, {batch}", lorenz, EXAMPLES, False),
        (f"Lorenz, {batch}, each with its own steps", lorenz, EXAMPLES, True),
        (ode, neural, 0, False),
        (f"{ode}, {batch}", neural, EXAMPLES, False),
    ]
    for title, (field, make_inputs), count, adapts in every:
        for saved in SAVED:
            args = make_inputs((count,) if count else ())
            yield f"{title}: {saved} saved", field, saved, adapts, args


def _comparison(
    title: str, field: Any, saved: str, adapts: bool, args: tuple[Any, ...]
) -> Comparison:
    batch = jax.tree.leaves(args[0])[0].ndim > 1
    cases = [
        Case(name, partial(gradient_of, field, saved, adapts, name), args, "diffrax")
        for name in (THEIRS, OURS)
    ]
    # What is gained in a batch is gained by steps that all examples take together. With
    # steps of its own each takes its own way back, and most of the time is the solve's.
    claims: list[Claim] = [
        time_ratio(OURS, THEIRS, 0.6 if batch and not adapts else NO_SLOWER),
        # The rows that are saved are nearly all there is, and both hold them.
        memory_ratio(OURS, THEIRS, 1.0 if SAVED[saved] == {"t1": True} else 1.01),
    ]
    rounds = 5 if batch else 15
    return Comparison(title, cases, claims, tolerance=1e-2, rounds=rounds)


def gradient_of(
    field: Any, saved: str, adapts: bool, name: str, y0: Any, params: Any
) -> Any:
    """The gradient of a solve by one of the two adjoints."""
    dfx = importlib.import_module("diffrax")
    adjoint = dfx.RecursiveCheckpointAdjoint()
    if name == OURS:
        adjoint = importlib.import_module("eqloop.diffrax").CheckpointedAdjoint()
    controller = dfx.ConstantStepSize()
    if adapts:
        controller = dfx.PIDController(rtol=1e-3, atol=3e-5)

    def solve(y0: Any, params: Any) -> Any:
        return dfx.diffeqsolve(
            dfx.ODETerm(field),
            dfx.Tsit5(),
            0.0,
            END,
            END / STEPS,
            y0,
            params,
            saveat=dfx.SaveAt(**SAVED[saved]),
            stepsize_controller=controller,
            adjoint=adjoint,
            max_steps=STEPS + 48,
        ).ys

    def loss(y0: Any, params: Any) -> Any:
        is_batch = jax.tree.leaves(y0)[0].ndim > 1
        ys = (jax.vmap(solve, (0, None)) if is_batch else solve)(y0, params)
        # Of chaotic equations the gradients of a mean would not be comparable.
        return jnp.mean(jnp.tanh(jnp.where(jnp.isfinite(ys), ys, 0.0) / 50))

    return jax.grad(loss, (0, 1))(y0, params)


def _lorenz(t: Any, y: jax.Array, params: jax.Array) -> jax.Array:
    s, r, b = params
    rates = s * (y[1] - y[0]), y[0] * (r - y[2]) - y[1], y[0] * y[1] - b * y[2]
    return jnp.stack(rates)


def _lorenz_inputs(batch: tuple[int, ...]) -> tuple[Any, ...]:
    start = jr.normal(jr.key(0), (*batch, 3)) + jnp.array([1.0, 1.0, 20.0])
    return start, jnp.array([10.0, 28.0, 8 / 3])


def _neural(t: Any, y: jax.Array, params: Any) -> jax.Array:
    first, second = params
    return jnp.tanh(second @ jnp.tanh(first @ y))


def _neural_inputs(batch: tuple[int, ...]) -> tuple[Any, ...]:
    weights = tuple(jr.normal(key, (WIDTH, WIDTH)) / 8 for key in jr.split(jr.key(1)))
    return jr.normal(jr.key(0), (*batch, WIDTH)), weights
