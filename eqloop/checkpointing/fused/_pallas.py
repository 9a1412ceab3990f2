"""What Pallas is asked: one kernel over blocks of rows.

No other file imports it but `_tpu.py`, which is asked by this one, `_panel_kernels.py`
and `_panel_block.py`, whose kernels are of another kind.

It takes a while to import, and few programs need it, so that is done where it is used.

The kernels use references, arithmetic and loops alone. They are compiled by one of
three backends of Pallas, and anywhere they are run by its interpreter:

- Mosaic GPU, for Hopper and Blackwell. A kernel reads and writes slices of arrays.
- Triton, for all other GPUs. Rows have their numbers, and may lie anywhere.
- Mosaic, for TPUs.
"""

import contextlib
import contextvars
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import mlir
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

from ..._arrays import split
from ..._compat import HAS_MOSAIC_GPU
from ..._device import planning_device
from ..._types import Aval, Value
from ._tpu import memory, of_tiles, shape_of

# What the kernels are called.
NAME = "fused_loop"


# How kernels are interpreted: as Pallas does for all backends, or as one of them does.
interpreter: Any = True


def by_mosaic() -> bool:
    """Whether the device is one for which kernels are compiled by Mosaic GPU."""
    capability = getattr(planning_device().own, "compute_capability", "")
    return HAS_MOSAIC_GPU and capability in ("9.0", "10.0")


def by_tiles() -> bool:
    """Whether the device is a TPU, for which Mosaic compiles kernels."""
    return HAS_MOSAIC_GPU and planning_device().platform == "tpu"


def has_tensor_cores() -> bool:
    """Whether groups of warps of the device multiply tiles in shared memory."""
    return by_mosaic() and planning_device().own.compute_capability == "9.0"


def call(
    kernel: Callable[..., None],
    inputs: Sequence[Value],
    outputs: Sequence[Aval],
    *,
    blocks: int,
    block: int,
    interpret: bool,
    mosaic: bool,
    aliases: dict[int, int] | None = None,
    axes: tuple[Sequence[int | None], Sequence[int | None]] | None = None,
) -> list[Value]:
    """Runs a kernel once for each of `blocks` blocks, with `block` rows each.

    The kernel takes the number of its block, and references to inputs and outputs.
    `axes` are those of rows, of each of these, if rows are tiles of a TPU.
    """
    # Pallas has no arrays without entries: these have one, which nobody reads.
    types = [jax.ShapeDtypeStruct(_some(t.shape), t.dtype) for t in outputs]
    inputs = [x if x.size else jnp.zeros(_some(x.shape), x.dtype) for x in inputs]
    how = interpreter if interpret else None
    if axes is not None:
        run = of_tiles(kernel, types, blocks, axes, how or False, NAME)
    elif mosaic and how is not True:
        run = _of_mosaic(kernel, types, blocks, how, aliases or {})
    else:
        run = _of_triton(kernel, types, blocks, block, interpret, aliases or {})
    made = launched(run, inputs, interpret)
    pairs = zip(made, outputs, strict=True)
    return [y if t.size else jnp.zeros(t.shape, t.dtype) for y, t in pairs]


def memory_of_tpu() -> dict[str, int]:
    """The bytes that the TPU has near its cores, for vectors and for scalars."""
    device = planning_device()
    with _on("" if device.is_here else device.kind):
        return memory()


def launched(
    run: Callable[..., list[Value]], inputs: Sequence[Value], interpret: bool
) -> list[Value]:
    """Runs a kernel, which is compiled for the device that plans are for."""
    if interpret:
        return run(*inputs)
    given = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs]
    device = planning_device()
    kind = "" if device.is_here else device.kind
    with _on(kind):
        program = jax.make_jaxpr(run)(*given)
    return _kernel_p.bind(*inputs, program=program, kind=kind)


