"""Eight functions as people write them. Nothing in `eqloop.fitting` knows of them.

Each is made at a scale: 1 takes about 20 to 60 MB on a CPU and well below a second, and
that of a test less. Each also says what its parts and its loops are, so that a person
can divide the memory among them: see `Division`.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

import eqloop as el


class Division:
    """How a person divides the memory of a function among its parts.

    Made anew for each time that a function is traced: it is called for one part after
    the other.

    Args:
        parts: Whether there is a `jax.checkpoint` around each part; none by default.
        schedules: The schedule of each loop, or `None` for that which it has anyway.
    """

    def __init__(
        self,
        parts: Iterable[bool] = (),
        schedules: Iterable[el.AbstractSchedule | None] = (),
    ):
        self._parts, self._schedules = iter(parts), iter(schedules)

    def __call__(self, part: Callable[..., Any]) -> Callable[..., Any]:
        """A part, with what is put around it."""
        return jax.checkpoint(part) if next(self._parts, False) else part

    def schedule(self) -> el.AbstractSchedule | None:
        """That of the next loop."""
        return next(self._schedules, None)


@dataclasses.dataclass(frozen=True)
class Function:
    """A loss.

    Attributes:
        name: What it is.
        loss: The loss: of a division, and then of arrays.
        args: The arrays; it is differentiated by the first.
        parts: How many parts it has.
        loops: The lengths of its loops that may be given a schedule.
    """

    name: str
    loss: Callable[..., jax.Array]
    args: tuple[Any, ...]
    parts: int
    loops: tuple[int, ...] = ()

    def plain(self, *args: Any) -> jax.Array:
        """The loss with nothing around its parts."""
        return self.loss(Division(), *args)

    def by_parts(self, *args: Any) -> jax.Array:
        """The loss with `jax.checkpoint` around each part."""
        return self.loss(Division(itertools.repeat(True)), *args)


class _Weights:
    """Gives random arrays, one after the other."""

    def __init__(self, seed: int):
        self._key = jax.random.key(seed)

    def __call__(self, *shape: int) -> jax.Array:
        self._key, key = jax.random.split(self._key)
        fan_in = shape[-2] if len(shape) > 1 else shape[0]
        return jax.random.normal(key, shape) / fan_in**0.5


def _norm(x: jax.Array) -> jax.Array:
    mean = jnp.mean(x, -1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-5)


def _attend(p: Any, x: jax.Array, of: jax.Array, is_causal: bool) -> jax.Array:
    """Attention of several heads, written out."""
    split = lambda y: y.reshape(*y.shape[:-1], 4, -1)
    q, k, v = split(x @ p["q"]), split(of @ p["k"]), split(of @ p["v"])
    scores = jnp.einsum("btnd,bsnd->bnts", q, k) / q.shape[-1] ** 0.5
    if is_causal:
        mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        scores = jnp.where(mask, scores, -1e9)
    mixed = jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(scores), v)
    return mixed.reshape(x.shape) @ p["o"]


def _feed(p: Any, x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x @ p["up"]) @ p["down"]


def _dropout(key: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0)


class Block(eqx.Module):
    """A layer of a transformer with dropout, which may attend to a memory as well."""

    p: Any
    is_causal: bool = eqx.field(static=True, default=True)

    def __call__(self, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        x, key, *memory = state
        key, own = jax.random.split(key)
        x = x + _attend(self.p["self"], _norm(x), _norm(x), self.is_causal)
        for of in memory:
            x = x + _attend(self.p["other"], _norm(x), of, False)
        x = x + _dropout(own, _feed(self.p, _norm(x)))
        return (x, key, *memory)


def _blocks(w: _Weights, layers: int, d: int, crosses: bool = False) -> Any:
    attention = lambda: {k: w(layers, d, d) for k in "qkvo"}
    p = {"self": attention(), "up": w(layers, d, 4 * d), "down": w(layers, 4 * d, d)}
    return p | ({"other": attention()} if crosses else {})


def _stack(around: Division, layers: Block) -> el.StackedLayers:
    return el.StackedLayers(layers, schedule=around.schedule())


def _entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    picked = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)


def transformer(scale: float) -> Function:
    """A stack of layers between an embedding and a head of many words."""
    w, d, length, words = _Weights(0), 64, int(128 * scale), int(8192 * scale)
    p = {"embed": w(words, d), "layers": _blocks(w, 6, d), "head": w(d, words)}
    tokens = jnp.arange(2 * length).reshape(2, length) * 7919 % words

    def loss(around: Division, p: Any, tokens: jax.Array, key: jax.Array) -> jax.Array:
        x = p["embed"][tokens]
        stack = around(lambda q, x: _stack(around, Block(q))((x, key))[0])
        head = around(lambda q, x: _entropy(_norm(x) @ q, jnp.roll(tokens, -1, 1)))
        return head(p["head"], stack(p["layers"], x))

    return Function("transformer", loss, (p, tokens, jax.random.key(1)), 2, (6,))


def encoder_decoder(scale: float) -> Function:
    """Two stacks of layers, the second of which reads what the first gives."""
    w, d, length, words = _Weights(1), 64, int(128 * scale), int(1024 * scale)
    p = {
        "embed": w(words, d),
        "encoder": _blocks(w, 6, d),
        "decoder": _blocks(w, 6, d, crosses=True),
    }
    tokens = jnp.arange(2 * length).reshape(2, length) * 7919 % words

    def loss(around: Division, p: Any, tokens: jax.Array, key: jax.Array) -> jax.Array:
        x = p["embed"][tokens]
        encode = around(
            lambda q, x: _stack(around, Block(q, is_causal=False))((x, key))[0]
        )
        decode = around(lambda q, x, m: _stack(around, Block(q))((x, key, m))[0])
        head = around(lambda q, x: _entropy(_norm(x) @ q.T, jnp.roll(tokens, -1, 1)))
        memory = encode(p["encoder"], x)
        return head(p["embed"], decode(p["decoder"], x, memory))

    return Function(
        "encoder and decoder", loss, (p, tokens, jax.random.key(1)), 3, (6, 6)
    )


def recurrent(scale: float) -> Function:
    """Three recurrent layers over time, with a readout of each step."""
    w, d, length, batch = _Weights(2), 64, int(250 * scale), 16
    layers = [{k: w(d, d) for k in ("xz", "xr", "xn", "hz", "hr", "hn")} for _ in "123"]
    p = {"layers": layers, "readout": [w(d, d), w(d, 10)]}

    def cell(q: Any, h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        z = jax.nn.sigmoid(x @ q["xz"] + h @ q["hz"])
        r = jax.nn.sigmoid(x @ q["xr"] + h @ q["hr"])
        new = jnp.tanh(x @ q["xn"] + (r * h) @ q["hn"])
        h = z * h + (1 - z) * new
        return h, h

    def over_time(q: Any, xs: jax.Array, schedule: Any) -> jax.Array:
        step = lambda h, x: cell(q, h, x)
        scan = el.Scan(step, schedule=schedule)
        return scan(jnp.zeros((batch, d)), xs)[1]

    def read(q: Any, xs: jax.Array) -> jax.Array:
        return jnp.mean((jax.nn.gelu(xs @ q[0]) @ q[1] - 1) ** 2)

    def loss(around: Division, p: Any, xs: jax.Array) -> jax.Array:
        for q in p["layers"]:
            over = functools.partial(over_time, schedule=around.schedule())
            xs = around(over)(q, xs)
        return around(read)(p["readout"], xs)

    return Function(
        "recurrent layers", loss, (p, w(length, batch, d)), 4, 3 * (length,)
    )


def neural_ode(scale: float) -> Function:
    """A neural differential equation, solved by Diffrax, and a decoder of its path."""
    import diffrax

    import eqloop.diffrax

    w, d, batch, times = _Weights(3), 32, 64, int(100 * scale)
    p = {
        "field": [w(d, 2 * d), w(2 * d, d)],
        "decoder": [w(d, 2 * d), w(2 * d, 2 * d), w(2 * d, 16)],
    }

    def path(q: Any, start: jax.Array, schedule: Any) -> jax.Array:
        field = lambda t, y, _: jnp.tanh(jnp.tanh(y @ q[0]) @ q[1])
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(field),
            diffrax.Tsit5(),
            0.0,
            4.0,
            0.04,
            start,
            saveat=diffrax.SaveAt(ts=jnp.linspace(0.0, 4.0, times)),
            adjoint=eqloop.diffrax.CheckpointedAdjoint(schedule=schedule),
            max_steps=128,
        )
        return solution.ys

    def decode(q: Any, ys: jax.Array) -> jax.Array:
        hidden = jax.nn.gelu(jax.nn.gelu(ys @ q[0]) @ q[1])
        return jnp.mean((hidden @ q[2] - 1) ** 2)

    def loss(around: Division, p: Any, start: jax.Array) -> jax.Array:
        run = functools.partial(path, schedule=around.schedule())
        return around(decode)(p["decoder"], around(run)(p["field"], start))

    return Function("neural ODE", loss, (p, w(batch, d)), 2, (128,))


def rollout(scale: float) -> Function:
    """A policy acts in a world that can be differentiated; a network judges states."""
    w, d, batch, length = _Weights(4), 16, 64, int(200 * scale)
    p = {
        "policy": [w(d, 64), w(64, 64), w(64, d)],
        "value": [w(d, 64), w(64, 64), w(64, 1)],
    }

    def network(q: Any, x: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.tanh(x @ q[0]) @ q[1]) @ q[2]

    def act(q: Any, start: jax.Array, key: jax.Array, schedule: Any) -> Any:
        def step(state: Any, key: jax.Array) -> Any:
            place, speed = state
            noise = jax.random.normal(key, place.shape)
            force = network(q, place) + 0.1 * noise
            speed = 0.95 * speed + 0.05 * (force - jnp.sin(place))
            place = place + 0.05 * speed
            reward = -jnp.sum(place**2, -1) - 0.01 * jnp.sum(force**2, -1)
            return (place, speed), (place, reward)

        keys = jax.random.split(key, length)
        scan = el.Scan(step, schedule=schedule)
        return scan((start, jnp.zeros_like(start)), keys)[1]

    def judge(q: Any, places: jax.Array, rewards: jax.Array) -> jax.Array:
        values = network(q, places)[..., 0]
        ahead = rewards[:-1] + 0.99 * values[1:]
        return jnp.mean((values[:-1] - ahead) ** 2) - jnp.mean(rewards)

    def loss(around: Division, p: Any, start: jax.Array, key: jax.Array) -> jax.Array:
        run = functools.partial(act, schedule=around.schedule())
        places, rewards = around(run)(p["policy"], start, key)
        return around(judge)(p["value"], places, rewards)

    return Function("rollout", loss, (p, w(batch, d), jax.random.key(1)), 2, (length,))


def u_net(scale: float) -> Function:
    """Convolutions at three sizes, there and back, without any loop."""
    w, size, channels = _Weights(5), 8 * max(round(8 * scale), 1), (8, 16, 32)
    kernel = lambda i, o: w(3, 3, i, o) / 3
    p = {
        "in": kernel(3, channels[0]),
        "down": [[kernel(c, c), kernel(c, c)] for c in channels],
        "wider": [kernel(a, b) for a, b in itertools.pairwise(channels)],
        "up": [[kernel(2 * c, c), kernel(c, c)] for c in channels[:-1]],
        "narrower": [kernel(b, a) for a, b in itertools.pairwise(channels)],
        "out": kernel(channels[0], 1),
    }

    def convolve(x: jax.Array, k: jax.Array) -> jax.Array:
        form = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            x, k, (1, 1), "SAME", dimension_numbers=form
        )

    def double(q: Any, x: jax.Array) -> jax.Array:
        for k in q:
            x = jax.nn.gelu(_norm(convolve(x, k)))
        return x

    def half(x: jax.Array) -> jax.Array:
        n, h, v, c = x.shape
        return jnp.max(x.reshape(n, h // 2, 2, v // 2, 2, c), (2, 4))

    def twice(x: jax.Array) -> jax.Array:
        return jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)

    def loss(around: Division, p: Any, images: jax.Array) -> jax.Array:
        x, levels = convolve(images, p["in"]), []
        for i, q in enumerate(p["down"]):
            x = around(double)(q, x)
            if i < len(p["wider"]):
                levels.append(x)
                x = convolve(half(x), p["wider"][i])
        for i in reversed(range(len(levels))):
            x = convolve(twice(x), p["narrower"][i])
            x = around(double)(p["up"][i], jnp.concatenate([x, levels[i]], -1))
        return jnp.mean((convolve(x, p["out"]) - jnp.mean(images)) ** 2)

    return Function("U-Net", loss, (p, w(8, size, size, 3)), 5)


def simulation(scale: float) -> Function:
    """Steps of an implicit solver, each of which iterates until it is exact enough."""
    w, d, batch, length = _Weights(6), 64, 32, int(150 * scale)
    p = {"world": w(d, d), "readout": [w(d, d), w(d, 1)]}

    def simulate(q: jax.Array, start: jax.Array, schedule: Any) -> jax.Array:
        def step(x: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
            force = lambda y: jnp.tanh(y @ q)

            def is_off(state: Any) -> jax.Array:
                count, y = state
                error = y - x - 0.1 * force(y)
                return (count < 2) | ((count < 12) & (jnp.max(jnp.abs(error)) > 1e-4))

            def better(state: Any) -> Any:
                count, y = state
                return count + 1, x + 0.1 * force(y)

            loop = el.CheckpointedWhileLoop(is_off, better, max_steps=12)
            _, y = loop((0, x))
            return y, y

        return el.Scan(step, schedule=schedule)(start, None, length=length)[1]

    def read(q: Any, ys: jax.Array) -> jax.Array:
        return jnp.mean((jax.nn.gelu(ys @ q[0]) @ q[1] - 1) ** 2)

    def loss(around: Division, p: Any, start: jax.Array) -> jax.Array:
        run = functools.partial(simulate, schedule=around.schedule())
        return around(read)(p["readout"], around(run)(p["world"], start))

    return Function("simulation", loss, (p, w(batch, d)), 2, (length,))


def mixer(scale: float) -> Function:
    """An MLP-Mixer, written out layer by layer in Python."""
    w, d, patches, batch = _Weights(7), 64, 64, max(int(16 * scale), 1)
    layers = 8 if scale > 0.1 else 2
    mlp = lambda n: [w(n, 2 * n), w(2 * n, n)]
    p = {
        "embed": w(48, d),
        "layers": [{"tokens": mlp(patches), "channels": mlp(d)} for _ in range(layers)],
        "head": w(d, 10),
    }

    def mix(q: Any, x: jax.Array) -> jax.Array:
        two = lambda q, x: jax.nn.gelu(x @ q[0]) @ q[1]
        across = two(q["tokens"], _norm(x).swapaxes(1, 2)).swapaxes(1, 2)
        x = x + across
        return x + two(q["channels"], _norm(x))

    def loss(around: Division, p: Any, images: jax.Array, key: jax.Array) -> jax.Array:
        x = images @ p["embed"]
        for i, q in enumerate(p["layers"]):
            x = _dropout(jax.random.fold_in(key, i), around(mix)(q, x))
        logits = jnp.mean(_norm(x), 1) @ p["head"]
        return _entropy(logits, jnp.arange(batch) % 10)

    return Function(
        "MLP-Mixer", loss, (p, w(batch, patches, 48), jax.random.key(1)), layers
    )


_MADE = {
    "transformer": transformer,
    "encoder-decoder": encoder_decoder,
    "recurrent": recurrent,
    "neural-ode": neural_ode,
    "rollout": rollout,
    "u-net": u_net,
    "simulation": simulation,
    "mixer": mixer,
}
NAMES = tuple(_MADE)


def function(name: str, scale: float = 1.0) -> Function:
    """One of them."""
    return _MADE[name](scale)


def functions(scale: float = 1.0) -> Iterator[Function]:
    """All of them."""
    return (function(name, scale) for name in NAMES)
