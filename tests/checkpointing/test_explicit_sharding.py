"""Loops on a mesh with explicit axes, where JAX checks how each array is split."""

import contextlib
import functools
import itertools
import tempfile
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import eqloop as el

from ..asserts import assert_close
from ..marks import slow

pytestmark = pytest.mark.sampled

BATCH, WIDTH, LENGTH = 8, 4, 7


@functools.cache
def mesh() -> Any:
    return jax.make_mesh(
        (4, 2), ("batch", "width"), axis_types=(AxisType.Explicit,) * 2
    )


def arrays() -> tuple[np.ndarray, ...]:
    numbers = functools.partial(np.random.default_rng(0).uniform, 0.2, 0.8)
    sizes = (WIDTH,), (BATCH, WIDTH), (BATCH, LENGTH, WIDTH)
    return tuple(numbers(size=size).astype("f4") for size in sizes)


# How the weights, the carry and `xs` are split.
SPECS = {
    "batch": (P(), P("batch"), P("batch")),
    "both": (P("width"), P("batch", None), P("batch", None, None)),
    "all": (P("width"), P("batch", "width"), P("batch", None, "width")),
    "width": (P("width"), P(None, "width"), P(None, None, "width")),
    "xs": (P(), P(None, "width"), P(None, None, "width")),
}


def placed(split: str) -> list[Any]:
    place = lambda x, spec: jax.device_put(x, NamedSharding(mesh(), spec))
    return list(map(place, arrays(), SPECS[split]))


def step(w: Any) -> Callable[..., Any]:
    return lambda h, x: (jnp.sin(w * h + x), w * h)


def scan(**settings: Any) -> Callable[..., Any]:
    return lambda w, h, xs: el.Scan(step(w), **settings)(h, xs)


def reference(w: Any, h: Any, xs: Any) -> Any:
    return lax.scan(step(w), h, xs)


def reversible(w: Any, h: Any, xs: Any) -> Any:
    f = lambda h, x: (h + w * jnp.sin(x), w * h)
    inverse = lambda h, x: h - w * jnp.sin(x)
    return el.Scan(f, schedule=el.Reversible(inverse, checkpoints=2))(h, xs)


def reversible_reference(w: Any, h: Any, xs: Any) -> Any:
    return lax.scan(lambda h, x: (h + w * jnp.sin(x), w * h), h, xs)


def sliced(w: Any, h: Any, xs: Any) -> Any:
    return el.SlicedScan(step(w), start=1, step=2, schedule=el.Recursive(2))(h, xs)


def sliced_reference(w: Any, h: Any, xs: Any) -> Any:
    last, ys = reference(w, h, xs)
    return last, ys[1::2]


def scan_while(schedule: Any) -> Callable[..., Any]:
    def loop(w: Any, h: Any, xs: Any) -> Any:
        cond = lambda h: jnp.sum(h) < 3.0
        while_ = el.ScanWhile(cond, step(w), max_steps=LENGTH, schedule=schedule)
        return while_(h, xs)[:2]

    return loop


def scan_while_reference(w: Any, h: Any, xs: Any) -> Any:
    def masked(carry: Any, x: Any) -> Any:
        h, goes_on = carry
        goes_on = goes_on & (jnp.sum(h) < 3.0)
        new, y = step(w)(h, x)
        new, y = jnp.where(goes_on, new, h), jnp.where(goes_on, y, 0)
        return (new, goes_on), y

    (h, _), ys = lax.scan(masked, (h, jnp.sum(h) < 3.0), xs)
    return h, ys


def while_(make: Callable[..., Any]) -> Callable[..., Any]:
    def loop(w: Any, h: Any, xs: Any) -> Any:
        cond = lambda c: (c[0] < 5) & (jnp.sum(c[1]) < 3.0)
        body = lambda c: (c[0] + 1, jnp.sin(w * c[1] + xs[0]))
        return make(cond, body)((0, h))[1]

    return loop


def while_reference(w: Any, h: Any, xs: Any) -> Any:
    repeated = jnp.zeros_like(xs)[:5] + xs[:1]
    return scan_while_reference(w, h, repeated)[0]


def for_loop(w: Any, h: Any, xs: Any) -> Any:
    return el.CheckpointedForLoop(lambda x: jnp.sin(w * x) + h, 2)(xs)