def _of_triton(
    kernel: Callable[..., None],
    types: Sequence[jax.ShapeDtypeStruct],
    blocks: int,
    block: int,
    interpret: bool,
    aliases: dict[int, int],
) -> Callable[..., list[Value]]:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    # Loads of later steps ahead of time would take shared memory several times over.
    params = triton.CompilerParams(num_warps=max(block // 32, 1), num_stages=1)
    settings: dict[str, Any] = {} if interpret else {"compiler_params": params}
    return pl.pallas_call(
        lambda *refs: kernel(pl.program_id(0), *refs),
        grid=(blocks,),
        out_shape=types,
        interpret=interpret,
        input_output_aliases=aliases,
        name=NAME,
        **settings,
    )


def _of_mosaic(
    kernel: Callable[..., None],
    types: Sequence[jax.ShapeDtypeStruct],
    blocks: int,
    interpret: Any,
    aliases: dict[int, int],
) -> Callable[..., list[Value]]:
    from jax.experimental.pallas import mosaic_gpu

    given_as = {out: at for at, out in aliases.items()}
    own = [t for i, t in enumerate(types) if i not in given_as]
    in_memory = [t.update(dtype=jnp.int8) if _is_flag(t) else t for t in own]
    of = lambda given, made: [
        given[given_as[i]] if i in given_as else next(made) for i in range(len(types))
    ]

    def run(*inputs: Value) -> list[Value]:
        given = [x.astype(jnp.int8) if _is_flag(x) else x for x in inputs]
        # What an output is given as is written in place, and is no other output.
        given = [jax.new_ref(x) if i in aliases else x for i, x in enumerate(given)]

        def body(*refs: Any) -> None:
            pairs = zip(refs, [*inputs, *own], strict=True)
            all_refs = [_Flags(ref) if _is_flag(x) else ref for ref, x in pairs]
            ins, outs = split(all_refs, len(inputs))
            token = _is_mosaic.set(True)
            try:
                kernel(lax.axis_index("block"), *ins, *of(ins, iter(outs)))
            finally:
                _is_mosaic.reset(token)

        body.__name__ = NAME
        made = mosaic_gpu.kernel(
            body,
            out_type=in_memory,
            grid=(blocks,),
            grid_names=("block",),
            interpret=interpret,
            # It does not infer layouts, which takes a time quadratic in the operations.
            # A thread reads what it has written itself, and nothing of others.
            compiler_params=mosaic_gpu.CompilerParams(
                lowering_semantics=mosaic_gpu.LoweringSemantics.Lane,
                unsafe_no_auto_barriers=True,
            ),
        )(*given)
        pairs = zip(of(given, iter(made)), types, strict=True)
        return [x[...].astype(t.dtype) for x, t in pairs]

    return run


def _is_flag(x: Any) -> bool:
    return x.dtype == np.dtype(bool)


class _Flags:
    """A reference to flags, which are bytes in memory."""

    def __init__(self, ref: Any):
        self._ref = ref

    def __getitem__(self, index: Any) -> Value:
        return self._ref[index].astype(jnp.int32) != 0

    def __setitem__(self, index: Any, value: Value) -> None:
        one, zero = jnp.ones_like(value, jnp.int32), jnp.zeros_like(value, jnp.int32)
        self._ref[index] = jnp.where(value, one, zero).astype(jnp.int8)


def _some(shape: Sequence[int]) -> list[int]:
    return [max(n, 1) for n in shape]


# Whether a kernel of Mosaic GPU is being traced.
_is_mosaic = contextvars.ContextVar("_is_mosaic", default=False)


def in_registers(x: Value) -> Value:
    """A vector with a number for each thread, also if all of them are the same."""
    if not _is_mosaic.get():
        return x
    from jax.experimental.pallas import mosaic_gpu

    layout = mosaic_gpu.Layout.WG_STRIDED(x.shape, vec_size=1)
    return mosaic_gpu.layout_cast(x, layout)


def of_all_rows(x: Value, block: int) -> Value:
    """A vector with a number for each row of a block, such as a loop carries."""
    shape = shape_of(block)
    found = in_registers(jnp.broadcast_to(x, shape))
    return found if x.ndim else in_own_register(found, block)


def in_own_register(x: Value, block: int) -> Value:
    """A vector that a while loop may carry, also if it is the same for all rows."""
    is_tile = x.shape == shape_of(block) and x.ndim > 1
    return jnp.where(places(block) >= 0, x, x + x) if is_tile else x


def places(block: int) -> Value:
    """The place of each row in its block."""
    shape, dtype = shape_of(block), np.dtype("int32")
    if len(shape) > 1:
        row, lane = (lax.broadcasted_iota(dtype, shape, i) for i in range(2))
        return row * shape[1] + lane
    return in_registers(lax.iota(dtype, block))


def rows_from(first: Value, count: int) -> Any:
    """The index of rows that follow one another."""
    from jax.experimental import pallas as pl

    return pl.ds(first, count)


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


# Pallas asks JAX for the kind of device while a program is lowered. Where there is
# none, it has to be told, and only then: the mesh that tells it is in types of arrays.
# And where Triton is all there is, nobody can do anything about its being deprecated.
_kernel_p = jex.Primitive("fused_loop_kernel")
_kernel_p.multiple_results = True


@_kernel_p.def_impl
def _run(*inputs: Value, **params: Any) -> list[Value]:
    return jax.jit(lambda *xs: _kernel_p.bind(*xs, **params))(*inputs)


@_kernel_p.def_abstract_eval
def _types(*_: Aval, program: jex.ClosedJaxpr, kind: str) -> list[Aval]:
    return [jax.core.ShapedArray(t.shape, t.dtype) for t in program.out_avals]


def _lower(context: Any, *inputs: Any, program: jex.ClosedJaxpr, kind: str) -> Any:
    run = mlir.lower_fun(jex.jaxpr_as_fun(program), multiple_results=True)
    with warnings.catch_warnings(), _on(kind):
        warnings.simplefilter("ignore", DeprecationWarning)
        return run(context, *inputs)


mlir.register_lowering(_kernel_p, _lower)


def _on(kind: str) -> Any:
    """Has Pallas know which device a kernel is for, if it is not here."""
    return use_abstract_mesh(_mesh_of(kind)) if kind else contextlib.nullcontext()


def _mesh_of(kind: str) -> AbstractMesh:
    """A mesh that tells Pallas which device a kernel is for."""
    own = planning_device().own
    cores = getattr(own, "num_cores", None)
    device = AbstractDevice(device_kind=kind, num_cores=cores, platform=own.platform)
    types = (AxisType.Auto,)
    return AbstractMesh((1,), ("device",), axis_types=types, abstract_device=device)
