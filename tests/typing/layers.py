"""Stacked layers know what a layer is."""

from typing import assert_type

import equinox as eqx
from jax import Array

import eqloop as el


class Block(eqx.Module):
    linear: eqx.nn.Linear

    def __init__(self, size: int, *, key: Array):
        self.linear = eqx.nn.Linear(size, size, key=key)

    def __call__(self, x: Array) -> Array:
        return x + self.linear(x)


def make(*, key: Array) -> Block:
    return Block(8, key=key)


def layers(x: Array, key: Array) -> None:
    """An editor completes `stack[0].linear.weight`."""
    stack = el.StackedLayers.init(make, 24, key=key, schedule=el.Chunked(6))
    assert_type(stack, el.StackedLayers[Block])
    assert_type(stack[0], Block)
    assert_type(stack[1:], el.StackedLayers[Block])
    assert_type(stack.unstack(), list[Block])
    assert_type([layer.linear for layer in stack], list[eqx.nn.Linear])
    assert_type(len(stack), int)
    assert_type(stack.plan(x), el.Plan)
    assert_type(el.StackedLayers.from_layers(stack.unstack())[0], Block)
    assert_type(el.StackedLayers(stack.layers, policy="save_dots")[0], Block)


def wrong(x: Array, key: Array) -> None:
    """Each of these is underlined."""
    el.StackedLayers.init(make, 24)  # pyright: ignore[reportCallIssue]
    el.StackedLayers.init(make, "24", key=key)  # pyright: ignore[reportArgumentType]
    el.StackedLayers.from_layers(make(key=key))  # pyright: ignore[reportArgumentType]
    stack = el.StackedLayers.init(make, 24, key=key)
    stack["0"]  # pyright: ignore[reportArgumentType, reportCallIssue]
    print(stack[0].weight)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownArgumentType]
    stack()  # pyright: ignore[reportCallIssue]
