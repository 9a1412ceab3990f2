"""What plans say of rewritings: each is named where it took place, and nowhere else."""

import dataclasses
import importlib
import pkgutil

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import eqloop as el
from eqloop.checkpointing import rewrites
from eqloop.checkpointing.rewrites._one_hot_writes import (
    blended_leaves,
    with_row_writes,
)
from eqloop.checkpointing.steps._loop import Loop
from eqloop.checkpointing.steps._step import make_step

ROWS, WIDTH, STEPS = 200, 8, 24
W = 0.1 * jnp.eye(WIDTH)
H, XS = jnp.ones(WIDTH), jnp.ones((STEPS, WIDTH))
LINE = jnp.ones((ROWS, WIDTH))
SCHEDULE = el.Binomial(4)


def plain(h, x):
    return jnp.tanh(W @ h + x), jnp.sum(h)


def viewing(h, x):
    return jnp.tanh(W @ h + x), (x[:3], h)


def constant(carry, x):
    w, h = carry
    return (w, jnp.tanh(w @ h + x)), None


def moving(line, x):
    return jnp.concatenate([jnp.tanh(W @ line[-1] + x)[None], line[:-1]]), None


def selecting(carry, x):
    line, i = carry
    row = jnp.tanh(line[i % ROWS] + x)
    return (jnp.where((jnp.arange(ROWS) == i % ROWS)[:, None], row, line), i + 1), None


def writing(carry, x):
    history, i = carry
    row = jnp.tanh(history[jnp.maximum(i - 3, 0)] + x)
    return (history.at[i].set(row), i + 1), None


def alike(carry, x):
    return [jnp.tanh(0.5 * leaf + x) for leaf in carry], None


SCALARS = [jnp.ones(()) * i for i in range(40)]


@pytest.mark.parametrize(
    ("step", "init", "notes"),
    [
        (plain, H, []),
        (viewing, H, ["1 of 2 outputs are views of xs"]),
        (constant, (W, H), ["carry[0] never changes and becomes a const"]),
        (
            moving,
            LINE,
            [
                "delay line carry becomes a ring",
                "carry is a list of its rows, 7 KiB, in place of 25 KiB in slots",
                "rows of the cotangent of carry are read and written in place",
            ],
        ),
        (
            selecting,
            (LINE, 0),
            [
                "one-hot write of carry[0] becomes a write of one row",
                "carry[0] is a list of its rows, 7 KiB, in place of 25 KiB in slots",
                "rows of the cotangent of carry[0] are read and written in place",
            ],
        ),
        (
            writing,
            (LINE, 0),
            [
                "carry[0] is rebuilt from its last state, in place of 25 KiB in slots",
                "rows of the cotangent of carry[0] are read and written in place",
            ],
        ),
        (alike, SCALARS, ["40 alike leaves, carry[0] to carry[39], run as one array"]),
    ],
    ids=lambda case: getattr(case, "__name__", ""),
)
def test_a_plan_says_what_was_done(step, init, notes):
    xs = XS[:, 0] if step is alike else XS
    plan = el.Scan(step, schedule=SCHEDULE).plan(init, xs)
    assert len(plan.rewritten) == len(notes)
    for said, note in zip(plan.rewritten, notes, strict=True):
        assert said.startswith(note)
    lines = [line for line in str(plan).splitlines() if "rewritten" in line]
    joined = "; ".join(plan.rewritten)
    assert lines == ([f"  {'rewritten':<19}{joined}"] if notes else [])
    if step is selecting:  # JAX runs such a loop as it is
        assert el.Scan(step, schedule=el.StoreAll()).plan(init, xs).rewritten == ()


def test_a_batch_and_derivatives_keep_what_was_said():
    def loss(line, x):
        (line, _), _ = el.Scan(selecting, schedule=SCHEDULE)((line, 0), x)
        return jnp.sum(line**2)

    expected = el.Scan(selecting, schedule=SCHEDULE).plan((LINE, 0), XS).rewritten
    (found,) = el.plans(jax.grad(loss))(LINE, XS)
    assert found.plan.rewritten == expected
    several = jax.vmap(jax.grad(loss), (None, 0))
    found = el.plans(several)(LINE, jnp.stack([XS] * 3))
    assert found[0].plan.rewritten[0] == expected[0]
    assert f"  rewritten: {expected[0]}; " in str(found)
    twice = lambda line, x: jax.jvp(jax.grad(loss), (line, x), (line, x))[1]
    assert el.plans(twice)(LINE, XS)[0].plan.rewritten[0] == expected[0]


def test_short_products_in_a_batch():
    def step(h, x):
        return jnp.tanh(h + (jnp.arange(4.0) @ h + x)[None]), None

    loss = lambda h, xs: jnp.sum(el.Scan(step, schedule=SCHEDULE)(h, xs)[0])
    one, several = jax.grad(loss), jax.vmap(jax.grad(loss))
    h = jnp.ones((4, WIDTH))
    assert el.plans(one)(h, XS)[0].plan.rewritten == ()
    (found,) = el.plans(several)(jnp.stack([h] * 3), jnp.stack([XS] * 3))
    assert found.plan.rewritten == ("short products in the batch become sums",)


def stages(h, first):
    stage = lambda k, i: (jnp.where(i == 0, jnp.tanh(k), jnp.sin(k)), None)
    h = lax.cond(first, lambda h: 2 * h, jnp.cos, h)
    return lax.scan(stage, h, jnp.arange(3))[0]


