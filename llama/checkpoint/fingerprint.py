"""What ranks that share a model must have in common, small enough to compare."""

import dataclasses
import hashlib
from typing import Any

import torch

from ..distributed import check_same_on_all_ranks, world_size
from ..model import Transformer
from ..tokenizer import Tokenizer, piece, stop_ids
from .checkpoint import Checkpoint
from .mapping import raw_bytes


def compare_ranks(checkpoint: Checkpoint, model: Transformer, tokenizer: Any, **settings: Any) -> None:
    """LlamaError, on every rank alike, where the ranks were not built the same way; for every rank."""
    if world_size() > 1:
        check_same_on_all_ranks("at build", _fingerprint(checkpoint, model, tokenizer) | settings)


def _fingerprint(checkpoint: Checkpoint, model: Transformer, tokenizer: Any) -> dict[str, object]:
    """The sizes, and digests of the vocabulary and of a few of each layer's weights."""
    ours = isinstance(tokenizer, Tokenizer)  # one of the caller's may name no pieces
    pieces = [piece(tokenizer, token) for token in range(tokenizer.n_words if ours else 0)]
    marks = [getattr(tokenizer, "bos_id", None), sorted(stop_ids(tokenizer))]
    vocabulary = hashlib.sha256(repr((pieces, marks)).encode("utf-8", "surrogatepass"))
    return {
        **dataclasses.asdict(model.params),
        "the vocabulary": f"{len(pieces)} pieces with digest {vocabulary.hexdigest()[:8]}",
        "the weights' digest": _digest(checkpoint),
        "the adapters (lora)": _adapters(checkpoint),
        "dtype": model.tok_embeddings.weight.dtype,
    }


def _adapters(checkpoint: Checkpoint) -> str:
    """What adapters add, their scales included."""
    digest = hashlib.sha256()
    for weight in checkpoint.weights.values():
        for change in weight.changes:
            change.update(digest)
    return f"{len(checkpoint.adapters)} with digest {digest.hexdigest()[:8]}" if checkpoint.adapters else "none"


def _digest(checkpoint: Checkpoint) -> str:
    """Of the first row of every weight, in float32: the same in every format, type permitting, and number of files."""
    digest = hashlib.sha256()
    for name, weight in checkpoint.weights.items():
        if weight.codec is not None:  # a row would take the whole weight to dequantize; norms and embedding will do
            continue
        rows = [one.values() for one in weight.slices(0, 0, 1)]
        row = torch.cat(rows, dim=-1).float().contiguous()
        digest.update(name.encode() + raw_bytes(row))
    return digest.hexdigest()[:8]
