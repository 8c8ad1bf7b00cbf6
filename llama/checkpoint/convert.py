"""`convert`: write a checkpoint in Meta's, Hugging Face's or llama2.c's format. `info`: what a checkpoint holds."""

import hashlib
import json
import logging
import math
import re
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from torch import Tensor
from tqdm import tqdm

from ..errors import LlamaError
from ..quantization import quantize_int4, quantize_int8
from . import llama2c
from .containers import raw_bytes, read_json, write_safetensors, write_tensor
from .loading import Checkpoint, open_checkpoint
from .memory import count_parameters, ffn_width, gigabytes, memory_estimate
from .stored import hf_name, pairs_to_halves, some, weight_spec

logger = logging.getLogger("llama")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HF_FILE_SIZE = 5_000_000_000  # bytes of weights; above this the folder gets several files and an index
CONTEXTS = {10000.0: 4096, 500000.0: 8192, 1000000.0: 16384}  # Llama 2, Llama 3, Code Llama, told by rope_theta
# What --force may remove: the files of checkpoints, and nothing that a folder given by mistake would hold.
REPLACEABLE = re.compile(
    r"consolidated\.\d+\.pth|params\.json|checklist\.chk|tokenizer.*|.*config\.json|special_tokens_map\.json"
    r"|(model|pytorch_model).*\.(safetensors|bin|json)|chat_template\.jinja"
)


