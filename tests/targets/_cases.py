"""What is compiled: gradients of loops and maps, in groups.

A group is made for loops of a number of steps, which is no size of anything else, so
that an array with so many rows has one for each step. Arrays are types: none is made.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

import eqloop as el
from eqloop._device import PlannedDevice, planning_device
from eqloop._programs import lowered

from ..benchmarks import _problems as problems
from ..fits import _functions as fits


@dataclasses.dataclass(frozen=True)
class Case:
    """Something to compile.

    Attributes:
        name: What it is.
        function: A function of arrays.
        args: The types of the arrays.
        steps: How many steps its loop has.
        is_planned: Whether it is the gradient of planned loops alone, so that their
            plans say what it takes.
        is_static: Whether all numbers of trips are known.
        rows: How many rows arrays have of which a loop should write only parts.
        plain: The same in plain JAX, if it can be said so.
        make: Makes the arrays, if any others would not do.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    steps: int | None = None
    is_planned: bool = False
    is_static: bool = True
    rows: tuple[int, ...] = ()
    plain: Callable[..., Any] | None = None
    make: Callable[[], Any] | None = None


# The steps of the benchmarks: a cell, the initial carry and `xs` of a number of steps.
STEPS: Mapping[str, Callable[[int], Any]] = {
    "recurrent": problems.recurrent,
    "gru": lambda length: problems.gru(length, 128),
    "lstm, 8 at once": lambda length: problems.lstm(length, 96, 8),
    "tanh": lambda length: problems.tanh_rnn(length, 128),
    "wave": lambda length: problems.wave(length, 40),
    "lorenz": lambda length: problems.lorenz(10 * length),
    "pendulum": problems.pendulum,
    "relaxation": lambda length: problems.relaxation(length, 48),
    "convolutions": lambda length: problems.convolutions(length, 12, 6),
    "attention": lambda length: problems.attention(length, 24, 48),
}


# Some of them at sizes that keep a GPU busy.
LARGE_STEPS: Mapping[str, Callable[[int], Any]] = {
    "256 LSTMs of width 512": lambda length: problems.lstm(length, 512, 256),
    "wave, 512 x 512": lambda length: problems.wave(length, 512),
    "convolutions, 64 x 64 x 32": lambda length: problems.convolutions(length, 64, 32),
    "attention, 512 tokens": lambda length: problems.attention(length, 512, 256),
}


def schedules(length: int) -> Mapping[str, Any]:
    """One or several of each kind."""
    root = round(length**0.5)
    low = jnp.bfloat16
    return {
        "StoreAll": el.StoreAll(),
        "Recursive(16)": el.Recursive(16),
        "Recursive(8, batch=1)": el.Recursive(8, batch=1),
        "Chunked(1, batch=32)": el.Chunked(1, batch=32),
        "Chunked(root)": el.Chunked(root),
        "Chunked(root, batch=16)": el.Chunked(root, batch=16),
        "Binomial(24)": el.Binomial(24),
        "Binomial(9, block=8)": el.Binomial(9, block=8),
        "Cast(Chunked(1))": el.Cast(el.Chunked(1), low),
        "Offload(Chunked(1))": el.Offload(el.Chunked(1)),
        "Offload(Recursive(16))": el.Offload(el.Recursive(16)),
        "Offload(Binomial(24))": el.Offload(el.Binomial(24)),
        "Offload(Cast(Chunked(1)))": el.Offload(el.Cast(el.Chunked(1), low)),
    }


def _is_static(schedule: str, length: int) -> bool:
    """Whether all loops of a gradient have numbers of trips that are known."""
    # On the host, only segments of equal length are told from others.
    is_even = "Offload" not in schedule or length % 10 == 0
    return "Binomial" not in schedule and is_even


def _sum(tree: Any) -> jax.Array:
    return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree))


