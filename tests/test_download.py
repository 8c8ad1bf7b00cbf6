"""download.sh against a server on loopback: it gets what the server has, or says why not, and never tells the link."""

import contextlib
import hashlib
import http.server
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "download.sh"
SECRET = "SiGnAtUrE~never-shown_"
QUERY = f"Policy=eyJTdGF0ZW1lbnQi__&Signature={SECRET}&Key-Pair-Id=K15QRJLYKIFSLZ"
TOOLS = ["cat", "cut", "grep", "head", "mkdir", "mktemp", "mv", "rm", "sed", "sleep", "tail", "tr", "wc", "md5sum"]
SHARD = b"PK\x03\x04" + bytes(range(256)) * 800
FOLDER = "llama-2-7b"


def checklist(files: dict[str, bytes]) -> bytes:
    return "".join(f"{hashlib.md5(data).hexdigest()}  {name}\n" for name, data in files.items()).encode()


def site(folder: str = FOLDER, shards: int = 1, list_params: bool = True) -> dict[str, bytes]:
    """What Meta's server would hold for one model, small."""
    files = {f"consolidated.{i:02}.pth": SHARD + bytes([i]) for i in range(shards)}
    params = {"params.json": b'{"dim": 64, "vocab_size": -1}\n'}
    tokenizer = {"tokenizer.model": b"\n\x0e\n\x05<unk>\x15" + bytes(500)}
    pages = {f"{folder}/{name}": data for name, data in {**files, **params}.items()}
    pages[f"{folder}/checklist.chk"] = checklist({**files, **params} if list_params else files)
    return {**tokenizer, "tokenizer_checklist.chk": checklist(tokenizer), **pages}


@dataclass
class Site:
    """A server's pages, its misbehaviour by path, and what it was asked for."""

    base: str
    pages: dict[str, bytes]
    status: dict[str, int] = field(default_factory=dict)
    cut: dict[str, list[int]] = field(default_factory=dict)  # per request: stop after so many bytes
    no_ranges: bool = False
    pause: float = 0.0  # seconds, after every 20 kB
    location: str = ""
    asked: list[tuple[str, str | None]] = field(default_factory=list)  # (path, Range header)

    def url(self) -> str:
        return f"{self.base}/*?{QUERY}"

    def times(self, path: str) -> int:
        return sum(asked == path for asked, _ in self.asked)


class Handler(http.server.BaseHTTPRequestHandler):
    server: "Server"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def reply(self, status: int, body: bytes, headers: dict[str, str], limit: int | None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        for at in range(0, len(body[:limit]), 20_000):
            self.wfile.write(body[:limit][at : at + 20_000])
            time.sleep(self.server.site.pause)
        self.close_connection = True

    def do_GET(self) -> None:
        site = self.server.site
        path, _, query = self.path[1:].partition("?")
        wanted = self.headers.get("Range")
        site.asked.append((path, wanted))
        limits = site.cut.get(path, [])
        limit = limits.pop(0) if limits else None
        status = site.status.get(path, 200 if query == QUERY and path in site.pages else 403)
        if status != 200:
            moved = {"Location": site.location} if site.location else {}
            return self.reply(status, f"<Error>{self.path}</Error>".encode(), moved, None)
        body, start = site.pages[path], 0
        if wanted and not site.no_ranges:
            start = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1])  # type: ignore[index]
            if start >= len(body):
                return self.reply(416, b"", {"Content-Range": f"bytes */{len(body)}"}, None)
            part = {"Content-Range": f"bytes {start}-{len(body) - 1}/{len(body)}"}
            return self.reply(206, body[start:], part, limit)
        self.reply(200, body, {}, limit)


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    site: Site

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # a client that was stopped


def serve(pages: dict[str, bytes]) -> Server:
    server = Server(("127.0.0.1", 0), Handler)
    server.site = Site(f"http://127.0.0.1:{server.server_address[1]}", pages)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    return server


@pytest.fixture
def web() -> Iterator[Site]:
    server = serve(site())
    yield server.site
    server.shutdown()
    server.server_close()


def programs(folder: Path, names: list[str]) -> Path:
    """A folder to be the whole PATH, with links to these programs alone; `sleep` takes no time."""
    folder.mkdir(exist_ok=True)
    for name in names:
        found = shutil.which("true" if name == "sleep" else name)
        if found is None:
            pytest.skip(f"{name} is not installed here")
        (folder / name).symlink_to(found)
    return folder


