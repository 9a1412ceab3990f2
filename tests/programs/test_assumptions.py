"""What JAX does not promise is tried at import, and a change fails aloud."""

import contextlib
import os
import subprocess
import sys

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import checkify
from jax.extend.core import primitives
from jax.sharding import AxisType

from eqloop._programs import _assumptions, _effects, _reaching, check_jax


def check_fails_with(*words: str):
    with pytest.raises(ImportError) as caught:
        check_jax()
    message = str(caught.value)
    assert f"JAX {jax.__version__}" in message
    for word in words:
        assert word in message


def nothing(*args: object, **kwargs: object) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext()


CHANGES = {
    "effects": (_effects, "_OF_CALLBACKS", (), "`io_callback` with `ordered=True`"),
    "checks": (_effects, "_OF_CHECKS", (), "`checkify.check`"),
    "names": (
        _assumptions,
        "_EXPECTED_NAMES",
        {"scan", "loop", "loops"},
        "loop, loops",
    ),
    "barriers": (lax, "optimization_barrier", lambda x: x, "optimization_barrier"),
    "callbacks": (jax, "pure_callback", lambda f, t, x: x, "pure_callback"),
    "given names": (_assumptions, "checkpoint_name", lambda x, name: -x, "_name`"),
    "programs": (jex, "jaxprs_in_params", lambda params: [], "equation of a `cond`"),
    "scans": (_reaching, "scan_counts", lambda params: (1, 1), "`scan`"),
    "looks": (
        checkify,
        "checkify",
        lambda f, errors: lambda x: (None, f(x)),
        "how `checkify` looks into an equation",
    ),
    "axes": (_effects, "_OF_AXES", "AxisEffect", "the effect of a collective"),
    "collectives": (lax, "pmax", lambda x, axis: x, "`psum`, `pmax` and `pmin`"),
    "digests": (_assumptions, "digest_of", lambda x: "", "its constants"),
    "scopes": (_assumptions, "loop_scope", nothing, "in a `jax.named_scope`"),
    "keys": (_assumptions, "str", lambda x: "key", "the type of a `rbg` key"),
    "makers": (primitives.sin_p, "impl", print, "the implementation of a primitive"),
    "errors": (lax, "while_loop", None, "'NoneType' object is not callable"),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_found(name: str, monkeypatch: pytest.MonkeyPatch):
    place, attribute, value, words = CHANGES[name]
    monkeypatch.setattr(place, attribute, value, raising=False)
    check_fails_with(words)


def test_all_that_has_changed_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_effects, "_OF_CHECKS", ())
    monkeypatch.setattr(_assumptions, "loop_scope", nothing)
    check_fails_with("`checkify.check`; ", "`jax.named_scope`. Install")


@contextlib.contextmanager
def flags(**values: object):
    old = {name: getattr(jax.config, name) for name in values}
    for name, value in values.items():
        jax.config.update(name, value)
    try:
        yield
    finally:
        for name, value in old.items():
            jax.config.update(name, value)


# JAX 0.12 has the last three.
FLAGS = [
    dict(jax_enable_x64=True, jax_numpy_dtype_promotion="standard"),
    dict(jax_disable_jit=True),
    dict(jax_check_tracer_leaks=True),
    dict(jax_debug_nans=True),
    dict(jax_enable_checks=True),
    dict(jax_default_prng_impl="rbg"),
    dict(jax_remat3=True),
    dict(jax_custom_jvp3=True, jax_custom_vjp3=True),
    dict(jax_remat3=True, jax_custom_jvp3=True, jax_custom_vjp3=True),
]


@pytest.mark.sampled
@pytest.mark.parametrize("values", FLAGS, ids=",".join)
def test_flags_make_no_difference(values: dict[str, object]):
    if not all(hasattr(jax.config, name) for name in values):
        pytest.skip("this JAX does not have the flag")
    with flags(**values):
        check_jax()


def in_a_function(x):
    check_jax()
    return x.sum()


CALLS = {
    "jit": jax.jit(in_a_function),
    "gradient": jax.grad(in_a_function),
    "batch": jax.vmap(in_a_function),
    "named batch": jax.vmap(in_a_function, axis_name="i"),
    "loop": lambda x: lax.map(in_a_function, x),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", CALLS)
def test_the_library_can_be_imported_in_a_function_that_is_traced(name: str):
    CALLS[name](jnp.ones((2, 3)))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_or_under_a_mesh(kind: AxisType):
    mesh = jax.make_mesh((2,), ("i",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        check_jax()
        spec = jax.P("i")
        over = lambda x: x + in_a_function(x)
        rows = jax.device_put(jnp.ones(2), jax.NamedSharding(mesh, spec))
        jax.jit(jax.shard_map(over, in_specs=spec, out_specs=spec))(rows)


def test_no_backend_is_started():
    """Users choose devices, or call `jax.distributed.initialize`, after the import."""
    code = (
        "import eqloop, jax; jax.config.update('jax_num_cpu_devices', 3); "
        "jax.config.update('jax_platforms', 'cpu'); assert jax.device_count() == 3"
    )
    environment = {**os.environ, "JAX_PLATFORMS": "none_of_that_name"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
