"""Steps to loop over, with the inputs of a loop: small and large, dense and sparse.

Each builder returns `(cell, init, xs)`; `cell(carry, x)` returns `(carry, None)`, and
all leaves of the three are float32 arrays.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr


class Recurrent(eqx.Module):
    """The step `h <- tanh(W tanh(W h + x))`: cheap, with residuals of six carries."""

    weight: jax.Array

    def __call__(self, h: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(self.weight @ jnp.tanh(self.weight @ h + x)), None


class Gru(eqx.Module):
    """A gated recurrent unit: many small residuals."""

    cell: eqx.nn.GRUCell

    def __call__(self, h: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
        return self.cell(x, h), None


class Lstm(eqx.Module):
    """A batch of long short-term memories."""

    cell: eqx.nn.LSTMCell

    def __call__(self, states: Any, xs: jax.Array) -> tuple[Any, None]:
        return jax.vmap(self.cell)(xs, states), None


class Tanh(eqx.Module):
    """The oldest recurrent cell: `h <- tanh(W h + x)`."""

    weight: jax.Array

    def __call__(self, h: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(self.weight @ h + x), None


class Wave(eqx.Module):
    """Leapfrog of the wave equation on a torus: a large carry, a small x."""

    speed: jax.Array

    def __call__(
        self, fields: tuple[jax.Array, jax.Array], source: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], None]:
        now, before = fields
        neighbours = sum(
            jnp.roll(now, shift, axis) for shift in (-1, 1) for axis in (0, 1)
        )
        after = 2 * now - before + self.speed**2 * (neighbours - 4 * now)
        return (after.at[0, 0].add(source), now), None


class Lorenz(eqx.Module):
    """An Euler step of Lorenz's three variables, forced: next to no work at all."""

    parameters: jax.Array
    dt: float = eqx.field(static=True, default=1e-4)

    def __call__(self, u: jax.Array, force: jax.Array) -> tuple[jax.Array, None]:
        sigma, rho, beta = self.parameters
        x, y, z = u
        velocity = jnp.stack([sigma * (y - x), x * (rho - z) - y, x * y - beta * z])
        return u + self.dt * (velocity + force), None


