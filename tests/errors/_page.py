"""The page `docs/errors.md`, from the source and from what is written about it."""

import dataclasses
import functools
import html
import re
import textwrap
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ._sites import sites

PAGE = Path(__file__).parents[2] / "docs/errors.md"
_ENTRIES = Path(__file__).parent / "entries"
_WIDTH = 88
_NARROW = 76  # of messages, which are indented on the page
_CODE = re.compile(r"`[^`]*`|\[[^]]*\]\([^)]*\)")
_UNBROKEN = "\0"
_INTRO = """\
# Errors

Every error of the library, with an example of its message, what it means, and how to
fix it. The errors are grouped by what you were doing, and each opens when you click it.
To find yours, search the site for its words, and leave out names and numbers.

A message begins with the transform that was called. It names leaves by their paths:
`carry.h` is the attribute `h` of the carry, and `xs['a'][0]` is the first entry of the
entry `'a'` of `xs`. Types are written as JAX writes them: `float32[3,4]` is an array of
that shape, and `float32[]` is a scalar. Except for the errors in [While the program
runs](#while-the-program-runs), all of them are raised by the call itself, while it is
traced and before anything runs.

If your own function raises an error, you get that error, with a note that says what was
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
        title: What it is called.
        means: What it means, and how to fix it.
        at: Where it is raised, as `sites` has it, and an example of each: what stands
            in the blanks of the message. The rest of the message is in the source.
        code: An example of how to fix it, a program.
    """

    title: str
    means: str
    at: Mapping[str, Sequence[str]]
    code: str = ""

    def messages(self) -> list[str]:
        """Its messages, filled in."""
        return sorted({sites()[site].fill(values) for site, values in self.at.items()})

    def kinds(self) -> list[str]:
        """The types of exceptions that it comes as."""
        return sorted({sites()[site].kind for site in self.at})


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


def render() -> str:
    """The page."""
    blocks = [block for section in sections() for block in _section_blocks(section)]
    return "\n\n".join(block.strip("\n") for block in [_INTRO, *blocks]) + "\n"


def _section_blocks(section: Section) -> Iterator[str]:
    yield f"## {section.title}"
    if section.intro:
        yield _paragraph(section.intro)
    for entry in section.errors:
        yield "\n\n".join(block.strip("\n") for block in _entry_blocks(entry))


def _entry_blocks(entry: Entry) -> Iterator[str]:
    """One error, folded; its title is a heading, so that the search leads to it."""
    kinds = ", ".join(f"`{kind}`" for kind in entry.kinds())
    yield '<details class="error" markdown="1">\n' + _summary(entry.title)
    yield f"{kinds}:"
    messages = (_wrap(message, _NARROW) for message in entry.messages())
    yield "```text\n" + "\n\n".join(messages) + "\n```"
    yield _paragraph(entry.means)
    if entry.code:
        yield f"```python\n{entry.code.strip()}\n```"
    yield "</details>"


def _summary(title: str) -> str:
    name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    shown = re.sub(r"`(.*?)`", r"<code>\1</code>", html.escape(title, quote=False))
    return f'<summary><h3 id="{name}">{shown}</h3></summary>'


def _paragraph(text: str) -> str:
    return _fill(" ".join(text.split()), _WIDTH)


def _wrap(text: str, width: int) -> str:
    """Text in lines that are not too long, with none added inside of code."""
    return "\n".join(_fill(line, width) for line in text.split("\n"))


def _fill(line: str, width: int) -> str:
    whole = _CODE.sub(lambda code: code[0].replace(" ", _UNBROKEN), line)
    filled = textwrap.fill(
        whole,
        width,
        subsequent_indent=" " * (len(line) - len(line.lstrip())),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return filled.replace(_UNBROKEN, " ")
