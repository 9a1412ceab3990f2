"""Pictures and trees."""

import builtins
import re
import stat
import subprocess

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from eqloop import ir

from ..marks import slow_if
from .corpus import PROBLEMS

X = jnp.ones(3, jnp.float32)
ROWS = jnp.ones((2, 3), jnp.float32)
ZERO = jnp.int32(0)


def f(x):
    y = lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * x), (ZERO, x))[1]
    y, _ = lax.scan(lambda c, x: (c + x, None), y, jnp.ones_like(ROWS), reverse=True)
    return lax.cond(y[0] > 0, jnp.sin, jax.jit(jnp.cos), y)


def test_the_tree():
    assert (
        str(ir.draw(f)(X))
        == """\
f: float32[3] -> float32[3]
├── while: float32[3], int32[], float32[3] -> int32[], float32[3]
│   ├── cond: int32[], float32[3] -> bool[]
│   │   └── lt: int32[], int32[] -> bool[]
│   └── body: float32[3], int32[], float32[3] -> int32[], float32[3]
│       ├── add: int32[], int32[] -> int32[]
│       └── mul: float32[3], float32[3] -> float32[3]
├── broadcast_in_dim: float32[] -> float32[2,3]
├── scan, 2 steps, last first: float32[3], float32[2,3] -> float32[3]
│   └── add: float32[3], float32[3] -> float32[3]
├── slice: float32[3] -> float32[1]
├── squeeze: float32[1] -> float32[]
├── gt: float32[], float32[] -> bool[]
├── convert_element_type: bool[] -> int32[]
└── cond: int32[], float32[3] -> float32[3]
    ├── branch 0: float32[3] -> float32[3]
    │   └── jit cos: float32[3] -> float32[3]
    │       └── cos: float32[3] -> float32[3]
    └── branch 1: float32[3] -> float32[3]
        └── sin: float32[3] -> float32[3]"""
    )


def test_loops_and_branches_are_clusters_and_edges_have_types():
    dot = ir.to_dot(jax.make_jaxpr(f)(X), "f")
    labels = re.findall(r'subgraph "cluster_[^"]*" {\n *label="([^"]*)"', dot)
    assert labels == [
        "while",
        "cond",
        "body",
        "scan, 2 steps, last first",
        "cond",
        "branch 0",
        "jit cos",
        "branch 1",
    ]
    assert '[label="float32[2,3]"]' in dot
    assert '[label="continue", ' in dot


@pytest.mark.parametrize(
    "name", slow_if(lambda name: not PROBLEMS[name].is_quick, PROBLEMS)
)
def test_every_edge_joins_two_nodes(name):
    problem = PROBLEMS[name]
    dot = ir.to_dot(jax.make_jaxpr(problem.f)(*problem.args))
    nodes = re.findall(r'^ *"([^"]*)" \[', dot, re.MULTILINE)
    assert len(set(nodes)) == len(nodes)
    ends = re.findall(r'"([^"]*)" -> "([^"]*)"', dot)
    assert {end for pair in ends for end in pair} <= set(nodes)


def test_pydot_reads_it():
    drawn = ir.to_pydot(jax.make_jaxpr(f)(X), "f")
    assert len(drawn.get_subgraphs()) == 3


def test_without_pydot(monkeypatch):
    original = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "pydot":
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install pydot"):
        ir.to_pydot(jax.make_jaxpr(f)(X))


def test_files_of_text(tmp_path):
    drawing = ir.draw(f)(X)
    for suffix, text in ((".dot", drawing.dot), (".txt", drawing.tree)):
        drawing.save(tmp_path / f"f{suffix}")
        assert (tmp_path / f"f{suffix}").read_text() == f"{text}\n"


def test_without_graphviz(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "")
    drawing = ir.draw(f)(X)
    assert drawing._repr_svg_() is None
    assert "scan" in repr(drawing)
    with pytest.raises(RuntimeError, match="install Graphviz, or save the drawing as"):
        drawing.save(tmp_path / "f.svg")


# A stand-in, as Graphviz is not everywhere: it says what it was asked for.
GRAPHVIZ = """#!/bin/sh
echo "<svg>$1 $(head -c 7)</svg>"
"""


def test_pictures_are_laid_out_by_graphviz(monkeypatch, tmp_path):
    program = tmp_path / "dot"
    program.write_text(GRAPHVIZ)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    drawing = ir.draw(f)(X)
    drawing.save(tmp_path / "f.png")
    assert (tmp_path / "f.png").read_text() == "<svg>-Tpng digraph</svg>\n"
    assert drawing._repr_svg_() == "<svg>-Tsvg digraph</svg>\n"
    program.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(subprocess.CalledProcessError):
        drawing.save(tmp_path / "f.svg")
