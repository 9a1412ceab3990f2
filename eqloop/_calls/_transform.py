"""The base class of every transform, a PyTree around its function, and its settings.

First the class, with what it is generic in. Then what its settings may be: checks,
counts, and amounts of memory as people write them. At last the docstrings of classes
that inherit settings.
"""

import abc
import dataclasses
import inspect
import operator
import re
from collections.abc import Callable
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    Protocol,
    Self,
    dataclass_transform,
    overload,
)

import equinox as eqx

from .._arrays import describe
from .._classes import BorderMeta, hash_of
from .._signatures import check_made
from .._tracebacks import border
from .._types import Value

# What transforms are generic in: the parameters and the results of their functions. A
# type checker that cannot follow how a transform is made, as mypy cannot where there
# are settings alone, takes `Any` for each of them.

if TYPE_CHECKING:
    from typing_extensions import ParamSpec, TypeVar

    P = ParamSpec("P", default=...)
    R = TypeVar("R", default=Any)
    Carry = TypeVar("Carry", default=Any)
    Y = TypeVar("Y", default=Any)
    X = TypeVar("X", default=Any)
    Function = TypeVar("Function", default=Any)
else:
    from typing import ParamSpec, TypeVar

    P = ParamSpec("P")
    R = TypeVar("R")
    Carry = TypeVar("Carry")
    Y = TypeVar("Y")
    X = TypeVar("X")
    Function = TypeVar("Function")

# The same, of the function that is given to an `_of`, see below.
NewP = ParamSpec("NewP")
NewR = TypeVar("NewR")
NewCarry = TypeVar("NewCarry")
NewY = TypeVar("NewY")
NewX = TypeVar("NewX")


_Instance = TypeVar("_Instance")
_InstanceIn = TypeVar("_InstanceIn", contravariant=True)
_Transform = TypeVar("_Transform")
_TransformOut = TypeVar("_TransformOut", covariant=True)


def setting(*, static: bool = True, kw_only: bool = True, **others: Any) -> Any:
    """A field that is given by keyword, and static unless something else is said."""
    return eqx.field(static=static, kw_only=kw_only, **others)


# For type checkers. A class that is generic in its function declares in `_of`, which
# does not exist when the program runs, what it is for which function. Without it the
# type of a transform could not follow from a function that is given later.


class _Makes(Protocol[NewP, _TransformOut]):
    """A class of transforms."""

    @staticmethod
    def _of(*args: NewP.args, **kwargs: NewP.kwargs) -> _TransformOut: ...


class _Binds(Protocol[_InstanceIn, NewP, NewR, _TransformOut]):
    """A transform of a function whose first argument is bound in methods."""

    @property
    def f(self) -> Callable[Concatenate[_InstanceIn, NewP], NewR]: ...

    @staticmethod
    def _of(f: Callable[NewP, NewR], /) -> _TransformOut: ...


@dataclasses.dataclass(frozen=True)
class Decorator:
    """A transform with its settings and without its function, to be used as `@...`.

    This is what `el.ChunkedVmap(chunk_size=32)` gives; calling it with the function
    gives the transform.
    """

    transform: type["AbstractTransform"]
    settings: dict[str, Any]

    @border
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs:
            name = self.transform.__name__
            settings = ", ".join(f"{k}=..." for k in self.settings)
            raise TypeError(
                f"{name}: without a function, `el.{name}({settings})` is a decorator, "
                f"which is called with a function alone. Give it the function first, "
                f"and call the result: `el.{name}(f, {settings})(...)`."
            )
        return self.transform(**{"f": args[0]}, **self.settings)

    def __repr__(self) -> str:
        settings = ", ".join(
            f"{name}={value!r}" for name, value in self.settings.items()
        )
        return f"{self.transform.__name__}({settings})"


@dataclass_transform(field_specifiers=(dataclasses.field, eqx.field, setting))
class _TransformMeta(BorderMeta):
    # In Equinox `__new__` must return an instance of the class, so it is here that a
    # call which lacks `f` is told from one that has it.

    @overload
    def __call__(
        cls: type[_Transform], f: Callable[..., Any], *args: Any, **settings: Any
    ) -> _Transform: ...
    @overload
    def __call__(
        cls: _Makes[NewP, _Transform], **settings: Any
    ) -> Callable[NewP, _Transform]: ...
    @overload
    def __call__(
        cls: type[_Transform], **settings: Any
    ) -> Callable[[Callable[..., Any]], _Transform]: ...
    @border
    def __call__(cls, *args: Any, **settings: Any) -> Any:
        _reject_unknown(cls, settings)
        if args or "f" in settings:
            if not is_abstract(cls):
                check_made(cls, args, settings)
            return super().__call__(*args, **settings)
        return Decorator(cls, settings)  # pyright: ignore