def for_loop_reference(w: Any, h: Any, xs: Any) -> Any:
    return lax.map(lambda x: jnp.sin(w * x) + h, xs)


def chunked(w: Any, h: Any, xs: Any) -> Any:
    return el.ChunkedVmap(lambda x: jnp.sin(w * x) + h, 4)(xs)


def chunked_sum(w: Any, h: Any, xs: Any) -> Any:
    return el.ChunkedVmap(lambda x: jnp.sin(w * x) + h, 4, reduce="sum")(xs)


def chunked_stored(w: Any, h: Any, xs: Any) -> Any:
    f = lambda x: jnp.sin(w * x) + h
    return el.ChunkedVmap(f, 4, policy="save_everything")(xs)


def sum_reference(w: Any, h: Any, xs: Any) -> Any:
    return jnp.sum(for_loop_reference(w, h, xs), 0)


def buffered(scan: Callable[..., Any]) -> Callable[..., Any]:
    """A loop that writes a row of a buffer at each step."""

    def loop(w: Any, h: Any, xs: Any) -> Any:
        def f(carry: Any, x: Any) -> Any:
            i, rows, h = carry
            h = jnp.sin(w * h + x)
            return (i + 1, rows.at[i].set(h), h), None

        return scan(f, (0, jnp.zeros_like(xs), h), xs)[0][1:]

    return loop


def buffered_while(make: Callable[..., Any]) -> Callable[..., Any]:
    def loop(w: Any, h: Any, xs: Any) -> Any:
        def body(carry: Any) -> Any:
            i, rows, h = carry
            h = jnp.sin(w * h + xs[i])
            return i + 1, rows.at[i].set(h), h

        cond = lambda carry: (carry[0] < LENGTH) & (jnp.sum(carry[2]) < 3.0)
        return make(cond, body)((0, jnp.zeros_like(xs), h))[1:]

    return loop


def buffered_while_reference(w: Any, h: Any, xs: Any) -> Any:
    def masked(h: Any, x: Any) -> Any:
        goes_on = jnp.sum(h) < 3.0
        new = jnp.sin(w * h + x)
        return jnp.where(goes_on, new, h), jnp.where(goes_on, new, 0)

    return lax.scan(masked, h, xs)[::-1]


class _Layer(eqx.Module):
    w: Any
    x: Any

    def __call__(self, h: Any) -> Any:
        return jnp.sin(self.w * h + self.x)


def stacked_layers(schedule: Any) -> Callable[..., Any]:
    def loop(w: Any, h: Any, xs: Any) -> Any:
        layers = jax.vmap(lambda x: _Layer(w, x))(xs)
        return el.StackedLayers(layers, schedule=schedule)(h)

    return loop


def stacked_reference(w: Any, h: Any, xs: Any) -> Any:
    return reference(w, h, xs)[0]


def truncated(w: Any, h: Any, xs: Any) -> Any:
    return scan(schedule=el.Recursive(2), backward=el.Truncate(2))(w, h, xs)


def truncated_reference(w: Any, h: Any, xs: Any) -> Any:
    ys = []
    for start in range(0, LENGTH, 2):
        h, y = reference(w, h, xs[start : start + 2])
        h = lax.stop_gradient(h) if start + 2 < LENGTH else h
        ys.append(y)
    return h, jnp.concatenate(ys)


def associative(w: Any, h: Any, xs: Any) -> Any:
    scaled = jax.vmap(lambda x: w * x)(xs)
    return h, el.AssociativeScan(lambda a, b: a + b, chunk_size=2)(scaled)


def associative_reference(w: Any, h: Any, xs: Any) -> Any:
    return h, jnp.cumsum(jax.vmap(lambda x: w * x)(xs), 0)


