"""python -m llama {complete, chat, trace, convert, info, bench}: `--help` after any of them shows its options."""

import logging
import os
import sys

from .cli.arguments import parse_arguments
from .cli.bench import bench
from .cli.chat import chat
from .cli.complete import complete
from .cli.convert import convert
from .cli.info import info
from .cli.output import PrintableRecords, printable
from .cli.trace import trace
from .distributed import choose_threads
from .errors import LlamaError

COMMANDS = {command.__name__: command for command in (complete, chat, trace, convert, info, bench)}


def main() -> None:
    """Run the command in `sys.argv`. Exit codes: 1 for an error, reported in one line on stderr; 2 for wrong arguments;
    130 after Ctrl-C; 141 if the reader of stdout has gone, as after `| head`.
    """
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # not None, as when the parent process closed it
            stream.reconfigure(errors="replace")  # for terminals without UTF-8
    logging.getLogger("llama").addFilter(PrintableRecords())
    try:
        command, options = parse_arguments(COMMANDS, sys.argv[1:])
        choose_threads()
        command(**options)
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's own flush at exit
        sys.exit(141)  # what a shell reports for SIGPIPE
    except (LlamaError, OSError) as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
