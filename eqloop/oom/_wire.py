"""Reads protocol buffers, as far as XLA's dumps need it, without their definitions.

A message is a sequence of fields, each with a number, and a value that is an integer or
bytes. [The encoding](https://protobuf.dev/programming-guides/encoding/) is a page.
"""

from collections import defaultdict
from collections.abc import Iterator

_EIGHT_BYTES, _FOUR_BYTES = 1, 5


class Message:
    """A message whose fields are asked for by their numbers."""

    def __init__(self, data: bytes):
        self._fields = defaultdict[int, list[int | bytes]](list)
        for number, value in _fields(data):
            self._fields[number].append(value)

    def __contains__(self, number: int) -> bool:
        return number in self._fields

    def integer(self, number: int) -> int:
        """An integer, zero if it is left out."""
        values = self._fields.get(number, [0])
        return values[-1] if isinstance(values[-1], int) else 0

    def data(self, number: int) -> bytes:
        """Bytes, none if they are left out."""
        values = self._fields.get(number, [b""])
        return values[-1] if isinstance(values[-1], bytes) else b""

    def text(self, number: int) -> str:
        """A text, empty if it is left out."""
        return self.data(number).decode(errors="replace")

    def every(self, number: int) -> list[bytes]:
        """All bytes of one number."""
        return [x for x in self._fields.get(number, ()) if isinstance(x, bytes)]

    def integers(self, number: int) -> list[int]:
        """All integers of one number, which may be packed into bytes."""
        found = list[int]()
        for value in self._fields.get(number, ()):
            found += [value] if isinstance(value, int) else _packed(value)
        return found


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    at, end = 0, len(data)
    while at < end:
        key, at = _integer(data, at)
        match key & 7:
            case 0:
                value, at = _integer(data, at)
                yield key >> 3, value
            case 2:
                size, at = _integer(data, at)
                yield key >> 3, data[at : at + size]
                at += size
            case kind if kind in (_EIGHT_BYTES, _FOUR_BYTES):
                at += 8 if kind == _EIGHT_BYTES else 4
            case kind:
                raise ValueError(f"no protocol buffer: a field of the kind {kind}")


def _integer(data: bytes, at: int) -> tuple[int, int]:
    """An integer of seven bits a byte, and where it ends."""
    byte = data[at]
    if byte < 128:
        return byte, at + 1
    value, shift = byte & 127, 7
    while True:
        at += 1
        byte = data[at]
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at + 1
        shift += 7


def _packed(data: bytes) -> list[int]:
    found, at = list[int](), 0
    while at < len(data):
        value, at = _integer(data, at)
        found.append(value)
    return found
