"""Arrays at a place of the loop, for every place where they were stored.

There is a folder for each, which is called by the number of steps and holds a `.npy`
file for each array, or for each part of one that is on several devices, and
`state.json`, which says what is in them.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from .._arrays import raw_bytes
from .._types import Value
from ._disk import (
    begin_folder,
    checksum,
    explaining_errors,
    finish_folder,
    npy_header,
    remove_folder,
    write_bytes,
    write_json,
)
from ._processes import as_the_leader, is_leader, wait_for_all
from ._row_file import storable
from ._run_record import read_json

_STATE = "state.json"


@dataclasses.dataclass(frozen=True)
class StateFolder:
    """Where the states of one sweep are.

    Attributes:
        names: The path of each array in the tree that it is from.
        shardings: Over which devices it is spread; `None` if it is on one.
    """

    path: Path
    names: Sequence[str]
    types: Sequence[jax.ShapeDtypeStruct]
    shardings: Sequence[Value]

    @property
    def steps(self) -> list[int]:
        """For how many steps there are states, in their order."""
        return steps_in(self.path)

    def are_stored(self, steps: Iterable[int]) -> list[bool]:
        """Which of these there are, by the numbers of steps, in the first process."""
        stored = set(self.steps)
        return list(map(bool, as_the_leader([each in stored for each in steps])))

    def write(self, steps: int, arrays: Sequence[Value]) -> None:
        """Writes a state: each process its part, and then one puts it into place."""
        place = self._place(steps)
        aside = begin_folder(place)
        pieces = [_write_pieces(aside, i, array) for i, array in enumerate(arrays)]
        if not is_leader():
            write_json(aside / _part(jax.process_index()), {"pieces": pieces})
        wait_for_all(f"{place} was written")
        if is_leader():
            for process in range(1, jax.process_count()):
                others = read_json(aside / _part(process))["pieces"]
                pieces = [a + b for a, b in zip(pieces, others, strict=True)]
            described = [
                {"path": name, "dtype": str(aval.dtype), "shape": [*aval.shape]}
                | {"pieces": parts}
                for name, aval, parts in zip(
                    self.names, self.types, pieces, strict=True
                )
            ]
            write_json(aside / _STATE, {"steps": steps, "arrays": described})
            finish_folder(aside, place)
        wait_for_all(f"{place} was finished")

    def read(self, steps: int) -> list[Value]:
        """Reads a state."""
        place = self._place(steps)
        described = read_json(place / _STATE).get("arrays") or []
        if len(described) != len(self.names):
            _damaged(place / _STATE, f"it has {len(described)} arrays")
        given = zip(described, self.types, self.shardings, strict=True)
        try:
            return [_read_array(place, *what) for what in given]
        except (AttributeError, IndexError, KeyError, TypeError):
            _damaged(place / _STATE, "it does not say what the arrays are")

    def forget(self, steps: Sequence[int]) -> None:
        """Removes states."""
        if is_leader():
            for each in steps:
                remove_folder(self._place(each))

    def _place(self, steps: int) -> Path:
        return self.path / f"{steps:012d}"


def steps_in(path: Path) -> list[int]:
    """For how many steps a folder has states, in their order."""
    with explaining_errors("read", path):
        names = [entry.name for entry in path.iterdir()] if path.is_dir() else []
    return sorted(int(name) for name in names if re.fullmatch(r"\d{12,}", name))


def pieces_of(array: Value) -> Iterator[tuple[list[int], np.ndarray]]:
    """What this process has to write of an array, and where in the array it starts."""
    if sharding_of(array) is None:
        if is_leader():
            yield [0] * array.ndim, np.asarray(array)
        return
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            yield [part.start or 0 for part in shard.index], np.asarray(shard.data)


def sharding_of(array: Value) -> Any:
    """How an array is spread over devices; `None` if it is on one."""
    sharding = getattr(array, "sharding", None)
    return sharding if sharding and len(sharding.device_set) > 1 else None


def placed(array: np.ndarray, sharding: Any) -> jax.Array:
    """An array on its devices; on the usual one if it is not spread over several."""
    if sharding is None:
        return jnp.asarray(array)
    return jax.make_array_from_callback(array.shape, sharding, lambda i: array[i])


def _write_pieces(folder: Path, number: int, array: Value) -> list[dict[str, Any]]:
    """Writes what this process has of an array, and says what that is."""
    described = []
    for start, piece in pieces_of(array):
        is_whole = piece.shape == array.shape
        where = "" if is_whole else "." + "-".join(map(str, start))
        file = f"{number}{where}.npy"
        piece = piece.view(storable(piece.dtype))
        header = npy_header(piece.shape, piece.dtype)
        with explaining_errors("written", folder / file):
            write_bytes(folder / file, [header, raw_bytes(piece)])
        what = {"file": file, "start": start, "bytes": len(header) + piece.nbytes}
        described.append(what | {"checksum": checksum(piece)})
    return described


def _part(process: int) -> str:
    return f"part-{process}.json"


def _read_array(
    place: Path,
    described: dict[str, Any],
    aval: jax.ShapeDtypeStruct,
    sharding: Any,
) -> jax.Array:
    if described["shape"] != [*aval.shape] or described["dtype"] != str(aval.dtype):
        _damaged(place / _STATE, f"{described['path']} is of another type")
    pieces = [(p["start"], _read_piece(place, p)) for p in described["pieces"]]
    whole = np.zeros(aval.shape, storable(aval.dtype))
    for start, piece in pieces:
        where = tuple(slice(i, i + n) for i, n in zip(start, piece.shape, strict=True))
        whole[where] = piece
    return placed(whole.view(aval.dtype), sharding)


def _read_piece(place: Path, described: dict[str, Any]) -> np.ndarray:
    path = place / described["file"]
    with explaining_errors("read", path):
        size = path.stat().st_size
        if size != described["bytes"]:
            _damaged(path, f"it has {size} of {described['bytes']} bytes")
        try:
            piece = np.load(path, allow_pickle=False)
        except ValueError as error:
            _damaged(path, str(error))
    if checksum(piece) != described["checksum"]:
        _damaged(path, "its checksum is another one")
    return piece


def _damaged(path: Path, how: str) -> NoReturn:
    raise ValueError(
        f"Resumable: {path} is damaged: {how}. Nothing was changed. Restore it, or "
        f"remove the folder {path.parent}: what was in it is then computed again, from "
        f"the state before it."
    )