LOOPS = {
    "store_all": (scan(schedule=el.StoreAll()), reference),
    "recursive": (scan(schedule=el.Recursive(2)), reference),
    "together": (scan(schedule=el.Recursive(2, batch=2)), reference),
    "policy": (scan(schedule=el.Recursive(2), policy="save_everything"), reference),
    "chunked": (scan(schedule=el.Chunked(3)), reference),
    "binomial": (scan(schedule=el.Binomial(2)), reference),
    "binomial_together": (scan(schedule=el.Binomial(2, block=2)), reference),
    "budget": (scan(schedule=el.Budget("1MiB", measure=False)), reference),
    "least": (scan(schedule=el.Budget(2000, measure=False)), reference),
    "measured": (scan(schedule=el.Budget(2000)), reference),
    "cast": (scan(schedule=el.Cast(el.Recursive(2), jnp.float32)), reference),
    "offload": (scan(schedule=el.Offload(el.Recursive(2))), reference),
    "reverse": (
        scan(schedule=el.Recursive(2), reverse=True),
        lambda w, h, xs: lax.scan(step(w), h, xs, reverse=True),
    ),
    "unroll": (scan(schedule=el.Recursive(2), unroll=2), reference),
    "clip": (
        scan(schedule=el.Recursive(2), backward=el.ClipCotangent(1e6)),
        reference,
    ),
    "truncate": (truncated, truncated_reference),
    "reversible": (reversible, reversible_reference),
    "sliced": (sliced, sliced_reference),
    "scan_while": (scan_while(el.Recursive(2)), scan_while_reference),
    "scan_while_binomial": (scan_while(el.Binomial(2)), scan_while_reference),
    "bounded_while": (
        while_(lambda *f: el.BoundedWhileLoop(*f, max_steps=8, base=2)),
        while_reference,
    ),
    "checkpointed_while": (
        while_(lambda *f: el.CheckpointedWhileLoop(*f, checkpoints=2)),
        while_reference,
    ),
    "for_loop": (for_loop, for_loop_reference),
    "chunked_vmap": (chunked, for_loop_reference),
    "chunked_vmap_stored": (chunked_stored, for_loop_reference),
    "chunked_sum": (chunked_sum, sum_reference),
    "layers": (stacked_layers(el.Recursive(2)), stacked_reference),
    "layers_together": (stacked_layers(el.Recursive(2, batch=2)), stacked_reference),
    "sliced_together": (
        lambda w, h, xs: el.SlicedScan(
            step(w), start=1, step=2, schedule=el.Recursive(2, batch=2)
        )(h, xs),
        sliced_reference,
    ),
    "buffer": (
        buffered(lambda f, *args: el.CheckpointedScan(f, 2)(*args)),
        buffered(lax.scan),
    ),
    "buffer_binomial": (
        buffered(lambda f, *args: el.Scan(f, schedule=el.Binomial(2))(*args)),
        buffered(lax.scan),
    ),
    "buffer_while": (
        buffered_while(lambda *f: el.CheckpointedWhileLoop(*f, checkpoints=2)),
        buffered_while_reference,
    ),
    "buffer_bounded": (
        buffered_while(lambda *f: el.BoundedWhileLoop(*f, max_steps=LENGTH, base=2)),
        buffered_while_reference,
    ),
    "spill": (
        lambda w, h, xs: el.Scan(
            step(w), schedule=el.Spill(el.Recursive(2), tempfile.mkdtemp())
        )(h, xs),
        reference,
    ),
    "associative": (associative, associative_reference),
}


def of_batch(loop: Callable[..., Any]) -> Callable[..., Any]:
    """The loop of a batch, each example of which has a loop of its own."""
    return jax.vmap(loop, (None, 0, 0))


def as_carry(loop: Callable[..., Any]) -> Callable[..., Any]:
    """One loop, whose carry is the batch."""
    return lambda w, h, xs: loop(w[None], h, jnp.moveaxis(xs, 1, 0))


def loss(loop: Callable[..., Any]) -> Callable[..., Any]:
    def of_inputs(*args: Any) -> Any:
        return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(loop(*args)))

    return of_inputs


def gradients(f: Callable[..., Any]) -> Callable[..., Any]:
    return jax.grad(loss(f), (0, 1, 2))


