"""Reading and loading: any format, any shard count, any rank count (on real ranks: tests/test_ranks.py)."""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import checkpoint_files as files
import pytest
import reference
import torch
from torch import Tensor

from llama.checkpoint import Checkpoint, load, open_checkpoint
from llama.checkpoint.checkpoint import halves_to_pairs, pairs_to_halves
from llama.checkpoint.memory import check_memory, free_memory, memory_estimate
from llama.checkpoint.meta import width_settings
from llama.checkpoint.table import all_names, hf_name
from llama.cli.convert import convert
from llama.errors import LlamaError
from llama.model import ModelArgs, Transformer, ffn_width

GOLDEN = Path(__file__).parent / "golden"
COUNTS = (1, 2, 4, 8)


def equal(checkpoint: Checkpoint, weights: dict[str, Tensor]) -> None:
    assert checkpoint.names() == list(weights)
    for name, tensor in weights.items():
        read = checkpoint.read(name)
        assert read.dtype == checkpoint.dtype(name) == tensor.dtype, name
        assert checkpoint.shape(name) == tensor.shape, name
        assert torch.equal(read, tensor), name


def build(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32, **changes: Any) -> Transformer:
    rows = checkpoint.shape("tok_embeddings.weight")[0]
    args = {**checkpoint.params, "vocab_size": rows, "max_seq_len": 24, "max_batch_size": 3, **changes}
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return Transformer(ModelArgs(**args))
    finally:
        torch.set_default_dtype(before)


def loaded(path: Path, dtype: torch.dtype = torch.float32) -> Transformer:
    checkpoint = open_checkpoint(path)
    model = build(checkpoint, dtype)
    load(model, checkpoint)
    return model


# --------------------------------------------------------------------------------- shards and ranks


@pytest.mark.parametrize("shards", COUNTS)
def test_any_shards_on_any_ranks(tmp_path: Path, shards: int) -> None:
    weights = files.weights(files.WIDE)
    checkpoint = open_checkpoint(files.write_meta(tmp_path, weights, files.WIDE, shards))
    assert checkpoint.shards == shards and checkpoint.format == "meta"
    equal(checkpoint, weights)
    for world in COUNTS:
        for name, tensor in weights.items():
            parts = [checkpoint.read(name, rank, world) for rank in range(world)]
            wanted = files.cut(name, tensor, world)
            assert all(torch.equal(a, b) for a, b in zip(parts, wanted, strict=True)), (name, world)


@pytest.mark.parametrize(("shards", "world"), [(2, 1), (2, 2), (4, 2), (2, 8)])
def test_llama_3_embedding_shards_are_told_by_shape(tmp_path: Path, shards: int, world: int) -> None:
    weights = files.weights(files.WIDE)
    checkpoint = open_checkpoint(files.write_meta(tmp_path, weights, files.WIDE, shards, rows=True))
    equal(checkpoint, weights)
    parts = [checkpoint.read("tok_embeddings.weight", rank, world) for rank in range(world)]
    assert torch.equal(torch.cat(parts, 1), weights["tok_embeddings.weight"])


def test_shards_are_ordered_by_their_number(tmp_path: Path) -> None:
    params = {**files.GQA, "dim": 96, "n_heads": 12, "n_kv_heads": 12, "vocab_size": 48, "multiple_of": 48}
    weights = files.weights(params)
    files.write_meta(tmp_path, weights, params, 12)
    for path in tmp_path.glob("*.pth"):  # 2 comes after 10 by name, and "shard-" is what a fine-tune may call it
        path.rename(tmp_path / f"shard-{int(re.findall('[0-9]+', path.name)[0])}.pth")
    equal(open_checkpoint(tmp_path), weights)


