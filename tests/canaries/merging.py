"""What XLA merges, keeps apart, and moves out of loops."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import eqloop as el
from eqloop import _compat
from eqloop._programs import temporary_bytes

from .hlo import optimised, temporary
from .registry import canary

SIDE, LENGTH = 64, 63
MATRIX = jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32)
BYTES = 4 * SIDE * SIDE


@canary("xla")
def equal_computations_are_merged() -> Iterator[str]:
    """A step and the program of its products are next to each other in one loop.

    They compute the same, once: `reversals/_block_reversals.py`,
    `engine/_primal.py` and `reversals/_together.py` leave that to XLA.
    """

    def loop(times: int) -> Any:
        def run(carry: jax.Array, weights: jax.Array) -> Any:
            def step(carry: jax.Array, _: Any) -> tuple[jax.Array, Any]:
                products = [jax.jit(jnp.matmul)(carry, weights) for _ in range(times)]
                return jnp.tanh(products[0]), products

            return lax.scan(step, carry, None, length=4)

        program = optimised(run, MATRIX, MATRIX)
        return program.count("dot", "custom-call")

    if loop(2) != loop(1):
        yield f"products in the loop: {loop(1)}, and {loop(2)} if written twice"


@canary("xla")
def barriers_keep_equal_computations_apart() -> Iterator[str]:
    """`Remat` computes again: the barrier of `prevent_cse` has XLA not notice.

    So do the barriers in `rewrites/_short_loops.py`. Some versions drop them on the CPU
    before they merge, see `drops_barriers` in `_compat.py`; there, `Remat` outside of a
    loop saves nothing, and nor does `jax.checkpoint`.
    """

    def loss(x: jax.Array) -> jax.Array:
        return (el.Remat(lambda x: jnp.sin(x @ x))(x) @ x).sum()

    once = optimised(loss, MATRIX).count("dot", "custom-call")
    both = optimised(jax.grad(loss), MATRIX).count("dot", "custom-call")
    plain = optimised(jax.grad(lambda x: (jnp.sin(x @ x) @ x).sum()), MATRIX).count(
        "dot", "custom-call"
    )
    says = _compat.drops_barriers()
    if (both == plain) != says:
        yield f"`drops_barriers()` is {says}; products: {once}, {plain}, {both}"


@canary("xla")
def the_first_block_is_not_moved_out_of_its_loop() -> Iterator[str]:
    """A loop of one iteration at most computes the residuals of a block (`pull_first`).

    The carry does not change in it. Without the barrier in `engine/_sweep.py`, XLA
    would compute them before the loop, and keep them.
    """

    block = 16

    def loss(x: jax.Array) -> jax.Array:
        step = lambda carry, _: (jnp.sin(carry @ carry), None)
        settings: Any = dict(max_steps=LENGTH, schedule=el.Binomial(3, block=block))
        scan = el.ScanWhile(lambda carry: carry.sum() < 1e9, step, **settings)
        return scan(x)[0].sum()

    # There are two residuals of a step, and its carry, in one block at a time.
    taken = temporary(jax.grad(loss), MATRIX) / BYTES
    if taken > 4.5 * block:
        yield f"{taken:.0f} carries, for blocks of {block} steps"


@canary("xla")
def what_is_measured_is_what_is_allocated() -> Iterator[str]:
    """Plans are compiled to find out their memory, quickly (`_programs/_compiled.py`).

    That leaves out most of LLVM, which does not change the memory.
    """

    def loss(x: jax.Array) -> jax.Array:
        step = lambda carry, _: (jnp.sin(carry @ carry), None)
        return el.CheckpointedScan(step, base=4)(x, length=LENGTH)[0].sum()

    run = jax.grad(loss)
    allocated = temporary(run, MATRIX)
    if (measured := temporary_bytes(run, MATRIX)) != allocated:
        yield f"measured {measured}, allocated {allocated}"
