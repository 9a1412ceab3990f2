"""Runs a script; when it runs out of memory, tells what took it.

python -m eqloop.oom script.py [arguments]
"""

import contextlib
import os
import re
import runpy
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence

import jax

from .._compiled import CompiledProgram, programs_in
from .._device import planning_device
from ._profile import profile_of

# What XLA, the libraries of a device, C++ and NumPy say, with whatever status.
_OUT_OF_MEMORY = re.compile(
    r"resource.?exhausted|out.?of.?memory|ran out of mem|alloc_failed|bad_alloc|"
    r"memoryerror|(failed|unable|cannot|attempting) to (allocate|reserve)|"
    r"error allocating|exceed\w* (memory|hbm)",
    re.IGNORECASE,
)
# In bytes, or rounded to two digits: "allocating 96 bytes", "allocate 8.00GiB".
_SIZE = re.compile(
    r"(?:allocat\w*|reserve|used|size=|\() *([\d.]+) *([KMGT]?)i?B?\b", re.I
)


def main() -> int:
    """Runs the script that is named among the arguments of the process."""
    if len(sys.argv) < 2:
        sys.exit("usage: python -m eqloop.oom script.py [arguments]")
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    with tempfile.TemporaryDirectory() as folder:
        flags = f" --xla_dump_to={folder} --xla_dump_hlo_as_proto"
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + flags
        # What is found in a cache on disk is not compiled, and nothing is written.
        jax.config.update("jax_enable_compilation_cache", False)
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except BaseException as error:
            is_last = isinstance(error, Exception)
            if is_last:
                traceback.print_exc()
            if _OUT_OF_MEMORY.search(said := "\n".join(_said(error))):
                print(_report(programs_in(folder), said), file=sys.stderr)
            if not is_last:  # the script ends itself
                raise
            return 1
    return 0


def _said(error: BaseException) -> Iterator[str]:
    """What an error says, and those that it was raised for or stands for."""
    queue, seen = [error], set[int]()
    while queue:
        one = queue.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield "\n".join([repr(one), str(one), *getattr(one, "__notes__", ())])
            queue += filter(None, (one.__cause__, one.__context__))
            queue += one.exceptions if isinstance(one, BaseExceptionGroup) else ()


def _sizes(text: str) -> Iterator[tuple[float, float]]:
    """From how many bytes to how many an error speaks of."""
    for number, unit in _SIZE.findall(text):
        with contextlib.suppress(ValueError):  # the end of a sentence
            size = float(number) * 1024 ** " KMGT".index(unit.upper() or " ")
            yield size * (0.99 if unit else 1), size * (1.01 if unit else 1)


def _report(programs: Sequence[CompiledProgram], error: str) -> str:
    """The profile of the program that ran out of memory."""
    if not programs:
        return "eqloop.oom: no program was compiled before."
    sizes = list(_sizes(error))
    is_told = lambda each: any(low <= each.nbytes <= high for low, high in sizes)
    has_failed = lambda one: any(map(is_told, one.allocations))
    failed = list(filter(has_failed, programs))
    how = "of that size" if failed else "with the most memory"
    total = lambda one: sum(each.nbytes for each in one.allocations)
    one, device = max(failed or programs, key=total), planning_device().kind
    profile = profile_of(one, one.name.removeprefix("jit_"), device)
    return f"eqloop.oom: the program {how} that was compiled:\n{profile}"


if __name__ == "__main__":
    sys.exit(main())