def of_last(f: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient of what the last carry alone makes."""
    return jax.grad(loss(lambda *args: jax.tree.leaves(f(*args))[0]), (0, 1, 2))


def tangents(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: jax.jvp(f, args, args)


def hessian(f: Callable[..., Any]) -> Callable[..., Any]:
    return jax.hessian(loss(f))


def products(f: Callable[..., Any]) -> Callable[..., Any]:
    """Reverse over reverse mode, for all inputs."""
    squares = lambda *args: sum(jnp.sum(g**2) for g in gradients(f)(*args))
    return jax.grad(squares, (0, 1, 2))


MODES = {
    "value": lambda wrap, loop: wrap(loop),
    "gradient": lambda wrap, loop: gradients(wrap(loop)),
    "of_last": lambda wrap, loop: of_last(wrap(loop)),
    "jvp": lambda wrap, loop: tangents(wrap(loop)),
    "hessian": lambda wrap, loop: hessian(wrap(loop)),
    "products": lambda wrap, loop: products(wrap(loop)),
    "of_each": lambda wrap, loop: wrap(gradients(loop)),
}


def check(
    loop: str,
    mode: str,
    wrap: Callable[..., Any],
    split: str,
    is_set: bool = True,
) -> None:
    """The numbers are those without a mesh, split as JAX splits its own loop."""
    ours, theirs = (jax.jit(MODES[mode](wrap, f)) for f in LOOPS[loop])
    args = placed(split)
    with jax.set_mesh(mesh()):
        expected = theirs(*args)
    with jax.set_mesh(mesh()) if is_set else contextlib.nullcontext():
        found = ours(*args)
    pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True))
    assert pairs
    for x, y in pairs:
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-5)
        assert jax.typeof(x) == jax.typeof(y)
    without = theirs(*arrays())
    assert_close(found, without, rtol=2e-5)


WRAPS = {
    "batch": (of_batch, "batch"),
    "batch_of_split": (of_batch, "all"),
    "carry": (as_carry, "all"),
    "width": (as_carry, "width"),
    "xs": (as_carry, "xs"),
}


# JAX does not batch loops whose examples stop apart on the way back as well.
NOT_OF_EACH = {"bounded_while", "checkpointed_while", "buffer_while", "buffer_bounded"}

QUICK = {
    ("recursive", "batch", "gradient"),
    ("together", "batch_of_split", "gradient"),
    ("checkpointed_while", "batch_of_split", "value"),
    ("chunked_vmap", "carry", "gradient"),
}


# What takes long to trace is tried for one loop of each kind.
WITH_HESSIAN = {"binomial", "chunked_vmap", "recursive", "reversible", "scan_while"}


def is_tried(loop: str, wrap: str, mode: str) -> bool:
    if loop == "clip" and mode in ("jvp", "hessian"):
        return False  # it has no forward mode
    if wrap not in ("batch_of_split", "carry"):
        return mode == "gradient"
    if mode == "of_each":
        return wrap != "carry" and loop not in NOT_OF_EACH
    return mode != "hessian" or loop in WITH_HESSIAN


def cases() -> list[Any]:
    found = [c for c in itertools.product(LOOPS, WRAPS, MODES) if is_tried(*c)]
    return [case if case in QUICK else slow(*case) for case in found]


@pytest.mark.parametrize(("loop", "wrap", "mode"), cases())
def test_numbers_and_shardings_are_those_of_jax(loop, wrap, mode):
    check(loop, mode, *WRAPS[wrap])


# JAX's own loop needs the mesh to be set for some of these.
UNSET = [
    ("recursive", "batch_of_split", "of_each"),
    ("recursive", "carry", "gradient"),
    slow("binomial", "batch", "products"),
    slow("together", "width", "gradient"),
    slow("chunked_vmap", "carry", "gradient"),
    slow("scan_while", "batch_of_split", "gradient"),
    slow("checkpointed_while", "batch_of_split", "value"),
    slow("layers", "carry", "gradient"),
    slow("reversible", "carry", "gradient"),
]


@pytest.mark.parametrize(("loop", "wrap", "mode"), UNSET)
def test_the_mesh_need_not_be_set(loop, wrap, mode):
    check(loop, mode, *WRAPS[wrap], is_set=False)


def test_an_axis_that_is_looped_over_is_not_split():
    with jax.set_mesh(mesh()):
        xs = placed("batch")[2]
        x = {"x": xs[:, 0]}
        for scan in (el.CheckpointedScan, el.Scan):
            with pytest.raises(ValueError, match=r"xs\['x'\]: .*8@batch.*axis 0"):
                scan(lambda h, x: (h + jnp.sum(x["x"]), None))(jnp.zeros(()), x)
        # JAX refuses it, too, though not by name.
        with pytest.raises(ValueError, match="replicated"):
            lax.scan(lambda h, x: (h + jnp.sum(x), None), jnp.zeros(()), xs[:, 0])


def test_chunks_of_rows_that_are_split():
    f = lambda x: jnp.sin(x) * 2
    with jax.set_mesh(mesh()):
        rows = placed("batch")[2]
        mapped = jax.jit(lambda rows: el.ChunkedVmap(f, 4)(rows))
        total = lambda rows: jnp.sum(mapped(rows) ** 2)
        out, ct = mapped(rows), jax.grad(total)(rows)
        # Ten chunks of six have no row for each of four devices; fifteen of four do.
        many = jax.device_put(jnp.arange(60.0), NamedSharding(mesh(), P("batch")))
        in_fours = jax.jit(el.ChunkedVmap(f, 8))(many)
        with pytest.raises(ValueError, match="each chunk, which has 2 rows"):
            el.ChunkedVmap(f, 3)(rows)
    assert jax.typeof(out) == jax.typeof(ct) == jax.typeof(rows)
    np.testing.assert_allclose(out, f(arrays()[2]), rtol=1e-6)
    np.testing.assert_allclose(in_fours, f(np.arange(60.0)), rtol=1e-5)
    expected = jax.grad(lambda rows: jnp.sum(f(rows) ** 2))(arrays()[2])
    np.testing.assert_allclose(ct, expected, rtol=1e-5)


def test_rows_that_every_device_has():
    f = lambda x: jnp.sin(x) * 2
    rows = arrays()[2]
    expected = jax.vjp(f, rows)
    with jax.set_mesh(mesh()):
        for mapped in (el.ChunkedVmap(f, 3), el.Map(f)):
            out, pull = jax.vjp(jax.jit(mapped), rows)
            np.testing.assert_allclose(out, expected[0], rtol=1e-6)
            np.testing.assert_allclose(
                pull(jnp.ones(out.shape))[0], expected[1](jnp.ones(out.shape))[0]
            )
        # Either all of them are split, or none.
        both = el.ChunkedVmap(lambda x, y: f(x) * y, 4)
        split = placed("batch")[2]
        for args in ((rows, split), (split, rows)):
            with pytest.raises(ValueError, match="must all be split in the same way"):
                both(*args)


def test_a_carry_that_starts_on_every_device_is_split():
    f = lambda h, x: (h + x, None)
    with jax.set_mesh(mesh()):
        xs = jnp.moveaxis(placed("batch")[2], 1, 0)
        last, _ = el.CheckpointedScan(f)(jnp.zeros((BATCH, WIDTH), "f4"), xs)
    assert jax.typeof(last).sharding.spec == P("batch", None)
    np.testing.assert_allclose(last, arrays()[2].sum(1), rtol=1e-5)


def test_a_carry_that_is_split_otherwise_is_refused():
    f = lambda h: jax.sharding.reshard(h, P(None, "width"))
    with jax.set_mesh(mesh()):
        _, h, _ = placed("batch")
        with pytest.raises(TypeError, match=r"carry: f.*8@batch,4.*8,4@width"):
            el.CheckpointedScan(lambda h, _: (f(h), None))(h, length=3)


@pytest.mark.slow
def test_while_loops_that_are_reversed_apart_are_refused():
    loop, _ = LOOPS["checkpointed_while"]
    with jax.set_mesh(mesh()):
        args = placed("batch")
        with pytest.raises(ValueError, match="Take the gradient of the batch instead"):
            of_batch(gradients(loop))(*args)
        rows = el.ParallelMap(
            gradients(loop), mesh=mesh(), axis_name="batch", in_axes=(None, 0, 0)
        )
        found = rows(*args)
    expected = jax.jit(of_batch(gradients(loop)))(*arrays())
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-5)


def automatic(p: Any) -> Callable[..., Any]:
    """A function that closes over an array, and whose axes are automatic."""
    return jax.sharding.auto_axes(lambda x: jnp.sin(p * x), out_sharding=P())


def automatic_scan(schedule: Any) -> Callable[..., Any]:
    def loop(f: Callable[..., Any], x: Any) -> Any:
        def step(carry: Any, _: Any) -> Any:
            carry = f(carry)
            return carry, jnp.cos(carry)

        return el.Scan(step, schedule=schedule)(x, length=6)

    return loop


def six_steps(f: Callable[..., Any], x: Any) -> Any:
    ys = list[Any]()
    for _ in range(6):
        x = f(x)
        ys.append(jnp.cos(x))
    return x, jnp.stack(ys)


def automatic_while(make: Callable[..., Any]) -> Callable[..., Any]:
    def loop(f: Callable[..., Any], x: Any) -> Any:
        body = lambda carry: (carry[0] + 1, f(carry[1]))
        return make(lambda carry: carry[0] < 6, body)((0, x))[1]

    return loop


def automatic_scan_while(f: Callable[..., Any], x: Any) -> Any:
    step = lambda carry, _: ((carry[0] + 1, f(carry[1])), None)
    loop = el.ScanWhile(
        lambda carry: carry[0] < 6, step, max_steps=8, schedule=el.Recursive(2)
    )
    return loop((0, x))[0][1]


NUMBERS = np.linspace(0.1, 0.9, 6, dtype="f4")


def automatic_map(make: Callable[..., Any]) -> Callable[..., Any]:
    return lambda f, x: make(lambda y: f(x * y))(jnp.asarray(NUMBERS))


def six_rows(f: Callable[..., Any], x: Any) -> Any:
    return jnp.stack([f(x * y) for y in NUMBERS])


SCHEDULES = {
    "store_all": el.StoreAll(),
    "recursive": el.Recursive(2),
    "together": el.Recursive(2, batch=2),
    "chunked": el.Chunked(3),
    "chunked_together": el.Chunked(3, batch=3),
    "binomial": el.Binomial(2),
    "budget": el.Budget("1MiB", measure=False),
    "cast": el.Cast(el.Recursive(2), jnp.float32),
    "offload": el.Offload(el.Recursive(2)),
}
last_of_six = lambda f, x: six_steps(f, x)[0]
AUTOMATIC = {
    **{name: (automatic_scan(s), six_steps) for name, s in SCHEDULES.items()},
    "scan_while": (automatic_scan_while, last_of_six),
    "bounded_while": (
        automatic_while(lambda *f: el.BoundedWhileLoop(*f, max_steps=8, base=2)),
        last_of_six,
    ),
    "checkpointed_while": (
        automatic_while(lambda *f: el.CheckpointedWhileLoop(*f, checkpoints=2)),
        last_of_six,
    ),
    "map": (automatic_map(lambda f: el.ChunkedVmap(f, 2)), six_rows),
    "uneven_map": (automatic_map(lambda f: el.ChunkedVmap(f, 4)), six_rows),
    "sum": (
        automatic_map(lambda f: el.ChunkedVmap(f, 2, reduce="sum")),
        lambda f, x: jnp.sum(six_rows(f, x)),
    ),
    "for": (automatic_map(lambda f: el.CheckpointedForLoop(f, 2)), six_rows),
}
AUTOMATIC_MODES = {
    "gradient": lambda f: jax.grad(f, (0, 1)),
    "jvp": lambda f: lambda *args: jax.jvp(f, args, args),
    "hessian": lambda f: jax.hessian(f, (0, 1)),
    "batch": lambda f: jax.vmap(jax.grad(f, (0, 1)), (None, 0)),
}


def automatic_cases() -> list[Any]:
    quick = {("together", "gradient"), ("map", "gradient"), ("binomial", "hessian")}
    quick.add(("checkpointed_while", "gradient"))
    cases = itertools.product(AUTOMATIC, AUTOMATIC_MODES)
    return [case if case in quick else slow(*case) for case in cases]


@pytest.mark.parametrize(("loop", "mode"), automatic_cases())
def test_what_a_function_with_automatic_axes_closes_over(loop, mode):
    """JAX adds its cotangent, which has the automatic mesh in its type, to no other."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))

    def of_inputs(run: Callable[..., Any], make: Callable[..., Any]) -> Any:
        ends = lambda p, x: jax.tree.leaves(run(make(p), x))
        total = lambda *args: sum(jnp.sum(jnp.sin(leaf)) for leaf in ends(*args))
        return jax.jit(AUTOMATIC_MODES[mode](total))

    ours, by_hand = AUTOMATIC[loop]
    xs = np.array([0.7, 0.4, 1.3], "f4")
    args = np.float32(1.1), xs if mode == "batch" else xs[0]
    with jax.set_mesh(mesh):
        actual = of_inputs(ours, automatic)(*args)
    expected = of_inputs(by_hand, lambda p: lambda x: jnp.sin(p * x))(*args)
    assert_close(actual, expected)