def _is_type(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _of_arrays(f: Callable[..., Any], *args: Any) -> tuple[Callable[..., Any], Any]:
    """A function of the arrays among its arguments, and their types."""
    types, others = eqx.partition(args, _is_type)
    return lambda *arrays: f(*eqx.combine(arrays, others)), types


def _scan(schedule: Any, **settings: Any) -> Callable[..., Any]:
    return lambda cell, init, xs: el.Scan(cell, schedule=schedule, **settings)(init, xs)


@dataclasses.dataclass(frozen=True)
class Problem:
    """A step, the initial carry and `xs`, of which the arrays are types."""

    name: str
    types: Any
    make: Callable[[], Any]

    @property
    def length(self) -> int:
        return self.types[2].shape[0]


def problems_of(
    length: int, steps: Mapping[str, Callable[[int], Any]] = STEPS
) -> Iterator[Problem]:
    for name, make in steps.items():
        made = functools.partial(make, length)
        yield Problem(name, eqx.filter_eval_shape(made), made)


def _plain(cell: Any, init: Any, xs: Any) -> Any:
    return lax.scan(lambda c, x: cell(c, x), init, xs)


def _checkpointed(cell: Any, init: Any, xs: Any) -> Any:
    return lax.scan(jax.checkpoint(lambda c, x: cell(c, x)), init, xs)


def _by_hand(cell: Any, init: Any, xs: Any) -> Any:
    """A loop in a loop, of about equal lengths."""
    root = math.isqrt(xs.shape[0])
    while xs.shape[0] % root:
        root -= 1
    segment = lambda c, xs: lax.scan(lambda c, x: cell(c, x), c, xs)
    segments = xs.reshape(root, -1, *xs.shape[1:])
    return lax.scan(jax.checkpoint(segment), init, segments)


def _gradient(
    run: Callable[..., Any], problem: Problem, name: str, **about: Any
) -> Case:
    """The gradient of a loss in all inputs."""
    of = lambda run: _of_arrays(lambda *args: _sum(run(*args)), *problem.types)
    gradient = lambda loss: jax.grad(loss, (0, 1, 2))
    return Case(
        f"{problem.name}: {name}",
        gradient(of(run)[0]),
        of(run)[1],
        steps=problem.length,
        plain=gradient(of(_plain)[0]),
        make=lambda: eqx.partition(problem.make(), eqx.is_array)[0],
        **about,
    )


def _scheduled(problem: Problem, name: str, schedule: Any) -> Case:
    n = problem.length
    return _gradient(
        _scan(schedule),
        problem,
        name,
        is_planned=True,
        is_static=_is_static(name, n),
        rows=(n, n + 1),
    )


def steps(length: int) -> Iterator[Case]:
    """Every schedule of a gradient, for every step."""
    for problem in problems_of(length):
        yield _gradient(_plain, problem, "lax.scan")
        for name, schedule in schedules(problem.length).items():
            yield _scheduled(problem, name, schedule)


def large(length: int) -> Iterator[Case]:
    """What people use instead, schedules and budgets, of steps that take long."""
    root = round(length**0.5)
    others = {
        "lax.scan": _plain,
        "jax.checkpoint on the step": _checkpointed,
        "nested by hand": _by_hand,
    }
    for problem in problems_of(length, LARGE_STEPS):
        for name, run in others.items():
            yield _gradient(run, problem, name)
        for name, schedule in {
            "Recursive(16)": el.Recursive(16),
            "Chunked(root)": el.Chunked(root),
            "Chunked(1)": el.Chunked(1),
            "Chunked(1, batch=8)": el.Chunked(1, batch=8),
            "Offload(Chunked(1))": el.Offload(el.Chunked(1)),
            "Offload(Chunked(root))": el.Offload(el.Chunked(root)),
        }.items():
            yield _scheduled(problem, name, schedule)
        for share in (0.1, 0.3, 0.6):
            yield _within(share, problem)


def _with_output(cell: Callable[..., Any]) -> Callable[..., Any]:
    def step(carry: Any, x: Any) -> Any:
        carry, _ = cell(carry, x)
        return carry, jax.tree.leaves(carry)[0] * 2

    return step


def ways(length: int) -> Iterator[Case]:
    """Every schedule in other modes and under `vmap`, for a few steps."""
    every = {problem.name: problem.types for problem in problems_of(length)}
    for step in ("tanh", "lstm, 8 at once", "wave"):
        for name, schedule in schedules(length).items():
            static = _is_static(name, length)
            for case in _ways_of(every[step], schedule, is_all=step == "tanh"):
                yield dataclasses.replace(
                    case,
                    name=f"{step}: {name}, {case.name}",
                    steps=length,
                    is_static=static,
                    rows=(length, length + 1),
                )


def _ways_of(problem: Any, schedule: Any, is_all: bool) -> Iterator[Case]:
    cell, init, xs = problem
    batch = lambda axis: (
        lambda x: jax.ShapeDtypeStruct((*x.shape[:axis], 3, *x.shape[axis:]), x.dtype)
    )
    inits = jax.tree.map(batch(0), init)

    def of(name: str, run: Any, transform: Any, *args: Any) -> Case:
        loss, types = _of_arrays(lambda *args: _sum(run(*args)), *args)
        return Case(name, transform(loss), types)

    run, over = _scan(schedule), (None, 0, None)
    grad = lambda loss: jax.grad(loss, (0, 1, 2))
    each = lambda axes: lambda loss: jax.vmap(grad(loss), axes)
    all_of = lambda loss: grad(lambda *args: jnp.sum(jax.vmap(loss, over)(*args)))
    yield of("vmap of grad", run, each(over), cell, inits, xs)
    yield of("grad of vmap", run, all_of, cell, inits, xs)
    if not is_all:
        return
    pushed = lambda loss: lambda *args: jax.jvp(grad(loss), args, args)[1]
    outputs = lambda cell, *args: run(_with_output(cell), *args)
    xs_too = jax.tree.map(batch(0), xs)
    yield of("vmap of grad with xs", run, each((None, 0, 0)), cell, inits, xs_too)
    yield of("Hessian times vector", run, pushed, cell, init, xs)
    yield of("in reverse", _scan(schedule, reverse=True), grad, cell, init, xs)
    yield of("with outputs", outputs, grad, cell, init, xs)


def loops(length: int) -> Iterator[Case]:
    """The other loops, maps and policies."""
    type_of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    w, init, xs = type_of(128, 128), type_of(128), type_of(length, 128)
    rows = (length, length + 1)
    step = lambda w: lambda h, x: (jnp.tanh(w @ h + x), None)

    def of(name: str, f: Callable[..., Any], *args: Any, **about: Any) -> Case:
        numbers = tuple(range(len(args)))
        loss = lambda *args: _sum(f(*args))
        return Case(name, jax.grad(loss, numbers), args, rows=rows, **about)

    known = dict(steps=length)
    open_ = dict(steps=length, is_static=False)
    yield of(
        "CheckpointedScan",
        lambda w, h, xs: el.CheckpointedScan(step(w))(h, xs),
        w,
        init,
        xs,
        **known,
    )
    yield of(
        "ForLoop",
        lambda w, xs: el.ForLoop(lambda x: jnp.tanh(w @ x))(xs),
        w,
        xs,
        **known,
    )
    yield of(
        "CheckpointedForLoop",
        lambda w, xs: el.CheckpointedForLoop(lambda x: jnp.tanh(w @ x))(xs),
        w,
        xs,
        **known,
    )
    for kind in ("last", "every tenth"):
        cut = dict(start=-1) if kind == "last" else dict(step=10)
        yield of(
            f"SlicedScan, {kind}",
            lambda w, h, xs, cut=cut: el.SlicedScan(
                lambda h, x: (jnp.tanh(w @ h + x), h), **cut
            )(h, xs),
            w,
            init,
            xs,
            **open_,
        )
        yield of(
            f"SlicedScan, {kind}, Recursive",
            lambda w, h, xs, cut=cut: el.SlicedScan(
                lambda h, x: (jnp.tanh(w @ h + x), h), schedule=el.Recursive(), **cut
            )(h, xs),
            w,
            init,
            xs,
            **open_,
        )
    yield of("Map", lambda w, xs: el.Map(lambda x: jnp.tanh(w @ x))(xs), w, xs)
    yield of(
        "Map, batches",
        lambda w, xs: el.Map(lambda x: jnp.tanh(w @ x), batch_size=50)(xs),
        w,
        xs,
    )
    yield of(
        "ChunkedVmap",
        lambda w, xs: el.ChunkedVmap(lambda x: jnp.tanh(w @ jnp.tanh(w @ x)), 50)(xs),
        w,
        xs,
    )
    yield of(
        "ChunkedVmap, sum",
        lambda w, xs: el.ChunkedVmap(
            lambda x: jnp.tanh(w @ jnp.tanh(w @ x)), 50, reduce="sum"
        )(xs),
        w,
        xs,
    )
    yield of(
        "ChunkedVmap, Budget",
        lambda w, xs: el.ChunkedVmap(
            lambda x: jnp.tanh(w @ jnp.tanh(w @ x)), el.Budget("2MiB", measure=False)
        )(xs),
        w,
        xs,
    )
    yield of(
        "AssociativeScan",
        lambda xs: el.AssociativeScan(lambda a, b: jnp.tanh(a) * b + a)(xs),
        xs,
    )
    yield of(
        "AssociativeScan, chunks",
        lambda xs: el.AssociativeScan(lambda a, b: jnp.tanh(a) * b + a, chunk_size=50)(
            xs
        ),
        xs,
    )
    going = lambda c: jnp.sum(c[1] ** 2) < 1e6
    body = lambda w: lambda c: (c[0] + 1, jnp.tanh(w @ c[1]))
    yield of(
        "BoundedWhileLoop",
        lambda w, h: el.BoundedWhileLoop(going, body(w), max_steps=length)((0, h))[1],
        w,
        init,
        **open_,
    )
    yield of(
        "CheckpointedWhileLoop",
        lambda w, h: el.CheckpointedWhileLoop(going, body(w), checkpoints=20)((0, h))[
            1
        ],
        w,
        init,
        **open_,
    )
    yield of(
        "CheckpointedWhileLoop, max_steps",
        lambda w, h: el.CheckpointedWhileLoop(going, body(w), max_steps=length)((0, h))[
            1
        ],
        w,
        init,
        **open_,
    )
    for name, s in {
        "": None,
        ", Recursive": el.Recursive(),
        ", Binomial": el.Binomial(9),
        ", Offload": el.Offload(el.Chunked(10)),
    }.items():
        yield of(
            f"ScanWhile{name}",
            lambda w, h, xs, s=s: el.ScanWhile(
                lambda c: jnp.sum(c**2) < 1e6, step(w), max_steps=length, schedule=s
            )(h, xs)[0],
            w,
            init,
            xs,
            **open_,
        )
    inits = type_of(3, 128)
    yield of(
        "vmap of BoundedWhileLoop",
        lambda w, h: jax.vmap(
            lambda h: el.BoundedWhileLoop(going, body(w), max_steps=length)((0, h))[1]
        )(h),
        w,
        inits,
        **open_,
    )
    yield of(
        "vmap of CheckpointedWhileLoop",
        lambda w, h: jax.vmap(
            lambda h: el.CheckpointedWhileLoop(going, body(w), checkpoints=20)((0, h))[
                1
            ]
        )(h),
        w,
        inits,
        **open_,
    )

    def leapfrog(c: Any, x: Any) -> Any:
        q, p = c
        p = p - 0.1 * jnp.sin(q) + x
        return (q + 0.1 * p, p), None

    def back(c: Any, x: Any) -> Any:
        q, p = c
        q = q - 0.1 * p
        return q, p + 0.1 * jnp.sin(q) - x

    # JAX compiles no callback for a GPU that is not here, so nothing is checked.
    reversible = functools.partial(el.Reversible, back, check=False)
    for name, s in {
        "Reversible": reversible(),
        "Reversible, checkpoints": reversible(checkpoints=10),
    }.items():
        yield of(
            name,
            lambda h, p, xs, s=s: el.Scan(leapfrog, schedule=s)((h, p), xs)[0],
            init,
            init,
            xs,
            **known,
        )

    def deep(w: Any, h: Any, x: Any) -> Any:
        a = el.policies.name(jnp.tanh(w @ h), "a")
        b = el.policies.name(jnp.tanh(w @ a + x), "b")
        return jnp.tanh(w @ b), None

    policies = {
        "save_dots": el.policies.save_dots,
        "save_names": el.policies.save_names("a"),
        "offload_names": el.policies.offload_names("a"),
        "offload_names and save": el.policies.either(
            el.policies.offload_names("a"), el.policies.save_names("b")
        ),
    }
    for name, policy in policies.items():
        for shown, s in {
            "StoreAll": el.StoreAll(),
            "Chunked(25)": el.Chunked(25),
            "Recursive": el.Recursive(),
        }.items():
            yield of(
                f"{name}, {shown}",
                lambda w, h, xs, s=s, p=policy: el.Scan(
                    lambda h, x: deep(w, h, x), schedule=s, policy=p
                )(h, xs)[0],
                w,
                init,
                xs,
                **known,
            )
        yield of(
            f"{name}, Remat",
            lambda w, h, x, p=policy: el.Remat(lambda h: deep(w, h, x)[0], policy=p)(h),
            w,
            init,
            init,
        )
    layers, narrow = type_of(24, 128, 128), type_of(32, 128)
    for name, s in {
        "": None,
        ", Recursive": el.Recursive(4),
        ", Chunked": el.Chunked(4),
        ", Offload": el.Offload(el.Chunked(1)),
    }.items():
        yield of(
            f"StackedLayers{name}",
            lambda ws, h, s=s: el.StackedLayers(_Layer(ws), schedule=s)(h),
            layers,
            narrow,
            steps=24,
        )
    yield of(
        "Remat of Scan",
        lambda w, h, xs: el.Remat(
            lambda w, h, xs: el.Scan(step(w), schedule=el.Chunked(30))(h, xs)[0]
        )(w, h, xs),
        w,
        init,
        xs,
        **known,
    )
    yield of(
        "Truncate",
        lambda w, h, xs: el.Scan(
            step(w), schedule=el.Recursive(), backward=el.Truncate(50)
        )(h, xs)[0],
        w,
        init,
        xs,
        **known,
    )
    yield of(
        "ClipCotangent",
        lambda w, h, xs: el.Scan(
            step(w), schedule=el.Recursive(), backward=el.ClipCotangent(1.0)
        )(h, xs)[0],
        w,
        init,
        xs,
        **known,
    )

    def rows_of(c: Any, x: Any) -> Any:
        i, buffer, h = c
        h = jnp.tanh(h + x)
        return (i + 1, buffer.at[i].set(h), h), None

    for name, s in {
        "Recursive": el.Recursive(),
        "Chunked(30)": el.Chunked(30),
        "Binomial": el.Binomial(20),
        "Offload": el.Offload(el.Chunked(25)),
    }.items():
        yield of(
            f"rows in the carry, {name}",
            lambda h, xs, s=s: el.Scan(rows_of, schedule=s)(
                (0, jnp.zeros((length, 128)), h), xs
            )[0][1:],
            init,
            xs,
            steps=length,
            is_static=name != "Binomial",
        )


class _Layer(eqx.Module):
    weight: jax.Array

    def __call__(self, h: jax.Array) -> jax.Array:
        return h + jnp.tanh(h @ self.weight)


def _within(share: float, problem: Problem) -> Case:
    """A budget of a share of what storing everything takes."""

    def run(cell: Any, init: Any, xs: Any) -> Any:
        full = el.Scan(cell, schedule=el.StoreAll()).plan(init, xs).peak_bytes
        return _scan(el.Budget(int(share * full), measure=False))(cell, init, xs)

    n = problem.length
    name = f"{share} of everything"
    about: Any = dict(is_planned=True, is_static=False, rows=(n, n + 1))
    return _gradient(run, problem, name, **about)


def budgets(length: int) -> Iterator[Case]:
    """Budgets of some share of what storing everything takes."""
    for problem in problems_of(length):
        for share in (0.02, 0.1, 0.3, 0.6, 0.9):
            yield _within(share, problem)


def functions(length: int) -> Iterator[Case]:
    """Whole functions, in shares of what their plain gradients take."""
    for name in fits.NAMES:
        make = functools.partial(fits.function, name, length / 1000)
        made = make()
        types = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), made.args
        )
        plain = jax.value_and_grad(made.plain)
        # How much that is, the compiler of the device says.
        taken = functools.cache(lambda device, f=plain, of=types: _taken(device, f, of))

        def fitted(share: float, made: Any = made, taken: Any = taken) -> Any:
            def loss(*args: Any) -> jax.Array:
                nbytes = int(share * taken(planning_device()))
                return el.Fit(made.plain, nbytes)(*args)

            return jax.value_and_grad(loss)

        for shown, gradient in {
            "lax.scan": plain,
            "jax.checkpoint on each part": jax.value_and_grad(made.by_parts),
            "0.3 of everything": fitted(0.3),
            "0.6 of everything": fitted(0.6),
            "0.9 of everything": fitted(0.9),
        }.items():
            yield Case(
                f"{name}: {shown}",
                gradient,
                types,
                plain=plain,
                make=lambda make=make: make().args,
                is_static=False,
            )


def _taken(device: PlannedDevice, f: Callable[..., Any], types: Any) -> int:
    """What a program takes on the device that plans are for, by which it is known."""
    assert device == planning_device()
    memory = lowered(f, *types).compile().memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


GROUPS: Mapping[str, Callable[[int], Iterator[Case]]] = {
    "steps": steps,
    "ways": ways,
    "loops": loops,
    "budgets": budgets,
    "large": large,
    "functions": functions,
}
