"""Policies: what is stored under each, that they are values, and wrong ones."""

import contextlib
import io

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import Offloadable, Recompute, Saveable, print_saved_residuals

import eqloop as el

jcp = jax.checkpoint_policies
NAMED_BY_JAX = jcp.save_only_these_names("a")
WEIGHT = jnp.eye(3)


def chain(w, x):
    """Two layers, the pre-activations and the activations of which have names."""
    first = el.name(jnp.sin(el.name(w @ x, "pre1")), "act1")
    second = el.name(jnp.sin(el.name(w @ first, "pre2")), "act2")
    return jnp.sin(w @ second).sum()


def stored(policy, f=chain):
    """A line for each residual that is not an argument."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        print_saved_residuals(jax.checkpoint(f, policy=policy), WEIGHT, jnp.ones(3))
    return [line for line in text.getvalue().splitlines() if "argument" not in line]


@pytest.mark.parametrize(
    ("policy", "counterpart"),
    [
        (el.policies.save_nothing, jcp.nothing_saveable),
        (el.policies.save_everything, jcp.everything_saveable),
        (el.policies.save_dots, jcp.dots_saveable),
        (el.policies.save_dots_without_batch, jcp.dots_with_no_batch_dims_saveable),
        (el.policies.save_names("act1"), jcp.save_only_these_names("act1")),
        (el.policies.save_any_except("act1"), jcp.save_any_names_but_these("act1")),
    ],
    ids=["nothing", "everything", "dots", "dots_without_batch", "names", "any_except"],
)
def test_stores_what_its_counterpart_in_jax_stores(policy, counterpart):
    assert stored(policy) == stored(counterpart)


def test_what_is_stored_differs_from_policy_to_policy():
    assert stored(el.policies.save_nothing) == []
    assert len(stored(el.policies.save_dots)) == 3
    assert len(stored(el.policies.save_names("act1"))) == 1
    assert len(stored(el.policies.save_names("act2"))) == 1
    assert len(stored(el.policies.save_any_except("act2"))) == 3
    assert len(stored(el.policies.save_any_except())) == 4


def test_batched_dots_are_told_from_products_with_weights():
    def attend(w, x):
        y = jnp.stack([w @ x, w @ x])
        return jnp.sin(jnp.einsum("bi,bi->b", y, jnp.sin(y))).sum()

    every = stored(el.policies.save_dots, attend)
    without = stored(el.policies.save_dots_without_batch, attend)
    assert len(without) < len(every)


def test_offloaded_values_are_in_host_memory():
    (line,) = stored(el.policies.offload_names("act1"))
    assert "<host>" in line


def test_either_keeps_what_one_of_two_keeps():
    both = el.policies.either(
        el.policies.save_names("act1"), el.policies.save_names("act2")
    )
    assert stored(both) == stored(el.policies.save_names("act1", "act2"))
    assert stored(el.policies.either("dots_saveable", "nothing_saveable")) == stored(
        el.policies.save_dots
    )


def test_either_takes_policies_that_offload():
    offload = el.policies.offload_names("act1")
    for mixed in (
        el.policies.either(offload, el.policies.save_dots),
        el.policies.either(el.policies.save_dots, offload),
    ):
        lines = stored(mixed)
        assert sum("<host>" in line for line in lines) == 1
        assert len(lines) > 1
    kept = el.policies.either(offload, el.policies.save_names("act1"))
    assert stored(kept) == stored(el.policies.save_names("act1"))


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ((False, False), Recompute),
        ((False, True), Saveable),
        ((Recompute, Saveable), Saveable),
        ((Offloadable("device", "pinned_host"), False), Offloadable),
        ((Offloadable("device", "pinned_host"), True), Saveable),
    ],
)
@pytest.mark.parametrize("swap", [False, True])
def test_either_of_any_two_answers(answers, expected, swap):
    first, second = (lambda *_, a=a, **__: a for a in answers)
    if swap:
        first, second = second, first
    answer = el.policies.either(first, second)(None)
    assert answer is expected or type(answer) is expected


def policies():
    p = el.policies
    return {
        "el.policies.save_nothing": p.save_nothing,
        "el.policies.save_everything": p.save_everything,
        "el.policies.save_dots": p.save_dots,
        "el.policies.save_dots_without_batch": p.save_dots_without_batch,
        "el.policies.save_names('a', 'b')": p.save_names("b", "a", "b"),
        "el.policies.save_any_except('a')": p.save_any_except("a"),
        "el.policies.save_any_except()": p.save_any_except(),
        "el.policies.offload_names('a')": p.offload_names("a"),
        "el.policies.offload_names('a', dst='unpinned_host')": p.offload_names(
            "a", dst="unpinned_host"
        ),
        "el.policies.either(el.policies.save_dots, el.policies.save_names('a'))": (
            p.either("save_dots", p.save_names("a"))
        ),
    }


@pytest.mark.parametrize("text", policies())
def test_are_written_as_one_writes_them(text):
    assert repr(policies()[text]) == text
    assert eval(text, {"el": el}) == policies()[text]


def test_are_equal_when_they_are_the_same_and_hash_so():
    again = policies()
    assert again == policies()
    assert {policy: text for text, policy in again.items()} == {
        policy: text for text, policy in policies().items()
    }
    assert len(set(again.values())) == len(again)
    assert el.policies.save_dots != jcp.dots_saveable


def test_either_tells_functions_apart_though_they_are_written_alike():
    def make():
        def policy(prim, *_, **__):
            return False

        policy.__qualname__ = "same"
        return policy

    one, two = make(), make()
    assert el.policies.either(one, "save_dots") == el.policies.either(one, "save_dots")
    assert el.policies.either(one, "save_dots") != el.policies.either(two, "save_dots")


def test_an_equal_policy_is_no_reason_to_compile_again():
    traces = []

    @eqx.filter_jit
    def call(f, x):
        traces.append(f.policy)
        return f(x)

    for policy in (el.policies.save_names("a"), el.policies.save_names("a")):
        call(el.Remat(jnp.sin, policy=policy), 1.0)
    assert len(traces) == 1


def test_name_tags_the_arrays_of_a_tree_and_leaves_it_as_it_is():
    tree = {"a": jnp.arange(3.0), "b": "static", "c": (None, jnp.ones(2, int))}
    named = el.name(tree, "tree")
    assert eqx.tree_equal(named, tree)
    jaxpr = str(eqx.filter_make_jaxpr(lambda tree: el.name(tree, "tree"))(tree)[0])
    assert jaxpr.count("name=tree") == 2


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (None, None),
        ("save_dots", el.policies.save_dots),
        ("dots_saveable", el.policies.save_dots),
        ("nothing_saveable", el.policies.save_nothing),
        ("dots_with_no_batch_dims_saveable", el.policies.save_dots_without_batch),
        (el.policies.save_dots, el.policies.save_dots),
        (jcp.dots_saveable, jcp.dots_saveable),
        (NAMED_BY_JAX, NAMED_BY_JAX),
    ],
)
def test_as_policy_takes_what_a_user_may_give(given, meant):
    assert el.policies.as_policy(given) == meant


def test_as_policy_knows_every_name_in_jax():
    plain = [name for name in vars(jcp) if not name.startswith(("save_", "offload_"))]
    assert plain
    for name in plain:
        assert stored(el.policies.as_policy(name)) == stored(getattr(jcp, name))


@pytest.mark.parametrize(
    ("wrong", "error", "parts"),
    [
        (
            "dots_savable",
            ValueError,
            ["no policy named 'dots_savable'", "Did you mean 'dots_saveable'?"],
        ),
        ("xyz", ValueError, ["named 'xyz'. The names are 'save_nothing'"]),
        (3, TypeError, ["not 3 of type int", "'save_dots'", "`save_names`"]),
        (
            "save_only_these_names",
            ValueError,
            ["`save_only_these_names` is not a policy", "save_names('a', 'b')"],
        ),
        (jcp.save_only_these_names, ValueError, ["save_names('a', 'b')"]),
        (jcp.save_from_both_policies, ValueError, ["either(first, second)"]),
        (jcp.offload_dot_with_no_batch_dims, ValueError, ["Call it"]),
        (
            el.policies.save_names,
            ValueError,
            ["`save_names` is not a policy", "Call it"],
        ),
    ],
)
def test_wrong_policies(wrong, error, parts):
    for take in (
        el.policies.as_policy,
        lambda policy: el.Remat(jnp.sin, policy=policy),
    ):
        with pytest.raises(error) as caught:
            take(wrong)
        for part in parts:
            assert part in str(caught.value)


@pytest.mark.parametrize(
    ("make", "error", "part"),
    [
        (lambda: el.policies.save_names(), ValueError, "at least one name"),
        (lambda: el.policies.offload_names(), ValueError, "at least one name"),
        (lambda: el.policies.save_names("a", 3), TypeError, "strings, not 3"),
        (lambda: el.policies.save_names(["a"]), TypeError, "strings, not ['a']"),
        (lambda: el.policies.save_any_except(None), TypeError, "strings, not None"),
    ],
)
def test_wrong_names(make, error, part):
    with pytest.raises(error) as caught:
        make()
    assert part in str(caught.value)
