"""Loops of known length: the carry and the outputs are those that the step returns."""

from typing import Any, NamedTuple, assert_type

import equinox as eqx
import jax
from jax import Array
from jaxtyping import Float

import eqloop as el


def step(
    h: Float[Array, " n"], x: Float[Array, " n"]
) -> tuple[Array, Float[Array, ""]]:
    return h + x, x.sum()


class Particle(NamedTuple):
    x: Array
    v: Array


class Store(eqx.Module):
    level: Array

    def fill(self, by: Array) -> "Store":
        return Store(self.level + by)


def move(particle: Particle, force: Array, *, key: Array) -> tuple[Particle, None]:
    return Particle(particle.x + particle.v, particle.v + force), None


def fill(store: Store, by: Array) -> tuple[Store, Array]:
    return store.fill(by), store.level


class Cell(eqx.Module):
    rate: Array

    def __call__(self, h: Array, x: Array) -> tuple[Array, dict[str, Array]]:
        return self.rate * h + x, {"h": h}


def of_a_step(init: Array, xs: Array) -> None:
    """An editor shows `carry: Array` and `ys: Array` for what the call returns."""
    carry, ys = el.CheckpointedScan(step)(init, xs)
    assert_type(carry, Array)
    assert_type(ys, Array)
    assert_type(el.Scan(step), el.Scan[Array, Array])
    assert_type(el.SlicedScan(step, start=1, step=10), el.SlicedScan[Array, Array])
    assert_type(el.Scan(step)(0.0, xs, length=3), tuple[Array, Array])


def of_other_carries(xs: Array, key: Array) -> None:
    """A carry of several arrays keeps its class; no outputs are `None`."""
    particle, ys = el.Scan(move)(Particle(xs, xs), xs, key=key)
    assert_type(particle, Particle)
    assert_type(ys, None)
    assert_type(el.Scan(fill)(Store(xs), xs), tuple[Store, Array])
    assert_type(el.Scan(Cell(xs))(xs, xs), tuple[Array, dict[str, Array]])
    assert_type(el.Scan(lambda h, x: (h + x, None)), el.Scan[Any, None])


def with_settings(init: Array, xs: Array) -> None:
    """Settings change nothing; those that are converted take what is converted."""
    scan = el.CheckpointedScan(
        step,
        4,
        schedule=el.Offload(el.Binomial(8)),
        policy="save_dots",
        in_axes=1,
        out_axes=(0, None),
        f_axes=None,
        f_transform=lambda f: f,
        reverse=True,
        unroll=True,
        split_keys=False,
        progress=True,
    )
    assert_type(scan, el.CheckpointedScan[Array, Array])
    assert_type(scan.base, int)
    assert_type(el.Scan(step, progress=100).progress, el.ProgressBar | None)
    assert_type(scan.plan(init, xs), el.Plan)
    assert_type(scan.plan(jax.ShapeDtypeStruct((3,), "float32"), xs).length, int)


@el.CheckpointedScan
def orbit(x: Array, r: Array) -> tuple[Array, Array]:
    return r * x * (1 - x), x


@el.CheckpointedScan(base=4)
def long_orbit(x: Array, r: Array) -> tuple[Array, Array]:
    return r * x * (1 - x), x


@el.SlicedScan(step=10, schedule=el.Budget("1MiB"))
def thin_orbit(x: Array, r: Array) -> tuple[Array, Array]:
    return r * x * (1 - x), x


@el.ForLoop(reverse=True)
def norms(x: Array, y: Array) -> dict[str, Array]:
    return {"x": x.sum(), "y": y.sum()}


def as_decorators(x: Array) -> None:
    """A decorated step is the transform, whether there are settings or not."""
    assert_type(orbit, el.CheckpointedScan[Array, Array])
    assert_type(long_orbit, el.CheckpointedScan[Array, Array])
    assert_type(thin_orbit, el.SlicedScan[Array, Array])
    assert_type(norms, el.ForLoop[dict[str, Array]])
    assert_type(long_orbit(x, x), tuple[Array, Array])
    assert_type(norms(x, x, length=3), dict[str, Array])
    assert_type(el.CheckpointedForLoop(norms.f, 4)(x, x), dict[str, Array])


class Model(eqx.Module):
    rate: Array

    @el.Scan
    def run(self, h: Particle, x: Array) -> tuple[Particle, Array]:
        return Particle(self.rate * h.x, h.v), x

    @el.CheckpointedScan(base=4)
    def run_long(self, h: Particle, x: Array) -> tuple[Particle, Array]:
        return Particle(self.rate * h.x, h.v), x

    @el.ForLoop
    def each(self, x: Array) -> list[Array]:
        return [self.rate * x]