class Source:
    """A checkpoint's weights in the type that is asked for, with a progress bar."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype | None, bar: "tqdm[Any]") -> None:
        self.checkpoint = checkpoint
        self.params = {**checkpoint.params, "vocab_size": checkpoint.shape("tok_embeddings.weight")[0]}
        self._dtype, self._bar = dtype, bar

    def dtype(self, name: str) -> torch.dtype:
        """The type in which a tensor is written."""
        return self._dtype or self.checkpoint.dtype(name)

    def read(self, name: str, rank: int = 0, world: int = 1) -> Tensor:
        """One tensor (or its part), contiguous, in the type asked for."""
        stored = self.checkpoint.read(name, rank, world)
        part = stored.to(self.dtype(name)).contiguous()
        if self._dtype == torch.float16 and part.isinf().any():
            raise LlamaError(f"{self.checkpoint.path}: {name} holds values beyond float16's range: keep bfloat16")
        if rank == 0 or weight_spec(name).axis is not None:
            self._bar.update(part.numel() * part.itemsize)
        return part

    def size(self, names: list[str]) -> int:
        """Bytes of these tensors as written."""
        return sum(math.prod(self.checkpoint.shape(name)) * self.dtype(name).itemsize for name in names)


def convert(
    src: str,
    dst: str,
    to: str = "hf",
    *,
    shards: int = 1,
    dtype: str | None = None,
    context: int | None = None,
    quantize: str | None = None,
    force: bool = False,
) -> None:
    """Write a checkpoint in another format, another type or another number of files.

    The folder DST appears when it is whole. LlamaError for what cannot be written so, and nothing is left behind.

    Args:
        src: The checkpoint, a folder or a file of any known format.
        dst: The folder to write; one that holds files is replaced only with `force`.
        to: meta (params.json and consolidated.NN.pth), hf (a Hugging Face folder) or llama2c (model.bin).
        shards: Files of weights that meta gets.
        dtype: float32, bfloat16 or float16; the stored type if not given, float32 always for llama2c.
        context: The longest window, in tokens, for formats that have a field for it; what SRC says if not given.
        quantize: int8 or int4 (meta in one file): the layers' weights as codes and scales (X.weight, X.scales; see
            quantize.py), which `build` loads as they are.
        force: Replace a checkpoint that is in DST.
    """
    writers: dict[str, Callable[[Source, Path, int, int], None]] = {
        "meta": _write_meta,
        "hf": _write_hf,
        "llama2c": _write_llama2c,
    }
    if to not in writers:
        raise LlamaError(f"to={to!r} must be one of {', '.join(writers)}")
    if dtype is not None and dtype not in DTYPES:
        raise LlamaError(f"dtype={dtype!r} must be one of {', '.join(DTYPES)} or None")
    if context is not None and (type(context) is not int or context < 1):
        raise LlamaError(f"context={context!r} must be None or a whole number of at least 1")
    if not isinstance(shards, int) or shards < 1 or (shards > 1 and to != "meta"):
        raise LlamaError(f"shards={shards!r} must be 1 or more, and 1 unless to='meta'")
    if quantize is not None and (quantize not in ("int8", "int4") or to != "meta" or shards != 1):
        raise LlamaError(
            f"quantize={quantize!r} must be int8 or int4, with to='meta' and shards=1; got to={to!r}, shards={shards}"
        )
    checkpoint, target = open_checkpoint(str(src)), Path(str(dst))
    if quantize and checkpoint.quantized:
        raise LlamaError(f"quantize={quantize!r}, but {src} holds {checkpoint.quantized}: quantize the original")
    _check_target(checkpoint, target, force)
    _check_shards(checkpoint, "shards", shards)
    kind = torch.float32 if to == "llama2c" else DTYPES[dtype] if dtype else None
    window = context or checkpoint.context or CONTEXTS.get(checkpoint.params["rope_theta"], 4096)
    with tqdm(unit="B", unit_scale=True, desc=f"Writing {to}") as bar:
        source = Source(checkpoint, kind, bar)
        bar.total = source.size(checkpoint.names())
        _check_space(target, bar.total)
        with _new_folder(target) as folder:
            if quantize:
                _write_quantized(source, folder, quantize)
            else:
                writers[to](source, folder, window, shards)
    print(f"{target}: {to}, {gigabytes(sum(path.stat().st_size for path in target.iterdir()))}")


# ---------------------------------------------------------------------------------------------- the folder


def _check_target(checkpoint: Checkpoint, target: Path, force: bool) -> None:
    place, source = target.resolve(), checkpoint.path.resolve()
    if place == source or place in source.parents or source in place.parents:
        raise LlamaError(f"{target} and {checkpoint.path} are one folder, or one holds the other: give another place")
    if not target.exists() and not target.is_symlink():
        return
    if not target.is_dir() or target.is_symlink():
        raise LlamaError(f"{target} exists and is no folder of its own: give another place")
    files = [path.name for path in target.iterdir()]
    if files and not force:
        raise LlamaError(f"{target} exists and holds {some(files)}: give another place, or force=True (--force)")
    foreign = [name for name in files if not REPLACEABLE.fullmatch(name) or not (target / name).is_file()]
    if foreign:
        raise LlamaError(f"{target} holds {some(foreign)}, which is no part of a checkpoint: it is not replaced")


def _check_shards(checkpoint: Checkpoint, name: str, shards: int) -> None:
    heads, kv_heads = checkpoint.params["n_heads"], checkpoint.params["n_kv_heads"] or checkpoint.params["n_heads"]
    if heads % shards or kv_heads % shards:
        raise LlamaError(f"{name}={shards} must divide n_heads={heads} and n_kv_heads={kv_heads}")
    for key in checkpoint.names():
        checkpoint.local_shape(key, shards)


def _check_space(target: Path, size: int) -> None:
    parent = next(path for path in target.absolute().parents if path.exists())
    free = shutil.disk_usage(parent).free
    if size + 10_000_000 > free:
        found = f"{target} needs {gigabytes(size)}, but {parent} has {gigabytes(free)} free"
        raise LlamaError(f"{found}: make room, or give another place")


@contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """A folder beside `target` that takes its place at the end, or is removed if anything stops the writing.

    A run that is killed leaves `.NAME.partial-XXXX`, which has no params.json or config.json: those come last.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
    try:
        folder.chmod(0o755)
        yield folder
        if target.exists():
            old = folder.with_name(folder.name.replace(".partial-", ".old-"))
            target.rename(old)
            try:
                folder.rename(target)
            except BaseException:
                old.rename(target)
                raise
            shutil.rmtree(old)
        else:
            folder.rename(target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


# ------------------------------------------------------------------------------------------------ writers


def _write_meta(source: Source, folder: Path, context: int, shards: int) -> None:
    """consolidated.NN.pth, one after another: the memory of one file is needed."""
    checkpoint = source.checkpoint
    for shard in range(shards):
        tensors = {name: _own(source.read(name, shard, shards)) for name in checkpoint.names()}
        torch.save(tensors, folder / f"consolidated.{shard:02d}.pth")
    _finish_meta(checkpoint, folder)


def _write_quantized(source: Source, folder: Path, scheme: str) -> None:
    """One file in Meta's format, with codes in X.weight and scales in X.scales for all but the embedding and norms."""
    tensors: dict[str, Tensor] = {}
    for name in source.checkpoint.names():
        weight = _own(source.read(name))
        if weight.ndim < 2 or name == "tok_embeddings.weight":
            tensors[name] = weight
            continue
        try:
            codes, scales = quantize_int4(weight) if scheme == "int4" else quantize_int8(weight)
        except ValueError as error:
            raise LlamaError(f"{source.checkpoint.path}: {name}: {error}") from None
        tensors[name], tensors[name.removesuffix("weight") + "scales"] = codes, scales
        source.checkpoint.forget(name)
    torch.save(tensors, folder / "consolidated.00.pth")
    _finish_meta(source.checkpoint, folder)


def _finish_meta(checkpoint: Checkpoint, folder: Path) -> None:
    """The tokenizer and, last, params.json."""
    _copy_tokenizer(checkpoint, folder)
    params = {name: value for name, value in checkpoint.params.items() if value is not None}
    if params["rope_theta"] == 10000.0:
        del params["rope_theta"]  # the published package does not know this key
    _write_json(folder / "params.json", params)


def _own(tensor: Tensor) -> Tensor:
    """The tensor with a storage that holds nothing else: torch.save writes whole storages."""
    if tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize:
        return tensor
    return tensor.clone()


def _write_hf(source: Source, folder: Path, context: int, shards: int) -> None:
    """config.json, generation_config.json, safetensors (several with an index above 5 GB), the tokenizer's files."""
    checkpoint = source.checkpoint
    names = [name for name in checkpoint.names() if not (checkpoint.tied and name == "output.weight")]
    files = _group(source, names)
    weight_map: dict[str, str] = {}
    for index, group in enumerate(files, 1):
        file = "model.safetensors" if len(files) == 1 else f"model-{index:05d}-of-{len(files):05d}.safetensors"
        ours = {hf_name(name): name for name in group}
        shapes = {name: (checkpoint.shape(ours[name]), source.dtype(ours[name])) for name in ours}
        write_safetensors(folder / file, shapes, lambda name, ours=ours: _hf_tensor(source, ours[name]))  # type: ignore[misc]
        weight_map |= dict.fromkeys(ours, file)
    if len(files) > 1:
        index_json = {"metadata": {"total_size": source.size(names)}, "weight_map": weight_map}
        _write_json(folder / "model.safetensors.index.json", index_json)
    ids = _copy_hf_tokenizer(checkpoint, folder, context)
    generation = {**ids, "do_sample": True, "temperature": 0.6, "top_p": 0.9}
    _write_json(folder / "generation_config.json", generation)
    _write_json(folder / "config.json", {**_hf_config(source, context), **ids})


def _group(source: Source, names: list[str]) -> list[list[str]]:
    """Names in order, in as few groups as stay within a file's size."""
    groups: list[list[str]] = [[]]
    for name in names:
        if groups[-1] and source.size([*groups[-1], name]) > HF_FILE_SIZE:
            groups.append([])
        groups[-1].append(name)
    return groups


def _hf_tensor(source: Source, name: str) -> Tensor:
    tensor, params = source.read(name), source.params
    if name.endswith("attention.wq.weight"):
        return pairs_to_halves(tensor, params["n_heads"])
    if name.endswith("attention.wk.weight"):
        return pairs_to_halves(tensor, params["n_kv_heads"] or params["n_heads"])
    return tensor


def _hf_config(source: Source, context: int) -> dict[str, Any]:
    params = source.params
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": params["dim"],
        "intermediate_size": ffn_width(params["dim"], params["multiple_of"], params["ffn_dim_multiplier"]),
        "num_hidden_layers": params["n_layers"],
        "num_attention_heads": params["n_heads"],
        "num_key_value_heads": params["n_kv_heads"] or params["n_heads"],
        "head_dim": params["dim"] // params["n_heads"],
        "vocab_size": params["vocab_size"],
        "max_position_embeddings": context,
        "rms_norm_eps": params["norm_eps"],
        "rope_theta": params["rope_theta"],
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": source.checkpoint.tied,
        "torch_dtype": str(source.dtype("output.weight")).removeprefix("torch."),
    }


