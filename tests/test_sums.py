"""Cotangents of what steps and rows share are added up in float32, by every transform.

Terms of bfloat16 have the sum that they have in float64, but for its rounding.
"""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqloop as el

from .compiling import temp_bytes
from .mapping.devices import mesh_of
from .marks import slow, slow_if

pytestmark = pytest.mark.sampled

# More than 256 equal terms: to their sum in bfloat16 nothing can be added any more.
COUNT = 600
NUMBERS = np.random.default_rng(0).uniform(0.005, 0.015, (COUNT, 3))

Loss = Callable[[Any, Any], Any]


def term(w: Any, x: Any) -> Any:
    """What a step or a row adds: its derivative `2 w x` is no product with rounding."""
    return jnp.sum((w * w * x).astype(jnp.float32))


def arguments(dtype: Any = jnp.bfloat16, count: int = COUNT) -> tuple[Any, Any]:
    return jnp.ones(3, dtype), jnp.asarray(NUMBERS[:count], dtype)


def off_by(found: Any, xs: Any, times: float = 2.0) -> float:
    """How far a gradient is from the sum in float64, in distances of its numbers."""
    exact = times * np.asarray(xs, np.float64).sum(0)
    unit = float(jnp.finfo(found.dtype).eps)
    return np.abs(np.asarray(found, np.float64) / exact - 1).max() / unit


def zero() -> Any:
    return jnp.float32(0)


def scan(schedule: Any = None, **settings: Any) -> Loss:
    def loss(w: Any, xs: Any) -> Any:
        step = lambda h, x: (h + term(w, x), None)
        return el.Scan(step, schedule=schedule, **settings)(zero(), xs)[0]

    return loss


def in_carry(schedule: Any = None, **settings: Any) -> Loss:
    """What is shared goes along in the carry."""

    def loss(w: Any, xs: Any) -> Any:
        step = lambda carry, x: ((carry[0], carry[1] + term(carry[0], x)), None)
        return el.Scan(step, schedule=schedule, **settings)((w, zero()), xs)[0][1]

    return loss


def reversible(w: Any, xs: Any) -> Any:
    step = lambda h, x: (h + term(w, x), None)
    schedule = el.Reversible(lambda h, x: h - term(w, x), check=False)
    return el.Scan(step, schedule=schedule)(zero(), xs)[0]


def spilled(w: Any, xs: Any, directory: Any) -> Any:
    return scan(el.Spill(el.Chunked(32), directory))(w, xs)


def rows_of_outputs(w: Any, xs: Any) -> Any:
    step = lambda h, x: (h, term(w, x))
    # Every step: the rows of others have no cotangent.
    return jnp.sum(el.SlicedScan(step, step=1)(zero(), xs)[1])


def while_loop(kind: Any, **settings: Any) -> Loss:
    def loss(w: Any, xs: Any) -> Any:
        cond = lambda carry: carry[0] < COUNT
        body = lambda carry: (carry[0] + 1, carry[1] + term(w, xs[carry[0]]))
        return kind(cond, body, **settings)((0, zero()))[1]

    return loss


def scan_while(w: Any, xs: Any) -> Any:
    step = lambda h, x: (h + term(w, x), None)
    loop = el.ScanWhile(lambda h: h < 1e3, step, max_steps=COUNT)
    return loop(zero(), xs)[0]


class Layer(eqx.Module):
    x: Any

    def __call__(self, h: Any, w: Any) -> Any:
        return h + term(w, self.x)


def layers(schedule: Any = None) -> Loss:
    stacked = lambda xs: el.StackedLayers(Layer(xs), schedule=schedule)
    return lambda w, xs: stacked(xs)(zero(), w)


def prefixes(w: Any, xs: Any) -> Any:
    """Each prefix is a call of a function that closes over `w`."""
    scale = jnp.asarray(xs[0], w.dtype)
    f = lambda a, b: a + b + term(w, scale)
    return el.AssociativeScan(f, chunk_size=4)(jnp.zeros(COUNT + 1))[-1]


