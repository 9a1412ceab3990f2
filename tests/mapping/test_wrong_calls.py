"""What `ChunkedVmap` says when it is called in a way that it cannot be."""

import jax.numpy as jnp
import pytest

import eqloop as el


def add(x, y):
    return {"sum": x + y}


def chunked(f=add, chunk_size=2, **settings):
    return el.ChunkedVmap(f, chunk_size, **settings)


ONES = jnp.ones((5, 3))

WRONG = {
    "no function": (
        lambda: chunked(3),
        TypeError,
        ["ChunkedVmap: `f` must be callable, but 3 is not"],
    ),
    "no chunk size": (lambda: el.ChunkedVmap(add), TypeError, ["chunk_size"]),
    "a fraction": (
        lambda: chunked(chunk_size=2.5),
        TypeError,
        ["`chunk_size` must be an int", "2.5, of type float"],
    ),
    "a flag": (lambda: chunked(chunk_size=True), TypeError, ["of type bool"]),
    "nothing at once": (
        lambda: chunked(chunk_size=0),
        ValueError,
        ["`chunk_size` must be at least 1, but it is 0"],
    ),
    "an unknown setting": (
        lambda: el.ChunkedVmap(chunksize=3),
        TypeError,
        ["ChunkedVmap has no setting 'chunksize'", "chunk_size"],
    ),
    "an unknown policy": (
        lambda: chunked(policy="dots"),
        ValueError,
        ["no policy named 'dots'", "dots_saveable"],
    ),
    "different lengths": (
        lambda: chunked()(ONES, {"a": [jnp.ones(5), jnp.ones(4)]}),
        ValueError,
        ["x: 5", "y['a'][0]: 5", "y['a'][1]: 4", "None"],
    ),
    "different lengths by keyword": (
        lambda: chunked()(y=ONES, x=jnp.ones(2)),
        ValueError,
        ["x: 2", "y: 5"],
    ),
    "nothing to map": (
        lambda: chunked()(1.0, "static"),
        ValueError,
        ["nothing to map over", "x: 1.0", "y: 'static'"],
    ),
    "nothing to map by choice": (
        lambda: chunked(in_axes=None)(ONES, ONES),
        ValueError,
        ["nothing to map over", "x: f32[5,3]"],
    ),
    "no arguments": (
        lambda: chunked(lambda: 1)(),
        ValueError,
        ["nothing to map over", "(none)"],
    ),
    "an axis that is not there": (
        lambda: chunked(in_axes=(0, {"a": 2}))(ONES, {"a": ONES}),
        ValueError,
        ["in_axes[1]['a'] gives axis 2 for y['a'], which is float32[5,3]", "-2 to 1"],
    ),
    "a scalar that is mapped": (
        lambda: chunked()(ONES, jnp.float32(1.0)),
        ValueError,
        ["axis 0 for y, which is float32[] and has no axis", "None"],
    ),
    "an axis that is no int": (
        lambda: chunked(in_axes={"y": "rows"})(ONES, ONES),
        TypeError,
        ["in_axes['y'] must be an int, None, or a callable", "'rows'"],
    ),
    "a name that is not there": (
        lambda: chunked(in_axes={"z": 0})(ONES, ONES),
        ValueError,
        ["in_axes names 'z'", "x, y"],
    ),
    "too many axes": (
        lambda: chunked(in_axes=(0, 0, 0))(ONES, ONES),
        ValueError,
        ["in_axes has 3 entries", "2 positional arguments: x, y"],
    ),
    "axes that are no prefix": (
        lambda: chunked(in_axes=({"a": 0}, 0))(ONES, ONES),
        ValueError,
        ["in_axes[0]={'a': 0} is not a prefix of x"],
    ),
    "a result that is not the same for every row": (
        lambda: chunked(out_axes={"sum": None})(ONES, ONES),
        ValueError,
        ["out_axes gives None for results that depend on mapped", "out['sum']", "int"],
    ),
    "an axis of the result that is not there": (
        lambda: chunked(out_axes=2)(ONES, ONES),
        ValueError,
        ["out_axes gives axis 2 for out['sum'], which is float32[3]", "-2 to 1"],
    ),
    "axes of the result that are no prefix": (
        lambda: chunked(out_axes={"total": 0})(ONES, ONES),
        ValueError,
        ["out_axes={'total': 0} is not a prefix of out"],
    ),
    "an argument missing": (lambda: chunked()(ONES), TypeError, ["'y'"]),
}


@pytest.mark.parametrize("call", WRONG)
def test_wrong_calls(call):
    run, error, parts = WRONG[call]
    with pytest.raises(error) as caught:
        run()
    for part in parts:
        assert part in str(caught.value)


def test_errors_of_f_tell_what_it_was_called_with():
    with pytest.raises(TypeError) as caught:
        chunked()(ONES, jnp.ones((5, 4)))
    (note, *_) = caught.value.__notes__
    assert "ChunkedVmap traced f on one row" in note
    assert "f32[3]" in note
    assert "f32[4]" in note
