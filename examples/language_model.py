# %% [markdown]
"""
# A language model on one page

This page trains a transformer that writes like the Python handbook. The model is small,
but a large one would need the same parts: its layers are traced as one, a policy
decides what to store for the gradient, the gradient of a batch is accumulated over
chunks, and the whole training is one loop with a progress bar.

You can run this page as a script,

```sh
python -m pip install -e '.[examples]' && python examples/language_model.py
```

or as a notebook. It prints the memory of a gradient with and without these parts and a
paragraph that the model wrote, and draws the loss.
"""

# %%
import re
import textwrap
from pydoc_data.topics import topics

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax
from jaxtyping import Array, Float, Int, Key

import eqloop as el

# %% [markdown]
"""
## The text

Python comes with the text that `help("assignment")` and similar calls print. We take
the paragraphs of prose, each of them once, without the marks for emphasis and code, and
keep the first 6,000 words. A token is a word or a punctuation mark, and `¶` ends a
paragraph.
"""

# %%
pages = "\n\n".join(topics[name] for name in sorted(topics))
plain = [" ".join(re.sub(r'[*"]', "", page).split()) for page in pages.split("\n\n")]
prose = [page for page in plain if re.fullmatch(r"[A-Z][\w ,.;:'()-]{60,}\.", page)]
words = re.findall(r"[\w'-]+|[^\w ]", " ¶ ".join(dict.fromkeys(prose)))[:6000]
vocabulary = sorted(set(words))
text = jnp.array([vocabulary.index(word) for word in words])
print(f"{len(words):,} words, of which {len(vocabulary):,} are different")

# %% [markdown]
"""
## The model

A block lets each word attend to the words before it, and then applies a perceptron to
each word. Both parts take normalised words, and add their results to the words.

`StackedLayers.init` makes four blocks, and stores their weights with a leading axis. So
the program contains the block once, and forty blocks would take no longer to compile.
The policy `save_dots` stores the results of matrix products for the gradient, and
recomputes the rest, which is cheap.
"""

# %%
DEPTH, WIDTH, HEADS, LENGTH = 4, 64, 4, 32

Tokens = Float[Array, "length width"]


class Block(eqx.Module):
    """A layer of the model."""

    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    norms: tuple[eqx.nn.RMSNorm, eqx.nn.RMSNorm]

    def __init__(self, *, key: Key[Array, ""]):
        attention_key, mlp_key = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=attention_key)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, jax.nn.gelu, key=mlp_key)
        self.norms = (eqx.nn.RMSNorm(WIDTH), eqx.nn.RMSNorm(WIDTH))

    def __call__(self, x: Tokens) -> Tokens:
        y = jax.vmap(self.norms[0])(x)
        x = x + self.attention(y, y, y, mask=jnp.tri(len(x), dtype=bool))
        return x + jax.vmap(lambda token: self.mlp(self.norms[1](token)))(x)


class Writer(eqx.Module):
    """For each word of a text, predicts the next one."""

    words: Float[Array, "vocabulary width"]
    places: Float[Array, "length width"]
    blocks: el.StackedLayers
    norm: eqx.nn.RMSNorm

    def __init__(
        self,
        *,
        key: Key[Array, ""],
        policy: el.policies.Policy | None = el.policies.save_dots,
    ):
        keys = jax.random.split(key, 3)
        self.words = 0.05 * jax.random.normal(keys[0], (len(vocabulary), WIDTH))
        self.places = 0.05 * jax.random.normal(keys[1], (LENGTH, WIDTH))
        self.blocks = el.StackedLayers.init(Block, DEPTH, key=keys[2], policy=policy)
        self.norm = eqx.nn.RMSNorm(WIDTH)

    def __call__(self, text: Int[Array, "length"]) -> Float[Array, "length vocabulary"]:
        x = self.blocks(self.words[text] + self.places)
        return jax.vmap(self.norm)(x) @ self.words.T


