"""What wrong calls of `el.Reschedule` say."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import eqloop as el

from ..asserts import assert_raises
from .functions import XS, W, root, simulate

SETTINGS: dict[str, tuple[Any, str]] = {
    "f": (lambda: el.Reschedule(3), "TypeError: Reschedule: `f` … callable … 3"),
    "f forgotten": (
        lambda: el.Reschedule(el.Recursive(4)),
        "TypeError: Reschedule: `f` … callable … Recursive(base=4)",
    ),
    "a number for a schedule": (
        lambda: el.Reschedule(simulate, 16),
        "TypeError: Reschedule: `schedule` … el.Recursive(16) … 16",
    ),
    "bytes for a schedule": (
        lambda: el.Reschedule(simulate, "1GiB"),
        "TypeError: Reschedule: `schedule` … el.Budget('1GiB') … '1GiB'",
    ),
    "a policy without a budget": (
        lambda: el.Reschedule(simulate, el.Recursive(4), policy="auto"),
        "ValueError: Reschedule: … `policy='auto'` … Recursive(base=4) … el.Budget",
    ),
    "whiles by a schedule for scans": (
        lambda: el.Reschedule(root, whiles=el.Chunked(4)),
        "TypeError: Reschedule: `whiles` … `whiles=64` … el.Recursive() … Chunked",
    ),
    "whiles=True": (
        lambda: el.Reschedule(root, whiles=True),
        "TypeError: Reschedule: `whiles` … True",
    ),
    "whiles=el.Recursive(4)": (
        lambda: el.Reschedule(root, whiles=el.Recursive(4)),
        "ValueError: Reschedule: `base` of `whiles` must be at least 8 … 4",
    ),
    "a misspelt setting": (
        lambda: el.Reschedule(simulate, while_loops=3),
        "TypeError: Reschedule has no setting 'while_loops' … whiles",
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name):
    assert_raises(*SETTINGS[name])


@pytest.mark.parametrize("answer", [None, 1, "lax.scan", jnp.bool_(True)], ids=repr)
def test_only_that_returns_no_bool(answer):
    f = el.Reschedule(simulate, only=lambda loop: answer)
    said = f"lax.scan of 24 steps at … (simulate) … {answer!r}"
    for call in (f, f.plans, jax.jit(f), jax.grad(f)):
        assert_raises(
            lambda call=call: call(W, XS), f"TypeError: Reschedule: `only` … {said}"
        )


LINE = root.__code__.co_firstlineno + 3


@pytest.mark.parametrize("change", [jax.grad, jax.jacrev, jax.hessian])
def test_a_gradient_through_a_while_loop_names_its_line(change):
    f = el.Reschedule(lambda w: simulate(root(w), XS), el.Recursive(4))
    place = f"{root.__code__.co_filename}:{LINE} (root)"
    said = f"ValueError: The lax.while_loop at {place} … reverse mode … `whiles=64`"
    for call in (change(f), jax.jit(change(f))):
        assert_raises(lambda call=call: call(W), said)


def test_a_while_loop_has_its_other_modes_without_whiles():
    f = el.Reschedule(root, only=lambda loop: True)
    value, tangent = jax.jvp(f, (9.0,), (1.0,))
    assert abs(value - 3) < 1e-3
    assert abs(tangent - 1 / 6) < 1e-3


def test_a_budget_in_which_no_gradient_fits():
    f = el.Reschedule(simulate, el.Budget("8B", measure=False))
    assert_raises(lambda: jax.grad(f)(W, XS[:2]), "ValueError: Budget … does not fit")


def test_errors_of_f_are_its_own():
    def library(w: Any) -> Any:
        raise KeyError("of the library")

    f = el.Reschedule(library, el.Recursive(4))
    for call in (f, f.plans, jax.grad(f)):
        assert_raises(lambda call=call: call(W), "KeyError: of the library")
