"""The process that renders one chat template (sandbox.py), as its owner sees it: started when needed, bounded."""

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

from ..errors import LlamaError

OLDEST = (3, 1, 6)  # of jinja2: in older ones templates can leave the sandbox
SECONDS = 2.0  # of CPU time for one rendering, which takes a millisecond
WAIT = 60.0  # seconds by the clock, on a machine however busy
MEMORY = 512 * 2**20  # bytes of address space
LONGEST = 8_000_000  # characters of a prompt
LONGEST_TEMPLATE = 500_000  # characters; the longest in use have some twenty thousand


class RenderError(LlamaError):
    """Why a template gave no prompt; `raised` where it refused the dialog in its own words."""

    def __init__(self, message: str, raised: bool = False) -> None:
        super().__init__(message)
        self.raised = raised


def check_jinja2() -> None:
    """LlamaError that says what to install where the package for templates is missing, or so old that templates can
    break out of its sandbox.
    """
    found = importlib.util.find_spec("jinja2") and _version("jinja2")
    if not found or found < OLDEST:
        what = f"has in version {'.'.join(map(str, found))}" if found else "cannot import"
        raise LlamaError(
            f"the checkpoint's chat template needs the package jinja2, which {sys.executable} {what}; install it with: "
            f"{sys.executable} -m pip install 'jinja2>=3.1.6' (llama's extra 'jinja2'), or choose another chat_format"
        )


def _version(package: str) -> tuple[int, ...]:
    """The numbers of an installed version; OLDEST where they are not known."""
    try:
        return tuple(map(int, re.findall(r"\d+", importlib.metadata.version(package))[:3]))
    except importlib.metadata.PackageNotFoundError:
        return OLDEST


class TemplateProcess:
    """Renders a template's prompts in a process of its own, which bounds time, memory and output: `RenderError`.

    Any thread may call; a copy, and a forked child, start a process of their own. It ends with this object.
    """

    def __init__(self, source: str, pieces: list[str]) -> None:
        self._source, self._pieces = source, pieces
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # whose child the process is
        self._roles: frozenset[str] = frozenset()
        self._broken: str | None = None  # why the template cannot be used at all

    def __getstate__(self) -> dict[str, Any]:
        return {"_source": self._source, "_pieces": self._pieces}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._reset()

    def roles(self) -> frozenset[str]:
        """The roles that the template names."""
        with self._lock:
            self._running()
            return self._roles

    def render(self, messages: Any, variables: dict[str, str], add_generation_prompt: bool) -> list[str | int]:
        """The prompt as texts and places of control pieces in the list that was given."""
        request = {"messages": messages, "variables": variables, "add_generation_prompt": add_generation_prompt}
        with self._lock:
            found: list[str | int] = self._exchange(self._running(), [request])["parts"]
        return found

    def _running(self) -> "subprocess.Popen[bytes]":
        """The process, with the template compiled in it."""
        if self._process is not None and self._owner == os.getpid() and self._process.poll() is None:
            return self._process
        check_jinja2()
        if len(self._source) > LONGEST_TEMPLATE:
            self._broken = f"it has {len(self._source)} characters, and may have {LONGEST_TEMPLATE}"
        if self._broken is not None:
            raise RenderError(self._broken)
        process = _start()
        weakref.finalize(self, _end, process, os.getpid())
        settings = {"path": sys.path, "memory": MEMORY, "seconds": SECONDS}
        load = {"source": self._source, "pieces": self._pieces, "longest": LONGEST}
        try:
            self._roles = frozenset(self._exchange(process, [settings, load])["roles"])
        except RenderError as error:
            self._broken = str(error)
            _end(process, os.getpid())
            raise
        self._process, self._owner = process, os.getpid()
        return process

    def _exchange(self, process: "subprocess.Popen[bytes]", requests: list[dict[str, Any]]) -> dict[str, Any]:
        """The reply to the requests, of which only the last has one. Where none comes the process is ended."""
        clock = threading.Timer(WAIT, process.kill)
        clock.daemon = True
        clock.start()
        try:
            reply = _talk(process, requests)
        except (OSError, EOFError, ValueError) as error:
            self._process = None
            _end(process, os.getpid())
            raise RenderError(
                f"it takes more than {SECONDS:g} seconds of computing, or ended its process ({process.returncode})"
            ) from error
        except BaseException:  # Ctrl-C between question and answer
            self._process = None
            _end(process, os.getpid())
            raise
        finally:
            clock.cancel()
        if "error" in reply or "raised" in reply:
            raise RenderError(str(reply.get("raised", reply.get("error"))), "raised" in reply)
        return reply


def _start() -> "subprocess.Popen[bytes]":
    """A fresh interpreter that knows nothing of this one, its signals and its terminal."""
    if not sys.executable:
        raise RenderError("this program knows no Python interpreter (sys.executable) to start for it")
    command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("sandbox.py"))]
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    try:
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nothing, start_new_session=True, bufsize=-1)
    except OSError as error:
        raise RenderError(f"no process could be started for it: {error!s:.200}") from error


def _talk(process: "subprocess.Popen[bytes]", messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Send them all and read the one reply. EOFError where the process has ended."""
    assert process.stdin is not None and process.stdout is not None
    for message in messages:
        data = json.dumps(message).encode()
        process.stdin.write(len(data).to_bytes(4, "little") + data)
    process.stdin.flush()
    size = int.from_bytes(process.stdout.read(4), "little")
    data = process.stdout.read(size)
    if not data or len(data) != size:
        raise EOFError
    reply: dict[str, Any] = json.loads(data)
    return reply


def _end(process: "subprocess.Popen[bytes]", owner: int) -> None:
    """Kill and bury it; a forked child leaves its parent's alone."""
    if os.getpid() != owner:
        return
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
