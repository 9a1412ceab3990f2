"""Runs a script; when it runs out of memory, tells what took it.

python -m eqloop.oom script.py [arguments]
"""

import os
import re
import runpy
import sys
import tempfile
import traceback
from collections.abc import Sequence

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
    r"(?:allocat\w*|reserve|used|size=|\() *(\d+(?:\.\d+)?) *([KMGT]?)i?B?\b", re.I
)
_UNITS = {unit: 1024**i for i, unit in enumerate(("", "K", "M", "G", "T"))}


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
            if _OUT_OF_MEMORY.search(said := _said(error)):
                print(_report(programs_in(folder), said), file=sys.stderr)
            if not is_last:  # the script ends itself
                raise
            return 1
    return 0


def _said(error: BaseException | None) -> str:
    """What an error says, and those that it was raised for or stands for."""
    if error is None:
        return ""
    others = error.__cause__, error.__context__, *getattr(error, "exceptions", ())
    each = map(_said, {id(other): other for other in others}.values())
    notes = getattr(error, "__notes__", ())
    return "\n".join([repr(error), str(error), *notes, *each])


def _is_told(nbytes: int, error: str) -> bool:
    """Whether an error speaks of so many bytes, perhaps rounded."""
    sizes = (float(n) * _UNITS[unit.upper()] for n, unit in _SIZE.findall(error))
    return any(abs(nbytes - size) <= nbytes / 100 for size in sizes)


def _report(programs: Sequence[CompiledProgram], error: str) -> str:
    """The profile of the program that ran out of memory."""
    if not programs:
        return "eqloop.oom: no program was compiled before."
    told = lambda one: any(_is_told(each.nbytes, error) for each in one.allocations)
    failed = list(filter(told, programs))
    how = "of that size" if failed else "with the most memory"
    total = lambda one: sum(each.nbytes for each in one.allocations)
    one, device = max(failed or programs, key=total), planning_device().kind
    profile = profile_of(one, one.name.removeprefix("jit_"), device)
    return f"eqloop.oom: the program {how} that was compiled:\n{profile}"


if __name__ == "__main__":
    sys.exit(main())
