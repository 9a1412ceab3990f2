"""The data of `docs/errors.md`, from the source and from what is written about it."""

import dataclasses
import functools
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..tables import FOLDER, data
from ._sites import sites

DATA = FOLDER / "errors.json"
_ENTRIES = Path(__file__).parent / "entries"
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
_COLUMNS = ("error", "what you did", "kind", "message", "means", "example")


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
    """The errors that one may get by doing something."""

    title: str
    errors: tuple[Entry, ...]


@functools.cache
def sections() -> list[Section]:
    """What one may have done, in the order of the files."""
    return [_section(path) for path in sorted(_ENTRIES.glob("*.toml"))]


def _section(path: Path) -> Section:
    text = tomllib.loads(path.read_text())
    errors = tuple(Entry(**fields) for fields in text["error"])
    return Section(text["title"], errors)


def render() -> str:
    """The data."""
    rows = (
        (
            sentence(entry),
            section.title,
            ", ".join(f"`{kind}`" for kind in entry.kinds()),
            "\n\n".join(entry.messages()),
            " ".join(entry.means.split()),
            entry.code.strip(),
        )
        for section in sections()
        for entry in section.errors
    )
    return data(_COLUMNS, rows)


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
