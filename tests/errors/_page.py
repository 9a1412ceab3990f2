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
# What a list follows.
_OPEN = re.compile(r"(,? (but it is|which is|which differs in|and they are: …)|, …)$")
# Sentences begin with these words, and not with a name in the program.
_WORDS = re.compile(
    r"(a|all|an|another|cannot|carries|cotangents|every|exactly|expected|forward|give|it|"
    r"layers|leaves|no|none|only|pass|primals|reverse|rows|the|there|these|this|to|what|"
    r"with)\b"
)
# Of a title; a longer one ends where its first part does.
_LONG = 120
_ENDS = re.compile(
    r"(, (which|as|and|so|but)\b|: |, if )(?!.*(, (which|as|and|so|but)\b|: ))"
)
_INTRO = """\
# Errors

Every error of the library, with an example of its message, what it means, and how to
fix it. To find yours, search the site for its words, without names and numbers, which
are `…` in the titles here. Or begin with what you were doing; an error opens when you
click it.

WHAT_YOU_DID

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
    intro = _INTRO.replace("WHAT_YOU_DID", _by_what_was_done())
    return "\n\n".join(block.strip("\n") for block in [intro, *blocks]) + "\n"


def _by_what_was_done() -> str:
    """A list of the sections: what one did, and how many errors that may give."""
    lines = [
        f"- [{section.title}](#{_anchor(section.title)}): {len(section.errors)}"
        for section in sections()
    ]
    return "\n".join(lines)


def _section_blocks(section: Section) -> Iterator[str]:
    yield f"## {section.title}"
    if section.intro:
        yield _paragraph(section.intro)
    for entry in section.errors:
        yield "\n\n".join(block.strip("\n") for block in _entry_blocks(entry))


def _entry_blocks(entry: Entry) -> Iterator[str]:
    """One error, folded; its title is a heading, so that the search leads to it."""
    kinds = ", ".join(f"`{kind}`" for kind in entry.kinds())
    yield '<details class="error" markdown="1">\n' + _summary(entry)
    yield f"{kinds}:"
    messages = (_wrap(message, _NARROW) for message in entry.messages())
    yield "```text\n" + "\n\n".join(messages) + "\n```"
    yield _paragraph(entry.means)
    if entry.code:
        yield f"```python\n{entry.code.strip()}\n```"
    yield "</details>"


def _summary(entry: Entry) -> str:
    name, title = _anchor(entry.title), html.escape(sentence(entry), quote=False)
    shown = re.sub(r"`(.*?)`", r"<code>\1</code>", title)
    return f'<summary><h3 id="{name}">{shown}</h3></summary>'


def _anchor(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def sentence(entry: Entry) -> str:
    """What an error says, as a sentence: the first one of its message, as a rule.

    What stands in blanks is left out. An entry for several messages, or for those of
    somebody else, says in its own title what they have in common.
    """
    found = [text for site in entry.at if _says(text := _spoken(site), entry.title)]
    text = found[0] if found else entry.title
    text = re.sub(r"^(…|[A-Z]\w+|[a-z_]+)(\.\w+)*: ", "", text)
    text = re.split(r"(?<=[^.])\.(?=\s|$)|:?\n", text)[0]
    if len(text) > _LONG and (ends := _ENDS.search(text, 0, _LONG)):
        text = text[: ends.start()]
    text = _OPEN.sub("", text.removesuffix(": …"))
    if _WORDS.match(text):
        text = text[0].upper() + text[1:]
    return text if text.endswith("…") else f"{text}."


def _spoken(site: str) -> str:
    template = sites()[site].template
    return "".join(part if isinstance(part, str) else "…" for part in template)


def _says(text: str, title: str) -> bool:
    """Whether the words of a title are in a text, in their order."""
    plain = lambda words: " ".join(words.replace("`", "").split())
    pattern = ".*".join(re.escape(plain(part)) for part in title.split("…"))
    return re.search(pattern, plain(text)) is not None


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
