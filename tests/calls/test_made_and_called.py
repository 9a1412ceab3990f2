"""Things that are made, or called, with too few or too many arguments.

Each is told how it is made and called, as a transform is, in one sentence of ours.
"""

import inspect
import traceback
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import eqloop as el

from ..asserts import assert_raises

X = jnp.ones(3)
PACKAGE = str(Path(el.__file__).parent)
less, more = (lambda x: x.sum() < 3), (lambda x: x + 1)
total = lambda x: jnp.sum(x**2)
LAYER = eqx.Partial(lambda w, x: w * x, jnp.ones((2, 3)))
CALLS = {
    "a while loop, called at once": (
        lambda: el.WhileLoop(less, more, X),
        "WhileLoop(cond, body): too many … `el.WhileLoop(cond, body)(init)`",
    ),
    "one with a bound": (
        lambda: el.BoundedWhileLoop(less, more, X, max_steps=5),
        "BoundedWhileLoop(cond, body, *, max_steps): too many … call the result",
    ),
    "one that stores carries": (
        lambda: el.CheckpointedWhileLoop(less, more, X),
        "CheckpointedWhileLoop(cond, body): too many … (cond, body)(init)`",
    ),
    "one function": (
        lambda: el.WhileLoop(more),
        "WhileLoop(cond, body): missing … 'body'",
    ),
    "no bound": (
        lambda: el.BoundedWhileLoop(less, more),
        "BoundedWhileLoop(cond, body, *, max_steps): missing … 'max_steps'",
    ),
    "a condition, called at once": (
        lambda: el.Cond(True, total, total, X),
        "Cond(true_f, false_f): too many … `el.Cond(true_f, false_f)(pred, *operands",
    ),
    "one branch": (
        lambda: el.Cond(total),
        "Cond(true_f, false_f): missing … 'false_f'",
    ),
    "a switch, called at once": (
        lambda: el.Switch(0, [total, total], X),
        "Switch(branches): too many … `el.Switch(branches)(index, … one list",
    ),
    "branches without a list": (
        lambda: el.Switch(total, total),
        "Switch(branches): too many … one list",
    ),
    "several branches, called at once": (
        lambda: el.IfElse([True], [total], X),
        "IfElse(branches): too many … `el.IfElse(branches)(conditions, … one list",
    ),
    "no layers": (
        lambda: el.StackedLayers(),
        "StackedLayers(layers): missing … 'layers'",
    ),
    "layers one by one": (
        lambda: el.StackedLayers.from_layers(LAYER, LAYER),
        "StackedLayers.from_layers(layers, **settings): too many",
    ),
    "a plan of nothing": (
        lambda: el.StackedLayers(LAYER).plan(),
        "StackedLayers.plan(x, … missing … 'x'",
    ),
    "no key": (
        lambda: el.ForwardGrad(total)(X),
        "ForwardGrad(*args, key, **kwargs): missing … 'key'",
    ),
    "no key of another": (
        lambda: el.SofoGrad(total)(X),
        "SofoGrad(*args, key, **kwargs): missing … 'key'",
    ),
    "no amount of memory": (lambda: el.Budget(), "Budget(nbytes): missing … 'nbytes'"),
    "no number of carries": (
        lambda: el.Binomial(),
        "Binomial(checkpoints): missing … 'checkpoints'",
    ),
    "no directory": (
        lambda: el.Spill(el.Recursive(4)),
        "Spill(schedule, directory): missing … 'directory'",
    ),
    "two amounts": (lambda: el.Recursive(4, 5, 6), "Recursive(base=16): too many"),
    "an unknown setting": (
        lambda: el.ProgressBar(name="a"),
        "ProgressBar(every=None): … unexpected … 'name'",
    ),
    "no steps between cuts": (
        lambda: el.Truncate(),
        "Truncate(every): missing … 'every'",
    ),
    "no message": (
        lambda: el.error_if(X, True),
        "error_if(x, pred, msg): missing … 'msg'",
    ),
    "nothing to look for": (
        lambda: el.find_leaves(X),
        "find_leaves(tree, where): missing … 'where'",
    ),
    "no jaxpr": (lambda: el.ir.optimize(), "optimize(jaxpr, passes=..., … 'jaxpr'"),
    "nothing to draw": (lambda: el.ir.draw(), "draw(f): missing … 'f'"),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_do_not_fit(name):
    call, said = CALLS[name]
    assert_raises(call, f"TypeError: {said}")
    with pytest.raises(TypeError) as caught:
        call()
    error = caught.value
    assert error.__cause__ is None
    assert error.__suppress_context__ or error.__context__ is None
    places = [f.filename for f in traceback.extract_tb(error.__traceback__)]
    assert not [p for p in places if p.startswith(PACKAGE) or p == "<string>"]


def test_a_layer_that_is_not_there():
    with pytest.raises(IndexError, match="there is no layer 7") as caught:
        el.StackedLayers(LAYER)[7]
    places = [f.filename for f in traceback.extract_tb(caught.value.__traceback__)]
    assert not [p for p in places if p.startswith(PACKAGE)]


def test_classes_of_users_say_what_they_need():
    class Fixed(el.AbstractSchedule):
        def __init__(self, steps):
            self.steps = steps

        def layout(self, loop):
            return el.Chunked(self.steps).layout(loop)

    class Abstract(el.AbstractSchedule):
        pass

    assert_raises(Fixed, "TypeError: Fixed(steps): missing … 'steps'")
    assert_raises(Abstract, "TypeError: Can't instantiate abstract … layout")


def test_a_type_error_within_is_left_alone():
    def cond(h):
        return h["a"] < 3

    assert_raises(
        lambda: el.WhileLoop(cond, more)(jax.numpy.float32(1)), "TypeError: … indexing"
    )


def test_base_is_of_the_default_schedule():
    step = lambda h, x: (h + x, None)
    said = "ValueError: CheckpointedScan: `base=4` … `schedule=Binomial(checkpoints=3"
    assert_raises(
        lambda: el.CheckpointedScan(step, base=4, schedule=el.Binomial(3)), said
    )
    assert_raises(
        lambda: el.CheckpointedForLoop(total, base=4, schedule=el.Binomial(3)),
        said.replace("Scan", "ForLoop"),
    )
    assert el.CheckpointedScan(step, schedule=el.Binomial(3)).base == 16


HAVE_A_POLICY = {
    "Scan": lambda policy: el.Scan(lambda h, x: (h, x), policy=policy),
    "Reschedule": lambda policy: el.Reschedule(total, policy=policy),
    "StackedLayers": lambda policy: el.StackedLayers(LAYER, policy=policy),
    "Remat": lambda policy: el.Remat(total, policy=policy),
    "ChunkedVmap": lambda policy: el.ChunkedVmap(total, 2, policy=policy),
}


@pytest.mark.parametrize("name", HAVE_A_POLICY)
def test_policies_that_are_none_are_told_by_whose_they_are(name):
    make = HAVE_A_POLICY[name]
    assert_raises(lambda: make("dots"), f"ValueError: {name}: … 'dots'. Did you mean")
    assert_raises(lambda: make(3), f"TypeError: {name}: `policy` … not 3 of type int")
    maker = el.policies.save_names
    assert_raises(lambda: make(maker), f"ValueError: {name}: `save_names` … Call it")
    is_loop = name not in ("Remat", "ChunkedVmap")
    hint = "Did you mean `schedule=Recursive(base=4)`?" if is_loop else "Recursive"
    assert_raises(lambda: make(el.Recursive(4)), f"TypeError: {name}: … {hint}")
    assert make("save_dots").policy == el.policies.save_dots


CLASSES = [
    made
    for made in (getattr(el, name) for name in el.__all__)
    if isinstance(made, type) and "__init__" in vars(made)
]


@pytest.mark.parametrize("made", CLASSES)
def test_the_signature_of_a_class_says_how_it_is_made(made: type):
    _, *expected = inspect.signature(made.__init__).parameters.values()
    assert list(inspect.signature(made).parameters.values()) == expected
