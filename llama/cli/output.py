"""What commands write: text that is safe to print, and files that take their place when they are whole."""

import errno
import os
import secrets
import shutil
from pathlib import Path


def replace_file(path: str, text: str) -> None:
    """Write a text file beside its place and move it there: whatever fails, what was there stays. A link is followed.

    OSError as `open` raises it, ValueError for what UTF-8 cannot write.
    """
    data = text.encode()
    target = Path(os.path.realpath(Path(path).expanduser()))
    if target.exists():
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
