"""`info`: what a checkpoint holds, and the memory that it needs."""

import hashlib

from ..checkpoint import Checkpoint, open_checkpoint
from ..checkpoint.family import (
    describe_context,
    describe_extras,
    describe_ranks,
    describe_scaling,
    describe_targets,
    family,
)
from ..checkpoint.files import first_few
from ..checkpoint.mapping import raw_bytes
from ..checkpoint.memory import count_parameters, gigabytes, memory_estimate
from ..checkpoint.source import DTYPES
from ..checkpoint.table import sizes
from ..checkpoint.templates import describe_format
from ..checkpoint.tokenizers import describe_tokenizer
from ..errors import LlamaError
from .output import printable
from .session import adapters


def info(
    ckpt: str,
    max_seq_len: int | None = None,
    max_batch_size: int = 1,
    ranks: int = 1,
    dtype: str | None = None,
    check: bool = False,
    lora: list[str] | None = None,
    lora_scale: list[float] | None = None,
) -> None:
    """Print what a checkpoint holds, and the memory that it needs on each rank.

    Args:
        ckpt: The checkpoint, a folder or a file of any known format.
        max_seq_len: The window to count the cache for, in tokens; the checkpoint's own, else 4096, if not given.
        max_batch_size: Rows to count the cache for.
        ranks: Ranks that share the model.
        dtype: float32, bfloat16 or float16 in memory; the stored type if not given.
        check: Read every tensor and print its digest (SHA-256 of the whole tensor's bytes: the same in every format and
            number of files). LlamaError names those with NaN or inf.
        lora: The folder of a LoRA adapter to merge, as `complete` would; may be given several times.
        lora_scale: What the adapter is multiplied with; once for all, or once for each adapter. Default: 1.0.
    """
    checkpoint = open_checkpoint(str(ckpt), **adapters(lora, lora_scale))
    if dtype is not None and dtype not in DTYPES:
        raise LlamaError(f"dtype={dtype!r} must be one of {', '.join(DTYPES)}")
    for name, value in (("max_batch_size", max_batch_size), ("ranks", ranks), ("max_seq_len", max_seq_len or 1)):
        if not isinstance(value, int) or value < 1:
            raise LlamaError(f"{name}={value!r} must be an integer of at least 1")
    checkpoint.check_world("ranks", ranks)
    print(printable("\n".join(f"{label:<16}{text}" for label, text in _describe(checkpoint))))
    params = {**checkpoint.params, "vocab_size": checkpoint.shape("tok_embeddings.weight")[0]}
    kind = DTYPES[dtype] if dtype else checkpoint.written_dtype("tok_embeddings.weight")
    window = max_seq_len or checkpoint.context or 4096
    need = memory_estimate(params, window, max_batch_size, ranks, kind, checkpoint.quantized, checkpoint.tied)
    parts = f"weights {gigabytes(need.weights)} + KV cache {gigabytes(need.kv_cache)}"
    print(f"{'memory per rank':<16}{gigabytes(need.total)} = {parts}")
    settings = f"{ranks} rank(s), max_seq_len {window}, max_batch_size {max_batch_size}"
    print(f"{'':<16}({str(kind).removeprefix('torch.')}, {settings})")
    if checkpoint.adapters:
        print(f"{'':<16}and {gigabytes(checkpoint.merging_bytes(ranks))} while adapters are merged")
    if check:
        _check_values(checkpoint)


def _describe(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    params, rows = checkpoint.params, checkpoint.shape("tok_embeddings.weight")[0]
    count = count_parameters({**params, "vocab_size": rows}, tied=checkpoint.tied)
    dtypes = sorted({str(checkpoint.dtype(name)).removeprefix("torch.") for name in checkpoint.names()})
    codecs = ", ".join(sorted({weight.codec.name for weight in checkpoint.weights.values() if weight.codec}))
    numbers, layers = sizes(params), params["n_layers"]
    size = sum(path.stat().st_size for path in checkpoint.files)
    return [
        ("checkpoint", str(checkpoint.path)),
        ("format", checkpoint.format + (" (tied head)" if checkpoint.tied else "")),
        ("files", f"{checkpoint.shards} of weights, {gigabytes(size)}"),
        *(("adapter", f"{adapter.path} ({adapter.summary})") for adapter in checkpoint.adapters),
        ("family", family(checkpoint)),
        ("tokenizer", describe_tokenizer(checkpoint)),
        ("chat format", describe_format(checkpoint)),
        ("parameters", f"{count:,}"),
        ("dtype", ", ".join(dtypes) + (f" (stored as {codecs})" if codecs else "")),
        ("sizes", f"dim {numbers['dim']}, {layers} layers, {numbers['heads']} heads, {numbers['kv_heads']} kv heads"),
        ("", f"ffn {numbers['ffn']}, norm_eps {params['norm_eps']}, rope_theta {params['rope_theta']}"),
        ("besides", describe_extras(checkpoint)),
        ("rope scaling", describe_scaling(checkpoint)),
        ("vocabulary", str(rows)),
        ("context", describe_context(checkpoint)),
        ("convert", describe_targets(checkpoint)),
        ("ranks", describe_ranks(checkpoint)),
    ]


def _check_values(checkpoint: Checkpoint) -> None:
    """Read everything once: a digest per tensor, and an error for what is not finite."""
    bad = []
    for name in checkpoint.names():
        tensor = checkpoint.read(name).contiguous()
        nans, infs = int(tensor.isnan().sum()), int(tensor.isinf().sum())
        digest = hashlib.sha256(raw_bytes(tensor)).hexdigest()[:16]
        note = f"  {nans} NaN, {infs} inf" if nans or infs else ""
        dtype = str(tensor.dtype).removeprefix("torch.")
        print(printable(f"{digest}  {dtype:<9}{tuple(tensor.shape)!s:<16} {name}{note}"))
        if note:
            bad.append(f"{name} ({note.strip()})")
        checkpoint.drop_pages(name)
    if bad:
        found = f"{len(bad)} weights are not finite: {first_few(bad)}"
        raise LlamaError(f"{checkpoint.path}: {found}: fetch the files again")
    print(f"all {len(checkpoint.names())} weights are finite")
