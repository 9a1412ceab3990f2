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

_SIZE = re.compile(r"allocat\w* (\d+)")


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
        except Exception as error:
            traceback.print_exc()
            if "RESOURCE_EXHAUSTED" in str(error):
                print(_report(programs_in(folder), str(error)), file=sys.stderr)
            return 1
    return 0


def _report(programs: Sequence[CompiledProgram], error: str) -> str:
    """The profile of the program that ran out of memory."""
    if not programs:
        return "eqloop.oom: no program was compiled before."
    sizes = set(map(int, _SIZE.findall(error)))
    has_failed = lambda one: any(each.nbytes in sizes for each in one.allocations)
    failed = list(filter(has_failed, programs))
    how = "of that size" if failed else "with the most memory"
    total = lambda one: sum(each.nbytes for each in one.allocations)
    one, device = max(failed or programs, key=total), planning_device().kind
    profile = profile_of(one, one.name.removeprefix("jit_"), device)
    return f"eqloop.oom: the program {how} that was compiled:\n{profile}"


if __name__ == "__main__":
    sys.exit(main())