def as_methods(model: Model, init: Particle, xs: Array) -> None:
    """In a class `self` is no carry: `model.run` is called as any other scan."""
    assert_type(model.run, el.Scan[Particle, Array])
    assert_type(model.run(init, xs), tuple[Particle, Array])
    assert_type(model.run_long(init, xs), tuple[Particle, Array])
    assert_type(model.run.plan(init, xs), el.Plan)
    assert_type(model.each(xs), list[Array])


def add(one: Particle, other: Particle) -> Particle:
    return Particle(one.x + other.x, one.v + other.v)


@el.AssociativeScan(reverse=True, chunk_size=10)
def sums(one: Particle, other: Particle) -> Particle:
    return add(one, other)


def associative(xs: Particle) -> None:
    """Prefixes are of the type of the elements."""
    assert_type(el.AssociativeScan(add)(xs), Particle)
    assert_type(sums, el.AssociativeScan[Particle])
    assert_type(sums(xs), Particle)


def changes_the_carry(h: int, x: Array) -> tuple[str, Array]:
    return str(h), x


def returns_no_pair(h: Array, x: Array) -> Array:
    return h + x


def wrong(init: Array, xs: Array) -> None:
    """Each of these is underlined."""
    el.Scan(3)  # pyright: ignore[reportArgumentType]
    el.Scan(changes_the_carry)  # pyright: ignore[reportArgumentType]
    el.Scan(returns_no_pair)  # pyright: ignore[reportArgumentType]
    el.Scan(step, 16)  # pyright: ignore[reportCallIssue]
    el.Scan(step, bse=16)  # pyright: ignore[reportCallIssue]
    el.Scan(step, schedule="1MiB")  # pyright: ignore[reportArgumentType]
    el.Scan(step, progress="yes")  # pyright: ignore[reportArgumentType]
    el.CheckpointedScan(step, base="16")  # pyright: ignore[reportArgumentType]
    el.CheckpointedScan(base=4)(returns_no_pair)  # pyright: ignore[reportArgumentType]
    el.SlicedScan(step, step=0.5)  # pyright: ignore[reportArgumentType]
    el.ForLoop(norms.f)(xs, steps=3)  # pyright: ignore[reportCallIssue]
    el.AssociativeScan(step)  # pyright: ignore[reportArgumentType]
    scan = el.Scan(step)
    scan()  # pyright: ignore[reportCallIssue]
    scan(init, xs, 3)  # pyright: ignore[reportCallIssue]
    scan(init, xs, length="3")  # pyright: ignore[reportArgumentType]
    scan.base = 3  # pyright: ignore[reportAttributeAccessIssue]


class OfScans(eqx.Module):
    """A field may hold any scan, or any of these carries and outputs."""

    any_scan: el.AbstractScan
    scan: el.AbstractScan[Array, Array]

    def __call__(self, init: Array, xs: Array) -> tuple[Array, Array]:
        assert_type(self.any_scan(init, xs), tuple[Any, Any])
        return self.scan(init, xs)


def in_fields(init: Array, xs: Array) -> None:
    of_one_kind = OfScans(el.Scan(step), el.CheckpointedScan(step, base=4))
    OfScans(el.SlicedScan(fill, step=2), el.SlicedScan(step, stop=3))
    assert_type(of_one_kind(init, xs), tuple[Array, Array])
    OfScans(el.Scan(step), el.Scan(move))  # pyright: ignore[reportArgumentType]
    OfScans(step, el.Scan(step))  # pyright: ignore[reportArgumentType]


def that_end(init: Array, xs: Array) -> None:
    def far(carry: Array) -> Array:
        return (carry > 1).any()

    loop = el.ScanWhile(far, step, max_steps=8)
    assert_type(loop(init, xs), tuple[Array, Array, Array])
    assert_type(loop.plan(init, xs), el.Plan)


def with_cotangents_changed(init: Array, xs: Array) -> None:
    cut = el.CheckpointedScan(step, backward=el.Truncate(every=20))
    clipped = el.Scan(step, backward=el.ClipCotangent(max_norm=1.0))
    halved = el.Scan(step, backward=lambda ct: ct / 2)
    assert_type(cut, el.CheckpointedScan[Array, Array])
    assert_type(clipped(init, xs), tuple[Array, Array])
    assert_type(halved(init, xs), tuple[Array, Array])


def in_a_function(init: Array, xs: Array) -> None:
    def run(xs: Array) -> Array:
        return el.Scan(step)(init, xs)[0]

    found = el.plans(run)(xs)
    assert_type(found[0].plan.peak_bytes, int)
    assert_type(found[0].plan.evaluations, int | None)
    assert_type(found.peak_bytes, int)