def test_grouped_heads_that_ranks_cannot_share(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(files.write_hf(tmp_path, files.weights()))
    assert checkpoint.read("layers.0.attention.wk.weight", 1, 2).shape == (8, 32)
    with pytest.raises(LlamaError, match=r"wk.weight: 2 heads cannot be sharded over 4 ranks"):
        checkpoint.read("layers.0.attention.wk.weight", 0, 4)


# ------------------------------------------------------------------------------------------ formats


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [1, 3])
def test_hugging_face(tmp_path: Path, dtype: torch.dtype, count: int) -> None:
    weights = files.weights(dtype=dtype)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    checkpoint = open_checkpoint(files.write_hf(tmp_path, weights, files=count))
    equal(checkpoint, weights)
    assert (checkpoint.format, checkpoint.shards, checkpoint.context) == ("hf", count, 128)
    assert checkpoint.tokenizer_path == tmp_path / "tokenizer.model"


def test_hugging_face_pytorch_files(tmp_path: Path) -> None:
    weights = files.weights()
    equal(open_checkpoint(files.write_hf(tmp_path / "one", weights, bin_file=True)), weights)
    equal(open_checkpoint(files.write_hf(tmp_path / "two", weights, files=2, bin_file=True)), weights)


def test_hugging_face_without_its_index(tmp_path: Path) -> None:
    weights = files.weights()
    files.write_hf(tmp_path, weights, files=3)
    (tmp_path / "model.safetensors.index.json").unlink()
    equal(open_checkpoint(tmp_path), weights)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="of 3 files of weights, 2 is missing"):
        open_checkpoint(tmp_path)


def test_tied_head_shares_storage(tmp_path: Path) -> None:
    weights = files.weights()
    weights["output.weight"] = weights["tok_embeddings.weight"]
    checkpoint = open_checkpoint(files.write_hf(tmp_path, weights, tie_word_embeddings=True))
    equal(checkpoint, weights)
    for dtype in (torch.float32, torch.bfloat16):  # mapped, and copied
        model = build(checkpoint, dtype)
        load(model, checkpoint)
        assert model.output.weight.data_ptr() == model.tok_embeddings.weight.data_ptr()
    parts = [checkpoint.read("output.weight", rank, 2) for rank in range(2)]
    assert torch.equal(torch.cat(parts), weights["output.weight"])


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 5e5},
        {"rope_theta": None, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
    ],
)
def test_rope_theta_at_either_place(tmp_path: Path, changes: dict[str, Any]) -> None:
    checkpoint = open_checkpoint(files.write_hf(tmp_path, files.weights(), **changes))
    assert checkpoint.params["rope_theta"] == 5e5


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "mixtral"),
        ("architectures", ["MistralForCausalLM"]),
        ("hidden_act", "gelu"),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
        ("rope_parameters", {"rope_type": "llama3", "rope_theta": 5e5}),
        ("quantization_config", {"bits": 4}),
        ("head_dim", 7),
        ("head_dim", "8"),
        ("attention_bias", "yes"),
        ("mlp_bias", 1),
        ("hidden_size", "32"),
        ("num_key_value_heads", 3),
        ("rms_norm_eps", -1),
    ],
)
def test_a_config_that_cannot_be_run_names_the_field(tmp_path: Path, field: str, value: Any) -> None:
    files.write_hf(tmp_path, files.weights(), **{field: value})
    ours = {"num_key_value_heads": "n_kv_heads", "rms_norm_eps": "norm_eps"}.get(field, field)
    with pytest.raises(LlamaError, match=ours):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("version", [0, 1, 2])
def test_llama2c(tmp_path: Path, version: int, shared: bool) -> None:
    weights = files.weights()
    if shared:
        weights["output.weight"] = weights["tok_embeddings.weight"]
    checkpoint = open_checkpoint(files.write_llama2c(tmp_path / "m.bin", weights, version=version, shared=shared))
    assert (checkpoint.format, checkpoint.context, checkpoint.tied) == ("llama2c", 24, shared)
    if version < 2:
        equal(checkpoint, weights)
        return
    for name, tensor in weights.items():
        wanted = tensor
        if tensor.ndim == 2:
            values, scales = files.quantize(tensor, 16)
            wanted = (values * scales[:, None]).view(tensor.shape)
        assert torch.equal(checkpoint.read(name), wanted), name
        part = checkpoint.read(name, 1, 2)
        assert torch.equal(part, files.cut(name, wanted, 2)[1]), name


