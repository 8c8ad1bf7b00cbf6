"""LoRA adapters written as PEFT writes them, and what they make of a model's weights, in plain torch."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import checkpoint_files as files
import torch
from safetensors.torch import save_file
from torch import Tensor

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# What PEFT 0.21.2 writes, in its order.
CONFIG: dict[str, Any] = {
    "alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None, "auto_mapping": None,
    "base_model_name_or_path": "/home/someone/base", "bias": "none", "corda_config": None, "ensure_weight_tying": False,
    "eva_config": None, "exclude_modules": None, "fan_in_fan_out": False, "inference_mode": True,
    "init_lora_weights": True, "layer_replication": None, "layers_pattern": None, "layers_to_transform": None,
    "loftq_config": {}, "lora_alpha": 16, "lora_bias": False, "lora_dropout": 0.05, "megatron_config": None,
    "megatron_core": "megatron.core", "modules_to_save": None, "peft_type": "LORA", "peft_version": "0.21.2",
    "qalora_group_size": 16, "r": 4, "rank_pattern": {}, "revision": None, "target_modules": ["q_proj", "v_proj"],
    "target_parameters": None, "task_type": "CAUSAL_LM", "trainable_token_indices": None, "use_bdlora": None,
    "use_dora": False, "use_qalora": False, "use_rslora": False,
}  # fmt: skip


def modules(weights: Mapping[str, Tensor], kinds: Iterable[str] = LINEAR) -> dict[str, str]:
    """Hugging Face's name of each module of these kinds, by Meta's key."""
    names = {name: files.hf_name(name).removesuffix(".weight") for name in weights if name.endswith(".weight")}
    return {name: module for name, module in names.items() if module.split(".")[-1] in set(kinds)}


def matrices(
    weights: Mapping[str, Tensor], kinds: Iterable[str] = LINEAR, rank: int = 4, seed: int = 5,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:  # fmt: skip
    """Random A and B by PEFT's keys, as large as the weights that they change."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, module in modules(weights, kinds).items():
        out, width = weights[name].shape
        key = f"base_model.model.{module}"
        if module.endswith("embed_tokens"):
            made[f"{key}.lora_embedding_A"] = torch.randn(rank, out, generator=generator).to(dtype)
            made[f"{key}.lora_embedding_B"] = 0.1 * torch.randn(width, rank, generator=generator).to(dtype)
        else:
            made[f"{key}.lora_A.weight"] = (torch.randn(rank, width, generator=generator) / width**0.5).to(dtype)
            made[f"{key}.lora_B.weight"] = 0.3 * torch.randn(out, rank, generator=generator).to(dtype)
    return made


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], bin_file: bool = False, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **changes}))
    if bin_file:
        torch.save(dict(tensors), folder / "adapter_model.bin")
    else:
        save_file(dict(tensors), str(folder / "adapter_model.safetensors"), metadata={"format": "pt"})
    return folder


def in_pairs(name: str, rows: Tensor, params: Mapping[str, Any]) -> Tensor:
    """Rows of Hugging Face's order in Meta's, one by one, where the weight is wq or wk."""
    if not name.endswith(("wq.weight", "wk.weight")):
        return rows
    head_dim = params.get("head_dim") or params["dim"] // params["n_heads"]
    first, second = range(head_dim // 2), range(head_dim // 2, head_dim)
    order = [row for pair in zip(first, second) for row in pair]
    return rows[[head * head_dim + row for head in range(len(rows) // head_dim) for row in order]]


def merged(
    weights: Mapping[str, Tensor], tensors: Mapping[str, Tensor], params: Mapping[str, Any], scale: float
) -> dict[str, Tensor]:
    """Meta's weights with an adapter merged: `scale` is the whole factor of B A. Rounded once to the weight's type."""
    made = dict(weights)
    for name in (name for name in weights if name.endswith(".weight")):
        module = "base_model.model." + files.hf_name(name).removesuffix(".weight")
        if f"{module}.weight" in tensors:
            made[name] = in_pairs(name, tensors[f"{module}.weight"], params)
        if f"{module}.lora_A.weight" in tensors:
            a, b = (tensors[f"{module}.lora_{side}.weight"].float() for side in "AB")
            added = in_pairs(name, (b @ a) * scale, params)
            made[name] = (made[name].float() + added).to(weights[name].dtype)
        if f"{module}.lora_embedding_A" in tensors:
            a, b = (tensors[f"{module}.lora_embedding_{side}"].float() for side in "AB")
            added = ((b @ a) * scale).T.to(weights[name].dtype)
            made[name] = (made[name].float() + added.float()).to(weights[name].dtype)
    return made


def default_scale(config: Mapping[str, Any] = CONFIG) -> float:
    alpha, rank = config["lora_alpha"], config["r"]
    return float(alpha / math.sqrt(rank) if config["use_rslora"] else alpha / rank)
