"""What Pallas is asked: one kernel over blocks of rows. No other file imports it.

It takes a while to import, and few programs need it, so that is done where it is used.

The kernels use references, arithmetic and loops alone. On a GPU they are compiled by
Pallas's backend for Triton, and anywhere by its interpreter.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax
from jax.interpreters import mlir
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

from ..._device import planning_device
from ..._types import Aval, Value

# What the kernels are called.
NAME = "fused_loop"


def call(
    kernel: Callable[..., None],
    inputs: Sequence[Value],
    outputs: Sequence[Aval],
    *,
    blocks: int,
    block: int,
    interpret: bool,
    aliases: dict[int, int] | None = None,
) -> list[Value]:
    """Runs a kernel once for each of `blocks` blocks, with `block` rows each.

    The kernel takes the number of its block, and references to inputs and outputs.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    # Pallas has no arrays without entries: these have one, which nobody reads.
    types = [jax.ShapeDtypeStruct(_some(t.shape), t.dtype) for t in outputs]
    inputs = [x if x.size else jnp.zeros(_some(x.shape), x.dtype) for x in inputs]
    # Loads of later steps ahead of time would take shared memory several times over.
    params = triton.CompilerParams(num_warps=max(block // 32, 1), num_stages=1)
    settings: dict[str, Any] = {} if interpret else {"compiler_params": params}
    run = pl.pallas_call(
        lambda *refs: kernel(pl.program_id(0), *refs),
        grid=(blocks,),
        out_shape=types,
        interpret=interpret,
        input_output_aliases=aliases or {},
        name=NAME,
        **settings,
    )
    device = planning_device()
    if interpret or device.is_here:
        made = run(*inputs)
    else:
        given = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs]
        with use_abstract_mesh(_mesh_of(device.kind)):
            program = jax.make_jaxpr(run)(*given)
        made = _elsewhere_p.bind(*inputs, program=program, kind=device.kind)
    pairs = zip(made, outputs, strict=True)
    return [y if t.size else jnp.zeros(t.shape, t.dtype) for y, t in pairs]


def _some(shape: Sequence[int]) -> list[int]:
    return [max(n, 1) for n in shape]


def when(condition: Value) -> Callable[[Callable[[], None]], None]:
    """Runs what it decorates if a condition holds."""
    from jax.experimental import pallas as pl

    return pl.when(condition)


def waiting(interpret: bool) -> Callable[[], None]:
    """What has the threads of a block wait for one another."""
    if interpret:
        return lambda: None
    from jax.experimental.pallas import triton

    return triton.debug_barrier


def precision_of_tiles(interpret: bool) -> Any:
    """How products of float32 are computed."""
    if interpret:
        return lax.Precision.HIGHEST
    return lax.DotAlgorithmPreset.TF32_TF32_F32_X3


# Pallas asks JAX for the kind of GPU while a program is lowered. Where there is none,
# it has to be told, and only then: the mesh by which it is told is in types of arrays.
_elsewhere_p = jex.Primitive("fused_loop_elsewhere")
_elsewhere_p.multiple_results = True


@_elsewhere_p.def_abstract_eval
def _types(*_: Aval, program: jex.ClosedJaxpr, kind: str) -> list[Aval]:
    return [jax.core.ShapedArray(t.shape, t.dtype) for t in program.out_avals]


def _lower(context: Any, *inputs: Any, program: jex.ClosedJaxpr, kind: str) -> Any:
    run = mlir.lower_fun(jex.jaxpr_as_fun(program), multiple_results=True)
    with use_abstract_mesh(_mesh_of(kind)):
        return run(context, *inputs)


mlir.register_lowering(_elsewhere_p, _lower)


def _mesh_of(kind: str) -> AbstractMesh:
    """A mesh that tells Pallas which GPU a kernel is for."""
    device = AbstractDevice(device_kind=kind, num_cores=None, platform="gpu")
    types = (AxisType.Auto,)
    return AbstractMesh((1,), ("device",), axis_types=types, abstract_device=device)
