"""JAX's flags for its next forms of checkpoints, names and custom rules.

The whole suite passes with each of them and with all, but for the tests in `EXPECTED`.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import jax
import pytest

FLAGS = ("jax_remat3", "jax_custom_jvp3", "jax_custom_vjp3")
# None of them, each alone, and all together.
SETS = [(), *((flag,) for flag in FLAGS), FLAGS]

only_with_flags = pytest.mark.skipif(
    not all(hasattr(jax.config, flag) for flag in FLAGS),
    reason="JAX before 0.12 has not all of these flags",
)


@contextlib.contextmanager
def turned_on(flags: Sequence[str]) -> Iterator[None]:
    """These flags are on, and the others off."""
    before = {flag: getattr(jax.config, flag) for flag in FLAGS}
    try:
        for flag in FLAGS:
            jax.config.update(flag, flag in flags)
        yield
    finally:
        for flag, value in before.items():
            jax.config.update(flag, value)


def names_of(flags: Sequence[str]) -> str:
    """A name for a set of flags, for the id of a case."""
    return "+".join(flag.removeprefix("jax_") for flag in flags) or "none"


# What is wrong in JAX itself, with which flag; `test_jax_faults.py` shows each.
FAULTS = {
    "zeros_in_checkpoints": "jax_remat3",
    "numbers_in_rules": "jax_custom_vjp3",
    "policies_that_keep_everything": "jax_remat3",
    "tangents_beside_values_in_checkpoints": "jax_remat3",
}

_POLICIES = "tests/checkpointing/test_policies.py"
_DIFFRAX = "tests/diffrax/test_adjoint.py"
# The tests that fail for it. In those of Diffrax it is Equinox whose rule fails.
EXPECTED = {
    "tests/test_symbolic_zeros.py::test_so_may_leaves_of_the_carry[checkpoint-": (
        "zeros_in_checkpoints"
    ),
    f"{_POLICIES}::test_stores_what_its_counterpart_in_jax_stores[everything]": (
        "policies_that_keep_everything"
    ),
    f"{_POLICIES}::test_as_policy_knows_every_name_in_jax": (
        "policies_that_keep_everything"
    ),
    "tests/programs/test_partial_eval.py::test_a_rule_computes_values_and_tangents_in_"
    "one_loop[Remat-": "tangents_beside_values_in_checkpoints",
    f"{_DIFFRAX}::test_gradients[default-": "numbers_in_rules",
    f"{_DIFFRAX}::test_solvers_with_an_init_of_their_own": "numbers_in_rules",
    "tests/peers/test_stand_ins.py::test_our_adjoint_stands_in_for_theirs": (
        "numbers_in_rules"
    ),
}


def expect_faults(items: Iterable[pytest.Item]) -> None:
    """Marks the tests that fail for a fault of JAX with a flag that is on."""
    for item in items:
        for test, fault in EXPECTED.items():
            is_on = getattr(jax.config, FAULTS[fault], False)
            if is_on and item.nodeid.startswith(test):
                # Cases that it leaves alone pass. That it is mended, says its own test.
                item.add_marker(pytest.mark.xfail(reason=fault, strict=False))
