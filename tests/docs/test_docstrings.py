"""Every public name has a docstring: arguments, what is returned, errors, an example.

The examples are run as the doctests that they are.
"""

import dataclasses
import inspect
import re
import types
from collections.abc import Iterator
from typing import Any

import pytest

import eqloop as el
from eqloop.checkpointing import AbstractSchedule

# What raises nothing of its own, whatever it is given.
CANNOT_RAISE = {
    "FittedPart",
    "ForeignLoop",
    "Layout",
    "MapPlan",
    "NonFiniteError",
    "NotInKernelError",
    "Traced",
    "ir.Report",
    "policies.Policy",
}


def members(module: types.ModuleType, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name in module.__all__:
        value = getattr(module, name)
        if isinstance(value, types.ModuleType):
            yield from members(value, f"{prefix}{name}.")
        elif callable(value):
            yield prefix + name, value


def methods(cls: type) -> Iterator[tuple[str, Any]]:
    """The public methods of a class; calling and indexing are among them."""
    for name in dir(cls):
        found = inspect.getattr_static(cls, name)
        found = getattr(found, "__func__", found)
        is_public = not name.startswith("_") or name in ("__call__", "__getitem__")
        if not (is_public and inspect.isfunction(found)):
            continue
        if found.__module__.startswith("eqloop"):
            is_contract = name in ("check", "layout")  # of a schedule with the engine
            yield name, getattr(AbstractSchedule, name) if is_contract else found


PUBLIC = dict(members(el))
FUNCTIONS = {name: value for name, value in PUBLIC.items() if inspect.isfunction(value)}
CLASSES = {name: value for name, value in PUBLIC.items() if inspect.isclass(value)}
METHODS = {
    f"{name}.{method}": value
    for name, cls in CLASSES.items()
    for method, value in methods(cls)
}


def sections(value: Any) -> dict[str, str]:
    """The text of a docstring by its headings; the first is called `""`."""
    parts = re.split(r"^(\w+):\n", inspect.getdoc(value) or "", flags=re.MULTILINE)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def described(text: str) -> set[str]:
    """The arguments that a section has an entry for."""
    entries = re.findall(r"^ {4}(?! )([*\w, `]+):", text, re.MULTILINE)
    return {name.strip(" *`") for entry in entries for name in entry.split(",")}


def parameters(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self", "cls"}


@pytest.mark.parametrize("name", sorted(FUNCTIONS | CLASSES))
def test_a_name_has_a_line_and_an_example(name):
    doc = inspect.getdoc(PUBLIC[name])
    assert doc
    line, *rest = doc.splitlines()
    assert line.endswith(".")
    assert not any(rest[:1])
    assert ">>> " in doc


@pytest.mark.parametrize("name", sorted(FUNCTIONS | METHODS))
def test_a_function_has_its_arguments_and_what_it_returns(name):
    function = (FUNCTIONS | METHODS)[name]
    doc = sections(function)
    assert described(doc.get("Args", "")) == parameters(function)
    if inspect.signature(function).return_annotation not in (None, "None"):
        assert "Returns" in doc


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_a_class_has_its_settings(name):
    cls = CLASSES[name]
    if dataclasses.is_dataclass(cls):
        doc = sections(cls)
        # What the library alone sets has an underscore.
        init = {field.name for field in dataclasses.fields(cls) if field.init}
        fields = {name for name in init if not name.startswith("_")}
        text = doc.get("Args", "") + doc.get("Attributes", "")
        assert described(text) == fields


@pytest.mark.parametrize("name", sorted(FUNCTIONS | CLASSES))
def test_errors_are_listed(name):
    value = PUBLIC[name]
    own = [value, *(f for _, f in methods(value))] if name in CLASSES else [value]
    raises = any("Raises" in sections(each) for each in own)
    assert raises != (name in CANNOT_RAISE)