def stopping(loop, reads, has_stages):
    def body(carry):
        t, h, rows, i, first = carry
        h = stages(h, first) if has_stages else jnp.tanh(h)
        row = h * rows[i - 1] if reads else h
        return t + 1.0, h, rows.at[i].set(row), i + 1, jnp.zeros_like(first)

    def loss(h, t):
        init = t, h, jnp.ones((30, WIDTH)), 0, jnp.array(True)
        _, h, rows, *_ = loop(lambda carry: carry[0] < 20.0, body)(init)
        return jnp.sum(h) + jnp.sum(rows)

    return loss


def bounded(cond, body):
    return el.BoundedWhileLoop(cond, body, max_steps=32, base=4)


def checkpointed(cond, body):
    return el.CheckpointedWhileLoop(cond, body, checkpoints=4)


LATER = "steps after the first one run without branches that it decides"
SHORT = "short loops in a step are written out where it is reversed"
IN_PLACE = "rows of the cotangent of a leaf are read and written in place"
MASKED = "writes to a leaf are masked: examples that have stopped write no rows"


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("loop", "has_stages", "notes"),
    [
        (bounded, False, (IN_PLACE,)),
        (bounded, True, (IN_PLACE, SHORT)),
        (checkpointed, True, (SHORT, LATER, IN_PLACE)),
    ],
)
def test_while_loops(loop, has_stages, notes):
    (found,) = el.plans(jax.grad(stopping(loop, False, has_stages)))(H, 0.0)
    assert found.plan.rewritten == notes
    assert "; ".join(notes) in str(found.plan)


@pytest.mark.parametrize("reads", [False, True])
def test_masked_writes(reads):
    loss = stopping(checkpointed, reads, False)
    joint = jax.grad(lambda h, t: jnp.sum(jax.vmap(loss)(h, t)))
    (found,) = el.plans(joint)(jnp.stack([H] * 3), jnp.arange(3.0))
    assert (MASKED in found.plan.rewritten) == (not reads)


def test_a_blend_says_what_stands_in_the_way():
    at = lambda i: (jnp.arange(ROWS) == i)[:, None]
    hot = lambda i: jax.nn.one_hot(i, ROWS)[:, None]
    blends = [
        lambda line, row, i: line * (1 - at(i)) + row * at(i),
        lambda line, row, i: line + at(i).astype(float) * (row - line),
        lambda line, row, i: line * (1.0 - hot(i)) + hot(i) * row,
        lambda line, row, i: line * ~at(i) + row * at(i),
    ]
    others = [
        lambda line, row, i: jnp.sin(line) + row,
        lambda line, row, i: line * jnp.eye(ROWS, WIDTH) + row,
        lambda line, row, i: jnp.sin(line) * (1 - at(i)) + row,
        lambda line, row, i: line + hot(i) + row,
    ]

    def step(blend):
        def step(consts, carry, x):
            (line, i), (x,) = carry, x
            return [blend(line, jnp.tanh(line[:1] + x[None]), i), i + 1], []

        return step

    types = [], [jax.typeof(LINE), jax.typeof(jnp.int32(0))], [jax.typeof(H)]
    found = lambda blend: blended_leaves(make_step(step(blend), *types))
    with jax.numpy_dtype_promotion("standard"):
        assert list(map(found, blends)) == [(True, False)] * len(blends)
        assert list(map(found, others)) == [(False, False)] * len(others)
        move = lambda carry, x: (tuple(step(blends[0])([], carry, [x])[0]), None)
        plan = el.Scan(move, schedule=SCHEDULE).plan((LINE, 0), XS)
    ((path, why),) = plan.held_whole
    assert path == "carry[0]"
    assert why.startswith("a mask blends all of it; `jnp.where(mask, new, old)`")
    assert why.endswith("; it takes 25 KiB in slots")
    assert plan.rewritten == ()
    assert f"held whole         carry[0]: {why}" in str(plan)


@pytest.mark.parametrize("spread", ["mask", "numbers"])
def test_a_mask_of_one_entry_for_all_rows_numbers_none(spread):
    def step(carry, x):
        rows, i = carry
        at = jnp.arange(1)[:, None]
        at = jnp.broadcast_to(at, (4, 3)) if spread == "numbers" else at
        mask = jnp.broadcast_to(at == i % 2, (4, 3))
        return (jnp.where(mask, jnp.broadcast_to(x, (4, 3)), rows), i + 1), None

    init, xs = (jnp.zeros((4, 3)), 0), jnp.arange(1.0, 18.0).reshape(-1, 1).repeat(3, 1)
    expected, _ = lax.scan(step, init, xs)[0]
    actual, _ = el.Scan(step, schedule=el.Chunked(2))(init, xs)[0]
    assert jnp.array_equal(actual, expected)


def test_notes_are_no_part_of_a_loop():
    """So whatever is remembered of one is found again."""
    loop = Loop(5, carry_paths=("a", "b", "c"))
    noted = loop.noting("{} moved", [True, False, True]).noting("all moved")
    assert noted.rewritten == ("a, c moved", "all moved")
    assert noted.noting("all moved").rewritten == noted.rewritten
    assert loop.noting("{} moved", [False] * 3) is loop
    assert (noted, hash(noted)) == (loop, hash(loop))
    unnamed = dataclasses.replace(loop, carry_paths=())
    assert unnamed.noting("{} moved", [True]).rewritten == ("a leaf moved",)


def test_a_step_that_selects_nothing_is_the_very_same():
    step = make_step(lambda c, h, x: ([jnp.sin(h[0])], []), [], [jax.typeof(H)], [])
    found, leaves = with_row_writes(step)
    assert found is step
    assert leaves == (False,)


def test_every_rewriting_has_words_for_plans():
    for module in pkgutil.iter_modules(rewrites.__path__):
        found = importlib.import_module(f"{rewrites.__name__}.{module.name}")
        # The last two say of which leaves they are.
        assert {"NOTE", "Viewing", "NormalForm"} & {*vars(found)}, module.name
