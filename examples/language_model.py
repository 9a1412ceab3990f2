# %% [markdown]
"""
# A language model on one page

A transformer that writes like the handbook of Python, from the text to what it writes.
It is small, but little would be different if it were not: its layers are traced as one,
a policy says what of them is stored for the gradient, the gradient of a batch is added
up from chunks of it, and all of the training is one loop with a bar.

You can run this page as a script,

```sh
python -m pip install -e '.[examples]' && python examples/language_model.py
```

or as a notebook. It prints what a gradient takes with and without all this, and a
paragraph that the model wrote; and it draws how the model got better.
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

Python comes with the text that `help("assignment")` and the like print. Of that we take
the paragraphs that are prose, without the marks for emphasis and code, each of them
once, and of these the first 6,000 words. A token is a word or a punctuation mark, and
`¶` ends a paragraph.
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

A block lets each word look at those before it, and then thinks about each word alone.
Both work on what a norm makes of the words, and add to what there was.

`StackedLayers.init` makes four blocks, whose weights it holds with a leading axis. So a
program has the block in it once, and takes no longer to compile for forty. The policy
`save_dots` keeps the results of matrix products for the gradient and computes the rest,
which is cheap, again.
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
    """Says for each word of a text how likely each word is to come next."""

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

The loss of one text is how surprised the model is by each next word. `ChunkedVmap`
takes the mean over a batch, of which it looks at four texts at once: in the gradient
too, where what four texts need is computed, reversed, and forgotten before the next
four.
"""


# %%
def loss(model: Writer, text: Int[Array, "tokens"]) -> Float[Array, ""]:
    logits = model(text[:-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, text[1:]).mean()


chunked = el.ChunkedVmap(loss, 4, in_axes={"model": None}, reduce="mean")

# %% [markdown]
"""
What the gradient of a batch of 16 texts then takes is told by XLA, before anything is
run:
"""

# %%
BATCH = 16


def whole(model: Writer, texts: Int[Array, "batch tokens"]) -> Float[Array, ""]:
    return jax.vmap(loss, in_axes=(None, 0))(model, texts).mean()


def mebibytes(mean, model: Writer) -> float:
    """What the program allocates beside its arguments and its results."""
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

An update is the step of a loop: its carry is the model and the state of the optimiser,
its output the loss, and its key, which the loop splits from that of the call, picks the
texts. What in the carry is no array, such as the policy, stays as it is.
"""

# %%
UPDATES, RATE = 700, 5e-3
optimiser = optax.adam(optax.warmup_cosine_decay_schedule(0, RATE, 30, UPDATES))


def update(carry, _, *, key: Key[Array, ""]):
    model, state = carry
    starts = jax.random.randint(key, (BATCH, 1), 0, len(text) - LENGTH)
    texts = text[starts + jnp.arange(LENGTH + 1)]
    gradient, value = el.Grad(chunked, return_value=True)(model, texts)
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

To write is a loop as well: it carries the last words, draws the next one, and puts it
out. A temperature below 1 draws the likely words more often than the model says. It
goes on where the last paragraph ended that it has read; and as it has read little, and
often, it knows some of that by heart.
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
