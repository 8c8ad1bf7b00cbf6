"""Files that change under us, and links that lead out of a stranger's folder."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint_files as files
import pytest
import torch
from helpers import build_golden

from llama import Tokenizer
from llama.checkpoint import open_checkpoint, pth, safetensors
from llama.checkpoint.convert import write_checkpoint
from llama.checkpoint.source import Source
from llama.errors import LlamaError

OLD, NEW = files.weights(), files.weights(seed=1)
WRITERS: dict[str, Callable[[Path, Any], Path]] = {
    "meta": files.write_meta,
    "hf": files.write_hf,
    "llama2c": lambda path, weights: files.write_llama2c(path.with_suffix(".bin"), weights),
    "training": lambda path, weights: files.write_training(path.with_suffix(".pt"), weights),
}


def weights_file(path: Path) -> Path:
    return path if path.is_file() else next(file for file in path.iterdir() if file.suffix in (".pth", ".safetensors"))


@pytest.fixture(params=WRITERS)
def both(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, bytes]:
    """A checkpoint, and what another program would write over its file of weights."""
    write = WRITERS[request.param]
    other = weights_file(write(tmp_path / "other", NEW)).read_bytes()
    return write(tmp_path / "model", OLD), other


def test_a_file_written_to_after_it_was_opened(both: tuple[Path, bytes]) -> None:
    path, other = both
    checkpoint = open_checkpoint(path)
    assert torch.equal(checkpoint.read("norm.weight"), OLD["norm.weight"])
    weights_file(path).write_bytes(other)
    with pytest.raises(LlamaError, match="written to after it was opened"):
        checkpoint.read("norm.weight")


def test_a_file_cut_after_it_was_opened(both: tuple[Path, bytes]) -> None:
    """Its pages would be a SIGBUS."""
    checkpoint = open_checkpoint(both[0])
    os.truncate(weights_file(both[0]), 10)
    with pytest.raises(LlamaError, match="written to after it was opened"):
        checkpoint.read("layers.1.feed_forward.w2.weight")


def test_a_file_with_another_in_its_place_stays_as_it_was(both: tuple[Path, bytes], tmp_path: Path) -> None:
    path, other = both
    checkpoint = open_checkpoint(path)
    (tmp_path / "x").write_bytes(other)
    (tmp_path / "x").replace(weights_file(path))
    assert torch.equal(checkpoint.read("norm.weight"), OLD["norm.weight"])
    assert torch.equal(open_checkpoint(path).read("norm.weight"), NEW["norm.weight"])


@pytest.mark.parametrize("name", ["meta", "hf"])
def test_a_file_replaced_between_its_header_and_its_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    module: Any = {"meta": pth, "hf": safetensors}[name]
    path, other = (WRITERS[name](tmp_path / folder, weights) for folder, weights in (("model", OLD), ("other", NEW)))
    map_file = module.map_file

    def replaced_first(file: Path) -> Any:
        weights_file(other).replace(file)
        return map_file(file)

    monkeypatch.setattr(module, "map_file", replaced_first)
    with pytest.raises(LlamaError, match="changed while it was read"):
        open_checkpoint(path)


def test_convert_while_the_source_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last weight was read; nothing is left of a folder that would be half old and half new."""
    path, target, read = files.write_meta(tmp_path / "model", OLD), tmp_path / "made", Source.read

    def written(source: Source, name: str, rank: int = 0, world: int = 1) -> torch.Tensor:
        found = read(source, name, rank, world)
        if name == source.checkpoint.names()[-1]:
            os.utime(path / "consolidated.00.pth", ns=(1, 1))
        return found

    monkeypatch.setattr(Source, "read", written)
    with pytest.raises(LlamaError, match="written to after it was opened"):
        write_checkpoint(Source(open_checkpoint(path)), target, "hf")
    assert not target.exists() and sorted(p.name for p in tmp_path.iterdir()) == ["model"]


# ---------------------------------------------------------------------------------------------- links


@pytest.mark.parametrize("name", ["notes.md", "LICENSE", "tokenizer_config.json", "tokenizer.model"])
def test_convert_copies_nothing_from_outside(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    """A link `notes.md` to a private key would go with the folder to wherever that is uploaded."""
    (tmp_path / "key").write_text("secret")
    path = files.write_hf(tmp_path / "model", OLD)
    (path / name).symlink_to(tmp_path / "key")
    (path / "README.md").write_text("kept")
    with caplog.at_level(logging.WARNING):
        write_checkpoint(Source(open_checkpoint(path)), tmp_path / "made", "meta")
    assert f"{path / name} is a link out of its folder" in caplog.text
    made = {file.name: file.read_bytes() for file in (tmp_path / "made").iterdir()}
    assert made["README.md"] == b"kept" and b"secret" not in made.values() and name not in made


def test_links_that_are_no_way_out(tmp_path: Path) -> None:
    """Those of the Hub's cache, those within the folder, and one to a vocabulary."""
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    files.write_hf(folder, OLD)
    blobs.mkdir()
    (blobs / "1").write_text("a")
    (folder / "README.md").symlink_to("../../blobs/1")
    (folder / "b.txt").write_text("b")
    (folder / "c.txt").symlink_to("b.txt")
    (folder / "tokenizer.model").symlink_to(Path(__file__).resolve().parent.parent / "checkpoints/demo/tokenizer.model")
    write_checkpoint(Source(open_checkpoint(folder)), tmp_path / "made", "meta")
    assert {"README.md", "b.txt", "c.txt", "tokenizer.model"} <= {file.name for file in (tmp_path / "made").iterdir()}


# ------------------------------------------------------------------------------- names and variables


@pytest.mark.parametrize("name", ["~nosuchuser/tokenizer.model", "a" * 5000, "x\0y", "b/" * 3000, "\udcff"])
def test_names_that_no_file_has(name: str) -> None:
    for read in (Tokenizer, open_checkpoint):
        with pytest.raises((LlamaError, FileNotFoundError)):
            read(name)


@pytest.mark.parametrize("value", ["", "abc", "-1", "0x1"])
def test_a_variable_that_is_no_number(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", value)
    with pytest.raises(LlamaError, match="LOCAL_WORLD_SIZE=.*must be an integer"):
        build_golden()
