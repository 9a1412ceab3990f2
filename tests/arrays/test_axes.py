"""Which axis of which leaf is looped over, and how long it is."""

import re

import equinox as eqx
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from eqloop._arrays._axes import (
    as_length,
    axes_tree,
    common_length,
    hashable_axes,
    resolve_axes,
)


def resolve(tree, spec, **settings):
    return resolve_axes(
        "Scan", tree, spec, tree_name="xs", spec_name="in_axes", **settings
    )


TREE = {"a": jnp.zeros((2, 3)), "b": (np.zeros(4), "static", None)}


@pytest.mark.parametrize(
    ("spec", "axes"),
    [
        (0, [0, 0, None, None]),
        (-1, [1, 0, None, None]),
        (None, [None, None, None, None]),
        (eqx.if_array(0), [0, 0, None, None]),
        ({"a": 1, "b": None}, [1, None, None, None]),
        ({"a": None, "b": 0}, [None, 0, None, None]),
        ({"a": -2, "b": (0, None, 0)}, [0, 0, None, None]),
        (
            lambda leaf: 1 if np.ndim(leaf) == 2 else None,
            [1] + 3 * [None],
        ),
    ],
)
def test_resolve(spec, axes):
    assert resolve(TREE, spec) == axes
    assert resolve(TREE, hashable_axes(spec)) == axes


@hypothesis.given(st.lists(st.integers(1, 4), max_size=3), st.integers(-4, 4))
def test_axes_count_as_in_numpy(shape, axis):
    array = np.zeros(shape)
    for new in (False, True):
        ndim = array.ndim + new
        if -ndim <= axis < ndim:
            assert resolve(array, axis, new=new) == [range(ndim)[axis]]
        else:
            with pytest.raises(ValueError, match=r"has (no axis|the axes)"):
                resolve(array, axis, new=new)


def test_keys_have_the_axes_that_they_show():
    assert resolve(jax.random.split(jax.random.key(0), 3), -1) == [0]
    with pytest.raises(ValueError, match=r"key<fry>\[\] and has no axis"):
        resolve(jax.random.key(0), 0)


def test_out_of_range_names_the_leaf():
    message = (
        r"in_axes\['a'\] gives axis 2 for xs\['a'\], which is float32\[2,3\] and has "
        r"the axes -2 to 1"
    )
    with pytest.raises(ValueError, match=message):
        resolve(TREE, {"a": 2, "b": None})


def test_no_prefix():
    with pytest.raises(ValueError, match=r"in_axes=.* is not a prefix of xs"):
        resolve(TREE, {"a": 0})
    with pytest.raises(ValueError, match=r"in_axes=\(0, 0\) is not a prefix of xs"):
        resolve([jnp.zeros(2)] * 2, (0, 0))


ROWS = jnp.zeros((2000, 3))
MISFITS = {
    "a list": (ROWS, [0, 1], "in_axes is a list of 2, where xs is float32[2000,3]"),
    "another container": (
        {"a": ROWS},
        (0,),
        "is a tuple of 1, where xs is a dict of 1",
    ),
    "below": (
        [{"a": ROWS}],
        [{"a": [0]}],
        "in_axes[0]['a'] is a list of 1, where xs[0]",
    ),
    "too many": ((ROWS, ROWS), (0, 0, 0), "in_axes has [2], and xs has not"),
    "too few": ({"a": ROWS, "b": 0}, {"a": 0}, "in_axes has no ['b'], and xs has one"),
    "below None": ((ROWS, None), (0, [0]), "list of 1, where xs[1] is None"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_no_prefix_is_told_by_its_place(name):
    tree, spec, said = MISFITS[name]
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        resolve(tree, spec)
    assert caught.value.__suppress_context__
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("wrong", [True, "0", 0.0, lambda leaf: 1.0])
def test_no_axis(wrong):
    with pytest.raises(TypeError, match=r"in_axes\['a'\] must be an int, None, or a"):
        resolve(TREE, {"a": wrong, "b": None})


def test_hashable_axes():
    spec = {"a": [0, None], "b": eqx.if_array(1)}
    assert axes_tree(hashable_axes(spec)) == spec
    assert hash(hashable_axes(spec)) == hash(hashable_axes(dict(spec)))
    assert hashable_axes(spec) == hashable_axes(dict(spec))
    assert hashable_axes(spec) != hashable_axes({"a": [0, 1], "b": eqx.if_array(1)})
    assert repr(hashable_axes({"a": [0]})) == "{'a': [0]}"


def test_what_is_hashable_stays_as_it_is():
    for spec in (0, None, eqx.if_array(0), (0, (None, 1))):
        assert hashable_axes(spec) is spec
    once = hashable_axes([0])
    assert hashable_axes(once) is once


def test_common_length():
    assert common_length("Scan", {"xs": 3, "f": 3}) == 3
    assert common_length("Scan", {"xs": 3}, 3) == 3
    assert common_length("Scan", {}, 0) == 0


def test_lengths_that_disagree_are_all_listed():
    with pytest.raises(ValueError, match="must all be the same") as info:
        common_length("Scan", {"xs['a']": 3, "xs['b']": 4, "f.weight": 3}, 5)
    for line in ("length: 5", "xs['a']: 3", "xs['b']: 4", "f.weight: 3"):
        assert f"\n  {line}\n" in str(info.value)


def test_unknown_length():
    with pytest.raises(ValueError, match="pass `length=`"):
        common_length("Scan", {})


@pytest.mark.parametrize("length", [3, np.int64(3), np.array(3)])
def test_lengths(length):
    assert as_length("Scan", length) == 3
    assert type(as_length("Scan", length)) is int


def test_no_lengths():
    assert as_length("Scan", None) is None
    with pytest.raises(ValueError, match="at least 0, but it is -1"):
        as_length("Scan", -1)
    with pytest.raises(TypeError, match="not the bool True"):
        as_length("Scan", True)
    with pytest.raises(TypeError, match=r"must be an int .* 3.0, of type float"):
        as_length("Scan", 3.0)
    with pytest.raises(TypeError, match=r"known when tracing, but it is int32\[\]"):
        jax.jit(lambda n: as_length("Scan", n))(3)
