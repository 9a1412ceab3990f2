"""An extension of griffe: how transforms are called, and what their settings mean.

griffe reads the source without running it. It does not know that the fields of an
`equinox.Module` are the arguments of its class, nor that `Args:` of a docstring go on
with those of the classes that it is derived from. Python does.
"""

import dataclasses
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import griffe


class ModuleSignatures(griffe.Extension):
    """Gives each class of modules the `__init__` and docstring that it has when run."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Called once all of the package has been read."""
        package = importlib.import_module(pkg.name)
        for name in package.__all__:
            getattr(package, name)  # which imports it, and completes its docstring
        for found in list(_classes(pkg)):
            module = importlib.import_module(found.module.path)
            value = getattr(module, found.name, None)
            if isinstance(value, type) and issubclass(value, eqx.Module):
                found.set_member("__init__", _init(pkg, found, value))
                if found.docstring and value.__doc__:
                    found.docstring.value = inspect.cleandoc(value.__doc__)


def _classes(module: griffe.Module) -> Iterator[griffe.Class]:
    for member in module.members.values():
        if isinstance(member, griffe.Module):
            yield from _classes(member)
        elif isinstance(member, griffe.Class):
            yield member


def _init(pkg: griffe.Module, found: griffe.Class, value: type) -> griffe.Function:
    annotations = dict(_annotations(pkg, value))
    parameters = [griffe.Parameter("self", kind=griffe.ParameterKind.positional_only)]
    for name, parameter in inspect.signature(value).parameters.items():
        lacks = parameter.default is inspect.Parameter.empty
        parameters.append(
            griffe.Parameter(
                name,
                annotation=annotations.get(name),
                kind=griffe.ParameterKind(parameter.kind.description),
                default=None if lacks else _written(parameter.default),
            )
        )
    return griffe.Function(
        "__init__", parameters=griffe.Parameters(*parameters), parent=found
    )


def _written(default: Any) -> str:
    """A default as one would write it: a function by its name, without an address."""
    if isinstance(default, tuple) and all(map(inspect.isfunction, default)):
        return f"({', '.join(one.__name__ for one in default)})"
    return repr(default)


def _annotations(pkg: griffe.Module, value: type) -> Iterator[tuple[str, Any]]:
    for base in reversed(value.__mro__):
        if base.__module__.partition(".")[0] == pkg.name:
            path = f"{base.__module__}.{base.__qualname__}".partition(".")[2]
            for name, attribute in pkg[path].attributes.items():
                yield name, _given(pkg, value, name) or attribute.annotation


def _given(pkg: griffe.Module, value: type, name: str) -> Any:
    """What may be given for a field that is converted: what its converter takes."""
    fields = {field.name: field for field in dataclasses.fields(value)}
    convert = fields[name].metadata.get("converter") if name in fields else None
    if not inspect.isfunction(convert) or "<" in convert.__qualname__:
        return None  # a lambda has no annotations
    package, _, path = f"{convert.__module__}.{convert.__qualname__}".partition(".")
    return pkg[path].parameters[0].annotation if package == pkg.name else None
