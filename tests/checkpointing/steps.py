"""Four steps that are quite different, as `(f, init, xs)` with arrays in each."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ..weights import normal, without_key


def cell(w, h, x):
    return jnp.tanh(w @ jnp.tanh(w @ h + x))


class Recurrent(eqx.Module):
    weight: jax.Array

    def __call__(self, h, x):
        return cell(self.weight, h, x), None


class Gru(eqx.Module):
    cell: eqx.nn.GRUCell

    def __call__(self, h, x):
        return self.cell(x, h), None


class Field(eqx.Module):
    speed: jax.Array

    def __call__(self, fields, source):
        now, before = fields
        around = sum(jnp.roll(now, s, axis) for s in (-1, 1) for axis in (0, 1))
        after = 2 * now - before + self.speed**2 * (around - 4 * now)
        return (after.at[0, 0].add(source), now), None


class Ode(eqx.Module):
    parameters: jax.Array

    def __call__(self, u, force):
        (s, r, b), (x, y, z) = self.parameters, u
        rates = jnp.stack([s * (y - x), x * (r - z) - y, x * y - b * z])
        return u + 1e-3 * (rates + force), None


def recurrent(length, width=32):
    weight, _ = np.linalg.qr(normal(0, (width, width)))
    step = Recurrent(jnp.asarray(weight))
    return step, jnp.ones(width), jnp.full((length, width), 0.01)


def gru(length, width=16):
    step = Gru(without_key(eqx.nn.GRUCell, width, width))
    return step, jnp.ones(width), jnp.ones((length, width))


def field(length, size=32):
    fields = (jnp.ones((size, size)), jnp.ones((size, size)))
    return Field(jnp.full((size, size), 0.5)), fields, jnp.ones(length)


def ode(length):
    return Ode(jnp.array([10.0, 28.0, 8 / 3])), jnp.ones(3), jnp.zeros((length, 3))


STEPS = {"recurrent": recurrent, "gru": gru, "field": field, "ode": ode}
