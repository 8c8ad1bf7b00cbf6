"""argparse for plain functions: options from the signature, help from the docstring and its "Args:" section."""

import argparse
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NoReturn, get_args, get_origin

from ..arguments import nearest
from .output import printable

Command = Callable[..., None]


class _Parser(argparse.ArgumentParser):
    """Never guesses an option from its first letters; leaves defaults to the function; reports an error in one line."""

    def __init__(self, **settings: Any) -> None:
        layout = argparse.RawDescriptionHelpFormatter
        super().__init__(allow_abbrev=False, argument_default=argparse.SUPPRESS, formatter_class=layout, **settings)

    def error(self, message: str) -> NoReturn:
        self.exit(2, printable(f"error: {message} (see {self.prog} --help)\n"))


def parse_arguments(commands: Mapping[str, Command], argv: Sequence[str]) -> tuple[Command, dict[str, Any]]:
    """The command that `argv` names and the keyword arguments given for it.

    Exits with 0 after --help and --version, and with 2, after one line on stderr, if the arguments are wrong.
    """
    parser = _Parser(prog="python -m llama", description="Llama 2 on the command line.")
    parser.add_argument("--version", action="version", version=f"llama {installed_version()}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    for name, function in commands.items():
        description, _, section = (inspect.getdoc(function) or "").partition("\n\nArgs:\n")
        command = subparsers.add_parser(name, help=description.partition("\n")[0], description=description)
        texts = dict(re.findall(r"^    (\w+): (.+(?:\n     .+)*)", section, re.MULTILINE))
        for index, parameter in enumerate(inspect.signature(function).parameters.values()):
            _add_argument(command, parameter, " ".join(texts[parameter.name].split()), index == 0)
    options, unknown = parser.parse_known_args(argv or ["--help"])
    name = options.__dict__.pop("command")
    if unknown and unknown[0].startswith("-"):
        given = unknown[0].partition("=")[0]
        known = [f"--{option}" for option in inspect.signature(commands[name]).parameters]
        hint = nearest(given.replace("-", "_").replace("__", "--", 1), known)
        subparsers.choices[name].error(f"{name} has no option {given}; {hint}it takes {', '.join(known)}")
    if unknown:
        subparsers.choices[name].error(f"unexpected argument {unknown[0]!r}: text with spaces needs quotes")
    return commands[name], vars(options)


def _add_argument(parser: argparse.ArgumentParser, parameter: inspect.Parameter, text: str, first: bool) -> None:
    """--max_gen_len N (or --max-gen-len N); --compile, --no-compile and --nocompile for a bool; --lora A --lora B for a
    list. Required parameters go by position, the first one by position or by name.
    """
    name, default, hidden, text = parameter.name, parameter.default, argparse.SUPPRESS, text.replace("%", "%%")
    types = get_args(parameter.annotation) or (parameter.annotation,)
    lists = [get_args(kind)[0] for kind in types if get_origin(kind) is list]
    if bool in types:
        parser.add_argument(f"--{name}", action="store_true", help=text)
        for negative in (f"--no-{name}", f"--no{name}"):
            parser.add_argument(negative, dest=name, action="store_false", help=hidden)
        return
    value: dict[str, Any] = {
        "type": next(t for t in (str, int, float) if t in [*types, *lists]),
        "metavar": name.upper(),
    }
    if lists:
        value["action"] = "append"
    if default is parameter.empty:
        parser.add_argument(name, help=text, **value)
        return
    text += "" if default is None else f" Default: {default}."
    parser.add_argument(f"--{name}", help=text, **value)
    if "_" in name:
        parser.add_argument("--" + name.replace("_", "-"), dest=name, help=hidden, **value)
    if first:
        parser.add_argument(name, nargs="?", help=f"same as --{name}", **value)


def installed_version() -> str:
    """This package's version, from the metadata of its installation."""
    try:
        return version("llama")
    except PackageNotFoundError:  # a checkout on the path
        return "(not installed)"
