"""python -m llama {complete, chat, trace, convert, info, bench}; `--help` behind each of them says what it takes."""

import sys
from collections.abc import Callable
from typing import Any

import fire  # type: ignore[import-untyped]

from .cli.bench import bench
from .cli.convert import convert
from .cli.info import info
from .cli.terminal import arguments, chat, complete, reader_may_leave
from .cli.trace import trace
from .errors import LlamaError

_COMMANDS: dict[str, Callable[..., Any]] = {
    "complete": complete,
    "chat": chat,
    "trace": trace,
    "convert": convert,
    "info": info,
    "bench": bench,
}


def main() -> None:
    """The command line; a mistake is one line on stderr and exit status 1."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # closed by who started us
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal that knows no UTF-8
    try:
        with reader_may_leave():
            fire.Fire(_COMMANDS, command=arguments(_COMMANDS, sys.argv[1:]), name="llama")
    except (LlamaError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
