"""Random loops whose memory is to be planned; a seed always gives the same one.

A step is made of a few parts, each with leaves of the carry of its own: nonlinear ones,
linear ones, and such as no cotangent needs. All that a plan has to foresee is in one
part or another: loops and branches inside, shared weights, integers, keys, many leaves.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

import eqloop as el


@dataclasses.dataclass(frozen=True)
class Case:
    """A loop, with all that it is run with.

    Attributes:
        f: The step.
        init: The initial carry; with an axis in front if there is a batch.
        xs: What is looped over, or `None`; with the axis of the batch in front.
        length: How many steps.
        kept: Of how many outputs one is kept.
        policy: Which residuals may be stored.
        batch: How many loops are run at once by `vmap`, if not one without it.
    """

    f: Callable[..., Any]
    init: Any
    xs: Any
    length: int
    kept: int
    policy: Any
    batch: int | None

    def scan(self, f: Any, schedule: Any) -> Any:
        settings = dict(schedule=schedule, policy=self.policy)
        if self.kept > 1:
            return el.SlicedScan(f, step=self.kept, **settings)
        return el.Scan(f, **settings)

    def run(self, f: Any, init: Any, xs: Any, schedule: Any) -> Any:
        """The final carry and the outputs."""
        one = lambda init, xs: self.scan(f, schedule)(init, xs, length=self.length)
        if self.batch is None:
            return one(init, xs)
        # Outputs lie as the loop stacks them: to put the batch first would copy them.
        return jax.vmap(one, out_axes=(0, 1))(init, xs)


class Part(eqx.Module):
    """A part of a step: its leaves of the carry, and how they move on.

    Attributes:
        start: The leaves that it starts with.
        weights: What it shares between the steps.
        move: `(weights, leaves, x) -> leaves`, with a number `x` for each step.
    """

    start: list[Any]
    weights: list[Any]
    move: Callable[..., Any] = eqx.field(static=True)


class Step(eqx.Module):
    """All parts, one beside the other, and what is handed out."""

    parts: list[Part]
    outputs: int = eqx.field(static=True)

    def __call__(self, carry: list[list[Any]], x: Any) -> tuple[Any, Any]:
        number = sum(map(_mean, jax.tree.leaves(x)), start=self._one())
        carry = [
            part.move(part.weights, leaves, number)
            for part, leaves in zip(self.parts, carry, strict=True)
        ]
        moving = [leaf for leaf in jax.tree.leaves(carry) if is_inexact(leaf)]
        return carry, moving[: self.outputs] or None

    def _one(self) -> Any:
        return jnp.ones((), _dtype_of([part.start for part in self.parts]))


def random_case(seed: int, dtype: Any) -> Case:
    """The loop that belongs to a seed, in some precision."""
    draw = np.random.default_rng(seed)
    count = int(draw.integers(1, 4))
    # The first part has something to differentiate.
    parts = [_MAKERS[int(draw.integers(0, _MOVING))](draw, dtype)]
    parts += [
        _MAKERS[int(draw.integers(0, len(_MAKERS)))](draw, dtype)
        for _ in range(count - 1)
    ]
    length = round(10 ** draw.uniform(0, 3.3))
    batch = int(draw.integers(2, 5)) if draw.random() < 0.25 else None
    shape = (length,) if batch is None else (batch, length)
    xs = {
        0: None,
        1: _ones(draw, shape, dtype),
        2: _ones(draw, (*shape, _size(draw, 200)), dtype),
        3: [_ones(draw, (*shape, 3), dtype), _ones(draw, (*shape, 2, 4), dtype)],
    }[int(draw.integers(0, 4))]
    init = [part.start for part in parts]
    if batch is not None:
        stacked = lambda leaf: jnp.stack([leaf] * batch)
        init = jax.tree.map(stacked, init)
    return Case(
        f=Step(parts, outputs=int(draw.integers(0, 3))),
        init=init,
        xs=xs,
        length=length,
        kept=int(draw.integers(2, 6)) if draw.random() < 0.15 else 1,
        policy=el.policies.save_dots if draw.random() < 0.15 else None,
        batch=batch,
    )


def fixed_schedule(seed: int, case: Case) -> Any:
    """A schedule that says how, and not how much memory."""
    draw = np.random.default_rng((seed, 1))
    small = int(draw.integers(2, 17))
    block = int(draw.integers(2, 9))
    return [
        el.StoreAll(),
        el.Recursive(small),
        el.Recursive(small),
        el.Chunked(small),
        el.Chunked(max(round(case.length**0.5), 1)),
        el.Binomial(small),
        el.Binomial(4 * small),
        el.Binomial(small, block=block),
        el.Offload(el.Recursive(small)),
    ][int(draw.integers(0, 9))]


# The parts. Each draws its own sizes.


def _size(draw: Any, most: int) -> int:
    return round(most ** draw.uniform(0, 1))


def _ones(draw: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    return jnp.full(shape, draw.uniform(0.1, 0.9), dtype)


def _mean(x: Any) -> Any:
    return jnp.mean(x)


def is_inexact(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def _dtype_of(leaves: Any) -> Any:
    return next(leaf.dtype for leaf in jax.tree.leaves(leaves) if is_inexact(leaf))


def _dense(draw: Any, dtype: Any) -> Part:
    width = _size(draw, 96)

    def move(weights: Any, leaves: Any, x: Any) -> Any:
        return [jnp.tanh(weights[0] @ leaves[0] + x)]

    return Part(
        [_ones(draw, (width,), dtype)], [_ones(draw, (width, width), dtype)], move
    )


def _gru(draw: Any, dtype: Any) -> Part:
    width = _size(draw, 48)
    cell = eqx.nn.GRUCell(1, width, key=jr.key(0), dtype=dtype)
    weights, static = eqx.partition(cell, eqx.is_array)
    leaves, tree = jax.tree.flatten(weights)

    def move(weights: Any, leaves: Any, x: Any) -> Any:
        return [eqx.combine(tree.unflatten(weights), static)(x[None], leaves[0])]

    return Part([_ones(draw, (width,), dtype)], leaves, move)


def _convolution(draw: Any, dtype: Any) -> Part:
    channels, width = _size(draw, 8), 4 + _size(draw, 60)

    def move(weights: Any, leaves: Any, x: Any) -> Any:
        (image,), (kernel,) = leaves, weights
        moved = jax.lax.conv_general_dilated(image[None], kernel, (1,), "SAME")
        return [jnp.sin(moved[0]) * x]

    kernel = _ones(draw, (channels, channels, 3), dtype)
    return Part([_ones(draw, (channels, width), dtype)], [kernel], move)


def _elementwise(draw: Any, dtype: Any) -> Part:
    size = _size(draw, 2000)
    move = lambda weights, leaves, x: [jnp.sin(leaves[0]) * x + leaves[0]]
    return Part([_ones(draw, (size,), dtype)], [], move)


def _many_leaves(draw: Any, dtype: Any) -> Part:
    count, size = 5 + _size(draw, 30), _size(draw, 20)

    def move(weights: Any, leaves: Any, x: Any) -> Any:
        shifted = leaves[1:] + leaves[:1]
        return [jnp.tanh(a * x + b) for a, b in zip(leaves, shifted, strict=True)]

    return Part([_ones(draw, (size,), dtype) for _ in range(count)], [], move)


def _loop_inside(draw: Any, dtype: Any) -> Part:
    size, count = _size(draw, 200), int(draw.integers(1, 8))
    base = int(draw.integers(2, 5))
    scan = jax.lax.scan if draw.random() < 0.5 else None

    def move(weights: Any, leaves: Any, x: Any) -> Any:
        step = lambda h, _: (jnp.sin(h) * x, None)
        if scan is None:
            return [el.CheckpointedScan(step, base)(leaves[0], length=count)[0]]
        return [scan(step, leaves[0], None, count)[0]]

    return Part([_ones(draw, (size,), dtype)], [], move)


def _while_inside(draw: Any, dtype: Any) -> Part:
    size = _size(draw, 200)

    def move(weights: Any, leaves: Any, x: Any) -> Any:
        half = jnp.asarray(0.5, dtype)
        rise = lambda h: (jnp.sin(h[0]) * half + h[0], h[1] + 1)
        loop = el.BoundedWhileLoop(lambda h: h[1] < 3, rise, max_steps=5)
        return [loop((leaves[0], jnp.int32(0)))[0] * x]

    return Part([_ones(draw, (size,), dtype)], [], move)


def _branches(draw: Any, dtype: Any) -> Part:
    size = _size(draw, 500)

    def move(weights: Any, leaves: Any, x: Any) -> Any:
        (h,) = leaves
        return [jax.lax.cond(h[0] > 0, lambda h: jnp.sin(h) * x, lambda h: h * h, h)]

    return Part([_ones(draw, (size,), dtype)], [], move)


def _wave(draw: Any, dtype: Any) -> Part:
    size = 2 + _size(draw, 1500)

    def move(weights: Any, leaves: Any, x: Any) -> Any:
        now, before = leaves
        around = jnp.roll(now, 1) + jnp.roll(now, -1) - now - now
        after = now + now - before + jnp.asarray(0.25, dtype) * around
        return [after + x, now]

    return Part([_ones(draw, (size,), dtype) for _ in range(2)], [], move)


def _average(draw: Any, dtype: Any) -> Part:
    size = _size(draw, 1000)

    def move(weights: Any, leaves: Any, x: Any) -> Any:
        h, mean = leaves
        rate = jnp.asarray(0.9, dtype)
        return [jnp.sin(h) * x, rate * mean + h * h]

    return Part([_ones(draw, (size,), dtype) for _ in range(2)], [], move)


def _monitor(draw: Any, dtype: Any) -> Part:
    size = _size(draw, 3000)

    def move(weights: Any, leaves: Any, x: Any) -> Any:
        (last,) = leaves
        return [jnp.full_like(last, x)]

    return Part([_ones(draw, (size,), dtype)], [], move)


def _counter(draw: Any, dtype: Any) -> Part:
    size = _size(draw, 300)
    move = lambda weights, leaves, x: [leaves[0] + jnp.ones_like(leaves[0])]
    return Part([jnp.zeros((size,), jnp.int32)], [], move)


def _noise(draw: Any, dtype: Any) -> Part:
    size = _size(draw, 300)

    def move(weights: Any, leaves: Any, x: Any) -> Any:
        h, key, count = leaves
        key = jr.fold_in(key, count)
        return [jnp.sin(h) + jr.normal(key, h.shape, dtype) * x, key, count + 1]

    start = [_ones(draw, (size,), dtype), jr.key(0), jnp.int32(0)]
    return Part(start, [], move)


_MAKERS = [
    _dense,
    _gru,
    _convolution,
    _elementwise,
    _many_leaves,
    _loop_inside,
    _while_inside,
    _branches,
    _wave,
    _average,
    _noise,
    _monitor,
    _counter,
]
_MOVING = len(_MAKERS) - 2
