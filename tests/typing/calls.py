"""Transforms that are called as their function is: its parameters, and its result."""

from typing import assert_type

import equinox as eqx
from jax import Array
from jax.sharding import Mesh, PartitionSpec

import eqloop as el


def energy(x: Array, *, power: int = 2) -> dict[str, Array]:
    return {"energy": x**power}


def is_long(loop: el.ForeignLoop) -> bool:
    """Whether to take a loop that is in a library."""
    assert_type(loop.place.line if loop.place else 0, int)
    return loop.length is not None and loop.length > 10


def calls(x: Array) -> None:
    """In each call an editor shows `(x: Array, *, power: int = 2) -> dict[...]`."""
    assert_type(el.Remat(energy)(x), dict[str, Array])
    assert_type(el.Checkpoint(energy, policy="save_dots")(x, power=3), dict[str, Array])
    assert_type(el.Jit(energy, donate="all")(x, power=3), dict[str, Array])
    assert_type(el.Named(energy, "energy")(x), dict[str, Array])
    assert_type(el.Optimize(energy)(x), dict[str, Array])
    assert_type(el.DebugNonFinite(energy, when=False)(x), dict[str, Array])
    frugal = el.Reschedule(energy, el.Recursive(8), whiles=4, only=is_long)
    assert_type(frugal(x, power=3), dict[str, Array])
    assert_type(frugal.plans(x).taken[0].depth, int)
    profile: el.MemoryProfile = el.memory_profile(energy)(x, power=3)
    assert_type(profile.peak_bytes, int)
    assert_type(el.Reschedule(whiles=4)(plain)(x, 2), Array)
    fit = el.Fit(energy, "8GiB", foreign=True, split=False, device="h100")
    assert_type(fit(x, power=3), dict[str, Array])
    assert_type(el.Fit(total=2**30)(plain)(x, 2), Array)
    plan = fit.plan(x, power=3)
    assert_type(plan, el.FitPlan)
    assert_type(plan.parts, tuple[el.FittedPart, ...])
    assert_type((plan.parts[0].name, plan.parts[0].stored_bytes), tuple[str, int])
    assert_type((plan.peak_bytes, plan.relative_time), tuple[int, float])
    assert_type(fit.frontier(x, power=3), el.FitFrontier)
    assert_type(fit.frontier(x, power=3).chosen, el.FitPlan | None)


def maps(x: Array, mesh: Mesh) -> None:
    """And so in those that run it for many rows."""
    assert_type(el.Vmap(energy, in_axes=1, axis_name="rows")(x), dict[str, Array])
    assert_type(el.ChunkedVmap(energy, 32)(x, power=3), dict[str, Array])
    assert_type(el.ChunkedVmap(energy, el.Budget("1MB"))(x), dict[str, Array])
    assert_type(el.Map(energy, batch_size=4, progress=True)(x), dict[str, Array])
    assert_type(el.Map(energy).plan(x, power=3), el.MapPlan)
    assert_type(el.ChunkedVmap(energy, 32).plan(x).value.peak_bytes, int | None)
    assert_type(el.ParallelMap(energy, axis_name="rows")(x), dict[str, Array])
    parts = PartitionSpec("rows")
    sharded = el.ShardMap(energy, mesh=mesh, in_specs=parts, out_specs=parts)
    assert_type(sharded(x), dict[str, Array])


@el.Jit
def plain(x: Array, y: int) -> Array:
    return x * y


@el.Jit(name="energy")
@el.ChunkedVmap(chunk_size=32, reduce="sum")
@el.Remat(policy=el.policies.save_dots)
def nested(x: Array, y: int) -> Array:
    return x * y


def as_decorators(x: Array) -> None:
    """A decorated function keeps its parameters, and has what the transform has."""
    assert_type(plain(x, y=2), Array)
    assert_type(nested(x, 2), Array)
    assert_type(nested.name, str | None)
    assert_type(nested.lower(x, 2).as_text(), str)
    assert_type(el.Named(name="f")(plain)(x, 2), Array)
    assert_type(el.Optimize()(plain)(x, 2), Array)
    assert_type(el.Vmap(axis_size=3)(plain)(x, 2), Array)


class Model(eqx.Module):
    weight: Array

    @el.Jit
    def __call__(self, x: Array) -> Array:
        return self.weight * x

    @el.ChunkedVmap(chunk_size=32)
    def predict(self, x: Array, *, scale: float = 1.0) -> tuple[Array, int]:
        return self.weight * x * scale, 0

    @el.Jit(donate="none")
    @el.Vmap
    def twice(self, x: Array) -> Array:
        return self.weight * x


def as_methods(model: Model, x: Array) -> None:
    """`self` is bound: `model.predict` is called with `x` alone."""
    assert_type(model.predict(x, scale=2.0), tuple[Array, int])
    assert_type(model.predict.chunk_size, int | el.Budget)
    assert_type(model.twice(x), Array)
    assert_type(Model.twice(model, x), Array)
    assert_type(el.Jit(model.predict)(x), tuple[Array, int])
    assert_type(model(x), Array)


def wrong(model: Model, x: Array) -> None:
    """Each of these is underlined."""
    el.Remat(energy)("x")  # pyright: ignore[reportArgumentType]
    el.Remat(energy)(x, powr=3)  # pyright: ignore[reportCallIssue]
    el.Remat(energy, prevent_cse=3)  # pyright: ignore[reportArgumentType]
    el.Remat(energy, "save_dots")  # pyright: ignore[reportCallIssue]
    el.Reschedule(energy, 16)  # pyright: ignore[reportArgumentType]
    el.Fit(energy, 0.5)  # pyright: ignore[reportArgumentType]
    el.Fit(energy, "1GiB", el.Recursive())  # pyright: ignore[reportCallIssue]
    fit = el.Fit(energy, "1GiB")
    fit.plan()  # pyright: ignore[reportCallIssue]
    el.Reschedule(energy, only=energy)  # pyright: ignore[reportArgumentType]
    el.Jit(energy, donate="some")  # pyright: ignore[reportArgumentType]
    el.Jit(3)  # pyright: ignore[reportArgumentType]
    el.Named(energy)  # pyright: ignore[reportCallIssue]
    el.ChunkedVmap(energy)  # pyright: ignore[reportCallIssue]
    el.ChunkedVmap(energy, "32")  # pyright: ignore[reportArgumentType]
    el.ShardMap(energy, in_specs=None)  # pyright: ignore[reportCallIssue]
    el.Map(energy, batch_size="3")  # pyright: ignore[reportArgumentType]
    el.ParallelMap(energy, chunk_size=0.5)  # pyright: ignore[reportArgumentType]
    nested(x)  # pyright: ignore[reportCallIssue]
    model.predict(model, x)  # pyright: ignore[reportCallIssue]
    model.twice("x")  # pyright: ignore[reportArgumentType]
    print(nested.lowered)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownArgumentType]
