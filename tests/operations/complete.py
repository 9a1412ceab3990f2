"""What the table must list: each operation, and two values of each parameter."""

import collections
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType

import jax.extend.core as jex

from .case import Case, params_of

# What is no operation on the numbers of a row: why, and the primitives.
NO_OPERATIONS = {
    "collectives: among the rows of other devices": """all_gather
        all_gather_invariant all_gather_reduced all_to_all axis_index pbroadcast
        pbroadcast_dynamic pmax pmin ppermute precv preduced psend psum psum_invariant
        pvary ragged_all_to_all reduce_scatter reduced_vary_cast reduced_vary_cast_p
        unreduced_pmax unreduced_pmin unreduced_psum unreduced_reduce_scatter
        vary_unreduced_cast vary_unreduced_cast_p shard_map""",
    "collectives, begun and awaited": """all_gather_done all_gather_reduced_start
        all_gather_start all_to_all_done all_to_all_start pbroadcast_done
        pbroadcast_start ppermute_done ppermute_start psum_done psum_invariant_start
        psum_start reduce_scatter_done reduce_scatter_start unreduced_psum_start
        unreduced_reduce_scatter_start""",
    "references, boxes and logs": """accum_grad_in_ref addupdate box_get box_set
        broadcast_to core_map create_linear empty_ref free_ref freeze get log_extend
        log_read new_box new_log new_ref pin run_state swap unpin
        with_memory_space_constraint""",
    "callbacks, tokens, checks": """after_all check create_token debug_callback
        debug_print inspect_sharding io_callback pure_callback""",
    "code of other libraries, or of a GPU": """call_exported cudnn_fusion
        custom_partitioning dot_product_attention_bwd dot_product_attention_bwd_wrapper
        dot_product_attention_fp8_bwd dot_product_attention_fp8_bwd_wrapper
        dot_product_attention_fp8_fwd dot_product_attention_fp8_fwd_wrapper
        dot_product_attention_fwd dot_product_attention_fwd_wrapper ffi_call scaled_dot
        scaled_matmul scaled_matmul_wrapper""",
    "what XLA makes of others, or is told of them": """geqp3 geqrf xla_metadata_call
        xla_metadata_value""",
    "sizes that are not known": "dim_as_value dimension_size shape_assertion",
    "where arrays lie": """layout_constraint relayout reshard sharding_constraint""",
    "what JAX makes on the way, and is in no function of a user's": """call
        call_hi_primitive call_hi_primitive_linearized closed_call
        custom_jvp_call_jaxpr custom_lin dce_sink empty empty2 eval_jaxpr from_edtype
        iota_2x32_shape remat_opt select_and_scatter stage tie to_edtype unreachable
        zeros_like""",
    "random bits that `jax.random` has no name for": """philox2x32 philox4x32
        threefry4x32""",
}

# Parameters that do not change values: programs, what XLA or the compiler is told, how
# operands are counted, and what follows from the operands.
NO_VALUES = frozenset(
    """branches body_jaxpr body_nconsts bwd call call_jaxpr callee
    closed_jaxpr compiler_options_kvs computation cond_jaxpr cond_nconsts const_lengths
    consts copy_semantics ctx_mesh debug devices differentiated donated_invars ft_in
    ft_out fwd_jaxpr_thunk in_layouts in_shardings in_tree inline jaxpr jaxprs
    jvp_jaxpr_fun keep_unused linear name num_callee_consts num_carry num_consts num_res
    out_layouts out_sharding out_shardings out_tree out_trees rule sharding srcs
    _split_transpose symbolic_zeros transpose transpose_thunk update_consts update_jaxpr
    use_magma weak_type x2_aval""".split()  # noqa: SIM905
)
# A parameter of an operation that has one value for all that it is given here.
ONE_VALUE = {
    ("Nonzero", "out_dtype"),  # with 64 bits it is that of an index
    ("SearchSorted", "batch_dims"),  # JAX writes others as a map around it
    ("SearchSorted", "dimension"),
    ("eig", "enable_eigvec_derivs"),  # a derivative that other devices lack
    ("erfc", "accuracy"),
    ("ragged_dot_general", "group_offset"),  # JAX has not written it yet
    ("select_and_gather_add", "base_dilation"),  # a derivative JAX has without it
    ("select_and_gather_add", "window_dilation"),
}


# Where JAX has kernels and sparse arrays: their primitives are in no other programs.
_KERNELS = {"pallas", "mosaic", "experimental", "tpu_custom_call"}


def _modules() -> Iterator[ModuleType]:
    for name, module in [*sys.modules.items()]:
        first, *others = name.split(".")
        if first == "jax" and _KERNELS.isdisjoint(others):
            yield module


def primitives() -> set[str]:
    """The names of all primitives that JAX has."""
    every = (x for module in _modules() for x in vars(module).values())
    return {x.name for x in every if isinstance(x, jex.Primitive)}


def without_case(cases: Sequence[Case]) -> list[str]:
    """The primitives that have no case, and are in none of `NO_OPERATIONS`."""
    exempt = {name for names in NO_OPERATIONS.values() for name in names.split()}
    have = {case.operation for case in cases}
    return [f"`{name}` has no case" for name in sorted(primitives() - exempt - have)]


def missing(cases: Sequence[Case]) -> list[str]:
    """What the table lacks: operations without a case, parameters that none varies."""
    params = collections.defaultdict[tuple[str, str], set[str]](set)
    seen = list[Case]()
    for case in cases:
        try:
            equations = case.found
        except Exception:  # JAX has not this operation for these types
            continue
        seen += [case] if equations else []
        for eqn in equations:
            for name, value in params_of(eqn).items():
                params[case.operation, name].add(repr(value))
    found, known = without_case(seen), NO_VALUES | ONE_VALUE
    for (operation, name), varied in sorted(params.items()):
        if len(varied) < 2 and not {name, (operation, name)} & known:
            (one,) = varied
            found.append(f"no case varies `{name}` of `{operation}`, always {one[:40]}")
    return found
