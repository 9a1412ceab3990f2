"""What Pallas is asked: one kernel over blocks of rows. No other file imports it.

The kernels use references, arithmetic and loops alone. On a GPU they are compiled by
Pallas's backend for Triton, and anywhere by its interpreter.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from ..._types import Aval, Value


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
    """Runs a kernel once for each block of rows.

    Args:
        kernel: Takes the number of the block, and references to inputs and outputs.
        inputs: Whole arrays.
        outputs: The types of the outputs.
        blocks: How many blocks there are.
        block: How many rows each has.
        interpret: Whether it is interpreted.
        aliases: Which outputs take the place of which inputs.
    """
    types = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in outputs]
    params = triton.CompilerParams(num_warps=min(max(block // 32, 1), 8))
    settings: dict[str, Any] = {} if interpret else {"compiler_params": params}
    run = pl.pallas_call(
        lambda *refs: kernel(pl.program_id(0), *refs),
        grid=(blocks,),
        out_shape=types,
        interpret=interpret,
        input_output_aliases=aliases or {},
        name="fused_loop",
        **settings,
    )
    return list(run(*inputs))


when = pl.when