def rows(transform: Callable[..., Any]) -> Loss:
    return lambda w, xs: jnp.sum(transform(lambda x: term(w, x))(xs))


def reduced(size: Any, **settings: Any) -> Loss:
    sums = functools.partial(el.ChunkedVmap, chunk_size=size, in_axes={"w": None})
    return lambda w, xs: sums(term, reduce="mean", **settings)(w, xs) * len(xs)


def by_jax(w: Any, xs: Any) -> Any:
    return jax.lax.scan(lambda h, x: (h + term(w, x), None), zero(), xs)[0]


def storing(w: Any, xs: Any) -> Any:
    """A loop of JAX with something to store: a one of which nobody knows."""

    def step(carry: Any, x: Any) -> Any:
        h, angle = carry
        one = jnp.sin(angle) ** 2 + jnp.cos(angle) ** 2
        return (h + one * term(w, x), jnp.sin(angle + 1)), None

    return jax.lax.scan(step, (zero(), zero()), xs)[0][0]


def while_of_jax(w: Any, xs: Any) -> Any:
    cond = lambda carry: carry[0] < COUNT
    body = lambda carry: (carry[0] + 1, carry[1] + term(w, xs[carry[0]]))
    return jax.lax.while_loop(cond, body, (0, zero()))[1]


def nested(inner: Any, outer: Any) -> Loss:
    """Both loops share it."""

    def loss(w: Any, xs: Any) -> Any:
        step = lambda h, x: (h + scan(inner)(w, x), None)
        return el.Scan(step, schedule=outer)(zero(), xs.reshape(20, -1, 3))[0]

    return loss


SAVING = el.policies.save_everything
# Those by which each term is added by itself: they lose most without.
SINGLY = {
    "StoreAll": scan(el.StoreAll(), reverse=True),
    "StoreAll, policy": scan(el.StoreAll(), policy=el.policies.save_nothing),
    "StoreAll, carry": in_carry(),
    "Recursive": scan(el.Recursive(8)),
    "Recursive, carry": in_carry(el.Recursive(8)),
    "Chunked": scan(el.Chunked(32)),
    "Binomial": scan(el.Binomial(8)),
    "StoreLast": scan(el.StoreLast(el.Chunked(8), 200)),
    "Offload": scan(el.Offload(el.Chunked(32))),
    "Cast": scan(el.Cast(el.Chunked(32), "float16")),
    "Budget": scan(el.Budget("3KiB", measure=False)),
    "Reversible": reversible,
    "SlicedScan": rows_of_outputs,
    "ForLoop": rows(el.ForLoop),
    "CheckpointedForLoop": rows(el.CheckpointedForLoop),
    "BoundedWhileLoop": while_loop(el.BoundedWhileLoop, max_steps=COUNT, base=8),
    "CheckpointedWhileLoop": while_loop(el.CheckpointedWhileLoop, checkpoints=8),
    "ScanWhile": scan_while,
    "StackedLayers": layers(),
    "StackedLayers, Chunked": layers(el.Chunked(8)),
    "Map": rows(el.Map),
    "ChunkedVmap, 1": rows(lambda f: el.ChunkedVmap(f, 1)),
    "reduce, 1": reduced(1),
    "Reschedule": el.Reschedule(by_jax, el.Recursive(8)),
    "Reschedule, Chunked": el.Reschedule(storing, el.Chunked(32)),
    "Reschedule, whiles": el.Reschedule(while_of_jax, whiles=8),
    "Fit": el.Fit(by_jax, "8KiB", foreign=True),
    "Fit, layers": el.Fit(layers(), "8KiB"),
    "Fit, Map": el.Fit(rows(el.Map), "16KiB"),
    "Fit, while": el.Fit(while_loop(el.CheckpointedWhileLoop), "8KiB"),
}
# Those that add some terms at once.
TOGETHER = {
    "Recursive, batch": scan(el.Recursive(8, batch=16)),
    "Chunked, batch": scan(el.Chunked(32, batch=32)),
    "Chunked, policy": scan(el.Chunked(32), policy=SAVING),
    "Binomial, block": scan(el.Binomial(8, block=8)),
    "Map, batch_size": rows(lambda f: el.Map(f, batch_size=8)),
    "ChunkedVmap, 7": rows(lambda f: el.ChunkedVmap(f, 7)),
    "ChunkedVmap, policy": rows(lambda f: el.ChunkedVmap(f, 8, policy=SAVING)),
    "reduce, 8": reduced(8),
    "reduce, policy": reduced(8, policy=SAVING),
    "ParallelMap": rows(el.ParallelMap),
    "ParallelMap, 8": rows(lambda f: el.ParallelMap(f, chunk_size=8)),
    "Fit, slots": el.Fit(storing, "2KiB", foreign=True),
    "nested": nested(None, el.Recursive(4)),
    "nested, batch": nested(el.Recursive(4), el.Chunked(5, batch=5)),
}
# Whose second derivative in reverse mode is JAX's own, sums included.
BY_JAX = {"StoreAll", "StoreAll, policy", "StoreAll, carry", "SlicedScan", "ForLoop"}
BY_JAX |= {"StackedLayers", "Chunked, policy", "ChunkedVmap, policy", "reduce, policy"}
BY_JAX |= {"Budget", "Fit", "Fit, layers"}  # which store everything of so small a loop


