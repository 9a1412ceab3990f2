"""Values are told apart by their types and bits, and not by `==` or by their text."""

import dataclasses
import gc
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqloop._arrays import _bits, bits, same_static, structure_bits

NAN, OTHER_NAN = np.frombuffer(np.uint32([0x7FC00000, 0x7FC00001]).tobytes(), "f4")
MATRIX = np.zeros((64, 64), np.float32)


@dataclasses.dataclass(frozen=True)
class Config:
    rate: float


class Cell(eqx.Module):
    rate: Any = eqx.field(static=True)


def changed(value: Any, dtype: Any = np.float32) -> np.ndarray:
    """A matrix that is printed like `MATRIX`: its middle is left out."""
    other = MATRIX.astype(dtype)
    other[30, 30] = value
    return other


OTHERS = {
    "int and float": (1, 1.0),
    "int and bool": (1, True),
    "zeros": (0.0, -0.0),
    "complex zeros": (complex(0.0, 0.0), complex(-0.0, 0.0)),
    "last digits": (1.0, 1.0 + 2**-52),
    "numbers of NumPy": (np.float32(1), np.float64(1)),
    "last digits in NumPy": (np.float64(0.3), np.float64(0.3) + 1e-16),
    "NaNs": (NAN, OTHER_NAN),
    "types of 16 bits": (jnp.bfloat16(1), jnp.float16(1)),
    "types of 8 bits": (
        jnp.zeros(2, jnp.float8_e4m3fn),
        jnp.zeros(2, jnp.float8_e5m2),
    ),
    "signs of integers": (np.int8(1), np.uint8(1)),
    "shapes": (np.zeros((2, 3)), np.zeros((3, 2))),
    "in the middle": (MATRIX, changed(1e-9)),
    "a sign in the middle": (MATRIX, changed(-0.0)),
    "on the device": (jnp.asarray(MATRIX), jnp.asarray(changed(1e-9))),
    "weak types": (jnp.asarray(1.0), jnp.float32(1)),
    "keys": (jax.random.key(0), jax.random.key(1)),
    "generators": (
        jax.random.wrap_key_data(np.zeros(4, np.uint32), impl="rbg"),
        jax.random.wrap_key_data(np.zeros(4, np.uint32), impl="unsafe_rbg"),
    ),
    "text and number": ("1", 1),
    "tuples": ((1, 0.0), (1, -0.0)),
    "tuples and lists": ((1,), [1]),
    "dictionaries": ({"a": 0.0}, {"a": -0.0}),
    "dataclasses": (Config(0.0), Config(-0.0)),
    "modules": (Cell(0.0), Cell(-0.0)),
    "functions": (jnp.sin, jnp.cos),
}


@pytest.mark.parametrize("pair", OTHERS.values(), ids=OTHERS)
def test_other_values(pair: tuple[Any, Any]):
    one, other = pair
    assert bits(one) != bits(other)
    assert not same_static(one, other)


SAME = {
    "NaN": (float("nan"), float("nan")),
    "NumPy's and JAX's": (MATRIX, jnp.asarray(MATRIX)),
    "copies": (changed(0.1), changed(0.1)),
    "in any order in memory": (np.asfortranarray(changed(0.1)), changed(0.1)),
    "keys": (jax.random.key(3), jax.random.key(3)),
    "empty": (np.zeros((0, 3)), np.zeros((0, 3))),
    "nested": ({"a": (1, [None, "b"])}, {"a": (1, [None, "b"])}),
    "dataclasses": (Config(0.5), Config(0.5)),
}


@pytest.mark.parametrize("pair", SAME.values(), ids=SAME)
def test_the_same_values(pair: tuple[Any, Any]):
    one, other = map(bits, pair)
    assert one == other
    assert hash(one) == hash(other)


def test_structures_differ_in_static_fields():
    tell = lambda tree: structure_bits(jax.tree.structure(tree))
    assert tell({"a": (Cell(1.0), 2)}) == tell({"a": (Cell(1.0), 3)})
    for other in (Cell(1), Cell(True), Cell((1.0,)), [Cell(1.0)]):
        assert tell({"a": (Cell(1.0), 2)}) != tell({"a": (other, 2)})
    assert tell(Cell((0.0,))) != tell(Cell((-0.0,)))


def test_tracers_are_told_by_identity():
    def f(x: Any, y: Any) -> Any:
        assert bits(x) == bits(x)
        assert bits(x) != bits(y)
        # Constants are read, and not traced.
        assert bits(key) == outside
        return x

    key = jax.random.key(0)
    outside = bits(key)
    assert not jax.make_jaxpr(f)(1.0, 1.0).eqns


def test_a_large_array_on_the_device_is_read_once(monkeypatch: pytest.MonkeyPatch):
    read = []
    told = _bits._told
    monkeypatch.setattr(_bits, "_told", lambda *parts: read.append(1) or told(*parts))
    x, before = jnp.ones(2**20), len(_bits._known)
    with jax.transfer_guard("disallow"):
        assert bits(x) == bits(x)
    assert (len(read), len(_bits._known)) == (1, before + 1)
    del x
    gc.collect()
    assert len(_bits._known) == before


def test_an_array_of_numpy_may_change():
    x = np.ones(2**20, np.float32)
    before = bits(x)
    x[5000] = 2
    assert bits(x) != before


def test_an_array_on_several_devices():
    mesh = jax.make_mesh((4,), ("d",))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    for sharding in (split, everywhere):
        place = lambda x, sharding=sharding: jax.device_put(x, sharding)
        assert bits(place(MATRIX)) == bits(place(MATRIX.copy()))
        assert bits(place(MATRIX)) != bits(place(changed(1e-9)))
