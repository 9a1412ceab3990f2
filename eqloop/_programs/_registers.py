"""How many registers the kernels of a GPU's program take, read from its binary.

XLA does not tell, and NVIDIA's assembler writes it into the binary, an ELF file. That
is in what JAX serialises of a program: records of Riegeli, compressed by Snappy. Of
what is not written so, nothing is known.
"""

import re
import struct
from collections.abc import Iterator
from typing import NamedTuple

import jax
from jax.experimental import serialize_executable

# How a file of Riegeli begins. It has such a header again each 64 KiB.
_RIEGELI = bytes.fromhex("83af70d10d884a3f") + bytes(8) + b"\x40" + bytes(7)
_BLOCK, _HEADER = 2**16, len(_RIEGELI)
# Of a chunk, how long it is and whether it has records; checksums are skipped.
_CHUNK = struct.Struct("<8xQ8xc15x")
_ELF = b"\x7fELF\x02\x01\x01"
# Attributes of a kernel in the section `.nv.info`, each two numbers of 32 bits: the
# symbol and the value.
_REGISTERS, _STACK = 0x2F, 0x12


class Registers(NamedTuple):
    """What a thread of a kernel takes.

    Attributes:
        number: How many registers.
        stack: The bytes that it has in memory: of numbers for which no register is
            left, or, with fewer registers, of a table that a function makes.
    """

    number: int
    stack: int


def registers_of(compiled: jax.stages.Compiled, kernel: str) -> Registers | None:
    """The most that a thread of some kernels of a program takes; `None` if unknown.

    `kernel` is how the names of these kernels begin.
    """
    try:
        written, _, _ = serialize_executable.serialize(compiled)
        every = dict(_kernels(b"".join(_inflated(_unframed(_unframed(written))))))
    except (ValueError, LookupError, struct.error, NotImplementedError):
        return None
    asked = [one for name, one in every.items() if name.startswith(kernel)]
    return Registers(*map(max, zip(*asked, strict=True))) if asked else None


def _unframed(data: bytes) -> bytes:
    """The contents of the first file of Riegeli, if there is one."""
    if (start := data.find(_RIEGELI)) < 0:
        return data
    blocks = range(start, len(data), _BLOCK)
    return b"".join(data[i + _HEADER : i + _BLOCK] for i in blocks)


def _inflated(data: bytes) -> Iterator[bytes]:
    """The records in the chunks of a file, those of each in one."""
    at = 0
    while at + _CHUNK.size <= len(data):
        size, kind = _CHUNK.unpack_from(data, at)
        chunk, at = data[at + _CHUNK.size :][:size], at + _CHUNK.size + size
        if kind == b"r" and chunk[:1] == b"s":
            sizes, start = varint(chunk, 1)
            _, start = varint(chunk, start + sizes)
            yield _unsnapped(chunk, start)


def varint(data: bytes, at: int) -> tuple[int, int]:
    """An integer of any length, seven bits in each byte; and where it ends."""
    value = shift = 0
    while (byte := data[at]) >= 128:
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
    return value | byte << shift, at + 1


def _unsnapped(data: bytes, at: int) -> bytes:
    """Opens a block of Snappy: literals, and copies of what was there before."""
    size, at = varint(data, at)
    out, little = bytearray(), lambda a, b: int.from_bytes(data[a:b], "little")
    while len(out) < size:
        tag, at = data[at], at + 1
        if not tag & 3:
            more = max((tag >> 2) - 59, 0)
            length = 1 + (little(at, at + more) if more else tag >> 2)
            at += more + length
            out += data[at - length : at]
            continue
        width = (1, 2, 4)[(tag & 3) - 1]
        back, at = little(at, at + width), at + width
        length = 1 + (tag >> 2)
        if width == 1:
            length, back = 4 + (tag >> 2 & 7), back | tag >> 5 << 8
        if not 0 < back <= len(out):
            raise ValueError
        piece = out[-back:][:length]
        out += (piece * (length // len(piece) + 1))[:length]
    return bytes(out)


def _kernels(data: bytes) -> Iterator[tuple[str, Registers]]:
    for found in re.finditer(re.escape(_ELF), data):
        yield from _kernels_of_elf(data[found.start() :])


def _kernels_of_elf(elf: bytes) -> Iterator[tuple[str, Registers]]:
    """The kernels in an ELF file, by their names."""
    (table,), (size, count, names) = (
        struct.unpack_from(kind, elf, at) for kind, at in (("<Q", 40), ("<HHH", 58))
    )
    heads = [
        struct.unpack_from("<II16xQQI", elf, table + i * size) for i in range(count)
    ]
    text = lambda head, at: elf[head[2] + at : elf.index(0, head[2] + at)].decode()
    sections = {text(heads[names], head[0]): head for head in heads}
    if ".nv.info" not in sections:
        return  # numbers, and no code
    _, _, symbols, _, link = sections[".symtab"]
    _, _, at, length, _ = sections[".nv.info"]
    end, values = at + length, dict[int, dict[int, int]]()
    while at < end:
        kind, attribute, wide = struct.unpack_from("<BBH", elf, at)
        at += 4
        if kind != 4:  # the value is in these two bytes
            continue
        if attribute in (_REGISTERS, _STACK):
            symbol, value = struct.unpack_from("<II", elf, at)
            values.setdefault(symbol, {})[attribute] = value
        at += wide
    for symbol, value in values.items():
        (name,) = struct.unpack_from("<I", elf, symbols + 24 * symbol)
        yield text(heads[link], name), Registers(value[_REGISTERS], value[_STACK])