@pytest.mark.parametrize("name", [*SINGLY, *TOGETHER])
def test_gradients(name):
    """A gradient, that of a batch, and the same without."""
    loss, (w, xs) = (SINGLY | TOGETHER)[name], arguments()

    def gradients(w: Any, xs: Any) -> Any:
        with el.accumulating_in(None):
            narrow = jax.grad(loss)(w, xs)
        return jax.grad(loss)(w, xs), narrow

    wide, narrow = jax.jit(gradients)(w, xs)
    assert wide.dtype == w.dtype
    assert off_by(wide, xs) < 1
    assert name in TOGETHER or off_by(narrow, xs) > 10


def test_slots_in_files(tmp_path):
    w, xs = arguments()
    wide = jax.jit(jax.grad(lambda w: spilled(w, xs, tmp_path)))(w)
    assert off_by(wide, xs) < 1


def test_functions_that_are_associative():
    w, xs = arguments()
    terms = jnp.broadcast_to(xs[0], xs.shape)
    assert off_by(jax.jit(jax.grad(prefixes))(w, xs), terms) < 1


@pytest.mark.parametrize(
    "name", slow_if(lambda name: "Fit" in name, [*SINGLY, *TOGETHER])
)
@pytest.mark.parametrize("mode", ["forward", slow("reverse")])
def test_second_derivatives(name, mode):
    loss, (w, xs) = (SINGLY | TOGETHER)[name], arguments()
    gradient = lambda w: jax.grad(loss)(w, xs)
    if mode == "forward":
        second = lambda w: jax.jvp(gradient, (w,), (w,))[1]
    else:
        second = jax.grad(lambda w: jnp.sum(gradient(w).astype(jnp.float32)))
    found = off_by(jax.jit(second)(w), xs)
    assert found < 1 or (mode == "reverse" and name in BY_JAX)


MODES = {
    "vmap of grad": lambda loss: (
        lambda w, xs: jax.vmap(jax.grad(loss), (0, None))(jnp.stack([w, w]), xs)[1]
    ),
    "grad of vmap": lambda loss: jax.grad(
        lambda w, xs: jnp.mean(jax.vmap(loss, (None, 0))(w, jnp.stack([xs, xs])))
    ),
    "checkpoint": lambda loss: jax.grad(jax.checkpoint(loss)),
    "linear_transpose": lambda loss: (
        lambda w, xs: jax.linear_transpose(
            jax.linearize(lambda w: loss(w, xs), w)[1], w
        )(zero() + 1)[0]
    ),
    "scan": lambda loss: jax.grad(
        lambda w, xs: jax.lax.scan(
            lambda h, _: (h + loss(w, xs) / 2, None), zero(), length=2
        )[0]
    ),
    "shard_map": lambda loss: jax.grad(
        lambda w, xs: jax.shard_map(
            lambda w, xs: jax.lax.psum(loss(w, xs), "rows"),
            mesh=mesh_of(rows=2),
            in_specs=(jax.P(), jax.P("rows")),
            out_specs=jax.P(),
        )(w, xs)
    ),
}
PLANNED = ["StoreAll", "Recursive", "Chunked, batch", "Binomial, block", "ScanWhile"]


