"""While loops, differentiated in reverse mode, beside Equinox's own."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import jax.random as jr

import eqloop as el

from .._claims import NO_SLOWER, memory_ratio, time_ratio
from .._comparison import Comparison
from .._measure import Case

STEPS, MAX_STEPS, WIDTH, EXAMPLES = 3000, 4096, 64, 32

# Beside Equinox's loops. Most of the time that these take with JAX 0.10 is not that of
# the steps. JAX 0.12 compiles each of them into one function, and takes a fourth of it.
_OF_ONE = NO_SLOWER if jax.__version_info__ >= (0, 12) else 0.6


def whiles() -> Sequence[Comparison]:
    """3000 steps of at most 4096; the number of steps is found out as they are run."""
    title = f"{STEPS} steps of at most {MAX_STEPS}, width {WIDTH}"
    one, many = _inputs(()), _inputs((EXAMPLES,))
    batch = f"{EXAMPLES} examples with as many stopping times"
    return [
        _comparison(f"Bounded: {title}", one, "bounded", _bounded),
        _comparison(f"Checkpointed: {title}", one, "checkpointed", _checkpointed),
        _comparison(
            f"With 20 slots: {title}",
            one,
            "checkpointed",
            _checkpointed,
            checkpoints=20,
        ),
        # What is bounded is the time of one loop; in a batch the matrix products count.
        _comparison(f"{batch}: {title}", many, "bounded", _bounded, time=NO_SLOWER),
    ]


def _comparison(
    title: str,
    args: tuple[Any, ...],
    kind: Literal["bounded", "checkpointed"],
    loop: Callable[..., Any],
    time: float = _OF_ONE,
    **settings: Any,
) -> Comparison:
    settings["max_steps"] = MAX_STEPS
    ours, theirs = f"eqloop, {kind}", f"Equinox, {kind}"
    cases = [
        Case(theirs, _gradient(partial(eqxi.while_loop, kind=kind, **settings)), args),
        Case(ours, _gradient(partial(loop, **settings)), args),
    ]
    claims = [time_ratio(ours, theirs, time), memory_ratio(ours, theirs, 1.0)]
    return Comparison(title, cases, claims, rounds=9)


def _bounded(cond: Any, body: Any, init: Any, **settings: Any) -> Any:
    return el.BoundedWhileLoop(cond, body, **settings)(init)


def _checkpointed(cond: Any, body: Any, init: Any, **settings: Any) -> Any:
    return el.CheckpointedWhileLoop(cond, body, **settings)(init)


def _inputs(batch: tuple[int, ...]) -> tuple[Any, ...]:
    """A weight, initial states, and after how many steps each is to stop."""
    weight = jr.orthogonal(jr.key(0), WIDTH)
    states = jr.normal(jr.key(1), (*batch, WIDTH))
    steps = jnp.full(batch, STEPS)
    if batch:
        steps = jnp.linspace(1, STEPS, *batch).astype(int)
    return weight, states, steps


def _gradient(loop: Callable[..., Any]) -> Callable[..., Any]:
    def loss(weight: jax.Array, state: jax.Array, steps: jax.Array) -> jax.Array:
        def body(carry: Any) -> Any:
            count, h = carry
            return count + 1, jnp.tanh(weight @ jnp.tanh(weight @ h + 0.01))

        one = lambda state, steps: loop(
            lambda carry: carry[0] < steps, body, (jnp.zeros((), int), state)
        )
        if state.ndim > 1:
            one = jax.vmap(one)
        return jnp.sum(one(state, steps)[1] ** 2)

    return jax.grad(loss, (0, 1))
