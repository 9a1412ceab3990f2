"""What is no transform: schedules, plans, policies, and what looks inside."""

# pyright: reportPrivateImportUsage=false
# JAX 0.12 does not say that it exports `ClosedJaxpr`.

from collections.abc import Callable
from typing import Any, Literal, assert_type

import equinox as eqx
import jax
import jax.extend.core as jex
from jax import Array

import eqloop as el


def f(x: Array) -> Array:
    return x


def step(h: Array, x: Array) -> tuple[Array, Array]:
    return h + x, x


def undo(h: Array, x: Array) -> Array:
    return h - x


def schedules() -> None:
    """Schedules may stand wherever one is taken."""
    for schedule in (
        el.StoreAll(),
        el.Recursive(8),
        el.Chunked(4),
        el.Binomial(8, block=2),
        el.Budget("1GiB"),
        el.Fused(4, block=32, interpret=True),
        el.Budget("1GiB", measure=False),
        el.Offload(el.Binomial(8)),
        el.Cast(el.Binomial(8), "bfloat16"),
        el.Spill(el.Chunked(8), "directory"),
        el.Reversible(undo, checkpoints=3),
        el.Reversible(undo, save=undo, check=False),
        el.StoreLast(el.Binomial(8), 100),
    ):
        el.Scan(step, schedule=schedule)
    assert_type(el.Budget(1024).nbytes, int)


def plans(x: Array) -> None:
    """A plan is read by its attributes, a frontier as a sequence of plans."""
    plan = el.Scan(step).plan(x, x)
    assert_type(plan.peak_bytes, int)
    assert_type(plan.evaluations, int)
    assert_type(plan.relative_time, float)
    assert_type(plan.is_measured, bool)
    assert_type(plan.pinned, el.Pinned)
    el.Scan(step, schedule=plan.pinned)
    el.measurements("times.json")
    assert_type(plan.device, str | None)
    with el.planning_for("h100"):
        el.Scan(step).plan(x, x, device="v5e")
    frontier = el.Scan(step).frontier(x, x, length=3)
    assert_type(frontier[0], el.Plan)
    assert_type([plan.length for plan in frontier], list[int])


def devices(x: Array, mesh: jax.sharding.Mesh, device: Any) -> None:
    """A device has a name, or is one of JAX's, or of a mesh."""
    with el.planning_for(mesh), el.accumulating_in("float32"):
        el.Scan(step).plan(x, x, device=device)
    with el.accumulating_in(x.dtype), el.accumulating_in(None):
        el.Scan(step)(x, x)
    el.Scan(step).frontier(x, x, device="h100")
    assert_type(el.plans(f, device="v5e")(x).peak_bytes, int)


def policies(x: Array) -> None:
    """`name` returns what it tags; a policy is one of ours, one of JAX's or a name."""
    assert_type(el.name({"x": x}, "x"), dict[str, Array])
    either = el.policies.either("save_dots", el.policies.save_names("x"))
    el.Remat(f, policy=either)
    el.Remat(f, policy=jax.checkpoint_policies.dots_saveable)
    el.Scan(step, policy=el.policies.offload_names("x"))


def looking(x: Array) -> None:
    """Types may stand for arrays in what is called, so these take anything."""
    shape = jax.ShapeDtypeStruct((3,), "float32")
    assert_type(el.EvalShape(f)(shape), Any)
    jaxpr, _ = el.Trace(f)(shape)
    assert_type(jaxpr, jex.ClosedJaxpr)
    assert_type(el.Trace(f)(shape), el.Traced)
    usage = el.Trace(f).leaf_usage(shape)
    assert_type(usage["x"], Literal["read", "passed", "unused"])
    assert_type(el.find_leaves([x], eqx.is_array), list[tuple[str, Any]])
    assert_type(el.unvmap(x > 0, "all"), Array)


def debugging(x: Array) -> None:
    """`error_if` returns what it is given."""
    assert_type(el.error_if({"x": x}, x > 0, "too large"), dict[str, Array])
    assert_type(el.breakpoint_if(x > 0), None)
    el.Scan(step, progress=el.ProgressBar(100, desc=lambda i, carry, y: f"{i}"))
    try:
        el.DebugNonFinite(f)(x)
    except el.NonFiniteError as error:
        assert_type(error, el.NonFiniteError)
    except el.NotInKernelError as error:
        assert_type(error, el.NotInKernelError)


def programs(jaxpr: jex.ClosedJaxpr, x: Array) -> None:
    """Passes take and give closed jaxprs."""
    assert_type(el.ir.optimize(jaxpr, [el.ir.inline_jit]), jex.ClosedJaxpr)
    for rewrite in el.ir.PASSES:
        assert_type(rewrite, Callable[[jex.ClosedJaxpr], jex.ClosedJaxpr])
    assert_type(el.ir.to_python(f)(x), str)
    assert_type(el.ir.jaxpr_to_python(jaxpr), str)
    assert_type(el.ir.draw(f)(x), el.ir.Drawing)
    assert_type(el.ir.to_dot(jaxpr), str)
    assert_type(el.__version__, str)


def wrong(x: Array) -> None:
    """Each of these is underlined."""
    el.Recursive("16")  # pyright: ignore[reportArgumentType]
    el.Binomial()  # pyright: ignore[reportCallIssue]
    el.Budget(0.5)  # pyright: ignore[reportArgumentType]
    el.Offload(8)  # pyright: ignore[reportArgumentType]
    el.Remat(f, policy=3)  # pyright: ignore[reportArgumentType]
    el.policies.save_names(x)  # pyright: ignore[reportArgumentType]
    el.name(x)  # pyright: ignore[reportCallIssue]
    el.unvmap(x, "some")  # pyright: ignore[reportArgumentType]
    el.error_if(x, x > 0)  # pyright: ignore[reportCallIssue]
    el.ProgressBar("100")  # pyright: ignore[reportArgumentType]
    el.ir.optimize(f)  # pyright: ignore[reportArgumentType]


def resumed(x: Array) -> None:
    """A run in segments is called as the scan is, and says how far it is."""
    run = el.Resumable(el.Scan(step), "directory", every=10)
    assert_type(run(x, x), tuple[Any, Any])
    assert_type(run.status().steps, int)
