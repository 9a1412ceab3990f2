"""The base class of every transform: a PyTree around the function it transforms."""

import abc
import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    Protocol,
    Self,
    TypeVar,
    dataclass_transform,
    overload,
)

import equinox as eqx

from ._generics import Function, NewP, NewR

_Instance = TypeVar("_Instance")
_InstanceIn = TypeVar("_InstanceIn", contravariant=True)
_Transform = TypeVar("_Transform")
_TransformOut = TypeVar("_TransformOut", covariant=True)


def setting(
    *,
    default: Any,
    converter: Callable[[Any], Any] | None = None,
    static: bool = True,
    kw_only: bool = True,
) -> Any:
    """A field that is given by keyword, and static unless something else is said."""
    return eqx.field(
        default=default, converter=converter, static=static, kw_only=kw_only
    )


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

    def __call__(self, f: Callable[..., Any], /) -> Any:
        return self.transform(**{"f": f}, **self.settings)

    def __repr__(self) -> str:
        settings = ", ".join(
            f"{name}={value!r}" for name, value in self.settings.items()
        )
        return f"{self.transform.__name__}({settings})"


if TYPE_CHECKING:
    from abc import ABCMeta as _ModuleMeta
else:
    _ModuleMeta = type(eqx.Module)


@dataclass_transform(field_specifiers=(dataclasses.field, eqx.field, setting))
class _TransformMeta(_ModuleMeta):
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
    def __call__(cls, *args: Any, **settings: Any) -> Any:
        __tracebackhide__ = True
        _reject_unknown(cls, settings)
        if args or "f" in settings:
            if not is_abstract(cls):
                _reject_unbound(cls, args, settings)
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
    def __signature__(self) -> inspect.Signature:
        # Without it `inspect.signature` takes whatever has a `__get__` for a builtin.
        signature = inspect.signature(type(self).__call__)
        _, *parameters = signature.parameters.values()
        return signature.replace(parameters=parameters)

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
        return dataclasses.replace(self, f=_bind(self.f, instance, owner))


def is_abstract(transform: type) -> bool:
    """Whether a class is one of the contracts rather than one of the transforms."""
    return transform.__name__.startswith("Abstract")


def _bind(
    f: Callable[..., Any], instance: Any, owner: type | None
) -> Callable[..., Any]:
    # A transform of a transform leaves the binding to the innermost, which knows that
    # `self` is not an argument to be mapped.
    if isinstance(f, AbstractTransform):
        return f.__get__(instance, owner)
    return eqx.Partial(f, instance)


def _reject_unknown(cls: type, settings: dict[str, Any]) -> None:
    known = {field.name for field in dataclasses.fields(cls)}
    for name in settings.keys() - known:
        raise TypeError(
            f"{cls.__name__} has no setting {name!r}. Its settings are: "
            f"{', '.join(sorted(known - {'f'}))}."
        )


def _reject_unbound(cls: type, args: tuple[Any, ...], settings: dict[str, Any]) -> None:
    signature = _signature(cls)
    try:
        signature.bind(*args, **settings)
    except TypeError as error:
        made = _without_settings(signature)
        _, *arguments = inspect.signature(cls.__call__).parameters.values()
        given = [p for p in arguments if p.kind != p.KEYWORD_ONLY]
        plain = inspect.Signature([p.replace(default=p.empty) for p in given])
        called = _without_settings(plain)
        raise TypeError(
            f"{cls.__name__}{made}: {error}. Pass settings by keyword, and "
            f"call the result: `el.{cls.__name__}{made}{called}`."
        ) from None


@functools.lru_cache(maxsize=256)
def _signature(cls: type) -> inspect.Signature:
    _, *parameters = inspect.signature(cls.__init__).parameters.values()
    return inspect.Signature(parameters)


def _without_settings(signature: inspect.Signature) -> inspect.Signature:
    """Without annotations, and without what may be left out or given by keyword."""
    parameters = signature.parameters.values()
    shown = [p for p in parameters if p.kind != p.KEYWORD_ONLY or p.default is p.empty]
    return inspect.Signature([p.replace(annotation=p.empty) for p in shown])
