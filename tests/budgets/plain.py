"""What a loop or a map with a budget is beside: the same in `lax.scan` or `vmap`."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..random_programs.transforms import Transform, before_step


class Plain(Transform):
    """A transform of the library whose function is one of plain JAX."""

    def made(self, *fs: Any) -> Callable[..., Any]:
        return MADE[self.name](self, *fs)


def plain(transform: Transform) -> Plain:
    """The same by plain JAX, which stores everything."""
    return Plain(**{f.name: getattr(transform, f.name) for f in _FIELDS})


class Checkpointed(Plain):
    """The same, whose steps are computed again on the way back."""

    def made(self, *fs: Any) -> Callable[..., Any]:
        *others, step = fs
        step = jax.checkpoint(step) if inspect.isfunction(step) else step
        return super().made(*others, step)


def checkpointed(transform: Transform) -> Plain:
    """The same by plain JAX, which stores the carries."""
    return Checkpointed(**{f.name: getattr(transform, f.name) for f in _FIELDS})


_FIELDS = dataclasses.fields(Transform)


def _scan(transform: Transform, step: Any) -> Callable[..., Any]:
    def run(init: Any, xs: Any, length: int, key: Any = None) -> Any:
        axes = jax.tree.leaves(
            transform.get("in_axes"), is_leaf=lambda axis: axis is None
        )
        leaves, tree = jax.tree.flatten(xs)
        pairs = list(zip(leaves, axes, strict=True)) if leaves else []
        moved = [jnp.moveaxis(x, axis, 0) for x, axis in pairs if axis is not None]
        keys = None if key is None else jax.random.split(key, length)
        positions = jnp.arange(length)
        is_reverse = transform.get("reverse", False)

        def body(carry: Any, element: Any) -> Any:
            position, rows, key = element
            rows = iter(rows)
            x = tree.unflatten([x if axis is None else next(rows) for x, axis in pairs])
            keyword = {} if key is None else {"key": key}
            return step(before_step(carry, position, transform), x, **keyword)

        positions = positions[::-1] if is_reverse else positions
        carry, ys = lax.scan(body, init, (positions, moved, keys), reverse=is_reverse)
        kept = slice(*(transform.get(s) for s in ("start", "stop", "step")))
        return carry, jax.tree.map(lambda y: y[kept], ys)

    return run


def _scan_while(transform: Transform, cond: Any, step: Any) -> Callable[..., Any]:
    def run(init: Any, xs: Any = None) -> Any:
        def body(state: Any, element: Any) -> Any:
            carry, steps, goes_on = state
            position, x = element
            goes_on = goes_on & cond(carry)
            after, y = step(before_step(carry, position, transform), x)
            select = lambda new, old: jnp.where(goes_on, new, old)
            y = jax.tree.map(lambda y: jnp.where(goes_on, y, jnp.zeros_like(y)), y)
            carry = jax.tree.map(select, after, carry)
            return (carry, steps + goes_on, goes_on), y

        start = init, jnp.zeros((), jnp.int32), jnp.asarray(True)
        elements = jnp.arange(transform.length), xs
        (carry, steps, _), ys = lax.scan(body, start, elements)
        return carry, ys, steps

    return run


def _layers(transform: Transform, module: Any) -> Callable[..., Any]:
    layer = lambda x, parameters: (module.step(parameters, x), None)
    return lambda x: lax.scan(layer, x, module.parameters)[0]


def _map(transform: Transform, f: Any) -> Callable[..., Any]:
    def run(*xs: Any) -> Any:
        ys = jax.vmap(f)(*xs)
        if transform.get("reduce") is None:
            return ys
        return jax.tree.map(lambda y: jnp.sum(y, 0), ys)

    return run


def _for_loop(transform: Transform, f: Any) -> Callable[..., Any]:
    return lambda *xs: lax.map(lambda xs: f(*xs), xs)


# By name what makes the function of a transform.
MADE: dict[str, Callable[..., Callable[..., Any]]] = {
    "Scan": _scan,
    "SlicedScan": _scan,
    "ScanWhile": _scan_while,
    "StackedLayers": _layers,
    "ForLoop": _for_loop,
    "ChunkedVmap": _map,
}