@pytest.mark.parametrize("name", PLANNED)
@pytest.mark.parametrize("mode", MODES)
def test_modes(name, mode):
    loss, (w, xs) = (SINGLY | TOGETHER)[name], arguments()
    if name == "ScanWhile" and mode == "shard_map":
        pytest.skip("it has as many steps as `max_steps` says")
    assert off_by(jax.jit(MODES[mode](loss))(w, xs), xs) < 1


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("name", [*PLANNED[:4], "Map", "reduce, 8"])
def test_other_narrow_types(name, dtype):
    loss, (w, xs) = (SINGLY | TOGETHER)[name], arguments(dtype, count=120)
    assert off_by(jax.jit(jax.grad(loss))(w, xs), xs) < 1


@pytest.mark.parametrize("transform", [el.Scan, el.CheckpointedScan])
def test_a_bar_changes_nothing(transform):
    """With one, what stays in the carry is no const of the loop."""
    w, xs = arguments()
    step = lambda carry, x: ((carry[0], carry[1] + term(carry[0], x)), None)
    loop = transform(step, progress=el.ProgressBar(every=COUNT, desc="sums"))
    gradient = jax.jit(jax.grad(lambda w: loop((w, zero()), xs)[0][1]))(w)
    assert off_by(gradient, xs) < 1


def test_values_of_narrow_floats():
    """A sum over rows, of floats of 8 bits too."""
    xs = jnp.full(500, 0.234375, "float8_e4m3fn")
    total = el.ChunkedVmap(lambda x: x, 5, reduce="sum")(xs)
    assert total.dtype == xs.dtype
    # 117.2 is none of its numbers, nor is the sum of a chunk: rounded, they add to 112.
    assert float(total) == 120.0


def test_sums_of_float32_in_float64():
    xs = jnp.full((100_000, 1), 0.1, jnp.float32)
    loss = lambda w: el.Map(lambda x: jnp.sum(w * x))(xs).sum()
    with jax.enable_x64(True):
        xs, exact = jnp.asarray(xs), 100_000 * float(np.float32(0.1))
        with el.accumulating_in("float64"):
            wide = jax.jit(jax.grad(loss))(jnp.ones(1, jnp.float32))
        narrow = jax.jit(jax.grad(loss))(jnp.ones(1, jnp.float32))
    assert wide.dtype == jnp.float32
    assert abs(float(wide[0]) / exact - 1) < 1e-7 < abs(float(narrow[0]) / exact - 1)


# The setting.


@pytest.mark.parametrize("name", ["StoreAll", "Recursive", "Map"])
def test_the_type_is_that_of_where_a_loop_is_traced(name):
    loss, (w, xs) = SINGLY[name], arguments()
    gradient = jax.jit(jax.grad(loss))
    with el.accumulating_in(None):
        _, pull = jax.vjp(lambda w: loss(w, xs), w)
        lowered = gradient.trace(w, xs)
        assert off_by(gradient(w, xs), xs) > 10
    assert off_by(pull(zero() + 1)[0], xs) > 10
    assert off_by(lowered.lower().compile()(w, xs), xs) > 10
    # The same function is traced again here.
    assert off_by(gradient(w, xs), xs) < 1


class Cell(eqx.Module):
    w: Any

    def __call__(self, h: Any, x: Any) -> Any:
        return h + term(self.w, x), None


