"""Runs a script; when it runs out of memory, tells what took it.

python -m eqloop.oom script.py [arguments]
"""

import os
import re
import runpy
import sys
import tempfile
import traceback

import jax

from ._dump import programs_in
from ._profile import profile_of
from ._program import Program

_USAGE = "usage: python -m eqloop.oom script.py [arguments]"
_SIZE = re.compile(r"allocat\w* (\d+)")


def main() -> int:
    """Runs the script that is named among the arguments of the process."""
    if len(sys.argv) < 2:
        print(_USAGE, file=sys.stderr)
        return 2
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_dump_to={folder} --xla_dump_hlo_as_proto"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
        # What is found in a cache on disk is not compiled, and nothing is written.
        jax.config.update("jax_enable_compilation_cache", False)
        try:
            runpy.run_path(script, run_name="__main__")
        except jax.errors.JaxRuntimeError as error:
            traceback.print_exc()
            if "RESOURCE_EXHAUSTED" in str(error):
                print(_report(folder, str(error)), file=sys.stderr)
            return 1
    return 0


def _report(folder: str, error: str) -> str:
    """The profile of the program that ran out of memory."""
    programs = programs_in(folder)
    if not programs:
        return "eqloop.oom: no program was compiled before."
    sizes = set(map(int, _SIZE.findall(error)))
    has_failed = lambda one: any(each.nbytes in sizes for each in one.allocations)
    failed = [one for one in programs if has_failed(one)]
    how = "of that size" if failed else "with the most memory"
    one = max(failed or programs, key=_total)
    profile = profile_of(
        one, one.name.removeprefix("jit_"), jax.devices()[0].device_kind
    )
    return f"eqloop.oom: the program {how} that was compiled:\n{profile}"


def _total(program: Program) -> int:
    return sum(one.nbytes for one in program.allocations)


if __name__ == "__main__":
    sys.exit(main())
