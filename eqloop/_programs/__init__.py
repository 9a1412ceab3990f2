"""Traced programs: what is asked of them, what is derived from them, and primitives.

A program is a jaxpr on a flat list of arrays.

- **What a program does**: `_equations.py` finds its equations, `_reaching.py` tells
  which inputs reach which outputs, `_seen_batches.py` whether a row of a batch can see
  the others, `_effects.py` which effects it has, `_ranges.py` between which integers
  its values lie, `_row_writes.py` which equations write rows of a buffer, and
  `_places.py` from which line of the user's program an operation comes. `_lowering.py`
  puts it on the devices that it will run on, and `_compiled.py` compiles it to see how
  much memory it takes; of a kernel, `_registers.py` reads how many registers.
  `_identity.py` tells it from others, and `_functions.py` functions of Python from
  others.
- **Programs made of it**: `_jaxprs.py` makes and rewrites jaxprs, and `_parted.py`
  divides them; `_simpler.py` has those by which others are written. `_calculus.py`
  makes those of tangents, cotangents and batches, and
  `_varied.py` those of values that differ between more devices. `_shifted_writes.py`
  takes out writes that XLA would get wrong, and `_wide_sums.py` has cotangents added up
  in a wider type. `_layouts.py` brings convolutions and products into the layouts that
  are fast in loops.
- **Primitives**: `_formula.py` makes one of a program and of the rules by which it is
  differentiated. It is the connection to JAX's machinery for derivatives. `_doubled.py`
  is what computes its tangents beside it, and has the two equations of its forward mode
  share their work. `_expandable.py` is its equation, which `checkify` can look into.
  `_vmapped.py` is its `vmap` where there is no better rule, and `_partial_eval.py`
  divides it where JAX transposes a part of it. `_small_equations.py` has those that are
  no loops: tables of integers, values without their derivatives, and marks for a
  debugger; `_program_call.py` that of any program.
"""

from . import _partial_eval as _partial_eval  # sets up rules of JAX
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
    interpreted,
    is_only_transposed,
    joined,
    jvp_of,
    literal_value,
    run,
    settled,
    traced,
    value_of,
    vjp_of,
    vmap,
)
from ._compiled import (
    NotCompiledError,
    allocated_bytes,
    by_itself,
    quick_options,
    said_to_be_estimated,
    temporary_bytes,
    told_of,
)
from ._doubled import Doubled
from ._effects import (
    axes_named,
    has_io,
    is_ordered,
    is_ref,
    makes_refs,
    refuse_callbacks,
    refuse_refs,
    refuse_refs_in_rules,
)
from ._equations import (
    ELEMENTWISE,
    NOTHING,
    Rewrite,
    as_written,
    aval_of,
    computed_from,
    equations,
    equations_of,
    foreign_programs,
    formula_of,
    programs_in,
    resized,
    with_formula,
)
from ._formula import Formula, Selected, Static
from ._identity import (
    called_by,
    digest_of,
    equation_bits,
    equation_digests,
    function_digest,
    literal_bits,
)
from ._jaxprs import (
    Rewriter,
    alone,
    calling,
    inlined,
    input_names,
    inputs_read,
    jaxpr_of,
    map_equations,
    map_params,
    map_programs,
    program_from,
    pruned,
    renamed,
    rewritable_programs,
    rewrite_everywhere,
    traced_function,
    with_equations,
    with_parts,
    without_array_literals,
    without_dead_code,
)
from ._layouts import notes_of_layouts
from ._lowering import lowered, meshes_in
from ._parted import parted
from ._places import (
    FITTED,
    JAX_FILES,
    OUR_FILES,
    Place,
    RuleAround,
    folders_of,
    frames_of,
    is_between,
    is_later,
    loop_name,
    loop_of_jax,
    loop_scope,
    owner_of,
    place_now,
    place_of,
    rule_around,
    said,
    warn_once,
)
from ._program_call import ProgramCall, laid_out_call
from ._ranges import Range, range_of_literal, range_of_result
from ._reaching import moved_by, moving_variables, reached
from ._registers import Registers, registers_of, varint
from ._row_writes import READS, WRITES, RowWrite, makes_zeros, row_write
from ._seen_batches import ROW_BY_ROW, has_collectives, sees_batch
from ._shifted_writes import without_shifted_writes
from ._simpler import as_simpler, simpler
from ._small_equations import (
    constant,
    detached,
    is_watched,
    mark,
    position_p,
    without_derivatives,
)
from ._varied import CannotVaryError, varied
from ._vmapped import Vmapped, vmapped
from ._wide_sums import adding_wide, shared, with_casts, without_casts
