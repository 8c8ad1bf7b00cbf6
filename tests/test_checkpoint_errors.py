"""Files that are damaged, missing, foreign or hostile: a message with path, what was found, what was expected."""

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import checkpoint_files as files
import pytest
import torch

from llama.checkpoint import open_checkpoint
from llama.errors import LlamaError

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 13476939516\n"
HTML = b"<!DOCTYPE html><html><body>403 Forbidden</body></html>"


@pytest.fixture
def meta(tmp_path: Path) -> Path:
    return files.write_meta(tmp_path / "llama", files.weights(), shards=2)


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return files.write_hf(tmp_path / "hf", files.weights(), files=2)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "the file is empty"),
        (HTML, "a web page"),
        (b"\n " + HTML, "a web page"),
        (LFS, "a Git LFS pointer"),
        (b"GGUF\x03\0\0\0" * 10, "found|expected|begins with|header"),
        (b"\x80", "damaged|not readable|header|size"),
    ],
)
@pytest.mark.parametrize(
    "name",
    [
        "consolidated.01.pth",
        "params.json",
        "model-00001-of-00002.safetensors",
        "config.json",
        "model.safetensors.index.json",
    ],
)
def test_what_a_bad_download_leaves(meta: Path, hf: Path, name: str, content: bytes, words: str) -> None:
    folder = meta if (meta / name).exists() else hf
    (folder / name).write_bytes(content)
    if name.endswith("json") and "|" in words:
        words = "no valid JSON"
    with pytest.raises(LlamaError, match=words) as error:
        open_checkpoint(folder)
    assert str(folder / name) in str(error.value) and "expected" in str(error.value)


@pytest.mark.parametrize("content", [b"", HTML, LFS, b"\0" * 28, b"24ka\x09\0\0\0" + b"\1" * 300, b"abc", b"x" * 4096])
def test_a_bad_llama2c_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "stories.bin"
    path.write_bytes(content)
    with pytest.raises(LlamaError, match="expected") as error:
        open_checkpoint(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("version", [0, 1, 2])
@pytest.mark.parametrize("change", [-1, -1000, 1, 4096])
def test_a_llama2c_file_of_another_size(tmp_path: Path, version: int, change: int) -> None:
    path = files.write_llama2c(tmp_path / "m.bin", files.weights(), version=version)
    data = path.read_bytes()
    path.write_bytes(data[:change] if change < 0 else data + b"\0" * change)
    with pytest.raises(LlamaError, match=rf"{len(data) + change} bytes; expected {len(data)} for"):
        open_checkpoint(path)


@pytest.mark.parametrize("change", [-1, -5000, 1, 4096])
def test_a_safetensors_file_of_another_size(tmp_path: Path, change: int) -> None:
    path = files.write_hf(tmp_path, files.weights()) / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:change] if change < 0 else data + b"\0" * change)
    with pytest.raises(LlamaError, match="truncated, or grown"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("keep", [100, 5000, -1, -200])
def test_a_truncated_pth(meta: Path, keep: int) -> None:
    path = meta / "consolidated.00.pth"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(LlamaError, match="damaged or truncated archive"):
        open_checkpoint(meta)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 15]},
        {"dtype": "F32", "shape": [2, -2], "data_offsets": [0, 16]},
        {"dtype": "F99", "shape": [2, 2], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [2, 2], "data_offsets": [4, 20]},
        {"dtype": "F32", "shape": [2.0, 2], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [True, 4], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [1 << 62, 1 << 62], "data_offsets": [0, 16]},
        {"dtype": ["F32"], "shape": [4], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [4]},
        [1, 2],
        None,
    ],
)
def test_a_safetensors_header_that_lies(hf: Path, entry: Any) -> None:
    header = json.dumps({"model.norm.weight": entry}).encode()
    path = hf / "model-00001-of-00002.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 16)
    with pytest.raises(LlamaError, match=r"'model.norm.weight'"):
        open_checkpoint(hf)


def test_safetensors_that_overlap(hf: Path) -> None:
    place = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    header = json.dumps({"a": place, "b": place}).encode()
    path = hf / "model-00001-of-00002.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 16)
    with pytest.raises(LlamaError, match="'b' begins at byte 0 of the data; expected byte 16"):
        open_checkpoint(hf)


