"""Pictures of functions."""

import dataclasses
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.extend.core as jex

from .._arrays import describe
from .._calls import open_call
from .._tracebacks import border
from ._atoms import Closed
from ._dot import dot_text
from ._parts import EquationPart, function_name, parts, title, whole

_PICTURES = (".pdf", ".png", ".svg")


@dataclasses.dataclass(frozen=True)
class Drawing:
    """A picture of a function.

    A notebook shows a picture if Graphviz is installed. Otherwise, and when printed, it
    is a tree of text.

    Attributes:
        dot: The graph in the language of Graphviz.
        tree: The tree.

    Examples:
        >>> import eqloop as el, jax.numpy as jnp
        >>> drawing = el.ir.draw(jnp.sin)(1.0)
        >>> drawing.dot.startswith("digraph")
        True
    """

    dot: str
    tree: str

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the picture into a file, in the format of its suffix.

        Args:
            path: The file. `.svg`, `.png` and `.pdf` need Graphviz; `.dot`, the graph,
                and `.txt`, the tree, do not.

        Raises:
            ValueError: The name ends in none of these.
            RuntimeError: Graphviz is not installed.
        """
        suffix, texts = Path(path).suffix, {".dot": self.dot, ".txt": self.tree}
        if suffix in texts:
            Path(path).write_text(f"{texts[suffix]}\n")
        elif suffix in _PICTURES:
            Path(path).write_bytes(self._picture(suffix))
        else:
            raise ValueError(
                f"Drawing.save: the name of the file must end in one of "
                f"{', '.join((*_PICTURES, *texts))}, but it is {os.fspath(path)!r}."
            )

    def _picture(self, suffix: str) -> bytes:
        if shutil.which("dot") is None:
            raise RuntimeError(
                "Pictures are laid out by Graphviz, whose program `dot` is not found: "
                "install Graphviz, or save the drawing as `.dot` or `.txt`, or print "
                "it, which needs nothing."
            )
        command = ["dot", f"-T{suffix[1:]}"]
        return subprocess.run(
            command, input=self.dot.encode(), capture_output=True, check=True
        ).stdout

    def _repr_svg_(self) -> str | None:
        # Given `None`, a notebook falls back to the text.
        return self._picture(".svg").decode() if shutil.which("dot") else None

    def __repr__(self) -> str:
        return self.tree


@border
def draw(f: Callable[..., Any]) -> Callable[..., Drawing]:
    """Draws what a function does.

    Operations are nodes, and the arrays between them are edges, with their types.
    Loops, branches and calls are boxes around what is inside.

    Args:
        f: The function.

    Returns:
        A function that takes the arguments of `f` and returns a `Drawing`. A notebook
        shows it, `.save("f.svg")` and `.save("f.png")` write it into a file, and
        printed it is a tree.

    Raises:
        TypeError: `f` is not a function.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from eqloop import ir
        >>> def drift(c, xs):
        ...     return jax.lax.scan(lambda c, x: (c + x, jnp.sin(c)), c, xs)
        >>> ir.draw(drift)(jnp.zeros(2), jnp.ones((3, 2)))
        drift: float32[2], float32[3,2] -> float32[2], float32[3,2]
        └── scan, 3 steps: float32[2], float32[3,2] -> float32[2], float32[3,2]
            ├── add: float32[2], float32[2] -> float32[2]
            └── sin: float32[2] -> float32[2]
    """
    if not callable(f):
        raise TypeError(
            f"draw: `f` must be a function, but it is {f!r}. (For a jaxpr there are "
            f"`to_dot` and `to_pydot`.)"
        )

    @border
    def drawing(*args: Any, **kwargs: Any) -> Drawing:
        call, arrays = open_call("draw", f, args, kwargs)
        jaxpr = jax.make_jaxpr(call.on_arrays)(arrays)
        name = function_name(f)
        return Drawing(dot_text(jaxpr, name), tree(jaxpr, name))

    return drawing


# The tree, for where nothing can be drawn.


def tree(jaxpr: Closed, name: str) -> str:
    """A jaxpr as a tree: operations with the types of their operands and results."""
    return "\n".join([f"{name}: {_types(jaxpr.jaxpr)}", *_branches([whole(jaxpr)])])


def _branches(found: Sequence[EquationPart]) -> Iterator[str]:
    """The parts of an equation, or of a single one its equations; a line for each."""
    if len(found) == 1:
        eqns = found[0].jaxpr.eqns
        entries = [(f"{title(eqn)}: {_types(eqn)}", parts(eqn)) for eqn in eqns]
    else:
        entries = [(f"{one.label}: {_types(one.jaxpr.jaxpr)}", [one]) for one in found]
    for i, (head, inside) in enumerate(entries):
        is_last = i == len(entries) - 1
        yield f"{'└' if is_last else '├'}── {head}"
        margin = "    " if is_last else "│   "
        yield from (f"{margin}{line}" for line in _branches(inside))


def _types(ends: jex.Jaxpr | jex.JaxprEqn) -> str:
    each = (ends.invars, ends.outvars)
    return " -> ".join(", ".join(describe(x.aval) for x in xs) or "()" for xs in each)
