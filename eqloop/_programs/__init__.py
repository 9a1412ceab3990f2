"""Traced programs: what is asked of them, what is derived from them, and primitives.

A program is a jaxpr on a flat list of arrays.

- **What a program does**: `_equations.py` finds and rewrites its equations,
  `_reaching.py` tells which inputs reach which outputs, `_seen_batches.py` whether a
  row of a batch can see the others, `_effects.py` which effects it has, `_ranges.py`
  between which integers its values lie, `_row_writes.py` which equations write rows of
  a buffer, and `_places.py` from which line of the user's program an operation comes.
  `_compiled.py` compiles it to see how much memory it takes.
- **Programs made of it**: `_calculus.py` makes those of its tangents, cotangents and
  batches, and `_varied.py` those of values that differ between more devices.
  `_shifted_writes.py` takes out writes that XLA would get wrong.
- **Primitives**: `_formula.py` makes one of a program and of the rules by which it is
  differentiated. It is the connection to JAX's machinery for derivatives. `_doubled.py`
  adds its forward mode, `_vmapped.py` its `vmap` where there is no better rule, and
  `_partial_eval.py` divides it where JAX transposes a part of it.
- **Small equations of our own**: tables of integers (`_constant.py`), values without
  their derivatives (`_detached.py`), and markers that tell a debugger where a loop is
  (`_loop_markers.py`).
- **What JAX does not promise**: `_assumptions.py` tries it at import.
"""

from . import _partial_eval as _partial_eval  # sets up rules of JAX
from ._assumptions import check_jax
from ._calculus import (
    along_axis,
    batched,
    batched_axes,
    batched_types,
    behind,
    called,
    evaluated,
    has_backward_rules,
    has_rules,
    inputs_read,
    interpreted,
    joined,
    parted,
    pruned,
    pulled,
    pushed,
    run,
    settled,
    traced,
    value_of,
    vmap,
)
from ._compiled import temporary_bytes
from ._constant import constant
from ._detached import detached
from ._doubled import Doubled, recall
from ._effects import (
    has_checks,
    is_ref,
    refuse_callbacks,
    refuse_checks,
    refuse_refs,
    refuse_refs_in_rules,
    without_derivatives,
)
from ._equations import (
    Rewrite,
    aval_of,
    computed_from,
    equations,
    formula_of,
    map_equations,
    map_params,
    map_programs,
    programs_in,
    renamed,
    rewritable_programs,
    rewrite_everywhere,
    with_equations,
)
from ._formula import Formula, Selected, Static
from ._loop_markers import (
    is_watched,
    loop_name,
    loop_scope,
    mark,
    position_p,
    unwatched,
    watched,
)
from ._places import JAX_FILES, OUR_FILES, Place, folders_of, frames_of, place_of
from ._ranges import Range, range_of_literal, range_of_result
from ._reaching import reached
from ._row_writes import READS, WRITES, RowWrite, makes_zeros, row_write
from ._seen_batches import ROW_BY_ROW, has_collectives, sees_batch
from ._shifted_writes import without_shifted_writes
from ._varied import CannotVaryError, varied
from ._vmapped import Vmapped, mapped

__all__ = [
    "JAX_FILES",
    "OUR_FILES",
    "READS",
    "ROW_BY_ROW",
    "WRITES",
    "CannotVaryError",
    "Doubled",
    "Formula",
    "Place",
    "Range",
    "Rewrite",
    "RowWrite",
    "Selected",
    "Static",
    "Vmapped",
    "along_axis",
    "aval_of",
    "batched",
    "batched_axes",
    "batched_types",
    "behind",
    "called",
    "check_jax",
    "computed_from",
    "constant",
    "detached",
    "equations",
    "evaluated",
    "folders_of",
    "formula_of",
    "frames_of",
    "has_backward_rules",
    "has_checks",
    "has_collectives",
    "has_rules",
    "inputs_read",
    "interpreted",
    "is_ref",
    "is_watched",
    "joined",
    "loop_name",
    "loop_scope",
    "makes_zeros",
    "map_equations",
    "map_params",
    "map_programs",
    "mapped",
    "mark",
    "parted",
    "place_of",
    "position_p",
    "programs_in",
    "pruned",
    "pulled",
    "pushed",
    "range_of_literal",
    "range_of_result",
    "reached",
    "recall",
    "refuse_callbacks",
    "refuse_checks",
    "refuse_refs",
    "refuse_refs_in_rules",
    "renamed",
    "rewritable_programs",
    "rewrite_everywhere",
    "row_write",
    "run",
    "sees_batch",
    "settled",
    "temporary_bytes",
    "traced",
    "unwatched",
    "value_of",
    "varied",
    "vmap",
    "watched",
    "with_equations",
    "without_derivatives",
    "without_shifted_writes",
]
