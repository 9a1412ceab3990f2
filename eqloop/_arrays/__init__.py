"""Arrays and their types, axes and tangents, and how they are taken out of trees.

Nothing here is traced or called: programs are in `_programs/`, calls in `_calls/`.

- **Trees and their leaves**: `_partition.py` tells arrays from other leaves,
  `_bits.py` values from each other, `_python_values.py` says what to do about Python's,
  and `_tree_differences.py` where two trees differ.
- **Arrays**: their types (`_array_types.py`), the axes along which loops and maps run
  (`_axes.py`), tangents and symbolic zeros (`_tangents.py`), the types in which sums of
  cotangents are kept (`_sums.py`), values that all examples of a `vmap` share
  (`_across_examples.py`), and values that XLA computes after others (`_waiting.py`).
"""

from ._across_examples import over_examples, reduces_examples, sees_examples, where_run
from ._array_types import (
    along,
    automatic_sharding,
    axes_of,
    batch_type,
    changes_mesh,
    explicit_sharding,
    has_dtype,
    is_type,
    is_weak,
    lowered_types,
    mesh_axis_of,
    nbytes,
    on_mesh,
    on_mesh_of,
    on_mesh_that_is_set,
    own_shape,
    placed_as,
    plain,
    put_on_mesh,
    stack_of,
    stack_type,
    strongly_typed,
    type_of,
    types_of,
    vary,
    varying_type,
    where_leading,
    with_batch_axis,
    with_weak_types,
)
from ._axes import (
    AlongAxes,
    Axis,
    as_length,
    axes_tree,
    axis_sizes,
    broadcast_prefix,
    common_length,
    hashable_axes,
    is_symbolic,
    numbers_with_axes,
    refuse_split,
    refuse_symbolic,
    refuse_symbolic_plan,
    refuse_symbolic_sizes,
    resolve_axes,
    symbolic_sizes,
)
from ._bits import (
    bits,
    compared_fields,
    host_parts,
    is_compared_by_fields,
    raw_bytes,
    structure_bits,
)
from ._partition import (
    Arrays,
    Flags,
    Rest,
    StaticTree,
    as_array,
    as_arrays,
    axes_of_keys,
    closed_under,
    describe,
    flatten,
    interleave,
    is_dynamic,
    is_inexact_scalar,
    is_key,
    is_scalar,
    is_typed,
    listing,
    partition,
    paths,
    pick,
    put,
    same_static,
    split,
    union,
    unmarked,
)
from ._python_values import refuse_foreign_arrays, refuse_python_values
from ._sums import (
    SumType,
    accumulating_in,
    added,
    as_float_dtype,
    cast_like,
    chosen_sum_type,
    is_narrow,
    sum_dtype,
    sum_type,
)
from ._tangents import (
    cotangent_types,
    inexact_only,
    instantiated,
    is_complex,
    is_inexact,
    is_zero,
    nonzero,
    tangent_types,
    with_tangent_types,
    zero_array,
    zero_cotangent,
    zero_cotangent_of,
    zero_tangent,
)
from ._tree_differences import Difference, kind, structure_differences
from ._waiting import number_of, waiting
