"""The transforms of random programs, and what stands for each, written out.

Each is a value with its settings: called with a function, it gives the transformed
one, or where the world is written out the same in Python and plain JAX.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

import eqloop as el

Settings = tuple[tuple[str, Any], ...]


@dataclasses.dataclass(frozen=True)
class Transform:
    """A transform by its name, with its settings.

    Attributes:
        name: The name, in `eqloop` or `jax.lax`.
        settings: What it is given beside its function.
        length: How many steps a loop has, or how many at most.
    """

    name: str
    settings: Settings = ()
    length: int = 0

    def __str__(self) -> str:
        settings = [f"{name}={value}" for name, value in self.settings]
        return f"{self.name}({', '.join([*settings, f'length={self.length}'])})"

    def get(self, setting: str, default: Any = None) -> Any:
        return dict(self.settings).get(setting, default)

    def made(self, *fs: Any) -> Callable[..., Any]:
        return getattr(el, self.name)(*fs, **dict(self.settings))

    @property
    def is_plain(self) -> bool:
        """Whether it is JAX's own, which the reference has as well."""
        return self.name.startswith(("lax.", "jax."))


# Scans


def scan(transform: Transform, is_written_out: bool, step: Any) -> Callable[..., Any]:
    """A loop `(init, xs, *, key=None) -> (carry, ys)`."""
    length = transform.length
    if transform.name == "lax.scan":
        made = dict(transform.settings)
        return lambda init, xs: lax.scan(step, init, xs, length, **made)
    if not is_written_out:
        loop = transform.made(step)
        return lambda init, xs, **key: loop(init, xs, length=length, **key)

    def run(init: Any, xs: Any, key: Any = None) -> Any:
        keys = None if key is None else jax.random.split(key, length)
        axes = transform.get("in_axes", eqx.if_array(0))

        def at(i: int) -> tuple[Any, dict[str, Any]]:
            keyword = {} if key is None else {"key": keys[i]}
            return rows(xs, axes, i), keyword

        carry, ys = init, []
        order = range(length)
        for n, i in enumerate(reversed(order) if transform.get("reverse") else order):
            x, keyword = at(i)
            carry, y = step(before_step(carry, n, transform), x, **keyword)
            ys.append(y)
        if transform.get("reverse"):
            ys.reverse()
        if not ys:
            x, keyword = row_types(xs, axes), {} if key is None else {"key": key}
            like = eqx.filter_eval_shape(step, init, x, **keyword)[1]
            return carry, jax.tree.map(_empty, like)
        ys = jax.tree.map(_stacked, *ys)
        if transform.name != "SlicedScan":
            return carry, ys
        kept = slice(*(transform.get(s) for s in ("start", "stop", "step")))
        return carry, jax.tree.map(lambda y: y[kept] if eqx.is_array(y) else y, ys)

    return run


def before_step(carry: Any, position: Any, transform: Transform) -> Any:
    """The carry before a step, with what happens to its cotangent there.

    Args:
        carry: The carry.
        position: How many steps were run before, which may be traced.
        transform: The loop.
    """
    backward = transform.get("backward")
    if backward is None:
        return carry
    inexact, others = eqx.partition(carry, eqx.is_inexact_array)
    if not isinstance(backward, el.Truncate):
        return eqx.combine(_changed(backward, inexact), others)
    is_cut = (position > 0) & (position % backward.every == 0)
    cut = lambda x: jnp.where(is_cut, lax.stop_gradient(x), x)
    return eqx.combine(jax.tree.map(cut, inexact), others)


def _changed(backward: Callable[[Any], Any], tree: Any) -> Any:
    """An identity whose cotangent is changed."""
    identity = jax.custom_vjp(lambda tree: tree)
    identity.defvjp(lambda tree: (tree, None), lambda _, ct: (backward(ct),))
    return identity(tree)


def rows(xs: Any, axes: Any, i: int) -> Any:
    """The `i`th rows of the arrays, along the axis that each has."""
    return _along(xs, axes, lambda x, axis: jnp.moveaxis(x, axis, 0)[i])


def row_types(xs: Any, axes: Any) -> Any:
    shape = lambda x, axis: x.shape[:axis] + x.shape[axis + 1 :]
    type = lambda x, axis: jax.ShapeDtypeStruct(shape(x, axis), x.dtype)
    return _along(xs, axes, type)


def _along(xs: Any, axes: Any, f: Callable[..., Any]) -> Any:
    def one(axis: Any, x: Any) -> Any:
        axis = axis(x) if callable(axis) else axis
        return x if axis is None else f(x, axis)

    if callable(axes):
        return jax.tree.map(lambda x: one(axes, x), xs)
    none = lambda x: x is None
    return jax.tree.map(lambda axis, x: one(axis, x), axes, xs, is_leaf=none)


def _empty(like: Any) -> Any:
    if not isinstance(like, jax.ShapeDtypeStruct):
        return like
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        data = jnp.zeros((0, *like.shape, 2), jnp.uint32)
        return jax.random.wrap_key_data(data)
    return jnp.zeros((0, *like.shape), like.dtype)


def _stacked(*ys: Any) -> Any:
    is_number = eqx.is_array(ys[0]) or isinstance(ys[0], int | float | complex)
    return jnp.stack([jnp.asarray(y) for y in ys]) if is_number else ys[0]


# Whiles