def start(
    folder: Path, path: Path, web: Site, answers: str | None = None, shell: str = "sh"
) -> "subprocess.Popen[str]":
    argv = [str(shutil.which(word) or word) if i == 0 else word for i, word in enumerate(shell.split())]
    if shutil.which(shell.split()[0]) is None:
        pytest.skip(f"{shell} is not installed here")
    env = {"PATH": str(path), "LLAMA_DOWNLOAD_BASE": web.base, "no_proxy": "127.0.0.1", "HOME": str(folder)}
    env["TMPDIR"] = str(folder)
    process = subprocess.Popen(
        [*argv, str(SCRIPT)],
        cwd=folder,
        env=env,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it may end before it asks
        process.stdin.write(f"{web.url()}\n7B\n" if answers is None else answers)
        process.stdin.close()
    process.stdin = None
    return process


Download = Callable[..., tuple[int, str]]


@pytest.fixture(params=["curl", "wget"])
def download(request: pytest.FixtureRequest, tmp_path: Path, web: Site) -> Download:
    """Runs the script with one of the two clients and returns its exit status and all it printed."""
    path = programs(tmp_path / "bin", [*TOOLS, request.param])
    (tmp_path / "here").mkdir()

    def run(answers: str | None = None, shell: str = "sh") -> tuple[int, str]:
        process = start(tmp_path / "here", path, web, answers, shell)
        out, err = process.communicate(timeout=60)
        assert SECRET not in out + err and "Policy=ey" not in out + err
        left = {p.name for p in (tmp_path / "here").iterdir()} - {"tokenizer.model", "tokenizer_checklist.chk"}
        assert all(re.fullmatch(r"llama-2-.*|tokenizer.*\.part|\.wget-hsts", name) for name in left), left
        return process.returncode, out + err

    return run


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return tmp_path / "here"


def assert_complete(here: Path, pages: dict[str, bytes]) -> None:
    assert {str(p.relative_to(here)): p.read_bytes() for p in here.rglob("*") if p.is_file()} == pages


@pytest.mark.parametrize("shell", ["sh", "dash", "bash --posix", "bash"])
def test_fetches_a_model_and_a_second_run_fetches_no_file_again(
    download: Download, here: Path, web: Site, shell: str
) -> None:
    rc, text = download(shell=shell)
    assert rc == 0, text
    assert_complete(here, web.pages)
    web.asked.clear()
    rc, text = download(shell=shell)
    assert rc == 0 and text.count("complete") >= 3, text
    assert {path for path, _ in web.asked} == {"tokenizer_checklist.chk", f"{FOLDER}/checklist.chk"}
    assert_complete(here, web.pages)


@pytest.mark.parametrize(("model", "shards"), [("70B-chat", 8), ("13B", 2)])
def test_every_shard_of_the_larger_models(download: Download, here: Path, web: Site, model: str, shards: int) -> None:
    web.pages = site(f"llama-2-{model.lower()}", shards, list_params=False)
    rc, text = download(f"  {web.url()} \r\n {model.lower()} ,\n")  # trimmed, any case
    assert rc == 0, text
    assert_complete(here, web.pages)


def test_enter_means_all_models(download: Download, here: Path, web: Site) -> None:
    shards = {"7B": 1, "13B": 2, "70B": 8}
    for size, count in shards.items():
        web.pages.update(site(f"llama-2-{size.lower()}", count))
        web.pages.update(site(f"llama-2-{size.lower()}-chat", count))
    rc, text = download(f"{web.url()}\n")
    assert rc == 0, text
    assert_complete(here, web.pages)


@pytest.mark.parametrize("path", ["tokenizer_checklist.chk", f"{FOLDER}/consolidated.00.pth"])
@pytest.mark.parametrize("status", [403, 404, 500])
def test_an_http_error_stops_it(download: Download, here: Path, web: Site, path: str, status: int) -> None:
    web.status[path] = status
    rc, text = download()
    assert rc == 1 and path in text and f"status {status}" in text
    assert not (here / path).exists() and not (here / f"{path}.part").exists()
    assert web.times(path) == 1 and web.asked[-1][0] == path


@pytest.mark.parametrize("code", [301, 302, 307])
def test_a_redirect_to_another_host_is_refused(download: Download, web: Site, code: int) -> None:
    other = serve(site())
    web.location = f"{other.site.base}/{FOLDER}/params.json?{QUERY}"
    web.status[f"{FOLDER}/params.json"] = code
    rc, text = download()
    other.shutdown()
    other.server_close()
    assert rc == 1 and f"{FOLDER}/params.json" in text and f"status {code}" in text and "redirect" in text
    assert other.site.asked == []


@pytest.mark.parametrize("name", ["consolidated.00.pth", "params.json", "checklist.chk", "../tokenizer.model"])
def test_a_web_page_in_place_of_a_file_is_refused(download: Download, here: Path, web: Site, name: str) -> None:
    path = os.path.normpath(f"{FOLDER}/{name}")
    web.pages[path] = b"<!DOCTYPE html><html><body>Please sign in to the network</body></html>"
    rc, text = download()
    assert rc == 1 and path in text and "status 200" in text and "web page" in text
    assert not (here / path).exists() and not (here / f"{path}.part").exists()


@pytest.mark.parametrize("path", [f"{FOLDER}/consolidated.00.pth", "tokenizer.model"])
def test_a_flipped_byte_is_found(download: Download, here: Path, web: Site, path: str) -> None:
    good = web.pages[path]
    web.pages[path] = good[:100] + bytes([good[100] ^ 1]) + good[101:]
    rc, text = download()
    assert rc == 1 and path in text and "checksum" in text
    assert not (here / path).exists() and not (here / f"{path}.part").exists()
    web.pages[path] = good
    rc, text = download()
    assert rc == 0, text
    assert_complete(here, web.pages)


def test_a_file_damaged_on_disk_is_fetched_again(download: Download, here: Path, web: Site) -> None:
    assert download()[0] == 0
    shard = here / FOLDER / "consolidated.00.pth"
    shard.write_bytes(SHARD[:300] + b"!" + SHARD[301:])
    rc, text = download()
    assert rc == 0 and "starting over" in text, text
    assert_complete(here, web.pages)


def test_a_cut_transfer_goes_on_where_it_stopped(download: Download, here: Path, web: Site) -> None:
    path = f"{FOLDER}/consolidated.00.pth"
    web.cut[path] = [60_000, 50_000]
    rc, text = download()
    assert rc == 0 and "cut at 60000 bytes" in text, text
    assert [asked for name, asked in web.asked if name == path] == [None, "bytes=60000-", "bytes=110000-"]
    assert_complete(here, web.pages)


def test_a_second_run_goes_on_where_the_first_gave_up(download: Download, here: Path, web: Site) -> None:
    path = f"{FOLDER}/consolidated.00.pth"
    web.cut[path] = [60_000, 0]
    rc, text = download()
    assert rc == 1 and path in text and "Run this again" in text
    assert (here / f"{path}.part").stat().st_size == 60_000
    web.asked.clear()
    web.status[path] = 403  # the link expired in between: what is there is kept
    assert download()[0] == 1 and (here / f"{path}.part").stat().st_size == 60_000
    web.status.clear()
    rc, text = download()
    assert rc == 0, text
    assert web.asked[-1] == (path, "bytes=60000-")
    assert_complete(here, web.pages)


def test_a_complete_part_is_taken_as_it_is(download: Download, here: Path, web: Site) -> None:
    (here / FOLDER).mkdir()
    (here / FOLDER / "consolidated.00.pth.part").write_bytes(web.pages[f"{FOLDER}/consolidated.00.pth"])
    rc, text = download()
    assert rc == 0, text
    assert_complete(here, web.pages)


def test_a_server_that_cannot_continue(download: Download, here: Path, web: Site) -> None:
    web.no_ranges = True
    web.cut[f"{FOLDER}/consolidated.00.pth"] = [60_000]
    rc, text = download()
    assert rc == 0, text
    assert_complete(here, web.pages)


def test_a_network_that_wants_a_sign_in_costs_no_part(download: Download, here: Path, web: Site) -> None:
    """It answers anything with 200 and its page, also what asks to go on: the part of an earlier run stays."""
    path = f"{FOLDER}/consolidated.00.pth"
    web.cut[path] = [60_000, 0]
    assert download()[0] == 1
    good, web.no_ranges = web.pages[path], True
    web.pages[path] = b"<!DOCTYPE html><html><body>Please sign in to the network</body></html>"
    rc, text = download()
    assert rc == 1 and path in text and "web page" in text
    assert (here / f"{path}.part").read_bytes() == good[:60_000]
    web.pages[path], web.no_ranges = good, False
    web.asked.clear()
    rc, text = download()
    assert rc == 0 and (path, "bytes=60000-") in web.asked, text
    assert_complete(here, web.pages)


@pytest.mark.parametrize("name", ["consolidated.00.pth", "consolidated.00.pth.part", "params.json", "checklist.chk"])
def test_a_folder_in_the_place_of_a_file(download: Download, here: Path, name: str) -> None:
    (here / FOLDER / name).mkdir(parents=True)
    rc, text = download()
    assert rc == 1 and f"{FOLDER}/{name} is in the way" in text and "Done" not in text
    assert list((here / FOLDER / name).iterdir()) == []


def test_a_byte_for_each_connection_is_given_up(download: Download, web: Site) -> None:
    path = f"{FOLDER}/consolidated.00.pth"
    web.cut[path] = [1] * 1000
    rc, text = download()
    assert rc == 1 and path in text and "Run this again" in text
    assert web.times(path) == 21


def test_a_server_that_is_not_there(download: Download, web: Site) -> None:
    gone = serve({})
    gone.shutdown()
    gone.server_close()
    web.base = gone.site.base
    rc, text = download()
    assert rc == 1 and web.base.removeprefix("http://") in text and "no answer" in text


def test_when_stopped_it_ends_the_transfer_and_keeps_the_part(tmp_path: Path, web: Site) -> None:
    path = programs(tmp_path / "bin", [*TOOLS, "curl"])
    web.pause = 0.2
    part = tmp_path / FOLDER / "consolidated.00.pth.part"
    process = start(tmp_path, path, web)
    deadline = time.monotonic() + 30
    while not (part.exists() and part.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=10)
    size = part.stat().st_size
    assert process.returncode == 130 and "run it again" in err and SECRET not in out + err
    time.sleep(0.5)
    assert 0 < part.stat().st_size == size < len(SHARD)
    assert {p.name for p in tmp_path.iterdir() if p.is_dir()} == {"bin", FOLDER}  # its temporary folder is gone


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "no link"),
        ("   ", "no link"),
        (f"https://elsewhere.example/*?{QUERY}", "not the link"),
        (f"BASE/llama-2-7b/params.json?{QUERY}", "asterisk"),
        (f"BASE/*?Policy=eyJ&Signature={SECRET}", "no Key-Pair-Id"),
        ("BASE/*?Policy=eyJ&Signature=&Key-Pair-Id=K1", "no Signature"),
        (f"BASE/*?{QUERY} 7B", "character"),
        (f'BASE/*?{QUERY}"', "character"),
        (f"BASE/*?{QUERY}*", "character"),
    ],
)
def test_a_link_of_another_form_is_refused(download: Download, web: Site, url: str, words: str) -> None:
    rc, text = download(url.replace("BASE", web.base) + "\n7B\n")
    assert rc == 1 and words in text and web.asked == []


