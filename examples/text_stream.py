"""A model reads a text that is larger than the memory it may use, from end to end.

The text is a file of 48 MiB. It is mapped into memory, and never all of it is read: a
segment is read while the model is trained on the previous one. The state of the model
goes from window to window, and the gradient stops at the start of each window:
truncated backpropagation through time. Then the trained model reads the whole text to
score it, in a loop that can be interrupted and resumed.

It prints the error as the model learns, the error on all of the text, and by how much
the memory of the process has grown while the text was read.

    python -m pip install -e . && python examples/text_stream.py
"""

import resource
import tempfile
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, UInt8

import eqloop as el

BYTES = 48 * 2**20
STREAMS = 4096  # parts of the text that are read side by side
WIDTH, WINDOW, WINDOWS, RATE = 32, 16, 120, 0.5
LETTERS = 27

State = Float[Array, "streams width"]


class Reader(eqx.Module):
    """Reads a letter in each stream, and predicts the next one."""

    letters: Float[Array, "letters width"]
    weights: Float[Array, "width width"]
    readout: Float[Array, "width letters"]

    def __init__(self, *, key: Key[Array, ""]):
        one, two, three = jax.random.split(key, 3)
        self.letters = jax.random.normal(one, (LETTERS, WIDTH))
        self.weights = jax.random.orthogonal(two, WIDTH)
        self.readout = jax.random.normal(three, (WIDTH, LETTERS)) / WIDTH

    def __call__(self, state: State, x: tuple[UInt8[Array, " streams"], ...]):
        letter, following = x
        state = jnp.tanh(state @ self.weights + self.letters[letter])
        scores = jax.nn.log_softmax(state @ self.readout)
        found = jnp.take_along_axis(scores, following[:, None].astype(int), axis=1)
        return state, -jnp.mean(found)


class Scorer(eqx.Module):
    """A reader whose errors are summed up in the carry."""

    reader: Reader

    def __call__(self, carry: tuple[State, Float[Array, ""]], x: tuple[Array, ...]):
        state, total = carry
        state, error = self.reader(state, x)
        return (state, total + error), None


def write_text(path: Path) -> np.memmap:
    """Words of a small language; a row has a letter of each part."""
    rng = np.random.default_rng(0)
    words = [rng.integers(1, LETTERS, rng.integers(2, 7)) for _ in range(30)]
    page = np.concatenate([[*words[i], 0] for i in rng.integers(0, 30, 200_000)])
    rows = BYTES // STREAMS
    text = np.lib.format.open_memmap(path, "w+", np.uint8, (rows, STREAMS))
    starts = rng.integers(0, len(page) - rows, STREAMS)
    for begin in range(0, rows, 1024):
        at = np.arange(begin, min(begin + 1024, rows))[:, None] + starts
        text[begin : begin + 1024] = page[at]
    text.flush()
    return np.load(path, mmap_mode="r")


@eqx.filter_jit
def update(scan: el.CheckpointedScan, state: State, window: tuple[Array, ...]):
    """A step of gradient descent on a window, to which the state is handed on."""

    @eqx.filter_value_and_grad(has_aux=True)
    def loss(scan: el.CheckpointedScan):
        last, errors = scan(state, window)
        return jnp.mean(errors), last

    (value, state), gradient = loss(scan)
    step = jax.tree.map(lambda g: -RATE * g, gradient)
    return value, eqx.apply_updates(scan, step), state


def train(text: np.memmap) -> Reader:
    """Reads the beginning of the text, and learns from it."""
    scan = el.CheckpointedScan(Reader(key=jax.random.key(0)))
    state = jnp.zeros((STREAMS, WIDTH))
    for i in range(WINDOWS):
        rows = np.array(text[i * WINDOW : (i + 1) * WINDOW + 1])
        value, scan, state = update(scan, state, (rows[:-1], rows[1:]))
        if i % 40 == 0 or i == WINDOWS - 1:
            print(f"window {i:3}: error {value:.2f} nats a letter", flush=True)
    return scan.f


def score(reader: Reader, text: np.memmap, directory: str) -> float:
    """The error on all of the text."""
    scan = el.Scan(Scorer(reader))
    run = el.Resumable(scan, directory, every=256)
    start = jnp.zeros((STREAMS, WIDTH)), jnp.zeros(())
    (_, total), _ = run(start, (text[:-1], text[1:]))
    return float(total) / (len(text) - 1)


def peak_memory() -> float:
    """The most memory that the process has had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        text = write_text(Path(folder) / "text.npy")
        print(f"{text.nbytes / 2**20:.0f} MiB of text")
        reader = train(text)
        before = peak_memory()
        error = score(reader, text, f"{folder}/score")
        print(f"the whole text: error {error:.2f} nats a letter")
        print(f"memory grew by {max(peak_memory() - before, 0):.0f} MiB")


if __name__ == "__main__":
    main()
