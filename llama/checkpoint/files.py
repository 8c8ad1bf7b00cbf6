"""What every reader and writer of files needs: the one form of complaints, first bytes, JSON."""

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import LlamaError

MAX_JSON = 2_000_000  # bytes; of the index of a 405B model's files 115 kB, and parsed it takes thirty times as much
MAX_MESSAGE = 1_000  # characters; a file's names and values may be of any length


def shortened(message: str) -> str:
    """A message of at most about MAX_MESSAGE characters: its beginning and its end."""
    return message if len(message) <= MAX_MESSAGE else f"{message[:700]} ... {message[-250:]}"


@contextlib.contextmanager
def only_our_errors(path: Path) -> Iterator[None]:
    """Whatever goes wrong within is a LlamaError of bounded length that names `path`, or FileNotFoundError."""
    try:
        yield
    except FileNotFoundError:
        raise
    except LlamaError as error:
        if len(str(error)) <= MAX_MESSAGE:
            raise
        raise LlamaError(shortened(str(error))) from error
    except Exception as error:  # a file's impossible values fail in any class, where no check has met them
        found = f"{path}: not readable ({type(error).__name__}: {str(error)[:300]})"
        raise LlamaError(f"{found}; expected a checkpoint, whole and unchanged") from error


def format_error(path: Path, found: str, expected: str) -> LlamaError:
    """An error about a file: where, what was found, what should be there."""
    return LlamaError(shortened(f"{path}: {found}; expected {expected}"))


def first_few(names: Iterable[str], limit: int = 5) -> str:
    """The first `limit` names and the number of the others, for a message."""
    listed = list(names)
    return ", ".join(listed[:limit]) + (f" and {len(listed) - limit} more" if len(listed) > limit else "")


def read_head(path: Path, expected: str) -> bytes:
    """The first 64 bytes of a file; LlamaError where it is what a failed download leaves."""
    if not path.exists():
        raise FileNotFoundError(f"{path.absolute()}: no such file; expected {expected}")
    if not path.is_file():
        raise format_error(path, "not a file", expected)
    with path.open("rb") as file:
        head = file.read(64)
    if not head:
        raise format_error(path, "the file is empty (0 bytes)", expected)
    if head.startswith(b"version https://git-lfs"):
        raise format_error(path, "a Git LFS pointer, not the file it stands for (run `git lfs pull`)", expected)
    if head.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        raise format_error(path, "a web page (HTML), as a failed or refused download leaves it", expected)
    return head


class Stamp(NamedTuple):
    """What tells that a file is the one it was, and has not been written to."""

    device: int
    inode: int
    size: int
    written: int  # in nanoseconds


def stamp(path: Path) -> Stamp | None:
    """The file's as it is now; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return Stamp(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


@contextlib.contextmanager
def one_version(path: Path) -> Iterator[None]:
    """LlamaError where the file was replaced or written to within: header and values would be of two versions."""
    before = stamp(path)
    yield
    if stamp(path) != before:
        raise format_error(
            path, "the file changed while it was read", "one that nobody writes: try again once it is whole"
        )


def parse_json(data: bytes) -> Any:
    """The value of JSON in UTF-8. ValueError, also for a key twice in one object: readers differ in which counts."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"the key {next(name for name in made if names.count(name) > 1)!r:.80} twice")
        return made

    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=unique)
    except RecursionError as error:
        raise ValueError(f"nested too deep: {error}") from error


def read_json(path: Path, expected: str) -> dict[str, Any]:
    """A JSON file that holds an object, of at most MAX_JSON bytes."""
    read_head(path, expected)
    size = path.stat().st_size
    if size > MAX_JSON:
        raise format_error(path, f"{size} bytes of JSON", f"{expected}, of at most {MAX_JSON} bytes")
    try:
        value = parse_json(path.read_bytes())
    except ValueError as error:
        raise format_error(path, f"no valid JSON ({error})", expected) from error
    if not isinstance(value, dict):
        raise format_error(path, f"a JSON {type(value).__name__}", f"{expected}, a JSON object")
    return value


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Indented by two, with a newline at the end."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
