"""Calls outside of `jit`: compiled once, and never with what is out of date."""

import dataclasses
import functools
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

import eqloop as el

from ..compiling import programs_compiled
from ..marks import slow
from ..weights import without_key

pytestmark = pytest.mark.sampled

H, XS = jnp.linspace(0.1, 0.4, 4), jnp.linspace(-1.0, 1.0, 24).reshape(6, 4)


class Counted:
    """Makes functions that count how often they are called by Python."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, f: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(f)
        def counted(*args: Any) -> Any:
            self.count += 1
            return f(*args)

        del counted.__wrapped__
        return counted


def step(h: Any, x: Any) -> Any:
    h = jnp.tanh(h + x)
    return h, h.sum()


def row(x: Any) -> Any:
    return jnp.tanh(2 * x)


def scan_with(schedule: Any) -> Callable[..., Any]:
    return lambda told: (lambda scan: lambda h: sum(map(jnp.sum, scan(h, XS))))(
        el.Scan(told(step), schedule=schedule)
    )


def of_rows(make: Callable[..., Any]) -> Callable[..., Any]:
    return lambda told: (lambda m: lambda h: jnp.sum(m(h[None] * XS)))(make(told(row)))


def of_one(make: Callable[..., Any]) -> Callable[..., Any]:
    return lambda told: (lambda m: lambda h: jnp.sum(m(h)))(make(told(row)))


def while_loop(make: Any, **settings: Any) -> Callable[..., Any]:
    def made(told: Any) -> Any:
        loop = make(
            lambda c: c[0] < 3, told(lambda c: (c[0] + 1, row(c[1]))), **settings
        )
        return lambda h: jnp.sum(loop((0, h))[1])

    return made


def stacked(told: Any) -> Any:
    layers = el.StackedLayers(jax.tree_util.Partial(told(jnp.multiply), XS))
    return lambda h: jnp.sum(layers(h))


MESH = jax.make_mesh((1,), ("i",))
BOTH = {
    "Scan": scan_with(el.StoreAll()),
    "Recursive": scan_with(el.Recursive(2)),
    "Together": scan_with(el.Recursive(2, batch=2)),
    "Chunked": scan_with(el.Chunked(2)),
    "Binomial": scan_with(el.Binomial(2)),
    "Budget": scan_with(el.Budget("1MiB")),
    "Offload": scan_with(el.Offload(el.Chunked(2))),
    "SlicedScan": lambda told: (lambda scan: lambda h: jnp.sum(scan(h, XS)[1]))(
        el.SlicedScan(told(step), step=2)
    ),
    "ForLoop": of_rows(el.ForLoop),
    "CheckpointedForLoop": of_rows(el.CheckpointedForLoop),
    "BoundedWhileLoop": while_loop(el.BoundedWhileLoop, max_steps=4),
    "CheckpointedWhileLoop": while_loop(el.CheckpointedWhileLoop),
    "AssociativeScan": lambda told: (
        lambda scan: lambda h: jnp.sum(scan(h[None] * XS))
    )(el.AssociativeScan(told(jnp.multiply), chunk_size=2)),
    "StackedLayers": stacked,
    "ChunkedVmap": of_rows(lambda f: el.ChunkedVmap(f, 4)),
    "Map": of_rows(el.Map),
    "ParallelMap": of_rows(el.ParallelMap),
    "ShardMap": of_one(
        lambda f: el.ShardMap(f, mesh=MESH, in_specs=P("i"), out_specs=P("i"))
    ),
    "Cond": lambda told: (lambda m: lambda h: jnp.sum(m(True, h)))(
        el.Cond(told(row), jnp.negative)
    ),
    "Switch": lambda told: (lambda m: lambda h: jnp.sum(m(0, h)))(
        el.Switch([told(row), jnp.negative])
    ),
    "IfElse": lambda told: (lambda m: lambda h: jnp.sum(m([True, False], h)))(
        el.IfElse([told(row), jnp.negative])
    ),
    "Remat": of_one(el.Remat),
    "Jit": of_one(el.Jit),
    "Optimize": of_one(el.ir.Optimize),
    "DebugNonFinite": of_one(el.DebugNonFinite),
}
FORWARD = {
    "WhileLoop": while_loop(el.WhileLoop),
    "JacRev": of_one(lambda f: el.JacRev(f, chunk_size=2)),
    "JacFwd": of_one(lambda f: el.JacFwd(f, chunk_size=2)),
    "Hessian": of_one(lambda f: el.Hessian(lambda x: jnp.sum(f(x)), chunk_size=2)),
}


def check_once(run: Callable[[], Any], told: Counted) -> None:
    """Checks that a second call neither traces nor compiles, and gives the same."""
    first = run()
    count, compiled = told.count, programs_compiled()
    assert count > 0
    again = run()
    assert (told.count, programs_compiled()) == (count, compiled)
    assert jnp.array_equal(first, again)


@pytest.mark.parametrize("make", BOTH.values(), ids=BOTH.keys())
@pytest.mark.parametrize("mode", [lambda f: f, jax.grad], ids=["call", "gradient"])
def test_a_second_call_traces_and_compiles_nothing(make: Any, mode: Any):
    told = Counted()
    f = make(told)
    check_once(lambda: mode(f)(H), told)


@pytest.mark.parametrize("make", FORWARD.values(), ids=FORWARD.keys())
def test_so_does_what_has_no_reverse_mode_or_is_one(make: Any):
    told = Counted()
    f = make(told)
    check_once(lambda: f(H), told)


@pytest.mark.parametrize(
    "mode",
    [
        lambda f: jax.jvp(f, (H,), (H,))[1],
        slow(jax.jacfwd),
        jax.hessian,
        lambda f: jax.vmap(f)(XS),
        lambda f: jax.vmap(jax.grad(f))(XS),
        lambda f: jax.linearize(f, H)[1](H),
    ],
    ids=["jvp", "jacfwd", "hessian", "vmap", "vmap of grad", "linearize"],
)
def test_in_other_modes(mode: Any):
    told = Counted()
    f = scan_with(el.Binomial(2))(told)
    run = lambda: out(H) if callable(out := mode(f)) else out
    check_once(run, told)
    jitted = jax.jit(lambda h: out(h) if callable(out := mode(f)) else out)
    assert jnp.allclose(run(), jitted(H), rtol=1e-5)


def test_a_model_that_is_trained_is_traced_once():
    cell = without_key(eqx.nn.GRUCell, 4, 4)
    told = Counted()
    call = told(lambda cell, h, x: (cell(x, h), None))
    step = jax.tree_util.Partial(call, cell)

    @eqx.filter_grad
    def gradient(scan: Any) -> Any:
        return jnp.sum(scan(H, XS)[0] ** 2)

    scan = el.CheckpointedScan(step, base=2)
    for i in range(4):
        compiled = programs_compiled()
        grads = gradient(scan)
        if i == 0:
            count = told.count
        else:
            assert (told.count, programs_compiled()) == (count, compiled)
        scan = eqx.apply_updates(scan, jax.tree.map(lambda g: -0.1 * g, grads))


SCALE = jnp.ones(())


def test_a_global_that_is_bound_anew_is_seen():
    global SCALE

    def f(h: Any, x: Any) -> Any:
        return SCALE * h + x, None

    scan = el.Scan(f)
    for value in (1.0, 2.0, 2.0):
        SCALE = jnp.asarray(value)
        assert jnp.allclose(scan(H, length=None, xs=XS)[0], by_hand(f))


def by_hand(f: Any) -> Any:
    h = H
    for x in XS:
        h, _ = f(h, x)
    return h


def test_what_functions_read_is_seen():
    scale, told = jnp.ones(()), Counted()

    def inner(h: Any) -> Any:
        return scale * h

    def f(h: Any, x: Any, *, shift: Any = 1.0) -> Any:
        told.count += 1
        return inner(h) + x + shift, None

    scan = el.Scan(f)
    for value in (1.0, 3.0):
        scale = jnp.asarray(value)
        assert jnp.allclose(scan(H, XS)[0], by_hand(f))
    f.__kwdefaults__ = {"shift": 5.0}
    assert jnp.allclose(scan(H, XS)[0], by_hand(f))
    told.count = 0
    assert jnp.allclose(scan(H, XS)[0], scan(H, XS)[0])
    assert told.count == 0


def test_what_a_function_writes_itself_is_no_change():
    count = 0

    def f(h: Any, x: Any) -> Any:
        nonlocal count
        count += 1
        return jnp.tanh(h + x), None

    scan = el.CheckpointedScan(f, base=2)
    gradient = jax.grad(lambda h: jnp.sum(scan(h, XS)[0]))
    for run in (lambda: scan(H, XS), lambda: gradient(H), lambda: scan(H, XS[:3])):
        run()
        once = count
        run()
        assert count == once


class Scaled:
    """A callable that can change."""

    scale = 1.0

    def __call__(self, h: Any, x: Any) -> Any:
        return self.scale * h + x, None

    def step(self, h: Any, x: Any) -> Any:
        return self(h, x)


@pytest.mark.parametrize(
    "choose", [lambda s: s, lambda s: s.step], ids=["call", "method"]
)
def test_attributes_that_change_are_seen(choose: Any):
    scaled = Scaled()
    for value in (1.0, 2.0, 3.0):
        scaled.scale = value
        assert jnp.allclose(el.Scan(choose(scaled))(H, XS)[0], by_hand(scaled))


def test_partials_of_other_functions_are_others():
    for value in (1.0, 2.0):
        f = functools.partial(lambda scale, h, x: (scale * h + x, None), value)
        assert jnp.allclose(el.Scan(f)(H, XS)[0], by_hand(f))


def test_tracers_are_not_remembered():
    state: dict[str, Any] = {}

    def f(h: Any, x: Any) -> Any:
        return state["w"] * h + x, None

    scan = el.CheckpointedScan(f, base=2)

    def loss(w: Any) -> Any:
        state["w"] = w
        return jnp.sum(scan(H, XS)[0])

    for w in (0.5, 0.25):  # `jax.lax.scan` raises at the second
        exact = jax.grad(lambda w: jnp.sum(by_hand(lambda h, x: (w * h + x, 0))))(w)
        assert jnp.allclose(jax.grad(loss)(w), exact, rtol=1e-5)


def test_references_are_not_constants():
    ref = jax.new_ref(jnp.zeros(4))

    def f(h: Any, x: Any) -> Any:
        ref[...] += x
        return h + ref[...], None

    for times in (1, 2, 3):
        el.CheckpointedScan(f)(H, XS)
        assert jnp.allclose(ref[...], times * XS.sum(0), atol=1e-6)


def test_settings_of_jax_are_seen():
    told = Counted()
    scan = el.Scan(told(lambda h, x: (h @ jnp.ones((4, 4)) / 4 + x, None)))
    scan(H, XS)
    once = told.count
    with jax.default_matmul_precision("highest"):
        scan(H, XS)
    assert told.count == 2 * once
    with jax.enable_x64(True):
        h, _ = scan(np.zeros(4), np.ones((6, 4)))
        assert h.dtype == jnp.float64
    assert scan(np.zeros(4), np.ones((6, 4)))[0].dtype == jnp.float32


def test_strict_promotion_is_seen():
    scan = el.Scan(lambda h, x: (h + x, None))
    mixed = (jnp.zeros(4), jnp.ones((6, 4), jnp.int32))
    with jax.numpy_dtype_promotion("standard"):
        scan(*mixed)
    with pytest.raises(jax.dtypes.TypePromotionError):
        scan(*mixed)


def test_weak_types_are_seen():
    scan = el.Scan(lambda h, x: (h * 1.0, h + 1))
    weak, strong = jnp.asarray(1.0), jnp.ones(())
    for h in (weak, strong, weak):
        assert scan(h, length=2)[0].weak_type == h.weak_type


def test_static_leaves_are_told_apart():
    f = lambda h, x: ({**h, "h": h["h"] * h["n"]}, None)
    for n in (1, 2, 2.5, 2.0):
        carry, _ = el.Scan(f)({"h": H, "n": n}, length=3)
        assert type(carry["n"]) is type(n)
        assert jnp.allclose(carry["h"], H * n**3)


@dataclasses.dataclass(frozen=True)
class Config:
    scale: float


class Cell(eqx.Module):
    scale: Any = eqx.field(static=True)

    def __call__(self, h: Any, x: Any) -> Any:
        scale = self.scale
        scale = scale.scale if isinstance(scale, Config) else scale[0]
        return h, jnp.copysign(x, float(scale)) * float(type(scale) is float)


@pytest.mark.parametrize("make", [lambda x: (x,), Config], ids=["tuple", "dataclass"])
def test_static_fields_are_told_apart(make: Any):
    for scale in (0.0, -0.0, 0, 0.0, True, 1.0):
        _, ys = el.Scan(Cell(make(scale)))(H, XS)
        sign = np.copysign(1.0, scale) * float(type(scale) is float)
        assert jnp.array_equal(ys, sign * jnp.abs(XS))


@dataclasses.dataclass
class Unhashable:
    scale: float


def test_what_cannot_be_told_apart_is_not_remembered():
    setting = Unhashable(1.0)
    f = lambda h, x: ({**h, "h": h["h"] * h["by"].scale}, None)
    for scale in (2.0, 3.0):
        setting.scale = scale
        carry, _ = el.Scan(f)({"h": H, "by": setting}, length=2)
        assert jnp.allclose(carry["h"], H * scale**2)


def test_the_mesh_is_seen():
    told = Counted()
    shard = el.ShardMap(told(lambda x: x * 2), in_specs=P(), out_specs=P())
    for name in ("a", "b", "a"):
        with jax.set_mesh(jax.make_mesh((1,), (name,))):
            assert jnp.allclose(shard(H), 2 * H)
    assert told.count == 2


def test_the_switch_of_jaxtyping_is_seen():
    def f(h: Float[Array, "2"], x: Any) -> Any:
        return h, None

    scan = el.Scan(f)
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        scan(H, XS)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
    with pytest.raises(jaxtyping.TypeCheckError):
        scan(H, XS)


def test_named_axes_are_seen():
    f = lambda h, x: (h + jax.lax.psum(x, "i"), None)
    run = lambda xs: el.Scan(f)(jnp.zeros(()), xs)[0]
    for size in (2, 3, 2):
        xs = jnp.ones((size, 4))
        assert jnp.allclose(jax.vmap(run, axis_name="i")(xs), 4.0 * size)


def test_without_jit_python_runs_each_step():
    told = Counted()
    scan = el.Scan(told(step))
    scan(H, XS)
    told.count = 0
    with jax.disable_jit():
        scan(H, XS)
    assert told.count > 0


def rows_by_a_mask(h):
    def step(carry, i):
        buffer, h = carry
        return (jnp.where(jnp.arange(5)[:, None] == i, h, buffer), jnp.sin(h)), None

    return el.CheckpointedScan(step)((jnp.zeros((5, *h.shape)), h), jnp.arange(5))[0]


def narrow_sums(h):
    step = lambda h, x: (jnp.sin(h) + jnp.sum(h * x), None)
    init, xs = h.astype(jnp.bfloat16), jnp.ones((4, 4), jnp.bfloat16)
    return el.CheckpointedScan(step)(init, xs)[0]


def total(tree):
    return sum(jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in jax.tree.leaves(tree))


def test_without_jit_derivatives_are_the_same():
    """Also of what is written anew as a call: with `jit` off, a call is no equation."""
    for f in (rows_by_a_mask, narrow_sums):
        gradient, h = jax.grad(lambda h, f=f: total(f(h))), jnp.ones(4)
        with jax.disable_jit():
            found = gradient(h)
        assert jnp.allclose(found, gradient(h), rtol=2e-2)


def test_a_function_may_need_values_where_it_is_not_traced():
    def f(x: Any) -> Any:
        return jnp.sin(x) if x[0] > 0 else jnp.cos(x)

    jacobian = el.JacRev(f, chunk_size=2)
    for x in (H, -H, H):
        assert jnp.allclose(jacobian(x), jax.jacrev(f)(x))


def test_errors_are_raised_each_time():
    scan = el.Scan(lambda h, x: (h[:2], None))
    for _ in range(2):
        with pytest.raises(TypeError, match="must keep its shape"):
            scan(H, XS)


def test_what_is_handed_on_is_not_copied():
    table = jnp.arange(1000.0)
    scan = el.Scan(lambda c, x: ((c[0] + c[1][0], c[1]), None))
    for _ in range(2):
        assert scan((jnp.zeros(()), table), length=3)[0][1] is table


@pytest.mark.parametrize("length", [3, np.int64(3), jnp.asarray(3)], ids=str)
def test_a_length_may_be_of_any_kind(length: Any):
    assert el.Scan(lambda h, _: (h + 1, None))(0, length=length)[0] == 3


def left_alive(make: Callable[[], tuple[Any, ...]]) -> list[Any]:
    references = [weakref.ref(x) for x in make()]
    gc.collect()
    return [alive for reference in references if (alive := reference()) is not None]


def test_nothing_that_is_remembered_keeps_a_function_alive():
    def made() -> tuple[Any, ...]:
        big = jnp.ones(100)

        def f(h: Any, x: Any) -> Any:
            return h + x + big.sum(), None

        scan = el.CheckpointedScan(f, base=2)
        jax.grad(lambda h: jnp.sum(scan(h, XS)[0]))(H)
        scan(H, XS)
        return f, big

    assert left_alive(made) == []


def test_an_object_in_the_place_of_one_that_is_gone_is_another():
    # Addresses are used again, so what is remembered by one must go when it does.
    results = []
    for scale in range(20):
        f = eval("lambda h, x: (h + scale, None)", {"scale": scale})
        results.append(float(el.Scan(f)(0.0, length=1)[0]))
        del f
    assert results == list(range(20))


def test_threads_may_share_a_transform():
    told, results = Counted(), []
    scan = el.CheckpointedScan(told(step), base=2)
    gradient = jax.grad(lambda h: jnp.sum(scan(h, XS)[0]))
    run = lambda: results.append(gradient(H))
    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    exact = jax.grad(lambda h: jnp.sum(jax.lax.scan(step, h, XS)[0]))(H)
    assert len(results) == 4
    assert all(jnp.allclose(result, exact, rtol=1e-5) for result in results)


TABLE: Any = {"decay": 0.5, 2: "two", "deep": [{None: 1, "x": 2}]}
TABLE["itself"] = TABLE


def test_what_is_read_need_not_be_a_tree():
    """JAX would sort the keys of a dictionary, and follow a circle for ever."""
    closed = {"decay": 0.5, 2: "two"}

    class Held:
        def __init__(self) -> None:
            self.own = {"decay": 0.5, None: 1}

        def step(self, h: Any, x: Any) -> Any:
            return h * self.own["decay"] + x, None

    steps = (
        lambda h, x: (h * TABLE["decay"] + x, None),
        lambda h, x: (h * closed["decay"] + x, None),
        lambda h, x, table=closed: (h * table["decay"] + x, None),
        functools.partial(lambda h, x, t: (h * t["decay"] + x, None), t=closed),
        Held().step,
    )
    for step in steps:
        told = Counted()
        scan = el.Scan(told(step))
        for _ in range(2):
            assert jnp.array_equal(scan(H, XS)[0], jax.lax.scan(step, H, XS)[0])
        assert told.count == 1
