"""What maps say when they are called in a way that they cannot be."""

import jax
import jax.numpy as jnp
import pytest

import eqloop as el

from ..asserts import assert_raises


def add(x, y):
    return {"sum": x + y}


def chunked(f=add, chunk_size=2, **settings):
    return el.ChunkedVmap(f, chunk_size, **settings)


def attend(x):
    return jax.nn.softmax(x @ x.T) @ x


def two(x):
    return {"a": jnp.ones(3), "b": [x, x + 1]}


ONES = jnp.ones((5, 3))
KEYS = jax.random.split(jax.random.key(0))

WRONG = {
    "no chunk size": (lambda: el.ChunkedVmap(add), "TypeError: … chunk_size"),
    "a flag": (lambda: chunked(chunk_size=True), "TypeError: … of type bool"),
    "an unknown setting": (
        lambda: el.ChunkedVmap(chunksize=3),
        "TypeError: ChunkedVmap has no setting 'chunksize' … chunk_size",
    ),
    "an unknown policy": (
        lambda: chunked(policy="dots"),
        "ValueError: … no policy named 'dots' … dots_saveable",
    ),
    "different lengths": (
        lambda: chunked()(ONES, {"a": [jnp.ones(5), jnp.ones(4)]}),
        "ValueError: … x: 5 … y['a'][0]: 5 … y['a'][1]: 4 … None",
    ),
    "different lengths by keyword": (
        lambda: chunked()(y=ONES, x=jnp.ones(2)),
        "ValueError: … x: 2 … y: 5",
    ),
    "nothing to map": (
        lambda: chunked()(1.0, "static"),
        "ValueError: … nothing to map over … x: 1.0 … y: 'static'",
    ),
    "nothing to map by choice": (
        lambda: chunked(in_axes=None)(ONES, ONES),
        "ValueError: … nothing to map over … x: f32[5,3]",
    ),
    "no arguments": (
        lambda: chunked(lambda: 1)(),
        "ValueError: … nothing to map over … (none)",
    ),
    "an axis that is not there": (
        lambda: chunked(in_axes=(0, {"a": 2}))(ONES, {"a": ONES}),
        "ValueError: … "
        "in_axes[1]['a'] gives axis 2 for y['a'], which is float32[5,3] … -2 to 1",
    ),
    "a scalar that is mapped": (
        lambda: chunked()(ONES, jnp.float32(1.0)),
        "ValueError: … axis 0 for y, which is float32[] and has no axis … None",
    ),
    "an axis that is no int": (
        lambda: chunked(in_axes={"y": "rows"})(ONES, ONES),
        "TypeError: … in_axes['y'] must be an int, None, or a callable … 'rows'",
    ),
    "a name that is not there": (
        lambda: chunked(in_axes={"z": 0})(ONES, ONES),
        "ValueError: … in_axes names 'z' … x, y",
    ),
    "too many axes": (
        lambda: chunked(in_axes=(0, 0, 0))(ONES, ONES),
        "ValueError: … in_axes … one entry for each positional argument, x, y … 3",
    ),
    "axes that are no prefix": (
        lambda: chunked(in_axes=({"a": 0}, 0))(ONES, ONES),
        "ValueError: … in_axes[0]={'a': 0} is not a prefix of x: … dict of 1, where x "
        "is float32[",
    ),
    "a result that is not the same for every row": (
        lambda: chunked(out_axes={"sum": None})(ONES, ONES),
        "ValueError: … out_axes gives None for results that depend on mapped … "
        "out['sum'] … int",
    ),
    "an axis of the result that is not there": (
        lambda: chunked(out_axes=2)(ONES, ONES),
        "ValueError: … out_axes gives axis 2 for out['sum'], which is float32[3] … "
        "-2 to 1",
    ),
    "axes of the result that are no prefix": (
        lambda: chunked(out_axes={"total": 0})(ONES, ONES),
        "ValueError: … out_axes={'total': 0} is not a prefix of out",
    ),
    "an argument missing": (lambda: chunked()(ONES), "TypeError: … 'y'"),
    "a budget in words": (
        lambda: chunked(chunk_size="512MiB"),
        "TypeError: … `chunk_size` must be an int … or a `Budget` … "
        "'512MiB', of type str",
    ),
    "a schedule that is no budget": (
        lambda: chunked(chunk_size=el.Recursive(16)),
        "TypeError: ChunkedVmap: `chunk_size` … Recursive(base=16)",
    ),
    "a budget that is too small": (
        lambda: jax.jit(chunked(attend, el.Budget(16)))(jnp.ones((5, 16, 8))),
        "ValueError: Budget: a single row takes … bytes … the budget is 16 B",
    ),
    "an unknown reduction": (
        lambda: chunked(reduce="max"),
        "ValueError: ChunkedVmap: `reduce` must be 'sum', 'mean', or None … 'max'",
    ),
    "an unknown reduction in a tree": (
        lambda: chunked(reduce={"sum": jnp.sum}),
        "ValueError: … `reduce['sum']` must be 'sum', 'mean', or None",
    ),
    "reductions that are no prefix": (
        lambda: chunked(reduce={"total": "sum"})(ONES, ONES),
        "ValueError: … reduce={'total': 'sum'} is not a prefix of out … "
        "Give one reduction for",
    ),
    "a sum of what cannot be added": (
        lambda: chunked(lambda key: {"k": [key]}, reduce="sum")(KEYS),
        "TypeError: ChunkedVmap: reduce='sum' … out['k'][0], which is key<fry>[] … "
        "None",
    ),
    "one key for a row that is none": (
        lambda: el.Vmap(lambda x, key: x)(ONES, key=jnp.zeros(7, jnp.uint32)),
        "ValueError: Vmap: `key` must be a PRNG key … not uint32[7]",
    ),
    "keys for some of the rows": (
        lambda: el.Map(lambda x, key: x)(ONES, key=KEYS),
        "ValueError: Map: these lengths must all be the same … x: 5 … key: 2",
    ),
    "an argument that is to be whole": (
        lambda: chunked(add)(jnp.ones(3), ONES),
        "ValueError: ChunkedVmap: … 3 … 5 … whole: `in_axes={",
    ),
    "a module that is to be whole": (
        lambda: el.Vmap(lambda w, x: x)(dict(a=jnp.ones(3), b=jnp.ones(5)), ONES),
        "ValueError: Vmap: … To pass w whole: `in_axes={'w': None}`.",
    ),
    "whole for a map": (
        lambda: el.Map(lambda x, w: x)(ONES, jnp.ones(3)),
        "ValueError: Map: … `in_axes={'x': None}` of `el.Vmap` or `el.ChunkedVmap`",
    ),
    "a size that is not that of the rows": (
        lambda: el.Vmap(add, axis_size=4)(ONES, ONES),
        "ValueError: Vmap: these lengths must all be the same … axis_size: 4 … x: 5",
    ),
    "nothing to vmap": (
        lambda: el.Vmap(add, in_axes=None)(1.0, ONES),
        "ValueError: Vmap: there is nothing to map over … x: 1.0",
    ),
    "no size by name": (
        lambda: el.Vmap(add, in_axes={"z": 0})(ONES, ONES),
        "ValueError: Vmap: in_axes names 'z' … x, y",
    ),
    "a result of Vmap that is not the same for every row": (
        lambda: el.Vmap(two, out_axes={"a": None, "b": [0, None]})(ONES),
        "ValueError: Vmap: out_axes gives None for results that depend … "
        "out['b'][1] … int",
    ),
    "a function of one row that fails": (
        lambda: el.Vmap(jnp.dot)(ONES, ONES[:, :2]),
        "TypeError: … dot",
    ),
    "no rows to map": (
        lambda: el.Map(add)(1.0, "static"),
        "ValueError: Map: there is nothing to map over",
    ),
    "a number among the rows": (
        lambda: el.Map(add)(ONES, jnp.float32(2.0)),
        "ValueError: … axis 0 for y, which is float32[] and has no axis",
    ),
    "axes of a Map": (
        lambda: el.Map(in_axes=1),
        "TypeError: Map has no setting 'in_axes' … batch_size",
    ),
    "an unknown operation": (
        lambda: el.unvmap(ONES, "sum"),
        "ValueError: unvmap: `op` … 'any', 'all', 'max', 'min', 'none', not 'sum'",
    ),
    "the greatest of nothing": (
        lambda: el.unvmap(ONES[:0], "max"),
        "ValueError: unvmap: 'max' needs at least one element … float32[0,3]",
    ),
    "no array": (
        lambda: el.unvmap([ONES]),
        "TypeError: unvmap: `x` must be an array, not [Array(",
    ),
}


@pytest.mark.parametrize("call", WRONG)
def test_wrong_calls(call):
    assert_raises(*WRONG[call])


def test_errors_of_f_tell_what_it_was_called_with():
    with pytest.raises(TypeError) as caught:
        chunked()(ONES, jnp.ones((5, 4)))
    (note, *_) = caught.value.__notes__
    assert "ChunkedVmap traced f on one row" in note
    assert "f32[3]" in note
    assert "f32[4]" in note