def _write_llama2c(source: Source, folder: Path, context: int, shards: int) -> None:
    """model.bin (version 0, float32) and tokenizer.bin."""
    params, checkpoint = source.params, source.checkpoint
    if params["rope_theta"] != 10000.0 or params["norm_eps"] != 1e-5:
        found = f"rope_theta={params['rope_theta']}, norm_eps={params['norm_eps']}"
        raise LlamaError(f"{checkpoint.path} has {found}; llama2.c's programs compute with 10000.0 and 1e-05 only")
    width = ffn_width(params["dim"], params["multiple_of"], params["ffn_dim_multiplier"])
    heads = (params["n_heads"], params["n_kv_heads"] or params["n_heads"])
    header = llama2c.Header(params["dim"], width, params["n_layers"], *heads, params["vocab_size"], context)
    header.shared = checkpoint.tied
    with (folder / "model.bin.partial").open("wb") as file:
        file.write(llama2c.pack_header(header))
        for name, _, kind in header.places():
            tensors = llama2c.rope_tables(header, params["rope_theta"]) if kind == "rope" else (source.read(name),)
            for tensor in tensors:
                write_tensor(file, tensor)
    _copy_tokenizer(checkpoint, folder, to_bin=True)
    (folder / "model.bin.partial").rename(folder / "model.bin")


