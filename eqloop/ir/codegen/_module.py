"""Functions as the text of a Python module."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np

from ..._arrays import describe, flatten, has_dtype, is_dynamic, paths
from ..._calls import argument_names, as_count, open_call
from ..._programs import equations, input_names, rewritable_programs
from ..._tracebacks import border
from .._atoms import Closed, has_known_shape, of_closed
from .._dead_code import eliminate_dead_code
from .._parts import function_name
from ._handlers import write_equation
from ._lines import INDENT
from ._scope import Module

CONSTANT_LIMIT = 2**20

_IMPORTS = {
    r"base64\.": "import base64",
    r"jax\.": "import jax",
    r"jnp\.": "import jax.numpy as jnp",
    r"np\.": "import numpy as np",
    r"lax\.": "from jax import lax",
    r"checkpoint_name\(": "from jax.ad_checkpoint import checkpoint_name",
    r"primitives\.": "from jax.extend.core import primitives",
}


@border
def to_python(
    f: Callable[..., Any], *, constant_limit: int = CONSTANT_LIMIT
) -> Callable[..., str]:
    """Writes what a function does as a Python module that needs nothing but JAX.

    The module has a function with the name of `f`. It takes the arrays of the
    arguments, and those of `f` if that is a module, and returns the arrays of the
    result, in the order in which JAX flattens them. It computes the same, and has the
    same derivatives. Everything that is not an array is fixed to its value in the call.

    Loops are `lax.scan` and `lax.while_loop`, branches are `lax.cond` and `lax.switch`,
    with named functions for their bodies. The transforms of this library are written as
    the loops that they run. Their gradients are the same, but take the memory of JAX's
    own loops. Progress bars, and the checks of `DebugNonFinite`, are left out. Constant
    arrays are written into the module.

    Args:
        f: The function.
        constant_limit: The most bytes of a constant array.

    Returns:
        A function that takes the arguments of `f` and returns the text.

    Raises:
        TypeError: `f` is not a function.
        ValueError: When called: an operation is not known (see `register_handler`), a
            constant is too large, an array is closed over that is being traced, or an
            argument is of a symbolic size.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from eqloop import ir
        >>> def f(x):
        ...     return jnp.sin(x) * 2
        >>> print(ir.to_python(f)(jnp.ones(3)))
        \"\"\"`f`, as JAX traced it.\"\"\"
        <BLANKLINE>
        import jax
        from jax import lax
        <BLANKLINE>
        <BLANKLINE>
        @jax.jit
        def f(x):
            \"\"\"Computes `f`.
        <BLANKLINE>
            Args:
                x: float32[3]
        <BLANKLINE>
            Returns:
                float32[3]
            \"\"\"
            a = lax.sin(x)
            b = a * 2.0
            return b
        <BLANKLINE>
    """
    if not callable(f):
        raise TypeError(
            f"to_python: `f` must be a function, but it is {f!r}. (For a jaxpr there "
            f"is `jaxpr_to_python`.)"
        )
    what = "the most bytes of a constant array"
    as_count("to_python", "constant_limit", what, constant_limit, least=0)

    @border
    def write(*args: Any, **kwargs: Any) -> str:
        call, arrays = open_call("to_python", f, args, kwargs)
        jaxpr = jax.make_jaxpr(call.on_arrays)(arrays)
        name = function_name(f)
        names = _argument_names(f, name, args, kwargs)
        return _module(jaxpr, name, names, constant_limit)

    return write


@of_closed
def jaxpr_to_python(
    jaxpr: jex.ClosedJaxpr, name: str = "f", *, constant_limit: int = CONSTANT_LIMIT
) -> str:
    """Writes what a jaxpr does as a Python module that needs nothing but JAX.

    Args:
        jaxpr: A closed jaxpr, as `jax.make_jaxpr(f)(*args)` gives.
        name: The name of the function in the module.
        constant_limit: The most bytes of a constant array.

    Returns:
        The text of the module; see `to_python`.

    Raises:
        TypeError: `jaxpr` is not a closed jaxpr.
        ValueError: `name` is not a valid name, or as for `to_python`.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from eqloop import ir
        >>> text = ir.jaxpr_to_python(jax.make_jaxpr(jnp.sin)(1.0), "sine")
        >>> print(text.splitlines()[0])
        \"\"\"`sine`, as JAX traced it.\"\"\"
    """
    if not name.isidentifier():
        raise ValueError(
            f"jaxpr_to_python: `name` must be a name of Python, but it is {name!r}."
        )
    names = [n or f"x{i}" for i, n in enumerate(input_names(jaxpr))]
    return _module(jaxpr, name, names, constant_limit)


def _argument_names(
    f: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[str]:
    """The paths of all arrays, in the order of the jaxpr's inputs."""
    named = [(name, f), *zip(argument_names(f, args), args, strict=True)]
    return [
        path
        for prefix, tree in (*named, *sorted(kwargs.items()))
        for path, leaf in zip(paths(tree, prefix), flatten(tree)[0], strict=True)
        if is_dynamic(leaf)
    ]


