"""GGUF files, held against the package `gguf`: every type of block, whole files, split ones, settings, what is refused."""

import re
import shutil
import struct
import time
from pathlib import Path
from typing import Any

import checkpoint_files as files
import gguf
import lora_files
import numpy as np
import pytest
import torch
from test_checkpoint import build, equal, loaded
from torch import Tensor
from transformers import AutoModelForCausalLM

from llama.checkpoint import load, open_checkpoint
from llama.checkpoint.checkpoint import DEQUANTIZE_STEP
from llama.checkpoint.codecs import Int4Groups
from llama.checkpoint.ggml_codecs import BLOCKS, Blocks
from llama.checkpoint.gguf import read_gguf
from llama.cli.convert import convert
from llama.cli.info import info
from llama.errors import LlamaError
from llama.quantization import pack, pack_quantized

GQA = files.GQA
WIDE = {**GQA, "dim": 256, "multiple_of": 256}  # rows of one K block
KINDS = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "F16", "BF16", "F32"]
OVERFLOW = pytest.mark.filterwarnings("ignore::RuntimeWarning:gguf")


def codec(kind: str, rows: int, columns: int, seed: int = 0) -> tuple[Blocks, np.ndarray]:
    """Random bytes, every scale among them, as our codec and as they are."""
    cls = BLOCKS[gguf.GGMLQuantizationType[kind].value]
    data = np.random.default_rng(seed).integers(0, 256, (rows, columns // cls.values * cls.size), dtype=np.uint8)
    return cls(torch.from_numpy(data)), data


# ------------------------------------------------------------------------------------------- blocks


@OVERFLOW
@pytest.mark.parametrize("kind", KINDS[:8])
def test_blocks_are_unpacked_as_gguf_does(kind: str) -> None:
    """Bit for bit, infinite and NaN scales too."""
    ours, data = codec(kind, 64, 512)
    theirs = files.gguf_values(data, kind)
    assert ours.shape == theirs.shape == (64, 512) and theirs.isnan().any() and theirs.isfinite().any()
    assert torch.equal(ours.dequantize().nan_to_num(7.5), theirs.nan_to_num(7.5))
    assert torch.equal(ours.rows(5, 9).nan_to_num(7.5), theirs[5:9].nan_to_num(7.5))


def test_blocks_in_one_axis_and_another_default_device() -> None:
    """llama.cpp never stores norms so; `meta` stands for a GPU: nothing is made there."""
    ours, data = codec("Q8_0", 1, 64, seed=4)
    with torch.device("meta"):
        found = BLOCKS[8](ours.blocks[0])
        assert found.shape == (64,) and torch.equal(found.dequantize(), files.gguf_values(data, "Q8_0")[0])
        assert torch.equal(found.rows(3, 40), files.gguf_values(data, "Q8_0")[0, 3:40])
        assert all(codec(kind, 4, 512)[0].dequantize().device.type == "cpu" for kind in KINDS[:8])


def test_the_worked_example_of_the_format() -> None:
    blocks = torch.tensor([[0x00, 0x3C, *range(16)]], dtype=torch.uint8)
    assert BLOCKS[2](blocks).dequantize().tolist() == [[*range(-8, 8), *[-8] * 16]]


# -------------------------------------------------------------------------------------- whole files


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_every_type(tmp_path: Path, kind: str) -> None:
    """Matrices of one type, the head of another, norms in float32, as llama.cpp's quantizer mixes them."""
    weights = files.weights(WIDE)
    kinds = {"norm.weight": "F32", "output.weight": "Q8_0", ".weight": kind}
    path = files.write_gguf(tmp_path / "x.gguf", weights, WIDE, kinds)
    checkpoint = open_checkpoint(path)
    for name, tensor in weights.items():
        stored = next(kind for end, kind in kinds.items() if name.endswith(end))
        read = checkpoint.read(name)
        assert torch.equal(read.float(), files.gguf_values(files.gguf_data(tensor, stored), stored)), name
        assert read.dtype == {"F16": torch.float16, "BF16": torch.bfloat16}.get(stored, torch.float32)
        assert (read.isfinite().all() and 0.001 < read.float().std() < 2) or "norm" in name
    params = {
        name: checkpoint.params[name] for name in ("dim", "n_layers", "n_heads", "n_kv_heads", "norm_eps", "ffn_dim")
    }
    assert params == {"dim": 256, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "norm_eps": 1e-5, "ffn_dim": 768}
    assert checkpoint.format == "gguf" and checkpoint.context == 24 and not checkpoint.tied
    assert checkpoint.params["rope_theta"] == 10000.0 and checkpoint.quantized is None


def test_the_model_is_the_one_of_metas_folder(tmp_path: Path) -> None:
    """q and k in Meta's order: the same logits, bit for bit."""
    weights = files.weights()
    ours, theirs = files.write_gguf(tmp_path / "x.gguf", weights), files.write_meta(tmp_path / "meta", weights)
    models = [loaded(path) for path in (ours, theirs)]
    ids = torch.arange(12).view(1, 12)
    with torch.no_grad():
        one, other = (model(ids, 0) for model in models)
    assert torch.equal(one, other)
    equal(open_checkpoint(ours), weights)


@pytest.mark.parametrize("name", ["model.gguf", "weights.bin", "noname", "model.safetensors", "consolidated.00.pth"])
def test_told_by_content(tmp_path: Path, name: str) -> None:
    path = files.write_gguf(tmp_path / "x.gguf", files.weights()).rename(tmp_path / name)
    assert open_checkpoint(path).format == "gguf"


def test_a_folder_with_one(tmp_path: Path) -> None:
    files.write_gguf(tmp_path / "x.gguf", files.weights())
    (tmp_path / "config.json").write_text("{}")  # as repositories of converted models have it
    assert open_checkpoint(tmp_path).format == "gguf"
    shutil.copy(tmp_path / "x.gguf", tmp_path / "y.gguf")
    with pytest.raises(FileNotFoundError, match=r"several: x.gguf, y.gguf: give one"):
        open_checkpoint(tmp_path)


def test_a_tied_head(tmp_path: Path) -> None:
    weights = files.weights()
    head = weights.pop("output.weight")
    checkpoint = open_checkpoint(
        files.write_gguf(tmp_path / "x.gguf", weights, kinds={"tok_embeddings.weight": "Q8_0"})
    )
    assert checkpoint.tied and checkpoint.shape("output.weight") == head.shape
    model = build(checkpoint)
    load(model, checkpoint)
    assert model.output.weight.data_ptr() == model.tok_embeddings.weight.data_ptr()


@pytest.mark.parametrize("world", [1, 2])
def test_every_rank_gets_its_part(tmp_path: Path, world: int) -> None:
    weights = files.weights(WIDE)
    path = files.write_gguf(tmp_path / "x.gguf", weights, WIDE, {"norm.weight": "F32", ".weight": "Q6_K"})
    checkpoint = open_checkpoint(path)
    for name, axis in (("attention.wq", 0), ("attention.wo", 1), ("feed_forward.w2", 1)):
        whole = files.gguf_values(files.gguf_data(weights[f"layers.1.{name}.weight"], "Q6_K"), "Q6_K")
        parts = [checkpoint.read(f"layers.1.{name}.weight", rank, world) for rank in range(world)]
        assert torch.equal(torch.cat(parts, axis), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_are_unpacked_some_rows_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    params = {**WIDE, "vocab_size": 2100, "n_layers": 1}
    path = files.write_gguf(tmp_path / "x.gguf", files.weights(params), params, {"tok_embeddings.weight": "Q4_K"})
    rows, unpacked = Blocks.rows, []

    def counting(self: Blocks, start: int, stop: int) -> Tensor:
        unpacked.append((start, stop))
        return rows(self, start, stop)

    monkeypatch.setattr(Blocks, "rows", counting)
    monkeypatch.setattr(Blocks, "dequantize", None)
    model = loaded(path, dtype)
    step = DEQUANTIZE_STEP // 256
    assert unpacked == [(0, step), (step, 2 * step), (2 * step, 2100)]
    monkeypatch.undo()
    stored = open_checkpoint(path)
    assert torch.equal(model.tok_embeddings.weight, stored.read("tok_embeddings.weight").to(dtype))


def test_split_files(tmp_path: Path) -> None:
    weights = files.weights()
    files.write_gguf(tmp_path / "x.gguf", weights, split=9)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"x-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for path in (tmp_path, *(tmp_path / name for name in names)):
        checkpoint = open_checkpoint(path)
        equal(checkpoint, weights)
        assert checkpoint.shards == 3
    (tmp_path / names[0]).rename(tmp_path / "a.gguf")
    with pytest.raises(FileNotFoundError, match=r"of 3 parts, x-00001-of-00003.gguf is missing"):
        open_checkpoint(tmp_path / names[1])
    with pytest.raises(LlamaError, match=r"split.no 0 of split.count 3, counted from 0; expected 0 of 1: parts are"):
        open_checkpoint(tmp_path / "a.gguf")
    (tmp_path / "a.gguf").rename(tmp_path / names[0])
    shutil.copy(tmp_path / names[1], tmp_path / names[2])
    with pytest.raises(LlamaError, match=r"00003-of-00003.gguf: split.no 1 of split.count 3.*expected 2 of 3"):
        open_checkpoint(tmp_path)


# ---------------------------------------------------------------------------------------- settings


def test_settings_of_the_rotary_angles(tmp_path: Path) -> None:
    weights = files.weights()
    path = tmp_path / "x.gguf"

    def params(extra: dict[str, Tensor] | None = None, **settings: Any) -> dict[str, Any]:
        return open_checkpoint(files.write_gguf(path, {**weights, **(extra or {})}, **settings)).params

    assert params(llama__rope__freq_base=500000.0)["rope_theta"] == 500000.0
    assert params().get("rope_scaling") is None
    assert params(llama__rope__scaling__type="none", llama__rope__scaling__factor=4.0).get("rope_scaling") is None
    linear = {"rope_type": "linear", "factor": 2.3}
    assert params(llama__rope__scaling__type="linear", llama__rope__scaling__factor=2.3)["rope_scaling"] == linear
    assert params(llama__rope__scale_linear=2.3)["rope_scaling"] == linear
    divisors = {"rope_freqs.weight": torch.tensor([1.0, 1.5, 8.0, 8.0])}
    assert params(divisors)["rope_scaling"] == {"rope_type": "divisors", "divisors": [1.0, 1.5, 8.0, 8.0]}
    assert params({"blk.0.attn_rot_embd.weight": torch.ones(3)}).get("rope_scaling") is None


def test_explicit_width_of_heads_and_biases(tmp_path: Path) -> None:
    """As helpers of Hugging Face's format read them: the same model from the folder that is written of it."""
    params = {**GQA, "head_dim": 16}
    weights = files.weights()
    generator = torch.Generator().manual_seed(5)
    for layer in range(2):
        for name, rows in (("wq", 64), ("wk", 32), ("wv", 32), ("wo", 32)):
            shape = (rows, 64 if name == "wo" else 32)
            weights[f"layers.{layer}.attention.{name}.weight"] = torch.randn(shape, generator=generator) / 6
            weights[f"layers.{layer}.attention.{name}.bias"] = torch.randn(rows, generator=generator) / 6
    widths = {
        "llama__attention__key_length": 16,
        "llama__attention__value_length": 16,
        "llama__rope__dimension_count": 16,
    }
    path = files.write_gguf(tmp_path / "x.gguf", weights, params, **widths)
    checkpoint = open_checkpoint(path)
    assert (checkpoint.params["head_dim"], checkpoint.params["attention_bias"], checkpoint.params["mlp_bias"]) == (
        16,
        True,
        False,
    )
    assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in weights.items())
    convert(str(path), str(tmp_path / "hf"), "hf")
    theirs = AutoModelForCausalLM.from_pretrained(str(tmp_path / "hf"), dtype=torch.float32)
    ids = torch.arange(12).view(1, 12)
    with torch.no_grad():
        assert torch.allclose(loaded(path)(ids, 0), theirs(ids).logits, atol=1e-4)
    del weights["layers.1.attention.wq.bias"]
    with pytest.raises(LlamaError, match=r"1 weights are missing: layers.1.attention.wq.bias"):
        open_checkpoint(files.write_gguf(path, weights, params, **widths))


def test_divisors_are_computed_with(tmp_path: Path) -> None:
    """Frequencies divided by 2 everywhere are positions divided by 2."""
    weights = files.weights()
    scaled = {"rope_freqs.weight": torch.full((4,), 2.0)}
    one = loaded(files.write_gguf(tmp_path / "a.gguf", {**weights, **scaled}))
    other = loaded(files.write_gguf(tmp_path / "b.gguf", weights, llama__rope__scale_linear=2.0))
    plain = loaded(files.write_gguf(tmp_path / "c.gguf", weights))
    ids = torch.arange(12).view(1, 12)
    with torch.no_grad():
        logits = [model(ids, 0) for model in (one, other, plain)]
    assert torch.allclose(logits[0], logits[1], atol=1e-5) and not torch.allclose(logits[0], logits[2], atol=1e-2)


REFUSED = [
    ({"general__architecture": "qwen2"}, "architecture is 'qwen2'; expected 'llama'"),
    ({"general__type": "adapter"}, "general.type is 'adapter'.*a LoRA"),
    ({"llama__expert_count": 8}, "llama.expert_count is 8"),
    ({"llama__attention__sliding_window": 4096}, "sliding_window is 4096"),
    ({"llama__attention__causal": False}, "attention.causal is False"),
    ({"llama__new_setting": 1.5}, "llama.new_setting is 1.5"),
    ({"llama__attention__head_count_kv": [2, 1]}, "head_count_kv is .*one number"),
    ({"llama__attention__head_count": 0}, "head_count=0"),
    ({"llama__attention__head_count": None}, "no llama.attention.head_count"),
    ({"llama__attention__layer_norm_rms_epsilon": None}, "no llama.attention.layer_norm_rms_epsilon"),
    ({"llama__attention__layer_norm_rms_epsilon": float("nan")}, "epsilon is nan"),
    ({"llama__feed_forward_length": "wide"}, "feed_forward_length is 'wide'"),
    ({"llama__block_count": 3}, "the files hold 2 layers, but its metadata says n_layers=3"),
    ({"llama__rope__dimension_count": 4}, "rope.dimension_count is 4; expected the heads' width, 8"),
    ({"llama__attention__value_length": 16}, "value_length is 16; expected the heads' width, 8"),
    ({"llama__rope__scaling__type": "yarn", "llama__rope__scaling__factor": 4.0}, "rope.scaling.type is 'yarn'"),
    ({"llama__rope__scaling__type": "longrope"}, "rope.scaling.type is 'longrope'"),
    ({"llama__rope__scaling__factor": -2.0}, "with factor -2.0"),
    ({"general__alignment": 48}, "general.alignment is 48"),
]


@pytest.mark.parametrize(("settings", "words"), REFUSED)
def test_settings_that_are_not_computed(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    path = tmp_path / "x.gguf"
    if "general__architecture" in settings:
        path = files.write_gguf(path, files.weights())
        path.write_bytes(path.read_bytes().replace(b"\5\0\0\0\0\0\0\0llama", b"\5\0\0\0\0\0\0\0qwen2", 1))
    else:
        files.write_gguf(path, files.weights(), **settings)
    with pytest.raises(LlamaError, match=words):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"rope_freqs.weight": torch.ones(5)}, "rope_freqs.weight: .*must be 4 numbers above 0"),
        ({"rope_freqs.weight": torch.tensor([1.0, 0.0, 1.0, 1.0])}, "must be 4 numbers above 0"),
        ({"rope_factors_long.weight": torch.ones(4)}, "1 weights that a Llama model does not have"),
        ({"blk.0.attn_q_norm.weight": torch.ones(8)}, "1 weights that a Llama model does not have"),
        ({"blk.2.attn_q.weight": torch.ones(32, 32)}, "hold 3 layers, but its metadata says n_layers=2"),
    ],
)
def test_weights_that_are_not_computed(tmp_path: Path, extra: dict[str, Tensor], words: str) -> None:
    path = files.write_gguf(tmp_path / "x.gguf", {**files.weights(), **extra})
    with pytest.raises(LlamaError, match=words):
        open_checkpoint(path)


