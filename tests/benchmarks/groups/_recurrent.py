"""Gradients through a long loop."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import jax.random as jr

import eqloop as el

from .. import _loops as loops
from .._claims import memory, memory_ratio, time_ratio
from .._comparison import Comparison
from .._measure import Case
from .._problems import gradient, loss, wave
from .._problems import recurrent as problem

# Beside Equinox's scan with as few slots. What JAX 0.10 does besides the steps was most
# of Equinox's time; JAX 0.12 compiles its loop into one function, so the steps decide.
_FEW_SLOTS = 0.8 if jax.__version_info__ >= (0, 12) else 0.35


def recurrent() -> Sequence[Comparison]:
    """All loops on the one step, and what each schedule should reach."""
    two, three = loops.nested(64, 64), loops.nested(16, 16, 16)
    equinox, brainstate = loops.equinox(30), loops.brainstate(16)
    recursive, few, many = (
        loops.ours(schedule)
        for schedule in (el.Recursive(16), el.Binomial(30), el.Binomial(96))
    )
    rows = [
        loops.lax_scan(),
        loops.lax_scan_of_remat(),
        two,
        three,
        loops.powerpax(64),
        equinox,
        loops.equinox(),
        brainstate,
        loops.ours(el.StoreAll()),
        loops.ours(el.Chunked(64)),
        recursive,
        few,
        many,
        loops.ours(el.Budget("8MiB")),
    ]
    args = problem(4096)
    return [
        Comparison(
            "Gradient of W, h0 and xs: recurrent step, 4096 steps, width 64",
            [loop.case(gradient, args) for loop in rows],
            [
                memory(recursive.name, 0.10e6),
                time_ratio(recursive.name, three.name, 1.05),
                time_ratio(recursive.name, two.name, 1.3),
                time_ratio(recursive.name, brainstate.name, 1 / 20),
                memory_ratio(recursive.name, brainstate.name, 1 / 20),
                memory_ratio(few.name, equinox.name, 1.0),
                time_ratio(few.name, equinox.name, _FEW_SLOTS),
                memory_ratio(many.name, two.name, 1.0),
                time_ratio(many.name, two.name, 1.15),
            ],
        )
    ]


def scaling() -> Sequence[Comparison]:
    """What a step costs in a short loop and in a long one."""
    short, long = 1024, 65536
    recursive = loops.ours(el.Recursive(16))
    rows = {
        f"{loop.name}, {length} steps": Case(
            f"{loop.name}, {length} steps", gradient(loop.run), args
        )
        for length, by_hand in ((short, (32, 32)), (long, (256, 256)))
        for args in [problem(length)]
        for loop in (loops.nested(*by_hand), recursive)
    }
    return [
        Comparison(
            "Gradient of W, h0 and xs: the time of a step as the loop grows",
            list(rows.values()),
            [
                time_ratio(
                    f"{recursive.name}, {long} steps",
                    f"{recursive.name}, {short} steps",
                    1.3,
                    scale=short / long,
                )
            ],
            rounds=7,
        )
    ]


def batched() -> Sequence[Comparison]:
    """Thirty-two sequences at once, with one gradient of the weights."""

    def batch_gradient(run):
        def mean_loss(cell, inits, xs):
            one = loss(run)
            return jnp.mean(jax.vmap(one, in_axes=(None, 0, 0))(cell, inits, xs))

        return jax.grad(mean_loss)

    cell, _, _ = problem(1)
    init_key, x_key = jr.split(jr.key(4))
    args = (cell, jr.normal(init_key, (32, 64)), jr.normal(x_key, (32, 1024, 64)))
    equinox, binomial = loops.equinox(30), loops.ours(el.Binomial(30))
    rows = [
        loops.lax_scan(),
        loops.nested(32, 32),
        equinox,
        loops.brainstate(16),
        loops.ours(el.Recursive(16)),
        binomial,
    ]
    return [
        Comparison(
            "Gradient of W: 32 sequences under `vmap`, 1024 steps, width 64",
            [loop.case(batch_gradient, args) for loop in rows],
            [
                time_ratio(binomial.name, equinox.name, 0.7),
                memory_ratio(binomial.name, equinox.name, 1.0),
            ],
        )
    ]


def modes() -> Sequence[Comparison]:
    """Where nothing is reversed, a schedule should cost nothing."""

    def primal(run):
        return lambda cell, init, xs: run(cell, init, xs)[0]

    def forward(run):
        return lambda primals, tangents: jax.jvp(primal(run), primals, tangents)

    primals = problem(4096)
    # Other tangents than the primals themselves, which XLA would compute only once.
    tangents = jax.tree.map(jnp.cos, primals)
    plain = loops.lax_scan()
    schedules = (el.StoreAll(), el.Recursive(16), el.Binomial(30), el.Budget("1MiB"))
    scans = [loops.ours(schedule) for schedule in schedules]
    return [
        Comparison(
            f"{title}: recurrent step, 4096 steps, width 64",
            [loop.case(use, args) for loop in (plain, *scans)],
            [time_ratio(scan.name, plain.name, at_most) for scan in scans],
            rounds=31,
        )
        for title, use, args, at_most in (
            ("Primal", primal, primals, 1.05),
            ("`jvp`", forward, (primals, tangents), 1.1),
        )
    ]


def heavy() -> Sequence[Comparison]:
    """A step whose work and carry are large beside the loop's own."""
    args = wave(256, 256)
    rows = [
        loops.lax_scan(),
        loops.lax_scan_of_remat(),
        loops.nested(16, 16),
        loops.powerpax(16),
        loops.equinox(30),
        loops.ours(el.Recursive(16)),
        loops.ours(el.Binomial(30)),
        loops.ours(el.Budget("64MiB")),
    ]
    return [
        Comparison(
            "Gradient of speed, fields and source: wave equation, 256 x 256, 256 steps",
            [loop.case(gradient, args) for loop in rows],
            rounds=5,
        )
    ]
