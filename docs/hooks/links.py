"""A hook of MkDocs: where the names of JAX and of Equinox are documented.

Their inventories are on the web, and a build needs no web. A name that is referred to
in a docstring or on a page, and is not listed here, fails the strict build.
"""

from mkdocs.config.defaults import MkDocsConfig

JAX = "https://docs.jax.dev/en/latest"
EQUINOX = "https://docs.kidger.site/equinox/api"

# JAX has a page for each function, and one for each of these modules.
JAX_NAMES = """
    jax.checkpoint jax.custom_jvp jax.custom_vjp jax.debug.callback jax.device_put
    jax.distributed.initialize jax.eval_shape jax.grad jax.hessian jax.jacfwd jax.jacrev
    jax.jit jax.jvp jax.lax.associative_scan jax.lax.cond jax.lax.fori_loop jax.lax.map
    jax.lax.psum jax.lax.scan jax.lax.switch jax.lax.while_loop jax.linearize
    jax.make_array_from_process_local_data jax.make_jaxpr jax.make_mesh jax.named_scope
    jax.numpy.where jax.shard_map jax.ShapeDtypeStruct jax.tree.map jax.value_and_grad
    jax.vjp jax.vmap
"""
JAX_MODULES = {
    "jax.sharding": "Mesh NamedSharding PartitionSpec",
    "jax.random": "key split",
}

# Equinox has several names on a page.
EQUINOX_PAGES = {
    "debug": "debug.breakpoint_if",
    "errors": "error_if",
    "manipulation": "apply_updates combine filter is_array is_inexact_array partition"
    " tree_at tree_equal",
    "module/advanced_fields": "field",
    "module/module": "Module",
    "nn/rnn": "nn.GRUCell nn.LSTMCell",
    "nn/stateful": "nn.make_with_state nn.State nn.StateIndex",
    "pretty-printing": "tree_pformat tree_pprint",
    "serialisation": "tree_deserialise_leaves tree_serialise_leaves",
    "transformations": "filter_checkpoint filter_eval_shape filter_grad filter_hessian"
    " filter_jacfwd filter_jacrev filter_jit filter_jvp filter_make_jaxpr"
    " filter_shard filter_value_and_grad filter_vjp filter_vmap if_array",
}


def addresses() -> dict[str, str]:
    """The address of each name."""
    found = {
        name: f"{JAX}/_autosummary/{name}.html#{name}" for name in JAX_NAMES.split()
    }
    for module, names in JAX_MODULES.items():
        for name in names.split():
            found[f"{module}.{name}"] = f"{JAX}/{module}.html#{module}.{name}"
    for page, names in EQUINOX_PAGES.items():
        for name in names.split():
            found[f"equinox.{name}"] = f"{EQUINOX}/{page}/#equinox.{name}"
    return found


def on_config(config: MkDocsConfig) -> None:
    """Tells the plug-in that links names what it cannot find in this site."""
    for name, address in addresses().items():
        config.plugins["autorefs"].register_url(name, address)