# ---------------------------------------------------------------------------------------------- tokenizer


def _sentencepiece(path: Path | None) -> sentencepiece.SentencePieceProcessor | None:
    """The vocabulary, where the file is one of SentencePiece."""
    if path is None or path.suffix != ".model":
        return None
    try:
        return sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (RuntimeError, OSError):
        return None


def _copy_tokenizer(checkpoint: Checkpoint, folder: Path, to_bin: bool = False) -> None:
    path = checkpoint.tokenizer_path
    if path is None:
        logger.warning("%s: no tokenizer beside it, so none is written", checkpoint.path)
    elif to_bin and path.suffix == ".model":
        vocabulary = _sentencepiece(path)
        if vocabulary is None:
            logger.warning("%s is no SentencePiece vocabulary: no tokenizer.bin is written", path)
        else:
            (folder / "tokenizer.bin").write_bytes(tokenizer_bin(vocabulary))
    else:
        shutil.copyfile(path, folder / path.name)


def tokenizer_bin(vocabulary: sentencepiece.SentencePieceProcessor) -> bytes:
    """llama2.c's tokenizer.bin: the longest piece's length, then score, length and bytes of every piece."""
    special = {vocabulary.bos_id(): "\n<s>\n", vocabulary.eos_id(): "\n</s>\n"}
    pieces = [special.get(i, vocabulary.id_to_piece(i)).replace("▁", " ").encode() for i in range(len(vocabulary))]
    scores = [vocabulary.get_score(i) for i in range(len(vocabulary))]
    body = [struct.pack("<fi", score, len(piece)) + piece for score, piece in zip(scores, pieces, strict=True)]
    return struct.pack("<i", max(map(len, pieces))) + b"".join(body)


KEPT = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def _copy_hf_tokenizer(checkpoint: Checkpoint, folder: Path, context: int) -> dict[str, Any]:
    """The tokenizer's files, new or as they stand in a Hugging Face folder; its BOS and EOS ids by config's names."""
    if checkpoint.format == "hf" and (checkpoint.path / "tokenizer_config.json").is_file():
        for path in (path for path in map(checkpoint.path.joinpath, KEPT) if path.is_file()):
            shutil.copyfile(path, folder / path.name)
    if checkpoint.tokenizer_path is not None or not (folder / "tokenizer.json").exists():
        _copy_tokenizer(checkpoint, folder)
    if checkpoint.format == "hf":
        config = read_json(checkpoint.path / "config.json", "a Hugging Face configuration")
        ids = {name: config[name] for name in ("bos_token_id", "eos_token_id") if config.get(name) is not None}
        if ids:
            return ids
    vocabulary = _sentencepiece(checkpoint.tokenizer_path)
    if vocabulary is None:
        logger.warning("%s: no SentencePiece vocabulary, so no BOS and EOS ids are written", checkpoint.path)
        return {}
    if not (folder / "tokenizer_config.json").exists():
        special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        config = {"tokenizer_class": "LlamaTokenizer", "model_max_length": context, "legacy": False, **special}
        config |= {"add_bos_token": True, "add_eos_token": False, "clean_up_tokenization_spaces": False}
        _write_json(folder / "tokenizer_config.json", config)
        _write_json(folder / "special_tokens_map.json", special)
    return {"bos_token_id": vocabulary.bos_id(), "eos_token_id": vocabulary.eos_id()}


