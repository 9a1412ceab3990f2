"""The messages that the tests saw, one for each place that raises."""

import json
import re
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import NamedTuple

_FILE = Path(__file__).parent / "messages.json"


class Message(NamedTuple):
    """An error as a test saw it."""

    kind: str
    text: str


def load() -> dict[str, Message]:
    """The messages of the last recording, by where they come from."""
    recorded = json.loads(_FILE.read_text())
    return {site: Message(**fields) for site, fields in recorded.items()}


def save(messages: Mapping[str, Message]) -> None:
    """Keeps them, in an order that does not depend on that of the tests."""
    fields = {site: messages[site]._asdict() for site in sorted(messages)}
    _FILE.write_text(json.dumps(fields, indent=1, ensure_ascii=False) + "\n")


def is_among(message: Message, seen: Set[Message]) -> bool:
    """Whether it was seen, but for what differs between versions and machines.

    These are numbers, as of bytes and times, and how JAX calls its types.
    """
    return _outline(message) in map(_outline, seen)


def _outline(message: Message) -> Message:
    text = re.sub(r"[\w.]*(Array|Jaxpr)\b", "…", message.text)
    return message._replace(text=re.sub(r"\d+(\.\d+)?", "0", text))


def choose(
    seen: Mapping[str, Set[Message]], is_apt: Callable[[str], bool]
) -> dict[str, Message]:
    """One message for each place: the shortest, of those that are apt if some are."""
    by_length = lambda m: (not is_apt(m.text), len(m.text), m)
    return {site: min(messages, key=by_length) for site, messages in seen.items()}
