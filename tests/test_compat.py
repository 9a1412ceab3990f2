"""One file alone knows which JAX is installed; what it names is met in each."""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import pytest
from jax.extend.core import primitives
from packaging.requirements import Requirement

import eqloop as el
from eqloop import _compat, _programs, ir
from eqloop._programs import _layouts
from eqloop.checkpointing.engine import _kept_names
from eqloop.debug import _can_fail
from eqloop.ir import _primitives
from eqloop.ir.codegen import _handlers

HOME = Path(el.__file__).parent
COMPAT = HOME / "_compat.py"
# Imported where they are used, since they need not be there.
OPTIONAL = {"import tqdm", "import pydot", "from matplotlib", "import diffrax"}
# Whose attributes differ between versions, by the names that they go by here.
FOREIGN = {"eqx", "hijax", "jax", "jex", "jnp", "lax", "mlir", "primitives"}


# Names in tables that JAX has no object for, or not in each version.
UNLISTED = _primitives._named(
    """call_hi_primitive closed_call constant copy_p custom_vmap_call debug_print
    empty eval_jaxpr expand_dims known_cast log2 lu_pivots_to_permutation
    optimization_barrier pcast psum_invariant pure_callback pvary ragged_dot
    ragged_dot_general random_unwrap random_wrap reduce_scatter scatter-sub
    scatter_add scatter_max scatter_min scatter_mul scatter_sub shard_map split stack
    tile unreduced_psum unstack"""
)


def branches(code: str) -> Iterator[int]:
    """The lines that ask which version is installed, or what there is in it."""
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Attribute(value=ast.Name(id="sys"), attr="version_info"):
                yield node.lineno
            case ast.Attribute(attr="__version__"):
                yield node.lineno
            case ast.Call(
                func=ast.Name(id="hasattr" | "getattr"),
                args=[place, ast.Constant(), *_],
            ) if ast.unparse(place).partition(".")[0] in FOREIGN:
                yield node.lineno
            case ast.Try(body=[ast.Import() | ast.ImportFrom() as first, *_]):
                if not ast.unparse(first).startswith(tuple(OPTIONAL)):
                    yield node.lineno


@pytest.mark.parametrize(
    "code",
    [
        "jax.__version__ > '0.12'",
        "sys.version_info >= (3, 12)",
        "hasattr(jax.core, 'Tracer')",
        "getattr(hijax, 'HiPrim', None)",
        "try:\n    from jax import a\nexcept ImportError:\n    a = None",
    ],
)
def test_branches_are_found(code: str):
    assert list(branches(code))


# What JAX makes jaxprs and primitives of, and the files that know it.
MAKINGS = {
    "dce_jaxpr": {"_jaxprs.py"},
    "debug_info": {"_jaxprs.py", "_compat.py"},
    "DebugInfo": {"_jaxprs.py"},
    "jex.Jaxpr()": {"_jaxprs.py"},
    "jex.Var()": {"_jaxprs.py"},
    "new_jaxpr_eqn": set[str](),
    "HiPrimitive": {"_compat.py", "_equations.py", "_identity.py", "_varied.py"},
}


def makings(code: str) -> Iterator[str]:
    """The names in some code that are keys of the table, with `()` if called."""
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Attribute(attr=name) | ast.Name(id=name):
                yield name
            case ast.Call(func=function):
                yield f"{ast.unparse(function)}()"


def test_one_file_makes_jaxprs():
    found = {name: set[str]() for name in MAKINGS}
    for path in HOME.rglob("*.py"):
        for name in MAKINGS.keys() & makings(path.read_text()):
            found[name].add(path.name)
    assert found == MAKINGS


# Rooms where no object is told by the names of its attributes, but for objects of the
# user or of JAX that may lack one: in one function each.
BY_CLASS = [
    "_arrays",
    "_calls",
    "_programs",
    "autodiff",
    "branching",
    "debug",
    "ir",
    "tracing",
]
ASKED = {
    ("_array_types.py", "dtype"),
    ("_array_types.py", "sharding"),
    ("_bits.py", "dtype"),
    ("_bits.py", "weak_type"),
    ("_lowering.py", "memory_space"),
    ("_partition.py", "dtype"),
    ("_partition.py", "shape"),
    ("_tree_differences.py", "_fields"),
    ("_named.py", "func"),
    # Primitives of other libraries have no class that tells them from those of JAX.
    ("_simpler.py", "func"),
    ("_simpler.py", "impl"),
}