def test_llama2c_training_file(tmp_path: Path) -> None:
    weights = files.weights()
    checkpoint = open_checkpoint(files.write_training(tmp_path / "ckpt.pt", weights))
    equal(checkpoint, weights)
    assert (checkpoint.format, checkpoint.context) == ("llama2c-train", 24)
    assert open_checkpoint(tmp_path).format == "llama2c-train"  # the folder that holds just this one


@pytest.mark.parametrize("name", ["mha", "llama2c/mha_v0.bin", "llama2c/mha_v1.bin"])
def test_golden_logits(name: str) -> None:
    golden = torch.load(GOLDEN / "mha" / "golden.pt")
    difference = loaded(GOLDEN / name)(golden["x"], 0) - golden["logits_full"]
    assert difference.abs().max() < 1e-4


def test_golden_int8_weights() -> None:
    plain, packed = (open_checkpoint(GOLDEN / "llama2c" / name) for name in ("mha_v0.bin", "mha_q80.bin"))
    worst = max(float((plain.read(name) - packed.read(name)).abs().max()) for name in plain.names())
    assert 0.013 < worst < 0.01371  # shared/data/README.md: at most 0.0137


def test_what_the_c_program_prints() -> None:
    """The greedy text of llama2.c on the same file, up to its first BOS."""
    from llama.tokenizer import Tokenizer

    checkpoint = open_checkpoint(GOLDEN / "llama2c" / "mha_v0.bin")
    assert checkpoint.tokenizer_path == GOLDEN / "llama2c" / "tokenizer.bin"
    model, tokenizer = build(checkpoint, max_seq_len=96), Tokenizer(str(checkpoint.tokenizer_path))
    load(model, checkpoint)
    for case in json.loads((GOLDEN / "llama2c" / "expected.json").read_text())["cases"]:
        if case["file"] != "mha_v0.bin":
            continue
        ids = tokenizer.encode(case["prompt"], bos=True, eos=False)
        while len(ids) <= case["steps"]:
            ids.append(int(model(torch.tensor([ids]), 0)[0, -1].argmax()))
            if ids[-1] == 1:
                break
        assert c_text(ids) == case["stdout"].removesuffix("\n")


def c_text(ids: list[int]) -> str:
    """What llama2.c prints: pieces of tokenizer.bin, no dummy space after BOS, no unprintable single bytes."""
    data = (GOLDEN / "llama2c" / "tokenizer.bin").read_bytes()
    pieces, place = [], 4
    while place < len(data):
        length = int.from_bytes(data[place + 4 : place + 8], "little")
        pieces.append(data[place + 8 : place + 8 + length])
        place += 8 + length
    out = b""
    for before, token in pairwise(ids):
        piece = pieces[token]
        if token == 1:
            break
        if before == 1 and piece.startswith(b" "):
            piece = piece[1:]
        byte = re.fullmatch(rb"<0x([0-9A-F]{2})>", piece)
        piece = bytes([int(byte[1], 16)]) if byte else piece
        if len(piece) == 1 and not (0x20 <= piece[0] < 0x7F or piece[0] in b"\t\n\v\f\r"):
            continue
        out += piece
    return out.decode("latin-1")


def test_every_format_gives_the_oracles_logits(tmp_path: Path) -> None:
    weights = files.weights()
    tokens = torch.arange(16).reshape(2, 8)
    wanted = reference.logits(weights, files.GQA, tokens)
    paths = [
        files.write_meta(tmp_path / "meta", weights, shards=2),
        files.write_hf(tmp_path / "hf", weights, files=2),
        files.write_hf(tmp_path / "bin", weights, bin_file=True),
        files.write_llama2c(tmp_path / "v0.bin", weights),
        files.write_llama2c(tmp_path / "v1.bin", weights, version=1),
        files.write_training(tmp_path / "ckpt.pt", weights),
    ]
    for path in paths:
        assert (loaded(path)(tokens, 0) - wanted).abs().max() < 1e-5, path


# ------------------------------------------------------------------------------------------ loading