class Spiking(eqx.Module):
    """A neuron that leaks, and fires above a threshold, with a surrogate gradient."""

    parameters: jax.Array

    def __call__(self, potential: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
        decay, threshold = self.parameters
        potential = decay * potential + x
        above = potential - threshold
        smooth = jax.nn.sigmoid(5 * above)
        fired = smooth + jax.lax.stop_gradient((above > 0) - smooth)
        return potential - threshold * fired, None


class Pendulum(eqx.Module):
    """A step of Runge and Kutta's fourth order, of an ODE whose field is a network."""

    inner: jax.Array
    outer: jax.Array
    dt: float = eqx.field(static=True, default=1e-2)

    def __call__(self, u: jax.Array, force: jax.Array) -> tuple[jax.Array, None]:
        at = lambda u: self.outer @ jnp.tanh(self.inner @ (u + force))
        a = at(u)
        b = at(u + self.dt / 2 * a)
        c = at(u + self.dt / 2 * b)
        d = at(u + self.dt * c)
        return u + self.dt / 6 * (a + 2 * b + 2 * c + d), None


class Relaxation(eqx.Module):
    """A step with a loop in it: a few sweeps towards a fixed point."""

    weight: jax.Array
    sweeps: int = eqx.field(static=True, default=5)

    def __call__(self, h: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
        sweep = lambda z, _: (jnp.tanh(self.weight @ z + x), None)
        return jax.lax.scan(sweep, h, None, self.sweeps)[0], None


class Convolutions(eqx.Module):
    """A residual layer of two convolutions on images, the same at each step."""

    first: jax.Array
    second: jax.Array

    def __call__(self, image: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
        within = jnp.tanh(_convolved(image + x, self.first))
        return image + 0.1 * _convolved(within, self.second), None


def _convolved(image: jax.Array, kernel: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(
        image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


class ConvLstm(eqx.Module):
    """A convolutional LSTM, features first, as Equinox and PyTorch have images."""

    of_x: jax.Array
    of_h: jax.Array

    def __call__(self, state: Any, x: jax.Array) -> tuple[Any, None]:
        h, c = state
        gates = _features_first(x, self.of_x) + _features_first(h, self.of_h)
        i, f, o, g = jnp.split(gates, 4, 1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None


class ConvGru(eqx.Module):
    """A convolutional gated recurrent unit, features first."""

    gates: jax.Array
    new: jax.Array

    def __call__(self, h: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
        both = jnp.concatenate([h, x], 1)
        z, r = jnp.split(jax.nn.sigmoid(_features_first(both, self.gates)), 2, 1)
        new = jnp.tanh(_features_first(jnp.concatenate([r * h, x], 1), self.new))
        return z * h + (1 - z) * new, None


class Diffusion(eqx.Module):
    """An explicit step of coupled reactions and diffusions, by a stencil."""

    stencil: jax.Array

    def __call__(self, u: jax.Array, force: jax.Array) -> tuple[jax.Array, None]:
        return u + 0.1 * jnp.tanh(_features_first(u, self.stencil)) + force, None


def _features_first(image: jax.Array, kernel: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(image, kernel, (1,) * (image.ndim - 2), "SAME")


class ThereAndBack(eqx.Module):
    """The step `h <- tanh(W^T (W h) + x)`, whose second matrix is transposed."""

    weight: jax.Array

    def __call__(self, h: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(self.weight.T @ (self.weight @ h) + x), None


class Attention(eqx.Module):
    """A layer of self-attention over tokens, the same at each step."""

    queries: jax.Array
    keys: jax.Array
    values: jax.Array

    def __call__(self, tokens: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
        tokens = tokens + x
        q, k, v = (tokens @ w for w in (self.queries, self.keys, self.values))
        weights = jax.nn.softmax(q @ k.T / q.shape[1] ** 0.5)
        return jnp.tanh(tokens + 0.1 * weights @ v), None


class TransformerLayer(eqx.Module):
    """Self-attention of four heads, and two products with a GELU between."""

    within: jax.Array
    outer: jax.Array
    up: jax.Array
    down: jax.Array

    def __call__(self, tokens: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
        q, k, v = jnp.split(jax.nn.standardize(tokens + x) @ self.within, 3, 1)
        q, k, v = (y.reshape(len(y), 4, -1) for y in (q, k, v))
        weights = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", q, k))
        mixed = jnp.einsum("hqk,khd->qhd", weights, v).reshape(tokens.shape)
        tokens = tokens + mixed @ self.outer
        within = jax.nn.gelu(jax.nn.standardize(tokens) @ self.up)
        return tokens + within @ self.down, None


class Scalars(eqx.Module):
    """Numbers in leaves of their own, each of which sees the one before it."""

    weights: list[jax.Array]

    def __call__(self, h: list[jax.Array], x: jax.Array) -> tuple[Any, None]:
        pairs = zip(h, h[-1:] + h[:-1], self.weights, strict=True)
        return [jnp.tanh(w * a + 0.1 * b + x) for a, b, w in pairs], None


class Arm(eqx.Module):
    """An arm above the ground, as simulators of physics have it: much to compile.

    Its mass matrix comes of derivatives, and contacts of sweeps written out.
    """

    lengths: jax.Array

    def __call__(self, state: Any, torque: jax.Array) -> tuple[Any, None]:
        q, v = state
        places, jacobian = self._places(q), jax.jacfwd(self._places)(q)
        mass = jnp.einsum("lxi,lxj->ij", jacobian, jacobian) + 0.1 * jnp.eye(len(q))
        factor = jax.scipy.linalg.cho_factor(mass)
        force = torque - 9.8 * jnp.sum(jacobian[:, 2], 0) - 0.1 * v
        v = v + 0.01 * jax.scipy.linalg.cho_solve(factor, force)
        contact = jacobian[:, 2]
        response = contact @ jax.scipy.linalg.cho_solve(factor, contact.T)
        push, gap = [jnp.zeros(())] * len(q), contact @ v + 10 * (places[:, 2] + 0.5)
        for i in [*range(len(q))] * 4:
            excess = response[i] @ jnp.stack(push) + gap[i]
            push[i] = jax.nn.relu(push[i] - excess / (response[i, i] + 1e-3))
        v = v + jax.scipy.linalg.cho_solve(factor, contact.T @ jnp.stack(push))
        return (q + 0.01 * v, v), None

    def _places(self, q: jax.Array) -> jax.Array:
        turned, place, places = jnp.eye(3), jnp.zeros(3), list[jax.Array]()
        for i, (angle, length) in enumerate(zip(q, self.lengths, strict=True)):
            c, s, axis = jnp.cos(angle), jnp.sin(angle), i % 2 * 2
            turn = jnp.eye(3).at[axis, axis].set(c).at[1, 1].set(c)
            turned = turned @ turn.at[axis, 1].set(s).at[1, axis].set(-s)
            place = place + length * turned[:, 2]
            places.append(place)
        return jnp.stack(places)


def recurrent(length: int, width: int = 64) -> tuple[Recurrent, jax.Array, jax.Array]:
    """The step by which the peers are known; `xs` is `(length, width)`.

    An orthogonal weight, a little above one, and small inputs hold the cell at the edge
    of chaos. With weights drawn at random all but the last gradients underflow to zero,
    and nobody would notice a loop that gets the others wrong.
    """
    w_key, h_key, x_key = jr.split(jr.key(0), 3)
    return (
        Recurrent(1.05 * jr.orthogonal(w_key, width)),
        jr.normal(h_key, (width,)),
        0.01 * jr.normal(x_key, (length, width)),
    )


def gru(length: int, width: int = 32) -> tuple[Gru, jax.Array, jax.Array]:
    """A GRU; `xs` is `(length, width)`.

    The bias holds the update gate nearly shut, so that the memory spans the loop.
    """
    cell_key, h_key, x_key = jr.split(jr.key(1), 3)
    cell = eqx.nn.GRUCell(width, width, key=cell_key)
    bias = cell.bias.at[width : 2 * width].set(6.0)
    cell = eqx.tree_at(lambda cell: cell.bias, cell, bias)
    return Gru(cell), jr.normal(h_key, (width,)), jr.normal(x_key, (length, width))


def sequences(length: int) -> tuple[Gru, jax.Array, jax.Array]:
    """A GRU of width 256 for 32 sequences; `xs` is `(32, length, 8)`."""
    cell = Gru(eqx.nn.GRUCell(8, 256, key=jr.key(0)))
    return cell, jnp.zeros(256), jr.normal(jr.key(9), (32, length, 8))


def lstm(length: int, width: int, batch: int) -> tuple[Lstm, Any, jax.Array]:
    """A batch of states; `xs` is `(length, batch, width)`."""
    cell = Lstm(eqx.nn.LSTMCell(width, width, key=jr.key(5)))
    state = jnp.zeros((batch, width))
    return cell, (state, state), jr.normal(jr.key(6), (length, batch, width))


def tanh_rnn(length: int, width: int) -> tuple[Tanh, jax.Array, jax.Array]:
    """A state of so many numbers; `xs` is `(length, width)`."""
    weight = jr.orthogonal(jr.key(7), width)
    return Tanh(weight), jnp.zeros(width), jr.normal(jr.key(8), (length, width))


def wave(length: int, size: int) -> tuple[Wave, Any, jax.Array]:
    """A `(size, size)` field of which two time levels are carried."""
    field_key, x_key = jr.split(jr.key(2))
    field = jr.normal(field_key, (size, size))
    speed = jnp.full((size, size), 0.5)
    return Wave(speed), (field, field), jr.normal(x_key, (length,))


def lorenz(length: int) -> tuple[Lorenz, jax.Array, jax.Array]:
    """Three numbers a step; `xs` is `(length, 3)`."""
    forces = jr.normal(jr.key(3), (length, 3))
    return Lorenz(jnp.array([10.0, 28.0, 8 / 3])), jnp.ones(3), forces


def spiking(length: int) -> tuple[Spiking, jax.Array, jax.Array]:
    """A number a step; `xs` is `(length,)`."""
    currents = 0.3 * jr.normal(jr.key(21), (length,))
    return Spiking(jnp.array([0.9, 1.0])), jnp.zeros(()), currents


def pendulum(length: int, width: int = 64) -> tuple[Pendulum, jax.Array, jax.Array]:
    """Four numbers a step, and a field of two layers."""
    keys = jr.split(jr.key(9), 3)
    inner, outer = jr.normal(keys[0], (width, 4)), jr.normal(keys[1], (4, width))
    forces = 0.1 * jr.normal(keys[2], (length, 4))
    return Pendulum(inner, outer / width), jnp.ones(4), forces


def relaxation(length: int, width: int) -> tuple[Any, jax.Array, jax.Array]:
    """A state of so many numbers; `xs` is `(length, width)`."""
    weight = 0.9 * jr.orthogonal(jr.key(17), width)
    return Relaxation(weight), jnp.zeros(width), jr.normal(jr.key(18), (length, width))


def convolutions(length: int, size: int, channels: int) -> tuple[Any, Any, Any]:
    """An image of so many pixels along an edge; `xs` has a number for each channel."""
    keys = jr.split(jr.key(19), 4)
    kernels = [jr.normal(k, (3, 3, channels, channels)) / 9 for k in keys[:2]]
    image = jr.normal(keys[2], (1, size, size, channels))
    return Convolutions(*kernels), image, 0.1 * jr.normal(keys[3], (length, channels))


def conv_lstm(length: int, channels: int = 16) -> tuple[ConvLstm, Any, jax.Array]:
    """Four images of 32 x 32 pixels; `xs` has four a step."""
    keys = jr.split(jr.key(22), 3)
    kernels = [jr.normal(k, (4 * channels, channels, 3, 3)) / 12 for k in keys[:2]]
    shape = (4, channels, 32, 32)
    zero = jnp.zeros(shape)
    return ConvLstm(*kernels), (zero, zero), jr.normal(keys[2], (length, *shape))


def conv_gru(length: int, channels: int = 16) -> tuple[ConvGru, jax.Array, jax.Array]:
    """Four images of 32 x 32 pixels; `xs` has four a step."""
    keys, many = jr.split(jr.key(23), 3), 2 * channels
    kernels = [
        jr.normal(k, (n, many, 3, 3)) / 12
        for k, n in zip(keys[:2], (many, channels), strict=True)
    ]
    shape = (4, channels, 32, 32)
    return ConvGru(*kernels), jnp.zeros(shape), jr.normal(keys[2], (length, *shape))


def diffusion(
    length: int, sizes: tuple[int, ...], species: int = 8
) -> tuple[Diffusion, jax.Array, jax.Array]:
    """Four fields of so many points for each species; `xs` has a number a step."""
    keys = jr.split(jr.key(24), 3)
    stencil = jr.normal(keys[0], (species, species, *[3] * len(sizes))) / 8
    fields = jr.normal(keys[1], (4, species, *sizes))
    return Diffusion(stencil), fields, 0.1 * jr.normal(keys[2], (length,))


def there_and_back(
    length: int, width: int
) -> tuple[ThereAndBack, jax.Array, jax.Array]:
    """A state of so many numbers; `xs` is `(length, width)`."""
    weight = jr.orthogonal(jr.key(25), width)
    xs = 0.1 * jr.normal(jr.key(26), (length, width))
    return ThereAndBack(weight), jnp.zeros(width), xs


def attention(length: int, tokens: int, width: int) -> tuple[Any, Any, Any]:
    """So many tokens; `xs` is `(length, width)`."""
    keys = jr.split(jr.key(20), 5)
    weights = [jr.orthogonal(key, width) for key in keys[:3]]
    init = jr.normal(keys[3], (tokens, width))
    return Attention(*weights), init, 0.1 * jr.normal(keys[4], (length, width))


def transformer_layer(length: int, tokens: int = 16, width: int = 64) -> Any:
    """So many tokens; `xs` is `(length, width)`."""
    keys = jr.split(jr.key(27), 6)
    sizes = (width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)
    weights = [jr.normal(k, s) / 8 for k, s in zip(keys[:4], sizes, strict=True)]
    init = jr.normal(keys[4], (tokens, width))
    return TransformerLayer(*weights), init, 0.1 * jr.normal(keys[5], (length, width))


def scalars(length: int, count: int = 40) -> tuple[Scalars, list[jax.Array], jax.Array]:
    """So many numbers, each a leaf; `xs` is `(length,)`."""
    leaves = lambda value: [jnp.full((), value) for _ in range(count)]
    return Scalars(leaves(0.9)), leaves(0.1), 0.1 * jr.normal(jr.key(28), (length,))


def arm(length: int, links: int = 4) -> tuple[Arm, Any, jax.Array]:
    """Angles and speeds; `xs` is `(length, links)`."""
    torques = 0.1 * jr.normal(jr.key(29), (length, links))
    return Arm(jnp.full(links, 0.3)), (jnp.full(links, 0.1), jnp.zeros(links)), torques


def loss(run: Callable[..., Any]) -> Callable[..., jax.Array]:
    """The sum of squares of the last carry that a loop comes to."""

    def function(cell: Any, init: Any, xs: Any) -> jax.Array:
        carry, _ = run(cell, init, xs)
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(carry))

    return function


def gradient(run: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient of `loss` in the cell, the initial carry and the inputs."""
    return jax.grad(loss(run), argnums=(0, 1, 2))