def while_loop(
    transform: Transform, is_written_out: bool, cond: Any, body: Any
) -> Callable[[Any], Any]:
    if transform.get("is_masked") and is_written_out:

        def masked(carry: Any, _: Any) -> Any:
            goes_on = cond(carry)
            pairs = zip(body(carry), carry, strict=True)
            return [jnp.where(goes_on, *pair) for pair in pairs], None

        return lambda init: lax.scan(masked, init, None, transform.length)[0]
    if transform.name == "lax.while_loop":
        return lambda init: lax.while_loop(cond, body, init)
    if transform.name == "ScanWhile":
        step = lambda carry, _: (body(carry), [])
        return lambda init: scan_while(transform, is_written_out, cond, step)(init)[0]
    if not is_written_out:
        return transform.made(cond, body)

    def run(carry: Any) -> Any:
        # An example that has ended stays as it is, and takes part in collectives.
        for _ in range(transform.length):
            goes_on, after = cond(carry), body(carry)
            carry = [jnp.where(goes_on, *xy) for xy in zip(after, carry, strict=True)]
        return carry

    return run


def scan_while(
    transform: Transform, is_written_out: bool, cond: Any, step: Any
) -> Callable[..., Any]:
    """A loop `(init, xs=None) -> (carry, ys, steps)` of lists."""
    if not is_written_out:
        return transform.made(cond, step)

    def run(carry: Any, xs: Any = None) -> Any:
        select = lambda which, new, old: [
            jnp.where(which, *xy) for xy in zip(new, old, strict=True)
        ]
        rows_, steps, goes_on = [], jnp.zeros((), jnp.int32), True
        for i in range(transform.length):
            goes_on = goes_on & cond(carry)
            x = rows(xs, eqx.if_array(0), i)
            after, y = step(before_step(carry, i, transform), x)
            carry = select(goes_on, after, carry)
            rows_.append(select(goes_on, y, map(jnp.zeros_like, y)))
            steps = steps + goes_on
        return carry, jax.tree.map(_stacked, *rows_), steps

    return run


# Maps, branches and what does nothing


def mapped(transform: Transform, is_written_out: bool, f: Any) -> Callable[..., Any]:
    """A map over the rows of its arguments."""
    if transform.name == "ShardMap" and not is_written_out:
        return transform.made(el.Vmap(f))
    if transform.name == "jax.shard_map" and not is_written_out:
        return jax.shard_map(jax.vmap(f), **dict(transform.settings))
    if not (is_written_out or transform.is_plain):
        return transform.made(f)
    if transform.name == "lax.map":
        return lambda *xs: lax.map(lambda xs: f(*xs), xs, **dict(transform.settings))
    reduce = transform.get("reduce")
    over_rows = jax.vmap(f, transform.get("in_axes", 0))
    if reduce is None:
        return over_rows
    how = {"sum": jnp.sum, "mean": jnp.mean}[reduce]
    return lambda *xs: jax.tree.map(lambda y: how(y, 0), over_rows(*xs))


def branched(
    transform: Transform, is_written_out: bool, branches: Any
) -> Callable[..., Any]:
    """One of some functions, by a boolean, an index, or several booleans."""
    if transform.name in ("Cond", "lax.cond"):
        plain = transform.is_plain or is_written_out
        if not plain:
            return transform.made(*branches)
        return lambda which, *xs: lax.cond(which, *branches, *xs)
    if transform.name in ("Switch", "lax.switch"):
        if transform.is_plain or is_written_out:
            return lambda which, *xs: lax.switch(which, branches, *xs)
        return transform.made(branches)
    if not is_written_out:
        chosen = transform.made(branches)
        others = lambda which: [which == i for i in range(len(branches))]
        return lambda which, *xs: chosen(
            others(jnp.clip(which, 0, len(branches) - 1)), *xs
        )
    return lambda which, *xs: lax.switch(which, branches, *xs)


def wrapped(transform: Transform, is_written_out: bool, f: Any) -> Callable[..., Any]:
    """What leaves the numbers of a function as they are."""
    if transform.name == "jax.shard_map":
        made = dict(transform.settings)
        return f if is_written_out else jax.shard_map(f, **made)
    if transform.is_plain:
        return _WRAPPERS[transform.name](f)
    return f if is_written_out else transform.made(f)


def _with_jvp(f: Any) -> Callable[..., Any]:
    """With the rule that it has anyhow."""
    ruled = jax.custom_jvp(f)
    ruled.defjvp(lambda args, dots: jax.jvp(f, args, dots))
    return ruled


def _with_vjp(f: Any) -> Callable[..., Any]:
    ruled = jax.custom_vjp(f)
    ruled.defvjp(
        lambda *args: (f(*args), args), lambda args, cts: jax.vjp(f, *args)[1](cts)
    )
    return ruled


_WRAPPERS: dict[str, Callable[..., Any]] = {
    "jax.checkpoint": jax.checkpoint,
    "jax.jit": jax.jit,
    "jax.custom_jvp": _with_jvp,
    "jax.custom_vjp": _with_vjp,
}


def written_prefixes(f: Any, xs: Any, axis: int, reverse: bool) -> Any:
    """All prefixes of the rows of `xs` under an associative function."""
    length = jax.tree.leaves(xs)[0].shape[axis]
    part = lambda i: jax.tree.map(
        lambda x: lax.slice_in_dim(x, i, i + 1, axis=axis), xs
    )
    order = range(length)[:: -1 if reverse else 1]
    prefixes = [part(order[0])]
    for i in order[1:]:
        prefixes.append(f(prefixes[-1], part(i)))
    prefixes = prefixes[:: -1 if reverse else 1]
    return jax.tree.map(lambda *ps: jnp.concatenate(ps, axis), *prefixes)