def _module(
    jaxpr: Closed, name: str, argument_paths: Sequence[str], constant_limit: int
) -> str:
    for path, var in zip(argument_paths, jaxpr.jaxpr.invars, strict=True):
        _check_shape(path, var)
    module = Module(write_equation, constant_limit)
    function = module.names.claim(name, "f")
    parameters = [module.names.claim(path, "x") for path in argument_paths]
    jaxpr = eliminate_dead_code(jaxpr)
    docstring = _docstring(jaxpr, name, argument_paths, parameters)
    module.entry(jaxpr, function, parameters, docstring)
    settings = (
        ['jax.config.update("jax_enable_x64", True)'] if _is_64_bit(jaxpr) else []
    )
    top = [*settings, *module.constants]
    text = ["", *top] if top else []
    for lines in module.functions:
        text += ["", "", *lines]
    header = [f'"""`{name}`, as JAX traced it."""', "", *_imports("\n".join(text))]
    return "\n".join([*header, *text, ""])


def _check_shape(path: str, var: jex.Var) -> None:
    if has_known_shape(var):
        return
    raise ValueError(
        f"to_python: `{path}` is {describe(var.aval)}, of a symbolic size, as in "
        f"`jax.export`. A module is written for arrays of known sizes: call "
        f"`to_python` with such, outside of what is exported."
    )


def _docstring(
    jaxpr: Closed, name: str, argument_paths: Sequence[str], parameters: Sequence[str]
) -> list[str]:
    lines = [f'"""Computes `{name}`.', ""]
    if parameters:
        lines.append("Args:")
    for parameter, path, aval in zip(
        parameters, argument_paths, jaxpr.in_avals, strict=True
    ):
        origin = "" if parameter == path else f"`{path}`, "
        lines.append(f"{INDENT}{parameter}: {origin}{describe(aval)}")
    types = ", ".join(map(describe, jaxpr.out_avals)) or "nothing"
    return [
        *lines,
        *([""] if parameters else []),
        "Returns:",
        f"{INDENT}{types}",
        '"""',
    ]


def _imports(text: str) -> list[str]:
    used = [line for name, line in _IMPORTS.items() if re.search(rf"\b{name}", text)]
    return [*used[:1], "", *used[1:]] if used[:1] == ["import base64"] else used


def _is_64_bit(jaxpr: Closed) -> bool:
    atoms = [*jaxpr.jaxpr.invars, *jaxpr.jaxpr.constvars]
    for eqn in equations(jaxpr, rewritable_programs):
        atoms += [*eqn.invars, *eqn.outvars]
    wide = {np.dtype(name) for name in ("int64", "uint64", "float64", "complex128")}
    return any(has_dtype(atom.aval) and atom.aval.dtype in wide for atom in atoms)
