"""Out again: `convert` and `info`."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any, NoReturn

import checkpoint_files as files
import pytest
import reference
import torch

from llama.checkpoint import hf, load, open_checkpoint
from llama.checkpoint.source import Source
from llama.cli.convert import convert
from llama.cli.info import info
from llama.errors import LlamaError
from llama.model import ModelArgs, Transformer

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def meta(tmp_path: Path) -> Path:
    folder = files.write_meta(tmp_path / "src", files.weights(dtype=torch.bfloat16), shards=2)
    shutil.copy(GOLDEN / "mha" / "tokenizer.model", folder)
    return folder


def same(one: Path, other: Path) -> None:
    a, b = open_checkpoint(one), open_checkpoint(other)
    assert a.names() == b.names()
    for name in a.names():
        assert a.dtype(name) == b.dtype(name) and torch.equal(a.read(name), b.read(name)), name


# ------------------------------------------------------------------------------------- there and back


@pytest.mark.parametrize("shards", [1, 2])
def test_meta_to_hugging_face_and_back_is_bitwise_the_same(tmp_path: Path, meta: Path, shards: int) -> None:
    convert(str(meta), str(tmp_path / "hf"), "hf")
    convert(str(tmp_path / "hf"), str(tmp_path / "back"), "meta", shards=shards)
    same(meta, tmp_path / "back")
    for shard in range(shards):
        held = torch.load(tmp_path / "back" / f"consolidated.{shard:02d}.pth")
        for name, tensor in files.weights(dtype=torch.bfloat16).items():
            assert torch.equal(held[name], files.cut(name, tensor, shards)[shard])
    assert (tmp_path / "back" / "tokenizer.model").read_bytes() == (meta / "tokenizer.model").read_bytes()


def test_resharding_there_and_back(tmp_path: Path) -> None:
    source = files.write_meta(tmp_path / "1", files.weights(files.WIDE), files.WIDE)
    for before, shards in ((1, 8), (8, 2), (2, 4)):
        convert(str(tmp_path / str(before)), str(tmp_path / str(shards)), "meta", shards=shards)
        assert len(list((tmp_path / str(shards)).glob("*.pth"))) == shards
        same(source, tmp_path / str(shards))


def test_shard_files_hold_their_part_and_no_more(tmp_path: Path) -> None:
    source = files.write_meta(tmp_path / "1", files.weights(files.WIDE), files.WIDE)
    convert(str(source), str(tmp_path / "4"), "meta", shards=4)
    whole = (source / "consolidated.00.pth").stat().st_size
    assert all(path.stat().st_size < 0.3 * whole for path in (tmp_path / "4").glob("*.pth"))


def test_llama2c_is_byte_for_byte_what_its_own_export_writes(tmp_path: Path) -> None:
    convert(str(GOLDEN / "mha"), str(tmp_path / "c"), "llama2c", context=96)
    convert(str(tmp_path / "c"), str(tmp_path / "meta"), "meta")
    expected = GOLDEN / "llama2c"
    assert (tmp_path / "c" / "model.bin").read_bytes() == (expected / "mha_v0.bin").read_bytes()
    assert (tmp_path / "c" / "tokenizer.bin").read_bytes() == (expected / "tokenizer.bin").read_bytes()
    same(GOLDEN / "mha", tmp_path / "meta")


def test_a_tied_head_stays_tied(tmp_path: Path) -> None:
    weights = files.weights()
    weights["output.weight"] = weights["tok_embeddings.weight"]
    source = files.write_hf(tmp_path / "src", weights, tie_word_embeddings=True)
    for before, to in (("src", "llama2c"), ("llama2c", "hf"), ("hf", "meta")):
        convert(str(tmp_path / before), str(tmp_path / to), to)
        same(source, tmp_path / to)
        assert open_checkpoint(tmp_path / to).tied
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["tie_word_embeddings"] is True


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_dtype(tmp_path: Path, meta: Path, name: str) -> None:
    convert(str(meta), str(tmp_path / "hf"), "hf", dtype=name)
    convert(str(tmp_path / "hf"), str(tmp_path / "meta"), "meta", dtype=name)
    checkpoint, dtype = open_checkpoint(tmp_path / "meta"), getattr(torch, name)
    for key, tensor in files.weights(dtype=torch.bfloat16).items():
        assert torch.equal(checkpoint.read(key), tensor.to(dtype))
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["torch_dtype"] == name


def test_settings_survive(tmp_path: Path) -> None:
    params = {**files.GQA, "rope_theta": 5e5, "norm_eps": 1e-6, "ffn_dim_multiplier": 1.3, "multiple_of": 8}
    source = files.write_meta(tmp_path / "a", files.weights(params), params)
    convert(str(source), str(tmp_path / "b"), "hf")
    convert(str(tmp_path / "b"), str(tmp_path / "c"), "meta")
    for key in ("rope_theta", "norm_eps", "n_kv_heads"):
        assert open_checkpoint(tmp_path / "c").params[key] == params[key]
    same(source, tmp_path / "c")
    with pytest.raises(LlamaError, match=r"rope_theta=500000.0, norm_eps=1e-06; llama2.c"):
        convert(str(source), str(tmp_path / "d"), "llama2c")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]


def test_an_index_above_the_files_size(tmp_path: Path, meta: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf, "FILE_SIZE", 8000)
    convert(str(meta), str(tmp_path / "hf"), "hf")
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    names = sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    assert len(names) > 3 and sorted(set(index["weight_map"].values())) == names
    assert index["metadata"]["total_size"] == sum(t.numel() * 2 for t in files.weights().values())
    same(meta, tmp_path / "hf")


# ---------------------------------------------------------------------------------- the real transformers


@pytest.mark.parametrize(("name", "tied"), [("gqa", False), ("gqa", True), ("mha", False)])
def test_transformers_gives_the_same(tmp_path: Path, name: str, tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    source = GOLDEN / "mha"
    if name == "gqa":
        weights = files.weights({**files.GQA, "vocab_size": 360})
        if tied:
            weights["output.weight"] = weights["tok_embeddings.weight"]
        source = tmp_path / "src"
        files.write_hf(source, weights, {**files.GQA, "vocab_size": 360}, tie_word_embeddings=tied)
        shutil.copy(GOLDEN / "mha" / "tokenizer.model", source)
    convert(str(source), str(tmp_path / "hf"), "hf", context=128)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    checkpoint = open_checkpoint(source)
    sizes = {"vocab_size": 360, "max_seq_len": 48, "max_batch_size": 2}
    ours = Transformer(ModelArgs(**{**checkpoint.params, **sizes}))
    load(ours, checkpoint)
    tokens = torch.tensor([[1, 20, 30, 40, 50], [1, 60, 7, 80, 9]])
    with torch.no_grad():
        assert (theirs(tokens).logits - ours(tokens, 0)).abs().max() < 1e-4
    written = theirs.generate(tokens, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
    text = tokens
    for _ in range(20):
        text = torch.cat([text, ours(text, 0)[:, -1:].argmax(-1)], 1)
    assert torch.equal(written, text)
    assert theirs.config.max_position_embeddings == 128 and theirs.generation_config.eos_token_id == 2


def test_transformers_reads_the_tokenizer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("google.protobuf")
    from llama.tokenizer import Tokenizer

    convert(str(GOLDEN / "mha"), str(tmp_path / "hf"), "hf")
    theirs, ours = (
        transformers.AutoTokenizer.from_pretrained(tmp_path / "hf"),
        Tokenizer(str(GOLDEN / "mha" / "tokenizer.model")),
    )
    for text in ("river stone", "the cold night, 12%", "é 日本"):
        assert theirs(text)["input_ids"] == ours.encode(text, bos=True, eos=False)


# ------------------------------------------------------------------------------------- never half done


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("to", ["meta", "hf", "llama2c"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("disk full")])
def test_a_stopped_run_leaves_nothing(
    tmp_path: Path, meta: Path, monkeypatch: pytest.MonkeyPatch, to: str, error: Any
) -> None:
    count = 0
    real = Source.read

    def read(self: Source, name: str, rank: int = 0, world: int = 1) -> torch.Tensor:
        nonlocal count
        count += 1
        if count > 5:
            raise error
        return real(self, name, rank, world)

    monkeypatch.setattr(Source, "read", read)
    with pytest.raises((KeyboardInterrupt, LlamaError)):
        convert(str(meta), str(tmp_path / "dst"), to)
    assert leftovers(tmp_path) == ["src"]


@pytest.mark.parametrize("to", ["meta", "hf", "llama2c"])
def test_a_killed_run_leaves_a_folder_that_is_no_checkpoint(
    tmp_path: Path, meta: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    def die(*_: object, **__: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"llama.checkpoint.{to}.copy_tokenizer", die)  # after the weights, before the settings
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    with pytest.raises(KeyboardInterrupt):
        convert(str(meta), str(tmp_path / "dst"), to)
    rest = [path for path in tmp_path.iterdir() if path.name != "src"]
    assert [path.name.startswith(".dst.partial-") for path in rest] == [True]
    assert any(rest[0].iterdir())
    with pytest.raises(FileNotFoundError):
        open_checkpoint(rest[0])


def test_nothing_is_overwritten_without_force(tmp_path: Path, meta: Path) -> None:
    convert(str(meta), str(tmp_path / "dst"), "meta", shards=2)
    before = leftovers(tmp_path / "dst")
    with pytest.raises(LlamaError, match=r"exists and holds .*--force"):
        convert(str(meta), str(tmp_path / "dst"), "hf")
    assert leftovers(tmp_path / "dst") == before
    convert(str(meta), str(tmp_path / "dst"), "hf", force=True)
    assert "consolidated.01.pth" not in leftovers(tmp_path / "dst")
    assert leftovers(tmp_path) == ["dst", "src"]
    same(meta, tmp_path / "dst")


def test_a_failed_run_with_force_leaves_what_was_there(
    tmp_path: Path, meta: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(str(meta), str(tmp_path / "dst"), "meta")
    monkeypatch.setattr(hf, "config_of", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        convert(str(meta), str(tmp_path / "dst"), "hf", force=True)
    monkeypatch.undo()
    same(meta, tmp_path / "dst")
    assert leftovers(tmp_path) == ["dst", "src"]


def test_force_removes_checkpoints_and_nothing_else(tmp_path: Path, meta: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.tex").write_text("years of work")
    with pytest.raises(LlamaError, match=r"thesis.tex, which is no part of a checkpoint"):
        convert(str(meta), str(home), "hf", force=True)
    for target in (meta, meta / "inside", tmp_path, meta / ".." / "src"):
        with pytest.raises(LlamaError, match="are one folder, or one holds the other"):
            convert(str(meta), str(target), "hf", force=True)
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(LlamaError, match="is not a folder"):
        convert(str(meta), str(file), "hf", force=True)
    same(meta, meta)


def test_too_little_disk(tmp_path: Path, meta: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(LlamaError, match=r"needs .* but .* has 1.0 kB free"):
        convert(str(meta), str(tmp_path / "dst"), "hf")
    assert leftovers(tmp_path) == ["src"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"to": "gguf"}, "to='gguf' must be one of"),
        ({"to": "hf", "dtype": "int8"}, "dtype='int8'"),
        ({"to": "hf", "shards": 2}, "shards=2"),
        ({"to": "meta", "shards": 0}, "shards=0"),
        ({"to": "meta", "shards": 3}, "must divide n_heads=4 and n_kv_heads=2"),
        ({"to": "meta", "shards": 4}, "must divide n_heads=4 and n_kv_heads=2"),
    ],
)
def test_what_cannot_be_asked_for(tmp_path: Path, meta: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(LlamaError, match=words):
        convert(str(meta), str(tmp_path / "dst"), **options)
    assert leftovers(tmp_path) == ["src"]


def test_special_ids_and_tokenizer_files_of_a_hugging_face_folder_are_kept(tmp_path: Path) -> None:
    source = files.write_hf(tmp_path / "src", files.weights(), bos_token_id=30, eos_token_id=[31, 32])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).write_text("{}")
    convert(str(source), str(tmp_path / "dst"), "hf", dtype="bfloat16")
    for name in ("config.json", "generation_config.json"):
        written = json.loads((tmp_path / "dst" / name).read_text())
        assert (written["bos_token_id"], written["eos_token_id"]) == (30, [31, 32])
    assert (tmp_path / "dst" / "tokenizer.json").read_text() == "{}"


def test_no_tokenizer_is_said(tmp_path: Path, meta: Path, caplog: pytest.LogCaptureFixture) -> None:
    (meta / "tokenizer.model").unlink()
    with caplog.at_level(logging.WARNING, "llama"):
        convert(str(meta), str(tmp_path / "dst"), "hf")
    assert "no tokenizer" in caplog.text


# ----------------------------------------------------------------------------------------------- info


def test_info_says_what_is_there(meta: Path, capsys: pytest.CaptureFixture[str]) -> None:
    info(str(meta), max_seq_len=100, max_batch_size=10, ranks=2)
    said = capsys.readouterr().out
    count = sum(tensor.numel() for tensor in files.weights().values())
    for part in (
        "format          meta",
        "2 of weights",
        f"{count:,}",
        "bfloat16",
        "vocabulary      40",
        "4 heads, 2 kv heads",
    ):
        assert part in said
    # 2 (keys, values) x batch 10 x 100 positions x 2 kv heads x 8 x 2 bytes x 2 layers / 2 ranks
    assert "KV cache 64.0 kB" in said and "2 rank(s)" in said


def test_info_of_every_format(tmp_path: Path, meta: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [files.write_llama2c(tmp_path / "v2.bin", files.weights(), version=2), GOLDEN / "mha"]
    paths += [
        files.write_training(tmp_path / "ckpt.pt", files.weights()),
        files.write_hf(tmp_path / "hf", files.weights()),
    ]
    for path in paths:
        info(str(path))
    said = capsys.readouterr().out
    assert said.count("memory per rank") == 4 and "int8 groups" in said and "llama2c-train" in said
    with pytest.raises(LlamaError, match="must divide n_heads=4"):
        info(str(meta), ranks=3)


def test_info_check_gives_the_same_digests_in_every_format(
    tmp_path: Path, meta: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert(str(meta), str(tmp_path / "hf"), "hf")
    convert(str(meta), str(tmp_path / "one"), "meta")
    capsys.readouterr()
    digests = []
    for path in (meta, tmp_path / "hf", tmp_path / "one"):
        info(str(path), check=True)
        digests.append(
            [line for line in capsys.readouterr().out.splitlines() if ".weight" in line or line.endswith("norm")]
        )
    assert len(digests[0]) == 21 and digests[0] == digests[1] == digests[2]


def test_info_check_names_what_is_not_finite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = files.weights()
    weights["norm.weight"][3] = float("nan")
    weights["layers.1.feed_forward.w2.weight"][0, :2] = float("inf")
    path = files.write_meta(tmp_path / "bad", weights, shards=2)
    with pytest.raises(LlamaError, match=r"2 weights are not finite: layers.1.feed_forward.w2.weight \(0 NaN, 2 inf\)"):
        info(str(path), check=True)
    assert "1 NaN, 0 inf" in capsys.readouterr().out


@pytest.mark.parametrize("dim", [128, 640])
def test_a_llama2c_header_that_begins_like_a_pickle(tmp_path: Path, dim: int) -> None:
    """128 and 640 are the bytes 80 00 and 80 02: told from a pickle by the zeros behind them."""
    params = {"dim": dim, "n_layers": 1, "n_heads": 4, "n_kv_heads": 4, "multiple_of": 32, "norm_eps": 1e-5}
    weights = reference.random_weights({**params, "vocab_size": 360}, 1, torch.float32)
    source = tmp_path / "src"
    source.mkdir()
    torch.save(weights, source / "consolidated.00.pth")
    (source / "params.json").write_text(json.dumps(params))
    shutil.copy(GOLDEN / "mha" / "tokenizer.model", source)
    convert(str(source), str(tmp_path / "c"), "llama2c")
    found = open_checkpoint(tmp_path / "c")
    assert found.format == "llama2c" and torch.equal(found.read("output.weight"), weights["output.weight"])
