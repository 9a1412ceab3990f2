"""Modes of differentiation and the contexts that a loop may stand in.

A *loop* is `jax.lax.scan`, or stands for it under a schedule: `(f, init, xs) -> (carry,
ys)`. A *context* makes of it a function `run(w, h, us)`, whose outputs are inexact
arrays. A *mode* evaluates some derivative of `run`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import eqloop as el

from .asserts import assert_close

Loop = Callable[..., Any]
Run = Callable[..., Any]

LENGTH = 7
WIDTH = 4


def step(w: Any, carry: Any, x: Any) -> tuple[Any, Any]:
    """Works for a state of any size; has leaves that are not differentiated."""
    h, count = carry
    u, shift = x
    by = jnp.where(shift, u, count.astype(u.dtype) * u)
    mixed = jnp.tanh(w[0] * h + w[1] * jnp.mean(h) + by)
    return (mixed, count + 1), (h * u, count + 1)


def run(loop: Loop, w: Any, h: Any, us: Any, step: Any = step) -> tuple[Any, Any]:
    shifts = jnp.arange(us.shape[0]) % 3 == 0
    carry, ys = loop(functools.partial(step, w), (h, jnp.zeros((), int)), (us, shifts))
    return carry[0], ys[0]


def inputs() -> tuple[Any, Any, Any]:
    us = np.sin(0.7 * np.arange(LENGTH * WIDTH)).reshape(LENGTH, WIDTH)
    w, h = np.array([0.9, -0.4]), np.linspace(-1, 1, WIDTH)
    return jnp.asarray(w), jnp.asarray(h), jnp.asarray(us)


# Modes


def weigh(tree: Any) -> jax.Array:
    """A scalar to differentiate, in which every number has its own weight."""
    leaves = [leaf.ravel() for leaf in jax.tree.leaves(tree)]
    return sum(leaf @ jnp.cos(jnp.arange(leaf.size * 1.0)) for leaf in leaves)


def direction(tree: Any) -> Any:
    """A direction in the space of a tree, the same for every run."""
    along = lambda x: jnp.cos(1 + jnp.arange(x.size * 1.0)).reshape(x.shape)
    return jax.tree.map(along, tree)


def loss(run: Run) -> Callable[..., jax.Array]:
    return lambda *args: weigh(run(*args))


def gradient(run: Run) -> Callable[..., Any]:
    """In all arguments."""
    return lambda *args: jax.grad(loss(run), tuple(range(len(args))))(*args)


def primal(run: Run, *args: Any) -> Any:
    return run(*args)


def jvp(run: Run, *args: Any) -> Any:
    return jax.jvp(run, args, direction(args))


def linearize(run: Run, *args: Any) -> Any:
    out, push = jax.linearize(run, *args)
    return out, push(*direction(args)), push(*args)


def vjp(run: Run, *args: Any) -> Any:
    out, pull = jax.vjp(run, *args)
    return out, pull(direction(out)), pull(out)


def linear_transpose(run: Run, *args: Any) -> Any:
    out, push = jax.linearize(run, *args)
    return jax.linear_transpose(push, *args)(direction(out))


def grad(run: Run, *args: Any) -> Any:
    return jax.value_and_grad(loss(run), tuple(range(len(args))))(*args)


def grad_of_parameters(run: Run, *args: Any) -> Any:
    return jax.grad(loss(run))(*args)


def jacfwd(run: Run, *args: Any) -> Any:
    return jax.jacfwd(run, (0, 1))(*args)


def jacrev(run: Run, *args: Any) -> Any:
    return jax.jacrev(run, (0, 1))(*args)


def hessian(run: Run, *args: Any) -> Any:
    return jax.hessian(loss(run), (0, 1))(*args)


def forward_over_reverse(run: Run, *args: Any) -> Any:
    return jax.jvp(gradient(run), args, direction(args))


def reverse_over_forward(run: Run, *args: Any) -> Any:
    return gradient(lambda *args: jax.jvp(run, args, direction(args)))(*args)


def reverse_over_reverse(run: Run, *args: Any) -> Any:
    return gradient(gradient(run))(*args)


MODES = (
    primal,
    jvp,
    linearize,
    vjp,
    linear_transpose,
    grad,
    grad_of_parameters,
    jacfwd,
    jacrev,
    hessian,
    forward_over_reverse,
    reverse_over_forward,
    reverse_over_reverse,
)


# Contexts


def plain(loop: Loop) -> Run:
    return functools.partial(run, loop)


def backwards(loop: Loop) -> Run:
    return plain(functools.partial(loop, reverse=True))


def unrolled(loop: Loop) -> Run:
    return plain(functools.partial(loop, reverse=True, unroll=3))


def vmap(loop: Loop) -> Run:
    """What each step gets is batched, along an axis behind that of the loop."""
    mapped = jax.vmap(plain(loop), (None, 0, 1), (0, 1))
    return lambda w, h, us: mapped(w, pair(h), pair(us, 1))


def vmap_of_consts(loop: Loop) -> Run:
    """Only the parameters are batched, so the carry comes to be."""
    mapped = jax.vmap(plain(loop), (0, None, None))
    return lambda w, h, us: mapped(pair(w), h, us)


def vmap_of_xs(loop: Loop) -> Run:
    """The batch lies before the axis of the loop, and nothing else is batched."""
    mapped = jax.vmap(plain(loop), (None, None, 0))
    return lambda w, h, us: mapped(w, h, pair(us))


def vmap_of_vmap(loop: Loop) -> Run:
    mapped = jax.vmap(jax.vmap(plain(loop), (None, 0, 0)), (0, None, 2))
    return lambda w, h, us: mapped(pair(w), pair(h), pair(pair(us, 1)))


def collectives(loop: Loop) -> Run:
    """The step knows the named axis that it is mapped over."""

    def along(w: Any, carry: Any, x: Any) -> Any:
        (h, count), y = step(w, carry, x)
        index = lax.axis_index("batch").astype(h.dtype)
        h = jnp.tanh(lax.psum(h, "batch") - h * (1 + index))
        return (h, count), y

    mapped = functools.partial(run, loop, step=along)
    mapped = jax.vmap(mapped, (None, 0, None), axis_name="batch")
    return lambda w, h, us: mapped(w, pair(h), us)


def shard_map(loop: Loop) -> Run:
    """The state is split over devices; the parameters are the same on all of them."""
    mesh = jax.make_mesh((4,), ("device",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = (P(), P("device"), P(None, "device"))
    return jax.shard_map(plain(loop), mesh=mesh, in_specs=specs, out_specs=specs[1:])


def shard_map_with_collectives(loop: Loop) -> Run:
    def along(w: Any, carry: Any, x: Any) -> Any:
        (h, count), y = step(w, carry, x)
        return (h - lax.pmean(h, "device") / 2, count), y

    mesh = jax.make_mesh((4,), ("device",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = (P(), P("device"), P(None, "device"))
    mapped = functools.partial(run, loop, step=along)
    return jax.shard_map(mapped, mesh=mesh, in_specs=specs, out_specs=specs[1:])


def in_scan(loop: Loop) -> Run:
    def outer(w: Any, h: Any, us: Any) -> Any:
        body = lambda h, scale: run(loop, scale * w, h, us)
        return lax.scan(body, h, jnp.array([0.5, 1.5]))

    return outer


def in_fori_loop(loop: Loop) -> Run:
    def outer(w: Any, h: Any, us: Any) -> Any:
        shifted = lambda i: us + i.astype(us.dtype)
        return lax.fori_loop(0, 2, lambda i, h: run(loop, w, h, shifted(i))[0], h)

    return outer


def in_cond(loop: Loop) -> Run:
    def outer(w: Any, h: Any, us: Any) -> Any:
        one = lambda w, h, us: run(loop, w, h, us)
        other = lambda w, h, us: (h, us)
        return lax.cond(w[0] > 0, one, other, w, h, us)

    return outer


def in_checkpoint(loop: Loop) -> Run:
    return jax.checkpoint(plain(loop))


def in_remat(loop: Loop) -> Run:
    return el.Remat(plain(loop), policy=el.policies.save_dots)


def nested(loop: Loop) -> Run:
    """A loop of loops, the same within as without."""

    def outer(w: Any, h: Any, us: Any) -> Any:
        body = lambda h, scale: run(loop, scale * w, h, us)
        return loop(body, h, jnp.array([0.5, 1.5, -0.5]))

    return outer


def closed_over(loop: Loop) -> Run:
    """What is differentiated reaches the step by its closure alone."""

    def outer(w: Any, h: Any, us: Any) -> Any:
        def body(carry: Any, i: Any) -> tuple[Any, Any]:
            carry = jnp.sin(w[0] * carry + us[i] + w[1] * jnp.mean(h))
            return carry, carry * h

        return loop(body, jnp.ones(WIDTH), jnp.arange(LENGTH))

    return outer


CONTEXTS = (
    plain,
    backwards,
    unrolled,
    vmap,
    vmap_of_consts,
    vmap_of_xs,
    vmap_of_vmap,
    collectives,
    shard_map,
    shard_map_with_collectives,
    in_scan,
    in_fori_loop,
    in_cond,
    in_checkpoint,
    in_remat,
    closed_over,
    nested,
)


def pair(x: Any, axis: int = 0) -> Any:
    return jnp.stack([x, x / 2], axis)


# Where a mode may stand


@functools.cache
def mapped(mode: Callable[..., Any]) -> Callable[..., Any]:
    """The derivative under `vmap`."""

    def evaluate(run: Run, w: Any, h: Any, us: Any) -> Any:
        one = lambda h, us: mode(run, w, h, us)
        return jax.vmap(one, (0, 1))(pair(h), pair(us, 1))

    return evaluate


@functools.cache
def looped(mode: Callable[..., Any]) -> Callable[..., Any]:
    """The derivative inside a loop."""

    def evaluate(run: Run, w: Any, h: Any, us: Any) -> Any:
        return lax.map(lambda h: mode(run, w, h, us), pair(h))

    return evaluate


@functools.cache
def rematerialised(mode: Callable[..., Any]) -> Callable[..., Any]:
    """The derivative inside `jax.checkpoint`, differentiated in turn."""

    def evaluate(run: Run, *args: Any) -> Any:
        return gradient(jax.checkpoint(lambda *args: mode(run, *args)))(*args)

    return evaluate


@functools.cache
def batch_of(mode: Callable[..., Any], at: int) -> Callable[..., Any]:
    """The derivatives of a batch, whose examples differ in one argument."""

    def evaluate(run: Run, *args: Any) -> Any:
        axes, args = _batched(args, at)
        return jax.vmap(functools.partial(mode, run), axes)(*args)

    evaluate.__name__ = f"batch_of_{mode.__name__}"
    return evaluate


@functools.cache
def of_batch(mode: Callable[..., Any], at: int) -> Callable[..., Any]:
    """The derivative of all results of a batch."""

    def evaluate(run: Run, *args: Any) -> Any:
        axes, args = _batched(args, at)
        return mode(jax.vmap(run, axes), *args)

    evaluate.__name__ = f"{mode.__name__}_of_batch"
    return evaluate


def _batched(args: tuple[Any, ...], at: int) -> tuple[Any, Any]:
    axes = tuple(0 if i == at else None for i in range(len(args)))
    return axes, [pair(x) if i == at else x for i, x in enumerate(args)]


# Comparing loops


def scan(schedule: Any, **settings: Any) -> Loop:
    """`eqloop.Scan` as a loop."""

    def loop(f: Any, init: Any, xs: Any, **more: Any) -> Any:
        return el.Scan(f, schedule=schedule, **settings, **more)(init, xs)

    return loop


def evaluate(mode: Callable[..., Any], context: Callable[..., Any], loop: Loop) -> Any:
    """A mode of a loop in a context, compiled."""
    return jax.jit(functools.partial(mode, context(loop)))(*inputs())


def assert_agrees(
    mode: Callable[..., Any],
    context: Callable[..., Any],
    loop: Loop,
    expected: Loop = lax.scan,
    rtol: float = 2e-4,
    atol: float = 2e-5,
) -> None:
    """A loop gives the numbers of another, that of JAX or one written by hand."""
    actual = evaluate(mode, context, loop)
    wanted = _evaluated_once(mode, context, expected, jax.config.jax_enable_x64)
    assert_close(actual, wanted, rtol, atol)


@functools.cache
def _evaluated_once(mode: Any, context: Any, loop: Loop, is_wide: bool) -> Any:
    del is_wide  # the numbers are other ones with 64 bits
    return jax.tree.map(np.asarray, evaluate(mode, context, loop))


name = lambda value: getattr(value, "__name__", str(value))
