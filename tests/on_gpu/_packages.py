"""What eqloop needs beside JAX, in a folder to take along.

A machine whose GPU is lent for minutes may have JAX and lack the others, and reach no
index of packages. They are pure Python, and so fit any machine.
"""

import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).parents[2]
FOLDER = _ROOT / "build" / "on_gpu"

# The needs of those that eqloop needs, as long as they are not there anyway.
_THEIR_NEEDS = ("wadler-lindig", "typing-extensions")
# More is not taken along.
_MOST_BYTES = 64 * 2**20


def prepare(folder: Path = FOLDER) -> None:
    """Installs the packages into a folder, in place of what is there.

    Raises:
        RuntimeError: If they are no pure Python, or too large.
    """
    shutil.rmtree(folder, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    names = [f"{name}>={version}" for name, version in _needed()]
    subprocess.run([*pip, "--target", folder, *names, *_THEIR_NEEDS], check=True)
    files = [file for file in folder.rglob("*") if file.is_file()]
    if built := [file.name for file in files if file.suffix in (".so", ".pyd")]:
        raise RuntimeError(f"{folder}: {', '.join(built)} fit one machine only")
    size = sum(file.stat().st_size for file in files)
    if size > _MOST_BYTES:
        raise RuntimeError(f"{folder}: {size / 2**20:.0f} MiB are too many")
    print(f"{folder}: {len(files)} files, {size / 2**20:.1f} MiB")


def find(folder: Path = FOLDER) -> None:
    """Has Python find the packages in a folder, if some are not there otherwise.

    Raises:
        SystemExit: If it has none.
    """
    if missing := [name for name, version in _needed() if not _is_there(name, version)]:
        if not folder.is_dir():
            raise SystemExit(
                f"{', '.join(missing)}: not here, or too old, and {folder} is not "
                f"either. Make that by `python -m tests.on_gpu --prepare` where pip "
                f"can, and take it along."
            )
        sys.path.insert(0, str(folder))
        print(f"{', '.join(missing)}: from {folder}")


def _needed() -> Iterator[tuple[str, str]]:
    """What eqloop needs, and from which version on; JAX is the one of the machine."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    for need in project["dependencies"]:
        name, version = re.fullmatch(r"([\w-]+)>=([\d.]+)[^;]*", need).groups()
        if not name.startswith("jax") or name == "jaxtyping":
            yield name, version


def _is_there(name: str, version: str) -> bool:
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    numbers = lambda text: [int(n) for n in re.findall(r"\d+", text)[:3]]
    return numbers(found) >= numbers(version)
