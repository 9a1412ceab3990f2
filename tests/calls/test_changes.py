"""Functions that change what they hold while they are traced."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import eqloop as el

from ..asserts import assert_raises

XS = jnp.arange(4.0)


@jax.tree_util.register_pytree_node_class
class Node:
    """A module that can be changed, as those of `flax.nnx`."""

    def __init__(self, state: Any, count: int = 0):
        self.state, self.count = state, count

    def tree_flatten(self):
        return [self.state], self.count

    @classmethod
    def tree_unflatten(cls, count, children):
        return cls(*children, count)

    def __call__(self, h, x=0.0):
        self.state = self.state + x
        return h + self.state, x

    def together(self, carry):
        return self(*carry)


@dataclasses.dataclass
class Held:
    """An object that holds another one."""

    inner: Any

    def step(self, h, x):
        return self.inner(h, x)


class Slotted:
    __slots__ = ("state",)

    def __init__(self):
        self.state = 1.0

    def __call__(self, h, x):
        self.state = self.state + x
        return h, x


def counting():
    total = jnp.zeros(())

    def step(h, x):
        nonlocal total
        total = total + x
        return h + total, x

    return step


def of_list(nodes):
    return lambda h, x: nodes[0](h, x)


STATE = jnp.zeros(())
KEPT = Node(STATE)


def of_a_script(h, x):
    return KEPT(h, x)


CHANGES = {
    "a module": (lambda: el.Scan(Node(STATE))(0.0, XS), "f.state"),
    "in a field": (lambda: el.Scan(Held(Node(STATE)).step)(0.0, XS), "f.inner.state"),
    "in a closure": (
        lambda: el.Scan((lambda node: lambda h, x: node(h, x))(Node(STATE)))(0.0, XS),
        "node.state",
    ),
    "in a list": (lambda: el.Scan(of_list([Node(STATE)]))(0.0, XS), "nodes[0].state"),
    "in a slot": (
        lambda: el.Scan(Slotted())(STATE, XS),
        "f.state: 1.0, then float32[]",
    ),
    "a variable": (lambda: el.CheckpointedScan(counting())(0.0, XS), "total"),
    "a global": (lambda: el.Scan(of_a_script)(0.0, XS), "KEPT.state"),
    "of a body": (
        lambda: el.WhileLoop(lambda c: c[0] < 3, Node(STATE).together)((0.0, 1.0)),
        "body.state",
    ),
    "of a map": (lambda: el.Map(Node(STATE))(XS, XS), "f.state"),
    "of a layer": (
        lambda: el.StackedLayers(Node(XS))(0.0, 1.0),
        "a layer.state",
    ),
    "of a branch": (lambda: el.Cond(Node(STATE), Node(STATE))(True, XS[0], XS[1]), "f"),
    "of a program": (lambda: el.Jit(Node(STATE))(0.0, XS[0]), "f.state"),
    "what is computed again": (lambda: el.Remat(Node(STATE))(0.0, XS[0]), "f.state"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_change_is_refused(case):
    call, path = CHANGES[case]
    assert_raises(call, f"ValueError: … changes what it holds … {path} … ")
    KEPT.state = STATE


def test_a_number_of_a_copy_is_refused():
    class Counter(Node):
        def __call__(self, h, x):
            self.count += 1
            return h, x

    jax.tree_util.register_pytree_node_class(Counter)
    assert_raises(lambda: el.Scan(Counter(STATE))(0.0, XS), "ValueError: … f.count: 0")


def test_what_is_only_looked_at_is_not_refused():
    seen, traced = {"last": None}, [0]

    def step(h, x):
        traced[0] += 1
        seen["last"] = seen["more"] = h
        return h + x, x

    for xs in (XS, XS[:2], XS[:3]):
        assert el.Scan(step)(0.0, xs)[0] == xs.sum()
    assert traced[0] > 2


def test_what_a_failed_trace_has_left_behind_is_no_change():
    seen, kept = {}, []

    def step(h, x):
        seen["x"] = x
        kept.append(h)
        return h.astype(x.dtype) + x, None  # no number of Python can do that

    def other(h, x):
        seen["h"] = h
        return h + x, None

    assert el.Scan(step)(0.0, XS)[0] == XS.sum()
    with pytest.raises(Exception, match="shape"):
        el.Scan(other)(jnp.zeros(2), jnp.ones((4, 3)))
    for run in (el.Scan(other), jax.jit(el.Scan(other))):
        assert (run(jnp.zeros(3), jnp.ones((4, 3)))[0] == 4).all()
