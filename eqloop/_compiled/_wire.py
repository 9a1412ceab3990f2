"""Reads protocol buffers, as far as XLA's dumps need it, without their definitions.

A message is a sequence of fields, each with a number, and a value that is an integer or
bytes. [The encoding](https://protobuf.dev/programming-guides/encoding/) is a page.
"""

from collections import defaultdict
from collections.abc import Iterator

from .._programs import varint

# How a value is encoded, if it is not bytes. Those of a fixed size are not needed.
_INTEGER = 0
_SIZES = {1: 8, 5: 4}


class Message:
    """A message whose fields are asked for by their numbers."""

    def __init__(self, data: bytes):
        self._integers = defaultdict[int, list[int]](list)
        self._bytes = defaultdict[int, list[bytes]](list)
        for number, value in _fields(data):
            if isinstance(value, int):
                self._integers[number].append(value)
            else:
                self._bytes[number].append(value)

    def __contains__(self, number: int) -> bool:
        return number in self._integers or number in self._bytes

    def integer(self, number: int) -> int:
        """An integer, zero if it is left out."""
        return self._integers[number][-1] if number in self._integers else 0

    def data(self, number: int) -> bytes:
        """Bytes, none if they are left out."""
        return self._bytes[number][-1] if number in self._bytes else b""

    def text(self, number: int) -> str:
        """A text, empty if it is left out."""
        return self.data(number).decode(errors="replace")

    def every(self, number: int) -> list["Message"]:
        """All messages of one number."""
        return list(map(Message, self._bytes.get(number, ())))

    def texts(self, number: int) -> list[str]:
        """All texts of one number."""
        return [x.decode(errors="replace") for x in self._bytes.get(number, ())]

    def integers(self, number: int) -> list[int]:
        """All integers of one number, which may be packed into bytes."""
        packed = (_packed(data) for data in self._bytes.get(number, ()))
        return sum(packed, self._integers.get(number, []))


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        number, kind = key >> 3, key & 7
        if kind in _SIZES:
            at += _SIZES[kind]
            continue
        value, at = varint(data, at)
        if kind == _INTEGER:
            yield number, value
        else:
            yield number, data[at : (at := at + value)]


def _packed(data: bytes) -> list[int]:
    found, at = list[int](), 0
    while at < len(data):
        value, at = varint(data, at)
        found.append(value)
    return found
