"""Jaxprs as graphs: a node for each operation, a cluster for each call and loop."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex

from .._arrays import describe
from ._atoms import Closed
from ._parts import EquationPart, numbered, parts, title


@dataclasses.dataclass(frozen=True)
class Node:
    """An operation, an input or an output.

    Attributes:
        kind: `"input"`, `"output"`, `"constant"` or `"operation"`.
    """

    id: str
    label: str
    kind: str


@dataclasses.dataclass(frozen=True)
class Edge:
    """An array that flows from one node to another; `label` is its type."""

    source: str
    target: str
    label: str


@dataclasses.dataclass
class Graph:
    """A jaxpr, or a call, loop or branch within one.

    Attributes:
        nodes: What is in it and in no cluster.
        clusters: The calls, loops and branches in it.
    """

    id: str
    label: str
    nodes: list[Node] = dataclasses.field(default_factory=list)
    clusters: list["Graph"] = dataclasses.field(default_factory=list)
    edges: list[Edge] = dataclasses.field(default_factory=list)


def graph(jaxpr: Closed, label: str) -> Graph:
    """The graph of a jaxpr."""
    inputs = numbered("input", len(jaxpr.in_avals))
    outputs = numbered("output", len(jaxpr.out_avals))
    part = EquationPart("", jaxpr, (), inputs, outputs)
    return _drawn(part, "g", label)


# The nodes that a variable may come from: after a `cond`, one for each branch.
_Sources = dict[jex.Var, list[str]]


def _drawn(part: EquationPart, name: str, label: str) -> Graph:
    new, jaxpr = Graph(name, label), part.jaxpr.jaxpr
    sources: _Sources = {}
    constants = numbered("constant", len(jaxpr.constvars))
    for i, (var, text) in enumerate(zip(jaxpr.constvars, constants, strict=True)):
        new.nodes.append(Node(f"{name}_c{i}", text, "constant"))
        sources[var] = [f"{name}_c{i}"]
    for i, (var, text) in enumerate(zip(jaxpr.invars, part.inputs, strict=True)):
        new.nodes.append(Node(f"{name}_i{i}", text, "input"))
        sources[var] = [f"{name}_i{i}"]
    for i, eqn in enumerate(jaxpr.eqns):
        _draw_equation(new, eqn, f"{name}_{i}", sources)
    for i, (atom, text) in enumerate(zip(jaxpr.outvars, part.outputs, strict=True)):
        new.nodes.append(Node(f"{name}_o{i}", text, "output"))
        _connect(new, atom, f"{name}_o{i}", sources)
    return new


def _draw_equation(new: Graph, eqn: jex.JaxprEqn, name: str, sources: _Sources) -> None:
    found = parts(eqn)
    sources.update((var, []) for var in eqn.outvars)
    if not found:
        new.nodes.append(Node(name, title(eqn), "operation"))
        for atom in eqn.invars:
            _connect(new, atom, name, sources)
        for var in eqn.outvars:
            sources[var].append(name)
        return
    cluster = Graph(name, title(eqn))
    new.clusters.append(cluster)
    if eqn.primitive.name == "cond":
        cluster.nodes.append(Node(f"{name}_index", "index", "input"))
        _connect(new, eqn.invars[0], f"{name}_index", sources)
    for i, part in enumerate(found):
        inside = _drawn(part, f"{name}_{i}", part.label)
        if len(found) == 1:
            inside.label, new.clusters[-1] = cluster.label, inside
        else:
            cluster.clusters.append(inside)
        for j, atom in enumerate(part.operands):
            _connect(new, atom, f"{name}_{i}_i{j}", sources)
        if part.gives_results:
            # A loop that is differentiated has more results than its body.
            for j, (var, _) in enumerate(zip(eqn.outvars, part.outputs, strict=False)):
                sources[var].append(f"{name}_{i}_o{j}")


def _connect(new: Graph, atom: Any, target: str, sources: _Sources) -> None:
    found: Sequence[str] = () if isinstance(atom, jex.Literal) else sources[atom]
    new.edges += [Edge(source, target, describe(atom.aval)) for source in found]
