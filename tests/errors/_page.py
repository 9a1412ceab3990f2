"""The page `docs/errors.md`, from the messages and from what is written about them."""

import dataclasses
import functools
import re
import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from ._messages import Message

PAGE = Path(__file__).parents[2] / "docs/errors.md"
_ENTRIES = Path(__file__).parent / "entries"
_WIDTH = 88
_CODE = re.compile(r"`[^`]*`|\[[^]]*\]\([^)]*\)")
_UNBROKEN = "\0"
_INTRO = """\
# Errors

Every error of the library, with a message as a test saw it, what it means, and how to
mend it. Search this page, or the site, for the words of yours that are not names or
numbers.

All of them come from the call itself, while it is traced and before anything runs, but
for those in [At run time](#at-run-time). A message begins with the transform that was
called, and names leaves by their paths: `carry.h` is the attribute `h` of the carry,
`xs['a'][0]` the first entry of the entry `'a'` of `xs`. Types are written as JAX writes
them: `float32[3,4]` is an array of that shape, `float32[]` a scalar.

An error that your own function raises reaches you as it is, with a note of what was
being traced and with which arguments: *This was raised while Scan traced `f(carry, x)`
with* …

The examples on this page begin with

```python
import equinox as eqx
import jax
import jax.numpy as jnp
import eqloop as el
```"""


@dataclasses.dataclass(frozen=True)
class Entry:
    """An error, or several that say the same of different settings.

    Attributes:
        says: The words that tell it; `…` is for any others.
        means: What it means, and how to mend it.
        title: What it is called, if not by its words.
        code: An example of how to mend it, a program.
        shows: Words of the message to show, where a test sees several.
    """

    says: str
    means: str
    title: str = ""
    code: str = ""
    shows: str = ""

    @functools.cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(".*".join(map(re.escape, self.says.split("…"))), re.DOTALL)

    def is_of(self, message: str) -> bool:
        """Whether the words are in a message."""
        return self._pattern.search(message) is not None


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of the page."""

    title: str
    intro: str
    errors: tuple[Entry, ...]


@functools.cache
def sections() -> list[Section]:
    """The parts of the page, in the order of their files."""
    return [_section(path) for path in sorted(_ENTRIES.glob("*.toml"))]


def _section(path: Path) -> Section:
    text = tomllib.loads(path.read_text())
    errors = tuple(Entry(**fields) for fields in text["error"])
    return Section(text["title"], text.get("intro", ""), errors)


def entry_of(message: str) -> Entry | None:
    """What is written about a message: where several fit, that with the most words."""
    every = [entry for section in sections() for entry in section.errors]
    fitting = [entry for entry in every if entry.is_of(message)]
    return max(fitting, key=lambda entry: len(entry.says), default=None)


def is_apt(message: str) -> bool:
    """Whether a message is one to show, where a test sees several from one place."""
    entry = entry_of(message)
    return entry is not None and entry.shows in message


def render(messages: Mapping[str, Message]) -> str:
    """The page."""
    shown: dict[Entry | None, list[Message]] = {}
    for message in messages.values():
        shown.setdefault(entry_of(message.text), []).append(message)
    blocks = [
        block for section in sections() for block in _section_blocks(section, shown)
    ]
    return "\n\n".join(block.strip("\n") for block in [_INTRO, *blocks]) + "\n"


def _section_blocks(
    section: Section, shown: Mapping[Entry | None, list[Message]]
) -> Iterator[str]:
    yield f"## {section.title}"
    if section.intro:
        yield _paragraph(section.intro)
    for entry in section.errors:
        messages = sorted(set(shown[entry]), key=lambda m: (m.text, m.kind))
        yield f"### {entry.title or entry.says}"
        yield ", ".join(f"`{kind}`" for kind in sorted({m.kind for m in messages}))
        yield "```text\n" + "\n\n".join(_wrap(m.text) for m in messages) + "\n```"
        yield _paragraph(entry.means)
        if entry.code:
            yield f"```python\n{entry.code.strip()}\n```"


def _paragraph(text: str) -> str:
    return _fill(" ".join(text.split()))


def _wrap(text: str) -> str:
    """Text in lines that are not too long, with none added inside of code."""
    return "\n".join(map(_fill, text.split("\n")))


def _fill(line: str) -> str:
    whole = _CODE.sub(lambda code: code[0].replace(" ", _UNBROKEN), line)
    filled = textwrap.fill(
        whole,
        _WIDTH,
        subsequent_indent=" " * (len(line) - len(line.lstrip())),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return filled.replace(_UNBROKEN, " ")
