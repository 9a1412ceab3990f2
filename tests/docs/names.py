"""The names that other libraries have for what is here."""

# What each library has that is about loops, maps, derivatives and checkpoints, under
# the prefixes that its page uses.
NAMES = {
    # `brainstate.transform` 0.5.4, but for those of its checkify's sets of checks.
    "brainstate": """
        GradientTransform ProgressBar StateFinder StatefulFunction StatefulMapping
        algebraic_simplification bounded_while_loop breakpoint_if check check_error
        checkify checkpoint checkpointed_for_loop checkpointed_scan
        common_subexpression_elimination cond constant_fold copy_propagation
        dead_code_elimination debug_nan debug_nan_if draw draw_dot_graph
        eqns_to_closed_jaxpr eqns_to_jaxpr eval_shape fn_to_python_code for_loop
        fwd_grad grad hessian ifelse in_new_state_probe inline_jit jacfwd jacobian
        jacrev jaxpr_to_python_code jit jit_error_if jvp make_jaxpr map named_call
        named_scope optimize_jaxpr pmap2 pmap2_new_states register_prim_handler remat
        scan shard_map switch unvmap vector_grad view_pydot vjp vmap vmap2
        vmap2_new_states vmap_new_states while_loop
    """,
    # powerpax 0.2.1: all of it.
    "powerpax": "chunked_vmap checkpoint_chunked_scan sliced_scan Static",
    # Flax 0.12.8: the lifted transforms, and what they take as settings.
    "flax": """
        nn.add_metadata_axis nn.checkpoint nn.cond nn.custom_vjp nn.fold_rngs nn.grad
        nn.jit nn.jvp nn.map_variables nn.named_call nn.remat nn.remat_scan nn.scan
        nn.switch nn.value_and_grad nn.vjp nn.vmap nn.while_loop
        nnx.Carry nnx.DiffState nnx.StateAxes nnx.StateSharding nnx.checkify nnx.cond
        nnx.custom_vjp nnx.eval_shape nnx.fori_loop nnx.grad nnx.jit nnx.jit_partial
        nnx.jvp nnx.make_jaxpr nnx.pmap nnx.remat nnx.scan nnx.shard_map nnx.split_rngs
        nnx.switch nnx.transform_metadata nnx.value_and_grad nnx.vjp nnx.vmap
        nnx.while_loop
    """,
    # Equinox 0.13.8: all of its transforms, and of its internals those for loops.
    "equinox": """
        eqxi.AbstractProgressMeter eqxi.MaybeBuffer eqxi.NoProgressMeter
        eqxi.TextProgressMeter eqxi.TqdmProgressMeter eqxi.buffer_at_set
        eqxi.cached_filter_eval_shape eqxi.closure_to_pytree eqxi.eval_empty
        eqxi.eval_zero eqxi.maybe_set_p eqxi.noinline eqxi.nonbatchable
        eqxi.nondifferentiable eqxi.nondifferentiable_backward eqxi.nontraceable
        eqxi.scan eqxi.scan_trick eqxi.select_if_vmap_p eqxi.unvmap_all eqxi.unvmap_any
        eqxi.unvmap_max eqxi.while_loop
        eqx.branched_error_if eqx.error_if eqx.filter_checkpoint
        eqx.filter_closure_convert eqx.filter_custom_jvp eqx.filter_custom_vjp
        eqx.filter_eval_shape eqx.filter_grad eqx.filter_hessian eqx.filter_jacfwd
        eqx.filter_jacrev eqx.filter_jit eqx.filter_jvp eqx.filter_make_jaxpr
        eqx.filter_pmap eqx.filter_pure_callback eqx.filter_shard
        eqx.filter_value_and_grad eqx.filter_vjp eqx.filter_vmap eqx.if_array
        eqx.debug.announce_transform eqx.debug.assert_max_traces eqx.debug.backward_nan
        eqx.debug.breakpoint_if eqx.debug.get_num_traces eqx.debug.inspect_dce
        eqx.debug.store_dce
    """,
    # haliax 1.4.dev453: what goes along an axis, and what compiles.
    "haliax": """
        hax.ScanCheckpointPolicy hax.auto_sharded hax.fold hax.fsdp hax.map
        hax.named_jit hax.scan hax.shard hax.tree_checkpoint_name hax.vmap
        hnn.BlockSeq hnn.Stacked.init hnn.scan.BlockFoldable
    """,
    # JAX 0.10 and 0.12: loops, and all that is about rematerialisation.
    "jax_checkpoint": """
        jax.ad_checkpoint.checkpoint_name jax.ad_checkpoint.print_saved_residuals
        jax.checkpoint jax.lax.associative_scan jax.lax.fori_loop jax.lax.map
        jax.lax.scan jax.lax.while_loop jax.remat
        checkpoint_dots checkpoint_dots_with_no_batch_dims dots_saveable
        dots_with_no_batch_dims_saveable everything_saveable nothing_saveable
        offload_dot_with_no_batch_dims save_and_offload_only_these_names
        save_any_names_but_these save_anything_except_these_names
        save_from_both_policies save_only_these_names
    """,
}
