"""What mypy makes of the library as well as pyright: functions that are passed.

mypy does not know that a call without `f` gives a decorator. So it takes what is
decorated with settings for `Any`, and a scan that is made in this way cannot be called.
"""

from typing import Any, assert_type

import equinox as eqx
from jax import Array

import eqloop as el


class Particle(eqx.Module):
    x: Array


class Model(eqx.Module):
    """A field holds any scan, and stacked layers know what a layer is."""

    loop: el.AbstractScan[Particle, Array]
    layers: el.StackedLayers[eqx.nn.Linear]

    def __call__(self, particle: Particle, xs: Array) -> Particle:
        assert_type(self.layers[0], eqx.nn.Linear)
        particle, path = self.loop(particle, xs)
        assert_type(path, Array)
        return particle


def move(particle: Particle, x: Array) -> tuple[Particle, Array]:
    return Particle(particle.x + x), x


def moves(particle: Particle) -> Array:
    return particle.x.sum() < 3


def settle(particle: Particle) -> Particle:
    return Particle(particle.x + 1)


def place(x: Array) -> Particle:
    return Particle(x)


def height(x: Array) -> Array:
    return x.sum()


@el.Scan
def decorated(particle: Particle, x: Array) -> tuple[Particle, Array]:
    return move(particle, x)


@el.Jit
def compiled(x: Array, *, scale: float) -> Particle:
    return Particle(scale * x)


@el.ChunkedVmap(chunk_size=32)
def in_chunks(x: Array) -> Particle:
    return Particle(x)


@el.Grad(return_value=True)
def slope(x: Array) -> Array:
    return x.sum()


def scans(start: Particle, xs: Array, layers: el.StackedLayers[eqx.nn.Linear]) -> None:
    assert_type(el.Scan(move)(start, xs), tuple[Particle, Array])
    assert_type(el.CheckpointedScan(move, 16)(start, xs), tuple[Particle, Array])
    assert_type(el.SlicedScan(move, step=10)(start, xs), tuple[Particle, Array])
    assert_type(decorated(start, xs), tuple[Particle, Array])
    assert_type(el.ForLoop(place)(xs), Particle)
    model = Model(el.CheckpointedScan(move, schedule=el.Budget("1GiB")), layers)
    assert_type(model(start, xs), Particle)
    particle, _, steps = el.ScanWhile(moves, move, max_steps=4)(start, xs)
    assert_type(steps, Array)
    last: Particle = particle
    print(last, el.plans(decorated)(start, xs).peak_bytes)


def while_loops(start: Particle) -> None:
    assert_type(el.WhileLoop(moves, settle)(start), Particle)
    assert_type(el.BoundedWhileLoop(moves, settle, max_steps=9)(start), Particle)
    assert_type(el.CheckpointedWhileLoop(moves, settle)(start), Particle)


def others(x: Array) -> None:
    assert_type(el.Vmap(place)(x), Particle)
    assert_type(el.ChunkedVmap(place, 32)(x), Particle)
    assert_type(el.Map(place)(x), Particle)
    assert_type(el.Remat(place)(x), Particle)
    assert_type(compiled(x, scale=2.0), Particle)
    assert_type(el.Cond(place, place)(True, x), Particle)
    assert_type(el.Grad(height)(x), Any)
    mapped: Particle = in_chunks(x)
    value, gradient = slope(x)
    print(mapped, value, gradient)


def wrong(start: Particle, xs: Array) -> None:
    """Each of these is an error."""
    el.Scan(place)  # type: ignore[arg-type]
    el.Vmap(3)  # type: ignore[arg-type]
    compiled(xs)  # type: ignore[call-arg]
    el.Remat(place)(xs, xs)  # type: ignore[call-arg]
    el.CheckpointedScan(move)(start, xs, size=3)  # type: ignore[call-arg]
    el.WhileLoop(moves)  # type: ignore[call-arg]
