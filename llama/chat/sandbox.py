"""Renders a chat template in a process of its own: run as a script, it answers requests on stdin until that ends.

Templates are programs by strangers. `jinja2`'s immutable sandbox keeps them from the interpreter; the process bounds
their CPU time and memory and dies where they exceed them, whatever they are at. Each request and reply is its length in
four bytes and JSON. `TemplateProcess` in renderer.py is the other end.
"""

import datetime
import json
import random
import re
import secrets
import sys
from collections.abc import Iterator
from typing import Any

MATCHING = {"split", "rsplit", "partition", "rpartition", "startswith", "endswith", "strip", "lstrip", "rstrip"}
MATCHING |= {"find", "rfind", "index", "rindex", "count", "replace", "removeprefix", "removesuffix", "get"}
PRIVATE, PRIVATE_SIZE = 0xF0000, 60_000  # characters for private use, planes 15 and 16
TOO_LONG = "its output exceeds {} characters"


class TooLong(Exception):
    """The output outgrew its bound."""


class Marks:
    """Stand-ins for control pieces in the template's own text: five private characters that nothing else can hold,
    since three of them are drawn at random here.
    """

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces
        self.places = {piece: i for i, piece in enumerate(pieces)}
        longest_first = sorted(filter(None, pieces), key=len, reverse=True)
        self.find_piece = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self.lead = "".join(chr(PRIVATE + 0x10000 + secrets.randbelow(PRIVATE_SIZE)) for _ in range(3))
        self.find_mark = re.compile(self.lead + "(..)", re.DOTALL)

    def put(self, text: str) -> str:
        """The text with marks for the control pieces in it."""
        return self.find_piece.sub(lambda match: self._mark(self.places[match.group()]), text)

    def _mark(self, place: int) -> str:
        high, low = divmod(place, PRIVATE_SIZE)
        return self.lead + chr(PRIVATE + high) + chr(PRIVATE + low)

    def split(self, text: str) -> list[str | int]:
        """The rendered text as what lies between the marks, and the marked pieces' places in the list."""
        parts: list[str | int] = []
        for i, part in enumerate(self.find_mark.split(text)):
            if i % 2 == 0:
                parts += [part] if part else []
            else:
                parts.append((ord(part[0]) - PRIVATE) * PRIVATE_SIZE + ord(part[1]) - PRIVATE)
        return parts

    def undo(self, parts: list[str | int]) -> str:
        """The text as it would be without marks."""
        return "".join(part if isinstance(part, str) else self.pieces[part] for part in parts)


class Program:
    """One template, compiled as it is and with marks in place of the control pieces that it writes itself."""

    def __init__(self, source: str, pieces: list[str], longest: int) -> None:
        self.marks, self.longest, self.now = Marks(pieces), longest, datetime.datetime.now()
        environment = make_environment(self)
        self.roles = sorted({role for role in roles(environment.parse(source)) if re.fullmatch("[a-z_]{2,32}", role)})
        self.plain = environment.from_string(source)
        marked = substitute(environment, environment.parse(source), self.marks.put)
        self.marked = environment.from_string(marked)

    def render(self, messages: Any, variables: dict[str, Any], add_generation_prompt: bool) -> list[str | int]:
        """The prompt as texts and control pieces (places in the list). ValueError where what the template writes
        depends on its own control pieces in a way that marks change.
        """
        self.now = datetime.datetime.now()
        options = {"messages": messages, "tools": None, "documents": None}
        options["add_generation_prompt"] = add_generation_prompt
        plain = self._run(self.plain, {**variables, **options})
        shown = {name: self.marks.put(text) if isinstance(text, str) else text for name, text in variables.items()}
        parts = self.marks.split(self._run(self.marked, {**shown, **options}))
        if self.marks.undo(parts) != plain:
            raise ValueError("it takes apart or compares control tokens in a way that text in a message could use")
        return parts

    def _run(self, template: Any, variables: dict[str, Any]) -> str:
        random.seed(0)  # the filter `random` draws alike in both renderings and on all ranks
        chunks, length = [], 0
        for chunk in template.generate(**variables):
            length += len(chunk)
            if length > self.longest:
                raise TooLong
            chunks.append(chunk)
        return "".join(chunks)


def make_environment(program: Program) -> Any:
    """The environment that transformers renders chat templates in."""
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox
    import jinja2.utils

    class Generation(jinja2.ext.Extension):
        """{% generation %} ... {% endgeneration %} is its body, in a scope of its own."""

        tags = {"generation"}  # noqa: RUF012  # as the base class has it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

        def _body(self, caller: Any) -> Any:
            return caller()

    class Namespace(jinja2.utils.Namespace):
        """Without names that begin with an underscore, which could reach into Python."""

        def __init__(*args: Any, **kwargs: Any) -> None:
            values = dict(*args[1:], **kwargs)
            for name in values:
                _check_public(name)
            jinja2.utils.Namespace.__init__(args[0], values)

        def __setitem__(self, name: str, value: Any) -> None:
            _check_public(name)
            super().__setitem__(name, value)

    def raise_exception(message: Any) -> None:
        raise jinja2.TemplateError(str(message))

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        layout: dict[str, Any] = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
        return json.dumps(value, ensure_ascii=ensure_ascii, **layout)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda layout: program.now.strftime(layout)
    environment.globals["dict"] = Dict()
    environment.globals["namespace"] = Namespace
    return environment


