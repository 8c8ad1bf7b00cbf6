"""Folders that other programs have quantized are told by name, with what to do instead, whatever gives them away."""

import json
import struct
from pathlib import Path
from typing import Any

import checkpoint_files as files
import pytest
import torch
from safetensors.torch import save_file

from llama import LlamaError
from llama.checkpoint import open_checkpoint

ADVICE = ("base_model in its README.md", "GGUF", "quantize='int4'")
# quantization_config as these programs write it into config.json, and how it is told.
CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "gptq": ({"bits": 4, "group_size": 128, "desc_act": True, "quant_method": "gptq", "sym": True}, "GPTQ in 4 bits"),
    "gptq 8": ({"bits": 8, "group_size": 32, "quant_method": "gptq"}, "GPTQ in 8 bits"),
    "old gptq": ({"bits": 4, "desc_act": False, "damp_percent": 0.1}, "GPTQ in 4 bits"),
    "awq": ({"bits": 4, "group_size": 128, "quant_method": "awq", "version": "gemm", "zero_point": True}, "AWQ in 4 bits"),
    "old awq": ({"w_bit": 4, "q_group_size": 128, "zero_point": True}, "AWQ in 4 bits"),
    "nf4": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4"},
        "bitsandbytes in 4 bits",
    ),
    "int8": ({"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True}, "bitsandbytes in 8 bits"),
    "old int8": ({"load_in_8bit": True, "llm_int8_threshold": 6.0}, "bitsandbytes in 8 bits"),
    "fp8": ({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}, "FP8"),
    "fbgemm": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, "FP8 (FBGEMM)"),
    "compressed-tensors": (
        {"quant_method": "compressed-tensors", "format": "float-quantized",
         "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}}},
        "compressed-tensors (llm-compressor, vLLM) in 8 bits",
    ),
    "hqq": ({"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4}}}, "HQQ in 4 bits"),
    "eetq": ({"quant_method": "eetq", "weights": "int8"}, "EETQ in 8 bits"),
    "torchao": ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}}}, "torchao"),
    "quanto": ({"quant_method": "quanto", "weights": "int4", "activations": None}, "quanto in 4 bits"),
    "a new one": ({"quant_method": "brand-new"}, "brand-new"),
    "nothing told": ({}, "another program"),
}  # fmt: skip


def refused(path: Path, *words: str) -> None:
    with pytest.raises(LlamaError) as caught:
        open_checkpoint(path)
    message = str(caught.value)
    assert all(word in message for word in (*words, *ADVICE)), message
    assert len(message) < 600 and "\n" not in message


def folder(tmp_path: Path, **config: Any) -> Path:
    return files.write_hf(tmp_path / "hf", files.weights(), **config)


@pytest.mark.parametrize("name", CONFIGS)
def test_config_json_says_it(tmp_path: Path, name: str) -> None:
    config, words = CONFIGS[name]
    refused(
        folder(tmp_path, quantization_config=config), "config.json: quantization_config is", f"quantized by {words};"
    )


def test_other_fields_and_files_say_it(tmp_path: Path) -> None:
    nested = {"config_groups": {"g": {"weights": {"num_bits": 4}}}}
    refused(folder(tmp_path / "1", compression_config=nested), "compression_config is", "compressed-tensors", "4 bits")
    refused(folder(tmp_path / "2", quantization={"group_size": 64, "bits": 4}), "quantization is", "MLX in 4 bits")
    beside = {"quantize_config.json": ("GPTQ", "bits"), "quant_config.json": ("AWQ", "w_bit")}
    for name, (method, key) in beside.items():
        path = folder(tmp_path / name)
        (path / name).write_text(json.dumps({key: 4}))
        refused(path, f"{name}: it is beside the weights", f"quantized by {method} in 4 bits")
    (path / "quant_config.json").unlink()
    (path / "quanto_qmap.json").write_text(json.dumps({"model.layers.0.mlp.up_proj": {"weights": "qint4"}}))
    refused(path, "quanto_qmap.json", "quantized by quanto")


def test_hostile_settings(tmp_path: Path) -> None:
    deep: Any = {"bits": 4}
    for _ in range(300):
        deep = {"x": deep}
    for value in (deep, "gptq", [1], 7, {"quant_method": "x" * 100_000}, {"quant_method": {"a": 1}, "bits": [4]}, True):
        refused(folder(tmp_path, quantization_config=value), "quantization_config is")


KEYS = {
    "self_attn.q_proj.qweight": "GPTQ's or AWQ's",
    "self_attn.q_proj.qzeros": "GPTQ's or AWQ's",
    "self_attn.q_proj.g_idx": "GPTQ's or AWQ's",
    "self_attn.q_proj.weight.absmax": "bitsandbytes' in 4 bits",
    "self_attn.q_proj.weight.quant_state.bitsandbytes__nf4": "bitsandbytes' in 4 bits",
    "self_attn.q_proj.SCB": "bitsandbytes' in 8 bits",
    "mlp.up_proj.weight_scale": "FP8 or compressed-tensors'",
    "mlp.up_proj.weight_packed": "FP8 or compressed-tensors'",
    "mlp.up_proj.weight_scale_inv": "FP8",
    "mlp.up_proj.input_scale": "FP8",
    "mlp.up_proj.weight_scales": "EETQ's",
    "mlp.up_proj.W_q": "HQQ's",
    "mlp.up_proj.weight._data": "quanto's",
    "mlp.up_proj._weight_qdata": "torchao's",
    "mlp.up_proj.codebooks": "AQLM's",
    "mlp.up_proj.q_weight": "ExLlama's",
    "mlp.up_proj.biases": "MLX's",
}


@pytest.mark.parametrize("key", KEYS)
def test_names_of_weights_say_it(tmp_path: Path, key: str) -> None:
    """Where no settings do: beside the weights, or in place of one."""
    tensors = files.to_hf(files.weights(), files.GQA)
    path = folder(tmp_path)
    for number in range(2):
        if number:
            tensors.pop(f"model.layers.0.{'.'.join(key.split('.')[:2])}.weight")
        save_file({**tensors, f"model.layers.0.{key}": torch.ones(4)}, str(path / "model.safetensors"))
        refused(path, key, f"of quantized weights ({KEYS[key]})")


@pytest.mark.parametrize("kind", ["F8_E4M3", "F8_E5M2", "F8_E8M0", "F4_E2M1"])
def test_types_say_it(tmp_path: Path, kind: str) -> None:
    path = folder(tmp_path)
    header = json.dumps({"model.norm.weight": {"dtype": kind, "shape": [8], "data_offsets": [0, 8]}}).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    refused(path, "model.safetensors", kind, f"FP{kind[1]}")


def test_types_in_pytorchs_files_say_it(tmp_path: Path) -> None:
    weights = files.weights()
    name = "layers.0.attention.wv.weight"
    refused(
        files.write_meta(tmp_path / "meta", {**weights, name: weights[name].to(torch.float8_e4m3fn)}), "float8_e4m3fn"
    )
