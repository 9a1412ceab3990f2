"""Graphs in the language of Graphviz."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import jax.extend.core as jex

from ._atoms import of_closed
from ._graph import Graph, Node, graph

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
    return dot_text(graph(jaxpr, name))


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


def dot_text(drawn: Graph) -> str:
    """A graph in the language of Graphviz."""
    return "\n".join([f"digraph {_quoted(drawn.label)} {{", *_lines(drawn, "  "), "}"])


def _lines(drawn: Graph, margin: str) -> Iterator[str]:
    yield f"{margin}label={_quoted(drawn.label)}"
    yield from (f"{margin}{_node(node)}" for node in drawn.nodes)
    for cluster in drawn.clusters:
        # Graphviz draws as a box what is called `cluster...`.
        yield f"{margin}subgraph {_quoted(f'cluster_{cluster.id}')} {{"
        yield from _lines(cluster, f"{margin}  ")
        yield f"{margin}}}"
    for edge in drawn.edges:
        ends = f"{_quoted(edge.source)} -> {_quoted(edge.target)}"
        yield f"{margin}{ends} [label={_quoted(edge.label)}]"


def _node(node: Node) -> str:
    return f"{_quoted(node.id)} [label={_quoted(node.label)}, {_STYLES[node.kind]}]"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
