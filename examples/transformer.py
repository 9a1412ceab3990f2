"""A transformer of 24 layers that is traced as one, and learns the Zen of Python.

The layers differ only in their weights, so `StackedLayers` stores them as one layer
whose arrays have a leading axis, and the model compiles in the time of a single layer.
Its gradient needs the intermediate results of the layers. A policy says which of them
are stored, and a schedule says for which layers. The text that it learns comes with
Python: `import this`.

It prints the memory and the time of the gradient for three ways to store, the loss
during training, and what the model writes in the end.

    python -m pip install -e '.[examples]' && python examples/transformer.py
"""

import codecs
import contextlib
import io
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, Key

import eqloop as el

with contextlib.redirect_stdout(io.StringIO()):  # it prints itself
    import this

DEPTH, WIDTH, HEADS = 24, 64, 4
LENGTH, BATCH, STEPS, RATE = 48, 8, 250, 3e-3  # letters, texts, updates
PROMPT, SHOWN = "Beautiful is", 150  # letters

Tokens = Float[Array, "length width"]


# The model: a block, and a stack of blocks that is a layer like any other.


class Block(eqx.Module):
    """Attention to the letters before, then a perceptron for each letter."""

    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    norms: tuple[eqx.nn.LayerNorm, eqx.nn.LayerNorm]
    dropout: eqx.nn.Dropout

    def __init__(self, *, key):
        attention_key, mlp_key = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=attention_key)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, jax.nn.gelu, key=mlp_key)
        self.norms = (eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH))
        self.dropout = eqx.nn.Dropout(0.05)

    def __call__(
        self, x: Tokens, mask: Bool[Array, "length length"], *, key: Key | None = None
    ) -> Tokens:
        y = jax.vmap(self.norms[0])(x)
        x = x + self.attention(y, y, y, mask) / DEPTH**0.5
        y = jax.vmap(lambda token: self.mlp(self.norms[1](token)))(x)
        return x + self.dropout(y, key=key, inference=key is None) / DEPTH**0.5


class Writer(eqx.Module):
    """For each letter of a text, predicts the next one."""

    letters: eqx.nn.Embedding
    places: Float[Array, "length width"]
    blocks: el.StackedLayers
    norm: eqx.nn.LayerNorm
    readout: eqx.nn.Linear

    def __init__(self, alphabet, *, key, **settings):
        keys = jax.random.split(key, 4)
        self.letters = eqx.nn.Embedding(alphabet, WIDTH, key=keys[0])
        self.places = jax.random.normal(keys[1], (LENGTH, WIDTH))
        self.blocks = el.StackedLayers.init(Block, DEPTH, key=keys[2], **settings)
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.readout = eqx.nn.Linear(WIDTH, alphabet, key=keys[3])

    def __call__(self, text: Int[Array, "length"], *, key=None):
        x = jax.vmap(self.letters)(text) + self.places[: text.size]
        mask = jnp.tril(jnp.ones((text.size, text.size), bool))
        x = self.blocks(x, mask, key=key)
        return jax.vmap(lambda token: self.readout(self.norm(token)))(x)


def loss(model, texts, keys):
    """The mean loss of the next letter, in nats."""
    logits = jax.vmap(lambda text, key: model(text[:-1], key=key))(texts, keys)
    return optax.softmax_cross_entropy_with_integer_labels(logits, texts[:, 1:]).mean()


# The memory and the time of a gradient.


def compare(alphabet, texts, keys):
    """Compiles one gradient in several ways; prints what each stores and takes."""
    print("stored for the gradient       compiled in      memory       time")
    for name, settings in (
        ("everything", {}),
        ("results of matrix products", {"policy": el.policies.save_dots}),
        ("every fourth input", {"schedule": el.Chunked(4)}),
    ):
        model = Writer(alphabet, key=jax.random.key(0), **settings)
        report(name, model, texts, keys)


def report(name, model, *args):
    weights, static = eqx.partition(model, eqx.is_inexact_array)
    gradient = jax.grad(lambda weights, *a: loss(eqx.combine(weights, static), *a))
    start = time.perf_counter()
    program = jax.jit(gradient).lower(weights, *args).compile()
    compiled = time.perf_counter() - start
    runs = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(program(weights, *args))
        runs.append(time.perf_counter() - start)
    megabytes = program.memory_analysis().temp_size_in_bytes / 1e6
    print(
        f"{name:<29}{compiled:>10.1f} s{megabytes:>9.1f} MB{1e3 * min(runs):>8.0f} ms"
    )


# Training and writing, as with any Equinox model.


def train(model, text):
    schedule = optax.warmup_cosine_decay_schedule(0.0, RATE, STEPS // 10, STEPS)
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))

    @eqx.filter_jit
    def step(model, state, key):
        start_key, key = jax.random.split(key)
        starts = jax.random.randint(start_key, (BATCH,), 0, text.size - LENGTH)
        texts = text[starts[:, None] + jnp.arange(LENGTH + 1)]
        keys = jax.random.split(key, BATCH)
        value, gradient = eqx.filter_value_and_grad(loss)(model, texts, keys)
        updates, state = optimiser.update(gradient, state)
        return value, eqx.apply_updates(model, updates), state

    state = optimiser.init(eqx.filter(model, eqx.is_inexact_array))
    for i, key in enumerate(jax.random.split(jax.random.key(1), STEPS)):
        value, model, state = step(model, state, key)
        if i % 50 == 0 or i == STEPS - 1:
            print(f"step {i:>3}: {value:5.2f} nats a letter")
    return model


def write(model, text, count):
    """Continues a text, with the likeliest letter each time."""

    @eqx.filter_jit
    def likeliest(model, window, last):
        return jnp.argmax(model(window)[last])

    text = list(text)
    for _ in range(count):
        seen = text[-LENGTH:]
        window = jnp.array(seen + [0] * (LENGTH - len(seen)))
        text.append(int(likeliest(model, window, len(seen) - 1)))
    return text


def main():
    zen = codecs.decode(this.s, "rot13")
    alphabet = sorted(set(zen))
    text = jnp.array([alphabet.index(letter) for letter in zen])

    texts = jnp.stack([text[i : i + LENGTH + 1] for i in range(BATCH)])
    print(f"The gradient of {DEPTH} layers")
    compare(len(alphabet), texts, jax.random.split(jax.random.key(0), BATCH))

    print("\nTraining")
    policy = el.policies.save_dots
    model = Writer(len(alphabet), key=jax.random.key(0), policy=policy)
    model = train(model, text)

    prompt = [alphabet.index(letter) for letter in PROMPT]
    print("\nWhat it writes")
    print("".join(alphabet[i] for i in write(model, prompt, SHOWN)))


if __name__ == "__main__":
    main()