# --------------------------------------------------------------------------------------------------- info


def info(
    ckpt: str,
    max_seq_len: int | None = None,
    max_batch_size: int = 1,
    ranks: int = 1,
    dtype: str | None = None,
    check: bool = False,
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
    """
    checkpoint = open_checkpoint(str(ckpt))
    if dtype is not None and dtype not in DTYPES:
        raise LlamaError(f"dtype={dtype!r} must be one of {', '.join(DTYPES)}")
    for name, value in (("max_batch_size", max_batch_size), ("ranks", ranks), ("max_seq_len", max_seq_len or 1)):
        if not isinstance(value, int) or value < 1:
            raise LlamaError(f"{name}={value!r} must be a whole number of at least 1")
    _check_shards(checkpoint, "ranks", ranks)
    print("\n".join(f"{label:<16}{text}" for label, text in _describe(checkpoint)))
    params = {**checkpoint.params, "vocab_size": checkpoint.shape("tok_embeddings.weight")[0]}
    kind = DTYPES[dtype] if dtype else checkpoint.dtype("tok_embeddings.weight")
    window = max_seq_len or checkpoint.context or 4096
    need = memory_estimate(params, window, max_batch_size, ranks, kind, checkpoint.quantized)
    print(
        f"memory a rank   {gigabytes(need.total)} = weights {gigabytes(need.weights)} + KV cache "
        f"{gigabytes(need.kv_cache)}\n                ({str(kind).removeprefix('torch.')}, {ranks} rank(s), "
        f"max_seq_len {window}, max_batch_size {max_batch_size})"
    )
    if check:
        _check_values(checkpoint)


def _describe(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    params, rows = checkpoint.params, checkpoint.shape("tok_embeddings.weight")[0]
    count = count_parameters({**params, "vocab_size": rows})
    count -= checkpoint.tied * rows * params["dim"]
    dtypes = sorted({str(checkpoint.dtype(name)).removeprefix("torch.") for name in checkpoint.names()})
    packed = any(entry.scales is not None for entry in checkpoint.entries.values())
    kv_heads = params["n_kv_heads"] or params["n_heads"]
    width = ffn_width(params["dim"], params["multiple_of"], params["ffn_dim_multiplier"])
    size = sum(path.stat().st_size for path in checkpoint.files)
    return [
        ("checkpoint", str(checkpoint.path)),
        ("format", checkpoint.format + (" (tied head)" if checkpoint.tied else "")),
        ("files", f"{checkpoint.shards} of weights, {gigabytes(size)}"),
        ("tokenizer", str(checkpoint.tokenizer_path or "none beside it")),
        ("parameters", f"{count:,}"),
        ("dtype", ", ".join(dtypes) + (f" (stored as {checkpoint.quantized or 'int8 groups'})" if packed else "")),
        ("sizes", f"dim {params['dim']}, {params['n_layers']} layers, {params['n_heads']} heads, {kv_heads} kv heads"),
        ("", f"ffn {width}, norm_eps {params['norm_eps']}, rope_theta {params['rope_theta']}"),
        ("vocabulary", str(rows)),
        ("context", str(checkpoint.context or "not stored")),
        *([("not used", some(checkpoint.unexpected))] if checkpoint.unexpected else []),
    ]


def _check_values(checkpoint: Checkpoint) -> None:
    """Read everything once: a digest per tensor, and an error for what is not finite."""
    bad = []
    for name in checkpoint.names():
        tensor = checkpoint.read(name).contiguous()
        nans, infs = int(tensor.isnan().sum()), int(tensor.isinf().sum())
        digest = hashlib.sha256(raw_bytes(tensor)).hexdigest()[:16]
        note = f"  {nans} NaN, {infs} inf" if nans or infs else ""
        print(f"{digest}  {str(tensor.dtype).removeprefix('torch.'):<9}{tuple(tensor.shape)!s:<16} {name}{note}")
        if note:
            bad.append(f"{name} ({note.strip()})")
        checkpoint.forget(name)
    if bad:
        raise LlamaError(f"{checkpoint.path}: {len(bad)} weights are not finite: {some(bad)}: fetch the files again")
    print(f"all {len(checkpoint.names())} weights are finite")