class AbstractTransform(eqx.Module, Generic[Function], metaclass=_TransformMeta):  # pyright: ignore
    """A function `f`, and what to do when it is called.

    A transform is a PyTree: the arrays of `f` are its arrays, so it can be a layer of a
    model, be differentiated, partitioned, edited with [`equinox.tree_at`][], serialised
    and printed. Its settings are static.

    Subclasses are final. They declare `f` as their first field, their other settings
    after it, and implement `__call__`. From this class they have that

    - leaving out `f` gives a decorator with the settings: `@el.Scan(unroll=4)`;
    - in the body of a class they bind like a function: in
      `model.step(...)`, `model` is passed to `f` first, and its arrays are arrays of
      the transform.
    """

    f: eqx.AbstractVar[Callable[..., Any]]

    if TYPE_CHECKING:
        # For mypy, which makes nothing of the metaclass: what is given is an `f`, or
        # settings alone. The `__init__` that pyright knows has all of the fields.
        def __init__(
            self, f: Function = ..., /, *args: Any, **settings: Any
        ) -> None: ...

    @abc.abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs `f`, transformed."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for base in cls.__bases__:
            if issubclass(base, AbstractTransform) and not is_abstract(base):
                raise TypeError(
                    f"{cls.__name__} cannot subclass {base.__name__}, which is final: "
                    f"wrap a function or module with it instead."
                )

    def __check_init__(self) -> None:
        if not callable(self.f):
            name = type(self).__name__
            raise TypeError(
                f"{name}: `f` must be callable, but {self.f!r} is not. (Settings are "
                f"given by keyword; `@{name}(...)` without `f` is a decorator.)"
            )

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        # The line that errors of JAX name, if it is `jax.jit` that is given this.
        return self.f

    @property
    def __signature__(self) -> inspect.Signature:
        # Without it `inspect.signature` takes whatever has a `__get__` for a builtin.
        signature = inspect.signature(type(self).__call__)
        _, *parameters = signature.parameters.values()
        return signature.replace(parameters=parameters)

    def __hash__(self) -> int:
        return hash_of(self, super().__hash__)

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...
    @overload
    def __get__(
        self: _Binds[_Instance, NewP, NewR, _Transform],
        instance: _Instance,
        owner: type | None = None,
    ) -> _Transform: ...
    @overload
    def __get__(self, instance: Any, owner: type | None = None) -> Self: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        # A transform of a transform leaves the binding to the innermost, which knows
        # that `self` is not an argument to be mapped.
        if isinstance(self.f, AbstractTransform):
            f = self.f.__get__(instance, owner)
        else:
            f = eqx.Partial(self.f, instance)
        return dataclasses.replace(self, f=f)


def is_abstract(transform: type) -> bool:
    """Whether a class is one of the contracts rather than one of the transforms."""
    return transform.__name__.startswith("Abstract")


class AbstractSameCall(AbstractTransform[Callable[P, R]], Generic[P, R]):
    """A transform that is called as its function is, and so has its signature.

    Final classes declare `f` anew: pyright takes the type of a method that is decorated
    with a transform from what the class itself declares.
    """

    f: Callable[P, R]

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.f)


def _reject_unknown(cls: type, settings: dict[str, Any]) -> None:
    known = {field.name for field in dataclasses.fields(cls)}
    for name in settings.keys() - known:
        raise TypeError(
            f"{cls.__name__} has no setting {name!r}. Its settings are: "
            f"{', '.join(sorted(known - {'f'}))}."
        )


# What settings may be.

_UNITS = {"B": 1}
for _power, _prefix in enumerate("KMGTP", start=1):
    _UNITS |= {f"{_prefix}B": 1000**_power, f"{_prefix}iB": 1024**_power}
_UNIT_OF = {name.lower(): size for name, size in _UNITS.items()}


def check_bool(owner: str, setting: str, value: object) -> None:
    """Raises unless a setting is `True` or `False`."""
    if not isinstance(value, bool):
        raise TypeError(f"{owner}: `{setting}` must be a bool, not {value!r}.")


def int_of(value: Value) -> int | None:
    """The int that a value is or stands for; `None` for bools, tracers and the rest."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:  # a tracer has an `__index__`, too, which raises
        return None


def as_int_if_index(value: Value) -> Value:
    """The int that a value stands for, NumPy's say; any other value as it is."""
    number = int_of(value)
    return value if number is None else number


