"""What all tests share: the devices, hypothesis's profile, and a bounded cache."""

from collections.abc import Iterator

import hypothesis
import jax
import pytest

# Enough devices to shard over; a program on one device does not notice the others.
jax.config.update("jax_num_cpu_devices", 8)

# The first example compiles, so a deadline would measure XLA. The same examples every
# time, so that a failure is one of the change at hand.
hypothesis.settings.register_profile(
    "eqloop", deadline=None, derandomize=True, max_examples=25
)
hypothesis.settings.load_profile("eqloop")


@pytest.fixture(scope="module", autouse=True)
def forget_compiled_programs() -> Iterator[None]:
    """Hands back the memory of a module's programs once its tests are through."""
    yield
    jax.clear_caches()
