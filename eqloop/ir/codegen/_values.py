"""Values as Python: numbers, dtypes, arrays, and the parameters of operations."""

import base64
import dataclasses
import enum
import json
import math
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives

from ._lines import call, list_of, tuple_of

# Arrays of at most so many elements are written as lists of numbers, larger ones as
# text that encodes their bytes.
INLINE_ELEMENTS = 16


class UnprintableError(Exception):
    """A value for which there is no Python text."""


def dtype_text(dtype: Any) -> str:
    """A dtype: `jnp.float32`."""
    name = jnp.dtype(dtype).name
    return f"jnp.{'bool_' if name == 'bool' else name}"


def number(value: Any) -> str | None:
    """A number that JAX reads as just this value, beside an array of its dtype."""
    # There is none for integers that do not fit into 32 bits, nor for complex numbers.
    value = np.asarray(value)
    if value.dtype == np.bool_:
        return repr(bool(value))
    if jnp.issubdtype(value.dtype, jnp.integer):
        return repr(int(value)) if abs(int(value)) < 2**31 else None
    if not jnp.issubdtype(value.dtype, jnp.floating):
        return None
    as_float = float(value)
    if math.isnan(as_float):
        return "jnp.nan"
    if math.isinf(as_float):
        return "jnp.inf" if as_float > 0 else "-jnp.inf"
    # The shortest text for this float32, rather than 17 digits of its float64.
    text = repr(float(str(value)) if value.dtype == np.float32 else as_float)
    return text.replace("e+", "e")


def typed_number(value: Any) -> str:
    """A number with its dtype: `jnp.float32(1.0)`."""
    value = np.asarray(value)
    text = number(value) or _exact(value)
    return f"{dtype_text(value.dtype)}({text})"


def array(value: Any) -> str:
    """An array as an expression."""
    value = np.asarray(value)
    if value.ndim == 0:
        return typed_number(value)
    dtype = dtype_text(value.dtype)
    if value.size <= INLINE_ELEMENTS:
        return call("jnp.array", _nested(value), dtype)
    data = base64.b64encode(value.tobytes()).decode()
    text = call("base64.b64decode", f'"{data}"')
    flat = call("np.frombuffer", text, dtype)
    shape = tuple_of(map(str, value.shape))
    return call("jnp.array", call("np.reshape", flat, shape))


def parameter(value: Any) -> str:
    """A parameter of an operation as an expression."""
    cls = type(value)
    public = f"lax.{cls.__name__}" if getattr(lax, cls.__name__, None) is cls else ""
    if isinstance(value, enum.Enum) and public:
        return f"{public}.{value.name}"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, jex.Primitive):
        name = f"{value.name}_p"
        if getattr(primitives, name, None) is value:
            return f"primitives.{name}"
    if value is None or isinstance(value, bool):
        return repr(value)
    if isinstance(value, int):  # as a plain one: its class may have another `repr`
        return repr(int(value))
    if isinstance(value, float):
        return number(np.float64(value)) or ""
    if public and isinstance(value, tuple):  # with names for its fields
        fields: dict[str, Any] = value._asdict()  # pyright: ignore
        return call(public, **{name: parameter(fields[name]) for name in fields})
    if public and dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return call(public, **{name: parameter(getattr(value, name)) for name in names})
    if type(value) is tuple:
        return tuple_of(map(parameter, value))
    if type(value) is list:
        return list_of(map(parameter, value))
    if isinstance(value, np.dtype) or (
        isinstance(value, type) and issubclass(value, np.generic)
    ):
        return dtype_text(value)
    raise UnprintableError(value)


def _nested(value: np.ndarray) -> str:
    if value.ndim == 0:
        return number(value) or _exact(value)
    return list_of(map(_nested, value))


def _exact(value: np.ndarray) -> str:
    return _complex(complex(value)) if np.iscomplexobj(value) else repr(int(value))


def _complex(value: complex) -> str:
    # From its parts: `1 - 0j` would lose the sign of the zero.
    parts = [number(np.float64(part)) for part in (value.real, value.imag)]
    return f"complex({parts[0]}, {parts[1]})"
