"""Control pieces that a template builds of smaller texts, such as '<|' + role + '|>', told from text of messages."""

import re
import secrets
from collections.abc import Callable
from typing import Any

from .renderer import RenderError
from .segments import special_pattern

Parts = list[str | int]  # texts, and places of control pieces in a list of names
Render = Callable[[list[dict[str, Any]]], Parts]


def settle_built(render: Render, messages: list[dict[str, Any]], names: list[str]) -> Parts:
    """`render(messages)`, in which control pieces that the template builds are places too.

    Those are the ones that it also writes for messages without any text. In this dialog, text that poses as one is told
    from them by marks around it: RenderError where the template loses the marks, or writes others because of the text.
    """
    parts, pattern = render(messages), special_pattern(tuple(names))
    if not _posing(parts, pattern):
        return parts
    built = _posing(render([_with_texts(message, lambda text: "x") for message in messages]), pattern)
    if not built:  # so what poses as a control piece comes from the messages
        return parts
    begin, end = _mark(), _mark()
    marked = render([_with_texts(message, lambda text: pattern.sub(f"{begin}\\1{end}", text)) for message in messages])
    told = re.compile(f"{begin}{pattern.pattern}{end}|{pattern.pattern}|({begin}|{end})")
    found, seen = Parts(), list[str]()
    for part in marked:
        if isinstance(part, int):
            found.append(part)
            continue
        place = 0
        for match in told.finditer(part):
            text, piece, lone = match.groups()
            found += [part[place : match.start()], text or lone or names.index(piece)]
            seen += [piece] if piece else []
            place = match.end()
        found.append(part[place:])
    if seen != built or _text(found, names) != _text(parts, names):  # a lone mark is in the one and not in the other
        raise RenderError(f"it puts {built[0]!r:.60} together of pieces, so that text in a message could do so too")
    return _merge(found)


def _posing(parts: Parts, pattern: re.Pattern[str]) -> list[str]:
    """What looks like a control piece in the texts of a prompt, in order."""
    return [name for part in parts if isinstance(part, str) for name in pattern.findall(part)]


def _with_texts(value: Any, change: Callable[[str], str], key: Any = None) -> Any:
    """A message with every text in it changed, but for its role."""
    if isinstance(value, dict):
        return {name: _with_texts(item, change, name) for name, item in value.items()}
    if isinstance(value, list):
        return [_with_texts(item, change) for item in value]
    return change(value) if isinstance(value, str) and key != "role" else value


def _mark() -> str:
    """Four characters for private use that no text holds, since they are drawn at random."""
    return "".join(chr(0xF0000 + secrets.randbelow(60_000)) for _ in range(4))


def _text(parts: Parts, names: list[str]) -> str:
    return "".join(part if isinstance(part, str) else names[part] for part in parts)


def _merge(parts: Parts) -> Parts:
    """The same with texts that follow each other as one, and none empty."""
    merged = Parts()
    for part in parts:
        if isinstance(part, str) and merged and isinstance(merged[-1], str):
            merged[-1] += part
        elif part != "":
            merged.append(part)
    return merged