def is_mapped(tensor: Tensor) -> bool:
    """Whether the tensor's memory is a file's, as the system tells it."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(number, 16) for number in line.split()[0].split("-"))
        if low <= tensor.data_ptr() < high:
            return line.endswith((".pth", ".safetensors", ".bin"))
    return False


linux = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's /proc")


@linux
def test_pages_are_used_as_they_are_where_that_is_right(tmp_path: Path) -> None:
    one, two = (files.write_meta(tmp_path / str(n), files.weights(), shards=n) for n in (1, 2))
    assert all(is_mapped(parameter) for parameter in loaded(one).parameters())
    assert not any(is_mapped(parameter) for parameter in loaded(one, torch.bfloat16).parameters())
    mapped = [name for name, parameter in loaded(two).named_parameters() if is_mapped(parameter)]
    assert mapped and all("norm" in name for name in mapped)
    copied = [
        name
        for name, p in loaded(files.write_hf(tmp_path / "h", files.weights())).named_parameters()
        if not is_mapped(p)
    ]
    assert copied and all(name.endswith(("wq.weight", "wk.weight")) for name in copied)


@linux
def test_writing_to_a_weight_leaves_file_and_other_models_alone(tmp_path: Path) -> None:
    weights = files.weights()
    checkpoint = open_checkpoint(files.write_meta(tmp_path, weights))
    models = [build(checkpoint), build(checkpoint), build(checkpoint, torch.bfloat16)]
    load(models[0], checkpoint)
    with torch.no_grad():
        models[0].output.weight.fill_(7)
    for model in models[1:]:
        load(model, checkpoint)
        assert torch.equal(model.output.weight, weights["output.weight"].to(model.output.weight.dtype))
    assert bool((models[0].output.weight == 7).all())
    equal(open_checkpoint(tmp_path), weights)


def test_old_files_that_are_no_archive(tmp_path: Path) -> None:
    weights = files.weights()
    files.write_meta(tmp_path, weights, shards=2)
    for path in tmp_path.glob("*.pth"):
        torch.save(torch.load(path), path, _use_new_zipfile_serialization=False)
    checkpoint = open_checkpoint(tmp_path)
    assert not checkpoint.mapped
    for _ in range(2):  # what was read is not given back as if it were a file's pages
        load(build(checkpoint), checkpoint)
        equal(checkpoint, weights)


def test_safetensors_out_of_alignment(tmp_path: Path) -> None:
    weights = files.weights()
    path = files.write_hf(tmp_path, weights) / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    path.write_bytes((length + 1).to_bytes(8, "little") + data[8 : 8 + length] + b" " + data[8 + length :])
    checkpoint = open_checkpoint(tmp_path)
    assert not checkpoint.mapped
    load(build(checkpoint), checkpoint)
    equal(checkpoint, weights)


def test_missing_and_misshapen_weights_are_named(tmp_path: Path) -> None:
    weights = files.weights()
    partial = {name: tensor for name, tensor in weights.items() if "layers.1.feed" not in name}
    with pytest.raises(LlamaError, match=r"3 weights are missing: layers.1.feed_forward.w1.weight, "):
        open_checkpoint(files.write_meta(tmp_path / "a", partial))
    wrong = {**weights, "layers.0.attention.wo.weight": torch.ones(32, 31)}
    with pytest.raises(LlamaError, match=r"wo.weight is \(32, 31\), must be \(32, 32\)"):
        open_checkpoint(files.write_meta(tmp_path / "b", wrong))
    checkpoint = open_checkpoint(files.write_meta(tmp_path / "c", weights))
    model = build(checkpoint, vocab_size=41)
    before = model.norm.weight.data_ptr()
    with pytest.raises(LlamaError, match=r"tok_embeddings.weight is \(40, 32\), must be \(41, 32\)"):
        load(model, checkpoint)
    assert model.norm.weight.data_ptr() == before


@pytest.mark.parametrize("key", ["rope_scaling", "w_lora", "dimm", "ffn_dim"])
def test_unknown_settings_are_named(tmp_path: Path, key: str) -> None:
    files.write_meta(tmp_path, files.weights(), {**files.GQA, key: True})
    with pytest.raises(LlamaError, match=f"unknown key '{key}'"):
        open_checkpoint(tmp_path)


# ------------------------------------------------------------------------------------ small functions


def test_pair_order_is_undone() -> None:
    weight = torch.arange(8 * 3.0).view(8, 3)
    halves = pairs_to_halves(weight, 2)
    assert halves[:, 0].tolist() == [0, 6, 3, 9, 12, 18, 15, 21]
    assert torch.equal(halves_to_pairs(halves, 2).reshape(8, 3), weight)


def test_names_are_the_models() -> None:
    model = Transformer(ModelArgs(dim=16, n_layers=2, n_heads=2, vocab_size=8, max_seq_len=4, max_batch_size=1))
    assert all_names(2) == list(model.state_dict())
    assert [hf_name(name) for name in all_names(2)] == [files.hf_name(name) for name in all_names(2)]


@pytest.mark.parametrize(
    ("dim", "width"), [(4096, 11008), (5120, 13824), (8192, 28672), (4096, 14336), (8192, 22016), (2048, 5632)]
)
def test_ffn_width_of_the_known_models(dim: int, width: int) -> None:
    settings = width_settings(dim, width)
    assert settings["multiple_of"] in (256, 1024, 4096)
    assert ffn_width(4 * dim, **settings) == width


def test_any_ffn_width_can_be_expressed() -> None:
    for width in range(1, 700, 7):
        assert ffn_width(4 * 64, **width_settings(64, width)) == width


@pytest.mark.parametrize("width", [1, 48, 85, 88, 100, 256])
def test_a_width_that_a_file_gives(tmp_path: Path, width: int) -> None:
    """Hugging Face's and llama2.c's files name the FFN's width, which no rule has to give; params.json says it, too."""
    params = {**files.GQA, "multiple_of": width, "ffn_dim_multiplier": width / 85}  # 85: two thirds of 4 * 32
    weights = files.weights(params)
    checkpoint = open_checkpoint(files.write_hf(tmp_path / "hf", weights, params))
    assert checkpoint.params["ffn_dim"] == width == build(checkpoint).layers[0].feed_forward.w1.out_features
    loaded(tmp_path / "hf")
    convert(str(tmp_path / "hf"), str(tmp_path / "meta"), "meta")
    equal(open_checkpoint(tmp_path / "meta"), weights)
    assert "ffn_dim" not in json.loads((tmp_path / "meta" / "params.json").read_text())