# ----------------------------------------------------------------------------------- damaged headers


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def header(
    *keys: bytes, tensors: tuple[bytes, ...] = (), version: int = 3, counts: tuple[int, int] | None = None
) -> bytes:
    head = struct.pack("<4sIQQ", b"GGUF", version, *(counts or (len(tensors), len(keys))))
    head += b"".join(keys) + b"".join(tensors)
    return head + b"\0" * (-len(head) % 32) + b"\0" * 64


def tensor(name: bytes = b"x", shape: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def array(kind: int, count: int, body: bytes = b"") -> bytes:
    return text(b"a") + struct.pack("<IIQ", 9, kind, count) + body


DEEP = array(9, 1, b"".join(struct.pack("<IQ", 9, 1) for _ in range(1000)))
DAMAGED = {
    "version 1": (header(version=1), "version 1; expected a GGUF file of version 2 or 3"),
    "version 4": (header(version=4), "version 4"),
    "big-endian": (header(version=3 << 24), "a big-endian file"),
    "cut in the counts": (header()[:20], "ends in the middle"),
    "more keys than there are": (header(counts=(0, 65000)), "a key of|type 0|ends in the middle|twice"),
    "2 ** 63 keys": (header(counts=(0, 1 << 63)), r"0 tensors and 9223372036854775808 keys \(at most 65536\)"),
    "2 ** 63 tensors": (header(counts=(1 << 63, 0)), "9223372036854775808 tensors and"),
    "a key of 2 ** 40 bytes": (header(struct.pack("<Q", 1 << 40)), "a key of 1099511627776 bytes"),
    "a key that is no text": (header(text(b"\xff") + b"\0" * 5), "a key at byte 32 that is no UTF-8"),
    "a key twice": (header(*[text(b"k") + struct.pack("<IB", 0, 1)] * 2), "the key 'k' twice"),
    "an unknown type": (header(text(b"k") + struct.pack("<I", 13)), "'k' is of type 13"),
    "a text beyond the end": (header(text(b"k") + struct.pack("<IQ", 8, 500)), "'k': a text of 500 bytes"),
    "numbers beyond the end": (header(array(4, 100)), "array .depth 1. of 100 items of type 4"),
    "2 ** 62 numbers": (header(array(12, 1 << 62)), "4611686018427387904 items"),
    "2 ** 62 texts": (header(array(8, 1 << 62)), "4611686018427387904 items"),
    "texts beyond the end": (header(array(8, 2, text(b"ab") + struct.pack("<Q", 1 << 63))), "a text reaches beyond"),
    "items of an unknown type": (header(array(77, 1)), "items of type 77"),
    "deep arrays": (header(DEEP), "depth 4"),
    "five axes": (header(tensors=(tensor(shape=(1,) * 5),)), "'x' with 5 axes"),
    "no axes": (header(tensors=(tensor(shape=()),)), "'x' with 0 axes"),
    "an empty axis": (header(tensors=(tensor(shape=(0, 4)),)), r"'x' is \(4, 0\)"),
    "a huge axis": (header(tensors=(tensor(shape=(1 << 63, 1 << 63)),)), r"'x' is \(9223372036854775808"),
    "two of a name": (header(tensors=(tensor(), tensor(offset=32))), "the tensor 'x' twice"),
    "an unknown ggml type": (header(tensors=(tensor(kind=99),)), "stored as an unknown type .ggml type 99."),
    "a type we do not read": (
        header(tensors=(tensor(shape=(256,), kind=16),)),
        "IQ2_XXS .ggml type 16.; expected one of",
    ),
    "a part of a block": (header(tensors=(tensor(shape=(33,), kind=8),)), "in blocks of 32"),
    "not aligned": (header(tensors=(tensor(offset=4),)), "'x' begins at byte 4 of the data, not where it must: 0"),
    "overlapping": (header(tensors=(tensor(), tensor(b"y", offset=0))), "'y' begins at byte 0 .* must: 32"),
    "with a gap": (header(tensors=(tensor(), tensor(b"y", offset=64))), "'y' begins at byte 64"),
    "truncated": (header(tensors=(tensor(shape=(17,)),))[:-1], "its tensors take .*truncated"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_header(tmp_path: Path, name: str) -> None:
    data, words = DAMAGED[name]
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    with pytest.raises(LlamaError, match=words) as error:
        open_checkpoint(path)
    assert len(str(error.value)) < 600


def test_versions_2_and_3_are_one_layout(tmp_path: Path) -> None:
    path = files.write_gguf(tmp_path / "x.gguf", files.weights())
    data = path.read_bytes()
    assert data[4] == 3
    path.write_bytes(data[:4] + b"\2" + data[5:])
    equal(open_checkpoint(path), files.weights())


def test_alignment(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    for alignment in (8, 256):
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_custom_alignment(alignment)
        writer.add_tensor("a", np.arange(3, dtype=np.float32))
        writer.add_tensor("b", np.arange(5, dtype=np.float32))
        for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
            write()
        writer.close()
        assert read_gguf(path).stored()["b"].tolist() == [0, 1, 2, 3, 4]


def test_a_long_vocabulary_takes_no_time(tmp_path: Path) -> None:
    """130,000 tokens and 280,000 merges: the package gguf needs seconds."""
    tokens = b"".join(text(b"token%d" % i) for i in range(130_000))
    merges = b"".join(text(b"mer ge%d" % i) for i in range(280_000))
    keys = [array(8, 130_000, tokens), array(8, 280_000, merges).replace(text(b"a"), text(b"b"), 1)]
    path = tmp_path / "x.gguf"
    path.write_bytes(header(*keys))
    start = time.process_time()
    found = read_gguf(path)
    assert time.process_time() - start < 0.6 and found.metadata["a"].texts()[129_999] == b"token129999"


# ----------------------------------------------------------------------------- codes kept in int4


def near(kind: str, spread: float, center: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return (torch.randn(64, 256, generator=generator) * spread + center).clamp(center - 2.2 * spread, center + 9)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_codes_are_kept_in_int4(tmp_path: Path, kind: str) -> None:
    """The file's own codes; scale and minimum, float16 in the file, are rounded to the bfloat16 of our groups."""
    data = files.gguf_data(near(kind, 0.05), kind)
    stored, theirs = (
        BLOCKS[gguf.GGMLQuantizationType[kind].value](torch.from_numpy(data)),
        files.gguf_values(data, kind),
    )
    kept = stored.for_scheme("int4")
    assert kept is not None and stored.for_scheme("int8") is None
    scale, zero = kept.scales.float().unbind(-1)
    exact_scale, exact_zero = (one.view(64, 8) for one in stored.scale_and_zero(stored.blocks.view(-1, stored.size)))
    assert torch.equal(scale, exact_scale.bfloat16().float()) and torch.equal(zero, exact_zero.bfloat16().float())
    exact = Int4Groups(kept.qvalues, torch.stack([exact_scale, exact_zero], -1))
    assert torch.allclose(exact.dequantize(), theirs, rtol=1e-6, atol=1e-7)  # the codes hold every value
    packed = pack_quantized(kept.qvalues, kept.scales, "int4")
    step = exact_scale.abs().repeat_interleave(32, 1)
    error, again = (packed.dense() - theirs).abs() / step, (pack(theirs, "int4").dense() - theirs).abs() / step
    assert error.max() < 0.1 and error.mean() < (0.1 if kind == "Q4_0" else 1.1) * again.mean()


def test_codes_whose_scales_our_groups_hold_are_exact() -> None:
    data = files.gguf_data(near("Q4_0", 0.05), "Q4_0").reshape(-1, 18)
    data[:, 0] &= 0xF8  # the last three bits of float16, which bfloat16 does not have
    stored = BLOCKS[2](torch.from_numpy(data.reshape(64, -1)))
    kept = stored.for_scheme("int4")
    assert kept is not None and torch.equal(kept.dequantize(), stored.dequantize())


def test_codes_far_from_zero_are_not_kept() -> None:
    """A minimum of 3 with steps of 0.001: bfloat16 would move it by several steps, fitting anew does not."""
    data = files.gguf_data(near("Q4_1", 0.005, 3.0), "Q4_1")
    assert BLOCKS[3](torch.from_numpy(data)).for_scheme("int4") is None


@OVERFLOW
def test_codes_with_scales_that_are_not_finite_are_not_kept() -> None:
    assert codec("Q4_0", 64, 512)[0].for_scheme("int4") is None


@pytest.mark.parametrize("scheme", ["int8", "int4"])
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q6_K"])
def test_quantized_from_any_type(tmp_path: Path, kind: str, scheme: str) -> None:
    weights = files.weights(WIDE)
    path = files.write_gguf(tmp_path / "x.gguf", weights, WIDE, {"norm.weight": "F32", ".weight": kind})
    checkpoint = open_checkpoint(path)
    model = build(checkpoint)
    load(model, checkpoint, scheme=scheme, device=torch.device("cpu"))
    for name in ("attention.wq", "feed_forward.w2"):
        packed = model.get_submodule(f"layers.1.{name}").packed
        values = checkpoint.read(f"layers.1.{name}.weight")
        worst = (packed.dense() - values).abs().amax(1) / values.abs().amax(1)
        assert worst.max() < (0.01 if scheme == "int8" else 0.006 if kind == "Q4_0" else 0.2)


def test_adapters_over_blocks(tmp_path: Path) -> None:
    """Merged with what was unpacked, then quantized: codes are kept of unchanged matrices alone."""
    weights, kinds = files.weights(WIDE), {"norm.weight": "F32", ".weight": "Q4_0"}
    path, tensors = (
        files.write_gguf(tmp_path / "x.gguf", weights, WIDE, kinds),
        lora_files.matrices(weights, ["q_proj"]),
    )
    folder = lora_files.write_adapter(tmp_path / "lora", tensors, target_modules=["q_proj"])
    plain, changed = open_checkpoint(path), open_checkpoint(path, lora=str(folder))
    values = {name: plain.read(name) for name in plain.names()}
    wanted = lora_files.merged(values, tensors, WIDE, lora_files.default_scale())
    assert all(torch.equal(changed.read(name), wanted[name]) for name in changed.names())
    assert not torch.equal(wanted["layers.0.attention.wq.weight"], values["layers.0.attention.wq.weight"])
    for name, kept in (("wq", False), ("wk", True)):
        assert (changed.quantized_shard(f"layers.0.attention.{name}.weight", scheme="int4") is not None) is kept


# -------------------------------------------------------------------------------------- conversion


@pytest.mark.parametrize("to", ["meta", "hf"])
def test_convert(tmp_path: Path, to: str) -> None:
    weights = files.weights(WIDE)
    path = files.write_gguf(tmp_path / "x.gguf", weights, WIDE, {"norm.weight": "F32", ".weight": "Q4_1"})
    convert(str(path), str(tmp_path / "out"), to)
    written, read = open_checkpoint(tmp_path / "out"), open_checkpoint(path)
    assert written.format == to
    equal(written, {name: read.read(name) for name in read.names()})


def test_convert_to_int4_keeps_the_codes(tmp_path: Path) -> None:
    weights = files.weights(WIDE)
    path = files.write_gguf(tmp_path / "x.gguf", weights, WIDE, {"norm.weight": "F32", ".weight": "Q4_0"})
    convert(str(path), str(tmp_path / "out"), "meta", quantize="int4")
    read, written = (open_checkpoint(place) for place in (path, tmp_path / "out"))
    kept = read.quantized_shard("layers.0.attention.wq.weight", scheme="int4")
    stored = written.weights["layers.0.attention.wq.weight"].codec
    assert kept is not None and stored is not None
    assert torch.equal(stored.qvalues, kept.qvalues) and torch.equal(stored.scales, kept.scales)
    assert written.weights["output.weight"].codec.name == "int8"


def test_info_names_the_types(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kinds = {"norm.weight": "F32", "output.weight": "Q6_K", "tok_embeddings.weight": "Q5_0", ".weight": "Q4_K"}
    info(str(files.write_gguf(tmp_path / "x.gguf", files.weights(WIDE), WIDE, kinds)))
    out = capsys.readouterr().out
    assert re.search(r"^format +gguf$", out, re.M)
    assert re.search(r"^dtype +float32 \(stored as Q4_K, Q5_0, Q6_K\)$", out, re.M)
    assert re.search(r"^context +24$", out, re.M)