def asked(code: str) -> Iterator[str]:
    """The attributes that an object is asked for, other than those of functions."""
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Call(
                func=ast.Name(id="hasattr" | "getattr"),
                args=[_, ast.Constant(value=str(name)), *_],
            ) if not name.startswith("__"):
                yield name


def test_objects_are_told_by_their_class():
    assert list(asked("hasattr(primitive, 'rewritten')")) == ["rewritten"]
    paths = [path for room in BY_CLASS for path in (HOME / room).rglob("*.py")]
    found = {(path.name, name) for path in paths for name in asked(path.read_text())}
    assert found == ASKED


def test_no_other_file_asks_for_versions():
    modules = [path for path in HOME.rglob("*.py") if path != COMPAT]
    found = [
        (path.name, line) for path in modules for line in branches(path.read_text())
    ]
    assert found == []


def test_each_difference_names_a_version():
    text = COMPAT.read_text()
    lines, end = text.splitlines(), 0
    for node in ast.parse(text).body:
        # From the end of the one before, since comments stand above.
        start, end = end, node.end_lineno or 0
        match node:
            case ast.FunctionDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                if not name.startswith("_"):
                    assert "JAX 0." in "\n".join(lines[start:end]), name


def gradient(w: jax.Array, x: jax.Array) -> jax.Array:
    def loss(w):
        step = lambda carry, _: (jnp.sin(carry @ (w @ w)), None)
        return jax.lax.scan(step, x, None, length=3)[0].sum()

    # The part of the scan that depends on `w` alone becomes a call.
    return jax.grad(jax.checkpoint(loss, policy=el.policies.save_dots))(w)


W, X = jnp.eye(3) / 2, jnp.ones(3)


def test_a_call_that_each_version_names_otherwise():
    jaxpr = jax.make_jaxpr(gradient)(W, X)
    if not getattr(jax.config, "jax_remat3", False):  # with it there is no such call
        found = {eqn.primitive.name for eqn in jaxpr.eqns}
        (name,) = {"closed_call", "eval_jaxpr"} & found
        assert name in _compat.CALLS
    assert el.Trace(gradient).leaf_usage(W, X) == {"w": "read", "x": "read"}
    expected: Any = jax.jit(gradient)(W, X)
    assert jnp.allclose(el.DebugNonFinite(gradient)(W, X), expected)
    assert jnp.allclose(ir.Optimize(gradient)(W, X), expected)
    assert "def " in ir.to_python(gradient)(W, X)


def test_names_in_tables_are_those_of_primitives():
    """A name that JAX has changed makes a table forget an operation, in silence."""
    found = {p.name for p in vars(primitives).values() if isinstance(p, jex.Primitive)}
    names: set[str] = set().union(
        *(_can_fail._SAFE, _programs.READS, _programs.WRITES, _kept_names._DOTS),
        *(_primitives.FOLDABLE, _primitives.COMMUTATIVE, _primitives.DISTINCT),
        *(_handlers._STATEMENTS, _handlers.OPERATIONS, _layouts._ALONG_AXES),
    )
    assert names - found <= UNLISTED


def test_a_broken_jaxlib_is_refused_by_name():
    _compat.refuse_broken_version((0, 11, 0))
    with pytest.raises(ImportError, match=r"jaxlib 0\.11\.1.*issues/40101.*install"):
        _compat.refuse_broken_version((0, 11, 1))


def test_pyproject_leaves_out_the_versions_that_are_refused():
    text = (HOME.parent / "pyproject.toml").read_text()
    needs = tomllib.loads(text)["project"]["dependencies"]
    (allowed,) = [r.specifier for r in map(Requirement, needs) if r.name == "jaxlib"]
    refused = [".".join(map(str, version)) for version in _compat._REFUSED]
    assert refused
    assert not list(allowed.filter(refused))
