"""The page `docs/errors.md`, from the source and from what is written about it."""

import dataclasses
import functools
import re
import textwrap
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ._sites import sites

PAGE = Path(__file__).parents[2] / "docs/errors.md"
_ENTRIES = Path(__file__).parent / "entries"
_WIDTH = 88
_CODE = re.compile(r"`[^`]*`|\[[^]]*\]\([^)]*\)")
_UNBROKEN = "\0"
_INTRO = """\
# Errors

Every error of the library, with an example of its message, what it means, and how to
fix it. Search this page, or the site, for the words of your message that are not names
or numbers.

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
        yield f"### {entry.title}"
        yield ", ".join(f"`{kind}`" for kind in entry.kinds())
        yield "```text\n" + "\n\n".join(map(_wrap, entry.messages())) + "\n```"
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