class Payload:
    """Unpickling it would run code."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        import os

        return os.system, (f"touch '{self.mark}'",)


def zipped(path: Path, value: Any) -> None:
    torch.save(value, path)


def bare(path: Path, value: Any) -> None:
    path.write_bytes(pickle.dumps(value, protocol=2))


@pytest.mark.parametrize("save", [zipped, bare])
@pytest.mark.parametrize("name", ["consolidated.01.pth", "pytorch_model.bin", "ckpt.pt"])
def test_no_file_can_run_code(meta: Path, tmp_path: Path, name: str, save: Any) -> None:
    mark = tmp_path / "ran"
    folder, place = meta, meta / name
    if name == "pytorch_model.bin":
        folder = files.write_hf(tmp_path / "old", files.weights(), bin_file=True)
        place = folder / name
    elif name == "ckpt.pt":
        folder = place = tmp_path / name
    save(place, {"norm.weight": Payload(mark)})
    with pytest.raises(LlamaError) as error:
        open_checkpoint(folder)
    assert not mark.exists()
    assert str(place) in str(error.value) and "weights_only" not in str(error.value)
    torch.load(place, weights_only=False) if save is zipped else pickle.loads(place.read_bytes())
    assert mark.exists()  # so the file was dangerous


def test_a_compressed_archive_is_refused(meta: Path) -> None:
    import zipfile

    path = meta / "consolidated.00.pth"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("consolidated/data.pkl", b"\0" * 10_000_000)
    with pytest.raises(LlamaError, match="unfold to 10000000 bytes"):
        open_checkpoint(meta)


# --------------------------------------------------------------------------------------- what is missing


def test_a_shard_in_between(meta: Path) -> None:
    (meta / "consolidated.01.pth").rename(meta / "consolidated.02.pth")
    with pytest.raises(FileNotFoundError, match=r"of 3 shards, consolidated.01.pth is missing"):
        open_checkpoint(meta)


def test_the_last_shard(meta: Path) -> None:
    (meta / "consolidated.01.pth").unlink()
    with pytest.raises(LlamaError, match=r"tok_embeddings.weight is \(40, 16\), must be \(40, 32\).*1 file"):
        open_checkpoint(meta)


def test_params_json(meta: Path) -> None:
    (meta / "params.json").unlink()
    with pytest.raises(FileNotFoundError, match=str(meta.absolute() / "params.json")):
        open_checkpoint(meta)


def test_config_json(hf: Path) -> None:
    (hf / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=str(hf / "config.json")):
        open_checkpoint(hf)


def test_a_file_that_the_index_names(hf: Path) -> None:
    (hf / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"index.json names model-00002-of-00002.safetensors, which is missing"):
        open_checkpoint(hf)


def test_an_index_that_points_outside(hf: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "../../etc/passwd"}}
    (hf / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(LlamaError, match="names of files in the same folder"):
        open_checkpoint(hf)


@pytest.mark.parametrize("name", ["nowhere", "nowhere.bin"])
def test_nothing_there(tmp_path: Path, name: str) -> None:
    with pytest.raises(FileNotFoundError, match=str(tmp_path / name)):
        open_checkpoint(tmp_path / name)


def test_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError) as error:
        open_checkpoint("here")
    for part in (str(tmp_path / "here"), "consolidated.NN.pth", "*.safetensors", "*.bin", "params.json", "config.json"):
        assert part in str(error.value)


def test_settings_without_weights(tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"no consolidated.NN.pth"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(files.hf_config(files.GQA)))
    with pytest.raises(FileNotFoundError, match=r"neither model\*.safetensors nor"):
        open_checkpoint(tmp_path)


# ------------------------------------------------------------------------------------- what is foreign


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("model.layers.0.self_attn.q_proj.weight", "Hugging Face's names"),
        ("transformer.h.0.attn.c_attn.weight", "GPT-2"),
        ("transformer.h.0.attn.attn.weight", "LitGPT"),
        ("gpt_neox.layers.0.attention.dense.weight", "GPT-NeoX"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", "a LoRA adapter"),
        ("model.layers.0.mlp.up_proj.qweight", "quantized weights"),
        ("module.layers.0.attention.wq.weight", "behind a prefix"),
        ("encoder.weight", "the keys 'encoder.weight'"),
    ],
)
def test_a_foreign_layout_is_named(meta: Path, key: str, words: str) -> None:
    for path in meta.glob("*.pth"):
        torch.save({key: torch.ones(2, 2)}, path)
    with pytest.raises(LlamaError, match=words) as error:
        open_checkpoint(meta)
    assert key in str(error.value)


@pytest.mark.parametrize("value", [[torch.ones(1)], {"model": {"a": torch.ones(1)}}, {}, {1: torch.ones(1)}, 3])
def test_other_things_that_torch_saves(meta: Path, value: Any) -> None:
    torch.save(value, meta / "consolidated.00.pth")
    with pytest.raises(LlamaError, match=r"consolidated.00.pth: .*expected weights by Meta's keys"):
        open_checkpoint(meta)


def test_weights_of_a_type_that_cannot_be_computed_in(meta: Path) -> None:
    path = meta / "consolidated.00.pth"
    torch.save({name: tensor.to(torch.int8) for name, tensor in torch.load(path).items()}, path)
    torch.save({name: tensor.to(torch.int8) for name, tensor in torch.load(path).items()}, meta / "consolidated.01.pth")
    with pytest.raises(LlamaError, match=r"int8; expected float32, bfloat16 or float16"):
        open_checkpoint(meta)


@pytest.mark.parametrize(
    "change", [{"n_layers": 3}, {"n_layers": 10**9}, {"dim": 64}, {"n_heads": 5}, {"norm_eps": "x"}]
)
def test_settings_that_do_not_fit_the_weights(meta: Path, change: dict[str, Any]) -> None:
    (meta / "params.json").write_text(json.dumps({**files.GQA, **change}))
    with pytest.raises(LlamaError, match=next(iter(change)).replace("dim", "must be")):
        open_checkpoint(meta)


# ------------------------------------------------------------------------------------- what is all right


def test_a_stray_file_is_no_shard(meta: Path) -> None:
    torch.save({"state": {}}, meta / "optimizer.pth")
    assert open_checkpoint(meta).shards == 2


def test_names_with_spaces_and_other_letters(tmp_path: Path) -> None:
    folder = tmp_path / "мой модель 模型 ü"
    assert open_checkpoint(files.write_meta(folder, files.weights(), shards=2)).read("norm.weight").numel() == 32
    assert open_checkpoint(files.write_llama2c(folder / "größe 1.bin", files.weights())).format == "llama2c"
    assert open_checkpoint(str(files.write_hf(folder / "hf", files.weights()))).format == "hf"


def test_a_link_to_a_folder_and_one_file_of_it(meta: Path, hf: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(meta)
    assert open_checkpoint(tmp_path / "link").shards == 2
    assert open_checkpoint(meta / "consolidated.00.pth").shards == 2
    assert open_checkpoint(hf / "config.json").shards == 2
    shutil.rmtree(meta)
    with pytest.raises(FileNotFoundError, match="link"):
        open_checkpoint(tmp_path / "link")
