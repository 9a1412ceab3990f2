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
    "sizes that are not known": "dim_as_value dimension_size shape_assertion",
    "where arrays lie": """layout_constraint relayout reshard sharding_constraint""",
    "what JAX makes on the way, and is in no function of a user's": """call
        call_hi_primitive call_hi_primitive_linearized closed_call
        custom_jvp_call_jaxpr custom_lin dce_sink empty empty2 eval_jaxpr from_edtype
        iota_2x32_shape remat_opt stage tie to_edtype unreachable zeros_like""",
    "random bits that `jax.random` has no name for": """philox2x32 philox4x32
        threefry4x32""",
}

# Parameters that do not change values: shardings, names, what XLA is told.
NO_VALUES = frozenset(
    [
        "sharding",
        "out_sharding",
        "debug",
        "name",
        "ctx_mesh",
        "donated_invars",
        "inline",
        "keep_unused",
        "compiler_options_kvs",
        "in_layouts",
        "out_layouts",
        "in_shardings",
        "out_shardings",
        "jvp_jaxpr_fun",
        "fwd_jaxpr_thunk",
        "bwd",
        "out_trees",
        "call_jaxpr",
        "jaxpr",
        "num_consts",
        "symbolic_zeros",
        "cond_jaxpr",
        "body_jaxpr",
        "branches",
        "closed_jaxpr",
        "callee",
        "transpose",
        "in_tree",
        "out_tree",
        "rule",
        "call",
        "ft_in",
        "ft_out",
        "num_carry",
        "linear",
        "_split_transpose",
        "cond_nconsts",
        "body_nconsts",
        "jaxprs",
        "const_lengths",
        "computation",
        "consts",
        "update_jaxpr",
        "update_consts",
        "copy_semantics",
        "devices",
        "srcs",
    ]
)


def _modules() -> Iterator[ModuleType]:
    for name, module in [*sys.modules.items()]:
        if name.split(".")[0] == "jax":
            yield module


def primitives() -> set[str]:
    """The names of all primitives that JAX has."""
    every = (x for module in _modules() for x in vars(module).values())
    return {
        x.name.replace("_p", "") if 0 else x.name
        for x in every
        if isinstance(x, jex.Primitive)
    }


def missing(cases: Sequence[Case]) -> list[str]:
    """What the table lacks: operations without a case, parameters that none varies."""
    found = list[str]()
    exempt = {name for names in NO_OPERATIONS.values() for name in names.split()}
    params = collections.defaultdict[tuple[str, str], set[str]](set)
    seen = set[str]()
    for case in cases:
        try:
            equations = case.found
        except Exception:  # JAX has not this operation for these types
            continue
        seen |= {case.operation} if equations else set()
        for eqn in equations:
            for name, value in params_of(eqn).items():
                params[case.operation, name].add(repr(value))
    for name in sorted(primitives() - exempt - seen):
        found.append(f"`{name}` has no case")
    for name in sorted(seen & exempt):
        found.append(f"`{name}` has a case, and is said to be no operation")
    for (operation, name), varied in sorted(params.items()):
        if len(varied) < 2 and name not in NO_VALUES:
            (one,) = varied
            found.append(f"no case varies `{name}` of `{operation}`, always {one[:40]}")
    return found
