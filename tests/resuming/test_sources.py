"""What is scanned stays as it was: pages are dropped if a file has what is in them."""

import mmap
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import eqloop as el
from eqloop.resuming._sources import mapping_of

SIZE = 1 << 14


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "ones.bin"
    np.ones(SIZE, np.float32).tofile(path)
    with path.open("r+b") as opened:
        yield opened


def of_buffer(buffer: Any) -> np.ndarray:
    return np.frombuffer(buffer, np.float32)


def private(file: Any) -> mmap.mmap:
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


MAPS = {
    "private": lambda f: of_buffer(private(f)),
    "private, by flags": lambda f: of_buffer(
        mmap.mmap(f.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    ),
    "a private buffer": lambda f: np.ndarray(SIZE, np.float32, private(f)),
    "a view of a private one": lambda f: of_buffer(private(f)).view(np.memmap),
    "of no file": lambda f: of_buffer(mmap.mmap(-1, 4 * SIZE)),
    "of no file, private": lambda f: of_buffer(
        mmap.mmap(-1, 4 * SIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    ),
    "c": lambda f: np.memmap(f.name, np.float32, "c"),
    "a view of c": lambda f: np.asarray(np.memmap(f.name, np.float32, "c"))[:],
    "r+": lambda f: np.memmap(f.name, np.float32, "r+"),
}


@pytest.mark.parametrize("name", MAPS)
def test_what_was_written_to_a_mapping_is_kept(name, file, tmp_path):
    xs = MAPS[name](file)
    xs[...] = 2 + np.arange(SIZE) % 3
    before = xs.copy()
    run = el.Resumable(
        el.Scan(lambda h, x: (h + x, None)), tmp_path / "run", every=SIZE // 4
    )
    assert run(jnp.float32(0), xs)[0] == before.sum()
    np.testing.assert_array_equal(xs, before)


def test_only_a_mapping_that_is_in_a_file_is_dropped(file):
    read = np.memmap(file.name, np.float32, "r")
    mapped = (read, read[::2], np.asarray(read)[3:], MAPS["r+"](file))
    assert all(mapping_of(array) is not None for array in mapped)
    others = [make(file) for name, make in MAPS.items() if name != "r+"]
    assert all(mapping_of(array) is None for array in (*others, read.copy(), 1.0))