def test_memory_estimate_is_that_of_facts() -> None:
    big = {"dim": 8192, "n_layers": 80, "n_heads": 64, "n_kv_heads": 8, "vocab_size": 32000}
    big |= {"multiple_of": 4096, "ffn_dim_multiplier": 1.3}
    need = memory_estimate(big, 4096, 32, 8, torch.float16)
    assert round(need.kv_cache / 1e9, 1) == 5.4
    assert round(memory_estimate(big, 4096, 32, 1, torch.float16).kv_cache / 1e9, 1) == 42.9
    assert round(need.weights / 1e9, 1) == 17.2


def test_memory_of_a_model_is_counted_exactly() -> None:
    args = ModelArgs(**{**files.GQA, "max_seq_len": 24, "max_batch_size": 3})
    model = Transformer(args)
    need = memory_estimate(vars(args), 24, 3, 1, torch.float32)
    assert need.weights == sum(parameter.numel() * 4 for parameter in model.parameters())
    cache = model.layers[0].attention
    assert need.kv_cache == 2 * (cache.cache_k.numel() + cache.cache_v.numel()) * 4


@linux
def test_too_little_memory_stops_with_the_arithmetic() -> None:
    args = ModelArgs(vocab_size=32000, max_seq_len=4096, max_batch_size=100_000)
    with pytest.raises(LlamaError, match=r"weights 26.95 GB \(float32\) \+ KV cache .*max_batch_size=100000") as error:
        check_memory(args, torch.device("cpu"), torch.float32, 1)
    assert "are free: lower" in str(error.value)
    free = free_memory(torch.device("cpu"))
    assert free is not None and free > 10_000_000
    check_memory(ModelArgs(**{**files.GQA, "max_seq_len": 24}), torch.device("cpu"), torch.float32, 2)
