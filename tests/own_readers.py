"""What a checkpoint's files hold, by torch's and safetensors' own readers (and a plain one for llama2.c's files).

Nothing of the package is used: weights by Meta's keys, in Meta's order, to compare an opened checkpoint with.
"""

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from checkpoint_files import COLUMNS, GGUF_NAMES, HF_NAMES, MATRICES, gguf_values
from safetensors.torch import load_file
from torch import Tensor

META_NAMES = {theirs: ours for ours, theirs in HF_NAMES.items()}


def container(path: Path) -> Any:
    """What torch or safetensors reads from one file."""
    if path.suffix == ".safetensors":
        return load_file(path)
    return torch.load(path, weights_only=True, map_location="cpu")  # not mapped: that checks no lengths


def weights(path: Path) -> dict[str, Tensor]:
    """Every weight of a checkpoint (a folder, a training file or a .bin of llama2.c)."""
    ggufs = sorted(path.glob("*.gguf")) if path.is_dir() else [path] * (path.suffix == ".gguf")
    if ggufs:
        return _gguf(ggufs)
    if path.is_dir():
        return _hf(path) if (path / "config.json").exists() else _meta(path)
    if path.suffix == ".bin":
        return _llama2c(path.read_bytes())
    return {name.removeprefix("_orig_mod."): tensor.detach() for name, tensor in container(path)["model"].items()}


def _gguf(paths: list[Path]) -> dict[str, Tensor]:
    """By the package gguf, unpacked where they are in blocks."""
    names, found = {theirs: ours for ours, theirs in GGUF_NAMES.items()}, {}
    for one in (tensor for path in paths for tensor in gguf.GGUFReader(path).tensors):
        layer, _, name = one.name.removesuffix(".weight").rpartition(".")
        ours = names.get(name, name)
        values = gguf_values(one.data, one.tensor_type.name).view(*reversed(one.shape.tolist()))
        kept = {"F16": torch.float16, "BF16": torch.bfloat16}.get(one.tensor_type.name, torch.float32)
        found[f"{layer.replace('blk', 'layers')}.{ours}.weight".removeprefix(".")] = values.to(kept)
    return one_nan({"output.weight": found.get("tok_embeddings.weight", torch.empty(0)), **found})


def one_nan(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """NaN, which has many forms, as one number; arithmetic keeps none of them."""
    return {name: tensor.masked_fill(tensor.isnan(), 7.5) for name, tensor in tensors.items()}


def _meta(folder: Path) -> dict[str, Tensor]:
    shards = [container(path) for path in sorted(folder.glob("*.pth"))]
    found = {}
    for name, tensor in shards[0].items():
        axis = 1 if name.endswith(COLUMNS) else 0
        parts = [shard[name].detach() for shard in shards]
        if name.removesuffix("weight") + "scales" in shards[0]:
            found[name] = _dequantized(tensor, shards[0][name.removesuffix("weight") + "scales"])
        else:
            found[name] = parts[0] if tensor.ndim < 2 or len(parts) == 1 else torch.cat(parts, axis)
    return found


def _dequantized(values: Tensor, scales: Tensor) -> Tensor:
    """int8 with a scale a row, or two values to a byte with scale and zero of each group."""
    if values.dtype == torch.int8:
        return values.float() * scales.float()[:, None]
    pairs = torch.stack([values & 15, values >> 4], -1).float().view(len(values), scales.shape[1], -1)
    return ((pairs - 8) * scales[..., :1].float() + scales[..., 1:].float()).flatten(1)


def _hf(folder: Path) -> dict[str, Tensor]:
    config, found = json.loads((folder / "config.json").read_text()), {}
    files = [path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin")]
    for name, tensor in (item for path in files for item in container(path).items()):
        ours = _meta_name(name)
        if ours.split(".")[-2] in ("wq", "wk"):  # rows of the matrix, values of the bias
            heads = config["num_attention_heads"]
            heads = heads if "wq" in ours else config.get("num_key_value_heads") or heads
            half = len(tensor) // heads // 2
            rows = [head * 2 * half + part * half + i for head in range(heads) for i in range(half) for part in (0, 1)]
            tensor = tensor[rows]
        found[ours] = tensor.detach()
    if config.get("tie_word_embeddings"):
        found.setdefault("output.weight", found.get("tok_embeddings.weight", torch.empty(0)))
        found.setdefault("tok_embeddings.weight", found["output.weight"])
    return found


def _meta_name(name: str) -> str:
    """As it is where it is no weight's."""
    stem, _, kind = name.rpartition(".")
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", stem)
    if layer:
        return f"layers.{layer[1]}.{META_NAMES.get(layer[2], layer[2])}.{kind}"
    return f"{META_NAMES.get(stem, stem)}.{kind}"


def _llama2c(data: bytes) -> dict[str, Tensor]:
    """Versions 0, 1 and 2, from the file's own header, by the letter of the format."""
    version, group = (data[4], int.from_bytes(data[37:41], "little")) if data[:4] == b"24ka" else (0, 0)
    start = 8 if version else 0
    dim, width, layers, heads, kv_heads, vocab, window = map(int, np.frombuffer(data[start : start + 28], "<i4"))
    shared = bool(data[36]) if version else vocab > 0
    vocab, kv, place, found = abs(vocab), dim // heads * kv_heads, 256 if version else 28, dict[str, Tensor]()
    shapes = {"wq": (dim, dim), "wk": (kv, dim), "wv": (kv, dim), "wo": (dim, dim)}
    shapes |= {"w1": (width, dim), "w2": (dim, width), "w3": (width, dim)}

    def take(name: str, *shape: int) -> None:
        nonlocal place
        count = int(np.prod(shape))
        quantized = version == 2 and "norm" not in name
        values = np.frombuffer(data, "<i1" if quantized else "<f4", count, place)
        place += values.nbytes
        if quantized:
            scales = np.frombuffer(data, "<f4", count // group, place)
            place += scales.nbytes
            values = values.astype("<f4") * scales.repeat(group)
        found[name] = torch.from_numpy(values.reshape(shape).copy())

    def each(kind: str) -> None:
        for layer in range(layers):
            take(f"layers.{layer}.{kind}.weight", *shapes.get(kind.split(".")[-1], (dim,)))

    matrices = [
        ("attention." if end[1] in "qkvo" else "feed_forward.") + end.removesuffix(".weight") for end in MATRICES
    ]
    if version:
        each("attention_norm"), each("ffn_norm"), take("norm.weight", dim), take("tok_embeddings.weight", vocab, dim)
        [each(kind) for kind in matrices]
    else:
        take("tok_embeddings.weight", vocab, dim), each("attention_norm"), [each(kind) for kind in matrices[:4]]
        each("ffn_norm"), [each(kind) for kind in matrices[4:]], take("norm.weight", dim)
        place += 4 * window * (dim // heads)
    if not shared:
        take("output.weight", vocab, dim)
    assert place == len(data)
    found.setdefault("output.weight", found["tok_embeddings.weight"])
    return found
