"""The text of one function, being written, and of the module around it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from ..._arrays import describe
from .._atoms import Closed, dtype_of
from . import _values
from ._lines import (
    INDENT,
    WIDTH,
    call,
    lines,
    structure,
    tuple_of,
)
from ._names import Names
from ._reads import written


class Module:
    """The constants and functions of a module.

    Attributes:
        write_equation: Writes an equation into a scope.
        constant_limit: The most bytes of a constant.
        constants: The lines that define its constants.
        open_functions: The functions whose derivatives are just being written.
    """

    def __init__(
        self,
        write_equation: Callable[["Scope", jex.JaxprEqn], None],
        constant_limit: int,
    ):
        self.names = Names()
        self.write_equation = write_equation
        self.constant_limit = constant_limit
        self.constants: list[str] = []
        self.functions: list[list[str]] = []
        self.open_functions: dict[tuple[str, ...], str] = {}
        # The jaxprs and arrays are kept, so that their ids do not become others'.
        self._written: dict[Any, tuple[Any, str]] = {}

    def constant(self, value: Any) -> str:
        """The name of a constant of the module."""
        if id(value) not in self._written:
            if value.nbytes > self.constant_limit:
                raise ValueError(
                    f"to_python: the function holds a constant array "
                    f"{describe(value)} of {value.nbytes} bytes, more than the "
                    f"{self.constant_limit} that are written into a module. Make "
                    f"it an argument of the function, or raise `constant_limit`."
                )
            name = self.names.claim("CONSTANT", "CONSTANT")
            self.constants += lines(_constant_text(value), prefix=f"{name} = ")
            self._written[id(value)] = value, name
        return self._written[id(value)][1]

    def has_written(self, jaxpr: Closed, kind: str) -> bool:
        """Whether a jaxpr is a function of that kind by now."""
        return (id(jaxpr), kind) in self._written

    def function(
        self,
        jaxpr: Closed,
        wish: str,
        decorator: str = "",
        *,
        kind: str = "",
        as_tuple: bool = False,
    ) -> str:
        """The name of a function of the module that does what a jaxpr does."""
        key = id(jaxpr), kind
        if key not in self._written:
            name = self.names.claim(wish, "function")
            self._written[key] = jaxpr, name
            scope = Scope(self, self.names.variables(), depth=1)
            parameters = scope.fresh(len(jaxpr.jaxpr.invars))
            body = scope.body(jaxpr, parameters, as_tuple=as_tuple)
            self.functions.append([*head(decorator, name, parameters), *body])
        return self._written[key][1]

    def entry(
        self,
        jaxpr: Closed,
        name: str,
        parameters: Sequence[str],
        docstring: Sequence[str],
    ) -> None:
        """Writes the function that is the purpose of the module."""
        scope = Scope(self, self.names.variables(), depth=1)
        scope.lines += [f"{INDENT}{line}".rstrip() for line in docstring]
        body = scope.body(jaxpr, parameters)
        self.functions.append([*head("@jax.jit", name, parameters), *body])


class Scope:
    """The body of a function.

    Attributes:
        module: The module that it is in.
    """

    def __init__(self, module: Module, variables: Iterator[str], depth: int):
        self.module = module
        self.lines: list[str] = []
        self._variables = variables
        self._depth = depth
        self._names: dict[jex.Var, str] = {}
        self._definitions: dict[jex.Var, jex.JaxprEqn] = {}
        self._written: list[jex.JaxprEqn] = []
        self._read: set[jex.Var] = set()

    def expect(self, jaxpr: Closed) -> None:
        """Finds out which parts of a jaxpr to write."""
        self._definitions.update((v, eqn) for eqn in jaxpr.eqns for v in eqn.outvars)
        self._written, read = written(jaxpr, self._definitions)
        self._read.update(read)

    # Reading.

    def read(self, atom: jax.core.Atom) -> str:
        """An operand of an operator: a name, or a number beside an array."""
        number = None
        if isinstance(atom, jex.Literal) and not np.ndim(atom.val):
            number = _values.number(np.asarray(atom.val, dtype_of(atom)))
        return number or self.argument(atom)

    def argument(self, atom: jax.core.Atom) -> str:
        """An operand of a function of `jax.lax`: a name, or a number with its dtype."""
        if not isinstance(atom, jex.Literal):
            return self._names[atom]
        if np.ndim(atom.val):
            return self.module.constant(atom.val)
        return _values.typed_number(np.asarray(atom.val, dtype_of(atom)))

    def arguments(self, atoms: Iterable[jax.core.Atom]) -> list[str]:
        """Operands of a function of `jax.lax`."""
        return [self.argument(atom) for atom in atoms]

    def definition(self, atom: jax.core.Atom) -> jex.JaxprEqn | None:
        """The equation that computes an operand, if it is in this function."""
        return None if isinstance(atom, jex.Literal) else self._definitions.get(atom)

    # Writing.

    def fresh(self, count: int) -> list[str]:
        """New names."""
        return [next(self._variables) for _ in range(count)]

    def bind(self, variables: Sequence[jex.Var], texts: Sequence[str]) -> None:
        """From here on these texts stand for these variables."""
        self._names.update(zip(variables, texts, strict=True))

    def statement(self, item: str, prefix: str = "") -> None:
        """Writes `prefix` and an expression."""
        self.lines += lines(item, indent=self._depth, prefix=prefix)

    def targets(self, variables: Sequence[jex.Var]) -> list[str]:
        """Names for assigned variables; `_` for those that are not needed."""
        names = [
            next(self._variables) if var in self._read else "_" for var in variables
        ]
        self.bind(variables, names)
        return names

    def assign(
        self, variables: Sequence[jex.Var], value: str, *, one_is_bare: bool = True
    ) -> None:
        """Writes `a, b = value`."""
        if not any(var in self._read for var in variables):
            self.statement(value)
            return
        self.unpack(variables, value, one_is_bare=one_is_bare)

    def unpack(
        self, variables: Sequence[jex.Var], value: str, *, one_is_bare: bool = True
    ) -> None:
        """Writes `a, b = value`, or if they are many `a = value`, read as `a[0]`."""
        if len(variables) == 1 and one_is_bare:
            (name,) = self.targets(variables)
            self.statement(value, f"{name} = ")
        elif 5 * len(variables) > WIDTH // 2:
            (name,) = self.fresh(1)
            self.bind(variables, [f"{name}[{i}]" for i in range(len(variables))])
            self.statement(value, f"{name} = ")
        else:
            names = tuple_of(self.targets(variables), bare=len(variables) > 1)
            self.statement(value, f"{names} = ")

    def body(
        self, jaxpr: Closed, parameters: Sequence[str], *, as_tuple: bool = False
    ) -> list[str]:
        """All lines of a function with these parameters."""
        self.expect(jaxpr)
        self.bind(jaxpr.jaxpr.invars, parameters)
        results = self.write(jaxpr)
        make = tuple_of if as_tuple else structure
        self.statement(make(results, bare=True), "return ")
        return self.lines

    def write(self, jaxpr: Closed) -> list[str]:
        """Writes the jaxpr that was expected, its inputs bound; gives its outputs."""
        constvars = jaxpr.jaxpr.constvars
        for var, const in zip(constvars, jaxpr.consts, strict=True):
            self.bind([var], [self._constant(var, const)])
        for eqn in self._written:
            self.module.write_equation(self, eqn)
        return self.arguments(jaxpr.jaxpr.outvars)

    def local_function(
        self,
        wish: str,
        default: str,
        jaxpr: Closed,
        consts: Sequence[str],
        groups: Sequence[tuple[str, int]],
        result: Callable[[list[str]], str],
    ) -> str:
        """Writes a function inside this one, and gives its name."""
        name = self.module.names.claim(wish, default)
        scope = Scope(self.module, self._variables, self._depth + 1)
        scope.expect(jaxpr)
        scope.bind(jaxpr.jaxpr.invars[: len(consts)], consts)
        invars = iter(jaxpr.jaxpr.invars[len(consts) :])
        parameters: list[str] = []
        for parameter, count in groups:
            variables = [next(invars) for _ in range(count)]
            if count == 1:
                parameters += scope.fresh(1)
                scope.bind(variables, parameters[-1:])
                continue
            parameters.append(self.module.names.claim(parameter, parameter))
            if count:
                scope.unpack(variables, parameters[-1])
        outputs = scope.write(jaxpr)
        scope.statement(result(outputs), "return ")
        if self.lines and self.lines[-1]:
            self.lines.append("")
        self.lines += [*head("", name, parameters, self._depth), *scope.lines, ""]
        return name

    def _constant(self, var: jex.Var, const: Any) -> str:
        if isinstance(const, jax.core.Tracer):
            raise ValueError(
                "to_python: the function closes over an array that is being traced by "
                "`jax.jit` or another transform: call `to_python` outside of it, or "
                "make the array an argument."
            )
        return self.module.constant(const)


def head(
    decorator: str, name: str, parameters: Sequence[str], indent: int = 0
) -> list[str]:
    """The lines before the body of a function."""
    line = lines(call(name, *parameters), indent=indent, prefix="def ", suffix=":")
    return [decorator, *line] if decorator else line


def _constant_text(value: Any) -> str:
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        data = _values.array(jax.random.key_data(value))
        impl = f'"{jax.random.key_impl(value)}"'
        return call("jax.random.wrap_key_data", data, impl=impl)
    return _values.array(value)
