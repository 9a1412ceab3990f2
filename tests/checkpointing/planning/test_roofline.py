"""Times that are told from the text of a compiled program."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from eqloop.checkpointing.planning._roofline import roofline
from eqloop.checkpointing.planning._work import CPU

# To start a kernel takes 1000, a byte 1, and an iteration 10. To compute takes nothing
# unless a test says so.
RATE = dataclasses.replace(
    CPU,
    equation=1000.0,
    byte=1.0,
    cached_byte=1.0,
    iteration=10.0,
    flop=0.0,
    entry=0.0,
    costly_entry=0.0,
)

LOOP = """\
HloModule jit_f

%fused (p0: f32[9,4], p1: s32[], p2: f32[4]) -> f32[9,4] {
  %p0 = f32[9,4]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %p2 = f32[4]{0} parameter(2)
  %zero = s32[] constant(0)
  %row = f32[1,4]{1,0} bitcast(%p2)
  ROOT %write = f32[9,4]{1,0} dynamic-update-slice(%p0, %row, %p1, %zero)
}

%body (state: (s32[], f32[9,4], f32[4])) -> (s32[], f32[9,4], f32[4]) {
  %state = (s32[], f32[9,4]{1,0}, f32[4]{0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %rows = f32[9,4]{1,0} get-tuple-element(%state), index=1
  %h = f32[4]{0} get-tuple-element(%state), index=2
  %new = f32[9,4]{1,0} fusion(%rows, %i, %h), kind=kLoop, calls=%fused
  ROOT %out = (s32[], f32[9,4]{1,0}, f32[4]{0}) tuple(%i, %new, %h)
}

%cond (state: (s32[], f32[9,4], f32[4])) -> pred[] {
  %state = (s32[], f32[9,4]{1,0}, f32[4]{0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %end = s32[] constant(7)
  ROOT %less = pred[] compare(%i, %end), direction=LT
}

ENTRY %main (x: f32[9,4], h: f32[4]) -> f32[9,4] {
  %x = f32[9,4]{1,0} parameter(0)
  %h = f32[4]{0} parameter(1)
  %i = s32[] constant(0)
  %init = (s32[], f32[9,4]{1,0}, f32[4]{0}) tuple(%i, %x, %h)
  %loop = (s32[], f32[9,4]{1,0}, f32[4]{0}) while(%init), condition=%cond, body=%body
  ROOT %result = f32[9,4]{1,0} get-tuple-element(%loop), index=1
}
"""
# The row, written and read, and the position; and the comparison of two numbers.
_EACH = 1000 + (16 + 16 + 4) + 1000 + (1 + 4 + 4) + 10


def test_loops_are_multiplied_out_and_rows_are_written_in_place():
    # The condition tells how often it runs.
    assert roofline(LOOP, RATE) == 7 * _EACH
    known = 'backend_config={"known_trip_count":{"n":"5"}}'
    text = LOOP.replace("body=%body", f"body=%body, {known}")
    assert roofline(text, RATE) == 5 * _EACH


def test_what_is_started_and_waited_for_is_done_once():
    started = """\
  %start = ((f32[9,4]{1,0}, s32[], f32[4]{0}), f32[9,4]{1,0}, u32[]) \
fusion-start(%rows, %i, %h), kind=kLoop, calls=%fused
  %new = f32[9,4]{1,0} fusion-done(%start)
"""
    (at_once,) = (line for line in LOOP.splitlines(True) if "%new = " in line)
    # Its result has a number for the device itself.
    assert roofline(LOOP.replace(at_once, started), RATE) == 7 * (_EACH + 4)


def test_what_is_in_the_vector_memory_of_a_tpu_takes_no_time_to_move():
    near = LOOP.replace("f32[4]{0}", "f32[4]{0:T(128)S(1)}")
    near = near.replace("f32[1,4]{1,0}", "f32[1,4]{1,0:T(8,128)S(1)}")
    assert roofline(near, RATE) == 7 * (_EACH - 32)


def test_what_fits_into_the_cache_is_moved_faster():
    cached = dataclasses.replace(RATE, cached_byte=0.5, cache=16)
    small = 16 + 16 + 4 + 1 + 4 + 4
    assert roofline(LOOP, cached) == 7 * (_EACH - small / 2)


@pytest.mark.parametrize("length", [8, 64])
def test_a_product_takes_its_flops_and_a_function_its_entries(length: int):
    """Of a program that this machine's compiler made."""
    w = jnp.ones((64, 64))

    def run(h: jax.Array) -> jax.Array:
        step = lambda _, h: jnp.tanh(h @ w)
        return lax.fori_loop(0, length, step, h)

    text = jax.jit(run).lower(jnp.ones((32, 64))).compile().as_text()
    nothing = dataclasses.replace(RATE, equation=0.0, byte=0.0, cached_byte=0.0)
    nothing = dataclasses.replace(nothing, iteration=0.0)
    flops = roofline(text, dataclasses.replace(nothing, flop=1.0))
    assert flops == pytest.approx(length * 2 * 32 * 64 * 64, rel=1e-6)
    entries = roofline(text, dataclasses.replace(nothing, costly_entry=1.0))
    assert length * 32 * 64 <= entries <= 1.1 * length * 32 * 64
