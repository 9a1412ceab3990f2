"""Values of Python where arrays are meant: each has a sentence that says what to do."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqloop as el

from ..asserts import assert_raises
from ..marks import slow_if


def step(h, x):
    return h + jnp.sum(jnp.asarray(x)), None


class Cell(eqx.Module):
    rate: jax.Array

    def __call__(self, h, x):
        return self.rate * h + x, None


class Loader:
    """Like a `DataLoader`: it has a length, and batches."""

    def __len__(self):
        return 3

    def __iter__(self):
        return iter([np.ones(2)] * 3)


def scanned(xs, **length):
    return lambda: el.Scan(step)(0.0, xs, **length)


def wanting(h, x, *, key):
    return h + jax.random.normal(key), x


XS, CELL = jnp.ones(3), Cell(jnp.ones(()))
WRONG = {
    "a list": (
        scanned([1.0, 2.0, 3.0]),
        "TypeError: Scan: … arrays … xs: a list of 3 … `jnp.asarray(xs)`",
    ),
    "a list, with its length": (
        scanned([1.0, 2.0, 3.0], length=3),
        "TypeError: Scan: … xs: a list of 3 Python numbers … `jnp.asarray(xs)`",
    ),
    "a list in a tree": (
        scanned({"a": (1, 2)}),
        "TypeError: Scan: … xs['a']: a tuple of 2 … `jnp.asarray(xs['a'])`",
    ),
    "a range": (scanned(range(3)), "TypeError: … range(0, 3) … `jnp.asarray(xs)`"),
    "a range, with its length": (
        scanned(range(3), length=3),
        "TypeError: … range(0, 3) … `jnp.asarray(xs)`",
    ),
    "a number": (scanned(10), "TypeError: … the number 10 … `length=10` … array"),
    "a number with a point": (scanned(0.5), "TypeError: … the number 0.5 … array"),
    "text": (scanned("abc"), "TypeError: … xs: 'abc', of type str … arrays"),
    "a set": (scanned({1, 2}), "TypeError: … of type set … `jnp.stack(list(xs))`"),
    "a loader": (
        scanned(Loader()),
        "TypeError: … of type Loader … `jnp.stack(list(xs))` … `el.Resumable` … batch",
    ),
    "a generator": (
        scanned(x for x in [1.0]),
        "TypeError: Scan: `xs` … iterator … generator … `el.Resumable`",
    ),
    "a list, with max_steps": (
        lambda: el.ScanWhile(lambda h: h < 9, step, max_steps=2)(0.0, [1.0, 2.0]),
        "TypeError: ScanWhile: … xs: a list of 2 … `jnp.asarray(xs)`",
    ),
    "a list for a ForLoop": (
        lambda: el.ForLoop(jnp.sin)([1.0, 2.0]),
        "TypeError: ForLoop: … xs[0]: a list of 2 … `jnp.asarray(xs[0])`",
    ),
    "a number for a ForLoop": (
        lambda: el.ForLoop(jnp.sin)(10),
        "TypeError: ForLoop: … xs[0]: the number 10 … `length=10`",
    ),
    "a list for a map": (
        lambda: el.Map(jnp.sin)([1.0, 2.0]),
        "ValueError: Map: … nothing to map over … [1.0, 2.0] … `jnp.asarray`",
    ),
    "an array of text for a map": (
        lambda: el.Vmap(lambda x: x["a"])({"a": np.array(["a"])}),
        "TypeError: Vmap: arrays must hold numbers … x['a']: <U1[1]",
    ),
    "nothing": (scanned(None), "ValueError: Scan: … unknown: pass `length=`"),
    "an array of text": (
        scanned({"name": np.array(["a", "b"]), "x": XS}),
        "TypeError: Scan: arrays must hold numbers … xs['name']: <U1[2] … indices",
    ),
    "an array of objects": (
        scanned(np.array([None, {}])),
        "TypeError: Scan: arrays must hold numbers … xs: object[2]",
    ),
    "an array of dates": (
        scanned(np.array(["2020-01-01"], "datetime64[D]")),
        "TypeError: Scan: arrays must hold numbers … xs: datetime64[D][1]",
    ),
    "a carry of text": (
        lambda: el.Scan(step)({"h": np.array(["a"])}, XS),
        "TypeError: Scan: arrays must hold numbers … carry['h']: <U1[1]",
    ),
    "settings without f": (
        lambda: el.Scan(schedule=el.Chunked(2))(0.0, XS),
        "TypeError: Scan: … `el.Scan(schedule=...)` is a decorator … "
        "`el.Scan(f, schedule=...)(...)`",
    ),
    "settings without f, by keyword": (
        lambda: el.Scan(schedule=el.Chunked(2))(0.0, xs=XS),
        "TypeError: Scan: … is a decorator",
    ),
    "jit of a module": (
        lambda: jax.jit(el.Scan(CELL))(0.0, XS),
        "TypeError: Scan: it holds arrays … `jax.jit` … `el.Jit`",
    ),
    "jit of layers": (
        lambda: jax.jit(el.StackedLayers.from_layers([CELL] * 2))(0.0),
        "TypeError: StackedLayers: it holds arrays … `jax.jit` … `el.Jit`",
    ),
    "no key": (
        lambda: el.Scan(wanting)(0.0, XS),
        "TypeError: Scan: f wants a `key` … `key=jax.random.key(0)`",
    ),
    "no key for a ForLoop": (
        lambda: el.ForLoop(lambda x, key: x)(XS),
        "TypeError: ForLoop: f wants a `key`",
    ),
    "a key that is not wanted": (
        lambda: el.Scan(step)(0.0, XS, key=jax.random.key(0)),
        "TypeError: Scan: … given a `key` … no parameter `key` … (h, x)",
    ),
    "plans of a call": (
        lambda: el.plans(step, 0.0, XS),
        "TypeError: plans(f, *, device=None): too many … `el.plans(f)(*args)`",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(name):
    assert_raises(*WRONG[name])


def test_what_is_meant_for_every_step():
    """What is no array, and is not as long as the loop, is given to each step."""
    whole = lambda *args, **kwargs: el.Scan(step, **kwargs)(0.0, *args, length=3)[0]
    assert whole(2.0) == 6
    assert whole([1.0, 2.0]) == 9
    assert whole([1.0, 2.0, 3.0], in_axes=None) == 18
    with_name = el.Scan(lambda h, x: (h + x[0], None))
    assert with_name(0.0, (XS, "a name"))[0] == 3


def test_keys_that_have_a_default_or_another_place():
    by_position = lambda h, key: (h + key, None)
    assert el.Scan(by_position)(0.0, XS)[0] == 3
    with_default = lambda h, x, key=None: (h + x, None)
    assert el.Scan(with_default)(0.0, XS)[0] == 3
    keywords = lambda h, x, **rest: (h + x, None)
    assert el.Scan(keywords)(0.0, XS, key=jax.random.key(0))[0] == 3
    assert hash(el.Scan(step)) == hash(el.Scan(step))


STEP = lambda h, x: (jnp.tanh(h + x), None)
LAYER = lambda key: eqx.nn.Linear(3, 3, key=key)
ASKED = {
    "plan": lambda h, xs: el.CheckpointedScan(STEP).plan(h, xs),
    "frontier": lambda h, xs: el.CheckpointedScan(STEP).frontier(h, xs)[0],
    "layers": lambda h, xs: el.StackedLayers.init(
        LAYER, 4, key=jax.random.key(0), schedule=el.Chunked(1)
    ).plan(h),
    "while": lambda h, xs: el.plans(
        jax.grad(
            lambda h: jnp.sum(
                el.CheckpointedWhileLoop(
                    lambda h: jnp.sum(h) < 3, lambda h: jnp.tanh(h) + 1, max_steps=9
                )(h)
            )
        )
    )(h),
    "plans": lambda h, xs: el.plans(
        jax.grad(lambda h, xs: jnp.sum(el.CheckpointedScan(STEP)(h, xs)[0]))
    )(h, xs),
    "Fit": lambda h, xs: el.Fit(
        lambda h, xs: jnp.sum(el.Scan(STEP)(h, xs)[0]), "1MiB"
    ).plan(h, xs),
}


# A frontier opens the call as a plan does.
@pytest.mark.parametrize(
    "ask", slow_if(lambda ask: ask is ASKED["frontier"], ASKED.values()), ids=ASKED
)
def test_what_a_loop_takes_is_the_same_for_arrays_of_numpy(ask):
    h, xs = np.zeros(3, np.float32), np.ones((20, 3), np.float32)
    expected = str(ask(jnp.asarray(h), jnp.asarray(xs)))
    assert expected == str(ask(h, jnp.asarray(xs))) == str(ask(jnp.asarray(h), xs))
