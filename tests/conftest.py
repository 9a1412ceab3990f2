"""What all tests share: devices, examples, strict types, a bounded cache."""

import gc
import os
from collections.abc import Iterator

import hypothesis
import jax
import pytest

from .flags.flags import expect_faults
from .marks import leave_some

# Most of the time goes into compiling programs that are run once and on little data, so
# LLVM need not optimise them. What XLA does before that, and with it the memory that a
# program takes, stays as it is. Flags of the environment come last, and prevail.
QUICK_FLAGS = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    " --xla_cpu_parallel_codegen_split_count=1"
)
if jax.__version_info__ < (0, 11):
    # Its emitters of fusions take as long as all else that a program is compiled by.
    # Newer versions compile them quickly, and need not know of the flag.
    QUICK_FLAGS += " --xla_cpu_use_fusion_emitters=false"
os.environ["XLA_FLAGS"] = f"{QUICK_FLAGS} {os.environ.get('XLA_FLAGS', '')}".strip()

# Nor need programs know the Python lines that they come from: errors and plans have
# these from the jaxpr.
jax.config.update("jax_traceback_in_locations_limit", 0)

# Enough devices to shard over; a program on one device does not notice the others.
jax.config.update("jax_num_cpu_devices", 8)

# The first example compiles, so a deadline would measure XLA, and so would a check of
# how fast examples are made. The same examples every time, so that a failure is one of
# the change at hand.
hypothesis.settings.register_profile(
    "eqloop",
    deadline=None,
    derandomize=True,
    max_examples=16,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("eqloop")


# Importing and collecting make hundreds of thousands of objects that stay, and the
# collector would search these again and again.
gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves cases to the weekly run, before those that are slow are taken out."""
    leave_some(items)
    expect_faults(items)


def pytest_collection_finish() -> None:
    """Turns the collector on, for what tests make: all that there is by now stays."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def forget_compiled_programs() -> Iterator[None]:
    """Hands back the memory of a module's programs once its tests are through."""
    yield
    jax.clear_caches()


@pytest.fixture(scope="module", autouse=True)
def promote_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """An error where dtypes or ranks differ that JAX would promote to one another.

    Some projects have these settings, and the library's own code has to run there. What
    is written for readers is run as they run it: with JAX's defaults.
    """
    if request.path.parent.name in ("docs", "examples"):
        yield
        return
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    yield
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    jax.config.update("jax_numpy_rank_promotion", "allow")


@pytest.fixture(params=[False, True], ids=["x32", "x64"])
def either_width(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs a test without and with 64 bits, which counters and numbers then have.

    Beside arrays of 32 bits, those of modules for instance, they have to be promoted.
    """
    promotion = jax.config.jax_numpy_dtype_promotion
    if request.param:
        jax.config.update("jax_enable_x64", True)
        jax.config.update("jax_numpy_dtype_promotion", "standard")
    yield
    jax.config.update("jax_enable_x64", False)
    jax.config.update("jax_numpy_dtype_promotion", promotion)