# %% [markdown]
"""
## The loss, and the loss of a batch

The loss of one text measures how much each next word surprises the model. `ChunkedVmap`
takes the mean over a batch, four texts at a time. The gradient also computes and
reverses four texts at a time, so it needs the memory of four texts.
"""


# %%
def loss(model: Writer, text: Int[Array, "tokens"]) -> Float[Array, ""]:
    logits = model(text[:-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, text[1:]).mean()


chunked = el.ChunkedVmap(loss, 4, in_axes={"model": None}, reduce="mean")

# %% [markdown]
"""
XLA reports how much memory the gradient of a batch of 16 texts takes, before anything
is run:
"""

# %%
BATCH = 16


def whole(model: Writer, texts: Int[Array, "batch tokens"]) -> Float[Array, ""]:
    return jax.vmap(loss, in_axes=(None, 0))(model, texts).mean()


def mebibytes(mean, model: Writer) -> float:
    """What the program allocates in addition to its arguments and its results."""
    texts = jnp.zeros((BATCH, LENGTH + 1), int)
    program = el.Jit(el.Grad(mean)).lower(model, texts).compile()
    return program.memory_analysis().temp_size_in_bytes / 2**20


model = Writer(key=jax.random.key(0))
everything = Writer(key=jax.random.key(0), policy=None)
print(f"all at once, all stored       {mebibytes(whole, everything):6.1f} MiB")
print(f"all at once, with the policy  {mebibytes(whole, model):6.1f} MiB")
print(f"four at once, with the policy {mebibytes(chunked, model):6.1f} MiB")

# %% [markdown]
"""
## Training

An update is the step of a loop. Its carry is the model and the state of the optimiser,
and its output is the loss. The loop splits its key, and the key of a step picks the
texts. Leaves of the carry that are not arrays, such as the policy, stay the same.
"""

# %%
UPDATES, RATE = 700, 5e-3
optimiser = optax.adam(optax.warmup_cosine_decay_schedule(0, RATE, 30, UPDATES))


def update(carry, _, *, key: Key[Array, ""]):
    model, state = carry
    starts = jax.random.randint(key, (BATCH, 1), 0, len(text) - LENGTH)
    texts = text[starts + jnp.arange(LENGTH + 1)]
    value, gradient = el.Grad(chunked, return_value=True)(model, texts)
    updates, state = optimiser.update(gradient, state)
    return (eqx.apply_updates(model, updates), state), value


train = el.Jit(el.Scan(update, progress=True))
start = model, optimiser.init(eqx.filter(model, eqx.is_inexact_array))
(model, _), losses = train(start, length=UPDATES, key=jax.random.key(1))

# %%
figure, ax = plt.subplots(figsize=(7, 3.2), layout="constrained")
ax.plot(losses)
ax.set(xlabel="updates", ylabel="nats a word", ylim=(0, None))
plt.show()
print(f"in the end {losses[-20:].mean():.2f} nats a word")

# %% [markdown]
"""
## Writing

Writing is a loop as well. It carries the last words, draws the next one, and returns
it. A temperature below 1 draws likely words more often. The model continues after the
last paragraph of its text. It has read little, and often, so it knows some of it by
heart.
"""

# %%
WRITTEN, TEMPERATURE = 100, 0.7


def write(model: Writer, window: Int[Array, "length"], key: Key[Array, ""]):
    def step(window, _, *, key):
        word = jax.random.categorical(key, model(window)[-1] / TEMPERATURE)
        return jnp.append(window[1:], word), word

    _, written = el.Scan(step)(window, length=WRITTEN, key=key)
    return written


end = 1 + int(jnp.flatnonzero(text == vocabulary.index("¶"))[-1])
written = el.Jit(write)(model, text[end - LENGTH : end], jax.random.key(2))
page = " ".join(vocabulary[word] for word in written)
page = re.sub(r" ([,.;:)])", r"\1", page).replace("( ", "(")
for paragraph in page.split(" ¶ "):
    print(textwrap.fill(paragraph, 80), end="\n\n")
