"""What is there stays: targets that appear meanwhile, links, full disks, files that cannot be written."""

import contextlib
import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkpoint_files as files
import pytest
import torch
from helpers import build_golden

from llama.checkpoint import hf, open_checkpoint
from llama.checkpoint.convert import WRITERS
from llama.cli.chat import _run_command
from llama.cli.convert import convert
from llama.cli.output import replace_file
from llama.errors import LlamaError
from llama.serving.conversation import Conversation


@pytest.fixture
def source(tmp_path: Path) -> str:
    return str(files.write_meta(tmp_path / "src", files.weights(dtype=torch.bfloat16)))


@contextlib.contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """As a full disk or a quota: no file of this process grows beyond `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def meanwhile(monkeypatch: pytest.MonkeyPatch, happen: Any) -> None:
    """Once the next conversion has begun to write."""

    def write(source: Any, folder: Path) -> None:
        monkeypatch.undo()
        happen()
        hf.write(source, folder)

    monkeypatch.setitem(WRITERS, "hf", write)


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_that_appears_meanwhile_stays(
    tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch, force: bool
) -> None:
    target = tmp_path / "dst"

    def appear() -> None:
        target.mkdir()
        (target / "thesis.tex").write_text("years of work")

    meanwhile(monkeypatch, appear)
    with pytest.raises(LlamaError, match="dst appeared"):
        convert(source, str(target), "hf", force=force)
    assert names(target) == ["thesis.tex"] and names(tmp_path) == ["dst", "src"]


@pytest.mark.parametrize("what", ["file", "link"])
def test_what_else_appears_meanwhile_stays(
    tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    target, other = tmp_path / "dst", tmp_path / "other"
    other.mkdir()
    meanwhile(monkeypatch, lambda: target.write_text("x") if what == "file" else target.symlink_to(other))
    with pytest.raises(LlamaError, match="dst appeared"):
        convert(source, str(target), "hf")
    assert os.path.lexists(target) and names(other) == []


@pytest.mark.parametrize("there", [False, True], ids=["new", "force"])
def test_of_two_converts_at_once_one_fails(
    tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    target = str(tmp_path / "dst")
    if there:
        convert(source, target, "meta")
    meanwhile(monkeypatch, lambda: convert(source, target, "llama2c" if not there else "hf", force=there))
    with pytest.raises(LlamaError, match="dst (appeared|was replaced)"):
        convert(source, target, "hf", force=there)
    assert open_checkpoint(target).format == ("hf" if there else "llama2c")
    assert names(tmp_path) == ["dst", "src"]


def test_a_file_that_is_put_into_the_folder_that_is_replaced(
    tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "dst"
    convert(source, str(target), "meta")
    meanwhile(monkeypatch, lambda: (target / "thesis.tex").write_text("years of work"))
    with pytest.raises(LlamaError, match=r"thesis\.tex"):
        convert(source, str(target), "hf", force=True)
    assert (target / "thesis.tex").exists() and open_checkpoint(target).format == "meta"
    assert names(tmp_path) == ["dst", "src"]


def test_a_source_of_links_into_the_target(tmp_path: Path, source: str) -> None:
    links = tmp_path / "links"
    links.mkdir()
    for path in Path(source).iterdir():
        (links / path.name).symlink_to(path)
    with pytest.raises(LlamaError, match="are links into"):
        convert(str(links), source, "hf", force=True)
    assert names(Path(source)) == ["consolidated.00.pth", "params.json"]


@pytest.mark.parametrize("to", ["meta", "hf", "llama2c"])
def test_a_full_disk_is_one_line(tmp_path: Path, source: str, to: str) -> None:
    with file_size_limit(3000), pytest.raises(LlamaError, match="cannot write .*dst") as error:
        convert(source, str(tmp_path / "dst"), to)
    assert "\n" not in str(error.value) and len(str(error.value)) < 600
    assert names(tmp_path) == ["src"]


def test_names_that_are_too_long_or_just_not(tmp_path: Path, source: str) -> None:
    convert(source, str(tmp_path / ("n" * 255)), "hf")
    (tmp_path / "file").touch()
    with pytest.raises(LlamaError, match="cannot write"):
        convert(source, str(tmp_path / ("n" * 256)), "hf")
    with pytest.raises(LlamaError, match="cannot write"):
        convert(source, str(tmp_path / "file" / "below"), "hf")


# ---------------------------------------------------------------------------------------- single files


def test_a_file_that_cannot_be_written_keeps_its_old_content(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("old")
    path.chmod(0o640)
    with file_size_limit(1000), pytest.raises(OSError, match="too large"):
        replace_file(str(path), "new" * 1000)
    with pytest.raises(ValueError, match="surrogates"):
        replace_file(str(path), "\ud800")
    assert path.read_text() == "old" and names(tmp_path) == ["page.html"]
    (tmp_path / "link").symlink_to("page.html")
    replace_file(str(tmp_path / "link"), "new")
    assert path.read_text() == "new" and path.stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "link").is_symlink() and names(tmp_path) == ["link", "page.html"]
    replace_file(str(tmp_path / ("n" * 255)), "new")
    os.mkfifo(tmp_path / "pipe")
    for wrong in (tmp_path / "pipe", tmp_path, tmp_path / "nowhere" / "file", tmp_path / ("n" * 256)):
        with pytest.raises(OSError):
            replace_file(str(wrong), "new")


def test_save_keeps_the_old_conversation(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    path.write_text("old")
    with build_golden() as generator:
        conversation = Conversation(generator)
        conversation.dialog = [{"role": "user", "content": "a" * 3000}, {"role": "assistant", "content": "b"}]
        with file_size_limit(1000):
            assert _run_command(conversation, f"/save {path}").startswith("(cannot save")
        conversation.dialog[1]["content"] = "\ud800"
        assert _run_command(conversation, f"/save {path}").startswith("(cannot save")
        assert path.read_text() == "old" and names(tmp_path) == ["talk.json"]
        conversation.dialog[1]["content"] = "b"
        assert _run_command(conversation, f"/save {path}").startswith("(saved 2")
        assert len(json.loads(path.read_text())) == 2
