"""Jaxprs as graphs of Graphviz: a node for an operation, a cluster for what it runs."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax.extend.core as jex

from .._arrays import describe
from ._atoms import Closed, of_closed
from ._parts import EquationPart, numbered, parts, title, whole

if TYPE_CHECKING:
    import pydot

_STYLES = {
    "constant": 'shape=box, style="rounded,filled", fillcolor="#eeeeee"',
    "input": 'shape=box, style="rounded,filled", fillcolor="#dbe9f6"',
    "operation": "shape=box",
    "output": 'shape=box, style="rounded,filled", fillcolor="#fde9d5"',
}


@of_closed
def to_dot(jaxpr: jex.ClosedJaxpr, name: str = "jaxpr") -> str:
    """A jaxpr in the language of Graphviz.

    Operations are nodes, and the arrays between them are edges, with their types.
    Loops, branches and calls are clusters.

    Args:
        jaxpr: A closed jaxpr, as `jax.make_jaxpr(f)(*args)` gives.
        name: What it is called.

    Returns:
        The text, as for a `.dot` file.

    Raises:
        TypeError: `jaxpr` is not a closed jaxpr.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from eqloop import ir
        >>> print(ir.to_dot(jax.make_jaxpr(jnp.sin)(1.0), "sine"))
        digraph "sine" {
          label="sine"
          "g_i0" [label="input", shape=box, ...]
          "g_0" [label="sin", shape=box]
          "g_o0" [label="output", shape=box, ...]
          "g_i0" -> "g_0" [label="float32[]"]
          "g_0" -> "g_o0" [label="float32[]"]
        }
    """
    return dot_text(jaxpr, name)


@of_closed
def to_pydot(jaxpr: jex.ClosedJaxpr, name: str = "jaxpr") -> "pydot.Dot":
    """A jaxpr as a graph of pydot, which you can change and draw.

    Args:
        jaxpr: A closed jaxpr, as `jax.make_jaxpr(f)(*args)` gives.
        name: What it is called.

    Returns:
        The graph that `to_dot` describes.

    Raises:
        TypeError: `jaxpr` is not a closed jaxpr.
        ImportError: pydot is not installed.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from eqloop import ir
        >>> ir.to_pydot(jax.make_jaxpr(jnp.sin)(1.0), "sine").get_label()
        '"sine"'
    """
    try:
        import pydot
    except ImportError:
        raise ImportError(
            "to_pydot: pydot is not installed. To install it: `python -m pip install "
            "pydot`. `eqloop.ir.to_dot` and `eqloop.ir.draw` do not need it."
        ) from None
    found = pydot.graph_from_dot_data(to_dot(jaxpr, name))
    assert found, "pydot reads what `to_dot` writes"
    return found[0]


def dot_text(jaxpr: Closed, name: str) -> str:
    """A jaxpr in the language of Graphviz."""
    drawn = _drawn(whole(jaxpr), "g", name)
    return "\n".join([f"digraph {_quoted(name)} {{", *drawn.lines("  "), "}"])


# The nodes that a variable may come from: after a `cond`, one for each branch.
_Sources = dict[jex.Var, list[str]]


@dataclasses.dataclass
class Graph:
    """A jaxpr, or a call, loop or branch within one.

    Attributes:
        nodes: What is in it and in no cluster; a line each, as for the edges.
        clusters: The calls, loops and branches in it.
    """

    id: str
    label: str
    nodes: list[str] = dataclasses.field(default_factory=list)
    clusters: list["Graph"] = dataclasses.field(default_factory=list)
    edges: list[str] = dataclasses.field(default_factory=list)

    def add(self, id: str, label: str, kind: str) -> None:
        """Adds an operation, an input, an output or a constant."""
        self.nodes.append(f"{_quoted(id)} [label={_quoted(label)}, {_STYLES[kind]}]")

    def connect(self, atom: Any, target: str, sources: _Sources) -> None:
        """Adds the edges by which an array flows to a node."""
        found: Sequence[str] = () if isinstance(atom, jex.Literal) else sources[atom]
        ends = (f"{_quoted(source)} -> {_quoted(target)}" for source in found)
        self.edges += [f"{e} [label={_quoted(describe(atom.aval))}]" for e in ends]

    def lines(self, margin: str) -> Iterator[str]:
        """The lines that describe it."""
        yield f"{margin}label={_quoted(self.label)}"
        yield from (f"{margin}{node}" for node in self.nodes)
        for cluster in self.clusters:
            # Graphviz draws as a box what is called `cluster...`.
            yield f"{margin}subgraph {_quoted(f'cluster_{cluster.id}')} {{"
            yield from cluster.lines(f"{margin}  ")
            yield f"{margin}}}"
        yield from (f"{margin}{edge}" for edge in self.edges)


def _drawn(part: EquationPart, name: str, label: str) -> Graph:
    new, jaxpr = Graph(name, label), part.jaxpr.jaxpr
    sources: _Sources = {}
    constants = numbered("constant", len(jaxpr.constvars))
    for i, (var, text) in enumerate(zip(jaxpr.constvars, constants, strict=True)):
        new.add(f"{name}_c{i}", text, "constant")
        sources[var] = [f"{name}_c{i}"]
    for i, (var, text) in enumerate(zip(jaxpr.invars, part.inputs, strict=True)):
        new.add(f"{name}_i{i}", text, "input")
        sources[var] = [f"{name}_i{i}"]
    for i, eqn in enumerate(jaxpr.eqns):
        _draw_equation(new, eqn, f"{name}_{i}", sources)
    for i, (atom, text) in enumerate(zip(jaxpr.outvars, part.outputs, strict=True)):
        new.add(f"{name}_o{i}", text, "output")
        new.connect(atom, f"{name}_o{i}", sources)
    return new


def _draw_equation(new: Graph, eqn: jex.JaxprEqn, name: str, sources: _Sources) -> None:
    found = parts(eqn)
    sources.update((var, []) for var in eqn.outvars)
    if not found:
        new.add(name, title(eqn), "operation")
        for atom in eqn.invars:
            new.connect(atom, name, sources)
        for var in eqn.outvars:
            sources[var].append(name)
        return
    cluster = Graph(name, title(eqn))
    new.clusters.append(cluster)
    if eqn.primitive.name == "cond":
        cluster.add(f"{name}_index", "index", "input")
        new.connect(eqn.invars[0], f"{name}_index", sources)
    for i, part in enumerate(found):
        inside = _drawn(part, f"{name}_{i}", part.label)
        if len(found) == 1:
            inside.label, new.clusters[-1] = cluster.label, inside
        else:
            cluster.clusters.append(inside)
        for j, atom in enumerate(part.operands):
            new.connect(atom, f"{name}_{i}_i{j}", sources)
        if part.gives_results:
            # A loop that is differentiated has more results than its body.
            for j, (var, _) in enumerate(zip(eqn.outvars, part.outputs, strict=False)):
                sources[var].append(f"{name}_{i}_o{j}")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
