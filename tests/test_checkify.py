"""`checkify` sees errors in what each transform is given: indices, NaN, and checks.

Each transform runs a function of one number that is wrong for some numbers. What it
returns for these is finite, so that only a check where it is computed can tell.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import checkify
from jax.sharding import AxisType

import eqloop as el

from .asserts import assert_close
from .marks import slow_if

Function = Callable[..., Any]

GOOD = jnp.array([3.0, 1.0, 2.0, 4.0])
TABLE = jnp.arange(8.0)
# What is wrong for which number, and what `checkify` says of it.
WRONG = {"index": (-1.0, "out-of-bounds"), "nan": (-2.0, "nan"), "check": (-3.0, "bad")}
ALL = checkify.index_checks | checkify.nan_checks | checkify.user_checks


def wrong(x: Any) -> Any:
    checkify.check(x != WRONG["check"][0], "bad")
    index = jnp.where(x == WRONG["index"][0], 9, 2)
    root = jnp.sqrt(jnp.where(x == WRONG["nan"][0], x, 4.0))
    return jnp.sin(x) + TABLE[index] + jnp.where(jnp.isnan(root), 0.0, root)


def total(f: Function) -> Function:
    return lambda xs: jnp.sum(f(xs))


def of_steps(make: Function) -> Function:
    """A loop that adds up."""
    return lambda f: lambda xs: make(lambda h, x: (h + f(x), h))(0.0, xs)[0]


def of_jax(f: Function) -> Function:
    return of_steps(lambda step: lambda init, xs: lax.scan(step, init, xs))(f)


def in_a_while(make: Function) -> Function:
    def of(f: Function) -> Function:
        body = lambda s: (s[0] + 1, s[1] + f(s[2][s[0]]), s[2])
        loop = make(lambda s: s[0] < 4, body)
        return lambda xs: loop((jnp.int32(0), jnp.float32(0), xs))[1]

    return of


def in_a_condition(make: Function) -> Function:
    def of(f: Function) -> Function:
        at = lambda xs, i: xs[jnp.minimum(i, 3)]
        cond = lambda s: (s[0] < 4) & (f(at(s[2], s[0])) < 99)
        body = lambda s: (s[0] + 1, s[1] + at(s[2], s[0]), s[2])
        loop = make(cond, body)
        return lambda xs: loop((jnp.int32(0), jnp.float32(0), xs))[1]

    return of


def bounded(cond: Function, body: Function) -> Function:
    return el.BoundedWhileLoop(cond, body, max_steps=9)


def in_a_shard_map(f: Function) -> Function:
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    specs = dict(in_specs=jax.P("d"), out_specs=jax.P("d"))
    return total(el.ShardMap(jax.vmap(f), mesh=mesh, **specs))


class Layer(eqx.Module):
    weight: jax.Array
    f: Function = eqx.field(static=True)

    def __call__(self, x: Any) -> Any:
        return x + self.f(self.weight)


SCHEDULES = {
    "StoreAll": el.StoreAll(),
    "Recursive": el.Recursive(2),
    "Chunked": el.Chunked(2),
    "Binomial": el.Binomial(2),
    "Budget": el.Budget("1MiB", measure=False),
    "Offload": el.Offload(el.Recursive(2)),
    "Cast": el.Cast(el.Recursive(2), jnp.bfloat16),
    "StoreLast": el.StoreLast(el.Recursive(2), 2),
}

# A function of `xs` that calls the one that it is given.
TRANSFORMS: dict[str, Function] = {
    **{
        f"Scan, {name}": of_steps(lambda f, way=way: el.Scan(f, schedule=way))
        for name, way in SCHEDULES.items()
    },
    "Scan, Reversible": lambda f: of_steps(
        lambda step: el.Scan(step, schedule=el.Reversible(lambda h, x: h - f(x)))
    )(f),
    "Scan, Truncate": of_steps(
        lambda f: el.CheckpointedScan(f, backward=el.Truncate(2))
    ),
    "CheckpointedScan": of_steps(el.CheckpointedScan),
    "SlicedScan": of_steps(lambda f: el.SlicedScan(f, step=2)),
    "ForLoop": lambda f: total(el.ForLoop(f)),
    "CheckpointedForLoop": lambda f: total(el.CheckpointedForLoop(f)),
    "WhileLoop": in_a_while(el.WhileLoop),
    "WhileLoop, cond": in_a_condition(el.WhileLoop),
    "CheckpointedWhileLoop": in_a_while(el.CheckpointedWhileLoop),
    "CheckpointedWhileLoop, cond": in_a_condition(el.CheckpointedWhileLoop),
    "BoundedWhileLoop": in_a_while(bounded),
    "BoundedWhileLoop, cond": in_a_condition(bounded),
    "ScanWhile": of_steps(lambda f: el.ScanWhile(lambda h: h < 99, f, max_steps=4)),
    "AssociativeScan": lambda f: total(
        el.AssociativeScan(jax.vmap(lambda a, b: a + f(b)))
    ),
    "StackedLayers": lambda f: lambda xs: el.StackedLayers(Layer(xs, f))(0.0),
    "StackedLayers, Chunked": lambda f: (
        lambda xs: el.StackedLayers(Layer(xs, f), schedule=el.Chunked(2))(0.0)
    ),
    "Vmap": lambda f: total(el.Vmap(f)),
    "Map": lambda f: total(el.Map(f)),
    "Map, batches": lambda f: total(el.Map(f, batch_size=3)),
    "ChunkedVmap": lambda f: total(el.ChunkedVmap(f, 3)),
    "ChunkedVmap, reduce": lambda f: el.ChunkedVmap(f, 3, reduce="sum"),
    "ParallelMap": lambda f: total(el.ParallelMap(f)),
    "ShardMap": in_a_shard_map,
    "Cond": lambda f: lambda xs: el.Cond(f, lambda x: x)(xs[0] > 0, xs[2]),
    "Switch": lambda f: lambda xs: el.Switch([jnp.sin, f])(jnp.int32(1), xs[2]),
    "IfElse": lambda f: lambda xs: el.IfElse([jnp.sin, f])([xs[0] < 0, True], xs[2]),
    "Remat": lambda f: total(el.Remat(jax.vmap(f))),
    "Fit": lambda f: el.Fit(of_jax(f), "1MiB"),
    "Fit, Recursive": lambda f: el.Fit(of_steps(el.CheckpointedScan)(f), "1MiB"),
    "Reschedule": lambda f: el.Reschedule(of_jax(f), el.Recursive(2)),
    "Reschedule, whiles": lambda f: el.Reschedule(
        in_a_while(lambda *loop: lambda x: lax.while_loop(*loop, x))(f), whiles=4
    ),
    "Optimize": lambda f: el.Optimize(total(jax.vmap(f))),
    "Jit": lambda f: el.Jit(total(jax.vmap(f))),
    "Named": lambda f: el.Named(total(jax.vmap(f)), "name"),
    "DebugNonFinite": lambda f: el.DebugNonFinite(of_jax(f), when=False),
    "Grad": lambda f: total(el.Grad(total(jax.vmap(f)))),
    "VectorGrad": lambda f: total(el.VectorGrad(jax.vmap(f))),
    "JacFwd": lambda f: total(el.JacFwd(jax.vmap(f))),
    "JacRev": lambda f: total(el.JacRev(jax.vmap(f))),
    "Jacobian": lambda f: total(el.Jacobian(jax.vmap(f))),
    "Hessian": lambda f: total(el.Hessian(total(jax.vmap(f)))),
    "Vjp": lambda f: lambda xs: el.Vjp(total(jax.vmap(f)))(xs)[0],
    "Jvp": lambda f: lambda xs: el.Jvp(total(jax.vmap(f)))((xs,), (xs,))[0],
}

# `checkify` itself fails on what these run: on empty arrays that are batched, on an
# index check in a `jax.checkpoint`, and on the errors of a `jax.shard_map`.
REFUSED = ("AssociativeScan", "Remat", "ParallelMap", "ShardMap")
# These have no reverse mode.
FORWARD = ("WhileLoop", "WhileLoop, cond")
# A gradient of these is JAX's own of a `lax.scan`, which drops a `checkify.check`.
LOST = (
    *("Scan, StoreAll", "Scan, Budget", "SlicedScan", "ForLoop", "StackedLayers"),
    *("Fit", "DebugNonFinite"),
)


def seen_by(f: Function) -> Function:
    """What `checkify` finds in a function, given what is wrong in its third row."""
    checked = jax.jit(checkify.checkify(f, errors=ALL))

    def seen(row: float) -> tuple[str, Any]:
        error, result = checked(GOOD.at[2].set(row))
        return error.get() or "", result

    return seen


# They run by the same primitives as others of their kind, which are tried every day.
LIKE_OTHERS = (
    *("Scan, Chunked", "Scan, Binomial", "Scan, Budget", "Scan, Cast"),
    *("CheckpointedForLoop", "BoundedWhileLoop, cond", "StackedLayers, Chunked"),
    *("Map, batches", "Jit", "JacRev", "VectorGrad", "Fit, Recursive"),
)
EVERY_NAME = slow_if(LIKE_OTHERS.__contains__, TRANSFORMS)


@pytest.mark.sampled
@pytest.mark.parametrize("is_gradient", [False, True])
@pytest.mark.parametrize("name", EVERY_NAME)
def test_errors_inside_are_seen(name, is_gradient):
    f = TRANSFORMS[name](wrong)
    if is_gradient and name in FORWARD:
        pytest.skip("there is no gradient")
    f = jax.grad(f) if is_gradient else f
    # Of a gradient JAX has no `jax.checkpoint` left.
    if name in REFUSED and not (is_gradient and name == "Remat"):
        with pytest.raises((IndexError, TypeError, ValueError)):
            seen_by(f)(2.0)
        return
    seen = seen_by(f)
    error, result = seen(2.0)
    bare = TRANSFORMS[name](lambda x: jnp.sin(x) + TABLE[2] + 2.0)
    assert error == ""
    assert_close(result, jax.jit(jax.grad(bare) if is_gradient else bare)(GOOD))
    for kind, (row, says) in WRONG.items():
        lost = is_gradient and kind == "check" and name in LOST
        assert seen(row)[0] == "" if lost else says in seen(row)[0], kind


@pytest.mark.sampled
@pytest.mark.parametrize("name", EVERY_NAME)
def test_they_are_seen_in_a_batch(name):
    if name in REFUSED:
        pytest.skip("`checkify` fails on it")
    seen = seen_by(lambda xs: jax.vmap(TRANSFORMS[name](wrong))(jnp.stack([GOOD, xs])))
    assert seen(2.0)[0] == ""
    for kind, (row, says) in WRONG.items():
        assert says in seen(row)[0], kind


# These run nothing, or run from Python, or are drawn by chance.
OTHERS = {"EvalShape", "Trace", "Resumable", "ForwardGrad", "SofoGrad", "SofoLoss"}


def test_every_transform_is_tried():
    tried = {name.split(",")[0] for name in TRANSFORMS} | OTHERS | {"Checkpoint"}
    members = {name: getattr(el, name) for name in el.__all__}
    assert tried == {
        name
        for name, member in members.items()
        if isinstance(member, type)
        and issubclass(member, eqx.Module)
        and "__call__" in dir(member)
        and not name.startswith("Abstract")
    }
