"""The canaries, on the versions that are installed."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from packaging.specifiers import SpecifierSet

from . import CANARIES, each, hlo
from .registry import Canary


def cases():
    for canary in CANARIES:
        if not canary.is_timed:
            known = pytest.mark.xfail(reason="in XLA", strict=False)
            marks = [known] if canary.is_known else []
            # Of plain JAX: only another version of it changes what is found.
            of_jax = canary.look.__module__.endswith((".values", ".merging"))
            marks += [pytest.mark.slow] if of_jax else []
            yield pytest.param(canary, id=canary.name, marks=marks)


@pytest.mark.parametrize("canary", list(cases()))
def test_canary(canary: Canary):
    assert list(canary.look()) == []


HLO = """
HloModule jit_f, is_scheduled=true

%inside (p.0: f32[8,16], p.1: f32[]) -> f32[8,16] {
  %p.0 = f32[8,16]{1,0} parameter(0)
  %p.1 = f32[] parameter(1)
  %wide = f32[8,16]{1,0} WHAT(%p.0)
  %row = f32[1,16]{1,0} broadcast(%p.1), dimensions={}
  ROOT %dus = f32[8,16]{1,0} dynamic-update-slice(%wide, %row, %p.1, %p.1)
}

%body.1 (t: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {
  %t = (s32[], f32[8,16]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %b = f32[8,16]{1,0} get-tuple-element(%t), index=1
  %copy.2 = f32[8,16]{1,0} copy(%b)
  %next = f32[8,16]{1,0} fusion(%copy.2, %i), kind=kLoop, calls=%inside
  ROOT %both = (s32[], f32[8,16]{1,0}) tuple(%i, %next)
}

%cond.1 (t: (s32[], f32[8,16])) -> pred[] {
  %t = (s32[], f32[8,16]{1,0}) parameter(0)
  ROOT %go = pred[] constant(true)
}

ENTRY %main (x: f32[8,16]) -> f32[8,16] {
  %x = f32[8,16]{1,0} parameter(0)
  %copy.1 = f32[8,16]{1,0} copy(%x)
  %loop = (s32[], f32[8,16]{1,0}) while(%copy.1), condition=%cond.1, body=%body.1
  ROOT %out = f32[8,16]{1,0} get-tuple-element(%loop), index=1
}
"""


@pytest.mark.parametrize(("what", "found"), [("bitcast", 1), ("convert", 2)])
def test_what_is_whole_in_a_loop_is_found(what: str, found: int):
    """The copy in the loop and not the one before; a fusion that writes in place."""
    program = hlo.parse(HLO.replace("WHAT", what))
    assert len(program.whole(4 * 8 * 16)) == found
    assert program.whole(4 * 8 * 16 + 1) == []
    assert program.count("copy") == 2


def test_programs_of_this_jaxlib_can_be_read():
    """Else a canary would find nothing, whatever there is."""

    def copying(rows: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 9, lambda i, rows: jnp.sin(rows) * rows, rows)

    rows = jnp.ones((64, 64))
    assert hlo.optimised(copying, rows).whole(rows.nbytes)
    assert hlo.optimised(copying, rows).count("while") == 1


def test_versions_are_those_that_pyproject_allows():
    listed = ["0.12.0.1", "0.12.0", "0.11.1", "0.10.0", "0.9.2"]
    found = each.within(SpecifierSet(">=0.10.0,!=0.11.1"), listed)
    assert found == ["0.10.0", "0.12.0", "0.12.0.1"]