def check_least(owner: str, setting: str, value: int, least: int) -> None:
    """Raises if a setting is less than it may be."""
    if value < least:
        raise ValueError(
            f"{owner}: `{setting}` must be at least {least}, but it is {value}."
        )


def as_count(owner: str, setting: str, what: str, value: object, least: int = 1) -> int:
    """Makes an `int` of a setting that is a number of something."""
    if (number := int_of(value)) is None:
        raise TypeError(
            f"{owner}: `{setting}` must be an int, {what}, but it is "
            f"{describe(value)}, of type {type(value).__name__}."
        )
    check_least(owner, setting, number, least)
    return number


def parse_bytes(owner: str, setting: str, value: object) -> int:
    """The number of bytes that an int or a string such as `"512MiB"` stands for."""
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([a-z]+)\s*", value, re.I)
        if match is None or match[2].lower() not in _UNIT_OF:
            raise ValueError(
                f"{owner}: `{setting}={value!r}` is not an amount of memory. Write a "
                f"number and its unit, such as '64kB', '512 MiB' or '1.5GiB', or give "
                f"an int, which is taken as bytes. Units are {', '.join(_UNITS)}."
            )
        count = int(float(match[1]) * _UNIT_OF[match[2].lower()])
    elif (count := int_of(value)) is None:
        raise TypeError(
            f"{owner}: `{setting}` must be an int, in bytes, or a string such as "
            f"'512MiB', not {value!r} of type {type(value).__name__}."
        )
    if count < 1:
        raise ValueError(
            f"{owner}: `{setting}` must be at least 1 byte, but it is {value!r}."
        )
    return count


def format_bytes(count: int) -> str:
    """A count of bytes with three digits and a binary unit."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if size < 1000:
            break
        size, unit = size / 1024, larger
    return f"{count} B" if unit == "B" else f"{size:.3g} {unit}"


def exact_bytes(count: int) -> int | str:
    """A count of bytes as one writes it, such as `"512MiB"`, if that is not rounded."""
    found = list[str]()
    for unit in ("TiB", "GiB", "MiB", "KiB", "TB", "GB", "MB", "KB"):
        hundredths, rest = divmod(100 * count, _UNIT_OF[unit.lower()])
        if not rest and 100 <= hundredths < 10**6:
            found.append(f"{hundredths / 100:g}{unit}")
    # 4 MB are 3906.25 KiB as well, which nobody writes.
    return min(found, key=len, default=count)


def format_limit(count: int) -> str:
    """A count of bytes that a user gave, in the unit in which it was given.

    >>> format_limit(4_000_000), format_limit(2**29), format_limit(1_234_567)
    ('4 MB', '512 MiB', '1.18 MiB')
    """
    exact = exact_bytes(count)
    if isinstance(exact, int):
        return format_bytes(count)
    return re.sub("(?=[A-Z])", " ", exact, count=1)


# Docstrings of classes that inherit settings from others.

_ARGS = re.compile(r"^Args:\n(?: {4}.*\n|\n(?= {4}))+", re.MULTILINE)
_SECTION = re.compile(r"(?=^\w+:$)", re.MULTILINE)
_ENTRY = re.compile(r"^ {4}(\w+): .*\n(?:^ {8}.*\n)*", re.MULTILINE)


def document_settings(cls: type) -> None:
    """Completes the `Args:` of a class by those of the classes it is derived from."""
    # So a setting that several classes have is documented once, where it is declared; a
    # class for which it means something else says so in its own docstring, which
    # counts.
    own = _documented(cls)
    entries: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        entries |= _documented(base)
    if not dataclasses.is_dataclass(cls) or own.keys() == entries.keys():
        return
    fields = sorted(dataclasses.fields(cls), key=lambda field: field.kw_only is True)
    args = "".join(entries[field.name] for field in fields if field.name in entries)
    doc = inspect.cleandoc(cls.__doc__ or "")
    if found := _ARGS.search(doc):
        cls.__doc__ = f"{doc[: found.start()]}Args:\n{args}{doc[found.end() :]}"
    elif found := _SECTION.search(doc):
        cls.__doc__ = f"{doc[: found.start()]}Args:\n{args}\n{doc[found.end() :]}"


def _documented(cls: type) -> dict[str, str]:
    """The entries of the `Args:` of a class, by what they are about."""
    args = _ARGS.search(inspect.cleandoc(vars(cls).get("__doc__") or "") + "\n")
    return {entry[1]: entry[0] for entry in _ENTRY.finditer(args[0])} if args else {}
