"""Every formula in every mode, against the same written out without a loop.

What is differentiated is the primitive of each kind of loop and map, and what becomes
of it: its tangents and its way back, mapped and batched, once and again.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tqdm.auto
from jax import lax

import eqloop as el
from eqloop._programs._formula import Formula

from ..marks import slow

pytestmark = pytest.mark.sampled

Run = Callable[..., Any]

LENGTH = 3


@pytest.fixture(autouse=True)
def with_enough_digits() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def inputs() -> tuple[Any, Any, Any]:
    us = np.sin(np.arange(LENGTH * 2) * 0.7).reshape(LENGTH, 2)
    return jnp.array([0.9, -0.4]), jnp.array([0.3, 0.8]), jnp.asarray(us)


# What is computed: functions of parameters, a state and rows, and what they are
# without a loop.


def step(w: Any, h: Any, u: Any) -> tuple[Any, Any]:
    after = jnp.sin(w[0] * h[::-1] + w[1] * u)
    return after, h * after


def steps(w: Any, h: Any, us: Any) -> Any:
    total = jnp.zeros(2)
    for i in range(LENGTH):
        h, y = step(w, h, us[i])
        total = total + (i + 1) * y
    return h, total


def scan(schedule: Any, w: Any, h: Any, us: Any) -> Any:
    loop = el.Scan(functools.partial(step, w), schedule=schedule)
    h, ys = loop(h, us)
    return h, jnp.arange(1.0, LENGTH + 1) @ ys


def while_loop(kind: Any, w: Any, h: Any, us: Any) -> Any:
    def body(state: Any) -> Any:
        i, h, total = state
        h, y = step(w, h, lax.dynamic_index_in_dim(us, i, 0, keepdims=False))
        return i + 1, h, total + (i + 1).astype(y.dtype) * y

    init = (jnp.zeros((), int), h, jnp.zeros(2))
    return kind(lambda state: state[0] < LENGTH, body)(init)[1:]


def shot(w: Any, h: Any, us: Any) -> Any:
    return jnp.sin(w[0] * h) * us[1]


def checked(w: Any, h: Any, us: Any) -> Any:
    return el.DebugNonFinite(shot)(w, h, us)


def rows(w: Any, h: Any, us: Any) -> Any:
    shared, own = zip(*(step(w, h, us[i]) for i in range(LENGTH)), strict=True)
    return sum(shared), jnp.stack(own)


def row_map(policy: Any, w: Any, h: Any, us: Any) -> Any:
    """The first chunk is shorter; one output is summed up, one not."""
    mapped = el.ChunkedVmap(
        lambda u: step(w, h, u), 2, reduce=("sum", None), policy=policy
    )
    return mapped(us)


def compose(w: Any, a: Any, b: Any) -> Any:
    """Associative, and with a parameter."""
    return a + b + w[0] * a * b


def products(w: Any, h: Any, us: Any) -> Any:
    prefixes = [us[0] * h]
    for i in range(1, LENGTH):
        prefixes.append(compose(w, prefixes[-1], us[i] * h))
    return jnp.stack(prefixes) * w[1]


def prefixes(w: Any, h: Any, us: Any) -> Any:
    scan = el.AssociativeScan(functools.partial(compose, w), chunk_size=2)
    return scan(us * h[None]) * w[1]


BOUNDED = functools.partial(el.BoundedWhileLoop, max_steps=6, base=2)
ONLINE = functools.partial(el.CheckpointedWhileLoop, checkpoints=2)
WITH_BAR = functools.partial(BOUNDED, progress=el.ProgressBar(2))

# Ways to run the same, which take turns, and the same written out.
FORMULAS: dict[str, tuple[tuple[Run, ...], Run]] = {
    "loop": (
        tuple(functools.partial(scan, s) for s in (el.Recursive(2), el.Binomial(2))),
        steps,
    ),
    "while": (
        tuple(functools.partial(while_loop, k) for k in (BOUNDED, ONLINE, WITH_BAR)),
        steps,
    ),
    "checked": ((checked,), shot),
    "rows": ((functools.partial(row_map, None),), rows),
    "stored rows": ((functools.partial(row_map, el.policies.save_everything),), rows),
    "prefixes": ((prefixes,), products),
}


# Where it stands.


def plain(run: Run) -> Run:
    return run


def batched_consts(run: Run) -> Run:
    mapped = jax.vmap(run, (0, None, None))
    return lambda w, h, us: mapped(jnp.stack([w, w / 2]), h, us)


def batched_rows(run: Run) -> Run:
    mapped = jax.vmap(run, (None, 0, 1), 1)
    return lambda w, h, us: mapped(w, jnp.stack([h, h / 2]), jnp.stack([us, us / 3], 1))


def in_scan(run: Run) -> Run:
    def outer(w: Any, h: Any, us: Any) -> Any:
        return lax.scan(lambda h, c: (h, run(c * w, h, us)), h, jnp.array([0.5, 1.5]))

    return outer


def in_cond(run: Run) -> Run:
    def outer(w: Any, h: Any, us: Any) -> Any:
        other = lambda *args: jax.tree.map(jnp.zeros_like, run(*args))
        return lax.cond(w[0] > 0, run, other, w, h, us)

    return outer


CONTEXTS = (plain, batched_consts, batched_rows, in_scan, in_cond, jax.checkpoint)


# How it is differentiated.


def weigh(tree: Any) -> Any:
    """A number in which every other has its own weight, and that is not linear."""
    leaves = [leaf.ravel() for leaf in jax.tree.leaves(tree)]
    weights = lambda leaf: jnp.cos(jnp.arange(1.0, leaf.size + 1))
    return sum(jnp.sin(leaf) @ weights(leaf) for leaf in leaves)


def along(tree: Any) -> Any:
    """A direction."""
    ramp = lambda x: jnp.cos(1 + jnp.arange(x.size * 1.0)).reshape(x.shape)
    return jax.tree.map(ramp, tree)


def push(run: Run) -> Run:
    return lambda *args: jax.jvp(run, args, along(args))[1]


def grad(run: Run) -> Run:
    return jax.grad(lambda *args: weigh(run(*args)), (0, 1, 2))


def jacfwd(run: Run) -> Run:
    return jax.jacfwd(run, (0, 1))


def jacrev(run: Run) -> Run:
    return jax.jacrev(run, (0, 2))


def linearize(run: Run) -> Run:
    def evaluate(*args: Any) -> Any:
        out, linear = jax.linearize(run, *args)
        back = jax.linear_transpose(linear, *args)
        return out, linear(*along(args)), back(along(out))

    return evaluate


def reverse_over_tangents(run: Run) -> Run:
    """The cotangents of tangents alone: what is pushed forward is linear in them."""

    def evaluate(*args: Any) -> Any:
        linear = lambda *dots: jax.jvp(run, args, dots)[1]
        out, back = jax.vjp(linear, *along(args))
        return back(along(out))

    return evaluate


def chain(*modes: Callable[[Run], Run]) -> Callable[[Run], Run]:
    """The first of some modes over the others."""
    return lambda run: functools.reduce(lambda f, mode: mode(f), reversed(modes), run)


MODES = {
    "linearize": linearize,
    "jacfwd": jacfwd,
    "jacrev": jacrev,
    "forward over forward": chain(push, push),
    "forward over reverse": chain(push, grad),
    "reverse over forward": chain(grad, push),
    "reverse over tangents": reverse_over_tangents,
    "reverse over reverse": chain(grad, grad),
    "reverse over jacfwd": chain(grad, jacfwd),
    "reverse over jacrev": chain(grad, jacrev),
    "jacfwd over reverse": chain(jacfwd, grad),
    "jacfwd over jacfwd": chain(jacfwd, jacfwd),
    "third order": chain(grad, push, push),
}


def evaluate(mode: str, context: Any, run: Run) -> list[np.ndarray]:
    derivative = jax.jit(MODES[mode](context(run)))
    return [np.asarray(leaf) for leaf in jax.tree.leaves(derivative(*inputs()))]


expected = functools.cache(evaluate)


class Silent:
    """A progress bar that draws nothing."""

    def __init__(self, **_: Any) -> None:
        self.n = 0

    def update(self, n: int) -> None: ...
    def set_description(self, desc: str, refresh: bool) -> None: ...
    def close(self) -> None: ...


def test_parameters_change_alone_and_together():
    formula = object.__new__(Formula)
    formula.params = {"one": 1, "other": 2}
    assert formula.with_params(one=1, other=2) is formula
    changed = formula.with_params(one=1, other=3)
    assert changed.params == {"one": 1, "other": 3}
    assert changed.other == 3


# Gradients of many numbers at once: the same as of one, in larger programs.
LARGE = {"reverse over jacfwd", "reverse over jacrev", "jacfwd over jacfwd"}

# Each week all of them; else every third mode of a formula, such that all the ways to
# run it have their turns.
PAIRS = [
    (mode, formula)
    if (i + j) % 2 and (i // 2 + j) % 3 != 2 and mode not in LARGE
    else slow(mode, formula)
    for i, mode in enumerate(MODES)
    for j, formula in enumerate(FORMULAS)
]


@pytest.mark.parametrize(("mode", "formula"), PAIRS)
def test_modes(mode, formula, monkeypatch):
    monkeypatch.setattr(tqdm.auto, "tqdm", Silent)
    ways, written_out = FORMULAS[formula]
    # They take turns, and so do contexts: each formula stands in each of them.
    turn = list(MODES).index(mode)
    context = CONTEXTS[turn % len(CONTEXTS)]
    actual = evaluate(mode, context, ways[turn % len(ways)])
    for a, e in zip(actual, expected(mode, context, written_out), strict=True):
        assert a.shape == e.shape
        assert a.dtype == e.dtype
        np.testing.assert_allclose(a, e, rtol=1e-9, atol=1e-12)