def test_only_metas_host_without_the_variable(tmp_path: Path, web: Site) -> None:
    path = programs(tmp_path / "bin", [*TOOLS, "curl"])
    real = web.base
    web.base = ""  # an empty variable counts as none
    process = start(tmp_path, path, web, f"{real}/*?{QUERY}\n7B\n")
    _, err = process.communicate(timeout=20)
    assert process.returncode == 1 and "https://download.llamameta.net/*?Policy=" in err and SECRET not in err
    assert web.asked == []


def test_an_unknown_model_is_named(download: Download, web: Site) -> None:
    rc, text = download(f"{web.url()}\n7B,8B\n")
    assert rc == 1 and "'8b'" in text and "70B-chat" in text and web.asked == []
    rc, text = download(f"{web.url()}\n*\n")
    assert rc == 1 and "'*'" in text and web.asked == []


def test_names_what_is_missing_before_it_asks(tmp_path: Path, web: Site) -> None:
    process = start(tmp_path, programs(tmp_path / "bin", ["cat", "head", "grep"]), web)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 1 and out == "" and web.asked == []
    assert {"mktemp", "sed", "curl-or-GNU-wget", "md5sum-or-md5"} <= set(err.replace(".", " ").split())


def test_checks_with_md5_where_there_is_no_md5sum(tmp_path: Path, web: Site) -> None:
    """As on macOS, whose md5 prints the sum alone when asked with -q."""
    path = programs(tmp_path / "bin", [*(tool for tool in TOOLS if tool != "md5sum"), "curl"])
    md5 = path / "md5"
    md5.write_text(f'#!/bin/sh\n[ "$1" = -q ] || exit 1\n{shutil.which("md5sum")} "$2" | cut -c1-32\n')
    md5.chmod(0o755)
    process = start(tmp_path, path, web)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 0, out + err
    (tmp_path / FOLDER / "params.json").write_text("{}")
    process = start(tmp_path, path, web)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 0 and "damaged" in out, out + err


@pytest.mark.parametrize("client", ["curl", "wget"])
def test_no_list_of_processes_shows_the_link(tmp_path: Path, web: Site, client: str) -> None:
    if not Path("/proc/self/cmdline").exists():
        pytest.skip("this system has no /proc to read command lines from")
    path = programs(tmp_path / "bin", [*TOOLS, client])
    web.pause = 0.05
    process = start(tmp_path, path, web)
    seen: list[str] = []
    while process.poll() is None:
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                seen.append(entry.read_bytes().decode(errors="replace"))
            except OSError:  # it ended meanwhile
                continue
        time.sleep(0.02)
    process.communicate()
    assert process.returncode == 0
    assert any(line.startswith(f"{client}\0") for line in seen), "the client was never seen: this test shows nothing"
    assert not [line for line in seen if SECRET in line]
