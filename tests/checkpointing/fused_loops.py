"""Loops of the steps of `fused_steps.py`, as a kernel and as they are otherwise."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

import eqloop as el
from eqloop.checkpointing.fused._row_programs import RowPrograms, Settings

from ..asserts import assert_close
from .fused_steps import STEPS, numbers

FUSED = el.Fused(3, interpret=True)
LENGTH = 7
W, H, XS = numbers(2), numbers(5, 2), numbers(5, LENGTH)


def use_settings(monkeypatch, **values):
    """Has kernels be made as on no GPU, but for some settings, by their names."""
    made = dict.fromkeys(("interpret", "mosaic", "panels", "tiles"), False)
    made = {"block": None, "most": None, **made, **values}
    names = [field.name for field in dataclasses.fields(Settings)]
    assert made.keys() == set(names)
    defaults = tuple(made[name] for name in names)
    monkeypatch.setattr(Settings.__init__, "__defaults__", defaults)


def reasons_noted(monkeypatch):
    """Why kernels are not made in a form, "" for each that is, as they are made."""
    noted, for_backend = list[str](), RowPrograms.for_backend

    def noting(self, *args):
        made = for_backend(self, *args)
        noted.append(self.why_not_mosaic)
        return made

    monkeypatch.setattr(RowPrograms, "for_backend", noting)
    return noted


def looped(step, schedule, length=LENGTH):
    """The loop of a step over the rows of its inputs, `lax.scan` for `None`."""

    def run(consts, init, xs):
        f = functools.partial(step, consts)
        scan = lax.scan if schedule is None else el.Scan(f, schedule=schedule)
        if schedule is None:
            scan = functools.partial(lax.scan, f)
        one = lambda h, x: scan(h, x, length=length)
        return jax.vmap(one, (0, 1), (0, 1))(init, xs)

    return run


def is_float(x):
    return jnp.issubdtype(x.dtype, jnp.inexact)


def loss(run):
    def of(*args):
        leaves = filter(is_float, jax.tree.leaves(run(*args)))
        return sum(jnp.mean(jnp.sin(leaf)) for leaf in leaves)

    return of


def both(name, rows=5, length=LENGTH):
    """Value and gradient of a step's loop, and what `lax.scan` has for them."""
    step, make = STEPS[name]
    args = make(rows, length)

    def of(schedule):
        run = looped(step, schedule, length)
        given, rest = zip(*((list(filter(is_float, g)), g) for g in args), strict=True)

        def with_floats(*floats):
            pairs = zip(map(iter, floats), rest, strict=True)
            return run(*([next(f) if is_float(x) else x for x in g] for f, g in pairs))

        def evaluate(*floats):
            grad = jax.grad(loss(with_floats), (0, 1, 2))
            return with_floats(*floats), grad(*floats)

        return jax.jit(evaluate)(*given)

    return of(FUSED), of(None)


def check(name, **sizes):
    actual, expected = both(name, **sizes)
    assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def step(w, h, x):
    return jnp.sin(w[0] * h + w[1] * x) * jnp.array([1.0, 0.5]) + h[::-1], h.sum() * x


def scanned(schedule, w, h, xs, **settings):
    f = functools.partial(step, w)
    return el.Scan(f, schedule=schedule, **settings)(h, xs)


def rows(schedule, w, h, xs, **settings):
    return jax.vmap(lambda h, x: scanned(schedule, w, h, x, **settings))(h, xs)


def total(tree):
    return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(tree))


def all_modes(schedule, w, h, xs):
    """First and second derivatives, which share one program here."""
    of = lambda *args: total(rows(schedule, *args))
    grad = jax.grad(of, (0, 1, 2))
    tangents = jax.tree.map(jnp.cos, (w, h, xs))
    return (
        jax.jvp(lambda *a: rows(schedule, *a), (w, h, xs), tangents),
        jax.jvp(grad, (w, h, xs), tangents),
        jax.grad(lambda *a: total(grad(*a)), (0, 1))(w, h, xs),
        jax.vmap(jax.grad(lambda h, x: total(scanned(schedule, w, h, x))))(h, xs),
    )


def alike(f, *args):
    """A function of a schedule gives the same for the kernel and for `StoreAll`."""
    run = lambda schedule: jax.jit(functools.partial(f, schedule))(*args)
    assert_close(run(FUSED), run(el.StoreAll()), rtol=1e-5, atol=1e-5)


def gradient(f, which=(0, 1, 2)):
    return lambda s, *args: jax.value_and_grad(lambda *args: total(f(s, *args)), which)(
        *args
    )
