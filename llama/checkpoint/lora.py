"""LoRA adapters as PEFT saves them, added to an opened checkpoint.

Nothing is computed here: a weight gets its `LowRank`, or other values, and is changed while it is read.
"""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..arguments import as_number, check_list
from ..errors import LlamaError
from .checkpoint import Checkpoint, StoredWeight, halves_to_pairs
from .checks import FLOATS, plain_tensors
from .files import Stamp, first_few, format_error, only_our_errors, stamp
from .lora_config import EXPECTED, LoraConfig, read_config
from .lowrank import Adapter, LowRank
from .pth import read_pth
from .safetensors import read_safetensors
from .table import meta_name, rotary_heads

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")  # in PEFT's order
ADAPTER_FILES = (CONFIG, *WEIGHTS)
PREFIX = "base_model.model."  # before Hugging Face's names
EMBEDDING, HEAD = "tok_embeddings.weight", "output.weight"
MATRIX = re.compile(r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])(?P<end>\.weight)?")
ODD_KEYS = (
    (r".*\.lora_magnitude_vector\b", "DoRA"),
    (r".*\.lora_[AB]\.bias", "a bias of LoRA's own (lora_bias)"),
    (
        r".*\.lora_(embedding_)?[AB]\.(?!weight$)\w+(\.weight)?",
        "a matrix behind its adapter's name: save it by save_pretrained",
    ),
    (r".*\.(trainable_tokens|token_adapter)", "single rows of the embedding (trainable_token_indices)"),
    (r".*\.bias", "a bias"),
    (r"(?!base_model\.model\.).*", "no name of PEFT's, which begin with base_model.model."),
)
logger = logging.getLogger("llama")


def add_adapters(checkpoint: Checkpoint, lora: Any, lora_scale: Any = 1.0) -> Checkpoint:
    """The checkpoint with the adapters `lora` added: a path, several, or None; `lora_scale`: one number, or one each.

    LlamaError for what is no LoRA adapter of this model, or cannot be merged into it; FileNotFoundError.
    """
    given = [] if lora is None else [lora] if isinstance(lora, (str, Path)) else lora
    paths = check_list("lora", given, "paths of adapters' folders")
    if not all(isinstance(path, (str, Path)) for path in paths):
        raise LlamaError(f"lora={lora!r:.80} must be the path of an adapter's folder, or a list of paths")
    opened, added = [], list[Adapter]()
    for path, scale in zip(paths, _scales(lora_scale, len(paths)), strict=True):
        with only_our_errors(Path(path)):
            opened.append(_open(_folder(Path(path).expanduser()), scale))
    weights = {**checkpoint.weights}
    for adapter in opened:  # PEFT, too, loads all of them before it merges one
        with only_our_errors(adapter.folder):
            _sort_keys(adapter, checkpoint)
            weights |= {name: _whole(checkpoint, name, tensor) for name, tensor in adapter.bases.items()}
    for adapter in opened:
        with only_our_errors(adapter.folder):
            added.append(_add(adapter, checkpoint, weights, added))
    if not opened:
        return checkpoint
    mapped = checkpoint.mapped and all(adapter.mapped for adapter in opened if adapter.bases or adapter.wholes)
    stamps = {**checkpoint.stamps, **{adapter.file: adapter.stamp for adapter in opened}}
    _say(checkpoint, weights)
    return replace(checkpoint, weights=weights, mapped=mapped, adapters=(*checkpoint.adapters, *added), stamps=stamps)


def _scales(given: Any, count: int) -> list[float]:
    one = as_number(given)
    listed = (
        [one] * count if one is not None else [as_number(scale) for scale in check_list("lora_scale", given, "numbers")]
    )
    scales = [scale for scale in listed if scale is not None and abs(scale) < 1e30]
    if len(scales) != count or len(listed) != count or (count == 0 and one not in (None, 1.0)):
        found = f"lora_scale={given!r:.80} for {count} adapters"
        raise LlamaError(f"{found} must be a finite number, or one for each adapter that lora names")
    return scales


