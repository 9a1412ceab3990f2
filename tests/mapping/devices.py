"""Meshes of the eight devices that the tests have, and what moves between them."""

import re
from collections import Counter
from typing import Any

import equinox as eqx
import jax
from jax.sharding import AxisType, Mesh

DEVICES = 8

_MOVES = re.compile(
    r"\b(all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|"
    r"collective-broadcast)(?:-start)?\("
)


def mesh_of(**sizes: int) -> Mesh:
    """A mesh with axes of these sizes, which the compiler may split as it likes."""
    types = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types)


def explicit_mesh_of(**sizes: int) -> Mesh:
    """A mesh whose axes are in the types of arrays."""
    types = (AxisType.Explicit,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types)


def collectives(f: Any, *args: Any) -> Counter[str]:
    """How many operations of each kind between devices a compiled program has."""
    program = eqx.filter_jit(f).lower(*args).compile().compiled
    return Counter(_MOVES.findall(program.as_text()))
