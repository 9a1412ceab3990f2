"""A scan that keeps some of its outputs, forward and in reverse."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import eqloop as el

from .._claims import NO_SLOWER, Claim, memory_ratio, time_ratio
from .._comparison import Comparison
from .._measure import Case
from .._problems import recurrent

LENGTH, STRIDE = 20_000, 10
PLAIN, PEER = "`lax.scan`, then a slice", "powerpax"


def sliced() -> Sequence[Comparison]:
    """Every tenth of 20,000 carries of the recurrent step, of width 64."""
    args = recurrent(LENGTH)
    title = f"every {STRIDE}th of {LENGTH} carries, recurrent step, width 64"
    ours = {"SlicedScan": _ours(None)}
    checkpointed = {"SlicedScan, Recursive(16)": _ours(el.Recursive(16))}
    return [
        Comparison(
            f"Forward: {title}",
            _cases(_forward, args, ours),
            [
                *_claims("SlicedScan", PEER, at_most_time=NO_SLOWER),
                *_claims("SlicedScan", PLAIN, at_most_time=NO_SLOWER),
            ],
        ),
        Comparison(
            f"Gradient of W, h0 and xs: {title}",
            _cases(_backward, args, ours | checkpointed),
            [
                claim
                for other in (PLAIN, PEER)
                for claim in _claims(*checkpointed, other, at_most_time=1.3)
            ],
        ),
    ]


def _claims(ours: str, theirs: str, *, at_most_time: float) -> list[Claim]:
    return [memory_ratio(ours, theirs, 0.1), time_ratio(ours, theirs, at_most_time)]


def _cases(
    use: Callable[..., Any], args: tuple[Any, ...], ours: dict[str, Any]
) -> list[Case]:
    return [
        Case(PLAIN, use(_plain), args),
        Case(PEER, use(_powerpax), args, requires="powerpax"),
        *(Case(name, use(run), args) for name, run in ours.items()),
    ]


def _forward(run: Callable[..., Any]) -> Callable[..., Any]:
    return lambda cell, init, xs: run(_with_output(cell), init, xs)


def _backward(run: Callable[..., Any]) -> Callable[..., Any]:
    def loss(cell: Any, init: Any, xs: Any) -> jax.Array:
        carry, ys = run(_with_output(cell), init, xs)
        return jnp.sum(carry**2) + jnp.sum(ys**2)

    return jax.grad(loss, argnums=(0, 1, 2))


def _with_output(cell: Callable[..., Any]) -> Callable[..., Any]:
    """The step whose output is its carry."""

    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        carry, _ = cell(carry, x)
        return carry, carry

    return step


def _ours(schedule: Any) -> Callable[..., Any]:
    return lambda f, init, xs: el.SlicedScan(f, step=STRIDE, schedule=schedule)(
        init, xs
    )


def _plain(f: Callable[..., Any], init: Any, xs: Any) -> Any:
    carry, ys = lax.scan(f, init, xs)
    return carry, ys[::STRIDE]


def _powerpax(f: Callable[..., Any], init: Any, xs: Any) -> Any:
    import powerpax

    return powerpax.sliced_scan(f, init, xs, step=STRIDE)