def _say(checkpoint: Checkpoint, weights: dict[str, StoredWeight]) -> None:
    """A log line for what a reader might not expect."""
    if checkpoint.tied and weights[HEAD] is not weights[EMBEDDING]:
        logger.warning("%s has one matrix as embedding and head, of which an adapter changes one", checkpoint.path)
    codec = next((one.codec for one in weights.values() if one.changes and one.codec and one.codec.scheme), None)
    if codec is not None:
        logger.warning("%s holds %s: what adapters change is quantized a second time", checkpoint.path, codec.scheme)


# --------------------------------------------------------------------------------------------------- read


@dataclass
class _Opened:
    """An adapter's files, and its tensors sorted by what they are."""

    folder: Path
    file: Path  # of the tensors
    stamp: Stamp | None
    scale: float
    config: LoraConfig
    tensors: dict[str, Tensor]
    mapped: bool
    bases: dict[str, Tensor] = field(default_factory=dict)  # by Meta's keys: copies of the base's own weights
    wholes: dict[str, Tensor] = field(default_factory=dict)  # modules_to_save: in place of the base's
    pairs: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # by module: A and B


def _folder(path: Path) -> Path:
    """Where the adapter is: the folder (or one of its files), or its one sub-folder that holds an adapter."""
    if path.is_file() and path.name in ADAPTER_FILES:
        path = path.parent
    if not path.exists():
        raise FileNotFoundError(f"{path.absolute()}: no such folder; expected {EXPECTED}")
    if not path.is_dir():
        raise format_error(path, "a file of another name", EXPECTED)
    if (path / CONFIG).exists():
        return path
    inner = sorted(child for child in path.iterdir() if (child / CONFIG).is_file())
    if len(inner) == 1:
        return inner[0]
    if inner:
        raise format_error(
            path, f"{len(inner)} adapters: {first_few(one.name for one in inner)}", "one: name its folder"
        )
    if any((path / name).exists() for name in ("config.json", "params.json")) and not (path / WEIGHTS[0]).exists():
        raise format_error(path, "a whole model, which belongs into ckpt_dir", EXPECTED)
    raise FileNotFoundError(f"{path.absolute()}: no {CONFIG}; expected {EXPECTED}")


def _open(folder: Path, scale: float) -> _Opened:
    config = read_config(folder / CONFIG)
    file = next((folder / name for name in WEIGHTS if (folder / name).exists()), None)
    if file is None:
        raise FileNotFoundError(f"{folder.absolute()}: {CONFIG}, but none of {', '.join(WEIGHTS)}")
    before = stamp(file)
    value, mapped = read_safetensors(file) if file.suffix == ".safetensors" else read_pth(file)
    tensors = plain_tensors(file, value, EXPECTED)
    for key, tensor in tensors.items():
        if tensor.dtype not in FLOATS:
            raise format_error(file, f"{key:.120} is {tensor.dtype}", "float32, bfloat16 or float16")
    return _Opened(folder, file, before, scale, config, tensors, mapped)


def _sort_keys(adapter: _Opened, checkpoint: Checkpoint) -> None:
    """Every key finds its weight in the model, and its place in `adapter`; or LlamaError."""
    for key, tensor in adapter.tensors.items():
        name, matrix = key.removeprefix(PREFIX), MATRIX.fullmatch(key.removeprefix(PREFIX))
        if not key.startswith(PREFIX):
            raise _odd_key(adapter, key, checkpoint)
        if matrix is not None and bool(matrix["embedding"]) == (matrix["end"] is None):
            weight = meta_name(f"{matrix['module']}.weight")
            if weight is None or weight not in checkpoint.weights or (weight == EMBEDDING) != bool(matrix["embedding"]):
                raise _odd_key(adapter, key, checkpoint)
            adapter.pairs.setdefault(matrix["module"], {})[matrix["side"]] = tensor
            continue
        weight = meta_name(name.replace(".base_layer.", "."))
        if matrix is not None or weight is None or weight not in checkpoint.weights:
            raise _odd_key(adapter, key, checkpoint)
        _check_shape(adapter, key, tuple(tensor.shape), checkpoint.shape(weight), weight)
        if not tensor.sum(dtype=torch.float32).isfinite() and not tensor.isfinite().all():
            raise format_error(adapter.folder, f"{key:.120} holds NaN or inf", "finite values: fetch the adapter again")
        (adapter.bases if ".base_layer." in name else adapter.wholes)[weight] = tensor
    if not adapter.pairs and not adapter.wholes:
        raise format_error(adapter.folder, "no matrices of LoRA", EXPECTED)


