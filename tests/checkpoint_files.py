"""Small checkpoints in every format, written without the package's own writers."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import reference
import torch
from safetensors.torch import save_file
from torch import Tensor

GQA: dict[str, Any] = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 40, "multiple_of": 16}
WIDE: dict[str, Any] = {**GQA, "dim": 64, "n_heads": 8, "n_kv_heads": 8, "vocab_size": 48}
BIASED: dict[str, Any] = {**WIDE, "head_dim": 12, "attention_bias": True, "mlp_bias": True}
COLUMNS = ("wo.weight", "w2.weight", "tok_embeddings.weight")
HF_NAMES = {
    "tok_embeddings": "model.embed_tokens",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "norm": "model.norm",
    "output": "lm_head",
}


def weights(params: Mapping[str, Any] = GQA, dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    return reference.random_weights(params, seed, dtype)


def cut(name: str, tensor: Tensor, shards: int, rows: bool = False) -> list[Tensor]:
    """The parts of one tensor in Meta's files; `rows` is Llama 3's way with the embedding."""
    if tensor.ndim == 1 and not name.endswith(("wq.bias", "wk.bias", "wv.bias", "w1.bias", "w3.bias")):
        return [tensor] * shards
    axis = 1 if name.endswith(COLUMNS) and not (rows and name.startswith("tok")) else 0
    return [part.clone() for part in tensor.chunk(shards, axis)]


def write_meta(
    folder: Path, tensors: Mapping[str, Tensor], params: Mapping[str, Any] = GQA, shards: int = 1, rows: bool = False
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(shards):
        part = {name: cut(name, tensor, shards, rows)[shard] for name, tensor in tensors.items()}
        part["rope.freqs"] = torch.ones(4)
        torch.save(part, folder / f"consolidated.{shard:02d}.pth")
    (folder / "params.json").write_text(json.dumps({**params, "vocab_size": -1}))
    return folder


def hf_name(name: str) -> str:
    *parts, kind = name.split(".")
    if parts[0] != "layers":
        return f"{HF_NAMES[parts[0]]}.{kind}"
    return f"model.layers.{parts[1]}.{HF_NAMES['.'.join(parts[2:])]}.{kind}"


def to_hf(tensors: Mapping[str, Tensor], params: Mapping[str, Any]) -> dict[str, Tensor]:
    """Hugging Face's names and pair order, row by row: row i of a head's first half was Meta's row 2i."""
    made = {}
    head_dim = params.get("head_dim") or params["dim"] // params["n_heads"]
    order = [*range(0, head_dim, 2), *range(1, head_dim, 2)]
    for name, tensor in tensors.items():
        if ".wq." in name or ".wk." in name:
            rows = [head * head_dim + row for head in range(len(tensor) // head_dim) for row in order]
            tensor = tensor[rows]
        made[hf_name(name)] = tensor.contiguous()
    return made


def hf_config(params: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": params["dim"],
        "intermediate_size": reference.ffn_width(params),
        "num_hidden_layers": params["n_layers"],
        "num_attention_heads": params["n_heads"],
        "num_key_value_heads": params["n_kv_heads"],
        "vocab_size": params["vocab_size"],
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        **changes,
    }


def write_hf(
    folder: Path,
    tensors: Mapping[str, Tensor],
    params: Mapping[str, Any] = GQA,
    files: int = 1,
    bin_file: bool = False,
    **changes: Any,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    theirs = to_hf(tensors, params)
    if changes.get("tie_word_embeddings"):
        del theirs["lm_head.weight"]
    (folder / "config.json").write_text(json.dumps(hf_config(params, **changes)))
    stem, suffix = ("pytorch_model", "bin") if bin_file else ("model", "safetensors")
    one = f"{stem}.{suffix}"
    groups = [dict(list(theirs.items())[start::files]) for start in range(files)]
    names = [one] if files == 1 else [f"{stem}-{i + 1:05d}-of-{files:05d}.{suffix}" for i in range(files)]
    for name, group in zip(names, groups, strict=True):
        if bin_file:
            torch.save(group, folder / name)
        else:
            save_file(group, str(folder / name), metadata={"format": "pt"})
    if files > 1:
        weight_map = {key: name for name, group in zip(names, groups, strict=True) for key in group}
        (folder / f"{one}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def _layers(tensors: Mapping[str, Tensor], end: str) -> list[Tensor]:
    return [tensor for name, tensor in tensors.items() if name.startswith("layers.") and name.endswith(end)]


MATRICES = ("wq.weight", "wk.weight", "wv.weight", "wo.weight", "w1.weight", "w2.weight", "w3.weight")


def quantize(tensor: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """llama2.c's q80: symmetric int8, one scale a group."""
    groups = tensor.float().reshape(-1, group)
    scales = groups.abs().amax(1) / 127
    return (groups / scales[:, None]).round().to(torch.int8), scales


def write_llama2c(
    path: Path, tensors: Mapping[str, Tensor], params: Mapping[str, Any] = GQA, version: int = 0, shared: bool = False,
    group: int = 16,
) -> Path:  # fmt: skip
    """A file of version 0, 1 or 2 by the letter of facts.md section 5."""
    width, window = reference.ffn_width(params), 24
    heads = (params["n_heads"], params["n_kv_heads"])
    vocab = params["vocab_size"]
    sign = -1 if version == 0 and not shared else 1
    ints = struct.pack("<7i", params["dim"], width, params["n_layers"], *heads, sign * vocab, window)
    norms = [*_layers(tensors, "attention_norm.weight"), *_layers(tensors, "ffn_norm.weight"), tensors["norm.weight"]]
    matrices = [tensor for end in MATRICES for tensor in _layers(tensors, end)]
    embedding, output = tensors["tok_embeddings.weight"], [] if shared else [tensors["output.weight"]]
    if version == 0:
        rope = torch.full((window * params["dim"] // params["n_heads"],), float("nan"))
        att, ffn = matrices[: 4 * params["n_layers"]], matrices[4 * params["n_layers"] :]
        n = params["n_layers"]
        order = [embedding, *norms[:n], *att, *norms[n : 2 * n], *ffn, norms[-1], rope, *output]
        body = b"".join(tensor.float().numpy().tobytes() for tensor in order)
        path.write_bytes(ints + body)
        return path
    head = struct.pack("<Ii", 0x616B3432, version) + ints + struct.pack("<B", shared)
    head += struct.pack("<i", group) if version == 2 else b""
    parts = [tensor.float().numpy().tobytes() for tensor in norms]
    for tensor in (embedding, *matrices, *output):
        if version == 1:
            parts.append(tensor.float().numpy().tobytes())
        else:
            parts += [array.numpy().tobytes() for array in quantize(tensor, group)]
    path.write_bytes(head.ljust(256, b"\0") + b"".join(parts))
    return path


def write_training(path: Path, tensors: Mapping[str, Tensor], params: Mapping[str, Any] = GQA) -> Path:
    """llama2.c's ckpt.pt as torch.compile leaves it."""
    args = {name: params[name] for name in ("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "multiple_of")}
    model = {f"_orig_mod.{name}": tensor for name, tensor in tensors.items()}
    extra = {"optimizer": {"state": {}}, "iter_num": 3, "best_val_loss": torch.tensor(1.0), "config": {"lr": 1e-3}}
    torch.save({"model": model, "model_args": {**args, "max_seq_len": 24, "dropout": 0.0}, **extra}, path)
    return path


GGUF_NAMES = {"tok_embeddings": "token_embd", "norm": "output_norm", "output": "output"}
GGUF_NAMES |= {"attention.wq": "attn_q", "attention.wk": "attn_k", "attention.wv": "attn_v"}
GGUF_NAMES |= {"attention.wo": "attn_output", "attention_norm": "attn_norm", "ffn_norm": "ffn_norm"}
GGUF_NAMES |= {"feed_forward.w1": "ffn_gate", "feed_forward.w2": "ffn_down", "feed_forward.w3": "ffn_up"}


def gguf_name(name: str) -> str:
    """llama.cpp's name for a key of Meta's; others as they are."""
    base, _, kind = name.rpartition(".")
    if not base.startswith("layers."):
        return f"{GGUF_NAMES.get(base, base)}.{kind}"
    _, layer, rest = base.split(".", 2)
    return f"blk.{layer}.{GGUF_NAMES[rest]}.{kind}"


def write_gguf(
    path: Path, tensors: Mapping[str, Tensor], params: Mapping[str, Any] = GQA, kinds: Mapping[str, str] | None = None,
    split: int = 0, **settings: Any,
) -> Path:  # fmt: skip
    """By the package gguf's writer: q and k as Meta has them. `kinds`: type by the end of Meta's key, else float32.

    `settings` are further metadata: `llama__context_length=24` is the key llama.context_length; None leaves one out.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=split)
    stated = {
        "llama__block_count": params["n_layers"],
        "llama__context_length": 24,
        "llama__embedding_length": params["dim"],
        "llama__feed_forward_length": reference.ffn_width(params),
        "llama__attention__head_count": params["n_heads"],
        "llama__attention__head_count_kv": params["n_kv_heads"],
        "llama__attention__layer_norm_rms_epsilon": 1e-5,
    }
    for key, value in {**stated, **settings}.items():
        key = key.replace("__", ".")
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        if value is not None:
            add.get(type(value), writer.add_array)(key, value)
    for name, tensor in tensors.items():
        kind = next((kind for end, kind in (kinds or {}).items() if name.endswith(end)), "F32")
        data, name = gguf_data(tensor, kind), gguf_name(name)
        writer.add_tensor(name, data, raw_dtype=None if kind == "F32" else gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_data(tensor: Tensor, kind: str) -> Any:
    """The values in ggml's blocks; of the K types, which gguf cannot make, random blocks of about the right size."""
    which, values = gguf.GGMLQuantizationType[kind], tensor.float().numpy()
    if not kind.endswith("_K"):
        return gguf.quants.quantize(values, which)
    block, size = gguf.GGML_QUANT_SIZES[which]
    rng = np.random.default_rng(tensor.numel())
    data = rng.integers(0, 256, (*values.shape[:-1], values.shape[-1] // block, size), dtype=np.uint8)
    scale = np.frombuffer(np.float16(1e-4).tobytes(), np.uint8)
    for at in (208,) if kind == "Q6_K" else (0, 2):
        data[..., at : at + 2] = scale
    return data.reshape(*values.shape[:-1], -1)


def gguf_values(data: Any, kind: str) -> Tensor:
    """What gguf makes of the blocks."""
    return torch.from_numpy(gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind]).copy())
