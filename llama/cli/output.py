"""What commands write: text that is safe to print, and files that take their place when they are whole."""

import errno
import logging
import os
import secrets
import shutil
import stat
from pathlib import Path

# A terminal obeys control characters; those that reorder or break lines would show another text than there is.
_CONTROLS = [*range(32), *range(127, 160), 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_ESCAPED = {code: repr(chr(code))[1:-1] for code in _CONTROLS if chr(code) not in "\n\t"}


def printable(text: object) -> str:
    """Text that does nothing to a terminal but stand there: control characters as Python writes them (`\\x1b`), only
    newline and tab as they are. Character by character, so that chunks of a text may be given one by one.
    """
    return str(text).translate(_ESCAPED)


class PrintableRecords(logging.Filter):
    """Makes the messages of a logger printable."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Always True."""
        record.msg, record.args = printable(record.getMessage()), None
        return True


def read_regular_file(path: str, limit: int) -> str:
    """A text file of at most `limit` bytes. OSError as `open` raises it, ValueError for what is larger or no UTF-8."""
    descriptor = os.open(Path(path).expanduser(), os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # waits for no pipe
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("not a regular file")
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"larger than {limit} bytes")
    return data.decode()


def replace_file(path: str, text: str) -> None:
    """Write a text file beside its place and move it there: whatever fails, what was there stays. A link is followed.

    OSError as `open` raises it, ValueError for what UTF-8 cannot write.
    """
    data = text.encode()
    target = Path(os.path.realpath(Path(path).expanduser()))
    if target.exists():
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not target.is_file():
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if not os.access(target, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    name = target.name.encode()[:200].decode(errors="ignore")  # names have 255 bytes at most
    beside = target.with_name(f".{name}.{secrets.token_hex(4)}")
    try:
        with beside.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, beside)
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)
