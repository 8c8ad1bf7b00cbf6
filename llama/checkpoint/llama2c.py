"""llama2.c's files: version 0 (read and written), 1 (float32) and 2 (int8 in groups) (read), and training files."""

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import LlamaError
from .checkpoint import Checkpoint, StoredWeight
from .checks import check_params, check_weights, plain_tensors, positive_int, same_storage
from .codecs import Int8Groups
from .companions import check_for_llama2c, copy_tokenizer
from .files import format_error, one_version, read_head
from .mapping import map_file, tensor_at, write_tensor
from .source import Source
from .table import BIASES, sizes, split_known, weight_spec

MAGIC = 0x616B3432  # "ak42"
HEADER = 256  # bytes, versions 1 and 2; version 0 has seven ints and nothing else
EXPECTED = "a llama2.c file of version 0, 1 or 2"
NORMS = ("layers.{}.attention_norm.weight", "layers.{}.ffn_norm.weight")
ATTENTION = tuple(f"layers.{{}}.attention.{name}.weight" for name in ("wq", "wk", "wv", "wo"))
FFN = tuple(f"layers.{{}}.feed_forward.{name}.weight" for name in ("w1", "w2", "w3"))
ROPE = "rope"  # version 0's tables of cosines and sines, which every reader skips


@dataclass
class Header:
    """The seven ints of a file (`vocab_size` made positive), and what the versions add."""

    dim: int
    hidden_dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    vocab_size: int
    max_seq_len: int
    version: int = 0
    shared: bool = True  # the head is the embedding
    group_size: int = 0

    def params(self) -> dict[str, int]:
        """Those of ModelArgs' fields that have the same name."""
        return {name: getattr(self, name) for name in ("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size")}

    def shape(self, key: str) -> tuple[int, ...]:
        """The shape of one kind of weight (a key of the table), or of the rotary tables together."""
        if key == ROPE:
            return (self.max_seq_len * (self.dim // self.n_heads),)
        numbers = sizes({**self.params(), "multiple_of": 1, "ffn_dim_multiplier": None, "ffn_dim": self.hidden_dim})
        return tuple(numbers[size] for size in weight_spec(key).shape)

    def quantized(self, key: str) -> bool:
        """Whether this kind of weight is stored in int8."""
        return self.version == 2 and "norm" not in key

    def weight_keys(self) -> list[str]:
        """The kinds of weights in the file's order; one with {} stands for every layer in turn."""
        output = [] if self.shared else ["output.weight"]
        if self.version == 0:
            attention_norm, ffn_norm = NORMS
            layers = [attention_norm, *ATTENTION, ffn_norm, *FFN]
            return ["tok_embeddings.weight", *layers, "norm.weight", ROPE, *output]
        return [*NORMS, "norm.weight", "tok_embeddings.weight", *ATTENTION, *FFN, *output]

    def bytes_of(self, key: str) -> int:
        """What one tensor of this kind takes in the file."""
        count = math.prod(self.shape(key))
        return count + 4 * (count // self.group_size) if self.quantized(key) else 4 * count

    def size(self) -> int:
        """The size of the whole file in bytes."""
        start = HEADER if self.version else 28
        return start + sum(self.bytes_of(key) * (self.n_layers if "{}" in key else 1) for key in self.weight_keys())

    def offsets(self) -> Iterator[tuple[str, int]]:
        """Meta's key and first byte of every tensor, in the file's order."""
        offset = HEADER if self.version else 28
        for key in self.weight_keys():
            for layer in range(self.n_layers if "{}" in key else 1):
                yield key.format(layer), offset
                offset += self.bytes_of(key)


# --------------------------------------------------------------------------------------------------- read


def read(path: Path) -> Checkpoint:
    """A file of version 0, 1 or 2. Errors as in `open_checkpoint`."""
    with one_version(path):
        header, storage = read_header(path), map_file(path)
    params = check_params(path, header.params()) | {"ffn_dim": header.hidden_dim}
    weights: dict[str, StoredWeight] = {}
    for name, start in header.offsets():
        if name == ROPE:
            continue
        shape = header.shape(name)
        if header.quantized(name):
            count = math.prod(shape)
            qvalues = tensor_at(storage, start, shape, torch.int8)
            scales = tensor_at(storage, start + count, (count // header.group_size,), torch.float32)
            weights[name] = StoredWeight([Int8Groups(qvalues, scales)])
        else:
            weights[name] = StoredWeight([tensor_at(storage, start, shape, torch.float32)])
    if header.shared:
        weights["output.weight"] = weights["tok_embeddings.weight"]
    return check_weights(Checkpoint(path, "llama2c", params, weights, [path], header.max_seq_len), "its header")


def read_header(path: Path) -> Header:
    """The header, checked against itself and against the size of the file."""
    head, size = read_head(path, EXPECTED), path.stat().st_size
    if len(head) < 28:
        raise format_error(path, f"{size} bytes, less than a header", EXPECTED)
    magic, version = struct.unpack("<Ii", head[:8])
    if magic == MAGIC:
        if version not in (1, 2) or size < HEADER:
            raise format_error(path, f"version {version} in {size} bytes", f"{EXPECTED}, of at least {HEADER} bytes")
        header = Header(*struct.unpack("<7i", head[8:36]))
        header.version, header.shared = version, bool(head[36])
        header.group_size = struct.unpack("<i", head[37:41])[0] if version == 2 else 0
    else:
        header = Header(*struct.unpack("<7i", head[:28]))
        header.vocab_size, header.shared = abs(header.vocab_size), header.vocab_size > 0
    _check(path, header, size)
    return header


def _check(path: Path, header: Header, size: int) -> None:
    numbers = (*header.params().values(), header.hidden_dim, header.max_seq_len)
    if min(numbers) < 1 or header.dim % header.n_heads or header.n_heads % header.n_kv_heads:
        raise format_error(path, f"a header that says {header}", f"{EXPECTED} (other magic, or damaged)")
    if header.version == 2:
        counts = [math.prod(header.shape(key)) for key in header.weight_keys() if header.quantized(key)]
        if header.group_size < 1 or any(count % header.group_size for count in counts):
            raise format_error(path, f"group_size {header.group_size}", "one that divides every matrix")
    if header.size() != size:
        raise format_error(path, f"{size} bytes", f"{header.size()} for {header} (truncated, grown, or another format)")


def read_training(path: Path, value: Mapping[str, Any], mapped: bool) -> Checkpoint:
    """A training file: `model` (keys perhaps behind `_orig_mod.`) and `model_args`."""
    args, expected = value["model_args"], "llama2.c's model_args (dim, n_layers, n_heads, vocab_size, ...)"
    if not isinstance(args, Mapping):
        raise format_error(path, f"model_args is a {type(args).__name__}", expected)
    others = ("dropout", "hidden_dim", "max_seq_len")
    params = check_params(path, {str(name): number for name, number in args.items() if name not in others})
    params["ffn_dim"] = positive_int(args.get("hidden_dim"))
    tensors = plain_tensors(path, value["model"], "weights by Meta's keys")
    tensors = {name.removeprefix("_orig_mod."): tensor for name, tensor in tensors.items()}
    known, unknown = split_known(tensors)
    weights = {name: StoredWeight([tensors[name]]) for name in known}
    if same_storage(tensors.get("tok_embeddings.weight"), tensors.get("output.weight")):
        weights["output.weight"] = weights["tok_embeddings.weight"]
    context = positive_int(args.get("max_seq_len"))
    checkpoint = Checkpoint(path, "llama2c-train", params, weights, [path], context, mapped)
    return check_weights(checkpoint, "model_args", unknown)


# -------------------------------------------------------------------------------------------------- write


def obstacle(params: Mapping[str, Any]) -> str | None:
    """What of these settings llama2.c's programs do not compute; None where they do."""
    if params["rope_theta"] != 10000.0 or params["norm_eps"] != 1e-5:
        found = f"rope_theta={params['rope_theta']}, norm_eps={params['norm_eps']}"
        return f"{found}; llama2.c's programs compute with 10000.0 and 1e-05 only"
    added = [name for name in ("head_dim", "rope_scaling", *BIASES) if params.get(name)]
    return f"{', '.join(added)}, which llama2.c's programs do not know" if added else None


def write(source: Source, folder: Path) -> None:
    """model.bin (version 0, float32) and tokenizer.bin."""
    params, numbers, checkpoint = source.params, sizes(source.params), source.checkpoint
    reason = obstacle(params)
    if reason is not None:
        raise LlamaError(f"{checkpoint.path} has {reason}")
    check_for_llama2c(checkpoint)
    ints = (numbers["dim"], numbers["ffn"], int(params["n_layers"]), numbers["heads"], numbers["kv_heads"])
    header = Header(*ints, numbers["vocab"], source.window)
    header.shared = checkpoint.tied
    vocab = header.vocab_size if header.shared else -header.vocab_size  # negative: the head is stored
    with (folder / "model.bin.partial").open("wb") as file:
        file.write(struct.pack("<7i", *ints, vocab, source.window))
        for name, _ in header.offsets():
            write_tensor(file, _rope_tables(header, params["rope_theta"]) if name == ROPE else source.read(name))
    copy_tokenizer(checkpoint, folder, to_bin=True)
    (folder / "model.bin.partial").rename(folder / "model.bin")


def _rope_tables(header: Header, theta: float) -> Tensor:
    """The cosines, then the sines that version 0 holds (2, max_seq_len, head_dim / 2); the programs skip them."""
    head_dim = header.dim // header.n_heads
    freqs = 1.0 / (theta ** (torch.arange(0, head_dim, 2).float() / head_dim))
    angles = torch.outer(torch.arange(header.max_seq_len).float(), freqs)  # (max_seq_len, head_dim / 2)
    return torch.stack([angles.cos(), angles.sin()])  # (2, max_seq_len, head_dim / 2)