def resumed(directory: Any) -> tuple[Any, Any]:
    """A gradient in 20 segments; what each adds is nothing beside the last row."""
    w, xs = arguments(count=40)
    xs = jnp.full_like(xs, 2**-10).at[-1].set(1)
    loop = el.Resumable(el.Scan(Cell(w)), directory, every=2)
    _, gradient = loop.value_and_grad(lambda h, ys: h, argnums="f")(zero(), xs)
    return gradient.f.w, xs


def test_sums_on_disk(tmp_path):
    found, xs = resumed(tmp_path / "wide")
    assert found.dtype == xs.dtype
    assert off_by(found, xs) < 1
    with el.accumulating_in(None):
        assert off_by(*resumed(tmp_path / "narrow")) > 4
        # What was begun in one type is not gone on with in another.
        with pytest.raises(ValueError, match=r"holds another run.* in\n  f: "):
            resumed(tmp_path / "wide")


# What it takes.


def cell(schedule: Any, width: int = 64, count: int = 128) -> Any:
    def loss(matrix: Any, xs: Any) -> Any:
        step = lambda h, x: (jnp.tanh(matrix @ h + x), None)
        init = jnp.zeros(width, matrix.dtype)
        h, _ = el.Scan(step, schedule=schedule)(init, xs)
        return jnp.sum(h.astype(jnp.float32))

    types = ((width, width), (count, width))
    return loss, [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in types]


@pytest.mark.parametrize("schedule", [el.StoreAll(), el.Chunked(16, batch=16)])
def test_nothing_is_stored_for_it(schedule):
    """A wide copy is given to the loop, and nobody makes it."""
    loss, types = cell(schedule)
    primal = temp_bytes(loss, *types)
    tangent = lambda w, xs: jax.jvp(lambda w: loss(w, xs), (w,), (w,))[1]
    tangents = temp_bytes(tangent, *types)
    with el.accumulating_in(None):
        assert (temp_bytes(loss, *types), temp_bytes(tangent, *types)) == (
            primal,
            tangents,
        )
    _, pull = jax.vjp(loss, *(jnp.zeros(t.shape, t.dtype) for t in types))
    assert all(x.dtype != jnp.float32 for x in jax.tree.leaves(pull) if x.size > 64)


def test_loops_in_place_of_others_hold_no_copy():
    """A loop by `StoreAll` is one of JAX, and may be run by another schedule."""
    loss, types = cell(el.StoreAll())
    again = el.Reschedule(loss, el.Chunked(16, batch=16))
    direct, _ = cell(el.Chunked(16, batch=16))
    taken = [temp_bytes(jax.grad(f), *types) for f in (again, direct)]
    assert taken[0] == taken[1]
    _, pull = jax.vjp(again, *(jnp.zeros(t.shape, t.dtype) for t in types))
    assert all(x.dtype != jnp.float32 for x in jax.tree.leaves(pull) if x.size > 64)


@pytest.mark.parametrize("schedule", [el.Recursive(8, batch=1), el.Binomial(8)])
def test_four_bytes_for_each_entry(schedule):
    loss, types = cell(schedule)
    wide = temp_bytes(jax.grad(loss), *types)
    with el.accumulating_in(None):
        narrow = temp_bytes(jax.grad(loss), *types)
    assert 3.5 < (wide - narrow) / (64 * 64) <= 4


@pytest.mark.slow
@pytest.mark.parametrize("share", [1.05, 1.5, 3])
def test_plans_count_them(share):
    least, types = cell(el.Binomial(2))
    nbytes = int(share * temp_bytes(jax.grad(least), *types))
    schedule = el.Budget(nbytes, measure=False)
    loss, _ = cell(schedule)
    taken = temp_bytes(jax.grad(loss), *types)
    (found,) = el.plans(jax.grad(loss))(*types)
    assert taken <= found.plan.peak_bytes <= nbytes
    pinned, _ = cell(found.plan.pinned)
    with el.accumulating_in(None):
        (narrow,) = el.plans(jax.grad(pinned))(*types)
    assert narrow.plan.peak_bytes < found.plan.peak_bytes
