"""LoRA over GGUF files: blocks are unpacked, merged, and quantized as asked for."""

from pathlib import Path
from typing import Any

import checkpoint_files as files
import lora_files
import pytest
import torch
from lora_files import matrices, write_adapter

from llama.checkpoint import load, open_checkpoint
from llama.model import ModelArgs, Transformer

pytest.importorskip("gguf", reason="needs gguf, which writes the files")
WIDE: dict[str, Any] = {**files.GQA, "dim": 256, "multiple_of": 256}
SCALE = lora_files.default_scale()


def kinds(weights: dict[str, torch.Tensor], kind: str) -> dict[str, str]:
    """Matrices in one type, norms in float32."""
    return {name: kind for name, weight in weights.items() if weight.ndim == 2}


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_1", "Q6_K"])
def test_any_blocks(tmp_path: Path, kind: str) -> None:
    weights = files.weights(WIDE)
    path = files.write_gguf(tmp_path / "model.gguf", weights, WIDE, kinds(weights, kind))
    plain = open_checkpoint(path)
    values = {name: plain.read(name, dtype=torch.float32).float() for name in plain.names()}
    tensors = matrices(weights, (*lora_files.LINEAR, "embed_tokens", "lm_head"))
    checkpoint = open_checkpoint(path, write_adapter(tmp_path / "adapter", tensors))
    wanted = lora_files.merged(values, tensors, WIDE, SCALE)
    for name in checkpoint.names():
        assert torch.equal(checkpoint.read(name, dtype=torch.float32).float(), wanted[name]), name
        parts = [checkpoint.read(name, rank, 2, torch.float32) for rank in range(2)]
        axis = 1 if name.endswith(files.COLUMNS) else 0
        whole = parts[0] if parts[0].ndim == 1 else torch.cat(parts, axis)
        assert (whole - wanted[name]).abs().max() < 1e-5, name


def test_codes_of_q4_0_are_kept_only_where_nothing_is_added(tmp_path: Path) -> None:
    weights = files.weights(WIDE)
    path = files.write_gguf(tmp_path / "model.gguf", weights, WIDE, kinds(weights, "Q4_0"))
    checkpoint = open_checkpoint(path, write_adapter(tmp_path / "adapter", matrices(weights, ["q_proj"])))
    assert checkpoint.quantized_shard("layers.0.attention.wq.weight", scheme="int4") is None
    assert checkpoint.quantized_shard("layers.0.attention.wv.weight", scheme="int4") is not None
    args = {"vocab_size": 40, "max_seq_len": 24, "max_batch_size": 2}
    models = [Transformer(ModelArgs(**{**checkpoint.params, **args})) for _ in range(2)]
    for model, opened in zip(models, (checkpoint, open_checkpoint(path)), strict=True):
        load(model, opened, scheme="int4", device=torch.device("cpu"))
    merged, plain = ([model.layers[0].attention.wq, model.layers[0].attention.wv] for model in models)
    assert (merged[0].packed.dense() - plain[0].packed.dense()).abs().max() > 0.1
    assert torch.equal(merged[1].packed.dense(), plain[1].packed.dense())