def _odd_key(adapter: _Opened, key: str, checkpoint: Checkpoint) -> LlamaError:
    what = next((what for pattern, what in ODD_KEYS if re.match(pattern, key)), "no weight of this base model")
    layers = checkpoint.params["n_layers"]
    return format_error(
        adapter.folder, f"the key {key!r:.120} is {what}", f"LoRA of modules of a Llama model of {layers} layers"
    )


def _check_shape(adapter: _Opened, key: str, found: tuple[int, ...], wanted: tuple[int, ...], weight: str) -> None:
    if found == wanted:
        return
    grown = weight in (EMBEDDING, HEAD) and len(found) == 2 and found[1] == wanted[1]
    hint = "a base model with that vocabulary (resize_token_embeddings, save_pretrained)" if grown else "the same base"
    what = f"{key:.120} is made for a weight of {found}, the base model's is {wanted}"
    raise format_error(adapter.folder, what + (": its vocabulary grew" if grown else ""), hint)


# ---------------------------------------------------------------------------------------------------- add


def _whole(checkpoint: Checkpoint, name: str, tensor: Tensor) -> StoredWeight:
    return StoredWeight([tensor], hf_heads=rotary_heads(name, checkpoint.params))


def _add(
    adapter: _Opened, checkpoint: Checkpoint, weights: dict[str, StoredWeight], others: Sequence[Adapter]
) -> Adapter:
    """Put one adapter's changes into `weights`, behind those of the `others`."""
    for name, tensor in adapter.wholes.items():
        if any(name in one.changed or name in one.replaced for one in others):
            raise format_error(adapter.folder, f"it replaces {name}, which another adapter changes", "one of the two")
        weights[name] = _whole(checkpoint, name, tensor)
    changed, ranks = [], set()
    for module, pair in adapter.pairs.items():
        name = str(meta_name(f"{module}.weight"))
        change = _low_rank(adapter, module, name, pair, checkpoint)
        if rotary_heads(name, checkpoint.params) and not weights[name].hf_heads:
            change = replace(change, b=_rows_in_pairs(change.b, rotary_heads(name, checkpoint.params)))
        weights[name] = replace(weights[name], changes=(*weights[name].changes, change))
        changed.append(name)
        ranks.add(change.a.shape[0])
    touched = {*changed, *adapter.wholes} & {EMBEDDING, HEAD}
    if checkpoint.tied and adapter.config.keeps_tied and touched:
        raise format_error(
            adapter.config.path, "ensure_weight_tying is true for an embedding that is the head too", "false"
        )
    replaced = {name: checkpoint.dtype(name) for name in (*adapter.wholes, *adapter.bases)}
    return Adapter(adapter.folder, adapter.scale, tuple(sorted(ranks)), tuple(changed), replaced)


def _rows_in_pairs(b: Tensor, heads: int) -> Tensor:
    """B (out, r) of wq or wk, for a base whose rows are in Meta's order: the permutation that the weight took."""
    return halves_to_pairs(b, heads).reshape(b.shape)


def _low_rank(adapter: _Opened, module: str, name: str, pair: dict[str, Tensor], checkpoint: Checkpoint) -> LowRank:
    if len(pair) < 2:
        raise format_error(adapter.folder, f"{module:.120} has {next(iter(pair))} alone", "A and B of every module")
    a, b = pair["A"].contiguous(), pair["B"].contiguous()
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
        found = f"{module:.120} has A {tuple(a.shape)!s:.60} and B {tuple(b.shape)!s:.60}"
        raise format_error(adapter.folder, found, "A (r, in) and B (out, r)")
    scale = adapter.config.scale(module, a.shape[0]) * adapter.scale
    change = LowRank(adapter.folder, module, a, b, scale, embedding=name == EMBEDDING)
    _check_shape(adapter, module, change.shape, checkpoint.shape(name), name)
    return change
