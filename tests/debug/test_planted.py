"""Numbers that cease to be finite, in 36 places: each is found, and named rightly.

The line that is to blame has a comment with the name of its case: an error quotes it.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax import lax

import eqloop as el

from ..marks import slow_if

pytestmark = pytest.mark.sampled

FORWARD, DIFFERENTIATED = "forward", "forward, as it is differentiated"
BACKWARD = "backward"


class Case(NamedTuple):
    f: Callable[..., Any]
    args: tuple[Any, ...]
    operation: str
    loops: tuple[str, ...] = ()
    sweep: str = FORWARD


def root_at(place: int) -> Callable[[Any, Any], Any]:
    """A step whose derivative is infinite at one index, and nowhere else.

    The carry stays one; what is taken the root of is zero at that index.
    """

    def step(carry: Any, i: Any) -> tuple[Any, Any]:
        y = jnp.sqrt(carry - jnp.where(i == place, 1.0, 0.0))  # root
        return carry, y

    return step


def log_at(place: int) -> Callable[[Any, Any], Any]:
    def step(carry: Any, i: Any) -> tuple[Any, Any]:
        return carry, jnp.log(jnp.abs(i - place).astype(float) + 0 * carry)  # log

    return step


def sum_of_ys(loop: Any, length: int = 7) -> Callable[[Any], Any]:
    """The sum of what a loop stacks, as a function of its carry."""
    return lambda x: jnp.sum(loop(x, jnp.arange(length))[1])


def logs(schedule: el.StoreAll | Any, **settings: Any) -> Case:
    loop = el.Scan(log_at(4), schedule=schedule, **settings)
    return Case(sum_of_ys(loop), (1.0,), "log", ("iteration 4 of Scan",))


def roots(schedule: Any, sweep: str = BACKWARD, **settings: Any) -> Case:
    gradient = jax.grad(sum_of_ys(el.Scan(root_at(4), schedule=schedule, **settings)))
    return Case(gradient, (1.0,), "div", ("iteration 4 of Scan",), sweep)


# Without loops.


def overflow(x: Any) -> Any:
    return jnp.exp(x)  # overflow


def zero_by_zero(x: Any) -> Any:
    return (x - x) / (x - x)  # zero_by_zero


def out_of_bounds(x: Any) -> Any:
    return jnp.take(x, jnp.array([0, 7]))  # out_of_bounds


def narrow(x: Any) -> Any:
    return x.astype(jnp.float16)  # narrow


def difference(x: Any) -> Any:
    mask = jnp.where(jnp.arange(3) > 0, -jnp.inf, 0.0)
    return (x + mask) - mask  # difference


def in_branch(x: Any) -> Any:
    def fine(x: Any) -> Any:
        return x

    def faulty(x: Any) -> Any:
        return jnp.log(x - 1)  # in_branch

    return lax.cond(x > 0, faulty, fine, x)


def of_jax(x: Any) -> Any:
    jnp.var(x + 1, axis=0)  # traced before, and remembered by JAX with this line
    return jnp.var(x * 1e30, axis=0)  # of_jax


def norm(x: Any) -> Any:
    return jnp.sqrt(jnp.sum(x**2))  # norm


def masked(x: Any) -> Any:
    return jnp.sum(jnp.where(x > 0, jnp.sqrt(jnp.abs(x)), 0.0))  # masked


@jax.custom_vjp
def with_rule(x: Any) -> Any:
    return x


def _forward(x: Any) -> tuple[Any, Any]:
    return x, x


def _backward(x: Any, ct: Any) -> tuple[Any]:
    return (ct / x,)


with_rule.defvjp(_forward, _backward)


def use_of_rule(x: Any) -> Any:
    # JAX says of the backward rule that it is where the function is called.
    return jnp.sin(with_rule(x))  # with_rule


def rematerialized(x: Any) -> Any:
    return el.Remat(lambda x: jnp.sin(jnp.sqrt(x)))(x)  # rematerialized


# Loops of JAX's own.


def in_scan(x: Any) -> Any:
    def step(c: Any, i: Any) -> tuple[Any, Any]:
        return c, c / (i - 3)  # in_scan

    return lax.scan(step, x, jnp.arange(5.0))[1]


def in_reversed_scan(x: Any) -> Any:
    def step(c: Any, i: Any) -> tuple[Any, Any]:
        return c, c / (i - 3)  # in_reversed_scan

    return lax.scan(step, x, jnp.arange(5.0), reverse=True)[1]


def in_while(x: Any) -> Any:
    def step(c: Any) -> Any:
        i, x = c
        return i + 1, x + 1 / (i - 3.0)  # in_while

    return lax.while_loop(lambda c: c[0] < 6, step, (0, x))


def in_condition(x: Any) -> Any:
    def cond(x: Any) -> Any:
        return jnp.log(x) > -9  # in_condition

    return lax.while_loop(cond, lambda x: x - 1, x)


def for_ever(x: Any) -> Any:
    def step(x: Any) -> Any:
        return x * x  # for_ever

    return lax.while_loop(lambda x: x > 0, step, x)


# Three loops around each other.


def three_deep(outer: Any, middle: Any) -> Callable[[Any], Any]:
    """A loop in a loop in a `lax.scan`, which fails at 2, 1 and 3."""

    def innermost(carry: Any, k: Any) -> tuple[Any, Any]:
        x, i, j = carry
        far = jnp.abs(i - 2) + jnp.abs(j - 1) + jnp.abs(k - 3)
        return carry, jnp.sqrt(far * x)  # deep

    def inner(carry: Any, j: Any) -> tuple[Any, Any]:
        carry = (*carry, j)
        return carry[:2], lax.scan(innermost, carry, jnp.arange(4.0))[1].sum()

    def step(x: Any, i: Any) -> tuple[Any, Any]:
        return x, middle(inner)((x, i), jnp.arange(3.0))[1].sum()

    return lambda x: outer(step)(x, jnp.arange(4.0))[1].sum()


def deep(outer: Any, middle: Any, names: str) -> Case:
    first, second = names.split()
    loops = (
        f"iteration 2 of {first}",
        f"iteration 1 of {second}",
        "iteration 3 of lax.scan",
    )
    gradient = jax.grad(three_deep(outer, middle))
    return Case(gradient, (1.0,), "div", loops, BACKWARD)


def in_layers(x: Any) -> Any:
    class Layer(eqx.Module):
        shift: Any

        def __call__(self, x: Any) -> Any:
            return x + jnp.log(self.shift)  # in_layers

    shifts = [Layer(jnp.asarray(s)) for s in (1.0, 2.0, 0.0)]
    return el.StackedLayers.from_layers(shifts)(x)


def in_rows(x: Any) -> Any:
    row = lambda x: jnp.log(x)  # in_rows
    return el.ChunkedVmap(row, 3)(x)


def in_rows_of_gradient(x: Any) -> Any:
    row = lambda x: jnp.sqrt(x)  # in_rows_of_gradient
    return jnp.sum(el.ChunkedVmap(row, 2)(x))


def scan_in_rows(x: Any) -> Any:
    def step(c: Any, i: Any) -> tuple[Any, Any]:
        return c, jnp.log(jnp.abs(c - 5) + jnp.abs(i - 1))  # scan_in_rows

    return el.Map(lambda x: el.CheckpointedScan(step, 2)(x, jnp.arange(3.0))[1])(x)


def while_at(kind: Any, **settings: Any) -> Callable[[Any], Any]:
    def step(c: Any) -> Any:
        i, x = c
        return i + 1, x + jnp.sqrt(x - jnp.where(i == 3, 1.0, 0.0)) * 0  # while

    return lambda x: kind(lambda c: c[0] < 6, step, **settings)((0, x))[1]


def backward_while(kind: Any, **settings: Any) -> Case:
    gradient = jax.grad(while_at(kind, **settings))
    return Case(gradient, (1.0,), "div", (f"iteration 3 of {kind.__name__}",), BACKWARD)


ROWS = jnp.array([1.0, 2, 3, 4, 5, 0, 6])
CASES = {
    "overflow": Case(overflow, (jnp.arange(3.0) * 100,), "exp"),
    "zero_by_zero": Case(zero_by_zero, (jnp.ones(()),), "div"),
    "out_of_bounds": Case(out_of_bounds, (jnp.ones(3),), "gather"),
    "narrow": Case(narrow, (jnp.array([1.0, 1e6]),), "convert_element_type"),
    "difference": Case(difference, (jnp.ones(3),), "sub"),
    "in_branch": Case(in_branch, (1.0,), "log"),
    "of_jax": Case(of_jax, (jnp.arange(3.0),), "square"),
    "norm": Case(jax.grad(norm), (jnp.zeros(3),), "div", (), DIFFERENTIATED),
    "masked": Case(jax.grad(masked), (jnp.arange(2.0),), "div", (), DIFFERENTIATED),
    "with_rule": Case(jax.grad(use_of_rule), (0.0,), "div", (), BACKWARD),
    "rematerialized": Case(jax.grad(rematerialized), (0.0,), "div", (), BACKWARD),
    "in_scan": Case(in_scan, (1.0,), "div", ("iteration 3 of lax.scan",)),
    "in_reversed_scan": Case(
        in_reversed_scan, (1.0,), "div", ("iteration 3 of lax.scan",)
    ),
    "in_while": Case(in_while, (1.0,), "div", ("iteration 3 of lax.while_loop",)),
    "in_condition": Case(
        in_condition, (3.0,), "log", ("iteration 2 of lax.while_loop",)
    ),
    "for_ever": Case(for_ever, (10.0,), "mul", ("iteration 5 of lax.while_loop",)),
    "in_layers": Case(in_layers, (1.0,), "log", ("iteration 2 of StackedLayers",)),
    "in_rows": Case(in_rows, (ROWS,), "log", ("rows 3 to 5 of ChunkedVmap",)),
    "in_rows_of_gradient": Case(
        jax.grad(in_rows_of_gradient),
        (ROWS,),
        "div",
        ("rows 4 to 5 of ChunkedVmap",),
        BACKWARD,
    ),
    "scan_in_rows": Case(
        scan_in_rows,
        (ROWS,),
        "log",
        ("row 4 of Map", "iteration 1 of CheckpointedScan"),
    ),
    "while 1": backward_while(el.BoundedWhileLoop, max_steps=9, base=2),
    "while 2": backward_while(el.CheckpointedWhileLoop, checkpoints=2),
    "while 3": Case(
        lambda x: while_at(el.WhileLoop)(x - 2.0),
        (2.5,),
        "sqrt",
        ("iteration 3 of WhileLoop",),
    ),
    "log of a Scan": logs(None),
    "log of a nested Scan": logs(el.Recursive(2)),
    "log of a binomial Scan, reversed": logs(el.Binomial(2), reverse=True),
    # What all residuals are stored of has its derivatives in the forward sweep.
    "root of a Scan": roots(None, DIFFERENTIATED),
    "root of a nested Scan": roots(el.Recursive(2)),
    "root of a chunked Scan, reversed": roots(el.Chunked(2), reverse=True),
    "root of a binomial Scan": roots(el.Binomial(2)),
    "root of blocks": roots(el.Binomial(2, block=3)),
    "deep 1": deep(el.CheckpointedScan, el.Scan, "CheckpointedScan Scan"),
    "deep 2": deep(el.Scan, lambda f: el.Scan(f, schedule=el.Binomial(2)), "Scan Scan"),
    "deep 3": deep(
        lambda f: el.CheckpointedScan(f, 2, unroll=2),
        lambda f: lambda init, xs: lax.scan(f, init, xs),
        "CheckpointedScan lax.scan",
    ),
    "deep under vmap": deep(el.CheckpointedScan, el.Scan, "CheckpointedScan Scan"),
    "root in a tangent": Case(
        lambda x: jax.jvp(sum_of_ys(el.CheckpointedScan(root_at(4), 2)), (x,), (x,)),
        (1.0,),
        "div",
        ("iteration 4 of CheckpointedScan",),
        DIFFERENTIATED,
    ),
}


# Each of them is like another one, and takes longer to compile than most.
SLOW = {
    "while 2",
    "deep 1",
    "deep 2",
    "deep 3",
    "root of a nested Scan",
    "root of a binomial Scan",
    "root of blocks",
    "log of a nested Scan",
    "log of a binomial Scan, reversed",
    "while 1",
    "in_rows_of_gradient",
}


@pytest.mark.parametrize("name", slow_if(SLOW.__contains__, CASES))
def test_first_is_named(name: str) -> None:
    case = CASES[name]
    f, args = el.DebugNonFinite(case.f), case.args
    if name.endswith("under vmap"):
        f, args = jax.vmap(f), (jnp.ones(2),)
    with pytest.raises(el.NonFiniteError) as error:
        f(*args)
    text = str(error.value)
    assert text.startswith(f"`{case.operation}` gave ")
    assert re.search(f"# ({name.split(' ')[0]})$", text, re.M)
    found = re.findall(r"^  in: (.*?)(?:, /.*)?$", text, re.M)
    assert tuple(found) == case.loops
    assert text.endswith(f"  sweep: {case.sweep}")
    assert __file__ in text