class Dict:
    """What templates call `dict`: the class itself would lead further into Python."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """As the class method, without the class."""
        return dict.fromkeys(*args)


def _check_public(name: Any) -> None:
    from jinja2.exceptions import SecurityError

    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r:.60}")


def roles(tree: Any) -> Iterator[str]:
    """The texts that a template compares with a role."""
    from jinja2 import nodes

    for comparison in tree.find_all((nodes.Compare, nodes.Test, nodes.Filter)):
        texts = [node.value for node in comparison.find_all(nodes.Const) if isinstance(node.value, str)]
        names = [node.attr for node in comparison.find_all(nodes.Getattr)]
        names += [node.name for node in comparison.find_all(nodes.Name)]
        if "role" in texts or "role" in names:
            yield from (text for text in texts if text != "role")


def substitute(environment: Any, tree: Any, put: Any) -> Any:
    """The template's tree with `put` of every text that it may write; what it only compares stays."""
    from jinja2 import nodes
    from jinja2.optimizer import optimize
    from jinja2.visitor import NodeTransformer

    class Substitute(NodeTransformer):
        def visit_TemplateData(self, node: Any) -> Any:
            return nodes.TemplateData(put(node.data), lineno=node.lineno, environment=environment)

        def visit_Const(self, node: Any) -> Any:
            if not isinstance(node.value, str):
                return node
            return nodes.Const(put(node.value), lineno=node.lineno, environment=environment)

        def visit_Compare(self, node: Any) -> Any:
            return node

        def visit_Test(self, node: Any) -> Any:
            return node

        def visit_Call(self, node: Any) -> Any:
            if not (isinstance(node.node, nodes.Getattr) and node.node.attr in MATCHING):
                return self.generic_visit(node)
            node.node = self.visit(node.node)
            node.args = node.args[:1] + [self.visit(argument) for argument in node.args[1:]]
            return node

        def visit_Filter(self, node: Any) -> Any:
            if node.name != "replace":
                return self.generic_visit(node)
            node.node = node.node and self.visit(node.node)
            node.args = node.args[:1] + [self.visit(argument) for argument in node.args[1:]]
            return node

    return Substitute().visit(optimize(tree, environment))


# ------------------------------------------------------------------------------------- the process


def read_request(stream: Any) -> Any:
    """The next request, None at the end."""
    head = stream.read(4)
    return json.loads(stream.read(int.from_bytes(head, "little"))) if len(head) == 4 else None


def write_reply(stream: Any, reply: dict[str, Any]) -> None:
    """Its length in four bytes, then JSON."""
    data = json.dumps(reply).encode()
    stream.write(len(data).to_bytes(4, "little") + data)
    stream.flush()


def bound_process(memory: int) -> None:
    """No more memory than that, no files written. Where the system has no such limits the other end's clock remains."""
    try:
        import resource
    except ImportError:
        return
    for what, limit in (("RLIMIT_AS", memory), ("RLIMIT_FSIZE", 0), ("RLIMIT_CORE", 0)):
        try:
            resource.setrlimit(getattr(resource, what), (limit, limit))
        except (AttributeError, ValueError, OSError):
            continue


def bound_time(seconds: float) -> None:
    """End this process after that much CPU time, with SIGPROF; 0 is no bound."""
    try:
        import signal

        signal.setitimer(signal.ITIMER_PROF, seconds)
    except (AttributeError, OSError, ValueError):
        return


def answer(program: Program | None, request: dict[str, Any]) -> tuple[Program | None, dict[str, Any]]:
    """The template as it is from now on, and the reply: {"roles"} or {"parts"}, or {"raised"} or {"error"}."""
    try:
        if program is None:
            program = Program(request["source"], request["pieces"], request["longest"])
            return program, {"roles": program.roles}
        return program, {"parts": program.render(**request)}
    except TooLong:
        return program, {"error": TOO_LONG.format(request.get("longest") or (program.longest if program else 0))}
    except MemoryError:
        return program, {"error": "it takes too much memory"}
    except Exception as error:
        named = type(error).__name__ == "TemplateError"  # `raise_exception`: the template's own words
        return program, {
            "raised" if named else "error": f"{'' if named else type(error).__name__ + ': '}{error!s:.400}"
        }


def main() -> None:
    """Settings first, then requests for one template, until stdin ends."""
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    settings = read_request(stdin)
    sys.path[:] = settings["path"]
    import jinja2.ext  # before the limits
    import jinja2.sandbox  # noqa: F401

    bound_process(settings["memory"])
    program: Program | None = None
    while (request := read_request(stdin)) is not None:
        bound_time(settings["seconds"])
        program, reply = answer(program, request)
        bound_time(0)
        write_reply(stdout, reply)


if __name__ == "__main__":
    main()
