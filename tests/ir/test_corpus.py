"""Every function of the corpus, rewritten and written as Python."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest

from eqloop import ir
from eqloop.ir._atoms import count_equations

from ..conftest import QUICK_FLAGS
from ..marks import slow, slow_if
from .corpus import PROBLEMS

pytestmark = pytest.mark.sampled


def is_float(leaf):
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def weigh(tree):
    """A scalar to differentiate, in which every number has its own weight."""
    leaves = [
        leaf.ravel().astype(jnp.float32)
        for leaf in jax.tree.leaves(tree)
        if is_float(leaf)
    ]
    return sum(leaf @ jnp.cos(jnp.arange(leaf.size)) for leaf in leaves)


def gradient(f, leaves, treedef):
    moves = [is_float(leaf) for leaf in leaves]

    def loss(moving):
        moving = iter(moving)
        args = [next(moving) if m else x for m, x in zip(moves, leaves, strict=True)]
        return weigh(f(*jax.tree.unflatten(treedef, args)))

    return jax.grad(loss)([x for m, x in zip(moves, leaves, strict=True) if m])


SLOW = {name for name, problem in PROBLEMS.items() if not problem.is_quick}
# Each week all of them; else a fifth here, and a fifth written as Python.
AS_PYTHON = set(list(PROBLEMS)[1::5]) - SLOW
WEEKLY = SLOW | (PROBLEMS.keys() - list(PROBLEMS)[::5])


@pytest.mark.parametrize("name", slow_if(WEEKLY.__contains__, PROBLEMS))
def test_optimized_functions_have_the_same_values_and_gradients(name):
    problem = PROBLEMS[name]
    leaves, treedef = jax.tree.flatten(problem.args)

    @jax.jit
    def evaluate(leaves):
        fs = problem.f, ir.Optimize(problem.f)
        out = [f(*jax.tree.unflatten(treedef, leaves)) for f in fs]
        if not problem.has_gradient:
            return out
        return out, [gradient(f, leaves, treedef) for f in fs]

    results = evaluate(leaves)
    if not problem.has_gradient:
        results = (results,)
    for expected, found in results:
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
        for x, y in pairs:
            assert jax.typeof(x) == jax.typeof(y)
            np.testing.assert_allclose(
                np.asarray(x, complex), np.asarray(y, complex), rtol=1e-5, atol=1e-6
            )


@pytest.mark.parametrize("name", slow_if(SLOW.__contains__, PROBLEMS))
def test_no_pass_adds_equations_or_breaks_the_jaxpr(name):
    problem = PROBLEMS[name]
    jaxpr = jax.make_jaxpr(problem.f)(*problem.args)
    reports = []
    optimized = ir.optimize(jaxpr, report=reports.append)
    assert ir.optimize(optimized) is optimized
    inlined = ir.optimize(jaxpr, passes=[ir.inline_jit, *ir.PASSES])
    for new in (optimized, inlined):
        jex.check_jaxpr(new.jaxpr)
        assert new.in_avals == jaxpr.in_avals
        assert new.out_avals == jaxpr.out_avals
        assert new.effects == jaxpr.effects
    (report,) = reports
    assert all(after <= before for _, before, after in report.runs)
    assert report.before == count_equations(jaxpr)
    assert report.after == count_equations(optimized)
    assert count_equations(inlined) <= count_equations(optimized)


RUNNER = """
import importlib, json, sys, traceback
import jax, numpy as np
import jax.numpy as jnp

failures = {}
data = np.load("data.npz")
for name, (ins, outs, keys) in json.load(open("problems.json")).items():
    args = [data[f"{name}_in{i}"] for i in range(ins)]
    args = [jax.random.wrap_key_data(x) if i in keys else x for i, x in enumerate(args)]
    try:
        found = getattr(importlib.import_module(name), name)(*args)
        found = found if isinstance(found, tuple) else (found,)
        assert len(found) == outs
        for i, x in enumerate(found):
            y = data[f"{name}_out{i}"]
            assert str(x.dtype) == str(data[f"{name}_dtype{i}"]), x.dtype
            np.testing.assert_allclose(np.asarray(x, complex), y, 1e-5, 1e-6)
    except Exception:
        failures[name] = traceback.format_exc()
assert "eqloop" not in sys.modules
json.dump(failures, open("failures.json", "w"))
"""


@pytest.fixture(scope="module", params=["quick", slow("the others")])
def modules(request, tmp_path_factory):
    """A directory with a module for each problem, its inputs and its outputs."""
    path: Path = tmp_path_factory.mktemp("modules")
    data, shapes = {}, {}
    others = PROBLEMS.keys() - AS_PYTHON
    for name in AS_PYTHON if request.param == "quick" else others:
        problem = PROBLEMS[name]
        (path / f"{name}.py").write_text(ir.to_python(problem.f)(*problem.args))
        leaves = jax.tree.leaves(problem.args)
        run = jax.jit(problem.f)
        outs = jax.tree.leaves(run(*problem.args))
        keys = [i for i, leaf in enumerate(leaves) if is_key(leaf)]
        shapes[name] = len(leaves), len(outs), keys
        for i, leaf in enumerate(leaves):
            data[f"{name}_in{i}"] = jax.random.key_data(leaf) if i in keys else leaf
        for i, leaf in enumerate(outs):
            data[f"{name}_out{i}"] = np.asarray(leaf, complex)
            data[f"{name}_dtype{i}"] = str(leaf.dtype)
    np.savez(path / "data.npz", **data)
    (path / "problems.json").write_text(json.dumps(shapes))
    return path


def is_key(leaf):
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


# One test, since both of pytest's workers would otherwise write the modules.
@pytest.mark.slow
def test_modules_run_on_their_own_and_lint(modules):
    (modules / "runner.py").write_text(RUNNER)
    environment = {
        **{k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        "XLA_FLAGS": QUICK_FLAGS,
    }
    subprocess.run(
        [sys.executable, "runner.py"],
        cwd=modules,
        env=environment,
        check=True,
        capture_output=True,
    )
    failures = json.loads((modules / "failures.json").read_text())
    assert not failures, "\n".join(failures.values())

    ruff = shutil.which("ruff", path=Path(sys.executable).parent) or shutil.which(
        "ruff"
    )
    if ruff is None:
        pytest.skip("ruff is not installed")
    (modules / "runner.py").unlink()
    for command in (["check"], ["format", "--check", "--diff"]):
        found = subprocess.run(
            [ruff, *command, "--isolated", str(modules)], capture_output=True, text=True
        )
        assert found.returncode == 0, found.stdout
