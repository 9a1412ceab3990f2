"""How programs are cut into parts."""

import jax
import jax.numpy as jnp
import pytest

import eqloop as el
from eqloop._programs import digest_of, run
from eqloop.checkpointing import fitting
from eqloop.fitting import _options
from eqloop.fitting._again import Roles
from eqloop.fitting._cut import Cut
from eqloop.fitting._parts import parts_of
from eqloop.fitting._written import flattened

from ..asserts import assert_same
from .functions import W, X, layers, mixed


def cut(f, *args):
    with fitting():
        program = flattened(jax.make_jaxpr(f)(*args), checkpoints=True)
    return program, parts_of(program)


def with_effects(w, x):
    x = jnp.sin(x @ w)
    jax.debug.print("{}", x[0, 0])
    return jnp.sum(jax.checkpoint(jnp.cos)(x))


def jitted(w, x):
    return jax.jit(layers)(w, jax.jit(jnp.tanh)(x))


@pytest.mark.parametrize("f", [layers, mixed, with_effects, jitted])
def test_the_parts_are_the_program(f):
    program, parts = cut(f, W, X)
    assert [e for part in parts for e in part.eqns] == list(program.jaxpr.eqns)
    known = dict(zip(program.jaxpr.invars, (W, X), strict=True))
    known |= zip(program.jaxpr.constvars, program.consts, strict=True)
    for part in parts:
        outs = run(part.program, *(known[x] for x in part.reads))
        known |= zip(part.gives, outs, strict=True)
    outs = [known[x] for x in program.jaxpr.outvars]
    assert_same(outs, run(program, W, X))
    # Nothing is given that nobody reads.
    read = {x for part in parts for x in part.reads} | set(program.jaxpr.outvars)
    assert all(x in read for part in parts for x in part.gives)


def test_loops_and_what_has_effects_are_parts_of_their_own():
    _, parts = cut(mixed, W, X)
    (loop,) = (part for part in parts if part.is_loop)
    assert loop.loop_name == "Scan"
    assert (loop.place.function, len(loop.eqns)) == ("over_time", 1)
    _, parts = cut(with_effects, W, X)
    (told,) = (part for part in parts if part.has_effects)
    assert len(told.eqns) == 1


def test_a_loop_with_a_schedule_is_not_left_open():
    settled = lambda x: el.Scan(lambda h, u: (h * u, None), schedule=el.StoreAll())
    _, parts = cut(lambda x: settled(x)(x[0], x)[0], X)
    assert not any(part.is_loop for part in parts)


def test_layers_are_cut_apart_where_little_is_alive():
    def wide(x):
        for _ in range(6):
            y = jnp.concatenate([x] * 8, axis=1)
            x = jnp.tanh(jnp.sin(y) * y)[:, :8] * jnp.cos(y)[:, 8:16]
        return jnp.sum(x)

    _, parts = cut(wide, X)
    assert len(parts) > 3
    between = [sum(x.aval.size for x in part.gives) for part in parts[:-1]]
    assert max(between) <= X.size


def test_the_same_program_is_cut_the_same():
    first, second = (cut(layers, W, X)[1] for _ in range(2))
    sizes = lambda parts: [len(part.eqns) for part in parts]
    assert sizes(first) == sizes(second)


def test_what_a_part_takes_is_told_for_each_device(monkeypatch):
    times = iter([1.0, 1.0, 2.0, 2.0])
    monkeypatch.setattr(_options, "work_of", lambda program: next(times))
    program = jax.make_jaxpr(lambda x: jnp.sin(x) * 1.375)(jnp.ones(7))
    (part,) = Cut.of(program).parts
    alike = _options._Alike("a part", Roles((True,), (True,)), part)
    of = lambda: _options._taken(alike, _options.EVERYTHING)[0].nanoseconds
    assert of() == of() == 2.0
    with el.planning_for(jax.devices()[-1]):
        assert of() == 4.0


def test_parts_that_only_print_alike_take_what_they_take_themselves():
    """Their rules save other values for the way back, and so do others of its kind."""

    def program(saves):
        @jax.custom_vjp
        def f(x):
            return jnp.sin(x)

        f.defvjp(lambda x: (f(x), x if saves else None), lambda _, ct: (ct,))
        _, parts = cut(lambda w, x: jnp.sum(f(f(x @ w))), W, X)
        return parts

    roles = lambda part: Roles((True,) * len(part.reads), (True,) * len(part.reads))
    alike = lambda saves: [
        _options._Alike(digest_of(part.program), roles(part), part)
        for part in program(saves)
    ]
    assert alike(True) == alike(True)
    assert alike(True) != alike(False)
